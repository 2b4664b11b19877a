"""The properties of a ViT that follow from what it is; that it equals the published ones is tested in parity/."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vitdet.backbones.vit import PatchEmbedding, ViT, keep_random
from vitdet.core.positions import Rotation, resample_positions, rotary_2d, sinusoidal_2d

SIDE = 24


def small(**overrides: Any) -> ViT:
    """A ViT with 3×3 patches, in evaluation mode, with values that matter in tokens, norms and biases."""
    model = ViT(
        **{"width": 16, "layers": 3, "heads": 2, "hidden": 32, "patch": 8, "image_size": (SIDE, SIDE)} | overrides
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model.eval()


def pictures(batch: int = 2, height: int = SIDE, width: int = SIDE) -> Tensor:
    return torch.randn(batch, 3, height, width)


def shuffled(images: Tensor, order: Tensor, patch: int = 8) -> Tensor:
    """The images with their patches in another order."""
    cells = images.unflatten(3, (-1, patch)).unflatten(2, (-1, patch)).permute(0, 2, 4, 1, 3, 5)
    moved = cells.flatten(1, 2)[:, order].unflatten(1, cells.shape[1:3])
    return moved.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)


def test_patches_are_projected_as_by_a_convolution() -> None:
    embedding = PatchEmbedding(8, 16)
    convolution = nn.Conv2d(3, 16, 8, 8)
    images = pictures(2, 16, 32)
    with torch.no_grad():
        convolution.weight.copy_(embedding.project.weight.view(16, 3, 8, 8))
        convolution.bias.copy_(embedding.project.bias)
    torch.testing.assert_close(embedding(images), convolution(images).flatten(2).mT, atol=1e-5, rtol=1e-5)
    last = images.to(memory_format=torch.channels_last)
    assert torch.equal(embedding(last), embedding(images))


@pytest.mark.parametrize("positions", ["learned", "sincos", "rotary", "none"])
@torch.no_grad()
def test_only_positions_tell_the_order_of_patches(positions: str) -> None:
    """Without positions a ViT is equivariant to permutations of the patches; with any it is not."""
    model, images, order = small(positions=positions), pictures(), torch.randperm(9)
    tokens, moved = model.tokens(images), model.tokens(shuffled(images, order))
    difference = (moved - torch.cat([tokens[:, :1], tokens[:, 1:][:, order]], dim=1)).abs().max()
    if positions == "none":
        assert difference < 1e-5
    else:
        assert difference > 1e-2
    assert (model.positions is not None) == (positions == "learned")


@torch.no_grad()
def test_positions_are_added_before_the_first_block() -> None:
    """With branches of factor 0 the blocks do nothing, and what enters comes out."""
    images = pictures()
    for positions, added in (("none", 0.0), ("sincos", sinusoidal_2d(3, 3, 16))):
        model = ViT(
            width=16, layers=2, heads=2, hidden=8, patch=8, positions=positions, layer_scale=0.0, final_norm=False,
            registers=2,
        )  # fmt: skip
        tokens = model.tokens(images)
        assert model.prefix_tokens == 3
        assert model.class_token is not None
        assert model.registers is not None
        assert torch.equal(tokens[1, :3], torch.cat([model.class_token, model.registers], dim=1)[0])
        torch.testing.assert_close(tokens[:, 3:], model.patch_embedding(images) + added)


@torch.no_grad()
def test_learnt_positions_of_their_own_grid_are_the_table() -> None:
    model = small(image_size=(16, 40))
    images = pictures(1, 16, 40)
    assert model.positions is not None
    assert model.grid(images) == (2, 5) == model.positions.grid
    assert torch.equal(model.positions(model.grid(images)), model.positions.table.flatten(1, 2))


@torch.no_grad()
def test_any_size_that_the_patch_divides() -> None:
    """A model takes another size as the same model made for that size does, after ``adapt``."""
    model, images = small(), pictures(2, 32, 48)
    made_for_it = small(image_size=(32, 48))
    made_for_it.load_state_dict(made_for_it.adapt(model.state_dict()))
    torch.testing.assert_close(model.tokens(images), made_for_it.tokens(images))
    assert [tuple(one.shape) for one in model(images)] == [(2, 16, 4, 6)]
    with pytest.raises(ValueError, match=r"images of 32×20 pixels cannot be cut into patches of 8; .* multiples of 8"):
        model(pictures(1, 32, 20))
    with pytest.raises(ValueError, match="images of 30×24 pixels cannot be cut into patches of 8"):
        small(image_size=(30, 24))


def test_adapt() -> None:
    state = small().state_dict()
    same = small().adapt(state)
    assert all(torch.equal(same[name], tensor) for name, tensor in state.items())
    adapted = small(image_size=(16, 40)).adapt(state)
    table = state["positions.table"]  # (1, 3, 3, 16)
    expected = resample_positions(table.flatten(1, 2), (3, 3), (2, 5)).unflatten(1, (2, 5))
    assert torch.equal(adapted.pop("positions.table"), expected)
    published = {**state, "positions.table": table.flatten(1, 2)}
    assert torch.equal(small(image_size=(16, 40)).adapt(published)["positions.table"], expected)
    assert all(adapted[name] is tensor for name, tensor in state.items() if name != "positions.table")
    rotary = small(positions="rotary", image_size=(16, 40))
    assert rotary.adapt(rotary.state_dict()).keys() == rotary.state_dict().keys()
    with pytest.raises(
        ValueError, match=r"10 positions are no square grid, .* resampled to \(3, 3\); give .* image_size"
    ):
        small().adapt({"positions.table": torch.zeros(1, 10, 16)})
    flat = torch.randn(1, 10, 16)
    assert torch.equal(
        small(image_size=(16, 40)).adapt({"positions.table": flat})["positions.table"].flatten(1, 2), flat
    )
    with pytest.raises(ValueError, match=r"is \(1, h, w, C\), not \(9, 16\); fetch the file again"):
        small().adapt({"positions.table": torch.zeros(9, 16)})


def test_a_table_of_as_many_places_is_not_taken_for_the_same_grid() -> None:
    """4×4 and 2×8 places are 16 each: a table says which it is of."""
    state = small(image_size=(32, 32)).state_dict()
    adapted = small(image_size=(16, 64)).adapt(state)["positions.table"]
    table = state["positions.table"].flatten(1, 2)
    assert torch.equal(adapted, resample_positions(table, (4, 4), (2, 8)).unflatten(1, (2, 8)))
    wide = small(image_size=(16, 40)).state_dict()
    back = small(image_size=(24, 24)).adapt(wide)["positions.table"]
    expected = resample_positions(wide["positions.table"].flatten(1, 2), (2, 5), (3, 3))
    assert torch.equal(back.flatten(1, 2), expected)


@torch.no_grad()
def test_maps_are_the_patch_tokens_of_their_blocks() -> None:
    model, images = small(out_layers=(0, -1), registers=2, distillation_token=True), pictures(2, 16, 32)
    first, last = model(images)
    assert (model.channels, model.strides) == ([16, 16], [8, 8])
    assert model.prefix_tokens == 4
    assert torch.equal(last.flatten(2).mT, model.tokens(images)[:, 4:])
    shorter = small(layers=1, registers=2, distillation_token=True)
    shorter.load_state_dict({k: v for k, v in model.state_dict().items() if k in shorter.state_dict()})
    torch.testing.assert_close(first, shorter(images)[0])


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@torch.no_grad()
def test_attention_weights(positions: str) -> None:
    """One matrix of rows that sum to 1 for each block and head, and the explicit path's output is the fast one's."""
    model, images = small(positions=positions), pictures()
    weights = model.attention_weights(images)
    assert [tuple(one.shape) for one in weights] == [(2, 2, 10, 10)] * 3
    for one in weights:
        torch.testing.assert_close(one.sum(-1), torch.ones(2, 2, 10))
        assert one.std() > 1e-3, "all alike would be no attention"
    tokens, rotation = model._embed(images)
    torch.testing.assert_close(model.encoder(tokens, rotary=rotation, collect=[]), model.tokens(images))


@torch.no_grad()
def test_attention_weights_are_those_used() -> None:
    """The last block's tokens are what its weights mix from the values."""
    model, images = small(layers=1, final_norm=False), pictures()
    tokens, _ = model._embed(images)
    block = model.encoder.layers[0]
    values = block.self_attention.qkv(block.self_attention_residual.norm(tokens))[..., 32:].unflatten(-1, (2, 8))
    mixed = torch.einsum("bhnm,bmhd->bnhd", model.attention_weights(images)[0], values).flatten(2)
    tokens = tokens + block.self_attention.out(mixed)
    expected = tokens + block.feed_forward(block.feed_forward_residual.norm(tokens))
    torch.testing.assert_close(model.tokens(images), expected)


