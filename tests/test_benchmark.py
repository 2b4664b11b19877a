"""The comparison with timm: the same model, the same schedule, and both sides run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.tiny import tiny_values as detector_values
from tests.engine.tiny import write_config, write_set
from tests.engine.tiny_images import changed, tiny_values, write_images
from vitdet.benchmark.timm_side import TimmTraining
from vitdet.benchmark.training import Side, compare_with_timm, make_side, timm_arguments
from vitdet.build.classification import build_eval_loader, read_split
from vitdet.cli import main
from vitdet.config import ClassificationRunConfig
from vitdet.errors import UserError
from vitdet.weights import vit
from vitdet.weights.rules import load_strict
from vitdet.zoo import create_model

pytestmark = pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")  # timm's data set leaves them open


@pytest.fixture(scope="module")
def image_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("images") / "set")


def settings(root: Path, **sections: Any) -> ClassificationRunConfig:
    values = changed(tiny_values(root, root.parent / "run"), **sections)
    return ClassificationRunConfig.model_validate(values)


def sides(root: Path, epochs: int = 4, **sections: Any) -> tuple[Any, TimmTraining]:
    """Our trainer and timm's side."""
    config = settings(root, **sections)
    return tuple(make_side(name, config, 0, epochs).training for name in ("ours", "timm"))  # type: ignore[return-value]


