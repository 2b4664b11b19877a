"""Detectors of ours in Hugging Face's layout: ``config.json``, ``preprocessor_config.json``, ``model.safetensors``.

Names are those that files on the Hub carry, which transformers renames while it loads them. One literal table for each
family, and what families share in :mod:`~vitdet.weights.to_huggingface.parts`; the way back is in
:mod:`vitdet.weights`, the table of the same family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from vitdet.errors import UserError
from vitdet.weights.to_huggingface import deimv2, detr, dfine, parts, rtdetr

_FAMILIES: dict[str, Callable[..., tuple[dict[str, Any], dict[str, Tensor]]]] = {
    "deimv2": deimv2.layout,
    "detr": detr.layout,
    "dfine": dfine.layout,
    "rtdetr": rtdetr.layout,
}


def layout_of(
    family: str, name: str, state: Mapping[str, Tensor], numbers: Mapping[str, Any], *, class_names: Sequence[str],
    prepared: Mapping[str, Any],
) -> tuple[dict[str, dict[str, Any]], dict[str, Tensor]]:  # fmt: skip
    """What a folder in Hugging Face's layout holds for a detector.

    Args:
        family: a key of our converters. name: of the model. state: its weights under our names, with the counters of
            batch norms that are not frozen.
        numbers: what weights do not show: heads, points (one number a level), sampling, reach, num_queries,
            denoising_queries, label_noise, box_noise, encoder_width, channels, strides and out_stages (of the maps
            that the backbone gives), backbone ("resnet", "hgnetv2", …), summed, activation and position_activation
            (of the heads), refine_positions, vit (heads, norm_eps, gated, key_bias, out_layers; or None); of a DETR
            heads, hidden, dropout, backbone and dilated.
        class_names: of its K classes. prepared: the plain values of a ``Preprocessing``.

    Returns:
        Contents of the JSON files by their names, and the tensors by theirs.

    Raises:
        UserError: transformers has no such model.
    """
    if family not in _FAMILIES:
        raise UserError(f"{name} has no counterpart in transformers; keep the .safetensors of ours")
    config, tensors = _FAMILIES[family](name, state, numbers)
    processor = detr.processor if family == "detr" else parts.processor
    files = {"config.json": config | parts.labels(class_names), "preprocessor_config.json": processor(prepared)}
    return files, tensors
