"""Backbones in Hugging Face's layout: rules for the names below ``backbone.``, and their own configurations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vitdet.weights.rules import Rules, convert_state_dict
from vitdet.weights.to_huggingface.parts import State, count, require, split

# ResNet-vd, below ``backbone.model.``
RESNET_VD: Rules = [
    (r"^backbone\.stem\.", "backbone.model.embedder.embedder."),
    (r"^backbone\.stages\.(\d+)\.(\d+)\.convs\.", r"backbone.model.encoder.stages.\1.layers.\2.layer."),
    (r"^backbone\.stages\.(\d+)\.(\d+)\.", r"backbone.model.encoder.stages.\1.layers.\2."),
    (r"^(backbone\..*)\.conv\.", r"\1.convolution."),
    (r"^(backbone\..*)\.norm\.", r"\1.normalization."),
]
HGNETV2: Rules = [
    (r"^backbone\.stem\.enter\.", "backbone.model.embedder.stem1."),
    (r"^backbone\.stem\.narrow\.", "backbone.model.embedder.stem2a."),
    (r"^backbone\.stem\.widen\.", "backbone.model.embedder.stem2b."),
    (r"^backbone\.stem\.merge\.", "backbone.model.embedder.stem3."),
    (r"^backbone\.stem\.leave\.", "backbone.model.embedder.stem4."),
    (r"^backbone\.stages\.", "backbone.model.encoder.stages."),
    (r"^(backbone\..*)\.aggregate\.", r"\1.aggregation."),
    (r"^(backbone\..*\.layers\.\d+)\.0\.", r"\1.conv1."),  # light layers
    (r"^(backbone\..*\.layers\.\d+)\.1\.", r"\1.conv2."),
    (r"^(backbone\..*)\.affine\.", r"\1.lab."),
    (r"^(backbone\..*)\.conv\.", r"\1.convolution."),
    (r"^(backbone\..*)\.norm\.", r"\1.normalization."),
]
# A DINOv3 ViT by itself, after `split`.
_DINOV3: Rules = [
    (r"^patch_embedding\.project\.", "embeddings.patch_embeddings."),
    (r"^class_token$", "embeddings.cls_token"),
    (r"^registers$", "embeddings.register_tokens"),
    (r"^encoder\.norm\.", "norm."),
    (r"^encoder\.layers\.", "layer."),
    *((rf"\.self_attention\.qkv\.(weight|bias)\[{n}\]$", rf".attention.{x}_proj.\1") for n, x in enumerate("qkv")),
    (r"\.self_attention\.out\.", ".attention.o_proj."),
    (r"\.self_attention_residual\.norm\.", ".norm1."),
    (r"\.feed_forward_residual\.norm\.", ".norm2."),
    (r"\.self_attention_residual\.scale\.factor$", ".layer_scale1.lambda1"),
    (r"\.feed_forward_residual\.scale\.factor$", ".layer_scale2.lambda1"),
    (r"\.feed_forward\.expand\.(\w+)\[0\]$", r".mlp.gate_proj.\1"),
    (r"\.feed_forward\.expand\.(\w+)\[1\]$", r".mlp.up_proj.\1"),
    (r"\.feed_forward\.expand\.", ".mlp.up_proj."),
    (r"\.feed_forward\.contract\.", ".mlp.down_proj."),
]


def rules_of(kind: str, family: str) -> Rules:
    """The rules for a convolutional backbone of this kind, ``"resnet"`` or ``"hgnetv2"``, in a model of a family."""
    known = {"resnet": RESNET_VD, "hgnetv2": HGNETV2}
    require(kind in known, family, f"backbone of the kind {kind!r}")
    return known[kind]


def config_of(state: Mapping[str, Tensor], numbers: Mapping[str, Any], family: str) -> dict[str, Any]:
    """The ``backbone_config`` of a convolutional backbone.

    Args:
        state: the detector's weights under our names. numbers: of the detector. family: the ``model_type``.
    """
    config = resnet_vd_config(state, family) if numbers["backbone"] == "resnet" else hgnetv2_config(state)
    return {**config, "out_features": [f"stage{index + 1}" for index in numbers["out_stages"]]}


def resnet_vd_config(state: Mapping[str, Tensor], family: str) -> dict[str, Any]:
    """Of a ResNet-vd with the published stem; theirs has no other."""
    stages = count(state, r"backbone\.stages\.(\d+)\.")
    depths = [count(state, rf"backbone\.stages\.{index}\.(\d+)\.") for index in range(stages)]
    convs = count(state, r"backbone\.stages\.0\.0\.convs\.(\d+)\.")
    stem = [len(state.get(f"backbone.stem.{index}.conv.weight", ())) for index in range(4)]
    require(
        stem[0] == stem[1] == stem[2] // 2 and not stem[3], family, "ResNet whose stem is not of three convolutions"
    )
    require(
        all(f"backbone.stages.{index}.0.shortcut.1.conv.weight" in state for index in range(1, stages)),
        family, "ResNet without pooled shortcuts",
    )  # fmt: skip
    return {
        "model_type": "rt_detr_resnet",
        "embedding_size": stem[2],
        "hidden_sizes": [state[f"backbone.stages.{i}.0.convs.{convs - 1}.conv.weight"].shape[0] for i in range(stages)],
        "depths": depths,
        "layer_type": "bottleneck" if convs == 3 else "basic",
    }


def hgnetv2_config(state: Mapping[str, Tensor]) -> dict[str, Any]:
    """Of a PP-HGNetV2 of any size."""
    stages = range(count(state, r"backbone\.stages\.(\d+)\."))
    firsts = [f"backbone.stages.{index}.blocks.0." for index in stages]
    light = [first + "layers.0.0.conv.weight" in state for first in firsts]
    # Of a light layer's two convolutions the first sees the input, the second has the kernel.
    first_convs = [
        f"{first}layers.0.{'0.' if lit else ''}conv.weight" for first, lit in zip(firsts, light, strict=True)
    ]
    last_convs = [f"{first}layers.0.{'1.' if lit else ''}conv.weight" for first, lit in zip(firsts, light, strict=True)]
    layers = [state[name] for name in last_convs]
    outputs = [state[first + "aggregate.1.conv.weight"].shape[0] for first in firsts]
    return {
        "model_type": "hgnet_v2",
        "stem_channels": [3, *(len(state[f"backbone.stem.{part}.conv.weight"]) for part in ("enter", "leave"))],
        "stage_in_channels": [state[name].shape[1] for name in first_convs],
        "stage_mid_channels": [layer.shape[0] for layer in layers],
        "stage_out_channels": outputs,
        "stage_num_blocks": [count(state, rf"backbone\.stages\.{index}\.blocks\.(\d+)\.") for index in stages],
        "stage_downsample": [f"backbone.stages.{index}.downsample.conv.weight" in state for index in stages],
        "stage_downsample_strides": [2 for _ in stages],
        "stage_light_block": light,
        "stage_kernel_size": [layer.shape[-1] for layer in layers],
        "stage_numb_of_layers": [
            count(state, rf"backbone\.stages\.{index}\.blocks\.0\.layers\.(\d+)\.") for index in stages
        ],
        "use_learnable_affine_block": "backbone.stem.enter.affine.scale" in state,
        # Names of the stages are made from the first of these, and the widths of the maps from the second.
        "depths": [count(state, rf"backbone\.stages\.{index}\.blocks\.(\d+)\.") for index in stages],
        "hidden_sizes": outputs,
    }  # fmt: skip


def dinov3(state: Mapping[str, Tensor], *, gated: bool, key_bias: bool) -> State:
    """A ViT's weights under the names of a DINOv3 of theirs; tensors are views of ours."""
    parts = split(state, r"\.qkv\.(weight|bias)$", 3)
    if gated:
        parts = split(parts, r"\.feed_forward\.expand\.(weight|bias)$", 2)
    if not key_bias:  # what ours holds there is read by nobody
        parts = {name: value for name, value in parts.items() if not name.endswith(".qkv.bias[1]")}
    theirs = convert_state_dict(parts, _DINOV3)
    patches = theirs["embeddings.patch_embeddings.weight"]  # (C, 3·p·p)
    side = math.isqrt(patches.shape[1] // 3)
    theirs["embeddings.patch_embeddings.weight"] = patches.unflatten(1, (3, side, side))
    theirs["embeddings.mask_token"] = torch.zeros(1, 1, len(patches))  # of pre-training
    theirs.setdefault("embeddings.register_tokens", torch.empty(1, 0, len(patches)))
    return theirs


def dinov3_config(state: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Of a ViT by itself; ``numbers`` are those of it that weights do not show."""
    width, inputs = state["patch_embedding.project.weight"].shape
    return {
        "model_type": "dinov3_vit",
        "patch_size": math.isqrt(inputs // 3),
        "hidden_size": width,
        "intermediate_size": state["encoder.layers.0.feed_forward.contract.weight"].shape[1],
        "num_hidden_layers": count(state, r"encoder\.layers\.(\d+)\."),
        "num_attention_heads": numbers["heads"],
        "hidden_act": "silu" if numbers["gated"] else "gelu",
        "use_gated_mlp": numbers["gated"],
        "layer_norm_eps": numbers["norm_eps"],
        "key_bias": numbers["key_bias"],
        "num_register_tokens": state["registers"].shape[1] if "registers" in state else 0,
        "out_indices": [index + 1 for index in numbers["out_layers"]],  # theirs counts the patches as 0
        "apply_layernorm": True,
        "reshape_hidden_states": True,
    }
