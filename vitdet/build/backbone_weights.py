"""A detector's backbone from the weights of a classifier, by whoever published it.

Its head, known by name, is left out. Everything else must fit, but for the last stage of DEIMv2's narrow HGNetV2s:
they start from B0's weights, of which that stage takes what has its names and shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vitdet import distributed, zoo
from vitdet.backbones.hgnetv2 import HGNetV2
from vitdet.backbones.pyramid import Pyramid
from vitdet.backbones.resnet import ResNet
from vitdet.backbones.spatial_adapter import SpatialAdapter
from vitdet.backbones.swin import Swin
from vitdet.backbones.timm import TimmBackbone
from vitdet.engine.checkpoint import read_metadata
from vitdet.engine.logging import say
from vitdet.errors import UserError
from vitdet.weights import hgnetv2, resnet, rtdetr
from vitdet.weights.files import read_state
from vitdet.weights.hub import locate, weights_file
from vitdet.weights.rules import LoadReport, convert_state_dict, load_strict

_State = dict[str, Tensor]

# What a classifier has behind its backbone; of a ViT also the last norm, where the detector's has none.
_HEADS = (
    "fc.*", "head.*", "head_dist.*", "classifier.*", "last_conv.*", "encoder.norm.*", "norm.*", "fc_norm.*",
    "conv_head.*", "bn2.*",
)  # fmt: skip
_MAP_NORMS = "out_norms.*"  # of all of a Swin's maps but the last, which no classifier has
_COUNTERS = "*.num_batches_tracked"  # few files have them, and frozen norms neither
_STAGES = 4  # of every published ResNet and HGNetV2; a detector may have no use for the last


def load_backbone(model: nn.Module, source: str | Path) -> LoadReport:
    """Start a model's backbone from the weights of a classifier, in place; the other parts stay as they are.

    Args:
        model: its ``backbone`` is a ResNet, an HGNetV2, a ViT or a Swin, also below a pyramid or an adapter, or timm's.
        source: a file, its address, a folder or a Hub id, see :func:`vitdet.weights.hub.locate`. For a ViT or a Swin
            anything that :func:`vitdet.load_model` takes; a file of ours, of any model with such a backbone, for all.

    Raises:
        UserError: the source cannot be had or read, or is of another backbone.
    """
    trunk = trunk_of(model)
    last, later = _narrow(trunk)
    try:
        report = load_strict(
            trunk, backbone_state(trunk, source), allow_missing=(_COUNTERS, _MAP_NORMS, *last), allow_reshaped=last,
            allow_unexpected=(_COUNTERS, *_HEADS, *last, *later),
        )  # fmt: skip
    except (UserError, ValueError) as error:
        raise UserError(f"model.backbone_weights {source} cannot be used: {error}") from error
    if distributed.rank() == 0:
        anew = [name for name in report.missing if not name.endswith(_COUNTERS[1:])]
        anew += [name for name, _, _ in report.reshaped]
        rest = f"; {len(anew)} tensors of its last stage start anew" if anew else ""
        say(f"note: the backbone starts from {source}{rest}")
    return report


def trunk_of(model: nn.Module) -> nn.Module:
    """The part of a model that a classifier has, too."""
    part: Any = getattr(model, "backbone", None)
    while isinstance(part, Pyramid | SpatialAdapter):
        part = part.backbone if isinstance(part, Pyramid) else part.vit
    if not isinstance(part, nn.Module):
        raise UserError(
            f"model.backbone_weights is for detectors, and {type(model).__name__} has no backbone; use model.weights"
        )
    return part


def backbone_state(trunk: nn.Module, source: str | Path) -> _State:
    """The tensors of a source under the trunk's names; of a head some may be left.

    Raises:
        UserError: the source cannot be had or read, or is of another kind of backbone.
    """
    path = locate(source)
    file = weights_file(path) if path.is_dir() else path
    ours = file.suffix == ".safetensors" and read_metadata(file) is not None
    if isinstance(trunk, ResNet | HGNetV2 | TimmBackbone) and not ours:
        theirs = read_state(file)
        if isinstance(trunk, TimmBackbone):
            return _of_timm(trunk, theirs)
        return _of_hgnetv2(theirs) if isinstance(trunk, HGNetV2) else _of_resnet(theirs)
    state = _below(zoo.read_source(source)[1], "backbone.")
    for part in ("backbone.", "vit."):  # of another detector, below a pyramid or an adapter
        state = _below(state, part) or state
    return trunk.adapt(state) if hasattr(trunk, "adapt") else state  # type: ignore[operator]


def _narrow(trunk: nn.Module) -> tuple[list[str], list[str]]:
    """Patterns of the names in the last stage of a narrow HGNetV2, and in those behind the trunk's last.

    A Swin without its last stage has its last norm behind another one.
    """
    if isinstance(trunk, Swin):
        count = len(trunk.stages)
        later = [f"stages.{index}.*" for index in range(count, _STAGES)]
        later += [f"merges.{index - 1}.*" for index in range(count, _STAGES)]
        return ["norm.*"] if later else [], later
    if not isinstance(trunk, ResNet | HGNetV2):
        return [], []
    count = len(trunk.stages)
    later = [f"stages.{index}.*" for index in range(count, _STAGES)]
    return [f"stages.{count - 1}.*"] if later and isinstance(trunk, HGNetV2) else [], later


def _of_resnet(theirs: Mapping[str, Tensor]) -> _State:
    """RT-DETR's ResNet-vd, or a plain ResNet."""
    if "conv1.conv1_1.conv.weight" not in theirs:
        return resnet.convert(theirs)
    whole = {f"backbone.{name}": tensor for name, tensor in theirs.items()}
    return _below(convert_state_dict(whole, rtdetr.OFFICIAL_RULES), "backbone.")


def _of_hgnetv2(theirs: Mapping[str, Tensor]) -> _State:
    """The files of D-FINE's authors, timm's with the same names, or Hugging Face's."""
    if any(name.startswith("hgnet_v2.") for name in theirs):
        whole = {f"backbone.{name.removeprefix('hgnet_v2.')}": tensor for name, tensor in theirs.items()}
        return _below(convert_state_dict(whole, hgnetv2.HUGGINGFACE_RULES), "backbone.")
    if "stem.stem1.conv.weight" not in theirs:
        raise UserError(
            f"the weights are no HGNetV2's (the first is {next(iter(theirs), 'missing')!r}); pass a file such as "
            "PPHGNetV2_B0_stage1.pth"
        )
    converted = convert_state_dict(theirs, hgnetv2.OFFICIAL_RULES)
    return {name.removeprefix("backbone."): tensor for name, tensor in converted.items()}


def _of_timm(trunk: TimmBackbone, theirs: Mapping[str, Tensor]) -> _State:
    """timm's own names, which its models of features change: a dot becomes a line, or ``model.`` stands before them."""
    own = {_flat(name): name for name in trunk.state_dict()}
    return {own.get(_flat(name), name): tensor for name, tensor in theirs.items()}


def _flat(name: str) -> str:
    """What all spellings of a name have in common."""
    while name.startswith("model."):
        name = name.removeprefix("model.")
    return name.replace(".", "_")


def _below(state: Mapping[str, Tensor], prefix: str) -> _State:
    """The tensors whose names begin so, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
