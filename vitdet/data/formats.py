"""Recognises a data set by what lies in its folder.

The first of these that is there decides for a detector:

1. Pascal VOC: the folders ``Annotations/`` and ``ImageSets/Main/``;
2. YOLO: ``data.yaml`` (``data.yml``, ``dataset.yaml``), or Darknet's ``obj.data``;
3. COCO JSON: ``annotations/instances_SPLIT.json`` and the other places of :func:`coco_splits`;
4. CSV: files whose first line names the columns of boxes, in the places of :func:`vitdet.data.csv_files.csv_splits`.

Where the root or the split names a file, its suffix decides. For a classifier two class folders in the split count for
more than a JSON or CSV file among them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from vitdet.data import coco, csv_files, voc, yolo
from vitdet.data.imagefolder import count_classes, image_folder_splits, read_image_folder
from vitdet.data.records import ClassificationSet, DetectionSet, split_aliases
from vitdet.errors import UserError
from vitdet.structures import ClassMap

_COCO_NAMES = ("instances.json", "_annotations.coco.json", "annotations.json")
_KNOWN = (
    "COCO JSON (annotations/instances_SPLIT.json, or SPLIT/ with a JSON file), YOLO (data.yaml), "
    "CSV (SPLIT.csv whose first line names the columns) "
    "or Pascal VOC (Annotations/, JPEGImages/, ImageSets/Main/SPLIT.txt)"
)
_YOLO_SUFFIXES = (".yaml", ".yml", ".data")


def read_detection_set(root: str | Path, split: str) -> DetectionSet:
    """Read one split of a COCO JSON, YOLO, Pascal VOC or CSV data set.

    COCO annotations are looked for as ``annotations/instances_{split}*.json``, ``annotations/{split}.json``, the same
    in ``root`` itself, and as a JSON file in the folder ``{split}``. ``split`` may also name a JSON or CSV file
    (``labels/first.json``, relative to ``root``), and ``root`` may be such a file or a ``data.yaml`` itself.

    Raises:
        UserError: nothing there, nothing recognised, no such split, or annotations that cannot be right.
    """
    root = Path(root)
    _check_exists(root)
    if root.is_file():
        return _read_file(root, split)
    if split.endswith((".json", ".csv")):
        if not (root / split).is_file():
            raise UserError(f"the annotation file {root / split} does not exist: check the split")
        read = _read_csv_file if split.endswith(".csv") else _read_coco_file
        return read(root / split, root=root, split=Path(split).stem)
    if _is_voc(root):
        return voc.read_voc(root, split)
    yolo_file = yolo.find_yolo(root)
    if yolo_file is not None:
        return yolo.read_yolo(yolo_file, root=root, split=split)
    splits = coco_splits(root)
    if splits:
        return _read_coco_file(_choose(splits, split, root), root=root, split=split)
    splits = csv_files.csv_splits(root)
    if splits:
        return _read_csv_file(_choose(splits, split, root), root=root, split=split)
    raise _not_recognised(root)


def detection_splits(root: str | Path) -> list[str]:
    """The names of all the splits of a data set for detection; of a single annotation file, its own.

    Raises:
        UserError: nothing there, or nothing recognised.
    """
    root = Path(root)
    _check_exists(root)
    if root.is_file():
        return list(yolo.read_yolo_file(root).splits) if root.suffix in _YOLO_SUFFIXES else [_own_split(root)]
    if _is_voc(root):
        return voc.split_names(root)
    yolo_file = yolo.find_yolo(root)
    if yolo_file is not None:
        return list(yolo.read_yolo_file(yolo_file).splits)
    splits = coco_splits(root) or csv_files.csv_splits(root)
    if not splits:
        raise _not_recognised(root)
    return list(splits)


def _not_recognised(root: Path) -> UserError:
    if image_folder_splits(root):
        return UserError(
            f"{root} is an image folder, one folder a class: a classifier trains on it, a detector needs boxes"
        )
    return UserError(f"no data set is recognised in {root}: it needs {_KNOWN}")


def read_classification_set(
    root: str | Path, split: str, *, class_map: ClassMap | None = None, names: Mapping[str, str] | None = None
) -> ClassificationSet:
    """Read one split of an image folder, see :func:`vitdet.data.imagefolder.read_image_folder`.

    Raises:
        UserError: nothing there, a data set for detection, or folders that cannot be right.
    """
    root = Path(root)
    _check_exists(root)
    kind = _detection_kind(root, split)
    if kind:
        raise UserError(f"{root} is a {kind} data set for detection: train a detector on it, or give an image folder")
    return read_image_folder(root, split, class_map=class_map, names=names)


def _check_exists(root: Path) -> None:
    """Raise unless there is something at ``root``."""
    if not root.exists():
        raise UserError(f"the data set folder {root} does not exist: check data.root")


def _is_voc(root: Path) -> bool:
    return (root / "Annotations").is_dir() and (root / "ImageSets" / "Main").is_dir()


def _detection_kind(root: Path, split: str) -> str | None:
    """The detection format of a data set, if it is one; class folders count for more than a JSON file among them."""
    if root.is_file():
        return "COCO JSON" if root.suffix == ".json" else "single-file"
    if _is_voc(root):
        return "Pascal VOC"
    if yolo.find_yolo(root) is not None:
        return "YOLO"
    if count_classes(root, split) > 1:
        return None
    return "COCO JSON" if coco_splits(root) else "CSV" if csv_files.csv_splits(root) else None


def coco_splits(root: Path) -> dict[str, Path]:
    """The splits of a COCO layout: name -> annotation file."""
    splits: dict[str, Path] = {}
    for folder in (root / "annotations", root):
        for path in sorted(folder.glob("*.json")):
            if path.name.startswith("instances_") or (folder != root and _is_plain_name(path)) or _has_images(path):
                splits.setdefault(path.stem.removeprefix("instances_"), path)
    for folder in sorted(path for path in root.iterdir() if path.is_dir() and path != root / "annotations"):
        found = _annotation_file(folder)
        if found is not None:
            splits.setdefault(folder.name, found)
    return splits


def _is_plain_name(path: Path) -> bool:
    """COCO's own ``annotations`` folder also holds captions, key points and panoptic labels: no splits."""
    return "_" not in path.stem


