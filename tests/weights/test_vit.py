"""What the conversion of ViT weights does beyond renaming, and a real file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from vitdet.classifiers import CLASSIFIERS
from vitdet.errors import UserError
from vitdet.weights.rules import load_strict
from vitdet.weights.vit import convert

WIDTH = 8


def flat(**tensors: Tensor) -> dict[str, Tensor]:
    """As little of timm's layout as is recognised, and these tensors."""
    return {"blocks.0.norm1.weight": torch.ones(WIDTH), **tensors}


def rows(count: int) -> Tensor:
    """(1, count, C), row n full of n."""
    return torch.arange(float(count))[None, :, None].expand(1, count, WIDTH).clone()


@pytest.mark.parametrize(
    ("places", "registers", "distilled", "folded"),
    [
        pytest.param(16, 0, False, 0, id="of patches only (DeiT III)"),
        pytest.param(17, 0, False, 1, id="with the class token's"),
        pytest.param(18, 0, True, 2, id="with the distillation token's, too"),
        pytest.param(17, 4, False, 1, id="not the registers' (DINOv2)"),
        pytest.param(16, 4, False, 0, id="not even the class token's (timm's DINOv2)"),
        pytest.param(21, 4, False, 5, id="with the registers', too (timm)"),
        pytest.param(15, 0, False, 1, id="not a square grid"),
    ],
)
def test_positions_before_the_patches_go_to_the_tokens(
    places: int, registers: int, distilled: bool, folded: int
) -> None:
    theirs = flat(cls_token=torch.full((1, 1, WIDTH), 100.0), pos_embed=rows(places))
    if distilled:
        theirs["dist_token"] = torch.full((1, 1, WIDTH), 200.0)
    if registers:
        theirs["reg_token"] = torch.full((1, registers, WIDTH), 300.0)
    ours = convert(theirs)
    table = ours["backbone.positions.table"]
    assert table.ndim == (3 if places == 15 else 4), "a square grid is taken for one"
    assert table.flatten(1, -2)[0, :, 0].tolist() == list(range(folded, places))
    assert ours["backbone.class_token"].unique().tolist() == [100.0]  # position 0 is all zeros
    if distilled:
        assert ours["backbone.distillation_token"].unique().tolist() == [201.0]
    if registers:
        expected = [301.0, 302.0, 303.0, 304.0] if folded == 5 else [300.0] * 4
        assert ours["backbone.registers"][0, :, 0].tolist() == expected
    assert theirs["cls_token"].unique().tolist() == [100.0], "the source must stay as it was"


def test_half_precision_becomes_float32_before_the_sum() -> None:
    token, place = torch.full((1, 1, WIDTH), 1.0), torch.full((1, 5, WIDTH), 2.0**-11)
    ours = convert(flat(cls_token=token.half(), pos_embed=place.half()))
    assert ours["backbone.class_token"].unique().tolist() == [1 + 2.0**-11], "float16 has no such number"
    assert {tensor.dtype for tensor in ours.values()} == {torch.float32}


def test_keys_without_bias_get_zeros() -> None:
    ours = convert(
        flat(**{
            "blocks.0.attn.qkv.weight": torch.ones(3 * WIDTH, WIDTH), "blocks.0.attn.proj.bias": torch.ones(WIDTH),
            "blocks.0.attn.q_bias": torch.full((WIDTH,), 2.0), "blocks.0.attn.v_bias": torch.full((WIDTH,), 3.0),
        })
    )  # fmt: skip
    bias = ours["backbone.encoder.layers.0.self_attention.qkv.bias"]
    assert bias.view(3, WIDTH).tolist() == [[2.0] * WIDTH, [0.0] * WIDTH, [3.0] * WIDTH]


def test_no_bias_at_all_stays_so_only_where_the_output_has_none() -> None:
    weights = {"blocks.0.attn.qkv.weight": torch.ones(3 * WIDTH, WIDTH)}
    name = "backbone.encoder.layers.0.self_attention.qkv.bias"
    assert name not in convert(flat(**weights))
    biased = convert(flat(**weights, **{"blocks.0.attn.proj.bias": torch.ones(WIDTH)}))
    assert biased[name].tolist() == [0.0] * 3 * WIDTH


