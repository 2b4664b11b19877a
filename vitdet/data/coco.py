"""Reads COCO instance annotations: one JSON file a split with ``images``, ``annotations`` and ``categories``."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path, PureWindowsPath
from typing import Any, TypeGuard

import numpy as np

from vitdet.data.images import image_size
from vitdet.data.records import DetectionSet, ImageRecord, training_notes
from vitdet.errors import UserError
from vitdet.structures import ClassMap

SECTIONS = ("images", "annotations", "categories")


def read_coco(json_path: Path, *, image_folders: list[Path], root: Path, split: str) -> DetectionSet:
    """Read one annotation file.

    Labels follow the category ids in ascending order. Image ids that are not whole numbers are replaced by 1…N, and
    annotation ids that are missing, repeated or not positive (0 means "unmatched" to the COCO API) likewise.

    Args:
        json_path: the annotation file.
        image_folders: folders that ``file_name`` may be relative to; the one that holds most of the images is taken.
        root: the data set's folder, as given by the user.
        split: the split's name, as given by the user.

    Raises:
        UserError: anything in the file that cannot be right, naming the entry; images that are not there.
    """
    content = load_json(json_path)
    missing = [key for key in SECTIONS if not isinstance(content, dict) or not isinstance(content.get(key), list)]
    if missing:
        absent, needed = " and ".join(missing), ", ".join(SECTIONS)
        raise UserError(f"{json_path} lacks the lists {absent}: COCO annotations need {needed}")
    if not content["images"]:
        raise UserError(f"{json_path} lists 0 images: there is nothing to use, check the split {split!r}")
    class_map = _read_categories(content["categories"], json_path)
    images = _read_images(content["images"], json_path)
    folder = _find_folder([image["file_name"] for image in images.values()], image_folders, json_path)
    rows = _group_annotations(content["annotations"], images, class_map, json_path)
    number_of = _integer_ids(list(images))
    records = [
        _record(image, rows[image_id], folder=folder, image_id=number)
        for (image_id, image), number in zip(images.items(), number_of, strict=True)
    ]
    return DetectionSet("COCO JSON", root, split, class_map, records, training_notes(records))


def load_json(path: Path) -> Any:
    """The content of a JSON file; a UserError names the line where it breaks."""
    try:
        return json.loads(path.read_bytes())
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise UserError(f"{path} is broken JSON at {where} ({error.msg}): mend or export it again") from error
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error}): check the file") from error


def _read_categories(categories: list[Any], path: Path) -> ClassMap:
    """The class map, in ascending order of the ids."""
    if not categories:
        raise UserError(f"{path} lists 0 categories: a detector needs at least one")
    pairs = []
    for position, category in enumerate(categories):
        identifier = _get(category, "id", f"category number {position} in {path}")
        if not _is_integer(identifier):
            raise UserError(f"category id {identifier!r} in {path} is not a whole number: use integer ids")
        pairs.append((identifier, str(_get(category, "name", f"category {identifier} in {path}"))))
    ids = [identifier for identifier, _ in pairs]
    repeated = [identifier for identifier, count in Counter(ids).items() if count > 1]
    if repeated:
        raise UserError(f"category id {repeated[0]} occurs more than once in {path}: give each category its own id")
    pairs.sort()
    return ClassMap(ids=tuple(i for i, _ in pairs), names=tuple(n for _, n in pairs))


def _read_images(images: list[Any], path: Path) -> dict[Any, dict[str, Any]]:
    """Image id -> entry, in file order, each with a safe relative file name."""
    by_id: dict[Any, dict[str, Any]] = {}
    for position, image in enumerate(images):
        identifier = _get(image, "id", f"image number {position} in {path}")
        if not isinstance(identifier, (int, str)):
            raise UserError(f"image id {identifier!r} in {path} is neither a number nor a text: use integer ids")
        name = _get(image, "file_name", f"image {identifier} in {path}")
        if not isinstance(name, str) or not name:
            raise UserError(f"image {identifier} in {path} has the file_name {name!r}: it must be a relative path")
        if identifier in by_id:
            raise UserError(f"image id {identifier!r} occurs more than once in {path}: give each image its own id")
        check_inside(name, f"image {identifier} in {path}")
        by_id[identifier] = image
    return by_id


def check_inside(name: str, where: str) -> None:
    """Refuse a file name that leaves the data set's folder, whichever kind of slash it uses."""
    outside = ".." in re.split(r"[\\/]", name) or name.startswith(("/", "\\")) or bool(PureWindowsPath(name).drive)
    if outside:
        raise UserError(f"{where} points outside the data set ({name!r}): use a path below the image folder")


