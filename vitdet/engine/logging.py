"""What a run tells: one JSON row per epoch in ``metrics.jsonl``, curves as a picture, lines or a bar on stderr."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def say(text: str) -> None:
    """A line on stderr: stdout is for results."""
    print(text, file=sys.stderr, flush=True)


def progress(items: Iterable[T], *, total: int, title: str, every: float = 30.0) -> Iterator[T]:
    """Go through items showing how far: a rich bar on a terminal, elsewhere a plain line every ``every`` seconds."""
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


class RunLog:
    """Appends rows to ``metrics.jsonl`` in the run's folder and draws ``curves.png`` from all of them.

    Args:
        folder: of the run. resume: keep the rows already there; otherwise they are of an older run and go.
    """

    def __init__(self, folder: Path, *, resume: bool = False) -> None:
        self.path, self.picture = folder / "metrics.jsonl", folder / "curves.png"
        if not resume:
            self.path.unlink(missing_ok=True)

    def rows(self) -> list[dict[str, Any]]:
        """All rows so far."""
        if not self.path.exists():
            return []
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    def write(self, row: dict[str, Any]) -> None:
        """Append a row; the first one makes the folder."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def draw(self, *, metric: str) -> None:
        """Draw losses, the metric and the learning rate over the epochs."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        rows = self.rows()
        figure = Figure(figsize=(12, 3.6), layout="constrained")
        panels = figure.subplots(1, 3)
        epochs = [row["epoch"] for row in rows]
        parts = ("total", "vfl", "box", "giou")
        for part in parts:
            panels[0].plot(epochs, [row["loss"][part] for row in rows], label=part)
        panels[0].set(title="training loss", xlabel="epoch", yscale="log")
        panels[0].legend()
        scored = [row for row in rows if row.get("metrics")]
        for name in dict.fromkeys((metric, "AP50", "AP75")):
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
