"""The trainer's promises, on a toy model: what is skipped, kept, resumed and written."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vitdet import distributed
from vitdet.engine.checkpoint import load_training_state, read_weights
from vitdet.engine.ema import ExponentialMovingAverage
from vitdet.engine.logging import RunLog
from vitdet.engine.optim import make_optimizer
from vitdet.engine.trainer import Trainer
from vitdet.errors import UserError
from vitdet.structures import ClassMap, ModelMetadata, Preprocessing, Targets

STEPS = 3  # an epoch


class ToyModel(nn.Module):
    """Mean colours to a number, with a random draw in each step as denoising queries make."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 1)
        self.dropout = nn.Dropout(0.3)

    def forward(self, images: Tensor, targets: Targets) -> Tensor:
        del targets
        return self.head(self.dropout(images.mean((2, 3))))


class ToyCriterion(nn.Module):
    """Pulls the output to 3; gives NaN in the steps (counted from 0) named."""

    def __init__(self, broken: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.broken, self.step, self.epochs = broken, 0, []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def forward(self, output: Tensor, targets: Targets) -> dict[str, Tensor]:
        del targets
        value = ((output - 3) ** 2).mean() * (math.nan if self.step in self.broken else 1.0)
        self.step += 1
        terms = {f"decoder_{layer}/{name}": value for layer in (0, 1) for name in ("vfl", "box", "giou")}
        return terms | {"total": torch.stack(list(terms.values())).sum()}


class ToySampler:
    """Remembers the epochs it was put at."""

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def __len__(self) -> int:
        return STEPS

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)


@pytest.fixture(autouse=True)
def _no_drawing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture takes longer than all else here; two tests look at it."""
    if request.node.name not in (
        "test_a_run_writes_its_files",
        "test_skipped_steps_are_counted_and_the_log_stays_json",
    ):
        monkeypatch.setattr(RunLog, "draw", lambda self, *, metric: None)


def make_batches() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(3)
    return [
        {
            "images": torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8, generator=generator),
            "targets": Targets.from_lists([torch.zeros(0, 4)] * 2, [torch.zeros(0, dtype=torch.int64)] * 2),
        }
        for _ in range(STEPS)
    ]


def make_trainer(
    output: Path, *, broken: tuple[int, ...] = (), scores: list[float] | None = None, epochs: int = 3, every: int = 1,
    ema: bool = True, clip_norm: float = 0.0, accumulate: int = 1,
    rate: Callable[[int], float] = lambda step: 1.0, name: str = "toy",
) -> Trainer:  # fmt: skip
    """A trainer whose evaluations give ``scores`` in turn."""
    torch.manual_seed(1)
    model = ToyModel()
    given = iter(scores or [])
    return Trainer(
        model=model, forward=lambda model, images, targets: model(images, targets), accumulate=accumulate,
        criterion=ToyCriterion(broken), rate=rate, loader=make_batches(), sampler=ToySampler(),
        optimizer=make_optimizer(model, lr=0.01, backbone_lr=0.01, weight_decay=0.0),
        ema=ExponentialMovingAverage(model, decay=0.5, warmup=1) if ema else None,
        evaluate=(lambda model: {"AP": next(given), "AP50": 0.5, "per_class": {}}) if scores else None, metric="AP",
        metadata=ModelMetadata(name, {"num_classes": 1}, ClassMap((4,), ("x",)), Preprocessing((8, 8))), epochs=epochs,
        evaluate_every=every, clip_norm=clip_norm, autocast=None, device=torch.device("cpu"), output=output,
        config={"seed": 1}, seed=1,
    )  # fmt: skip


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


def rows_of(output: Path) -> list[dict[str, Any]]:
    """The log's rows; NaN and Infinity are no JSON and are refused."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} in metrics.jsonl")

    lines = (output / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line, parse_constant=refuse) for line in lines]


def test_a_run_writes_its_files(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "run", scores=[0.1, 0.3, 0.2])
    metrics = trainer.fit()
    assert metrics == {"AP": 0.3, "AP50": 0.5, "per_class": {}}
    names = {"config.yaml", "metrics.jsonl", "curves.png", "last.pt", "best.safetensors"}
    assert {path.name for path in (tmp_path / "run").iterdir()} == names
    assert (tmp_path / "run" / "config.yaml").read_text() == "seed: 1\n"
    rows = rows_of(tmp_path / "run")
    assert [(row["epoch"], row["step"], row["skipped"]) for row in rows] == [(1, 3, 0), (2, 6, 0), (3, 9, 0)]
    assert [row["metrics"] for row in rows] == [{"AP": score, "AP50": 0.5} for score in (0.1, 0.3, 0.2)]
    assert trainer.sampler.epochs == trainer.criterion.epochs == [0, 1, 2]


