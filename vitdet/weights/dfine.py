"""D-FINE weights in other people's layouts: Hugging Face's, and the authors' (DEIM's files of D-FINE, too).

What RT-DETR has as well is in :mod:`vitdet.weights.rtdetr`; here are the backbone, the fusion blocks and the decoder's
own parts. ``up`` and ``reg_scale`` are constants that both publishers store, the authors twice.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from vitdet.errors import UserError
from vitdet.weights import hgnetv2, rtdetr
from vitdet.weights.rules import Rules, convert_state_dict

FUSION_BLOCK = r"^encoder\.(fpn|pan)_(blocks?(?:\.\d+)?)\."  # DEIMv2's smallest have one, without a number
_FUSION_NAMES: Rules = [
    (r"\.chains\.(\d)\.0\.conv1\.", r".chains.\1.0.enter."),
    (r"\.chains\.(\d)\.0\.conv2\.", r".chains.\1.0.shortcut."),
]
_DECODER: Rules = [
    (r"\.gateway\.", ".cross_attention_residual."),
    (r"^decoder\.(?:decoder\.)?lqe_layers\.(\d+)\.reg_conf\.", r"decoder.quality_heads.\1.head."),
    (r"^decoder\.pre_bbox_head\.", "decoder.first_box_head."),
    (r"^decoder\.decoder\.(up|reg_scale)$", r"decoder.\1"),
]

# Of Hugging Face's files: all but the backbone and the fusion blocks.
HUGGINGFACE_HEAD: Rules = [
    (r"^encoder\.downsample_convs\.(\d+)\.conv1\.", r"encoder.downsample.\1.0."),
    (r"^encoder\.downsample_convs\.(\d+)\.conv2\.", r"encoder.downsample.\1.1."),
    *_DECODER,
    (r"\.mlp\.layers\.0\.", ".feed_forward.expand."),
    (r"\.mlp\.layers\.1\.", ".feed_forward.contract."),
    *rtdetr.HUGGINGFACE_HEAD,
]
HUGGINGFACE_RULES: Rules = [
    (r"^model\.", ""),
    *rtdetr.DERIVED,
    *hgnetv2.HUGGINGFACE_RULES,
    # theirs counts the convolutions of a fusion block in the order in which they run
    (FUSION_BLOCK + r"conv1\.", r"encoder.\1_\2.enter."),
    (FUSION_BLOCK + r"conv2\.", r"encoder.\1_\2.chains.0.1."),
    (FUSION_BLOCK + r"conv3\.", r"encoder.\1_\2.chains.1.1."),
    (FUSION_BLOCK + r"conv4\.", r"encoder.\1_\2.leave."),
    (FUSION_BLOCK + r"csp_rep1\.", r"encoder.\1_\2.chains.0.0."),
    (FUSION_BLOCK + r"csp_rep2\.", r"encoder.\1_\2.chains.1.0."),
    *_FUSION_NAMES,
    *HUGGINGFACE_HEAD,
]
OFFICIAL_RULES: Rules = [
    *rtdetr.DERIVED,
    *hgnetv2.OFFICIAL_RULES,
    (FUSION_BLOCK + r"cv1\.", r"encoder.\1_\2.enter."),
    (FUSION_BLOCK + r"cv2\.", r"encoder.\1_\2.chains.0."),
    (FUSION_BLOCK + r"cv3\.", r"encoder.\1_\2.chains.1."),
    (FUSION_BLOCK + r"cv4\.", r"encoder.\1_\2.leave."),
    *_FUSION_NAMES,
    (r"^encoder\.downsample_convs\.(\d+)\.0\.cv1\.", r"encoder.downsample.\1.0."),
    (r"^encoder\.downsample_convs\.(\d+)\.0\.cv2\.", r"encoder.downsample.\1.1."),
    *_DECODER,
    *rtdetr.OFFICIAL_HEAD,
]


def convert(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a D-FINE, by its authors, by DEIM's or by Hugging Face, under our names.

    Raises:
        UserError: the names are of another layout or another model.
    """
    rules = {"huggingface": HUGGINGFACE_RULES, "official": OFFICIAL_RULES}.get(rtdetr.layout(state) or "")
    mine = ("decoder.layers.0.gateway.gate.weight", "decoder.decoder.layers.0.gateway.gate.weight")
    gated = any(".swish_ffn." in name or ".gate_proj." in name for name in state)  # DEIMv2 has gateways, too
    if rules is None or gated or not any(name.removeprefix("model.") in mine for name in state):
        raise UserError(
            f"the weights are no D-FINE's by its authors or by Hugging Face (the first is "
            f"{next(iter(state), 'missing')!r}); name the model that they were made for"
        )
    return convert_state_dict(state, rules)
