"""Files of weights in every format, damaged ones, and ones that mean harm."""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from vitdet.errors import UserError
from vitdet.weights.files import INDEX, read_json, read_state

STATE = {"head.weight": torch.arange(6.0).reshape(2, 3), "head.bias": torch.tensor([1.0, 2.0])}


def same(state: dict[str, Tensor]) -> bool:
    return state.keys() == STATE.keys() and all(torch.equal(value, STATE[name]) for name, value in state.items())


class Runs:
    """What an attacker puts into a pickle: reading it without care makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("suffix", [".pth", ".pt", ".bin", ".pkl", ".ckpt"])
@pytest.mark.parametrize("zipped", [True, False])
def test_torch_files(suffix: str, zipped: bool, tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / f"a{suffix}", _use_new_zipfile_serialization=zipped)
    assert same(read_state(tmp_path / f"a{suffix}"))


@pytest.mark.parametrize(
    "wrapped",
    [
        {"model": STATE, "epoch": 3},
        {"state_dict": STATE, "optimizer": {"lr": 0.1}},
        {"ema": {"module": STATE, "updates": 5}, "model": {"head.weight": torch.zeros(1)}},
        {"state_dict_ema": STATE, "state_dict": {"head.weight": torch.zeros(1)}},
        {"model_ema": STATE, "model": {"head.weight": torch.zeros(1)}},
        {"model": {f"module.{name}": value for name, value in STATE.items()}},
        {"model": STATE, "args": argparse.Namespace(lr=1e-4, coco_path="data", output_dir="")},
        {**STATE, "epoch": 3},
    ],
)
def test_what_training_programs_save(wrapped: dict[str, Any], tmp_path: Path) -> None:
    torch.save(wrapped, tmp_path / "a.pth")
    assert same(read_state(tmp_path / "a.pth"))


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_runs_code_does_not_run_it(zipped: bool, tmp_path: Path) -> None:
    path, trace = tmp_path / "evil.pth", tmp_path / "it_ran"
    torch.save({"model": STATE, "extra": Runs(trace)}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(UserError) as error:
        read_state(path)
    assert not trace.exists()
    assert str(error.value) == (
        f"{path} is a pickle that asks for {os.mkdir.__module__}.mkdir, more than tensors, and nothing in it was run; "
        "fetch a .safetensors of it, or have its maker save the state dict alone"
    )
    torch.load(path, weights_only=False)  # it would have
    assert trace.exists()


def test_a_plain_pickle_that_runs_code(tmp_path: Path) -> None:
    (tmp_path / "evil.pkl").write_bytes(pickle.dumps(Runs(tmp_path / "it_ran")))
    with pytest.raises(UserError, match=r"evil\.pkl"):
        read_state(tmp_path / "evil.pkl")
    assert not (tmp_path / "it_ran").exists()


def test_arrays(tmp_path: Path) -> None:
    arrays = {
        "Transformer/encoder_norm/scale": np.arange(4, dtype=np.float32),
        "embedding/kernel": np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
        "half": np.ones((2, 2), dtype=np.float16),
        "big": np.arange(3, dtype=">f4"),
        "scalar": np.array(2.5),
        "text": np.array("not a weight"),
    }
    np.savez(tmp_path / "a.npz", **arrays)
    np.savez_compressed(tmp_path / "b.npz", **arrays)
    for name in ("a.npz", "b.npz"):
        state = read_state(tmp_path / name)
        assert state.keys() == arrays.keys() - {"text"}
        for key, value in state.items():
            assert np.array_equal(value.numpy(), arrays[key])
        assert state["half"].dtype == torch.float16
        assert state["embedding/kernel"].is_contiguous()
        state["scalar"] += 1  # not on read-only memory


def test_arrays_of_a_running_training(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", **{"opt/target/head/bias": np.ones(2), "opt/state/step": np.zeros(1)})
    assert list(read_state(tmp_path / "a.npz")) == ["head/bias"]


def test_arrays_in_bfloat16(tmp_path: Path) -> None:
    """numpy has no such type: it stores and reads two bytes of nothing in particular."""
    values = torch.tensor([1.0, -2.5, 3e10])
    raw = values.to(torch.bfloat16).view(torch.int16).numpy().view("V2")
    np.savez(tmp_path / "a.npz", a=raw)
    assert torch.equal(read_state(tmp_path / "a.npz")["a"], values.to(torch.bfloat16).float())


def array_that_claims(shape: tuple[int, ...]) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return file.getvalue() + b"\0" * 16


@pytest.mark.parametrize("shape", [(10**12,), (2**62, 4), (5,)])
def test_an_array_that_claims_more_than_there_is(shape: tuple[int, ...], tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("a.npy", array_that_claims(shape))
    with pytest.raises(UserError, match=r"a\.npz is damaged, or no \.npz file at all; fetch it again"):
        read_state(tmp_path / "a.npz")


@pytest.mark.parametrize("name", ["a.npz", "a.pth"])
def test_an_archive_that_unpacks_to_far_more(name: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / name, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", b"\0" * 20_000_000)
    with pytest.raises(UserError) as error:
        read_state(tmp_path / name)
    assert "bytes and claims to unpack to 20,000,000; no weights do, so it is not used: fetch it" in str(error.value)


def test_arrays_of_objects(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", a=np.array([Runs(tmp_path / "it_ran")], dtype=object))
    with pytest.raises(UserError, match="is damaged, or no"):
        read_state(tmp_path / "a.npz")
    assert not (tmp_path / "it_ran").exists()


@pytest.mark.parametrize("name", ["a.safetensors", "a.pth", "old.pth", "a.npz"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.95])
def test_files_cut_short(name: str, share: float, tmp_path: Path) -> None:
    path = tmp_path / name
    if path.suffix == ".pth":
        torch.save(STATE, path, _use_new_zipfile_serialization=name != "old.pth")
    elif path.suffix == ".npz":
        np.savez(path, **{key: value.numpy() for key, value in STATE.items()})
    else:
        save_file(STATE, path)
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(UserError) as error:
        read_state(path)
    assert str(error.value) == f"{path} is damaged, or no {path.suffix} file at all; fetch it again"


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.safetensors", b"<html>404</html>", "is damaged, or no .safetensors file at all; fetch it again"),
        ("a.pth", b"version https://git-lfs.github.com/spec/v1", "is damaged, or no .pth file at all"),
        ("a.h5", b"x", "a.h5 is no weights file by its name; it must end in one of .safetensors, .pth, "),
        (INDEX, b"{}", "has no weight_map of file names; fetch it again"),
        (INDEX, b'{"weight_map": {"a": 3}}', "has no weight_map of file names"),
        (INDEX, b'{"weight_map": {"a": "b.safetensors"}}', "names b.safetensors, which is not beside it; fetch that"),
        (INDEX, b'{"weight_map": {"a": "/etc/x.safetensors"}}', "'/etc/x.safetensors', which is no .safetensors besid"),
        (INDEX, b'{"weight_map": {"a": "..\\\\x.safetensors"}}', "which is no .safetensors beside it; do not trust it"),
        (INDEX, b"[" * 100_000, "is not readable JSON; fetch it again"),
        (INDEX, b"\xff\xfe", "is not readable JSON; fetch it again"),
        (INDEX, b"[1]", "holds a list instead of an object; fetch it again"),
    ],
)
def test_files_of_another_kind(name: str, content: bytes, expected: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        read_state(tmp_path / name)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"there is no weights file .*b\.pth; check the path"):
        read_state(tmp_path / "b.pth")


@pytest.mark.parametrize("content", [[torch.zeros(2)], torch.zeros(2), {"epoch": 3}, {"model": {}}])
def test_no_weights_by_name(content: Any, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "a.pth")
    with pytest.raises(UserError, match="holds no weights by name; pass the file of a state dict"):
        read_state(tmp_path / "a.pth")


def test_shards_that_lack_a_tensor(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "a.safetensors")
    places = dict.fromkeys([*STATE, "tail"], "a.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": places}))
    with pytest.raises(UserError, match=r"the files of .* lack tail; fetch them again"):
        read_state(tmp_path / INDEX)


def test_a_description_too_large_to_be_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vitdet.weights.files._MAX_JSON", 2**20)
    (tmp_path / "config.json").write_bytes(b" " * (2**20 + 1))
    with pytest.raises(UserError, match=r"config\.json is larger than 1 MiB; it cannot be a description of a model"):
        read_json(tmp_path / "config.json")


def test_views_of_a_few_bytes_are_not_copied_out(tmp_path: Path) -> None:
    """A tensor of stride 0 has any number of values."""
    path = tmp_path / "wide.pth"
    torch.save({"weight": torch.zeros(1).expand(10**5, 10**5)}, path)
    with pytest.raises(UserError, match=r"claims to unpack to 40,000,000,000; no weights do"):
        read_state(path)
