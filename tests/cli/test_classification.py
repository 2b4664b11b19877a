"""Train, evaluate, predict with a classifier; and what people do wrong with image folders, one sentence each."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.cli.conftest import Run
from tests.engine.tiny import tiny_values as detector_values
from tests.engine.tiny import write_config
from tests.engine.tiny_images import CLASSES, SIDE, changed, tiny_values, write_images
from vitdet.cli import main
from vitdet.data.images import decode_image
from vitdet.engine.checkpoint import load_training_state, save_weights
from vitdet.structures import ClassMap, ModelMetadata, Preprocessing
from vitdet.zoo import create_model

Fails = Callable[..., str]


def command(*words: str | Path) -> int:
    return main([str(word) for word in words])


def evaluate(run: Run, *more: str | Path) -> int:
    return command("eval", run.weights, "--data", run.root, "--workers", "0", "--device", "cpu", *more)


# ------------------------------------------------------------------------------------------ the way it goes


def test_training_leaves_its_files_and_prints_the_table(image_run: Run) -> None:
    assert image_run.code == 0, image_run.stderr
    names = {"config.yaml", "metrics.jsonl", "curves.png", "last.pt", "best.safetensors"}
    assert {path.name for path in image_run.output.iterdir()} == names
    rows = [json.loads(line) for line in (image_run.output / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows if "metrics" in row] == [6, 12]
    best = max(row["metrics"]["top1"] for row in rows if "metrics" in row)
    assert best >= 0.75, "the run must have learnt something for what follows to mean anything"
    lines = image_run.stdout.splitlines()
    assert lines[0].split() == ["top-1", "accuracy", f"{best:.4f}"]
    assert [line.split()[0] for line in lines[4:]] == ["class", *CLASSES]
    assert f"weights: {image_run.weights}\ncurves: {image_run.output / 'curves.png'}\n" in image_run.stderr
    assert f"{image_run.root}: image folder, train: 36 images, 3 classes\n" in image_run.stderr
    assert "epoch 12/12  loss" in image_run.stderr
    assert f"top1 {rows[-1]['metrics']['top1']:.3f}  top5 1.000" in image_run.stderr
    assert decode_image(image_run.output / "curves.png").std() > 5


def test_evaluation_repeats_the_runs_best_metrics(image_run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate(image_run, "--json", "-") == 0
    captured = capsys.readouterr()
    metrics = json.loads(captured.out)  # nothing but JSON
    assert list(metrics) == ["top1", "top5", "loss", "images", "per_class", "confusion"]
    rows = [json.loads(line) for line in (image_run.output / "metrics.jsonl").read_text().splitlines()]
    best = max((row["metrics"] for row in rows if "metrics" in row), key=lambda values: values["top1"])
    assert {key: metrics[key] for key in best} == pytest.approx(best, abs=1e-6)
    assert metrics["top5"] == 1.0
    assert list(metrics["per_class"]) == list(CLASSES)
    assert np.array(metrics["confusion"]).sum() == metrics["images"] == 12
    assert np.trace(np.array(metrics["confusion"])) == round(12 * metrics["top1"])


def test_the_matrix_and_the_single_results(image_run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, rows, figures = tmp_path / "deep" / "confusion.png", tmp_path / "rows.json", tmp_path / "figures.json"
    assert evaluate(image_run, "--confusion", picture, "--save", rows, "--json", figures) == 0
    captured = capsys.readouterr()
    assert f"confusion matrix: {picture}\n" in captured.err
    assert captured.out.splitlines()[0].startswith(" top-1 accuracy")
    assert [path.name for path in picture.parent.iterdir()] == ["confusion.png"]
    with Image.open(picture) as image:
        assert image.format == "PNG"
        assert min(image.size) > 300
    found = json.loads(rows.read_text())
    assert all(list(row) == ["file_name", "truth", "name", "score"] for row in found)
    assert [Path(row["file_name"]).parent.name for row in found] == [row["truth"] for row in found]
    right = sum(row["truth"] == row["name"] for row in found)
    assert right / len(found) == pytest.approx(json.loads(figures.read_text())["top1"])


def test_prediction(image_run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, folder = tmp_path / "out", image_run.root / "val" / "red"
    assert command("predict", image_run.weights, folder, "--out", out, "--device", "cpu", "--sheet") == 0
    captured = capsys.readouterr()
    names = [f"{number:02}.png" for number in range(4)]
    assert sorted(path.name for path in out.iterdir()) == [*names, "predictions.json", "sheet.jpg"]
    rows = json.loads((out / "predictions.json").read_text())
    assert [Path(row["file_name"]).name for row in rows] == names
    for row, name in zip(rows, names, strict=True):
        assert {one["name"] for one in row["classes"]} == set(CLASSES)
        assert sum(one["score"] for one in row["classes"]) == pytest.approx(1, abs=1e-5)
        best = row["classes"][0]
        assert f"{out / name}: {best['name']} {best['score']:.2f}\n" in captured.err
        drawn, original = (np.asarray(Image.open(path / name).convert("RGB")) for path in (out, folder))
        assert drawn.shape[1] >= original.shape[1]
        assert drawn.shape != original.shape or not np.array_equal(drawn, original)
    counted = [row["classes"][0]["name"] for row in rows]
    lines = [line.split() for line in captured.out.splitlines()]
    assert lines[0] == ["class", "images"]
    assert {line[0]: int(line[1]) for line in lines[1:-1]} == {name: counted.count(name) for name in set(counted)}
    assert decode_image(out / "sheet.jpg").shape[1] > 2 * SIDE


def test_prediction_agrees_with_evaluation(image_run: Run, tmp_path: Path) -> None:
    assert evaluate(image_run, "--save", tmp_path / "rows.json") == 0
    words = ["predict", image_run.weights, f"{image_run.root}/val/*/*.png", "--out", tmp_path / "out"]
    assert command(*words, "--device", "cpu") == 0
    evaluated = {Path(row["file_name"]): row for row in json.loads((tmp_path / "rows.json").read_text())}
    predicted = json.loads((tmp_path / "out" / "predictions.json").read_text())
    assert len(predicted) == len(evaluated) == 12
    for row in predicted:
        one = evaluated[Path(row["file_name"])]
        assert row["classes"][0]["name"] == one["name"]
        assert row["classes"][0]["score"] == pytest.approx(one["score"], abs=1e-5)


def test_attention_is_shown(image_run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The picture of a stripe is the one that the API draws, by either method, and not the plain one."""
    from vitdet import Predictor

    image = image_run.root / "val" / "stripes" / "00.png"
    ways: dict[str | bool, list[str]] = {
        False: [], "rollout": ["--attention"], "last": ["--attention-method", "last"],
    }  # fmt: skip
    drawn = []
    for method, more in ways.items():
        out = tmp_path / str(method)
        assert command("predict", image_run.weights, image, "--out", out, "--device", "cpu", *more) == 0
        drawn.append(np.asarray(Image.open(out / "00.png").convert("RGB")))
        [found] = Predictor(image_run.weights, device="cpu", attention=method)(image)
        assert np.array_equal(drawn[-1], found.plot())
    assert not any(np.array_equal(drawn[i], drawn[j]) for i, j in ((0, 1), (0, 2), (1, 2)))
    capsys.readouterr()
    assert command("predict", image_run.weights, image, "--out", tmp_path / "x", "--attention-method", "first") == 2
    assert capsys.readouterr().err == "vitdet: attention is 'first'; choose 'rollout' or 'last'\n"


