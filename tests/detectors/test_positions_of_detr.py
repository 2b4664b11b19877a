"""Positions and masks of padded maps against the formula spelt out place by place.

To be split between tests/core/test_positions.py, test_masks.py and test_stacks.py.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from vitdet.core.attention import Attention
from vitdet.core.blocks import DecoderBlock
from vitdet.core.masks import valid_cells
from vitdet.core.positions import sinusoidal_shares
from vitdet.core.stacks import DecoderStack


def test_positions_by_hand() -> None:
    rows = torch.tensor([[True, True, False], [True, True, True]])
    columns = torch.tensor([[True, True, True, True], [True, False, False, False]])
    found = sinusoidal_shares(rows, columns, 8).unflatten(1, (3, 4))
    assert found.dtype == torch.float32
    for image, (height, width) in enumerate([(2, 4), (3, 1)]):
        for y in range(height):
            for x in range(width):
                expected = []
                for place, length in ((y, height), (x, width)):
                    angle = (place + 1) / (length + 1e-6) * 2 * math.pi
                    expected += [math.sin(angle), math.cos(angle), math.sin(angle / 100), math.cos(angle / 100)]
                assert found[image, y, x].tolist() == pytest.approx(expected, abs=1e-6)
    with pytest.raises(ValueError, match="divisible by 4"):
        sinusoidal_shares(rows, columns, 6)


@pytest.mark.parametrize(("length", "cells"), [(64, 2), (97, 4), (800, 25), (1333, 42), (203, 7)])
def test_cells_are_those_of_a_shrunken_pixel_mask(length: int, cells: int) -> None:
    lengths = torch.arange(1, length + 1)
    mask = (torch.arange(length) < lengths[:, None])[:, None, None].expand(-1, 1, 5, -1).float()
    expected = nn.functional.interpolate(mask, size=(2, cells))[:, 0, 0].bool()
    assert torch.equal(valid_cells(lengths, length, cells), expected)
    assert valid_cells(lengths, length, cells).any(-1).all()  # every image has a cell


def test_taps_of_a_decoder() -> None:
    def block() -> DecoderBlock:
        return DecoderBlock(16, 2, 24, cross_attention=Attention(16, 2))

    stack = DecoderStack((block() for _ in range(3)), norm=nn.LayerNorm(16))
    tokens, memory, pos = torch.randn(2, 5, 16), torch.randn(2, 7, 16), torch.randn(1, 5, 16)
    mask = torch.rand(2, 1, 1, 7) > 0.3
    mask[..., 0] = True
    context = {"memory_pos": torch.randn(2, 7, 16), "mask": mask}
    first, last = stack.taps(tokens, memory, [0, -1], context=context, query_pos=pos)
    torch.testing.assert_close(last, stack(tokens, memory, context=context, query_pos=pos))
    one = stack.norm(stack.layers[0](tokens, memory, context=context, query_pos=pos))
    torch.testing.assert_close(first, one)
