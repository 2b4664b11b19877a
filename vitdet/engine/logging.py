"""What a run tells: one JSON row per epoch in ``metrics.jsonl``, curves as a picture, lines or a bar on stderr."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from vitdet.engine.checkpoint import write_atomically

T = TypeVar("T")


def say(text: str) -> None:
    """A line on stderr: stdout is for results."""
    print(text, file=sys.stderr, flush=True)


def progress(items: Iterable[T], *, total: int, title: str, every: float = 30.0, show: bool = True) -> Iterator[T]:
    """Go through items showing how far: a rich bar on a terminal, elsewhere a plain line every ``every`` seconds."""
    if not show:
        yield from items
        return
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import track

        yield from track(items, description=title, total=total, console=Console(stderr=True), transient=True)
        return
    start = last = time.monotonic()
    for done, item in enumerate(items, start=1):
        yield item
        now = time.monotonic()
        if now - last >= every:
            last = now
            say(f"{title}: {done}/{total}, {(now - start) / done * (total - done):.0f} s left")


RUN_FILES = ("metrics.jsonl", "curves.png", "best.safetensors", "last.pt", "config.yaml")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a ``metrics.jsonl``, none where there is no such file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


class RunLog:
    """Appends rows to ``metrics.jsonl`` in the run's folder and draws ``curves.png`` from all of them.

    Args:
        folder: of the run. resumed: the epoch to go on from; later rows are dropped.
            0 is a new run, whose first row takes the place of an older run's files.
    """

    def __init__(self, folder: Path, *, resumed: int = 0) -> None:
        self.folder, self.resumed = folder, resumed
        self.path, self.picture = folder / "metrics.jsonl", folder / "curves.png"
        self._kept: list[dict[str, Any]] | None = None

    def rows(self) -> list[dict[str, Any]]:
        """All rows so far."""
        if self._kept is None:
            self._kept = [row for row in read_rows(self.path) if row["epoch"] <= self.resumed]
        return self._kept

    def write(self, row: dict[str, Any]) -> None:
        """Append a row; the first one of a new run makes the folder."""
        rows = self.rows()
        if not rows and not self.resumed:
            self.folder.mkdir(parents=True, exist_ok=True)
            for name in RUN_FILES:
                (self.folder / name).unlink(missing_ok=True)
        rows.append(row)
        text = "".join(json.dumps(one) + "\n" for one in rows)
        write_atomically(self.path, lambda temporary: temporary.write_text(text))

    def draw(self, *, metric: str) -> None:
        """Draw losses, the metric and the learning rate over the epochs."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        rows = self.rows()
        figure = Figure(figsize=(12, 3.6), layout="constrained")
        panels = figure.subplots(1, 3)
        epochs = [row["epoch"] for row in rows]
        for part in rows[-1]["loss"]:
            panels[0].plot(epochs, [row["loss"].get(part, math.nan) for row in rows], label=part)
        panels[0].set(title="training loss", xlabel="epoch", yscale="log")
        panels[0].legend()
        scored = [row for row in rows if row.get("metrics")]
        for name in dict.fromkeys((metric, "AP50", "AP75", "top5")):
            points = [(row["epoch"], row["metrics"][name]) for row in scored if name in row["metrics"]]
            if points:
                panels[1].plot(*zip(*points, strict=True), marker=".", label=name)
        panels[1].set(title="evaluation", xlabel="epoch", ylim=(0, 1))
        if scored:
            panels[1].legend()
        panels[2].plot(epochs, [row["lr"] for row in rows])
        panels[2].set(title="learning rate", xlabel="epoch")
        for panel in panels:
            panel.grid(alpha=0.3)
        FigureCanvasAgg(figure).print_png(self.picture)
