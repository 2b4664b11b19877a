"""From a configuration to the parts of a run: each key arrives where it acts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.tiny import tiny_values, write_set, write_split
from vitdet.backbones.layers import freeze_batch_norms
from vitdet.build import build_trainer, evaluate_source, resume_training, run_training
from vitdet.build.detection import build_criterion, build_eval_loader, build_evaluation, read_split
from vitdet.build.parts import build_rate, start_from
from vitdet.config import LossSection, OptimSection, RunConfig
from vitdet.devices import autocast_dtype, pick_device
from vitdet.engine.checkpoint import save_training_state, save_weights
from vitdet.engine.trainer import Trainer
from vitdet.errors import UserError
from vitdet.structures import ClassMap, Preprocessing


@pytest.fixture(scope="module")
def tiny_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_set(tmp_path_factory.mktemp("tiny"))


def build(root: Path, output: Path, **sections: Any) -> Trainer:
    values = tiny_values(root, output)
    for name, change in sections.items():
        values[name] = {**values.get(name, {}), **change} if isinstance(change, dict) else change
    return build_trainer(RunConfig.model_validate(values))


def test_every_key_of_the_run_arrives(tiny_set: Path, tmp_path: Path) -> None:
    trainer = build(
        tiny_set, tmp_path / "run",
        optim={"lr": 0.01, "backbone_lr": 0.001, "weight_decay": 0.3, "clip_norm": 0.7},
        train={"epochs": 5, "batch": 3, "ema": 0.999, "precision": "bf16"}, eval={"every": 2},
        augment={"strong_until": 0.4}, data={"sizes": [[32, 64], [64, 64]]}, seed=4,
    )  # fmt: skip
    groups = {group["name"]: (group["lr"], group["weight_decay"]) for group in trainer.optimizer.param_groups}
    assert groups == {
        "backbone": (0.001, 0.3),
        "backbone, not decayed": (0.001, 0.0),
        "head": (0.01, 0.3),
        "head, not decayed": (0.01, 0.0),
    }
    assert (trainer.epochs, trainer.evaluate_every, trainer.clip_norm) == (5, 2, 0.7)
    assert trainer.autocast is torch.bfloat16
    assert trainer.output == tmp_path / "run"
    sampler = trainer.sampler
    assert (sampler.batch_size, sampler.seed, sampler.strong_until, sampler.sizes) == (3, 4, 2, [(32, 64), (64, 64)])
    assert trainer.ema.decay == 0.0  # ten steps: five hundredths of them are no memory at all
    assert trainer.metadata.preprocessing.size == (64, 64)
    assert trainer.seed == 4
    assert not (tmp_path / "run").exists()


def test_augmentation_arrives(tiny_set: Path, tmp_path: Path) -> None:
    shares = {"photometric": 0.1, "zoom_out": 0.2, "iou_crop": 0.3, "hflip": 0.4, "vflip": 0.5, "rotate90": 0.6}
    augment = {**shares, "mosaic": 0.7, "mixup": 0.8, "scale_jitter": [0.9, 1.1]}
    dataset = build(tiny_set, tmp_path, augment=augment, seed=3).loader.dataset
    assert {name: getattr(dataset.transform, name) for name in shares} == shares
    assert (dataset.mosaic, dataset.mixup, dataset.transform.scale_jitter, dataset.seed) == (0.7, 0.8, (0.9, 1.1), 3)


def test_no_average_where_none_is_wanted(tiny_set: Path, tmp_path: Path) -> None:
    assert build(tiny_set, tmp_path, train={"ema": None}).ema is None


def test_loss_weights_arrive() -> None:
    numbers = {
        "vfl": 2, "mal": 12, "ce": 13, "box": 3, "giou": 4, "fgl": 10, "ddf": 11, "union": True, "match_class": 5,
        "match_box": 6, "match_giou": 7, "one_to_many": 9, "dense": 0.5,
    }  # fmt: skip
    for kind in ("mal", "ce"):
        other = build_criterion(LossSection(classification=kind, no_object=0.3, **numbers), epochs=10)
        assert other.weights == {kind: numbers[kind], "box": 3, "giou": 4, "fgl": 10, "ddf": 11}
        assert (other.no_object, other.matcher.softmax) == (0.3, kind == "ce")
    criterion = build_criterion(LossSection(**numbers), epochs=10)
    assert criterion.weights == {"vfl": 2, "box": 3, "giou": 4, "fgl": 10, "ddf": 11}
    assert criterion.union
    matcher = criterion.matcher
    assert (matcher.class_cost, matcher.box_cost, matcher.giou_cost) == (5, 6, 7)
    assert (criterion.count, criterion.dense_weight) == (9, 0.5)


def test_the_loss_of_the_classes_is_the_models() -> None:
    """DETR's with its cost of 1, the others' with 2, where the run does not say another."""
    for no_object, kind, cost in ((False, "vfl", 2.0), (True, "ce", 1.0)):
        criterion = build_criterion(LossSection(), epochs=1, no_object=no_object)
        assert (criterion.classification, criterion.matcher.class_cost) == (kind, cost)
    assert build_criterion(LossSection(classification="mal"), epochs=1).classification == "mal"
    assert build_criterion(LossSection(classification="ce"), epochs=1).matcher.softmax


def test_images_are_mixed_in_their_epochs(tiny_set: Path, tmp_path: Path) -> None:
    """DEIM: mosaic and mixup from 4 to 64 of 132 epochs; other augmentation and other sizes until 120."""
    trainer = build(
        tiny_set, tmp_path / "run", train={"epochs": 132}, data={"sizes": [[32, 64], [96, 64]]},
        augment={"mosaic": 0.5, "mixup": 0.5, "mix_from": 0.0303, "mix_until": 0.4848, "strong_until": 0.9091},
    )  # fmt: skip
    seen = {}
    for epoch in (3, 4, 63, 64, 119, 120):
        trainer.sampler.set_epoch(epoch)
        keys = [key for batch in trainer.sampler for key in batch]
        seen[epoch] = (keys[0].strong, keys[0].mix, {key.size for key in keys} == {(64, 64)})
    off, on = (True, False, False), (True, True, False)
    assert seen == {3: off, 4: on, 63: on, 64: off, 119: off, 120: (False, False, True)}
    with pytest.raises(ValueError, match="mix_from below mix_until"):
        build(tiny_set, tmp_path, augment={"mosaic": 0.5, "mix_from": 0.5, "mix_until": 0.4})


def test_matching_changes_at_its_share_of_the_epochs() -> None:
    assert build_criterion(LossSection(), epochs=160).quality_from is None
    assert build_criterion(LossSection(match_quality_from=0.85), epochs=160).quality_from == 136


def test_the_rate_is_the_schedules() -> None:
    rate = build_rate(OptimSection(schedule="flat_cosine", flat=0.5, final=0.1, warmup=0.1), 100)
    assert [rate(step) for step in (0, 10, 49, 75)] == pytest.approx([1 / 11, 1, 1, 0.55])
    assert build_rate(OptimSection(warmup=0.5, warmup_steps=3), 100)(3) == 1.0
    rate = build_rate(OptimSection(schedule="cosine", settled=0.2, final=0.1, warmup=0.1, ramp="quadratic"), 100)
    assert [rate(step) for step in (0, 80, 99)] == pytest.approx([1 / 121, 0.1, 0.1])


def test_the_seed_gives_the_first_weights(tiny_set: Path, tmp_path: Path) -> None:
    first, again, other = (build(tiny_set, tmp_path, seed=seed).model.state_dict() for seed in (1, 1, 2))
    name = "encoder.channel_project.0.conv.weight"
    name = name if name in first else next(key for key, value in first.items() if value.ndim == 4)
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])


def test_the_class_count_is_checked(tiny_set: Path, tmp_path: Path) -> None:
    assert build(tiny_set, tmp_path, model={"num_classes": 2}).metadata.arguments["num_classes"] == 2
    with pytest.raises(UserError) as error:
        build(tiny_set, tmp_path, model={"num_classes": 5})
    assert str(error.value) == (
        f"model.num_classes is 5 but {tiny_set} has 2 classes; leave it out, it is taken from the data"
    )


def test_splits_with_different_classes_are_refused(tmp_path: Path) -> None:
    root = write_set(tmp_path / "set")
    path = root / "annotations" / "instances_val.json"
    content = json.loads(path.read_text())
    content["categories"][0]["name"] = "scarlet"
    path.write_text(json.dumps(content))
    with pytest.raises(UserError) as error:
        build(root, tmp_path / "run")
    assert str(error.value) == (
        f"the splits of {root} have different classes: red, blue and scarlet, blue; give both the same categories"
    )


def test_images_in_both_splits_are_told(tiny_set: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    build(tiny_set, tmp_path / "run")
    assert "both splits" not in capsys.readouterr().err
    root = tmp_path / "set"
    source = write_split(root, "train", [1, 1, 1])
    (root / "train").rename(root / "images")
    content = json.loads(source.read_text())
    content["images"] = content["images"][1:]
    content["annotations"] = content["annotations"][1:]
    source.with_name("instances_val.json").write_text(json.dumps(content))
    build(root, tmp_path / "run")
    sentence = f"note: 2 images are in both splits of {root}: the AP will look too good"
    assert capsys.readouterr().err.splitlines().count(sentence) == 1


@pytest.fixture
def start(tiny_set: Path, tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A weights file of the tiny model for red and blue, and its values, of which no fresh model has one."""
    trainer = build(tiny_set, tmp_path / "first")
    state = {name: value + 1 for name, value in trainer.model.state_dict().items()}
    trainer.model.load_state_dict(state)
    save_weights(tmp_path / "first.safetensors", trainer.model, trainer.metadata)
    return tmp_path / "first.safetensors", state


