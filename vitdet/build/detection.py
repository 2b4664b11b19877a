"""The parts of a run that trains or measures a detector."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitdet import distributed
from vitdet.build.parts import Parts, build_model
from vitdet.config import AugmentSection, LossSection, RunConfig
from vitdet.data.detection import DetectionDataset
from vitdet.data.formats import read_detection_set
from vitdet.data.loaders import EpochBatchSampler, Loader, collate, make_loader
from vitdet.data.records import DetectionSet
from vitdet.data.transforms import EvalTransform, TrainTransform
from vitdet.detectors.detr import DETR
from vitdet.detectors.postprocess import postprocess
from vitdet.engine.logging import progress, say
from vitdet.engine.statistics import restore_statistics
from vitdet.errors import UserError, some
from vitdet.evaluation.coco import CocoEvaluator
from vitdet.losses.criterion import Criterion
from vitdet.losses.matcher import HungarianMatcher
from vitdet.results import coco_rows
from vitdet.structures import ClassMap, Preprocessing, Targets
from vitdet.weights.classes import NO_CLASS
from vitdet.weights.deimv2 import is_merged


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


def build_criterion(loss: LossSection, *, epochs: int, no_object: bool = False) -> Criterion:
    """The criterion of a run, with its matcher; ``no_object``: whether the model has a logit for that."""
    classification = loss.classification or ("ce" if no_object else "vfl")
    softmax = classification == "ce"
    class_cost = loss.match_class if loss.match_class is not None else 1.0 if softmax else 2.0
    matcher = HungarianMatcher(
        class_cost=class_cost, box_cost=loss.match_box, giou_cost=loss.match_giou, softmax=softmax
    )
    share = loss.match_quality_from
    return Criterion(
        matcher=matcher, classification=classification, vfl_weight=loss.vfl, mal_weight=loss.mal,
        ce_weight=loss.ce, no_object=loss.no_object, box_weight=loss.box, giou_weight=loss.giou,
        one_to_many=loss.one_to_many, dense_weight=loss.dense, fgl_weight=loss.fgl, ddf_weight=loss.ddf,
        union=loss.union, quality_from=None if share is None else round(share * epochs),
    )  # fmt: skip


def build_train_loader(config: RunConfig, data: DetectionSet, device: torch.device) -> tuple[Loader, EpochBatchSampler]:
    """The loader of the training split and its sampler."""
    augment: AugmentSection = config.augment
    longest = config.data.longest  # then each image draws its own size, and the batch is padded
    transform = TrainTransform(
        photometric=augment.photometric, zoom_out=augment.zoom_out, iou_crop=augment.iou_crop, hflip=augment.hflip,
        vflip=augment.vflip, rotate90=augment.rotate90, scale_jitter=augment.scale_jitter, size_crop=augment.size_crop,
        longest=longest, shorter=[size[0] for size in config.data.sizes] if longest else (),
        min_box_pixels=augment.min_box,
    )  # fmt: skip
    dataset = DetectionDataset(
        data, transform=transform, mosaic=augment.mosaic, mixup=augment.mixup, seed=config.seed, cache=config.data.cache
    )
    sizes, epochs = [] if longest else config.data.sizes, config.train.epochs
    strong_until = round(augment.strong_until * epochs)
    mix_until = strong_until if augment.mix_until is None else round(augment.mix_until * epochs)
    sampler = EpochBatchSampler(
        length=len(dataset), batch_size=config.train.batch, seed=config.seed, sizes=sizes or [config.data.size],
        strong_from=round(augment.strong_from * epochs), strong_until=strong_until, final_size=config.data.size,
        mix=(round(augment.mix_from * epochs), mix_until),
        rank=distributed.rank(), world_size=distributed.world_size(),
    )  # fmt: skip
    loader = make_loader(
        dataset, batch_sampler=sampler, workers=config.data.workers, pin_memory=device.type == "cuda",
        collate=partial(collate, pad=longest is not None),
    )  # fmt: skip
    return loader, sampler


def build_eval_loader(
    data: DetectionSet, preprocessing: Preprocessing, *, batch: int, workers: int, cache: bool, shared: bool = True
) -> Loader:
    """A loader over a whole split in order, resized only; several processes share it, or see all of it each."""
    longest = preprocessing.longest
    transform = EvalTransform(longest=longest, interpolation=preprocessing.interpolation)
    dataset = DetectionDataset(data, transform=transform, cache=cache)
    sampler = EpochBatchSampler(
        length=len(dataset), batch_size=batch, seed=0, sizes=[preprocessing.size], shuffle=False, drop_last=False,
        rank=distributed.rank() if shared else 0, world_size=distributed.world_size() if shared else 1,
    )  # fmt: skip
    return make_loader(
        dataset, batch_sampler=sampler, workers=workers, pin_memory=torch.cuda.is_available(),
        collate=partial(collate, pad=longest is not None),
    )  # fmt: skip


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
        data_labels = labels_in_data(model.metadata.class_map, data.class_map)  # type: ignore[arg-type, union-attr]
        for batch in progress(loader, total=len(loader), title="evaluation", show=distributed.rank() == 0):
            padding = {} if "sizes" not in batch else {"sizes": batch["sizes"].to(device)}
            images = preprocessing.normalize(batch["images"].to(device), **padding)
            found = postprocess(model(images, **padding), batch["orig_sizes"], top_k=top_k)
            for image_id, (boxes, scores, labels) in zip(batch["image_ids"], found, strict=True):
                labels = data_labels[labels]
                known = labels >= 0
                rows += coco_rows(
                    boxes[known], scores[known], labels[known], image_id=image_id, class_map=data.class_map
                )
        model.train(training)
        rows = distributed.gather_lists(rows)
        if distributed.rank():
            return {}
        evaluator = CocoEvaluator(data.to_coco(), backend=backend)
        evaluator.update(rows)
        return evaluator.compute() | {"results": rows}

    return evaluate


def labels_in_data(model: ClassMap, data: ClassMap) -> Tensor:
    """(K,) int64: the data set's label of each of the model's classes, in their order; -1 for ids that nothing has."""
    if model.names == data.names:
        return torch.arange(len(data))
    count = itertools.count()
    labels = torch.tensor([-1 if name == NO_CLASS else next(count) for name in model.names])
    if int(labels.max()) + 1 != len(data):
        raise ValueError(f"the model knows {int(labels.max()) + 1} classes and the data has {len(data)}")
    return labels


def detect(model: nn.Module, images: Tensor, targets: Targets, **padding: Tensor) -> Any:
    """A detector sees the targets in training, for its denoising queries, and the sizes of padded images."""
    return model(images, targets, **padding)


SEEN = 64  # images from which batch norms get their statistics back


def restore_norms(model: nn.Module, data: DetectionSet, config: RunConfig) -> None:
    """Make weights trainable that were merged for inference, see :func:`restore_statistics`."""
    preprocessing: Preprocessing = model.metadata.preprocessing  # type: ignore[assignment, union-attr]
    few = replace(data, records=data.records[:: max(len(data.records) // SEEN, 1)][:SEEN])
    loader = build_eval_loader(few, preprocessing, batch=config.eval.batch, workers=0, cache=False, shared=False)
    restore_statistics(model, (preprocessing.normalize(batch["images"]) for batch in loader))
    if distributed.rank() == 0:
        say(
            f"note: {config.model.weights} was merged for inference: its batch norms got the statistics of "
            f"{len(few.records)} images back"
        )


def assemble(config: RunConfig, device: torch.device) -> Parts:
    """Read the data and build what the run needs. Problems with data and model show here."""
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
    own = {key: value for key in ("mean", "std") if (value := getattr(config.data, key))}
    preprocessing = Preprocessing(size=config.data.size, longest=config.data.longest, **own)
    model = build_model(config, train_data.class_map, preprocessing)
    if config.data.longest is not None and not getattr(model, "takes_sizes", False):
        raise UserError(
            f"data.longest is {config.data.longest} but {config.model.name} cannot tell an image from its padding; "
            "leave it out"
        )
    loader, sampler = build_train_loader(config, train_data, device)
    val_loader = build_eval_loader(
        val_data, preprocessing, batch=config.eval.batch, workers=config.data.workers, cache=config.data.cache
    )
    if config.model.weights and is_merged(model.state_dict()):
        restore_norms(model, train_data, config)
    criterion = build_criterion(config.loss, epochs=config.train.epochs, no_object=isinstance(model, DETR))
    return Parts(
        model=model, forward=detect, criterion=criterion, loader=loader, sampler=sampler,
        evaluate=build_evaluation(
            val_data, val_loader, backend=config.eval.backend, top_k=config.eval.top_k, device=device
        ),
        metric="AP",
    )  # fmt: skip
