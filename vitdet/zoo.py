"""Models by name, and models with their weights."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vitdet.detectors import rtdetr
from vitdet.engine.checkpoint import read_weights
from vitdet.errors import UserError, did_you_mean
from vitdet.weights.rules import load_strict

MODELS: dict[str, Callable[..., nn.Module]] = {
    "rtdetr_nano": rtdetr.rtdetr_nano,
    "rtdetr_r18": rtdetr.rtdetr_r18,
    "rtdetr_r34": rtdetr.rtdetr_r34,
    "rtdetr_r50_m": rtdetr.rtdetr_r50_m,
    "rtdetr_r50": rtdetr.rtdetr_r50,
    "rtdetr_r101": rtdetr.rtdetr_r101,
}


def list_models(pattern: str = "*") -> list[str]:
    """Names of the models that match a shell pattern."""
    return sorted(fnmatch.filter(MODELS, pattern))


def create_model(name: str, *, num_classes: int, **overrides: Any) -> nn.Module:
    """A model with random weights.

    Args:
        name: see :func:`list_models`. num_classes: K.
        overrides: arguments of the detector other than the variant's.

    Raises:
        UserError: for an unknown name or argument, or a value the model refuses.
    """
    if name not in MODELS:
        raise UserError(f"there is no model {name!r}; {did_you_mean(name, sorted(MODELS))}")
    if num_classes < 1:
        raise UserError(f"a detector needs at least 1 class, got {num_classes}; check the categories of the data")
    known = keyword_arguments(MODELS[name]) + keyword_arguments(rtdetr.RTDETR)
    known.remove("num_classes")
    for key in overrides:
        if key not in known:
            raise UserError(f"model {name!r} has no argument {key!r}; {did_you_mean(key, known)}")
    try:
        return MODELS[name](num_classes, **overrides).to(memory_format=torch.channels_last)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"model {name!r} cannot be built with {overrides}: {error}") from error


def keyword_arguments(function: Callable[..., Any]) -> list[str]:
    """Names of the arguments that can be given by name only."""
    return [p.name for p in inspect.signature(function).parameters.values() if p.kind == p.KEYWORD_ONLY]


def load_model(source: str | Path) -> nn.Module:
    """A model with its weights, in evaluation mode; ``.metadata`` says its name, classes and preprocessing.

    Args:
        source: a ``.safetensors`` file written by this package.
    """
    path = Path(source)
    if path.suffix != ".safetensors":
        raise UserError(f"cannot load a model from {str(source)!r}; pass a .safetensors file written by vitdet train")
    metadata, state = read_weights(path)
    arguments = dict(metadata.arguments)
    if not isinstance(arguments.get("num_classes"), int):
        raise UserError(f"{path} names no whole number as num_classes in its header; fetch or write the file again")
    # Without memory at first: a header may ask for any width, and only the shapes in the file show whether it is true.
    with torch.device("meta"):
        model = create_model(metadata.name, num_classes=arguments.pop("num_classes"), **arguments)
    try:
        load_strict(model, state, assign=True)
    except UserError as error:
        raise UserError(f"{path} does not hold the weights of {metadata.name!r} that it names: {error}") from error
    if len(metadata.class_map) != metadata.arguments["num_classes"]:
        raise UserError(
            f"{path} names {len(metadata.class_map)} classes but its model has {metadata.arguments['num_classes']}; "
            "fetch or write the file again"
        )
    stride: int = model.stride  # type: ignore[assignment]
    if any(side < 1 or side % stride for side in metadata.preprocessing.size):
        raise UserError(
            f"{path} asks for images of {list(metadata.preprocessing.size)} pixels, which {stride} does not divide; "
            "fetch or write the file again"
        )
    model.metadata = metadata  # type: ignore[assignment]
    return model.to(memory_format=torch.channels_last).eval()