def test_both_sides_run(image_set: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = changed(
        tiny_values(image_set, tmp_path / "run"),
        augment={"rand_augment_layers": 2, "mixup": 0.2, "erasing": 0.2},
        loss={"label_smoothing": 0.1},
    )
    del values["data"]["root"]
    config = write_config(tmp_path / "run.yaml", values)
    words = ["--data", str(image_set), "--config", str(config), "--minutes", "0.01", "--timm-workers", "0"]
    assert main(["benchmark", "timm", *words, "optim.lr=0.002", "--json", str(tmp_path / "figures.json")]) == 0
    figures = json.loads((tmp_path / "figures.json").read_text())
    printed = capsys.readouterr()
    assert list(figures) == ["ours", "timm", "ratio", "torch", "machine"]
    for name in ("ours", "timm"):
        one = figures[name]
        assert list(one) == ["top1", "epochs", "minutes", "images_per_second"]
        assert one["top1"] in [pytest.approx(right / 12) for right in range(13)], "a share of the twelve images"
        assert one["epochs"] >= 1
        assert one["minutes"] > 0
        assert one["images_per_second"] > 0
    rates = [figures[name]["images_per_second"] for name in ("ours", "timm")]
    assert figures["ratio"] == pytest.approx(rates[0] / rates[1])
    assert not (tmp_path / "run").exists(), "a measurement is no run"
    lines = printed.out.splitlines()
    assert lines[0].split() == ["top-1", "epochs", "minutes", "images/s"]
    assert lines[1].split()[:3] == ["ours", f"{figures['ours']['top1']:.4f}", str(figures["ours"]["epochs"])]
    assert lines[3].endswith(f"{figures['ratio']:.2f}")
    told = printed.err
    assert f"ours: epoch 1/{figures['ours']['epochs']}, " in told
    assert f"timm: epoch {figures['timm']['epochs']}/{figures['timm']['epochs']}, " in told


def test_the_figures_of_a_side() -> None:
    """Images a second by the median epoch, so that one disturbed epoch does not count; minutes in all."""
    side = Side("ours", None, images_per_epoch=100, epochs=3)
    side.seconds = [2.0, 50.0, 4.0]
    assert side.done
    assert side.figures(0.5) == {"top1": 0.5, "epochs": 3, "minutes": 56 / 60, "images_per_second": 25.0}


@pytest.mark.parametrize(
    "overrides",
    [{}, {"class_token": False, "pooling": "average"}, {"drop_path": 0.3}],
    ids=["token", "average", "drop"],
)
def test_it_is_the_same_model(overrides: dict[str, Any]) -> None:
    """As many parameters, and with our weights' values the same logits: nothing is larger or calculated otherwise."""
    from timm.models.vision_transformer import VisionTransformer

    ours = create_model(
        "vit_tiny_patch16_224", num_classes=5, image_size=(96, 96), patch=12, layers=3, **overrides
    ).eval()
    theirs = VisionTransformer(num_classes=5, **timm_arguments(ours)).eval()
    counts = [sum(p.numel() for p in model.parameters()) for model in (ours, theirs)]
    assert counts[0] == counts[1]
    images = torch.randn(2, 3, 96, 96)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
        load_strict(ours, vit.convert(theirs.state_dict()))
        torch.testing.assert_close(ours(images), theirs(images), atol=1e-4, rtol=0)
    rates = [[block.feed_forward_residual.drop_path.rate for block in ours.backbone.encoder.layers]]
    rates.append([getattr(block.drop_path1, "drop_prob", 0.0) for block in theirs.blocks])
    assert rates[0] == pytest.approx(rates[1])


def test_the_rates_and_the_decay_are_the_same(image_set: Path) -> None:
    ours, theirs = sides(
        image_set,
        epochs=7,
        optim={"lr": 2e-3, "final": 0.05, "warmup": 0.2, "weight_decay": 0.07, "betas": [0.8, 0.99]},
    )
    total = 7 * 3
    curves: tuple[list[float], list[float]] = ([], [])
    for step in range(total):
        curves[0].append(ours.base_rates[0] * ours.rate(step))
        theirs.schedule.step_update(step)
        rates = {group["lr"] for group in theirs.optimizer.param_groups}
        assert len(rates) == 1
        curves[1].append(rates.pop())
    assert curves[0] == pytest.approx(curves[1], rel=1e-9)
    assert max(curves[1]) == pytest.approx(2e-3)
    assert curves[1][0] == pytest.approx(2e-3 / 5)
    decays = []
    for optimizer in (ours.optimizer, theirs.optimizer):
        assert {group["betas"] for group in optimizer.param_groups} == {(0.8, 0.99)}
        count = {0.0: 0, 0.07: 0}
        for group in optimizer.param_groups:
            count[group["weight_decay"]] += sum(p.numel() for p in group["params"])
        decays.append(count)
    assert decays[0] == decays[1]
    assert all(decays[0].values())
    assert ours.ema.decay == theirs.average.decay


def test_what_timm_loads_is_what_we_load(image_set: Path) -> None:
    """The same size, normalisation, order of the classes and, without augmentation, the same pixels."""
    ours, theirs = sides(image_set, data={"mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.4]}, eval={"batch": 12})
    seen = ours.evaluate(ours.best_model)
    assert seen["images"] == 12
    (images, labels), *rest = theirs._loader("val", 0)
    assert not rest
    assert labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    preprocessing = ours.metadata.preprocessing
    (batch,) = build_eval_loader(read_split(image_set, "val"), preprocessing, batch=12, workers=0, cache=False)
    assert batch["labels"].tolist() == labels.tolist()
    torch.testing.assert_close(preprocessing.normalize(batch["images"]), images, atol=1e-5, rtol=0)


def test_mixing_off_still_smooths(image_set: Path) -> None:
    _, theirs = sides(image_set, loss={"label_smoothing": 0.3})
    picture = np.zeros((3, 4, 4), dtype=np.uint8)
    _, targets = theirs._collate(3)([(picture, 2), (picture, 0)])
    torch.testing.assert_close(targets, torch.tensor([[0.1, 0.1, 0.8], [0.8, 0.1, 0.1]]))
    assert theirs.train_epoch() == pytest.approx(1.1, abs=0.3)
    assert theirs.steps == 3


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        (
            {"model": {"overrides": {"patch_dropout": 0.5}}},
            "model.overrides has 'patch_dropout', which the side of timm does not follow; leave it out",
        ),
        (
            {"train": {"ema": None}},
            "train.ema is null, and the side of timm averages its weights; set a decay such as 0.9999",
        ),
        (
            {"augment": {"colour_jitter": 0.4, "rand_augment_layers": 2}},
            "timm leaves out augment.colour_jitter beside RandAugment; set one of them to 0",
        ),
        ({"train": {"batch": 5}}, "train.batch is 5; timm mixes pairs of images, make it even"),
        ({"train": {"batch": 40}}, "the 36 images are fewer than train.batch 40"),
        (
            {"optim": {"layer_decay": 0.5}},
            "optim.layer_decay is 0.5, which the side of timm does not do; set optim.layer_decay=1.0",
        ),
        (
            {"augment": {"repeats": 3}},
            "augment.repeats is 3, which the side of timm does not do; set augment.repeats=1",
        ),
        (
            {"model": {"weights": "x.safetensors"}},
            "both sides train from scratch at one size; leave out model.weights and data.sizes",
        ),
        (
            {"model": {"name": "vit_small_patch16_dinov3"}},
            "the comparison needs a plain ViT with learnt positions, such as vit_tiny_patch16_224",
        ),
    ],
)
def test_what_cannot_be_compared(image_set: Path, tmp_path: Path, sections: dict[str, Any], expected: str) -> None:
    values = changed(tiny_values(image_set, tmp_path / "run"), **sections)
    config = write_config(tmp_path / "run.yaml", values)
    with pytest.raises(UserError) as error:
        compare_with_timm(config, root=str(image_set), minutes=0.001, timm_workers=0)
    assert str(error.value) == expected


def test_a_detector_is_refused(tmp_path: Path) -> None:
    root = write_set(tmp_path / "set")
    config = write_config(tmp_path / "run.yaml", detector_values(root, tmp_path / "run"))
    with pytest.raises(UserError) as error:
        compare_with_timm(config, root=str(root), minutes=0.001)
    assert str(error.value) == (
        f"{config} trains a detector; the comparison with timm needs a configuration of a classifier"
    )


def test_a_model_with_more_is_not_timms(image_set: Path) -> None:
    overrides = {**tiny_values(image_set, image_set)["model"]["overrides"], "distillation_token": True}
    with pytest.raises(UserError, match=r"^vit_tiny_patch16_224 as configured has \d+ parameters, timm's \d+; use a "):
        sides(image_set, model={"overrides": overrides})
