"""DETR weights in other people's layouts: the publisher's ``.pth``, and Hugging Face's with either of its backbones.

Both count classes by COCO's category ids: 91 rows, of which eleven stand for ids that nothing has, and one more for "no
object", which is the last. Hugging Face's files do not carry the names that their modules have in memory
(``backbone.conv_encoder`` became ``backbone``, ``fc1`` ``mlp.fc1``, ``out_proj`` ``o_proj``): the rules take either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def convert(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a published DETR under our names.

    Raises:
        UserError: the names are of another layout, or of a DETR for segmentation.
    """
    if any(name.startswith("detr.") for name in state):
        raise UserError("the weights are of a DETR for panoptic segmentation; pass one that detects, such as detr-r50")
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


# The way back, to the names of Hugging Face's files with timm's ResNet, which is the one that can be dilated.
TO_HUGGINGFACE_RULES: Rules = [
    (r"\.num_batches_tracked$", None),
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
    (r"\.self_attention_residual\.norm\.", ".self_attn_layer_norm."),
    (r"\.cross_attention_residual\.norm\.", ".encoder_attn_layer_norm."),
    (r"\.feed_forward_residual\.norm\.", ".final_layer_norm."),
    (r"\.self_attention\.", ".self_attn."),
    (r"\.cross_attention\.", ".encoder_attn."),
    *((rf"_attn\.qkv\.(weight|bias)\[{n}\]$", rf"_attn.{letter}_proj.\1") for n, letter in enumerate("qkv")),
    (r"_attn\.out\.", "_attn.out_proj."),
    (r"\.feed_forward\.expand\.", ".fc1."),
    (r"\.feed_forward\.contract\.", ".fc2."),
    (r"^(?!score_head\.|box_head\.)", "model."),
    (r"^score_head\.", "class_labels_classifier."),
    (r"^box_head\.", "bbox_predictor."),
]


def to_huggingface(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of our DETR under the names of Hugging Face's files; tensors are views of ours."""
    parts: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name.endswith((".qkv.weight", ".qkv.bias")):
            parts |= {f"{name}[{index}]": part for index, part in enumerate(tensor.chunk(3))}
        else:
            parts[name] = tensor
    return convert_state_dict(parts, TO_HUGGINGFACE_RULES)


def huggingface_config(name: str, arguments: Mapping[str, Any], class_names: Sequence[str]) -> dict[str, Any]:
    """The ``config.json`` of our DETR.

    Args:
        name: of the zoo. arguments: the model's, with their defaults. class_names: of its K classes.
    """
    return {
        "architectures": ["DetrForObjectDetection"],
        "model_type": "detr",
        "use_timm_backbone": True,
        "backbone": "resnet101" if name.startswith("detr_r101") else "resnet50",
        "use_pretrained_backbone": False,
        "dilation": name.endswith("_dc5"),
        "d_model": arguments["width"],
        **{f"{part}_attention_heads": arguments["heads"] for part in ("encoder", "decoder")},
        **{f"{part}_ffn_dim": arguments["hidden"] for part in ("encoder", "decoder")},
        **{f"{part}_layers": arguments[f"{part}_layers"] for part in ("encoder", "decoder")},
        "num_queries": arguments["num_queries"],
        "dropout": arguments["dropout"],
        "attention_dropout": arguments["dropout"],
        "activation_dropout": arguments["dropout"],
        "id2label": {str(label): one for label, one in enumerate(class_names)},
        "label2id": {one: label for label, one in enumerate(class_names)},
    }


def huggingface_processor(size: int, longest: int, mean: Sequence[float], std: Sequence[float]) -> dict[str, Any]:
    """The ``preprocessor_config.json`` of our DETR."""
    return {
        "image_processor_type": "DetrImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": size, "longest_edge": longest},
        "resample": 2,
        "do_rescale": True,
        "do_normalize": True,
        "image_mean": list(mean),
        "image_std": list(std),
        "do_pad": True,
    }
