"""DETR in Hugging Face's layout, with timm's ResNet, as its published files have it; only that one can be dilated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vitdet.weights.rules import Rules, convert_state_dict
from vitdet.weights.to_huggingface.parts import BLOCKS, State, count, require, resizing, split

RULES: Rules = [
    (r"\.num_batches_tracked$", None),  # theirs are always frozen
    (r"^backbone\.stem\.0\.conv\.", "backbone.conv_encoder.model.conv1."),
    (r"^backbone\.stem\.0\.norm\.", "backbone.conv_encoder.model.bn1."),
    *((rf"^backbone\.stages\.{n}\.", f"backbone.conv_encoder.model.layer{n + 1}.") for n in range(4)),
    *((rf"\.convs\.{n}\.conv\.", f".conv{n + 1}.") for n in range(3)),
    *((rf"\.convs\.{n}\.norm\.", f".bn{n + 1}.") for n in range(3)),
    (r"\.shortcut\.conv\.", ".downsample.0."),
    (r"\.shortcut\.norm\.", ".downsample.1."),
    (r"^project\.", "input_projection."),
    (r"^query_pos$", "query_position_embeddings.weight"),
    (r"^decoder\.norm\.", "decoder.layernorm."),
    *BLOCKS,
    *((rf"\.cross_attention\.qkv\.(weight|bias)\[{n}\]$", rf".encoder_attn.{x}_proj.\1") for n, x in enumerate("qkv")),
    (r"\.cross_attention_residual\.norm\.", ".encoder_attn_layer_norm."),
    (r"\.self_attention\.out\.", ".self_attn.out_proj."),
    (r"\.cross_attention\.out\.", ".encoder_attn.out_proj."),
    (r"\.feed_forward\.expand\.", ".fc1."),
    (r"\.feed_forward\.contract\.", ".fc2."),
    (r"^(?!score_head\.|box_head\.)", "model."),
    (r"^score_head\.", "class_labels_classifier."),
    (r"^box_head\.", "bbox_predictor."),
]
# Blocks in each stage of a ResNet -> timm's name.
_RESNETS: dict[tuple[int, ...], str] = {(3, 4, 6, 3): "resnet50", (3, 4, 23, 3): "resnet101"}


def layout(name: str, state: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> tuple[dict[str, Any], State]:
    """The ``config.json``, without its classes, and the tensors; see :mod:`vitdet.weights.to_huggingface`."""
    depths = tuple(count(state, rf"backbone\.stages\.{index}\.(\d+)\.") for index in range(4))
    plain = "backbone.stem.1.conv.weight" not in state and "backbone.stages.0.0.convs.2.conv.weight" in state
    require(numbers["backbone"] == "resnet" and depths in _RESNETS and plain, "detr", "backbone but ResNet-50 and -101")
    config = {
        "architectures": ["DetrForObjectDetection"],
        "model_type": "detr",
        "dtype": "float32",
        "use_timm_backbone": True,
        "backbone": _RESNETS[depths],
        "use_pretrained_backbone": False,
        "dilation": numbers["dilated"],
        "d_model": state["project.weight"].shape[0],
        **{f"{part}_attention_heads": numbers["heads"] for part in ("encoder", "decoder")},
        **{f"{part}_ffn_dim": numbers["hidden"] for part in ("encoder", "decoder")},
        **{f"{part}_layers": count(state, rf"{part}\.layers\.(\d+)\.") for part in ("encoder", "decoder")},
        "num_queries": state["query_pos"].shape[0],
        "dropout": numbers["dropout"],
        "attention_dropout": numbers["dropout"],
        "activation_dropout": numbers["dropout"],
    }
    return config, convert_state_dict(split(state, r"_attention\.qkv\.(weight|bias)$", 3), RULES)


def processor(prepared: Mapping[str, Any]) -> dict[str, Any]:
    """The ``preprocessor_config.json``; ``prepared`` holds the plain values of a ``Preprocessing``."""
    require(prepared["crop"] is None, "DetrImageProcessor", "cropping")
    height, width = prepared["size"]
    longest = prepared.get("longest")
    size = {"height": height, "width": width}
    if longest is not None:
        size = {"shortest_edge": min(height, width), "longest_edge": longest}
    return {**resizing(prepared, "DetrImageProcessor"), "size": size, "do_pad": True}
