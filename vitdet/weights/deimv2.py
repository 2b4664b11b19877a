"""DEIMv2 weights in other people's layouts: its authors', trained or merged for inference, and transformers'.

Beyond renaming:

* The two 1×1 convolutions into a fusion block are one in their files, the shortcut's half first.
* In files that were merged for inference each convolution has swallowed its batch norm, and a RepVGG block its 1×1
  convolution. Ours keep both: the norms become the identity with the merged bias, the lost convolution zero. The
  numbers stay the same, up to rounding; before training such a model its norms need statistics (:func:`is_merged`).
* Score heads and quality heads that a file lacks (merged files have the last layer's only, transformers writes tied
  ones once) are copies of the last one that it has.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vitdet.errors import UserError, some
from vitdet.weights import dfine, hgnetv2, rtdetr, vit
from vitdet.weights.preprocessing import IMAGENET, UNIT, values
from vitdet.weights.rules import Rules, convert_state_dict

NORM_EPS = 1e-5  # of the batch norms, ours and theirs

OFFICIAL_RULES: Rules = [
    # spatial adapter
    (r"^backbone\.sta\.stem\.0\.", "backbone.details.stem.conv."),
    (r"^backbone\.sta\.stem\.1\.", "backbone.details.stem.norm."),
    (r"^backbone\.sta\.conv2\.0\.", "backbone.details.convs.0.conv."),
    (r"^backbone\.sta\.conv2\.1\.", "backbone.details.convs.0.norm."),
    (r"^backbone\.sta\.conv3\.1\.", "backbone.details.convs.1.conv."),
    (r"^backbone\.sta\.conv3\.2\.", "backbone.details.convs.1.norm."),
    (r"^backbone\.sta\.conv4\.1\.", "backbone.details.convs.2.conv."),
    (r"^backbone\.sta\.conv4\.2\.", "backbone.details.convs.2.norm."),
    (r"^backbone\.convs\.(\d)\.", r"backbone.fuse.\1.conv."),
    (r"^backbone\.norms\.(\d)\.", r"backbone.fuse.\1.norm."),
    # encoder
    (r"\.conv_bn_fused\.", ".conv."),
    (r"\.bottlenecks\.(\d+)\.conv\.", r".blocks.\1.conv3.conv."),  # merged
    (r"\.(cv[23]\.0)\.conv1\.", r".\1.joint."),
    (r"^encoder\.down_sample1\.1\.", "encoder.coarsen.conv."),
    (r"^encoder\.down_sample1\.2\.", "encoder.coarsen.norm."),
    (r"^encoder\.down_sample2\.1\.", "encoder.downsample.conv."),
    (r"^encoder\.down_sample2\.2\.", "encoder.downsample.norm."),
    (r"^encoder\.bi_fusion\.cv\.", "encoder.globalise."),
    # decoder
    (r"^(decoder\..+\.norm\d?)\.scale$", r"\1.weight"),
    (r"\.swish_ffn\.w12\.", ".feed_forward.expand."),
    (r"\.swish_ffn\.w3\.", ".feed_forward.contract."),
    *dfine.OFFICIAL_RULES,
]

HUGGINGFACE_RULES: Rules = [
    (r"^model\.", ""),
    *rtdetr.DERIVED,
    (r"^conv_encoder\.model\.", "backbone."),
    *hgnetv2.HUGGINGFACE_RULES,
    # spatial adapter
    (r"^conv_encoder\.spatial_tuning_adapter\.stem_conv\.", "backbone.details.stem."),
    (r"^conv_encoder\.spatial_tuning_adapter\.conv2\.", "backbone.details.convs.0."),
    (r"^conv_encoder\.spatial_tuning_adapter\.conv3\.", "backbone.details.convs.1."),
    (r"^conv_encoder\.spatial_tuning_adapter\.conv4\.", "backbone.details.convs.2."),
    (r"^conv_encoder\.fusion_proj\.", "backbone.fuse."),
    # encoder
    (r"^(conv_encoder\.encoder_input_proj|encoder\.input_proj)\.", "encoder.project."),
    (r"^encoder\.down_conv1\.", "encoder.coarsen."),
    (r"^encoder\.down_conv2\.", "encoder.downsample."),
    (r"^encoder\.bi_fusion_conv\.", "encoder.globalise."),
    (dfine.FUSION_BLOCK + r"conv1\.", r"encoder.\1_\2.enter."),
    (dfine.FUSION_BLOCK + r"conv2\.", r"encoder.\1_\2.leave."),
    (r"\.csp_rep1\.conv2\.", ".chains.0.1."),
    (r"\.csp_rep2\.conv2\.", ".chains.1.1."),
    (r"\.csp_rep1\.conv1\.", ".chains.0.0.joint."),
    (r"\.csp_rep2\.conv1\.", ".chains.1.0.joint."),
    (r"\.csp_rep1\.", ".chains.0.0."),
    (r"\.csp_rep2\.", ".chains.1.0."),
    (r"^decoder_input_proj\.", "memory_project."),
    # decoder
    (r"^(decoder\.layers\.\d+)\.mlp\.gate_proj\.(\w+)$", r"\1.feed_forward.expand.\2[0]"),
    (r"^(decoder\.layers\.\d+)\.mlp\.up_proj\.(\w+)$", r"\1.feed_forward.expand.\2[1]"),
    (r"^(decoder\.layers\.\d+)\.mlp\.down_proj\.", r"\1.feed_forward.contract."),
    *dfine.HUGGINGFACE_HEAD,
]

# A name that a layout has and no other does, its rules, and what comes before the names of its ViT.
_LAYOUTS: list[tuple[str, Rules, str]] = [
    (r"^decoder\.decoder\.layers\.0\.swish_ffn\.", OFFICIAL_RULES, r"^backbone\.dinov3\.(?:_model\.)?"),
    (r"^model\.decoder\.layers\.0\.mlp\.gate_proj\.", HUGGINGFACE_RULES, r"^model\.conv_encoder\.backbone\."),
]


def convert(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a DEIMv2 under our names, without the counters of batch norms.

    Raises:
        UserError: the names are of another layout.
    """
    for pattern, rules, vit_prefix in _LAYOUTS:
        if any(re.search(pattern, name) for name in state):
            inner = {re.sub(vit_prefix, "", name): t for name, t in state.items() if re.match(vit_prefix, name)}
            outer = {name: tensor for name, tensor in state.items() if not re.match(vit_prefix, name)}
            ours = _unmerge(_split(convert_state_dict(outer, rules)))
            return {**_complete(ours), **_vit(inner)}
    raise UserError(
        "the weights are no DEIMv2's by its authors or by transformers "
        f"(they hold {some(list(state), 3) or 'nothing'}); "
        "name the model that they were made for"
    )


