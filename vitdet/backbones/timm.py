"""Any model of timm, as a backbone or as a classifier.

timm is imported when one is built: it takes longer to import than all of this package.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

# Arguments of timm's with which a file's header could make it fetch or read other files, or give no classifier.
_ELSEWHERE = {
    "pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "pretrained_strict", "pretrained_filter_fn",
    "pretrained_custom_load", "checkpoint_path", "cache_dir", "features_only", "pruned",
}  # fmt: skip


_MOST_PARAMETERS = 10**9  # of a backbone under a detector: a file's header may name any of timm's models


def create_timm(name: str, *, device: str = "cpu", **arguments: Any) -> Any:
    """``timm.create_model``, with an error that names what is wrong.

    Args:
        name: timm's, with or without its tag (``"resnet50.a1_in1k"``) and with or without ``"timm/"`` before it.
        device: ``"meta"`` for a model that is only looked at: what timm computes in constructors and keeps out of state
            dicts is lost there.

    Raises:
        ValueError: timm has no such model, or it does not take these arguments.
    """
    import timm

    name = name.removeprefix("timm/")
    architecture = name.split(".")[0]
    if not timm.is_model(architecture):
        (nearest,) = difflib.get_close_matches(architecture, timm.list_models(), n=1, cutoff=0.0)
        raise ValueError(f"timm has no model {name!r}; did you mean {nearest!r}?")
    try:
        with torch.device(device):  # whatever the caller's is
            return timm.create_model(name, **arguments)
    except (TypeError, RuntimeError, LookupError, AttributeError, OSError, AssertionError) as error:
        raise ValueError(f"timm cannot build {name!r} with {arguments}: {error}") from error


class TimmBackbone(nn.Module):
    """The feature maps of a timm model, (B, C, h, w) whatever its own layout.

    Args:
        name: see :func:`create_timm`.
        out_indices: which of the model's features, in its own numbering; all that it gives by default where not given.
        pretrained: fetch its published weights.
        arguments: of the model, such as ``img_size``.
    """

    def __init__(
        self, name: str, *, out_indices: Sequence[int] | None = None, pretrained: bool = False, **arguments: Any
    ) -> None:
        super().__init__()
        if out_indices is not None:
            arguments["out_indices"] = tuple(out_indices)
        self.model = create_timm(name, features_only=True, pretrained=pretrained, **arguments)
        self.channels: list[int] = list(self.model.feature_info.channels())
        self.strides: list[int] = list(self.model.feature_info.reduction())
        self.channels_last = str(getattr(getattr(self.model, "output_fmt", None), "value", "NCHW")) == "NHWC"

    def forward(self, images: Tensor) -> list[Tensor]:
        """(B, 3, h, w) to one (B, C_s, h/stride_s, w/stride_s) map per feature."""
        maps = self.model(images)
        return [part.permute(0, 3, 1, 2) for part in maps] if self.channels_last else list(maps)


def timm_maps(name: str, strides: Sequence[int]) -> TimmBackbone:
    """A timm model that gives a map of each of these strides, or, where all of its maps have one stride, the last.

    Args:
        name: see :func:`create_timm`.

    Raises:
        ValueError: timm has no such model, or it is too large, takes images of one size only, or gives other maps.
    """
    arguments = {"dynamic_img_size": True} if timm_takes_size(name) else {}
    try:
        model = create_timm(name, device="meta", features_only=True, **arguments)
    except ValueError as error:
        if "dynamic_img_size" in str(error.__cause__):
            raise ValueError(f"{name!r} takes images of one size only, a detector of any; choose another") from error
        raise
    count = sum(parameter.numel() for parameter in model.parameters())
    if count > _MOST_PARAMETERS:
        raise ValueError(f"{name!r} has {count:,} parameters, and a detector's backbone at most {_MOST_PARAMETERS:,}")
    # Of several maps of one stride the last.
    found = dict(zip(model.feature_info.reduction(), model.feature_info.out_indices, strict=True))
    if len(found) > 1 and not found.keys() >= set(strides):
        raise ValueError(f"{name!r} gives maps of strides {sorted(found)}, not of {list(strides)}; choose another")
    indices = [found[stride] for stride in strides] if len(found) > 1 else list(found.values())
    return TimmBackbone(name, out_indices=indices, **arguments)


class TimmClassifier(nn.Module):
    """A timm classifier; its state dict holds timm's own names after ``model.``.

    Attributes:
        num_classes: K; with 0 the model gives its features.
        class_heads: shell patterns of the names of all that depends on the classes.
        stride: what height and width must be divisible by, where the model cuts patches; else 1.
    """

    def __init__(self, name: str, *, num_classes: int, **arguments: Any) -> None:
        super().__init__()
        self.model = create_timm(name, num_classes=num_classes, **arguments)
        self.num_classes = num_classes
        heads = getattr(self.model, "default_cfg", {}).get("classifier") or ()
        self.class_heads = tuple(f"model.{head}.*" for head in ([heads] if isinstance(heads, str) else heads))
        patch = getattr(getattr(self.model, "patch_embed", None), "patch_size", 1)
        self.stride: int = patch if isinstance(patch, int) else max(patch)

    def features(self, images: Tensor) -> Tensor:
        """(B, 3, h, w) to (B, C): what the head sees."""
        return self.model.forward_head(self.model.forward_features(images), pre_logits=True)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, h, w) to logits (B, K)."""
        return self.model(images)


def timm_classifier(name: str, num_classes: int, **overrides: Any) -> TimmClassifier:
    """A timm model as a classifier of ``num_classes``; ``overrides`` are timm's arguments.

    Raises:
        ValueError: an override that would fetch or read other files: overrides come from the headers of files, too.
    """
    _refuse_files(overrides)
    return TimmClassifier(name, num_classes=num_classes, **overrides)


def _refuse_files(overrides: dict[str, Any]) -> None:
    refused = sorted(overrides.keys() & _ELSEWHERE)
    if refused:
        raise ValueError(f"{refused[0]} is not for a model's arguments; name weights as model.weights or as the source")


def timm_parameters(name: str, num_classes: int, **overrides: Any) -> int:
    """How many parameters :func:`timm_classifier` would make; without memory for them."""
    _refuse_files(overrides)
    model = create_timm(name, device="meta", num_classes=num_classes, **overrides)
    return sum(parameter.numel() for parameter in model.parameters())


def timm_takes_size(name: str) -> bool:
    """Whether this model is made for one size of image, its ``img_size``."""
    import timm

    published = timm.get_pretrained_cfg(name.removeprefix("timm/"))
    return bool(published and published.fixed_input_size)


def timm_preprocessing(name: str) -> dict[str, Any]:
    """How images become this model's input, as plain values: what ``Preprocessing`` takes.

    Returns:
        ``size`` (height, width), ``mean`` and ``std`` on the [0, 1] scale, ``interpolation``, and ``crop``, the share
        of the image that is kept, or None where it is stretched.
    """
    import timm
    from timm.data import resolve_data_config

    published = timm.get_pretrained_cfg(name.removeprefix("timm/"))
    if published is None:
        raise ValueError(f"timm says no preprocessing for {name!r}; give mean, std and size yourself")
    said = resolve_data_config(pretrained_cfg=published.to_dict())
    return {
        "size": tuple(said["input_size"][1:]),
        "mean": tuple(said["mean"]),
        "std": tuple(said["std"]),
        "interpolation": said["interpolation"],
        "crop": None if said["crop_mode"] == "squash" else said["crop_pct"],
    }
