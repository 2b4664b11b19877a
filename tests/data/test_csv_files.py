"""CSV files of boxes, in fractions or pixels, and what is wrong with a broken one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vitdet.data.csv_files import MAX_BYTES
from vitdet.data.formats import detection_splits, read_classification_set, read_detection_set
from vitdet.errors import UserError

OPEN_IMAGES = """ImageID,Source,LabelName,Confidence,XMin,XMax,YMin,YMax,IsOccluded,IsTruncated,IsGroupOf
b,xclick,/m/2,1,0.25,0.75,0.1,0.9,0,0,0
a,xclick,/m/1,1,0,1,0,1,-1,-1,-1
b,xclick,/m/1,1,"0,5",1,0.5,0.5,0,0,1
"""
PIXELS = "image_path,xmin,ymin,xmax,ymax,label\na.png,1,2,11.5,22,cat\nb.png,,,,,\na.png,0,0,5,5,dog\n"


@pytest.fixture
def root(tmp_path: Path, write_image: Callable[..., Path]) -> Path:
    folder = tmp_path / "set"
    for name in ("a", "b"):
        write_image(folder / "images" / f"{name}.png")
    return folder


def test_open_images(root: Path) -> None:
    (root / "train-annotations-bbox.csv").write_text(OPEN_IMAGES)
    (root / "validation-annotations-bbox.csv").write_text(OPEN_IMAGES.replace("/m/2", "/m/0"))
    data = read_detection_set(root, "train")
    assert (data.name, data.class_map.ids, data.class_map.names) == ("CSV", (1, 2, 3), ("/m/0", "/m/1", "/m/2"))
    first, second = data.records
    assert (first.path, first.size, first.image_id) == (root / "images" / "b.png", (30, 40), 1)
    assert first.boxes.tolist() == [[10, 3, 30, 27], [20, 15, 40, 15]]
    assert (first.labels.tolist(), first.crowd.tolist()) == ([2, 1], [False, True])
    assert (second.boxes.tolist(), second.crowd.tolist()) == ([[0, 0, 40, 30]], [False])
    assert second.annotation_ids.tolist() == [3]
    assert detection_splits(root) == ["train", "validation"]
    assert read_detection_set(root, "val").class_map == data.class_map


def test_class_descriptions_give_names_and_order(root: Path) -> None:
    (root / "train.csv").write_text(OPEN_IMAGES)
    (root / "oidv7-class-descriptions-boxable.csv").write_text(
        "LabelName,DisplayName\n/m/9,Ant\n/m/2,Zebra\n/m/1,Cat\n"
    )
    data = read_detection_set(root, "train")
    assert (data.class_map.ids, data.class_map.names) == ((1, 2), ("Zebra", "Cat"))  # no class that no file has
    assert data.records[0].labels.tolist() == [0, 1]
    (root / "oidv7-class-descriptions-boxable.csv").write_text("/m/2,Crane\n/m/1,Crane\n")
    assert read_detection_set(root, "train").class_map.names == ("Crane (/m/2)", "Crane (/m/1)")


def test_pixels(root: Path) -> None:
    (root / "train.csv").write_text(PIXELS)
    data = read_detection_set(root, "train")
    assert data.class_map.names == ("cat", "dog")
    first, second = data.records
    assert first.boxes.tolist() == [[1, 2, 11.5, 22], [0, 0, 5, 5]]
    assert (first.labels.tolist(), first.areas.tolist()) == ([0, 1], [210, 25])
    assert second.boxes.shape == (0, 4)  # an image without objects


@pytest.mark.parametrize(
    ("path", "header"),
    [
        ("train.csv", "image_path,xmin,ymin,xmax,ymax,label"),
        ("train_annotations.csv", "label,image,ymin,ymax,xmin,xmax"),
        ("annotations/train.csv", "filename,width,height,class,xmin,ymin,xmax,ymax"),
        ("train/_annotations.csv", "filename,width,height,class,xmin,ymin,xmax,ymax"),
        ("oidv6-train-annotations-bbox.csv", "\ufeffImageID , LabelName, XMin,XMax,YMin,YMax"),
    ],
)
def test_layouts(root: Path, path: str, header: str) -> None:
    values = {"xmin": 4, "ymin": 3, "xmax": 8, "ymax": 6, "XMin": 0.1, "YMin": 0.1, "XMax": 0.2, "YMax": 0.2}
    names = [name.strip(" \ufeff") for name in header.split(",")]
    row = [str(values.get(n, "cat" if n.lower()[:5] in ("label", "class") else "b.png")) for n in names]
    (root / path).parent.mkdir(exist_ok=True)
    (root / path).write_text(f"{header}\r\n{','.join(row)}\r\n\r\n", encoding="utf-8")
    if path.startswith("train/"):
        (root / "images" / "b.png").rename(root / "train" / "b.png")
    data = read_detection_set(root, "train")
    assert data.records[0].boxes.tolist() == [pytest.approx([4, 3, 8, 6])]
    assert (len(data), data.class_map.names, detection_splits(root)) == (1, ("cat",), ["train"])


def test_a_named_file(root: Path) -> None:
    (root / "boxes.csv").write_text(PIXELS)
    assert len(read_detection_set(root, "boxes.csv")) == len(read_detection_set(root / "boxes.csv", "train")) == 2
    assert detection_splits(root) == detection_splits(root / "boxes.csv") == ["boxes"]
    with pytest.raises(UserError, match=r"other\.csv does not exist: check the split"):
        read_detection_set(root, "other.csv")
    with pytest.raises(UserError, match="has no split 'train': its splits are boxes"):
        read_detection_set(root, "train")


def test_other_csv_files_are_no_data_set(root: Path) -> None:
    (root / "train.csv").write_text("id,label\n1,2\n")
    (root / "val.csv").write_bytes(b"\xff\xfe\0")
    with pytest.raises(UserError, match="no data set is recognised in"):
        read_detection_set(root, "train")
    with pytest.raises(UserError, match=r"train\.csv does not name the columns of boxes in its first line: it needs"):
        read_detection_set(root, "train.csv")


def test_for_a_classifier(root: Path, write_image: Callable[..., Path]) -> None:
    (root / "train.csv").write_text(PIXELS)
    with pytest.raises(UserError, match="is a CSV data set for detection: train a detector on it"):
        read_classification_set(root, "train")
    for name in ("x", "y"):
        write_image(root / "train" / name / "1.png")
    assert len(read_classification_set(root, "train")) == 2


def test_an_image_with_another_suffix(root: Path, write_image: Callable[..., Path]) -> None:
    (root / "train.csv").write_text(PIXELS.replace("b.png", "b.tif"))
    data = read_detection_set(root, "train")
    assert [record.path.name for record in data.records] == ["a.png", "b.png"]
    assert data.notes == ["1 image has another suffix than listed: b.png"]
    write_image(root / "images" / "b.jpg")  # which of the two is it?
    with pytest.raises(UserError, match=r"1 of the 2 images .* missing on disk, the first is .*images.b\.tif"):
        read_detection_set(root, "train")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("a.png,1,2,3,4", r"line 5 of .*train\.csv has 5 columns, the first line tells of 6 or more"),
        ("a.png,1,2,3,4,", "line 5 of .* has a box and no class"),
        (",1,2,3,4,cat", "line 5 of .* names no image"),
        ("a.png,1,2,,4,cat", "line 5 of .* has xmin '1', ymin '2', xmax '', .* all four must be finite numbers"),
        ("a.png,,,,,cat", "all four must be finite numbers, or empty where it shows no object"),
        ("a.png,1,2,wide,4,cat", "xmax 'wide', .* all four must be finite numbers"),
        ("a.png,1,2,nan,4,cat", "all four must be finite numbers"),
        ("a.png,1,2,1e400,4,cat", "all four must be finite numbers"),
        ("a.png,1,2,1e12,4,cat", "no image is that large"),
        ("a.png,3,2,1,4,cat", "line 5 of .* has a box of negative size, xmin '3'"),
        ("../a.png,1,2,3,4,cat", r"line 5 of .* points outside the data set .'\.\./a\.png'"),
        ("/a.png,1,2,3,4,cat", "line 5 of .* points outside the data set"),
        ("c.png,1,2,3,4,cat", r"1 of the 3 images listed in .*train\.csv are missing on disk, the first is .*c\.png"),
        ("a.tif,1,2,3,4,cat", r"two names in .*train\.csv are of the one image .*a\.png"),
        ("a\0.png,1,2,3,4,cat", "missing on disk|broken CSV"),
        ("x" * 70_000, "line 5 of .* has 65536 characters or more"),
        ('"' + "x\n" * 70_000, r"line \d+ of .* is broken CSV \(field larger"),
    ],
)
def test_broken_rows(root: Path, row: str, message: str) -> None:
    (root / "train.csv").write_text(PIXELS + row + "\n")
    with pytest.raises(UserError, match=message):
        read_detection_set(root, "train")


def test_pixels_under_the_names_of_fractions(root: Path) -> None:
    (root / "train.csv").write_text("ImageID,LabelName,XMin,XMax,YMin,YMax\na,cat,1,11,2,22\n")
    with pytest.raises(
        UserError, match=r"line 2 of .* XMax '11'.* must be fractions in \[0, 1\]; name columns of pixels"
    ):
        read_detection_set(root, "train")


@pytest.mark.parametrize(
    ("rows", "message"),
    [("", "lists 0 images: there is nothing to use, check the split 'train'"), ("a.png,,,,,\n", "lists 0 objects")],
)
def test_nothing_in_it(root: Path, rows: str, message: str) -> None:
    (root / "train.csv").write_text(PIXELS.splitlines()[0] + "\n" + rows)
    with pytest.raises(UserError, match=message):
        read_detection_set(root, "train")


def test_encoding_and_size(root: Path) -> None:
    (root / "train.csv").write_bytes((PIXELS + "a.png,1,2,3,4,Äpfel\n").encode("latin-1"))
    with pytest.raises(UserError, match=r"train\.csv is not UTF-8 after line \d+: save it as UTF-8"):
        read_detection_set(root, "train")
    (root / "train.csv").write_text(PIXELS)
    os.truncate(root / "train.csv", MAX_BYTES + 1)  # takes no place: the rest is a hole
    with pytest.raises(UserError, match=rf"has {MAX_BYTES + 1} bytes, more than {MAX_BYTES}"):
        read_detection_set(root, "train")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(
        st.sampled_from(
            ["a.png", "b", "..", "1", "0.5", "nan", "", ",", ",", ",", "\n", '"', "é", "\0", "-1", "cat", "\r"]
        ),
        max_size=24,
    ).map("".join),
    header=st.sampled_from([PIXELS.splitlines()[0], OPEN_IMAGES.splitlines()[0], "a,b", ""]),
)
def test_anything_is_read_or_refused(root: Path, rows: str, header: str) -> None:
    (root / "train.csv").write_text(f"{header}\n{rows}", encoding="utf-8")
    with contextlib.suppress(UserError):
        assert len(read_detection_set(root, "train.csv")) > 0


def test_tree_crowns(shared_data: Path) -> None:
    """The file names a .tif, beside it lies a .png; the XML files there say the same boxes."""
    from vitdet.data.voc import read_annotation

    root = shared_data / "detection" / "tree_crowns"
    data = read_detection_set(root, "OSBS_029")
    assert (data.name, len(data), data.class_map.names) == ("CSV", 1, ("Tree",))
    record = data.records[0]
    assert (record.path, record.size) == (root / "OSBS_029.png", (400, 400))
    assert data.notes == ["1 image has another suffix than listed: OSBS_029.png"]
    assert record.boxes.tolist() == read_annotation(root / "OSBS_029.xml").boxes
    assert len(record.boxes) == 61
