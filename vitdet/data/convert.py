"""Converts a data set for detection, in whichever format, to another one: ``vitdet data convert``."""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from vitdet.data.formats import detection_splits, read_detection_set
from vitdet.data.images import IMAGE_SUFFIXES, image_size
from vitdet.data.records import DetectionSet
from vitdet.data.writers import IN_FRACTIONS, WITHOUT_CROWD, WRITERS, Splits, image_folder
from vitdet.errors import UserError, did_you_mean
from vitdet.structures import ClassMap


def convert_set(root: str | Path, destination: str | Path, *, to: str, splits: Sequence[str] = ()) -> list[str]:
    """Write a data set in another format; all of it or nothing is there afterwards.

    Boxes and the names of their classes stay as they are. Images are linked to the same file where the file system can
    (hard links), else copied; an image whose name another one has, apart from the suffix, gets a number. Splits that
    disagree on their classes get the classes of all.

    Args:
        root: the data set.
        destination: a folder that is empty or not there yet.
        to: ``"coco"``, ``"yolo"``, ``"voc"`` or ``"csv"``.
        splits: the splits to convert; none: all that there are.

    Returns:
        Lines that say what was read, left out and written.

    Raises:
        UserError: an unknown format, a destination with something in it, or a data set that cannot be read or written.
    """
    root, destination = Path(root), Path(destination)
    if to not in WRITERS:
        raise UserError(f"there is no format {to!r} to convert to; {did_you_mean(to, WRITERS)}")
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        raise UserError(f"{destination} is not empty: choose another folder or remove it")
    names = list(dict.fromkeys(splits)) or detection_splits(root)
    if not names:
        raise UserError(f"{root} has 0 splits: there is nothing to convert")
    _check_splits(names, root)
    data = _with_one_class_map({name: read_detection_set(root, name) for name in names})
    _check_names(data)
    _check_images(data, to)
    lines = list(_describe(data, to))
    destination.parent.mkdir(parents=True, exist_ok=True)
    partial = destination.parent / f".{destination.name}.{os.getpid()}.partial"
    try:
        partial.mkdir()
        WRITERS[to](partial, _place_images(data, partial, to))
        if destination.exists():
            destination.rmdir()  # empty, as seen above; some systems rename over nothing
        partial.replace(destination)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return [*lines, f"{destination}: written as {to}"]


def _describe(data: Splits, to: str) -> Iterator[str]:
    """What was read, and what the format has no place for."""
    for split, one in data.items():
        boxes = sum(len(record.labels) for record in one.records)
        crowd = sum(int(record.crowd.sum()) for record in one.records)
        yield f"{one.root}: {one.name}, {split}: {len(one)} images, {boxes} boxes, {len(one.class_map)} classes"
        if crowd and to in WITHOUT_CROWD:
            yield f"note: {crowd} crowd regions of {split} are left out, {to} has none"


def _check_splits(names: list[str], root: Path) -> None:
    """File names are made of the splits' names."""
    for name in names:
        if not re.fullmatch(r"[\w][\w .+-]*", name):
            raise UserError(f"split {name!r} of {root} cannot be the name of a file: rename it before converting")


def _check_names(data: Splits) -> None:
    """Names must survive the formats of text."""
    for name in next(iter(data.values())).class_map.distinct_names:
        if not name.isprintable() or name != name.strip() or not name:
            raise UserError(f"class {name!r} is empty, or has white space around it or control characters: rename it")


def _with_one_class_map(data: Splits) -> Splits:
    """The same sets with the classes of all of them, by name; ids are kept as far as the splits agree on them."""
    maps = [one.class_map for one in data.values()]
    if all(one == maps[0] for one in maps):
        return data
    pairs = dict.fromkeys(pair for one in maps for pair in zip(one.ids, one.distinct_names, strict=True))
    names = list(dict.fromkeys(name for _, name in sorted(pairs)))
    agreed = len(pairs) == len(names) == len({category for category, _ in pairs})
    ids = tuple(category for category, _ in sorted(pairs)) if agreed else tuple(range(1, len(names) + 1))
    class_map = ClassMap(ids=ids, names=tuple(names))
    return {split: _relabelled(one, class_map) for split, one in data.items()}


def _relabelled(data: DetectionSet, class_map: ClassMap) -> DetectionSet:
    label_of_name = {name: label for label, name in enumerate(class_map.names)}
    new = np.array([label_of_name[name] for name in data.class_map.distinct_names], dtype=np.int64)
    records = [replace(record, labels=new[record.labels]) for record in data.records]
    return replace(data, class_map=class_map, records=records)


def _check_images(data: Splits, to: str) -> None:
    """What the readers of the format ask of the image files."""
    for record in (record for one in data.values() for record in one.records):
        if record.path.suffix.lower() not in IMAGE_SUFFIXES:
            raise UserError(f"image {record.path} has no suffix of an image: rename it before converting")
        if to in IN_FRACTIONS and image_size(record.path) != record.size:
            height, width = image_size(record.path)
            raise UserError(
                f"image {record.path} is {width} x {height} pixels (upright) but its annotation says "
                f"{record.size[1]} x {record.size[0]}: correct the annotation before converting"
            )


def _place_images(data: Splits, folder: Path, to: str) -> Splits:
    """Link or copy the images below ``folder``; the same sets, whose records have the new paths."""
    taken: dict[str, set[str]] = {}  # folder -> stems: labels of a.jpg and a.png would have one name
    placed: dict[tuple[str, Path, int], Path] = {}
    result = {}
    for split, one in data.items():
        place = image_folder(to, split)
        (folder / place).mkdir(parents=True, exist_ok=True)
        times: Counter[Path] = Counter()  # COCO may list a file twice, then it is two images
        records = []
        for record in one.records:
            source = record.path.resolve()
            times[source] += 1
            key = (place, source, times[source])
            if key not in placed:  # an image may be in several splits, which VOC keeps in one folder
                placed[key] = folder / place / _free_name(record.path, taken.setdefault(place, set()))
                _link(source, placed[key])
            records.append(replace(record, path=placed[key]))
        result[split] = replace(one, records=records)
    return result


def _free_name(path: Path, taken: set[str]) -> str:
    """The image's name, without white space, with a number where another image has it."""
    plain = "_".join(path.stem.split()) or "image"  # VOC's lists end a name at white space
    stem, number = plain, 1
    while stem.casefold() in taken:  # some file systems do not tell A from a
        number += 1
        stem = f"{plain}_{number}"
    taken.add(stem.casefold())
    return stem + path.suffix


def _link(source: Path, path: Path) -> None:
    try:
        os.link(source, path)
    except OSError:  # another file system, or one without links
        shutil.copyfile(source, path)
