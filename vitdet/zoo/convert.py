"""Weights from one layout to another: any source as a file of ours, and ours as a folder for other programs."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from vitdet.backbones.hgnetv2 import HGNetV2
from vitdet.backbones.resnet import ResNet
from vitdet.backbones.spatial_adapter import SpatialAdapter
from vitdet.backbones.timm import create_timm
from vitdet.core.attention import Attention
from vitdet.detectors.detr import DETR
from vitdet.engine.checkpoint import read_weights, save_weights, write_atomically
from vitdet.errors import UserError, some
from vitdet.structures import ModelMetadata
from vitdet.weights import to_huggingface, to_timm
from vitdet.zoo import adapt, create_model, load_model
from vitdet.zoo.builders import DETECTORS, TIMM
from vitdet.zoo.detectors import family_of
from vitdet.zoo.sources import read_source

State = dict[str, Tensor]
Files = dict[str, dict[str, Any]]

WEIGHTS = "model.safetensors"
_COUNTER = ".num_batches_tracked"  # counts steps, enters no result, and readers leave it out
_OF_TRAINING = ("label_noise", "box_noise", "dropout")


def convert_source(
    source: str | Path, destination: str | Path, *, model: str | None = None, overwrite: bool = False
) -> list[str]:
    """Write the weights of a source in another layout, read them back, and compare every bit.

    Args:
        source, model: as for ``load_model``.
        destination: a name that ends in ``.safetensors``, for a file of ours; else a folder, which gets a detector in
            Hugging Face's layout, as transformers reads it, and a classifier in timm's.
        overwrite: replace what is there; of a folder, the files that are written, and no others.

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
        return _write_ours(source, path, model)
    if path.suffix or path.is_file():
        raise UserError(f"{path} is no name of a folder, and a file of ours ends in .safetensors; pass one of the two")
    return _write_folder(source, path, model)


def _write_ours(source: str | Path, path: Path, model: str | None) -> list[str]:
    """As a file of ours; the model is built, so all of its weights are there and no others."""
    from vitdet import __version__

    if path.is_dir():
        raise UserError(f"{path} is a folder; pass the name of a file, or remove the .safetensors")
    net = load_model(source, model=model)
    metadata: ModelMetadata = net.metadata  # type: ignore[assignment]
    state = {name: value.clone() for name, value in net.state_dict().items()}  # the source may be what is replaced

    def write(temporary: Path) -> None:
        save_weights(temporary, net, replace(metadata, version=metadata.version or __version__))
        _compare(read_weights(temporary)[1], state, path)

    write_atomically(path, write)
    return []


def _write_folder(source: str | Path, path: Path, model: str | None) -> list[str]:
    """As a folder in the layout that the model's kind has elsewhere."""
    metadata, state = read_source(source, model=model)
    if metadata.class_map.ids != tuple(range(len(metadata.class_map))):
        notes = ["category ids are not part of that layout: classes are counted from 0"]
    else:
        notes = []
    if metadata.name in DETECTORS:
        return notes + _write_detector(metadata, state, path)
    _write_classifier(metadata, state, path)
    return notes


def _write_detector(metadata: ModelMetadata, state: State, path: Path) -> list[str]:
    """In Hugging Face's layout."""
    net = _built(metadata)
    state, notes = _used(net, _without_unread(net, adapt(net, state)))
    numbers = numbers_of(net)
    files, tensors = to_huggingface.layout_of(
        family_of(metadata.name), metadata.name, state, numbers, class_names=metadata.class_map.names,
        prepared=metadata.preprocessing.to_dict(),
    )  # fmt: skip

    def check(folder: Path) -> None:
        found, again = read_source(folder)
        _compare(again, state, path)
        _compare_descriptions(found, metadata, path)
        other = numbers_of(_built(found))
        # What readers do not take over, as it only matters in training.
        _refuse([key for key in numbers if key not in _OF_TRAINING and other.get(key) != numbers[key]], path)

    _put(path, files, tensors, check)
    return notes


