"""RT-DETR weights in other people's layouts.

Hugging Face's files do not carry the names that their modules have in memory (``fc1`` became ``mlp.fc1``, ``out_proj``
``o_proj``, ``encoder.encoder`` ``encoder.aifi``; older files hold each head twice): the rules take either spelling.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from vitdet.errors import UserError
from vitdet.weights.rules import Rules, convert_state_dict

HUGGINGFACE_RULES: Rules = [
    (r"\.num_batches_tracked$", None),  # counts steps, enters no result, and absent where the norms were frozen
    (r"^model\.", ""),
    # backbone
    (r"^backbone\.model\.embedder\.embedder\.", "backbone.stem."),
    (r"^backbone\.model\.encoder\.stages\.(\d+)\.layers\.(\d+)\.layer\.", r"backbone.stages.\1.\2.convs."),
    (r"^backbone\.model\.encoder\.stages\.(\d+)\.layers\.", r"backbone.stages.\1."),
    (r"\.convolution\.", ".conv."),
    (r"\.normalization\.", ".norm."),
    # hybrid encoder
    (r"^encoder_input_proj\.(\d+)\.0\.", r"encoder.project.\1.conv."),
    (r"^encoder_input_proj\.(\d+)\.1\.", r"encoder.project.\1.norm."),
    (r"^encoder\.(encoder|aifi)\.0\.layers\.", "encoder.attend."),
    (r"^encoder\.lateral_convs\.", "encoder.lateral."),
    (r"^encoder\.downsample_convs\.", "encoder.downsample."),
    (r"^encoder\.fpn_blocks\.", "encoder.top_down."),
    (r"^encoder\.pan_blocks\.", "encoder.bottom_up."),
    (r"\.bottlenecks\.(\d+)\.conv1\.", r".blocks.\1.conv3."),  # theirs counts, ours names the kernel
    (r"\.bottlenecks\.(\d+)\.conv2\.", r".blocks.\1.conv1."),
    (r"^(encoder\.(?:top_down|bottom_up)\.\d+)\.conv1\.", r"\1.enter."),
    (r"^(encoder\.(?:top_down|bottom_up)\.\d+)\.conv2\.", r"\1.shortcut."),
    (r"^(encoder\.(?:top_down|bottom_up)\.\d+)\.conv3\.", r"\1.leave."),
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
    (r"\.encoder_attn\.sampling_offsets\.", ".cross_attention.offsets."),
    (r"\.encoder_attn\.attention_weights\.", ".cross_attention.weights."),
    (r"\.encoder_attn\.value_proj\.", ".cross_attention.value."),
    (r"\.encoder_attn\.output_proj\.", ".cross_attention.out."),
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


def convert(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a Hugging Face RT-DETR under our names, without the counters of batch norms.

    Raises:
        UserError: the names are of another layout.
    """
    if not any(name.startswith(("model.encoder_input_proj.", "encoder_input_proj.")) for name in state):
        raise UserError(
            f"the weights are no RT-DETR's by Hugging Face (the first is {next(iter(state), 'missing')!r}); "
            "name the model that they were made for"
        )
    return convert_state_dict(state, HUGGINGFACE_RULES)
