"""Denoising queries: how many, whose, how far from the truth, and who may see them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from vitdet.boxes import cxcywh_to_xyxy, iou_and_giou
from vitdet.detectors.denoising import Denoising
from vitdet.structures import Targets


def make_targets(*counts: int, classes: int = 3) -> Targets:
    boxes = [torch.cat([torch.rand(n, 2) * 0.4 + 0.3, torch.rand(n, 2) * 0.2 + 0.1], dim=-1) for n in counts]
    return Targets.from_lists(boxes, [torch.randint(classes, (n,)) for n in counts])


@pytest.mark.parametrize(
    ("counts", "groups", "queries"),
    [((7, 3), 14, 196), ((1, 0), 100, 200), ((0, 0), 100, 200), ((60, 2), 1, 120), ((300, 1), 1, 600)],
)
def test_number_of_groups(counts: tuple[int, int], groups: int, queries: int) -> None:
    found = Denoising(8, num_classes=3, queries=100)(make_targets(*counts))
    assert found.groups == groups
    assert found.tokens.shape == (2, queries, 8)
    assert found.box_logits.shape == (2, queries, 4)
    assert found.box_logits.isfinite().all()
    assert found.target_index.shape == (2, queries)
    # In each group one positive query for each target.
    assert (found.target_index >= 0).sum(1).tolist() == [groups * n for n in counts]


def test_whose_query_it_is() -> None:
    found = Denoising(8, num_classes=3, queries=4)(make_targets(2, 1, 0))
    assert found.groups == 2  # positives of group 0, negatives of group 0, positives of group 1, negatives of group 1
    assert found.target_index.tolist() == [
        [0, 1, -1, -1, 0, 1, -1, -1],
        [0, -1, -1, -1, 0, -1, -1, -1],
        [-1] * 8,
    ]


def test_who_may_see_whom() -> None:
    found = Denoising(8, num_classes=3, queries=4)(make_targets(2, 1))
    mask = found.attention_mask(3)
    group = [0] * 4 + [1] * 4 + ["object"] * 3
    expected = [[mine == other or other == "object" for other in group] for mine in group]
    assert mask.tolist() == expected
    empty = Denoising(8, num_classes=3)(make_targets(0)).attention_mask(3)
    assert empty[-3:].int().tolist() == [[0] * 200 + [1] * 3] * 3


def test_without_noise_it_is_the_truth() -> None:
    module, targets = Denoising(8, num_classes=3, queries=6, label_noise=0.0, box_noise=0.0), make_targets(3, 1)
    found = module(targets)
    for copy in range(4):
        part = slice(3 * copy, 3 * copy + 3)
        torch.testing.assert_close(found.box_logits[0, part].sigmoid(), targets.boxes[0], rtol=0, atol=1e-6)
        assert torch.equal(found.tokens[0, part], module.embedding(targets.labels[0]))
        assert torch.equal(found.tokens[1, part.start], module.embedding(targets.labels[1, 0]))
        # Padding is the embedding beyond the classes, which is 0 and stays so.
        assert found.tokens[1, part.start + 1 : part.stop].abs().max() == 0
    found.tokens.sum().backward()
    assert module.embedding.weight.grad[3].abs().max() == 0


@pytest.mark.parametrize(("noise", "classes"), [(0.5, 10), (1.0, 2), (0.5, 1)])
def test_share_of_changed_labels(noise: float, classes: int) -> None:
    """Half the noise is the probability of another draw, which gives the old label once in K."""
    module = Denoising(8, num_classes=classes, queries=20_000, label_noise=noise)
    targets = make_targets(4, classes=classes)
    found = module(targets)
    distance = torch.cdist(found.tokens[0], module.embedding.weight[:classes])
    labels = distance.argmin(-1)
    assert torch.equal(labels.unique(), torch.arange(classes))
    changed = (labels.view(-1, 4) != targets.labels[0]).float().mean().item()
    assert changed == pytest.approx(noise / 2 * (classes - 1) / classes, abs=0.01)


def moves(found: Tensor, truth: Tensor) -> Tensor:
    """Of each corner coordinate, in halves of the box's size."""
    return (cxcywh_to_xyxy(found) - cxcywh_to_xyxy(truth)) / truth[..., 2:].repeat(1, 2) * 2


def test_positives_move_little_and_negatives_further() -> None:
    noise = 0.4  # small enough for boxes to stay in the image, and for no corner to pass the other
    targets = make_targets(2)
    found = Denoising(8, num_classes=3, queries=2000, box_noise=noise)(targets)
    truth = targets.boxes[0].tile(2000, 1)
    moved = moves(found.box_logits[0].sigmoid(), truth) / noise
    positive = found.target_index[0] >= 0
    assert positive.view(-1, 4)[0].tolist() == [True, True, False, False]
    for chosen, low in [(positive, 0.0), (~positive, 1.0)]:
        amount = moved[chosen].abs()
        assert low - 1e-3 < amount.min() < low + 0.05
        assert low + 0.95 < amount.max() < low + 1 + 1e-3
        assert amount.mean(0).tolist() == pytest.approx([low + 0.5] * 4, abs=0.03)
        assert (moved[chosen] > 0).float().mean(0).tolist() == pytest.approx([0.5] * 4, abs=0.05)


@pytest.mark.parametrize("box_noise", [0.5, 1.0])
def test_positives_still_overlap_their_target(box_noise: float, random_boxes: Callable[..., Tensor]) -> None:
    boxes = random_boxes(5)
    boxes[0] = torch.tensor([0.05, 0.95, 0.1, 0.1])  # touches two borders
    targets = Targets.from_lists([boxes], [torch.zeros(5, dtype=torch.int64)])
    found = Denoising(8, num_classes=1, queries=2000, box_noise=box_noise)(targets)
    chosen = found.target_index[0] >= 0
    corners = cxcywh_to_xyxy(found.box_logits[0].sigmoid())
    truth = cxcywh_to_xyxy(boxes[found.target_index[0, chosen]])
    iou, _ = iou_and_giou(corners[chosen], truth)
    # Each side shrinks or grows by up to half of it: at the most the corners meet in the centre.
    assert iou.min() > (0.25 if box_noise == 0.5 else 0) - 1e-6
    assert iou.min() < 0.5
    assert iou.max() > 0.9
    assert corners.min() > -1e-4
    assert corners.max() < 1 + 1e-4


def test_noise_is_drawn_anew() -> None:
    module, targets = Denoising(8, num_classes=3), make_targets(4)
    first, second = module(targets), module(targets)
    assert not torch.equal(first.box_logits, second.box_logits)
    assert not torch.equal(first.tokens, second.tokens)
    assert torch.equal(first.target_index, second.target_index)
