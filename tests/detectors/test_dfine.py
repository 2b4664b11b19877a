"""D-FINE: bins, boxes of distributions, the decoder's predictions, and what trains."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from vitdet.backbones.resnet import BasicBlock, ResNet
from vitdet.detectors.dfine import (
    LocationQuality,
    dfine,
    dfine_l,
    dfine_m,
    dfine_n,
    dfine_s,
    dfine_x,
    expected_distances,
    make_bins,
    move_edges,
)
from vitdet.detectors.rtdetr import RTDETR
from vitdet.losses.criterion import Criterion
from vitdet.losses.matcher import HungarianMatcher
from vitdet.structures import Targets


def small(**options) -> RTDETR:
    """On a narrow ResNet; two levels, as N has."""
    backbone = ResNet(
        depths=(1, 1, 1, 1), block=BasicBlock, stem=(8, 16), widths=(16, 16, 32, 32), out_stages=(2, 3)
    )  # fmt: skip
    numbers = {
        "encoder_width": 32, "encoder_hidden": 64, "encoder_expansion": 0.5, "encoder_blocks": 1, "width": 32,
        "heads": 4, "decoder_hidden": 64, "decoder_layers": 3, "points": (4, 2), "num_queries": 20,
        "denoising_queries": 8,
    }  # fmt: skip
    return dfine(backbone, 3, **(numbers | options))


def lively(model: RTDETR) -> RTDETR:
    """Off the start, at which heads, gates and offsets' weights are 0."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


def some_targets(*counts: int) -> Targets:
    boxes = [torch.cat([torch.rand(n, 2) * 0.6 + 0.2, torch.rand(n, 2) * 0.3 + 0.05], -1) for n in counts]
    return Targets.from_lists(boxes, [torch.randint(3, (n,)) for n in counts])


@pytest.mark.parametrize(("up", "scale"), [(0.5, 4.0), (0.5, 8.0), (-0.3, 5.0)])
def test_bins_are_the_published_ones(up: float, scale: float) -> None:
    pytest.importorskip("transformers", reason="the reference implementation is not installed")
    from transformers.models.d_fine.modeling_d_fine import weighting_function

    expected = weighting_function(32, torch.tensor([up]), torch.tensor([scale]))
    bins = make_bins(torch.tensor([up]), torch.tensor([scale]), count=32)
    torch.testing.assert_close(bins, expected, rtol=1e-5, atol=1e-6)
    assert (bins.diff() > 0).all()


def test_bins_by_hand() -> None:
    """N = 4 leaves one step beside the middle: up · scale = 2."""
    assert make_bins(torch.tensor([0.5]), torch.tensor([4.0]), count=4).tolist() == pytest.approx([-4, -2, 0, 2, 4])


def test_distances_move_edges_outwards() -> None:
    boxes = torch.tensor([[[0.5, 0.5, 0.4, 0.2]]])
    scale = torch.tensor([4.0])
    torch.testing.assert_close(move_edges(boxes, torch.zeros(1, 1, 4), scale), boxes)
    moved = move_edges(boxes, torch.tensor([[[1.0, 0.0, -1.0, 2.0]]]), scale)  # left, top, right, bottom
    # left 0.3 - 0.1, top 0.4, right 0.7 - 0.1, bottom 0.6 + 0.1
    torch.testing.assert_close(moved, torch.tensor([[[0.4, 0.55, 0.4, 0.3]]]))


def test_expected_distances() -> None:
    bins = torch.tensor([-1.0, 0.0, 3.0])
    logits = torch.tensor([[[[-99.0, 0, 0], [0, -99, 0], [0, 0, -99], [0, 0, 0]]]])
    torch.testing.assert_close(expected_distances(logits, bins), torch.tensor([[[1.5, 1.0, -0.5, 2 / 3]]]))


def test_location_quality_starts_silent_and_then_looks_at_sharpness() -> None:
    head, scores = LocationQuality(), torch.randn(2, 5, 3)
    flat, sharp = torch.zeros(2, 5, 4, 33), torch.zeros(2, 5, 4, 33)
    sharp[..., 16] = 9
    assert torch.equal(head(scores, sharp), scores)
    for parameter in head.parameters():
        nn.init.normal_(parameter)
    change = head(scores, sharp) - scores
    torch.testing.assert_close(change, change[..., :1].expand_as(change))
    assert (head(scores, flat) - scores - change).abs().min() > 1e-3


def test_distances_are_exact_in_bfloat16() -> None:
    """Autocast would make bfloat16 of them, and of all boxes."""
    logits, bins = torch.randn(2, 3, 4, 33), make_bins(torch.tensor([0.5]), torch.tensor([4.0]), count=32)
    expected = expected_distances(logits, bins)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(expected_distances(logits, bins), expected)


