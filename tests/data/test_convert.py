"""Conversion between the formats: equal boxes through every pair, and what is refused."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from vitdet.data.convert import convert_set
from vitdet.data.formats import detection_splits, read_detection_set
from vitdet.data.records import DetectionSet
from vitdet.data.writers import WRITERS
from vitdet.errors import UserError

NAMES = {"coco": "COCO JSON", "yolo": "YOLO", "voc": "Pascal VOC", "csv": "CSV"}


def objects(data: DetectionSet, *, crowd: bool = True) -> dict[str, list[tuple]]:
    """Image name -> (class name, crowd, box) of its objects, in order; and its size."""
    return {
        record.path.name: [
            (data.class_map.names[label], group, *box)
            for label, group, box in zip(
                record.labels.tolist(), record.crowd.tolist(), record.boxes.tolist(), strict=True
            )
            if crowd or not group
        ]
        + [record.size]
        for record in data.records
    }


def assert_equal(one: dict[str, list[tuple]], other: dict[str, list[tuple]], tolerance: float) -> None:
    assert one.keys() == other.keys()
    for name, rows in one.items():
        assert [row[:2] for row in rows] == [row[:2] for row in other[name]], name
        for row, expected in zip(rows, other[name], strict=True):
            assert row[2:] == pytest.approx(expected[2:], rel=0, abs=tolerance), name


# --- the oracle: 273 boxes that others wrote in four formats


@pytest.fixture(scope="module")
def oracle(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Its annotations, each kind with the images where its format has them."""
    source = shared_data / "oracles" / "voc100_formats"
    root = tmp_path_factory.mktemp("oracle")
    images, given = source / "images", source / "gts"
    for name in ("coco", "csv", "voc/ImageSets/Main"):
        (root / name).mkdir(parents=True)
    shutil.copy(given / "coco_format_v1" / "instances_default.json", root / "coco")
    shutil.copy(given / "openimages_format" / "all_bounding_boxes.csv", root / "csv" / "default.csv")
    for name in ("coco", "csv"):
        (root / name / "images").symlink_to(images)
    (root / "voc" / "Annotations").symlink_to(given / "pascalvoc_format")
    (root / "voc" / "JPEGImages").symlink_to(images)
    stems = sorted(path.stem for path in images.iterdir())
    (root / "voc" / "ImageSets" / "Main" / "default.txt").write_text("\n".join(stems))
    # Darknet's: labels and images in one folder, called data/obj_train_data in the list.
    shutil.copytree(given / "yolo_format", root / "yolo", copy_function=shutil.copyfile)
    for folder in (root / "yolo", root / "yolo" / "obj_train_data"):
        folder.chmod(0o755)
    for path in images.iterdir():
        (root / "yolo" / "obj_train_data" / path.name).symlink_to(path)
    return {name: root / name for name in NAMES}


@pytest.mark.parametrize(("name", "tolerance"), [("coco", 0), ("csv", 1e-6), ("yolo", 1e-3)])
def test_all_formats_give_equal_boxes(oracle: dict[str, Path], name: str, tolerance: float) -> None:
    """The oracle's CSV has 10 digits, its YOLO files 6: half a thousandth of 500 pixels; the order may be another."""

    def ordered(data: DetectionSet) -> dict[str, list[tuple]]:
        def order(row: tuple) -> tuple:
            return (row[0], *(round(value) for value in row[2:])) if len(row) > 2 else ("",)

        return {image: sorted(rows, key=order) for image, rows in objects(data).items()}

    data = read_detection_set(oracle[name], "train" if name == "yolo" else "default")
    voc = read_detection_set(oracle["voc"], "default")
    assert (data.name, len(data)) == (NAMES[name], 100)
    assert sum(len(record.labels) for record in data.records) == 273
    assert set(data.class_map.names) == set(voc.class_map.names)
    assert_equal(ordered(data), ordered(voc), tolerance)


