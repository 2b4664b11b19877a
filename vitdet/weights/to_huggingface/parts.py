"""What the layouts of all detectors share: names, how joined tensors are taken apart, plain parts of the JSON files."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from vitdet.errors import UserError
from vitdet.weights.rules import Rules, count

State = dict[str, Tensor]

# Attention and feed-forward of encoder and decoder blocks, after `split`; `out` and the feed-forward differ.
BLOCKS: Rules = [
    *((rf"\.self_attention\.qkv\.(weight|bias)\[{n}\]$", rf".self_attn.{x}_proj.\1") for n, x in enumerate("qkv")),
    (r"\.self_attention_residual\.norm\.", ".self_attn_layer_norm."),
    (r"\.feed_forward_residual\.norm\.", ".final_layer_norm."),
]
# Deformable attention of the decoder, query selection, denoising and heads, which RT-DETR's descendants kept.
DECODER: Rules = [
    (r"\.cross_attention\.offsets\.", ".encoder_attn.sampling_offsets."),
    (r"\.cross_attention\.weights\.", ".encoder_attn.attention_weights."),
    (r"\.cross_attention\.value\.", ".encoder_attn.value_proj."),
    (r"\.cross_attention\.out\.", ".encoder_attn.output_proj."),
    (r"^query_selection\.proposals\.project\.", "enc_output."),
    (r"^query_selection\.proposals\.score_head\.", "enc_score_head."),
    (r"^query_selection\.proposals\.box_head\.", "enc_bbox_head."),
    (r"^denoising\.embedding\.", "denoising_class_embed."),
    (r"^decoder\.query_pos\.", "decoder.query_pos_head."),
    (r"^decoder\.score_heads\.", "decoder.class_embed."),
    (r"^decoder\.box_heads\.", "decoder.bbox_embed."),
    # of D-FINE and DEIMv2
    (r"^decoder\.first_box_head\.", "decoder.pre_bbox_head."),
    (r"^decoder\.quality_heads\.(\d+)\.head\.", r"decoder.lqe_layers.\1.reg_conf."),
]
# The paths between the levels; theirs counts the convolutions of a RepVGG block, ours names the kernel.
FUSION: Rules = [
    (r"^encoder\.lateral\.", "encoder.lateral_convs."),
    (r"^encoder\.top_down\.", "encoder.fpn_blocks."),
    (r"^encoder\.bottom_up\.", "encoder.pan_blocks."),
    (r"^(encoder\..*)\.blocks\.(\d+)\.conv3\.", r"\1.bottlenecks.\2.conv1."),
    (r"^(encoder\..*)\.blocks\.(\d+)\.conv1\.", r"\1.bottlenecks.\2.conv2."),
]


def refuse(kind: str, lacks: str) -> NoReturn:
    """Say that transformers' model of this kind cannot be the one at hand."""
    raise UserError(f"transformers' {kind} has no {lacks}; keep this model in a .safetensors of ours, which holds all")


def require(condition: bool, kind: str, lacks: str) -> None:
    """Refuse, see :func:`refuse`, where the condition does not hold."""
    if not condition:
        refuse(kind, lacks)


def split(state: Mapping[str, Tensor], pattern: str, parts: int) -> State:
    """The tensors whose names match as ``name[0]``, ``name[1]``, … of equal heights; the others as they are."""
    pieces: State = {}
    for name, tensor in state.items():
        if re.search(pattern, name):
            pieces |= {f"{name}[{index}]": part for index, part in enumerate(tensor.chunk(parts))}
        else:
            pieces[name] = tensor
    return pieces


def with_heads(state: Mapping[str, Tensor]) -> State:
    """The decoder's heads a second time at the top, where transformers' models hold them, too."""
    prefix = "model.decoder."
    heads = {name.removeprefix(prefix): value for name, value in state.items() if re.match(_HEADS, name)}
    return {**state, **heads}


_HEADS = r"model\.decoder\.(class_embed|bbox_embed)\."


