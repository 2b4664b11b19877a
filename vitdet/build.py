"""From a configuration to model, criterion, loaders, optimizer, trainer: the only place that joins them."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitdet import __version__, distributed, zoo
from vitdet.config import AugmentSection, LossSection, OptimSection, RunConfig
from vitdet.data.detection import DetectionDataset
from vitdet.data.formats import read_detection_set
from vitdet.data.loaders import EpochBatchSampler, Loader, make_loader
from vitdet.data.records import DetectionSet
from vitdet.data.transforms import EvalTransform, TrainTransform
from vitdet.detectors.postprocess import postprocess
from vitdet.devices import autocast_dtype, pick_device
from vitdet.engine.checkpoint import load_training_state, read_weights
from vitdet.engine.ema import ExponentialMovingAverage, scaled_decay
from vitdet.engine.logging import progress, say
from vitdet.engine.optim import make_optimizer
from vitdet.engine.schedules import rate_multiplier, warmup_steps
from vitdet.engine.trainer import Trainer
from vitdet.errors import UserError, some
from vitdet.evaluation.coco import CocoEvaluator
from vitdet.losses.criterion import Criterion
from vitdet.losses.matcher import HungarianMatcher
from vitdet.structures import ClassMap, ModelMetadata, Preprocessing, coco_rows
from vitdet.weights.rules import load_strict


def read_split(root: str | Path, split: str) -> DetectionSet:
    """One split of a data set; says what was recognised and what is suspicious."""
    data = read_detection_set(root, split)
    if distributed.rank() == 0:
        boxes = sum(len(record.labels) for record in data.records)
        counts = f"{len(data.records)} images, {boxes} boxes, {len(data.class_map)} classes"
        say(f"{data.root}: {data.name}, {split}: {counts}")
        for note in data.notes:
            say(f"note: {note}")
    return data


def build_model(config: RunConfig, data: DetectionSet) -> nn.Module:
    """The model of the run with its metadata, started from ``model.weights`` where given."""
    classes = len(data.class_map)
    if config.model.num_classes not in (None, classes):
        raise UserError(
            f"model.num_classes is {config.model.num_classes} but {data.root} has {classes} classes; "
            "leave it out, it is taken from the data"
        )
    model = zoo.create_model(config.model.name, num_classes=classes, **config.model.overrides)
    if config.model.weights:
        start_from(model, Path(config.model.weights), config.model.name, data.class_map)
    model.metadata = ModelMetadata(  # type: ignore[assignment]
        name=config.model.name,
        arguments={"num_classes": classes, **config.model.overrides},
        class_map=data.class_map,
        preprocessing=Preprocessing(size=config.data.size),
        version=__version__,
    )
    return model


CLASS_HEADS = ("*score_head*", "denoising.embedding.*")  # names of all that depends on the classes


def start_from(model: nn.Module, path: Path, name: str, class_map: ClassMap) -> None:
    """Load weights of the same model; where they know other classes, the class heads start anew, and it is said."""
    theirs, state = read_weights(path)
    if theirs.name != name:
        raise UserError(f"model.weights {path} is of {theirs.name!r}, the run trains {name!r}; use the same model")
    # Frozen batch norms count no batches, trained ones do: a run may freeze what another has trained.
    counters = ("*.num_batches_tracked",)
    if theirs.class_map.names == class_map.names:
        load_strict(model, state, allow_missing=counters, allow_unexpected=counters)
        return
    kept = {key: value for key, value in state.items() if not any(fnmatchcase(key, head) for head in CLASS_HEADS)}
    report = load_strict(model, kept, allow_missing=(*CLASS_HEADS, *counters), allow_unexpected=counters)
    anew = [key for key in report.missing if not fnmatchcase(key, counters[0])]
    say(f"note: {path} knows other classes ({some(theirs.class_map.names)}): {len(anew)} tensors start anew")


def build_criterion(loss: LossSection) -> Criterion:
    """The criterion with its matcher."""
    matcher = HungarianMatcher(class_cost=loss.match_class, box_cost=loss.match_box, giou_cost=loss.match_giou)
    return Criterion(
        matcher=matcher, vfl_weight=loss.vfl, box_weight=loss.box, giou_weight=loss.giou,
        one_to_many=loss.one_to_many, dense_weight=loss.dense,
    )  # fmt: skip


def build_train_loader(config: RunConfig, data: DetectionSet, device: torch.device) -> tuple[Loader, EpochBatchSampler]:
    """The loader of the training split and its sampler."""
    augment: AugmentSection = config.augment
    transform = TrainTransform(
        photometric=augment.photometric, zoom_out=augment.zoom_out, iou_crop=augment.iou_crop, hflip=augment.hflip,
        vflip=augment.vflip, rotate90=augment.rotate90, scale_jitter=augment.scale_jitter,
    )  # fmt: skip
    dataset = DetectionDataset(
        data, transform=transform, mosaic=augment.mosaic, mixup=augment.mixup, seed=config.seed, cache=config.data.cache
    )
    sampler = EpochBatchSampler(
        length=len(dataset), batch_size=config.train.batch, seed=config.seed,
        sizes=config.data.sizes or [config.data.size], strong_until=round(augment.strong_until * config.train.epochs),
        rank=distributed.rank(), world_size=distributed.world_size(),
    )  # fmt: skip
    workers = config.data.workers
    return make_loader(dataset, batch_sampler=sampler, workers=workers, pin_memory=device.type == "cuda"), sampler


def build_eval_loader(data: DetectionSet, *, size: tuple[int, int], batch: int, workers: int, cache: bool) -> Loader:
    """A loader over a whole split in order, resized only; several processes share it."""
    dataset = DetectionDataset(data, transform=EvalTransform(), cache=cache)
    sampler = EpochBatchSampler(
        length=len(dataset), batch_size=batch, seed=0, sizes=[size], shuffle=False, drop_last=False,
        rank=distributed.rank(), world_size=distributed.world_size(),
    )  # fmt: skip
    return make_loader(dataset, batch_sampler=sampler, workers=workers, pin_memory=torch.cuda.is_available())


def build_evaluation(
    data: DetectionSet, loader: Loader, *, backend: str, top_k: int, device: torch.device
) -> Callable[[nn.Module], dict[str, Any]]:
    """A function from a model with metadata to its COCO metrics on ``data``, on the main process; elsewhere to {}.

    ``results`` among them are the detections as COCO result rows.
    """

    @torch.inference_mode()
    def evaluate(model: nn.Module) -> dict[str, Any]:
        preprocessing: Preprocessing = model.metadata.preprocessing  # type: ignore[assignment, union-attr]
        training = model.training
        model.eval()
        rows: list[dict[str, Any]] = []
        for batch in progress(loader, total=len(loader), title="evaluation", show=distributed.rank() == 0):
            images = preprocessing.normalize(batch["images"].to(device))
            found = postprocess(model(images), batch["orig_sizes"], top_k=top_k)
            for image_id, (boxes, scores, labels) in zip(batch["image_ids"], found, strict=True):
                rows += coco_rows(boxes, scores, labels, image_id=image_id, class_map=data.class_map)
        model.train(training)
        rows = distributed.gather_lists(rows)
        if distributed.rank():
            return {}
        evaluator = CocoEvaluator(data.to_coco(), backend=backend)
        evaluator.update(rows)
        return evaluator.compute() | {"results": rows}

    return evaluate


def check_class_map(metadata: ModelMetadata, data: DetectionSet) -> None:
    """A model is measured only on its own classes."""
    ours, theirs = list(metadata.class_map.names), list(data.class_map.names)
    if ours != theirs:
        raise UserError(
            f"the model knows the classes {some(ours)} but {data.root} has {some(theirs)}; "
            "evaluate on data with the classes it was trained on"
        )


def evaluate_source(
    source: str | Path, *, root: str | Path, split: str = "val", batch: int = 8, workers: int = 2, device: str = "auto",
    backend: str = "hotcoco", top_k: int = 300,
) -> dict[str, Any]:  # fmt: skip
    """Load a model and measure it on a split; what ``vitdet eval`` does."""
    target = pick_device(device)
    model = zoo.load_model(source).to(target)
    metadata: ModelMetadata = model.metadata  # type: ignore[assignment]
    data = read_split(root, split)
    check_class_map(metadata, data)
    loader = build_eval_loader(data, size=metadata.preprocessing.size, batch=batch, workers=workers, cache=False)
    return build_evaluation(data, loader, backend=backend, top_k=top_k, device=target)(model)


def build_rate(optim: OptimSection, total: int) -> Callable[[int], float]:
    """The learning-rate multiplier of every step of a run of ``total`` steps."""
    warmup = warmup_steps(total, fraction=optim.warmup, most=optim.warmup_steps)

    def rate(step: int) -> float:
        return rate_multiplier(
            step, total=total, warmup=warmup, schedule=optim.schedule, final=optim.final, flat=optim.flat
        )

    return rate


def build_trainer(config: RunConfig) -> Trainer:
    """Everything a run needs. Problems with data and model show before the run's folder is made."""
    torch.manual_seed(config.seed)  # the same first weights everywhere: the average is copied before they are shared
    device = pick_device(config.train.device)
    train_data = read_split(config.data.root, config.data.train_split)
    val_data = read_split(config.data.root, config.data.val_split)
    if train_data.class_map != val_data.class_map:
        raise UserError(
            f"the splits of {config.data.root} have different classes: {some(train_data.class_map.names)} "
            f"and {some(val_data.class_map.names)}; give both the same categories"
        )
    shared = {record.path for record in train_data.records} & {record.path for record in val_data.records}
    if shared and distributed.rank() == 0:
        say(f"note: {len(shared)} images are in both splits of {config.data.root}: the AP will look too good")
    model = build_model(config, train_data)
    metadata: ModelMetadata = model.metadata  # type: ignore[assignment]
    if distributed.is_distributed() and device.type == "cuda":
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)  # as published: statistics of the whole batch
    model = model.to(device)
    loader, sampler = build_train_loader(config, train_data, device)
    total = len(sampler) * config.train.epochs
    ema = None
    if config.train.ema is not None:
        warmup = warmup_steps(total, fraction=0.1, most=config.train.ema_warmup)
        ema = ExponentialMovingAverage(model, decay=scaled_decay(config.train.ema, total_steps=total), warmup=warmup)
    val_loader = build_eval_loader(
        val_data, size=config.data.size, batch=config.eval.batch, workers=config.data.workers, cache=config.data.cache
    )
    optim = config.optim
    optimizer = make_optimizer(
        model, lr=optim.lr, backbone_lr=optim.backbone_lr or optim.lr, weight_decay=optim.weight_decay
    )
    wrapped = nn.parallel.DistributedDataParallel(model) if distributed.is_distributed() else model
    return Trainer(
        model=wrapped, criterion=build_criterion(config.loss), optimizer=optimizer, rate=build_rate(optim, total),
        loader=loader, sampler=sampler, ema=ema, metric="AP", metadata=metadata, epochs=config.train.epochs,
        evaluate=build_evaluation(
            val_data, val_loader, backend=config.eval.backend, top_k=config.eval.top_k, device=device
        ),
        evaluate_every=config.eval.every, clip_norm=optim.clip_norm, device=device,
        autocast=autocast_dtype(config.train.precision, device), output=Path(config.output),
        config=config.model_dump(mode="json"), seed=config.seed,
    )  # fmt: skip


def run_training(config: RunConfig, *, overwrite: bool = False) -> dict[str, Any]:
    """Train from the start and return the best metrics; several processes where torchrun says so."""
    if Path(config.output).exists() and not Path(config.output).is_dir():
        raise UserError(f"the output folder {config.output} is a file; choose another output=…")
    last = Path(config.output) / "last.pt"
    if last.exists() and not overwrite:
        raise UserError(
            f"{config.output} already holds a run; continue it with --resume {config.output}, "
            "replace it with --overwrite, or choose another output=…"
        )
    return _fit(config, None)


def resume_training(run: str | Path) -> dict[str, Any]:
    """Continue a run, with its own configuration, from its ``last.pt``."""
    last = Path(run) / "last.pt" if Path(run).is_dir() else Path(run)
    state = load_training_state(last)
    try:
        config = RunConfig.model_validate(state["config"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{last} holds no run of this version of vitdet; start anew without --resume") from error
    return _fit(config.model_copy(update={"output": str(last.parent)}), last)


def _fit(config: RunConfig, last: Path | None) -> dict[str, Any]:
    distributed.start()
    try:
        trainer = build_trainer(config)
        if last:
            trainer.resume(last)
        return trainer.fit()
    finally:
        distributed.stop()
