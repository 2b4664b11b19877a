"""Reading data sets: the real ones, the layouts people use, and what is wrong with a broken one."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pycocotools.coco import COCO

from vitdet.data.formats import read_detection_set
from vitdet.data.records import DetectionSet
from vitdet.errors import UserError
from vitdet.evaluation.coco import CocoEvaluator

Content = dict[str, Any]


def class_counts(data: DetectionSet) -> dict[str, int]:
    counts = np.bincount(np.concatenate([record.labels for record in data.records]), minlength=len(data.class_map))
    return dict(zip(data.class_map.names, counts.tolist(), strict=True))


@pytest.fixture
def coco_root(tmp_path: Path, coco_content: Content, write_image: Callable[..., Path]) -> Path:
    root = tmp_path / "set"
    for name in ("a.png", "b.png"):
        write_image(root / "train" / name)
    (root / "annotations").mkdir()
    (root / "annotations" / "instances_train.json").write_text(json.dumps(coco_content))
    return root


def rewrite(root: Path, content: Content | str) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    (root / "annotations" / "instances_train.json").write_text(text)


XML = """<annotation><filename>elsewhere.jpg</filename><size><width>{width}</width><height>30</height></size>
<object><name>zebra</name><difficult>1</difficult><bndbox><xmin>1</xmin><ymin>2</ymin><xmax>11</xmax><ymax>22</ymax></bndbox></object>
<object><name>ant</name><bndbox><xmax>40</xmax><xmin>3.5</xmin><ymin>4</ymin><ymax>4</ymax></bndbox></object></annotation>"""


@pytest.fixture
def voc_root(tmp_path: Path, write_image: Callable[..., Path]) -> Path:
    root = tmp_path / "voc"
    (root / "Annotations").mkdir(parents=True)
    (root / "ImageSets" / "Main").mkdir(parents=True)
    for stem in ("one", "two", "three"):
        write_image(root / "JPEGImages" / f"{stem}.png")
        (root / "Annotations" / f"{stem}.xml").write_text(XML.format(width=40))
    (root / "Annotations" / "three.xml").write_text(XML.format(width=40).replace("ant<", "bee<"))
    (root / "ImageSets" / "Main" / "train.txt").write_text("two\none\n\n")
    (root / "ImageSets" / "Main" / "val.txt").write_text("three\n")
    (root / "ImageSets" / "Main" / "ant_train.txt").write_text("two  1\none -1\n")
    return root


# --- real data


def test_bccd(shared_data: Path) -> None:
    root = shared_data / "detection" / "bccd"
    train, val = read_detection_set(root, "train"), read_detection_set(root, "val")
    assert (train.name, len(train), len(val)) == ("Pascal VOC", 205, 87)
    assert train.class_map == val.class_map
    assert (train.class_map.ids, train.class_map.names) == ((1, 2, 3), ("Platelets", "RBC", "WBC"))
    assert class_counts(train) == {"Platelets": 209, "RBC": 2382, "WBC": 214}
    assert class_counts(val) == {"Platelets": 83, "RBC": 968, "WBC": 87}
    assert train.notes == ["1 box of zero area is left out of training: BloodImage_00343.jpg"]
    listed = (root / "ImageSets" / "Main" / "train.txt").read_text().split()
    assert [record.path.stem for record in train.records] == listed
    assert [record.image_id for record in train.records] == list(range(1, 206))
    record = next(record for record in train.records if record.path.stem == "BloodImage_00343")
    assert record.boxes[0].tolist() == [484, 195, 613, 303]
    assert len(record.training_targets()[0]) == len(record.boxes) - 1


@pytest.mark.parametrize(("split", "images", "boxes", "crowd"), [("train", 80, 739, 8), ("val", 79, 624, 5)])
def test_coco_mini(shared_data: Path, split: str, images: int, boxes: int, crowd: int) -> None:
    """The ground truth handed on is the file's own, number for number."""
    root = shared_data / "detection" / "coco_mini"
    data = read_detection_set(root, split)
    assert (data.name, len(data), len(data.class_map)) == ("COCO JSON", images, 80)
    assert sum(len(record.labels) for record in data.records) == boxes
    assert sum(int(record.crowd.sum()) for record in data.records) == crowd
    original = json.loads((root / split / "instances.json").read_text())
    ours = data.to_coco()
    keys = ("image_id", "category_id", "area", "iscrowd")
    expected = {a["id"]: ([a[key] for key in keys], a["bbox"]) for a in original["annotations"]}
    assert len(ours["annotations"]) == boxes
    for annotation in ours["annotations"]:
        values, bbox = expected[annotation["id"]]
        assert [annotation[key] for key in keys] == values
        assert annotation["bbox"] == pytest.approx(bbox, abs=1e-9)
    assert [(c["id"], c["name"]) for c in ours["categories"]] == [(c["id"], c["name"]) for c in original["categories"]]
    sizes = {image["id"]: (image["height"], image["width"]) for image in original["images"]}
    assert {record.image_id: record.size for record in data.records} == sizes


