"""The criterion: equal to the published one on one prediction, and the laws of its normalisation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from vitdet.errors import UserError
from vitdet.losses.criterion import Criterion, gather_targets
from vitdet.losses.matcher import HungarianMatcher
from vitdet.structures import DetectorOutput, SupervisedOutput, Targets

CLASSES = 5


def criterion(**options) -> Criterion:
    return Criterion(matcher=HungarianMatcher(), **options)


def random_boxes(*shape: int) -> Tensor:
    return torch.cat([torch.rand(*shape, 2) * 0.6 + 0.2, torch.rand(*shape, 2) * 0.3 + 0.05], dim=-1)


def prediction(batch: int = 2, queries: int = 8, *options) -> SupervisedOutput:
    logits = torch.randn(batch, queries, CLASSES, requires_grad=True)
    return SupervisedOutput(logits, random_boxes(batch, queries).requires_grad_(), *options)


def random_targets(*counts: int) -> Targets:
    return Targets.from_lists([random_boxes(n) for n in counts], [torch.randint(CLASSES, (n,)) for n in counts])


def output(**supervised: SupervisedOutput) -> DetectorOutput:
    last = next(iter(supervised.values()))
    return DetectorOutput(last.logits, last.boxes, supervised)


@pytest.mark.parametrize("counts", [(3, 1), (0, 12), (0, 0)], ids=["few", "more than queries", "none"])
def test_equal_to_the_published_criterion(counts: tuple[int, int]) -> None:
    transformers = pytest.importorskip("transformers", reason="the reference implementation is not installed")
    from transformers.loss.loss_rt_detr import RTDetrLoss

    theirs = RTDetrLoss(transformers.RTDetrConfig(num_labels=CLASSES))
    final, first, targets = prediction(), prediction(), random_targets(*counts)
    labels = [{"class_labels": targets.labels[i, :n], "boxes": targets.boxes[i, :n]} for i, n in enumerate(counts)]
    plain = {"logits": final.logits, "pred_boxes": final.boxes}
    expected = theirs(plain | {"auxiliary_outputs": [{"logits": first.logits, "pred_boxes": first.boxes}]}, labels)
    found = criterion()(output(final=final, first=first), targets)
    for name, suffix in {"final": "", "first": "_aux_0"}.items():
        for ours, other in {"vfl": "loss_vfl", "box": "loss_bbox", "giou": "loss_giou"}.items():
            torch.testing.assert_close(found[f"{name}/{ours}"], expected[other + suffix], rtol=1e-5, atol=1e-5)
    leaves = [final.logits, final.boxes, first.logits, first.boxes]
    mine = torch.autograd.grad(found["total"], leaves)
    other = torch.autograd.grad(sum(expected.values()), leaves)
    for one, two in zip(mine, other, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)


def test_names_weights_and_total() -> None:
    both, targets = output(a=prediction(), b=prediction()), random_targets(2, 3)
    plain = criterion(vfl_weight=1, box_weight=1, giou_weight=1)(both, targets)
    weighted = criterion(vfl_weight=2, box_weight=3, giou_weight=5)(both, targets)
    terms = {f"{name}/{term}" for name in "ab" for term in ("vfl", "box", "giou")}
    assert set(plain) == terms | {"total"}
    for name in terms:
        factor = {"vfl": 2, "box": 3, "giou": 5}[name.split("/")[1]]
        assert plain[name].item() > 0.01
        assert weighted[name].item() == pytest.approx(factor * plain[name].item(), rel=1e-5)
    for losses in (plain, weighted):
        assert losses["total"].item() == pytest.approx(sum(losses[name].item() for name in terms), rel=1e-5)


def test_by_hand() -> None:
    """One target, two queries; the first is given it."""
    targets = Targets.from_lists([torch.tensor([[0.4, 0.5, 0.2, 0.2]])], [torch.tensor([1])])
    boxes = torch.tensor([[[0.3, 0.5, 0.2, 0.2], [0.4, 0.5, 0.2, 0.2]]])
    given = SupervisedOutput(torch.zeros(1, 2, 2), boxes, "given", torch.tensor([[0, -1]]))
    found = criterion()(output(only=given), targets)
    ln2, iou = 0.693147, 1 / 3
    # The positive weighs its IoU; three negatives of probability 1/2 weigh 0.75 / 4.
    expected = {"vfl": iou * ln2 + 3 * 0.1875 * ln2, "box": 5 * 0.1, "giou": 2 * (1 - iou)}
    for term, value in expected.items():
        assert found[f"only/{term}"].item() == pytest.approx(value, abs=1e-5)


def test_perfect_predictions_cost_nothing() -> None:
    targets = random_targets(3, 3)
    logits = torch.full((2, 3, CLASSES), -30.0).scatter(2, targets.labels[..., None], 30.0)
    order = torch.tensor([2, 0, 1])
    losses = criterion()(output(a=SupervisedOutput(logits[:, order], targets.boxes[:, order])), targets)
    assert losses["total"].item() == pytest.approx(0, abs=1e-5)


def test_an_average_over_objects() -> None:
    one, targets = prediction(), random_targets(2, 4)
    alone = criterion()(output(a=one), targets)["total"]

    def twice(values: Tensor) -> Tensor:
        return torch.cat([values, values])

    doubled = Targets(twice(targets.boxes), twice(targets.labels), twice(targets.valid))
    both = criterion()(output(a=SupervisedOutput(twice(one.logits), twice(one.boxes))), doubled)["total"]
    torch.testing.assert_close(both, alone)


def test_padding_has_no_part_in_it() -> None:
    one, targets = prediction(), random_targets(2, 4)
    padded = Targets(
        torch.cat([targets.boxes, torch.rand(2, 5, 4)], 1),
        torch.cat([targets.labels, torch.randint(CLASSES, (2, 5))], 1),
        torch.cat([targets.valid, torch.zeros(2, 5, dtype=torch.bool)], 1),
    )
    for matching in ("one_to_one", "one_to_many"):
        both = output(a=SupervisedOutput(one.logits, one.boxes, matching))
        expected, found = criterion()(both, targets), criterion()(both, padded)
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value)


def test_denoising_groups_are_averaged() -> None:
    """Three copies of the same predictions in three groups cost what one of them does."""
    targets = random_targets(2, 4)
    index = torch.tensor([[0, 1, -1, -1, -1], [3, 2, 1, 0, -1]])
    one = prediction(2, 5, "given", index)
    copies = SupervisedOutput(one.logits.repeat(1, 3, 1), one.boxes.repeat(1, 3, 1), "given", index.repeat(1, 3), 3)
    found = criterion()(output(one=one, copies=copies), targets)
    for term in ("vfl", "box", "giou"):
        torch.testing.assert_close(found[f"copies/{term}"], found[f"one/{term}"])
        assert found[f"one/{term}"] > 0.01


def test_dense_predictions_are_averaged_over_their_copies() -> None:
    targets, dense = random_targets(2, 4), prediction(2, 30, "one_to_many")
    index = HungarianMatcher().one_to_many(dense, targets, count=6)
    given = SupervisedOutput(dense.logits, dense.boxes, "given", index, groups=6)
    expected = criterion()(output(a=given), targets)
    for weight in (1.0, 0.5):
        found = criterion(one_to_many=6, dense_weight=weight)(output(a=dense, b=given), targets)
        for term in ("vfl", "box", "giou"):
            torch.testing.assert_close(found[f"a/{term}"], weight * expected[f"a/{term}"])
            torch.testing.assert_close(found[f"b/{term}"], expected[f"a/{term}"])


EMPTY = Targets.from_lists([torch.zeros(0, 4)] * 2, [torch.zeros(0, dtype=torch.int64)] * 2)
PADDING = Targets(torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 3, dtype=torch.bool))


@pytest.mark.parametrize("targets", [EMPTY, PADDING], ids=["T=0", "padding only"])
def test_a_batch_without_objects(targets: Targets) -> None:
    nothing = torch.full((2, 8), -1)
    supervised = {
        "a": prediction(), "b": prediction(2, 8, "one_to_many"), "c": prediction(2, 8, "given", nothing, 4)
    }  # fmt: skip
    losses = criterion()(output(**supervised), targets)
    losses["total"].backward()
    for name, one in supervised.items():
        probability = one.logits.detach().sigmoid()
        background = -0.75 * probability**2 * (1 - probability).log()
        copies = {"a": 1, "b": 8, "c": 4}[name]
        torch.testing.assert_close(losses[f"{name}/vfl"].detach(), background.sum() / copies)
        assert losses[f"{name}/box"] == losses[f"{name}/giou"] == 0
        assert one.boxes.grad is not None  # the graph is the same as ever
        assert one.boxes.grad.abs().max() == 0
        assert one.logits.grad.abs().min() > 0


def test_gradients_reach_only_what_a_term_is_about() -> None:
    one, targets = prediction(), random_targets(2, 3)
    losses = criterion()(output(a=one), targets)
    [index] = HungarianMatcher().one_to_one([one], targets)
    quality = torch.autograd.grad(losses["a/vfl"], one.boxes, retain_graph=True, allow_unused=True)[0]
    assert quality is None or quality.abs().max() == 0  # no box is learnt through its score
    for term in ("box", "giou"):
        gradient = torch.autograd.grad(losses[f"a/{term}"], one.boxes, retain_graph=True)[0]
        assert torch.equal(gradient.abs().amax(-1) > 0, index >= 0)


def test_half_precision_is_computed_in_full() -> None:
    one, targets = prediction(), random_targets(2, 3)
    half = SupervisedOutput(one.logits.bfloat16(), one.boxes.bfloat16())
    same = SupervisedOutput(half.logits.float(), half.boxes.float())
    expected = criterion()(output(a=same), targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = criterion()(output(a=half), targets)
    for name, value in expected.items():
        assert found[name].dtype == torch.float32
        torch.testing.assert_close(found[name], value)


def test_given_matching_must_be_given() -> None:
    with pytest.raises(ValueError, match=r"prediction 'denoising_0' has given matching but no target_index"):
        criterion()(output(denoising_0=prediction(2, 8, "given")), random_targets(1, 1))


def test_gathering() -> None:
    targets = random_targets(2, 3)
    labels, boxes = gather_targets(targets, torch.tensor([[1, -1, 0, 1], [2, 0, -1, 1]]))
    assert torch.equal(boxes[0, [0, 2, 3]], targets.boxes[0, [1, 0, 1]])
    assert torch.equal(labels[1, [0, 1, 3]], targets.labels[1, [2, 0, 1]])
    assert boxes.isfinite().all()


@pytest.mark.parametrize("kind", ["vfl", "mal"])
def test_the_class_term_is_named_by_its_loss(kind: str) -> None:
    one, targets = prediction(), random_targets(2, 3)
    found = criterion(classification=kind, vfl_weight=2, mal_weight=3)(output(a=one), targets)
    assert set(found) == {f"a/{kind}", "a/box", "a/giou", "total"}
    plain = criterion(classification=kind)(output(a=one), targets)
    factor = {"vfl": 2, "mal": 3}[kind]
    torch.testing.assert_close(found[f"a/{kind}"], factor * plain[f"a/{kind}"])


def no_object_criterion(**options) -> Criterion:
    return Criterion(matcher=HungarianMatcher(softmax=True), **options)


def test_more_targets_do_not_divide_the_cross_entropy() -> None:
    """It is a mean over queries, and not divided by the targets as the other terms are."""
    logits, boxes = torch.zeros(1, 4, 3), torch.full((1, 4, 4), 0.5)
    given = DetectorOutput(logits, boxes, {"x": SupervisedOutput(logits, boxes)}, no_object=True)
    for count in (0, 1, 3):
        targets = Targets.from_lists([torch.full((count, 4), 0.5)], [torch.zeros(count, dtype=torch.int64)])
        losses = no_object_criterion(no_object=0.5, ce_weight=2.0)(given, targets)
        assert set(losses) == {"x/ce", "x/box", "x/giou", "total"}
        assert losses["x/ce"].item() == pytest.approx(2 * math.log(3), abs=1e-6)


def test_a_loss_for_other_logits_is_refused() -> None:
    targets = random_targets(1, 1)
    plain = output(a=prediction())
    with pytest.raises(UserError) as error:
        no_object_criterion()(plain, targets)
    assert str(error.value) == (
        "the model has no logit for 'no object', which loss.classification=ce needs; set it to vfl or mal"
    )
    plain.no_object = True
    with pytest.raises(UserError) as error:
        criterion(classification="mal")(plain, targets)
    assert str(error.value) == (
        "the model has a logit for 'no object', which loss.classification=mal leaves out; set it to ce"
    )


@pytest.mark.parametrize(
    ("softmax", "options", "message"),
    [
        (False, {"classification": "focal"}, "one of vfl, mal, ce, got 'focal'"),
        (False, {"classification": "ce"}, "do not go together"),
        (True, {"classification": "vfl"}, "do not go together"),
        (True, {"no_object": 0.0}, r"no_object is a weight in \(0, 1\]"),
        (True, {"no_object": 1.5}, r"no_object is a weight in \(0, 1\]"),
    ],
)
def test_what_does_not_go_together_is_refused(softmax: bool, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Criterion(matcher=HungarianMatcher(softmax=softmax), **options)


def test_matching_changes_at_its_epoch() -> None:
    never, changing = criterion(), criterion(quality_from=3)
    found = []
    for epoch in (0, 2, 3, 4, 1):  # a run may be taken up at any epoch
        never.set_epoch(epoch)
        changing.set_epoch(epoch)
        assert not never.matcher.by_quality
        found.append(changing.matcher.by_quality)
    assert found == [False, False, True, True, False]


def autograd_graph(loss: Tensor) -> list[str]:
    """Names of all that backward will run, in the order in which it is met."""
    names, queue, seen = [], [loss.grad_fn], set()
    while queue:
        node = queue.pop()
        if node is not None and node not in seen:
            seen.add(node)
            names.append(node.name())
            queue += [following for following, _ in node.next_functions]
    return names


def lively_predictions(classes: int, index: Tensor) -> dict[str, SupervisedOutput]:
    """Sure logits and a box of no area, matched in each of the three ways."""
    boxes = random_boxes(2, 40)
    boxes[:, 0, 2:] = 0
    logits, boxes = (30 * torch.randn(2, 40, classes)).requires_grad_(), boxes.requires_grad_()
    return {
        "a": SupervisedOutput(logits, boxes), "b": SupervisedOutput(logits, boxes, "one_to_many"),
        "c": SupervisedOutput(logits, boxes, "given", index, 4),
    }  # fmt: skip


@pytest.mark.parametrize("classes", [1, 80])
@pytest.mark.parametrize("by_quality", [False, True])
@pytest.mark.parametrize("kind", ["vfl", "mal", "ce"])
def test_finite_and_of_one_graph_whatever_the_targets(kind: str, by_quality: bool, classes: int) -> None:
    """Without objects, with padding alone, with few and with 300 an image, of which most find no query."""
    softmax = kind == "ce"
    one = Criterion(matcher=HungarianMatcher(softmax=softmax), classification=kind)
    one.matcher.by_quality = by_quality
    few, many = (
        Targets.from_lists([random_boxes(n) for n in counts], [torch.randint(classes, (n,)) for n in counts])
        for counts in ((3, 0), (300, 300))
    )
    graphs = []
    for targets in (EMPTY, PADDING, few, many):
        index = torch.where(torch.rand(2, 40) < 0.5, 0, -1) if targets is many else torch.full((2, 40), -1)
        supervised = lively_predictions(classes + softmax, index)
        losses = one(DetectorOutput(*torch.zeros(2, 1), supervised, no_object=softmax), targets)
        assert all(loss.isfinite() for loss in losses.values())
        graphs.append(autograd_graph(losses["total"]))
        losses["total"].backward()
        for leaf in (supervised["a"].logits, supervised["a"].boxes):
            assert leaf.grad.isfinite().all()
        assert supervised["a"].boxes.grad.any() == targets.valid.any()
    assert all(graph == graphs[0] for graph in graphs)
    assert len(graphs[0]) > 50
