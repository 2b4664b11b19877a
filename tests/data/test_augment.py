"""Augmentation for classification: what is cut, erased and recoloured, and how often."""

from __future__ import annotations

import math
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_image
from torchvision.transforms import InterpolationMode, RandomResizedCrop
from torchvision.transforms import functional as F

from vitdet.data import augment
from vitdet.data.augment import ClassificationEvalTransform, ClassificationTransform, erase, random_crop
from vitdet.data.randaugment import saturation, solarize
from vitdet.data.transforms import centre_crop, resize, to_input
from vitdet.structures import Preprocessing

SIZE = (48, 64)
PLAIN: dict[str, Any] = {"scale": (1.0, 1.0), "ratio": (4 / 3, 4 / 3), "hflip": 0.0}


@pytest.fixture(scope="module")
def picture() -> np.ndarray:
    """A photograph of 4:3, so that ``PLAIN`` shows all of it."""
    return np.ascontiguousarray(load_sample_image("flower.jpg")[:240:2, 160:480:2])  # (120, 160, 3)


def draws(transform: ClassificationTransform, image: np.ndarray, count: int = 12, **options: Any) -> list[np.ndarray]:
    return [transform(image, size=SIZE, rng=np.random.default_rng(seed), **options) for seed in range(count)]


def test_areas_and_ratios_of_random_crops() -> None:
    """Uniform shares and log-uniform ratios where all crops fit, any place alike, and always inside."""
    rng = np.random.default_rng(0)
    size = (600, 600)
    crops = np.array([random_crop(size, scale=(0.1, 0.5), ratio=(3 / 4, 4 / 3), rng=rng) for _ in range(4000)])
    top, left, height, width = crops.T.astype(float)
    assert (crops[:, :2] >= 0).all()
    assert (top + height).max() <= 600
    assert (left + width).max() <= 600
    shares = height * width / 600**2
    assert shares.min() == pytest.approx(0.1, abs=0.01)
    assert shares.max() == pytest.approx(0.5, abs=0.01)
    assert shares.mean() == pytest.approx(0.3, abs=0.01)
    assert shares.std() == pytest.approx(0.4 / math.sqrt(12), abs=0.005)
    ratios = np.log(width / height)
    assert ratios.mean() == pytest.approx(0, abs=0.01)
    assert ratios.std() == pytest.approx(2 * math.log(4 / 3) / math.sqrt(12), abs=0.01)
    for place, room in ((top, 600 - height), (left, 600 - width)):
        assert (place / room).mean() == pytest.approx(0.5, abs=0.02)
        assert (place / room).std() == pytest.approx(1 / math.sqrt(12), abs=0.02)


@pytest.mark.parametrize("size", [(50, 400), (400, 50), (90, 120)])
def test_random_crops_are_torchvisions(size: tuple[int, int]) -> None:
    """The same mean and spread of all four numbers, also where many draws are turned down."""
    rng, blank = np.random.default_rng(0), torch.zeros(3, *size)
    scale, ratio = (0.08, 1.0), (3 / 4, 4 / 3)
    ours = np.array([random_crop(size, scale=scale, ratio=ratio, rng=rng) for _ in range(1500)])
    theirs = np.array([RandomResizedCrop.get_params(blank, list(scale), list(ratio)) for _ in range(1500)])
    spread = theirs.std(axis=0)
    assert ours.mean(axis=0) == pytest.approx(theirs.mean(axis=0), abs=float(0.15 * spread.max()) + 0.1)
    assert ours.std(axis=0) == pytest.approx(spread, rel=0.12, abs=0.1)


@pytest.mark.parametrize("size", [(10, 300), (300, 10), (1, 7), (7, 1), (60, 60)])
def test_an_impossible_crop_is_taken_from_the_middle(size: tuple[int, int]) -> None:
    """As torchvision's: the largest part of an allowed ratio."""
    ratio = (3 / 4, 4 / 3) if size != (60, 60) else (3.0, 4.0)
    scale = (0.99, 1.0)
    ours = random_crop(size, scale=scale, ratio=ratio, rng=np.random.default_rng(0))
    theirs = RandomResizedCrop.get_params(torch.zeros(3, *size), list(scale), list(ratio))
    assert ours == tuple(theirs)


