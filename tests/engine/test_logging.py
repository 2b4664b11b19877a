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


def test_a_resumed_log_keeps_the_rows_and_a_new_one_does_not(tmp_path: Path) -> None:
    RunLog(tmp_path).write(row(1))
    assert RunLog(tmp_path, resume=True).rows() == [row(1)]
    assert RunLog(tmp_path).rows() == []


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


def test_progress_is_quiet_for_a_while(capsys: pytest.CaptureFixture[str]) -> None:
    list(progress(range(100), total=100, title="x"))
    assert capsys.readouterr().err == ""


def test_say_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    say("hello")
    assert capsys.readouterr() == ("", "hello\n")
