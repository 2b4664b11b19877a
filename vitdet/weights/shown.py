"""What converted weights show about their model by their names and shapes: all numbers but a few.

Not shown are a ViT's heads, the norms' epsilon, the activation, and whether class token or average is classified.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vitdet.errors import UserError
from vitdet.weights.rules import count


def classifier_arguments(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """The numbers that converted weights show by their names and shapes, as arguments of a classifier."""
    vit = "backbone.patch_embedding.project.weight" in state
    arguments = _vit(state) if vit else _swin(state)
    features = arguments["width"] if vit else arguments["width"] * 2 ** (len(arguments["depths"]) - 1)
    if "pool.query" in state:
        arguments["pooling"] = "attention"
    head = state.get("head.weight")
    arguments["representation"] = state["representation.weight"].shape[0] if "representation.weight" in state else None
    arguments["norm_pooled"] = "norm.weight" in state
    if head is not None and head.shape[1] == 2 * features and arguments["representation"] is None:
        arguments["pooling"] = "token_and_average"
    return {**arguments, "num_classes": 0 if head is None else head.shape[0]}


def _vit(state: Mapping[str, Tensor]) -> dict[str, Any]:
    width, inputs = state["backbone.patch_embedding.project.weight"].shape
    block = "backbone.encoder.layers.0."
    patch = math.isqrt(inputs // 3)
    arguments: dict[str, Any] = {
        "width": width,
        "layers": count(state, r"backbone\.encoder\.layers\.(\d+)\."),
        "hidden": _shape(state, block + "feed_forward.contract.weight")[1],
        "patch": patch,
        "class_token": "backbone.class_token" in state,
        "distillation_token": "backbone.distillation_token" in state,
        "registers": state["backbone.registers"].shape[1] if "backbone.registers" in state else 0,
        "bias": block + "self_attention.out.bias" in state,
        "final_norm": "backbone.encoder.norm.weight" in state,
    }
    scaled = block + "self_attention_residual.scale.factor" in state
    arguments["layer_scale"] = 1e-5 if scaled else None  # the value they started at is not shown, nor needed
    if _shape(state, block + "feed_forward.expand.weight")[0] == 2 * arguments["hidden"]:
        arguments["activation"] = "swiglu"
    if (table := state.get("backbone.positions.table")) is not None:
        places = table.flatten(1, -2).shape[1]
        side = math.isqrt(places)
        arguments |= {"positions": "learned"}
        if side * side == places:  # another grid is for a description to tell
            arguments |= {"image_size": (side * patch, side * patch)}
    return arguments


def _swin(state: Mapping[str, Tensor]) -> dict[str, Any]:
    stages = count(state, r"backbone\.stages\.(\d+)\.")
    first = "backbone.stages.0.layers.0.self_attention."
    arguments: dict[str, Any] = {
        "version": 1 if first + "position_bias.table" in state else 2,
        "width": _shape(state, "backbone.embed.project.weight")[0],
        "depths": tuple(count(state, rf"backbone\.stages\.{i}\.layers\.(\d+)\.") for i in range(stages)),
    }
    if arguments["version"] == 1:
        arguments["window"] = (math.isqrt(_shape(state, first + "position_bias.table")[0]) + 1) // 2
        arguments["heads"] = tuple(
            _shape(state, f"backbone.stages.{i}.layers.0.self_attention.position_bias.table")[1] for i in range(stages)
        )
    return arguments


def _shape(state: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
    if name not in state:
        raise UserError(f"the weights lack {name!r}; fetch the file again")
    return tuple(state[name].shape)


# Blocks of a ResNet's or HGNetV2's stages, and convolutions or layers in each block -> the detector on it.
_RTDETR: dict[tuple[tuple[int, ...], int], str] = {
    ((2, 2, 2, 2), 2): "rtdetr_r18", ((3, 4, 6, 3), 2): "rtdetr_r34", ((3, 4, 6, 3), 3): "rtdetr_r50",
    ((3, 4, 23, 3), 3): "rtdetr_r101", ((1, 1, 3, 1), 6): "rtdetr_hgnetv2_l", ((1, 2, 5, 2), 6): "rtdetr_hgnetv2_x",
}  # fmt: skip


_DETR = {(3, 4, 6, 3): "detr_r50", (3, 4, 23, 3): "detr_r101"}


def detr_arguments(state: Mapping[str, Tensor]) -> tuple[str, dict[str, Any]]:
    """The name of the DETR whose converted weights these are, were its last stage not dilated, and its arguments.

    Raises:
        UserError: its backbone is none of the published ones.
    """
    depths = tuple(count(state, rf"backbone\.stages\.{i}\.(\d+)\.") for i in range(4))
    if depths not in _DETR:
        known = ", ".join(_DETR.values())
        raise UserError(f"there is no DETR on a backbone of {list(depths)} blocks here; known: {known}")
    rows, width = _shape(state, "score_head.weight")
    return _DETR[depths], {
        "num_classes": rows - 1,
        "width": width,
        "hidden": _shape(state, "decoder.layers.0.feed_forward.expand.weight")[0],
        "encoder_layers": count(state, r"encoder\.layers\.(\d+)\."),
        "decoder_layers": count(state, r"decoder\.layers\.(\d+)\."),
        "num_queries": _shape(state, "query_pos")[0],
    }


def rtdetr_arguments(state: Mapping[str, Tensor]) -> tuple[str, dict[str, Any]]:
    """The name of the RT-DETR whose converted weights these are, and its arguments.

    Raises:
        UserError: its backbone is none of the published ones.
    """
    depths = tuple(count(state, rf"backbone\.stages\.{i}\.(?:blocks\.)?(\d+)\.") for i in range(4))
    parts = count(state, r"backbone\.stages\.0\.(?:0\.convs|blocks\.0\.layers)\.(\d+)\.")
    name = _RTDETR.get((depths, parts))
    if name is None:
        known = ", ".join(_RTDETR.values())
        raise UserError(f"there is no RT-DETR on a backbone of {list(depths)} blocks here; known: {known}")
    width = _shape(state, "encoder.project.0.conv.weight")[0]
    classes, _ = _shape(state, "decoder.score_heads.0.weight")
    return name, {
        "num_classes": classes,
        "encoder_width": width,
        "encoder_hidden": _shape(state, "encoder.attend.0.feed_forward.expand.weight")[0],
        "encoder_expansion": _shape(state, "encoder.top_down.0.enter.conv.weight")[0] / width,
        "encoder_blocks": count(state, r"encoder\.top_down\.0\.blocks\.(\d+)\."),
        "width": _shape(state, "memory_project.0.conv.weight")[0],
        "decoder_hidden": _shape(state, "decoder.layers.0.feed_forward.expand.weight")[0],
        "decoder_layers": count(state, r"decoder\.layers\.(\d+)\."),
        **_points(state),
    }


def _points(state: Mapping[str, Tensor]) -> dict[str, int]:
    """The number of points a level where it is not 4: RT-DETRv2 was published with fewer (its sp1, sp2, sp3)."""
    levels = count(state, r"encoder\.project\.(\d+)\.")
    weights = _shape(state, "decoder.layers.0.cross_attention.weights.weight")[0]
    points, rest = divmod(weights, 8 * levels)  # eight heads, as all published ones have
    return {"points": points} if points != 4 and not rest else {}


# Levels, channels of the first map, the encoder's width -> the D-FINE with these.
_DFINE: dict[tuple[int, int, int], str] = {
    (2, 512, 128): "dfine_n", (3, 256, 256): "dfine_s", (3, 384, 256): "dfine_m", (3, 512, 256): "dfine_l",
    (3, 512, 384): "dfine_x",
}  # fmt: skip


def dfine_arguments(state: Mapping[str, Tensor]) -> tuple[str, dict[str, Any]]:
    """The name of the D-FINE whose converted weights these are, and its arguments.

    Raises:
        UserError: none of the published sizes.
    """
    width, channels = _shape(state, "encoder.project.0.conv.weight")[:2]
    levels = count(state, r"encoder\.project\.(\d+)\.")
    name = _DFINE.get((levels, channels, width))
    if name is None:
        raise UserError(f"there is no D-FINE of {levels} levels, {channels} channels and width {width} here")
    outputs = _shape(state, "decoder.box_heads.0.layers.2.weight")[0]
    arguments = {
        "num_classes": _shape(state, "decoder.score_heads.0.weight")[0],
        "encoder_width": width,
        "encoder_hidden": _shape(state, "encoder.attend.0.feed_forward.expand.weight")[0],
        "encoder_expansion": 2 * _shape(state, "encoder.top_down.0.chains.0.0.enter.conv.weight")[0] / width,
        "encoder_blocks": count(state, r"encoder\.top_down\.0\.chains\.0\.0\.blocks\.(\d+)\."),
        "width": _shape(state, "query_selection.proposals.score_head.weight")[1],
        "decoder_hidden": _shape(state, "decoder.layers.0.feed_forward.expand.weight")[0],
        "decoder_layers": count(state, r"decoder\.layers\.(\d+)\."),
        "bins": outputs // 4 - 1,
    }
    for key in ("up", "reg_scale"):
        arguments[key] = float(state[f"decoder.{key}"])
    return name, arguments