def test_info_and_models(image_run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("info", image_run.weights) == 0
    info = json.loads(capsys.readouterr().out)
    assert (info["name"], info["class_map"]["names"]) == ("vit_tiny_patch16_224", list(CLASSES))
    assert info["arguments"]["image_size"] == [SIDE, SIDE]
    assert info["preprocessing"] == {
        "size": [SIDE, SIDE], "mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225], "interpolation": "bicubic",
        "crop": 1.0,
    }  # fmt: skip
    assert info["metrics"]["top1"] >= 0.75
    assert command("models", "deit_tiny*", "--json", "-") == 0
    # timm's, whose tokens have positions beside themselves, 192 numbers each.
    assert {name: model["parameters"] for name, model in json.loads(capsys.readouterr().out).items()} == {
        "deit_tiny_distilled_patch16_224": 5_910_800 - 2 * 192,
        "deit_tiny_patch16_224": 5_717_416 - 192,
    }
    assert command("models", "swin_tiny*") == 0
    title, row = capsys.readouterr().out.splitlines()
    assert title.split()[:2] == ["model", "parameters"]
    assert row.split() == ["swin_tiny_patch4_window7_224", "28.29", "M"]


def test_resuming_a_run(image_run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(image_run.output, tmp_path / "copy")
    assert command("train", "--resume", tmp_path / "copy", "--json", "-") == 0
    shown = json.loads(capsys.readouterr().out)
    stored = load_training_state(tmp_path / "copy" / "last.pt")["best_metrics"]
    assert shown == json.loads(json.dumps(stored))
    assert list(shown) == ["top1", "top5", "loss", "images", "per_class", "confusion"]


def test_a_probe_from_the_runs_weights(image_run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On other classes, by the one key that people type."""
    root = write_images(tmp_path / "set", classes=("ocean", "rose"), per_split={"train": 6, "val": 2})
    config = write_config(tmp_path / "run.yaml", tiny_values(root, tmp_path / "out"))
    words = ["train", config, f"model.weights={image_run.weights}", "train.freeze=backbone", "optim.lr=0.05"]
    assert command(*words) == 0
    captured = capsys.readouterr()
    sentence = f"note: {image_run.weights} knows other classes (blue, red, stripes): 2 tensors start anew\n"
    assert captured.err.count(sentence) == 1
    assert captured.out.splitlines()[0].split()[:2] == ["top-1", "accuracy"]
    assert load_training_state(tmp_path / "out" / "last.pt")["config"]["train"]["freeze"] == ["backbone"]


# ------------------------------------------------------------------------------------------ unusual data


def train_on(root: Path, tmp_path: Path, *overrides: str, **sections: Any) -> int:
    values = changed(tiny_values(root, tmp_path / "out"), **sections)
    values["train"]["epochs"] = 1
    return command("train", write_config(tmp_path / "run.yaml", values), *overrides)


def test_three_images_a_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Fewer than a batch: one step an epoch, of all nine."""
    root = write_images(tmp_path / "set", per_split={"train": 3, "val": 1})
    assert train_on(root, tmp_path, augment={"mixup": 0.5}) == 0
    row = json.loads((tmp_path / "out" / "metrics.jsonl").read_text())
    assert (row["step"], row["metrics"]["images"], row["skipped"]) == (1, 3, 0)


def test_names_that_differ_in_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write_images(tmp_path / "set", classes=("Cat", "cat", "dog"))
    assert train_on(root, tmp_path) == 0
    captured = capsys.readouterr()
    assert "note: classes whose names differ in case only stay different classes: Cat, cat\n" in captured.err
    assert [line.split()[0] for line in captured.out.splitlines()[4:]] == ["class", "Cat", "cat", "dog"]


def test_a_class_without_validation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write_images(tmp_path / "set")
    shutil.rmtree(root / "val" / "red")
    assert train_on(root, tmp_path) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()][6] == ["red", "-", "0"]


def test_images_of_all_modes(tmp_path: Path) -> None:
    """Gray, palette, with transparency, 16 bits: all train and are measured."""
    root = write_images(tmp_path / "set")
    modes = ["L", "P", "RGBA", "LA", "1", "CMYK", "I;16"]
    for number, path in enumerate(sorted(root.rglob("*.png"))):
        mode = modes[number % len(modes)]
        with Image.open(path) as image:
            gray = Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257) if mode == "I;16" else None
            converted = gray or image.convert(mode)
        path.unlink()
        converted.save(path.with_suffix(".tif" if mode == "CMYK" else ".png"))
    assert train_on(root, tmp_path) == 0
    row = json.loads((tmp_path / "out" / "metrics.jsonl").read_text())
    assert (row["step"], row["metrics"]["images"]) == (3, 12)
    weights = tmp_path / "out" / "best.safetensors"
    pattern = str(root / "val" / "*" / "*")
    assert command("predict", weights, pattern, "--out", tmp_path / "pictures", "--device", "cpu") == 0
    assert len(json.loads((tmp_path / "pictures" / "predictions.json").read_text())) == 12


# ------------------------------------------------------------------------------------------ mistakes


def rename(old: str, new: str) -> Callable[[Path], object]:
    return lambda root: (root / old).rename(root / new)


@pytest.mark.parametrize(
    ("spoil", "expected"),
    [
        (
            lambda root: [shutil.rmtree(root / "train" / name) for name in ("red", "stripes")],
            "{root}/train has the one class 'blue': a classifier needs at least 2 class folders",
        ),
        (
            lambda root: (root / "train" / "empty").mkdir(),
            "class folder {root}/train/empty holds 0 images: add some or remove the folder",
        ),
        (
            rename("val/red", "val/purple"),
            "class 'purple' of {root}/val/purple is not among the 3 known classes: known: blue, red, stripes",
        ),
        (rename("val", "checks"), "{root} has no split 'val': its splits are checks, train"),
        (shutil.rmtree, "the data set folder {root} does not exist: check data.root"),
        (
            lambda root: (root / "train" / "red" / "00.png").write_bytes(b"x"),
            "{root}/train/red/00.png is not an image in a known format: replace or remove it",
        ),
    ],
    ids=["one class", "an empty class", "an unknown class", "no split", "no folder", "no image"],
)
def test_training_on_bad_data(tmp_path: Path, fails: Fails, spoil: Callable[[Path], object], expected: str) -> None:
    root = write_images(tmp_path / "set")
    spoil(root)
    config = write_config(tmp_path / "run.yaml", tiny_values(root, tmp_path / "out"))
    assert fails("train", config) == expected.format(root=root)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "set") == ["run.yaml"]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["data.size=[30, 32]"], "data.size [30, 32] must be divisible by 8 for vit_tiny_patch16_224; change it"),
        (
            ["model.name=vit_tinny_patch16_224"],
            "there is no model 'vit_tinny_patch16_224'; did you mean 'vit_tiny_patch16_224'?",
        ),
        (
            ["model.overrides.layrs=3"],
            "model 'vit_tiny_patch16_224' has no argument 'layrs'; did you mean 'layers'?",
        ),
        (
            ["model.name=timm/resnet10x", "model.overrides={}"],
            "model 'timm/resnet10x' cannot be built with {}: timm has no model 'resnet10x'; did you mean 'resnet10t'?",
        ),
        (
            ["augment.mixpu=0.2"],
            "{config}: unknown key 'augment.mixpu' (did you mean 'mixup'?)",
        ),
        (["task=clasification"], "there is no task 'clasification'; did you mean 'classification'?"),
        (
            ["train.freeze=[backbone, head]"],
            "train.freeze ['backbone', 'head'] leaves nothing to train; name fewer parts",
        ),
        (
            ["loss.teacher=nowhere.pth"],
            "there is no 'nowhere.pth'; pass a file (.safetensors, .pth, .pt, .bin, .pkl, .ckpt, .npz), "
            "a folder with a config.json, or a Hub id (owner/name)",
        ),
        (["data.val_split=tset"], "{root} has no split 'tset': its splits are train, val"),
    ],
)
def test_training_with_bad_values(
    image_run: Run, tmp_path: Path, fails: Fails, overrides: list[str], expected: str
) -> None:
    config = write_config(tmp_path / "run.yaml", tiny_values(image_run.root, tmp_path / "out"))
    sentence = expected.replace("{config}", str(config)).replace("{root}", str(image_run.root))
    assert fails("train", config, *overrides) == sentence
    assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


