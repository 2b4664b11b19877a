"""Weights from one layout to another: any source as a file of ours, and ours as a folder for other programs."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from vitdet.engine.checkpoint import read_weights, save_weights, write_atomically
from vitdet.errors import UserError, some
from vitdet.structures import ModelMetadata
from vitdet.zoo import adapt, load_model
from vitdet.zoo.layouts import Layout, built, layout_of
from vitdet.zoo.sources import read_source

WEIGHTS = "model.safetensors"
_COUNTER = ".num_batches_tracked"  # counts steps, enters no result, and is left out by readers


def convert_source(
    source: str | Path, destination: str | Path, *, model: str | None = None, overwrite: bool = False, version: str = ""
) -> list[str]:
    """Write the weights of a source in another layout, read them back, and compare every bit.

    Args:
        source, model: as for ``load_model``.
        destination: a name that ends in ``.safetensors``, for a file of ours; else a folder, which gets a detector in
            Hugging Face's layout, for transformers, or a classifier in timm's.
        overwrite: replace what is there; of a folder, the files that are written, and no others.
        version: of this package, for a file whose source names none.

    Returns:
        What the new layout cannot hold, a sentence each.

    Raises:
        UserError: the source cannot be read, there is something at the destination, or its layout has no such model;
            nothing is written then.
    """
    path = Path(destination)
    if not overwrite and (path.is_file() or (path.is_dir() and any(path.iterdir()))):
        raise UserError(f"there is something at {path} already; pass another name, or --overwrite")
    if path.suffix == ".safetensors":
        if path.is_dir():
            raise UserError(f"{path} is a folder; pass the name of a file, or one without .safetensors")
        _write_file(path, source, model, version)
        return []
    if path.is_file() or path.suffix in (".pth", ".pt", ".bin", ".npz", ".onnx"):
        raise UserError(f"{path} is no name of a folder, and a file of ours ends in .safetensors; pass one of the two")
    metadata, state = read_source(source, model=model)
    layout = layout_of(metadata, adapt(built(metadata), state))
    _write_folder(path, layout, lambda folder: _check(folder, layout, metadata, path))
    if metadata.class_map.ids != tuple(range(len(metadata.class_map))):
        layout.notes.append("category ids are not part of that layout: its classes are counted from 0")
    return layout.notes


def _write_file(path: Path, source: str | Path, model: str | None, version: str) -> None:
    """As a file of ours; the model is built, so all of its weights are there and no others."""
    net = load_model(source, model=model)
    metadata: ModelMetadata = net.metadata  # type: ignore[assignment]
    state = {name: value.clone() for name, value in net.state_dict().items()}  # the source may be what is replaced

    def write(temporary: Path) -> None:
        save_weights(temporary, net, replace(metadata, version=metadata.version or version))
        _refuse(_changed(read_weights(temporary)[1], state), path)

    write_atomically(path, write)


def _write_folder(path: Path, layout: Layout, check: Callable[[Path], None]) -> None:
    """Write a folder beside its place, check it, and put it there; where one is already, file by file."""
    path = path.resolve()  # "." has no name, and a link is to stay one
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.mkdir()
    try:
        for name, values in layout.files.items():
            (temporary / name).write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        # Copies: a file must not hold the same memory under two names.
        tensors = {name: value.clone(memory_format=torch.contiguous_format) for name, value in layout.tensors.items()}
        write_atomically(temporary / WEIGHTS, lambda file: save_file(tensors, file, metadata={"format": "pt"}))
        check(temporary)
        if path.is_dir():
            for file in temporary.iterdir():
                file.replace(path / file.name)
        else:
            temporary.replace(path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _check(folder: Path, layout: Layout, metadata: ModelMetadata, path: Path) -> None:
    """Read a folder as anybody's, and refuse what does not come back as it was."""
    try:
        found, state = read_source(folder)
    except UserError as error:
        told = str(error).replace(str(folder), str(path))
        raise UserError(
            f"{path} was not written, as it could not be read back: {told}; keep the file that you have"
        ) from error
    differing = _changed(state, layout.state) or layout.differing(found)
    if found.class_map.names != metadata.class_map.names:
        differing.append("class names")
    if found.preprocessing != metadata.preprocessing:
        differing.append("preprocessing")
    _refuse(differing, path)


def _refuse(differing: list[str], path: Path) -> None:
    """Say what came back otherwise, if anything."""
    if differing:
        raise UserError(
            f"{path} was not written: what was read back differs in {some(differing)}; keep the file that you have, "
            "and report this"
        )


def _changed(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    """The names of tensors that are not the same in both, bit by bit; counters of batch norms aside."""
    names = [name for name in sorted(found.keys() | expected.keys()) if not name.endswith(_COUNTER)]
    return [name for name in names if not _same(found.get(name), expected.get(name))]


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    """Whether both are there and hold the same bits."""
    if one is None or other is None or one.shape != other.shape or one.dtype != other.dtype:
        return False
    bits, others = (value.contiguous().reshape(-1).view(torch.uint8) for value in (one, other))
    return torch.equal(bits, others)
