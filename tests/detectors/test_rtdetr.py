"""RT-DETR as a whole: published sizes, any image, any targets, and who learns from whom."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from vitdet.detectors import rtdetr
from vitdet.detectors.rtdetr import RTDETR, rtdetr_nano
from vitdet.losses.criterion import Criterion
from vitdet.losses.matcher import HungarianMatcher
from vitdet.structures import DetectorOutput, Targets

Build = Callable[..., RTDETR]
Boxes = Callable[..., Tensor]


def make_targets(random_boxes: Boxes, *counts: int, classes: int = 3) -> Targets:
    return Targets.from_lists([random_boxes(n) for n in counts], [torch.randint(classes, (n,)) for n in counts])


@pytest.mark.parametrize(
    ("build", "millions"),
    [
        (rtdetr.rtdetr_r18, 20),
        (rtdetr.rtdetr_r34, 31),
        (rtdetr.rtdetr_r50_m, 36),
        (rtdetr.rtdetr_r50, 42),
        (rtdetr.rtdetr_r101, 76),
        (rtdetr.rtdetr_hgnetv2_l, 32),
        (rtdetr.rtdetr_hgnetv2_x, 67),
        (rtdetr.rtdetrv2_r18, 20),
        (rtdetr.rtdetrv2_r34, 31),
        (rtdetr.rtdetrv2_r50_m, 36),
        (rtdetr.rtdetrv2_r50, 42),
        (rtdetr.rtdetrv2_r101, 76),
        (rtdetr.rtdetrv2_hgnetv2_l, 32),
        (rtdetr.rtdetrv2_hgnetv2_x, 67),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_published_numbers_of_parameters(build: Build, millions: int) -> None:
    """In whole millions, rounded down, as the paper's table and its repository have them."""
    with torch.device("meta"):
        model = build(80)
    assert sum(p.numel() for p in model.parameters()) // 1_000_000 == millions


def test_nano_is_small() -> None:
    with torch.device("meta"):
        assert 2e6 < sum(p.numel() for p in rtdetr_nano(80).parameters()) <= 4e6


@pytest.mark.parametrize(("height", "width"), [(64, 64), (32, 96), (160, 64)])
def test_any_size_divisible_by_32(height: int, width: int, lively: Build) -> None:
    model, images = lively().eval(), torch.randn(2, 3, height, width)
    tokens = height * width // 64 + height * width // 256 + height * width // 1024
    output = model(images)
    assert output.logits.shape == (2, min(100, tokens), 3)
    assert output.boxes.shape == (2, min(100, tokens), 4)
    assert output.boxes.min() >= 0
    assert output.boxes.max() <= 1
    assert output.boxes.std(1).min() > 0.01
    assert output.supervised == {}


@pytest.mark.parametrize(("height", "width"), [(65, 64), (64, 80)])
def test_other_sizes_are_refused(height: int, width: int, small: Build) -> None:
    message = rf"must be divisible by 32, got \({height}, {width}\); resize or pad the images"
    with pytest.raises(ValueError, match=message):
        small()(torch.randn(1, 3, height, width))


def test_memory_holds_the_maps_row_by_row(lively: Build) -> None:
    model, images = lively().eval(), torch.randn(1, 3, 64, 96)
    memory, shapes = model.encode(images)
    assert shapes == [(8, 12), (4, 6), (2, 3)]
    maps = model.encoder(model.backbone(images))
    start = 0
    for project, one, (height, width) in zip(model.memory_project, maps, shapes, strict=True):
        expected = project(one)
        for y, x in [(0, 0), (1, 2), (height - 1, 0)]:
            torch.testing.assert_close(memory[:, start + y * width + x], expected[:, :, y, x])
        start += height * width
    assert memory.shape == (1, start, 128)


# Counts of objects in the two images of a batch. All of them must leave the same graph: processes that train together
# wait for one another's gradients.
CASES = {"two and five": (2, 5), "one image empty": (0, 3), "all empty": (0, 0), "crowded": (300, 1)}


