"""Reads YOLO sets: ``data.yaml`` with a text file of labels an image, and Darknet's ``obj.data`` with the same labels.

A line of a label file is ``class cx cy width height`` in fractions of the upright image. Longer lines are what the
formats define and no others: ``class`` and three or more points (segments, oriented boxes), reduced to the box around
them, or, where ``data.yaml`` has ``kpt_shape``, a box and its key points, which are passed over. An image whose label
file is empty or missing shows no objects.

Labels lie in ``labels/`` where the path of an image has the folder ``images/``, or beside the image.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import yaml

from vitdet.data.coco import check_inside
from vitdet.data.folders import Listings, images_below
from vitdet.data.fractions import HIGHEST, LOWEST, to_pixels
from vitdet.data.images import image_size
from vitdet.data.records import DetectionSet, ImageRecord, split_aliases, training_notes
from vitdet.errors import UserError
from vitdet.structures import ClassMap

NAMES = ("data.yaml", "data.yml", "dataset.yaml", "obj.data")
MAX_YAML_BYTES = 2**20
MAX_LABEL_BYTES = 8 * 2**20
MAX_LIST_BYTES = 256 * 2**20
_SPLITS = ("train", "val", "valid", "validation", "test")
_NO_SPLITS = frozenset(("path", "names", "nc", "classes", "backup", "download", "results", "eval"))


@dataclass(frozen=True)
class YoloFile:
    """What a ``data.yaml`` or ``obj.data`` says.

    Attributes:
        path: the file; no path in it may leave its folder.
        base: the folder that its paths are relative to, below that of the file: ``.`` or a relative path.
        splits: name -> folders of images or files that list images.
        class_map: the classes.
        keypoint_columns: numbers after the box in each line of a label file, of sets with key points.
        notes: one-line warnings.
    """

    path: Path
    base: str
    splits: dict[str, list[str]]
    class_map: ClassMap
    keypoint_columns: int = 0
    notes: list[str] = field(default_factory=list)


def find_yolo(root: Path) -> Path | None:
    """The ``data.yaml`` (or another of its names) of a folder, if it has one."""
    return next((root / name for name in NAMES if (root / name).is_file()), None)


def read_yolo(path: Path, *, root: Path, split: str) -> DetectionSet:
    """Read one split.

    Category ids are the keys of ``names``, or 0…K-1 where it is a list; image ids are 1…N in the order of the list
    file, or sorted by path where the split is a folder.

    Args:
        path: the ``data.yaml`` or ``obj.data``.
        root: the data set's folder (or file), as given by the user.
        split: the split's name; ``val`` also finds ``valid`` and ``validation``.

    Raises:
        UserError: no such split, missing images, no labels at all, a line that cannot be right, a path that leads out
            of the folder.
    """
    said = read_yolo_file(path)
    name = next((one for one in split_aliases(split) if one in said.splits), None)
    if name is None:
        known = ", ".join(said.splits) or "none"
        raise UserError(f"{path} has no split {split!r}: its splits are {known}")
    images = _find_images(said, name)
    listings = Listings()
    labels = [_find_labels(image, path.parent, listings) for image in images]
    absent = labels.count(None)
    if absent == len(images):
        raise UserError(
            f"none of the {absent} images of split {split!r} of {path} has a label file, the first is looked for at "
            f"{_label_path(images[0], path.parent)}: put the labels there"
        )
    records, first_number = [], 1
    for position, (image, label) in enumerate(zip(images, labels, strict=True)):
        rows = read_labels(label, said) if label else []
        record = _record(image, rows, image_id=position + 1, first_number=first_number)
        records.append(record)
        first_number += len(record.labels)
    notes = [f"{absent} of the {len(images)} images have no label file: taken as without objects"] if absent else []
    return DetectionSet("YOLO", root, split, said.class_map, records, said.notes + notes + training_notes(records))


def read_yolo_file(path: Path) -> YoloFile:
    """Read a ``data.yaml``, or an ``obj.data`` with the file of names that it refers to."""
    return _read_darknet(path) if path.suffix == ".data" else _read_yaml(path)


def read_labels(path: Path, said: YoloFile) -> list[tuple[int, float, float, float, float]]:
    """The objects of one label file: label and box, ``xyxy`` in fractions of the image."""
    label_of_id = said.class_map.label_of_id
    rows = []
    for number, line in enumerate(_read_text(path, MAX_LABEL_BYTES, errors="replace").splitlines(), start=1):
        words = line.split()
        if words:
            where = f"line {number} of {path}"
            values = _fractions(words, said.keypoint_columns, where)
            category = _category(words[0], where)
            if category not in label_of_id:
                known = _shown(said.class_map.ids)
                raise UserError(
                    f"{where} has class {category}, known are {known}: correct it or add it to {said.path.name}"
                )
            rows.append((label_of_id[category], *_box(values, where)))
    return rows


def _category(word: str, where: str) -> int:
    """The class of a line; some tools write 0 as 0.0."""
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not value.is_integer() or not 0 <= value < 2**31:
        raise UserError(f"{where} has the class {word[:40]!r}: it must be a whole number from 0 on")
    return int(value)


def _fractions(words: list[str], keypoint_columns: int, where: str) -> list[float]:
    """The numbers of a line that tell where the object is: 4 of a box, or 6 and more of a polygon."""
    count = len(words)
    if keypoint_columns:
        if count != 5 + keypoint_columns:
            raise UserError(f"{where} has {count} columns: by kpt_shape it must have {5 + keypoint_columns}")
        words = words[:5]
    elif count != 5 and (count < 7 or count % 2 == 0):
        hint = " (a sixth, a confidence, belongs to predictions)" if count == 6 else ""
        raise UserError(
            f"{where} has {count} columns: it must be class cx cy width height, or class and 3 or more points{hint}"
        )
    try:
        values = [float(word) for word in words[1:]]
    except ValueError:
        values = [math.nan]
    if not all(map(math.isfinite, values)):
        raise UserError(f"{where} is {' '.join(words)[:80]!r}: all columns must be finite numbers")
    if min(values) < LOWEST or max(values) > HIGHEST:
        raise UserError(f"{where} is {' '.join(words)[:80]!r}: it needs fractions of the image in [0, 1], no pixels")
    return values


def _box(values: list[float], where: str) -> tuple[float, float, float, float]:
    """The corners of a box given by centre and size, or around a polygon."""
    if len(values) > 4:
        return min(values[::2]), min(values[1::2]), max(values[::2]), max(values[1::2])
    x, y, width, height = values
    if width < 0 or height < 0:
        raise UserError(f"{where} has a box of negative size {width} x {height}: it must be cx cy width height")
    return x - width / 2, y - height / 2, x + width / 2, y + height / 2


def _record(
    path: Path, rows: list[tuple[int, float, float, float, float]], *, image_id: int, first_number: int
) -> ImageRecord:
    """One image's objects as arrays."""
    size = image_size(path)
    table = np.array(rows, dtype=np.float64).reshape(-1, 5)
    boxes = to_pixels(table[:, 1:], size)
    return ImageRecord(
        path=path,
        image_id=image_id,
        size=size,
        boxes=boxes,
        labels=table[:, 0].astype(np.int64),
        crowd=np.zeros(len(table), dtype=bool),
        areas=(boxes[:, 2:] - boxes[:, :2]).prod(axis=1),
        annotation_ids=np.arange(first_number, first_number + len(table), dtype=np.int64),
    )


