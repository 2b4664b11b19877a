"""A trained run of a small model of each task on a tiny data set, shared by the tests of the command line."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engine import tiny_images
from tests.engine.tiny import tiny_values, write_config, write_set
from vitdet.cli import main
from vitdet.engine.logging import RunLog


@dataclass
class Run:
    """Where a run's things are, and what it printed."""

    root: Path  # the data set
    config: Path
    output: Path
    weights: Path
    code: int
    stdout: str
    stderr: str


def train(folder: Path, root: Path, values: dict[str, Any]) -> Run:
    """``vitdet train`` from a YAML of these values."""
    config = write_config(folder / "run.yaml", values)
    stdout, stderr = io.StringIO(), io.StringIO()
    draw = RunLog.draw  # a picture takes as long as an epoch here: only the evaluated ones are drawn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            RunLog, "draw", lambda log, metric: draw(log, metric=metric) if "metrics" in log.rows()[-1] else None
        )
        with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            code = main(["train", str(config)])
    output = Path(values["output"])
    return Run(root, config, output, output / "best.safetensors", code, stdout.getvalue(), stderr.getvalue())


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A detector's run, long enough to detect something; not to be written to."""
    folder = tmp_path_factory.mktemp("run")
    root = write_set(folder / "set")
    values = tiny_values(root, folder / "out")
    values["train"]["epochs"] = 16
    values["eval"] = {"every": 8}
    return train(folder, root, values)


@pytest.fixture(scope="session")
def image_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A classifier's run, long enough to tell most images apart; not to be written to."""
    folder = tmp_path_factory.mktemp("image_run")
    root = tiny_images.write_images(folder / "set")
    values = tiny_images.tiny_values(root, folder / "out")
    values["train"]["epochs"] = 12
    values["eval"] = {"every": 6}
    return train(folder, root, values)


@pytest.fixture
def fails(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command that must end with code 2 and one sentence; returns the sentence."""

    def run_it(*words: str | Path) -> str:
        capsys.readouterr()
        code = main([str(word) for word in words])
        captured = capsys.readouterr()
        told = [line for line in captured.err.splitlines() if line.startswith("vitdet: ")]
        assert code == 2, captured.err
        assert captured.out == ""
        assert "Traceback" not in captured.err
        assert len(told) == 1, captured.err
        assert captured.err.endswith(told[0] + "\n"), "the sentence is the last line"
        sentence = told[0].removeprefix("vitdet: ")
        assert sentence
        return sentence

    return run_it
