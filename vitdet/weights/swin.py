"""Swin weights, v1 and v2, in other people's layouts.

timm's own files have each patch merging at the start of the stage after it, the official ones and Hugging Face's at the
end of the stage before; Hugging Face's files of v1 do not carry the names that the modules have in memory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from vitdet.errors import UserError
from vitdet.weights.rules import Rules, convert_state_dict

# What is computed from the window's size, or belongs to masked pre-training.
_DROPPED: Rules = [
    (r"\.relative_position_index$", None),
    (r"\.relative_coords_table$", None),
    (r"\.attn_mask$", None),
    (r"\bmask_token$", None),
]
# A block's parts, in timm's, the official and torchvision's spelling.
_BLOCK: Rules = [
    (r"\.attn\.qkv\.", ".self_attention.attention.qkv."),
    (r"\.attn\.q_bias$", ".self_attention.attention.qkv.bias[0]"),
    (r"\.attn\.k_bias$", ".self_attention.attention.qkv.bias[1]"),
    (r"\.attn\.v_bias$", ".self_attention.attention.qkv.bias[2]"),
    (r"\.attn\.proj\.", ".self_attention.attention.out."),
    (r"\.attn\.logit_scale$", ".self_attention.attention.q_norm.log_scale"),
    (r"\.attn\.relative_position_bias_table$", ".self_attention.position_bias.table"),
    (r"\.attn\.cpb_mlp\.0\.", ".self_attention.position_bias.mlp.layers.0."),
    (r"\.attn\.cpb_mlp\.2\.", ".self_attention.position_bias.mlp.layers.1."),
    (r"\.norm1\.", ".self_attention_residual.norm."),
    (r"\.norm2\.", ".feed_forward_residual.norm."),
    (r"\.mlp\.(fc1|0)\.", ".feed_forward.expand."),
    (r"\.mlp\.(fc2|3)\.", ".feed_forward.contract."),
]
_TIMM_AND_OFFICIAL: Rules = [
    (r"^patch_embed\.proj\.", "backbone.embed.project."),
    (r"^patch_embed\.norm\.", "backbone.embed_norm."),
    (r"^layers\.(\d+)\.blocks\.(\d+)\.", r"backbone.stages.\1.layers.\2."),
    (r"^norm\.", "backbone.norm."),
    (r"^head\.fc\.", "head."),
]
TIMM_RULES: Rules = [
    *_DROPPED, *_BLOCK, *_TIMM_AND_OFFICIAL,
    *[(rf"^layers\.{stage + 1}\.downsample\.", f"backbone.merges.{stage}.") for stage in range(3)],
]  # fmt: skip
OFFICIAL_RULES: Rules = [
    *_DROPPED, *_BLOCK, *_TIMM_AND_OFFICIAL, (r"^layers\.(\d+)\.downsample\.", r"backbone.merges.\1."),
]  # fmt: skip
TORCHVISION_RULES: Rules = [
    *_DROPPED, *_BLOCK,
    (r"^features\.0\.0\.", "backbone.embed.project."),
    (r"^features\.0\.2\.", "backbone.embed_norm."),
    *[(rf"^features\.{2 * stage + 1}\.(\d+)\.", rf"backbone.stages.{stage}.layers.\1.") for stage in range(4)],
    *[(rf"^features\.{2 * stage + 2}\.", f"backbone.merges.{stage}.") for stage in range(3)],
    (r"^norm\.", "backbone.norm."),
]  # fmt: skip
HUGGINGFACE_RULES: Rules = [
    *_DROPPED,
    (r"^(swin|swinv2)\.", ""),
    (r"^embeddings\.patch_embeddings\.projection\.", "backbone.embed.project."),
    (r"^embeddings\.norm\.", "backbone.embed_norm."),
    (r"^encoder\.layers\.(\d+)\.blocks\.(\d+)\.", r"backbone.stages.\1.layers.\2."),
    (r"^encoder\.layers\.(\d+)\.downsample\.", r"backbone.merges.\1."),
    (r"^layernorm\.", "backbone.norm."),
    (r"^classifier\.", "head."),
    # v1 in memory says q_proj; its files and v2 say self.query.
    (r"\.attention\.(self\.query|q_proj)\.(\w+)$", r".self_attention.attention.qkv.\2[0]"),
    (r"\.attention\.(self\.key|k_proj)\.(\w+)$", r".self_attention.attention.qkv.\2[1]"),
    (r"\.attention\.(self\.value|v_proj)\.(\w+)$", r".self_attention.attention.qkv.\2[2]"),
    (r"\.attention\.(output\.dense|o_proj)\.", ".self_attention.attention.out."),
    (r"\.attention\.self\.logit_scale$", ".self_attention.attention.q_norm.log_scale"),
    (
        r"\.attention\.(self|relative_position_bias)\.relative_position_bias_table$",
        ".self_attention.position_bias.table",
    ),
    (r"\.attention\.self\.continuous_position_bias_mlp\.0\.", ".self_attention.position_bias.mlp.layers.0."),
    (r"\.attention\.self\.continuous_position_bias_mlp\.2\.", ".self_attention.position_bias.mlp.layers.1."),
    (r"\.layernorm_before\.", ".self_attention_residual.norm."),
    (r"\.layernorm_after\.", ".feed_forward_residual.norm."),
    (r"\.(intermediate\.dense|mlp\.fc1)\.", ".feed_forward.expand."),
    (r"\.(output\.dense|mlp\.fc2)\.", ".feed_forward.contract."),
]

_EMBEDDING = "backbone.embed.project.weight"

# A name that a layout has and no other does. The official one comes before timm's, which has no merging in stage 0.
_LAYOUTS: list[tuple[str, Rules]] = [
    (r"^features\.1\.0\.attn\.", TORCHVISION_RULES),
    (r"^((swin|swinv2)\.)?encoder\.layers\.0\.blocks\.0\.", HUGGINGFACE_RULES),
    (r"^layers\.0\.downsample\.", OFFICIAL_RULES),
    (r"^layers\.0\.blocks\.0\.attn\.", TIMM_RULES),
]


def convert(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a Swin classifier, by timm, torchvision, Hugging Face or its authors, under our names.

    Args:
        state: their names to tensors; with or without a head.

    Returns:
        Names of our :class:`~vitdet.classifiers.Classifier` on a Swin backbone.

    Raises:
        UserError: the names are of none of these layouts.
    """
    for pattern, rules in _LAYOUTS:
        if any(re.search(pattern, name) for name in state):
            ours = convert_state_dict(_with_key_biases(state), rules)
            # A convolution there, here a matrix over (channel, row, column).
            return {name: value.flatten(1) if name == _EMBEDDING else value for name, value in ours.items()}
    raise UserError(
        f"the weights are no Swin Transformer's by timm, torchvision, Hugging Face or its authors (the first is "
        f"{next(iter(state), 'missing')!r}); name the model that they were made for"
    )


def _with_key_biases(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """v2 keeps biases of queries and values only: zeros for the keys, so that the three can be joined."""
    whole = dict(state)
    for query, key in ((".attn.q_bias", ".attn.k_bias"), (".attention.self.query.bias", ".attention.self.key.bias")):
        for name, tensor in state.items():
            if name.endswith(query):
                whole.setdefault(name.removesuffix(query) + key, torch.zeros_like(tensor))
    return whole
