"""What is said about the model whose weights a source holds: in a ``config.json``, or by a file's name.

The weights themselves are the other witness, see :mod:`vitdet.weights.shown`: what they show is not read here.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vitdet.errors import UserError
from vitdet.weights import preprocessing as prepare
from vitdet.weights.classes import as_coco
from vitdet.weights.files import read_json


class UnknownModelError(UserError):
    """A description of a model that we do not have; whoever names the model needs none."""


@dataclass
class Description:
    """What is known of a model before its weights are looked at.

    Attributes:
        name: of the architecture, timm's, or None.
        arguments: what differs from the named architecture, or what weights do not show of an unnamed one.
        class_names: of the K classes; None where nothing is said.
        preprocessing: plain values; None where nothing is said.
        kind: the ``model_type`` of transformers; None elsewhere.
    """

    name: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    class_names: list[str] | None = None
    preprocessing: dict[str, Any] | None = None
    kind: str | None = None


def describe_folder(folder: Path, known: Container[str]) -> Description:
    """From ``config.json``, by timm or by transformers, and ``preprocessor_config.json`` where it is there.

    Args:
        folder: its path. known: the architectures that we have ourselves; arguments of others stay timm's.

    Raises:
        UserError: no description, one of a model that we do not have, or one that cannot be understood.
    """
    path = folder / "config.json"
    if not path.is_file():
        return Description()
    config = read_json(path)
    processor = folder / "preprocessor_config.json"
    try:
        if "architecture" in config:
            return _describe_timm(config, known)
        if "model_type" in config:
            return _describe_huggingface(config, read_json(processor) if processor.is_file() else None)
        if "DEIMTransformer" in config:  # as DEIMv2's authors write it; the weights show all that it says
            return Description()
    except UserError as error:
        raise type(error)(f"{folder} cannot be used: {error}") from error
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        raise UserError(
            f"{path} describes no model that could be built ({type(error).__name__}: {error}); fetch it again"
        ) from error
    raise UnknownModelError(
        f"{path} names neither an architecture (timm) nor a model_type (transformers); pass model=NAME"
    )


# --------------------------------------------------------------------------------------------- timm

# Their arguments under our names. What the weights show anyway needs no entry; what only matters in training has none.
_TIMM_ARGUMENTS = {"num_heads": "heads", "window_size": "window"}
_SHOWN_BY_WEIGHTS = {
    "patch_size", "embed_dim", "depth", "depths", "mlp_ratio", "init_values", "reg_tokens", "class_token",
    "num_classes", "qkv_bias", "in_chans", "drop_rate", "drop_path_rate", "proj_drop_rate", "attn_drop_rate",
    "patch_drop_rate", "pos_drop_rate", "dynamic_img_size", "strict_img_size", "no_embed_class", "fc_norm",
}  # fmt: skip
_TIMM_POOLINGS = {"token": "token", "avg": "average", "map": "attention"}


def _describe_timm(config: Mapping[str, Any], known: Container[str]) -> Description:
    pretrained = config.get("pretrained_cfg") or {}
    name = str(config["architecture"]).partition(".")[0]
    given = dict(config.get("model_args") or {})
    if name in known and config.get("global_pool") in _TIMM_POOLINGS:  # also where it is the architecture's own
        given.setdefault("global_pool", config["global_pool"])
    arguments = _timm_arguments(name, given) if name in known else given
    arguments["num_classes"] = int(config.get("num_classes", pretrained.get("num_classes", 1000)))
    class_names = _timm_class_names(config, pretrained, arguments["num_classes"])
    return Description(name, arguments, class_names, prepare.from_timm(pretrained))


def _timm_arguments(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """What a timm model was made with, as arguments of ours."""
    arguments: dict[str, Any] = {}
    for key, value in given.items():
        if key == "img_size":
            arguments["image_size"] = prepare.sides(value)
        elif key == "global_pool" and value in _TIMM_POOLINGS:
            arguments["pooling"] = _TIMM_POOLINGS[value]
        elif key in _TIMM_ARGUMENTS:
            arguments[_TIMM_ARGUMENTS[key]] = tuple(value) if isinstance(value, list) else value
        elif key not in _SHOWN_BY_WEIGHTS:
            raise UserError(f"{name} was made with {key}={value!r}, which is not supported; pass model='timm/{name}'")
    return arguments


def _timm_class_names(config: Mapping[str, Any], pretrained: Mapping[str, Any], count: int) -> list[str] | None:
    """Descriptions of the classes where there are some, else their names, else ImageNet's by their number."""
    labels = config.get("label_names") or pretrained.get("label_names")
    if not labels:
        return imagenet_class_names(count)
    if isinstance(labels, Mapping):
        labels = [labels[key] for key in sorted(labels, key=int)]
    known = config.get("label_descriptions") or pretrained.get("label_descriptions") or {}
    return [str(known.get(label, label)) for label in labels]