def test_voc_and_coco_give_equal_boxes(shared_data: Path, tmp_path: Path) -> None:
    """The oracle holds the same 273 annotations in both formats."""
    oracle = shared_data / "oracles" / "voc100_formats"
    root = tmp_path / "both"
    (root / "ImageSets" / "Main").mkdir(parents=True)
    stems = sorted(path.stem for path in (oracle / "images").iterdir())
    (root / "ImageSets" / "Main" / "all.txt").write_text("\n".join(stems))
    (root / "Annotations").symlink_to(oracle / "gts" / "pascalvoc_format")
    (root / "JPEGImages").symlink_to(oracle / "images")
    (root / "coco").mkdir()
    (root / "coco" / "images").symlink_to(oracle / "images")
    shutil.copy(oracle / "gts" / "coco_format_v1" / "instances_default.json", root / "coco" / "default.json")
    voc, coco = read_detection_set(root, "all"), read_detection_set(root / "coco" / "default.json", "default")

    def rows(data: DetectionSet) -> list[tuple]:
        return sorted(
            (record.path.name, *record.size, data.class_map.names[label], area, *box)
            for record in data.records
            for label, area, box in zip(record.labels, record.areas, record.boxes.tolist(), strict=True)
        )

    assert len(rows(voc)) == 273
    assert rows(voc) == rows(coco)


# --- COCO


def test_coco_records(coco_root: Path) -> None:
    data = read_detection_set(coco_root, "train")
    assert (data.class_map.ids, data.class_map.names) == ((2, 5), ("dog", "cat"))
    first, second = data.records
    assert (first.image_id, first.size, first.path) == (7, (30, 40), coco_root / "train" / "a.png")
    assert first.boxes.tolist() == [[1, 2, 11, 22], [0, 0, 5, 5]]
    assert (first.labels.tolist(), first.crowd.tolist(), first.areas.tolist()) == ([1, 0], [False, True], [150.5, 25])
    assert first.annotation_ids.tolist() == [11, 12]
    assert (second.areas.tolist(), second.crowd.tolist()) == ([100], [False])  # computed where they are missing
    assert second.boxes.tolist() == [[30.5, 20, 50.5, 25]]  # kept for evaluation
    assert second.training_targets()[0].tolist() == [[30.5, 20, 40, 25]]  # clipped for training
    assert [len(record.training_targets()[1]) for record in data.records] == [1, 1]  # the crowd region is left out
    assert data.notes == ["1 box reaches beyond the image and is clipped for training: b.png"]


def test_to_coco_is_accepted_by_pycocotools(coco_root: Path) -> None:
    api = COCO()
    api.dataset = read_detection_set(coco_root, "train").to_coco()
    api.createIndex()
    assert api.getCatIds(catNms=["cat"]) == [5]
    assert api.loadAnns(api.getAnnIds(imgIds=[7], iscrowd=True))[0]["bbox"] == [0, 0, 5, 5]


