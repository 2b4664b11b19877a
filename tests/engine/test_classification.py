"""Whole runs of a small ViT on a tiny image folder: it learns, repeats, resumes, and leaves alone what it should."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.tiny_images import CLASSES, TINY_VIT, changed, tiny_values, write_images
from vitdet import load_model
from vitdet.build import build_trainer, resume_training, run_training
from vitdet.config import ClassificationRunConfig
from vitdet.engine.checkpoint import load_training_state, read_weights
from vitdet.engine.logging import RunLog
from vitdet.engine.trainer import Trainer


@pytest.fixture(autouse=True)
def _no_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture takes longer than an epoch here; other tests look at it."""
    monkeypatch.setattr(RunLog, "draw", lambda self, *, metric: None)


@pytest.fixture
def _long_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run this short has an average without memory, which would be the weights themselves."""
    monkeypatch.setattr("vitdet.build.scaled_decay", lambda decay, *, total_steps: decay)


@pytest.fixture(scope="module")
def image_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("images") / "set")


def configure(root: Path, output: Path, **sections: Any) -> ClassificationRunConfig:
    return ClassificationRunConfig.model_validate(changed(tiny_values(root, output), **sections))


def final_weights(output: Path) -> dict[str, Tensor]:
    state = load_training_state(output / "last.pt")
    averaged = state["ema"]["model"] if state["ema"] else {}
    return state["model"] | {f"average of {name}": value for name, value in averaged.items()}


def differing(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    assert first.keys() == second.keys()
    return [name for name, value in first.items() if not torch.equal(value, second[name])]


def test_it_learns_and_leaves_weights(image_set: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    config = configure(image_set, output, train={"epochs": 12}, eval={"every": 4})
    metrics = run_training(config)
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows if "metrics" in row] == [4, 8, 12]
    assert rows[-1]["step"] == 12 * 3
    losses = [row["loss"]["total"] for row in rows]
    assert losses[-1] < 0.5 * losses[0]
    assert list(rows[-1]["loss"]) == ["loss_class", "total"]
    assert metrics["top1"] == max(row["metrics"]["top1"] for row in rows if "metrics" in row)
    assert metrics["top1"] >= 0.75, "chance is a third"
    assert set(rows[-1]["metrics"]) == {"top1", "top5", "loss", "images"}, "no table of classes in a row"
    assert ClassificationRunConfig.model_validate(load_training_state(output / "last.pt")["config"]) == config
    metadata = load_model(output / "best.safetensors").metadata
    assert metadata.class_map.names == CLASSES
    assert metadata.metrics["top1"] == metrics["top1"]
    assert metrics["per_class"].keys() == set(CLASSES)


# What draws random numbers in a step, in the loader and in the model.
RANDOM: dict[str, Any] = {
    "augment": {"mixup": 0.8, "cutmix": 1.0, "rand_augment_layers": 2, "erasing": 0.5, "repeats": 2},
    "model": {"name": "vit_tiny_patch16_224", "overrides": {**TINY_VIT, "drop_path": 0.5, "dropout": 0.1}},
    "data": {"sizes": [[32, 32], [40, 40]]},
}


def interrupted(config: ClassificationRunConfig) -> Trainer:
    trainer = build_trainer(config)
    trainer.evaluate, trainer.epochs = None, 1
    trainer.fit()
    return trainer


@pytest.mark.usefixtures("_long_memory")
@pytest.mark.parametrize("workers", [0, 1])
def test_resuming_gives_the_uninterrupted_runs_weights(image_set: Path, tmp_path: Path, workers: int) -> None:
    """Bit for bit, with mixing, stochastic depth, dropout, several sizes, and steps of two batches."""
    for name in ("whole", "parts"):
        config = configure(
            image_set, tmp_path / name, **{**RANDOM, "data": {**RANDOM["data"], "workers": workers}},
            train={"epochs": 2, "accumulate": 2, "ema": 0.5, "ema_warmup": 1}, eval={"every": 2},
        )  # fmt: skip
        if name == "whole":
            metrics = run_training(config)
        else:
            interrupted(config)
            torch.manual_seed(99)
            assert resume_training(tmp_path / name) == metrics
    assert not differing(final_weights(tmp_path / "whole"), final_weights(tmp_path / "parts"))
    states = load_training_state(tmp_path / "whole" / "last.pt")
    assert differing(states["model"], states["ema"]["model"])
    first, second = (load_training_state(tmp_path / name / "last.pt") for name in ("whole", "parts"))
    assert first["step"] == second["step"] == 4
    (one, kept), (two, kept_too) = (read_weights(tmp_path / name / "best.safetensors") for name in ("whole", "parts"))
    assert one == two
    assert not differing(kept, kept_too)


def test_a_teacher_is_taken_up_again(image_set: Path, tmp_path: Path) -> None:
    """A distilled model learns from a teacher, and its resumed run is the uninterrupted one."""
    run_training(configure(image_set, tmp_path / "teacher", train={"epochs": 8}, eval={"every": 8}))
    teacher = tmp_path / "teacher" / "best.safetensors"
    sections = {
        "model": {"name": "deit_tiny_distilled_patch16_224", "overrides": dict(TINY_VIT)},
        "loss": {"teacher": str(teacher), "distillation": 0.5},
        "data": {"size": [40, 40], "mean": [0.5, 0.5, 0.5]},
    }
    for name in ("whole", "parts"):
        config = configure(image_set, tmp_path / name, **sections, train={"epochs": 8}, eval={"every": 8})
        if name == "whole":
            metrics = run_training(config)
        else:
            trainer = build_trainer(config)
            trainer.evaluate, trainer.epochs = None, 3
            trainer.fit()
            resume_training(tmp_path / name)
    assert not differing(final_weights(tmp_path / "whole"), final_weights(tmp_path / "parts"))
    rows = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert list(rows[0]["loss"]) == ["loss_class", "loss_distill", "total"]
    assert rows[-1]["loss"]["loss_distill"] < 0.7 * rows[0]["loss"]["loss_distill"]
    assert metrics["top1"] >= 0.6
    assert load_model(tmp_path / "whole" / "best.safetensors")(torch.zeros(1, 3, 40, 40)).shape == (1, 3)


def test_a_linear_probe_changes_the_head_only(image_set: Path, tmp_path: Path) -> None:
    """And its backbone is as in evaluation: neither dropout nor stochastic depth disturb its features."""
    overrides = {**TINY_VIT, "drop_path": 0.5, "dropout": 0.5}
    config = configure(
        image_set, tmp_path / "run", train={"freeze": "backbone", "ema": 0.9}, optim={"lr": 0.1},
        model={"overrides": overrides},
    )  # fmt: skip
    start = {name: value.clone() for name, value in build_trainer(config).bare_model.state_dict().items()}
    trainer = build_trainer(config)
    modes: list[tuple[bool, bool]] = []
    features: list[bool] = []
    images = torch.randn(2, 3, 32, 32)

    def forward(model: Any, shown: Tensor, targets: Any) -> Tensor:
        modes.append((model.backbone.training, model.training))
        features.append(torch.equal(model.features(images), model.features(images)))
        assert {name for name, p in model.named_parameters() if p.requires_grad} == {"head.weight", "head.bias"}
        return model(shown)

    trainer.forward = forward
    trainer.fit()
    assert set(modes) == {(False, True)}
    assert len(modes) == 6
    assert all(features)
    assert set(differing(start, trainer.bare_model.state_dict())) == {"head.weight", "head.bias"}
    assert set(differing(start, trainer.ema.model.state_dict())) == {"head.weight", "head.bias"}  # type: ignore[union-attr]
    names = {group["name"] for group in trainer.optimizer.param_groups}
    assert names == {"head", "head, not decayed"}


def test_frozen_layers_stay(image_set: Path, tmp_path: Path) -> None:
    config = configure(image_set, tmp_path / "run", train={"freeze": ["backbone.encoder.layers.0*", "*position*"]})
    start = {name: value.clone() for name, value in build_trainer(config).bare_model.state_dict().items()}
    run_training(config)
    end = load_training_state(tmp_path / "run" / "last.pt")["model"]
    trainer = build_trainer(config)
    layers: Any = trainer.bare_model.backbone.encoder.layers  # type: ignore[union-attr]
    assert any(part is layers[0] for part in trainer.frozen)
    stayed = start.keys() - set(differing(start, end))
    frozen = {name for name in start if name.startswith("backbone.encoder.layers.0.") or "position" in name}
    assert stayed == frozen


def test_the_seed_decides_and_the_workers_do_not(image_set: Path, tmp_path: Path) -> None:
    states = {}
    for name, seed, workers in (("first", 5, 0), ("worker", 5, 1), ("other", 6, 0)):
        sections = {**RANDOM, "data": {**RANDOM["data"], "workers": workers}}
        run_training(configure(image_set, tmp_path / name, **sections, seed=seed, eval={"every": 2}))
        states[name] = final_weights(tmp_path / name)
    assert not differing(states["first"], states["worker"])
    assert differing(states["first"], states["other"])


def test_strong_augmentation_ends(image_set: Path, tmp_path: Path) -> None:
    trainer = build_trainer(configure(image_set, tmp_path, augment={"strong_until": 0.5}, train={"epochs": 4}))
    strong = []
    for epoch in range(4):
        trainer.sampler.set_epoch(epoch)
        strong.append({key.strong for batch in trainer.sampler for key in batch})  # type: ignore[attr-defined]
    assert strong == [{True}, {True}, {False}, {False}]


def test_repeats_show_copies_of_an_image(image_set: Path, tmp_path: Path) -> None:
    trainer = build_trainer(configure(image_set, tmp_path, augment={"repeats": 3}, data={"cache": True}))
    seen: dict[int, list[Tensor]] = {}
    for batch in trainer.loader:
        for index, image in zip(batch["indices"], batch["images"], strict=True):
            seen.setdefault(index, []).append(image)
    assert len(seen) == 12
    assert all(len(images) == 3 for images in seen.values())
    assert sum(not torch.equal(images[0], images[1]) for images in seen.values()) >= 11


@pytest.mark.usefixtures("_long_memory")
def test_the_average_is_evaluated_and_kept(image_set: Path, tmp_path: Path) -> None:
    trainer = build_trainer(
        configure(image_set, tmp_path / "run", train={"epochs": 3, "ema": 0.8, "ema_warmup": 1}, eval={"every": 3})
    )
    evaluated = []
    evaluate = trainer.evaluate
    assert evaluate is not None
    trainer.evaluate = lambda model: evaluated.append(model) or evaluate(model)  # type: ignore[func-returns-value]
    trainer.fit()
    assert trainer.ema is not None
    assert evaluated == [trainer.ema.model]
    kept = load_model(tmp_path / "run" / "best.safetensors").state_dict()
    assert not differing(kept, trainer.ema.model.state_dict())
    assert differing(kept, trainer.bare_model.state_dict())
    plain = build_trainer(configure(image_set, tmp_path / "plain", train={"epochs": 1, "ema": None}))
    plain.fit()
    assert not differing(
        load_model(tmp_path / "plain" / "best.safetensors").state_dict(), plain.bare_model.state_dict()
    )


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_bfloat16_and_both_losses_learn(image_set: Path, tmp_path: Path, kind: str) -> None:
    config = configure(
        image_set, tmp_path / "run", train={"epochs": 8, "precision": "bf16"}, eval={"every": 8},
        loss={"kind": kind, "label_smoothing": 0.1},
    )  # fmt: skip
    metrics = run_training(config)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["loss"]["total"] < 0.85 * rows[0]["loss"]["total"]
    assert rows[-1]["skipped"] == 0
    assert metrics["top1"] >= 0.6
