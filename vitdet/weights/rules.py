"""Renaming of foreign state dicts by literal rules, and strict loading with a report.

A family's rules are one table of ``(pattern, replacement)``: regular expressions that are applied to every name in
turn, so that a prefix, a block's part and a norm's spelling are each written once. Beyond renaming:

* a replacement of None drops the tensor: what the source stores and ours computes (anchors, position tables);
* a new name that ends in ``[0]``, ``[1]``, … is a part: parts are stacked along the first dimension, in order, which
  joins separate query, key and value projections into one matrix.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

from vitdet.errors import UserError, some

Rules = Sequence[tuple[str, str | None]]

_PART = re.compile(r"(?P<name>.+)\[(?P<index>\d+)\]")


def convert_state_dict(source: Mapping[str, Tensor], rules: Rules) -> dict[str, Tensor]:
    """Rename, drop and join the tensors of ``source``.

    A name that no rule touches is kept, and shows up in :func:`load_strict` if the model lacks it.

    Raises:
        UserError: two different tensors get one name, or a part of a joined one is missing.
    """
    renamed: dict[str, Tensor] = {}
    origin: dict[str, str] = {}
    for old, tensor in source.items():
        new = rename(old, rules)
        if new is None:
            continue
        # Tied weights are written twice by some publishers; that is one tensor, not a conflict.
        if new in renamed and not torch.equal(renamed[new], tensor):
            raise UserError(
                f"the weights {origin[new]!r} and {old!r} differ but are both our {new!r}; "
                "name the model that the file was made for"
            )
        renamed[new], origin[new] = tensor, old
    return join_parts(renamed)


def rename(name: str, rules: Rules) -> str | None:
    """The name after all rules in turn, or None where one of them drops it."""
    for pattern, replacement in rules:
        if replacement is not None:
            name = re.sub(pattern, replacement, name)
        elif re.search(pattern, name):
            return None
    return name


def count(state: Mapping[str, Tensor], pattern: str) -> int:
    """One more than the largest number at a place of the names."""
    return 1 + max((int(match[1]) for name in state if (match := re.match(pattern, name))), default=-1)


def join_parts(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Stack ``name[0]``, ``name[1]``, … to ``name`` along the first dimension; other entries stay as they are."""
    whole: dict[str, Tensor] = {}
    parts: dict[str, dict[int, Tensor]] = {}
    for name, tensor in state.items():
        if match := _PART.fullmatch(name):
            parts.setdefault(match["name"], {})[int(match["index"])] = tensor
        else:
            whole[name] = tensor
    for name, pieces in parts.items():
        lost = [index for index in range(max(pieces) + 1) if index not in pieces]
        if lost:
            raise UserError(f"the weights of {name!r} lack part {lost[0]} of {max(pieces) + 1}; fetch the file again")
        whole[name] = torch.cat([pieces[index] for index in range(len(pieces))])
    return whole


@dataclass(frozen=True)
class LoadReport:
    """What did not fit when weights were loaded; empty lists mean that every tensor found its place.

    Attributes:
        missing: names that the model has and the source lacks; they keep the model's own values.
        unexpected: names that the source has and the model lacks; they were left out.
        reshaped: (name, source shape, model shape) where the shapes differ; they keep the model's own values.
    """

    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    reshaped: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)

    def __str__(self) -> str:
        shapes = [f"{name} {list(theirs)} instead of {list(ours)}" for name, theirs, ours in self.reshaped]
        lists = {"missing": self.missing, "unexpected": self.unexpected, "of another shape": shapes}
        return "; ".join(f"{len(names)} {what}: {some(names)}" for what, names in lists.items() if names) or "all fit"


def load_strict(
    model: nn.Module, state: Mapping[str, Tensor], *, allow_missing: Sequence[str] = (),
    allow_unexpected: Sequence[str] = (), allow_reshaped: Sequence[str] = (), assign: bool = False,
) -> LoadReport:  # fmt: skip
    """Load ``state`` into ``model`` in place; whatever does not fit must have been named by the caller.

    Args:
        model: receives the values, in its own dtypes and on its own devices.
        state: our names to tensors.
        allow_missing, allow_unexpected, allow_reshaped: shell patterns (``"class_head.*"``) of names that may differ,
            as a new head's do.
        assign: make the tensors of ``state`` themselves the model's, which may then be on the meta device.

    Returns:
        All that did not fit, allowed or not.

    Raises:
        UserError: something did not fit and no pattern allows it; the model is then untouched.
    """
    own = model.state_dict()
    report = LoadReport(
        missing=[name for name in own if name not in state],
        unexpected=[name for name in state if name not in own],
        reshaped=[
            (name, tuple(tensor.shape), tuple(own[name].shape))
            for name, tensor in state.items()
            if name in own and tensor.shape != own[name].shape
        ],
    )
    refused = LoadReport(
        missing=_not_allowed(report.missing, allow_missing),
        unexpected=_not_allowed(report.unexpected, allow_unexpected),
        reshaped=[entry for entry in report.reshaped if _not_allowed([entry[0]], allow_reshaped)],
    )
    if refused.missing or refused.unexpected or refused.reshaped:
        raise UserError(
            f"the weights do not fit {type(model).__name__}: {refused}; "
            "choose the model they were made for, or say which names may differ"
        )
    left_out = {*report.unexpected, *(name for name, _, _ in report.reshaped)}
    fitting = {name: tensor for name, tensor in state.items() if name not in left_out}
    model.load_state_dict(fitting, strict=False, assign=assign)
    return report


def _not_allowed(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """The names that match none of the shell patterns."""
    return [name for name in names if not any(fnmatchcase(name, pattern) for pattern in patterns)]
