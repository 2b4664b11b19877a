"""The parts of a run that trains or measures a classifier."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitdet import distributed, zoo
from vitdet.build.parts import Parts, build_model
from vitdet.config import ClassificationRunConfig
from vitdet.data.augment import ClassificationEvalTransform, ClassificationTransform
from vitdet.data.classification import ClassificationDataset
from vitdet.data.formats import read_classification_set
from vitdet.data.loaders import EpochBatchSampler, Loader, collate_images, make_loader
from vitdet.data.mixing import BatchMixer
from vitdet.data.records import ClassificationSet
from vitdet.devices import autocast_dtype
from vitdet.engine.logging import progress, say
from vitdet.errors import UserError, some
from vitdet.evaluation.classification import ClassificationEvaluator
from vitdet.losses.labels import ClassificationCriterion
from vitdet.structures import IMAGENET_MEAN, IMAGENET_STD, ClassMap, ImageTargets, ModelMetadata, Preprocessing
from vitdet.weights.describe import imagenet_synsets


def read_split(root: str | Path, split: str, *, class_map: ClassMap | None = None) -> ClassificationSet:
    """One split of an image folder; says what was recognised and what is suspicious.

    Folders that are called by ImageNet's synsets get the names and labels that published models use, where all 1,000
    are there or ``class_map`` is of such a model.
    """
    synsets = next(Path(root).glob("*/n" + "[0-9]" * 8), None)
    names = None if synsets is None else imagenet_synsets(None if class_map is None else class_map.names)
    data = read_classification_set(root, split, class_map=class_map, names=names)
    if distributed.rank() == 0:
        say(f"{data.root}: {data.name}, {split}: {len(data)} images, {len(data.class_map)} classes")
        for note in data.notes:
            say(f"note: {note}")
    return data


def build_train_loader(
    config: ClassificationRunConfig, data: ClassificationSet, device: torch.device
) -> tuple[Loader, EpochBatchSampler]:
    """The loader of the training split and its sampler."""
    augment = config.augment
    transform = ClassificationTransform(
        scale=augment.scale, ratio=augment.ratio, hflip=augment.hflip, interpolation=config.data.interpolation,
        rand_augment_layers=augment.rand_augment_layers, rand_augment_magnitude=augment.rand_augment_magnitude,
        rand_augment_std=augment.rand_augment_std, three_augment=augment.three_augment,
        colour_jitter=augment.colour_jitter, erasing=augment.erasing, resize_only=augment.resize_only,
    )  # fmt: skip
    dataset = ClassificationDataset(data, transform=transform, seed=config.seed, cache=config.data.cache)
    sampler = EpochBatchSampler(
        length=len(dataset), batch_size=config.train.batch, seed=config.seed,
        sizes=config.data.sizes or [config.data.size], strong_until=round(augment.strong_until * config.train.epochs),
        repeats=augment.repeats, rank=distributed.rank(), world_size=distributed.world_size(),
    )  # fmt: skip
    loader = make_loader(
        dataset, batch_sampler=sampler, workers=config.data.workers, pin_memory=device.type == "cuda",
        collate=partial(collate_images, num_classes=len(data.class_map)),
    )  # fmt: skip
    return loader, sampler


def build_eval_loader(
    data: ClassificationSet, preprocessing: Preprocessing, *, batch: int, workers: int, cache: bool
) -> Loader:
    """A loader over a whole split in order, as the model is evaluated; several processes share it."""
    dataset = ClassificationDataset(data, transform=ClassificationEvalTransform(preprocessing), cache=cache)
    sampler = EpochBatchSampler(
        length=len(dataset), batch_size=batch, seed=0, sizes=[preprocessing.size], shuffle=False, drop_last=False,
        rank=distributed.rank(), world_size=distributed.world_size(),
    )  # fmt: skip
    return make_loader(
        dataset, batch_sampler=sampler, workers=workers, pin_memory=torch.cuda.is_available(),
        collate=partial(collate_images, num_classes=len(data.class_map)),
    )  # fmt: skip


def build_evaluation(
    data: ClassificationSet, loader: Loader, *, device: torch.device
) -> Callable[[nn.Module], dict[str, Any]]:
    """A function from a model with metadata to its accuracies on ``data``, on the main process; elsewhere to {}.

    ``results`` among them are the predictions: file, true class, best class and its probability.
    """

    @torch.inference_mode()
    def evaluate(model: nn.Module) -> dict[str, Any]:
        preprocessing: Preprocessing = model.metadata.preprocessing  # type: ignore[assignment, union-attr]
        training = model.training
        model.eval()
        evaluator = ClassificationEvaluator(data.class_map)
        results: list[dict[str, Any]] = []
        for batch in progress(loader, total=len(loader), title="evaluation", show=distributed.rank() == 0):
            logits = model(preprocessing.normalize(batch["images"].to(device)))
            evaluator.update(logits, batch["labels"])
            results += result_rows(logits, batch, data)
        model.train(training)
        rows = distributed.gather_lists(evaluator.state_rows())
        results = distributed.gather_lists(results)
        if distributed.rank():
            return {}
        whole = ClassificationEvaluator(data.class_map)
        whole.add_rows(rows)
        return whole.compute() | {"results": results}

    return evaluate


def result_rows(logits: Tensor, batch: dict[str, Any], data: ClassificationSet) -> list[dict[str, Any]]:
    """One plain row an image."""
    scores, labels = logits.float().softmax(dim=-1).max(dim=-1)
    columns = zip(batch["indices"], batch["labels"].tolist(), labels.tolist(), scores.tolist(), strict=True)
    names = data.class_map.names
    return [
        {"file_name": str(data.paths[index]), "truth": names[truth], "name": names[label], "score": score}
        for index, truth, label, score in columns
    ]


class Preparation:
    """Mixes a batch, then asks the teacher what it sees in the mixed images."""

    def __init__(
        self, mixer: BatchMixer, teacher: nn.Module | None, preprocessing: Preprocessing,
        autocast: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self.mixer, self.teacher, self.preprocessing, self.autocast = mixer, teacher, preprocessing, autocast

    def __call__(self, images: Tensor, targets: ImageTargets) -> tuple[Tensor, ImageTargets]:
        """Images (B, 3, h, w), normalised, and their targets."""
        images, targets = self.mixer(images, targets)
        if self.teacher is not None:
            cast = torch.autocast(images.device.type, dtype=self.autocast, enabled=self.autocast is not None)
            with torch.inference_mode(), cast:
                found = self.teacher(self.as_teacher(images)).argmax(dim=-1)
            targets.teacher = found.clone()
        return images, targets

    def as_teacher(self, images: Tensor) -> Tensor:
        """The images in the teacher's own normalisation and size."""
        theirs: Preprocessing = self.teacher.metadata.preprocessing  # type: ignore[assignment, union-attr]
        ours = self.preprocessing
        if (ours.mean, ours.std) != (theirs.mean, theirs.std):
            mean, std, their_mean, their_std = (
                images.new_tensor(v).view(3, 1, 1) for v in (ours.mean, ours.std, theirs.mean, theirs.std)
            )
            images = (images * std + (mean - their_mean)) / their_std
        if images.shape[-2:] != theirs.size:
            images = F.interpolate(images, size=theirs.size, mode="bicubic", antialias=True)
        return images


