"""A run's configuration: what can be set, and how it is read. An unknown key is an error."""

from __future__ import annotations

from vitdet.config.files import apply_override, check_config, find_config, load_config
from vitdet.config.sections import (
    AnyRunConfig,
    AugmentSection,
    ClassificationRunConfig,
    LossSection,
    ModelSection,
    OptimSection,
    RunConfig,
)

__all__ = [
    "AnyRunConfig",
    "AugmentSection",
    "ClassificationRunConfig",
    "LossSection",
    "ModelSection",
    "OptimSection",
    "RunConfig",
    "apply_override",
    "check_config",
    "find_config",
    "load_config",
]
