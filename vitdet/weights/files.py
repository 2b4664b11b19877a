"""Files of weights, of whichever format, to tensors by name; nothing in them is ever run.

Pickles are read by torch's restricted unpickler, arrays without pickles, and sizes that a file only claims are held
against its own before memory is taken.
"""

from __future__ import annotations

import argparse
import json
import math
import pickle
import re
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from vitdet.errors import UserError, some

INDEX = "model.safetensors.index.json"
PICKLES = (".pth", ".pt", ".bin", ".pkl", ".ckpt")
FORMATS = (".safetensors", *PICKLES, ".npz")

# Where training programs keep the weights within what they save; averaged ones, which were measured, come first.
_WRAPPERS = (("ema", "module"), ("state_dict_ema",), ("model_ema",), ("state_dict",), ("model",))
_MAX_JSON = 64 * 2**20
_MAX_RATIO = 10  # weights hardly compress: a file that claims to unpack to more is a bomb


def read_state(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, on the CPU, as they are named in it.

    Args:
        path: a ``.safetensors``; the ``.index.json`` of a sharded one; a ``.pth``, ``.pt``, ``.bin``, ``.pkl``,
            ``.ckpt`` of torch, from which ``{"model": …}``, ``{"state_dict": …}``, ``{"ema": {"module": …}}`` and a
            prefix ``module.`` on every name are unwrapped; or a ``.npz``.

    Raises:
        UserError: no such file, another format, a damaged file, one that would run code or unpack to far more than its
            size, or one without tensors.
    """
    if not path.is_file():
        raise UserError(f"there is no weights file {path}; check the path")
    if path.name.endswith(".index.json"):
        state = _read_shards(path)
    elif path.suffix == ".safetensors":
        state = _read_safetensors(path)
    elif path.suffix == ".npz":
        state = _read_npz(path)
    elif path.suffix in PICKLES:
        state = _read_pickle(path)
    else:
        raise UserError(f"{path} is no weights file by its name; it must end in one of {', '.join(FORMATS)}")
    if not state:
        raise UserError(f"{path} holds no weights by name; pass the file of a state dict")
    return state


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        UserError: not readable, not JSON, or no object.
    """
    try:
        if path.stat().st_size > _MAX_JSON:
            raise UserError(f"{path} is larger than {_MAX_JSON >> 20} MiB; it cannot be a description of a model")
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is not readable JSON; fetch it again") from error
    if not isinstance(values, dict):
        raise UserError(f"{path} holds a {type(values).__name__} instead of an object; fetch it again")
    return values


def shard_names(index: Path) -> list[str]:
    """The files that a ``model.safetensors.index.json`` names, all in its own folder.

    Raises:
        UserError: not such an index, or a name that leads out of the folder.
    """
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise UserError(f"{index} has no weight_map of file names; fetch it again")
    names = sorted(set(places.values()))
    for name in names:
        if not re.fullmatch(r"[\w][\w.-]*\.safetensors", name):
            raise UserError(f"{index} names the file {name!r}, which is no .safetensors beside it; do not trust it")
    return names


def _read_shards(index: Path) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for name in shard_names(index):
        if not (index.parent / name).is_file():
            raise UserError(f"{index} names {name}, which is not beside it; fetch that file too")
        state |= _read_safetensors(index.parent / name)
    lost = [name for name in read_json(index)["weight_map"] if name not in state]
    if lost:
        raise UserError(f"the files of {index} lack {some(lost)}; fetch them again")
    return state


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except (SafetensorError, OSError, ValueError) as error:
        raise _damaged(path) from error


def _read_pickle(path: Path) -> dict[str, Tensor]:
    whole = zipfile.is_zipfile(path)  # the format since torch 1.6; the one before cannot be mapped
    if whole:
        _check_sizes(path)
    try:
        # Training programs keep their arguments beside the weights; this class only holds attributes.
        with torch.serialization.safe_globals([argparse.Namespace]):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=whole)
    except pickle.UnpicklingError as error:
        asked = re.search(r"GLOBAL ([A-Za-z_][\w.]*)", str(error))
        if asked is None:
            raise _damaged(path) from error
        raise UserError(
            f"{path} is a pickle that asks for {asked[1]}, more than tensors, and nothing in it was run; "
            "fetch a .safetensors of it, or have its maker save the state dict alone"
        ) from error
    except Exception as error:  # a damaged pickle can raise anything
        raise _damaged(path) from error
    state = _unwrap(content)
    # Views can show a few bytes as any number of them, and would be copied.
    claimed = sum(value.numel() * value.element_size() for value in state.values())
    if claimed > _MAX_RATIO * path.stat().st_size + 2**20:
        raise _bomb(path, claimed)
    return state