def test_losses_are_epoch_means_summed_by_term(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, epochs=1)
    totals: list[float] = []
    trainer.criterion.register_forward_hook(lambda module, inputs, losses: totals.append(losses["total"].item()))
    losses = trainer.train_epoch()
    assert losses["total"] == pytest.approx(sum(totals) / STEPS)
    assert losses["vfl"] == pytest.approx(losses["total"] / 3)  # two predictions with three equal terms each
    assert losses.keys() == {"total", "vfl", "box", "giou"}


def test_a_step_that_is_not_finite_changes_nothing(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, broken=(1,), ema=False)
    first, second, third = trainer.loader
    trainer.train_step([first])
    before, moments = weights(trainer.model), trainer.optimizer.state_dict()["state"]
    kept = {index: {key: value.clone() for key, value in state.items()} for index, state in moments.items()}
    trainer.train_step([second])
    assert equal(weights(trainer.model), before)
    for index, state in trainer.optimizer.state_dict()["state"].items():
        assert equal(state, kept[index]), "moments or step counts moved"
    assert (int(trainer.skipped), trainer.step) == (1, 2)
    trainer.train_step([third])
    assert not equal(weights(trainer.model), before)
    assert int(trainer.skipped) == 1


def test_skipped_steps_are_counted_and_the_log_stays_json(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, broken=(1, 3), epochs=2)
    trainer.fit()
    assert [row["skipped"] for row in rows_of(tmp_path)] == [1, 2]
    assert (tmp_path / "curves.png").is_file()


def test_steps_left_out_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_trainer(tmp_path, broken=(4, 6), epochs=3).fit()
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("epoch ")]
    assert [line.partition("  ")[0] for line in lines] == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]
    told = [re.search(r"  (\d) steps skipped, their gradients were not finite  \d+ s$", line) for line in lines]
    assert [match and match[1] for match in told] == [None, "1", "2"]


def test_statistics_that_are_not_finite_end_the_run(tmp_path: Path) -> None:
    """They come through the forward pass, which no skipped step takes back."""
    trainer = make_trainer(tmp_path / "run", ema=False)
    trainer.model.register_buffer("steps", torch.tensor(3))
    trainer.model.register_buffer("mean", torch.ones(2))
    trainer.train_epoch()
    trainer.model.mean[1] = math.inf
    with pytest.raises(UserError) as error:
        trainer.fit()
    assert str(error.value) == "mean is not finite after epoch 2; lower optim.lr or set train.precision=fp32"
    assert not (tmp_path / "run").exists()


def test_draws_depend_on_seed_step_and_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(tmp_path)
    seeds = []
    for rank, seed, step in itertools.product(range(2), range(3), range(50)):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        trainer.seed, trainer.step = seed, step
        seeds.append(trainer.step_seed())
        assert trainer.step_seed() == seeds[-1]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_step_draws_the_same_whatever_was_drawn_before(tmp_path: Path) -> None:
    """So that a run goes on from its last epoch as if it had never stopped."""
    losses = []
    for before in (0, 17):
        trainer = make_trainer(tmp_path)
        torch.rand(before)
        losses.append([trainer.train_step([batch])["total"].item() for batch in trainer.loader])
    assert losses[0] == losses[1]
    trainer = make_trainer(tmp_path)
    trainer.seed = 2
    assert trainer.train_step([trainer.loader[0]])["total"].item() != losses[0][0]


def test_accumulated_batches_make_the_step_of_one_large_batch(tmp_path: Path) -> None:
    """Their gradients are averaged; an epoch of three batches has a step of two and a step of the one left."""
    batches = make_batches()
    joined = {
        "images": torch.cat([batch["images"] for batch in batches[:2]]),
        "targets": Targets.from_lists([torch.zeros(0, 4)] * 4, [torch.zeros(0, dtype=torch.int64)] * 4),
    }
    states = []
    for group in (batches[:2], [joined]):
        trainer = make_trainer(tmp_path, ema=False)
        trainer.model.dropout.p = 0.0
        losses = trainer.train_step(group)
        states.append((weights(trainer.model), losses["total"].item()))
    torch.testing.assert_close(states[0][0], states[1][0])
    assert states[0][1] == pytest.approx(states[1][1])

    trainer = make_trainer(tmp_path, accumulate=2)
    losses = trainer.train_epoch()
    assert trainer.step == 2
    assert losses["total"] == pytest.approx(3 * losses["vfl"])