@torch.no_grad()
def test_patch_dropout_leaves_out_patches_and_no_prefix() -> None:
    tokens = torch.arange(4.0 * 11).view(4, 11, 1).expand(-1, -1, 16)  # 2 of the prefix, 9 patches
    rotation = rotary_2d(3, 3, 8, prefix=2)
    kept, turned = keep_random(tokens, rotation, prefix=2, rate=0.5)
    assert kept.shape == (4, 2 + 4, 16)  # 9 · (1 - 0.5), rounded down
    assert torch.equal(kept[:, :2], tokens[:, :2])
    places = (kept[..., 0] - tokens[:, :1, 0]).long()
    assert all(len(set(row)) == 6 and min(row[2:]) >= 2 for row in places.tolist())
    assert len({tuple(sorted(row)) for row in places.tolist()}) > 1, "each image loses others"
    assert turned is not None
    for table, whole in zip(turned, rotation, strict=True):
        assert torch.equal(table[:, 0], whole[places])
    assert keep_random(tokens, None, prefix=2, rate=0.99)[0].shape == (4, 2 + 1, 16)


@pytest.mark.parametrize("positions", ["learned", "rotary"])
@torch.no_grad()
def test_patch_dropout_equals_hiding_the_patches(positions: str) -> None:
    """The tokens that stay become what they become among all when nobody may attend to the others."""
    model, images = small(positions=positions, patch_dropout=0.5, registers=1).train(), pictures(1)
    torch.manual_seed(3)
    dropped = model.tokens(images)
    torch.manual_seed(3)
    kept = keep_random(torch.arange(11.0).view(1, 11, 1), None, prefix=2, rate=0.5)[0].flatten().long()
    assert len(kept) == 2 + 4 == dropped.shape[1]
    tokens, rotation = model._embed(images)
    mask = torch.zeros(11, dtype=torch.bool).index_fill(0, kept, True)
    whole = model.encoder(tokens, rotary=rotation, mask=mask[None, None, None])
    torch.testing.assert_close(dropped, whole[:, kept], atol=1e-5, rtol=1e-5)
    assert model(images)[0].shape == (1, 16, 3, 3), "maps are whole, even in training"
    assert model.eval().tokens(images).shape == (1, 2 + 9, 16)


