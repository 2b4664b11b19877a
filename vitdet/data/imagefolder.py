"""Reads image folders: ``SPLIT/CLASS/**/*.jpg``, one folder a class, as torchvision's ``ImageFolder`` has it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from vitdet.data.coco import load_json
from vitdet.data.images import IMAGE_SUFFIXES
from vitdet.data.records import ClassificationSet, split_aliases
from vitdet.errors import UserError, did_you_mean, some
from vitdet.structures import ClassMap


def read_image_folder(
    root: Path, split: str, *, class_map: ClassMap | None = None, names: Mapping[str, str] | None = None
) -> ClassificationSet:
    """Read one split.

    Labels follow the sorted names of the class folders, ids are 0…K-1. Where ``classes.json`` (folder name -> name),
    ``classes.txt`` or ``*_names.txt`` (lines ``n01440764 tench``) lies in ``root`` or its parent folder and knows the
    folders, the classes have those names, else those of ``names``, else the names of the folders; one that several
    classes share is followed by the folder. Hidden files are passed over, and links that
    lead out of ``root`` or to folders are not followed.

    Args:
        class_map: of the training split or of a checkpoint. The folders must then be among its classes, by their own
            or their given name; classes without a folder are allowed.
        names: folder -> name, of a published set of classes in the order of its labels, for folders that no file
            names; where the folders are exactly the set, before any file. A ``class_map`` of exactly these names is
            that set, and its folders have its labels.

    Raises:
        UserError: no such split, a class without images, fewer than 2 classes, a class that ``class_map`` lacks, two
            folders of one class.
    """
    folder = _find_split(root, split)
    notes: list[str] = []
    folders = _class_folders(folder)
    if not folders:
        raise UserError(f"{folder} has no class folders: put the images of each class into a folder of its own")
    loose = sum(_is_image(entry) for entry in folder.iterdir())
    if loose:
        notes.append(f"{loose} image{'s' * (loose > 1)} beside the class folders of {folder} left out: no class")
    given = _human_names(root, folders, notes, names or {})
    if class_map is None:
        class_map = _new_class_map(folder, given, notes)
    published = names is not None and class_map.names == tuple(names.values())
    known = {name: label for label, name in enumerate(names or ())} if published else {}
    label_of = _labels(folder, given, class_map, known)
    paths, labels, real_root = [], [], root.resolve()
    for name in folders:
        found, refused = _images_below(folder / name, real_root)
        reason = f"{refused} link{'s' * (refused != 1)} in {folder / name} not followed: they lead out or to folders"
        if not found:
            detail = f" ({reason})" if refused else ""
            raise UserError(f"class folder {folder / name} holds 0 images{detail}: add some or remove the folder")
        notes += [reason] if refused else []
        paths += found
        labels += [label_of[name]] * len(found)
    return ClassificationSet("image folder", root, split, class_map, paths, np.array(labels, dtype=np.int64), notes)


def image_folder_splits(root: Path) -> list[str]:
    """The folders in ``root`` that have class folders with images in them, each to be read as a split."""
    return [name for name in _class_folders(root) if _filled_classes(root / name)]


def count_classes(root: Path, split: str) -> int:
    """How many class folders with images a split has; 0 where there is no such split."""
    folders = [root / name for name in split_aliases(split) if (root / name).is_dir()]
    return max((len(_filled_classes(folder)) for folder in folders), default=0)


def _find_split(root: Path, split: str) -> Path:
    """The split's folder, under its own or another customary name."""
    for name in split_aliases(split):
        folder = root / name
        if folder.is_dir():
            if not folder.resolve().is_relative_to(root.resolve()):
                raise UserError(
                    f"{folder} is a link that leads out of {root}: give the folder it leads to as data.root"
                )
            return folder
    known = image_folder_splits(root)
    if known:
        raise UserError(f"{root} has no split {split!r}: its splits are {', '.join(known)}")
    classes = _filled_classes(root)
    if classes and root.name in split_aliases(split):
        raise UserError(f"{root} is the split {split!r} itself: give {root.parent} as data.root")
    if classes:
        raise UserError(
            f"{root} has no split {split!r}: its folders ({some(classes)}) hold images themselves, "
            f"so move them into {root / split}"
        )
    raise UserError(f"no image folders are recognised in {root}: it needs images as {split}/CLASS/NAME.jpg")


def _class_folders(folder: Path) -> list[str]:
    """The names of the folders in a folder, hidden ones left out, in the order that decides the labels."""
    return sorted(entry.name for entry in os.scandir(folder) if entry.is_dir() and not entry.name.startswith("."))


