"""The offline digit set."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from vitdet.data import digits
from vitdet.data.digits import draw_scene, make_digits
from vitdet.data.formats import read_detection_set
from vitdet.data.images import decode_image
from vitdet.errors import UserError


@pytest.fixture(scope="module")
def digit_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("digits") / "set"
    said = make_digits(root, train=30, val=10, size=(128, 160), seed=4)
    assert said == f"wrote 30 + 10 digit scenes of 128 x 160 pixels to {root}"
    return root


def contents(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_it_reads_as_coco(digit_set: Path) -> None:
    train, val = read_detection_set(digit_set, "train"), read_detection_set(digit_set, "val")
    assert (len(train), len(val)) == (30, 10)
    assert train.class_map == val.class_map
    assert (train.class_map.ids, train.class_map.names) == (tuple(range(1, 11)), tuple("0123456789"))
    assert train.notes == val.notes == []  # no box is empty or leaves its image
    for record in train.records:
        assert decode_image(record.path).shape == (128, 160, 3)
        assert record.size == (128, 160)
        assert len(record.boxes) <= 8
    sides = np.concatenate([record.boxes[:, 2:] - record.boxes[:, :2] for record in train.records]).max(axis=1)
    assert sides.min() >= 16
    assert sides.max() <= 80


def test_boxes_are_tight() -> None:
    """On a flat background without noise, the ink of a lone digit fills its box to the edge and does not leave it."""
    scans, labels = digits._load_scans()
    checked = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(digits, "MAX_DIGITS", 1)
            patch.setattr(digits, "_background", lambda size, rng: np.full((*size, 3), 128, dtype=np.float32))
            image, shown = draw_scene(scans, labels, size=(128, 128), rng=rng)
        if not shown:
            continue
        difference = np.abs(image.astype(float).mean(axis=2) - 128)
        rows, columns = np.nonzero(difference > 25)  # noise of 6 levels, averaged over channels, is 3.5
        x0, y0, x1, y1 = shown[0].box
        found = (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1)
        assert np.abs(np.subtract(found, (x0, y0, x1, y1))).max() <= 1
        checked += 1
    assert checked > 30


def test_some_scenes_are_empty() -> None:
    scans, labels = digits._load_scans()
    counts = [len(draw_scene(scans, labels, size=(96, 96), rng=np.random.default_rng(seed))[1]) for seed in range(200)]
    assert 1 <= counts.count(0) <= 16
    assert max(counts) >= 5


def test_train_and_val_share_no_scan(digit_set: Path) -> None:
    names = {
        split: {path.name for path in (digit_set / "classification" / split).rglob("*.png")}
        for split in ("train", "val")
    }
    assert len(names["train"]) + len(names["val"]) == 1797
    assert not names["train"] & names["val"]
    assert len(names["val"]) == round(0.2 * 1797)


def test_scenes_draw_from_the_scans_of_their_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each split is drawn from scans that the other never sees."""
    pools = []

    def watched(scans: np.ndarray, labels: np.ndarray, **options: object) -> tuple[np.ndarray, list]:
        pools.append({scan.tobytes() for scan in scans})
        return np.zeros((96, 96, 3), dtype=np.uint8), []

    monkeypatch.setattr(digits, "draw_scene", watched)
    make_digits(tmp_path / "set", train=1, val=1, size=(96, 96), classification=False)
    assert len(pools) == 2
    assert not pools[0] & pools[1]
    assert not (tmp_path / "set" / "classification").exists()


def test_single_digits_are_labelled(digit_set: Path) -> None:
    _, labels = digits._load_scans()
    paths = list((digit_set / "classification").glob("*/*/*.png"))
    assert all(labels[int(path.stem)] == int(path.parent.name) for path in paths)
    assert decode_image(paths[0]).shape == (32, 32, 3)


def test_the_same_arguments_give_the_same_files(digit_set: Path, tmp_path: Path) -> None:
    make_digits(tmp_path / "again", train=30, val=10, size=(128, 160), seed=4)
    assert contents(tmp_path / "again") == contents(digit_set)
    make_digits(tmp_path / "other", train=1, val=1, size=(128, 160), seed=5, classification=False)
    name = "train/000001.jpg"
    assert contents(tmp_path / "other")[name] != contents(digit_set)[name]


def test_what_is_there_is_kept(digit_set: Path) -> None:
    before = contents(digit_set)
    said = make_digits(digit_set, train=30, val=10, size=(128, 160), seed=4)
    assert said == f"{digit_set} already holds this digit set (30 + 10 scenes)"
    with pytest.raises(UserError, match="is not empty and holds something else: choose another folder"):
        make_digits(digit_set, train=31, val=10, size=(128, 160), seed=4)
    assert contents(digit_set) == before


def test_nothing_half_written_remains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object, **options: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(digits, "_write_singles", fail)
    with pytest.raises(OSError, match="disk full"):
        make_digits(tmp_path / "set", train=2, val=1, size=(96, 96))
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_may_be_filled(tmp_path: Path) -> None:
    root = tmp_path / "empty"
    root.mkdir()
    make_digits(root, train=2, val=1, size=(96, 96), classification=False)
    assert json.loads((root / "digits.json").read_text())["train"] == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [({"train": 0}, "at least 1 scene a split, got train=0"), ({"size": (64, 128)}, "64 x 128 pixels are too small")],
)
def test_wrong_arguments(tmp_path: Path, options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_digits(tmp_path / "set", **options)
