"""How each publisher prepares images for the weights it publishes.

The same architecture is published with other means, crops and interpolations, and nothing fails when they are mixed up:
only the accuracy drops. Results are the plain values of :class:`vitdet.structures.Preprocessing`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vitdet.errors import UserError

IMAGENET = ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
UNIT = ([0.0, 0.0, 0.0], [1.0, 1.0, 1.0])  # leaves [0, 1] as it is
HALF = ([0.5, 0.5, 0.5], [0.5, 0.5, 0.5])
_INTERPOLATIONS = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers
MAX_SIDE = 2**14  # of an image, in pixels: a file may ask for any

# What their image processors do by custom where a folder has no preprocessor_config.json. ViT's, Swin's and DINOv3's
# stretch to the size; DINOv2's and DeiT's resize to 256 / 224 of it and cut out the middle.
_CUSTOMARY: dict[str, dict[str, Any]] = {
    "vit": {"image_mean": HALF[0], "image_std": HALF[1], "resample": 2},
    "swin": {"resample": 3},
    "swinv2": {"resample": 3},
    "deit": {"resample": 3, "do_center_crop": True},
    "dinov2": {"resample": 3, "do_center_crop": True},
    "dinov2_with_registers": {"resample": 3, "do_center_crop": True},
    "dinov3_vit": {"resample": 2},
    "rt_detr": {"resample": 2, "do_normalize": False},
    "detr": {"resample": 2, "size": {"shortest_edge": 800, "longest_edge": 1333}},
    "rt_detr_v2": {"resample": 2, "do_normalize": False},
    "d_fine": {"resample": 2, "do_normalize": False},
    "deimv2": {"resample": 2, "do_normalize": False},
}


def values(
    size: tuple[int, int], norm: tuple[list[float], list[float]], interpolation: str, crop: float | None,
    longest: int | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The plain values of a ``Preprocessing``."""
    plain = {"size": list(size), "mean": norm[0], "std": norm[1], "interpolation": interpolation, "crop": crop}
    return plain if longest is None else {**plain, "longest": longest}


def from_timm(config: Mapping[str, Any]) -> dict[str, Any]:
    """From timm's ``pretrained_cfg``, with timm's own defaults where it says nothing.

    The three ViTs that it stretches and then cuts by 5 % are only stretched.
    """
    share = float(config.get("crop_pct") or 0.875)
    stretched = config.get("crop_mode") == "squash"
    interpolation = config.get("interpolation") or "bicubic"
    if interpolation not in _INTERPOLATIONS.values():
        raise UserError(f"interpolation {interpolation!r} is not supported; use bilinear or bicubic")
    norm = (list(config.get("mean") or IMAGENET[0]), list(config.get("std") or IMAGENET[1]))
    height, width = (config.get("input_size") or (3, 224, 224))[1:]
    return values(sides([height, width]), norm, interpolation, None if stretched else share)


def from_huggingface(processor: Mapping[str, Any] | None, kind: str, image_size: tuple[int, int]) -> dict[str, Any]:
    """From a ``preprocessor_config.json``.

    Args:
        processor: its content; None where there is none, for what is customary with models of this kind.
        kind: the model's ``model_type``. image_size: the model's own (height, width).
    """
    said = {**_CUSTOMARY[kind], **{key: value for key, value in (processor or {}).items() if value is not None}}
    number = said.get("resample", 2)
    if number not in _INTERPOLATIONS:
        raise UserError(f"resample {number!r} is not supported; it must be 2 (bilinear) or 3 (bicubic)")
    if abs(float(said.get("rescale_factor", 1 / 255)) * 255 - 1) > 1e-6 or not said.get("do_rescale", True):
        raise UserError(f"rescale_factor {said.get('rescale_factor')!r} is not supported; only 1 / 255 is")
    norm = (list(said.get("image_mean", IMAGENET[0])), list(said.get("image_std", IMAGENET[1])))
    if not said.get("do_normalize", True):
        norm = UNIT
    stretched = isinstance(said.get("size"), Mapping) and "height" in said["size"]
    if kind == "detr" and not stretched:
        shorter, longest = _edges(said)
        return values((shorter, shorter), norm, _INTERPOLATIONS[number], None, longest)
    size, share = _geometry(said, image_size)
    return values(size, norm, _INTERPOLATIONS[number], share)