def test_official_dino_names() -> None:
    """The publishers' own files: buffers and the mask token go, registers and gates have other names than timm's."""
    gate_first = torch.arange(32.0)[:, None].expand(32, WIDTH)  # silu(first half) * second half, as ours
    ours = convert(
        flat(**{
            "mask_token": torch.ones(1, WIDTH), "rope_embed.periods": torch.ones(4),
            "blocks.0.attn.qkv.bias_mask": torch.ones(3 * WIDTH), "register_tokens": rows(4),
            "blocks.0.mlp.w12.weight": gate_first, "blocks.0.mlp.w3.weight": torch.ones(WIDTH, 16),
            "blocks.0.ls2.gamma": torch.ones(WIDTH), "patch_embed.proj.weight": torch.ones(WIDTH, 3, 2, 2),
        })
    )  # fmt: skip
    block = "backbone.encoder.layers.0."
    assert {name: tuple(tensor.shape) for name, tensor in ours.items()} == {
        block + "self_attention_residual.norm.weight": (WIDTH,),
        block + "feed_forward_residual.scale.factor": (WIDTH,),
        block + "feed_forward.expand.weight": (32, WIDTH),
        block + "feed_forward.contract.weight": (WIDTH, 16),
        "backbone.registers": (1, 4, WIDTH),
        "backbone.patch_embedding.project.weight": (WIDTH, 12),
    }
    assert torch.equal(ours[block + "feed_forward.expand.weight"], gate_first)
    assert torch.equal(convert(flat(storage_tokens=rows(4)))["backbone.registers"], rows(4))


def test_pooler_of_huggingface_is_left_out() -> None:
    theirs = {
        "embeddings.cls_token": rows(1),
        "pooler.dense.weight": torch.ones(2, 2),
        "vit.pooler.dense.bias": rows(1),
    }
    assert list(convert(theirs)) == ["backbone.class_token"]


@pytest.mark.parametrize(
    "theirs",
    [
        {"layers.0.blocks.0.attn.qkv.weight": torch.ones(1), "patch_embed.proj.weight": torch.ones(1)},
        {"swin.embeddings.patch_embeddings.projection.weight": torch.ones(1)},
        {"conv1.weight": torch.ones(1), "layer1.0.conv1.weight": torch.ones(1)},
        {},
    ],
    ids=["timm's Swin", "Hugging Face's Swin", "ResNet", "nothing"],
)
def test_other_models_are_refused(theirs: dict[str, Tensor]) -> None:
    held = "nothing" if not theirs else next(iter(theirs))
    with pytest.raises(UserError, match=rf"no ViT's by timm.*they hold {held}.*name the model"):
        convert(theirs)


def photographs(folder: Path, count: int) -> Tensor:
    """(B, 3, 224, 224), one of each of the first classes, as DINOv2 was trained on them."""
    paths = [sorted(one.glob("*.*"))[0] for one in sorted(folder.iterdir())[:count]]
    pixels = np.stack([np.asarray(Image.open(path).convert("RGB").resize((224, 224))) for path in paths])
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    return (images - mean[:, None, None]) / std[:, None, None]


@torch.no_grad()
def test_real_dinov2(shared_data: Path) -> None:
    """A file that others trained loads strictly, and gives timm's features of photographs."""
    timm = pytest.importorskip("timm")
    theirs = load_file(next((shared_data / "weights" / "dinov2_vits14").glob("*.safetensors")))
    ours = CLASSIFIERS["vit_small_patch14_dinov2"](0)
    assert str(load_strict(ours, convert(theirs))) == "all fit"
    reference = timm.create_model("vit_small_patch14_dinov2", dynamic_img_size=True)
    reference.load_state_dict(theirs)
    images = photographs(shared_data / "classification" / "imagenette224_small" / "val", 3)
    expected, tokens = reference.eval().forward_features(images), ours.eval().backbone.tokens(images)
    assert expected.shape == (3, 257, 384)
    assert expected[:, 0].std(dim=0).mean() > 0.1, "different photographs must give different features"
    assert (tokens - expected).norm() < 1e-4 * expected.norm()
    torch.testing.assert_close(tokens, expected, atol=1e-4, rtol=1e-4)
