"""Equal budget: our training of a small ViT against timm's own parts, for the same minutes on the same machine.

The two take turns, epoch by epoch, so that what disturbs the machine disturbs both; each has its own clock. The number
of epochs of each schedule is set by timing the second of two epochs of each beforehand, and is what fits into the
minutes. Building is not timed. Where ``data.cache`` is on, ours decodes each image once: in its first epoch, or with
loader processes before it, untimed; timm decodes them in every epoch.
"""

from __future__ import annotations

import platform
import statistics
from pathlib import Path
from typing import Any

import torch

from vitdet.backbones.vit import ViT
from vitdet.benchmark.timm_side import TimmTraining, timed_epoch
from vitdet.build import build_trainer
from vitdet.config import ClassificationRunConfig, load_config
from vitdet.engine.logging import say
from vitdet.engine.trainer import Trainer
from vitdet.errors import UserError
from vitdet.structures import ModelMetadata

# What of a model timm's side is given, see timm_arguments.
_FOLLOWED = {"width", "layers", "heads", "hidden", "patch", "image_size", "class_token", "pooling", "drop_path"}


class Side:
    """One of the two trainings with its clock."""

    def __init__(self, name: str, training: Any, images_per_epoch: int, epochs: int) -> None:
        self.name, self.training, self.images, self.epochs = name, training, images_per_epoch, epochs
        self.seconds: list[float] = []

    @property
    def done(self) -> bool:
        """Whether the schedule has come to its end."""
        return len(self.seconds) >= self.epochs

    def step(self) -> None:
        """One more epoch."""
        self.seconds.append(timed_epoch(self.training))

    def figures(self, top1: float) -> dict[str, Any]:
        """What is reported."""
        return {
            "top1": top1,
            "epochs": self.epochs,
            "minutes": sum(self.seconds) / 60,
            "images_per_second": self.images / statistics.median(self.seconds),
        }


def compare_with_timm(
    config: str | Path, *, root: str, minutes: float, timm_workers: int = 2, overrides: list[str] | None = None
) -> dict[str, Any]:
    """Train both and measure both.

    Args:
        config: of a run that trains a plain ViT. root: the image folder. minutes: of training, each.
        timm_workers: of timm's loader; ours has ``data.workers``. overrides: of the configuration.

    Returns:
        ``ours`` and ``timm``: top1, epochs, minutes, images_per_second (median over epochs); ``ratio``: of the images a
        second; and what they ran on.
    """
    settings = load_config(config, [f"data.root={root}", *(overrides or [])])
    if not isinstance(settings, ClassificationRunConfig):
        raise UserError(f"{config} trains a detector; the comparison with timm needs a configuration of a classifier")
    check_comparable(settings)
    ours, theirs = (calibrate(side, settings, timm_workers, minutes) for side in ("ours", "timm"))
    sides = [make_side("ours", settings, timm_workers, ours), make_side("timm", settings, timm_workers, theirs)]
    while waiting := [side for side in sides if not side.done]:
        side = min(waiting, key=lambda one: sum(one.seconds))
        side.step()
        say(f"{side.name}: epoch {len(side.seconds)}/{side.epochs}, {sum(side.seconds) / 60:.1f} min")
    trainer: Trainer = sides[0].training
    top1 = {"ours": trainer.evaluate(trainer.best_model)["top1"], "timm": sides[1].training.top1()}  # type: ignore[misc]
    figures = {side.name: side.figures(top1[side.name]) for side in sides}
    ratio = figures["ours"]["images_per_second"] / figures["timm"]["images_per_second"]
    machine = f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"
    return {**figures, "ratio": ratio, "torch": torch.__version__, "machine": machine}


