"""What is told of a detector by its weights' shapes, its file's name and what lies beside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from vitdet.errors import UserError
from vitdet.weights.classes import COCO, coco_names_by_id
from vitdet.weights.describe import Description
from vitdet.zoo import create_model
from vitdet.zoo.detectors import describe_detector, family_of


def described(
    name: str, file: str, *, said: Description | None = None, told: str | None = None, **arguments: Any
) -> tuple[str, dict[str, Any]]:
    with torch.device("meta"):
        state = create_model(name, **{"num_classes": 80, **arguments}).state_dict()
    if name.startswith("dfine"):
        state |= {key: torch.ones(1) for key in ("decoder.up", "decoder.reg_scale")}
    found = describe_detector(family_of(name), told, said or Description(), state, Path(file))
    assert found[2] == (coco_names_by_id() if name.startswith("detr") else list(COCO.values()))
    return found[0], found[1]


@pytest.mark.parametrize("points", [1, 2, 3])
def test_fewer_points_are_seen(points: int) -> None:
    """As of the authors' rtdetrv2_r18vd_sp1, sp2, sp3."""
    name, arguments = described("rtdetrv2_r18", f"rtdetrv2_r18vd_sp{points}_120e_coco.pth", points=points)
    assert arguments["points"] == points
    assert "points" not in described("rtdetr_r18", "x.pth")[1]
    assert name == "rtdetr_r18"  # by the weights alone; the file's name is read before


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("rtdetrv2_r18vd_dsp_3x_coco.pth", "discrete"),
        ("rtdetrv2_r18vd_dsp1_3x_coco.pth", "discrete"),
        ("r18.pth", None),
    ],
)
def test_discrete_sampling_is_in_the_files_name(file: str, expected: str | None) -> None:
    assert described("rtdetr_r18", file)[1].get("sampling") == expected


def test_deims_d_fine_is_in_the_files_name() -> None:
    """Its activation is SiLU, which no shape shows."""
    assert described("dfine_s", "deim_dfine_hgnetv2_s_coco_120e.pth")[1]["activation"] == "silu"
    assert "activation" not in described("dfine_s", "dfine_s_coco.pth")[1]
    beside = Description(kind="d_fine", arguments={"num_queries": 10})
    assert "activation" not in described("dfine_s", "deim_x.safetensors", said=beside)[1]


def test_r50_m_is_seen_whatever_its_file_is_called() -> None:
    """Its authors evaluate three of its six layers, transformers all of them."""
    assert described("rtdetr_r50_m", "checkpoint0071.pth")[0] == "rtdetr_r50_m"
    assert described("rtdetr_r50", "checkpoint0071.pth")[0] == "rtdetr_r50"
    assert described("rtdetr_r50_m", "model.safetensors", said=Description(kind="rt_detr"))[0] == "rtdetr_r50"


@pytest.mark.parametrize(
    ("held", "told"), [("dfine_n", "dfine_s"), ("deimv2_atto", "deimv2_femto"), ("rtdetr_r18", "rtdetrv2_r34")]
)
def test_another_variant_is_told(held: str, told: str) -> None:
    """By the caller, or by the name of the file."""
    with pytest.raises(UserError, match=f"^the weights are of '{held}', not of '{told}'; leave out the name"):
        described(held, "x.pth", told=told)


@pytest.mark.parametrize(("held", "told"), [("rtdetr_r18", "rtdetrv2_r18"), ("detr_r50", "detr_r50_dc5")])
def test_what_weights_do_not_show_may_be_told(held: str, told: str) -> None:
    classes = {"num_classes": 91} if held == "detr_r50" else {}
    assert described(held, "x.pth", told=told, **classes)[0] == told


def test_silu_reaches_all_of_d_fines_heads() -> None:
    with torch.device("meta"):
        model = create_model("dfine_n", num_classes=2, activation="silu")
    parts = {name.split(".")[0] for name, part in model.named_modules() if isinstance(part, torch.nn.ReLU)}
    assert parts <= {"backbone"}
