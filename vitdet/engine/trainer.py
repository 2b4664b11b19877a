"""The trainer: epochs of steps over built objects, evaluation, checkpoints.

A step does not wait for the device but in the matcher: losses are summed on the device and read once an epoch, and a
step whose gradient is not finite is skipped by the optimizer's own kernel.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import yaml
from torch import Tensor, nn

from vitdet import distributed
from vitdet.engine.checkpoint import load_training_state, save_training_state, save_weights, write_atomically
from vitdet.engine.ema import ExponentialMovingAverage
from vitdet.engine.logging import RunLog, progress, say
from vitdet.errors import UserError
from vitdet.structures import ModelMetadata


class EpochSampler(Protocol):
    """What the trainer needs of the loader's batch sampler: its length, and to be put at a place in the run."""

    def __len__(self) -> int: ...

    def set_epoch(self, epoch: int) -> None:
        """Draw the batches of this epoch from now on."""


def groups_of(batches: Iterable[dict[str, Any]], size: int) -> Iterator[list[dict[str, Any]]]:
    """Batches in lists of ``size``, the last one of what is left."""
    rest = iter(batches)
    while group := list(islice(rest, size)):
        yield group


class Trainer:
    """Trains a model.

    Args:
        model: the model, or its wrapper of distributed training.
        forward: called as ``forward(model, images, targets)``, with ``sizes=`` where the loader padded the images
            and tells their sizes; gives what the criterion takes.
        prepare: called as ``prepare(images, targets)`` on normalised images, gives both as the model shall see them
            (mixup, a teacher's labels); None for nothing.
        criterion: called as ``criterion(output, targets)``; the sum of its losses is ``total``. It is told of each
            epoch where it has ``set_epoch``.
        optimizer: fused. rate: optimizer step -> multiplier of every group's learning rate.
        loader: batches with ``images`` (uint8) and ``targets``. sampler: the loader's.
        ema: average to evaluate and keep, or None.
        evaluate: model -> metrics, or None. metric: the one that says which weights are best.
        metadata: for the weights files; its preprocessing normalises the images.
        epochs: length of the run. evaluate_every: epochs between evaluations; the last one always is.
        accumulate: batches whose gradients are averaged into one step.
        frozen: parts of the model that stay in evaluation mode.
        clip_norm: largest gradient norm, 0 for none. autocast: dtype, or None for float32.
        output: the run's folder, made when the first epoch is over. config: plain values, kept with the run.
        seed: with the step and the process, of all that is drawn in a step.
    """

    def __init__(
        self, *, model: nn.Module, forward: Callable[..., Any],
        prepare: Callable[[Tensor, Any], tuple[Tensor, Any]] | None = None, criterion: nn.Module,
        optimizer: torch.optim.Optimizer,
        rate: Callable[[int], float], loader: Iterable, sampler: EpochSampler, ema: ExponentialMovingAverage | None,
        evaluate: Callable[[nn.Module], dict[str, Any]] | None, metric: str, metadata: ModelMetadata, epochs: int,
        evaluate_every: int, clip_norm: float, autocast: torch.dtype | None, device: torch.device, output: Path,
        config: dict[str, Any], seed: int, accumulate: int = 1, frozen: Sequence[nn.Module] = (),
    ) -> None:  # fmt: skip
        self.model, self.criterion, self.optimizer, self.rate = model, criterion, optimizer, rate
        self.forward, self.prepare, self.accumulate, self.frozen = forward, prepare, accumulate, frozen
        self.loader, self.sampler, self.ema = loader, sampler, ema
        self.evaluate, self.metric, self.metadata = evaluate, metric, metadata
        self.epochs, self.evaluate_every, self.clip_norm = epochs, evaluate_every, clip_norm
        self.autocast, self.device, self.output, self.config = autocast, device, output, config
        self.seed, self.main = seed, distributed.rank() == 0
        self.base_rates = [group["lr"] for group in optimizer.param_groups]
        self.epoch, self.step, self.best, self.seconds = 0, 0, float("-inf"), 0.0
        self.best_metrics: dict[str, Any] = {}
        self.skipped = torch.zeros((), device=device)

    @property
    def bare_model(self) -> nn.Module:
        """The model without the wrapper of distributed training."""
        return self.model.module if isinstance(self.model, nn.parallel.DistributedDataParallel) else self.model

    @property
    def best_model(self) -> nn.Module:
        """The model that is evaluated and kept: the average, where there is one."""
        return self.ema.model if self.ema else self.bare_model

    def fit(self) -> dict[str, Any]:
        """Train to the end and return the metrics of the best weights; only the main process has any."""
        log = RunLog(self.output, resumed=self.epoch) if self.main else None
        while self.epoch < self.epochs:
            losses = self.train_epoch()
            row = {"epoch": self.epoch, "step": self.step, "lr": self.highest_rate(), "loss": losses}
            metrics: dict[str, Any] = {}
            if self.evaluate and (self.epoch % self.evaluate_every == 0 or self.epoch == self.epochs):
                # Batch statistics are each process's own where they are not synchronised.
                distributed.share_from_main(self.best_model.state_dict().values())
                metrics = self.evaluate(self.best_model)
                metrics.pop("results", None)
                row["metrics"] = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
            if log:
                row |= {"seconds": round(self.seconds, 2), "skipped": int(self.skipped)}
                log.write(row)
                self.report(row)
                self.keep(metrics)
                if metrics or self.epoch == self.epochs:  # a picture takes half a second
                    log.draw(metric=self.metric)
        return self.best_metrics

    def highest_rate(self) -> float:
        """The largest learning rate: with a rate a layer, the head's."""
        return max(group["lr"] for group in self.optimizer.param_groups)

    def train_epoch(self) -> dict[str, float]:
        """One pass over the loader; returns the mean losses of finite steps, summed over predictions by term."""
        self.sampler.set_epoch(self.epoch)
        if callable(set_epoch := getattr(self.criterion, "set_epoch", None)):  # what it asks may change in the run
            set_epoch(self.epoch)
        self.model.train()
        for part in self.frozen:
            part.eval()
        start, count, names = time.monotonic(), 0, list[str]()
        skipped = self.skipped.clone()
        sums, finite_steps = torch.zeros((), device=self.device), torch.zeros((), device=self.device)
        title = f"epoch {self.epoch + 1}/{self.epochs}"
        batches = progress(self.loader, total=len(self.sampler), title=title, show=self.main)
        for group in groups_of(batches, self.accumulate):
            losses = self.train_step(group)
            count, names = count + 1, list(losses)
            finite = losses["total"].isfinite()
            finite_steps += finite
            sums = sums + torch.where(finite, torch.stack(list(losses.values())), 0.0)
        self.epoch += 1
        self.seconds += time.monotonic() - start
        if int(self.skipped - skipped) >= count:
            raise UserError(
                f"nothing was learnt in epoch {self.epoch}: the gradients were not finite and all {count} steps were "
                "skipped; lower optim.lr or check the data"
            )
        self.check_buffers()
        means = (sums / finite_steps.clamp(min=1)).tolist()
        by_term: dict[str, float] = {}
        for name, mean in zip(names, means, strict=True):
            term = name.rsplit("/", 1)[-1]
            by_term[term] = by_term.get(term, 0.0) + mean
        return by_term

    def check_buffers(self) -> None:
        """A skipped step leaves the weights alone, but its images have gone through the batch statistics."""
        for name, buffer in self.bare_model.named_buffers():
            if buffer.is_floating_point() and not buffer.isfinite().all():
                raise UserError(
                    f"{name} is not finite after epoch {self.epoch}; lower optim.lr or set train.precision=fp32"
                )

    def train_step(self, batches: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
        """Forward, loss and backward of each batch; then clip, step, average. Returns the mean losses."""
        torch.manual_seed(self.step_seed())
        for group, base in zip(self.optimizer.param_groups, self.base_rates, strict=True):
            group["lr"] = base * self.rate(self.step)
        losses: dict[str, Tensor] = {}
        for batch in batches:
            last = batch is batches[-1]
            for name, value in self.backward(batch, share=1 / len(batches), communicate=last).items():
                losses[name] = losses[name] + value if name in losses else value
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm or float("inf"))
        # The fused kernel leaves weights and moments alone where found_inf is 1: no wait for the device.
        broken = (~torch.isfinite(norm)).float()
        self.optimizer.found_inf = broken  # type: ignore[attr-defined]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.skipped += broken
        self.step += 1
        if self.ema:
            self.ema.update(self.bare_model)
        return losses

    def backward(self, batch: dict[str, Any], *, share: float, communicate: bool) -> dict[str, Tensor]:
        """Add the gradient of ``share`` times the loss of one batch; returns that share of the losses."""
        images = batch["images"].to(self.device, non_blocking=True)
        targets = batch["targets"].to(self.device, non_blocking=True)
        padding = {} if "sizes" not in batch else {"sizes": batch["sizes"].to(self.device, non_blocking=True)}
        images = self.metadata.preprocessing.normalize(images, **padding)
        if self.prepare:
            images, targets = self.prepare(images, targets)
        # Gradients of all but the last batch of a step stay on their process.
        alone = isinstance(self.model, nn.parallel.DistributedDataParallel) and not communicate
        with self.model.no_sync() if alone else nullcontext():  # type: ignore[operator]
            with torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None):
                output = self.forward(self.model, images, targets, **padding)
            losses = self.criterion(output, targets)
            (losses["total"] * share).backward()
        return {name: value.detach() * share for name, value in losses.items()}

    def step_seed(self) -> int:
        """Seed of what this step draws on this process: the same after a resume, another on each process."""
        sequence = np.random.SeedSequence([self.seed, self.step, distributed.rank()])
        return int(sequence.generate_state(1, np.uint64)[0] >> 1)

    def report(self, row: dict[str, Any]) -> None:
        """One line about the epoch."""
        metrics = row.get("metrics", {})
        parts = [f"epoch {row['epoch']}/{self.epochs}", f"loss {row['loss']['total']:.3f}", f"lr {row['lr']:.2e}"]
        parts += [
            f"{name} {metrics[name]:.3f}" for name in dict.fromkeys((self.metric, "AP50", "top5")) if name in metrics
        ]
        parts += [f"{row['skipped']} steps skipped, their gradients were not finite"] if row["skipped"] else []
        say("  ".join([*parts, f"{self.seconds:.0f} s"]))

    def keep(self, metrics: dict[str, Any]) -> None:
        """Write ``best.safetensors`` where the metric is the best so far (or there is none), and ``last.pt``."""
        score = float(metrics.get(self.metric, -1.0))
        if (metrics and score > self.best) or (not self.evaluate and self.epoch == self.epochs):
            self.best = max(score, self.best)
            self.best_metrics = metrics
            self.metadata.metrics = {k: float(v) for k, v in metrics.items() if isinstance(v, int | float)}
            save_weights(self.output / "best.safetensors", self.best_model, self.metadata)
        text = yaml.safe_dump(self.config, sort_keys=False)
        write_atomically(self.output / "config.yaml", lambda temporary: temporary.write_text(text))
        save_training_state(self.output / "last.pt", self.state())

    def state(self) -> dict[str, Any]:
        """Everything needed to go on from here."""
        return {
            "model": self.bare_model.state_dict(),
            "ema": self.ema.state_dict() if self.ema else None,
            "optimizer": self.optimizer.state_dict(),
            "epoch": self.epoch,
            "step": self.step,
            "best": self.best,
            "best_metrics": self.best_metrics,
            "seconds": self.seconds,
            "skipped": float(self.skipped),
            "metadata": self.metadata.to_dict(),
            "config": self.config,
        }

    def resume(self, path: Path) -> None:
        """Take up the state of a ``last.pt``."""
        state = load_training_state(path)
        theirs, ours = state["metadata"], self.metadata.to_dict()
        for key in ("name", "arguments", "class_map"):
            if theirs[key] != ours[key]:
                raise UserError(f"{path} is of a run with {key} {theirs[key]}, this one has {ours[key]}; start anew")
        self.bare_model.load_state_dict(state["model"])
        if self.ema:
            self.ema.load_state_dict(state["ema"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.epoch, self.step, self.best, self.seconds = state["epoch"], state["step"], state["best"], state["seconds"]
        self.skipped.fill_(state["skipped"])
        self.best_metrics = state["best_metrics"] if self.main else {}
        self.metadata.metrics = theirs["metrics"]
