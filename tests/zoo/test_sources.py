"""Everybody's files through ``load_model``: their own model after their own preprocessing gives the same logits.

The weights are random, but no value is left at the 0 or 1 of a fresh model. The image is a photograph that is not
square, so that a wrong geometry, interpolation or normalisation shows.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from timm.data import create_transform, resolve_model_data_config
from timm.models.vision_transformer import checkpoint_filter_fn
from torch import Tensor, nn
from torchvision import models as torchvision_models
from torchvision import transforms as T
from torchvision.transforms import InterpolationMode

from vitdet.data.transforms import to_input
from vitdet.errors import UserError
from vitdet.zoo import describe_source, load_model

transformers = pytest.importorskip("transformers", reason="the reference implementation is not installed")


@pytest.fixture(scope="module")
def photo(shared_data: Path) -> Image.Image:
    files = sorted((shared_data / "detection" / "coco_mini" / "val").rglob("*.jpg"))
    image = Image.open(files[0]).convert("RGB")
    assert image.width != image.height
    return image


def randomized(model: nn.Module) -> Any:
    """Values that matter everywhere, at a size that keeps activations and logits near 1."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            noise = torch.randn(value.shape, generator=generator) if value.is_floating_point() else None
            if noise is None:
                continue
            if name.endswith("running_var"):
                value.copy_(1 + noise.abs())
            elif value.ndim > 1:
                value.copy_(noise * value[0].numel() ** -0.5)
            else:
                value.add_(0.1 * noise)
    return model.eval()


def ours(source: Path, photo: Image.Image, **options: Any) -> tuple[Tensor, Any]:
    """Logits by way of our preprocessing alone, and the metadata."""
    model: Any = load_model(source, **options)
    assert not model.training
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
    assert describe_source(source, **{k: v for k, v in options.items() if k == "model"}).name == model.metadata.name
    pixels = torch.from_numpy(to_input(np.asarray(photo), model.metadata.preprocessing)).permute(2, 0, 1)[None]
    with torch.inference_mode():
        return model(model.metadata.preprocessing.normalize(pixels)), model.metadata


# transformers' processors resize by torch, which differs from Pillow by a gray level here and there.
GRAY_LEVEL = 5e-3


def assert_close(got: Tensor, expected: Tensor, tolerance: float = 1e-4) -> None:
    assert got.shape == expected.shape
    assert expected.std() > 0.1
    assert (got - expected).abs().max() < tolerance


# ------------------------------------------------------------------------------------- transformers

VIT = {
    "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 96, "image_size": 64,
    "patch_size": 8,
}  # fmt: skip
LABELS = {0: "cat", 1: "dog", 2: "eel", 3: "fox"}
NAMES = {"id2label": LABELS, "label2id": {name: label for label, name in LABELS.items()}}
MEAN = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}


def huggingface_vit() -> tuple[nn.Module, Any]:
    config = transformers.ViTConfig(**VIT, **NAMES)
    processor = transformers.ViTImageProcessor(size={"height": 64, "width": 64})
    return transformers.ViTForImageClassification(config), processor


def huggingface_dinov2() -> tuple[nn.Module, Any]:
    config = transformers.Dinov2Config(**{**VIT, "patch_size": 14, "image_size": 70}, mlp_ratio=2, **NAMES)
    processor = transformers.BitImageProcessor(
        size={"shortest_edge": 80}, crop_size={"height": 70, "width": 70}, resample=3, **MEAN
    )
    return transformers.Dinov2ForImageClassification(config), processor


def huggingface_swin() -> tuple[nn.Module, Any]:
    config = transformers.SwinConfig(
        embed_dim=16, depths=[1, 2, 1, 1], num_heads=[1, 2, 4, 8], window_size=2, image_size=64, **NAMES
    )
    processor = transformers.ViTImageProcessor(size={"height": 64, "width": 64}, resample=3, **MEAN)
    return transformers.SwinForImageClassification(config), processor


def huggingface_swinv2() -> tuple[nn.Module, Any]:
    config = transformers.Swinv2Config(
        embed_dim=16, depths=[1, 2, 1, 1], num_heads=[1, 2, 4, 8], window_size=4, image_size=64, **NAMES
    )
    processor = transformers.ViTImageProcessor(size={"height": 64, "width": 64}, resample=3, **MEAN)
    return transformers.Swinv2ForImageClassification(config), processor


