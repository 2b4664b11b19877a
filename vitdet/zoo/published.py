"""Weights of detectors that their authors published, by ``model:tag``, and what is known of each model.

The tags: ``coco``, trained on COCO; ``objects365``, trained on Objects365; ``objects365_coco``, the latter trained on
COCO; ``coco_discrete``, trained on COCO and made for sampling without interpolation. Figures are the publishers' own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vitdet.errors import UserError, did_you_mean
from vitdet.weights.hub import locate
from vitdet.zoo.builders import MODELS, check_name, create_model, list_models


@dataclass(frozen=True, kw_only=True)
class PublishedWeights:
    """One file, or one repository, of weights.

    Attributes:
        address: ``https://`` of a file, or a Hub id.
        ap: COCO AP on val2017, in percent; None where it was not measured on COCO.
        gflops: of one image in the size that the AP is of; None where nobody says.
        image_size: (height, width) of the images; of DETR the shorter side and the most of the longer one.
        licence: of the weights; ``(code)`` behind it: the publisher says so of the code and nothing of the weights.
        source: where these facts stand.
        sha256: first digits of the checksum; None where none is published.
    """

    address: str
    ap: float | None = None
    gflops: float | None = None
    image_size: tuple[int, int] = (640, 640)
    licence: str
    source: str
    sha256: str | None = None


_DETR = "https://dl.fbaipublicfiles.com/detr/"
_RTDETR = "https://github.com/lyuwenyu/storage/releases/download/"
_DFINE = "https://github.com/Peterande/storage/releases/download/dfinev1.0/"
_DEIMV2 = "Intellindust/DEIMv2_"

_detr = partial(
    PublishedWeights,
    image_size=(800, 1333),
    licence="Apache-2.0",
    source="arXiv 2005.12872, table 1; https://github.com/facebookresearch/detr",
)
_rtdetr = partial(
    PublishedWeights,
    licence="Apache-2.0 (code)",
    source="arXiv 2304.08069, table 2; https://github.com/lyuwenyu/RT-DETR (rtdetr_pytorch, and issue 42)",
)
_rtdetrv2 = partial(
    PublishedWeights,
    licence="Apache-2.0 (code)",
    source="arXiv 2407.17140, table 1; https://github.com/lyuwenyu/RT-DETR (rtdetrv2_pytorch)",
)
_dfine = partial(
    PublishedWeights,
    licence="Apache-2.0 (code)",
    source="arXiv 2410.13842, table 1; https://github.com/Peterande/D-FINE",
)
_deimv2 = partial(
    PublishedWeights,
    licence="Apache-2.0",
    source="arXiv 2509.20787; https://github.com/Intellindust-AI-Lab/DEIMv2",
)
# Their backbones are DINOv3's, or were taught by it; it has a licence of its own.
_dinov3 = partial(_deimv2, licence="Apache-2.0, DINOv3 License")

PUBLISHED: dict[str, PublishedWeights] = {
    "detr_r50:coco": _detr(address=f"{_DETR}detr-r50-e632da11.pth", sha256="e632da11", ap=42.0, gflops=86),
    "detr_r50_dc5:coco": _detr(address=f"{_DETR}detr-r50-dc5-f0fb7ef5.pth", sha256="f0fb7ef5", ap=43.3, gflops=187),
    "detr_r101:coco": _detr(address=f"{_DETR}detr-r101-2c7b67e5.pth", sha256="2c7b67e5", ap=43.5, gflops=152),
    "detr_r101_dc5:coco": _detr(address=f"{_DETR}detr-r101-dc5-a2e86def.pth", sha256="a2e86def", ap=44.9, gflops=253),
    "rtdetr_r18:coco": _rtdetr(address=f"{_RTDETR}v0.1/rtdetr_r18vd_dec3_6x_coco_from_paddle.pth", ap=46.4, gflops=60),
    "rtdetr_r18:objects365": _rtdetr(address=f"{_RTDETR}v0.1/rtdetr_r18vd_1x_objects365_from_paddle.pth", gflops=60),
    "rtdetr_r18:objects365_coco": _rtdetr(
        address=f"{_RTDETR}v0.1/rtdetr_r18vd_5x_coco_objects365_from_paddle.pth", ap=49.0, gflops=60
    ),
    "rtdetr_r34:coco": _rtdetr(address=f"{_RTDETR}v0.1/rtdetr_r34vd_dec4_6x_coco_from_paddle.pth", ap=48.9, gflops=92),
    "rtdetr_r50_m:coco": _rtdetr(address=f"{_RTDETR}v0.1/rtdetr_r50vd_m_6x_coco_from_paddle.pth", ap=51.3, gflops=100),
    "rtdetr_r50:coco": _rtdetr(address=f"{_RTDETR}v0.1/rtdetr_r50vd_6x_coco_from_paddle.pth", ap=53.1, gflops=136),
    "rtdetr_r50:objects365": _rtdetr(address=f"{_RTDETR}v0.1/rtdetr_r50vd_1x_objects365_from_paddle.pth", gflops=136),
    "rtdetr_r50:objects365_coco": _rtdetr(
        address=f"{_RTDETR}v0.1/rtdetr_r50vd_2x_coco_objects365_from_paddle.pth", ap=55.2, gflops=136
    ),
    "rtdetr_r101:coco": _rtdetr(address=f"{_RTDETR}v0.1/rtdetr_r101vd_6x_coco_from_paddle.pth", ap=54.3, gflops=259),
    "rtdetr_r101:objects365": _rtdetr(address=f"{_RTDETR}v0.1/rtdetr_r101vd_1x_objects365_from_paddle.pth", gflops=259),
    "rtdetr_r101:objects365_coco": _rtdetr(
        address=f"{_RTDETR}v0.1/rtdetr_r101vd_2x_coco_objects365_from_paddle.pth", ap=56.2, gflops=259
    ),
    # The first version's own files are Paddle's (AP 53.0 and 54.8); the second's are of the same arithmetic.
    "rtdetr_hgnetv2_l:coco": _rtdetr(
        address=f"{_RTDETR}v0.1/rtdetrv2_hgnetv2_l_6x_coco_from_paddle.pth", ap=52.9, gflops=110
    ),
    "rtdetr_hgnetv2_x:coco": _rtdetr(
        address=f"{_RTDETR}v0.1/rtdetrv2_hgnetv2_x_6x_coco_from_paddle.pth", ap=54.7, gflops=234
    ),
    "rtdetrv2_r18:coco": _rtdetrv2(
        address=f"{_RTDETR}v0.2/rtdetrv2_r18vd_120e_coco_rerun_48.1.pth", ap=48.1, gflops=60
    ),
    "rtdetrv2_r18:coco_discrete": _rtdetrv2(
        address=f"{_RTDETR}v0.1/rtdetrv2_r18vd_dsp_3x_coco.pth", ap=47.4, gflops=60
    ),
    "rtdetrv2_r34:coco": _rtdetrv2(address=f"{_RTDETR}v0.1/rtdetrv2_r34vd_120e_coco_ema.pth", ap=49.9, gflops=92),
    # The second r is the publisher's.
    "rtdetrv2_r34:coco_discrete": _rtdetrv2(
        address=f"{_RTDETR}v0.1/rrtdetrv2_r34vd_dsp_1x_coco.pth", ap=49.2, gflops=92
    ),
    "rtdetrv2_r50_m:coco": _rtdetrv2(address=f"{_RTDETR}v0.1/rtdetrv2_r50vd_m_7x_coco_ema.pth", ap=51.9, gflops=100),
    "rtdetrv2_r50_m:coco_discrete": _rtdetrv2(
        address=f"{_RTDETR}v0.1/rtdetrv2_r50vd_m_dsp_3x_coco.pth", ap=51.4, gflops=100
    ),
    "rtdetrv2_r50:coco": _rtdetrv2(address=f"{_RTDETR}v0.1/rtdetrv2_r50vd_6x_coco_ema.pth", ap=53.4, gflops=136),
    "rtdetrv2_r50:coco_discrete": _rtdetrv2(
        address=f"{_RTDETR}v0.1/rtdetrv2_r50vd_dsp_1x_coco.pth", ap=52.9, gflops=136
    ),
    "rtdetrv2_r101:coco": _rtdetrv2(
        address=f"{_RTDETR}v0.1/rtdetrv2_r101vd_6x_coco_from_paddle.pth", ap=54.3, gflops=259
    ),
    "rtdetrv2_hgnetv2_l:coco": _rtdetrv2(
        address=f"{_RTDETR}v0.1/rtdetrv2_hgnetv2_l_6x_coco_from_paddle.pth", ap=52.9, gflops=110
    ),
    "rtdetrv2_hgnetv2_x:coco": _rtdetrv2(
        address=f"{_RTDETR}v0.1/rtdetrv2_hgnetv2_x_6x_coco_from_paddle.pth", ap=54.7, gflops=234
    ),
    "dfine_n:coco": _dfine(address=f"{_DFINE}dfine_n_coco.pth", ap=42.8, gflops=7),
    "dfine_s:coco": _dfine(address=f"{_DFINE}dfine_s_coco.pth", ap=48.5, gflops=25),
    "dfine_s:objects365": _dfine(address=f"{_DFINE}dfine_s_obj365.pth", gflops=25),
    "dfine_s:objects365_coco": _dfine(address=f"{_DFINE}dfine_s_obj2coco.pth", ap=50.7, gflops=25),
    "dfine_m:coco": _dfine(address=f"{_DFINE}dfine_m_coco.pth", ap=52.3, gflops=57),
    "dfine_m:objects365": _dfine(address=f"{_DFINE}dfine_m_obj365.pth", gflops=57),
    "dfine_m:objects365_coco": _dfine(address=f"{_DFINE}dfine_m_obj2coco.pth", ap=55.1, gflops=57),
    "dfine_l:coco": _dfine(address=f"{_DFINE}dfine_l_coco.pth", ap=54.0, gflops=91),
    "dfine_l:objects365": _dfine(address=f"{_DFINE}dfine_l_obj365.pth", gflops=91),
    "dfine_l:objects365_coco": _dfine(address=f"{_DFINE}dfine_l_obj2coco_e25.pth", ap=57.3, gflops=91),
    "dfine_x:coco": _dfine(address=f"{_DFINE}dfine_x_coco.pth", ap=55.8, gflops=202),
    "dfine_x:objects365": _dfine(address=f"{_DFINE}dfine_x_obj365.pth", gflops=202),
    "dfine_x:objects365_coco": _dfine(address=f"{_DFINE}dfine_x_obj2coco.pth", ap=59.3, gflops=202),
    "deimv2_atto:coco": _deimv2(address=f"{_DEIMV2}HGNetv2_ATTO_COCO", ap=23.8, gflops=0.8, image_size=(320, 320)),
    "deimv2_femto:coco": _deimv2(address=f"{_DEIMV2}HGNetv2_FEMTO_COCO", ap=31.0, gflops=1.7, image_size=(416, 416)),
    "deimv2_pico:coco": _deimv2(address=f"{_DEIMV2}HGNetv2_PICO_COCO", ap=38.5, gflops=5.2),
    "deimv2_n:coco": _deimv2(address=f"{_DEIMV2}HGNetv2_N_COCO", ap=43.0, gflops=6.8),
    "deimv2_s:coco": _dinov3(address=f"{_DEIMV2}DINOv3_S_COCO", ap=50.9, gflops=25.6),
    "deimv2_m:coco": _dinov3(address=f"{_DEIMV2}DINOv3_M_COCO", ap=53.0, gflops=52.2),
    "deimv2_l:coco": _dinov3(address=f"{_DEIMV2}DINOv3_L_COCO", ap=56.0, gflops=96.7),
    "deimv2_x:coco": _dinov3(address=f"{_DEIMV2}DINOv3_X_COCO", ap=57.8, gflops=151.6),
}

_SOURCE = re.compile(r"(?P<model>[A-Za-z]\w+):(?P<tag>\w+)")


def weights_of(model: str) -> dict[str, PublishedWeights]:
    """The published weights of a model, by tag."""
    return {key.partition(":")[2]: entry for key, entry in PUBLISHED.items() if key.partition(":")[0] == model}


def find_published(source: str | Path) -> tuple[str, PublishedWeights] | None:
    """The model and the weights that ``model:tag`` names; None for a source of another kind.

    Raises:
        UserError: no such model, no such weights of it, or a model's name alone where it has weights.
    """
    text = str(source)
    match = _SOURCE.fullmatch(text)
    model = match["model"] if match else text
    known = weights_of(model)
    if Path(source).exists() or (match is None and not known):
        return None
    check_name(model)
    if not known:
        raise UserError(f"no weights of {model!r} are published; pass a file of your own training")
    if match is None:
        raise UserError(
            f"{model!r} names a model without weights; pass {' or '.join(f'{model}:{tag}' for tag in known)}"
        )
    if match["tag"] not in known:
        raise UserError(f"there are no weights {match['tag']!r} of {model!r}; known: {', '.join(known)}")
    return model, known[match["tag"]]


def locate_source(source: str | Path, *, model: str | None = None) -> tuple[Path, str | None]:
    """The local file or folder of a source, and the name of its model where the caller or ``model:tag`` has it.

    Args:
        source: see :func:`find_published` and :func:`~vitdet.weights.hub.locate`. model: as the caller names it.

    Raises:
        UserError: see these two, or the caller's is another model than the weights'.
    """
    found = find_published(source)
    if found is None:
        return locate(source), model
    name, weights = found
    if model not in (None, name):
        raise UserError(f"{source} holds a {name!r}, not a {model!r}; name the same model, or none")
    return locate(weights.address, sha256=weights.sha256), name


def describe_models(pattern: str = "*") -> dict[str, dict[str, Any]]:
    """Of each model that matches a shell pattern: number of parameters, GFLOPs, and published weights by tag.

    Parameters are those of a detector of 80 classes, or a classifier of 1000.

    Raises:
        UserError: none matches.
    """
    names = list_models(pattern)
    if not names:
        raise UserError(f"no model matches {pattern!r}; {did_you_mean(pattern, sorted(MODELS))}")
    described = {}
    for name in names:
        with torch.device("meta"):
            parameters = sum(parameter.numel() for parameter in create_model(name).parameters())
        weights = {tag: asdict(entry) for tag, entry in weights_of(name).items()}
        gflops = next((entry["gflops"] for entry in weights.values()), None)
        described[name] = {"parameters": parameters, "gflops": gflops, "weights": weights}
    return described


def format_table(described: Mapping[str, Mapping[str, Any]]) -> str:
    """What :func:`describe_models` returns, a line for each of the published weights, and one for a model without."""
    rows = [("model", "parameters", "GFLOPs", "AP", "licence", "weights", "address (checksum)")]
    for name, model in described.items():
        gflops = "" if model["gflops"] is None else f"{model['gflops']:g}"
        first = (name, f"{model['parameters'] / 1e6:.2f} M", gflops)
        for tag, entry in model["weights"].items():
            ap = "" if entry["ap"] is None else f"{entry['ap']:.1f}"
            checksum = "" if entry["sha256"] is None else f" (sha256 {entry['sha256']}…)"
            rows.append((*first, ap, entry["licence"], f"{name}:{tag}", entry["address"] + checksum))
            first = ("", "", "")
        if not model["weights"]:
            rows.append((*first, "", "", "", ""))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    aligned = ("<", ">", ">", ">", "<", "<", "<")
    lines = (
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, aligned, widths, strict=True))
        for row in rows
    )
    return "\n".join(f" {line.rstrip()}" for line in lines)
