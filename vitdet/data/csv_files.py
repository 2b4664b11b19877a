"""Reads boxes from CSV files: a row an object, with the columns' names in the first line.

Two kinds are told apart by these names. Open Images has ``ImageID, LabelName, XMin, XMax, YMin, YMax`` in fractions of
the upright image; the plain kind has ``xmin, ymin, xmax, ymax`` in pixels, a column of images (``image_path``,
``filename``, …) and one of classes (``label``, ``class``, …). Columns may have any order, others are passed over but
``IsGroupOf``, whose objects are crowd regions. A row with an image and nothing else is an image without objects.
"""

from __future__ import annotations

import csv
import math
import re
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy as np

from vitdet.data.coco import check_inside
from vitdet.data.folders import Listings
from vitdet.data.fractions import HIGHEST, LOWEST, to_pixels
from vitdet.data.images import image_size
from vitdet.data.records import DetectionSet, ImageRecord, training_notes
from vitdet.errors import UserError, some
from vitdet.structures import ClassMap

MAX_BYTES = 4 * 2**30  # Open Images' training boxes, the largest known, are 2.3 GB
MAX_LINE = 65_536
MAX_PIXELS = 1e9

DESCRIPTIONS = "*class-descriptions*.csv"
_FRACTIONS = ("XMin", "YMin", "XMax", "YMax")
_PIXELS = ("xmin", "ymin", "xmax", "ymax")
_IMAGES = ("ImageID", "image_path", "img_path", "filename", "file_name", "image")
_CLASSES = ("LabelName", "label", "class", "class_name")
_FIELDS = 6  # of an object in an image's array: x1, y1, x2, y2, class number, crowd


@dataclass(frozen=True)
class Columns:
    """Which columns hold what; ``fractions``: whether boxes are fractions of the image, not pixels."""

    image: int
    name: int
    box: tuple[int, ...]
    group: int | None
    fractions: bool


def csv_splits(root: Path) -> dict[str, Path]:
    """The splits of a folder: name -> CSV file with boxes.

    They lie in ``root`` or ``root/annotations`` as ``train.csv``, ``train-annotations-bbox.csv`` and the like, or alone
    in the split's own folder (``train/_annotations.csv``).
    """
    splits: dict[str, Path] = {}
    for folder in (root, root / "annotations"):
        for path in sorted(folder.glob("*.csv")):
            if is_boxes(path):
                name = re.sub(r"^oidv\d+-|[-_]annotations([-_]bbox)?$", "", path.stem)
                splits.setdefault(name or path.stem, path)
    for folder in sorted(path for path in root.iterdir() if path.is_dir() and path.name != "annotations"):
        found = [path for path in sorted(folder.glob("*.csv")) if is_boxes(path)]
        if len(found) == 1:
            splits.setdefault(folder.name, found[0])
    return splits


def is_boxes(path: Path) -> bool:
    """Whether the first line of a CSV file names the columns of boxes."""
    try:
        with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
            return _find_columns(next(csv.reader([file.readline(MAX_LINE)]), [])) is not None
    except (OSError, ValueError, csv.Error):
        return False


def read_csv(path: Path, *, image_folders: list[Path], class_files: list[Path], root: Path, split: str) -> DetectionSet:
    """Read one file.

    Classes are those of all ``class_files``, with ids 1…K: sorted, or in the order of a ``class-descriptions`` file
    (lines ``/m/011k07,Tortoise``) beside them, which also gives the names. Image ids are 1…N in the order of the file.
    The name of an image may lack its suffix, or have another one than the file.

    Args:
        path: the CSV file of the split.
        image_folders: folders that the names of images may be relative to; the one that holds most of them is taken.
        class_files: the CSV files of all splits, which share their classes.
        root: the data set's folder (or file), as given by the user.
        split: the split's name, as given by the user.

    Raises:
        UserError: a row that cannot be right, naming its line; images that are not there; no objects at all.
    """
    labels: dict[str, int] = {}  # class as written -> number, in the order of appearance
    rows = _read_boxes(path, labels)
    if not rows:
        raise UserError(f"{path} lists 0 images: there is nothing to use, check the split {split!r}")
    for other in class_files:
        if other != path:
            _read_boxes(other, labels, boxes=False)
    if not labels:
        raise UserError(f"{path} lists 0 objects: a detector needs a class to learn")
    class_map, label_of_number = _make_class_map(labels, path, root)
    places, notes = _find_images(list(rows), image_folders, path)
    fractions = _header(path).fractions
    records, first_number = [], 1
    for position, (place, values) in enumerate(zip(places, rows.values(), strict=True)):
        record = _record(
            place, values, label_of_number, image_id=position + 1, first_number=first_number, fractions=fractions
        )
        records.append(record)
        first_number += len(record.labels)
    return DetectionSet("CSV", root, split, class_map, records, notes + training_notes(records))


