"""What a model of ours is in another program's layout: detectors in Hugging Face's, classifiers in timm's."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vitdet.backbones.hgnetv2 import HGNetV2
from vitdet.backbones.resnet import ResNet
from vitdet.backbones.spatial_adapter import SpatialAdapter
from vitdet.backbones.timm import create_timm
from vitdet.core.attention import Attention
from vitdet.detectors.detr import DETR
from vitdet.detectors.rtdetr import RTDETR
from vitdet.errors import UserError, some
from vitdet.structures import ModelMetadata
from vitdet.weights import to_huggingface, to_timm
from vitdet.zoo.builders import DETECTORS, MODELS, TIMM, builder_arguments, create_model
from vitdet.zoo.detectors import family_of

State = dict[str, Tensor]

_LATE = re.compile(r"decoder\.(?:layers|score_heads|box_heads|quality_heads)\.(\d+)\.")
_OF_TRAINING = ("label_noise", "box_noise", "dropout")  # what readers do not take over


@dataclass
class Layout:
    """What is to be written.

    Attributes:
        files: contents of the JSON files, by their names. tensors: by theirs.
        state: what must come back, under our names. notes: what the layout cannot hold, a sentence each.
        differing: which numbers of the model are other ones in what was read back.
    """

    files: dict[str, dict[str, Any]]
    tensors: State
    state: State
    differing: Callable[[ModelMetadata], list[str]]
    notes: list[str] = field(default_factory=list)


def layout_of(metadata: ModelMetadata, state: State) -> Layout:
    """A model in the layout that its kind has elsewhere; ``state`` with counters of batch norms.

    Raises:
        UserError: that layout has no such model.
    """
    if metadata.name.startswith(TIMM):
        tensors = {name.removeprefix("model."): value for name, value in state.items()}
        return _of_timm(metadata, state, tensors, metadata.arguments)
    net = built(metadata)
    state = _without_unread(net, state)
    if metadata.name in DETECTORS:
        return _of_detector(metadata, net, state)
    return _of_timm(metadata, state, None, to_timm.model_arguments(metadata.name, metadata.arguments))


def built(metadata: ModelMetadata) -> nn.Module:
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


# ---------------------------------------------------------------------------------------- detectors


def _of_detector(metadata: ModelMetadata, net: nn.Module, state: State) -> Layout:
    """In Hugging Face's layout."""
    numbers = numbers_of(metadata.name, net)
    state, notes = _used(net, state)
    files, tensors = to_huggingface.layout_of(
        family_of(metadata.name), metadata.name, state, numbers, class_names=metadata.class_map.names,
        prepared=metadata.preprocessing.to_dict(),
    )  # fmt: skip

    def differing(found: ModelMetadata) -> list[str]:
        other = numbers_of(found.name, built(found))
        return [key for key in numbers if key not in _OF_TRAINING and other.get(key) != numbers[key]]

    return Layout(files, tensors, state, differing, notes)


def _used(net: Any, state: State) -> tuple[State, list[str]]:
    """The state without what only training uses and no other program has, and sentences that say so."""
    notes = []
    if any(name.startswith("dense_head.") for name in state):
        state = {name: value for name, value in state.items() if not name.startswith("dense_head.")}
        notes.append("the head of the dense supervision, which only training uses, is left out")
    layers = len(net.decoder.layers)
    used = getattr(net.decoder, "eval_layers", layers)
    if used < layers:
        late = {name for name in state if (match := _LATE.match(name)) and int(match[1]) >= used}
        state = {name: value for name, value in state.items() if name not in late}
        notes.append(f"the last {layers - used} of {layers} decoder layers, which only training uses, are left out")
    return state, notes


def numbers_of(name: str, net: Any) -> dict[str, Any]:
    """What a detector's weights do not show, see :func:`vitdet.weights.to_huggingface.layout_of`.

    Raises:
        UserError: the model is none that transformers has.
    """
    if not isinstance(net, RTDETR | DETR):
        raise UserError(f"transformers has no counterpart of {name}; keep the .safetensors of ours")
    backbone: Any = net.backbone
    kinds = {ResNet: "resnet", HGNetV2: "hgnetv2", SpatialAdapter: "adapter"}
    numbers = {
        "backbone": kinds.get(type(backbone), type(backbone).__name__),
        "channels": tuple(backbone.channels),
        "strides": tuple(backbone.strides),
        "out_stages": tuple(getattr(backbone, "out_stages", ())),
    }
    return numbers | (_of_detr(net) if isinstance(net, DETR) else _of_rtdetr(net))


def _of_detr(net: Any) -> dict[str, Any]:
    block = net.decoder.layers[0]
    return {
        "heads": block.self_attention.heads,
        "hidden": block.feed_forward.contract.in_features,
        "dropout": block.self_attention.dropout,
        "dilated": net.backbone.strides[-1] == 16,
    }