@torch.no_grad()
def test_token_dropout_zeroes_channels_of_what_enters() -> None:
    model = small(token_dropout=0.25, width=64).train()
    entering: list[Tensor] = []
    model.encoder.layers[0].register_forward_pre_hook(lambda module, inputs: entering.append(inputs[0]))
    images = pictures(8)
    model.tokens(images)
    model.eval().tokens(images)
    dropped, whole = entering
    lost = dropped == 0
    assert 0.2 < lost.float().mean() < 0.3
    torch.testing.assert_close(dropped, torch.where(lost, 0.0, whole / 0.75))


@torch.no_grad()
def test_drop_path_grows_with_depth_and_drops_in_training_only() -> None:
    model = small(drop_path=0.5, layers=5)
    rates = [block.self_attention_residual.drop_path.rate for block in model.encoder.layers]
    assert rates == [0, 0.125, 0.25, 0.375, 0.5]
    assert rates == [block.feed_forward_residual.drop_path.rate for block in model.encoder.layers]
    images = pictures(1).expand(16, -1, -1, -1)
    same, different = model.tokens(images), model.train().tokens(images)
    assert same.std(dim=0).max() < 1e-5 < 0.1 < different.std(dim=0).max()


@pytest.mark.parametrize(
    "option",
    [
        {"dropout": 0.3}, {"qk_norm": "rms"}, {"bias": False}, {"layer_scale": 0.1},
        {"activation": "swiglu"}, {"norm_eps": 0.1}, {"final_norm": False}, {"class_token": False}, {"registers": 1},
        {"distillation_token": True}, {"heads": 4},
    ],
    ids=lambda option: next(iter(option)),
)  # fmt: skip
@torch.no_grad()
def test_each_option_changes_the_output(option: dict[str, Any]) -> None:
    plain, changed, images = small(), small(**option).train(), pictures()
    shared = {k: v for k, v in plain.state_dict().items() if k in changed.state_dict()}
    if option.get("activation"):
        shared = {k: v for k, v in shared.items() if ".expand." not in k}
    changed.load_state_dict(shared, strict=False)
    assert (changed(images)[0] - plain(images)[0]).abs().max() > 1e-4