# --- rows


def _read_boxes(path: Path, labels: dict[str, int], *, boxes: bool = True) -> dict[str, array]:
    """Image -> its objects, ``_FIELDS`` numbers each; ``labels`` grows by the classes. Or these alone."""
    columns = _header(path)
    rows: dict[str, array] = {}
    least = max(columns.image, columns.name, *columns.box) + 1
    for number, row in _rows(path):
        where = f"line {number} of {path}"
        if len(row) < least:
            raise UserError(f"{where} has {len(row)} columns, the first line tells of {least} or more: complete it")
        image, name, corners = row[columns.image].strip(), row[columns.name].strip(), [row[i] for i in columns.box]
        empty = not name and not any(corner.strip() for corner in corners)
        if not empty and not name:
            raise UserError(f"{where} has a box and no class: add it or remove the row")
        if name:
            labels.setdefault(name, len(labels))
        if not boxes:
            continue
        if image not in rows:
            if not image:
                raise UserError(f"{where} names no image: add it or remove the row")
            check_inside(image, where)
            rows[image] = array("d")
        if not empty:
            group = columns.group is not None and columns.group < len(row) and row[columns.group].strip() == "1"
            rows[image].extend((*_numbers(corners, columns, where), labels[name], group))
    return rows


def _numbers(texts: list[str], columns: Columns, where: str) -> list[float]:
    """The corners of a row; a decimal comma, in quotes, is read as well."""
    names = _FRACTIONS if columns.fractions else _PIXELS
    shown = ", ".join(f"{name} {text[:40]!r}" for name, text in zip(names, texts, strict=True))
    try:
        box = [float(text.replace(",", ".")) for text in texts]
    except ValueError:
        box = [math.nan]
    if not all(map(math.isfinite, box)):
        raise UserError(f"{where} has {shown}: all four must be finite numbers, or empty where it shows no object")
    if columns.fractions and (min(box) < LOWEST or max(box) > HIGHEST):
        raise UserError(f"{where} has {shown}: these must be fractions in [0, 1]; name columns of pixels xmin, ymin, …")
    if max(map(abs, box)) > MAX_PIXELS:
        raise UserError(f"{where} has {shown}: no image is that large, correct it")
    if box[2] < box[0] or box[3] < box[1]:
        raise UserError(f"{where} has a box of negative size, {shown}: the minima must not exceed the maxima")
    return box


def _header(path: Path) -> Columns:
    """The columns by the names in the first line."""
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise UserError(f"{path} has {size} bytes, more than {MAX_BYTES}: split it into smaller files")
    with path.open(encoding="utf-8-sig", newline="") as file:
        first = next((row for _, row in _parse(file, path)), [])
    columns = _find_columns(first)
    if columns is None:
        raise UserError(
            f"{path} does not name the columns of boxes in its first line: it needs ImageID,LabelName,XMin,XMax,YMin,"
            f"YMax (fractions) or image_path,xmin,ymin,xmax,ymax,label (pixels)"
        )
    return columns


def _find_columns(names: list[str]) -> Columns | None:
    """The columns of boxes among the names, None where they are not all there."""
    places = {name.strip(): place for place, name in reversed(list(enumerate(names)))}
    image = next((places[name] for name in _IMAGES if name in places), None)
    label = next((places[name] for name in _CLASSES if name in places), None)
    for corners in (_FRACTIONS, _PIXELS):
        if image is not None and label is not None and all(name in places for name in corners):
            box = tuple(places[name] for name in corners)
            return Columns(image, label, box, places.get("IsGroupOf"), corners is _FRACTIONS)
    return None


