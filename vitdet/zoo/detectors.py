"""What a source of a detector's weights holds, by family: how its names are told, and what its weights show."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from vitdet.errors import UserError
from vitdet.weights import deimv2, detr, dfine, rtdetr
from vitdet.weights.classes import coco_names, coco_names_by_id
from vitdet.weights.describe import Description
from vitdet.weights.preprocessing import UNIT, values
from vitdet.weights.shown import detr_arguments, dfine_arguments, rtdetr_arguments

State = dict[str, Tensor]

# From a publisher's names to ours; each refuses what is another family's.
CONVERTERS: dict[str, Callable[[Mapping[str, Tensor]], State]] = {
    "detr": detr.convert,
    "deimv2": deimv2.convert,
    "dfine": dfine.convert,
    "rtdetr": rtdetr.convert,
}
_SHOWN: dict[str, Callable[[Mapping[str, Tensor]], tuple[str, dict[str, Any]]]] = {
    "detr": detr_arguments,
    "deimv2": deimv2.arguments,
    "dfine": dfine_arguments,
    "rtdetr": rtdetr_arguments,
}


def family_of(name: str) -> str:
    """The family, a key of :data:`CONVERTERS`, of the detector of this name: ``rtdetrv2_r18`` is of ``"rtdetr"``."""
    return next(family for family in CONVERTERS if name.startswith(family))


def describe_detector(
    family: str, name: str | None, said: Description, state: State, file: Path
) -> tuple[str, dict[str, Any], list[str] | None, dict[str, Any]]:
    """Name, arguments, class names (None where nobody tells them) and preprocessing of a detector.

    Args:
        family: of the weights. name: as the caller or the file's name has it, or None. said: by what lies beside.
        state: the weights under our names. file: theirs.
    """
    found, shown = _SHOWN[family](state)
    if found == "rtdetr_r50" and shown["encoder_expansion"] == 0.5 and said.kind is None:
        found = "rtdetr_r50_m"  # by its authors; transformers' evaluates all of its layers
    if said.kind == "rt_detr_v2":  # the same weights as version 1's by names and shapes
        found = found.replace("rtdetr_", "rtdetrv2_")
    if "points" in said.arguments:  # of as many heads as are said; weights show the product alone
        shown.pop("points", None)
    arguments = {**said.arguments, **shown}
    if family == "detr":
        found = _with_dilation(found, name, arguments.pop("dilated", None))
    elif not any(key.startswith("denoising.") for key in state):
        arguments["denoising_queries"] = 0
    arguments |= _by_file_name(family, file.name) if said.kind is None else {}
    if name is not None and _variant(name) != _variant(found):
        raise UserError(f"the weights are of {found!r}, not of {name!r}; leave out the name, or use the other's file")
    names, usual = said.class_names, coco_names_by_id() if family == "detr" else coco_names()
    if names is None and shown["num_classes"] == len(usual):
        names = usual
    return name or found, arguments, names, said.preprocessing or _prepared(family, found)


def _variant(name: str) -> str:
    """The name without what weights do not show: the version of RT-DETR, layers that only training uses, dilation."""
    return name.replace("rtdetrv2_", "rtdetr_").replace("_r50_m", "_r50").removesuffix("_dc5")


def _by_file_name(family: str, name: str) -> dict[str, Any]:
    """What the authors' file names alone tell: discrete sampling, and DEIM's D-FINE."""
    told: dict[str, Any] = {"sampling": "discrete"} if re.search(r"_dsp\d*_", name) else {}
    if family == "dfine" and name.startswith("deim_"):
        told["activation"] = "silu"
    return told


def _with_dilation(found: str, name: str | None, dilated: bool | None) -> str:
    """The name of a DETR by whether its backbone's last stage is dilated, which the weights do not show.

    Args:
        found: what they show. name: as the caller or the file's name has it. dilated: by what lies beside.
    """
    if dilated is None and name is None:
        raise UserError(
            f"the weights do not say whether the backbone's last stage is dilated; pass model={found} or {found}_dc5"
        )
    told = f"{found}_dc5" if dilated else found
    if dilated is not None and name not in (None, told):
        raise UserError(f"its description says that it is {told!r}, not {name!r}; leave out the name")
    return told


def _prepared(family: str, name: str) -> dict[str, Any]:
    """How the family's own code prepares images, where nothing else says it: mostly a square, in [0, 1]."""
    if family == "detr":
        return detr.preprocessing()
    return deimv2.preprocessing(name) if family == "deimv2" else values((640, 640), UNIT, "bilinear", None)
