"""Models by name, with random weights."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from vitdet.backbones.timm import timm_classifier
from vitdet.classifiers import CLASSIFIERS
from vitdet.detectors import deimv2, detr, dfine, rtdetr
from vitdet.errors import UserError, did_you_mean
from vitdet.zoo.backbones import TIMM, make_backbone, strides_under

DETECTORS: dict[str, Callable[..., nn.Module]] = {
    "detr_r50": detr.detr_r50,
    "detr_r50_dc5": detr.detr_r50_dc5,
    "detr_r101": detr.detr_r101,
    "detr_r101_dc5": detr.detr_r101_dc5,
    "rtdetr_nano": rtdetr.rtdetr_nano,
    "rtdetr_r18": rtdetr.rtdetr_r18,
    "rtdetr_r34": rtdetr.rtdetr_r34,
    "rtdetr_r50_m": rtdetr.rtdetr_r50_m,
    "rtdetr_r50": rtdetr.rtdetr_r50,
    "rtdetr_r101": rtdetr.rtdetr_r101,
    "rtdetr_hgnetv2_l": rtdetr.rtdetr_hgnetv2_l,
    "rtdetr_hgnetv2_x": rtdetr.rtdetr_hgnetv2_x,
    "rtdetr_vit_s": rtdetr.rtdetr_vit_s,
    "rtdetrv2_r18": rtdetr.rtdetrv2_r18,
    "rtdetrv2_r34": rtdetr.rtdetrv2_r34,
    "rtdetrv2_r50_m": rtdetr.rtdetrv2_r50_m,
    "rtdetrv2_r50": rtdetr.rtdetrv2_r50,
    "rtdetrv2_r101": rtdetr.rtdetrv2_r101,
    "rtdetrv2_hgnetv2_l": rtdetr.rtdetrv2_hgnetv2_l,
    "rtdetrv2_hgnetv2_x": rtdetr.rtdetrv2_hgnetv2_x,
    "dfine_n": dfine.dfine_n,
    "dfine_s": dfine.dfine_s,
    "dfine_m": dfine.dfine_m,
    "dfine_l": dfine.dfine_l,
    "dfine_x": dfine.dfine_x,
    "deimv2_atto": deimv2.deimv2_atto,
    "deimv2_femto": deimv2.deimv2_femto,
    "deimv2_pico": deimv2.deimv2_pico,
    "deimv2_n": deimv2.deimv2_n,
    "deimv2_s": deimv2.deimv2_s,
    "deimv2_m": deimv2.deimv2_m,
    "deimv2_l": deimv2.deimv2_l,
    "deimv2_x": deimv2.deimv2_x,
}
MODELS: dict[str, Callable[..., nn.Module]] = {**DETECTORS, **CLASSIFIERS}

# A file's header may ask for any number, and nobody has a machine for more than these.
_MOST_LAYERS = 256
_MOST_CLASSES = 10**8
_MOST_PARAMETERS = 20 * 10**9


def list_models(pattern: str = "*") -> list[str]:
    """Names of the models that match a shell pattern; ``timm/NAME``, any model of timm, is not among them."""
    return sorted(fnmatch.filter(MODELS, pattern))


def check_name(name: str) -> None:
    """Refuse a name that is of no model of ours and does not begin with ``timm/``."""
    if name not in MODELS and not name.startswith(TIMM):
        raise UserError(f"there is no model {name!r}; {did_you_mean(name, sorted(MODELS))}")


def create_model(name: str, *, num_classes: int | None = None, **overrides: Any) -> nn.Module:
    """A model with random weights.

    Args:
        name: see :func:`list_models`; or ``timm/NAME``.
        num_classes: K; where not given, 80 for a detector and 1000 for a classifier. A classifier of 0 classes gives
            its features.
        overrides: arguments of the model other than the variant's; timm's own for ``timm/NAME``. A ``backbone`` is
            given by name, see :func:`make_backbone`.

    Raises:
        UserError: for an unknown name or argument, or a value the model refuses.
    """
    check_name(name)
    if num_classes is None:
        num_classes = 80 if name in DETECTORS else 1000
    if name in DETECTORS and num_classes < 1:
        raise UserError(f"a detector needs at least 1 class, got {num_classes}; check the categories of the data")
    if not 0 <= num_classes <= _MOST_CLASSES:
        raise UserError(f"num_classes is {num_classes}; it must be from 0, for features, to {_MOST_CLASSES:,}")
    builder = MODELS[name] if name in MODELS else partial(timm_classifier, name)
    if name in MODELS:
        known = [key for key in builder_arguments(builder) if key != "num_classes"]
        for key in overrides:
            if key not in known:
                raise UserError(f"model {name!r} has no argument {key!r}; {did_you_mean(key, known)}")
    try:
        if name in CLASSIFIERS:
            _check_size(builder, num_classes, overrides)
        arguments = dict(overrides)
        if arguments.get("backbone") is not None:
            arguments["backbone"] = make_backbone(arguments["backbone"], strides=strides_under(name))
        return builder(num_classes, **arguments).to(memory_format=torch.channels_last)
    except (TypeError, ValueError, RuntimeError, ArithmeticError, LookupError) as error:
        raise UserError(f"model {name!r} cannot be built with {str(overrides)[:500]}: {error}") from error


def builder_arguments(builder: Callable[..., Any]) -> dict[str, Any]:
    """The arguments that a model takes by name, with their values: a classifier's own and its backbone's."""
    given: dict[str, Any] = {}
    while isinstance(builder, partial):
        given = {**builder.keywords, **given}
        builder = builder.func
    own = {p.name: p.default for p in inspect.signature(builder).parameters.values() if p.kind == p.KEYWORD_ONLY}
    arguments = {**own, **given}
    if builder in DETECTORS.values():
        return {**_family_arguments(builder.__module__), **arguments}
    backbone = arguments.pop("backbone", None)
    return arguments if backbone is None else {**builder_arguments(backbone), **arguments}


def _family_arguments(module: str) -> dict[str, Any]:
    """The arguments that all detectors of a module take."""
    if module == detr.__name__:
        return builder_arguments(detr.DETR)
    families = {dfine.__name__: dfine.dfine, deimv2.__name__: deimv2.deimv2}
    family = families.get(module)
    shared = {**builder_arguments(rtdetr.RTDETR), **(builder_arguments(family) if family else {})}
    shared.pop("decoder")  # which a family chooses
    return shared


def _check_size(builder: Callable[..., Any], num_classes: int, overrides: dict[str, Any]) -> None:
    """Refuse numbers that no machine holds, before memory is taken for them."""
    arguments = builder_arguments(builder) | overrides
    layers = sum(arguments["depths"]) if "depths" in arguments else arguments["layers"]
    if layers > _MOST_LAYERS:
        raise ValueError(f"at most {_MOST_LAYERS} layers are built, got {layers}")
    if torch.get_default_device().type != "meta" and (overrides or num_classes > 10**5):
        with torch.device("meta"):
            count = sum(parameter.numel() for parameter in builder(num_classes, **overrides).parameters())
        if count > _MOST_PARAMETERS:
            raise ValueError(f"it would have {count:,} parameters")
