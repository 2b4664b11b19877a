"""Matching: brute force, the published matcher, and what must never be matched."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from vitdet.losses.matcher import HungarianMatcher
from vitdet.structures import SupervisedOutput, Targets


def prediction(batch: int, queries: int, classes: int) -> SupervisedOutput:
    return SupervisedOutput(torch.randn(batch, queries, classes), random_boxes(batch, queries))


def random_boxes(*shape: int) -> Tensor:
    return torch.cat([torch.rand(*shape, 2) * 0.6 + 0.2, torch.rand(*shape, 2) * 0.3 + 0.05], dim=-1)


def random_targets(counts: list[int], classes: int) -> Targets:
    return Targets.from_lists([random_boxes(n) for n in counts], [torch.randint(classes, (n,)) for n in counts])


def pairs(row: Tensor) -> list[tuple[int, int]]:
    """(query, target) of one image, by target."""
    return sorted(((q, t) for q, t in enumerate(row.tolist()) if t >= 0), key=lambda pair: pair[1])


def test_cost_by_hand() -> None:
    matcher = HungarianMatcher(class_cost=2.0, box_cost=5.0, giou_cost=3.0, alpha=0.3, gamma=1.5)
    logits = torch.tensor([[[-1.0, 0.8]]])
    boxes = torch.tensor([[[0.3, 0.5, 0.2, 0.2]]])
    targets = Targets.from_lists([torch.tensor([[0.4, 0.5, 0.2, 0.2], [0.8, 0.5, 0.2, 0.2]])], [torch.tensor([1, 0])])
    expected = []
    for logit, distance, giou in [(0.8, 0.1, 1 / 3), (-1.0, 0.5, -3 / 7)]:  # second: union 0.08, hull 0.14, IoU 0
        p = 1 / (1 + math.exp(-logit))
        class_cost = -0.3 * (1 - p) ** 1.5 * math.log(p) + 0.7 * p**1.5 * math.log(1 - p)
        expected.append(2 * class_cost + 5 * distance - 3 * giou)
    assert matcher.cost(logits, boxes, targets).flatten().tolist() == pytest.approx(expected, abs=1e-5)


def test_softmax_cost_is_minus_the_probability() -> None:
    matcher = HungarianMatcher(class_cost=3.0, box_cost=0.0, giou_cost=0.0, softmax=True)
    logits = torch.tensor([[[math.log(2.0), 0.0, math.log(5.0)]]])  # probabilities 2/8, 1/8, and 5/8 for no object
    targets = Targets.from_lists([torch.full((2, 4), 0.5)], [torch.tensor([0, 1])])
    cost = matcher.cost(logits, torch.full((1, 1, 4), 0.5), targets)
    assert cost.flatten().tolist() == pytest.approx([-0.75, -0.375], abs=1e-6)
    no_class = Targets.from_lists([torch.full((1, 4), 0.5)], [torch.tensor([2])])
    with pytest.raises(RuntimeError, match="out of bounds"):
        matcher.cost(logits, torch.full((1, 1, 4), 0.5), no_class)


@pytest.mark.parametrize("softmax", [False, True])
def test_cost_by_quality_by_hand(softmax: bool) -> None:
    """Minus the score times the IoU to its power: 1/3 for a box moved by half its width, 0 for one far away."""
    matcher = HungarianMatcher(class_cost=7.0, softmax=softmax)
    matcher.by_quality = True
    logits = torch.tensor([[[math.log(3.0), 0.0, math.log(4.0)]]])  # sigmoid 3/4, 1/2; softmax 3/8, 1/8
    boxes = torch.tensor([[[0.3, 0.5, 0.2, 0.2]]])
    places = torch.tensor([[0.4, 0.5, 0.2, 0.2], [0.3, 0.5, 0.2, 0.2], [0.8, 0.5, 0.2, 0.2]])
    targets = Targets.from_lists([places], [torch.tensor([0, 1, 0])])
    score = (3 / 8, 1 / 8) if softmax else (3 / 4, 1 / 2)
    expected = [-score[0] / 81, -score[1], 0.0]
    assert matcher.cost(logits, boxes, targets).flatten().tolist() == pytest.approx(expected, abs=1e-5)


def test_by_quality_a_better_box_beats_a_surer_one() -> None:
    """The usual cost gives the target to the sure query; IoU⁴ makes 0.6 · 1 more than 0.95 · 0.7⁴."""
    targets = Targets.from_lists([torch.tensor([[0.5, 0.5, 0.2, 0.2]])], [torch.tensor([0])])
    boxes = torch.tensor([[[0.5, 0.5, 0.14, 0.2], [0.5, 0.5, 0.2, 0.2]]])  # IoU 0.7 and 1
    output = SupervisedOutput(torch.logit(torch.tensor([[[0.95], [0.6]]])), boxes)
    matcher = HungarianMatcher(class_cost=20.0)
    assert matcher.one_to_one([output], targets)[0].tolist() == [[0, -1]]
    matcher.by_quality = True
    assert matcher.one_to_one([output], targets)[0].tolist() == [[-1, 0]]


@pytest.mark.parametrize(("queries", "count"), [(5, 3), (4, 4), (3, 5)], ids=["fewer", "equal", "more targets"])
def test_cheapest_of_all_assignments(queries: int, count: int) -> None:
    matcher, output, targets = HungarianMatcher(), prediction(2, queries, 3), random_targets([count, count], 3)
    cost = matcher.cost(output.logits, output.boxes, targets)
    [found] = matcher.one_to_one([output], targets)
    for image in range(2):
        if queries >= count:
            every = ([*zip(p, range(count), strict=True)] for p in itertools.permutations(range(queries), count))
        else:
            every = ([*zip(range(queries), p, strict=True)] for p in itertools.permutations(range(count), queries))
        best = min(every, key=lambda some: sum(cost[image, q, t].item() for q, t in some))
        assert pairs(found[image]) == sorted(best, key=lambda pair: pair[1])


def test_equal_to_the_published_matcher() -> None:
    transformers = pytest.importorskip("transformers", reason="the reference implementation is not installed")
    from transformers.loss.loss_rt_detr import RTDetrHungarianMatcher

    theirs = RTDetrHungarianMatcher(transformers.RTDetrConfig())
    counts = [7, 0, 40, 1]
    output, targets = prediction(4, 30, 6), random_targets(counts, 6)
    labels = [{"class_labels": targets.labels[i, :n], "boxes": targets.boxes[i, :n]} for i, n in enumerate(counts)]
    expected = theirs({"logits": output.logits, "pred_boxes": output.boxes}, labels)
    [found] = HungarianMatcher().one_to_one([output], targets)
    assert found.dtype == torch.int64
    for row, (query, target) in zip(found, expected, strict=True):
        assert pairs(row) == sorted(zip(query.tolist(), target.tolist(), strict=True), key=lambda pair: pair[1])
    assert (found >= 0).sum(1).tolist() == [7, 0, 30, 1]


def test_several_predictions_are_matched_each_on_its_own() -> None:
    matcher, targets = HungarianMatcher(), random_targets([2, 5], 3)
    outputs = [prediction(2, queries, 3) for queries in (8, 3, 6)]
    together = matcher.one_to_one(outputs, targets)
    assert [tuple(index.shape) for index in together] == [(2, 8), (2, 3), (2, 6)]
    for output, index in zip(outputs, together, strict=True):
        assert torch.equal(matcher.one_to_one([output], targets)[0], index)
    assert matcher.one_to_one([], targets) == []


def test_padding_is_never_matched() -> None:
    matcher, output = HungarianMatcher(), prediction(2, 9, 3)
    targets = random_targets([2, 6], 3)
    output.boxes[0, 4:] = 0.0  # exactly where the padding lies
    [one] = matcher.one_to_one([output], targets)
    many = matcher.one_to_many(output, targets, count=4)
    for found in (one, many):
        assert set(found[0].tolist()) <= {-1, 0, 1}
    assert sorted(t for t in one[1].tolist() if t >= 0) == list(range(6))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_broken_predictions_are_the_last_choice(bad: float) -> None:
    matcher, output, targets = HungarianMatcher(), prediction(1, 4, 3), random_targets([3], 3)
    output.logits[0, 1] = float("nan")
    output.boxes[0, 2] = bad
    [found] = matcher.one_to_one([output], targets)
    assert {0, 3} < {query for query, _ in pairs(found[0])}
    assert len(pairs(found[0])) == 3
    assert (matcher.one_to_many(output, targets, count=2)[0, [0, 3]] >= 0).all()


def test_without_targets() -> None:
    matcher, output = HungarianMatcher(), prediction(2, 4, 3)
    nothing = random_targets([0, 0], 3)
    padding = Targets(torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.bool))
    for targets in (nothing, padding):
        assert matcher.one_to_one([output], targets)[0].tolist() == [[-1] * 4] * 2
        assert matcher.one_to_many(output, targets, count=3).tolist() == [[-1] * 4] * 2


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_targets_are_counted_whatever_the_first_query_says(bad: float) -> None:
    """The costs tell real targets from padding; a broken prediction must not hide a target."""
    matcher, targets, outputs = HungarianMatcher(), random_targets([2, 0, 5, 1], 3), [prediction(4, 6, 3) for _ in "ab"]
    outputs[0].logits[:, 0] = bad
    outputs[0].boxes[:, 0] = bad
    for found in matcher.one_to_one(outputs, targets):
        assert [sorted(t for _, t in pairs(row)) for row in found] == [[0, 1], [], [0, 1, 2, 3, 4], [0]]


@pytest.mark.parametrize(("queries", "count"), [(20, 4), (6, 4), (3, 8)])
def test_one_to_many_by_plain_loops(queries: int, count: int) -> None:
    matcher, output, counts = HungarianMatcher(), prediction(3, queries, 2), [3, 5, 0]
    targets = random_targets(counts, 2)
    cost = matcher.cost(output.logits, output.boxes, targets).tolist()
    expected = [[-1] * queries for _ in counts]
    for image, targets_here in enumerate(counts):
        wanted: dict[int, list[int]] = {}
        for t in range(targets_here):
            for q in sorted(range(queries), key=lambda q: cost[image][q][t])[:count]:
                wanted.setdefault(q, []).append(t)
        for q, wanting in wanted.items():
            expected[image][q] = min(wanting, key=lambda t: cost[image][q][t])
    found = matcher.one_to_many(output, targets, count=count)
    assert found.tolist() == expected
    assert any(len(set(row)) > 1 for row in expected)
    for row in found.tolist():
        assert max(row.count(t) for t in range(5)) <= count