@pytest.mark.parametrize("make", [huggingface_vit, huggingface_dinov2, huggingface_swin, huggingface_swinv2])
def test_transformers(make: Any, photo: Image.Image, tmp_path: Path) -> None:
    reference, processor = make()
    reference = randomized(reference)
    reference.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    with torch.inference_mode():
        expected = reference(**processor(images=photo, return_tensors="pt")).logits
    got, metadata = ours(tmp_path, photo)
    assert_close(got, expected, GRAY_LEVEL)
    assert metadata.class_map.names == ("cat", "dog", "eel", "fox")


def test_a_description_without_a_processor(photo: Image.Image, tmp_path: Path) -> None:
    """What is customary with that kind of model."""
    reference, processor = huggingface_vit()
    randomized(reference).save_pretrained(tmp_path)  # type: ignore[operator]
    with torch.inference_mode():
        expected = reference(**processor(images=photo, return_tensors="pt")).logits
    assert_close(ours(tmp_path, photo)[0], expected, GRAY_LEVEL)


def test_a_backbone_alone(photo: Image.Image, tmp_path: Path) -> None:
    config = transformers.Dinov2Config(**{**VIT, "patch_size": 14, "image_size": 70}, mlp_ratio=2)
    reference = randomized(transformers.Dinov2Model(config))
    reference.save_pretrained(tmp_path)
    got, metadata = ours(tmp_path, photo, image_size=(70, 70))
    pixels = torch.from_numpy(to_input(np.asarray(photo), metadata.preprocessing)).permute(2, 0, 1)[None]
    with torch.inference_mode():
        expected = reference(metadata.preprocessing.normalize(pixels)).pooler_output
    assert_close(got, expected, GRAY_LEVEL)
    assert metadata.arguments["num_classes"] == len(metadata.class_map) == 0


def test_rtdetr(photo: Image.Image, tmp_path: Path) -> None:
    backbone = transformers.RTDetrResNetConfig(
        embedding_size=64, hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = transformers.RTDetrConfig(
        backbone_config=backbone, encoder_in_channels=[128, 256, 512], decoder_in_channels=[64] * 3, decoder_layers=2,
        d_model=64, encoder_hidden_dim=64, encoder_ffn_dim=96, decoder_ffn_dim=80, num_queries=30,
        decoder_attention_heads=4, encoder_attention_heads=4, **NAMES,
    )  # fmt: skip
    reference = transformers.RTDetrForObjectDetection(config).eval()
    reference.save_pretrained(tmp_path)
    processor = transformers.RTDetrImageProcessor(size={"height": 128, "width": 160})
    processor.save_pretrained(tmp_path)
    with torch.inference_mode():
        expected = reference(**processor(images=photo, return_tensors="pt"))
    got, metadata = ours(tmp_path, photo)
    assert (got.logits - expected.logits).abs().max() < 1e-3
    assert (got.boxes - expected.pred_boxes).abs().max() < 1e-3
    assert metadata.name == "rtdetr_r18"
    assert metadata.class_map.names == ("cat", "dog", "eel", "fox")
    assert metadata.preprocessing.size == (128, 160)


# --------------------------------------------------------------------------------------------- timm


def timm_folder(folder: Path, name: str, **arguments: Any) -> nn.Module:
    """A model of timm in the layout of its repositories."""
    side = arguments.get("img_size")
    overlay = {} if side is None else {"pretrained_cfg_overlay": {"input_size": (3, side, side)}}
    model = randomized(timm.create_model(name, **arguments, **overlay))
    config = {k: v for k, v in model.pretrained_cfg.items() if k not in ("architecture", "num_classes")}
    description = {
        "architecture": name,
        "num_classes": model.num_classes,
        "model_args": {key: value for key, value in arguments.items() if key != "num_classes"},
        "pretrained_cfg": {**config, "num_classes": model.num_classes},
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(description))
    save_file(model.state_dict(), folder / "model.safetensors")
    return model


def timm_logits(model: nn.Module, photo: Image.Image) -> Tensor:
    transform = create_transform(**resolve_model_data_config(model), is_training=False)
    with torch.inference_mode():
        return model(transform(photo)[None])


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("vit_tiny_patch16_224", {"depth": 2}),
        ("vit_small_patch14_dinov2", {"depth": 2, "img_size": 98, "num_classes": 0}),
        ("deit_tiny_distilled_patch16_224", {"depth": 1}),
        ("swinv2_tiny_window8_256", {"depths": [1, 1, 1, 1], "num_classes": 7}),
        ("test_resnet", {"num_classes": 5}),
    ],
)
def test_timm(name: str, arguments: dict[str, Any], photo: Image.Image, tmp_path: Path) -> None:
    reference = timm_folder(tmp_path, name, **arguments)
    got, metadata = ours(tmp_path, photo)
    assert_close(got, timm_logits(reference, photo))
    assert metadata.name == (name if name != "test_resnet" else "timm/test_resnet")
    if got.shape[1] == 1000:
        assert metadata.class_map.names[0] == "tench, Tinca tinca"
    elif got.shape[1] == 7:
        assert metadata.class_map.names[6] == "class_6"