def _of_rtdetr(net: Any) -> dict[str, Any]:
    cross, denoising, decoder = net.decoder.layers[0].cross_attention, net.denoising, net.decoder
    return {
        "heads": cross.heads,
        "points": tuple(cross.points),
        "sampling": cross.sampling,
        "reach": cross.reach,
        "num_queries": net.query_selection.num_queries,
        "denoising_queries": denoising.queries if denoising else 0,
        "label_noise": denoising.label_noise if denoising else 0.5,
        "box_noise": denoising.box_noise if denoising else 1.0,
        "encoder_width": net.encoder.channels[0],
        "summed": getattr(net.encoder, "summed", True),
        "activation": _activation(net.query_selection.proposals.box_head),
        "position_activation": _activation(decoder.query_pos),
        "refine_positions": getattr(decoder, "refine_positions", True),
        "vit": _of_vit(net.backbone.vit) if isinstance(net.backbone, SpatialAdapter) else None,
    }


def _activation(head: Any) -> str:
    """The name of a perceptron's activation."""
    return type(head.activation).__name__.lower()


def _of_vit(vit: Any) -> dict[str, Any]:
    """What the weights of the ViT under a spatial adapter do not show."""
    block = vit.encoder.layers[0]
    return {
        "heads": block.self_attention.heads,
        "norm_eps": block.self_attention_residual.norm.eps,
        "gated": block.feed_forward.expand.out_features == 2 * block.feed_forward.contract.in_features,
        "key_bias": block.self_attention.key_bias,
        "out_layers": tuple(index % len(vit.encoder.layers) for index in vit.out_layers),
    }


# -------------------------------------------------------------------------------------- classifiers


def _of_timm(metadata: ModelMetadata, state: State, tensors: State | None, arguments: Mapping[str, Any]) -> Layout:
    """In timm's layout; ``tensors`` under its names, where they are timm's already. ``arguments``: timm's."""
    name, count = metadata.name.removeprefix(TIMM), metadata.arguments["num_classes"]
    arguments = {key: value for key, value in arguments.items() if key != "num_classes"}
    theirs = _create(name, count, arguments)
    if tensors is None:
        arguments = _explicit(metadata, theirs) | arguments
        theirs = _create(name, count, arguments)
        tensors = to_timm.tensors_of(state, theirs.state_dict())
        if any(key.endswith("attn.qkv.bias") for key in tensors.keys() - theirs.state_dict().keys()):
            arguments["qkv_bias"] = True  # published without, as DINOv3, and learnt since
            theirs = _create(name, count, arguments)
            tensors = to_timm.tensors_of(state, theirs.state_dict())
    _check_fit(name, theirs.state_dict(), tensors)
    config = to_timm.config_of(
        name.partition(".")[0], arguments, num_classes=count, features=theirs.num_features,
        class_names=metadata.class_map.names, prepared=metadata.preprocessing.to_dict(),
        pretrained=theirs.pretrained_cfg,
    )  # fmt: skip

    def differing(found: ModelMetadata) -> list[str]:
        if found.name.partition(".")[0] != metadata.name.partition(".")[0]:
            return ["name"]
        mine, other = (_calculating(one) for one in (metadata, found))
        return [key for key in sorted(mine.keys() | other.keys()) if mine.get(key) != other.get(key)]

    return Layout({"config.json": config}, tensors, state, differing)


def _create(name: str, count: int, arguments: Mapping[str, Any]) -> Any:
    try:
        return create_timm(name, device="meta", num_classes=count, **arguments)
    except ValueError as error:
        raise UserError(f"{name} cannot be written in timm's layout: {error}; keep the .safetensors of ours") from error


def _explicit(metadata: ModelMetadata, theirs: Any) -> dict[str, Any]:
    """What timm would else take from elsewhere: the images' size from their preparation, the pooling from the class."""
    has = {**builder_arguments(MODELS[metadata.name]), **metadata.arguments}
    said = {"image_size": has["image_size"]} if theirs.pretrained_cfg.get("fixed_input_size") else {}
    named = {**said, "pooling": has["pooling"]}
    explicit = to_timm.model_arguments(metadata.name, named)
    if explicit["global_pool"] == theirs.global_pool:
        del explicit["global_pool"]
    return explicit


def _calculating(metadata: ModelMetadata) -> dict[str, Any]:
    """All arguments of a model that it calculates with, with their defaults, comparable."""
    has = dict(metadata.arguments)
    if not metadata.name.startswith(TIMM):
        has = {**builder_arguments(MODELS[metadata.name]), **has}
        has = {key: value for key, value in has.items() if key not in to_timm.TRAINING}
    return {key: tuple(value) if isinstance(value, list) else value for key, value in has.items()}


def _check_fit(name: str, expected: State, tensors: State) -> None:
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
