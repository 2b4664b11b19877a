"""YOLO sets: what data.yaml may say, what a line may be, and what is wrong with a broken one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vitdet.data.formats import detection_splits, read_detection_set
from vitdet.errors import UserError

YAML = "train: images/train\nval: images/val\nnames: [cat, dog]\n"


@pytest.fixture
def root(tmp_path: Path, write_image: Callable[..., Path]) -> Path:
    """Two images (30 x 40) to train on, with labels, and one to validate."""
    folder = tmp_path / "set"
    for name in ("train/a", "train/b", "val/c"):
        write_image(folder / "images" / f"{name}.png")
        (folder / "labels" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "labels" / f"{name}.txt").write_text("1 0.5 0.5 0.25 0.5\n")
    (folder / "labels" / "train" / "a.txt").write_text("0 0.25 0.5 0.5 0.2\n\n1.0\t0.5  0.5 1 1\r\n")
    (folder / "data.yaml").write_text(YAML)
    return folder


def stems(root: Path, split: str = "train") -> list[str]:
    return [record.path.stem for record in read_detection_set(root, split).records]


def test_records(root: Path) -> None:
    data = read_detection_set(root, "train")
    assert (data.name, data.root, data.split, data.notes) == ("YOLO", root, "train", [])
    assert (data.class_map.ids, data.class_map.names) == ((0, 1), ("cat", "dog"))
    first, second = data.records
    assert (first.path, first.size, first.image_id) == (root / "images" / "train" / "a.png", (30, 40), 1)
    assert first.boxes.tolist() == [[0, 12, 20, 18], [0, 0, 40, 30]]
    assert (first.labels.tolist(), first.crowd.tolist(), first.areas.tolist()) == ([0, 1], [False] * 2, [120, 1200])
    assert (first.annotation_ids.tolist(), second.annotation_ids.tolist()) == ([1, 2], [3])
    assert second.boxes.tolist() == [[15, 7.5, 25, 22.5]]
    assert detection_splits(root) == ["train", "val"]


def test_fractions_are_of_the_upright_image(root: Path, write_image: Callable[..., Path]) -> None:
    from PIL import Image

    path = write_image(root / "images" / "train" / "b.jpg", (30, 40))
    exif = Image.Exif()
    exif[0x0112] = 6
    with Image.open(path) as image:
        image.save(path, exif=exif)
    (root / "images" / "train" / "b.png").unlink()
    record = read_detection_set(root, "train").records[1]
    assert (record.size, record.boxes.tolist()) == ((40, 30), [[11.25, 10, 18.75, 30]])


def test_images_without_objects(root: Path) -> None:
    """An empty label file is said to be one, a missing one is told of."""
    (root / "labels" / "train" / "a.txt").write_text("\n")
    (root / "labels" / "train" / "b.txt").write_text("")
    assert [len(record.labels) for record in read_detection_set(root, "train").records] == [0, 0]
    (root / "labels" / "train" / "b.txt").unlink()
    data = read_detection_set(root, "train")
    assert [record.boxes.shape for record in data.records] == [(0, 4), (0, 4)]
    assert data.notes == ["1 of the 2 images have no label file: taken as without objects"]
    (root / "labels" / "train" / "a.txt").unlink()
    with pytest.raises(
        UserError, match=r"none of the 2 images of split 'train' .* looked for at .*labels.train.a\.txt"
    ):
        read_detection_set(root, "train")


@pytest.mark.parametrize(
    ("line", "box"),
    [
        ("0 0.1 0.2 0.5 0.2 0.3 0.8", [4, 6, 20, 24]),  # a triangle
        ("0 0.2 0.2 0.5 0.1 0.6 0.5 0.3 0.6", [8, 3, 24, 18]),  # an oriented box
        ("0 0.5 0.5 0 0.2", [20, 12, 20, 18]),  # of no width, kept
    ],
)
def test_lines(root: Path, line: str, box: list[float]) -> None:
    (root / "labels" / "train" / "b.txt").write_text(line)
    assert read_detection_set(root, "train").records[1].boxes.tolist() == [pytest.approx(box, abs=1e-12)]


def test_key_points_are_passed_over(root: Path) -> None:
    """Without kpt_shape this line would be a polygon."""
    (root / "data.yaml").write_text(YAML + "kpt_shape: [2, 2]\n")
    for path in (root / "labels" / "train").iterdir():
        path.write_text("0 0.5 0.5 0.25 0.5 0.1 0.1 0.9 0.9")
    assert read_detection_set(root, "train").records[1].boxes.tolist() == [[15, 7.5, 25, 22.5]]
    (root / "labels" / "train" / "a.txt").write_text("0 0.5 0.5 0.25 0.5")
    with pytest.raises(UserError, match=r"line 1 of .*a\.txt has 5 columns: by kpt_shape it must have 9"):
        read_detection_set(root, "train")


@pytest.mark.parametrize(
    ("names", "ids", "expected"),
    [
        ("[cat, dog]", (0, 1), ("cat", "dog")),
        ("{0: cat, 1: dog}", (0, 1), ("cat", "dog")),
        ("{7: horse, 1: dog, 0: 5}", (0, 1, 7), ("5", "dog", "horse")),
        ("{'1': dog, '0': cat}", (0, 1), ("cat", "dog")),
        ("[cat, dog]\nnc: 2", (0, 1), ("cat", "dog")),
    ],
)
def test_names(root: Path, names: str, ids: tuple[int, ...], expected: tuple[str, ...]) -> None:
    (root / "data.yaml").write_text(f"train: images/train\nnames: {names}\n")
    class_map = read_detection_set(root, "train").class_map
    assert (class_map.ids, class_map.names) == (ids, expected)


@pytest.mark.parametrize(
    "train",
    [
        "train: images/train",
        "train: ./images/train/",
        "path: .\ntrain: images/train",
        "path: images\ntrain: train",
        "path: {root}\ntrain: images/train",
        "train: {root}/images/train",
        "train: [images/train]",
        "train: ../images/train",  # as some exports write it
        "train: images\\train",
        "path: ../elsewhere/set\ntrain: images/train",  # a note tells
        "train: list.txt",
        "train: [list.txt]",
        "train: lists/list.txt",
    ],
)
def test_where_images_are(root: Path, train: str) -> None:
    (root / "lists").mkdir()
    (root / "list.txt").write_text(f"./images/train/a.png\n\n{root}/images/train/b.png\n")
    (root / "lists" / "list.txt").write_text("../images/train/a.png\nimages/train/b.png\n")
    (root / "data.yaml").write_text(f"{train.format(root=root)}\nnames: [cat, dog]\n")
    data = read_detection_set(root, "train")
    assert [(r.path.stem, len(r.labels)) for r in data.records] == [("a", 2), ("b", 1)]
    assert data.notes == (
        [f"path: ../elsewhere/set of {root / 'data.yaml'} is not a folder in {root}: its own folder is taken"]
        if "elsewhere" in train
        else []
    )


def test_several_folders_and_folders_in_folders(root: Path, write_image: Callable[..., Path]) -> None:
    write_image(root / "images" / "train" / "deep" / "d.png")
    write_image(root / "images" / "train" / ".hidden" / "e.png")
    (root / "data.yaml").write_text("train: [images/val, images/train]\nnames: [cat, dog]\n")
    assert stems(root) == ["c", "a", "b", "d"]


@pytest.mark.parametrize("key", ["val", "valid", "validation"])
def test_splits_by_other_names(root: Path, key: str) -> None:
    (root / "data.yaml").write_text(
        f"train: images/train\n{key}: images/val\ntest:\ndownload: x.zip\nnames: [cat, dog]"
    )
    assert stems(root, "val") == ["c"]
    assert detection_splits(root) == ["train", key]
    with pytest.raises(UserError, match=rf"data\.yaml has no split 'test': its splits are train, {key}"):
        read_detection_set(root, "test")


def test_the_file_itself(root: Path) -> None:
    (root / "data.yaml").rename(root / "mine.yaml")
    assert stems(root / "mine.yaml", "val") == ["c"]
    assert detection_splits(root / "mine.yaml") == ["train", "val"]


def test_relative_root(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    (root / "data.yaml").write_text(f"train: {root}/images/train\nnames: [cat, dog]\n")
    assert stems(Path(), "train") == ["a", "b"]


def test_labels_beside_images(root: Path) -> None:
    """Where no folder is called images."""
    for folder in ("train", "val"):
        (root / "images" / folder).rename(root / folder)
        for path in (root / "labels" / folder).iterdir():
            path.rename(root / folder / path.name)
    (root / "data.yaml").write_text("train: train\nnames: [cat, dog]\n")
    assert [len(record.labels) for record in read_detection_set(root, "train").records] == [2, 1]


def test_the_last_folder_of_images_counts(root: Path) -> None:
    (root / "outer" / "images").mkdir(parents=True)
    (root / "images").rename(root / "outer" / "images" / "images")
    (root / "labels").rename(root / "outer" / "images" / "labels")
    (root / "data.yaml").write_text("train: outer/images/images/train\nnames: [cat, dog]\n")
    assert [len(record.labels) for record in read_detection_set(root, "train").records] == [2, 1]


@pytest.mark.parametrize("prefix", ["data/", ""])
def test_darknet(root: Path, prefix: str) -> None:
    for folder in ("train", "val"):
        for path in (root / "labels" / folder).iterdir():
            path.rename(root / "images" / folder / path.name)
    (root / "data.yaml").unlink()
    (root / "obj.data").write_text(
        f"classes = 2\ntrain = {prefix}train.txt\nnames = {prefix}obj.names\nbackup = images/"
    )
    (root / "obj.names").write_text("cat\ndog\n")
    (root / "train.txt").write_text(f"{prefix}images/train/b.png\n{prefix}images/train/a.png\n")
    data = read_detection_set(root, "train")
    assert [(r.path.stem, len(r.labels)) for r in data.records] == [("b", 1), ("a", 2)]
    assert data.class_map.names == ("cat", "dog")
    assert detection_splits(root) == ["train"]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("2 0.5 0.5 0.1 0.1", r"line 2 of .*a\.txt has class 2, known are 0, 1: correct it or add it to data\.yaml"),
        ("cat 0.5 0.5 0.1 0.1", r"line 2 of .*a\.txt has the class 'cat': it must be a whole number"),
        ("0.5 0.5 0.5 0.1 0.1", "has the class '0.5': it must be a whole number"),
        ("-1 0.5 0.5 0.1 0.1", "has the class '-1': it must be a whole number"),
        ("nan 0.5 0.5 0.1 0.1", "has the class 'nan': it must be a whole number"),
        ("1e300 0.5 0.5 0.1 0.1", "has the class '1e300': it must be a whole number"),
        ("0 0.5 0.5 0.1", r"has 4 columns: it must be class cx cy width height, or class and 3 or more points$"),
        ("0 0.5 0.5 0.1 0.1 0.9", r"has 6 columns: .* \(a sixth, a confidence, belongs to predictions\)$"),
        ("0 0.5 0.5 0.1 0.1 0.9 0.1 0.1", "has 8 columns"),
        ("0 0.5 0.5 0.1 wide", "line 2 of .* all columns must be finite numbers"),
        ("0 0.5 0.5 0.1 nan", "all columns must be finite numbers"),
        ("0 0.5 0.5 0.1 inf", "all columns must be finite numbers"),
        ("0 20 15 10 10", r"is '0 20 15 10 10': it needs fractions of the image in \[0, 1\], no pixels"),
        ("0 0.5 0.5 -0.1 0.1", "has a box of negative size -0.1 x 0.1"),
        ("0,0.5,0.5,0.1,0.1", "has the class|has 1 columns"),
    ],
)
def test_broken_lines(root: Path, line: str, message: str) -> None:
    (root / "labels" / "train" / "a.txt").write_text(f"0 0.5 0.5 0.1 0.1\n{line}\n")
    with pytest.raises(UserError, match=message):
        read_detection_set(root, "train")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("names: [a\ntrain: x", r"data\.yaml is broken YAML at line 2"),
        ("a: !!timestamp x", r"data\.yaml is broken YAML"),
        ("[" * 5000, r"data\.yaml is broken YAML"),
        ("- a", r"data\.yaml must hold keys such as train, val and names, got list"),
        ("", r"data\.yaml must hold keys .* got NoneType"),
        ("train: images/train", r"data\.yaml has no class names: add 'names'"),
        ("train: images/train\nnames: []", "has no class names"),
        ("train: images/train\nnames: cat", "has no class names"),
        ("train: images/train\nnames: [no]", "class 0 of .* has the name False: give it a text, in quotes"),
        ("train: images/train\nnames: [[a]]", "class 0 of .* has the name a list"),
        ("train: images/train\nnames: {x: a}", "has the class 'x': the keys of names must be whole numbers"),
        ("train: images/train\nnames: {-1: a}", "has the class -1: the keys of names must be whole numbers"),
        ("train: images/train\nnames: {1: a, '1': b}", "class 1 occurs more than once in the names"),
        ("train: images/train\nnames: [a, b]\nnc: 3", r"says nc: 3 but has 2 names"),
        ("train: images/train\nnames: [a, b]\nkpt_shape: 17", "kpt_shape of .* must be two whole numbers"),
        ("train: 5\nnames: [a, b]", "has no split 'train': its splits are none"),
        ("train: [images/train, 5]\nnames: [a, b]", "'train' of .* must be a folder, a list file or a list of these"),
        ("train: images/tain\nnames: [a, b]", "'train' of .* is images/tain, which does not exist"),
        ("train: labels\nnames: [a, b]", "split 'train' of .* holds 0 images"),
        ("train: [images, images/train]\nnames: [a, b]", r"image .*a\.png occurs more than once in split 'train'"),
        ("train: /etc\nnames: [a, b]", "'train' of .* points outside the data set .'/etc'"),
        ("train: C:\\images\nnames: [a, b]", "points outside the data set"),
        ("train: images/../../x\nnames: [a, b]", "points outside the data set"),
        ("train: {root}/../x\nnames: [a, b]", "points outside the data set"),
        ("train: list.txt\nnames: [a, b]", r"line 1 of .*list\.txt points outside the data set .'\.\./\.\./a\.png'"),
        (
            "train: gone.txt\nnames: [a, b]",
            r"1 of the 2 images listed in .*gone\.txt are missing .*images.train.x\.png",
        ),
        ("train: images/" + "x" * 5000 + "\nnames: [a, b]", "which does not exist"),
        ('train: "a\\0b"\nnames: [a, b]', "which does not exist"),
    ],
)
def test_broken_data_yaml(root: Path, text: str, message: str) -> None:
    (root / "list.txt").write_text("../../a.png\n")
    (root / "gone.txt").write_text("images/train/a.png\nimages/train/x.png\n")
    (root / "data.yaml").write_text(text.replace("{root}", str(root)))
    with pytest.raises(UserError, match=message):
        read_detection_set(root, "train")


def test_a_small_yaml_of_an_endless_list(root: Path) -> None:
    """Aliases of aliases: as text it would fill the memory."""
    lines = ["a0: &a0 [x]"] + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30)]
    (root / "data.yaml").write_text("\n".join([*lines, "names: [*a29]", "train: *a29"]))
    with pytest.raises(UserError, match=r"class 0 of .* has the name a list"):
        read_detection_set(root, "train")


def test_sizes_are_bounded(root: Path) -> None:
    for path, bound in ((root / "labels" / "train" / "a.txt", 8 * 2**20), (root / "data.yaml", 2**20)):
        os.truncate(path, bound + 1)
        with pytest.raises(UserError, match=rf"{path.name} is larger than {bound} bytes"):
            read_detection_set(root, "train")


def test_other_encodings(root: Path) -> None:
    (root / "data.yaml").write_bytes("train: images/train\nnames: [Äpfel, b]".encode("latin-1"))
    with pytest.raises(UserError, match=r"data\.yaml is not UTF-8 .* save it as UTF-8"):
        read_detection_set(root, "train")
    (root / "data.yaml").write_bytes("\ufefftrain: images/train\nnames: [Äpfel, 犬]".encode())
    assert read_detection_set(root, "train").class_map.names == ("Äpfel", "犬")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_anything_is_read_or_refused(root: Path, data: st.DataObject) -> None:
    """Broken files end in a sentence, never in another error."""
    words = st.sampled_from(["0", "1", "0.5", "-1", "nan", "1e400", "x", "\n", "\t", "\0", "é", "9" * 400, "0_1"])
    yaml_words = st.sampled_from(
        ["train: ", "names: ", "path: ", "nc: ", "[", "]", "{", "}", "a", "1", "&a ", "*a ", "\n", "..", "/", "images",
         "!!int ", "!!float ", "2024-13-45", "0x_", "\0", ": ", "- ", ", ", "? "]
    )  # fmt: skip
    (root / "labels" / "train" / "a.txt").write_text(" ".join(data.draw(st.lists(words, max_size=14))))
    text = data.draw(st.one_of(st.just(YAML), st.lists(yaml_words, max_size=16).map("".join), st.text(max_size=40)))
    (root / "data.yaml").write_text(text, encoding="utf-8", errors="surrogatepass")
    with contextlib.suppress(UserError):
        assert len(read_detection_set(root, "train")) > 0
