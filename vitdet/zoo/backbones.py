"""Backbones by name, as they stand under a detector: a module that gives maps of the strides that it takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from vitdet.backbones import hgnetv2, resnet
from vitdet.backbones.pyramid import Pyramid
from vitdet.backbones.timm import timm_maps
from vitdet.backbones.vit import ViT
from vitdet.classifiers import CLASSIFIERS, classifier
from vitdet.errors import UserError, did_you_mean

TIMM = "timm/"  # before the name of any model of timm

# Those that nothing but detectors stands on; a classifier's name means its backbone.
CONVOLUTIONAL: dict[str, Callable[[], Any]] = {
    "resnet18_vd": resnet.resnet18_vd,
    "resnet34_vd": resnet.resnet34_vd,
    "resnet50_vd": resnet.resnet50_vd,
    "resnet101_vd": resnet.resnet101_vd,
    "resnet50": resnet.resnet50,
    "resnet101": resnet.resnet101,
    "hgnetv2_b0": hgnetv2.hgnetv2_b0,
    "hgnetv2_b1": hgnetv2.hgnetv2_b1,
    "hgnetv2_b2": hgnetv2.hgnetv2_b2,
    "hgnetv2_b3": hgnetv2.hgnetv2_b3,
    "hgnetv2_b4": hgnetv2.hgnetv2_b4,
    "hgnetv2_b5": hgnetv2.hgnetv2_b5,
    "hgnetv2_b6": hgnetv2.hgnetv2_b6,
}
_STRIDES = {
    "detr_r50": (32,), "dfine_n": (16, 32), "deimv2_n": (16, 32), "deimv2_atto": (16,), "deimv2_femto": (16,),
    "deimv2_pico": (16,),
}  # fmt: skip


def strides_under(detector: str) -> tuple[int, ...]:
    """The strides of the maps that the detector of this name takes from its backbone."""
    return _STRIDES.get(detector, (8, 16, 32))


def make_backbone(name: object, *, strides: Sequence[int]) -> nn.Module:
    """A backbone with random weights that gives one map of each of these strides, to images of any size.

    A plain ViT gets a :class:`Pyramid` where its one map is not enough; its learnt positions keep the grid of the
    images that its name says, and are resampled in every forward pass.

    Args:
        name: a key of :data:`CONVOLUTIONAL`, the name of a classifier, or ``timm/NAME``. It may come from a file, so
            it is no more than the name of a known architecture.
        strides: ascending, of 8, 16 and 32.

    Raises:
        UserError: no such backbone, or none that gives these maps.
    """
    if not isinstance(name, str):
        raise UserError(f"backbone is the name of a model, got {name!r}; name one, such as 'resnet50_vd'")
    if name.startswith(TIMM):
        backbone: Any = timm_maps(name, strides)
    elif name in CONVOLUTIONAL:
        backbone = keep_strides(CONVOLUTIONAL[name](), strides)
    elif name in CLASSIFIERS:
        backbone = _of_classifier(name, strides)
    else:
        raise UserError(f"there is no backbone {name!r}; {did_you_mean(name, [*CONVOLUTIONAL, *CLASSIFIERS])}")
    if list(backbone.strides) == list(strides):
        return backbone
    (stride,) = backbone.strides
    scales = [stride / wanted for wanted in strides]
    if not set(scales) <= {4, 2, 1, 0.5}:
        raise UserError(
            f"the backbone {name!r} has patches of {stride}, which give no maps of strides {list(strides)}; "
            "choose one with patches of 16"
        )
    return Pyramid(backbone, scales=scales)


def keep_strides(backbone: Any, strides: Sequence[int]) -> Any:
    """The same ResNet or HGNetV2, giving its maps of these strides alone, without the stages behind the last one."""
    places = [list(backbone.strides).index(stride) for stride in strides]
    backbone.out_stages = tuple(backbone.out_stages[place] for place in places)
    backbone.channels = [backbone.channels[place] for place in places]
    backbone.strides = list(strides)
    backbone.stages = backbone.stages[: backbone.out_stages[-1] + 1]
    return backbone


def _of_classifier(name: str, strides: Sequence[int]) -> Any:
    """A classifier's backbone: a ViT giving its last map, or a Swin giving the maps of these strides."""
    arguments = dict(CLASSIFIERS[name].keywords)
    builder = arguments.pop("backbone")
    for own in inspect.signature(classifier).parameters:  # the head's
        arguments.pop(own, None)
    if builder is ViT:
        return ViT(**arguments)
    stages = [index for index, stride in enumerate((4, 8, 16, 32)) if stride in strides]
    return builder(**arguments, out_stages=stages, out_norms=True)