def test_ids_that_the_coco_api_cannot_take(coco_root: Path, coco_content: Content) -> None:
    """Texts as image ids become 1…N, and an annotation id of 0, which would count as unmatched, 1…N too."""
    for image, name in zip(coco_content["images"], ("x", "y"), strict=True):
        for annotation in coco_content["annotations"]:
            annotation["image_id"] = name if annotation["image_id"] == image["id"] else annotation["image_id"]
        image["id"] = name
    coco_content["annotations"][0]["id"] = 0
    rewrite(coco_root, coco_content)
    data = read_detection_set(coco_root, "train")
    assert [record.image_id for record in data.records] == [1, 2]
    assert np.concatenate([record.annotation_ids for record in data.records]).tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (2**53 - 1, 0, [2**53 - 1, 0]),
        (2**53, 2**53 + 1, [1, 2]),  # one and the same number as float64
        (10**30, 3, [1, 2]),
        (-5, 3, [1, 2]),
    ],
)
@pytest.mark.parametrize("backend", ["hotcoco", "pycocotools"])
def test_image_ids_that_results_cannot_hold(
    coco_root: Path, coco_content: Content, first: int, second: int, expected: list[int], backend: str
) -> None:
    """Perfect detections of two images whose ids must not run together."""
    renamed = {7: first, 3: second}
    for image in coco_content["images"]:
        image["id"] = renamed[image["id"]]
    for annotation in coco_content["annotations"]:
        annotation["image_id"] = renamed[annotation["image_id"]]
    rewrite(coco_root, coco_content)
    data = read_detection_set(coco_root, "train")
    assert [record.image_id for record in data.records] == expected
    evaluator = CocoEvaluator(data.to_coco(), backend=backend)
    truth = [annotation for annotation in data.to_coco()["annotations"] if not annotation["iscrowd"]]
    evaluator.update([annotation | {"score": 0.9} for annotation in truth])
    assert evaluator.compute()["AP"] == pytest.approx(1.0)


def test_notes_name_each_image_once(coco_root: Path, coco_content: Content) -> None:
    for number in range(3):
        box = {"id": 20 + number, "image_id": 3, "category_id": 2, "bbox": [30 + number, 20, 20, 5]}
        coco_content["annotations"].append(box)
    rewrite(coco_root, coco_content)
    assert read_detection_set(coco_root, "train").notes == [
        "4 boxes reach beyond the image and are clipped for training: b.png"
    ]


def test_size_comes_from_the_file_where_it_is_missing(coco_root: Path, coco_content: Content) -> None:
    del coco_content["images"][0]["height"]
    rewrite(coco_root, coco_content)
    assert read_detection_set(coco_root, "train").records[0].size == (30, 40)


@pytest.mark.parametrize(
    ("json_path", "images"),
    [
        ("annotations/instances_train2017.json", "train2017"),
        ("annotations/instances_train.json", "images/train"),
        ("annotations/instances_train.json", "images"),
        ("annotations/train.json", "train"),
        ("train/_annotations.coco.json", "train"),
        ("train/labels.json", "train"),
        ("train/instances.json", "train/images"),
        ("train.json", "train"),
        ("instances_train.json", "images"),
    ],
)
def test_coco_layouts(
    tmp_path: Path, coco_content: Content, write_image: Callable[..., Path], json_path: str, images: str
) -> None:
    (tmp_path / json_path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / json_path).write_text(json.dumps(coco_content))
    for name in ("a.png", "b.png"):
        write_image(tmp_path / images / name)
    data = read_detection_set(tmp_path, "train")
    assert [record.path for record in data.records] == [tmp_path / images / "a.png", tmp_path / images / "b.png"]


