"""Writes the annotations of a detection set in each of the formats that are read.

Boxes keep their digits: pixels to 1e-9, fractions of the image to the last bit, so that each reader finds the box that
was written, to float32 and far beyond. YOLO and VOC have no place for crowd regions, and only COCO JSON has one for
category ids with gaps and for the areas of masks.
"""

from __future__ import annotations

import csv
import json
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import yaml

from vitdet.data.fractions import DIGITS, HIGHEST, LOWEST
from vitdet.data.records import DetectionSet, ImageRecord
from vitdet.data.voc import CORNERS
from vitdet.errors import UserError

# Split -> its set, whose records have the paths of the written images. All the sets have the same class map.
Splits = dict[str, DetectionSet]
OPEN_IMAGES = (
    "ImageID", "Source", "LabelName", "Confidence", "XMin", "XMax", "YMin", "YMax",
    "IsOccluded", "IsTruncated", "IsGroupOf", "IsDepiction", "IsInside",
)  # fmt: skip


def write_coco(folder: Path, splits: Splits) -> None:
    """``annotations/instances_SPLIT.json``, with category ids, crowd regions and areas."""
    (folder / "annotations").mkdir()
    for split, data in splits.items():
        content = data.to_coco()
        for annotation in content["annotations"]:
            annotation["bbox"] = [round(value, DIGITS) for value in annotation["bbox"]]
        (folder / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))


def write_yolo(folder: Path, splits: Splits) -> None:
    """``data.yaml`` and ``labels/SPLIT/NAME.txt``, empty for an image without objects; no crowd regions."""
    for split, data in splits.items():
        labels = folder / "labels" / split
        labels.mkdir(parents=True)
        for record in data.records:
            rows = []
            for label, (x1, y1, x2, y2), crowd in _objects(record, fractions=True):
                if not crowd:
                    values = _checked(((x1 + x2) / 2, (y1 + y2) / 2, x2 - x1, y2 - y1), record)
                    rows.append(" ".join([str(label), *map(repr, values)]) + "\n")
            (labels / f"{record.path.stem}.txt").write_text("".join(rows))
    names = dict(enumerate(_names(splits)))
    content = {split: f"images/{split}" for split in splits} | {"names": names}
    text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    (folder / "data.yaml").write_text(text, encoding="utf-8")


def write_voc(folder: Path, splits: Splits) -> None:
    """``Annotations/NAME.xml`` and ``ImageSets/Main/SPLIT.txt``; no crowd regions."""
    (folder / "Annotations").mkdir()
    (folder / "ImageSets" / "Main").mkdir(parents=True)
    names = _names(splits)
    for split, data in splits.items():
        for record in data.records:
            path, text = folder / "Annotations" / f"{record.path.stem}.xml", _voc_text(record, names)
            if path.exists() and path.read_text(encoding="utf-8") != text:
                raise UserError(
                    f"{record.path.name} has other objects in split {split!r} than in an earlier one, and VOC has "
                    "one annotation an image: convert the splits one by one"
                )
            path.write_text(text, encoding="utf-8")
        lines = "".join(f"{record.path.stem}\n" for record in data.records)
        listing = folder / "ImageSets" / "Main" / f"{split}.txt"
        listing.write_text(lines, encoding="utf-8", errors="surrogateescape")


def write_csv(folder: Path, splits: Splits) -> None:
    """``SPLIT.csv`` with Open Images' columns, and ``class-descriptions.csv``, which keeps the order of the classes."""
    names = _names(splits)
    for split, data in splits.items():
        with (folder / f"{split}.csv").open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(OPEN_IMAGES)
            for record in data.records:
                image = record.path.name
                for label, box, crowd in _objects(record, fractions=True):
                    x1, y1, x2, y2 = map(repr, _checked(box, record))
                    writer.writerow([image, "", names[label], 1, x1, x2, y1, y2, "", "", int(crowd), "", ""])
                if not len(record.labels):
                    writer.writerow([image] + [""] * (len(OPEN_IMAGES) - 1))
    with (folder / "class-descriptions.csv").open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows((name, name) for name in names)


WRITERS: dict[str, Callable[[Path, Splits], None]] = {
    "coco": write_coco,
    "yolo": write_yolo,
    "voc": write_voc,
    "csv": write_csv,
}
WITHOUT_CROWD = ("yolo", "voc")
IN_FRACTIONS = ("yolo", "csv")


def image_folder(to: str, split: str) -> str:
    """Where the images of a split go, below the data set's folder."""
    return "JPEGImages" if to == "voc" else f"images/{split}"


def _voc_text(record: ImageRecord, names: list[str]) -> str:
    """The XML of one image."""
    tree = ET.Element("annotation")
    _add(tree, "filename", record.path.name)
    size = ET.SubElement(tree, "size")
    for side, pixels in zip(("width", "height", "depth"), (*record.size[::-1], 3), strict=True):
        _add(size, side, str(pixels))
    for label, box, crowd in _objects(record):
        if not crowd:
            item = ET.SubElement(tree, "object")
            _add(item, "name", names[label])
            _add(item, "difficult", "0")
            corners = ET.SubElement(item, "bndbox")
            for corner, value in zip(CORNERS, box, strict=True):
                _add(corners, corner, _pixels(value))
    ET.indent(tree)
    return ET.tostring(tree, encoding="unicode") + "\n"


def _objects(record: ImageRecord, *, fractions: bool = False) -> Iterator[tuple[int, list[float], bool]]:
    """(label, box ``xyxy`` in pixels or fractions of the image, crowd) of each object."""
    height, width = record.size
    boxes = record.boxes / np.array([width, height, width, height]) if fractions else record.boxes
    yield from zip(record.labels.tolist(), boxes.tolist(), record.crowd.tolist(), strict=True)


def _checked(values: tuple[float, ...] | list[float], record: ImageRecord) -> tuple[float, ...]:
    """The fractions themselves, unless the readers would take them for pixels."""
    if min(values) < LOWEST or max(values) > HIGHEST:
        raise UserError(
            f"a box of {record.path.name} reaches beyond the image by more than its size: correct it before converting"
        )
    return tuple(values)


def _pixels(value: float) -> str:
    shown = round(value, DIGITS)
    return str(int(shown)) if shown.is_integer() else repr(shown)


def _names(splits: Splits) -> list[str]:
    return next(iter(splits.values())).class_map.distinct_names


def _add(parent: ET.Element, tag: str, text: str) -> None:
    ET.SubElement(parent, tag).text = text
