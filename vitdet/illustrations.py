"""Pictures that explain: what positions look like to attention."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vitdet.core.positions import alibi_bias, rotary_1d, rotate, sinusoidal_1d
from vitdet.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ALIBI_HEADS = 8


def sinusoidal_similarity(length: int, channels: int, reference: int) -> Tensor:
    """(N,) inner products of the sinusoidal encodings with the one at ``reference``, as shares of that one's own."""
    table = sinusoidal_1d(length, channels).double()
    return table @ table[reference] / table[reference].square().sum()


def rotary_similarity(length: int, channels: int, reference: int) -> Tensor:
    """(N,) scores of equal vectors, turned by their positions, with the one at ``reference``, as shares of its own."""
    heads = torch.ones(1, 1, length, channels, dtype=torch.float64)
    turned = rotate(heads, rotary_1d(length, channels))[0, 0]  # (N, C)
    return turned @ turned[reference] / turned[reference].square().sum()


def alibi_biases(length: int, reference: int) -> Tensor:
    """(H, N) what ALiBi adds to the scores of a query at ``reference``, for each of 8 heads."""
    return alibi_bias(ALIBI_HEADS, length, length)[:, reference]


def draw_positions(path: Path, *, length: int = 128, channels: int = 256) -> Path:
    """Draw sinusoidal, rotary and ALiBi positions into an image file.

    Args:
        path: of the image, whose suffix tells its format; its folder is made.
        length: positions shown. channels: C of the encodings and D of the rotated heads, even.

    Returns:
        The path.
    """
    from matplotlib.figure import Figure  # not pyplot: no window system, no global state

    if length < 2 or channels < 2 or channels % 2:
        raise UserError(
            f"positions need a length of at least 2 and an even number of channels, got {length}, {channels}"
        )
    figure = Figure(figsize=(12, 8), layout="constrained")
    ((pattern, single), (similarity, alibi)) = figure.subplots(2, 2)
    _draw_pattern(pattern, single, sinusoidal_1d(length, channels))
    _draw_similarities(similarity, length, channels)
    _draw_alibi(alibi, length)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return path


def _draw_pattern(pattern: Axes, single: Axes, table: Tensor) -> None:
    """The whole (N, C) table as an image, and some of its channels as curves."""
    channels = table.shape[1]
    by_kind = torch.cat([table[:, 0::2], table[:, 1::2]], dim=1)  # in turns, sines and cosines would only flicker
    image = pattern.imshow(by_kind.T.numpy(), aspect="auto", cmap="RdBu", vmin=-1, vmax=1, interpolation="nearest")
    pattern.figure.colorbar(image, ax=pattern)
    rows = "even channels (sine), then odd ones (cosine)"
    _label(pattern, "Sinusoidal encoding: every position a column", "position", rows)
    for channel in sorted({0, channels // 8 * 2, channels // 4 * 2}):
        single.plot(table[:, channel], label=f"channel {channel}")
    single.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
    _label(single, "Single channels: the higher, the slower", "position", "value")


def _draw_similarities(axes: Axes, length: int, channels: int) -> None:
    """How alike other positions are to the middle one, for both encodings."""
    reference = length // 2
    offsets = torch.arange(length) - reference
    sinusoidal, rotary = (of(length, channels, reference) for of in (sinusoidal_similarity, rotary_similarity))
    axes.plot(offsets, sinusoidal, linewidth=4, alpha=0.4, label="sinusoidal: inner product")
    axes.plot(offsets, rotary, linewidth=1.2, color="black", label="rotary: score of two equal vectors (the same)")
    axes.axvline(0, color="grey", linewidth=0.8, linestyle=":")
    axes.set_ylim(top=1.2)
    axes.legend(loc="upper center")
    title = "Near positions are alike, whatever the position"
    _label(axes, title, f"offset from position {reference}", "share of the peak")


def _draw_alibi(axes: Axes, length: int) -> None:
    """Each head's bias for a query in the middle."""
    from matplotlib import colormaps

    reference = length // 2
    offsets = torch.arange(length) - reference
    colors = colormaps["RdBu"](torch.linspace(0, 0.35, ALIBI_HEADS).numpy())
    for head, (bias, color) in enumerate(zip(alibi_biases(length, reference), colors, strict=True), start=1):
        axes.plot(offsets, bias, color=color, label=f"head {head}: slope 1/{2**head}")
    axes.set_ylim(-length / 8, length / 200)  # where half of them can be told apart
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
    _label(axes, "ALiBi: what each head adds to its scores", f"offset from position {reference}", "bias")


def _label(axes: Axes, title: str, x: str, y: str) -> None:
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw positions as the command line says; 0, or 2 with a sentence where it cannot be done."""
    parser = argparse.ArgumentParser(description="Draw what sinusoidal, rotary and ALiBi positions do.")
    parser.add_argument("--out", type=Path, default=Path("positional_encoding.png"), help="image file to write")
    parser.add_argument("--length", type=int, default=128, help="positions shown")
    parser.add_argument("--channels", type=int, default=256, help="channels of an encoding, even")
    options = parser.parse_args(arguments)
    try:
        print(draw_positions(options.out, length=options.length, channels=options.channels))
    except (OSError, ValueError) as error:  # a file that cannot be written, a suffix that is no image's
        print(f"positional_encoding: {error}", file=sys.stderr)
        return 2
    return 0
