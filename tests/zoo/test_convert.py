"""Weights in another layout: whole or not at all, and nothing lost on the way without a word."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.parity.random_detectors import with_random_values
from vitdet.engine.checkpoint import read_weights, save_weights
from vitdet.errors import UserError
from vitdet.structures import ClassMap, ModelMetadata, Preprocessing
from vitdet.zoo import convert, create_model, load_model
from vitdet.zoo.convert import convert_source

FILES = ["config.json", "model.safetensors", "preprocessor_config.json"]
METADATA = ModelMetadata("dfine_n", {"num_classes": 2}, ClassMap((3, 7), ("red", "blue")), Preprocessing((64, 96)))


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ours") / "best.safetensors"
    save_weights(path, with_random_values(create_model("dfine_n", num_classes=2)), METADATA)
    return path


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_there_and_back_again_is_bit_equal(ours: Path, tmp_path: Path) -> None:
    notes = convert_source(ours, tmp_path / "theirs")
    assert notes == ["category ids are not part of that layout: its classes are counted from 0"]
    assert names_in(tmp_path) == ["theirs"]
    assert names_in(tmp_path / "theirs") == FILES
    assert convert_source(tmp_path / "theirs", tmp_path / "back.safetensors", version="1.2") == []
    (metadata, state), (_, first) = read_weights(tmp_path / "back.safetensors"), read_weights(ours)
    assert (metadata.name, metadata.version, metadata.class_map.names) == ("dfine_n", "1.2", ("red", "blue"))
    assert metadata.preprocessing == METADATA.preprocessing
    assert state.keys() == first.keys()
    floating = [name for name in first if first[name].is_floating_point()]  # the others count steps
    assert all(torch.equal(state[name].view(torch.int32), first[name].view(torch.int32)) for name in floating)


def test_a_publishers_file_becomes_one_of_ours(shared_data: Path, tmp_path: Path) -> None:
    """The authors' DEIMv2, which transformers cannot be given."""
    (source,) = (shared_data / "weights" / "deimv2").glob("*atto*_fused.safetensors")
    convert_source(source, tmp_path / "ours.safetensors")
    metadata, state = read_weights(tmp_path / "ours.safetensors")
    assert metadata.name == "deimv2_atto"
    expected = load_model(source).state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    with pytest.raises(UserError, match="transformers' deimv2 computes other results than deimv2_atto as its authors"):
        convert_source(source, tmp_path / "theirs")
    assert names_in(tmp_path) == ["ours.safetensors"]


def test_what_is_there_is_kept_unless_told_otherwise(ours: Path, tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    folder.mkdir()
    convert_source(ours, folder)  # empty: nobody's
    (folder / "README.md").write_text("mine")
    with pytest.raises(UserError, match=r"there is something at .*theirs already; pass another name, or --overwrite"):
        convert_source(ours, folder)
    (folder / "config.json").write_text("{}")
    convert_source(ours, folder, overwrite=True)
    assert names_in(folder) == ["README.md", *FILES]
    assert json.loads((folder / "config.json").read_text())["model_type"] == "d_fine"

    file = tmp_path / "ours.safetensors"
    file.write_bytes(b"mine")
    with pytest.raises(UserError, match="there is something at"):
        convert_source(ours, file)
    convert_source(folder, file, overwrite=True)
    convert_source(file, file, overwrite=True)
    assert read_weights(file)[0].name == "dfine_n"
    assert names_in(tmp_path) == ["ours.safetensors", "theirs"]


@pytest.mark.parametrize(
    ("spoilt", "told"),
    [
        ({"model.decoder.up": torch.ones(1)}, "theirs was not written: what was read back differs in decoder.up;"),
        ({"model.mine": torch.ones(1)}, "theirs was not written: what was read back differs in mine;"),
        (
            {"model.decoder.layers.0.gateway.gate.weight": None},
            "theirs was not written, as it could not be read back: ",
        ),
    ],
    ids=["changed", "more", "less"],
)
def test_what_does_not_come_back_is_not_written(
    spoilt: dict[str, Any], told: str, ours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(tensors: dict[str, torch.Tensor], *arguments: Any, **options: Any) -> None:
        changed = {name: value for name, value in {**tensors, **spoilt}.items() if value is not None}
        save_file(changed, *arguments, **options)

    monkeypatch.setattr(convert, "save_file", save)
    with pytest.raises(UserError, match=told) as raised:
        convert_source(ours, tmp_path / "theirs")
    assert ".tmp" not in str(raised.value)
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("name", ["model.pth", "model.onnx"])
def test_a_destination_of_another_kind_is_refused(name: str, ours: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{name} is no name of a folder, and a file of ours ends in .safetensors"):
        convert_source(ours, tmp_path / name)
    (tmp_path / "folder.safetensors").mkdir()
    with pytest.raises(UserError, match="is a folder; pass the name of a file"):
        convert_source(ours, tmp_path / "folder.safetensors")


def test_readable_by_others(ours: Path, tmp_path: Path) -> None:
    """Not only by whoever wrote it, as temporary files are."""
    convert_source(ours, tmp_path / "theirs")
    (tmp_path / "usual").touch()
    modes = {(tmp_path / "theirs" / name).stat().st_mode for name in FILES}
    assert modes == {(tmp_path / "usual").stat().st_mode}
    assert load_file(tmp_path / "theirs" / "model.safetensors")