# --------------------------------------------------------------------------------------- single files


def official_transform(size: int, resized: int) -> Any:
    return T.Compose(
        [
            T.Resize(resized, InterpolationMode.BICUBIC),
            T.CenterCrop(size),
            T.ToTensor(),
            T.Normalize(MEAN["image_mean"], MEAN["image_std"]),
        ]
    )


def test_deit(photo: Image.Image, tmp_path: Path) -> None:
    reference = randomized(timm.create_model("deit_tiny_patch16_224"))
    torch.save({"model": reference.state_dict()}, tmp_path / "deit_tiny_patch16_224-a1311bcf.pth")
    with torch.inference_mode():
        expected = reference(official_transform(224, 256)(photo)[None])
    got, metadata = ours(tmp_path / "deit_tiny_patch16_224-a1311bcf.pth", photo)
    assert_close(got, expected)
    assert metadata.name == "deit_tiny_patch16_224"
    assert metadata.arguments == {"num_classes": 1000}


def test_swin_by_its_authors(photo: Image.Image, tmp_path: Path) -> None:
    """Their patch mergings end a stage, timm's begin the next; and they keep what they compute."""
    reference = randomized(timm.create_model("swin_tiny_patch4_window7_224"))
    state = {}
    for name, value in reference.state_dict().items():
        if ".downsample." in name:
            stage = int(name.split(".")[1])
            name = name.replace(f"layers.{stage}.", f"layers.{stage - 1}.")
        state[name.replace("head.fc.", "head.")] = value
    state["layers.0.blocks.1.attn_mask"] = torch.zeros(64, 49, 49)
    state["layers.0.blocks.0.attn.relative_position_index"] = torch.zeros(49, 49, dtype=torch.int64)
    torch.save({"model": state}, tmp_path / "swin_tiny_patch4_window7_224.pth")
    with torch.inference_mode():
        expected = reference(official_transform(224, 256)(photo)[None])
    assert_close(ours(tmp_path / "swin_tiny_patch4_window7_224.pth", photo)[0], expected)


def test_torchvision(photo: Image.Image, tmp_path: Path) -> None:
    reference = randomized(torchvision_models.swin_t())
    weights = torchvision_models.Swin_T_Weights.IMAGENET1K_V1
    path = tmp_path / weights.url.rpartition("/")[2]
    torch.save(reference.state_dict(), path)
    with torch.inference_mode():
        expected = reference(weights.transforms()(photo)[None])
    got, metadata = ours(path, photo)
    assert_close(got, expected)
    assert metadata.name == "swin_tiny_patch4_window7_224"
    assert list(metadata.class_map.names) == weights.meta["categories"]