def test_a_named_annotation_file(coco_root: Path) -> None:
    assert len(read_detection_set(coco_root, "annotations/instances_train.json")) == 2
    with pytest.raises(UserError, match=r"annotations/other\.json does not exist: check the split"):
        read_detection_set(coco_root, "annotations/other.json")


def test_two_years_of_one_split(coco_root: Path) -> None:
    source = coco_root / "annotations" / "instances_train.json"
    for year in ("2014", "2017"):
        shutil.copy(source, source.with_name(f"instances_val{year}.json"))
    with pytest.raises(UserError, match=r"'val' of .* could be val2014 or val2017: give the full name"):
        read_detection_set(coco_root, "val")


def broken(change: str) -> Callable[[Content], Any]:
    """A statement that changes the content ``c``, with its annotations ``a`` and images ``i``."""

    def apply(content: Content) -> None:
        exec(change, {"c": content, "a": content["annotations"], "i": content["images"], "nan": float("nan")})

    return apply


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("del c['categories']", "lacks the lists categories"),
        ("c['images'] = []", "lists 0 images"),
        ("c['categories'] = []", "lists 0 categories"),
        ("c['categories'][0]['id'] = 2", "category id 2 occurs more than once"),
        ("c['categories'][0]['id'] = 'x'", "category id 'x' in .* is not a whole number"),
        ("a[1]['category_id'] = 9", "annotation 12 in .*json has category_id 9, known ids are 2, 5"),
        ("a[1]['image_id'] = 99", "annotation 12 in .* has image_id 99, which is not among the images"),
        ("i[1]['id'] = 7", "image id 7 occurs more than once"),
        ("del i[0]['file_name']", "image 7 in .* has no key 'file_name'"),
        ("del a[2]['bbox']", "annotation 13 in .* has no key 'bbox'"),
        ("a[0]['bbox'][2] = nan", "annotation 11 in .* bbox .*nan.* must be 4 finite numbers"),
        ("a[0]['bbox'][2] = '3'", "annotation 11 in .* must be 4 finite numbers"),
        ("a[0]['bbox'][2] = 10**400", "annotation 11 in .* must be 4 finite numbers"),
        ("a[0]['bbox'] = [1, 2, 3]", "annotation 11 in .* must be 4 finite numbers"),
        ("a[0]['bbox'][2] = -3", "annotation 11 in .* negative size"),
        ("a[0] = 5", "annotation 0 in .* is 5: it must be an object"),
        ("i[0]['file_name'] = '../a.png'", "image 7 in .* points outside the data set"),
        ("i[0]['file_name'] = '/etc/a.png'", "image 7 in .* points outside the data set"),
        (r"i[0]['file_name'] = 'x\\..\\..\\a.png'", "image 7 in .* points outside the data set"),
        ("i[0]['file_name'] = 'gone.png'", r"1 of the 2 images .* missing on disk, the first is .*train.gone\.png"),
    ],
)
def test_broken_coco(coco_root: Path, coco_content: Content, change: str, message: str) -> None:
    broken(change)(coco_content)
    rewrite(coco_root, coco_content)
    with pytest.raises(UserError, match=message):
        read_detection_set(coco_root, "train")


def test_broken_json_names_the_line(coco_root: Path) -> None:
    rewrite(coco_root, '{"images": [],\n "annotations": oops}')
    with pytest.raises(UserError, match=r"instances_train\.json is broken JSON at line 2, column 17"):
        read_detection_set(coco_root, "train")


# --- Pascal VOC


