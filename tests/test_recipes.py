"""The published recipes: their numbers, and that a run of each can be built and takes a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from vitdet import create_model
from vitdet.build import build_trainer
from vitdet.build.detection import build_criterion
from vitdet.build.parts import build_rate
from vitdet.config import RunConfig, load_config
from vitdet.engine.freezing import freeze
from vitdet.engine.optim import parameter_groups

GPUS = 8

# Images a step, epochs, rate, the backbone's, epochs of strong augmentation, sizes of images; from the repositories'
# files of settings: lyuwenyu/RT-DETR, Peterande/D-FINE, Intellindust-AI-Lab/DEIM and DEIMv2, facebookresearch/detr.
PUBLISHED: dict[str, tuple[int, int, float, float, int, int]] = {
    "rtdetr_r18_coco": (16, 72, 1e-4, 1e-5, 72, 11),
    "rtdetr_r50_coco": (16, 72, 1e-4, 1e-5, 72, 11),
    "rtdetrv2_r18_coco": (16, 120, 1e-4, 1e-4, 117, 1),
    "rtdetrv2_r50_coco": (16, 72, 1e-4, 1e-5, 71, 11),
    "dfine_n_coco": (128, 160, 8e-4, 4e-4, 148, 1),
    "dfine_s_coco": (32, 132, 2e-4, 1e-4, 120, 11),
    "dfine_l_coco": (32, 80, 2.5e-4, 1.25e-5, 72, 11),
    "deim_dfine_s_coco": (32, 132, 4e-4, 2e-4, 120, 11),
    "deimv2_atto_coco": (128, 500, 2e-3, 1e-3, 400, 1),
    "deimv2_n_coco": (32, 160, 8e-4, 4e-4, 148, 1),
    "detr_r50_coco": (64, 500, 1e-4, 1e-5, 500, 11),
}
# Epochs of mosaic, and of mixup where it has any; the epoch from which the rate has its last value, and this value.
DENSE: dict[str, tuple[tuple[int, int], int, float]] = {
    "deim_dfine_s_coco": ((4, 64), 120, 0.5),
    "deimv2_atto_coco": ((4, 250), 468, 0.5),
    "deimv2_n_coco": ((4, 78), 160, 1.0),
}
FROZEN = {"rtdetr_r50_coco", "rtdetrv2_r50_coco", "dfine_l_coco", "detr_r50_coco"}


def recipe(name: str, *overrides: str) -> RunConfig:
    config = load_config(f"{name}.yaml", list(overrides))
    assert isinstance(config, RunConfig)
    return config


def test_every_recipe_is_checked() -> None:
    folder = Path(__file__).resolve().parents[1] / "configs"
    found = {path.stem for path in folder.glob("*_coco.yaml")}
    assert found == set(PUBLISHED)
    assert set(DENSE) == {name for name in found if name.startswith("deim")}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_schedule_is_the_published_one(name: str) -> None:
    config = recipe(name)
    optim, train = config.optim, config.train
    sizes = {tuple(size) for size in config.data.sizes or [config.data.size]}
    strong = round(config.augment.strong_until * train.epochs)
    found = (train.batch * GPUS, train.epochs, optim.lr, optim.backbone_lr or optim.lr, strong, len(sizes))
    assert found == PUBLISHED[name]
    assert optim.clip_norm == 0.1
    if len(sizes) > 1:
        assert {height for height, _ in sizes} == set(range(480, 801, 32))


@pytest.mark.parametrize("name", DENSE)
def test_the_dense_ones_are_the_published_ones(name: str) -> None:
    config = recipe(name)
    mixed, settled, last = DENSE[name]
    augment, epochs = config.augment, config.train.epochs
    assert (round(augment.mix_from * epochs), round((augment.mix_until or 0) * epochs)) == mixed
    assert config.loss.classification == "mal"
    steps = 3696  # an epoch of COCO's 118,287 images
    rate = build_rate(config.optim, epochs * steps)
    assert rate(epochs * steps - 1) == rate(round((settled + 0.02) * steps) - 1) == pytest.approx(last)
    assert rate(mixed[1] * steps - steps) == 1.0
    assert rate(999 if config.optim.warmup_steps == 2000 else 1999) == pytest.approx(0.25, abs=1e-3)  # half a ramp


@pytest.mark.parametrize("name", PUBLISHED)
def test_its_parts_build(name: str) -> None:
    """Model, parts that stay as they are, optimizer's groups and criterion, without memory."""
    config = recipe(name)
    with torch.device("meta"):
        model = create_model(config.model.name, num_classes=80, **config.model.overrides)
    frozen = freeze(model, config.train.freeze)
    assert bool(frozen) == (name in FROZEN)
    norms = sum(isinstance(module, torch.nn.BatchNorm2d) for module in model.backbone.modules())
    assert (norms == 0) == (name in FROZEN)
    optim = config.optim
    groups = parameter_groups(
        model, lr=optim.lr, backbone_lr=optim.backbone_lr or optim.lr, weight_decay=optim.weight_decay
    )
    assert {group["lr"] for group in groups} == {optim.lr, optim.backbone_lr or optim.lr}
    assert {group["weight_decay"] for group in groups} == {optim.weight_decay, 0.0}
    criterion = build_criterion(config.loss, epochs=config.train.epochs, no_object=name.startswith("detr_"))
    assert criterion.classification == ("ce" if name == "detr_r50_coco" else "mal" if name in DENSE else "vfl")


QUICK = {
    "deimv2_atto_coco": [],
    "dfine_n_coco": [],
    "finetune_detector": ["model.name=rtdetr_nano", "model.weights=null"],
}


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in PUBLISHED if name not in QUICK)]
)
def test_it_takes_a_step(name: str, coco_mini: Path, tmp_path: Path) -> None:
    """On two real images, small, on the CPU; the rest is the recipe's."""
    config = recipe(
        name, f"data.root={coco_mini}", "data.train_split=train", "data.val_split=val", "data.size=[64,64]",
        "data.sizes=[]", "data.workers=0", "model.backbone_weights=null", "train.batch=2", "train.device=cpu",
        "train.precision=fp32", f"output={tmp_path / 'run'}", *QUICK.get(name, []),
    )  # fmt: skip
    trainer = build_trainer(config)
    before = [parameter.detach().clone() for parameter in trainer.bare_model.parameters()]
    trainer.sampler.set_epoch(round(config.augment.mix_from * config.train.epochs))
    losses: dict[str, Any] = trainer.train_step([next(iter(trainer.loader))])
    assert losses["total"].isfinite()
    assert not int(trainer.skipped)
    assert any(not torch.equal(a, b) for a, b in zip(before, trainer.bare_model.parameters(), strict=True))


@pytest.fixture(scope="module")
def coco_mini(shared_data: Path) -> Path:
    return shared_data / "detection" / "coco_mini"