def _has_images(path: Path) -> bool:
    """Whether ``root/NAME.json`` has its images in ``root/NAME/`` or ``root/images/NAME/``."""
    return any((path.parent / folder / path.stem).is_dir() for folder in (".", "images"))


def _annotation_file(folder: Path) -> Path | None:
    """The annotation file beside a split's images: one with a customary name, else the only JSON file there."""
    for name in _COCO_NAMES:
        if (folder / name).is_file():
            return folder / name
    found = sorted(folder.glob("*.json"))
    return found[0] if len(found) == 1 else None


def _choose(splits: dict[str, Path], split: str, root: Path) -> Path:
    """The file of ``split``: the exact name, a customary other one, or the name with a year (``train2017``)."""
    names = split_aliases(split)
    for name in names:
        if name in splits:
            return splits[name]
    dated = [name for name in splits if name.startswith(split) and name.removeprefix(split).strip("_-").isdigit()]
    if len(dated) == 1:
        return splits[dated[0]]
    known = ", ".join(splits)
    if dated:
        raise UserError(f"split {split!r} of {root} could be {' or '.join(dated)}: give the full name")
    raise UserError(f"{root} has no split {split!r}: its splits are {known}")


def _own_split(path: Path) -> str:
    """What an annotation file that stands for the whole set calls its split."""
    return path.stem.removeprefix("instances_")


def _read_file(path: Path, split: str) -> DetectionSet:
    """Read an annotation file that was given as the root, by its suffix."""
    if path.suffix in _YOLO_SUFFIXES:
        return yolo.read_yolo(path, root=path, split=split)
    read = _read_csv_file if path.suffix == ".csv" else _read_coco_file
    return read(path, root=path.parent, split=split)


def _read_coco_file(path: Path, *, root: Path, split: str) -> DetectionSet:
    """Read a file whose images lie in one of the customary places around it."""
    return coco.read_coco(path, image_folders=_image_folders(path, split), root=root, split=split)


def _read_csv_file(path: Path, *, root: Path, split: str) -> DetectionSet:
    """Read a file whose images lie in one of the customary places, with the classes of all the set's files."""
    splits = csv_files.csv_splits(root)
    class_files = list(splits.values()) if path in splits.values() else [path]
    names = [name for name, one in splits.items() if one == path]
    folders = _image_folders(path, *names, split)
    return csv_files.read_csv(path, image_folders=folders, class_files=class_files, root=root, split=split)


def _image_folders(path: Path, *splits: str) -> list[Path]:
    """The customary places of a split's images around its annotation file."""
    names = dict.fromkeys([path.stem.removeprefix("instances_"), *(n for one in splits for n in split_aliases(one))])
    folders = [path.parent / "images", path.parent]
    bases = dict.fromkeys([path.parent, path.parent.parent] if path.parent.name == "annotations" else [path.parent])
    for base in bases:
        folders += [base / place / name for name in names for place in ("images", ".")]
        folders += [base / "images", base]
    return [folder for folder in dict.fromkeys(folders) if folder.is_dir()]
