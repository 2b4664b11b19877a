"""Images that keep their proportions: sizes, padding, targets, DETR's crop."""

from __future__ import annotations

import pickle
from functools import partial

import numpy as np
import pytest
import torch

from vitdet.data.loaders import collate, stack_images
from vitdet.data.transforms import EvalTransform, TrainTransform, proportional, to_input
from vitdet.structures import Preprocessing

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((480, 640), (800, 1066)),  # int(800 · 640 / 480)
        ((640, 480), (1066, 800)),
        ((500, 500), (800, 800)),
        ((800, 1000), (800, 1000)),
        ((375, 1242), (402, 1331)),  # round(1333 · 375 / 1242) = 402, int(402 · 1242 / 375)
        ((1, 4000), (1, 1333)),  # where theirs would be 0 pixels high
    ],
)
def test_sizes_are_those_of_the_published_code(size: tuple[int, int], expected: tuple[int, int]) -> None:
    assert proportional(size, shorter=800, longest=1333) == expected


def test_only_square_sizes_name_a_shorter_side() -> None:
    for options in ({"size": (600, 800), "longest": 1333}, {"size": (800, 800), "longest": 700}):
        with pytest.raises(ValueError, match="keep their proportions"):
            Preprocessing(**options)
    with pytest.raises(ValueError, match="no crop"):
        Preprocessing((800, 800), longest=1333, crop=0.9)
    kept = Preprocessing((800, 800), longest=1333)
    assert Preprocessing.from_dict(kept.to_dict()) == kept


def test_evaluation_and_inference_give_the_same_pixels() -> None:
    image = np.random.default_rng(0).integers(0, 256, (40, 90, 3), dtype=np.uint8)
    boxes = np.array([[10, 5, 50, 35]], dtype=np.float32)
    evaluated, moved, _ = EvalTransform(longest=100)(image, boxes, np.zeros(1, dtype=np.int64), size=(60, 60))
    assert evaluated.shape == (44, 99, 3)  # round(100 · 40 / 90), int(44 · 90 / 40)
    assert np.array_equal(evaluated, to_input(image, Preprocessing((60, 60), longest=100)))
    assert moved[0] == pytest.approx([11, 5.5, 55, 38.5])


def sample(height: int, width: int, boxes: list[list[float]]) -> tuple[np.ndarray, dict]:
    image = np.full((height, width, 3), 200, dtype=np.uint8)
    target = {
        "boxes": np.array(boxes, dtype=np.float32).reshape(-1, 4),
        "labels": np.zeros(len(boxes), dtype=np.int64),
        "image_id": height,
        "orig_size": (2 * height, 2 * width),
    }
    return image, target


def test_a_batch_is_padded_at_the_right_and_below() -> None:
    batch = collate([sample(4, 8, [[0, 0, 4, 4]]), sample(6, 3, [])], pad=True)
    assert batch["images"].shape == (2, 3, 6, 8)
    assert batch["sizes"].tolist() == [[4, 8], [6, 3]]
    inside = torch.zeros(2, 6, 8, dtype=torch.bool)
    inside[0, :4], inside[1, :, :3] = True, True
    assert torch.equal(batch["images"] == 200, inside[:, None].expand(-1, 3, -1, -1))
    assert batch["targets"].boxes[0, 0].tolist() == [0.25, 0.5, 0.5, 1.0]  # of the image, not of the batch
    normal = Preprocessing((4, 4), MEAN, STD, longest=8).normalize(batch["images"], batch["sizes"])
    assert torch.equal(normal != 0, inside[:, None].expand(-1, 3, -1, -1))
    plain = Preprocessing((4, 4), MEAN, STD).normalize(batch["images"])
    assert torch.equal(normal[0, :, :4], plain[0, :, :4])


def test_images_of_one_size_are_not_padded() -> None:
    batch = collate([sample(4, 8, []), sample(4, 8, [])], pad=True)
    assert "sizes" not in batch
    with pytest.raises(ValueError, match="one size"):
        stack_images([np.zeros((4, 8, 3), np.uint8), np.zeros((6, 3, 3), np.uint8)])


def test_training_draws_a_shorter_side_for_each_image() -> None:
    transform = TrainTransform(hflip=0.5, longest=120, shorter=(40, 50))
    image = np.zeros((100, 150, 3), dtype=np.uint8)
    boxes, labels = np.array([[0, 0, 150, 100]], dtype=np.float32), np.zeros(1, dtype=np.int64)
    sizes = set()
    for seed in range(20):
        shown, moved, _ = transform(image, boxes, labels, size=(80, 80), rng=np.random.default_rng(seed))
        sizes.add(shown.shape[:2])
        assert moved[0].tolist() == pytest.approx([0, 0, shown.shape[1], shown.shape[0]], abs=1e-3)
    assert sizes == {(40, 60), (50, 75)}


def test_a_quarter_turn_keeps_the_proportions() -> None:
    transform = TrainTransform(rotate90=1.0, longest=120)
    image = np.zeros((100, 150, 3), dtype=np.uint8)
    boxes, labels = np.array([[0, 0, 150, 100]], dtype=np.float32), np.zeros(1, dtype=np.int64)
    shapes = {
        transform(image, boxes, labels, size=(40, 40), rng=np.random.default_rng(seed))[0].shape[:2]
        for seed in range(20)
    }
    assert shapes == {(40, 60), (60, 40)}


def test_the_crop_keeps_what_reaches_into_it() -> None:
    """Its sides are 384 to 600 of what is 400, 500 or 600 along the shorter side; a box of the whole stays."""
    transform = TrainTransform(size_crop=1.0, longest=2000)
    image = np.zeros((300, 900, 3), dtype=np.uint8)
    image[:, :, 0] = np.linspace(0, 250, 900, dtype=np.uint8)
    boxes = np.array([[0, 0, 900, 300], [0, 0, 5, 300], [895, 0, 900, 300]], dtype=np.float32)
    labels = np.arange(3, dtype=np.int64)
    widths = []
    for seed in range(30):
        shown, moved, kept = transform(image, boxes, labels, size=(300, 300), rng=np.random.default_rng(seed))
        assert 0 in kept.tolist()
        assert len(kept) < 3  # both edges are never seen together
        assert moved[0].tolist() == pytest.approx([0, 0, shown.shape[1], shown.shape[0]], abs=1e-3)
        ratio = shown.shape[1] / shown.shape[0]
        assert 384 / 600 - 0.02 <= ratio <= 600 / 384 + 0.02
        span = int(shown[:, -1, 0].max()) - int(shown[:, 0, 0].min())  # of 250 over 900 pixels
        widths.append(span / 250 * 900)
    assert 384 * 300 / 600 - 10 <= min(widths) < max(widths) <= 600 * 300 / 400 + 10


def test_collate_can_go_to_workers() -> None:
    assert pickle.loads(pickle.dumps(partial(collate, pad=True))).keywords == {"pad": True}
