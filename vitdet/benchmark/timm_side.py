"""The same training by timm's own parts: model, loader and transforms, mixup, optimizer, schedule, averaged weights.

What is common comes from the run's configuration: sizes, batch, learning rate, weight decay, strengths of augmentation.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from vitdet.config import ClassificationRunConfig
from vitdet.devices import autocast_dtype, pick_device
from vitdet.engine.ema import scaled_decay
from vitdet.engine.schedules import warmup_steps
from vitdet.structures import Preprocessing


class TimmTraining:
    """One training of timm's ``VisionTransformer``.

    Args:
        config: of the run. model: our model, whose numbers timm's gets. preprocessing: of the run.
        epochs: of the schedule. workers: of the loader.
    """

    def __init__(
        self, config: ClassificationRunConfig, *, model: dict[str, Any], preprocessing: Preprocessing, classes: int,
        epochs: int, workers: int,
    ) -> None:  # fmt: skip
        from timm.loss import SoftTargetCrossEntropy
        from timm.models.vision_transformer import VisionTransformer
        from timm.optim import create_optimizer_v2
        from timm.scheduler import CosineLRScheduler
        from timm.utils import ModelEmaV3

        torch.manual_seed(config.seed)
        np.random.seed(config.seed)  # timm's mixing draws from it
        keep_one_bit()
        self.config, self.preprocessing = config, preprocessing
        self.device = pick_device(config.train.device)
        self.autocast = autocast_dtype(config.train.precision, self.device)
        self.model = VisionTransformer(num_classes=classes, **model).to(self.device)
        self.loader = self._loader("train", workers, self._collate(classes))
        optim, total = config.optim, epochs * len(self.loader)
        self.optimizer = create_optimizer_v2(
            self.model, opt="adamw", lr=optim.lr, weight_decay=optim.weight_decay, betas=optim.betas, fused=True
        )
        warmup = warmup_steps(total, fraction=optim.warmup, most=optim.warmup_steps)
        self.schedule = CosineLRScheduler(
            self.optimizer, t_initial=max(1, total - warmup), lr_min=optim.final * optim.lr, warmup_t=warmup,
            warmup_prefix=True, warmup_lr_init=optim.lr / (warmup + 1), t_in_epochs=False,
        )  # fmt: skip
        decay = scaled_decay(config.train.ema or 0.0, total_steps=total)
        self.average = ModelEmaV3(self.model, decay=decay, use_warmup=True)
        self.criterion = SoftTargetCrossEntropy()
        self.steps = 0

    def _collate(self, classes: int) -> Any:
        from timm.data import FastCollateMixup

        augment = self.config.augment
        mixes = bool(augment.mixup or augment.cutmix)  # where not, it still makes smoothed rows of the labels
        return FastCollateMixup(
            mixup_alpha=augment.mixup, cutmix_alpha=augment.cutmix, prob=augment.mix if mixes else 0.0,
            switch_prob=augment.switch, label_smoothing=self.config.loss.label_smoothing, num_classes=classes,
        )  # fmt: skip

    def _loader(self, split: str, workers: int, collate: Any = None) -> Any:
        from timm.data import create_dataset, create_loader

        config, training = self.config, split == "train"
        augment, data = config.augment, config.data
        folder = Path(data.root) / (data.train_split if training else data.val_split)
        policy = (
            f"rand-m{augment.rand_augment_magnitude:g}-n{augment.rand_augment_layers}-mstd{augment.rand_augment_std:g}"
        )
        return create_loader(
            create_dataset("", root=str(folder), is_training=training),
            input_size=(3, *data.size), batch_size=config.train.batch if training else config.eval.batch,
            is_training=training, device=self.device, collate_fn=collate, no_aug=False, re_prob=augment.erasing,
            re_mode="pixel",
            scale=augment.scale, ratio=augment.ratio, hflip=augment.hflip, color_jitter=augment.colour_jitter or None,  # type: ignore[arg-type]
            auto_augment=f"{policy}-inc1" if augment.rand_augment_layers else None,
            interpolation=data.interpolation, mean=self.preprocessing.mean, std=self.preprocessing.std,
            crop_pct=data.crop or 1.0, crop_mode="center" if data.crop else "squash", num_workers=workers,
            persistent_workers=workers > 0,
        )  # fmt: skip

    def train_epoch(self) -> float:
        """One pass over the data, as timm's training script has it; returns the mean loss."""
        self.model.train()
        total = torch.zeros((), device=self.device)
        for images, targets in self.loader:
            with torch.autocast(self.device.type, dtype=self.autocast, enabled=self.autocast is not None):
                loss = self.criterion(self.model(images), targets)
            self.optimizer.zero_grad()
            loss.backward()
            if self.config.optim.clip_norm:
                nn.utils.clip_grad_norm_(self.model.parameters(), self.config.optim.clip_norm)
            self.schedule.step_update(self.steps)
            self.optimizer.step()
            self.steps += 1
            self.average.update(self.model, step=self.steps)
            total += loss.detach()
        return float(total) / len(self.loader)

    @torch.inference_mode()
    def top1(self) -> float:
        """Accuracy of the averaged model on the validation split."""
        right = images_seen = 0
        self.average.module.eval()
        for images, labels in self._loader("val", 0):
            best = self.average.module(images.to(self.device)).argmax(dim=-1).cpu()
            right, images_seen = right + int((best == labels.cpu()).sum()), images_seen + len(labels)
        return right / images_seen

    @property
    def images_per_epoch(self) -> int:
        """Images that an epoch trains on."""
        return len(self.loader) * self.config.train.batch


def keep_one_bit() -> None:
    """timm asks Pillow to posterize to 0 bits now and then, which Pillow 13 refuses; it gets 1 bit."""
    from timm.data import auto_augment

    plain: Any = auto_augment.NAME_TO_OP["PosterizeOriginal"]
    for name in ("Posterize", "PosterizeIncreasing"):
        auto_augment.NAME_TO_OP[name] = lambda image, bits, **rest: plain(image, max(1, bits), **rest)


def timed_epoch(training: Any) -> float:
    """Seconds of ``training.train_epoch()``."""
    start = time.monotonic()
    training.train_epoch()
    return time.monotonic() - start