def imagenet_class_names(count: int) -> list[str] | None:
    """The names of ImageNet's 1,000 classes, or of its larger sets', in timm's order; None for another number."""
    from timm.data import ImageNetInfo, infer_imagenet_subset

    subset = infer_imagenet_subset({"num_classes": count})
    return None if subset is None else list(ImageNetInfo(subset).label_descriptions())


def imagenet_synsets(class_names: Sequence[str] | None = None) -> dict[str, str]:
    """ImageNet's 1,000 synsets (``n01440764``) in the order of the labels -> names.

    The names are those of :func:`imagenet_class_names`; or ``class_names``, where these are the same classes in another
    publisher's words, of whom all begin with the tench and end with toilet tissue.
    """
    from timm.data import ImageNetInfo

    info = ImageNetInfo("imagenet-1k")
    names = info.label_descriptions()
    if class_names is not None and len(class_names) == len(names):
        first, last = class_names[0].lower(), class_names[-1].lower()
        names = list(class_names) if first.startswith("tench") and last.startswith("toilet tissue") else names
    return dict(zip(info.label_names(), names, strict=True))


# ------------------------------------------------------------------------------------- transformers


def _describe_huggingface(config: Mapping[str, Any], processor: Mapping[str, Any] | None) -> Description:
    kind = str(config["model_type"])
    if kind not in _HUGGINGFACE:
        known = ", ".join(sorted(_HUGGINGFACE))
        raise UnknownModelError(f"there is no model of the type {kind!r} here; known: {known}")
    arguments = _HUGGINGFACE[kind](config)
    size = arguments.get("image_size", (640, 640))  # detectors take any size; their configurations name none
    labels = config.get("id2label")
    names = None if not labels else as_coco([str(labels[key]) for key in sorted(labels, key=int)])
    if kind == "deimv2" and processor is None and _on_dinov3(config):  # whose authors' is normalised as ImageNet
        processor = {"do_normalize": True}
    prepared = prepare.from_huggingface(processor, kind, size)
    return Description(None, arguments, names, prepared, kind)


def _vit(config: Mapping[str, Any]) -> dict[str, Any]:
    if not config.get("qkv_bias", True):
        raise UserError("attention without biases (qkv_bias) is not supported; use transformers itself")
    return {
        "heads": config["num_attention_heads"],
        "norm_eps": config.get("layer_norm_eps", 1e-12),
        "activation": _activation(config),
        "image_size": prepare.sides(config.get("image_size", 224)),
    }


def _dinov2(config: Mapping[str, Any]) -> dict[str, Any]:
    gated = {"activation": "swiglu"} if config.get("use_swiglu_ffn") else {}
    return {**_vit({"layer_norm_eps": 1e-6, **config}), **gated}


def _dinov3(config: Mapping[str, Any]) -> dict[str, Any]:
    if config.get("rope_theta", 100.0) != 100:
        raise UserError(f"rope_theta {config['rope_theta']} is not supported; only 100 is")
    gated = {"activation": "swiglu"} if config.get("use_gated_mlp") else {}
    if gated and config.get("hidden_act") not in ("silu", "swish"):
        raise UserError(f"a gated feed-forward with {config.get('hidden_act')!r} is not supported; only with 'silu'")
    return {
        **_vit({"layer_norm_eps": 1e-5, **config}),
        **gated,
        "positions": "rotary",
        "key_bias": bool(config.get("key_bias", False)),
    }


def _swin(config: Mapping[str, Any]) -> dict[str, Any]:
    if config.get("use_absolute_embeddings") or _activation(config) != "gelu":
        raise UserError("use_absolute_embeddings and activations other than gelu are not supported for Swin")
    arguments = {
        "version": 1,
        "heads": tuple(config["num_heads"]),
        "window": config["window_size"],
        "image_size": prepare.sides(config.get("image_size", 224)),
        "pooling": "average",
    }
    if config["model_type"] == "swinv2":
        before = tuple(config.get("pretrained_window_sizes", ()))
        arguments |= {"version": 2, "pretrained_windows": before if any(before) else None}
    return arguments