@pytest.mark.parametrize("dense", [True, False], ids=["dense", "sparse"])
@pytest.mark.parametrize("counts", CASES.values(), ids=CASES.keys())
def test_every_parameter_learns(counts: tuple[int, int], dense: bool, lively: Build, random_boxes: Boxes) -> None:
    model = lively(dense_supervision=dense).train()
    targets = make_targets(random_boxes, *counts)
    output = model(torch.randn(2, 3, 64, 96), targets)
    Criterion(matcher=HungarianMatcher())(output, targets)["total"].backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        if sum(counts):
            assert parameter.grad.abs().max() > 0, name
    queries = {5: 200, 3: 198, 0: 200, 300: 600}[max(counts)]
    assert all(output.supervised[f"denoising_{i}"].logits.shape == (2, queries, 3) for i in range(3))


def test_one_class(lively: Build, random_boxes: Boxes) -> None:
    model, targets = lively(num_classes=1).train(), make_targets(random_boxes, 2, 0, classes=1)
    output = model(torch.randn(2, 3, 64, 64), targets)
    assert output.logits.shape == (2, 84, 1)
    Criterion(matcher=HungarianMatcher())(output, targets)["total"].backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("dense", [True, False], ids=["dense", "sparse"])
def test_what_the_criterion_is_shown(dense: bool, small: Build, random_boxes: Boxes) -> None:
    model = small(dense_supervision=dense, denoising_queries=6, num_queries=50).train()
    targets = make_targets(random_boxes, 2, 1)
    output = model(torch.randn(2, 3, 64, 64), targets)
    supervised = output.supervised
    decoder, denoising = [f"decoder_{i}" for i in range(3)], [f"denoising_{i}" for i in range(3)]
    assert set(supervised) == {*decoder, *denoising, "encoder", *(["dense"] if dense else [])}
    for name in decoder:
        assert supervised[name].matching == "one_to_one"
        assert supervised[name].logits.shape == (2, 50, 3)
    for name in denoising:
        one = supervised[name]
        assert (one.matching, one.groups, one.logits.shape) == ("given", 3, (2, 12, 3))
        assert one.target_index.tolist() == [[0, 1, -1, -1] * 3, [0, -1, -1, -1] * 3]
    assert supervised["encoder"].matching == "one_to_one"
    assert supervised["encoder"].logits.shape == (2, 50, 3)
    if dense:
        assert supervised["dense"].matching == "one_to_many"
        assert supervised["dense"].logits.shape == (2, 84, 3)
        assert supervised["dense"].boxes.shape == (2, 84, 4)
    assert output.logits is supervised["decoder_2"].logits
    assert output.boxes is supervised["decoder_2"].boxes


def test_dense_supervision_has_its_own_head(lively: Build) -> None:
    """Several proposals to a target must not become several queries to a target: it shares the memory only."""
    model, images = lively(dense_supervision=True), torch.randn(2, 3, 64, 64)
    output = model.train()(images)
    own, selecting = model.dense_head.score_head.weight, model.query_selection.proposals.score_head.weight
    shared = model.memory_project[0].conv.weight
    for name, expected in [("dense", [True, False, True]), ("encoder", [False, True, True])]:
        logits = output.supervised[name].logits
        found = torch.autograd.grad(logits.sum(), [own, selecting, shared], retain_graph=True, allow_unused=True)
        assert [gradient is not None for gradient in found] == expected
    model.eval()
    before = model(images)
    nn.init.constant_(own, float("nan"))
    assert torch.equal(model(images).logits, before.logits)
    assert lively(dense_supervision=False).dense_head is None


@pytest.mark.parametrize("options", [{"denoising_queries": 0}, {}], ids=["none built", "no targets"])
def test_without_denoising(options: dict[str, int], small: Build, random_boxes: Boxes) -> None:
    model = small(**options).train()
    assert (model.denoising is None) == bool(options)
    targets = make_targets(random_boxes, 2, 1) if options else None
    output = model(torch.randn(2, 3, 64, 64), targets)
    assert set(output.supervised) == {"decoder_0", "decoder_1", "decoder_2", "encoder"}


