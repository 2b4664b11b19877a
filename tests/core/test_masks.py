"""Masks, written out."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from vitdet.core.masks import causal_mask, group_mask, padding_mask, sliding_window_mask, valid_cells


def test_causal() -> None:
    assert causal_mask(3, 3).int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert causal_mask(2, 4).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert causal_mask(1, 3).all()


def test_groups() -> None:
    groups = torch.tensor([0, 0, 1, 2, 2])
    assert group_mask(groups, shared_group=2).int().tolist() == [
        [1, 1, 0, 1, 1],
        [1, 1, 0, 1, 1],
        [0, 0, 1, 1, 1],
        [0, 0, 0, 1, 1],
        [0, 0, 0, 1, 1],
    ]
    assert torch.equal(group_mask(groups, shared_group=9), groups[:, None] == groups)


def test_sliding_window() -> None:
    band = [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]
    assert sliding_window_mask(4, 4, 2).int().tolist() == band
    assert sliding_window_mask(2, 4, 2).int().tolist() == band[2:]  # the last queries of four
    assert (sliding_window_mask(4, 4, 2) & causal_mask(4, 4)).sum(1).tolist() == [1, 2, 2, 2]  # itself and one before
    assert torch.equal(sliding_window_mask(3, 3, 1), torch.eye(3, dtype=torch.bool))
    assert sliding_window_mask(3, 3, 3).all()
    with pytest.raises(ValueError, match="a sliding window needs at least 1 token, got 0"):
        sliding_window_mask(3, 3, 0)


def test_padding() -> None:
    found = padding_mask(torch.arange(3) < torch.tensor([[2], [0], [3]]))
    assert found.shape == (3, 1, 1, 3)
    assert found.flatten(1).int().tolist() == [[1, 1, 0], [0, 0, 0], [1, 1, 1]]


@pytest.mark.parametrize(("length", "cells"), [(64, 2), (97, 4), (800, 25), (1333, 42), (203, 7)])
def test_cells_are_those_of_a_shrunken_pixel_mask(length: int, cells: int) -> None:
    lengths = torch.arange(1, length + 1)
    mask = (torch.arange(length) < lengths[:, None])[:, None, None].expand(-1, 1, 5, -1).float()
    expected = F.interpolate(mask, size=(2, cells))[:, 0, 0].bool()
    assert torch.equal(valid_cells(lengths, length, cells), expected)
    assert valid_cells(lengths, length, cells).any(-1).all()  # every image has a cell