# --- data.yaml and obj.data


def _read_yaml(path: Path) -> YoloFile:
    text = _read_text(path, MAX_YAML_BYTES)
    try:
        content = yaml.safe_load(text)
    except Exception as error:  # PyYAML's constructors raise almost any type on odd scalars
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}" if mark else ""
        raise UserError(f"{path} is broken YAML{where}: mend or export it again") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold keys such as train, val and names, got {type(content).__name__}: fill it")
    class_map = _read_names(content, path)
    base, notes = _read_base(content.get("path"), path)
    entries = {str(key): value for key, value in content.items() if isinstance(key, str | int)}
    return YoloFile(path, base, _read_splits(entries, path, base), class_map, _keypoint_columns(content, path), notes)


def _read_darknet(path: Path) -> YoloFile:
    """``key = value`` lines; paths in it often begin with ``data/``, the customary name of its own folder."""
    lines = [line.partition("=") for line in _read_text(path, MAX_YAML_BYTES).splitlines()]
    entries = {key.strip(): value.strip() for key, separator, value in lines if separator}
    if not entries.get("names"):
        raise UserError(f"{path} has no line 'names = FILE': add the file of class names")
    names_path = _target(entries["names"], path, ".", f"'names' of {path}")
    if names_path is None or not names_path.is_file():
        raise UserError(f"{path} takes its names from {entries['names']}, which does not exist: add the file")
    names = [line.strip() for line in _read_text(names_path, MAX_YAML_BYTES).splitlines() if line.strip()]
    if not names:
        raise UserError(f"{names_path} holds 0 class names: a detector needs at least one")
    class_map = ClassMap(ids=tuple(range(len(names))), names=tuple(names))
    return YoloFile(path, ".", _read_splits(entries, path, "."), class_map)