# --- round trips


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A COCO set with what formats stumble over: ids with gaps, no objects, digits, borders, names, equal stems."""
    from PIL import Image

    root = tmp_path_factory.mktemp("odd") / "set"
    rng = np.random.default_rng(3)
    names = ["ä dog, «old» & <wild>", "0", "yes", 'a "b"', "zebra crossing"]
    categories = [{"id": 3 + 7 * i, "name": name} for i, name in enumerate(names)]
    (root / "annotations").mkdir(parents=True)
    for split, files in (("train", ["ü.png", "b.png", "empty.png", "b.jpg"]), ("val", ["a.png", "b.png"])):
        images, annotations = [], []
        for number, file in enumerate(files):
            width, height = int(rng.integers(20, 999)), int(rng.integers(20, 999))
            (root / split).mkdir(exist_ok=True)
            Image.new("RGB", (width, height)).save(root / split / file)
            images.append({"id": 5 * number, "file_name": file, "width": width, "height": height})
            boxes = rng.uniform(0, 0.5, (30, 4)) * [width, height, width, height]
            boxes = [*boxes.tolist(), [0, 0, width, height], [-3.3, 1 / 3, 9, 9], [5, 5, 0, 2], [7, 8.1, 1e-4, 3]]
            for box in boxes if file != "empty.png" else []:
                category = categories[int(rng.integers(5))]["id"]
                annotations.append({"image_id": 5 * number, "category_id": category, "bbox": box})
        content = {"images": images, "annotations": annotations, "categories": categories}
        (root / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))
    return root


@pytest.fixture(scope="module")
def written(odd: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """That set in each of the formats."""
    folder = tmp_path_factory.mktemp("written")
    for to in WRITERS:
        convert_set(odd, folder / to, to=to)
    return {to: folder / to for to in WRITERS}


@pytest.mark.parametrize(("first", "second"), list(itertools.product(WRITERS, WRITERS)))
def test_round_trips(odd: Path, written: dict[str, Path], first: str, second: str, tmp_path: Path) -> None:
    """From COCO to the first, to the second, and back: each reads the boxes of the origin, to the float32 at least."""
    convert_set(written[first], tmp_path / "second", to=second)
    convert_set(tmp_path / "second", tmp_path / "third", to="coco")
    # VOC has one folder for all images, in which the second b and the third have numbers.
    renamed = {"train": {"b.jpg": "b_2.jpg"}, "val": {}}
    if "voc" in (first, second):
        renamed["val"] = {"b.png": "b_3.png"}
    for split in ("train", "val"):
        origin = objects(read_detection_set(odd, split))
        expected = {renamed[split].get(name, name): rows for name, rows in origin.items()}
        for root, name in ((tmp_path / "second", NAMES[second]), (tmp_path / "third", "COCO JSON")):
            data = read_detection_set(root, split)
            assert data.name == name
            assert detection_splits(root) == ["train", "val"]
            assert_equal(objects(data), expected, 1e-8)
            for one, other in zip(objects(data).values(), expected.values(), strict=False):
                assert len(one) == len(other)
            sorted_names = data.class_map.names
            assert set(sorted_names) == {"ä dog, «old» & <wild>", "0", "yes", 'a "b"', "zebra crossing"}


def test_ids_crowd_and_areas_stay_in_coco(shared_data: Path, tmp_path: Path) -> None:
    root = shared_data / "detection" / "coco_mini"
    convert_set(root, tmp_path / "out", to="coco")
    for split in ("train", "val"):
        ours, original = (read_detection_set(folder, split).to_coco() for folder in (tmp_path / "out", root))
        for one, other in zip(ours["annotations"], original["annotations"], strict=True):
            assert one.pop("bbox") == pytest.approx(other.pop("bbox"), rel=0, abs=1e-8)
            assert one == other
        assert ours == original | {"annotations": ours["annotations"]}


@pytest.mark.parametrize("to", list(WRITERS))
def test_coco_mini(shared_data: Path, to: str, tmp_path: Path) -> None:
    """All 80 classes in COCO's order, where the format can say it; crowd regions, or a line that they are left out."""
    root = shared_data / "detection" / "coco_mini"
    lines = convert_set(root, tmp_path / "out", to=to, splits=["val"])
    left_out = f"note: 5 crowd regions of val are left out, {to} has none"
    assert lines == [
        f"{root}: COCO JSON, val: 79 images, 624 boxes, 80 classes",
        *([left_out] if to in ("yolo", "voc") else []),
        f"{tmp_path / 'out'}: written as {to}",
    ]
    before, after = read_detection_set(root, "val"), read_detection_set(tmp_path / "out", "val")
    assert_equal(objects(after), objects(before, crowd=to in ("coco", "csv")), 1e-8)
    used = {before.class_map.names[label] for record in before.records for label in record.labels}
    names = [name for name in before.class_map.names if name in used or to in ("coco", "yolo")]
    assert list(after.class_map.names) == (sorted(names) if to == "voc" else names)


