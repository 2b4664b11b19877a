"""Reads Pascal VOC: ``Annotations/*.xml``, ``JPEGImages/``, ``ImageSets/Main/{split}.txt``.

Corner coordinates are taken as they are written. The original VOC counts pixels from 1, today's tools count from 0, the
files do not say which; the difference is one pixel.
"""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from vitdet.data.coco import check_inside
from vitdet.data.images import IMAGE_SUFFIXES, image_size
from vitdet.data.records import DetectionSet, ImageRecord, training_notes
from vitdet.errors import UserError
from vitdet.structures import ClassMap

MAX_XML_BYTES = 8 * 2**20
CORNERS = ("xmin", "ymin", "xmax", "ymax")


@dataclass(frozen=True)
class VocAnnotation:
    """One XML file: class names and boxes (``xyxy`` pixels) of its T objects, and (height, width) where it is given."""

    names: list[str]
    boxes: list[list[float]]
    size: tuple[int, int] | None


def read_voc(root: Path, split: str) -> DetectionSet:
    """Read one split.

    Class names are those of all the splits, sorted, with ids 1…K; image ids are 1…N in the order of the list.
    Objects marked difficult are ordinary objects. The image of an annotation is the one with the same name, whatever
    its ``<filename>`` says.

    Raises:
        UserError: no such split, an empty one, a missing image or annotation, an XML file that cannot be right.
    """
    stems = _read_list(root, split)
    everything = set(stems).union(*(_read_stems(root, name) for name in split_names(root)))
    annotations: dict[str, VocAnnotation] = {}
    for stem in sorted(everything):
        path = root / "Annotations" / f"{stem}.xml"
        if path.is_file():  # test splits are published without annotations
            annotations[stem] = read_annotation(path)
    names = sorted({name for annotation in annotations.values() for name in annotation.names})
    if not names:
        raise UserError(f"the annotations in {root / 'Annotations'} hold 0 objects: a detector needs a class to learn")
    class_map = ClassMap(ids=tuple(range(1, len(names) + 1)), names=tuple(names))
    images = _find_images(root, stems, split)
    records, first_number = [], 1
    for position, stem in enumerate(stems):
        if stem not in annotations:
            path = root / "Annotations" / f"{stem}.xml"
            raise UserError(f"{path}, listed in split {split!r}, does not exist: add it or take it out of the list")
        record = _record(annotations[stem], images[stem], class_map, image_id=position + 1, first_number=first_number)
        records.append(record)
        first_number += len(record.labels)
    return DetectionSet("Pascal VOC", root, split, class_map, records, training_notes(records))


def split_names(root: Path) -> list[str]:
    """The splits that have a list; VOC's lists of single classes (``cat_train.txt``) are not splits."""
    names = sorted(path.stem for path in (root / "ImageSets" / "Main").glob("*.txt"))
    whole = set(names)
    return [name for name in names if "_" not in name or name.rpartition("_")[2] not in whole]


def read_annotation(path: Path) -> VocAnnotation:
    """Read one XML file; its size is bounded and document types, which could define entities, are refused."""
    where = str(path)
    if path.stat().st_size > MAX_XML_BYTES:
        raise UserError(f"{where} is larger than {MAX_XML_BYTES} bytes: this is no VOC annotation")
    content = path.read_bytes()
    if b"<!DOCTYPE" in content or b"<!ENTITY" in content or b"\0" in content:
        raise UserError(f"{where} has a document type, entities or is not UTF-8: export it as plain XML")
    try:
        tree = ET.fromstring(content)
    except (ET.ParseError, LookupError, ValueError) as error:
        raise UserError(f"{where} is broken XML ({error}): mend or export it again") from error
    names, boxes = [], []
    for position, item in enumerate(tree.findall("object")):
        name = (item.findtext("name") or "").strip()
        if not name:
            raise UserError(f"object {position + 1} in {where} has no name: add it")
        names.append(name)
        boxes.append(_read_box(item, f"object {position + 1} ({name}) in {where}"))
    return VocAnnotation(names, boxes, _read_size(tree))


def _read_box(item: ET.Element, where: str) -> list[float]:
    """The corners of one object."""
    bndbox = item.find("bndbox")
    if bndbox is None:
        raise UserError(f"{where} has no bndbox: add it or remove the object")
    texts = [bndbox.findtext(corner) for corner in CORNERS]
    try:
        box = [float(text or "nan") for text in texts]
    except ValueError:
        box = [math.nan]
    if not all(map(math.isfinite, box)):
        shown = ", ".join(f"{corner} {text!r}" for corner, text in zip(CORNERS, texts, strict=True))
        raise UserError(f"{where} has the bndbox {shown}: all four must be finite numbers")
    if box[2] < box[0] or box[3] < box[1]:
        raise UserError(f"{where} has a bndbox of negative size {box}: xmin, ymin must not exceed xmax, ymax")
    return box


def _read_size(tree: ET.Element) -> tuple[int, int] | None:
    """(height, width), or None where it is missing or 0, as some tools write it."""
    try:
        height, width = (int(float(tree.findtext(f"size/{side}") or 0)) for side in ("height", "width"))
    except (ValueError, OverflowError):
        return None
    return (height, width) if height > 0 and width > 0 else None


def _read_list(root: Path, split: str) -> list[str]:
    """The image names of a split."""
    path = root / "ImageSets" / "Main" / f"{split}.txt"
    if not path.is_file():
        known = ", ".join(split_names(root)) or "none"
        raise UserError(f"{root} has no split {split!r}: its splits are {known}")
    stems = _read_stems(root, split)
    if not stems:
        raise UserError(f"split {split!r} of {root} lists 0 images: fill {path}")
    repeated = [stem for stem, count in Counter(stems).items() if count > 1]
    if repeated:
        raise UserError(f"image {repeated[0]!r} occurs more than once in {path}: list every image once")
    for stem in stems:
        check_inside(stem, f"a line of {path}")
    return stems


def _read_stems(root: Path, split: str) -> list[str]:
    """The first word of each line; lists of single classes have a second."""
    text = (root / "ImageSets" / "Main" / f"{split}.txt").read_text(encoding="utf-8-sig", errors="surrogateescape")
    return [line.split()[0] for line in text.splitlines() if line.strip()]


def _find_images(root: Path, stems: list[str], split: str) -> dict[str, Path]:
    """Image name -> file, of whatever image type."""
    folder = root / "JPEGImages"
    files: dict[str, Path] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.suffix.lower() in IMAGE_SUFFIXES:
            files.setdefault(path.stem, path)
    absent = [stem for stem in stems if stem not in files]
    if absent:
        raise UserError(
            f"{len(absent)} of the {len(stems)} images of split {split!r} are missing on disk, the first is "
            f"{folder / absent[0]}.*: add them or take them out of the list"
        )
    return files


def _record(
    annotation: VocAnnotation, path: Path, class_map: ClassMap, *, image_id: int, first_number: int
) -> ImageRecord:
    """One image's objects as arrays."""
    label_of_name = {name: label for label, name in enumerate(class_map.names)}
    boxes = np.array(annotation.boxes, dtype=np.float64).reshape(-1, 4)
    count = len(boxes)
    return ImageRecord(
        path=path,
        image_id=image_id,
        size=annotation.size or image_size(path),
        boxes=boxes,
        labels=np.array([label_of_name[name] for name in annotation.names], dtype=np.int64),
        crowd=np.zeros(count, dtype=bool),
        areas=(boxes[:, 2:] - boxes[:, :2]).prod(axis=1),
        annotation_ids=np.arange(first_number, first_number + count, dtype=np.int64),
    )