def jax_arrays(width: int, layers: int, heads: int, patch: int, grid: int, classes: int) -> dict[str, np.ndarray]:
    """The published layout: kernels take inputs first, attention's have their heads apart."""
    draw = np.random.default_rng(0)

    def some(*shape: int, scale: float = 0.1) -> np.ndarray:
        return (draw.normal(size=shape) * scale).astype(np.float32)

    arrays = {
        "cls": some(1, 1, width),
        "embedding/kernel": some(patch, patch, 3, width, scale=0.04),
        "embedding/bias": some(width),
        "Transformer/posembed_input/pos_embedding": some(1, grid * grid + 1, width),
        "Transformer/encoder_norm/scale": 1 + some(width),
        "Transformer/encoder_norm/bias": some(width),
        "head/kernel": some(width, classes),
        "head/bias": some(classes),
    }
    for index in range(layers):
        block = f"Transformer/encoderblock_{index}/"
        for norm in ("LayerNorm_0", "LayerNorm_2"):
            arrays |= {f"{block}{norm}/scale": 1 + some(width), f"{block}{norm}/bias": some(width)}
        attention = f"{block}MultiHeadDotProductAttention_1/"
        for part in ("query", "key", "value"):
            arrays |= {
                f"{attention}{part}/kernel": some(width, heads, width // heads),
                f"{attention}{part}/bias": some(heads, width // heads),
            }
        arrays |= {f"{attention}out/kernel": some(heads, width // heads, width), f"{attention}out/bias": some(width)}
        mlp = f"{block}MlpBlock_3/"
        arrays |= {f"{mlp}Dense_0/kernel": some(width, 4 * width), f"{mlp}Dense_0/bias": some(4 * width)}
        arrays |= {f"{mlp}Dense_1/kernel": some(4 * width, width), f"{mlp}Dense_1/bias": some(width)}
    return arrays


def test_jax_arrays(photo: Image.Image, tmp_path: Path) -> None:
    path = tmp_path / "Ti_16-i21k-300ep-lr_0.001-aug_none-wd_0.03-do_0.0-sd_0.0--imagenet2012-res_224.npz"
    np.savez(path, **jax_arrays(192, 12, 3, 16, 14, 1000))
    reference = timm.create_model("vit_tiny_patch16_224").eval()
    reference.load_pretrained(str(path))  # timm's own reader of them
    got, metadata = ours(path, photo)
    assert_close(got, timm_logits(reference, photo))
    assert metadata.name == "vit_tiny_patch16_224"
    assert metadata.preprocessing.mean == (0.5, 0.5, 0.5)


def test_a_file_named_by_the_caller(photo: Image.Image, tmp_path: Path) -> None:
    reference = randomized(timm.create_model("deit_tiny_patch16_224", num_classes=3))
    save_file(reference.state_dict(), tmp_path / "best.safetensors")
    with pytest.raises(UserError) as error:
        load_model(tmp_path / "best.safetensors")
    both = "vit_tiny_patch16_224, deit_tiny_patch16_224"
    assert f"the weights do not say which model they are of (it may be {both}); pass model=NAME" in str(error.value)
    got, metadata = ours(tmp_path / "best.safetensors", photo, model="deit_tiny_patch16_224")
    assert_close(got, timm_logits(reference, photo))
    assert metadata.class_map.names == ("class_0", "class_1", "class_2")
    theirs, metadata = ours(tmp_path / "best.safetensors", photo, model="timm/deit_tiny_patch16_224")
    assert_close(theirs, got, 1e-4)
    assert metadata.name == "timm/deit_tiny_patch16_224"


def test_a_file_that_can_only_be_one(shared_data: Path) -> None:
    (file,) = (shared_data / "weights" / "dinov2_vits14").glob("*.safetensors")
    model: Any = load_model(file)
    assert model.metadata.name == "vit_small_patch14_dinov2"
    assert model.metadata.preprocessing.size == (518, 518)
    assert model.metadata.arguments["num_classes"] == 0
    assert all(value.dtype == torch.float32 for value in model.state_dict().values())


def test_another_image_size(photo: Image.Image, tmp_path: Path) -> None:
    timm_folder(tmp_path, "vit_tiny_patch16_224", depth=2)
    larger = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=(288, 256)).eval()
    larger.load_state_dict(checkpoint_filter_fn(load_file(tmp_path / "model.safetensors"), larger))
    got, metadata = ours(tmp_path, photo, image_size=(288, 256))
    assert metadata.preprocessing.size == (288, 256)
    assert metadata.arguments["image_size"] == (288, 256)
    pixels = torch.from_numpy(to_input(np.asarray(photo), metadata.preprocessing)).permute(2, 0, 1)[None]
    with torch.inference_mode():
        assert_close(got, larger(metadata.preprocessing.normalize(pixels)))


# ------------------------------------------------------------------------------------------ mistakes


def write(folder: Path, **config: Any) -> Path:
    """A folder with a description and weights of two tensors."""
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"a.weight": torch.zeros(2, 3), "b": torch.zeros(2)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "bert"}, "cannot be used: there is no model of the type 'bert' here; known: d_fine, "),
        ({"a": 1}, "names neither an architecture (timm) nor a model_type (transformers); pass model=NAME"),
        ({"model_type": "vit"}, "config.json describes no model that could be built (KeyError: 'num_attention_heads')"),
        ({"model_type": "vit", "num_attention_heads": 3, "hidden_act": "quick_gelu"}, "'quick_gelu' is not supported"),
        ({"model_type": "vit", "num_attention_heads": 3, "image_size": 10**9}, "1000000000 is no image size; it must"),
        ({"model_type": "vit", "num_attention_heads": 3, "id2label": [1]}, "describes no model that could be built"),
        (
            {"model_type": "vit", "num_attention_heads": 3},
            "cannot be loaded: its layout is not known (it holds a.weight",
        ),
        (
            {"architecture": "vit_tiny_patch16_224", "model_args": {"rope": 1}},
            "was made with rope=1, which is not supp",
        ),
        ({"architecture": "vit_tiny_patch16_224"}, "cannot be loaded: the weights are no ViT's by timm, torchvision, "),
        ({"architecture": "resnet18", "pretrained_cfg": {"interpolation": "nearest"}}, "'nearest' is not supported; "),
        ({"architecture": "no_such_net"}, "cannot be loaded: timm has no model 'no_such_net'"),
        ({"architecture": "resnet18"}, "does not hold the weights of 'timm/resnet18' that it names: "),
    ],
)
def test_folders_that_say_something_else(config: dict[str, Any], expected: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        load_model(write(tmp_path, **config))
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_names_that_are_not_enough_or_too_many(tmp_path: Path) -> None:
    config = transformers.ViTConfig(**VIT, **NAMES)
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path)
    description = json.loads((tmp_path / "config.json").read_text())
    description["id2label"] = {"0": "cat"}
    (tmp_path / "config.json").write_text(json.dumps(description))
    with pytest.raises(UserError, match="it names 1 classes and its weights know 4; fetch both again"):
        load_model(tmp_path)


