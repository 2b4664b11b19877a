"""What both tasks need: the parts of a run, a model with its metadata, weights to start from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from vitdet import __version__, distributed, zoo
from vitdet.build.backbone_weights import load_backbone
from vitdet.build.class_heads import class_heads, keep_rows, match_classes, split_heads, tell_kept
from vitdet.config import AnyRunConfig, ModelSection, OptimSection
from vitdet.data.loaders import EpochBatchSampler, Loader
from vitdet.engine.checkpoint import read_metadata
from vitdet.engine.logging import say
from vitdet.engine.schedules import rate_multiplier, warmup_steps
from vitdet.errors import UserError, some
from vitdet.structures import ClassMap, ModelMetadata, Preprocessing
from vitdet.weights.classes import NO_CLASS
from vitdet.weights.rules import load_strict


@dataclass
class Parts:
    """What is particular to a task; see :class:`vitdet.engine.trainer.Trainer` for each.

    Attributes:
        model: with ``.metadata``.
        forward, prepare, criterion, loader, sampler: for training.
        evaluate: model -> metrics. metric: the one that says which weights are best.
    """

    model: nn.Module
    forward: Callable[..., Any]
    criterion: nn.Module
    loader: Loader
    sampler: EpochBatchSampler
    evaluate: Callable[[nn.Module], dict[str, Any]]
    metric: str
    prepare: Callable[[Tensor, Any], tuple[Tensor, Any]] | None = None


def build_model(config: AnyRunConfig, class_map: ClassMap, preprocessing: Preprocessing, **arguments: Any) -> nn.Module:
    """The model of the run with its metadata, started from ``model.weights`` or ``model.backbone_weights``.

    Args:
        preprocessing: of the run; its mean and std are taken from the weights where the run does not set them.
        arguments: for the model, besides the run's overrides.
    """
    classes = len(class_map)
    if config.model.num_classes not in (None, classes):
        raise UserError(
            f"model.num_classes is {config.model.num_classes} but {config.data.root} has {classes} classes; "
            "leave it out, it is taken from the data"
        )
    arguments = {**arguments, **config.model.overrides}
    check_sizes(config, patch_of(config.model))  # of which the model would complain without naming data.size
    model = zoo.create_model(config.model.name, num_classes=classes, **arguments)
    check_sizes(config, model.stride)  # type: ignore[arg-type]
    metadata = ModelMetadata(
        name=config.model.name,
        arguments={"num_classes": classes, **arguments},
        class_map=class_map,
        preprocessing=preprocessing,
        version=__version__,
    )
    if config.model.backbone_weights:
        load_backbone(model, config.model.backbone_weights)
    if config.model.weights:
        theirs = start_from(model, config.model.weights, config.model.name, class_map, arguments)
        metadata.preprocessing = replace(
            preprocessing,
            mean=config.data.mean or theirs.preprocessing.mean,
            std=config.data.std or theirs.preprocessing.std,
        )
    model.metadata = metadata  # type: ignore[assignment]
    return model


def patch_of(section: ModelSection) -> int:
    """The side of the patches that the model will cut; 1 where that is not known beforehand."""
    if section.name not in zoo.CLASSIFIERS:
        return 1
    patch = {**zoo.builder_arguments(zoo.MODELS[section.name]), **section.overrides}.get("patch")
    return patch if isinstance(patch, int) and patch > 0 else 1


def check_sizes(config: AnyRunConfig, stride: int) -> None:
    """The image must come out even at the model's stride."""
    for name, size in [("data.size", config.data.size), *(("data.sizes", size) for size in config.data.sizes)]:
        if any(side % stride for side in size):
            raise UserError(f"{name} {list(size)} must be divisible by {stride} for {config.model.name}; change it")


# Arguments that change what a model computes and no tensor's shape.
UNSEEN = ("activation", "position_activation", "refine_positions", "sampling", "reach", "heads", "norm_eps")


