"""ViT weights in other people's layouts: timm, DeiT, DINOv2 and DINOv3, torchvision, Hugging Face, JAX arrays.

All are renamed by tables. Beyond that, what they learnt as the position of a class, distillation or register token is
added to that token (ours have none of their own), and biases that they lack or hold at zero are zeros.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import torch
from torch import Tensor

from vitdet.errors import UserError, some
from vitdet.weights.rules import Rules, convert_state_dict

_LAYER = r"backbone.encoder.layers.\1."
_HEADS: Rules = [
    (r"^(head_dist|distillation_classifier)\.", "head_distillation."),
    (r"^(heads\.head|cls_classifier|classifier)\.", "head."),
    (r"^(pre_logits\.fc|heads\.pre_logits|pre_logits)\.", "representation."),
]
# timm's VisionTransformer and Eva, and the files of DeiT, DeiT III, DINOv2 and DINOv3.
FLAT_RULES: Rules = [
    (r"(^|\.)mask_token$", None),  # of pre-training
    (r"^rope(_embed)?\.", None),  # ours computes the angles
    (r"\.bias_mask$", None),  # zero for the keys; ours reads no bias of theirs
    (r"^patch_embed\.proj\.", "backbone.patch_embedding.project."),
    (r"^cls_token$", "backbone.class_token"),
    (r"^dist_token$", "backbone.distillation_token"),
    (r"^(reg_token|register_tokens|storage_tokens)$", "backbone.registers"),
    (r"^pos_embed$", "backbone.positions.table"),
    (r"^blocks\.(\d+)\.", _LAYER),
    (r"^norm\.", "backbone.encoder.norm."),
    (r"^fc_norm\.", "norm."),
    (r"^attn_pool\.latent$", "pool.query"),
    (r"^attn_pool\.q\.(weight|bias)$", r"pool.attention.qkv.\1[0]"),
    (r"^attn_pool\.kv\.(weight|bias)$", r"pool.attention.qkv.\1[1]"),
    (r"^attn_pool\.proj\.", "pool.attention.out."),
    (r"^attn_pool\.norm\.", "pool.feed_forward_residual.norm."),
    (r"^attn_pool\.mlp\.fc1\.", "pool.feed_forward.expand."),
    (r"^attn_pool\.mlp\.fc2\.", "pool.feed_forward.contract."),
    (r"\.attn\.q_bias$", ".self_attention.qkv.bias[0]"),
    (r"\.attn\.k_bias$", ".self_attention.qkv.bias[1]"),
    (r"\.attn\.v_bias$", ".self_attention.qkv.bias[2]"),
    (r"\.attn\.(qkv|q_norm|k_norm)\.", r".self_attention.\1."),
    (r"\.attn\.proj\.", ".self_attention.out."),
    (r"\.norm1\.", ".self_attention_residual.norm."),
    (r"\.norm2\.", ".feed_forward_residual.norm."),
    (r"\.(ls1\.gamma|gamma_1)$", ".self_attention_residual.scale.factor"),
    (r"\.(ls2\.gamma|gamma_2)$", ".feed_forward_residual.scale.factor"),
    (r"\.mlp\.(fc1_g|w1)\.(\w+)$", r".feed_forward.expand.\2[0]"),
    (r"\.mlp\.(fc1_x|w2)\.(\w+)$", r".feed_forward.expand.\2[1]"),
    (r"\.mlp\.(fc1|w12)\.", ".feed_forward.expand."),
    (r"\.mlp\.(fc2|w3)\.", ".feed_forward.contract."),
    *_HEADS,
]
TORCHVISION_RULES: Rules = [
    (r"^conv_proj\.", "backbone.patch_embedding.project."),
    (r"^class_token$", "backbone.class_token"),
    (r"^encoder\.pos_embedding$", "backbone.positions.table"),
    (r"^encoder\.ln\.", "backbone.encoder.norm."),
    (r"^encoder\.layers\.encoder_layer_(\d+)\.", _LAYER),
    (r"\.self_attention\.in_proj_", ".self_attention.qkv."),
    (r"\.self_attention\.out_proj\.", ".self_attention.out."),
    (r"\.ln_1\.", ".self_attention_residual.norm."),
    (r"\.ln_2\.", ".feed_forward_residual.norm."),
    (r"\.mlp\.(0|linear_1)\.", ".feed_forward.expand."),
    (r"\.mlp\.(3|linear_2)\.", ".feed_forward.contract."),
    *_HEADS,
]
# ViT, DeiT, DINOv2 (with registers) and DINOv3; in memory they have other names than in the published files.
HUGGINGFACE_RULES: Rules = [
    (r"(^|\.)mask_token$", None),
    (r"(^|\.)pooler\.", None),  # of pre-training; no classifier reads it
    (r"^(vit|deit|dinov2|dinov2_with_registers|dinov3_vit)\.", ""),
    (r"^embeddings\.patch_embeddings\.(projection\.)?", "backbone.patch_embedding.project."),
    (r"^embeddings\.cls_token$", "backbone.class_token"),
    (r"^embeddings\.distillation_token$", "backbone.distillation_token"),
    (r"^embeddings\.register_tokens$", "backbone.registers"),
    (r"^embeddings\.position_embeddings$", "backbone.positions.table"),
    (r"^(?:encoder\.|model\.)?layers?\.(\d+)\.", _LAYER),
    (r"^(layernorm|norm)\.", "backbone.encoder.norm."),
    (r"\.attention\.(?:attention\.query|q_proj)\.(\w+)$", r".self_attention.qkv.\1[0]"),
    (r"\.attention\.(?:attention\.key|k_proj)\.(\w+)$", r".self_attention.qkv.\1[1]"),
    (r"\.attention\.(?:attention\.value|v_proj)\.(\w+)$", r".self_attention.qkv.\1[2]"),
    (r"\.attention\.(output\.dense|o_proj)\.", ".self_attention.out."),
    (r"\.(layernorm_before|norm1)\.", ".self_attention_residual.norm."),
    (r"\.(layernorm_after|norm2)\.", ".feed_forward_residual.norm."),
    (r"\.layer_scale1\.lambda1$", ".self_attention_residual.scale.factor"),
    (r"\.layer_scale2\.lambda1$", ".feed_forward_residual.scale.factor"),
    (r"\.mlp\.gate_proj\.(\w+)$", r".feed_forward.expand.\1[0]"),
    (r"\.mlp\.gated_up_proj\.(\w+)$", r".feed_forward.expand.\1[1]"),
    (r"\.(intermediate\.dense|mlp\.fc1|mlp\.weights_in|mlp\.up_proj)\.", ".feed_forward.expand."),
    (r"\.(output\.dense|mlp\.fc2|mlp\.weights_out|mlp\.down_proj)\.", ".feed_forward.contract."),
    *_HEADS,
]
# Names joined by dots in place of slashes; see _from_jax for the arrays themselves.
JAX_RULES: Rules = [
    (r"\.(kernel|scale)$", ".weight"),
    (r"^embedding\.", "backbone.patch_embedding.project."),
    (r"^cls$", "backbone.class_token"),
    (r"^Transformer\.posembed_input\.pos_embedding$", "backbone.positions.table"),
    (r"^Transformer\.encoder_norm\.", "backbone.encoder.norm."),
    (r"^Transformer\.encoderblock_(\d+)\.", _LAYER),
    (r"\.MultiHeadDotProductAttention_\d\.query\.(\w+)$", r".self_attention.qkv.\1[0]"),
    (r"\.MultiHeadDotProductAttention_\d\.key\.(\w+)$", r".self_attention.qkv.\1[1]"),
    (r"\.MultiHeadDotProductAttention_\d\.value\.(\w+)$", r".self_attention.qkv.\1[2]"),
    (r"\.MultiHeadDotProductAttention_\d\.out\.", ".self_attention.out."),
    (r"\.LayerNorm_0\.", ".self_attention_residual.norm."),
    (r"\.LayerNorm_[12]\.", ".feed_forward_residual.norm."),
    (r"\.MlpBlock_\d\.Dense_0\.", ".feed_forward.expand."),
    (r"\.MlpBlock_\d\.Dense_1\.", ".feed_forward.contract."),
    *_HEADS,
]

# A name that a layout has and no other does.
_LAYOUTS: list[tuple[str, Rules]] = [
    (r"^blocks\.0\.(attn|norm1)\.", FLAT_RULES),
    (r"^encoder\.layers\.encoder_layer_0\.", TORCHVISION_RULES),
    (r"^((vit|deit|dinov2|dinov2_with_registers|dinov3_vit)\.)?embeddings\.cls_token$", HUGGINGFACE_RULES),
    (r"^Transformer/encoderblock_0/", JAX_RULES),
]


def convert(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a ViT in one of the known layouts, under our names and in float32.

    Args:
        state: their names to tensors (of an ``.npz``, its arrays as tensors); with or without a head.

    Returns:
        Names of our :class:`~vitdet.classifiers.Classifier` on a ViT.

    Raises:
        UserError: the names are of none of these layouts.
    """
    for pattern, rules in _LAYOUTS:
        if any(re.search(pattern, name) for name in state):
            theirs = _from_jax(state) if rules is JAX_RULES else dict(state)
            return _complete(convert_state_dict(_with_parts(theirs), rules))
    raise UserError(
        "the weights are no ViT's by timm, torchvision, Hugging Face, JAX, DeiT or DINO "
        f"(they hold {some(list(state), 3) or 'nothing'}); name the model that they were made for"
    )


