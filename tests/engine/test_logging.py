"""What a run writes down and tells."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitdet.engine.logging import RunLog, progress, say

LOSS = {"total": 6.0, "vfl": 1.0, "box": 2.0, "giou": 3.0}


def row(epoch: int, **more: object) -> dict:
    return {"epoch": epoch, "lr": 1e-3 / epoch, "loss": {key: value / epoch for key, value in LOSS.items()}, **more}


def test_rows_are_appended_as_json_lines(tmp_path: Path) -> None:
    log = RunLog(tmp_path / "run")
    assert log.rows() == []
    assert not (tmp_path / "run").exists()
    log.write(row(1))
    log.write(row(2, metrics={"AP": 0.5}))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [row(1), row(2, metrics={"AP": 0.5})] == log.rows()


def write_rows(folder: Path, *epochs: int) -> None:
    log = RunLog(folder)
    for epoch in epochs:
        log.write(row(epoch))


def test_a_resumed_log_drops_what_came_after_its_epoch(tmp_path: Path) -> None:
    """A row is written before the checkpoint: a run that was stopped between the two takes the epoch again."""
    write_rows(tmp_path, 1, 2, 3)
    assert RunLog(tmp_path, resumed=3).rows() == [row(1), row(2), row(3)]
    log = RunLog(tmp_path, resumed=2)
    assert log.rows() == [row(1), row(2)]
    log.write(row(3, metrics={"AP": 0.5}))
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [row(1), row(2), row(3, metrics={"AP": 0.5})]


def test_a_new_log_takes_the_place_of_an_old_run_with_its_first_row(tmp_path: Path) -> None:
    write_rows(tmp_path, 1, 2)
    others = ["best.safetensors", "config.yaml", "curves.png", "last.pt", "notes.txt"]
    for name in others:
        (tmp_path / name).write_text("old")
    log = RunLog(tmp_path)
    assert log.rows() == []
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*others, "metrics.jsonl"])
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2, "nothing is lost yet"
    log.write(row(1, metrics={"AP": 0.5}))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["metrics.jsonl", "notes.txt"]
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == row(1, metrics={"AP": 0.5})


def test_a_resumed_log_never_removes_a_runs_files(tmp_path: Path) -> None:
    """Whoever lost the rows still wants the weights."""
    for name in ("best.safetensors", "last.pt"):
        (tmp_path / name).write_text("mine")
    RunLog(tmp_path, resumed=4).write(row(5))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best.safetensors", "last.pt", "metrics.jsonl"]


def test_curves_show_the_rows(tmp_path: Path) -> None:
    """A picture of three panels, in which every additional kind of line leaves its mark."""
    pictures = []
    for name, metrics in (("a", {}), ("b", {"AP": 0.2}), ("c", {"AP": 0.2, "AP50": 0.9})):
        log = RunLog(tmp_path / name)
        for epoch in (1, 2, 3):
            log.write(row(epoch, metrics=metrics) if metrics else row(epoch))
        log.draw(metric="AP")
        with Image.open(log.picture) as image:
            assert image.format == "PNG"
            pictures.append(np.asarray(image.convert("RGB")))
    height, width = pictures[0].shape[:2]
    assert width > 3 * height  # three panels side by side
    middle = slice(width // 3, 2 * width // 3)
    assert not np.array_equal(pictures[0][:, middle], pictures[1][:, middle])
    assert not np.array_equal(pictures[1][:, middle], pictures[2][:, middle])


def test_progress_gives_everything_and_tells_on_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress(iter("abc"), total=3, title="epoch 1/2", every=0.0)) == ["a", "b", "c"]
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [line.split(",")[0] for line in captured.err.splitlines()] == [f"epoch 1/2: {n}/3" for n in (1, 2, 3)]


def test_progress_that_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress(iter("ab"), total=2, title="x", every=0.0, show=False)) == ["a", "b"]
    assert capsys.readouterr().err == ""


def test_progress_is_quiet_for_a_while(capsys: pytest.CaptureFixture[str]) -> None:
    list(progress(range(100), total=100, title="x"))
    assert capsys.readouterr().err == ""


def test_say_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    say("hello")
    assert capsys.readouterr() == ("", "hello\n")
