"""DEIMv2 in transformers' layout, as far as its port goes, which computes three things otherwise than the authors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vitdet.errors import UserError
from vitdet.weights.rules import Rules, convert_state_dict
from vitdet.weights.to_huggingface import backbones
from vitdet.weights.to_huggingface.dfine import distribution_config
from vitdet.weights.to_huggingface.parts import (
    BLOCKS,
    DECODER,
    FUSION,
    State,
    common_config,
    point_scales,
    require,
    split,
    with_heads,
)

_KIND = "deimv2"
_BLOCK = r"^(encoder\.(?:fpn|pan)_blocks?(?:\.\d+)?)\."
_ADAPTER: Rules = [
    (r"^backbone\.details\.stem\.", "conv_encoder.spatial_tuning_adapter.stem_conv."),
    *((rf"^backbone\.details\.convs\.{n}\.", f"conv_encoder.spatial_tuning_adapter.conv{n + 2}.") for n in range(3)),
    (r"^backbone\.fuse\.", "conv_encoder.fusion_proj."),
    (r"^encoder\.project\.", "conv_encoder.encoder_input_proj."),
]
_LITE: Rules = [
    (r"^encoder\.project\.", "encoder.input_proj."),
    (r"^encoder\.coarsen\.", "encoder.down_conv1."),
    (r"^encoder\.downsample\.", "encoder.down_conv2."),
    (r"^encoder\.globalise\.", "encoder.bi_fusion_conv."),
    (r"^encoder\.top_down\.", "encoder.fpn_block."),
    (r"^encoder\.bottom_up\.", "encoder.pan_block."),
]
_GATED: Rules = [(r"\.cross_attention_residual\.", ".gateway.")]
RULES: Rules = [
    *FUSION,
    (r"^encoder\.downsample\.(\d+)\.0\.", r"encoder.downsample_convs.\1.conv1."),
    (r"^encoder\.downsample\.(\d+)\.1\.", r"encoder.downsample_convs.\1.conv2."),
    (_BLOCK + r"chains\.0\.1\.", r"\1.csp_rep1.conv2."),
    (_BLOCK + r"chains\.1\.1\.", r"\1.csp_rep2.conv2."),
    (_BLOCK + r"chains\.0\.0\.", r"\1.csp_rep1."),
    (_BLOCK + r"chains\.1\.0\.", r"\1.csp_rep2."),
    (_BLOCK + r"(csp_rep\d)\.joint\.", r"\1.\2.conv1."),
    (_BLOCK + r"enter\.", r"\1.conv1."),
    (_BLOCK + r"leave\.", r"\1.conv2."),
    (r"^encoder\.attend\.(\d+)\.feed_forward\.expand\.", r"encoder.attend.\1.mlp.layers.0."),
    (r"^encoder\.attend\.(\d+)\.feed_forward\.contract\.", r"encoder.attend.\1.mlp.layers.1."),
    (r"^encoder\.attend\.", "encoder.aifi.0.layers."),
    (r"^memory_project\.", "decoder_input_proj."),
    *BLOCKS,
    *DECODER,
    (r"\.cross_attention_residual\.norm\.", ".encoder_attn_layer_norm."),
    (r"\.self_attention\.out\.", ".self_attn.o_proj."),
    (r"\.feed_forward\.expand\.(\w+)\[0\]$", r".mlp.gate_proj.\1"),
    (r"\.feed_forward\.expand\.(\w+)\[1\]$", r".mlp.up_proj.\1"),
    (r"\.feed_forward\.contract\.", ".mlp.down_proj."),
    (r"^backbone\.model\.", "conv_encoder.model."),
    (r"^", "model."),
]


def layout(name: str, state: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> tuple[dict[str, Any], State]:
    """The ``config.json``, without its classes, and the tensors; see :mod:`vitdet.weights.to_huggingface`."""
    _check(name, state, numbers)
    lite = "encoder.coarsen.conv.weight" in state
    gated = "decoder.layers.0.cross_attention_residual.gate.weight" in state
    inner, outer = _without_vit(state)
    rules: Rules = [] if inner else [*backbones.rules_of(numbers["backbone"], _KIND)]
    rules = [*rules, *(_LITE if lite else _ADAPTER), *(_GATED if gated else []), *RULES]
    config = {
        **common_config(_KIND, "Deimv2ForObjectDetection", state, numbers),
        "backbone_config": backbones.dinov3_config(inner, numbers["vit"])
        if inner
        else backbones.config_of(state, numbers, _KIND),
        **distribution_config(state, numbers),
        "decoder_activation_function": numbers["position_activation"],
        "encoder_type": "lite" if lite else "hybrid",
        "encoder_has_trailing_conv": any(".chains.0.1." in name for name in state),
        "use_gateway": gated,
        "share_bbox_head": "decoder.box_heads.1.layers.0.weight" not in state,
    }
    if lite:  # one map of the backbone, two of the encoder
        config |= {"decoder_in_channels": [numbers["encoder_width"]] * 2, "num_feature_levels": 2}
    if inner:
        config["spatial_tuning_adapter_inplanes"] = len(state["backbone.details.stem.conv.weight"])
    parts = split(outer, r"\.self_attention\.qkv\.(weight|bias)$", 3)
    parts = split(parts, r"^decoder\.layers\.\d+\.feed_forward\.expand\.", 2)
    theirs = convert_state_dict(_for_every_layer(_join(parts), config["decoder_layers"]), rules)
    if inner:
        vit = backbones.dinov3(inner, gated=numbers["vit"]["gated"], key_bias=numbers["vit"]["key_bias"])
        theirs |= {f"model.conv_encoder.backbone.{key}": value for key, value in vit.items()}
    return config, {
        **with_heads(theirs),
        **point_scales("num_points_scale", numbers["points"], config["decoder_layers"]),
    }


def _check(name: str, state: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> None:
    """Refuse what transformers' port computes otherwise."""
    port = (
        "query_selection.proposals.project.0.weight" in state,
        numbers["refine_positions"],
        numbers["activation"] == "relu",
    )
    if not all(port):
        raise UserError(
            f"transformers' deimv2 computes other results than {name} as its authors publish it, and cannot hold it; "
            "keep the .safetensors of ours, or train one with project_tokens=true refine_positions=true activation=relu"
        )
    require(numbers["sampling"] == "bilinear", _KIND, "discrete sampling that we read back")
    if numbers["vit"] is not None:
        scaled = "backbone.vit.encoder.layers.0.self_attention_residual.scale.factor" in state
        require("backbone.vit.encoder.norm.weight" in state and scaled, _KIND, "ViT without final norm and layer scale")
    else:
        projected = all(f"encoder.project.{n}.conv.weight" in state for n in range(len(numbers["strides"])))
        require(projected, _KIND, "encoder that takes maps as they are")


def _without_vit(state: Mapping[str, Tensor]) -> tuple[State, State]:
    """The ViT's own weights by themselves, and the others."""
    prefix = "backbone.vit."
    inner = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    return inner, {name: value for name, value in state.items() if not name.startswith(prefix)}


def _join(state: Mapping[str, Tensor]) -> State:
    """The two convolutions into each fusion block as one: shortcut, then chain."""
    joined = {}
    for name, tensor in state.items():
        if ".chains." in name and ".shortcut." in name:
            other = state[name.replace(".shortcut.", ".enter.")]
            # Both counters of batch norms count the same steps.
            joined[name.replace(".shortcut.", ".joint.")] = torch.cat([tensor, other]) if tensor.ndim else tensor
        elif not (".chains." in name and ".enter." in name):
            joined[name] = tensor
    return joined


def _for_every_layer(state: State, layers: int) -> State:
    """A box head for each layer, where all share one."""
    heads = {name: value for name, value in state.items() if name.startswith("decoder.box_heads.0.")}
    copies = {name.replace(".0.", f".{index}.", 1): value for index in range(layers) for name, value in heads.items()}
    return {**copies, **state}
