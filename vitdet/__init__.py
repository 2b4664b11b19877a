"""vitdet: vision Transformers and the DETR family of detectors: train them, run them, measure them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vitdet.inference.predictor import Predictor
    from vitdet.results import Detections
    from vitdet.zoo import create_model, list_models, load_model

__version__ = "0.1.0"
__all__ = ["Detections", "Predictor", "__version__", "create_model", "list_models", "load_model"]

_HOMES = {
    "Detections": "vitdet.results",
    "Predictor": "vitdet.inference.predictor",
    "create_model": "vitdet.zoo",
    "list_models": "vitdet.zoo",
    "load_model": "vitdet.zoo",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that ``import vitdet`` does not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'vitdet' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