def test_a_crop_is_resized_as_torchvision_does(picture: np.ndarray) -> None:
    transform = ClassificationTransform(scale=(0.2, 0.4), hflip=0.0)
    for seed in range(4):
        result = transform(picture, size=(24, 32), rng=np.random.default_rng(seed))
        place = random_crop((120, 160), scale=(0.2, 0.4), ratio=(3 / 4, 4 / 3), rng=np.random.default_rng(seed))
        theirs = F.resized_crop(Image.fromarray(picture), *place, [24, 32], InterpolationMode.BICUBIC)
        assert np.abs(result.astype(int) - np.asarray(theirs)).max() <= 1
        assert result.flags.c_contiguous


def test_without_options_an_image_is_resized(picture: np.ndarray) -> None:
    for interpolation in ("bilinear", "bicubic"):
        [result] = draws(ClassificationTransform(**PLAIN, interpolation=interpolation), picture, 1)
        assert np.array_equal(result, resize(picture, SIZE, interpolation=interpolation))


def test_flips(picture: np.ndarray) -> None:
    straight = resize(picture, SIZE, interpolation="bicubic")
    results = draws(ClassificationTransform(**{**PLAIN, "hflip": 0.5}), picture, 60)
    flipped = [np.array_equal(result, straight[:, ::-1]) for result in results]
    assert all(flip or np.array_equal(result, straight) for flip, result in zip(flipped, results, strict=True))
    assert 15 < sum(flipped) < 45


def test_resize_only_is_evaluation(picture: np.ndarray) -> None:
    transform = ClassificationTransform(resize_only=True, hflip=0.0)
    result = transform(picture, size=(40, 40), rng=np.random.default_rng(0))
    assert np.array_equal(result, centre_crop(picture, (40, 40), share=1.0, interpolation="bicubic"))


STRONG: list[dict[str, Any]] = [
    {"rand_augment_layers": 2},
    {"three_augment": True},
    {"colour_jitter": 0.4},
    {"erasing": 1.0},
]


@pytest.mark.parametrize("options", STRONG, ids=str)
def test_strong_augmentation_can_be_off(picture: np.ndarray, options: dict[str, Any]) -> None:
    """Crop and flip are then those of a transform without it, and the input is never written to."""
    before = picture.copy()
    weak = draws(ClassificationTransform(), picture)
    off = draws(ClassificationTransform(**options), picture, strong=False)
    assert all(np.array_equal(a, b) for a, b in zip(weak, off, strict=True))
    strong = draws(ClassificationTransform(**options), picture)
    changed = [not np.array_equal(a, b) for a, b in zip(weak, strong, strict=True)]
    assert sum(changed) >= 5
    assert all(result.shape == (*SIZE, 3) and result.dtype == np.uint8 for result in strong)
    again = draws(ClassificationTransform(**options), picture)
    assert all(np.array_equal(a, b) for a, b in zip(strong, again, strict=True))
    assert np.array_equal(picture, before)


def test_the_whole_image_at_its_own_size_is_not_written_to(picture: np.ndarray) -> None:
    """Nothing is resized here, so the transform holds the cached image itself."""
    before = picture.copy()
    for options in STRONG:
        for seed in range(6):
            transform = ClassificationTransform(**PLAIN, **options)
            transform(picture, size=(120, 160), rng=np.random.default_rng(seed))
    assert np.array_equal(picture, before)


def test_three_augment(picture: np.ndarray) -> None:
    """Each of the three for a third of the images."""
    small = resize(picture, SIZE, interpolation="bicubic")
    gray, negative = saturation(small, 0.0), solarize(small, 128)
    results = draws(ClassificationTransform(**PLAIN, three_augment=True), picture, 150)
    grays = sum(np.array_equal(result, gray) for result in results)
    negatives = sum(np.array_equal(result, negative) for result in results)
    blurred = [r for r in results if not np.array_equal(r, gray) and not np.array_equal(r, negative)]
    for count in (grays, negatives, len(blurred)):
        assert 30 < count < 70
    sharpness = [cv2.Laplacian(result, cv2.CV_64F).std() for result in blurred]
    assert max(sharpness) <= cv2.Laplacian(small, cv2.CV_64F).std() * 1.01
    assert min(sharpness) < 0.5 * max(sharpness)