def test_a_task_and_the_others_data(run: Run, image_run: Run, tmp_path: Path, fails: Fails) -> None:
    detector = write_config(tmp_path / "detector.yaml", detector_values(image_run.root, tmp_path / "out"))
    assert fails("train", detector) == (
        f"{image_run.root} is an image folder, one folder a class: a classifier trains on it, a detector needs boxes"
    )
    classifier = write_config(tmp_path / "classifier.yaml", tiny_values(run.root, tmp_path / "out"))
    assert fails("train", classifier) == (
        f"{run.root} is a COCO JSON data set for detection: train a detector on it, or give an image folder"
    )
    measure = ["--workers", "0", "--device", "cpu"]
    assert fails("eval", run.weights, "--data", image_run.root, *measure).startswith(f"{image_run.root} is an image ")
    assert fails("eval", image_run.weights, "--data", run.root, *measure).startswith(f"{run.root} is a COCO JSON ")


def test_a_task_and_the_others_model(run: Run, image_run: Run, tmp_path: Path, fails: Fails) -> None:
    hint = "start from a configuration with task: {}, or choose another model"
    classifier = write_config(tmp_path / "classifier.yaml", tiny_values(image_run.root, tmp_path / "out"))
    assert fails("train", classifier, "model.name=rtdetr_nano", "model.overrides={}") == (
        "rtdetr_nano is a model for detection but the run's task is classification; " + hint.format("detection")
    )
    detector = write_config(tmp_path / "detector.yaml", detector_values(run.root, tmp_path / "out"))
    assert fails("train", detector, "model.name=vit_tiny_patch16_224", "model.overrides={}") == (
        "vit_tiny_patch16_224 is a model for classification but the run's task is detection; "
        + hint.format("classification")
    )


