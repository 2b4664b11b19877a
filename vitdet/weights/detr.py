"""DETR weights in other people's layouts: the publisher's ``.pth``, and Hugging Face's with either of its backbones.

Both count classes by COCO's category ids: 91 rows, of which eleven stand for ids that nothing has, and one more for "no
object", which is the last. Hugging Face's files do not carry the names that their modules have in memory
(``backbone.conv_encoder`` became ``backbone``, ``fc1`` ``mlp.fc1``, ``out_proj`` ``o_proj``): the rules take either.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from vitdet.errors import UserError
from vitdet.weights import resnet
from vitdet.weights.preprocessing import IMAGENET, values
from vitdet.weights.rules import Rules, convert_state_dict

OFFICIAL_RULES: Rules = [
    (r"\.num_batches_tracked$", None),
    (r"^backbone\.0\.body\.", "backbone."),
    *resnet.TORCHVISION_RULES,
    (r"^transformer\.", ""),
    (r"^input_proj\.", "project."),
    (r"^query_embed\.weight$", "query_pos"),
    (r"^class_embed\.", "score_head."),
    (r"^bbox_embed\.", "box_head."),
    # The three projections are one matrix there, too, in the same order.
    (r"\.self_attn\.in_proj_(weight|bias)$", r".self_attention.qkv.\1"),
    (r"\.multihead_attn\.in_proj_(weight|bias)$", r".cross_attention.qkv.\1"),
    (r"\.self_attn\.out_proj\.", ".self_attention.out."),
    (r"\.multihead_attn\.out_proj\.", ".cross_attention.out."),
    (r"\.linear1\.", ".feed_forward.expand."),
    (r"\.linear2\.", ".feed_forward.contract."),
    (r"^((?:en|de)coder\.layers\.\d+)\.norm1\.", r"\1.self_attention_residual.norm."),
    (r"^(encoder\.layers\.\d+)\.norm2\.", r"\1.feed_forward_residual.norm."),
    (r"^(decoder\.layers\.\d+)\.norm2\.", r"\1.cross_attention_residual.norm."),
    (r"^(decoder\.layers\.\d+)\.norm3\.", r"\1.feed_forward_residual.norm."),
]

HUGGINGFACE_RULES: Rules = [
    (r"\.num_batches_tracked$", None),
    (r"^model\.", ""),
    (r"^backbone\.(conv_encoder\.)?model\.", "backbone."),
    *resnet.HUGGINGFACE_RULES,
    *resnet.TORCHVISION_RULES,  # of timm's ResNet
    (r"^input_projection\.", "project."),
    (r"^query_position_embeddings\.weight$", "query_pos"),
    (r"^class_labels_classifier\.", "score_head."),
    (r"^bbox_predictor\.", "box_head."),
    (r"^decoder\.layernorm\.", "decoder.norm."),
    (r"\.self_attn\.", ".self_attention."),
    (r"\.encoder_attn\.", ".cross_attention."),
    (r"_attention\.q_proj\.(weight|bias)$", r"_attention.qkv.\1[0]"),
    (r"_attention\.k_proj\.(weight|bias)$", r"_attention.qkv.\1[1]"),
    (r"_attention\.v_proj\.(weight|bias)$", r"_attention.qkv.\1[2]"),
    (r"_attention\.(out|o)_proj\.", "_attention.out."),
    (r"\.self_attn_layer_norm\.", ".self_attention_residual.norm."),
    (r"\.encoder_attn_layer_norm\.", ".cross_attention_residual.norm."),
    (r"\.(mlp\.)?fc1\.", ".feed_forward.expand."),
    (r"\.(mlp\.)?fc2\.", ".feed_forward.contract."),
    (r"\.final_layer_norm\.", ".feed_forward_residual.norm."),
]

# What only DETR's own layouts hold all of; its descendants have some of them.
_OFFICIAL = {"transformer.decoder.norm.weight", "query_embed.weight", "input_proj.weight", "class_embed.weight"}
_HUGGINGFACE = {"model.query_position_embeddings.weight", "class_labels_classifier.weight"}


def check_detects(state: Iterable[str]) -> None:
    """Refuse the names of a DETR that segments."""
    if any(name.startswith("detr.") for name in state):
        raise UserError(
            "the weights are of a DETR for panoptic segmentation; pass one that detects, such as detr-r50-e632da11.pth"
        )


def convert(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a published DETR under our names.

    Raises:
        UserError: the names are of another layout, or of a DETR for segmentation.
    """
    check_detects(state)
    if state.keys() >= _OFFICIAL:
        return convert_state_dict(state, OFFICIAL_RULES)
    if state.keys() >= _HUGGINGFACE:
        return convert_state_dict(state, HUGGINGFACE_RULES)
    raise UserError(
        f"the weights are no DETR's by its publisher or Hugging Face (the first is {next(iter(state), 'missing')!r}); "
        "name the model that they were made for"
    )


def preprocessing() -> dict[str, Any]:
    """How DETR's own code evaluates: 800 pixels along the shorter side, at most 1333 along the longer."""
    return values((800, 800), IMAGENET, "bilinear", None, longest=1333)
