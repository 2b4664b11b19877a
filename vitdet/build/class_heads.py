"""Heads for other classes than the weights': the rows of classes of the same name are kept, the others start anew."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import Tensor, nn

from vitdet.errors import some

# Names of all that depends on the classes. The first dimension goes by class; one row more, which is the last, stands
# for none of them: no object in DETR's scores, padding among the denoising labels.
CLASS_HEADS = ("*score_head*", "denoising.embedding.*", "head.*", "head_distillation.*")
_NUMBERED = re.compile(r"class_\d+")  # what a class is called whose name nobody has told


def class_heads(model: nn.Module) -> tuple[str, ...]:
    """Shell patterns of the names of all in this model that depends on the classes."""
    return (*CLASS_HEADS, *getattr(model, "class_heads", ()))


def split_heads(state: Mapping[str, Tensor], heads: Sequence[str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors whose names fit one of the patterns, and the others."""
    inside = {name: tensor for name, tensor in state.items() if any(fnmatchcase(name, head) for head in heads)}
    return inside, {name: tensor for name, tensor in state.items() if name not in inside}


def match_classes(ours: Sequence[str], theirs: Sequence[str]) -> dict[int, int]:
    """Our labels to the weights' labels of the same class, in order.

    Names are equal as they stand, else without regard to case and outer spaces. A name that several classes have says
    nothing, nor does a number in a name's place.
    """
    matches: dict[int, int] = {}
    spellings: list[Callable[[str], str]] = [str, lambda name: name.strip().casefold()]
    for spell in spellings:
        taken = set(matches.values())
        known = _once((j, spell(n)) for j, n in enumerate(theirs) if j not in taken and not _NUMBERED.fullmatch(n))
        wanted = _once((i, spell(n)) for i, n in enumerate(ours) if i not in matches)
        matches |= {label: known[name] for name, label in wanted.items() if name in known}
    return dict(sorted(matches.items()))


def _once(pairs: Iterable[tuple[int, str]]) -> dict[str, int]:
    """Name -> label, for the names that occur once."""
    pairs = list(pairs)
    uses = Counter(name for _, name in pairs)
    return {name: label for label, name in pairs if uses[name] == 1}


def keep_rows(
    own: Mapping[str, Tensor], theirs: Mapping[str, Tensor], matches: Mapping[int, int], *, classes: tuple[int, int]
) -> dict[str, Tensor]:
    """The heads with the rows of the matched classes, and the row that stands for none, from the weights.

    Args:
        own: the model's heads, left as they are. theirs: the weights'. matches: our labels to theirs.
        classes: how many we have, and they.

    Returns:
        The heads of which something is kept; not those that the weights lack, or that are otherwise made there.
    """
    kept = {}
    for name, tensor in own.items():
        source = theirs.get(name)
        if source is None or not tensor.ndim or source.ndim != tensor.ndim or source.shape[1:] != tensor.shape[1:]:
            continue
        spare = len(tensor) - classes[0]
        if spare not in (0, 1) or len(source) - classes[1] != spare or not (matches or spare):
            continue
        rows = tensor.clone()
        rows[list(matches)] = source[list(matches.values())].to(rows)
        rows[classes[0] :] = source[classes[1] :].to(rows)
        kept[name] = rows
    return kept


def tell_kept(ours: Sequence[str], theirs: Sequence[str], matches: Mapping[int, int], anew: int) -> str:
    """What became of the heads, as part of a sentence; ``anew``: tensors that keep nothing."""
    known = f"knows other classes ({some(theirs)})" if theirs else "knows no classes"
    if not matches:
        return f"{known}: {anew} tensors start anew"
    new = [name for label, name in enumerate(ours) if label not in matches]
    kept = some([ours[label] for label in matches], 20)
    told = f"{known}: the heads keep the rows of {kept} ({len(matches)} of {len(ours)} classes)"
    told += f"; new: {some(new, 20)}" if new else ""
    return told + (f"; {anew} tensors start anew" if anew else "")
