"""RT-DETR and RT-DETRv2 in Hugging Face's layout, in the names that files have: ``out_proj``, ``fc1``, …"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vitdet.weights.rules import Rules, convert_state_dict
from vitdet.weights.to_huggingface import backbones
from vitdet.weights.to_huggingface.parts import (
    BLOCKS,
    DECODER,
    FUSION,
    State,
    common_config,
    count,
    factor,
    point_scales,
    require,
    split,
    with_heads,
)

# All but the backbone and the fusion blocks; D-FINE has the same.
HEAD: Rules = [
    (r"^encoder\.project\.(\d+)\.conv\.", r"encoder_input_proj.\1.0."),
    (r"^encoder\.project\.(\d+)\.norm\.", r"encoder_input_proj.\1.1."),
    (r"^memory_project\.(\d+)\.conv\.", r"decoder_input_proj.\1.0."),
    (r"^memory_project\.(\d+)\.norm\.", r"decoder_input_proj.\1.1."),
    (r"^encoder\.attend\.", "encoder.encoder.0.layers."),
    *BLOCKS,
    *DECODER,
    (r"\.cross_attention_residual\.norm\.", ".encoder_attn_layer_norm."),
    (r"\.self_attention\.out\.", ".self_attn.out_proj."),
    (r"\.feed_forward\.expand\.", ".fc1."),
    (r"\.feed_forward\.contract\.", ".fc2."),
]
RULES: Rules = [
    *FUSION,
    (r"^encoder\.downsample\.", "encoder.downsample_convs."),
    (r"^(encoder\.(?:fpn|pan)_blocks\.\d+)\.enter\.", r"\1.conv1."),
    (r"^(encoder\.(?:fpn|pan)_blocks\.\d+)\.shortcut\.", r"\1.conv2."),
    (r"^(encoder\.(?:fpn|pan)_blocks\.\d+)\.leave\.", r"\1.conv3."),
    *HEAD,
    (r"^", "model."),
]


def kind_of(name: str, numbers: Mapping[str, Any]) -> str:
    """``"rt_detr_v2"`` for that version's models, and for any that samples as only they can."""
    special = numbers["sampling"] != "bilinear" or numbers["reach"] != 0.5
    return "rt_detr_v2" if special or name.startswith("rtdetrv2") else "rt_detr"


def layout(name: str, state: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> tuple[dict[str, Any], State]:
    """The ``config.json``, without its classes, and the tensors; see :mod:`vitdet.weights.to_huggingface`."""
    kind = kind_of(name, numbers)
    points = numbers["points"]
    blocks = count(state, r"encoder\.top_down\.0\.blocks\.(\d+)\.")
    require("encoder.top_down.0.enter.conv.weight" in state and blocks == 3, kind, "fusion but of three RepVGG blocks")
    require(not numbers["summed"], kind, "fusion by addition")
    require(len(set(points)) == 1, kind, f"levels of different numbers of points ({list(points)})")
    require("memory_project.0.conv.weight" in state, kind, "decoder without projected memory")
    require("query_selection.proposals.project.0.weight" in state, kind, "query selection of tokens as they are")
    require(numbers["activation"] == "relu", kind, f"box head with {numbers['activation']}")
    rules = [*backbones.rules_of(numbers["backbone"], kind), *RULES]
    inner = state["encoder.top_down.0.enter.conv.weight"].shape[0]
    config = {
        **common_config(kind, "RTDetrV2ForObjectDetection" if kind == "rt_detr_v2" else "RTDetrForObjectDetection",
                        state, numbers),
        "backbone_config": backbones.config_of(state, numbers, kind),
        "hidden_expansion": factor(inner, numbers["encoder_width"]),
        "decoder_n_points": points[0],
    }  # fmt: skip
    theirs = convert_state_dict(split(state, r"\.self_attention\.qkv\.(weight|bias)$", 3), rules)
    if kind == "rt_detr":
        return config, theirs
    config |= {
        "decoder_n_levels": len(points),
        "decoder_method": {"bilinear": "default", "discrete": "discrete"}[numbers["sampling"]],
        "decoder_offset_scale": numbers["reach"],
        "tie_word_embeddings": False,
    }
    scales = point_scales("n_points_scale", points, config["decoder_layers"])
    return config, {**with_heads(theirs), **scales}