def _rows(path: Path) -> Iterator[tuple[int, list[str]]]:
    """(line number, row) below the first line; empty lines are passed over."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = _parse(file, path)
        next(rows, None)
        yield from ((number, row) for number, row in rows if row)


def _parse(file: TextIO, path: Path) -> Iterator[tuple[int, list[str]]]:
    """(line number, row) of a file whose lines are bounded."""
    lines = iter(lambda: file.readline(MAX_LINE), "")
    reader = csv.reader(_check_length(line, number, path) for number, line in enumerate(lines, start=1))
    try:
        for row in reader:
            yield reader.line_num, row
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 after line {reader.line_num}: save it as UTF-8") from error
    except csv.Error as error:
        raise UserError(f"line {reader.line_num} of {path} is broken CSV ({error}): mend or export it again") from error


def _check_length(line: str, number: int, path: Path) -> str:
    if len(line) == MAX_LINE:
        raise UserError(f"line {number} of {path} has {MAX_LINE} characters or more: this is no CSV file of boxes")
    return line


# --- classes and images


def _make_class_map(labels: dict[str, int], path: Path, root: Path) -> tuple[ClassMap, np.ndarray]:
    """The class map, and (K,) the label of each number."""
    folders = dict.fromkeys([path.parent, root if root.is_dir() else root.parent])
    described: dict[str, str] = {}
    for file in (file for folder in folders for file in sorted(folder.glob(DESCRIPTIONS))):
        described = _descriptions(file) | described
    order = {name: place for place, name in enumerate(described)}
    written = sorted(labels, key=lambda name: (order.get(name, len(order)), name))
    names = [described.get(name, name) for name in written]
    uses = Counter(names)
    names = [name if uses[name] == 1 else f"{name} ({own})" for name, own in zip(names, written, strict=True)]
    label_of_number = np.zeros(len(written), dtype=np.int64)
    label_of_number[[labels[name] for name in written]] = np.arange(len(written))
    return ClassMap(ids=tuple(range(1, len(names) + 1)), names=tuple(names)), label_of_number


def _descriptions(path: Path) -> dict[str, str]:
    """Class as written -> name, in the order of the file."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        pairs = [(row[0].strip(), row[1].strip()) for _, row in _parse(file, path) if len(row) > 1]
    return {own: name for own, name in pairs if own != "LabelName" and own and name}


def _find_images(names: list[str], folders: list[Path], path: Path) -> tuple[list[Path], list[str]]:
    """The files of the images, in the one folder that holds most of them, and a note on other suffixes."""
    listings = Listings()
    found = {folder: [listings.find_image(folder / name) for name in names] for folder in folders}
    best = max(found, key=lambda folder: sum(place is not None for place in found[folder]))
    places = [place for place in found[best] if place is not None]
    absent = [name for name, place in zip(names, found[best], strict=True) if place is None]
    if absent:
        searched = "" if places else f" (searched {', '.join(str(folder) for folder in folders)})"
        raise UserError(
            f"{len(absent)} of the {len(names)} images listed in {path} are missing on disk{searched}, "
            f"the first is {best / absent[0]}: add them or take them out of the list"
        )
    twice = [str(place) for place, other in zip(sorted(places), sorted(places)[1:], strict=False) if place == other]
    if twice:
        raise UserError(f"two names in {path} are of the one image {twice[0]}: write it the same in every row")
    renamed = [
        place.name
        for place, name in zip(places, names, strict=True)
        if place.name != Path(name).name and place.stem != Path(name).name
    ]
    verb = "s have" if len(renamed) > 1 else " has"
    return places, [f"{len(renamed)} image{verb} another suffix than listed: {some(renamed)}"] if renamed else []


def _record(
    path: Path, values: array, label_of_number: np.ndarray, *, image_id: int, first_number: int, fractions: bool
) -> ImageRecord:
    """One image's objects as arrays."""
    size = image_size(path)
    table = np.array(values, dtype=np.float64).reshape(-1, _FIELDS)
    boxes = to_pixels(table[:, :4], size) if fractions else table[:, :4]
    return ImageRecord(
        path=path,
        image_id=image_id,
        size=size,
        boxes=boxes,
        labels=label_of_number[table[:, 4].astype(np.int64)],
        crowd=table[:, 5] > 0,
        areas=(boxes[:, 2:] - boxes[:, :2]).prod(axis=1),
        annotation_ids=np.arange(first_number, first_number + len(table), dtype=np.int64),
    )