def test_files_of_another_model(tmp_path: Path) -> None:
    state = timm.create_model("vit_tiny_patch16_224", depth=2, num_classes=2).state_dict()
    save_file(state, tmp_path / "a.safetensors")
    with pytest.raises(UserError) as error:
        load_model(tmp_path / "a.safetensors", model="vit_small_patch16_224")
    assert "a.safetensors does not hold the weights of 'vit_small_patch16_224' that it names: " in str(error.value)
    with pytest.raises(
        UserError, match=r"do not say which model they are of \(it is of no known size\); pass model=NAME"
    ):
        load_model(tmp_path / "a.safetensors")
    with pytest.raises(UserError, match=r"there is no model 'vit_tiny_patch16'; did you mean 'vit_tiny_patch16_"):
        load_model(tmp_path / "a.safetensors", model="vit_tiny_patch16")
    with pytest.raises(UserError, match="the weights are no Swin Transformer's by timm"):
        load_model(tmp_path / "a.safetensors", model="swin_tiny_patch4_window7_224")


def test_an_image_size_that_does_not_fit(tmp_path: Path) -> None:
    timm_folder(tmp_path, "vit_tiny_patch16_224", depth=1)
    with pytest.raises(UserError, match=r"cannot be built with .*make both sides multiples of 16"):
        load_model(tmp_path, image_size=(100, 100))


def timm_vit_folder(path: Path, **arguments: Any) -> Any:
    """A small ViT of timm's in its layout; the model."""
    given = {"patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2, **arguments}
    theirs = timm.create_model("vit_tiny_patch16_224", num_classes=5, **given)
    path.mkdir()
    config = {"architecture": "vit_tiny_patch16_224", "num_classes": 5, "model_args": given}
    (path / "config.json").write_text(json.dumps(config))
    save_file({name: value.contiguous() for name, value in theirs.state_dict().items()}, path / "model.safetensors")
    return theirs.eval()


def test_positions_of_a_grid_that_is_not_square(tmp_path: Path) -> None:
    """The description says which grid it is; as many places as a square has are not taken for one."""
    theirs = timm_vit_folder(tmp_path / "wide", img_size=[16, 64])  # 2×8 patches
    ours: Any = load_model(tmp_path / "wide")
    images = torch.randn(2, 3, 16, 64)
    with torch.no_grad():
        torch.testing.assert_close(ours(images), theirs(images), atol=1e-4, rtol=0)
    # With the class token's, 3×5 positions are as many as a square of 4×4 without it.
    timm_vit_folder(tmp_path / "odd", img_size=[24, 40])
    with pytest.raises(UserError, match=r"it has 16 positions .* images of \[24, 40\] pixels have 15 patches"):
        load_model(tmp_path / "odd")


def test_a_description_that_is_wrong_is_told_whatever_the_caller_names(tmp_path: Path) -> None:
    timm_vit_folder(tmp_path / "set", act_layer="silu")
    with pytest.raises(UserError, match=r"was made with act_layer='silu', which is not supported"):
        load_model(tmp_path / "set", model="vit_tiny_patch16_224")
    (tmp_path / "set" / "config.json").write_text(json.dumps({"model_type": "nobodys"}))
    with pytest.raises(UserError, match="there is no model of the type 'nobodys' here"):
        load_model(tmp_path / "set")
