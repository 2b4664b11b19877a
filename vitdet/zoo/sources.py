"""What a source of weights holds: metadata, and tensors under our names, whoever published it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vitdet.backbones.swin import Swin
from vitdet.backbones.timm import timm_preprocessing
from vitdet.engine.checkpoint import read_metadata, read_weights
from vitdet.errors import UserError, some
from vitdet.structures import ClassMap, ModelMetadata, Preprocessing
from vitdet.weights import swin, vit
from vitdet.weights.classes import category_ids
from vitdet.weights.describe import (
    Description,
    UnknownModelError,
    describe_file,
    describe_folder,
    imagenet_class_names,
    name_of_file,
)
from vitdet.weights.detr import check_detects
from vitdet.weights.files import read_state
from vitdet.weights.hub import weights_file
from vitdet.weights.preprocessing import sides
from vitdet.weights.shown import classifier_arguments
from vitdet.zoo import detectors
from vitdet.zoo.builders import CLASSIFIERS, DETECTORS, MODELS, TIMM, builder_arguments, check_name
from vitdet.zoo.published import locate_source

_State = dict[str, Tensor]

_CONVERTERS = {"vit": vit.convert, "swin": swin.convert, **detectors.CONVERTERS}
# In what weights may differ from the architecture that they are of.
_FREE = {"num_classes", "image_size", "representation", "pooling", "norm_pooled"}


def describe_source(source: str | Path, *, model: str | None = None) -> ModelMetadata:
    """What a source says about itself, without a model being built; arguments and errors as for ``load_model``.

    Of a file of ours only the header is read.
    """
    path = Path(source)
    if path.suffix == ".safetensors" and path.is_file() and model is None:
        metadata = read_metadata(path)
        if metadata is not None:
            return metadata
    return read_source(source, model=model)[0]


def read_source(source: str | Path, *, model: str | None = None) -> tuple[ModelMetadata, _State]:
    """A source's metadata, and its weights under our names; arguments and errors as for ``load_model``."""
    if model is not None:
        check_name(model)
    path, model = locate_source(source, model=model)
    if path.suffix == ".safetensors" and path.is_file() and read_metadata(path) is not None:
        metadata, state = read_weights(path)
        if model not in (None, metadata.name):
            raise UserError(f"{path} holds a {metadata.name!r}, not a {model!r}; leave out the name, the file says it")
        return metadata, state
    said = _said(path, model) if path.is_dir() else Description()
    file = weights_file(path) if path.is_dir() else path
    theirs = read_state(file)
    name = model or said.name or name_of_file(file.name, MODELS)
    try:
        if name is None or name in MODELS:
            metadata, state = _of_ours(name, said, theirs, file)
        else:
            metadata, state = _of_timm(name.removeprefix(TIMM), said, theirs)
    except (ValueError, LookupError, RuntimeError, TypeError) as error:  # of shapes that nobody publishes, too
        raise UserError(f"{source} cannot be loaded: {error}") from error
    # Copies of their own: what was read may be mapped from the file, shared between names, or of half precision.
    kinds = {key: torch.float32 if value.is_floating_point() else value.dtype for key, value in state.items()}
    return metadata, {key: value.to(kinds[key], copy=True).contiguous() for key, value in state.items()}


def _said(folder: Path, model: str | None) -> Description:
    """What a folder says; where the caller names the model, it may be of one that we lack."""
    try:
        return describe_folder(folder, () if model is not None and model.startswith(TIMM) else MODELS)
    except UnknownModelError:
        if model is None:
            raise
        return Description()


def _of_timm(name: str, said: Description, theirs: _State) -> tuple[ModelMetadata, _State]:
    """Of an architecture that only timm has, or that is to be timm's."""
    arguments = dict(said.arguments) if said.name == name.partition(".")[0] else {}
    arguments["num_classes"] = _timm_classes(name, theirs)
    prepared = said.preprocessing or timm_preprocessing(name)
    metadata = _metadata(TIMM + name, arguments, said.class_names, prepared)
    return metadata, {f"model.{key}": value for key, value in theirs.items()}


def _timm_classes(name: str, theirs: _State) -> int:
    """The rows of the layer that timm says is the head."""
    import timm

    published = timm.get_pretrained_cfg(name)
    if published is None:
        raise UserError(f"timm has no model {name!r}; use another name after 'timm/'")
    head = published.classifier if isinstance(published.classifier, str) else (published.classifier or [""])[0]
    weight = theirs.get(f"{head}.weight")
    return 0 if weight is None else weight.shape[0]


def _of_ours(name: str | None, said: Description, theirs: _State, file: Path) -> tuple[ModelMetadata, _State]:
    """Of an architecture that we have, in any layout that we know."""
    kind, state = _converted(name, theirs)
    if kind in detectors.CONVERTERS:
        return _metadata(*detectors.describe_detector(kind, name, said, state, file)), state
    shown = classifier_arguments(state)
    if name is not None:
        # A file's name, or the caller, may be wrong: strict loading then says so, if not all is taken from the weights.
        wanted = {**shown, **said.arguments} if said.name else {key: shown[key] for key in _FREE & shown.keys()}
        arguments = _differing(name, {**wanted, "num_classes": shown["num_classes"]})
    elif said.arguments:
        # Weights show how many positions there are, not on which grid.
        told = {key: value for key, value in said.arguments.items() if key == "image_size"}
        name, arguments = _nearest(kind, {**said.arguments, **shown, **told})
    else:
        name, arguments = _only(kind, shown, theirs, file)
    if said.preprocessing is None:
        size = sides(arguments.get("image_size", builder_arguments(MODELS[name])["image_size"]))
        said = _described(name, theirs, file, size)
    arguments["num_classes"] = shown["num_classes"]
    metadata = _metadata(name, arguments, said.class_names, said.preprocessing or {})
    return metadata, _on_grid(state, name, arguments, said.arguments.get("image_size"))