@torch.no_grad()
def test_bias_of_keys() -> None:
    """What is added to all keys alike adds the same to all scores of a query, unless the keys are then turned."""
    images = pictures()
    for positions, matters in (("learned", False), ("rotary", True)):
        given, left_out = small(positions=positions), small(positions=positions, key_bias=False)
        left_out.load_state_dict(given.state_dict())
        difference = (given.tokens(images) - left_out.tokens(images)).abs().max()
        assert difference > 1e-2 if matters else difference < 1e-5


def test_bias_is_of_all_linear_layers_of_the_blocks() -> None:
    names = [name for name, _ in small(bias=False).encoder.named_parameters()]
    assert [name for name in names if name.endswith("bias") and "norm" not in name] == []


def test_depth_of_every_parameter() -> None:
    model = small(registers=1, distillation_token=True, layer_scale=0.1)
    depths = {name: model.depth_of(name) for name, _ in model.named_parameters()}
    assert model.depth == 4
    assert {name for name, depth in depths.items() if depth == 0} == {
        "class_token", "distillation_token", "registers", "positions.table", "patch_embedding.project.weight",
        "patch_embedding.project.bias",
    }  # fmt: skip
    for name, depth in depths.items():
        if 1 <= depth <= 3:
            assert name.startswith(f"encoder.layers.{depth - 1}.")
    assert {name for name, depth in depths.items() if depth == 4} == {"encoder.norm.weight", "encoder.norm.bias"}
    assert set(depths.values()) == {0, 1, 2, 3, 4}


def test_weight_decay_spares_tokens_and_tables() -> None:
    """The optimizer decays what has more than one dimension and is called a weight."""
    model = small(registers=1, distillation_token=True, layer_scale=0.1)
    decayed = {n for n, p in model.named_parameters() if p.ndim > 1 and n.endswith("weight")}
    linear = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert decayed == linear


def test_fresh_values() -> None:
    """Truncated normals of deviation 0.02 and zeros in the blocks; the patches' as a convolution's."""
    model = ViT(width=64, layers=1, heads=2, hidden=128, patch=8, registers=4)
    block = model.encoder.layers[0]
    for tensor in (block.self_attention.qkv.weight, block.feed_forward.expand.weight, model.registers):
        assert tensor is not None
        assert tensor.std().item() == pytest.approx(0.02, rel=0.15)
    assert not block.self_attention.out.bias.any()
    bound = (3 * 8 * 8) ** -0.5
    weight = model.patch_embedding.project.weight
    assert 0.95 * bound < weight.abs().max() <= bound
    assert weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)


@pytest.mark.parametrize("positions", ["learned", "sincos", "rotary", "none"])
@torch.no_grad()
def test_precision_of_the_residual_stream(positions: str) -> None:
    """It is the parameters': float32 under autocast, bfloat16 where they are in bfloat16."""
    model, images = small(positions=positions, class_token=False), pictures()
    expected = model.tokens(images)
    with torch.autocast("cpu", torch.bfloat16):
        tokens = model.tokens(images)
    assert tokens.dtype == torch.float32
    torch.testing.assert_close(tokens, expected, atol=0.1, rtol=0.1)
    entering: list[Tensor] = []
    model.bfloat16().encoder.layers[0].register_forward_pre_hook(lambda module, inputs: entering.append(inputs[0]))
    model.tokens(images.bfloat16())
    assert entering[0].dtype == torch.bfloat16


def test_mistakes() -> None:
    with pytest.raises(ValueError, match="unknown positions 'alibi'; use one of"):
        small(positions="alibi")
    with pytest.raises(ValueError, match=r"patch_dropout is the share of patches left out, in \[0, 1\), got 1"):
        small(patch_dropout=1)


def test_rotation_of_each_image_broadcasts_over_heads() -> None:
    rotation = Rotation(torch.ones(5, 4), torch.zeros(5, 4))
    _, turned = keep_random(torch.ones(3, 5, 16), rotation, prefix=1, rate=0.5)
    assert turned is not None
    assert [tuple(table.shape) for table in turned] == [(3, 1, 3, 4)] * 2