def _vit(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The ViT's weights, which are in a layout of their own; none where there are none."""
    if not state:
        return {}
    ours = vit.convert({name: tensor for name, tensor in state.items() if tensor.numel()})  # transformers: 0 registers
    return {f"backbone.vit.{name.removeprefix('backbone.')}": tensor for name, tensor in ours.items()}


def _split(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The joint convolution into each fusion block as two: shortcut, then chain."""
    parts: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if ".joint." in name:
            shortcut, chain = tensor.chunk(2)
            parts |= {name.replace(".joint.", ".shortcut."): shortcut, name.replace(".joint.", ".enter."): chain}
        else:
            parts[name] = tensor
    return parts


def _unmerge(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convolutions with a bias as ones without, and a norm that adds it; RepVGG blocks with a 1×1 convolution of 0."""
    whole: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if not name.endswith(".conv.bias"):
            whole[name] = tensor
            continue
        base = name.removesuffix("conv.bias")
        whole |= _identity_norm(base, tensor)
        if base.endswith(".conv3."):
            point = base.removesuffix("conv3.") + "conv1."
            whole[point + "conv.weight"] = tensor.new_zeros(len(tensor), len(tensor), 1, 1)
            whole |= _identity_norm(point, torch.zeros_like(tensor))
    return whole


def _identity_norm(base: str, bias: Tensor) -> dict[str, Tensor]:
    """A batch norm that only adds a bias."""
    return {
        f"{base}norm.weight": torch.ones_like(bias),
        f"{base}norm.bias": bias,
        f"{base}norm.running_mean": torch.zeros_like(bias),
        f"{base}norm.running_var": torch.full_like(bias, 1 - NORM_EPS),
    }


def is_merged(state: Mapping[str, Tensor]) -> bool:
    """Whether these converted weights come from a file merged for inference: their norms know nothing of any batch."""
    variances = [value for name, value in state.items() if name.endswith("norm.running_var")]
    return any(bool((value == torch.full_like(value, 1 - NORM_EPS)).all()) for value in variances)


def _complete(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """One score and one quality head for each layer; one box head where all layers share it; the bins' reach."""
    layers = _numbers(state, "layers")
    for kind in ("score_heads", "quality_heads"):
        present = _numbers(state, kind)
        if present:
            last = _below(state, f"decoder.{kind}.{max(present)}.")
            for index in set(layers) - set(present):
                state |= {f"decoder.{kind}.{index}.{name}": tensor for name, tensor in last.items()}
    boxes = {index: _below(state, f"decoder.box_heads.{index}.") for index in _numbers(state, "box_heads")}
    one = next(iter(boxes.values()), {})
    if all(head.keys() == one.keys() and all(torch.equal(head[n], one[n]) for n in one) for head in boxes.values()):
        state = {name: tensor for name, tensor in state.items() if not name.startswith("decoder.box_heads.")}
        state |= {f"decoder.box_heads.0.{name}": tensor for name, tensor in one.items()}
    state.setdefault("decoder.up", torch.tensor([0.5]))
    state.setdefault("decoder.reg_scale", torch.tensor([4.0]))
    return state


def _numbers(state: Mapping[str, Tensor], kind: str) -> list[int]:
    """The numbers that occur below ``decoder.{kind}``, in order."""
    found = {int(match[1]) for name in state if (match := re.match(rf"decoder\.{kind}\.(\d+)\.", name))}
    return sorted(found)


def _below(state: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin so, by the rest of their names."""
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


# By the encoder's width, or the ViT's.
_LITE = {64: "deimv2_atto", 96: "deimv2_femto", 112: "deimv2_pico"}
_ON_VIT = {(192, False): "deimv2_s", (256, False): "deimv2_m", (384, False): "deimv2_l", (384, True): "deimv2_x"}


def arguments(state: Mapping[str, Tensor]) -> tuple[str, dict[str, Any]]:
    """The name of the DEIMv2 whose converted weights these are, and what they show of its arguments.

    Raises:
        UserError: none of the published ones.
    """
    width = state["query_selection.proposals.score_head.weight"].shape[1]
    patches = state.get("backbone.vit.patch_embedding.project.weight")
    if patches is not None:
        block = "backbone.vit.encoder.layers.0.feed_forward."
        gated = state[block + "expand.weight"].shape[0] != state[block + "contract.weight"].shape[1]
        name = _ON_VIT.get((patches.shape[0], gated))
    elif "encoder.coarsen.conv.weight" in state:
        name = _LITE.get(width)
    else:
        name = "deimv2_n" if width == 128 else None
    if name is None:
        raise UserError(f"there is no DEIMv2 of the width {width} here; the published ones are atto to x")
    shown: dict[str, Any] = {
        "num_classes": state["decoder.score_heads.0.weight"].shape[0],
        "project_tokens": "query_selection.proposals.project.0.weight" in state,
    }
    if "denoising.embedding.weight" not in state:
        shown["denoising_queries"] = 0
    return name, shown


def preprocessing(name: str) -> dict[str, Any]:
    """How images are prepared for the published files, which do not say it themselves."""
    side = {"deimv2_atto": 320, "deimv2_femto": 416}.get(name, 640)
    return values((side, side), IMAGENET if name in _ON_VIT.values() else UNIT, "bilinear", None)
