"""D-FINE's losses: equal to the published ones, their limits, and the union of matches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from vitdet.boxes import cxcywh_to_xyxy
from vitdet.losses.criterion import Criterion, unite
from vitdet.losses.distribution import (
    decoupled_mean,
    distillation_loss,
    edge_targets,
    fine_grained_loss,
    matched_share,
)
from vitdet.losses.matcher import HungarianMatcher
from vitdet.structures import DetectorOutput, EdgeDistributions, SupervisedOutput, Targets

CLASSES, COUNT = 5, 32


def some_bins(scale: float = 4.0) -> Tensor:
    """Rising and symmetric, as D-FINE's."""
    right = torch.tensor([(0.5 * scale + 1) ** (i / 15) - 1 for i in range(1, 16)])
    return torch.cat([torch.tensor([-scale]), -right.flip(0), torch.zeros(1), right, torch.tensor([scale])])


def random_boxes(*shape: int) -> Tensor:
    return torch.cat([torch.rand(*shape, 2) * 0.6 + 0.2, torch.rand(*shape, 2) * 0.3 + 0.05], dim=-1)


def random_edges(batch: int, queries: int, *, taught: bool = True) -> EdgeDistributions:
    logits = torch.randn(batch, queries, 4, COUNT + 1, requires_grad=True)
    reference, bins, scale = random_boxes(batch, queries), some_bins(), torch.tensor([4.0])
    if not taught:
        return EdgeDistributions(logits, reference, bins, scale)
    teacher, confidence = torch.randn(batch, queries, 4, COUNT + 1), torch.rand(batch, queries)
    return EdgeDistributions(logits, reference, bins, scale, teacher, confidence)


def prediction(batch: int = 2, queries: int = 8, edges: EdgeDistributions | None = None) -> SupervisedOutput:
    logits = torch.randn(batch, queries, CLASSES, requires_grad=True)
    return SupervisedOutput(logits, random_boxes(batch, queries).requires_grad_(), edges=edges)


def random_targets(*counts: int) -> Targets:
    return Targets.from_lists([random_boxes(n) for n in counts], [torch.randint(CLASSES, (n,)) for n in counts])


def criterion(**options) -> Criterion:
    return Criterion(matcher=HungarianMatcher(), **options)


