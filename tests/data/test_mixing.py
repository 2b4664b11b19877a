"""Mosaic and mixup."""

from __future__ import annotations

import numpy as np
import pytest

from vitdet.data.mixing import MIN_VISIBLE, mixup, mosaic
from vitdet.data.transforms import Sample


def plain(label: int, size: tuple[int, int] = (90, 150)) -> Sample:
    """An image of one gray level that tells its label, with a white rectangle as its object."""
    image = np.full((*size, 3), 40 * (label + 1), dtype=np.uint8)
    image[20:60, 30:110] = 255
    return image, np.array([[30, 20, 110, 60]], dtype=np.float32), np.array([label])


def test_mosaic_shows_all_four_around_a_centre() -> None:
    samples = [plain(label, size=(90 + label, 150)) for label in range(4)]
    seen: set[int] = set()
    for seed in range(30):
        image, boxes, labels = mosaic(samples, size=(100, 160), rng=np.random.default_rng(seed))
        assert image.shape == (100, 160, 3)
        assert image.dtype == np.uint8
        assert boxes.dtype == np.float32
        assert boxes.min(initial=0) >= 0
        assert (boxes <= [160, 100, 160, 100]).all()
        assert len(boxes) == len(labels)
        seen |= set(labels.tolist())
        # The gray levels keep to their quadrants: the background of each image never leaves its corner.
        for label, rows, columns in ((0, slice(70, None), ...), (3, slice(None, 30), ...), (1, ..., slice(None, 48))):
            part = image[rows] if columns is ... else image[:, columns]
            assert (part == 40 * (label + 1)).all(axis=2).mean() < 0.02  # an edge may pass through the level
    assert seen == {0, 1, 2, 3}


def test_mosaic_boxes_lie_on_their_objects() -> None:
    samples = [plain(label) for label in range(4)]
    checked = 0
    for seed in range(30):
        image, boxes, _ = mosaic(samples, size=(100, 160), rng=np.random.default_rng(seed))
        white = (image == 255).all(axis=2)
        for x0, y0, x1, y1 in boxes:
            inner = white[int(np.ceil(y0)) + 1 : int(y1) - 1, int(np.ceil(x0)) + 1 : int(x1) - 1]
            assert inner.all()
            checked += inner.size > 0
        # and no object without its box: what is white outside all boxes is less than boxes may lose
        covered = np.zeros_like(white)
        for x0, y0, x1, y1 in boxes:
            covered[max(int(y0) - 1, 0) : int(np.ceil(y1)) + 1, max(int(x0) - 1, 0) : int(np.ceil(x1)) + 1] = True
        assert (white & ~covered).sum() <= MIN_VISIBLE * 4 * (80 * 40) * (160 / 150) * (100 / 90)
    assert checked > 60


def test_mosaic_scales_vary() -> None:
    widths = []
    for seed in range(60):
        _, boxes, labels = mosaic(
            [plain(label) for label in range(4)], size=(100, 160), rng=np.random.default_rng(seed)
        )
        widths += [box[2] - box[0] for box, label in zip(boxes, labels, strict=True) if label == 0 and box[0] > 0]
    natural = 80 * 160 / 150
    assert min(widths) < 0.6 * natural
    assert max(widths) > 0.7 * natural


def test_mosaic_drops_what_is_hardly_visible() -> None:
    """A box over the whole of a far larger image keeps at most the quadrant's share; a sliver is dropped."""
    image = np.zeros((100, 100, 3), dtype=np.uint8)
    sliver = np.array([[10, 10, 11, 90]], dtype=np.float32)  # under 2 pixels at any scale
    samples = [(image, sliver, np.array([0]))] * 4
    for seed in range(10):
        assert len(mosaic(samples, size=(100, 100), rng=np.random.default_rng(seed))[1]) == 0


def test_mosaic_without_objects() -> None:
    empty = (plain(0)[0], np.zeros((0, 4), dtype=np.float32), np.zeros(0, dtype=np.int64))
    image, boxes, labels = mosaic([empty] * 4, size=(64, 64), rng=np.random.default_rng(0))
    assert image.shape == (64, 64, 3)
    assert boxes.shape == (0, 4)
    assert labels.shape == (0,)


def test_mosaic_takes_four() -> None:
    with pytest.raises(ValueError, match="takes 4 samples, got 3"):
        mosaic([plain(0)] * 3, size=(64, 64), rng=np.random.default_rng(0))


def test_mixup_blends_and_joins() -> None:
    first, second = plain(0), plain(4)  # gray levels 40 and 200
    weights = []
    for seed in range(200):
        image, boxes, labels = mixup(first, second, np.random.default_rng(seed))
        weights.append((200 - int(image[0, 0, 0])) / 160)
        assert image[30, 40].tolist() == [255, 255, 255]
        assert boxes.tolist() == [*first[1].tolist(), *second[1].tolist()]
        assert labels.tolist() == [0, 4]
    assert np.mean(weights) == pytest.approx(0.5, abs=0.03)
    assert np.std(weights) == pytest.approx(1 / np.sqrt(4 * 17), abs=0.02)  # of Beta(8, 8)


def test_mixup_takes_equal_sizes() -> None:
    with pytest.raises(ValueError, match=r"equal size, got \(90, 150, 3\) and \(80, 150, 3\)"):
        mixup(plain(0), plain(1, size=(80, 150)), np.random.default_rng(0))