def test_bccd_through_yolo_is_exact(shared_data: Path, tmp_path: Path) -> None:
    """Whole pixels are whole pixels in every format, so that the areas are the same, too."""
    root = shared_data / "detection" / "bccd"
    convert_set(root, tmp_path / "yolo", to="yolo")
    convert_set(tmp_path / "yolo", tmp_path / "voc", to="voc")
    for split in ("train", "val"):
        for to in ("yolo", "voc"):
            data, original = (read_detection_set(folder, split) for folder in (tmp_path / to, root))
            assert_equal(objects(data), objects(original), 0)
            areas = {record.path.name: record.areas.tolist() for record in original.records}
            assert {record.path.name: record.areas.tolist() for record in data.records} == areas


# --- files


def test_what_is_written(odd: Path, written: dict[str, Path]) -> None:
    def listing(name: str) -> list[str]:
        return sorted(path.relative_to(written[name]).as_posix() for path in written[name].rglob("*") if path.is_file())

    images = [f"images/{name}" for name in ("train/b.png", "train/b_2.jpg", "train/empty.png", "train/ü.png")]
    images += ["images/val/a.png", "images/val/b.png"]
    labels = [name.replace("images/", "labels/", 1)[:-3] + "txt" for name in images]
    assert listing("coco") == ["annotations/instances_train.json", "annotations/instances_val.json", *images]
    assert listing("csv") == ["class-descriptions.csv", *images, "train.csv", "val.csv"]
    assert listing("yolo") == ["data.yaml", *images, *labels]
    content = yaml.safe_load((written["yolo"] / "data.yaml").read_text(encoding="utf-8"))
    assert {key: content[key] for key in ("train", "val")} == {"train": "images/train", "val": "images/val"}
    assert content["names"][2] == "yes"
    assert (written["yolo"] / "labels" / "train" / "empty.txt").read_text() == ""
    assert len([name for name in listing("voc") if name.startswith("JPEGImages/")]) == 6
    source, copy = odd / "val" / "a.png", written["csv"] / "images" / "val" / "a.png"
    assert os.path.samefile(source, copy)  # noqa: PTH121 - linked, not copied
    assert not [path for path in written["csv"].parent.iterdir() if path.name.startswith(".")]


def test_images_are_copied_where_links_are_not_possible(
    odd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: Any) -> None:
        raise OSError("another file system")

    monkeypatch.setattr(os, "link", link)
    convert_set(odd, tmp_path / "out", to="yolo", splits=["val"])
    copy = tmp_path / "out" / "images" / "val" / "a.png"
    assert copy.read_bytes() == (odd / "val" / "a.png").read_bytes()
    assert copy.stat().st_nlink == 1


def test_an_image_in_two_splits_is_kept_once(odd: Path, written: dict[str, Path], tmp_path: Path) -> None:
    listing = written["voc"] / "ImageSets" / "Main"
    (tmp_path / "set").mkdir()
    shutil.copytree(written["voc"], tmp_path / "voc")
    text = (listing / "train.txt").read_text() + (listing / "val.txt").read_text()
    (tmp_path / "voc" / "ImageSets" / "Main" / "trainval.txt").write_text(text)
    convert_set(tmp_path / "voc", tmp_path / "again", to="voc")
    assert detection_splits(tmp_path / "again") == ["train", "trainval", "val"]
    assert len(list((tmp_path / "again" / "JPEGImages").iterdir())) == 6
    assert len(read_detection_set(tmp_path / "again", "trainval")) == 6