# What changes the results of transformers' RT-DETR and its descendants, and no tensor; all published ones have these.
_RTDETR_USUAL = {
    "decoder_activation_function": "relu", "encoder_activation_function": "gelu", "activation_function": "silu",
    "normalize_before": False, "positional_encoding_temperature": 10000, "layer_norm_eps": 1e-5, "batch_norm_eps": 1e-5,
}  # fmt: skip


def _rtdetr(config: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in _RTDETR_USUAL.items():
        if config.get(key, value) != value:
            raise UserError(f"{key} {config[key]!r} is not supported for RT-DETR and D-FINE; only {value!r} is")
    heads = {config.get(f"{part}_attention_heads", 8) for part in ("encoder", "decoder")}
    if len(heads) != 1 or config.get("learn_initial_query") or not config.get("use_focal_loss", True):
        raise UserError("encoders and decoders of different heads, and learnt queries, are not supported for RT-DETR")
    return {
        "heads": heads.pop(),
        "points": config.get("decoder_n_points", 4),
        "num_queries": config.get("num_queries", 300),
        "denoising_queries": config.get("num_denoising", 100),
    }


def _rtdetr_v2(config: Mapping[str, Any]) -> dict[str, Any]:
    methods = {"default": "bilinear", "discrete": "discrete"}
    return {
        **_rtdetr(config),
        "sampling": methods[config.get("decoder_method", "default")],
        "reach": float(config.get("decoder_offset_scale", 0.5)),
    }


def _dfine(config: Mapping[str, Any]) -> dict[str, Any]:
    layers = config.get("decoder_layers", 6)
    if config.get("layer_scale", 1) != 1 or config.get("eval_idx", -1) not in (-1, layers - 1):
        raise UserError("idle layers of another width, and results of an earlier one, are not supported for D-FINE")
    points = config.get("decoder_n_points", 4)
    return {
        **_rtdetr_v2(config),
        "points": points if isinstance(points, int) else tuple(points),
        "bins": config.get("max_num_bins", 32),
        "reg_scale": float(config.get("reg_scale", 4.0)),
        "up": float(config.get("up", 0.5)),
    }


def _on_dinov3(config: Mapping[str, Any]) -> bool:
    return (config.get("backbone_config") or {}).get("model_type") == "dinov3_vit"


def _deimv2(config: Mapping[str, Any]) -> dict[str, Any]:
    backbone, on_vit = config.get("backbone_config") or {}, _on_dinov3(config)
    if on_vit and not backbone.get("apply_layernorm", True):
        raise UserError("a ViT whose last map alone is normed is not supported; use its authors' file")
    if config.get("learn_initial_query") or config.get("decoder_method", "default") != "default":
        raise UserError("learnt queries and discrete sampling are not supported for DEIMv2")
    # What transformers computes otherwise than the authors.
    theirs = {"activation": "relu", "refine_positions": True}
    return {
        "num_queries": config.get("num_queries", 300),
        "denoising_queries": config.get("num_denoising", 100),
        "position_activation": config.get("decoder_activation_function", "relu"),
        **theirs,
        **({"key_bias": bool(backbone.get("key_bias", False))} if on_vit else {}),
    }


def _detr(config: Mapping[str, Any]) -> dict[str, Any]:
    heads = {config.get(f"{part}_attention_heads", 8) for part in ("encoder", "decoder")}
    hidden = {config.get(f"{part}_ffn_dim", 2048) for part in ("encoder", "decoder")}
    usual = (
        config.get("position_embedding_type", "sine") == "sine" and config.get("activation_function", "relu") == "relu"
    )
    if len(heads) != 1 or len(hidden) != 1 or not usual:
        raise UserError("learnt positions, other activations, unequal encoder and decoder: not supported for DETR")
    backbone = config.get("backbone_config") or {}
    return {"heads": heads.pop(), "dilated": bool(config.get("dilation")) or backbone.get("output_stride") == 16}


def _activation(config: Mapping[str, Any]) -> str:
    name = config.get("hidden_act", "gelu")
    if name not in ("gelu", "relu", "silu"):
        raise UserError(f"the activation {name!r} is not supported; use transformers itself")
    return name


_HUGGINGFACE = {
    "vit": _vit, "deit": _vit, "dinov2": _dinov2, "dinov2_with_registers": _dinov2, "dinov3_vit": _dinov3,
    "swin": _swin, "swinv2": _swin, "rt_detr": _rtdetr, "rt_detr_v2": _rtdetr_v2, "d_fine": _dfine, "deimv2": _deimv2,
    "detr": _detr,
}  # fmt: skip


# --------------------------------------------------------------------------------------- single files

_SIZES = {"ti": "tiny", "t": "tiny", "s": "small", "b": "base", "l": "large", "h": "huge", "g": "giant"}
# A publisher's file name -> the architecture, as timm calls it.
_FILE_NAMES = [
    (r"detr-r(?P<name>50|101)-dc5-[0-9a-f]{8}", "detr_r{name}_dc5"),
    (r"detr-r(?P<name>50|101)-[0-9a-f]{8}", "detr_r{name}"),
    (r"vit_(?P<size>[blh])_(?P<patch>\d+)(_lc)?(_swag)?-[0-9a-f]{8}", "vit_{size}_patch{patch}_224"),
    (r"swin_(?P<size>[tsb])-[0-9a-f]{8}", "swin_{size}_patch4_window7_224"),
    (r"swin_v2_(?P<size>[tsb])-[0-9a-f]{8}", "swinv2_{size}_window8_256"),
    (r"swinv2_(?P<name>\w+?)_patch4_(?P<rest>window[\dto]+_[\dto]+)", "swinv2_{name}_{rest}"),
    (r"dinov2_vit(?P<size>[sblg])14_reg4", "vit_{size}_patch14_reg4_dinov2"),
    (r"dinov2_vit(?P<size>[sblg])14", "vit_{size}_patch14_dinov2"),
    (r"r?rtdetrv2_r50vd_m_", "rtdetrv2_r50_m"),  # one of theirs begins with rr
    (r"r?rtdetrv2_r(?P<depth>\d+)vd_", "rtdetrv2_r{depth}"),
    (r"rtdetr_r50vd_m_", "rtdetr_r50_m"),
    (r"rtdetr_r(?P<depth>\d+)vd_", "rtdetr_r{depth}"),
    (r"dfine_(hgnetv2_)?(?P<letter>[nsmlx])_", "dfine_{letter}"),
    (r"deimv2_(hgnetv2|dinov3)_(?P<letter>atto|femto|pico|n|s|m|l|x)_", "deimv2_{letter}"),
    (r"(ViT-)?(?P<size>Ti|S|B|L|H)_(?P<patch>\d+)(?=[-_.]|$)", "vit_{size}_patch{patch}_224"),
]


def name_of_file(file: str, known: Iterable[str]) -> str | None:
    """The architecture that a file is named after: one of ``known``, by itself or in a publisher's spelling."""
    for pattern, name in _FILE_NAMES:
        if match := re.match(pattern, file):
            parts = match.groupdict()
            parts["size"] = _SIZES.get((parts.get("size") or "").lower(), "")
            found = name.format(**parts)
            return found if found in known else None
    stem = file.removesuffix(".gz")
    starts = [name for name in known if re.match(re.escape(name) + r"(?![a-z0-9])", stem)]
    return max(starts, key=len, default=None)


def publisher(names: Iterable[str], suffix: str) -> str:
    """Whose layout the names of a single file are: ``"torchvision"``, ``"official"`` (DeiT, Swin) or ``"timm"``."""
    for name in names:
        if name.startswith(("encoder.layers.encoder_layer_", "conv_proj.", "features.0.0.")):
            return "torchvision"
    return "official" if suffix in (".pth", ".pt") else "timm"


def describe_file(file: Path, names: Iterable[str], name: str, size: tuple[int, int]) -> Description:
    """The preprocessing and class names of a single file, where its publisher has ways of its own.

    torchvision's are in its own table; DeiT's and Swin's own files are prepared as their code evaluates them.

    Args:
        file: its path. names: of the tensors in it. name: of the architecture. size: (height, width) of its images.
    """
    whose = publisher(names, file.suffix)
    if whose == "torchvision" and (found := prepare.from_torchvision(name, file.name)):
        return Description(name, preprocessing=found[0], class_names=found[1])
    if whose == "official" and name.startswith(("deit_", "swin")):
        return Description(name, preprocessing=prepare.official(name, size))
    if name.endswith("_plain"):  # no model of timm's: as its authors evaluate it (arXiv 2205.01580, appendix A)
        return Description(name, preprocessing=prepare.values(size, prepare.HALF, "bilinear", 0.875))
    return Description(name)