@pytest.mark.parametrize("spread", [1.0, 30.0], ids=["within the bins", "partly beyond"])
def test_targets_and_loss_are_the_published_ones(spread: float) -> None:
    transformers = pytest.importorskip("transformers", reason="the reference implementation is not installed")
    from transformers.loss.loss_d_fine import DFineLoss, bbox2distance

    edges = random_edges(2, 6)
    boxes = edges.reference.clone()
    boxes[..., :2] += 0.1 * spread * boxes[..., 2:]
    boxes[..., 2:] *= 1.1
    flat = edges.reference.flatten(0, 1)
    up = torch.tensor([0.5])
    label, right, left = bbox2distance(flat, cxcywh_to_xyxy(boxes).flatten(0, 1), COUNT, 4.0, up)
    lower, share = edge_targets(edges, boxes)
    assert torch.equal(lower.flatten(), label.long())
    torch.testing.assert_close(share.flatten(), right, rtol=0, atol=1e-4)
    torch.testing.assert_close(1 - share.flatten(), left, rtol=0, atol=1e-4)
    assert bool((lower == 0).any() or (lower == COUNT - 1).any()) == (spread > 1)
    theirs = DFineLoss(transformers.DFineConfig(num_labels=CLASSES))
    expected = theirs.unimodal_distribution_focal_loss(edges.logits.flatten(0, 2), label, right, left)
    torch.testing.assert_close(fine_grained_loss(edges.logits, lower, share).sum(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("counts", "denoising"),
    [((3, 1), False), ((0, 12), False), ((0, 0), False), ((3, 1), True), ((0, 0), True)],
    ids=["few", "more than queries", "none", "few given", "none given"],
)
def test_all_terms_are_the_published_ones(counts: tuple[int, int], denoising: bool) -> None:
    """Without the union, which the reference lacks."""
    transformers = pytest.importorskip("transformers", reason="the reference implementation is not installed")
    from transformers.loss.loss_d_fine import DFineLoss

    theirs = DFineLoss(transformers.DFineConfig(num_labels=CLASSES))
    final, first, targets = prediction(), prediction(edges=random_edges(2, 8)), random_targets(*counts)
    labels = [{"class_labels": targets.labels[i, :n], "boxes": targets.boxes[i, :n]} for i, n in enumerate(counts)]
    plain = {"logits": final.logits, "pred_boxes": final.boxes}
    # Confidences are maxima of teacher scores.
    teacher_logits = torch.full((2, 8, CLASSES), -9.0)
    teacher_logits[..., 1] = torch.logit(first.edges.confidence.clamp(0.01, 0.99))
    first.edges.confidence = teacher_logits.sigmoid().amax(-1)
    auxiliary = {
        "logits": first.logits, "pred_boxes": first.boxes, "pred_corners": first.edges.logits.flatten(2),
        "ref_points": first.edges.reference, "teacher_corners": first.edges.teacher.flatten(2),
        "teacher_logits": teacher_logits,
    }  # fmt: skip
    if denoising:
        index = torch.full((2, 8), -1)
        for image, count in enumerate(counts):
            index[image, :count] = torch.arange(count)
        first.matching, first.target_index = "given", index
        places = [(index[image] >= 0).nonzero().flatten() for image in range(2)]
        meta = {"dn_positive_idx": places, "dn_num_group": 1}
        given = {"dn_auxiliary_outputs": [auxiliary], "denoising_meta_values": meta}
        expected, suffix = theirs(plain | given, labels), "_dn_0"
    else:
        expected, suffix = theirs(plain | {"auxiliary_outputs": [auxiliary]}, labels), "_aux_0"
    found = criterion()(DetectorOutput(final.logits, final.boxes, {"final": final, "first": first}), targets)
    names = {"vfl": "loss_vfl", "box": "loss_bbox", "giou": "loss_giou", "fgl": "loss_fgl", "ddf": "loss_ddf"}
    assert {f"first/{term}" for term in names} < set(found)
    for term, other in names.items():
        reference = torch.as_tensor(expected[other + suffix])
        torch.testing.assert_close(found[f"first/{term}"], reference, rtol=1e-4, atol=1e-4, msg=term)
    leaves = [first.logits, first.boxes, first.edges.logits]
    mine = torch.autograd.grad(found["total"], leaves)
    other_gradients = torch.autograd.grad(sum(expected.values()), leaves)
    for one, two in zip(mine, other_gradients, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-5)


def test_loss_is_least_where_the_expectation_is_the_target() -> None:
    edges, boxes = random_edges(1, 3), random_boxes(1, 3)
    lower, share = edge_targets(edges, boxes)
    logits = torch.full((1, 3, 4, COUNT + 1), -30.0)
    logits.scatter_(-1, lower[..., None], (1 - share).clamp(min=1e-9).log()[..., None])
    logits.scatter_(-1, lower[..., None] + 1, share.clamp(min=1e-9).log()[..., None])
    best = fine_grained_loss(logits, lower, share)
    for _ in range(5):
        assert (fine_grained_loss(logits + torch.randn_like(logits), lower, share) >= best - 1e-5).all()
    distance = logits.softmax(-1) @ edges.bins
    low, high = cxcywh_to_xyxy(boxes).split(2, -1)
    centre, size = edges.reference.split(2, -1)
    expected = torch.cat([centre - low, high - centre], -1) / size.repeat(1, 1, 2) * 4 - 2
    inside = expected.abs() < 4
    torch.testing.assert_close(distance[inside], expected[inside], rtol=1e-3, atol=1e-3)


def test_distillation_vanishes_at_the_teacher_and_teaches_only_the_pupil() -> None:
    logits, teacher = (torch.randn(1, 2, 4, 7, requires_grad=True) for _ in range(2))
    assert distillation_loss(logits, logits.detach()).abs().max() < 1e-5
    loss = distillation_loss(logits, teacher)
    assert loss.min() > 0
    loss.sum().backward()
    assert logits.grad is not None
    assert teacher.grad is None


def test_decoupled_mean_by_hand() -> None:
    values = torch.tensor([1.0, 2.0, 4.0, 6.0]).view(1, 4, 1).expand(1, 4, 4)
    positive = torch.tensor([[True, False, False, False]])
    share = matched_share(positive)
    assert share.item() == pytest.approx(1 / (1 + 3**0.5))
    expected = share * 1.0 + (1 - share) * 4.0
    torch.testing.assert_close(decoupled_mean(values, positive, share), expected)
    nobody = torch.zeros(1, 4, dtype=torch.bool)
    assert matched_share(nobody) == 0
    assert decoupled_mean(values, nobody, matched_share(nobody)) == pytest.approx(13 / 4)


def test_union_takes_the_most_frequent_target() -> None:
    outputs = {name: prediction(1, 4) for name in "abc"} | {"known": prediction(1, 6)}
    outputs["known"].matching = "given"
    assigned = {
        "a": torch.tensor([[0, -1, 1, -1]]), "b": torch.tensor([[0, -1, 0, -1]]), "c": torch.tensor([[1, 1, 0, -1]]),
        "known": torch.zeros(1, 6, dtype=torch.int64),
    }  # fmt: skip
    assert unite(outputs, assigned, random_targets(2)).tolist() == [[0, 1, 0, -1]]
    nothing = {name: torch.full((1, 4), -1) for name in "abc"}
    assert unite({name: outputs[name] for name in "abc"}, nothing, random_targets(0)).tolist() == [[-1] * 4]


def test_boxes_learn_from_the_union_and_classes_from_their_own_matches() -> None:
    torch.manual_seed(3)
    first, second, targets = prediction(edges=random_edges(2, 8)), prediction(), random_targets(3, 2)
    output = DetectorOutput(second.logits, second.boxes, {"first": first, "second": second})
    alone, together = criterion()(output, targets), criterion(union=True)(output, targets)
    assigned = criterion().assign(output.supervised, targets)
    union = unite(output.supervised, assigned, targets)
    assert (union >= 0).sum() > targets.valid.sum(), "else this would show nothing"
    for name in ("first", "second"):
        torch.testing.assert_close(alone[f"{name}/vfl"], together[f"{name}/vfl"])
    given = SupervisedOutput(first.logits, first.boxes, "given", union, 1, first.edges)
    expected = criterion()(DetectorOutput(given.logits, given.boxes, {"first": given}), targets)
    ratio = targets.valid.sum() / (union >= 0).sum()
    for term in ("box", "giou", "fgl"):
        torch.testing.assert_close(together[f"first/{term}"], expected[f"first/{term}"] * ratio)
    torch.testing.assert_close(together["first/ddf"], expected["first/ddf"])


def test_the_graph_does_not_depend_on_the_targets() -> None:
    for counts in [(3, 1), (0, 0)]:
        first = prediction(edges=random_edges(2, 8))
        output = DetectorOutput(first.logits, first.boxes, {"first": first})
        criterion(union=True)(output, random_targets(*counts))["total"].backward()
        for leaf in (first.logits, first.boxes, first.edges.logits):
            assert leaf.grad is not None
            assert leaf.grad.isfinite().all()