def test_images_are_prepared_before_the_model_sees_them(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    seen: list[Tensor] = []
    trainer.prepare = lambda images, targets: (images * 0 + 0.25, targets)
    trainer.forward = lambda model, images, targets: (seen.append(images), model(images, targets))[1]
    trainer.train_step([trainer.loader[0]])
    assert seen[0].unique().tolist() == [0.25]


def test_frozen_parts_stay_in_evaluation_mode(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    trainer.frozen = [trainer.model.dropout]
    trainer.train_epoch()
    assert trainer.model.head.training
    assert not trainer.model.dropout.training


def test_a_bad_step_now_and_then_does_not_end_the_run(tmp_path: Path) -> None:
    """One in each of four epochs of three steps: more in all than an epoch has, but never a whole epoch."""
    trainer = make_trainer(tmp_path, broken=(0, 3, 6, 9), epochs=4)
    trainer.fit()
    assert (trainer.epoch, int(trainer.skipped)) == (4, 4)


def test_an_epoch_of_bad_steps_ends_the_run(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "run", broken=(0, 1, 2), epochs=2)
    with pytest.raises(UserError, match=r"epoch 1\b.* 3 steps were skipped; lower optim\.lr or check"):
        trainer.fit()
    assert not (tmp_path / "run").exists()


def test_the_rate_multiplies_every_groups_own(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, rate=lambda step: (step + 1) / 10)
    trainer.base_rates = [0.5, 0.25]
    seen = []
    for batch in trainer.loader:
        trainer.train_step([batch])
        seen.append([group["lr"] for group in trainer.optimizer.param_groups])
    assert seen == [pytest.approx([0.05, 0.025]), pytest.approx([0.1, 0.05]), pytest.approx([0.15, 0.075])]


@pytest.mark.parametrize(("clip_norm", "expected"), [(0.1, 0.1), (0.0, None)])
def test_gradients_are_clipped(tmp_path: Path, clip_norm: float, expected: float | None) -> None:
    trainer = make_trainer(tmp_path, clip_norm=clip_norm)
    norms: list[float] = []

    def record(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        del args, kwargs
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        norms.append(float(torch.cat([gradient.flatten() for gradient in gradients]).norm()))

    trainer.optimizer.register_step_pre_hook(record)
    trainer.train_step([trainer.loader[0]])
    assert norms[0] == pytest.approx(expected, rel=1e-3) if expected else norms[0] > 1


def test_evaluation_comes_every_few_epochs_and_at_the_end(tmp_path: Path) -> None:
    make_trainer(tmp_path, scores=[0.1, 0.2, 0.3], epochs=5, every=2).fit()
    assert [row["epoch"] for row in rows_of(tmp_path) if "metrics" in row] == [2, 4, 5]


@pytest.mark.parametrize("ema", [True, False])
def test_the_best_weights_are_kept(tmp_path: Path, ema: bool) -> None:
    """Those of the second epoch, of the average where there is one."""
    trainer = make_trainer(tmp_path, scores=[0.1, 0.5, 0.3], ema=ema)
    evaluate, evaluated = trainer.evaluate, []

    def watch(model: nn.Module) -> dict[str, Any]:
        assert model is (trainer.ema.model if trainer.ema else trainer.model)
        evaluated.append(weights(model))
        return evaluate(model)

    trainer.evaluate = watch
    trainer.fit()
    metadata, state = read_weights(tmp_path / "best.safetensors")
    assert equal(state, evaluated[1])
    assert not equal(state, evaluated[2])
    assert metadata.metrics == {"AP": 0.5, "AP50": 0.5}
    assert metadata.class_map == ClassMap((4,), ("x",))


def test_a_run_without_evaluation_keeps_its_last_weights(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, ema=False)
    assert trainer.fit() == {}
    assert equal(read_weights(tmp_path / "best.safetensors")[1], weights(trainer.model))


def test_a_validation_set_without_objects_still_gives_weights(tmp_path: Path) -> None:
    """COCO's AP is then -1."""
    metrics = make_trainer(tmp_path, scores=[-1.0, -1.0, -1.0]).fit()
    assert metrics["AP"] == -1.0
    assert (tmp_path / "best.safetensors").is_file()


def test_resuming_is_bit_equal(tmp_path: Path) -> None:
    scores = [0.1, 0.4, 0.3, 0.2]
    whole = make_trainer(tmp_path / "whole", scores=scores, epochs=4)
    whole.fit()
    first = make_trainer(tmp_path / "parts", scores=scores[:2], epochs=4)
    first.epochs = 2
    first.fit()
    second = make_trainer(tmp_path / "parts", scores=scores[2:], epochs=4)
    torch.manual_seed(99)  # a new process starts elsewhere
    second.resume(tmp_path / "parts" / "last.pt")
    assert (second.epoch, second.step, second.best) == (2, 2 * STEPS, 0.4)
    metrics = second.fit()
    assert second.sampler.epochs == second.criterion.epochs == [2, 3]
    assert equal(weights(second.model), weights(whole.model))
    assert equal(weights(second.ema.model), weights(whole.ema.model))
    for index, state in whole.optimizer.state_dict()["state"].items():
        assert equal(state, second.optimizer.state_dict()["state"][index])
    drop = {"seconds"}
    assert [{k: v for k, v in row.items() if k not in drop} for row in rows_of(tmp_path / "parts")] == [
        {k: v for k, v in row.items() if k not in drop} for row in rows_of(tmp_path / "whole")
    ]
    assert metrics["AP"] == 0.4  # the best is from before the break
    assert read_weights(tmp_path / "parts" / "best.safetensors")[0].metrics["AP"] == 0.4


def test_resuming_counts_skipped_steps_on(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, broken=(1,), epochs=2)
    trainer.epochs = 1
    trainer.fit()
    again = make_trainer(tmp_path, epochs=2)
    again.resume(tmp_path / "last.pt")
    again.fit()
    assert [row["skipped"] for row in rows_of(tmp_path)] == [1, 1]


def test_another_models_state_is_refused(tmp_path: Path) -> None:
    make_trainer(tmp_path, epochs=1).fit()
    other = make_trainer(tmp_path, name="rtdetr_r18")
    before = weights(other.model)
    with pytest.raises(UserError, match=r"last\.pt is of a run with name toy, this one has rtdetr_r18; start anew$"):
        other.resume(tmp_path / "last.pt")
    assert equal(weights(other.model), before)


def test_a_new_run_leaves_nothing_of_an_older_one(tmp_path: Path) -> None:
    """Stopped before its first evaluation, it must not pass off the older run's weights as its own."""
    make_trainer(tmp_path, scores=[0.9] * 5, epochs=5).fit()
    (tmp_path / "curves.png").write_text("old")
    trainer = make_trainer(tmp_path, scores=[0.1], epochs=2, every=2)

    def stop(model: nn.Module) -> dict[str, Any]:
        raise KeyboardInterrupt

    trainer.evaluate = stop
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    assert {path.name for path in tmp_path.iterdir()} == {"config.yaml", "last.pt", "metrics.jsonl"}
    assert [row["epoch"] for row in rows_of(tmp_path)] == [1]
    assert load_training_state(tmp_path / "last.pt")["epoch"] == 1


def test_a_new_run_that_fails_leaves_the_older_one(tmp_path: Path) -> None:
    make_trainer(tmp_path, scores=[0.9] * 3).fit()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(UserError, match="nothing was learnt in epoch 1"):
        make_trainer(tmp_path, broken=(0, 1, 2)).fit()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert "best.safetensors" in before


def test_a_resumed_run_drops_the_row_that_came_before_its_checkpoint(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, scores=[0.1, 0.2, 0.3])
    trainer.epochs = 1
    trainer.fit()
    kept = (tmp_path / "last.pt").read_bytes()
    trainer.epochs = 2
    trainer.fit()
    (tmp_path / "last.pt").write_bytes(kept)  # stopped after the row of the second epoch was written
    again = make_trainer(tmp_path, scores=[0.2, 0.3])
    again.resume(tmp_path / "last.pt")
    again.fit()
    assert [(row["epoch"], row["step"]) for row in rows_of(tmp_path)] == [(1, 3), (2, 6), (3, 9)]


def test_an_error_in_the_first_epoch_leaves_no_folder(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "run", scores=[0.1])

    def fail(model: nn.Module) -> dict[str, Any]:
        raise UserError("no")

    trainer.evaluate = fail
    with pytest.raises(UserError, match=r"^no$"):
        trainer.fit()
    assert not (tmp_path / "run").exists()
