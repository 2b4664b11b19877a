"""D-FINE in Hugging Face's layout, in the names that files have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vitdet.weights.rules import Rules, convert_state_dict
from vitdet.weights.to_huggingface import backbones, rtdetr
from vitdet.weights.to_huggingface.parts import (
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

_BLOCK = r"^(encoder\.(?:fpn|pan)_blocks\.\d+)\."
RULES: Rules = [
    *FUSION,
    (r"^encoder\.downsample\.(\d+)\.0\.", r"encoder.downsample_convs.\1.conv1."),
    (r"^encoder\.downsample\.(\d+)\.1\.", r"encoder.downsample_convs.\1.conv2."),
    # theirs counts the convolutions of a fusion block in the order in which they run
    (_BLOCK + r"chains\.0\.1\.", r"\1.conv2."),
    (_BLOCK + r"chains\.1\.1\.", r"\1.conv3."),
    (_BLOCK + r"chains\.0\.0\.", r"\1.csp_rep1."),
    (_BLOCK + r"chains\.1\.0\.", r"\1.csp_rep2."),
    (_BLOCK + r"enter\.", r"\1.conv1."),
    (_BLOCK + r"leave\.", r"\1.conv4."),
    (_BLOCK + r"(csp_rep\d)\.enter\.", r"\1.\2.conv1."),
    (_BLOCK + r"(csp_rep\d)\.shortcut\.", r"\1.\2.conv2."),
    (r"\.cross_attention_residual\.", ".gateway."),
    *rtdetr.HEAD,
    (r"^", "model."),
]


def layout(name: str, state: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> tuple[dict[str, Any], State]:
    """The ``config.json``, without its classes, and the tensors; see :mod:`vitdet.weights.to_huggingface`."""
    kind, points = "d_fine", numbers["points"]
    smooth = "encoder.top_down.0.chains.0.1.conv.weight" in state
    require(smooth and not numbers["summed"], kind, "fusion but the published one")
    require("decoder.layers.0.cross_attention_residual.gate.weight" in state, kind, "decoder without gates")
    require("query_selection.proposals.project.0.weight" in state, kind, "query selection of tokens as they are")
    require(numbers["activation"] == "relu", kind, f"heads with {numbers['activation']}")
    equal = numbers["encoder_width"] == state["query_selection.proposals.score_head.weight"].shape[1]
    projected = "memory_project.0.conv.weight" in state
    require(projected != equal, kind, "projection of a memory that has the decoder's width")
    rules = [*backbones.rules_of(numbers["backbone"], kind), *RULES]
    config = {
        **common_config(kind, "DFineForObjectDetection", state, numbers),
        "backbone_config": backbones.config_of(state, numbers, kind),
        **distribution_config(state, numbers),
    }
    theirs = convert_state_dict(split(state, r"\.self_attention\.qkv\.(weight|bias)$", 3), rules)
    scales = point_scales("num_points_scale", points, config["decoder_layers"])
    return config, {**with_heads(theirs), **scales}


def distribution_config(state: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> dict[str, Any]:
    """What the configurations of D-FINE and DEIMv2 share beyond RT-DETR's."""
    chain = "encoder.top_down.0." if "encoder.top_down.0.enter.conv.weight" in state else "encoder.top_down."
    inner = state[f"{chain}chains.0.0.enter.conv.weight"].shape[0]
    blocks = count(state, chain.replace(".", r"\.") + r"chains\.0\.0\.blocks\.(\d+)\.")
    return {
        "hidden_expansion": factor(inner, numbers["encoder_width"], halves=2),
        "depth_mult": blocks / 3,
        "decoder_n_points": list(numbers["points"]),
        "decoder_method": {"bilinear": "default", "discrete": "discrete"}[numbers["sampling"]],
        "decoder_offset_scale": numbers["reach"],
        "max_num_bins": state["decoder.box_heads.0.layers.2.weight"].shape[0] // 4 - 1,
        "reg_scale": float(state["decoder.reg_scale"]),
        "up": float(state["decoder.up"]),
        "lqe_hidden_dim": state["decoder.quality_heads.0.head.layers.0.weight"].shape[0],
        "lqe_layers": count(state, r"decoder\.quality_heads\.0\.head\.layers\.(\d+)\."),
        "top_prob_values": state["decoder.quality_heads.0.head.layers.0.weight"].shape[1] // 4 - 1,
        "tie_word_embeddings": False,
    }