def _read_names(content: dict[Any, Any], path: Path) -> ClassMap:
    """``names``, a list or a dictionary id -> name; its length must be ``nc`` where that is given."""
    names = content.get("names")
    if not isinstance(names, list | dict) or not names:
        raise UserError(f"{path} has no class names: add 'names', a list or lines such as '0: person'")
    pairs = []
    for key, name in names.items() if isinstance(names, dict) else enumerate(names):
        if not isinstance(name, str | int | float) or isinstance(name, bool) or not str(name).strip():
            raise UserError(f"class {_scalar(key)} of {path} has the name {_scalar(name)}: give it a text, in quotes")
        number = int(key) if isinstance(key, str) and re.fullmatch(r"[0-9]{1,9}", key) else key
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < 2**31:
            raise UserError(f"{path} has the class {_scalar(key)}: the keys of names must be whole numbers from 0 on")
        pairs.append((number, str(name)))
    repeated = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    if repeated:
        raise UserError(f"class {repeated[0]} occurs more than once in the names of {path}: keep one of them")
    count = content.get("nc")
    if count is not None and count != len(pairs):
        raise UserError(f"{path} says nc: {_scalar(count)} but has {len(pairs)} names: correct one of the two")
    pairs.sort()
    return ClassMap(ids=tuple(key for key, _ in pairs), names=tuple(name for _, name in pairs))


def _keypoint_columns(content: dict[Any, Any], path: Path) -> int:
    shape = content.get("kpt_shape")
    if shape is None:
        return 0
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(n) is int and 0 < n < 10_000 for n in shape):
        raise UserError(f"kpt_shape of {path} must be two whole numbers, such as [17, 3]: correct it")
    return shape[0] * shape[1]


def _read_base(given: Any, path: Path) -> tuple[str, list[str]]:
    """What ``path`` says, below the file's folder, and a note where it leads elsewhere and is passed over."""
    if given is None or given == "":
        return ".", []
    if not isinstance(given, str):
        raise UserError(f"'path' of {path} is {_scalar(given)}: it must be a folder")
    relative = _below(given, path.parent)
    if relative is not None and os.path.isdir(path.parent / relative):  # noqa: PTH112 - as in _target
        return relative, []
    # A path of another machine, or relative to a trainer's own folder of data sets: the images came with the file.
    return ".", [f"path: {given[:200]} of {path} is not a folder in {path.parent}: its own folder is taken"]


def _read_splits(entries: dict[str, Any], path: Path, base: str) -> dict[str, list[str]]:
    """The entries that are splits: those with a customary name, and others that name something in the folder."""
    splits = {}
    for key, value in entries.items():
        places = [value] if isinstance(value, str) else value
        if key in _NO_SPLITS or not places or not isinstance(places, list):
            continue
        texts = [place for place in places if isinstance(place, str) and place]
        if key in _SPLITS and len(texts) < len(places):
            raise UserError(f"{key!r} of {path} must be a folder, a list file or a list of these: correct it")
        existing = len(texts) == len(places) and all(
            _below(place, path.parent, base) is not None and _target(place, path, base, key) for place in texts
        )
        if key in _SPLITS or existing:
            splits[key] = texts
    return splits


# --- paths


def _below(name: str, folder: Path, base: str = ".") -> str | None:
    """A path as one below ``folder``, normalised; None where it leads out of it."""
    name = name.strip().replace("\\", "/")
    for start in (folder.absolute(), folder.resolve()):
        if name.startswith("/") and PurePosixPath(name).is_relative_to(start.as_posix()):
            name, base = PurePosixPath(name).relative_to(start.as_posix()).as_posix(), "."
    if name.startswith("/"):
        return None
    relative = os.path.normpath(f"{base}/{name}").replace("\\", "/")
    try:
        check_inside(relative, name)
    except UserError:
        return None
    return relative


