"""Classifiers of ours in timm's layout: the ``config.json`` and ``model.safetensors`` that ``timm.create_model`` reads.

The way back is in :mod:`vitdet.weights.vit` and :mod:`vitdet.weights.swin`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vitdet.errors import UserError
from vitdet.weights.rules import Rules, convert_state_dict

VIT_RULES: Rules = [
    (r"^norm\.", "fc_norm."),
    (r"^backbone\.patch_embedding\.project\.", "patch_embed.proj."),
    (r"^backbone\.class_token$", "cls_token"),
    (r"^backbone\.distillation_token$", "dist_token"),
    (r"^backbone\.registers$", "reg_token"),
    (r"^backbone\.positions\.table$", "pos_embed"),
    (r"^backbone\.encoder\.norm\.", "norm."),
    (r"^backbone\.encoder\.layers\.", "blocks."),
    (r"\.self_attention\.qkv\.", ".attn.qkv."),
    (r"\.self_attention\.out\.", ".attn.proj."),
    (r"\.self_attention_residual\.norm\.", ".norm1."),
    (r"\.feed_forward_residual\.norm\.", ".norm2."),
    (r"\.self_attention_residual\.scale\.factor$", ".ls1.gamma"),
    (r"\.feed_forward_residual\.scale\.factor$", ".ls2.gamma"),
    (r"\.feed_forward\.expand\.", ".mlp.fc1."),
    (r"\.feed_forward\.contract\.", ".mlp.fc2."),
    (r"^head_distillation\.", "head_dist."),
]
# timm's class for DINOv3 spells some of it otherwise.
EVA_RULES: Rules = [(r"\.ls(\d)\.gamma$", r".gamma_\1")]
SWIN_RULES: Rules = [
    (r"^backbone\.embed\.project\.", "patch_embed.proj."),
    (r"^backbone\.embed_norm\.", "patch_embed.norm."),
    (r"^backbone\.stages\.(\d+)\.layers\.(\d+)\.", r"layers.\1.blocks.\2."),
    *((rf"^backbone\.merges\.{stage}\.", f"layers.{stage + 1}.downsample.") for stage in range(3)),
    (r"^backbone\.norm\.", "norm."),
    (r"^head\.", "head.fc."),
    (r"\.self_attention\.attention\.qkv\.", ".attn.qkv."),
    (r"\.self_attention\.attention\.out\.", ".attn.proj."),
    (r"\.self_attention\.attention\.q_norm\.log_scale$", ".attn.logit_scale"),
    (r"\.self_attention\.position_bias\.table$", ".attn.relative_position_bias_table"),
    (r"\.self_attention\.position_bias\.mlp\.layers\.0\.", ".attn.cpb_mlp.0."),
    (r"\.self_attention\.position_bias\.mlp\.layers\.1\.", ".attn.cpb_mlp.2."),
    (r"\.self_attention_residual\.norm\.", ".norm1."),
    (r"\.feed_forward_residual\.norm\.", ".norm2."),
    (r"\.feed_forward\.expand\.", ".mlp.fc1."),
    (r"\.feed_forward\.contract\.", ".mlp.fc2."),
]

# Our arguments under timm's names, and those that only matter in training. timm's names of models say the rest.
_ARGUMENTS = {"image_size": "img_size", "heads": "num_heads", "window": "window_size", "pooling": "global_pool"}
TRAINING = {"drop_path", "dropout", "token_dropout", "patch_dropout", "layer_scale", "num_classes"}
_OF_ARCHITECTURE = ("fixed_input_size", "pool_size", "first_conv", "classifier")
_POOLINGS = {"token": "token", "average": "avg"}


def model_arguments(name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What timm makes a model with, from the arguments in which ours differs from the named one.

    Raises:
        UserError: one that timm's models of that name lack.
    """
    theirs: dict[str, Any] = {}
    for key, value in arguments.items():
        if key == "pooling" and value not in _POOLINGS:
            raise UserError(f"{name} with pooling={value!r} is not in timm's layout; keep the .safetensors of ours")
        if key in _ARGUMENTS:
            plain = list(value) if isinstance(value, list | tuple) else value
            theirs[_ARGUMENTS[key]] = _POOLINGS[value] if key == "pooling" else plain
        elif key == "norm_pooled":
            theirs["fc_norm"] = bool(value)
        elif key == "final_norm":  # shown by the weights
            continue
        elif key not in TRAINING and not (key == "representation" and value is None):
            raise UserError(f"{name} with {key}={value!r} is not in timm's layout; keep the .safetensors of ours")
    # timm's ViTs move the norm behind an average, where they are not told otherwise; ours stays before it.
    if theirs.get("global_pool") == "avg" and not name.startswith("swin") and "dinov3" not in name:
        theirs.setdefault("fc_norm", False)
    return theirs


