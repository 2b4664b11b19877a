"""Configurations: what is read, and the one sentence for what is wrong."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from vitdet.config import ClassificationRunConfig, RunConfig, check_config, find_config, load_config
from vitdet.errors import UserError

VALID: dict[str, Any] = {
    "model": {"name": "rtdetr_nano"},
    "data": {"root": "set", "size": [64, 96]},
    "train": {"epochs": 3, "batch": 4},
    "output": "runs/x",
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(VALID))
    return path


def message(path: Path, overrides: list[str] | None = None) -> str:
    with pytest.raises(UserError) as error:
        load_config(path, overrides)
    text = str(error.value)
    assert "\n" not in text, "one sentence on one line"
    return text


def test_values_and_defaults(config: Path) -> None:
    run = load_config(config)
    assert (run.model.name, run.data.size, run.train.epochs, run.output) == ("rtdetr_nano", (64, 96), 3, "runs/x")
    assert (run.augment.mosaic, run.optim.lr, run.train.ema, run.eval.backend, run.seed) == (
        0,
        1e-4,
        0.9999,
        "hotcoco",
        0,
    )


@pytest.mark.parametrize(
    ("override", "section", "key", "value"),
    [
        ("train.epochs=10", "train", "epochs", 10),
        ("optim.lr=0.002", "optim", "lr", 0.002),
        ("optim.lr=2.0e-3", "optim", "lr", 0.002),
        ("data.size=[32, 64]", "data", "size", (32, 64)),
        ("data.root=/data/a b=c", "data", "root", "/data/a b=c"),
        ("data.cache=true", "data", "cache", True),
        ("train.ema=null", "train", "ema", None),
        ("augment.scale_jitter=[0.5, 2.0]", "augment", "scale_jitter", (0.5, 2.0)),
        ("model.overrides.num_queries=50", "model", "overrides", {"num_queries": 50}),
        ("model.overrides={width: 64}", "model", "overrides", {"width": 64}),
    ],
)
def test_overrides_have_types(config: Path, override: str, section: str, key: str, value: Any) -> None:
    found = getattr(getattr(load_config(config, [override]), section), key)
    assert found == value
    assert type(found) is type(value)


def test_overrides_apply_in_order_and_at_the_top(config: Path) -> None:
    run = load_config(config, ["seed=1", "seed=2", "output=elsewhere"])
    assert (run.seed, run.output) == (2, "elsewhere")


def test_a_number_with_an_exponent_and_no_point(config: Path) -> None:
    """YAML 1.1 reads 2e-3 as a text; people write it, and it must not be refused or misread."""
    assert load_config(config, ["optim.lr=2e-3"]).optim.lr == 0.002


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("train.epoch=10", ["unknown key 'train.epoch'", "did you mean 'epochs'?"]),
        ("trian.epochs=10", ["unknown key 'trian'", "did you mean 'train'?"]),
        ("optim.zzz=1", ["unknown key 'optim.zzz'", "known: lr, backbone_lr, weight_decay"]),
        ("train.epochs=ten", ["'train.epochs'", "integer", "'ten'"]),
        ("train.epochs=0", ["'train.epochs'", "greater than or equal to 1", "got 0"]),
        ("train.epochs=1.5", ["'train.epochs'", "integer", "1.5"]),
        ("optim.lr=-1", ["'optim.lr'", "greater than 0", "got -1"]),
        ("augment.mosaic=1.5", ["'augment.mosaic'", "less than or equal to 1", "got 1.5"]),
        ("optim.schedule=linear", ["'optim.schedule'", "'constant', 'cosine', 'flat_cosine' or 'step'", "'linear'"]),
        ("train.epochs=", ["'train.epochs'", "integer", "got nothing"]),
        ("data.size=[0, 64]", ["'data.size' must be (height, width) in pixels, got [0, 64]"]),
        ("data.sizes=[[64, 64], [64, -70]]", ["'data.sizes' must be (height, width) in pixels, got [64, -70]"]),
        ("data.std=[0.2, 0.0, 0.2]", ["'data.std' must be positive, got [0.2, 0.0, 0.2]"]),
        ("data.mean=[0.5, 0.5]", ["'data.mean", "missing"]),
        ("data.crop=0.9", ["unknown key 'data.crop'"]),
        ("augment.cutmix=0.9", ["unknown key 'augment.cutmix'"]),
        ("optim.layer_decay=1.1", ["'optim.layer_decay'", "less than or equal to 1", "got 1.1"]),
        ("optim.layer_decay=0", ["'optim.layer_decay'", "greater than 0", "got 0"]),
        ("train.accumulate=0", ["'train.accumulate'", "greater than or equal to 1", "got 0"]),
        ("data.size=64", ["'data.size'", "tuple", "got 64"]),
        ("data.size=[64]", ["'data.size", "missing"]),
        ("eval.backend=coco", ["'eval.backend'", "'hotcoco' or 'pycocotools'", "'coco'"]),
        ("seed=-1", ["'seed'", "greater than or equal to 0", "got -1"]),
        ("augment.scale_jitter=[2.0, 0.5]", ["'augment.scale_jitter'", "[2.0, 0.5]"]),
        ("augment.scale_jitter=[0.0, 1.0]", ["'augment.scale_jitter'", "[0.0, 1.0]"]),
        ("optim=fast", ["'optim'", "'fast'"]),
    ],
)
def test_wrong_values_are_named(config: Path, override: str, parts: list[str]) -> None:
    text = message(config, [override])
    assert text.startswith(f"{config}: ")
    for part in parts:
        assert part in text, text
    assert not re.search(r"got (.+), got \1$", text), "told twice"
    assert "Section" not in text, "names of our classes say nothing to a person"


@pytest.fixture
def classification(tmp_path: Path) -> Path:
    path = tmp_path / "classes.yaml"
    values = {"task": "classification", **VALID, "model": {"name": "vit_tiny_patch16_224"}}
    path.write_text(yaml.safe_dump(values))
    return path


def test_the_task_decides_what_is_read(config: Path, classification: Path) -> None:
    """A run without a task is a detector's, as before there were others."""
    assert type(load_config(config)) is RunConfig
    assert type(load_config(config, ["task=detection"])) is RunConfig
    run = load_config(classification)
    assert type(run) is ClassificationRunConfig
    assert (run.task, run.data.crop, run.data.interpolation) == ("classification", 0.875, "bicubic")
    augment, loss = run.augment, run.loss
    assert (augment.scale, augment.ratio, augment.hflip) == ((0.08, 1.0), (3 / 4, 4 / 3), 0.5)
    assert (augment.mixup, augment.cutmix, augment.erasing, augment.rand_augment_layers, augment.repeats) == (
        0.0, 0.0, 0.0, 0, 1,
    )  # fmt: skip
    assert (loss.kind, loss.label_smoothing, loss.teacher, loss.distillation) == ("softmax", 0.0, None, 0.5)
    assert (run.train.accumulate, run.train.freeze, run.optim.layer_decay) == (1, [], 1.0)
    assert (run.data.mean, run.data.std) == (None, None)