def test_a_detector_has_no_confusion_matrix(run: Run, tmp_path: Path, fails: Fails) -> None:
    """It is told before anything is measured."""
    words = ["eval", run.weights, "--data", tmp_path / "not looked at", "--confusion", tmp_path / "x.png"]
    assert fails(*words) == f"{run.weights} is a detector and has no confusion matrix; leave out --confusion"
    assert not list(tmp_path.iterdir())


def test_attention_of_what_has_none(run: Run, image_run: Run, tmp_path: Path, fails: Fails) -> None:
    overrides = {"width": 24, "depths": [1, 1, 1, 1], "heads": [1, 1, 2, 2], "image_size": [32, 32]}
    swin = create_model("swin_tiny_patch4_window7_224", num_classes=3, **overrides)
    metadata = ModelMetadata(
        "swin_tiny_patch4_window7_224", {"num_classes": 3, **overrides}, ClassMap((0, 1, 2), CLASSES),
        Preprocessing((32, 32)),
    )  # fmt: skip
    save_weights(tmp_path / "swin.safetensors", swin, metadata)
    rest = [image_run.root / "val" / "red", "--out", tmp_path / "out", "--device", "cpu"]
    hint = "has no attention over the whole image to show; use a Vision Transformer (vit_*, deit_*), not a Swin"
    assert fails("predict", tmp_path / "swin.safetensors", *rest, "--attention").startswith(f"Swin {hint}")
    assert hint in fails("predict", run.weights, *rest, "--attention")
    assert not (tmp_path / "out").exists()
    assert command("predict", tmp_path / "swin.safetensors", *rest) == 0