def _write_classifier(metadata: ModelMetadata, state: State, path: Path) -> None:
    """In timm's layout."""
    name, arguments = metadata.name.removeprefix(TIMM), dict(metadata.arguments)
    count = arguments.pop("num_classes")
    if metadata.name.startswith(TIMM):
        tensors = {key.removeprefix("model."): value for key, value in state.items()}
    else:
        net = _built(metadata)
        state = _without_unread(net, adapt(net, state))
        arguments = to_timm.model_arguments(name, arguments)
        tensors = {}
    try:
        theirs = create_timm(name, device="meta", num_classes=count, **arguments)
        if not tensors:
            tensors = to_timm.tensors_of(state, theirs.state_dict())
        if any(key.endswith("attn.qkv.bias") for key in tensors.keys() - theirs.state_dict().keys()):
            # DINOv3 as published has none; trained on, ours does.
            arguments["qkv_bias"] = True
            theirs = create_timm(name, device="meta", num_classes=count, **arguments)
            tensors = to_timm.tensors_of(state, theirs.state_dict())
    except ValueError as error:
        raise UserError(f"{metadata.name} cannot be written in timm's layout: {error}") from error
    _fits(name, theirs.state_dict(), tensors)
    config = to_timm.config_of(
        name.partition(".")[0], arguments, num_classes=count, features=theirs.num_features,
        class_names=metadata.class_map.names, prepared=metadata.preprocessing.to_dict(),
    )  # fmt: skip

    def check(folder: Path) -> None:
        found, again = read_source(folder)
        _compare(again, state, path)
        _compare_descriptions(found, metadata, path)
        if not metadata.name.startswith(TIMM) and str(_built(found)) != str(_built(metadata)):
            _refuse(["arguments"], path)

    _put(path, {"config.json": config}, tensors, check)


def _fits(name: str, expected: State, tensors: State) -> None:
    """Refuse tensors that are not those of timm's model of this name."""
    different = [
        key
        for key in sorted(expected.keys() | tensors.keys())
        if key not in expected or key not in tensors or expected[key].shape != tensors[key].shape
    ]
    if different:
        raise UserError(
            f"timm's {name} is another model than this one (they differ in {some(different)}); keep the .safetensors "
            "of ours, which holds all"
        )


def _built(metadata: ModelMetadata) -> nn.Module:
    """The model without its weights, on the meta device."""
    arguments = dict(metadata.arguments)
    with torch.device("meta"):
        return create_model(metadata.name, num_classes=arguments.pop("num_classes"), **arguments)


def _without_unread(net: nn.Module, state: State) -> State:
    """The state with zeros for the biases of keys that have none, where other programs may have left some."""
    state = dict(state)
    for name, module in net.named_modules():
        if isinstance(module, Attention) and not module.key_bias and f"{name}.qkv.bias" in state:
            queries, keys, values = state[f"{name}.qkv.bias"].chunk(3)
            state[f"{name}.qkv.bias"] = torch.cat([queries, torch.zeros_like(keys), values])
    return state


def _used(net: nn.Module, state: State) -> tuple[State, list[str]]:
    """The state without what only training uses and no other program has, and sentences that say so."""
    notes = []
    if any(name.startswith("dense_head.") for name in state):
        state = {name: value for name, value in state.items() if not name.startswith("dense_head.")}
        notes.append("the head of the dense supervision, which only training uses, is left out")
    decoder: Any = net.decoder
    layers, used = len(decoder.layers), getattr(decoder, "eval_layers", len(decoder.layers))
    if used < layers:
        pattern = re.compile(r"decoder\.(?:layers|score_heads|box_heads|quality_heads)\.(\d+)\.")
        late = [name for name in state if (match := pattern.match(name)) and int(match[1]) >= used]
        state = {name: value for name, value in state.items() if name not in late}
        notes.append(f"the last {layers - used} of {layers} decoder layers, which only training uses, are left out")
    return state, notes


