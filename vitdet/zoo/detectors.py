"""What a source of a detector's weights holds, by family: how its names are told, and what its weights show."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from vitdet.weights import deimv2, dfine, rtdetr
from vitdet.weights.classes import coco_names
from vitdet.weights.describe import Description
from vitdet.weights.preprocessing import UNIT, values
from vitdet.weights.shown import dfine_arguments, rtdetr_arguments

State = dict[str, Tensor]

# From a publisher's names to ours; each refuses what is another family's.
CONVERTERS: dict[str, Callable[[Mapping[str, Tensor]], State]] = {
    "deimv2": deimv2.convert,
    "dfine": dfine.convert,
    "rtdetr": rtdetr.convert,
}
_SHOWN: dict[str, Callable[[Mapping[str, Tensor]], tuple[str, dict[str, Any]]]] = {
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
    if said.kind == "rt_detr_v2":  # the same weights as version 1's by names and shapes
        found = found.replace("rtdetr_", "rtdetrv2_")
    arguments = {**said.arguments, **shown}
    if not any(key.startswith("denoising.") for key in state):
        arguments["denoising_queries"] = 0
    if "_dsp_" in file.name:  # "discrete sampling" in the authors' file names; the weights do not show it
        arguments["sampling"] = "discrete"
    names = said.class_names
    if names is None and shown["num_classes"] == len(coco_names()):
        names = coco_names()
    return name or found, arguments, names, said.preprocessing or _prepared(family, found)


def _prepared(family: str, name: str) -> dict[str, Any]:
    """How the family's own code prepares images, where nothing else says it: stretched to a square, in [0, 1]."""
    return deimv2.preprocessing(name) if family == "deimv2" else values((640, 640), UNIT, "bilinear", None)