def test_predictions_in_training_and_evaluation() -> None:
    model, images = small(), torch.randn(2, 3, 64, 96)
    output = model.eval()(images)
    assert output.supervised == {}
    assert output.logits.shape == (2, 20, 3)
    output = model.train()(images, some_targets(2, 1))
    layers = ["pre", "0", "1", "2"]
    assert set(output.supervised) == {
        *(f"{kind}_{layer}" for kind in ("decoder", "denoising") for layer in layers), "encoder",
    }  # fmt: skip
    assert output.logits is output.supervised["decoder_2"].logits
    for kind, queries in (("decoder", 20), ("denoising", 2 * 4 * 2)):
        parts = [output.supervised[f"{kind}_{layer}"] for layer in layers]
        assert parts[0].edges is None
        assert all(part.edges.logits.shape == (2, queries, 4, 33) for part in parts[1:])
        assert all(torch.equal(part.edges.reference, parts[0].boxes) for part in parts[1:])
        assert parts[3].edges.teacher is None
        for part in parts[1:3]:
            assert torch.equal(part.edges.teacher, parts[3].edges.logits)
            assert not part.edges.teacher.requires_grad
            torch.testing.assert_close(part.edges.confidence, parts[3].logits.detach().sigmoid().amax(-1))


def test_a_fresh_decoder_keeps_the_boxes_it_is_given() -> None:
    output = small(denoising_queries=0).train()(torch.randn(1, 3, 64, 64))
    for name in ("pre", "0", "1", "2"):
        boxes = output.supervised[f"decoder_{name}"].boxes
        torch.testing.assert_close(boxes, output.supervised["encoder"].boxes, rtol=0, atol=1e-4)


def test_layers_add_to_the_distributions_of_those_before() -> None:
    model = lively(small(denoising_queries=0)).train()
    with torch.no_grad():
        for parameter in model.decoder.box_heads[1].layers[-1].parameters():
            parameter.zero_()
    output = model(torch.randn(1, 3, 64, 64))
    one, two, three = (output.supervised[f"decoder_{i}"].edges.logits for i in range(3))
    assert torch.equal(one, two)
    assert (three - two).abs().max() > 1e-3


@pytest.mark.parametrize("counts", [(3, 1), (0, 0)], ids=["objects", "none"])
def test_everything_trains(counts: tuple[int, int]) -> None:
    model, targets = lively(small()).train(), some_targets(*counts)
    criterion = Criterion(matcher=HungarianMatcher(), union=True)
    losses = criterion(model(torch.randn(2, 3, 64, 64), targets), targets)
    assert {"decoder_0/fgl", "decoder_1/ddf", "denoising_0/ddf"} < set(losses)
    assert {"decoder_2/ddf", "decoder_pre/fgl", "encoder/fgl"}.isdisjoint(losses)
    losses["total"].backward()
    untouched = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert untouched == []


def test_constants_are_in_the_state_and_matter() -> None:
    model, other = lively(small()).eval(), small(reg_scale=8.0, up=0.25).eval()
    assert {"decoder.up", "decoder.reg_scale"} <= model.state_dict().keys()
    assert all(not name.endswith(("up", "reg_scale")) for name, _ in model.named_parameters())
    images = torch.randn(1, 3, 64, 64)
    constants = ("decoder.up", "decoder.reg_scale")
    rest = {name: value for name, value in model.state_dict().items() if name not in constants}
    other.load_state_dict(rest, strict=False)
    with torch.inference_mode():
        assert (model(images).boxes - other(images).boxes).abs().max() > 1e-4
        other.load_state_dict(model.state_dict())
        torch.testing.assert_close(model(images).boxes, other(images).boxes)


def test_fewer_layers_in_evaluation() -> None:
    model = lively(small()).eval()
    images = torch.randn(1, 3, 64, 64)
    short = small(decoder_layers=2).eval()
    short.load_state_dict({n: v for n, v in model.state_dict().items() if n in short.state_dict()})
    model.decoder.eval_layers = 2
    with torch.inference_mode():
        torch.testing.assert_close(model(images).logits, short(images).logits)


def test_builds_without_memory_and_loads() -> None:
    with torch.device("meta"):
        model = small()
    state: dict[str, Tensor] = lively(small()).state_dict()
    model.load_state_dict(state, assign=True)
    assert not any(value.is_meta for value in model.state_dict().values())
    assert model.eval()(torch.randn(1, 3, 64, 64)).boxes.isfinite().all()


@pytest.mark.parametrize("options", [{"bins": 3}, {"bins": 2}, {"reg_scale": 0.0}, {"up": -0.5}])
def test_numbers_must_make_sense(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"bins must be even and at least 4, reg_scale and up above 0; got"):
        small(**options)


@pytest.mark.parametrize(
    ("build", "millions"), [(dfine_n, 4), (dfine_s, 10), (dfine_m, 19), (dfine_l, 31), (dfine_x, 62)]
)
def test_as_many_parameters_as_published(build: Callable[..., RTDETR], millions: int) -> None:
    """Published are rounded counts of the model that infers, without some heads that only training needs."""
    with torch.device("meta"):
        model = build(80, denoising_queries=0)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count / 1e6 == pytest.approx(millions, abs=0.8)
