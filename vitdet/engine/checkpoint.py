"""Files of a run: ``last.pt`` for resuming, ``*.safetensors`` for using. Both are written whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from vitdet.errors import UserError
from vitdet.structures import ModelMetadata

HEADER_KEY = "vitdet"  # the safetensors header maps strings to strings; ours holds one JSON text under this key


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """Let ``write`` fill a temporary file beside ``path``, then put it in its place in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode  # safetensors makes files that only their owner may read
        write(temporary)
        temporary.chmod(mode)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def save_training_state(path: Path, state: dict[str, Any]) -> None:
    """Write what :func:`load_training_state` gives back: tensors and plain values only."""
    write_atomically(path, lambda temporary: torch.save(state, temporary))


def load_training_state(path: Path) -> dict[str, Any]:
    """Read a ``last.pt``; nothing but tensors and plain values is unpickled."""
    if not path.is_file():
        raise UserError(f"there is no checkpoint {path} to resume from; start the run without --resume")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise UserError(
            f"{path} cannot be read as a training state ({_first_line(error)}); pass the last.pt of a run"
        ) from error


def save_weights(path: Path, model: nn.Module, metadata: ModelMetadata) -> None:
    """Write a model's weights and, in the file's header, what is needed to use them."""
    state = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    header = {HEADER_KEY: json.dumps(metadata.to_dict()), "format": "pt"}
    write_atomically(path, lambda temporary: save_file(state, temporary, metadata=header))


def read_metadata(path: Path) -> ModelMetadata | None:
    """What a file of :func:`save_weights` says about itself; None for a safetensors file of another program."""
    if not path.is_file():
        raise UserError(f"there is no weights file {path}; check the path")
    try:
        with safe_open(path, framework="pt") as file:
            header = (file.metadata() or {}).get(HEADER_KEY)
        return None if header is None else ModelMetadata.from_dict(json.loads(header))
    except (SafetensorError, OSError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{path} is not a readable weights file ({_first_line(error)}); pass a .safetensors written by vitdet train"
        ) from error


def read_weights(path: Path) -> tuple[ModelMetadata, dict[str, Tensor]]:
    """Read a file of :func:`save_weights`."""
    metadata = read_metadata(path)
    if metadata is None:
        raise UserError(f"{path} is a safetensors file of another program; pass a file written by vitdet train")
    return metadata, load_file(path)


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0][:120] if lines else type(error).__name__