def _find_folder(names: list[str], folders: list[Path], path: Path) -> Path:
    """The folder that holds the images; all of them must be there."""
    listings: dict[Path, set[str]] = {}
    absent: dict[Path, list[str]] = {}
    for folder in folders:
        absent[folder] = [name for name in names if not _exists(folder / name, listings)]
        if not absent[folder]:
            return folder
    best = min(absent, key=lambda folder: len(absent[folder]))
    gone = absent[best]
    searched = "" if len(gone) < len(names) else f" (searched {', '.join(str(folder) for folder in folders)})"
    raise UserError(
        f"{len(gone)} of the {len(names)} images listed in {path} are missing on disk{searched}, "
        f"the first is {best / gone[0]}: add them or take them out of the list"
    )


def _exists(path: Path, listings: dict[Path, set[str]]) -> bool:
    """Whether a file is there, with one directory listing for all the files of a folder (100,000 stats are slow)."""
    folder = path.parent
    if folder not in listings:
        listings[folder] = {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()
    return path.name in listings[folder]


def _group_annotations(
    annotations: list[Any], images: dict[Any, Any], class_map: ClassMap, path: Path
) -> dict[Any, list[tuple]]:
    """Image id -> rows (box xyxy, label, crowd, area, annotation id)."""
    label_of_id = class_map.label_of_id
    identifiers = [annotation.get("id") if isinstance(annotation, dict) else None for annotation in annotations]
    usable = all(_is_integer(i) and 0 < i < 2**63 for i in identifiers) and len(set(identifiers)) == len(identifiers)
    rows: dict[Any, list[tuple]] = {image_id: [] for image_id in images}
    for position, annotation in enumerate(annotations):
        identifier = identifiers[position]
        where = f"annotation {position if identifier is None else identifier} in {path}"
        image_id = _get(annotation, "image_id", where)
        if not isinstance(image_id, (int, str)) or image_id not in rows:
            raise UserError(
                f"{where} has image_id {image_id!r}, which is not among the images: add it or drop this one"
            )
        category = _get(annotation, "category_id", where)
        label = label_of_id.get(category) if _is_integer(category) else None
        if label is None:
            known = ", ".join(map(str, class_map.ids))
            raise UserError(f"{where} has category_id {category!r}, known ids are {known}: correct it or add this one")
        x, y, width, height = _numbers(_get(annotation, "bbox", where), where)
        area = annotation.get("area")
        area = float(area) if _is_number(area) else width * height
        crowd = bool(annotation.get("iscrowd", 0))
        number = identifier if usable else position + 1
        rows[image_id].append(((x, y, x + width, y + height), label, crowd, area, number))
    return rows


def _numbers(bbox: Any, where: str) -> tuple[float, float, float, float]:
    """A bbox as four finite numbers of which the size is not negative."""
    good = isinstance(bbox, (list, tuple)) and len(bbox) == 4 and all(map(_is_number, bbox))
    if not good:
        raise UserError(f"{where} has the bbox {bbox!r}: it must be 4 finite numbers [x, y, width, height]")
    x, y, width, height = (float(value) for value in bbox)
    if width < 0 or height < 0:
        raise UserError(f"{where} has a bbox of negative size {bbox!r}: it must be [x, y, width, height]")
    return x, y, width, height


def _record(image: dict[str, Any], rows: list[tuple], *, folder: Path, image_id: int) -> ImageRecord:
    """One image's rows as arrays."""
    path = folder / image["file_name"]
    height, width = image.get("height"), image.get("width")
    if _is_number(height) and _is_number(width) and height >= 1 and width >= 1:
        size = (int(height), int(width))
    else:
        size = image_size(path)
    boxes, labels, crowd, areas, numbers = zip(*rows, strict=True) if rows else ((), (), (), (), ())
    return ImageRecord(
        path=path,
        image_id=image_id,
        size=size,
        boxes=np.array(boxes, dtype=np.float64).reshape(-1, 4),
        labels=np.array(labels, dtype=np.int64),
        crowd=np.array(crowd, dtype=bool),
        areas=np.array(areas, dtype=np.float64),
        annotation_ids=np.array(numbers, dtype=np.int64),
    )


def _integer_ids(identifiers: list[Any]) -> list[int]:
    """The image ids where all are whole numbers, else 1…N in order."""
    # Results are kept as float64, which tells whole numbers apart only below 2**53.
    usable = all(_is_integer(one) and 0 <= one < 2**53 for one in identifiers)
    return identifiers if usable else list(range(1, len(identifiers) + 1))


def _get(entry: Any, key: str, where: str) -> Any:
    """``entry[key]``, or a UserError that says where it is missing."""
    if not isinstance(entry, dict):
        raise UserError(f"{where} is {entry!r}: it must be an object with the key {key!r}")
    if key not in entry:
        raise UserError(f"{where} has no key {key!r}: add it or export the annotations again")
    return entry[key]


def _is_integer(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> TypeGuard[float]:
    """A number that arithmetic on pixels can take: neither NaN nor infinite, nor one of JSON's endless integers."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -1e15 < value < 1e15