def _on_grid(state: _State, name: str, arguments: dict[str, Any], told: Any) -> _State:
    """The state with its positions on the grid of the images that they were made for, if that is known.

    ``told`` is the size of these images that the source itself names, or None.
    """
    table = state.get("backbone.positions.table")
    if table is None:
        return state
    has = {**builder_arguments(MODELS[name]), **arguments}
    height, width = (side // has["patch"] for side in sides(has["image_size"]))
    flat = table.flatten(1, -2)  # (1, places, C)
    if height * width != flat.shape[1]:
        if told is not None:
            raise ValueError(
                f"it has {flat.shape[1]} positions after those of its first tokens, and images of {list(told)} pixels "
                f"have {height * width} patches; name the image size that they are of"
            )
        return state
    return {**state, "backbone.positions.table": flat.unflatten(1, (height, width))}


def _converted(name: str | None, theirs: _State) -> tuple[str, _State]:
    """The kind of model that weights are of, and the weights under our names."""
    if name is not None:
        return kind_of(name), _CONVERTERS[kind_of(name)](theirs)
    check_detects(theirs)
    for kind in _CONVERTERS:
        with suppress(UserError):  # which says that it is another kind's
            return kind, _CONVERTERS[kind](theirs)
    raise UserError(
        f"its layout is not known (it holds {some(list(theirs), 3)}); pass model='timm/NAME' where it is another model "
        "of timm's"
    )


def kind_of(name: str) -> str:
    """Whose weights the model of this name takes: ``"vit"``, ``"swin"``, or a family of detectors."""
    if name in DETECTORS:
        return detectors.family_of(name)
    backbone: Any = CLASSIFIERS[name].keywords["backbone"]
    while isinstance(backbone, partial):
        backbone = backbone.func
    return "swin" if backbone is Swin else "vit"


def _described(name: str, theirs: Iterable[str], file: Path, size: tuple[int, int]) -> Description:
    """Preprocessing and class names of a file that nothing lies beside; timm's of that name where it says nothing."""
    said = describe_file(file, theirs, name, size)
    if said.preprocessing is None:
        said.preprocessing = {**timm_preprocessing(name), "size": size}
    return said


def _nearest(kind: str, wanted: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The named architecture that differs least from these arguments, and where it does."""
    names = [name for name in CLASSIFIERS if kind_of(name) == kind]
    differing = {name: _differing(name, wanted) for name in names}
    name = min(names, key=lambda one: len(differing[one]))
    return name, differing[name]


def _only(kind: str, shown: dict[str, Any], theirs: Iterable[str], file: Path) -> tuple[str, dict[str, Any]]:
    """The named architecture whose weights these are, by all that they show, if nothing else is as likely.

    Raises:
        UserError: none, or several that calculate or prepare their images differently.
    """
    free = _FREE - {"pooling", "norm_pooled"}
    found = {}
    for name in CLASSIFIERS:
        if kind_of(name) == kind:
            arguments = _differing(name, shown)
            learned = builder_arguments(MODELS[name]).get("positions", "learned") == "learned"
            if not arguments.keys() - free and (kind == "swin" or learned == ("positions" in shown)):
                found[name] = arguments
    fewest = min((len(arguments) for arguments in found.values()), default=0)
    likely = [name for name, arguments in found.items() if len(arguments) == fewest]
    size = shown.get("image_size", (224, 224))
    distinct = {
        name: (
            {key: value for key, value in builder_arguments(MODELS[name]).items() if key not in free},
            _described(name, theirs, file, size).preprocessing,
        )
        for name in likely
    }
    if not likely or any(one != distinct[likely[0]] for one in distinct.values()):
        may = f"it may be {some(likely)}" if likely else "it is of no known size"
        raise UserError(f"the weights do not say which model they are of ({may}); pass model=NAME")
    return likely[0], found[likely[0]]


def _differing(name: str, wanted: dict[str, Any]) -> dict[str, Any]:
    """Those of the wanted arguments that the named architecture does not have by itself; num_classes aside."""
    has = builder_arguments(MODELS[name])
    return {
        key: value
        for key, value in wanted.items()
        if key != "num_classes" and (key not in has or not _same(key, has[key], value))
    }


def _same(key: str, ours: Any, theirs: Any) -> bool:
    """Whether two values of an argument mean the same model."""
    if key == "image_size":
        return sides(ours) == sides(theirs)
    if key == "layer_scale":  # only where training starts
        return (ours is None) == (theirs is None)
    return (tuple(ours) if isinstance(ours, list | tuple) else ours) == theirs


def _metadata(
    name: str, arguments: dict[str, Any], class_names: list[str] | None, prepared: dict[str, Any]
) -> ModelMetadata:
    """From what is known; classes that nobody named are ImageNet's where their number says so, else numbered."""
    count = arguments["num_classes"]
    if class_names is None or count == 0:
        class_names = imagenet_class_names(count) if count and name not in DETECTORS else None if count else []
    names = class_names if class_names is not None else [f"class_{index}" for index in range(count)]
    if len(names) != count:
        raise UserError(f"it names {len(names)} classes and its weights know {count}; fetch both again")
    class_map = ClassMap(category_ids(names), tuple(names))
    return ModelMetadata(name, arguments, class_map, Preprocessing.from_dict(prepared))