def test_colour_jitter_stays_within_its_range(picture: np.ndarray) -> None:
    flat = np.full((40, 40, 3), 100, dtype=np.uint8)  # contrast and saturation leave it
    transform = ClassificationTransform(colour_jitter=0.3)
    levels = np.array([result[0, 0, 0] for result in draws(transform, flat, 100)])
    assert levels.min() == pytest.approx(71, abs=3)
    assert levels.max() == pytest.approx(129, abs=3)
    assert (
        len({result.tobytes() for result in draws(ClassificationTransform(**PLAIN, colour_jitter=0.3), picture)}) > 10
    )


def test_erased_rectangles() -> None:
    """A rectangle of noise, 2 to 33 % of the image, of ratio 0.3 to 3.3; the rest of the image stays."""
    image = np.full((100, 140, 3), 250, dtype=np.uint8)
    rng = np.random.default_rng(0)
    shares, ratios, values = [], [], []
    for _ in range(400):
        result = erase(image, rng)
        changed = (result != image).any(axis=2)
        rows, columns = np.flatnonzero(changed.any(axis=1)), np.flatnonzero(changed.any(axis=0))
        height, width = rows[-1] - rows[0] + 1, columns[-1] - columns[0] + 1
        assert changed[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].mean() > 0.95
        shares.append(height * width / changed.size)
        ratios.append(height / width)
        values.append(result[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].reshape(-1, 3))
    assert min(shares) == pytest.approx(0.02, abs=0.008)
    assert max(shares) == pytest.approx(1 / 3, abs=0.02)
    assert min(ratios) == pytest.approx(0.3, abs=0.05)
    assert max(ratios) == pytest.approx(1 / 0.3, abs=0.4)
    noise = np.concatenate(values) / 255
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    normalised = (noise - mean) / std
    # Clipping to gray levels costs a little: two standard deviations fit below white.
    assert normalised.mean(axis=0) == pytest.approx(np.zeros(3), abs=0.03)
    assert normalised.std(axis=0) == pytest.approx(np.ones(3), abs=0.06)
    assert (image == 250).all()


def test_how_often_something_is_erased(picture: np.ndarray) -> None:
    small = resize(picture, SIZE, interpolation="bicubic")
    results = draws(ClassificationTransform(**PLAIN, erasing=0.25), picture, 400)
    erased = sum(not np.array_equal(result, small) for result in results)
    assert erased == pytest.approx(100, abs=4 * math.sqrt(400 * 0.25 * 0.75))
    assert erase(np.zeros((1, 1, 3), np.uint8), np.random.default_rng(0)).shape == (1, 1, 3)  # nothing fits


def test_eval_transform(picture: np.ndarray) -> None:
    preprocessing = Preprocessing((40, 40), interpolation="bicubic", crop=0.9)
    transform = ClassificationEvalTransform(preprocessing)
    assert np.array_equal(transform(picture, size=(40, 40)), to_input(picture, preprocessing))
    with pytest.raises(ValueError, match=r"gives images of \(40, 40\), asked for \(48, 64\)"):
        transform(picture, size=SIZE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": (0.0, 1.0)}, r"scale is a range \(low, high\) of shares in \(0, 1\], got \(0.0, 1.0\)"),
        ({"ratio": (2.0, 1.0)}, r"ratio is a range .* got \(2.0, 1.0\)"),
        ({"hflip": 1.5}, "hflip is a probability, got 1.5"),
        ({"erasing": -1}, "erasing is a probability, got -1"),
        ({"colour_jitter": 2}, r"colour_jitter must be in \[0, 1\], got 2"),
        ({"interpolation": "nearest"}, "'bilinear' or 'bicubic', got 'nearest'"),
        ({"rand_augment_layers": -1}, "layers >= 0"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClassificationTransform(**options)


def test_the_noise_table_holds_every_quantile_once() -> None:
    table = augment._NOISE[0].astype(float)
    assert table.shape == (256, 3)
    assert (np.diff(table, axis=0) >= 0).all()
    assert table[127:129].mean(axis=0) == pytest.approx(np.array([0.485, 0.456, 0.406]) * 255, abs=0.6)
