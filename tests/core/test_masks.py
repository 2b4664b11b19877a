"""Masks, written out."""

from __future__ import annotations

import torch

from vitdet.core.masks import causal_mask, group_mask


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
