"""Models by name, and files that are, or are not, models."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from vitdet import create_model, list_models, load_model
from vitdet.engine.checkpoint import save_weights
from vitdet.errors import UserError
from vitdet.structures import ClassMap, ModelMetadata, Preprocessing
from vitdet.zoo import CLASSIFIERS, DETECTORS, MODELS, describe_source

VIT, SWIN = "vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"

SMALL: dict[str, Any] = {"encoder_width": 32, "encoder_hidden": 64, "width": 32, "heads": 4, "decoder_layers": 1}
METADATA = ModelMetadata(
    "rtdetr_nano", {"num_classes": 2, **SMALL}, ClassMap((3, 7), ("red", "blue")), Preprocessing((64, 64))
)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    model = create_model("rtdetr_nano", num_classes=2, **SMALL)
    save_weights(tmp_path / "best.safetensors", model, METADATA)
    return tmp_path / "best.safetensors"


def edit_header(path: Path, **changes: Any) -> None:
    """The same tensors under other metadata."""
    header = json.dumps(METADATA.to_dict() | changes)
    save_file(load_file(path), path, metadata={"vitdet": header, "format": "pt"})


def test_names() -> None:
    rtdetr = ["rtdetr_r101", "rtdetr_r18", "rtdetr_r34", "rtdetr_r50", "rtdetr_r50_m"]
    assert list_models("rtdetr_r*") == rtdetr
    assert list_models("deimv2_?") == ["deimv2_l", "deimv2_m", "deimv2_n", "deimv2_s", "deimv2_x"]
    assert {"vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"} <= set(list_models())
    assert list_models() == sorted(MODELS)
    assert DETECTORS.keys() | CLASSIFIERS.keys() == MODELS.keys()
    assert list_models("rtdetr*r50") == ["rtdetr_r50", "rtdetrv2_r50"]
    assert list_models("yolo*") == []


@pytest.mark.parametrize(
    ("name", "millions"),
    [("rtdetr_r18", 20), ("rtdetr_r34", 31), ("rtdetr_r50_m", 36), ("rtdetr_r50", 42), ("rtdetr_r101", 76)],
)
def test_sizes_are_the_published_ones(name: str, millions: int) -> None:
    """arXiv 2304.08069, table 2, and its repository."""
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in create_model(name, num_classes=80).parameters())
    assert abs(count / 1e6 - millions) < 1


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        ({"head_activation": "tanh"}, "unknown activation 'tanh'"),
        ({"num_queries": "a"}, "num_queries must be a whole number, got 'a'"),
        ({"num_queries": 1.5}, "num_queries must be a whole number, got 1.5"),
        ({"num_queries": True}, "num_queries must be a whole number, got True"),
        ({"points": [1, "a", 2]}, "points must be a whole number, got 'a'"),
        ({"reach": "x"}, "reach must be a number, got 'x'"),
        ({"reach": -1}, "reach must be at least 0, got -1"),
        ({"decoder_layers": 65}, "decoder_layers is 65, and at most 64 are built"),
    ],
)
def test_arguments_that_make_no_model(overrides: dict[str, Any], told: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"model 'rtdetr_nano' cannot be built with {overrides}: {told}")):
        create_model("rtdetr_nano", **overrides)


def test_the_small_model_is_small() -> None:
    count = sum(parameter.numel() for parameter in create_model("rtdetr_nano", num_classes=80).parameters())
    assert count < 4e6


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("rtdetr_r81", {}, "there is no model 'rtdetr_r81'; did you mean 'rtdetr_r"),
        ("yolo", {}, "there is no model 'yolo'; known: "),
        ("rtdetr_nano", {"num_querys": 5}, "has no argument 'num_querys'; did you mean 'num_queries'?"),
        ("rtdetr_nano", {"zzz": 5}, "has no argument 'zzz'; known: encoder_width, encoder_hidden, "),
        ("rtdetr_nano", {"width": 30}, "model 'rtdetr_nano' cannot be built with {'width': 30}: "),
        ("rtdetr_nano", {"width": "wide"}, "model 'rtdetr_nano' cannot be built with {'width': 'wide'}: "),
        ("rtdetr_nano", {"width": 0}, "cannot be built with {'width': 0}: width must be at least 1, got 0"),
        ("rtdetr_nano", {"num_queries": -1}, "num_queries must be at least 1, got -1"),
        ("rtdetr_nano", {"denoising_queries": -1}, "denoising_queries must be at least 0, got -1"),
        ("rtdetr_nano", {"box_noise": -0.5}, "box_noise must be at least 0, got -0.5"),
        (
            "rtdetr_nano",
            {"label_noise": 1.5},
            "label_noise at most 1, eval_layers at most decoder_layers; got 0.5, 1.5",
        ),
        ("rtdetr_nano", {"encoder_expansion": 0.0}, "encoder_expansion must be above 0, "),
        ("rtdetr_nano", {"eval_layers": 4}, "eval_layers at most decoder_layers; got 0.5, 0.5, 4 of 3"),
        ("rtdetr_nano", {"frozen_norm": True}, "model 'rtdetr_nano' has no argument 'frozen_norm'; known: "),
        (VIT, {"widht": 5}, f"model {VIT!r} has no argument 'widht'; did you mean 'width'?"),
        (VIT, {"num_queries": 5}, f"model {VIT!r} has no argument 'num_queries'; "),
        (VIT, {"backbone": None}, f"model {VIT!r} has no argument 'backbone'; "),
        (VIT, {"heads": 5}, f"model {VIT!r} cannot be built with {{'heads': 5}}: "),
        (VIT, {"layers": 10**9}, "at most 256 layers are built, got 1000000000"),
        (VIT, {"layers": "many"}, f"model {VIT!r} cannot be built with {{'layers': 'many'}}: "),
        (VIT, {"heads": 0}, f"model {VIT!r} cannot be built with {{'heads': 0}}: "),
        (VIT, {"width": 3 * 2**20}, "it would have "),
        (VIT, {"registers": 10**9}, "it would have "),
        (VIT, {"image_size": (10**8, 10**8)}, f"model {VIT!r} cannot be built with {{'image_size': (1"),
        (VIT, {"image_size": (224, 230)}, "make both sides multiples of 16"),
        (VIT, {"pooling": "max"}, "unknown pooling 'max'; use one of "),
        (SWIN, {"depths": (2, 2, 10**9, 2)}, "at most 256 layers are built, got 1000000006"),
        (SWIN, {"depths": 6}, f"model {SWIN!r} cannot be built with {{'depths': 6}}: "),
        (SWIN, {"heads": (3, 6)}, "heads and depths go by stage and are equally many, got 2 and 4"),
        ("timm/resnot18", {}, "cannot be built with {}: timm has no model 'resnot18'; did you mean 'resnet18'?"),
        ("timm/resnet18", {"zzz": 1}, "model 'timm/resnet18' cannot be built with {'zzz': 1}: "),
    ],
)
def test_what_cannot_be_created(name: str, options: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError) as error:
        create_model(name, num_classes=2, **options)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_a_detector_needs_a_class() -> None:
    with pytest.raises(UserError, match="needs at least 1 class, got 0; check the categories of the data"):
        create_model("rtdetr_nano", num_classes=0)


@pytest.mark.parametrize("count", [-1, 10**12])
def test_numbers_of_classes_that_are_none(count: int) -> None:
    with pytest.raises(UserError, match=f"num_classes is {count}; it must be from 0, for features, to 100,000,000"):
        create_model(VIT, num_classes=count)


def test_nonsense_takes_no_memory() -> None:
    resource = pytest.importorskip("resource", reason="this system does not tell how much memory was used")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for options in ({"width": 3 * 2**20}, {"registers": 10**9}, {"layers": 10**9}, {"hidden": 10**9}):
        with pytest.raises(UserError):
            create_model(VIT, **options)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


def test_classes_where_nobody_says_how_many() -> None:
    with torch.device("meta"):
        assert create_model("rtdetr_nano").num_classes == 80
        assert create_model(VIT).num_classes == 1000
        assert create_model(VIT, num_classes=0)(torch.zeros(1, 3, 224, 224)).shape == (1, 192)


def test_classifiers_take_arguments_of_head_and_backbone() -> None:
    model: Any = create_model(VIT, num_classes=3, pooling="average", layers=1, image_size=(32, 32), head_dropout=0.5)
    assert (model.pooling, len(model.backbone.encoder.layers), model.dropout.p) == ("average", 1, 0.5)
    assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 3)


def test_any_model_of_timm() -> None:
    model: Any = create_model("timm/test_vit", num_classes=3, depth=1)
    assert model.eval()(torch.zeros(1, 3, 160, 160)).shape == (1, 3)
    assert len(model.model.blocks) == 1


@pytest.mark.parametrize("name", [VIT, SWIN])
def test_a_saved_classifier(name: str, tmp_path: Path) -> None:
    small = {"layers": 1} if name == VIT else {"depths": [1, 1, 1, 1]}
    model = create_model(name, num_classes=2, **small).eval()
    metadata = ModelMetadata(
        name, {"num_classes": 2, **small}, ClassMap((0, 1), ("a", "b")), Preprocessing((224, 224), crop=0.9)
    )
    save_weights(tmp_path / "a.safetensors", model, metadata)
    loaded: Any = load_model(tmp_path / "a.safetensors")
    images = torch.randn(1, 3, 224, 224)
    assert torch.equal(loaded(images), model(images))
    assert loaded.metadata == describe_source(tmp_path / "a.safetensors") == metadata
    larger: Any = load_model(tmp_path / "a.safetensors", image_size=(256, 288))
    assert larger.metadata.preprocessing == Preprocessing((256, 288), crop=0.9)
    assert larger(torch.randn(1, 3, 256, 288)).shape == (1, 2)


@pytest.mark.parametrize(("option", "value"), [("decoder_layers", 2), ("num_queries", 7), ("dense_supervision", False)])
def test_options_arrive(option: str, value: Any) -> None:
    model = create_model("rtdetr_nano", num_classes=2, **{option: value})
    found = {
        "decoder_layers": len(model.decoder.layers),
        "num_queries": model.query_selection.num_queries,
        "dense_supervision": model.dense_head is not None,
    }
    assert found[option] == value


def test_a_loaded_model_is_the_saved_one(weights: Path) -> None:
    model = load_model(str(weights))
    assert isinstance(model, nn.Module)
    assert not model.training
    assert model.metadata == METADATA
    saved = load_file(weights)
    assert all(torch.equal(value, saved[name]) for name, value in model.state_dict().items())
    tensors = [*model.parameters(), *model.buffers()]
    assert not any(tensor.is_meta for tensor in tensors)
    kernels = [tensor for tensor in tensors if tensor.ndim == 4]
    assert all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in kernels)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model(torch.zeros(1, 3, 64, 64)).logits.isfinite().all()


def test_another_models_weights_are_refused(weights: Path) -> None:
    edit_header(weights, name="rtdetr_r18", arguments={"num_classes": 2})
    with pytest.raises(UserError) as error:
        load_model(weights)
    text = str(error.value)
    assert text.startswith(f"{weights} does not hold the weights of 'rtdetr_r18' that it names: ")
    assert "missing" in text
    assert "of another shape" in text
    assert "\n" not in text


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"name": "rtdetr_r81"}, "there is no model 'rtdetr_r81'"),
        (
            {"preprocessing": {**METADATA.preprocessing.to_dict(), "crop": 0.5}},
            "asks for the middle of images, and a detector sees all of them",
        ),
        (
            {"name": "timm/vit_tiny_patch16_224", "arguments": {"num_classes": 2, "embed_dim": 3072}},
            "does not hold the weights of 'timm/vit_tiny_patch16_224' that it names: ",
        ),
        ({"arguments": {"num_classes": 3, **SMALL}}, "does not hold the weights of 'rtdetr_nano' that it names"),
        ({"arguments": {"num_classes": 2, "zzz": 1}}, "has no argument 'zzz'"),
        ({"arguments": dict(SMALL)}, "num_classes"),
        ({"arguments": {"num_classes": "two", **SMALL}}, "num_classes"),
        ({"class_map": {"ids": [3], "names": ["red"]}}, "names 1 classes but its model has 2; fetch or write the file"),
        (
            {"preprocessing": {"size": [64, 70], "mean": [0, 0, 0], "std": [1, 1, 1]}},
            "asks for images of [64, 70] pixels, which 32 does not divide; fetch or write the file again",
        ),
        ({"preprocessing": {"size": [0, 64], "mean": [0, 0, 0], "std": [1, 1, 1]}}, "images of [0, 64] pixels, which"),
    ],
)
def test_edited_headers(weights: Path, changes: dict[str, Any], expected: str) -> None:
    edit_header(weights, **changes)
    with pytest.raises(UserError) as error:
        load_model(weights)
    assert expected in str(error.value)


@pytest.mark.parametrize("width", [2**14, 2**20])
def test_a_header_that_asks_for_more_memory_than_there_is(weights: Path, width: int) -> None:
    """The first linear layer alone would take 1 GiB, or 4 TiB; only the shapes in the file are looked at."""
    resource = pytest.importorskip("resource", reason="this system does not tell how much memory was used")
    edit_header(weights, arguments={"num_classes": 2, **SMALL, "width": width})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(UserError) as error:
        load_model(weights)
    assert "does not hold the weights of 'rtdetr_nano' that it names" in str(error.value)
    assert f" instead of [{width}" in str(error.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("model.pth", "there is no 'model.pth'; pass a file (.safetensors, "),
        ("rtdetr_r18", "'rtdetr_r18' names a model without weights; pass rtdetr_r18:coco or "),
        (".", ". has no model.safetensors, model.safetensors.index.json, pytorch_model.bin; pass a folder in Hugging"),
    ],
)
def test_sources_that_are_none(source: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error:
        load_model(source)
    assert str(error.value).startswith(expected)


def test_a_file_that_says_what_it_is(weights: Path) -> None:
    assert load_model(weights, model="rtdetr_nano").metadata == METADATA
    with pytest.raises(UserError, match="holds a 'rtdetr_nano', not a 'rtdetr_r18'; leave out the name"):
        load_model(weights, model="rtdetr_r18")