def decoded(output: DetectorOutput) -> dict[str, Tensor]:
    """The predictions of the object queries."""
    rest = {name: one for name, one in output.supervised.items() if not name.startswith("denoising")}
    return {f"{name} {kind}": getattr(one, kind) for name, one in rest.items() for kind in ("logits", "boxes")}


def test_object_queries_learn_nothing_of_the_truth(
    lively: Build, random_boxes: Boxes, train_with_fixed_norms: Callable[[nn.Module], None]
) -> None:
    model, images = lively(), torch.randn(2, 3, 64, 96)
    train_with_fixed_norms(model)
    with torch.no_grad():
        outputs = [model(images, make_targets(random_boxes, *counts)) for counts in [(2, 5), (2, 5), (0, 0), (60, 1)]]
        without = decoded(model(images))
    for output in outputs:
        for name, value in decoded(output).items():
            torch.testing.assert_close(value, without[name], rtol=1e-4, atol=1e-5, msg=name)
    first, second = (output.supervised["denoising_2"].logits for output in outputs[:2])
    assert (first - second).abs().max() > 0.01


def test_denoising_queries_do_read_the_image(
    lively: Build, random_boxes: Boxes, train_with_fixed_norms: Callable[[nn.Module], None]
) -> None:
    model, targets = lively(label_noise=0.0, box_noise=0.0), make_targets(random_boxes, 2)
    train_with_fixed_norms(model)
    with torch.no_grad():
        first, second = (model(torch.randn(1, 3, 64, 64), targets).supervised["denoising_0"] for _ in range(2))
    assert (first.logits - second.logits).abs().max() > 1e-3
    # Nothing was spoilt, so both copies of a target in all groups are one query, and groups do not disturb one another.
    rows = first.boxes[0].view(100, 2, 4)
    torch.testing.assert_close(rows, rows[:1].expand(100, 2, 4), rtol=1e-4, atol=1e-5)


