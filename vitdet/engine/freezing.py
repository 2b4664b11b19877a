"""Parts of a model that a run leaves as they are: linear probes, and fine-tuning of the last layers."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from vitdet.errors import UserError, did_you_mean


def freeze(model: nn.Module, parts: Sequence[str]) -> list[nn.Module]:
    """Take parameters out of training.

    Args:
        parts: names of modules or parameters (``backbone``, ``backbone.encoder.layers.0``) or shell patterns of
            parameter names (``backbone.encoder.layers.[0-5].*``).

    Returns:
        The modules of which every parameter was named, which must be in evaluation mode while the rest trains: no
        dropout, and batch statistics as they are. Those within them are not listed again.

    Raises:
        UserError: a part that the model does not have, or nothing left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    frozen: set[str] = set()
    for part in parts:
        fits = [n for n in names if n == part or n.startswith(f"{part}.") or fnmatchcase(n, part)]
        if not fits:
            known = sorted({name.partition(".")[0] for name in names})
            raise UserError(f"train.freeze names {part!r}, which the model does not have; {did_you_mean(part, known)}")
        for name in fits:
            model.get_parameter(name).requires_grad_(False)
        frozen.update(fits)
    if parts and not any(parameter.requires_grad for parameter in model.parameters()):
        raise UserError(f"train.freeze {list(parts)} leaves nothing to train; name fewer parts")
    whole: dict[str, nn.Module] = {}
    for prefix, module in model.named_modules():
        inside = [name for name in names if name.startswith(f"{prefix}.")]
        above = any(prefix.startswith(f"{one}.") for one in whole)
        if inside and frozen.issuperset(inside) and not above:
            whole[prefix] = module
    return list(whole.values())