def start_from(
    model: nn.Module, source: str, name: str, class_map: ClassMap, arguments: Mapping[str, Any]
) -> ModelMetadata:
    """Load weights of the same model; where they know other classes, the class heads are rebuilt, and it is said.

    Rows of classes of the same name are kept, see :mod:`vitdet.build.class_heads`; everything else must fit, and what
    only training uses where the weights have it.

    Args:
        name, arguments: what the model was made of.
    """
    check_same_model(source, name)
    metadata, state = zoo.read_source(source, model=name)
    check_unseen(source, metadata, name, arguments)
    try:
        state = zoo.adapt(model, state)
    except ValueError as error:
        raise UserError(f"model.weights {source} cannot be used: {error}") from error
    # Frozen batch norms count no batches, trained ones do: a run may freeze what another has trained.
    counters = ("*.num_batches_tracked",)
    if metadata.class_map.names == class_map.names:
        # Files for inference may lack the labels of denoising queries, and a run may do without.
        spare = (*counters, "denoising.*")
        report = load_strict(model, state, allow_missing=spare, allow_unexpected=spare)
        if "denoising.embedding.weight" in report.missing and distributed.rank() == 0:
            say(f"note: {source} has no labels of denoising queries, which only training uses: they start anew")
        return metadata
    heads = class_heads(model)
    theirs, rest = split_heads(state, heads)
    own, _ = split_heads(model.state_dict(), heads)
    matches = match_classes(class_map.names, metadata.class_map.names)
    # The layer before the head, which some pre-trained models have, goes with it, and so do the rows that read it.
    if any(key.startswith("representation.") and key not in model.state_dict() for key in rest):
        theirs, matches = {}, {}
    kept = keep_rows(own, theirs, matches, classes=(len(class_map), len(metadata.class_map)))
    spare = (*counters, "representation.*")
    load_strict(model, {**rest, **kept}, allow_missing=(*heads, *counters), allow_unexpected=spare)
    if distributed.rank() == 0:
        anew = len(own) - len(kept) if matches else len(own)
        say(f"note: {source} {tell_kept(class_map.names, metadata.class_map.names, matches, anew)}")
    return metadata


def check_unseen(source: str, metadata: ModelMetadata, name: str, arguments: Mapping[str, Any]) -> None:
    """Refuse weights of a model that computes otherwise: their shapes do not show it."""
    if name not in zoo.MODELS:
        return
    usual = zoo.builder_arguments(zoo.MODELS[name])
    for key in UNSEEN:
        theirs, ours = ({**usual, **given}.get(key) for given in (metadata.arguments, arguments))
        theirs, ours = (tuple(value) if isinstance(value, list) else value for value in (theirs, ours))
        if theirs != ours:
            raise UserError(
                f"model.weights {source} is of a model with {key}={theirs}, and the run has {ours}; "
                f"set model.overrides.{key}={theirs}"
            )


def check_same_model(source: str, name: str) -> None:
    """Where a file of ours says that it is another model, the run's configuration is told, not the file's reader."""
    path = Path(source)
    theirs = read_metadata(path) if path.suffix == ".safetensors" and path.is_file() else None
    if theirs is not None and theirs.name != name:
        raise UserError(f"model.weights {source} is of {theirs.name!r}, the run trains {name!r}; use the same model")


def check_class_map(metadata: ModelMetadata, names: Sequence[str], root: object) -> None:
    """A model is measured only on its own classes; ids that nothing has are no classes."""
    ours = [name for name in metadata.class_map.names if name != NO_CLASS]
    if list(names) not in (ours, list(metadata.class_map.names)):
        raise UserError(
            f"the model knows the classes {some(ours)} but {root} has {some(names)}; "
            "evaluate on data with the classes it was trained on"
        )


def build_rate(optim: OptimSection, total: int) -> Callable[[int], float]:
    """The learning-rate multiplier of every step of a run of ``total`` steps."""
    warmup = warmup_steps(total, fraction=optim.warmup, most=optim.warmup_steps)

    def rate(step: int) -> float:
        return rate_multiplier(
            step, total=total, warmup=warmup, schedule=optim.schedule, final=optim.final, flat=optim.flat,
            settled=optim.settled, ramp=optim.ramp,
        )  # fmt: skip

    return rate
