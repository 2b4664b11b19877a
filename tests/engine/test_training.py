"""Whole runs of a small RT-DETR on a tiny data set: it learns, it repeats, it resumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.tiny import CATEGORIES, tiny_values
from vitdet import load_model
from vitdet.build import build_trainer, resume_training, run_training
from vitdet.config import RunConfig
from vitdet.engine.checkpoint import load_training_state
from vitdet.engine.logging import RunLog
from vitdet.errors import UserError


@pytest.fixture(autouse=True)
def _no_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture takes as long as an epoch here; other tests look at it."""
    monkeypatch.setattr(RunLog, "draw", lambda self, *, metric: None)


def configure(root: Path, output: Path, **sections: dict[str, Any] | int) -> RunConfig:
    values = tiny_values(root, output)
    for name, change in sections.items():
        values[name] = {**values.get(name, {}), **change} if isinstance(change, dict) else change
    return RunConfig.model_validate(values)


def final_weights(output: Path) -> dict[str, Tensor]:
    state = load_training_state(output / "last.pt")
    averaged = {f"average of {name}": value for name, value in state["ema"]["model"].items()}
    return state["model"] | averaged


def differing(first: dict[str, Tensor], second: dict[str, Tensor]) -> list[str]:
    assert first.keys() == second.keys()
    return [name for name, value in first.items() if not torch.equal(value, second[name])]


def test_it_learns_and_leaves_weights(tiny_set: Path, tmp_path: Path) -> None:
    output = tmp_path / "run"
    config = configure(tiny_set, output, train={"epochs": 14}, eval={"every": 14})
    metrics = run_training(config)
    rows = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    totals = [row["loss"]["total"] for row in rows]
    assert sum(totals[-2:]) < 0.75 * sum(totals[:2]), totals
    assert rows[-1]["step"] == 14 * 3
    assert {path.name for path in output.iterdir()} == {"config.yaml", "metrics.jsonl", "last.pt", "best.safetensors"}
    assert RunConfig.model_validate(load_training_state(output / "last.pt")["config"]) == config
    metadata = load_model(output / "best.safetensors").metadata
    assert dict(zip(metadata.class_map.ids, metadata.class_map.names, strict=True)) == CATEGORIES
    assert metadata.preprocessing.size == (64, 64)
    assert metadata.arguments == {"num_classes": 2, **config.model.overrides}
    assert metadata.metrics["AP"] == metrics["AP"]
    assert metrics["per_class"].keys() == set(CATEGORIES.values())


def test_resuming_gives_the_uninterrupted_runs_weights(tiny_set: Path, tmp_path: Path) -> None:
    def config(output: Path) -> RunConfig:
        return configure(tiny_set, output, train={"epochs": 4}, eval={"every": 4}, augment={"mosaic": 0.5})

    run_training(config(tmp_path / "whole"))
    trainer = build_trainer(config(tmp_path / "parts"))
    trainer.evaluate, trainer.epochs = None, 2
    trainer.fit()
    torch.manual_seed(99)
    resume_training(tmp_path / "parts")
    assert not differing(final_weights(tmp_path / "whole"), final_weights(tmp_path / "parts"))


def test_the_seed_decides_and_the_workers_do_not(tiny_set: Path, tmp_path: Path) -> None:
    """Two epochs: the random numbers of the second must not depend on how the first was loaded."""
    states = {}
    for name, seed, workers in (("first", 5, 0), ("again", 5, 0), ("worker", 5, 1), ("other", 6, 0)):
        output = tmp_path / name
        config = configure(
            tiny_set, output, seed=seed, data={"workers": workers}, eval={"every": 2}, augment={"mosaic": 0.5}
        )
        run_training(config)
        states[name] = final_weights(output)
    assert not differing(states["first"], states["again"])
    assert not differing(states["first"], states["worker"])
    assert differing(states["first"], states["other"])


def test_resuming_with_workers_too(tiny_set: Path, tmp_path: Path) -> None:
    for name in ("whole", "parts"):
        config = configure(tiny_set, tmp_path / name, train={"epochs": 3}, eval={"every": 3}, data={"workers": 1})
        trainer = build_trainer(config)
        trainer.evaluate, trainer.epochs = None, 3 if name == "whole" else 1
        trainer.fit()
    trainer = build_trainer(config)
    trainer.evaluate = None
    trainer.resume(tmp_path / "parts" / "last.pt")
    trainer.fit()
    assert not differing(final_weights(tmp_path / "whole"), final_weights(tmp_path / "parts"))


def test_resuming_another_model_is_refused(tiny_set: Path, tmp_path: Path) -> None:
    trainer = build_trainer(configure(tiny_set, tmp_path / "run"))
    trainer.evaluate, trainer.epochs = None, 1
    trainer.fit()
    overrides = {**tiny_values(tiny_set, tmp_path)["model"]["overrides"], "num_queries": 30}
    other = build_trainer(configure(tiny_set, tmp_path / "run", model={"overrides": overrides}))
    with pytest.raises(UserError, match=r"last\.pt is of a run with arguments .*'num_queries': 20.*; start anew$"):
        other.resume(tmp_path / "run" / "last.pt")
