"""Which files lie in a folder, found with one listing each: a stat for each of 100,000 images is slow."""

from __future__ import annotations

import os
from pathlib import Path

from vitdet.data.images import IMAGE_SUFFIXES


class Listings:
    """Remembers the listings of the folders it was asked about."""

    def __init__(self) -> None:
        self._names: dict[Path, set[str]] = {}
        self._stems: dict[Path, dict[str, Path | None]] = {}

    def holds(self, path: Path) -> bool:
        """Whether there is something of this name."""
        return path.name in self._listing(path.parent)

    def find_image(self, path: Path) -> Path | None:
        """The file itself, else the only image in its folder of that name with a suffix, or with another suffix."""
        if self.holds(path):
            return path
        stems = self._images(path.parent)
        known_suffix = path.suffix.lower() in IMAGE_SUFFIXES
        return stems.get(path.name) or (stems.get(path.stem) if known_suffix else None)

    def _listing(self, folder: Path) -> set[str]:
        if folder not in self._names:
            # os.path takes a name that is no name (too long, with a zero byte) for absent; Path raises.
            there = os.path.isdir(folder)  # noqa: PTH112
            self._names[folder] = set(os.listdir(folder)) if there else set()  # noqa: PTH208 - names alone
        return self._names[folder]

    def _images(self, folder: Path) -> dict[str, Path | None]:
        """Name without suffix -> image; None where several share it."""
        if folder not in self._stems:
            stems: dict[str, Path | None] = {}
            for name in self._listing(folder):
                path = folder / name
                if path.suffix.lower() in IMAGE_SUFFIXES:
                    stems[path.stem] = None if path.stem in stems else path
            self._stems[folder] = stems
        return self._stems[folder]


def images_below(folder: Path) -> list[Path]:
    """The images in a folder and in those below it, sorted; hidden ones and links to folders are passed over."""
    found: list[Path] = []
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        found += [
            Path(place, name)
            for name in sorted(names)
            if os.path.splitext(name)[1].lower() in IMAGE_SUFFIXES and not name.startswith(".")  # noqa: PTH122
        ]
    return found
