"""The authors' own DEIMv2 Atto and Femto, trained on COCO and merged for inference, in our model.

Their ONNX files' detections are in ``oracles/deimv2_real``: the hundred best of each image.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

from vitdet.detectors.deimv2 import deimv2_atto, deimv2_femto
from vitdet.detectors.postprocess import postprocess
from vitdet.errors import UserError
from vitdet.structures import Preprocessing
from vitdet.weights.deimv2 import arguments, convert, preprocessing
from vitdet.weights.rules import load_strict

BUILD = {"atto": deimv2_atto, "femto": deimv2_femto}
# Values in the merged files, reg_scale aside.
MERGED = {"atto": 486_997, "femto": 952_077}


@pytest.fixture(params=sorted(BUILD))
def size(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def published(size: str, shared_data: Path) -> dict[str, Tensor]:
    return load_file(shared_data / "weights" / "deimv2" / f"deimv2_{size}_coco_fused.safetensors")


@pytest.fixture
def model(size: str, published: dict[str, Tensor]) -> nn.Module:
    net = BUILD[size](80, denoising_queries=0).eval()
    load_strict(net, convert(published), allow_missing=("*.num_batches_tracked",))
    return net


def test_the_file_tells_its_model(size: str, published: dict[str, Tensor]) -> None:
    name, shown = arguments(convert(published))
    assert name == f"deimv2_{size}"
    assert shown == {"num_classes": 80, "project_tokens": False, "denoising_queries": 0}
    side = {"atto": 320, "femto": 416}[size]
    assert Preprocessing.from_dict(preprocessing(name)) == Preprocessing((side, side))


def test_merged_numbers_of_parameters(size: str) -> None:
    """Ours, less what merging removes, are as many as the published file has."""
    with torch.device("meta"):
        net = BUILD[size](80, denoising_queries=0)
    assert merged_parameters(net) == MERGED[size]


def merged_parameters(net: nn.Module) -> int:
    """Without the norms' factors, the RepVGG blocks' 1×1 convolutions, and heads of the last layer's predecessors."""
    scales = {f"{name}.weight" for name, module in net.named_modules() if isinstance(module, nn.BatchNorm2d)}
    last = len(net.decoder.layers) - 1
    count = 0
    for name, parameter in net.named_parameters():
        part = name.split(".")
        early = part[1] in ("score_heads", "quality_heads") and part[0] == "decoder" and int(part[2]) != last
        if name not in scales and not early and ".conv1." not in name:
            count += parameter.numel()
    return count


def prepare(path: Path, side: int) -> tuple[Tensor, tuple[int, int]]:
    """An image stretched to a square, (1, 3, side, side) in [0, 1], and its (height, width)."""
    with Image.open(path) as image:
        rgb = image.convert("RGB")
        small = np.asarray(rgb.resize((side, side), Image.Resampling.BILINEAR))
        tensor = torch.from_numpy(small.copy()).permute(2, 0, 1)[None]
        return Preprocessing((side, side)).normalize(tensor), (rgb.height, rgb.width)


def test_the_same_detections_as_their_onnx_file(size: str, model: nn.Module, shared_data: Path) -> None:
    """To 5e-4 in score and 0.1 pixels, for all that score above 0.1."""
    folder = shared_data / "detection" / "coco_mini" / "val"
    described = json.loads((folder / "instances.json").read_text())
    label_of = {one: k for k, one in enumerate(sorted(category["id"] for category in described["categories"]))}
    oracle = json.loads((shared_data / "oracles" / "deimv2_real" / f"{size}_shared_val_detections.json").read_text())
    side = {"atto": 320, "femto": 416}[size]
    compared = 0
    for entry in described["images"][:20]:
        images, original = prepare(folder / "images" / entry["file_name"], side)
        with torch.inference_mode():
            ((boxes, scores, labels),) = postprocess(model(images), torch.tensor([original]), top_k=300)
        for row in oracle:
            if row["image_id"] != entry["id"] or row["score"] <= 0.1:
                continue
            x, y, width, height = row["bbox"]
            own = labels == label_of[row["category_id"]]
            distance = (boxes[own] - torch.tensor([x, y, x + width, y + height])).abs().amax(-1)
            assert distance.numel(), row
            near = distance < 0.1
            assert near.any(), (row, distance.min())
            assert (scores[own][near] - row["score"]).abs().min() < 5e-4, row
            compared += 1
    assert compared > 50


def test_heads_that_the_file_lacks_are_copies_of_the_last(model: nn.Module) -> None:
    for heads in (model.decoder.score_heads, model.decoder.quality_heads):
        first, *_, last = (head.state_dict() for head in heads)
        assert all(torch.equal(first[name], last[name]) for name in last)


def test_other_files_are_told(published: dict[str, Tensor]) -> None:
    with pytest.raises(UserError, match=r"no DEIMv2's by its authors or by transformers \(they hold "):
        convert({"blocks.0.attn.qkv.weight": torch.zeros(1)})
    with pytest.raises(UserError, match=r"RTDETR: .* of another shape"):
        load_strict(deimv2_atto(3, denoising_queries=0), convert(published), allow_missing=("*",))
