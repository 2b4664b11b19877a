"""A classifier's run from its configuration: each key arrives where it acts."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from tests.engine.tiny_images import CLASSES, TINY_VIT, changed, tiny_values, write_images
from vitdet import create_model, load_model
from vitdet.build import build_trainer, evaluate_source, resume_training, run_training
from vitdet.build.classification import Preparation, build_eval_loader, build_evaluation, read_split
from vitdet.config import ClassificationRunConfig
from vitdet.data.mixing import BatchMixer
from vitdet.engine.checkpoint import read_metadata, save_weights
from vitdet.engine.trainer import Trainer
from vitdet.errors import UserError
from vitdet.structures import ClassMap, ImageTargets, ModelMetadata, Preprocessing
from vitdet.weights.describe import imagenet_class_names

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))


@pytest.fixture(scope="module")
def image_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_images(tmp_path_factory.mktemp("images") / "set")


def build(root: Path, output: Path, **sections: Any) -> Trainer:
    return build_trainer(ClassificationRunConfig.model_validate(changed(tiny_values(root, output), **sections)))


# ------------------------------------------------------------------------------------------ each key


def test_every_key_of_the_run_arrives(image_set: Path, tmp_path: Path) -> None:
    trainer = build(
        image_set, tmp_path / "run",
        optim={"lr": 0.01, "backbone_lr": 0.001, "weight_decay": 0.3, "clip_norm": 0.7, "betas": [0.8, 0.99]},
        train={"epochs": 5, "batch": 6, "ema": 0.9, "precision": "bf16", "accumulate": 2},
        eval={"every": 2, "batch": 5}, augment={"strong_until": 0.4, "repeats": 3},
        data={"sizes": [[32, 32], [40, 40]]}, seed=4,
    )  # fmt: skip
    groups = {group["name"]: (group["lr"], group["weight_decay"]) for group in trainer.optimizer.param_groups}
    assert groups == {
        "backbone": (0.001, 0.3),
        "backbone, not decayed": (0.001, 0.0),
        "head": (0.01, 0.3),
        "head, not decayed": (0.01, 0.0),
    }
    assert all(group["betas"] == (0.8, 0.99) for group in trainer.optimizer.param_groups)
    assert (trainer.epochs, trainer.evaluate_every, trainer.clip_norm, trainer.accumulate) == (5, 2, 0.7, 2)
    assert (trainer.metric, trainer.seed, trainer.frozen) == ("top1", 4, [])
    assert trainer.autocast is torch.bfloat16
    sampler: Any = trainer.sampler
    assert (sampler.batch_size, sampler.seed, sampler.strong_until, sampler.sizes) == (6, 4, 2, [(32, 32), (40, 40)])
    assert sampler.repeats == 3
    assert trainer.ema.decay == pytest.approx(1 - 1 / max(1, 0.05 * 15))  # 3 steps an epoch
    assert trainer.output == tmp_path / "run"
    assert not (tmp_path / "run").exists()


def test_augmentation_arrives(image_set: Path, tmp_path: Path) -> None:
    values = {
        "scale": [0.3, 0.9], "ratio": [0.5, 2.0], "hflip": 0.4, "rand_augment_layers": 3,
        "rand_augment_magnitude": 7.0, "rand_augment_std": 0.2, "three_augment": True, "colour_jitter": 0.3,
        "erasing": 0.1, "mixup": 0.6, "cutmix": 0.7, "switch": 0.2, "mix": 0.8, "resize_only": True,
    }  # fmt: skip
    trainer = build(image_set, tmp_path, augment=values, seed=3, data={"interpolation": "bilinear", "cache": True})
    dataset: Any = trainer.loader.dataset  # type: ignore[attr-defined]
    transform = dataset.transform
    assert (transform.scale, transform.ratio, transform.hflip) == ((0.3, 0.9), (0.5, 2.0), 0.4)
    policy = transform.rand_augment
    assert (policy.layers, policy.magnitude, policy.std) == (3, 7.0, 0.2)
    assert (transform.three_augment, transform.colour_jitter, transform.erasing) == (True, 0.3, 0.1)
    assert (transform.resize_only, transform.interpolation) == (True, "bilinear")
    assert dataset.seed == 3
    assert dataset.images[0] is dataset.images[0], "kept in memory"
    mixer = trainer.prepare.mixer  # type: ignore[union-attr]
    assert (mixer.mixup, mixer.cutmix, mixer.switch, mixer.probability) == (0.6, 0.7, 0.2, 0.8)


def test_the_loss_arrives(image_set: Path, tmp_path: Path) -> None:
    criterion: Any = build(image_set, tmp_path, loss={"kind": "sigmoid", "label_smoothing": 0.2}).criterion
    assert (criterion.kind, criterion.label_smoothing, criterion.distillation) == ("sigmoid", 0.2, 0.0)


def test_preprocessing_is_the_runs(image_set: Path, tmp_path: Path) -> None:
    assert build(image_set, tmp_path).metadata.preprocessing == Preprocessing((32, 32), *IMAGENET, "bicubic", 1.0)
    data = {
        "size": [24, 40], "mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "crop": None, "interpolation": "bilinear",
    }  # fmt: skip
    trainer = build(image_set, tmp_path, data=data)
    expected = Preprocessing((24, 40), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "bilinear", None)
    assert trainer.metadata.preprocessing == expected
    assert trainer.metadata.arguments == {"num_classes": 3, "image_size": (24, 40), **TINY_VIT}
    assert trainer.bare_model.backbone.positions.grid == (3, 5)  # type: ignore[union-attr]
    assert trainer.metadata.class_map == ClassMap((0, 1, 2), CLASSES)


def test_a_swin_is_made_for_the_size(image_set: Path, tmp_path: Path) -> None:
    overrides = {"width": 24, "depths": [1, 1, 1, 1], "heads": [1, 1, 2, 2]}
    model = {"name": "swin_tiny_patch4_window7_224", "overrides": overrides}
    trainer = build(image_set, tmp_path, model=model, data={"size": [64, 64]}, optim={"layer_decay": 0.5})
    assert trainer.metadata.arguments["image_size"] == (64, 64)
    rates = {group["lr"] for group in trainer.optimizer.param_groups}
    assert len(rates) >= 5
    batch = next(iter(trainer.loader))
    assert trainer.model(trainer.metadata.preprocessing.normalize(batch["images"])).shape == (12, 3)


def test_layer_decay(image_set: Path, tmp_path: Path) -> None:
    """Head and last norm at the full rate, each layer at half that of the next; the embedding last."""
    trainer = build(image_set, tmp_path, optim={"lr": 0.01, "backbone_lr": 0.008, "layer_decay": 0.5})
    rate = {id(p): group["lr"] for group in trainer.optimizer.param_groups for p in group["params"]}
    found = {name: rate[id(p)] for name, p in trainer.bare_model.named_parameters()}
    expected = {
        "head.weight": 0.01,
        "backbone.encoder.norm.weight": 0.008,
        "backbone.encoder.layers.1.feed_forward.expand.weight": 0.004,
        "backbone.encoder.layers.0.feed_forward.expand.weight": 0.002,
        "backbone.patch_embedding.project.weight": 0.001,
        "backbone.class_token": 0.001,
        "backbone.positions.table": 0.001,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_layer_decay_of_what_has_no_layers(image_set: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        build(image_set, tmp_path, model={"name": "timm/resnet10t", "overrides": {}}, optim={"layer_decay": 0.5})
    assert str(error.value) == (
        "optim.layer_decay cannot be 0.5 for timm/resnet10t: layer-wise learning-rate decay needs a backbone of "
        "numbered layers, TimmClassifier has none"
    )


@pytest.mark.parametrize(("accumulate", "steps"), [(1, 3), (2, 2), (3, 1), (5, 1)])
def test_accumulated_steps_are_counted(image_set: Path, tmp_path: Path, accumulate: int, steps: int) -> None:
    """Three batches an epoch, the last step of what is left; the schedule ends with the run."""
    trainer = build(
        image_set, tmp_path, train={"accumulate": accumulate, "epochs": 4}, optim={"warmup": 0.0, "final": 0.2}
    )
    trainer.train_epoch()
    assert trainer.step == steps
    assert trainer.rate(4 * steps) == pytest.approx(0.2)
    assert trainer.rate(4 * steps - 1) > 0.2


def test_accumulating_is_a_larger_batch(image_set: Path, tmp_path: Path) -> None:
    """The same step from three batches of twelve as from one of all images: their gradients are averaged."""
    states = []
    for batch, accumulate in ((36, 1), (12, 3)):
        trainer = build(
            image_set, tmp_path, train={"batch": batch, "accumulate": accumulate, "ema": None},
            augment={"resize_only": True, "hflip": 0.0},
        )  # fmt: skip
        trainer.train_epoch()
        assert trainer.step == 1
        states.append(trainer.bare_model.state_dict())
    start = build(image_set, tmp_path).bare_model.state_dict()
    for name, value in states[0].items():
        torch.testing.assert_close(states[1][name], value, atol=1e-5, rtol=1e-4)
    assert all(not torch.equal(value, start[name]) for name, value in states[0].items())


# ------------------------------------------------------------------------------------------ sizes, tasks, classes


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"data": {"size": [30, 32]}}, "data.size [30, 32] must be divisible by 8 for vit_tiny_patch16_224; change it"),
        (
            {"data": {"sizes": [[32, 32], [40, 44]]}},
            "data.sizes [40, 44] must be divisible by 8 for vit_tiny_patch16_224; change it",
        ),
        (
            {"model": {"name": "swin_tiny_patch4_window7_224", "overrides": {}}, "data": {"size": [36, 32]}},
            "data.size [36, 32] must be divisible by 32 for swin_tiny_patch4_window7_224; change it",
        ),
        (
            {"model": {"name": "rtdetr_nano", "overrides": {}}},
            "rtdetr_nano is a model for detection but the run's task is classification; start from a configuration "
            "with task: detection, or choose another model",
        ),
        (
            {"train": {"freeze": ["backbon"]}},
            "train.freeze names 'backbon', which the model does not have; did you mean 'backbone'?",
        ),
    ],
)
def test_what_does_not_fit(image_set: Path, tmp_path: Path, sections: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError) as error:
        build(image_set, tmp_path, **sections)
    assert str(error.value) == expected


def test_the_class_count_is_checked(image_set: Path, tmp_path: Path) -> None:
    assert build(image_set, tmp_path, model={"num_classes": 3}).metadata.arguments["num_classes"] == 3
    with pytest.raises(UserError) as error:
        build(image_set, tmp_path, model={"num_classes": 5})
    assert str(error.value) == (
        f"model.num_classes is 5 but {image_set} has 3 classes; leave it out, it is taken from the data"
    )


# ------------------------------------------------------------------------------------------ mixing and the teacher


def test_mixed_images_reach_the_model_with_mixed_targets(image_set: Path, tmp_path: Path) -> None:
    trainer = build(image_set, tmp_path, augment={"mixup": 1.0})
    seen: list[tuple[Tensor, Tensor]] = []

    def forward(model: nn.Module, images: Tensor, targets: ImageTargets) -> Tensor:
        seen.append((images, targets.probabilities))
        return model(images)

    trainer.forward = forward
    batch = next(iter(trainer.loader))
    torch.manual_seed(3)
    trainer.backward(batch, share=1.0, communicate=True)
    images, rows = seen[0]
    torch.testing.assert_close(rows.sum(dim=1), torch.ones(12))
    one_hot = batch["targets"].probabilities
    assert one_hot.unique().tolist() == [0.0, 1.0], "the loader's own are left alone"
    # The share of the image itself, where its partner is of another class, is the same for all.
    other = (one_hot != one_hot.flip(0)).any(dim=1)
    share = (rows * one_hot).sum(dim=1)[other]
    assert share.max() - share.min() < 1e-6
    assert 0 < share[0] < 1
    plain = trainer.metadata.preprocessing.normalize(batch["images"])
    torch.testing.assert_close(images, plain.lerp(plain.flip(0), 1 - share[0]), atol=1e-5, rtol=0)


def test_cutmix_too(image_set: Path, tmp_path: Path) -> None:
    trainer = build(image_set, tmp_path, augment={"cutmix": 1.0})
    batch = next(iter(trainer.loader))
    plain = trainer.metadata.preprocessing.normalize(batch["images"])
    images, targets = trainer.prepare(plain.clone(), batch["targets"])  # type: ignore[misc]
    own = (images == plain).all(dim=1)  # (B, h, w)
    own |= (plain == plain.flip(0)).all(dim=1)
    foreign = (~own).float().mean(dim=(1, 2))
    one_hot = batch["targets"].probabilities
    other = (one_hot != one_hot.flip(0)).any(dim=1)
    share = (targets.probabilities * one_hot).sum(dim=1)
    torch.testing.assert_close(share[other], 1 - foreign[other], atol=0.02, rtol=0)


class Recorder(nn.Module):
    """A teacher that keeps what it is shown and answers with the class of the largest mean channel."""

    def __init__(self, preprocessing: Preprocessing) -> None:
        super().__init__()
        self.metadata = ModelMetadata("x", {}, ClassMap((0, 1, 2), CLASSES), preprocessing)
        self.shown: list[Tensor] = []

    def forward(self, images: Tensor) -> Tensor:
        assert torch.is_inference_mode_enabled()
        self.shown.append(images.clone())
        return images.mean(dim=(2, 3))


def test_a_teacher_sees_the_images_as_it_wants_them() -> None:
    """Its own mean, deviation and size, as if the pixels had been prepared for it."""
    pixels = torch.randint(0, 256, (2, 3, 32, 48), dtype=torch.uint8)
    ours = Preprocessing((32, 48), *IMAGENET)
    theirs = Preprocessing((32, 48), (0.5, 0.4, 0.3), (0.5, 0.6, 0.7))
    teacher = Recorder(theirs)
    prepare = Preparation(BatchMixer(), teacher, ours)
    images = ours.normalize(pixels)
    before = images.clone()
    given, targets = prepare(images, ImageTargets.from_labels(torch.tensor([0, 1]), 3))
    torch.testing.assert_close(teacher.shown[0], theirs.normalize(pixels), atol=1e-5, rtol=0)
    assert torch.equal(given, before), "the student's images are not the teacher's"
    assert targets.teacher is not None
    assert targets.teacher.tolist() == teacher.shown[0].mean(dim=(2, 3)).argmax(dim=1).tolist()
    assert not targets.teacher.is_inference()
    same = Recorder(ours)
    Preparation(BatchMixer(), same, ours)(before.clone(), ImageTargets.from_labels(torch.tensor([0, 1]), 3))
    assert torch.equal(same.shown[0], before), "nothing to convert, nothing rounded"


def test_a_teacher_of_another_size_gets_its_size() -> None:
    pixels = torch.randint(0, 256, (2, 3, 32, 32), dtype=torch.uint8)
    ours = Preprocessing((32, 32), *IMAGENET)
    teacher = Recorder(Preprocessing((48, 64), *IMAGENET))
    Preparation(BatchMixer(), teacher, ours)(ours.normalize(pixels), ImageTargets(torch.ones(2, 3) / 3))
    expected = F.interpolate(ours.normalize(pixels), size=(48, 64), mode="bicubic", antialias=True)
    assert torch.equal(teacher.shown[0], expected)


def test_a_teacher_sees_the_mixed_images() -> None:
    ours = Preprocessing((8, 8), *IMAGENET)
    teacher = Recorder(ours)
    images, _ = Preparation(BatchMixer(mixup=1.0), teacher, ours)(
        torch.randn(4, 3, 8, 8), ImageTargets.from_labels(torch.tensor([0, 1, 2, 0]), 3)
    )
    assert torch.equal(teacher.shown[0], images)


@pytest.fixture(scope="module")
def weights(image_set: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of the tiny ViT for blue, red and stripes, none of whose values a fresh model has."""
    folder = tmp_path_factory.mktemp("weights")
    trainer = build(image_set, folder, data={"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "crop": 0.5}, seed=9)
    with torch.no_grad():
        for parameter in trainer.bare_model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    save_weights(folder / "first.safetensors", trainer.bare_model, trainer.metadata)
    return folder / "first.safetensors"


def distilled(weights: Path, **more: Any) -> dict[str, Any]:
    """The sections of a run whose teacher is the file."""
    model = {"name": "deit_tiny_distilled_patch16_224", "overrides": dict(TINY_VIT)}
    return {"model": model, "loss": {"teacher": str(weights), **more}}


def test_the_teacher_is_loaded_and_weighed(image_set: Path, tmp_path: Path, weights: Path) -> None:
    trainer = build(image_set, tmp_path, **distilled(weights, distillation=0.3))
    teacher = trainer.prepare.teacher  # type: ignore[union-attr]
    assert not teacher.training
    assert trainer.criterion.distillation == 0.3
    batch = next(iter(trainer.loader))
    losses = trainer.backward(batch, share=1.0, communicate=True)
    assert list(losses) == ["loss_class", "loss_distill", "total"]
    parameters = dict(trainer.bare_model.named_parameters())
    assert parameters["head_distillation.weight"].grad is not None
    assert all(parameter.grad is None for parameter in teacher.parameters())
    alone = build(image_set, tmp_path, model=distilled(weights)["model"])
    assert list(alone.backward(batch, share=1.0, communicate=True)) == ["loss_class", "total"]


def test_teachers_that_do_not_fit(tmp_path: Path, image_set: Path, weights: Path) -> None:
    root = write_images(tmp_path / "set", classes=("cat", "dog", "owl"))
    with pytest.raises(UserError) as error:
        build(root, tmp_path / "run", **distilled(weights))
    assert str(error.value) == (
        f"loss.teacher {weights} knows the classes blue, red, stripes but {root} has cat, dog, owl; "
        "a teacher must have learnt the same classes"
    )
    with pytest.raises(UserError) as error:
        build(image_set, tmp_path / "run", loss={"teacher": str(weights)})
    assert str(error.value) == (
        "loss.teacher needs a model with a distillation token, which vit_tiny_patch16_224 lacks; "
        "train deit_tiny_distilled_patch16_224 or another *_distilled_*"
    )
    assert not (tmp_path / "run").exists()


# ------------------------------------------------------------------------------------------ weights to start from


def differing(first: dict[str, Tensor], second: dict[str, Tensor]) -> set[str]:
    assert first.keys() == second.keys()
    return {
        name
        for name, value in first.items()
        if value.shape != second[name].shape or not torch.equal(value, second[name])
    }


HEAD = {"head.weight", "head.bias"}


def test_the_same_classes_keep_their_head(
    image_set: Path, tmp_path: Path, weights: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = build(image_set, tmp_path, model={"weights": str(weights)})
    state = load_model(weights).state_dict()
    assert not differing(trainer.bare_model.state_dict(), state)
    assert not differing(trainer.ema.model.state_dict(), state)  # type: ignore[union-attr]
    assert "anew" not in capsys.readouterr().err


def test_mean_and_deviation_are_the_weights_own(image_set: Path, tmp_path: Path, weights: Path) -> None:
    """Unless the run sets them; the geometry is the run's."""
    found = build(image_set, tmp_path, model={"weights": str(weights)}).metadata.preprocessing
    assert found == Preprocessing((32, 32), (0.1, 0.2, 0.3), (0.4, 0.5, 0.6), "bicubic", 1.0)
    data = {"mean": [0.0, 0.0, 0.0], "std": [0.7, 0.8, 0.9]}
    found = build(image_set, tmp_path, model={"weights": str(weights)}, data=data).metadata.preprocessing
    assert (found.mean, found.std) == ((0.0, 0.0, 0.0), (0.7, 0.8, 0.9))


@pytest.mark.parametrize(
    ("classes", "told"),
    [
        (("cat", "dog", "owl"), "2 tensors start anew"),
        (
            ("red", "blue", "stripes", "more"),
            "the heads keep the rows of blue, red, stripes (3 of 4 classes); new: more",
        ),
    ],
)
def test_other_classes_get_a_new_head(
    tmp_path: Path, weights: Path, capsys: pytest.CaptureFixture[str], classes: tuple[str, ...], told: str
) -> None:
    """But for the rows of classes that the weights know by name; labels are in the order of the names."""
    root = write_images(tmp_path / "set", classes=classes, per_split={"train": 1, "val": 1})
    fresh = build(root, tmp_path / "run").bare_model.state_dict()
    capsys.readouterr()
    started = build(root, tmp_path / "run", model={"weights": str(weights)}).bare_model.state_dict()
    theirs, known = load_model(weights).state_dict(), ["blue", "red", "stripes"]
    assert differing(started, theirs) == HEAD
    for key in HEAD:
        for label, name in enumerate(sorted(classes)):
            expected = theirs[key][known.index(name)] if name in known else fresh[key][label]
            assert torch.equal(started[key][label], expected)
    sentence = f"note: {weights} knows other classes (blue, red, stripes): {told}"
    assert capsys.readouterr().err.splitlines().count(sentence) == 1


def test_another_size_resamples_the_positions(image_set: Path, tmp_path: Path, weights: Path) -> None:
    """At the old size the features are unchanged; only the position table is another one."""
    model = build(image_set, tmp_path, model={"weights": str(weights)}, data={"size": [48, 48]}).bare_model.eval()
    old = load_model(weights)
    assert differing(model.state_dict(), old.state_dict()) == {"backbone.positions.table"}
    assert model.backbone.positions.table.shape == (1, 6, 6, 32)  # type: ignore[union-attr]
    same = build(image_set, tmp_path, model={"weights": str(weights)}, data={"size": [32, 32]}).bare_model.eval()
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(same(images), old(images))
        # Up to what resampling there and back loses, and much nearer than without the table.
        change = (model(images) - old(images)).norm() / old(images).norm()
        model.backbone.positions.table.zero_()  # type: ignore[union-attr]
        without = (model(images) - old(images)).norm() / old(images).norm()
    assert change < 0.5 * without


def test_another_size_of_the_same_positions() -> None:
    """Positions that vary linearly over the image are the same ones at any size, so the model is, too."""
    from vitdet.zoo import adapt

    arguments = {**TINY_VIT, "num_classes": 3}
    small = create_model("vit_tiny_patch16_224", image_size=(32, 32), **arguments).eval()
    large = create_model("vit_tiny_patch16_224", image_size=(64, 64), **arguments).eval()
    with torch.no_grad():
        small.backbone.positions.table.copy_(torch.randn(1, 1, 1, 32).expand(1, 4, 4, 32))
    large.load_state_dict(adapt(large, small.state_dict()))
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(large(images), small(images), atol=1e-5, rtol=0)


def timm_folder(path: Path, *, classes: int) -> Path:
    """A folder as timm writes one: ``config.json`` and ``model.safetensors`` of its own small ViT."""
    from timm.models.vision_transformer import VisionTransformer

    theirs = VisionTransformer(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, mlp_ratio=2.0,
                               num_classes=classes)  # fmt: skip
    pretrained = {
        "num_classes": classes, "input_size": [3, 32, 32], "mean": [0.5, 0.5, 0.5], "std": [0.25, 0.25, 0.25],
        "interpolation": "bicubic", "crop_pct": 0.9,
    }  # fmt: skip
    arguments = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "mlp_ratio": 2.0}
    path.mkdir(parents=True)
    config = {
        "architecture": "vit_tiny_patch16_224", "num_classes": classes, "model_args": arguments,
        "pretrained_cfg": pretrained,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    save_file({name: value.contiguous() for name, value in theirs.state_dict().items()}, path / "model.safetensors")
    return path


@pytest.mark.parametrize("classes", [7, 0])
def test_starting_from_a_folder_of_timms(
    image_set: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], classes: int
) -> None:
    folder = timm_folder(tmp_path / "timm", classes=classes)
    trainer = build(image_set, tmp_path / "run", model={"weights": str(folder)})
    theirs = load_model(folder)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        torch.testing.assert_close(
            trainer.bare_model.eval().features(images),
            theirs.features(images),
            atol=1e-5,
            rtol=0,  # type: ignore[operator]
        )
    knows = "knows other classes (class_0, class_1, class_2, class_3, class_4 and 2 more)"
    knows = knows if classes else "knows no classes"
    assert f"note: {folder} {knows}: 2 tensors start anew\n" in capsys.readouterr().err
    prepared = trainer.metadata.preprocessing
    assert (prepared.mean, prepared.std, prepared.crop) == ((0.5,) * 3, (0.25,) * 3, 1.0)


def test_starting_from_another_model_is_refused(image_set: Path, tmp_path: Path, weights: Path) -> None:
    with pytest.raises(UserError) as error:
        build(image_set, tmp_path, model={"name": "deit_tiny_patch16_224", "weights": str(weights)})
    assert str(error.value) == (
        f"model.weights {weights} is of 'vit_tiny_patch16_224', the run trains 'deit_tiny_patch16_224'; "
        "use the same model"
    )
    with pytest.raises(
        UserError, match=r"^the weights do not fit Classifier: 12 missing: backbone\.encoder\.layers\.2"
    ):
        build(image_set, tmp_path, model={"overrides": {**TINY_VIT, "layers": 3}, "weights": str(weights)})


# ------------------------------------------------------------------------------------------ files and evaluation


def test_metadata_survives_the_file(image_set: Path, tmp_path: Path) -> None:
    trainer = build(image_set, tmp_path, data={"crop": 0.8, "interpolation": "bilinear", "mean": [0.1, 0.2, 0.3]})
    save_weights(tmp_path / "w.safetensors", trainer.bare_model, trainer.metadata)
    read = read_metadata(tmp_path / "w.safetensors")
    assert read is not None
    assert read.preprocessing == trainer.metadata.preprocessing
    assert (read.preprocessing.crop, read.preprocessing.interpolation) == (0.8, "bilinear")
    assert (read.class_map, read.name) == (trainer.metadata.class_map, "vit_tiny_patch16_224")
    model = load_model(tmp_path / "w.safetensors")
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(model(images), trainer.bare_model.eval()(images))


def test_evaluation_is_the_models_own(image_set: Path, tmp_path: Path, weights: Path) -> None:
    """The figures by hand, in the geometry that the file says and not in the run's; the model is left as it was."""
    metrics = evaluate_source(weights, root=image_set, device="cpu", workers=0, batch=5)
    model = load_model(weights)
    preprocessing = model.metadata.preprocessing
    data = read_split(image_set, "val")
    (batch,) = build_eval_loader(data, preprocessing, batch=12, workers=0, cache=False)
    with torch.no_grad():
        logits = model(preprocessing.normalize(batch["images"]))
    labels = batch["labels"]
    assert metrics["top1"] == pytest.approx(float((logits.argmax(1) == labels).float().mean()))
    assert metrics["loss"] == pytest.approx(float(F.cross_entropy(logits, labels)), abs=1e-5)
    assert np.array(metrics["confusion"]).sum(axis=1).tolist() == [4, 4, 4]
    best, found = logits.softmax(1).max(1)
    rows = metrics["results"]
    assert [row["file_name"] for row in rows] == [str(path) for path in data.paths]
    assert [row["truth"] for row in rows] == [CLASSES[label] for label in labels]
    assert [row["name"] for row in rows] == [CLASSES[label] for label in found]
    assert [row["score"] for row in rows] == pytest.approx(best.tolist(), abs=1e-5)
    model.train()
    loader = build_eval_loader(data, preprocessing, batch=5, workers=0, cache=False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    again = build_evaluation(data, loader, device=torch.device("cpu"))(model)
    assert model.training
    assert {key: again[key] for key in ("top1", "confusion")} == {key: metrics[key] for key in ("top1", "confusion")}
    assert not differing(before, model.state_dict())


def test_classes_are_matched_by_name(image_set: Path, tmp_path: Path, weights: Path) -> None:
    """A folder with some of the model's classes only is measured on those."""
    whole = evaluate_source(weights, root=image_set, device="cpu", workers=0)["per_class"]
    root = write_images(tmp_path / "set")
    for split in ("train", "val"):
        for path in (root / split / "blue").iterdir():
            path.unlink()
        (root / split / "blue").rmdir()
    metrics = evaluate_source(weights, root=root, device="cpu", workers=0)
    assert metrics["images"] == 8
    assert metrics["per_class"]["blue"] == {"top1": None, "images": 0}
    assert metrics["per_class"]["stripes"] == whole["stripes"]
    (root / "val" / "red").rename(root / "val" / "purple")
    with pytest.raises(UserError) as error:
        evaluate_source(weights, root=root, device="cpu", workers=0)
    assert str(error.value) == (
        f"class 'purple' of {root / 'val' / 'purple'} is not among the 3 known classes: known: blue, red, stripes"
    )


def test_features_alone_cannot_be_measured(image_set: Path, tmp_path: Path) -> None:
    folder = timm_folder(tmp_path / "timm", classes=0)
    with pytest.raises(UserError) as error:
        evaluate_source(folder, root=image_set, device="cpu", workers=0)
    assert str(error.value) == (
        f"{folder} gives features and knows no classes; train a head on it first: "
        f"vitdet train CONFIG model.weights={folder}"
    )


def test_the_first_weights_are_the_seeds(image_set: Path, tmp_path: Path) -> None:
    first, again, other = (build(image_set, tmp_path, seed=seed).bare_model.state_dict() for seed in (1, 1, 2))
    assert not differing(first, again)
    assert HEAD & differing(first, other) == {"head.weight"}
    assert math.isclose(float(first["head.weight"].std()), 0.02, rel_tol=0.3)


# ------------------------------------------------------------------------------------- what was found in use


def test_a_run_goes_on_without_the_weights_it_began_with(image_set: Path, tmp_path: Path, weights: Path) -> None:
    """What it took from them, mean and deviation, is in its own state."""
    copy = tmp_path / "start.safetensors"
    copy.write_bytes(weights.read_bytes())
    values = changed(
        tiny_values(image_set, tmp_path / "run"), model={"weights": str(copy)}, train={"epochs": 1}, eval={"batch": 4}
    )
    run_training(ClassificationRunConfig.model_validate(values))
    copy.unlink()
    state = torch.load(tmp_path / "run" / "last.pt", weights_only=True)
    state["config"]["train"]["epochs"] = 2
    torch.save(state, tmp_path / "run" / "last.pt")
    resume_training(tmp_path / "run")
    after = torch.load(tmp_path / "run" / "last.pt", weights_only=True)
    assert (after["epoch"], after["config"]["model"]["weights"]) == (2, str(copy))
    assert after["metadata"]["preprocessing"] == state["metadata"]["preprocessing"]


def test_a_model_of_timms_gets_a_new_head(image_set: Path, tmp_path: Path) -> None:
    theirs = create_model("timm/resnet10t", num_classes=7)
    file = tmp_path / "timm.safetensors"
    names = tuple(f"class {index}" for index in range(7))
    metadata = ModelMetadata(
        "timm/resnet10t", {"num_classes": 7}, ClassMap(tuple(range(7)), names), Preprocessing((32, 32))
    )
    save_weights(file, theirs, metadata)
    model = build(
        image_set, tmp_path / "run", model={"name": "timm/resnet10t", "weights": str(file), "overrides": {}}
    ).bare_model
    assert model.state_dict()["model.fc.weight"].shape[0] == 3
    assert differing(model.state_dict(), theirs.state_dict()) == {"model.fc.weight", "model.fc.bias"}


def test_folders_named_by_synsets_are_imagenets_classes(tmp_path: Path) -> None:
    """So that a published model of its 1,000 classes is evaluated on any of them."""
    root = write_images(tmp_path / "set", classes=("n01440764", "n02012849", "n03126707"))
    published = tuple(imagenet_class_names(1000) or ())
    data = read_split(root, "val", class_map=ClassMap(tuple(range(1000)), published))
    assert sorted(set(data.labels.tolist())) == [0, 134, 517]  # tench, the bird and the machine called crane
    assert published[134] == published[517]
    words = ("tench", *(f"class {index}" for index in range(1, 999)), "toilet tissue")  # of another publisher
    assert sorted(set(read_split(root, "val", class_map=ClassMap(data.class_map.ids, words)).labels)) == [0, 134, 517]
    named = read_split(root, "train").class_map.names
    assert named == (published[0], f"{published[134]} (n02012849)", f"{published[517]} (n03126707)")
