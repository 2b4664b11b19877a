"""Files of a run: whole or not at all, one sentence for what is no such file, and no code run from them."""

from __future__ import annotations

import json
import pickle
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from vitdet.engine.checkpoint import (
    load_training_state,
    read_weights,
    save_training_state,
    save_weights,
    write_atomically,
)
from vitdet.errors import UserError
from vitdet.structures import ClassMap, ModelMetadata, Preprocessing

METADATA = ModelMetadata(
    name="rtdetr_nano",
    arguments={"num_classes": 2, "width": 32},
    class_map=ClassMap(ids=(3, 7), names=("red", "blue")),
    preprocessing=Preprocessing(size=(64, 96), mean=(0.5, 0.4, 0.3), std=(0.2, 0.2, 0.1)),
    metrics={"AP": 0.25},
    version="0.1.0",
)


class Payload:
    """Makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.marker,))


def one_sentence(error: pytest.ExceptionInfo[UserError], path: Path) -> str:
    text = str(error.value)
    assert "\n" not in text
    assert str(path) in text
    return text


def test_an_error_while_writing_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    path.write_text("old")

    def fail(temporary: Path) -> None:
        temporary.write_text("half")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        write_atomically(path, fail)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.pt"]


def test_the_file_appears_only_when_complete(tmp_path: Path) -> None:
    path = tmp_path / "new" / "file"

    def write(temporary: Path) -> None:
        assert temporary.parent == path.parent  # the same file system, or the move would be a copy
        assert not path.exists()
        temporary.write_text("whole")

    write_atomically(path, write)
    assert path.read_text() == "whole"
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]


def test_a_state_that_cannot_be_saved_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    save_training_state(path, {"epoch": 1})
    with pytest.raises((AttributeError, pickle.PicklingError)):
        save_training_state(path, {"epoch": 2, "bad": lambda: None})
    assert load_training_state(path) == {"epoch": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["last.pt"]


def test_training_state_round_trip(tmp_path: Path) -> None:
    state = {
        "tensor": torch.randn(3),
        "epoch": 3,
        "best": 0.5,
        "config": {"a": [1, None, "x"]},
        "counts": torch.arange(3, dtype=torch.uint8),
    }
    save_training_state(tmp_path / "last.pt", state)
    loaded = load_training_state(tmp_path / "last.pt")
    assert loaded.keys() == state.keys()
    assert torch.equal(loaded["tensor"], state["tensor"])
    assert torch.equal(loaded["counts"], state["counts"])
    assert {key: loaded[key] for key in ("epoch", "best", "config")} == {
        "epoch": 3,
        "best": 0.5,
        "config": state["config"],
    }


def test_weights_round_trip(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last)
    save_weights(tmp_path / "best.safetensors", model, METADATA)
    metadata, state = read_weights(tmp_path / "best.safetensors")
    assert metadata == METADATA
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert [entry.name for entry in tmp_path.iterdir()] == ["best.safetensors"]


def test_weights_can_be_read_by_whoever_may_read_the_run(tmp_path: Path) -> None:
    """The same permissions as any file made here, not the owner's alone."""
    save_weights(tmp_path / "best.safetensors", nn.Linear(1, 1), METADATA)
    (tmp_path / "plain").write_text("")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes["best.safetensors"] == modes["plain"]


@pytest.mark.parametrize("kind", ["torch", "pickle"])
def test_nothing_runs_from_a_malicious_checkpoint(tmp_path: Path, kind: str) -> None:
    path, marker = tmp_path / "last.pt", tmp_path / "marker"
    content = {"epoch": 1, "config": Payload(marker)}
    torch.save(content, path) if kind == "torch" else path.write_bytes(pickle.dumps(content))
    with pytest.raises(UserError, match=r"cannot be read as a training state .*; pass the last\.pt of a run") as error:
        load_training_state(path)
    one_sentence(error, path)
    assert not marker.exists()
    if kind == "pickle":  # the payload is a live one
        pickle.loads(path.read_bytes())
        assert marker.exists()


def test_a_missing_or_damaged_training_state(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    with pytest.raises(
        UserError, match=r"there is no checkpoint .* to resume from; start the run without --resume"
    ) as error:
        load_training_state(path)
    one_sentence(error, path)
    save_training_state(path, {"tensor": torch.randn(1000)})
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UserError, match="cannot be read as a training state") as error:
        load_training_state(path)
    one_sentence(error, path)


def test_files_that_are_no_weights(tmp_path: Path) -> None:
    path = tmp_path / "best.safetensors"
    with pytest.raises(UserError, match=r"there is no weights file .*; check the path") as error:
        read_weights(path)
    one_sentence(error, path)
    path.write_text("not a safetensors file at all")
    with pytest.raises(UserError, match=r"is not a readable weights file .*; pass a \.safetensors written by") as error:
        read_weights(path)
    one_sentence(error, path)
    save_weights(path, nn.Linear(100, 100), METADATA)
    path.write_bytes(path.read_bytes()[:-500])
    with pytest.raises(UserError, match="is not a readable weights file") as error:
        read_weights(path)
    one_sentence(error, path)


def test_a_foreign_safetensors_file(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    for header in (None, {"format": "pt"}):
        save_file({"weight": torch.zeros(2)}, path, metadata=header)
        with pytest.raises(
            UserError, match="is a safetensors file of another program; pass a file written by"
        ) as error:
            read_weights(path)
        one_sentence(error, path)


@pytest.mark.parametrize(
    "header",
    [
        "{broken",
        "[1, 2]",
        json.dumps({"name": "rtdetr_nano"}),
        json.dumps(METADATA.to_dict() | {"arguments": "width"}),
        json.dumps(METADATA.to_dict() | {"class_map": {"ids": ["x"], "names": ["red"]}}),
        json.dumps(METADATA.to_dict() | {"class_map": {"ids": [1, 2], "names": ["red"]}}),
        json.dumps(METADATA.to_dict() | {"preprocessing": {"size": [64], "mean": [0, 0, 0], "std": [1, 1, 1]}}),
        json.dumps(METADATA.to_dict() | {"class_map": None}),
    ],
)
def test_a_damaged_header(tmp_path: Path, header: str) -> None:
    path = tmp_path / "best.safetensors"
    save_file({"weight": torch.zeros(2)}, path, metadata={"vitdet": header})
    with pytest.raises(UserError, match="is not a readable weights file") as error:
        read_weights(path)
    one_sentence(error, path)