def _from_jax(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Arrays as JAX has them, inputs before outputs and heads apart, in the order of a linear layer's (out, in)."""
    ours = {}
    for name, array in state.items():
        if name == "embedding/kernel":
            array = array.permute(3, 2, 0, 1)  # (p, p, 3, C) to (C, 3, p, p)
        elif re.search(r"/(query|key|value)/kernel$", name):
            array = array.flatten(1).T  # (C, H, D) to (H·D, C)
        elif re.search(r"/(query|key|value)/bias$", name):
            array = array.flatten()  # (H, D) to (H·D,)
        elif name.endswith("/out/kernel"):
            array = array.flatten(0, 1).T  # (H, D, C) to (C, H·D)
        elif name.endswith("/kernel"):
            array = array.T
        ours[name.replace("/", ".")] = array
    return ours


def _with_parts(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Zeros for the biases of keys where only queries and values have some; gated halves told from a plain layer."""
    whole = {
        name.replace(".up_proj.", ".gated_up_proj.")
        if name.replace(".up_proj.", ".gate_proj.") in state
        else name: value
        for name, value in state.items()
    }
    for query, key in ((".q_bias", ".k_bias"), (".q_proj.bias", ".k_proj.bias")):
        for name, value in state.items():
            if name.endswith(query):
                whole.setdefault(name.removesuffix(query) + key, torch.zeros_like(value))
    return whole


def _complete(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Our names to tensors of our shapes: patches flat, positions of the patches only, biases of queries to values.

    All in float32, as half-precision sums of token and position would lose digits that the file has.
    """
    state = {name: value.float() for name, value in state.items()}
    patches = "backbone.patch_embedding.project.weight"
    if patches in state:
        state[patches] = state[patches].flatten(1)  # (C, 3, p, p) to (C, 3·p·p)
    for name in [name for name in state if name.endswith(".qkv.weight")]:
        prefix = name.removesuffix("qkv.weight")
        if prefix + "out.bias" in state:
            state.setdefault(prefix + "qkv.bias", state[name].new_zeros(state[name].shape[0]))
    return _square(_fold_prefix_positions(state))


def _square(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Positions as (1, h, w, C), as a model has them, where they are as many as a square grid has."""
    table = state.get("backbone.positions.table")
    if table is not None:
        side = math.isqrt(table.shape[1])
        if side * side == table.shape[1]:
            state["backbone.positions.table"] = table.unflatten(1, (side, side))
    return state


def _fold_prefix_positions(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add the positions of the tokens before the patches, where the table begins with such, to these tokens.

    The published tables begin with those of class and distillation token, or (timm) registers, too, or with none: as
    many as leave a square grid; on grids that are not square, class and distillation token are taken to be there.
    """
    table = state.get("backbone.positions.table")
    names = ["backbone.class_token", "backbone.distillation_token", "backbone.registers"]
    tokens = {name: state[name] for name in names if name in state}
    if table is None or not tokens:
        return state
    registers = tokens["backbone.registers"].shape[1] if "backbone.registers" in tokens else 0
    everything = sum(token.shape[1] for token in tokens.values())
    usual = everything - registers
    left = {count: table.shape[1] - count for count in (usual, everything, 0)}
    squares = [count for count, patches in left.items() if patches > 0 and math.isqrt(patches) ** 2 == patches]
    count = squares[0] if squares else usual
    prefix, state["backbone.positions.table"] = table[:, :count], table[:, count:]
    for name, token in tokens.items():
        if prefix.shape[1]:
            own, prefix = prefix[:, : token.shape[1]], prefix[:, token.shape[1] :]
            state[name] = token + own
    return state
