"""Windowed attention is dense attention in which each token sees its window only."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from vitdet.core.attention import Attention
from vitdet.core.windows import (
    ContinuousBias,
    TableBias,
    WindowAttention,
    fit_window,
    log_offsets,
    merge_windows,
    partition_windows,
    relative_index,
    shifted_window_mask,
)

WIDTH, HEADS = 8, 2


def window_attention(version: int, window: tuple[int, int], *, shifted: bool) -> WindowAttention:
    """One of either version; no parameter is left at a value that would hide it."""
    attention = Attention(WIDTH, HEADS, qk_norm="cosine" if version == 2 else None, key_bias=version == 1)
    bias = TableBias(window, HEADS) if version == 1 else ContinuousBias(window, HEADS, hidden=16)
    module = WindowAttention(attention, position_bias=bias, window=window, shifted=shifted)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return module.double()


def bias_of_offset(bias: nn.Module, down: int, right: int) -> Tensor:
    """(H,): straight from the papers' definitions, for one offset."""
    if isinstance(bias, TableBias):
        height, width = bias.window
        return bias.table[(down + height - 1) * (2 * width - 1) + right + width - 1]
    assert isinstance(bias, ContinuousBias)
    scaled = [8 * d / (side - 1) for d, side in zip((down, right), bias.reference, strict=True)]
    logs = torch.tensor([math.copysign(math.log2(abs(d) + 1) / 3, d) for d in scaled], dtype=torch.float64)
    return 16 * bias.mlp(logs).sigmoid()


