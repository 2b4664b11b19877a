"""Blocks: equal to torch's own layers with the same weights, and composed by hand where those have no such option."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vitdet.core.attention import Attention
from vitdet.core.blocks import DecoderBlock, EncoderBlock
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