def test_evaluation_on_other_classes(image_run: Run, tmp_path: Path, fails: Fails) -> None:
    root = write_images(tmp_path / "set", classes=("cat", "dog"), per_split={"val": 1})
    measure = ["--data", root, "--workers", "0", "--device", "cpu", "--save", tmp_path / "rows.json"]
    assert fails("eval", image_run.weights, *measure) == (
        f"class 'cat' of {root / 'val' / 'cat'} is not among the 3 known classes: known: blue, red, stripes"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["set"]


def test_resuming_with_other_classes(image_run: Run, tmp_path: Path, fails: Fails) -> None:
    """A run whose data has changed under it."""
    root = write_images(tmp_path / "set")
    assert train_on(root, tmp_path) == 0
    for split in ("train", "val"):
        (root / split / "red").rename(root / split / "rose")
    assert fails("train", "--resume", tmp_path / "out").startswith(f"{tmp_path / 'out' / 'last.pt'} is of a run with ")


def test_rows_of_numbers_stand_on_one_line(tmp_path: Path) -> None:
    """And nothing but white space changes, whatever the names are."""
    from vitdet.cli import write_json

    values = {"confusion": [[1, 20], [3.5, -1e-07]], "names": ["[ 1 ]", "[\n 2\n]"], "empty": [], "one": [7]}
    write_json(values, str(tmp_path / "x.json"))
    text = (tmp_path / "x.json").read_text()
    assert json.loads(text) == values
    assert "[1, 20],\n" in text
    assert "[3.5, -1e-07]\n" in text
