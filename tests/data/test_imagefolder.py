"""Image folders: names, labels, and what is wrong with a folder, in one sentence."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from torchvision.datasets import ImageFolder

from vitdet.data.formats import read_classification_set, read_detection_set
from vitdet.errors import UserError
from vitdet.structures import ClassMap

WriteImage = Callable[..., Path]
MakeFolder = Callable[..., Path]


@pytest.fixture
def make_folder(tmp_path: Path, write_image: WriteImage) -> MakeFolder:
    """Writes pictures (``train/cat/1.png`` …) below a root."""

    def make(*files: str, root: str = "set") -> Path:
        for seed, file in enumerate(files):
            write_image(tmp_path / root / file, (8, 8), seed=seed)
        return tmp_path / root

    return make


@pytest.fixture
def pets(make_folder: MakeFolder) -> Path:
    return make_folder("train/n2/b.png", "train/n2/a.png", "train/n1/deep/er/c.png", "train/n1/z.JPG", "val/n2/d.png")


def names_of(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


def test_imagenette(shared_data: Path) -> None:
    root = shared_data / "classification" / "imagenette96"
    train = read_classification_set(root, "train")
    val = read_classification_set(str(root), "validation" if (root / "validation").is_dir() else "val")
    assert (len(train), len(val), train.name, train.notes) == (9469, 1000, "image folder", [])
    assert train.class_map == val.class_map
    assert train.class_map.ids == tuple(range(10))
    known = json.loads((root.parent / "classes.json").read_text())
    assert train.class_map.names == tuple(known[name] for name in sorted(known))
    assert np.bincount(val.labels).tolist() == [100] * 10
    theirs = ImageFolder(root / "val").samples
    assert [(str(path), label) for path, label in zip(val.paths, val.labels, strict=True)] == theirs


def test_labels_follow_the_folder_names(pets: Path) -> None:
    data = read_classification_set(pets, "train")
    assert data.class_map == ClassMap(ids=(0, 1), names=("n1", "n2"))
    assert names_of(data.paths) == ["z.JPG", "c.png", "a.png", "b.png"]
    assert (data.labels.tolist(), data.labels.dtype) == ([0, 0, 1, 1], np.int64)
    assert (data.root, data.split, data.notes) == (pets, "train", [])


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("set/classes.json", '{"n2": "big_dog", "n1": "cat", "n3": "bird"}'),
        ("classes.json", '{"n2": "big_dog", "n1": "cat"}'),
        ("set/classes.txt", "n1 cat\nn2\tbig_dog\n\nlonely\n"),
        ("imagenet_names.txt", "n1 cat\nn2 big_dog\n"),
    ],
)
def test_human_names(pets: Path, file: str, text: str) -> None:
    """Underscores stay; labels still follow the folders."""
    (pets.parent / file).write_text(text)
    data = read_classification_set(pets, "train")
    assert data.class_map.names == ("cat", "big_dog")
    assert data.labels.tolist() == [0, 0, 1, 1]


def test_files_that_name_other_things_are_passed_over(pets: Path) -> None:
    (pets / "classes.json").write_text('["cat", "dog"]')
    (pets / "classes.txt").write_text("cat\ndog\n")
    (pets.parent / "some_names.txt").write_text("x1 apple\n")
    assert read_classification_set(pets, "train").class_map.names == ("n1", "n2")
    (pets.parent / "some_names.txt").write_text("n2 dog\n")
    data = read_classification_set(pets, "train")
    assert data.class_map.names == ("n1", "dog")
    assert data.notes == [f"{pets.parent / 'some_names.txt'} lacks n1: named after the folder"]
    (pets / "classes.json").write_text("{")
    with pytest.raises(UserError, match=r"classes\.json is broken JSON at line 1"):
        read_classification_set(pets, "train")


def test_a_given_class_map_decides(pets: Path) -> None:
    (pets / "classes.txt").write_text("n1 cat\nn2 dog\n")
    trained = ClassMap(ids=(4, 9, 7), names=("n2", "bird", "cat"))
    data = read_classification_set(pets, "train", class_map=trained)
    assert data.class_map is trained
    assert data.labels.tolist() == [2, 2, 0, 0]
    assert read_classification_set(pets, "val", class_map=trained).labels.tolist() == [0]  # one class of the three
    with pytest.raises(UserError, match=r"class 'dog' of .*n2 is not among the 2 known classes: did you mean 'dogs'\?"):
        read_classification_set(pets, "val", class_map=ClassMap(ids=(0, 1), names=("dogs", "cat")))
    many = ClassMap(ids=tuple(range(30)), names=tuple(f"c{i}" for i in range(30)))
    with pytest.raises(UserError, match=r"known classes: check the folder$"):
        read_classification_set(pets, "val", class_map=many)


@pytest.mark.parametrize("folder", ["val", "valid", "validation"])
def test_split_aliases(make_folder: MakeFolder, folder: str) -> None:
    root = make_folder(f"{folder}/a/1.png", f"{folder}/b/1.png")
    assert len(read_classification_set(root, "val")) == 2


def test_no_such_split(pets: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no split 'test': its splits are train, val$"):
        read_classification_set(pets, "test")
    (pets / "train" / "n1" / "z.JPG").unlink()
    sentence = re.escape(f"{pets / 'train'} has no split 'val': its folders (n2) hold images")
    with pytest.raises(UserError, match=sentence):
        read_classification_set(pets / "train", "val")
    with pytest.raises(UserError, match=re.escape(f"is the split 'train' itself: give {pets} as data.root")):
        read_classification_set(pets / "train", "train")
    (tmp_path / "bare").mkdir()
    with pytest.raises(UserError, match=r"no image folders are recognised .* images as train/CLASS/NAME\.jpg"):
        read_classification_set(tmp_path / "bare", "train")
    with pytest.raises(UserError, match=r"gone does not exist: check data\.root"):
        read_classification_set(tmp_path / "gone", "train")


def test_an_empty_class(pets: Path) -> None:
    (pets / "train" / "n3").mkdir()
    (pets / "train" / "n3" / "notes.txt").write_text("none yet")
    (pets / "train" / "n3" / ".hidden.png").write_bytes(b"x")
    with pytest.raises(UserError, match=r"class folder .*n3 holds 0 images: add some or remove the folder"):
        read_classification_set(pets, "train")


def test_one_class_is_too_few(pets: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="val has the one class 'n2': a classifier needs at least 2"):
        read_classification_set(pets, "val")
    (tmp_path / "set2" / "train").mkdir(parents=True)
    with pytest.raises(UserError, match="train has no class folders: put the images of each class into a folder"):
        read_classification_set(tmp_path / "set2", "train")


def test_names_that_differ_in_case(make_folder: MakeFolder) -> None:
    root = make_folder("train/Cat/1.png", "train/cat/1.png", "train/dog/1.png")
    if len(list((root / "train").iterdir())) < 3:
        pytest.skip("this file system does not tell upper from lower case")
    data = read_classification_set(root, "train")
    assert data.class_map.names == ("Cat", "cat", "dog")
    assert data.labels.tolist() == [0, 1, 2]
    assert data.notes == ["classes whose names differ in case only stay different classes: Cat, cat"]


def test_two_folders_of_one_name(pets: Path) -> None:
    (pets / "classes.txt").write_text("n1 crane\nn2 crane\n")
    names = read_classification_set(pets, "train").class_map.names
    assert names == ("crane (n1)", "crane (n2)")
    (pets / "classes.txt").write_text("n1 owl\nn2 n1\n")
    with pytest.raises(UserError, match=r"the folders n1 and n2 of .*train are both the class 'n1': keep one"):
        read_classification_set(pets, "train", class_map=ClassMap((0, 1), ("n1", "cat")))


def test_published_sets_have_their_own_names_and_labels(pets: Path) -> None:
    """ImageNet names two classes crane; a model of all of them is evaluated on folders called by synsets."""
    published = {"n0": "tench", "n1": "crane", "n2": "crane", "n3": "ewe"}
    whole = ClassMap((0, 1, 2, 3), tuple(published.values()))
    data = read_classification_set(pets, "val", class_map=whole, names=published)
    assert {path.parent.name: label for path, label in zip(data.paths, data.labels.tolist(), strict=True)}["n2"] == 2
    part = read_classification_set(pets, "train", names=published).class_map
    assert part.names == ("crane (n1)", "crane (n2)")
    exact = {"n1": "crane", "n2": "crane"}
    assert read_classification_set(pets, "train", names=exact).class_map.names == ("crane", "crane")


def test_hidden_and_loose_files(pets: Path, write_image: WriteImage) -> None:
    for file in (".cache/x.png", "n1/.thumbs/x.png", "n1/.x.png", "loose.png"):
        write_image(pets / "train" / file)
    (pets / "train" / "readme.txt").write_text("")
    data = read_classification_set(pets, "train")
    assert len(data) == 4
    assert data.notes == [f"1 image beside the class folders of {pets / 'train'} left out: no class"]


def test_links_do_not_lead_out(pets: Path, make_folder: MakeFolder) -> None:
    outside = make_folder("other/1.png", "other/2.png", root="outside")
    (pets / "train" / "n1" / "in.png").symlink_to(pets / "val" / "n2" / "d.png")
    (pets / "train" / "n1" / "out.png").symlink_to(outside / "other" / "1.png")
    (pets / "train" / "n1" / "folder").symlink_to(outside / "other")
    (pets / "train" / "n1" / "loop").symlink_to(pets / "train")
    data = read_classification_set(pets, "train")
    assert names_of(data.paths[:3]) == ["in.png", "z.JPG", "c.png"]
    assert data.notes == [f"3 links in {pets / 'train' / 'n1'} not followed: they lead out or to folders"]
    (pets / "train" / "n3").symlink_to(outside / "other")
    with pytest.raises(UserError, match=r"n3 holds 0 images \(1 link in .* not followed"):
        read_classification_set(pets, "train")
    (pets / "test").symlink_to(outside)
    with pytest.raises(UserError, match=r"test is a link that leads out of .*: give the folder it leads to"):
        read_classification_set(pets, "test")


def test_each_task_names_the_other_kind_of_data(pets: Path, shared_data: Path) -> None:
    with pytest.raises(UserError, match="is an image folder, one folder a class: a classifier trains on it"):
        read_detection_set(pets, "train")
    for name, kind in (("bccd", "Pascal VOC"), ("coco_mini", "COCO JSON")):
        with pytest.raises(UserError, match=f"{name} is a {kind} data set for detection: train a detector"):
            read_classification_set(shared_data / "detection" / name, "train")
    (pets / "data.yaml").write_text("names: [a]")
    with pytest.raises(UserError, match="is a YOLO data set for detection"):
        read_classification_set(pets, "train")
    with pytest.raises(UserError, match="is a single-file data set"):
        read_classification_set(pets / "data.yaml", "train")


def test_a_json_file_among_class_folders_is_no_annotation(make_folder: MakeFolder) -> None:
    root = make_folder("train/a/1.png", "train/b/1.png")
    (root / "train" / "licences.json").write_text("{}")
    assert len(read_classification_set(root, "train")) == 2
