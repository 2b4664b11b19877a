"""Detectors that we write for transformers: it loads them without a word, and finds what ours finds.

The weights are random, but none is left at a value at which a whole branch would do nothing.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.parity.random_detectors import random_images, theirs_in_our_order, with_random_values
from vitdet.engine.checkpoint import save_weights
from vitdet.errors import UserError
from vitdet.structures import ClassMap, ModelMetadata, Preprocessing
from vitdet.zoo import DETECTORS, create_model, load_model
from vitdet.zoo.convert import convert_source
from vitdet.zoo.layouts import built, layout_of

transformers = pytest.importorskip("transformers", reason="the reference implementation is not installed")

NAMES = ("red", "N/A", "blue", "N/A", "green")  # published class maps have a name twice
PORT = {"project_tokens": True, "refine_positions": True, "activation": "relu"}
NARROW = {
    "encoder_width": 48, "encoder_hidden": 96, "width": 64, "heads": 4, "decoder_hidden": 80, "decoder_layers": 2,
    "num_queries": 40,
}  # fmt: skip
PROPORTIONAL = Preprocessing((320, 320), (0.5, 0.4, 0.3), (0.2, 0.3, 0.1), longest=500)


def metadata_of(name: str, prepared: Preprocessing | None = None, **arguments: Any) -> ModelMetadata:
    class_map = ClassMap(tuple(range(len(NAMES))), NAMES)
    return ModelMetadata(
        name, {"num_classes": len(NAMES), **arguments}, class_map, prepared or Preprocessing((192, 256))
    )


def written(folder: Path, name: str, prepared: Preprocessing | None = None, **arguments: Any) -> tuple[nn.Module, Path]:
    """A model of random weights as a file of ours, and what became of it for transformers."""
    net = with_random_values(create_model(name, num_classes=len(NAMES), **arguments)).eval()
    save_weights(folder / "ours.safetensors", net, metadata_of(name, prepared, **arguments))
    convert_source(folder / "ours.safetensors", folder / "theirs")
    return net, folder / "theirs"


def loaded(folder: Path) -> nn.Module:
    """Theirs; every name must have found its place, the counters of batch norms included."""
    model, told = transformers.AutoModelForObjectDetection.from_pretrained(folder, output_loading_info=True)
    assert not any(told.values()), told
    return model.eval()


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "rtdetr": ("rtdetr_r18", {**NARROW, "encoder_expansion": 0.7, "points": 3}),
    "rtdetr frozen": ("rtdetr_r50", {**NARROW, "frozen_norm": True, "denoising_queries": 0}),
    "rtdetr hgnet": ("rtdetr_hgnetv2_l", NARROW),
    "rtdetrv2": ("rtdetrv2_r18", {**NARROW, "reach": 0.4}),
    "rtdetrv2 discrete": ("rtdetrv2_r18", {**NARROW, "sampling": "discrete", "points": 2}),
    "dfine": ("dfine_n", {"bins": 16, "reg_scale": 5.0, "up": 0.3, "points": (5, 2), "num_queries": 40}),
    "dfine 3 levels": ("dfine_s", {"num_queries": 40, "denoising_queries": 30}),
    "deimv2 lite": ("deimv2_atto", {**PORT, "num_queries": 40}),
    "deimv2": ("deimv2_n", {**PORT, "num_queries": 40, "position_activation": "relu"}),
    "deimv2 vit": ("deimv2_l", PORT),
    "deimv2 gated vit": ("deimv2_x", {**PORT, "key_bias": True}),
    "detr": ("detr_r50", {"width": 64, "heads": 4, "hidden": 96, "encoder_layers": 1, "decoder_layers": 2}),
    "detr dilated": ("detr_r50_dc5", {"width": 64, "heads": 4, "hidden": 96, "encoder_layers": 1, "decoder_layers": 1}),
}
LARGE = {
    "rtdetr hgnet", "rtdetr frozen", "rtdetrv2 discrete", "dfine 3 levels", "deimv2 vit", "deimv2 gated vit",
    "detr dilated",
}  # fmt: skip
PARAMETERS = [pytest.param(case, marks=[pytest.mark.slow] if case in LARGE else []) for case in CASES]


@pytest.mark.parametrize("case", PARAMETERS)
def test_they_find_what_we_find(case: str, tmp_path: Path) -> None:
    name, arguments = CASES[case]
    prepared = PROPORTIONAL if name.startswith("detr") else None
    net, folder = written(tmp_path, name, prepared, **arguments)
    model = loaded(folder)
    for height, width in [(192, 192), (160, 224)]:  # the second tells rows from columns
        images = random_images(1, height, width)
        with torch.inference_mode():
            expected, output = model(images), net(images)
        assert output.logits.std() > 0.3
        logits, boxes = theirs_in_our_order(expected.logits, expected.pred_boxes, output)
        torch.testing.assert_close(output.logits, logits, rtol=0, atol=1e-4)
        torch.testing.assert_close(output.boxes, boxes, rtol=0, atol=1e-4)

    # What they save of it has the same names, those of files on the Hub, and the same bits.
    model.save_pretrained(tmp_path / "again")
    again, first = load_file(tmp_path / "again" / "model.safetensors"), load_file(folder / "model.safetensors")
    shared = {key for key in first if case == "deimv2 lite" and "bbox_embed." in key}  # one head, saved once
    assert again.keys() - shared == first.keys() - shared
    assert all(torch.equal(again[key], first[key]) for key in again)

    # And so has what we read of either.
    for source in (folder, tmp_path / "again"):
        found = load_model(source)
        mine, other = net.state_dict(), found.state_dict()
        for key in mine.keys() | other.keys():
            unread = case == "deimv2 vit" and key.startswith("backbone.vit.") and key.endswith("qkv.bias")
            if not key.endswith("num_batches_tracked") and not unread:
                torch.testing.assert_close(other[key], mine[key], rtol=0, atol=0)
        with torch.inference_mode():
            torch.testing.assert_close(found(images).logits, net(images).logits, rtol=0, atol=1e-4)  # frozen or not


REFUSED = {"rtdetr_nano", "rtdetr_vit_s", "deimv2_s", "deimv2_m"}


@pytest.mark.parametrize("name", sorted(DETECTORS.keys() - REFUSED))
def test_every_variant_has_the_tensors_of_theirs(name: str) -> None:
    """Without memory: the configuration alone must make a model of the same shapes."""
    metadata = metadata_of(name, **(PORT if name.startswith("deimv2") else {}))
    state = built(metadata).state_dict()
    state |= {key: torch.ones(1) for key in state if key in ("decoder.up", "decoder.reg_scale")}
    if name.startswith("detr"):
        metadata.preprocessing = PROPORTIONAL
    layout = layout_of(metadata, state)
    config = transformers.AutoConfig.for_model(**layout.files["config.json"])
    with torch.device("meta"):
        model = transformers.AutoModelForObjectDetection.from_config(config)
    shapes = [Counter(tuple(value.shape) for value in one.values()) for one in (model.state_dict(), layout.tensors)]
    assert shapes[0] == shapes[1]


def test_layers_that_only_training_uses_are_left_out(tmp_path: Path) -> None:
    """As rtdetr_r50_m, which is evaluated after its third layer; transformers knows no such thing."""
    net = with_random_values(create_model("rtdetr_r18", num_classes=5, **NARROW, eval_layers=1, dense_supervision=True))
    metadata = metadata_of("rtdetr_r18", **NARROW, eval_layers=1, dense_supervision=True)
    save_weights(tmp_path / "ours.safetensors", net.eval(), metadata)
    notes = convert_source(tmp_path / "ours.safetensors", tmp_path / "theirs")
    assert [note.partition(",")[0] for note in notes] == [
        "the head of the dense supervision", "the last 1 of 2 decoder layers",
    ]  # fmt: skip
    model, images = loaded(tmp_path / "theirs"), random_images(1, 192, 192)
    assert model.config.decoder_layers == 1
    with torch.inference_mode():
        expected, output = model(images), net(images)
    logits, _ = theirs_in_our_order(expected.logits, expected.pred_boxes, output)
    torch.testing.assert_close(output.logits, logits, rtol=0, atol=1e-4)


def test_the_description_says_all_that_differs(tmp_path: Path) -> None:
    arguments = {**NARROW, "num_queries": 33, "denoising_queries": 20, "label_noise": 0.25, "box_noise": 0.5}
    _, folder = written(tmp_path, "rtdetr_r18", **arguments)
    config = json.loads((folder / "config.json").read_text())
    assert config["id2label"] == {"0": "red", "1": "N/A", "2": "blue", "3": "N/A", "4": "green"}
    found = {key: config[key] for key in ("num_queries", "num_denoising", "label_noise_ratio", "box_noise_scale")}
    assert list(found.values()) == [33, 20, 0.25, 0.5]
    assert config["backbone_config"]["depths"] == [2, 2, 2, 2]
    assert config["freeze_backbone_batch_norms"] is False  # ours is not frozen
    assert loaded(folder).config.id2label == {0: "red", 1: "N/A", 2: "blue", 3: "N/A", 4: "green"}


@pytest.mark.parametrize(
    "prepared",
    [
        Preprocessing((192, 256)),
        Preprocessing((192, 256), (0.5, 0.4, 0.3), (0.2, 0.3, 0.1), interpolation="bicubic"),
    ],
    ids=["unit", "normalised"],
)  # fmt: skip
def test_their_processor_prepares_as_ours(prepared: Preprocessing, tmp_path: Path) -> None:
    """An image that has the size already, so that no resampling's rounding is compared."""
    _, folder = written(tmp_path, "dfine_n", prepared)
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    image = torch.randint(256, (3, 192, 256), dtype=torch.uint8)
    theirs = processor(image, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(theirs, prepared.normalize(image[None]), rtol=0, atol=1e-5)
    assert processor(torch.zeros(3, 50, 70, dtype=torch.uint8), return_tensors="pt")["pixel_values"].shape[2:] == (
        192,
        256,
    )
    assert int(processor.resample) == (3 if prepared.interpolation == "bicubic" else 2)


def test_their_processor_of_detr_keeps_the_proportions(tmp_path: Path) -> None:
    _, folder = written(tmp_path, "detr_r50", PROPORTIONAL, **CASES["detr"][1])
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    image = torch.zeros(3, 100, 200, dtype=torch.uint8)
    assert processor(image, return_tensors="pt")["pixel_values"].shape[2:] == (250, 500)  # the longer side decides


REFUSALS: dict[str, tuple[str, dict[str, Any], Preprocessing | None, str]] = {
    "published deimv2": ("deimv2_atto", {}, None, "transformers' deimv2 computes other results than deimv2_atto as"),
    "half of the port": ("deimv2_n", {**PORT, "refine_positions": False}, None, "transformers' deimv2 computes other"),
    "distilled vit": ("deimv2_s", PORT, None, "transformers' deimv2 has no ViT without final norm and layer scale;"),
    "stem": ("rtdetr_nano", {"encoder_blocks": 3}, None, "has no ResNet whose stem is not of three convolutions;"),
    "blocks": ("rtdetr_r18", {"encoder_blocks": 2}, None, "transformers' rt_detr has no fusion but of three RepVGG"),
    "points": ("rtdetrv2_r18", {"points": (3, 6, 3)}, None, r"rt_detr_v2 has no levels of different numbers of points"),
    "fusion": ("rtdetr_r18", {"fusion": "elan"}, None, "transformers' rt_detr has no fusion but of three RepVGG"),
    "backbone": ("rtdetr_vit_s", {}, None, "transformers' rt_detr has no backbone of the kind 'Pyramid'; keep this"),
    "crop": ("dfine_n", {}, Preprocessing((64, 64), crop=0.9), "RTDetrImageProcessor has no cropping or padding; keep"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_what_transformers_lacks_is_refused_in_one_sentence(case: str) -> None:
    name, arguments, prepared, sentence = REFUSALS[case]
    metadata = metadata_of(name, prepared, **arguments)
    state = built(metadata).state_dict()
    state |= {key: torch.ones(1) for key in state if key in ("decoder.up", "decoder.reg_scale")}
    with pytest.raises(UserError, match=sentence):
        layout_of(metadata, state)


@pytest.mark.parametrize("name", ["rtdetr_r18", "dfine_n"])
def test_a_model_that_samples_as_only_version_2_can_becomes_one(name: str) -> None:
    metadata = metadata_of(name, reach=0.25)
    state = built(metadata).state_dict()
    state |= {key: torch.ones(1) for key in state if key in ("decoder.up", "decoder.reg_scale")}
    config = layout_of(metadata, state).files["config.json"]
    assert config["decoder_offset_scale"] == 0.25
    assert config["model_type"] == ("rt_detr_v2" if name == "rtdetr_r18" else "d_fine")
