"""D-FINE's and RT-DETR's own files: every kind of name, a whole file through our reader, and files of others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from vitdet.backbones.resnet import BasicBlock, Bottleneck, ResNet
from vitdet.detectors.dfine import dfine
from vitdet.detectors.rtdetr import RTDETR
from vitdet.errors import UserError
from vitdet.weights import dfine as dfine_weights
from vitdet.weights import rtdetr as rtdetr_weights
from vitdet.weights.files import read_state
from vitdet.weights.rules import load_strict, rename

NAMES = {  # theirs -> ours
    "encoder.input_proj.1.conv.weight": "encoder.project.1.conv.weight",
    "encoder.input_proj.1.norm.bias": "encoder.project.1.norm.bias",
    "encoder.encoder.0.layers.0.self_attn.in_proj_weight": "encoder.attend.0.self_attention.qkv.weight",
    "encoder.encoder.0.layers.0.norm2.bias": "encoder.attend.0.feed_forward_residual.norm.bias",
    "encoder.lateral_convs.0.conv.weight": "encoder.lateral.0.conv.weight",
    "encoder.fpn_blocks.0.cv1.conv.weight": "encoder.top_down.0.enter.conv.weight",
    "encoder.fpn_blocks.0.cv2.0.conv1.conv.weight": "encoder.top_down.0.chains.0.0.enter.conv.weight",
    "encoder.fpn_blocks.0.cv2.0.conv2.norm.weight": "encoder.top_down.0.chains.0.0.shortcut.norm.weight",
    "encoder.fpn_blocks.0.cv2.0.bottlenecks.1.conv1.conv.weight":
        "encoder.top_down.0.chains.0.0.blocks.1.conv3.conv.weight",
    "encoder.pan_blocks.1.cv3.0.bottlenecks.0.conv2.norm.bias":
        "encoder.bottom_up.1.chains.1.0.blocks.0.conv1.norm.bias",
    "encoder.pan_blocks.1.cv3.1.conv.weight": "encoder.bottom_up.1.chains.1.1.conv.weight",
    "encoder.pan_blocks.1.cv4.norm.running_var": "encoder.bottom_up.1.leave.norm.running_var",
    "encoder.downsample_convs.0.0.cv1.conv.weight": "encoder.downsample.0.0.conv.weight",
    "encoder.downsample_convs.0.0.cv2.norm.bias": "encoder.downsample.0.1.norm.bias",
    "decoder.up": "decoder.up",
    "decoder.decoder.up": "decoder.up",
    "decoder.decoder.reg_scale": "decoder.reg_scale",
    "decoder.input_proj.0.conv.weight": "memory_project.0.conv.weight",
    "decoder.denoising_class_embed.weight": "denoising.embedding.weight",
    "decoder.query_pos_head.layers.1.bias": "decoder.query_pos.layers.1.bias",
    "decoder.enc_output.proj.weight": "query_selection.proposals.project.0.weight",
    "decoder.enc_output.norm.bias": "query_selection.proposals.project.1.bias",
    "decoder.enc_score_head.weight": "query_selection.proposals.score_head.weight",
    "decoder.enc_bbox_head.layers.2.bias": "query_selection.proposals.box_head.layers.2.bias",
    "decoder.dec_score_head.2.weight": "decoder.score_heads.2.weight",
    "decoder.pre_bbox_head.layers.0.weight": "decoder.first_box_head.layers.0.weight",
    "decoder.dec_bbox_head.0.layers.2.weight": "decoder.box_heads.0.layers.2.weight",
    "decoder.decoder.layers.1.self_attn.out_proj.bias": "decoder.layers.1.self_attention.out.bias",
    "decoder.decoder.layers.1.norm1.weight": "decoder.layers.1.self_attention_residual.norm.weight",
    "decoder.decoder.layers.1.cross_attn.sampling_offsets.weight": "decoder.layers.1.cross_attention.offsets.weight",
    "decoder.decoder.layers.1.cross_attn.attention_weights.bias": "decoder.layers.1.cross_attention.weights.bias",
    "decoder.decoder.layers.1.cross_attn.num_points_scale": None,
    "decoder.decoder.layers.1.gateway.gate.weight": "decoder.layers.1.cross_attention_residual.gate.weight",
    "decoder.decoder.layers.1.gateway.norm.bias": "decoder.layers.1.cross_attention_residual.norm.bias",
    "decoder.decoder.layers.1.linear2.weight": "decoder.layers.1.feed_forward.contract.weight",
    "decoder.decoder.layers.1.norm3.weight": "decoder.layers.1.feed_forward_residual.norm.weight",
    "decoder.decoder.lqe_layers.2.reg_conf.layers.1.bias": "decoder.quality_heads.2.head.layers.1.bias",
    "decoder.anchors": None,
    "decoder.valid_mask": None,
}  # fmt: skip
RTDETR_NAMES = {
    "backbone.conv1.conv1_1.conv.weight": "backbone.stem.0.conv.weight",
    "backbone.conv1.conv1_3.norm.running_mean": "backbone.stem.2.norm.running_mean",
    "backbone.res_layers.3.blocks.1.branch2b.conv.weight": "backbone.stages.3.1.convs.1.conv.weight",
    "backbone.res_layers.0.blocks.0.short.conv.weight": "backbone.stages.0.0.shortcut.conv.weight",
    "backbone.res_layers.0.blocks.0.short.norm.bias": "backbone.stages.0.0.shortcut.norm.bias",
    "backbone.res_layers.1.blocks.0.short.conv.conv.weight": "backbone.stages.1.0.shortcut.1.conv.weight",
    "backbone.res_layers.1.blocks.0.short.conv.norm.weight": "backbone.stages.1.0.shortcut.1.norm.weight",
    "encoder.input_proj.0.0.weight": "encoder.project.0.conv.weight",  # version 1
    "encoder.input_proj.0.1.bias": "encoder.project.0.norm.bias",
    "encoder.fpn_blocks.0.conv1.conv.weight": "encoder.top_down.0.enter.conv.weight",
    "encoder.fpn_blocks.0.conv3.norm.weight": "encoder.top_down.0.leave.norm.weight",
    "encoder.downsample_convs.0.conv.weight": "encoder.downsample.0.conv.weight",
    "decoder.input_proj.0.0.weight": "memory_project.0.conv.weight",
    "decoder.enc_output.0.weight": "query_selection.proposals.project.0.weight",
    "decoder.enc_output.1.weight": "query_selection.proposals.project.1.weight",
    "decoder.decoder.layers.0.cross_attn.value_proj.weight": "decoder.layers.0.cross_attention.value.weight",
    "decoder.decoder.layers.0.cross_attn.output_proj.bias": "decoder.layers.0.cross_attention.out.bias",
    "decoder.decoder.layers.0.norm2.bias": "decoder.layers.0.cross_attention_residual.norm.bias",
}


@pytest.mark.parametrize(("theirs", "ours"), NAMES.items())
def test_names_of_dfine(theirs: str, ours: str | None) -> None:
    assert rename(theirs, dfine_weights.OFFICIAL_RULES) == ours


@pytest.mark.parametrize(("theirs", "ours"), RTDETR_NAMES.items())
def test_names_of_rtdetr(theirs: str, ours: str) -> None:
    assert rename(theirs, rtdetr_weights.OFFICIAL_RULES) == ours


# Ours -> the authors', for a whole file; what the two detectors share.
_SHARED = [
    (r"^encoder\.project\.", "encoder.input_proj."),
    (r"^encoder\.attend\.", "encoder.encoder.0.layers."),
    (r"^encoder\.lateral\.", "encoder.lateral_convs."),
    (r"^encoder\.top_down\.", "encoder.fpn_blocks."),
    (r"^encoder\.bottom_up\.", "encoder.pan_blocks."),
    (r"\.blocks\.(\d+)\.conv1\.", r".bottlenecks.\1.two."),
    (r"\.blocks\.(\d+)\.conv3\.", r".bottlenecks.\1.conv1."),
    (r"\.two\.", ".conv2."),
    (r"^memory_project\.", "decoder.input_proj."),
    (r"^query_selection\.proposals\.project\.0\.", "decoder.enc_output.proj."),
    (r"^query_selection\.proposals\.project\.1\.", "decoder.enc_output.norm."),
    (r"^query_selection\.proposals\.score_head\.", "decoder.enc_score_head."),
    (r"^query_selection\.proposals\.box_head\.", "decoder.enc_bbox_head."),
    (r"^denoising\.embedding\.", "decoder.denoising_class_embed."),
    (r"^decoder\.layers\.", "decoder.decoder.layers."),
    (r"^decoder\.query_pos\.", "decoder.query_pos_head."),
    (r"^decoder\.score_heads\.", "decoder.dec_score_head."),
    (r"^decoder\.box_heads\.", "decoder.dec_bbox_head."),
    (r"\.self_attention\.qkv\.", ".self_attn.in_proj_"),
    (r"\.self_attention\.out\.", ".self_attn.out_proj."),
    (r"\.cross_attention\.offsets\.", ".cross_attn.sampling_offsets."),
    (r"\.cross_attention\.weights\.", ".cross_attn.attention_weights."),
    (r"\.cross_attention\.value\.", ".cross_attn.value_proj."),
    (r"\.cross_attention\.out\.", ".cross_attn.output_proj."),
    (r"\.feed_forward\.expand\.", ".linear1."),
    (r"\.feed_forward\.contract\.", ".linear2."),
    (r"\.self_attention_residual\.norm\.", ".norm1."),
    (r"^(encoder.*)\.feed_forward_residual\.norm\.", r"\1.norm2."),
    (r"^(decoder.*)\.feed_forward_residual\.norm\.", r"\1.norm3."),
]
_DFINE = [
    (r"\.chains\.(\d)\.0\.enter\.", r".chains.\1.0.conv1."),
    (r"\.chains\.(\d)\.0\.shortcut\.", r".chains.\1.0.conv2."),
    (r"\.chains\.0\.", ".cv2."),
    (r"\.chains\.1\.", ".cv3."),
    (r"(top_down|bottom_up)\.(\d)\.enter\.", r"\1.\2.cv1."),
    (r"(top_down|bottom_up)\.(\d)\.leave\.", r"\1.\2.cv4."),
    (r"^encoder\.downsample\.(\d)\.0\.", r"encoder.downsample_convs.\1.0.cv1."),
    (r"^encoder\.downsample\.(\d)\.1\.", r"encoder.downsample_convs.\1.0.cv2."),
    (r"^decoder\.quality_heads\.(\d)\.head\.", r"decoder.decoder.lqe_layers.\1.reg_conf."),
    (r"^decoder\.first_box_head\.", "decoder.pre_bbox_head."),
    (r"\.cross_attention_residual\.", ".gateway."),
]
_RTDETR = [
    (r"(top_down|bottom_up)\.(\d)\.enter\.", r"\1.\2.conv1."),
    (r"(top_down|bottom_up)\.(\d)\.shortcut\.", r"\1.\2.conv2."),
    (r"(top_down|bottom_up)\.(\d)\.leave\.", r"\1.\2.conv3."),
    (r"^encoder\.downsample\.", "encoder.downsample_convs."),
    (r"\.cross_attention_residual\.norm\.", ".norm2."),
    (r"^backbone\.stem\.0\.", "backbone.conv1.conv1_1."),
    (r"^backbone\.stem\.1\.", "backbone.conv1.conv1_2."),
    (r"^backbone\.stem\.2\.", "backbone.conv1.conv1_3."),
    (r"^backbone\.stages\.(\d)\.(\d)\.convs\.0\.", r"backbone.res_layers.\1.blocks.\2.branch2a."),
    (r"^backbone\.stages\.(\d)\.(\d)\.convs\.1\.", r"backbone.res_layers.\1.blocks.\2.branch2b."),
    (r"^backbone\.stages\.(\d)\.(\d)\.convs\.2\.", r"backbone.res_layers.\1.blocks.\2.branch2c."),
    (r"^backbone\.stages\.(\d)\.(\d)\.shortcut\.1\.", r"backbone.res_layers.\1.blocks.\2.short.conv."),
    (r"^backbone\.stages\.(\d)\.(\d)\.shortcut\.", r"backbone.res_layers.\1.blocks.\2.short."),
]


def written(model: nn.Module, names: list[tuple[str, str]], path: Path) -> dict[str, Tensor]:
    """Save the model as its authors would; gives what is in the file."""
    state = {}
    for name, value in model.state_dict().items():
        for pattern, replacement in [*names, *_SHARED]:
            name = re.sub(pattern, replacement, name)
        state[name] = value
    state |= {"decoder.anchors": torch.zeros(1, 3, 4), "decoder.valid_mask": torch.ones(1, 3, 1, dtype=torch.bool)}
    torch.save({"last_epoch": 71, "ema": {"module": state, "updates": 3}}, path)
    return state


NUMBERS = {
    "encoder_width": 32, "encoder_hidden": 64, "encoder_expansion": 0.5, "encoder_blocks": 2, "width": 16, "heads": 4,
    "decoder_hidden": 64, "decoder_layers": 2, "num_queries": 20,
}  # fmt: skip


def narrow(block: type[BasicBlock] | type[Bottleneck]) -> ResNet:
    return ResNet(depths=(1, 2, 1, 1), block=block, stem=(8, 8, 16), widths=(8, 8, 16, 16))


@pytest.mark.parametrize("block", [BasicBlock, Bottleneck])
def test_a_whole_file_of_rtdetr(block: type[BasicBlock], tmp_path: Path) -> None:
    first, second = (RTDETR(narrow(block), num_classes=3, **NUMBERS) for _ in range(2))
    written(first, _RTDETR, tmp_path / "rtdetr.pth")
    report = load_strict(
        second, rtdetr_weights.convert(read_state(tmp_path / "rtdetr.pth")), allow_missing=["*.num_batches_tracked"]
    )
    assert not report.unexpected
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name


def test_a_whole_file_of_dfine(tmp_path: Path) -> None:
    """But the backbone, which is tested by itself."""
    first = dfine(narrow(BasicBlock), 3, reg_scale=8.0, **NUMBERS)
    second = dfine(narrow(BasicBlock), 3, **NUMBERS)
    state = written(first, _DFINE, tmp_path / "dfine.pth")
    assert "decoder.decoder.layers.0.gateway.gate.weight" in state
    assert "encoder.fpn_blocks.0.cv2.0.bottlenecks.1.conv2.norm.weight" in state
    theirs = {name: value for name, value in read_state(tmp_path / "dfine.pth").items() if "backbone" not in name}
    report = load_strict(second, dfine_weights.convert(theirs), allow_missing=["*.num_batches_tracked", "backbone.*"])
    assert not report.unexpected
    for name, value in first.state_dict().items():
        if not name.startswith("backbone."):
            assert torch.equal(value, second.state_dict()[name]), name


def test_the_families_are_told_apart(tmp_path: Path) -> None:
    written(dfine(narrow(BasicBlock), 3, **NUMBERS), _DFINE, tmp_path / "dfine.pth")
    written(RTDETR(narrow(BasicBlock), num_classes=3, **NUMBERS), _RTDETR, tmp_path / "rtdetr.pth")
    with pytest.raises(UserError, match=r"the weights are no RT-DETR's by its authors or by Hugging Face \(the first"):
        rtdetr_weights.convert(read_state(tmp_path / "dfine.pth"))
    with pytest.raises(UserError, match=r"the weights are no D-FINE's by its authors or by Hugging Face \(the first"):
        dfine_weights.convert(read_state(tmp_path / "rtdetr.pth"))
    with pytest.raises(UserError, match=r"no D-FINE's .* \(the first is 'a'\)"):
        dfine_weights.convert({"a": torch.zeros(1)})