def numbers_of(net: nn.Module) -> dict[str, Any]:
    """What a detector's weights do not show, see :func:`vitdet.weights.to_huggingface.layout_of`."""
    model: Any = net
    backbone = model.backbone
    kinds = {ResNet: "resnet", HGNetV2: "hgnetv2", SpatialAdapter: "adapter"}
    shared = {
        "backbone": kinds.get(type(backbone), type(backbone).__name__),
        "channels": tuple(backbone.channels),
        "strides": tuple(backbone.strides),
        "out_stages": tuple(getattr(backbone, "out_stages", ())),
    }
    if isinstance(model, DETR):
        block = model.decoder.layers[0]
        return {
            **shared,
            "heads": block.self_attention.heads,
            "hidden": block.feed_forward.contract.in_features,
            "dropout": block.self_attention.dropout,
            "dilated": backbone.strides[-1] == 16,
        }
    cross = model.decoder.layers[0].cross_attention
    position_head = model.decoder.query_pos
    return {
        **shared,
        "heads": cross.heads,
        "points": tuple(cross.points),
        "sampling": cross.sampling,
        "reach": cross.reach,
        "num_queries": model.query_selection.num_queries,
        "denoising_queries": model.denoising.queries if model.denoising else 0,
        "label_noise": model.denoising.label_noise if model.denoising else 0.5,
        "box_noise": model.denoising.box_noise if model.denoising else 1.0,
        "encoder_width": model.encoder.channels[0],
        "summed": getattr(model.encoder, "summed", True),
        "activation": _activation(model.query_selection.proposals.box_head),
        "position_activation": _activation(position_head),
        "refine_positions": getattr(model.decoder, "refine_positions", True),
        "vit": _vit_numbers(backbone.vit) if isinstance(backbone, SpatialAdapter) else None,
    }


def _activation(head: nn.Module) -> str:
    """The name of a perceptron's activation."""
    return type(head.activation).__name__.lower()


def _vit_numbers(vit: Any) -> dict[str, Any]:
    """What the weights of the ViT under a spatial adapter do not show."""
    block = vit.encoder.layers[0]
    hidden = block.feed_forward.contract.in_features
    return {
        "heads": block.self_attention.heads,
        "norm_eps": block.self_attention_residual.norm.eps,
        "gated": block.feed_forward.expand.out_features == 2 * hidden,
        "key_bias": block.self_attention.key_bias,
        "out_layers": tuple(index % len(vit.encoder.layers) for index in vit.out_layers),
    }


def _compare(found: State, expected: State, path: Path) -> None:
    """Refuse what was read back where a bit of it is not as it was written; counters of batch norms aside."""
    found, expected = (
        {name: value for name, value in one.items() if not name.endswith(_COUNTER)} for one in (found, expected)
    )
    names = sorted(expected.keys() | found.keys())
    _refuse(
        [key for key in names if key not in expected or key not in found or not _same(found[key], expected[key])], path
    )


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether both hold the same bits."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    bits, others = (value.contiguous().reshape(-1).view(torch.uint8) for value in (one, other))
    return torch.equal(bits, others)


def _compare_descriptions(found: ModelMetadata, metadata: ModelMetadata, path: Path) -> None:
    """Refuse what was read back where it has other classes, or prepares its images otherwise."""
    differing = [] if found.class_map.names == metadata.class_map.names else ["class names"]
    if found.preprocessing != metadata.preprocessing:
        differing.append("preprocessing")
    _refuse(differing, path)


def _refuse(differing: list[str], path: Path) -> None:
    """Say what differs in what was read back, if anything."""
    if differing:
        raise UserError(
            f"{path} was not written: what was read back differs in {some(differing)}; keep the file that you have, "
            "and report this"
        )


def _put(path: Path, files: Files, tensors: State, check: Callable[[Path], None]) -> None:
    """Write a folder beside its place, check it, and put it there; where one is already, file by file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.mkdir()
    try:
        for name, values in files.items():
            (temporary / name).write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        whole = {name: value.clone(memory_format=torch.contiguous_format) for name, value in tensors.items()}
        # A copy of the mode of a usual file: safetensors makes files that only their owner may read.
        write_atomically(temporary / WEIGHTS, lambda file: save_file(whole, file, metadata={"format": "pt"}))
        check(temporary)
        if path.is_dir() and any(path.iterdir()):
            for file in temporary.iterdir():
                file.replace(path / file.name)
        else:
            temporary.replace(path)  # an empty folder gives way
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
