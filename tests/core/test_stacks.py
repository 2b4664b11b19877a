"""Stacks: blocks one after another, and what holds for a whole encoder or decoder."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vitdet.core.attention import Attention
from vitdet.core.blocks import DecoderBlock, EncoderBlock
from vitdet.core.cache import KeyValueCache
from vitdet.core.masks import padding_mask
from vitdet.core.positions import alibi_bias, rotary_1d, sinusoidal_1d
from vitdet.core.stacks import DecoderStack, EncoderStack, drop_path_rates

WIDTH, HEADS, HIDDEN, LAYERS = 16, 4, 24, 3
DOUBLE = torch.float64


def encoder(layers: int = LAYERS, **options: Any) -> EncoderStack:
    stack = EncoderStack(
        (EncoderBlock(WIDTH, HEADS, HIDDEN, **options) for _ in range(layers)), norm=nn.LayerNorm(WIDTH)
    )
    return lively(stack)


def decoder() -> DecoderStack:
    blocks = (DecoderBlock(WIDTH, HEADS, HIDDEN, cross_attention=Attention(WIDTH, HEADS)) for _ in range(LAYERS))
    return lively(DecoderStack(blocks, norm=nn.LayerNorm(WIDTH)))


def lively(module: nn.Module) -> Any:
    for name, parameter in module.named_parameters():
        nn.init.normal_(parameter, mean=float("norm.weight" in name), std=0.3)
    return module.to(DOUBLE)


def tokens(count: int = 6) -> Tensor:
    return torch.randn(2, count, WIDTH, dtype=DOUBLE)


def test_blocks_then_norm() -> None:
    stack, x = encoder(), tokens()
    expected = x
    for block in stack.layers:
        expected = block(expected)
    torch.testing.assert_close(stack(x), stack.norm(expected), rtol=0, atol=0)
    bare = EncoderStack(stack.layers)
    torch.testing.assert_close(bare(x), expected, rtol=0, atol=0)


def test_taps_are_the_outputs_of_shorter_stacks() -> None:
    stack, x, mask = encoder(placement="pre"), tokens(), torch.rand(6, 6) < 0.8
    mask.fill_diagonal_(True)
    found = stack.taps(x, [-1, 0], mask=mask)
    expected = [EncoderStack(stack.layers[:n], norm=stack.norm)(x, mask=mask) for n in (3, 1)]
    for mine, other in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0)
    ran: list[int] = []
    for index, block in enumerate(stack.layers):
        block.register_forward_hook(lambda *_, index=index: ran.append(index))
    stack.taps(x, [0, 1])
    assert ran == [0, 1]  # nothing after the last one asked for
    with pytest.raises(IndexError):
        stack.taps(x, [3])


def test_drop_path_grows_with_the_layers() -> None:
    assert drop_path_rates(0.3, 4) == pytest.approx([0, 0.1, 0.2, 0.3])
    assert drop_path_rates(0.3, 1) == [0]
    with torch.device("meta"):  # where models are built before their weights come
        assert drop_path_rates(0.2, 3) == pytest.approx([0, 0.1, 0.2])


ORDER = torch.tensor([3, 0, 5, 1, 4, 2])


@pytest.mark.parametrize("placement", ["post", "pre", "peri", "res_post"])
def test_without_positions_order_means_nothing(placement: str) -> None:
    stack, x = encoder(placement=placement), tokens()
    torch.testing.assert_close(stack(x[:, ORDER]), stack(x)[:, ORDER], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    "context",
    [
        {"query_pos": sinusoidal_1d(6, WIDTH).to(DOUBLE)},
        {"rotary": rotary_1d(6, WIDTH // HEADS)},
        {"bias": alibi_bias(HEADS, 6, 6)},
        {"window": 2},
        {"causal": True},
    ],
    ids=lambda context: next(iter(context)),
)
def test_with_positions_it_does(context: dict[str, Any]) -> None:
    stack, x = encoder(), tokens()
    change = stack(x[:, ORDER], **context) - stack(x, **context)[:, ORDER]
    assert change.abs().amax(-1).min() > 1e-3


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_the_view_of_a_window_grows_by_layers(layers: int) -> None:
    """With windows of w tokens, the causal stack sees layers · (w - 1) tokens back, and not one more."""
    stack, x, window = encoder(layers), tokens(12).requires_grad_(), 3
    (gradient,) = torch.autograd.grad(stack(x, causal=True, window=window)[0, 10].square().sum(), x)
    seen = gradient[0].abs().amax(-1) > 0
    assert seen.nonzero().flatten().tolist() == list(range(10 - layers * (window - 1), 11))
    (gradient,) = torch.autograd.grad(stack(x, window=window)[0, 6].square().sum(), x)  # to both sides
    reach = range(max(0, 6 - layers * (window - 1)), min(12, 6 + layers * (window - 1) + 1))
    assert (gradient[0].abs().amax(-1) > 0).nonzero().flatten().tolist() == list(reach)


def test_padding_changes_nothing() -> None:
    stack, x = encoder(), tokens(7)
    padded = stack(x, mask=padding_mask(torch.arange(7) < torch.tensor([[4], [7]])))
    torch.testing.assert_close(padded[:1, :4], stack(x[:1, :4]), rtol=0, atol=1e-10)
    torch.testing.assert_close(padded[1:], stack(x[1:]), rtol=0, atol=1e-10)
    assert (stack(x)[:1, :4] - padded[:1, :4]).abs().max() > 1e-3


def test_padding_of_a_memory_changes_nothing() -> None:
    stack, x, memory = decoder(), tokens(3), tokens(7)
    found = stack(x, memory, context={"mask": padding_mask(torch.arange(7) < torch.tensor([[4], [7]]))})
    torch.testing.assert_close(found[:1], stack(x[:1], memory[:1, :4]), rtol=0, atol=1e-10)
    torch.testing.assert_close(found[1:], stack(x[1:], memory[1:]), rtol=0, atol=1e-10)


def test_causal_stacks_ignore_the_future() -> None:
    x, memory = tokens(), tokens(4)
    changed = x.clone()
    changed[:, 3:] = tokens()[:, 3:]
    for stack, rest in ((encoder(), ()), (decoder(), (memory,))):
        before, after = stack(x, *rest, causal=True), stack(changed, *rest, causal=True)
        torch.testing.assert_close(after[:, :3], before[:, :3], rtol=0, atol=1e-10)
        assert (after[:, 3:] - before[:, 3:]).abs().amax(-1).min() > 1e-3


@torch.no_grad()
def test_cached_stacks_equal_uncached() -> None:
    x, memory, mask = tokens(), tokens(4), padding_mask(torch.arange(4) < torch.tensor([[3], [4]]))
    own, stack = [KeyValueCache() for _ in range(LAYERS)], encoder()
    pieces = [stack(x[:, i : i + 1], caches=own, causal=True) for i in range(6)]
    torch.testing.assert_close(torch.cat(pieces, 1), stack(x, causal=True), rtol=0, atol=1e-10)

    pairs, stack = [(KeyValueCache(), KeyValueCache()) for _ in range(LAYERS)], decoder()
    context = {"mask": mask}
    pieces = [stack(x[:, i : i + 2], memory, context=context, caches=pairs, causal=True) for i in (0, 2, 4)]
    expected = stack(x, memory, context=context, causal=True)
    torch.testing.assert_close(torch.cat(pieces, 1), expected, rtol=0, atol=1e-10)


def test_decoder_ends_in_its_norm() -> None:
    stack, x, memory = decoder(), tokens(), tokens(4)
    expected = x
    for block in stack.layers:
        expected = block(expected, memory, causal=True)
    torch.testing.assert_close(stack(x, memory, causal=True), stack.norm(expected), rtol=0, atol=0)
    assert isinstance(DecoderStack(stack.layers).norm, nn.Identity)


@torch.no_grad()
def test_taps_of_a_decoder() -> None:
    stack, x, memory, pos = decoder(), tokens(5), tokens(4), tokens(5)
    mask = padding_mask(torch.arange(4) < torch.tensor([[3], [4]]))
    context = {"memory_pos": tokens(4), "mask": mask}
    last, first = stack.taps(x, memory, [-1, 0], context=context, query_pos=pos)
    assert torch.equal(last, stack(x, memory, context=context, query_pos=pos))
    assert torch.equal(first, stack.norm(stack.layers[0](x, memory, context=context, query_pos=pos)))