def dense(module: WindowAttention, tokens: Tensor, grid: tuple[int, int]) -> Tensor:
    """The same attention over all tokens at once, under a mask and a bias written out pair by pair."""
    window = [min(side, whole) for side, whole in zip(module.window, grid, strict=True)]
    shift = [w // 2 if module.shifted and w < g else 0 for w, g in zip(module.window, grid, strict=True)]
    height, width = (math.ceil(g / w) * w for g, w in zip(grid, window, strict=True))
    padded = tokens.new_zeros(tokens.shape[0], height, width, WIDTH)
    padded[:, : grid[0], : grid[1]] = tokens.unflatten(1, grid)

    # A token belongs to the window that its place, moved up and left by the shift, falls in; what falls off the map
    # there is at the other side of the edge and a window of its own (index -1).
    home = [((y - shift[0]) // window[0], (x - shift[1]) // window[1]) for y in range(height) for x in range(width)]
    places = [(y, x) for y in range(height) for x in range(width)]
    mask = torch.tensor([[a == b for b in home] for a in home])
    bias = torch.zeros(HEADS, len(places), len(places), dtype=torch.float64)
    rows = []
    for i, (y, x) in enumerate(places):
        zero = torch.zeros(HEADS, dtype=torch.float64)
        row = [
            bias_of_offset(module.position_bias, y - v, x - u) if mask[i, j] else zero
            for j, (v, u) in enumerate(places)
        ]
        rows.append(torch.stack(row, dim=1))  # (H, M)
    bias = torch.stack(rows, dim=1)  # (H, N, M)
    mixed = module.attention(padded.flatten(1, 2), mask=mask, bias=bias)
    return mixed.unflatten(1, (height, width))[:, : grid[0], : grid[1]].flatten(1, 2)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize(
    "grid",
    [
        pytest.param((6, 8), id="divisible"),
        pytest.param((5, 7), id="padded"),
        pytest.param((2, 8), id="window cut in height"),
        pytest.param((2, 3), id="one window"),
    ],
)
def test_windows_equal_dense_attention(version: int, shifted: bool, grid: tuple[int, int]) -> None:
    torch.manual_seed(0)
    module = window_attention(version, (3, 4), shifted=shifted)
    tokens = torch.randn(2, grid[0] * grid[1], WIDTH, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, grid[0] * grid[1], WIDTH, dtype=torch.float64)
    inputs = [tokens, *module.parameters()]

    ours, reference = module(tokens, grid=grid), dense(module, tokens, grid)
    torch.testing.assert_close(ours, reference)
    for mine, theirs in zip(
        torch.autograd.grad((ours * weight).sum(), inputs),
        torch.autograd.grad((reference * weight).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


def test_a_window_is_a_rectangle_of_the_map() -> None:
    maps = torch.arange(24).view(1, 4, 6, 1)
    windows = partition_windows(maps, (2, 3))
    assert windows[..., 0].tolist() == [
        [0, 1, 2, 6, 7, 8],
        [3, 4, 5, 9, 10, 11],
        [12, 13, 14, 18, 19, 20],
        [15, 16, 17, 21, 22, 23],
    ]


def test_merging_undoes_partitioning() -> None:
    maps = torch.randn(3, 6, 8, 5)
    assert torch.equal(merge_windows(partition_windows(maps, (3, 2)), (3, 2), (6, 8)), maps)


@pytest.mark.parametrize(
    ("grid", "shifted", "window", "shift"),
    [
        ((14, 14), False, (7, 7), (0, 0)),
        ((14, 14), True, (7, 7), (3, 3)),
        ((7, 14), True, (7, 7), (0, 3)),  # one window spans the height: nothing to shift there
        ((4, 5), True, (4, 5), (0, 0)),
    ],
)
def test_window_fits_the_map(
    grid: tuple[int, int], shifted: bool, window: tuple[int, int], shift: tuple[int, int]
) -> None:
    assert fit_window((7, 7), grid, shifted=shifted) == (window, shift)


def test_shifted_mask_parts_the_edges_only() -> None:
    mask = shifted_window_mask((4, 6), (2, 2), (1, 1))  # 2×3 windows of 4 tokens
    assert mask.shape == (6, 4, 4)
    assert mask[0].all()
    assert mask[1].all()
    # At the right edge the left and the right column part, at the lower edge the rows, in the corner all four.
    assert mask[2].tolist() == [[(i % 2) == (j % 2) for j in range(4)] for i in range(4)]
    assert mask[3].tolist() == [[(i // 2) == (j // 2) for j in range(4)] for i in range(4)]
    assert torch.equal(mask[5], torch.eye(4, dtype=torch.bool))


def test_shifting_lets_neighbouring_windows_see_each_other() -> None:
    tokens = torch.randn(1, 64, WIDTH, dtype=torch.float64, requires_grad=True)
    seen = {}
    for shifted in (False, True):
        out = window_attention(1, (4, 4), shifted=shifted)(tokens, grid=(8, 8))
        (gradient,) = torch.autograd.grad(out[0, 3 * 8 + 3].sum(), tokens)
        seen[shifted] = {divmod(i, 8) for i in gradient[0].abs().sum(-1).nonzero()[:, 0].tolist()}
    assert seen[False] == {(y, x) for y in range(4) for x in range(4)}
    assert seen[True] == {(y, x) for y in range(2, 6) for x in range(2, 6)}


def test_collected_weights_are_of_the_windows_and_stay_in_them() -> None:
    module = window_attention(1, (2, 2), shifted=True)
    tokens = torch.randn(2, 16, WIDTH, dtype=torch.float64)
    weights: list[Tensor] = []
    collected = module(tokens, grid=(4, 4), collect=weights)
    torch.testing.assert_close(collected, module(tokens, grid=(4, 4)))
    (weight,) = weights
    assert weight.shape == (2 * 4, HEADS, 4, 4)
    torch.testing.assert_close(weight.sum(-1), torch.ones(8, HEADS, 4, dtype=torch.float64))
    corner = weight.unflatten(0, (2, 4))[:, 3]  # all four of its tokens come from different corners of the map
    torch.testing.assert_close(corner, torch.eye(4, dtype=torch.float64).expand_as(corner))


def test_table_bias_depends_on_the_offset_only() -> None:
    bias = TableBias((3, 4), HEADS)((3, 4))[0].unflatten(1, (3, 4)).unflatten(3, (3, 4))  # (H, y, x, v, u)
    assert torch.equal(bias[:, :2, :3, :2, :3], bias[:, 1:, 1:, 1:, 1:])
    assert not torch.equal(bias[:, 0, 0, 1, 1], bias[:, 1, 1, 0, 0])  # and on its direction


def test_a_smaller_window_finds_its_offsets_in_a_larger_ones_table() -> None:
    whole = relative_index((3, 4), (3, 4)).view(3, 4, 3, 4)
    assert torch.equal(relative_index((2, 3), (3, 4)).view(2, 3, 2, 3), whole[:2, :3, :2, :3])


def test_log_offsets_are_those_of_the_paper() -> None:
    offsets = log_offsets((8, 8), (8, 8)).view(15, 15, 2)
    assert offsets[7, 7].tolist() == [0, 0]
    torch.testing.assert_close(offsets[14, 7, 0], torch.tensor(math.log2(9) / 3).double())
    torch.testing.assert_close(offsets[0, 10], torch.tensor([-math.log2(9) / 3, math.log2(1 + 8 * 3 / 7) / 3]).double())
    torch.testing.assert_close(offsets, -offsets.flip(0, 1))


def test_enlarged_windows_keep_the_bias_of_the_offsets_they_knew() -> None:
    bias = ContinuousBias((4, 4), HEADS, hidden=16)
    small = bias((4, 4)).unflatten(2, (4, 4)).unflatten(4, (4, 4))
    large = bias((6, 6)).unflatten(2, (6, 6)).unflatten(4, (6, 6))
    torch.testing.assert_close(large[:, :, :4, :4, :4, :4], small)
    assert large.min() > 0
    assert large.max() < 16


def test_window_of_one_token_has_no_offsets() -> None:
    assert log_offsets((1, 1), (1, 1)).tolist() == [[0, 0]]


def test_no_window() -> None:
    with pytest.raises(ValueError, match=r"at least 1 token, got \(height, width\) \(0, 4\)"):
        WindowAttention(nn.Identity(), position_bias=nn.Identity(), window=(0, 4), shifted=False)


def test_tables_made_without_autograd_do_not_stay() -> None:
    module = window_attention(1, (2, 2), shifted=True)
    tokens = torch.randn(1, 16, WIDTH, dtype=torch.float64)
    with torch.inference_mode():
        module(tokens, grid=(4, 4))
    module(tokens, grid=(4, 4)).sum().backward()  # an inference tensor among what is saved would be refused
    assert module.position_bias.table.grad.abs().sum() > 0