def _filled_classes(folder: Path) -> list[str]:
    """The names of the folders in a folder that themselves hold images."""
    return [name for name in _class_folders(folder) if any(map(_is_image, (folder / name).iterdir()))]


def _is_image(path: Path) -> bool:
    return path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith(".") and path.is_file()


def _images_below(folder: Path, root: Path) -> tuple[list[Path], int]:
    """The image files in a folder and then in the folders below it, sorted, and how many links were not followed."""
    if not folder.resolve().is_relative_to(root):
        return [], 1
    found: list[Path] = []
    refused = 0
    waiting = [str(folder)]
    while waiting:
        below = []
        # Entries know their kind from the listing: a stat for each of a million files would take its time.
        for entry in sorted(os.scandir(waiting.pop()), key=lambda entry: entry.name):
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                refused += entry.is_symlink()
                below += [] if entry.is_symlink() else [entry.path]
            elif os.path.splitext(entry.name)[1].lower() in IMAGE_SUFFIXES:  # noqa: PTH122 - as above
                path = Path(entry.path)
                inside = not entry.is_symlink() or path.resolve().is_relative_to(root)
                refused += not inside
                found += [path] if inside else []
        waiting += reversed(below)
    return found, refused


def _human_names(root: Path, folders: list[str], notes: list[str], published: Mapping[str, str]) -> dict[str, str]:
    """Folder -> name, from the first file that knows any of the folders, else the published ones, else their own."""
    if published.keys() == set(folders):  # the whole set, whose names others use as they are
        return {name: published[name] for name in folders}
    for place in (root, root.resolve().parent):
        for path in (place / "classes.json", place / "classes.txt", *sorted(place.glob("*_names.txt"))):
            known = _read_names(path) if path.is_file() else {}
            absent = [name for name in folders if name not in known]
            if len(absent) < len(folders):
                if absent:
                    notes.append(f"{path} lacks {some(absent)}: named after the folder")
                return _distinct({name: known.get(name, name) for name in folders})
    return _distinct({name: published.get(name, name) for name in folders})


def _distinct(names: dict[str, str]) -> dict[str, str]:
    """A name that several folders share is followed by the folder."""
    uses = Counter(names.values())
    return {folder: name if uses[name] == 1 else f"{name} ({folder})" for folder, name in names.items()}


def _read_names(path: Path) -> dict[str, str]:
    """The pairs in a file of names; empty where it holds something else."""
    if path.suffix == ".json":
        content = load_json(path)
        pairs = content.items() if isinstance(content, dict) else ()
        return {key: value for key, value in pairs if isinstance(value, str) and value}
    lines = path.read_text(encoding="utf-8-sig", errors="replace").splitlines()
    pairs_of_words = [line.split(maxsplit=1) for line in lines]
    return {words[0]: words[1].strip() for words in pairs_of_words if len(words) == 2}


def _new_class_map(folder: Path, names: dict[str, str], notes: list[str]) -> ClassMap:
    """The class map of a training split."""
    if len(names) < 2:
        raise UserError(
            f"{folder} has the one class {next(iter(names))!r}: a classifier needs at least 2 class folders"
        )
    lower = Counter(name.lower() for name in names)
    alike = [name for name in names if lower[name.lower()] > 1]
    if alike:
        notes.append(f"classes whose names differ in case only stay different classes: {some(alike)}")
    return ClassMap(ids=tuple(range(len(names))), names=tuple(names.values()))


def _labels(folder: Path, names: dict[str, str], class_map: ClassMap, known: Mapping[str, int]) -> dict[str, int]:
    """Folder -> label: the known one, or by its given name, its own, or both together."""
    uses = Counter(class_map.names)  # a name of several classes says nothing
    label_of_name = {name: label for label, name in enumerate(class_map.names) if uses[name] == 1}
    folder_of_label: dict[int, str] = {}
    labels = {}
    for own, given in names.items():
        label = known.get(own)
        for name in (given, own, f"{given} ({own})"):
            label = label_of_name.get(name) if label is None else label
        if label is None:
            hint = did_you_mean(given, class_map.names) if len(class_map) <= 20 else "check the folder"
            raise UserError(
                f"class {given!r} of {folder / own} is not among the {len(class_map)} known classes: {hint}"
            )
        if label in folder_of_label:
            both = f"{folder_of_label[label]} and {own}"
            raise UserError(f"the folders {both} of {folder} are both the class {given!r}: keep one of them")
        folder_of_label[label] = own
        labels[own] = label
    return labels