def differing(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> set[str]:
    assert first.keys() == second.keys()
    return {name for name, value in first.items() if not torch.equal(value, second[name])}


def test_starting_from_weights_of_the_same_classes(
    tiny_set: Path, tmp_path: Path, start: tuple[Path, dict[str, torch.Tensor]], capsys: pytest.CaptureFixture[str]
) -> None:
    path, state = start
    trainer = build(tiny_set, tmp_path / "run", seed=7, model={"weights": str(path)})
    assert not differing(trainer.model.state_dict(), state)
    assert not differing(trainer.ema.model.state_dict(), state)
    assert "start anew" not in capsys.readouterr().err


KEPT = "the heads keep the rows of"


@pytest.mark.parametrize(
    ("categories", "labels", "told"),
    [
        ({3: "cat", 7: "dog"}, {}, "{count} tensors start anew"),
        ({3: "blue", 7: "red"}, {0: 1, 1: 0}, f"{KEPT} blue, red (2 of 2 classes)"),
        ({3: "red"}, {0: 0}, f"{KEPT} red (1 of 1 classes)"),
        ({3: "cat", 7: "Red"}, {1: 0}, f"{KEPT} Red (1 of 2 classes); new: cat"),
    ],
)
def test_starting_from_weights_of_other_classes(
    tmp_path: Path, start: tuple[Path, dict[str, torch.Tensor]], capsys: pytest.CaptureFixture[str],
    categories: dict[int, str], labels: dict[int, int], told: str,
) -> None:  # fmt: skip
    """Of the same number or another; all but the heads comes from the file, of them the rows of classes known there."""
    path, state = start
    root = write_set(tmp_path / "set", categories=categories)
    fresh = build(root, tmp_path / "run", seed=7).model.state_dict()
    capsys.readouterr()
    started = build(root, tmp_path / "run", seed=7, model={"weights": str(path)}).model.state_dict()
    heads = {name for name in started if "score_head" in name} | {"denoising.embedding.weight"}
    assert len(heads) >= 5  # weight and bias of the encoder's and the one layer's, and the embedding
    assert not differing(started, state) - heads
    for name in heads:
        for label in range(len(categories)):
            expected = state[name][labels[label]] if label in labels else fresh[name][label]
            assert torch.equal(started[name][label], expected), (name, label)
    assert torch.equal(started["denoising.embedding.weight"][-1], state["denoising.embedding.weight"][-1])
    sentence = f"note: {path} knows other classes (red, blue): {told.format(count=len(heads))}"
    assert capsys.readouterr().err.splitlines().count(sentence) == 1


@pytest.mark.parametrize("names", [("red", "blue"), ("cat", "dog")], ids=["same classes", "other classes"])
def test_a_run_may_freeze_what_another_has_trained(
    tiny_set: Path, tmp_path: Path, start: tuple[Path, dict[str, torch.Tensor]], capsys: pytest.CaptureFixture[str],
    names: tuple[str, str],
) -> None:  # fmt: skip
    """And train what was frozen: only the counters of the batch norms differ."""
    path, state = start
    trainer, free = build(tiny_set, tmp_path), build(tiny_set, tmp_path).model
    freeze_batch_norms(trainer.model.backbone)
    start_from(trainer.model, path, "rtdetr_nano", ClassMap((1, 2), names), trainer.metadata.arguments)
    norms = [name for name in trainer.model.state_dict() if name.endswith("norm.running_mean")]
    assert norms
    assert all(torch.equal(trainer.model.state_dict()[name], state[name]) for name in norms)
    save_weights(tmp_path / "frozen.safetensors", trainer.model, trainer.metadata)
    start_from(
        free, tmp_path / "frozen.safetensors", "rtdetr_nano", ClassMap((1, 2), names), trainer.metadata.arguments
    )
    assert all(torch.equal(free.state_dict()[name], state[name]) for name in norms)
    told = re.findall(r"(\d+) tensors start anew", capsys.readouterr().err)
    heads = {name for name in state if "score_head" in name} | {"denoising.embedding.weight"}
    assert told == ([] if names == ("red", "blue") else [str(len(heads))] * 2)


def test_starting_from_another_model_is_refused(
    tiny_set: Path, tmp_path: Path, start: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    path, _ = start
    with pytest.raises(UserError) as error:
        build(tiny_set, tmp_path / "run", model={"name": "rtdetr_r18", "overrides": {}, "weights": str(path)})
    assert str(error.value) == (
        f"model.weights {path} is of 'rtdetr_nano', the run trains 'rtdetr_r18'; use the same model"
    )
    overrides = tiny_values(tiny_set, tmp_path)["model"]["overrides"] | {"decoder_hidden": 96}
    with pytest.raises(UserError, match=r"^the weights do not fit RTDETR: 3 of another shape: decoder\.layers\.0\."):
        build(tiny_set, tmp_path / "run", model={"overrides": overrides, "weights": str(path)})


def test_data_of_other_classes_is_not_evaluated(tiny_set: Path, tmp_path: Path) -> None:
    trainer = build(tiny_set, tmp_path)
    trainer.metadata.class_map = type(trainer.metadata.class_map)((1, 2), ("cat", "dog"))
    save_weights(tmp_path / "best.safetensors", trainer.model, trainer.metadata)
    with pytest.raises(UserError) as error:
        evaluate_source(tmp_path / "best.safetensors", root=tiny_set, device="cpu", workers=0)
    assert str(error.value) == (
        f"the model knows the classes cat, dog but {tiny_set} has red, blue; "
        "evaluate on data with the classes it was trained on"
    )


def test_evaluation_leaves_the_model_as_it_was(tiny_set: Path, tmp_path: Path) -> None:
    trainer = build(tiny_set, tmp_path)
    data = read_split(tiny_set, "val")
    loader = build_eval_loader(data, Preprocessing((64, 64)), batch=4, workers=0, cache=False)
    evaluate = build_evaluation(data, loader, backend="hotcoco", top_k=3, device=torch.device("cpu"))
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    trainer.model.train()
    metrics = evaluate(trainer.model)
    assert trainer.model.training
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
    assert len(metrics["results"]) == 6 * 3  # top_k an image
    assert {row["category_id"] for row in metrics["results"]} <= {3, 7}
    assert {row["image_id"] for row in metrics["results"]} == set(range(11, 17))


def test_boxes_are_in_pixels_of_the_original(tiny_set: Path, tmp_path: Path) -> None:
    """A model that answers with the ground truth scores 1, whatever the size it sees."""
    trainer = build(tiny_set, tmp_path)
    data = read_split(tiny_set, "val")
    loader = build_eval_loader(data, Preprocessing((32, 64)), batch=4, workers=0, cache=False)

    class Oracle(torch.nn.Module):
        metadata = trainer.metadata

        def __init__(self) -> None:
            super().__init__()
            self.batches = iter(list(loader))

        def forward(self, images: torch.Tensor) -> Any:
            del images
            targets = next(self.batches)["targets"]
            logits = torch.nn.functional.one_hot(targets.labels, 2) * 20.0 - 10
            logits = torch.where(targets.valid[..., None], logits, -10.0)
            from vitdet.structures import DetectorOutput

            return DetectorOutput(logits, targets.boxes)

    evaluate = build_evaluation(data, loader, backend="hotcoco", top_k=300, device=torch.device("cpu"))
    assert evaluate(Oracle())["AP"] == pytest.approx(1.0)


def test_a_run_is_not_replaced_unasked(tiny_set: Path, tmp_path: Path) -> None:
    save_training_state(tmp_path / "run" / "last.pt", {"epoch": 1})
    config = RunConfig.model_validate(tiny_values(tiny_set, tmp_path / "run"))
    with pytest.raises(UserError) as error:
        run_training(config)
    output = tmp_path / "run"
    assert str(error.value) == (
        f"{output} already holds a run; continue it with --resume {output}, replace it with --overwrite, "
        "or choose another output=…"
    )


@pytest.mark.parametrize("state", [{"epoch": 1}, [1, 2], {"config": {"model": 3}}, {"config": None}])
def test_resuming_from_a_file_of_another_kind(tmp_path: Path, state: Any) -> None:
    """What a state dict saved by other programs looks like."""
    save_training_state(tmp_path / "last.pt", state)
    with pytest.raises(UserError) as error:
        resume_training(tmp_path)
    assert str(tmp_path / "last.pt") in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["gpu", "cuda:99", "meow:0"])
def test_devices_that_are_not_there(name: str) -> None:
    with pytest.raises(UserError) as error:
        pick_device(name)
    assert str(error.value) == f"the device {name!r} cannot be used here; choose 'cpu' or 'auto'"


def test_devices_and_precision() -> None:
    cpu = torch.device("cpu")
    assert pick_device("cpu") == cpu
    assert pick_device("auto").type in {"cpu", "cuda", "mps"}
    assert autocast_dtype("fp32", cpu) is None
    assert autocast_dtype("bf16", cpu) is torch.bfloat16


@pytest.mark.parametrize(("matrix_unit", "expected"), [(True, torch.bfloat16), (False, None)])
def test_auto_precision_asks_the_cpu(monkeypatch: pytest.MonkeyPatch, matrix_unit: bool, expected: Any) -> None:
    monkeypatch.setattr("vitdet.devices.has_matrix_unit", lambda: matrix_unit)
    assert autocast_dtype("auto", torch.device("cpu")) is expected