def test_nothing_is_left_behind(odd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(folder: Path, _: Any) -> None:
        (folder / "half").write_text("x")
        raise OSError("disk full")

    monkeypatch.setitem(WRITERS, "csv", write)
    with pytest.raises(OSError, match="disk full"):
        convert_set(odd, tmp_path / "out", to="csv")
    assert list(tmp_path.iterdir()) == []


def test_an_empty_destination_is_taken_another_refused(odd: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    convert_set(odd, tmp_path / "out", to="csv")
    before = sorted(tmp_path.rglob("*"))
    for place in (tmp_path / "out", tmp_path / "out" / "train.csv"):
        with pytest.raises(UserError, match=r"is not empty: choose another folder or remove it"):
            convert_set(odd, place, to="csv")
    assert sorted(tmp_path.rglob("*")) == before


# --- what is refused


@pytest.fixture
def coco_root(tmp_path: Path, coco_content: dict[str, Any], write_image: Callable[..., Path]) -> Path:
    for name in ("a.png", "b.png"):
        write_image(tmp_path / "set" / "train" / name)
    (tmp_path / "set" / "train.json").write_text(json.dumps(coco_content))
    return tmp_path / "set"


def change(root: Path, edit: Callable[[dict[str, Any]], Any], name: str = "train.json") -> None:
    content = json.loads((root / "train.json").read_text())
    edit(content)
    (root / name).write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("edit", "to", "message"),
    [
        (lambda c: c["images"][0].update(width=50), "yolo", r"a\.png is 40 x 30 pixels .* its annotation says 50 x 30"),
        (lambda c: c["images"][0].update(width=50), "csv", r"a\.png is 40 x 30 pixels .* its annotation says 50 x 30"),
        (
            lambda c: c["categories"][0].update(name=" cat"),
            "voc",
            "class ' cat' is empty, or has white space around it",
        ),
        (lambda c: c["categories"][0].update(name="a\nb"), "csv", r"class 'a\\nb' is empty, or has white space"),
        (lambda c: c["annotations"][2].update(bbox=[900, 0, 5, 5]), "csv", r"a box of b\.png reaches beyond the image"),
        (
            lambda c: c["annotations"][2].update(bbox=[900, 0, 5, 5]),
            "yolo",
            r"a box of b\.png reaches beyond the image",
        ),
    ],
)
def test_what_the_readers_would_not_read(
    coco_root: Path, tmp_path: Path, edit: Callable[[dict[str, Any]], Any], to: str, message: str
) -> None:
    change(coco_root, edit)
    with pytest.raises(UserError, match=message):
        convert_set(coco_root, tmp_path / "out", to=to)
    assert not (tmp_path / "out").exists()


def test_unknown_format_and_split(coco_root: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no format 'vocc' to convert to; did you mean 'voc'"):
        convert_set(coco_root, tmp_path / "out", to="vocc")
    with pytest.raises(UserError, match="has no split 'val': its splits are train"):
        convert_set(coco_root, tmp_path / "out", to="voc", splits=["val"])


def test_splits_with_different_classes(coco_root: Path, tmp_path: Path, write_image: Callable[..., Path]) -> None:
    """By name, where the ids contradict each other."""
    for name in ("a.png", "b.png"):
        write_image(coco_root / "val" / name)
    change(coco_root, lambda c: c.update(categories=[{"id": 5, "name": "cow"}, {"id": 2, "name": "cat"}]), "val.json")
    convert_set(coco_root, tmp_path / "out", to="yolo")
    train, val = (read_detection_set(tmp_path / "out", split) for split in ("train", "val"))
    assert train.class_map == val.class_map
    assert sorted(train.class_map.names) == ["cat", "cow", "dog"]
    for data, split in ((train, "train"), (val, "val")):
        assert_equal(objects(data), objects(read_detection_set(coco_root, split), crowd=False), 1e-8)


def test_one_image_with_two_annotations(coco_root: Path, tmp_path: Path) -> None:
    """VOC keeps one file an image: two splits that differ on it cannot be both."""
    change(coco_root, lambda c: c["annotations"].pop(), "val.json")
    (coco_root / "val").symlink_to(coco_root / "train")
    with pytest.raises(UserError, match=r"b\.png has other objects in split 'val' than in an earlier one"):
        convert_set(coco_root, tmp_path / "out", to="voc", splits=["train", "val"])
    convert_set(coco_root, tmp_path / "out", to="yolo", splits=["train", "val"])
    counts = [sum(len(r.labels) for r in read_detection_set(tmp_path / "out", s).records) for s in ("train", "val")]
    assert counts == [2, 1]


@pytest.mark.parametrize("to", list(WRITERS))
def test_a_file_that_is_listed_twice(coco_root: Path, tmp_path: Path, to: str) -> None:
    """It is two images, each with its own objects."""
    change(coco_root, lambda c: c["images"][1].update(file_name="a.png"))
    convert_set(coco_root, tmp_path / "out", to=to)
    data = read_detection_set(tmp_path / "out", "train")
    assert [record.path.name for record in data.records] == ["a.png", "a_2.png"]
    assert len(data.records[1].labels) == 1
