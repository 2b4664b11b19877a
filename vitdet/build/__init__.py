"""From a configuration to model, criterion, loaders, optimizer, trainer: the only place that joins them."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitdet import distributed, zoo
from vitdet.build import classification, detection
from vitdet.build.parts import build_rate, check_class_map
from vitdet.config import AnyRunConfig, RunConfig, check_config
from vitdet.devices import autocast_dtype, pick_device
from vitdet.engine.checkpoint import load_training_state
from vitdet.engine.ema import ExponentialMovingAverage, scaled_decay
from vitdet.engine.freezing import freeze
from vitdet.engine.optim import make_optimizer
from vitdet.engine.schedules import warmup_steps
from vitdet.engine.trainer import Trainer
from vitdet.errors import UserError
from vitdet.structures import ModelMetadata, Preprocessing


def evaluate_source(
    source: str | Path, *, root: str | Path, split: str = "val", batch: int = 8, workers: int = 2, device: str = "auto",
    backend: str = "hotcoco", top_k: int = 300, model: str | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Load a model and measure it on a split; what ``vitdet eval`` does.

    Args:
        source: anything that ``vitdet.load_model`` takes. model: its name in the zoo, where the file does not say.
        root, split: the data set. batch, workers: of the loader.
        backend, top_k: for detectors, see :class:`CocoEvaluator` and :func:`postprocess`.

    Returns:
        The metrics, and under ``results`` what was found, image by image.
    """
    target = pick_device(device)
    module = zoo.load_model(source, model=model).to(target)
    metadata: ModelMetadata = module.metadata  # type: ignore[assignment]
    if zoo.is_classifier(metadata.name):
        if not len(metadata.class_map):
            raise UserError(
                f"{source} gives features and knows no classes; train a head on it first: "
                f"vitdet train CONFIG model.weights={source}"
            )
        images = classification.read_split(root, split, class_map=metadata.class_map)
        loader = classification.build_eval_loader(
            images, metadata.preprocessing, batch=batch, workers=workers, cache=False
        )
        return classification.build_evaluation(images, loader, device=target)(module)
    data = detection.read_split(root, split)
    check_class_map(metadata, data.class_map.names, data.root)
    loader = detection.build_eval_loader(data, metadata.preprocessing, batch=batch, workers=workers, cache=False)
    return detection.build_evaluation(data, loader, backend=backend, top_k=top_k, device=target)(module)


def build_trainer(config: AnyRunConfig) -> Trainer:
    """Everything a run needs. Problems with data and model show before the run's folder is made."""
    torch.manual_seed(config.seed)  # the same first weights everywhere: the average is copied before they are shared
    device = pick_device(config.train.device)
    check_task(config)
    task = detection.assemble if isinstance(config, RunConfig) else classification.assemble
    parts = task(config, device)  # type: ignore[arg-type]
    model, optim, train = parts.model, config.optim, config.train
    metadata: ModelMetadata = model.metadata  # type: ignore[assignment]
    if distributed.is_distributed() and device.type == "cuda":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # as published: statistics of the whole batch
    frozen = freeze(model, train.freeze)  # after the conversion, which makes new modules
    model = model.to(device)
    total = math.ceil(len(parts.sampler) / train.accumulate) * train.epochs
    ema = None
    if train.ema is not None:
        warmup = warmup_steps(total, fraction=0.1, most=train.ema_warmup)
        ema = ExponentialMovingAverage(model, decay=scaled_decay(train.ema, total_steps=total), warmup=warmup)
    try:
        optimizer = make_optimizer(
            model, lr=optim.lr, backbone_lr=optim.backbone_lr or optim.lr, weight_decay=optim.weight_decay,
            layer_decay=optim.layer_decay, betas=optim.betas,
        )  # fmt: skip
    except ValueError as error:
        raise UserError(f"optim.layer_decay cannot be {optim.layer_decay} for {config.model.name}: {error}") from error
    wrapped = nn.parallel.DistributedDataParallel(model) if distributed.is_distributed() else model
    return Trainer(
        model=wrapped, forward=parts.forward, prepare=parts.prepare, criterion=parts.criterion, optimizer=optimizer,
        rate=build_rate(optim, total), loader=parts.loader, sampler=parts.sampler, ema=ema, evaluate=parts.evaluate,
        metric=parts.metric, metadata=metadata, epochs=train.epochs, evaluate_every=config.eval.every,
        accumulate=train.accumulate, frozen=frozen, clip_norm=optim.clip_norm, device=device,
        autocast=autocast_dtype(train.precision, device), output=Path(config.output),
        config=config.model_dump(mode="json"), seed=config.seed,
    )  # fmt: skip


def check_task(config: AnyRunConfig) -> None:
    """The model must be of the run's task."""
    wanted = "detection" if isinstance(config, RunConfig) else "classification"
    if zoo.is_classifier(config.model.name) != (wanted == "classification"):
        other = "detection" if wanted == "classification" else "classification"
        raise UserError(
            f"{config.model.name} is a model for {other} but the run's task is {wanted}; "
            f"start from a configuration with task: {other}, or choose another model"
        )


def run_training(config: AnyRunConfig, *, overwrite: bool = False) -> dict[str, Any]:
    """Train from the start and return the best metrics; several processes where torchrun says so."""
    if Path(config.output).exists() and not Path(config.output).is_dir():
        raise UserError(f"the output folder {config.output} is a file; choose another output=…")
    last = Path(config.output) / "last.pt"
    if last.exists() and not overwrite:
        raise UserError(
            f"{config.output} already holds a run; continue it with --resume {config.output}, "
            "replace it with --overwrite, or choose another output=…"
        )
    return _fit(config)


def resume_training(run: str | Path) -> dict[str, Any]:
    """Continue a run, with its own configuration, from its ``last.pt``."""
    last = Path(run) / "last.pt" if Path(run).is_dir() else Path(run)
    state = load_training_state(last)
    try:
        config = check_config({**state["config"], "output": str(last.parent)})
        again = without_start(config, state["metadata"])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{last} holds no run of this version of vitdet; start anew without --resume") from error
    del state  # the trainer reads it when it is built; two of them at once need not fit
    return _fit(again, last, config)


def without_start(config: AnyRunConfig, metadata: dict[str, Any]) -> AnyRunConfig:
    """The run without the weights that it began with, which may be gone, and with what it took from them."""
    if config.model.weights is None and config.model.backbone_weights is None:
        return config
    taken = Preprocessing.from_dict(metadata["preprocessing"])
    model = config.model.model_copy(update={"weights": None, "backbone_weights": None})
    data = config.data.model_copy(update={"mean": taken.mean, "std": taken.std})
    return config.model_copy(update={"model": model, "data": data})


def _fit(config: AnyRunConfig, last: Path | None = None, told: AnyRunConfig | None = None) -> dict[str, Any]:
    """Train; from ``last`` where given. ``told`` is the configuration that the run keeps, where it is another."""
    distributed.start()
    try:
        trainer = build_trainer(config)
        if told is not None:
            trainer.config = told.model_dump(mode="json")
        if last is not None:
            trainer.resume(last)
        return trainer.fit()
    finally:
        distributed.stop()
