"""Models by name, and models with their weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitdet.backbones.timm import timm_parameters, timm_takes_size
from vitdet.errors import UserError
from vitdet.structures import ModelMetadata
from vitdet.weights.preprocessing import MAX_SIDE
from vitdet.weights.rules import load_strict
from vitdet.zoo.builders import (
    CLASSIFIERS,
    DETECTORS,
    MODELS,
    TIMM,
    builder_arguments,
    check_name,
    create_model,
    list_models,
)
from vitdet.zoo.sources import describe_source, read_source

__all__ = [
    "CLASSIFIERS", "DETECTORS", "MODELS", "adapt", "builder_arguments", "create_model", "describe_source",
    "is_classifier", "list_models", "load_model", "read_source", "size_argument",
]  # fmt: skip


def load_model(source: str | Path, *, model: str | None = None, image_size: tuple[int, int] | None = None) -> nn.Module:
    """A model with its weights, in evaluation mode; ``.metadata`` says its name, classes and preprocessing.

    Args:
        source: a ``.safetensors`` file written by this package; a folder in Hugging Face's layout, by timm or by
            transformers; a Hub id of such a one (``"timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k"``); or a file in a
            publisher's own layout (``"deit_tiny_patch16_224-a1311bcf.pth"``).
        model: the name of the architecture, where the source does not say.
        image_size: (height, width) of the model's images, where other than what the weights were made for.

    Raises:
        UserError: the source cannot be had or read, or does not hold all weights of the model it names, and no others.
    """
    metadata, state = read_source(source, model=model)
    if image_size is not None:
        metadata = _resized(metadata, image_size)
    arguments = dict(metadata.arguments)
    if "name" in arguments:
        raise UserError(f"{source} gives its model an argument called name; fetch or write the file again")
    if not isinstance(arguments.get("num_classes"), int):
        raise UserError(f"{source} names no whole number as num_classes in its header; fetch or write the file again")
    # Without memory at first: a header may ask for any width, and only the shapes in the file show whether it is true.
    # Models of timm's take theirs at once, as what they compute in constructors would be lost: looked at before.
    if metadata.name.startswith(TIMM):
        _check_timm(metadata.name, arguments, state, source)
    with torch.device("meta"):
        net = create_model(str(metadata.name), num_classes=arguments.pop("num_classes"), **arguments)
    try:
        load_strict(net, adapt(net, state), assign=True)
    except ValueError as error:
        raise UserError(f"{source} does not hold the weights of {metadata.name!r} that it names: {error}") from error
    _check(metadata, net, source)
    net.metadata = metadata  # type: ignore[assignment]
    return net.to(memory_format=torch.channels_last).eval()


def _check_timm(name: str, arguments: dict[str, Any], state: dict[str, Tensor], source: str | Path) -> None:
    """Refuse a model of timm's that is far larger than what the source holds."""
    given = {key: value for key, value in arguments.items() if key != "num_classes"}
    try:
        count = timm_parameters(name, arguments["num_classes"], **given)
    except ValueError as error:
        raise UserError(f"{source} cannot be loaded: {error}") from error
    held = sum(tensor.numel() for tensor in state.values())
    if count > 2 * held:
        raise UserError(
            f"{source} does not hold the weights of {name!r} that it names: {held:,} numbers for a model of {count:,}"
        )


def is_classifier(name: str) -> bool:
    """Whether the model of this name classifies images; the others detect objects."""
    check_name(name)
    return name not in DETECTORS


def size_argument(name: str, size: tuple[int, int]) -> dict[str, Any]:
    """What makes a model of this name for images of (height, width) pixels; nothing where any size will do."""
    if name in CLASSIFIERS:
        return {"image_size": size}
    if name.startswith(TIMM) and timm_takes_size(name):
        return {"img_size": size}
    return {}


def _resized(metadata: ModelMetadata, image_size: tuple[int, int]) -> ModelMetadata:
    """The same for images of another size; detectors take any."""
    size = (int(image_size[0]), int(image_size[1]))
    arguments = {**metadata.arguments, **size_argument(metadata.name, size)}
    prepared = replace(metadata.preprocessing, size=size, longest=None)  # a given size is reached by stretching
    return replace(metadata, arguments=arguments, preprocessing=prepared)


def adapt(net: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state with positions for the model's grid, and with the counters of batch norms, which few layouts have."""
    counters = [name for name in net.state_dict() if name.endswith("num_batches_tracked")]
    state = {**{name: torch.zeros((), dtype=torch.int64) for name in counters if name not in state}, **state}
    backbone = getattr(net, "backbone", None)
    if not hasattr(backbone, "adapt"):
        return state
    inner = {name.removeprefix("backbone."): value for name, value in state.items() if name.startswith("backbone.")}
    rest = {name: value for name, value in state.items() if not name.startswith("backbone.")}
    adapted = backbone.adapt(inner)  # type: ignore[union-attr]
    return {**{f"backbone.{name}": value for name, value in adapted.items()}, **rest}


def _check(metadata: ModelMetadata, net: nn.Module, source: str | Path) -> None:
    """Refuse classes or sizes that are not the model's."""
    classes, named = metadata.arguments["num_classes"], len(metadata.class_map)
    if named != classes:
        raise UserError(f"{source} names {named} classes but its model has {classes}; fetch or write the file again")
    if metadata.name in DETECTORS and metadata.preprocessing.crop is not None:
        raise UserError(
            f"{source} asks for the middle of images, and a detector sees all of them; give its preprocessing a size "
            "of height and width"
        )
    stride: int = net.stride  # type: ignore[assignment]
    longest = metadata.preprocessing.longest
    if longest is not None and not getattr(net, "takes_sizes", False):
        raise UserError(
            f"{source} asks for images that keep their proportions, and {metadata.name!r} cannot tell them from their "
            "padding; fetch or write the file again"
        )
    if max(*metadata.preprocessing.size, longest or 0) > MAX_SIDE:
        raise UserError(
            f"{source} asks for images of {longest or list(metadata.preprocessing.size)} pixels, and a side has at "
            f"most {MAX_SIDE}; fetch or write the file again"
        )
    if any(side < 1 or side % stride for side in metadata.preprocessing.size):
        raise UserError(
            f"{source} asks for images of {list(metadata.preprocessing.size)} pixels, which {stride} does not divide; "
            "fetch or write the file again"
        )
