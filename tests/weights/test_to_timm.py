"""Classifiers that we write for timm: it loads them strictly, and finds what ours finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file

from tests.parity.random_detectors import with_random_values
from vitdet.engine.checkpoint import save_weights
from vitdet.errors import UserError
from vitdet.structures import ClassMap, ModelMetadata, Preprocessing
from vitdet.zoo import CLASSIFIERS, create_model, load_model
from vitdet.zoo.convert import convert_source
from vitdet.zoo.layouts import built, layout_of

NAMES = ("tench", "crane", "crane")


def metadata_of(name: str, size: tuple[int, int] = (224, 224), crop: float | None = 0.9, **more: Any) -> ModelMetadata:
    prepared = Preprocessing(size, (0.5, 0.4, 0.3), (0.2, 0.3, 0.1), "bicubic", crop)
    return ModelMetadata(name, {"num_classes": len(NAMES), **more}, ClassMap((0, 1, 2), NAMES), prepared)


@pytest.mark.parametrize(
    ("name", "size", "arguments"),
    [
        ("vit_tiny_patch16_224", (224, 224), {}),
        ("vit_tiny_patch16_224", (96, 160), {"image_size": (96, 160)}),
        ("vit_small_patch32_224", (224, 224), {"pooling": "average", "drop_path": 0.1, "dropout": 0.1}),
        ("vit_small_patch32_224", (64, 64), {
            "pooling": "average", "norm_pooled": True, "final_norm": False, "image_size": (64, 64),
        }),
        ("deit_tiny_distilled_patch16_224", (224, 224), {}),
        ("deit3_small_patch16_224", (224, 224), {}),
        ("vit_small_patch14_reg4_dinov2", (84, 84), {"image_size": (84, 84)}),
        ("vit_small_patch16_dinov3", (64, 96), {"image_size": (64, 96)}),
        ("vit_small_patch16_dinov3", (64, 64), {"image_size": (64, 64), "pooling": "average"}),
        ("swin_tiny_patch4_window7_224", (224, 224), {}),
        ("swinv2_tiny_window8_256", (256, 256), {}),
        ("timm/resnet10t", (96, 96), {}),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)  # fmt: skip
def test_timm_finds_what_we_find(name: str, size: tuple[int, int], arguments: dict[str, Any], tmp_path: Path) -> None:
    net = with_random_values(create_model(name, num_classes=3, **arguments)).eval()
    metadata = metadata_of(name, size, **arguments)
    save_weights(tmp_path / "ours.safetensors", net, metadata)
    assert convert_source(tmp_path / "ours.safetensors", tmp_path / "theirs") == []
    model = timm.create_model(f"local-dir:{tmp_path / 'theirs'}", pretrained=True).eval()
    images = torch.rand(2, 3, *size)
    with torch.inference_mode():
        output = net(images)
        assert output.std() > 0.1
        torch.testing.assert_close(model(images), output, rtol=0, atol=1e-4)
    said = timm.data.resolve_data_config(model=model)
    assert (tuple(said["input_size"][1:]), said["crop_pct"], said["crop_mode"]) == (size, 0.9, "center")
    assert (said["mean"], said["std"]) == ([0.5, 0.4, 0.3], [0.2, 0.3, 0.1])

    found = load_model(tmp_path / "theirs")
    assert found.metadata.class_map.names == NAMES
    with torch.inference_mode():
        torch.testing.assert_close(found(images), output, rtol=0, atol=0)


@pytest.mark.parametrize("name", sorted(CLASSIFIERS.keys() - {"vit_small_patch16_224_plain"}))
def test_every_name_of_ours_is_timms(name: str) -> None:
    """Without memory: all names and shapes are those of the model that timm has under that name."""
    metadata = metadata_of(name)
    net = built(metadata)
    state = {key: torch.zeros(value.shape) if "bias" in key else value for key, value in net.state_dict().items()}
    assert layout_of(metadata, state).files["config.json"]["architecture"] == name


def test_dinov3_without_learnt_biases_has_none(tmp_path: Path) -> None:
    """As published; biases that training gave it are written beside an argument that says so."""
    net = create_model("vit_small_patch16_dinov3", num_classes=3, image_size=(64, 64))
    metadata = metadata_of("vit_small_patch16_dinov3", (64, 64), image_size=(64, 64))
    save_weights(tmp_path / "ours.safetensors", net, metadata)
    convert_source(tmp_path / "ours.safetensors", tmp_path / "plain")
    assert not any("_bias" in name for name in load_file(tmp_path / "plain" / "model.safetensors"))
    with torch.no_grad():
        net.backbone.encoder.layers[3].self_attention.qkv.bias[:4] = 1.0
    save_weights(tmp_path / "ours.safetensors", net, metadata)
    convert_source(tmp_path / "ours.safetensors", tmp_path / "learnt")
    assert load_file(tmp_path / "learnt" / "model.safetensors")["blocks.3.attn.q_bias"][:5].tolist() == [1, 1, 1, 1, 0]


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("vit_tiny_patch16_224", {"pooling": "attention"}, "pooling='attention' is not in timm's layout; keep"),
        ("vit_tiny_patch16_224", {"layers": 3}, "layers=3 is not in timm's layout; keep the .safetensors"),
        (
            "vit_tiny_patch16_224",
            {"layer_scale": 0.1},
            r"timm's vit_tiny_patch16_224 is another model than this one \(",
        ),
        ("vit_small_patch16_224_plain", {}, "cannot be written in timm's layout: timm has no model"),
    ],
)
def test_what_timm_lacks_is_refused_in_one_sentence(name: str, arguments: dict[str, Any], sentence: str) -> None:
    metadata = metadata_of(name, **arguments)
    with pytest.raises(UserError, match=sentence):
        layout_of(metadata, built(metadata).state_dict())