def _edges(said: Mapping[str, Any]) -> tuple[int, int]:
    """Shorter side and most of the longer; older files give the first as a number and the second as ``max_size``."""
    size = said["size"]
    edges = size if isinstance(size, Mapping) else {"shortest_edge": size, "longest_edge": said.get("max_size", 1333)}
    pair = (edges.get("shortest_edge"), edges.get("longest_edge", said.get("max_size", 1333)))
    if not said.get("do_resize", True) or any(value is None for value in pair):
        raise UserError(f"images of size {size!r} are not supported for DETR; it must have shortest_edge, longest_edge")
    return sides(list(pair))


def _geometry(said: Mapping[str, Any], image_size: tuple[int, int]) -> tuple[tuple[int, int], float | None]:
    """The input's size and the share that is cut out of the middle, None for a stretched image."""
    resized = said.get("size") if said.get("do_resize", True) else None
    if said.get("do_center_crop", False):
        crop = sides(said.get("crop_size", (224, 224) if resized else image_size))
        edge = min(sides(resized)) if resized else round(256 / 224 * min(crop))
        return crop, min(1.0, min(crop) / edge)
    if resized is None:
        return image_size, None
    # The shorter side alone leaves the other open; a model wants one size, so the middle is cut out.
    return sides(resized), 1.0 if isinstance(resized, Mapping) and "shortest_edge" in resized else None


def sides(value: Any) -> tuple[int, int]:
    """(height, width) from a side, a pair, or the mappings that image processors have.

    Raises:
        UserError: it is none of them, or not a size.
    """
    if isinstance(value, Mapping):
        edge = value.get("shortest_edge")
        value = [value.get("height", edge), value.get("width", edge)]
    pair = [value, value] if isinstance(value, int) else value
    if isinstance(pair, list | tuple) and len(pair) == 2 and all(isinstance(side, int) for side in pair):
        height, width = pair
        if 0 < height <= MAX_SIDE and 0 < width <= MAX_SIDE:
            return height, width
    raise UserError(f"{value!r} is no image size; it must be a side or height and width, each at most {MAX_SIDE}")


def official(name: str, image_size: tuple[int, int]) -> dict[str, Any]:
    """How DeiT's and Swin's own code evaluates: resize to 256 / 224 of the size, bicubic, and cut out the middle.

    Swin is stretched to sizes above 256 (its configurations for 384 set ``TEST.CROP: False``).
    """
    side = min(image_size)
    stretched = name.startswith("swin") and side > 256
    return values(image_size, IMAGENET, "bicubic", None if stretched else side / int(256 / 224 * side))


_TORCHVISION = {
    "vit_base_patch16": "vit_b_16", "vit_base_patch32": "vit_b_32", "vit_large_patch16": "vit_l_16",
    "vit_large_patch32": "vit_l_32", "vit_huge_patch14": "vit_h_14", "swin_tiny": "swin_t", "swin_small": "swin_s",
    "swin_base": "swin_b", "swinv2_tiny": "swin_v2_t", "swinv2_small": "swin_v2_s", "swinv2_base": "swin_v2_b",
}  # fmt: skip


def from_torchvision(name: str, file: str) -> tuple[dict[str, Any], list[str]] | None:
    """That of torchvision's weights for an architecture, and their class names.

    Args:
        name: ours of the architecture. file: of the weights; where it is none of theirs, their first ones are meant.
    """
    theirs = [their for prefix, their in _TORCHVISION.items() if name.startswith(prefix)]
    if not theirs:
        return None
    from torchvision.models import get_model_weights

    known = list(get_model_weights(theirs[0]))
    weights = next((one for one in known if one.url.rpartition("/")[2] == file), known[0])
    transform = weights.transforms()
    size, resized = transform.crop_size[0], transform.resize_size[0]  # both square
    norm = (list(transform.mean), list(transform.std))
    prepared = values((size, size), norm, transform.interpolation.value, size / resized)
    return prepared, list(weights.meta["categories"])
