"""The data set: what a key gives, and that nothing but the key and the seed decides it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from vitdet.data import detection
from vitdet.data.detection import DetectionDataset, SampleKey
from vitdet.data.images import decode_image
from vitdet.data.records import DetectionSet
from vitdet.data.transforms import EvalTransform, TrainTransform, resize
from vitdet.errors import UserError

MakeSet = Callable[..., DetectionSet]
KEY = SampleKey(index=2, epoch=0, size=(48, 64), strong=True)


def strong_transform() -> TrainTransform:
    return TrainTransform(photometric=0.5, zoom_out=0.5, iou_crop=0.8, hflip=0.5, vflip=0.5, rotate90=0.5)


def equal(first: tuple[np.ndarray, dict[str, Any]], second: tuple[np.ndarray, dict[str, Any]]) -> bool:
    same = all(np.array_equal(first[1][key], second[1][key]) for key in ("boxes", "labels"))
    return same and np.array_equal(first[0], second[0]) and first[1]["image_id"] == second[1]["image_id"]


def test_an_evaluation_sample(make_set: MakeSet) -> None:
    data = make_set()
    image, target = DetectionDataset(data, transform=EvalTransform())[KEY]
    record = data.records[2]
    assert np.array_equal(image, resize(decode_image(record.path), (48, 64)))
    height, width = record.size
    assert target["boxes"] == pytest.approx(record.boxes * ([64 / width, 48 / height] * 2), rel=1e-5)
    assert target["boxes"].dtype == np.float32
    assert target["labels"].dtype == np.int64
    assert np.array_equal(target["labels"], record.labels)
    assert (target["image_id"], target["orig_size"]) == (102, record.size)


def test_crowd_and_empty_boxes_are_no_targets(make_set: MakeSet) -> None:
    data = make_set()
    record = data.records[2]
    boxes = record.boxes.copy()
    boxes[0, 2] = boxes[0, 0]
    crowd = np.array([False, True, False])
    data.records[2] = replace(record, boxes=boxes, crowd=crowd)
    _, target = DetectionDataset(data, transform=EvalTransform())[KEY]
    assert target["labels"].tolist() == [record.labels[2]]
    assert target["boxes"].shape == (1, 4)


def test_the_key_decides(make_set: MakeSet) -> None:
    """Two data sets agree whatever either was asked before; epoch, index and seed each make a difference."""
    data = make_set()
    options: dict[str, Any] = {"transform": strong_transform(), "mosaic": 0.5, "mixup": 0.5}
    first, second = DetectionDataset(data, **options), DetectionDataset(data, **options)
    keys = [SampleKey(index, epoch, (48, 64), True) for epoch in range(2) for index in range(6)]
    expected = {key: first[key] for key in keys}
    assert all(equal(second[key], expected[key]) for key in reversed(keys))
    assert not equal(expected[keys[0]], expected[keys[6]])
    assert not equal(DetectionDataset(data, seed=1, **options)[keys[0]], expected[keys[0]])


@pytest.mark.parametrize("option", ["mosaic", "mixup"])
def test_mixing_is_on_while_strong(make_set: MakeSet, option: str) -> None:
    data = make_set()
    plain = DetectionDataset(data, transform=EvalTransform())
    mixed = DetectionDataset(data, transform=EvalTransform(), **{option: 1.0})
    assert equal(mixed[KEY._replace(strong=False)], plain[KEY])
    assert equal(mixed[KEY._replace(mix=False)], plain[KEY])
    image, target = mixed[KEY]
    assert image.shape == (48, 64, 3)
    assert len(target["labels"]) > 3  # one image has 3
    assert target["image_id"] == 102
    assert target["orig_size"] == data.records[2].size
    with pytest.raises(ValueError, match=f"{option} is a probability, got 2"):
        DetectionDataset(data, transform=EvalTransform(), **{option: 2.0})


def test_the_cache_decodes_once(make_set: MakeSet, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(detection, "decode_image", lambda path: calls.append(path) or decode_image(path))
    data = make_set()
    cached = DetectionDataset(data, transform=strong_transform(), mosaic=0.5, cache=True)
    uncached = DetectionDataset(data, transform=strong_transform(), mosaic=0.5)
    cached.images.fill()
    assert len(calls) == 6
    keys = [SampleKey(index, epoch, (48, 64), True) for epoch in range(3) for index in range(6)]
    samples = [cached[key] for key in keys]
    assert len(calls) == 6
    assert all(equal(sample, uncached[key]) for sample, key in zip(samples, keys, strict=True))
    assert len(calls) >= 6 + 18


def test_the_cache_is_bounded(make_set: MakeSet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for the first two images of 40 x 60 and 44 x 58 pixels; the others are decoded each time."""
    calls = []
    monkeypatch.setattr(detection, "decode_image", lambda path: calls.append(path.stem) or decode_image(path))
    dataset = DetectionDataset(make_set(), transform=EvalTransform(), cache=True, cache_bytes=15_000)
    for _ in range(2):
        for index in range(4):
            dataset[KEY._replace(index=index)]
    assert calls == ["0", "1", "2", "3", "2", "3"]


def test_a_pickled_data_set_leaves_its_cache_behind(make_set: MakeSet) -> None:
    dataset = DetectionDataset(make_set(), transform=strong_transform(), cache=True)
    expected = dataset[KEY]
    dataset.images.fill()
    content = pickle.dumps(dataset)
    assert len(content) < 50_000  # the six images are 70,000 bytes
    assert equal(pickle.loads(content)[KEY], expected)


def test_an_unreadable_image_is_named(make_set: MakeSet) -> None:
    data = make_set()
    data.records[2].path.write_bytes(b"no image")
    with pytest.raises(UserError, match=r"2\.png is not an image"):
        DetectionDataset(data, transform=EvalTransform())[KEY]


def test_a_wrong_size_is_named(make_set: MakeSet) -> None:
    data = make_set()
    data.records[2] = replace(data.records[2], size=(56, 48))
    with pytest.raises(UserError, match=r"2\.png is 56 x 48 pixels \(upright\) but its annotation says 48 x 56"):
        DetectionDataset(data, transform=EvalTransform())[KEY]