def test_one_frozen_part_is_a_list_of_one(config: Path, classification: Path) -> None:
    for path in (config, classification):
        assert load_config(path, ["train.freeze=backbone"]).train.freeze == ["backbone"]
        assert load_config(path, ["train.freeze=[a, b]"]).train.freeze == ["a", "b"]


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("augment.mosaic=0.5", ["unknown key 'augment.mosaic'", "known: scale, ratio, hflip"]),
        ("augment.cutmx=0.5", ["unknown key 'augment.cutmx' (did you mean 'cutmix'?)"]),
        ("loss.vfl=1", ["unknown key 'loss.vfl'", "known: kind, label_smoothing, teacher, distillation"]),
        ("eval.backend=hotcoco", ["unknown key 'eval.backend'"]),
        ("data.cropp=0.9", ["unknown key 'data.cropp' (did you mean 'crop'?)"]),
        ("data.crop=0", ["'data.crop'", "greater than 0", "got 0"]),
        ("data.crop=1.1", ["'data.crop'", "less than or equal to 1", "got 1.1"]),
        ("data.interpolation=nearest", ["'data.interpolation'", "'bilinear' or 'bicubic'", "'nearest'"]),
        (
            "augment.scale=[0.5, 2.0]",
            ["'augment.scale' must be shares of the image's area, at most 1, got [0.5, 2.0]"],
        ),
        ("augment.scale=[1.0, 0.5]", ["'augment.scale' must be a range [low, high] of positive numbers, got [1.0,"]),
        ("augment.scale=[0.0, 0.5]", ["'augment.scale' must be a range", "got [0.0, 0.5]"]),
        ("augment.ratio=[2.0, 0.5]", ["'augment.ratio' must be a range", "got [2.0, 0.5]"]),
        ("augment.mixup=-1", ["'augment.mixup'", "greater than or equal to 0", "got -1"]),
        ("augment.switch=1.5", ["'augment.switch'", "less than or equal to 1", "got 1.5"]),
        ("augment.rand_augment_magnitude=11", ["'augment.rand_augment_magnitude'", "less than or equal to 10"]),
        ("augment.repeats=0", ["'augment.repeats'", "greater than or equal to 1", "got 0"]),
        ("loss.label_smoothing=1", ["'loss.label_smoothing'", "less than 1", "got 1"]),
        ("loss.distillation=2", ["'loss.distillation'", "less than or equal to 1", "got 2"]),
        ("loss.kind=hinge", ["'loss.kind'", "'softmax' or 'sigmoid'", "'hinge'"]),
        ("train.freeze={a: 1}", ["'train.freeze'", "list"]),
    ],
)
def test_wrong_values_of_a_classifier(classification: Path, override: str, parts: list[str]) -> None:
    text = message(classification, [override])
    assert text.startswith(f"{classification}: ")
    for part in parts:
        assert part in text, text


