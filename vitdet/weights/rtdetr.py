"""RT-DETR weights, of version 1 and 2, in other people's layouts.

Hugging Face's files do not carry the names that their modules have in memory (``fc1`` became ``mlp.fc1``, ``out_proj``
``o_proj``, ``encoder.encoder`` ``encoder.aifi``; older files hold each head twice): the rules take either spelling.
The authors' files differ between the versions, which number or name the same parts: the rules take both.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from vitdet.errors import UserError
from vitdet.weights import hgnetv2
from vitdet.weights.rules import Rules, convert_state_dict

# What both layouts spell alike.
DERIVED: Rules = [
    (r"\.num_batches_tracked$", None),  # counts steps, enters no result, and absent where the norms were frozen
    (r"\.(n|num)_points_scale$", None),  # one over the number of points
    (r"^(decoder\.(anchors|valid_mask)|encoder\.pos_embed\d+)$", None),  # of the one size that it was evaluated at
]
FUSION: Rules = [
    (r"^encoder\.lateral_convs\.", "encoder.lateral."),
    (r"^encoder\.downsample_convs\.", "encoder.downsample."),
    (r"^encoder\.fpn_blocks?\.", "encoder.top_down."),
    (r"^encoder\.pan_blocks?\.", "encoder.bottom_up."),
    (r"\.bottlenecks\.(\d+)\.conv1\.", r".blocks.\1.conv3."),  # theirs counts, ours names the kernel
    (r"\.bottlenecks\.(\d+)\.conv2\.", r".blocks.\1.conv1."),
    (r"^(encoder\.(?:top_down|bottom_up)\.\d+)\.conv1\.", r"\1.enter."),
    (r"^(encoder\.(?:top_down|bottom_up)\.\d+)\.conv2\.", r"\1.shortcut."),
    (r"^(encoder\.(?:top_down|bottom_up)\.\d+)\.conv3\.", r"\1.leave."),
]
SAMPLING: Rules = [
    (r"\.(?:encoder_attn|cross_attn)\.sampling_offsets\.", ".cross_attention.offsets."),
    (r"\.(?:encoder_attn|cross_attn)\.attention_weights\.", ".cross_attention.weights."),
    (r"\.(?:encoder_attn|cross_attn)\.value_proj\.", ".cross_attention.value."),
    (r"\.(?:encoder_attn|cross_attn)\.output_proj\.", ".cross_attention.out."),
]

# All but the backbone; of Hugging Face's files.
HUGGINGFACE_HEAD: Rules = [
    (r"^encoder_input_proj\.(\d+)\.0\.", r"encoder.project.\1.conv."),
    (r"^encoder_input_proj\.(\d+)\.1\.", r"encoder.project.\1.norm."),
    (r"^encoder\.(encoder|aifi)\.0\.layers\.", "encoder.attend."),
    *FUSION,
    # query selection and denoising
    (r"^decoder_input_proj\.(\d+)\.0\.", r"memory_project.\1.conv."),
    (r"^decoder_input_proj\.(\d+)\.1\.", r"memory_project.\1.norm."),
    (r"^enc_output\.", "query_selection.proposals.project."),
    (r"^enc_score_head\.", "query_selection.proposals.score_head."),
    (r"^enc_bbox_head\.", "query_selection.proposals.box_head."),
    (r"^denoising_class_embed\.", "denoising.embedding."),
    # decoder
    (r"^decoder\.query_pos_head\.", "decoder.query_pos."),
    (r"^(decoder\.)?class_embed\.", "decoder.score_heads."),
    (r"^(decoder\.)?bbox_embed\.", "decoder.box_heads."),
    *SAMPLING,
    (r"\.encoder_attn_layer_norm\.", ".cross_attention_residual.norm."),
    # blocks of both
    (r"\.self_attn\.q_proj\.(weight|bias)$", r".self_attention.qkv.\1[0]"),
    (r"\.self_attn\.k_proj\.(weight|bias)$", r".self_attention.qkv.\1[1]"),
    (r"\.self_attn\.v_proj\.(weight|bias)$", r".self_attention.qkv.\1[2]"),
    (r"\.self_attn\.(out|o)_proj\.", ".self_attention.out."),
    (r"\.self_attn_layer_norm\.", ".self_attention_residual.norm."),
    (r"\.(mlp\.)?fc1\.", ".feed_forward.expand."),
    (r"\.(mlp\.)?fc2\.", ".feed_forward.contract."),
    (r"\.final_layer_norm\.", ".feed_forward_residual.norm."),
]
HUGGINGFACE_RULES: Rules = [
    (r"^model\.", ""),
    *DERIVED,
    (r"^backbone\.model\.embedder\.embedder\.", "backbone.stem."),
    (r"^backbone\.model\.encoder\.stages\.(\d+)\.layers\.(\d+)\.layer\.", r"backbone.stages.\1.\2.convs."),
    (r"^backbone\.model\.encoder\.stages\.(\d+)\.layers\.", r"backbone.stages.\1."),
    *hgnetv2.HUGGINGFACE_RULES,
    (r"\.convolution\.", ".conv."),
    (r"\.normalization\.", ".norm."),
    *HUGGINGFACE_HEAD,
]

# All but the backbone; of the authors' files (RT-DETR v1 numbers what v2 and D-FINE name).
OFFICIAL_HEAD: Rules = [
    (r"^encoder\.input_proj\.(\d+)\.(?:0|conv)\.", r"encoder.project.\1.conv."),
    (r"^encoder\.input_proj\.(\d+)\.(?:1|norm)\.", r"encoder.project.\1.norm."),
    (r"^encoder\.encoder\.0\.layers\.", "encoder.attend."),
    *FUSION,
    # query selection and denoising
    (r"^decoder\.input_proj\.(\d+)\.(?:0|conv)\.", r"memory_project.\1.conv."),
    (r"^decoder\.input_proj\.(\d+)\.(?:1|norm)\.", r"memory_project.\1.norm."),
    (r"^decoder\.enc_output\.(?:0|proj)\.", "query_selection.proposals.project.0."),
    (r"^decoder\.enc_output\.(?:1|norm)\.", "query_selection.proposals.project.1."),
    (r"^decoder\.enc_score_head\.", "query_selection.proposals.score_head."),
    (r"^decoder\.enc_bbox_head\.", "query_selection.proposals.box_head."),
    (r"^decoder\.denoising_class_embed\.", "denoising.embedding."),
    # decoder
    (r"^decoder\.query_pos_head\.", "decoder.query_pos."),
    (r"^decoder\.dec_score_head\.", "decoder.score_heads."),
    (r"^decoder\.dec_bbox_head\.", "decoder.box_heads."),
    (r"^decoder\.decoder\.layers\.", "decoder.layers."),
    *SAMPLING,
    # blocks of both
    (r"\.self_attn\.in_proj_(weight|bias)$", r".self_attention.qkv.\1"),
    (r"\.self_attn\.out_proj\.", ".self_attention.out."),
    (r"\.linear1\.", ".feed_forward.expand."),
    (r"\.linear2\.", ".feed_forward.contract."),
    (r"^(encoder\.attend\.\d+|decoder\.layers\.\d+)\.norm1\.", r"\1.self_attention_residual.norm."),
    (r"^(encoder\.attend\.\d+)\.norm2\.", r"\1.feed_forward_residual.norm."),
    (r"^(decoder\.layers\.\d+)\.norm2\.", r"\1.cross_attention_residual.norm."),
    (r"^(decoder\.layers\.\d+)\.norm3\.", r"\1.feed_forward_residual.norm."),
]
OFFICIAL_RULES: Rules = [
    *DERIVED,
    (r"^backbone\.conv1\.conv1_1\.", "backbone.stem.0."),
    (r"^backbone\.conv1\.conv1_2\.", "backbone.stem.1."),
    (r"^backbone\.conv1\.conv1_3\.", "backbone.stem.2."),
    (r"^backbone\.res_layers\.(\d+)\.blocks\.", r"backbone.stages.\1."),
    (r"^(backbone\.stages\.\d+\.\d+)\.branch2a\.", r"\1.convs.0."),
    (r"^(backbone\.stages\.\d+\.\d+)\.branch2b\.", r"\1.convs.1."),
    (r"^(backbone\.stages\.\d+\.\d+)\.branch2c\.", r"\1.convs.2."),
    (r"^(backbone\.stages\.\d+\.\d+)\.short\.conv\.(conv|norm)\.", r"\1.shortcut.1.\2."),  # after an average pool
    (r"^(backbone\.stages\.\d+\.\d+)\.short\.", r"\1.shortcut."),
    *hgnetv2.OFFICIAL_RULES,
    *OFFICIAL_HEAD,
]


def convert(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of an RT-DETR, of either version, by its authors or by Hugging Face, under our names.

    Without the counters of batch norms, which few files have.

    Raises:
        UserError: the names are of another layout, or of D-FINE.
    """
    rules = {"huggingface": HUGGINGFACE_RULES, "official": OFFICIAL_RULES}.get(layout(state) or "")
    if any(name.endswith("decoder.query_pos_head.layers.2.weight") for name in state):
        raise UserError("DEIM's RT-DETRv2 has another head of positions, which is not supported; use RT-DETRv2's own")
    if rules is None or any(".gateway." in name for name in state):
        raise UserError(
            f"the weights are no RT-DETR's by its authors or by Hugging Face (the first is "
            f"{next(iter(state), 'missing')!r}); name the model that they were made for"
        )
    return convert_state_dict(state, rules)


def layout(state: Mapping[str, Tensor]) -> str | None:
    """``"huggingface"`` or ``"official"`` (RT-DETR's and D-FINE's authors'), by the names; None where it is neither."""
    if any(name.startswith(("model.encoder_input_proj.", "encoder_input_proj.")) for name in state):
        return "huggingface"
    if any(name.startswith("encoder.input_proj.") for name in state) and "decoder.enc_score_head.weight" in state:
        return "official"
    return None