def test_evaluation_gives_the_last_layer_of_training(
    lively: Build, random_boxes: Boxes, train_with_fixed_norms: Callable[[nn.Module], None]
) -> None:
    model, images = lively(), torch.randn(2, 3, 64, 96)
    train_with_fixed_norms(model)
    with torch.no_grad():
        trained = model(images, make_targets(random_boxes, 3, 1))
        expected = model.eval()(images)
    torch.testing.assert_close(trained.logits, expected.logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(trained.boxes, expected.boxes, rtol=1e-4, atol=1e-5)
    earlier = trained.supervised["decoder_1"]
    assert (earlier.logits - expected.logits).abs().max() > 0.01


def test_fewer_layers_in_evaluation_are_a_shorter_decoder(small: Build, lively: Build) -> None:
    model, images = lively(eval_layers=2), torch.randn(2, 3, 64, 96)
    assert {"decoder_0", "decoder_1", "decoder_2"} < model.train()(images).supervised.keys()
    short = small(decoder_layers=2).eval()
    last = re.compile(r"decoder\.(layers|score_heads|box_heads)\.2\.")
    short.load_state_dict({name: value for name, value in model.state_dict().items() if not last.match(name)})
    with torch.no_grad():
        found, expected = model.eval()(images), short(images)
        model.decoder.eval_layers = 3
        whole = model(images)
    assert torch.equal(found.logits, expected.logits)
    assert torch.equal(found.boxes, expected.boxes)
    assert (whole.logits - found.logits).abs().max() > 0.01


@pytest.mark.parametrize(
    ("build", "trained", "evaluated"),
    [(rtdetr.rtdetr_r50_m, 6, 3), (rtdetr.rtdetr_r50, 6, 6), (rtdetr.rtdetr_r18, 3, 3)],
)
def test_published_layers(build: Build, trained: int, evaluated: int) -> None:
    """R50-m trains six layers and evaluates three (its repository's configuration)."""
    with torch.device("meta"):
        model, images = build(80), torch.empty(1, 3, 64, 64)
    ran: list[int] = []
    for index, layer in enumerate(model.decoder.layers):
        layer.register_forward_hook(lambda *_, index=index: ran.append(index))
    with torch.no_grad():
        model.eval()(images)
        assert ran == list(range(evaluated))
        ran.clear()
        assert len(model.train()(images).supervised) == trained + 1  # and the encoder's
    assert ran == list(range(trained))


@pytest.mark.parametrize("build", [rtdetr.rtdetr_r50_m, rtdetr.rtdetr_r50, rtdetr.rtdetr_r101, rtdetr.rtdetr_hgnetv2_l])
def test_backbones_are_frozen_where_asked(build: Build) -> None:
    with torch.device("meta"):
        models = [build(80), build(80, frozen_norm=True)]

    def norms(part: nn.Module) -> int:
        return sum(isinstance(module, nn.BatchNorm2d) for module in part.modules())

    assert [norms(model.backbone) > 50 for model in models] == [True, False]
    assert norms(models[1].backbone) == 0
    assert norms(models[0].encoder) == norms(models[1].encoder) > 0


def test_a_batch_is_its_images(lively: Build) -> None:
    model, images = lively().eval(), torch.randn(3, 3, 64, 96)
    with torch.no_grad():
        together, alone = model(images), [model(image[None]) for image in images]
    for kind in ("logits", "boxes"):
        expected = torch.cat([getattr(one, kind) for one in alone])
        torch.testing.assert_close(getattr(together, kind), expected, rtol=1e-4, atol=1e-5)


def test_a_fresh_decoder_keeps_the_boxes_it_is_given(small: Build) -> None:
    model = small().train()
    output = model(torch.randn(2, 3, 64, 64))
    for index in range(3):
        boxes = output.supervised[f"decoder_{index}"].boxes
        torch.testing.assert_close(boxes, output.supervised["encoder"].boxes, rtol=0, atol=1e-4)
        assert output.supervised[f"decoder_{index}"].logits.sigmoid().mean() < 0.1


def test_layers_refine_boxes_on_their_own(lively: Build) -> None:
    """Each layer's loss moves its own box head; none reaches those before it, or the selection, through the boxes."""
    model = lively()
    output = model.train()(torch.randn(2, 3, 64, 64))
    heads = [*model.decoder.box_heads, model.query_selection.proposals.box_head]
    weights = [head.layers[-1].weight for head in heads]
    for index, name in enumerate(["decoder_0", "decoder_1", "decoder_2", "encoder"]):
        boxes = output.supervised[name].boxes
        found = torch.autograd.grad(boxes.square().sum(), weights, retain_graph=True, allow_unused=True)
        assert [g is not None and bool(g.abs().max() > 0) for g in found] == [i == index for i in range(4)]


@pytest.mark.parametrize("still", [0, 1, 2])
def test_each_layer_starts_from_the_boxes_of_the_one_before(still: int, lively: Build) -> None:
    model = lively().train()
    last = model.decoder.box_heads[still].layers[-1]
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    output = model(torch.randn(2, 3, 64, 64))
    steps = [output.supervised[name].boxes for name in ("encoder", "decoder_0", "decoder_1", "decoder_2")]
    for index, (before, after) in enumerate(itertools.pairwise(steps)):
        change = (after - before).abs().max()
        assert change < 1e-4 if index == still else change > 1e-2


def test_images_receive_gradients_through_the_memory_only(lively: Build) -> None:
    """The object queries' tokens are cut from the graph; the decoder still reads the memory."""
    model = lively().train()
    images = torch.randn(1, 3, 64, 64, requires_grad=True)
    logits = model(images).logits
    project = model.query_selection.proposals.project[0].weight
    gradient = torch.autograd.grad(logits.sum(), [images, project], allow_unused=True)
    assert gradient[0].abs().max() > 0
    assert gradient[1] is None


def test_overrides_replace_the_numbers_of_a_variant(small: Build) -> None:
    model = small(decoder_layers=2, num_queries=7)
    assert len(model.decoder.layers) == len(model.decoder.box_heads) == len(model.decoder.score_heads) == 2
    assert model.eval()(torch.randn(1, 3, 64, 64)).logits.shape == (1, 7, 3)