def tensors_of(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights under timm's names.

    Args:
        state: ours. expected: timm's own of that model, of which only names and shapes are looked at.
    """
    swin = "backbone.embed.project.weight" in state
    rules = SWIN_RULES if swin else [*VIT_RULES, *(EVA_RULES if "blocks.0.gamma_1" in expected else [])]
    theirs = convert_state_dict(state, rules)
    patches = theirs["patch_embed.proj.weight"]  # (C, 3·p·p)
    side = math.isqrt(patches.shape[1] // 3)
    theirs["patch_embed.proj.weight"] = patches.unflatten(1, (3, side, side))
    if "pos_embed" in theirs:
        theirs["pos_embed"] = _positions(theirs["pos_embed"], expected)
    return _biases(theirs, expected)


def _positions(table: Tensor, expected: Mapping[str, Tensor]) -> Tensor:
    """A (1, h, w, C) table as (1, prefix + h·w, C): first those of class and other tokens, which ours lack.

    They are -0.0, which added to any number is that number, its sign included.
    """
    table = table.flatten(1, -2)
    before = expected["pos_embed"].shape[1] - table.shape[1] if "pos_embed" in expected else 0
    return torch.cat([table.new_full((1, max(before, 0), table.shape[2]), -0.0), table], dim=1)


def _biases(state: dict[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Biases of queries, keys and values: joined, apart, or none, as theirs has them."""
    changed = {}
    for name, value in state.items():
        block = name.removesuffix("qkv.bias")
        if name == block or name in expected:
            changed[name] = value
        elif block + "q_bias" in expected:
            queries, _, values = value.chunk(3)  # nobody reads that of the keys
            changed |= {block + "q_bias": queries, block + "v_bias": values}
        elif value.any():
            changed[name] = value
    return changed


def config_of(
    name: str, arguments: Mapping[str, Any], *, num_classes: int, features: int, class_names: Sequence[str],
    prepared: Mapping[str, Any], pretrained: Mapping[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """The ``config.json``.

    Args:
        name: of timm's architecture. arguments: timm's. num_classes: K. features: that the head sees.
        class_names: of the K classes. prepared: the plain values of a ``Preprocessing``.
        pretrained: timm's own ``pretrained_cfg`` of that architecture, for what is not the weights'.
    """
    kept = {key: pretrained[key] for key in _OF_ARCHITECTURE if pretrained.get(key) is not None}
    stretched = prepared["crop"] is None
    return {
        "architecture": name,
        "num_classes": num_classes,
        "num_features": features,
        **({"label_names": list(class_names)} if class_names else {}),
        **({"model_args": dict(arguments)} if arguments else {}),
        "pretrained_cfg": {
            **kept,
            "custom_load": False,
            "input_size": [3, *prepared["size"]],
            "interpolation": prepared["interpolation"],
            "crop_pct": 1.0 if stretched else prepared["crop"],
            "crop_mode": "squash" if stretched else "center",
            "mean": list(prepared["mean"]),
            "std": list(prepared["std"]),
            "num_classes": num_classes,
        },
    }
