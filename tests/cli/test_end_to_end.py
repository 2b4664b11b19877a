"""Train, evaluate, predict: the commands, one after the other, on a tiny data set."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.cli.conftest import Run
from tests.engine.tiny import CATEGORIES, FIRST_IMAGE, HEIGHT, WIDTH, tiny_values, write_config, write_set, write_split
from vitdet.cli import main
from vitdet.data.images import decode_image
from vitdet.engine.checkpoint import load_training_state

METRICS = ["AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl"]


def command(*words: str | Path) -> int:
    return main([str(word) for word in words])


def evaluate(run: Run, *more: str | Path) -> int:
    return command("eval", run.weights, "--data", run.root, "--workers", "0", "--device", "cpu", *more)


def test_training_leaves_its_files_and_prints_the_table(run: Run) -> None:
    assert run.code == 0
    names = {"config.yaml", "metrics.jsonl", "curves.png", "last.pt", "best.safetensors"}
    assert {path.name for path in run.output.iterdir()} == names
    rows = [json.loads(line) for line in (run.output / "metrics.jsonl").read_text().splitlines()]
    assert [row["epoch"] for row in rows] == list(range(1, 17))
    assert [row["epoch"] for row in rows if "metrics" in row] == [8, 16]
    best = max(row["metrics"]["AP"] for row in rows if "metrics" in row)
    assert best > 0, "the run must have learnt something for what follows to mean anything"
    lines = run.stdout.splitlines()
    assert lines[0] == f" Average Precision  (AP) @[ IoU=0.50:0.95 | area=   all | maxDets=100 ] = {best:0.3f}"
    assert [line.split()[0] for line in lines[12:]] == ["class", "red", "blue"]
    assert f"weights: {run.weights}" in run.stderr
    assert f"{run.root}: COCO JSON, train: 6 images, 8 boxes, 2 classes" in run.stderr
    assert "epoch 16/16  loss" in run.stderr


def test_evaluation_repeats_the_runs_best_metrics(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate(run, "--json", "-") == 0
    captured = capsys.readouterr()
    metrics = json.loads(captured.out)  # nothing but JSON
    assert list(metrics) == [*METRICS, "per_class"]
    rows = [json.loads(line) for line in (run.output / "metrics.jsonl").read_text().splitlines()]
    best = max((row["metrics"] for row in rows if "metrics" in row), key=lambda values: values["AP"])
    assert {key: metrics[key] for key in METRICS} == best
    assert list(metrics["per_class"]) == list(CATEGORIES.values())
    assert "COCO JSON" in captured.err


def test_both_backends_agree_and_the_table_is_printed(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = {backend: tmp_path / f"{backend}.json" for backend in ("hotcoco", "pycocotools")}
    for backend, path in paths.items():
        assert evaluate(run, "--backend", backend, "--json", path, "--batch", "4") == 0
    table = capsys.readouterr().out
    first, second = (json.loads(path.read_text()) for path in paths.values())
    assert {key: first[key] for key in METRICS} == pytest.approx({key: second[key] for key in METRICS}, abs=1e-12)
    half = table.splitlines()
    assert half[: len(half) // 2] == half[len(half) // 2 :]
    assert f"= {first['AP']:0.3f}" in half[0]


def test_saved_detections_are_coco_results(run: Run, tmp_path: Path) -> None:
    """pycocotools, fed with the file, gives the same AP."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    assert evaluate(run, "--save", tmp_path / "deep" / "results.json", "--json", tmp_path / "metrics.json") == 0
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["results.json"]
    rows = json.loads((tmp_path / "deep" / "results.json").read_text())
    assert {row["category_id"] for row in rows} == set(CATEGORIES)
    assert all(row.keys() == {"image_id", "category_id", "bbox", "score"} for row in rows)
    truth = COCO(str(run.root / "annotations" / "instances_val.json"))
    evaluation = COCOeval(truth, truth.loadRes(rows), "bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    assert evaluation.stats[0] == pytest.approx(json.loads((tmp_path / "metrics.json").read_text())["AP"], abs=1e-9)


def test_the_training_split_can_be_measured(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate(run, "--split", "train") == 0
    assert ", train: 6 images" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["folder", "pattern", "files"])
def test_prediction(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str) -> None:
    """Pictures, results with the data set's own category ids, and the table; images as folder, pattern or files."""
    folder, out = run.root / "val", tmp_path / "out"
    names = [f"val_{number}.png" for number in range(FIRST_IMAGE, FIRST_IMAGE + 6)]
    given = {
        "folder": [folder],
        "pattern": [f"{folder}/val_1[123].png"],
        "files": [folder / names[5], folder / names[0]],
    }
    expected = {"folder": names, "pattern": names[:3], "files": [names[5], names[0]]}[kind]
    assert command("predict", run.weights, *given[kind], "--out", out, "--threshold", "0.2", "--device", "cpu") == 0
    captured = capsys.readouterr()
    assert sorted(path.name for path in out.iterdir()) == sorted([*expected, "predictions.json"])
    rows = json.loads((out / "predictions.json").read_text())
    assert rows
    for row in rows:
        assert row["category_id"] in CATEGORIES
        assert row["score"] > 0.2
        assert Path(row["file_name"]).name == expected[row["image_id"] - 1]
        x, y, width, height = row["bbox"]
        assert 0 <= x <= x + width <= WIDTH + 1e-3
        assert 0 <= y <= y + height <= HEIGHT + 1e-3
    for name in expected:
        drawn, original = (np.asarray(Image.open(path / name).convert("RGB")) for path in (out, folder))
        found = any(Path(row["file_name"]).name == name for row in rows)
        assert drawn.shape == original.shape
        assert np.array_equal(drawn, original) != found
    assert captured.out.splitlines()[0].split() == ["class", "objects"]
    assert captured.out.splitlines()[-1].split()[-1] == str(len(rows))
    assert captured.err.count(" objects\n") == len(expected)


def test_an_image_called_sheet(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    images, out = tmp_path / "images", tmp_path / "out"
    images.mkdir()
    for name in ("a.jpg", "sheet.jpg"):
        Image.fromarray(decode_image(run.root / "val" / f"val_{FIRST_IMAGE}.png")).save(images / name)
    assert command("predict", run.weights, images, "--out", out, "--sheet", "--device", "cpu") == 0
    assert sorted(path.name for path in out.iterdir()) == ["a.jpg", "predictions.json", "sheet.jpg", "sheet_2.jpg"]
    assert decode_image(out / "sheet_2.jpg").shape == (HEIGHT, WIDTH, 3)
    assert decode_image(out / "sheet.jpg").shape[1] > 2 * WIDTH
    assert f"{out / 'sheet.jpg'}\n" in capsys.readouterr().err


def test_prediction_agrees_with_evaluation(run: Run, tmp_path: Path) -> None:
    """The same images through ``predict`` and ``eval`` give the same scores."""
    assert evaluate(run, "--save", tmp_path / "results.json") == 0
    command("predict", run.weights, run.root / "val", "--out", tmp_path / "out", "--threshold", "0", "--device", "cpu")
    evaluated = json.loads((tmp_path / "results.json").read_text())
    predicted = json.loads((tmp_path / "out" / "predictions.json").read_text())
    scores = [sorted(row["score"] for row in rows) for rows in (evaluated, predicted)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-5)


def test_prediction_as_json(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = run.root / "val" / f"val_{FIRST_IMAGE}.png"
    assert command("predict", run.weights, image, "--out", tmp_path / "out", "--json", "-", "--device", "cpu") == 0
    summary = json.loads(capsys.readouterr().out)
    assert summary["images"] == 1
    assert summary["objects"] == sum(summary["per_class"].values())


def test_info_and_models(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert command("info", run.weights) == 0
    info = json.loads(capsys.readouterr().out)
    assert (info["name"], info["class_map"]) == ("rtdetr_nano", {"ids": [3, 7], "names": ["red", "blue"]})
    assert info["preprocessing"]["size"] == [64, 64]
    assert command("models", "*nano", "--json", "-") == 0
    described = json.loads(capsys.readouterr().out)
    assert described.keys() == {"rtdetr_nano"}
    assert 3e6 < described["rtdetr_nano"]["parameters"] < 4e6
    assert command("models", "rtdetr_r18") == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:5] == ["rtdetr_r18", "20.18", "M", "60", "46.4"]


def test_resuming_a_run(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A finished run has nothing left to do: it shows the best metrics again and changes no weights."""
    copy = tmp_path / "copy"
    shutil.copytree(run.output, copy)
    assert command("train", "--resume", copy, "--json", "-") == 0
    shown = json.loads(capsys.readouterr().out)
    stored = json.loads(json.dumps(load_training_state(copy / "last.pt")["metadata"]["metrics"]))
    assert {key: shown[key] for key in METRICS} == stored
    assert (copy / "best.safetensors").read_bytes() == run.weights.read_bytes()
    assert (copy / "metrics.jsonl").read_text() == (run.output / "metrics.jsonl").read_text()
    assert command("train", "--resume", copy / "last.pt") == 0  # the file does as well as its folder
    captured = capsys.readouterr()
    assert captured.out.splitlines()[0].endswith(f"= {stored['AP']:0.3f}")
    assert f"weights: {copy / 'best.safetensors'}\ncurves: {copy / 'curves.png'}\n" in captured.err


def train_once(root: Path, tmp_path: Path, *overrides: str) -> tuple[int, Path]:
    values = tiny_values(root, tmp_path / "out")
    values["train"].update(epochs=1, batch=2)
    return command("train", write_config(tmp_path / "run.yaml", values), *overrides), tmp_path / "out"


@pytest.mark.parametrize(
    ("train", "val", "categories"),
    [
        ([1, 0, 2], [1, 0], None),  # images without an object
        ([0, 0, 0, 0, 1, 1], [2], None),  # batches without an object
        ([0, 0], [1], None),  # no object in training at all
        ([1, 2], [1, 1], {3: "red"}),  # one class
        ([1], [1], None),  # fewer images than a batch
        ([1, 1], [0, 0], None),  # nothing to find: AP is -1
        ([300, 1], [300], None),  # more objects than queries
    ],
    ids=["an empty image", "an empty batch", "no objects", "one class", "one image", "empty validation", "300 objects"],
)
def test_unusual_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], train: list[int], val: list[int], categories: dict | None
) -> None:
    root = tmp_path / "set"
    for split, counts in (("train", train), ("val", val)):
        write_split(root, split, counts, categories=categories, side=12 if max(counts) > 10 else 36)
    code, output = train_once(root, tmp_path)
    assert code == 0
    row = json.loads((output / "metrics.jsonl").read_text())
    assert row["skipped"] == 0
    assert row["loss"]["total"] > 0
    measured = ["eval", output / "best.safetensors", "--data", root, "--workers", "0", "--device", "cpu", "--json", "-"]
    capsys.readouterr()
    assert command(*measured) == 0
    metrics = json.loads(capsys.readouterr().out)
    assert {key: metrics[key] for key in METRICS} == row["metrics"]
    assert (metrics["AP"] == -1.0) == (sum(val) == 0)


def test_overrides_and_overwriting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = write_set(tmp_path / "set")
    code, output = train_once(root, tmp_path, "seed=3", "train.batch=6")
    assert code == 0
    assert load_training_state(output / "last.pt")["config"]["seed"] == 3
    assert json.loads((output / "metrics.jsonl").read_text())["step"] == 1
    assert command("train", tmp_path / "run.yaml") == 2
    assert f"{output} already holds a run; continue it with --resume {output}" in capsys.readouterr().err
    assert load_training_state(output / "last.pt")["config"]["seed"] == 3
    assert command("train", tmp_path / "run.yaml", "--overwrite") == 0
    assert load_training_state(output / "last.pt")["config"]["seed"] == 0
    assert json.loads((output / "metrics.jsonl").read_text())["step"] == 3