def _unwrap(content: Any) -> dict[str, Tensor]:
    """The state dict within what a training program saved; empty where there is none."""
    for keys in _WRAPPERS:
        inner = content
        for key in keys:
            inner = inner.get(key) if isinstance(inner, Mapping) else None
        if isinstance(inner, Mapping):
            content = inner
            break
    if not isinstance(content, Mapping):
        return {}
    state = {name: value for name, value in content.items() if isinstance(name, str) and isinstance(value, Tensor)}
    if all(name.startswith("module.") for name in state):  # left by data-parallel training
        state = {name.removeprefix("module."): value for name, value in state.items()}
    return state


def _read_npz(path: Path) -> dict[str, Tensor]:
    if not zipfile.is_zipfile(path):
        raise _damaged(path)
    _check_sizes(path)
    try:
        with zipfile.ZipFile(path) as archive:
            arrays = {
                info.filename.removesuffix(".npy"): _read_array(archive, info)
                for info in archive.infolist()
                if not info.is_dir()
            }
    except (
        ValueError, KeyError, OSError, EOFError, zlib.error, zipfile.BadZipFile, NotImplementedError, RuntimeError,
    ) as error:  # fmt: skip
        raise _damaged(path) from error
    # Checkpoints of a running training keep the weights beside the optimizer's state.
    prefix = "opt/target/"
    inner = {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}
    return {name: torch.from_numpy(array) for name, array in (inner or arrays).items() if array.dtype.kind in "fiub"}


def _read_array(archive: zipfile.ZipFile, info: zipfile.ZipInfo) -> np.ndarray:
    """One array; ValueError where its header claims more bytes than follow, or Python objects."""
    headers: dict[tuple[int, int], Callable[[Any], Any]] = {
        (1, 0): np.lib.format.read_array_header_1_0,
        (2, 0): np.lib.format.read_array_header_2_0,
    }
    with archive.open(info) as file:
        shape, fortran, dtype = headers[np.lib.format.read_magic(file)](file)
        size = math.prod(shape) * dtype.itemsize
        if dtype.hasobject or size > info.file_size:
            raise ValueError(f"{info.filename} claims {size} bytes of {dtype}")
        content = file.read()
    array = np.frombuffer(content, dtype=dtype).reshape(shape, order="F" if fortran else "C")
    if dtype.str in ("|V2", "<V2"):  # numpy has no bfloat16 and stores it as two bytes: the upper half of a float32
        array = (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return array.astype(array.dtype.newbyteorder("="), order="C")


def _check_sizes(path: Path) -> None:
    """Refuse an archive that claims to unpack to far more than its size."""
    try:
        with zipfile.ZipFile(path) as archive:
            claimed = sum(info.file_size for info in archive.infolist())
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
        raise _damaged(path) from error
    if claimed > _MAX_RATIO * path.stat().st_size + 2**20:
        raise _bomb(path, claimed)


def _bomb(path: Path, claimed: int) -> UserError:
    return UserError(
        f"{path} has {path.stat().st_size:,} bytes and claims to unpack to {claimed:,}; no weights do, "
        "so it is not used: fetch it again from a place you trust"
    )


def _damaged(path: Path) -> UserError:
    return UserError(f"{path} is damaged, or no {path.suffix} file at all; fetch it again")