def point_scales(name: str, points: Sequence[int], layers: int) -> State:
    """What transformers keeps of the sampling points in each of the decoder's layers: one over their number."""
    values = [1 / number for number in points for _ in range(number)]
    return {f"model.decoder.layers.{index}.encoder_attn.{name}": torch.tensor(values) for index in range(layers)}


def factor(inner: int, width: int, *, halves: int = 1) -> float:
    """A factor of the width that gives ``inner`` when ``width * factor / halves`` is rounded down.

    transformers rounds down what is a little below a whole number for quotients that are no binary fractions.
    """
    exact = halves * inner / width
    return exact if math.floor(width * exact / halves) == inner else (halves * inner + 0.25) / width


def labels(class_names: Sequence[str]) -> dict[str, Any]:
    """The classes, as any ``config.json`` has them."""
    return {
        "id2label": {str(label): name for label, name in enumerate(class_names)},
        "label2id": {name: label for label, name in enumerate(class_names)},
    }


def common_config(kind: str, architecture: str, state: Mapping[str, Tensor], numbers: Mapping[str, Any]) -> dict:
    """What the ``config.json`` of RT-DETR and of its descendants share.

    Args:
        kind: the ``model_type``. architecture: the class that loads it.
        state: the weights under our names. numbers: see :func:`vitdet.weights.to_huggingface.layout_of`.
    """
    width = state["query_selection.proposals.score_head.weight"].shape[1]
    encoder_width, levels = numbers["encoder_width"], len(numbers["strides"])
    block = "encoder.attend.0.feed_forward.expand.weight"
    return {
        "architectures": [architecture],
        "model_type": kind,
        "dtype": "float32",
        "freeze_backbone_batch_norms": not any(_is_counter(name) for name in state),
        "encoder_hidden_dim": encoder_width,
        "encoder_in_channels": list(numbers["channels"]),
        "feat_strides": list(numbers["strides"]),
        "encoder_layers": count(state, r"encoder\.attend\.(\d+)\."),
        **({"encoder_ffn_dim": state[block].shape[0]} if block in state else {}),
        "encoder_attention_heads": numbers["heads"],
        "encode_proj_layers": [levels - 1],
        "d_model": width,
        "num_queries": numbers["num_queries"],
        "decoder_in_channels": [encoder_width] * levels,
        "decoder_ffn_dim": state["decoder.layers.0.feed_forward.expand.weight"].shape[0],
        "num_feature_levels": levels,
        "decoder_layers": count(state, r"decoder\.layers\.(\d+)\."),
        "decoder_attention_heads": numbers["heads"],
        "decoder_activation_function": "relu",
        "num_denoising": numbers["denoising_queries"],
        "label_noise_ratio": numbers["label_noise"],
        "box_noise_scale": numbers["box_noise"],
    }


def _is_counter(name: str) -> bool:
    """Whether the tensor is the counter of a batch norm in the backbone, which frozen ones lack."""
    return name.startswith("backbone.") and name.endswith(".num_batches_tracked")


def processor(prepared: Mapping[str, Any]) -> dict[str, Any]:
    """The ``preprocessor_config.json`` of RT-DETR and of its descendants.

    Args:
        prepared: the plain values of a ``Preprocessing``.

    Raises:
        UserError: it cuts images, or keeps their proportions; transformers stretches these models' images.
    """
    require(prepared["crop"] is None and prepared.get("longest") is None, "RTDetrImageProcessor", "cropping or padding")
    height, width = prepared["size"]
    return {**resizing(prepared, "RTDetrImageProcessor"), "size": {"height": height, "width": width}, "do_pad": False}


def resizing(prepared: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The entries that detectors' image processors of all kinds share; without the size."""
    return {
        "image_processor_type": kind,
        "do_resize": True,
        "resample": {"bilinear": 2, "bicubic": 3}[prepared["interpolation"]],
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": any(prepared["mean"]) or any(value != 1 for value in prepared["std"]),
        "image_mean": list(prepared["mean"]),
        "image_std": list(prepared["std"]),
        "do_convert_annotations": True,
        "format": "coco_detection",
    }