def check_comparable(settings: ClassificationRunConfig) -> None:
    """Refuse what the training by timm's parts would not do."""
    only = ClassificationRunConfig.model_validate(
        {**settings.model_dump(), "augment": {}, "loss": {}, "optim": {}, "train": {"epochs": 1, "batch": 1}}
    )
    for key in (
        "augment.three_augment", "augment.resize_only", "augment.repeats", "augment.strong_until", "loss.kind",
        "loss.teacher", "optim.schedule", "optim.backbone_lr", "optim.layer_decay", "train.accumulate", "train.freeze",
    ):  # fmt: skip
        section, _, name = key.partition(".")
        value, expected = (getattr(getattr(config, section), name) for config in (settings, only))
        if value != expected:
            raise UserError(f"{key} is {value!r}, which the side of timm does not do; set {key}={expected}")
    strange = sorted(settings.model.overrides.keys() - _FOLLOWED)
    if strange:
        raise UserError(f"model.overrides has {strange[0]!r}, which the side of timm does not follow; leave it out")
    if settings.augment.colour_jitter and settings.augment.rand_augment_layers:
        raise UserError("timm leaves out augment.colour_jitter beside RandAugment; set one of them to 0")
    if settings.train.ema is None:
        raise UserError("train.ema is null, and the side of timm averages its weights; set a decay such as 0.9999")
    if settings.model.weights or settings.data.sizes:
        raise UserError("both sides train from scratch at one size; leave out model.weights and data.sizes")
    if settings.train.batch % 2:
        raise UserError(f"train.batch is {settings.train.batch}; timm mixes pairs of images, make it even")


def calibrate(name: str, settings: ClassificationRunConfig, timm_workers: int, minutes: float) -> int:
    """How many epochs fit into the minutes, by the second of two epochs (the first fills caches)."""
    side = make_side(name, settings, timm_workers, 2)
    side.step()
    side.step()
    epochs = max(1, int(minutes * 60 / side.seconds[-1]))
    say(f"{name}: {side.images / side.seconds[-1]:.0f} images a second, {epochs} epochs in {minutes:g} minutes")
    return epochs


def make_side(name: str, settings: ClassificationRunConfig, timm_workers: int, epochs: int) -> Side:
    """A fresh training with a schedule of so many epochs."""
    changed = settings.model_copy(update={"train": settings.train.model_copy(update={"epochs": epochs})})
    trainer = build_trainer(changed)
    if name == "ours":
        return Side(name, trainer, len(trainer.sampler) * settings.train.batch, epochs)
    metadata: ModelMetadata = trainer.metadata
    if len(trainer.loader.dataset) < settings.train.batch:  # type: ignore[attr-defined]
        raise UserError(f"the {len(trainer.loader.dataset)} images are fewer than train.batch {settings.train.batch}")  # type: ignore[attr-defined]
    training = TimmTraining(
        changed, model=timm_arguments(trainer.bare_model), preprocessing=metadata.preprocessing,
        classes=len(metadata.class_map), epochs=epochs, workers=timm_workers,
    )  # fmt: skip
    ours, theirs = (sum(p.numel() for p in m.parameters()) for m in (trainer.bare_model, training.model))
    if ours != theirs:
        raise UserError(f"{settings.model.name} as configured has {ours} parameters, timm's {theirs}; use a plain ViT")
    return Side(name, training, training.images_per_epoch, epochs)


def timm_arguments(model: torch.nn.Module) -> dict[str, Any]:
    """The numbers of our plain ViT classifier as timm's ``VisionTransformer`` takes them."""
    backbone: Any = getattr(model, "backbone", None)
    if not isinstance(backbone, ViT) or backbone.positions is None or backbone.registers is not None:
        raise UserError("the comparison needs a plain ViT with learnt positions, such as vit_tiny_patch16_224")
    first: Any = backbone.encoder.layers[0]
    last: Any = backbone.encoder.layers[-1]
    height, width = backbone.positions.grid
    return {
        "img_size": (height * backbone.patch, width * backbone.patch),
        "patch_size": backbone.patch,
        "embed_dim": backbone.width,
        "depth": len(backbone.encoder.layers),
        "num_heads": first.self_attention.heads,
        "mlp_ratio": first.feed_forward.expand.out_features / backbone.width,
        "class_token": backbone.class_token is not None,
        "no_embed_class": True,  # as here, where the class token has no position of its own
        "global_pool": "token" if model.pooling == "token" else "avg",
        "fc_norm": False,
        "drop_path_rate": last.feed_forward_residual.drop_path.rate,
    }


def format_table(figures: dict[str, Any]) -> str:
    """The figures of :func:`compare_with_timm`, a line each side."""
    lines = [f" {'':<5} {'top-1':>7} {'epochs':>7} {'minutes':>8} {'images/s':>9}"]
    for name in ("ours", "timm"):
        top1, epochs, minutes, rate = (figures[name][k] for k in ("top1", "epochs", "minutes", "images_per_second"))
        lines.append(f" {name:<5} {top1:>7.4f} {epochs:>7} {minutes:>8.1f} {rate:>9.1f}")
    return "\n".join([*lines, f" images a second, ours over timm's: {figures['ratio']:.2f}"])
