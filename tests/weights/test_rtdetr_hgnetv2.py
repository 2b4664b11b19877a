"""RT-DETR on HGNetV2: its authors' files, and Hugging Face's, whose model gives the same numbers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.parity.random_detectors import random_images, theirs_in_our_order, with_random_values
from tests.weights.test_dfine import _RTDETR, NUMBERS, written
from vitdet.backbones.hgnetv2 import HGNetV2
from vitdet.detectors.rtdetr import RTDETR, rtdetr_hgnetv2_l
from vitdet.weights import rtdetr as rtdetr_weights
from vitdet.weights.describe import name_of_file
from vitdet.weights.files import read_state
from vitdet.weights.rules import load_strict, rename
from vitdet.weights.shown import rtdetr_arguments
from vitdet.zoo import DETECTORS, create_model, load_model

NAMES = {  # theirs -> ours
    "backbone.stem.stem1.conv.weight": "backbone.stem.enter.conv.weight",
    "backbone.stem.stem2a.conv.1.weight": "backbone.stem.narrow.conv.weight",
    "backbone.stem.stem2a.bn.running_var": "backbone.stem.narrow.norm.running_var",
    "backbone.stem.stem2b.conv.1.weight": "backbone.stem.widen.conv.weight",
    "backbone.stem.stem4.bn.bias": "backbone.stem.leave.norm.bias",
    "backbone.stages.0.blocks.0.layers.5.conv.weight": "backbone.stages.0.blocks.0.layers.5.conv.weight",
    "backbone.stages.1.downsample.bn.weight": "backbone.stages.1.downsample.norm.weight",
    "backbone.stages.2.blocks.1.layers.0.conv1.conv.weight": "backbone.stages.2.blocks.1.layers.0.0.conv.weight",
    "backbone.stages.2.blocks.1.layers.0.conv2.bn.bias": "backbone.stages.2.blocks.1.layers.0.1.norm.bias",
    "backbone.stages.3.blocks.0.aggregation_squeeze_conv.conv.weight":
        "backbone.stages.3.blocks.0.aggregate.0.conv.weight",
    "backbone.stages.3.blocks.0.aggregation_excitation_conv.bn.running_mean":
        "backbone.stages.3.blocks.0.aggregate.1.norm.running_mean",
}  # fmt: skip
_HGNETV2 = [  # ours -> theirs, for a whole file
    (r"^(backbone\.st.+)\.norm\.", r"\1.bn."),
    (r"^backbone\.stem\.enter\.", "backbone.stem.stem1."),
    (r"^backbone\.stem\.narrow\.conv\.", "backbone.stem.stem2a.conv.1."),
    (r"^backbone\.stem\.narrow\.", "backbone.stem.stem2a."),
    (r"^backbone\.stem\.widen\.conv\.", "backbone.stem.stem2b.conv.1."),
    (r"^backbone\.stem\.widen\.", "backbone.stem.stem2b."),
    (r"^backbone\.stem\.merge\.", "backbone.stem.stem3."),
    (r"^backbone\.stem\.leave\.", "backbone.stem.stem4."),
    (r"\.aggregate\.0\.", ".aggregation_squeeze_conv."),
    (r"\.aggregate\.1\.", ".aggregation_excitation_conv."),
    (r"^(backbone\.stages.+\.layers\.\d+)\.0\.", r"\1.conv1."),
    (r"^(backbone\.stages.+\.layers\.\d+)\.1\.", r"\1.conv2."),
]
DEPTHS = {"rtdetr_hgnetv2_l": (1, 1, 3, 1), "rtdetr_hgnetv2_x": (1, 2, 5, 2)}


def narrow(depths: tuple[int, ...]) -> RTDETR:
    """The published depths, and few channels."""
    backbone = HGNetV2(stem=(8, 8), inner=(8,) * 4, widths=(16,) * 4, depths=depths, layers=6)
    return RTDETR(backbone, num_classes=3, **NUMBERS)


@pytest.mark.parametrize(("theirs", "ours"), NAMES.items())
def test_names(theirs: str, ours: str) -> None:
    assert rename(theirs, rtdetr_weights.OFFICIAL_RULES) == ours


@pytest.mark.parametrize(("name", "depths"), DEPTHS.items())
def test_a_whole_file(name: str, depths: tuple[int, ...], tmp_path: Path) -> None:
    first, second = narrow(depths), narrow(depths)
    state = written(first, [*_HGNETV2, *_RTDETR], tmp_path / "first.pth")
    assert {theirs for theirs in NAMES if ".blocks.1." not in theirs} < state.keys()
    ours = rtdetr_weights.convert(read_state(tmp_path / "first.pth"))
    report = load_strict(second, ours, allow_missing=["*.num_batches_tracked"])
    assert not report.unexpected
    for key, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[key]), key
    found, shown = rtdetr_arguments(ours)
    assert found == name
    assert shown.pop("points") == 2  # if these were eight heads, as all published ones are: the product is the same
    assert shown == {"num_classes": 3} | {key: NUMBERS[key] for key in shown.keys() - {"num_classes"}}


@pytest.mark.parametrize("letter", ["l", "x"])
def test_files_are_named_after_the_model(letter: str) -> None:
    """github.com/lyuwenyu/storage, releases v0.1."""
    file = f"rtdetrv2_hgnetv2_{letter}_6x_coco_from_paddle.pth"
    assert name_of_file(file, DETECTORS) == f"rtdetrv2_hgnetv2_{letter}"
    assert create_model(f"rtdetrv2_hgnetv2_{letter}", denoising_queries=0).num_classes == 80


def test_the_published_file_says_all(tmp_path: Path) -> None:
    first = rtdetr_hgnetv2_l(80)
    path = tmp_path / "rtdetrv2_hgnetv2_l_6x_coco_from_paddle.pth"
    written(first, [*_HGNETV2, *_RTDETR], path)
    model = load_model(path)
    assert model.metadata.name == "rtdetrv2_hgnetv2_l"
    assert model.metadata.class_map.names[:3] == ("person", "bicycle", "car")
    theirs = first.state_dict()
    assert all(torch.equal(value, theirs[key]) for key, value in model.state_dict().items())


def test_same_outputs_as_hugging_face(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the reference implementation is not installed")
    backbone = transformers.HGNetV2Config(  # HGNetv2-L
        stem_channels=[3, 32, 48], stage_in_channels=[48, 128, 512, 1024], stage_mid_channels=[48, 96, 192, 384],
        stage_out_channels=[128, 512, 1024, 2048], stage_num_blocks=[1, 1, 3, 1],
        stage_downsample=[False, True, True, True], stage_light_block=[False, False, True, True],
        stage_kernel_size=[3, 3, 5, 5], stage_numb_of_layers=[6, 6, 6, 6], use_learnable_affine_block=False,
        out_features=["stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = transformers.RTDetrConfig(backbone_config=backbone, encoder_in_channels=[512, 1024, 2048], num_labels=80)
    theirs = with_random_values(transformers.RTDetrForObjectDetection(config)).eval()
    theirs.save_pretrained(tmp_path)
    model = load_model(tmp_path)
    assert model.metadata.name == "rtdetr_hgnetv2_l"
    for size in [(128, 128), (96, 160)]:
        images = random_images(1, *size)
        with torch.inference_mode():
            expected, output = theirs(images), model(images)
        logits, boxes = theirs_in_our_order(expected.logits, expected.pred_boxes, output)
        torch.testing.assert_close(output.logits, logits, rtol=0, atol=1e-4)
        torch.testing.assert_close(output.boxes, boxes, rtol=0, atol=1e-4)
