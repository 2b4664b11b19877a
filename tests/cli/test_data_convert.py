"""``vitdet data convert`` by its command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Run
from tests.engine.tiny import write_set
from vitdet.cli import main
from vitdet.data.formats import read_detection_set

Fails = Callable[..., str]


@pytest.mark.parametrize(
    ("to", "name"), [("yolo", "YOLO"), ("voc", "Pascal VOC"), ("csv", "CSV"), ("coco", "COCO JSON")]
)
def test_convert(tmp_path: Path, capsys: pytest.CaptureFixture[str], to: str, name: str) -> None:
    root, out = write_set(tmp_path / "set"), tmp_path / "out"
    assert main(["data", "convert", str(root), str(out), "--to", to, "--split", "train"]) == 0
    captured = capsys.readouterr()
    before, after = read_detection_set(root, "train"), read_detection_set(out, "train")
    boxes = sum(len(record.labels) for record in before.records)
    assert captured.out == f"{out}\n"
    assert captured.err.splitlines() == [
        f"{root}: COCO JSON, train: {len(before)} images, {boxes} boxes, {len(before.class_map)} classes",
        f"{out}: written as {to}",
    ]
    assert (after.name, len(after)) == (name, len(before))
    assert sum(len(record.labels) for record in after.records) == boxes


def test_mistakes(tmp_path: Path, fails: Fails) -> None:
    root = write_set(tmp_path / "set")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    sentence = fails("data", "convert", root, tmp_path / "full", "--to", "voc")
    assert sentence == f"{tmp_path / 'full'} is not empty: choose another folder or remove it"
    assert fails("data", "convert", root, tmp_path / "out", "--to", "pdf").startswith("there is no format 'pdf'")
    gone = tmp_path / "gone"
    assert fails("data", "convert", gone, tmp_path / "out", "--to", "voc").startswith(f"the data set folder {gone}")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ["yolo", "csv"])
def test_a_detector_measures_the_same(run: Run, tmp_path: Path, to: str) -> None:
    """The same images and boxes in another format, whose ids are others, give the same figures."""
    assert main(["data", "convert", str(run.root), str(tmp_path / "out"), "--to", to]) == 0
    figures = []
    for number, root in enumerate((run.root, tmp_path / "out")):
        path = tmp_path / f"{number}.json"
        options = ["--workers", "0", "--device", "cpu", "--json", str(path)]
        assert main(["eval", str(run.weights), "--data", str(root), *options]) == 0
        figures.append(json.loads(path.read_text()))
    assert figures[0]["AP"] > 0
    for key in ("AP", "AP50", "APs", "AR100"):
        assert figures[1][key] == pytest.approx(figures[0][key], abs=1e-9)