def _target(name: str, path: Path, base: str, where: str) -> Path | None:
    """What a path in the file means, or None where there is nothing; a UserError where it leads out of the folder."""
    plain = name.strip().replace("\\", "/")
    # Some exports write ../train/images for what lies beside data.yaml, and data/train.txt for what lies in obj.data's
    # own folder.
    shorter = [re.sub(r"^(\.\./)+", "", plain)] + ([plain.removeprefix("data/")] if path.suffix == ".data" else [])
    inside = [one for one in (_below(text, path.parent, base) for text in (plain, *shorter)) if one is not None]
    if not inside:
        raise UserError(f"{where} points outside the data set ({name[:200]!r}): use a path below {path.parent}")
    # os.path takes names that are no names (too long, with a zero byte) for absent; Path raises.
    return next((path.parent / one for one in inside if os.path.exists(path.parent / one)), None)  # noqa: PTH110


def _find_images(said: YoloFile, split: str) -> list[Path]:
    """The images of a split, which must be there and be listed once."""
    images: list[Path] = []
    for entry in said.splits[split]:
        place = _target(entry, said.path, said.base, f"{split!r} of {said.path}")
        if place is None:
            raise UserError(f"{split!r} of {said.path} is {entry[:200]}, which does not exist: correct the path")
        images += images_below(place) if place.is_dir() else _listed_images(place, said)
    if not images:
        raise UserError(f"split {split!r} of {said.path} holds 0 images: add some or correct the path")
    repeated = [image for image, count in Counter(images).items() if count > 1]
    if repeated:
        raise UserError(f"image {repeated[0]} occurs more than once in split {split!r} of {said.path}: list it once")
    return images


def _listed_images(path: Path, said: YoloFile) -> list[Path]:
    """The images in a list file: relative to it, to the set's base or to its folder, or absolute."""
    folder, listings = said.path.parent, Listings()
    bases = dict.fromkeys([os.path.relpath(path.parent, folder).replace("\\", "/"), said.base, "."])
    images, absent = [], []
    for number, line in enumerate(_read_text(path, MAX_LIST_BYTES, errors="surrogateescape").splitlines(), start=1):
        name = line.strip()
        if not name:
            continue
        spellings = [name, name.removeprefix("data/")] if said.path.suffix == ".data" else [name]
        inside = [one for base in bases for text in spellings if (one := _below(text, folder, base)) is not None]
        if not inside:
            raise UserError(
                f"line {number} of {path} points outside the data set ({name[:200]!r}): use a path below {folder}"
            )
        found = next((folder / one for one in inside if listings.holds(folder / one)), None)
        if found is None:
            absent.append(folder / inside[0])
        else:
            images.append(found)
    if absent:
        raise UserError(
            f"{len(absent)} of the {len(absent) + len(images)} images listed in {path} are missing on disk, the first "
            f"is {absent[0]}: add them or take them out of the list"
        )
    return images


def _find_labels(image: Path, folder: Path, listings: Listings) -> Path | None:
    """The label file of an image, in ``labels/`` or beside it, or None."""
    return next(filter(listings.holds, (_label_path(image, folder), image.with_suffix(".txt"))), None)


def _label_path(image: Path, folder: Path) -> Path:
    """Where the labels of an image should be: the last folder ``images`` of its path becomes ``labels``."""
    parts = list(image.relative_to(folder).parts)
    places = [place for place, part in enumerate(parts[:-1]) if part == "images"]
    if places:
        parts[places[-1]] = "labels"
    return folder.joinpath(*parts).with_suffix(".txt")


def _read_text(path: Path, limit: int, errors: str = "strict") -> str:
    """A text file of bounded size."""
    with path.open("rb") as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise UserError(f"{path} is larger than {limit} bytes: this is no file of a YOLO set, check it")
    try:
        return content.decode("utf-8-sig", errors=errors)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 ({error.reason} at byte {error.start}): save it as UTF-8") from error


def _scalar(value: Any) -> str:
    """A value for a sentence; collections by their kind, for YAML can make small files of endless ones."""
    return repr(value)[:80] if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


def _shown(ids: tuple[int, ...]) -> str:
    return ", ".join(map(str, ids)) if len(ids) <= 20 else f"{len(ids)} from {ids[0]} to {ids[-1]}"