def test_voc_records(voc_root: Path) -> None:
    data = read_detection_set(voc_root, "train")
    assert data.class_map.names == ("ant", "bee", "zebra")  # of all the splits
    assert data.class_map.ids == (1, 2, 3)
    first, second = data.records
    assert (first.path, first.image_id) == (voc_root / "JPEGImages" / "two.png", 1)
    assert first.boxes.tolist() == [[1, 2, 11, 22], [3.5, 4, 40, 4]]
    assert (first.labels.tolist(), first.areas.tolist()) == ([2, 0], [200, 0])
    assert not first.crowd.any()  # difficult objects are ordinary ones
    assert (first.annotation_ids.tolist(), second.annotation_ids.tolist()) == ([1, 2], [3, 4])
    assert first.training_targets()[0].tolist() == [[1, 2, 11, 22]]
    assert data.notes == ["2 boxes of zero area are left out of training: two.png, one.png"]


@pytest.mark.parametrize("suffix", [".JPEG", ".webp", ".jfif", ".gif"])
def test_voc_images_of_any_kind(voc_root: Path, suffix: str) -> None:
    (voc_root / "JPEGImages" / "one.png").rename(voc_root / "JPEGImages" / f"one{suffix}")
    (voc_root / "JPEGImages" / "one.txt").write_text("no image")
    assert [r.path.name for r in read_detection_set(voc_root, "train").records] == ["two.png", f"one{suffix}"]


def test_voc_size_of_zero_comes_from_the_image(voc_root: Path) -> None:
    (voc_root / "Annotations" / "two.xml").write_text(XML.format(width=0))
    assert read_detection_set(voc_root, "train").records[0].size == (30, 40)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("</annotation>", "", r"two\.xml is broken XML"),
        ("<annotation>", "<!DOCTYPE a [<!ENTITY b 'c'>]><annotation>", r"two\.xml has a document type, entities"),
        ("bndbox", "box", r"object 1 \(zebra\) in .*two\.xml has no bndbox"),
        ("<name>zebra</name>", "", r"object 1 in .*two\.xml has no name"),
        ("<xmin>1<", "<xmin>nan<", r"object 1 \(zebra\) in .*xmin 'nan'.* must be finite numbers"),
        ("<xmin>1<", "<xmin>wide<", r"object 1 \(zebra\) in .*xmin 'wide'.* must be finite numbers"),
        ("<xmin>1</xmin>", "", r"object 1 \(zebra\) in .*xmin None.* must be finite numbers"),
        ("<xmin>1<", "<xmin>12<", r"object 1 \(zebra\) in .* negative size"),
    ],
)
def test_broken_voc(voc_root: Path, old: str, new: str, message: str) -> None:
    path = voc_root / "Annotations" / "two.xml"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(UserError, match=message):
        read_detection_set(voc_root, "train")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("\n", "split 'train' of .* lists 0 images"),
        ("one\none\n", "image 'one' occurs more than once"),
        ("one\nfour\n", r"1 of the 2 images of split 'train' are missing on disk, the first is .*four\.\*"),
        ("../JPEGImages/one\n", "points outside the data set"),
    ],
)
def test_broken_voc_list(voc_root: Path, lines: str, message: str) -> None:
    (voc_root / "ImageSets" / "Main" / "train.txt").write_text(lines)
    with pytest.raises(UserError, match=message):
        read_detection_set(voc_root, "train")


def test_voc_without_annotation(voc_root: Path) -> None:
    (voc_root / "Annotations" / "one.xml").unlink()
    with pytest.raises(UserError, match=r"one\.xml, listed in split 'train', does not exist"):
        read_detection_set(voc_root, "train")


# --- neither


def test_no_such_split(coco_root: Path, voc_root: Path) -> None:
    with pytest.raises(UserError, match=re.escape(f"{coco_root} has no split 'test': its splits are train")):
        read_detection_set(coco_root, "test")
    with pytest.raises(UserError, match=re.escape(f"{voc_root} has no split 'test': its splits are train, val")):
        read_detection_set(voc_root, "test")


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"gone does not exist: check data\.root"):
        read_detection_set(tmp_path / "gone", "train")
    with pytest.raises(UserError, match=r"no data set is recognised in .*: it needs COCO JSON .* or Pascal VOC"):
        read_detection_set(tmp_path, "train")