@pytest.mark.parametrize(
    ("task", "expected"),
    [
        ("classify", "there is no task 'classify'; did you mean 'classification'?"),
        ("detect", "there is no task 'detect'; did you mean 'detection'?"),
        ("3", "there is no task 3; known: detection, classification"),
        ("", "there is no task None; known: detection, classification"),
        ("[detection]", "there is no task ['detection']; did you mean 'detection'?"),
    ],
)
def test_an_unknown_task(config: Path, task: str, expected: str) -> None:
    assert message(config, [f"task={task}"]) == expected


@pytest.mark.parametrize(
    "key", ["model", "data", "train", "output", "data.root", "data.size", "train.batch", "model.name"]
)
def test_what_is_missing_is_named(tmp_path: Path, key: str) -> None:
    values = yaml.safe_load(yaml.safe_dump(VALID))
    *parents, last = key.split(".")
    place = values
    for parent in parents:
        place = place[parent]
    del place[last]
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(values))
    assert message(path) == f"{path}: {key!r} is missing"


def test_all_problems_are_told_at_once(config: Path) -> None:
    text = message(config, ["train.epochs=0", "optim.learning_rate=1", "data.size=[1, 0]"])
    assert text.count("; ") == 2
    for part in ("'train.epochs'", "'optim.learning_rate'", "'data.size'"):
        assert part in text


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("epochs", "cannot read the override 'epochs'; write section.key=value, such as train.epochs=10"),
        ("=3", "cannot read the override '=3'; write section.key=value, such as train.epochs=10"),
        ("output.x=3", "the override 'output.x=3' goes into 'output', which is no section"),
        ("train.epochs.x=3", "the override 'train.epochs.x=3' goes into 'epochs', which is no section"),
        ("data.size=[1, 2", "the value of the override 'data.size=[1, 2' is not valid YAML; quote it"),
    ],
)
def test_overrides_that_cannot_be_read(config: Path, override: str, expected: str) -> None:
    assert message(config, [override]) == expected


def test_an_override_into_an_empty_section(tmp_path: Path) -> None:
    """``augment:`` with nothing below it is a section, as far as a person can see."""
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(VALID) + "augment:\n")
    assert load_config(path, ["augment.hflip=0.5"]).augment.hflip == 0.5
    assert load_config(path).augment.hflip == 0.0


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"model:\n  name: x\n data: [1\n", "is not valid YAML at line 3; mend the file"),
        (b"model: {name: x\ntrain: 1\n", "is not valid YAML at line 2; mend the file"),
        (b"model: \xff\xfe\n", "is not valid YAML; mend the file"),
        (b"", "must hold sections such as 'model:' and 'data:', got nothing"),
        (b"- 1\n- 2\n", "must hold sections such as 'model:' and 'data:', got list"),
    ],
)
def test_files_that_are_no_configuration(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(content)
    assert message(path) == f"{path} {expected}"


@pytest.mark.parametrize("key", ["1: 2", "null: 3", "2024-01-01: x"])
def test_a_key_that_is_no_text(tmp_path: Path, key: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(VALID) + key + "\n")
    assert message(path).startswith(f"{path}: ")


def test_shipped_configurations_are_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("rtdetr_nano_bccd", "rtdetr_nano_bccd.yaml", "configs/rtdetr_nano_bccd.yaml"):
        found = find_config(name)
        assert found.is_absolute()
        assert found.name == "rtdetr_nano_bccd.yaml"
        assert load_config(name).model.name == "rtdetr_nano"


def test_a_file_at_hand_goes_before_a_shipped_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rtdetr_nano_bccd.yaml").write_text(yaml.safe_dump(VALID))
    assert load_config("rtdetr_nano_bccd.yaml").output == "runs/x"


def test_an_unknown_configuration(tmp_path: Path) -> None:
    text = message(tmp_path / "nope.yaml")
    assert text.startswith(
        f"there is no configuration {tmp_path / 'nope.yaml'}; give a YAML file or one of those shipped: "
    )
    assert "rtdetr_nano_bccd.yaml" in text
    assert message(tmp_path).startswith(f"there is no configuration {tmp_path}; ")


def test_a_wrong_folder_is_not_passed_over(tmp_path: Path) -> None:
    """A person's own file in a misspelt folder must not become a shipped one of the same name."""
    path = tmp_path / "mispelt" / "rtdetr_nano_bccd.yaml"
    assert message(path).startswith(f"there is no configuration {path}; ")


def test_the_configuration_survives_being_written(config: Path) -> None:
    """``last.pt`` and ``config.yaml`` hold it as plain values."""
    run = load_config(config, ["data.sizes=[[64, 64], [96, 96]]", "train.ema=null"])
    plain = run.model_dump(mode="json")
    assert RunConfig.model_validate(yaml.safe_load(yaml.safe_dump(plain))) == run


def test_a_classifiers_configuration_survives_being_written(classification: Path) -> None:
    run = load_config(classification, ["augment.scale=[0.2, 0.8]", "data.crop=null", "train.freeze=backbone"])
    assert check_config(yaml.safe_load(yaml.safe_dump(run.model_dump(mode="json")))) == run