def load_teacher(config: ClassificationRunConfig, class_map: ClassMap, device: torch.device) -> nn.Module | None:
    """The run's teacher, which must know the same classes; none where it would have no weight."""
    if config.loss.teacher is None or config.loss.distillation == 0:
        return None
    teacher = zoo.load_model(config.loss.teacher).to(device).eval()
    known: ClassMap = teacher.metadata.class_map  # type: ignore[assignment, union-attr]
    if known.names != class_map.names:
        raise UserError(
            f"loss.teacher {config.loss.teacher} knows the classes {some(known.names)} but {config.data.root} has "
            f"{some(class_map.names)}; a teacher must have learnt the same classes"
        )
    return teacher


def classify(model: nn.Module, images: Tensor, targets: ImageTargets) -> Tensor:
    """A classifier sees the images alone."""
    del targets
    return model(images)


def assemble(config: ClassificationRunConfig, device: torch.device) -> Parts:
    """Read the data and build what the run needs. Problems with data and model show here."""
    train_data = read_split(config.data.root, config.data.train_split)
    val_data = read_split(config.data.root, config.data.val_split, class_map=train_data.class_map)
    preprocessing = Preprocessing(
        size=config.data.size, mean=config.data.mean or IMAGENET_MEAN, std=config.data.std or IMAGENET_STD,
        interpolation=config.data.interpolation, crop=config.data.crop,
    )  # fmt: skip
    model = build_model(
        config, train_data.class_map, preprocessing, **zoo.size_argument(config.model.name, config.data.size)
    )
    metadata: ModelMetadata = model.metadata  # type: ignore[assignment]
    teacher = load_teacher(config, train_data.class_map, device)
    augment, loss = config.augment, config.loss
    mixer = BatchMixer(mixup=augment.mixup, cutmix=augment.cutmix, switch=augment.switch, probability=augment.mix)
    loader, sampler = build_train_loader(config, train_data, device)
    val_loader = build_eval_loader(
        val_data, metadata.preprocessing, batch=config.eval.batch, workers=config.data.workers, cache=config.data.cache
    )
    if teacher is not None and not hasattr(model, "head_distillation"):
        raise UserError(
            f"loss.teacher needs a model with a distillation token, which {config.model.name} lacks; "
            "train deit_tiny_distilled_patch16_224 or another *_distilled_*"
        )
    return Parts(
        model=model, forward=classify,
        prepare=Preparation(
            mixer, teacher, metadata.preprocessing, autocast_dtype(config.train.precision, device)
        ),
        criterion=ClassificationCriterion(
            label_smoothing=loss.label_smoothing, kind=loss.kind, distillation=loss.distillation if teacher else 0.0
        ),
        loader=loader, sampler=sampler, evaluate=build_evaluation(val_data, val_loader, device=device), metric="top1",
    )  # fmt: skip
