"""Blocks: equal to torch's own layers with the same weights, and composed by hand where those have no such option."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vitdet.core.attention import Attention
from vitdet.core.blocks import DecoderBlock, DropPath, EncoderBlock, LayerScale, Residual
from vitdet.core.deformable import DeformableAttention

WIDTH, HEADS, HIDDEN = 16, 4, 24


def with_random_values(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    return module


def copy_attention(theirs: nn.MultiheadAttention, ours: Attention) -> None:
    theirs.in_proj_weight.data.copy_(ours.qkv.weight)
    theirs.in_proj_bias.data.copy_(ours.qkv.bias)
    theirs.out_proj.load_state_dict(ours.out.state_dict())


@pytest.mark.parametrize("placement", ["post", "pre"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_encoder_block_equals_torch(activation: str, placement: str) -> None:
    ours = with_random_values(EncoderBlock(WIDTH, HEADS, HIDDEN, activation=activation, placement=placement))
    theirs = nn.TransformerEncoderLayer(
        WIDTH,
        HEADS,
        HIDDEN,
        dropout=0.0,
        activation=activation,
        batch_first=True,
        norm_first=placement == "pre",
    )
    copy_attention(theirs.self_attn, ours.self_attention)
    theirs.norm1.load_state_dict(ours.self_attention_residual.norm.state_dict())
    theirs.linear1.load_state_dict(ours.feed_forward.expand.state_dict())
    theirs.linear2.load_state_dict(ours.feed_forward.contract.state_dict())
    theirs.norm2.load_state_dict(ours.feed_forward_residual.norm.state_dict())
    x = torch.randn(2, 5, WIDTH)
    allowed = torch.ones(5, 5, dtype=torch.bool).tril()
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours(x, mask=allowed), theirs(x, src_mask=~allowed), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("placement", ["post", "pre"])
def test_decoder_block_equals_torch(placement: str) -> None:
    cross = Attention(WIDTH, HEADS)
    ours = DecoderBlock(WIDTH, HEADS, HIDDEN, cross_attention=cross, placement=placement)
    with_random_values(ours)
    theirs = nn.TransformerDecoderLayer(
        WIDTH, HEADS, HIDDEN, dropout=0.0, batch_first=True, norm_first=placement == "pre"
    )
    copy_attention(theirs.self_attn, ours.self_attention)
    copy_attention(theirs.multihead_attn, cross)
    theirs.norm1.load_state_dict(ours.self_attention_residual.norm.state_dict())
    theirs.norm2.load_state_dict(ours.cross_attention_residual.norm.state_dict())
    theirs.linear1.load_state_dict(ours.feed_forward.expand.state_dict())
    theirs.linear2.load_state_dict(ours.feed_forward.contract.state_dict())
    theirs.norm3.load_state_dict(ours.feed_forward_residual.norm.state_dict())
    x, memory = torch.randn(2, 5, WIDTH), torch.randn(2, 7, WIDTH)
    allowed, readable = torch.ones(5, 5, dtype=torch.bool).tril(), torch.rand(5, 7) < 0.7
    readable[:, 0] = True
    found = ours(x, memory, mask=allowed, context={"mask": readable})
    expected = theirs(x, memory, tgt_mask=~allowed, memory_mask=~readable)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("placement", ["post", "pre"])
def test_encoder_block_by_hand(placement: str, norm: str) -> None:
    block = EncoderBlock(WIDTH, HEADS, HIDDEN, activation="swiglu", norm=norm, placement=placement)
    with_random_values(block)
    x, pos = torch.randn(2, 5, WIDTH), torch.randn(2, 5, WIDTH)
    attend, feed = block.self_attention, block.feed_forward
    first, second = block.self_attention_residual.norm, block.feed_forward_residual.norm
    if placement == "pre":
        middle = x + attend(first(x), query_pos=pos)
        expected = middle + feed(second(middle))
    else:
        middle = first(x + attend(x, query_pos=pos))
        expected = second(middle + feed(middle))
    torch.testing.assert_close(block(x, query_pos=pos), expected)
    assert (block(x) - expected).abs().max() > 0.01


@pytest.mark.parametrize("placement", ["post", "pre"])
def test_decoder_block_by_hand_with_deformable_attention(placement: str) -> None:
    cross = DeformableAttention(WIDTH, HEADS, levels=2, points=2)
    block = DecoderBlock(WIDTH, HEADS, HIDDEN, cross_attention=cross, placement=placement)
    with_random_values(block)
    x, pos, memory = torch.randn(2, 5, WIDTH), torch.randn(2, 5, WIDTH), torch.randn(2, 20, WIDTH)
    context: dict[str, Any] = {"reference_boxes": torch.rand(2, 5, 4), "shapes": [(4, 4), (2, 2)]}
    attend, feed = block.self_attention, block.feed_forward
    first, second, third = (
        block.self_attention_residual.norm,
        block.cross_attention_residual.norm,
        block.feed_forward_residual.norm,
    )
    if placement == "pre":
        one = x + attend(first(x), query_pos=pos)
        two = one + cross(second(one), memory, query_pos=pos, **context)
        expected = two + feed(third(two))
    else:
        one = first(x + attend(x, query_pos=pos))
        two = second(one + cross(one, memory, query_pos=pos, **context))
        expected = third(two + feed(two))
    torch.testing.assert_close(block(x, memory, query_pos=pos, context=context), expected)


def test_dropout_of_every_branch() -> None:
    """With everything dropped, pre-norm blocks hand their input through and post-norm blocks only normalise it."""
    x, memory = torch.randn(2, 5, WIDTH), torch.randn(2, 7, WIDTH)
    options: dict[str, Any] = {"placement": "pre", "dropout": 1.0}
    encoder = EncoderBlock(WIDTH, HEADS, HIDDEN, **options)
    decoder = DecoderBlock(WIDTH, HEADS, HIDDEN, cross_attention=Attention(WIDTH, HEADS), **options)

    def change(output: Tensor) -> float:
        return (output - x).abs().max().item()

    assert change(encoder(x)) == change(decoder(x, memory)) == 0
    assert change(encoder.eval()(x)) > 0.1
    assert change(decoder.eval()(x, memory)) > 0.1


def test_dropout_reaches_attention_and_feed_forward() -> None:
    block = EncoderBlock(WIDTH, HEADS, HIDDEN, dropout=0.25)
    assert block.self_attention.dropout == block.feed_forward.dropout.p == 0.25
    assert block.self_attention_residual.dropout.p == block.feed_forward_residual.dropout.p == 0.25


def sample() -> torch.Tensor:
    return torch.randn(2, 5, WIDTH)


@pytest.mark.parametrize("placement", ["post", "pre", "peri", "res_post"])
@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_where_the_norm_stands(norm: str, placement: str) -> None:
    """Each placement by its formula, with layer scale on the branch."""
    residual, x = Residual(WIDTH, placement=placement, norm=norm, norm_eps=1e-2, layer_scale=0.5), sample()
    with_random_values(residual)
    n, scale = residual.norm, residual.scale.factor

    def branch(tokens: Tensor) -> Tensor:
        return tokens.sin() + tokens.mean(1, keepdim=True)

    expected = {
        "post": lambda: n(x + scale * branch(x)),
        "pre": lambda: x + scale * branch(n(x)),
        "peri": lambda: x + scale * residual.out_norm(branch(n(x))),
        "res_post": lambda: x + scale * n(branch(x)),
    }[placement]()
    torch.testing.assert_close(residual(x, branch), expected)
    assert (n.eps, len(list(residual.out_norm.parameters())) > 0) == (1e-2, placement == "peri")


def test_unknown_placement() -> None:
    with pytest.raises(
        ValueError, match=r"placement 'mid' of the norm; use one of \['post', 'pre', 'peri', 'res_post'\]"
    ):
        EncoderBlock(WIDTH, HEADS, HIDDEN, placement="mid")


def test_layer_scale() -> None:
    module, x = LayerScale(WIDTH, 1e-3), sample()
    torch.testing.assert_close(module(x), 1e-3 * x)
    block = EncoderBlock(WIDTH, HEADS, HIDDEN, placement="pre", layer_scale=0.0)
    assert torch.equal(block(x), x)  # both branches are scaled
    block.self_attention_residual.scale.factor.data[3] = 1
    assert (block(x) - x).abs().amax((0, 1)).nonzero().flatten().tolist() == [3]


def test_drop_path_drops_whole_samples_and_keeps_the_mean() -> None:
    module, x = DropPath(0.25), torch.ones(8000, 3, 2)
    found = module(x)
    per_sample = found.flatten(1)
    assert torch.equal(per_sample.amin(1), per_sample.amax(1))  # all or nothing
    assert per_sample.unique().tolist() == pytest.approx([0, 1 / 0.75])
    assert found.mean().item() == pytest.approx(1, abs=0.02)  # 3.7 standard deviations
    assert module.eval()(x) is x
    assert DropPath(0.0)(x) is x
    assert DropPath(0.5)(x.bfloat16()).dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"the probability of dropping a branch, in \[0, 1\), got 1"):
        DropPath(1)


def test_drop_path_of_a_block_leaves_the_sample() -> None:
    block, x = EncoderBlock(WIDTH, HEADS, HIDDEN, placement="pre", drop_path=0.5), torch.randn(64, 3, WIDTH)
    untouched = (block(x) == x).flatten(1).all(1).double().mean().item()
    assert 0.1 < untouched < 0.4  # a quarter: both branches, on their own
    assert (block.eval()(x) != x).flatten(1).any(1).all()


def test_blocks_without_bias() -> None:
    cross = Attention(WIDTH, HEADS, bias=False)
    for block in (
        EncoderBlock(WIDTH, HEADS, HIDDEN, bias=False, norm="rms"),
        DecoderBlock(WIDTH, HEADS, HIDDEN, bias=False, norm="rms", cross_attention=cross),
    ):
        assert not [name for name, _ in block.named_parameters() if "bias" in name]
    for block in (
        EncoderBlock(WIDTH, HEADS, HIDDEN), DecoderBlock(WIDTH, HEADS, HIDDEN, cross_attention=Attention(WIDTH, HEADS))
    ):  # fmt: skip
        assert all(layer.bias is not None for layer in block.modules() if isinstance(layer, nn.Linear))


def test_an_injected_self_attention_is_the_one_used() -> None:
    own = Attention(WIDTH, HEADS, kv_heads=1)
    encoder = EncoderBlock(WIDTH, HEADS, HIDDEN, attention=own)
    decoder = DecoderBlock(WIDTH, HEADS, HIDDEN, attention=own, cross_attention=Attention(WIDTH, HEADS))
    assert encoder.self_attention is own
    assert decoder.self_attention is own
    x = sample()
    before = encoder(x), decoder(x, x)
    with_random_values(own)
    after = encoder(x), decoder(x, x)
    assert all((one - other).abs().max() > 1e-2 for one, other in zip(before, after, strict=True))


def test_context_reaches_the_attention() -> None:
    block, x, collected = EncoderBlock(WIDTH, HEADS, HIDDEN), sample(), []
    torch.testing.assert_close(block(x, causal=True, collect=collected), block(x, causal=True))
    assert collected[0].triu(1).eq(0).all()
    assert (block(x) - block(x, causal=True)).abs().max() > 1e-2
