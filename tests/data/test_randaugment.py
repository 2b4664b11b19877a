"""Each operation against Pillow's, and what is drawn."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image, ImageEnhance, ImageFilter, ImageOps
from sklearn.datasets import load_sample_image

from vitdet.data import randaugment
from vitdet.data.randaugment import OPERATIONS, RandAugment

Operation = Callable[[np.ndarray], np.ndarray]


@pytest.fixture(scope="module")
def picture() -> np.ndarray:
    """A photograph, darkened and tinted so that stretching and equalising have work to do."""
    photograph = np.asarray(Image.fromarray(load_sample_image("china.jpg")).resize((131, 97)))
    return np.ascontiguousarray(photograph // [2, 3, 1] + [20, 0, 0]).clip(0, 255).astype(np.uint8)


def affine(image: Image.Image, *matrix: float) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR, fillcolor=(128,) * 3)


# Name -> Pillow's image, and the mean and largest difference in gray levels.
POINTWISE: dict[str, tuple[Operation, Callable[[Image.Image], Image.Image], float, int]] = {
    "autocontrast": (randaugment.autocontrast, ImageOps.autocontrast, 0, 0),
    "equalize": (randaugment.equalize, ImageOps.equalize, 0, 0),
    "invert": (randaugment.invert, ImageOps.invert, 0, 0),
    "posterize": (lambda a: randaugment.posterize(a, 3), lambda i: ImageOps.posterize(i, 3), 0, 0),
    "solarize": (lambda a: randaugment.solarize(a, 90), lambda i: ImageOps.solarize(i, 90), 0, 0),
    "solarize_add": (
        lambda a: randaugment.solarize_add(a, 40),
        lambda i: i.point([min(v + 40, 255) if v < 128 else v for v in range(256)] * 3),
        0, 0,
    ),
    "brightness": (lambda a: randaugment.brightness(a, 1.7), lambda i: ImageEnhance.Brightness(i).enhance(1.7), 0, 0),
    "darkness": (lambda a: randaugment.brightness(a, 0.3), lambda i: ImageEnhance.Brightness(i).enhance(0.3), 0, 0),
    "contrast": (lambda a: randaugment.contrast(a, 1.8), lambda i: ImageEnhance.Contrast(i).enhance(1.8), 0.5, 1),
    "colour": (lambda a: randaugment.saturation(a, 1.8), lambda i: ImageEnhance.Color(i).enhance(1.8), 0.7, 2),
    "gray": (lambda a: randaugment.saturation(a, 0.0), lambda i: i.convert("L").convert("RGB"), 0.1, 1),
    "sharp": (lambda a: randaugment.sharpness(a, 1.9), lambda i: ImageEnhance.Sharpness(i).enhance(1.9), 0.7, 2),
    "soft": (lambda a: randaugment.sharpness(a, 0.1), lambda i: ImageEnhance.Sharpness(i).enhance(0.1), 0.7, 2),
    "blur": (lambda a: randaugment.gaussian_blur(a, 1.5), lambda i: i.filter(ImageFilter.GaussianBlur(1.5)), 0.6, 16),
}  # fmt: skip


@pytest.mark.parametrize("name", POINTWISE)
def test_colours_are_pillows(picture: np.ndarray, name: str) -> None:
    ours, theirs, mean, most = POINTWISE[name]
    before = picture.copy()
    result, expected = ours(picture), np.asarray(theirs(Image.fromarray(picture)))
    difference = np.abs(result.astype(int) - expected)
    assert difference.mean() <= mean
    assert difference.max() <= most
    assert np.abs(result.astype(int) - picture).mean() > 1  # it does something
    assert np.array_equal(picture, before)
    assert result.flags.c_contiguous
    assert result.dtype == np.uint8


def turned(image: Image.Image, degrees: float) -> Image.Image:
    return image.rotate(degrees, Image.Resampling.BILINEAR, fillcolor=(128,) * 3)


# Name of the operation, strength, sign, and Pillow's image.
WARPS: dict[str, tuple[str, float, float, Callable[[Image.Image], Image.Image]]] = {
    "left": ("Rotate", 2 / 3, 1, lambda i: turned(i, 20)),
    "right": ("Rotate", 0.5, -1, lambda i: turned(i, -15)),
    "shear x": ("ShearX", 0.5, 1, lambda i: affine(i, 1, 0.15, 0, 0, 1, 0)),
    "shear y": ("ShearY", 0.5, -1, lambda i: affine(i, 1, 0, 0, -0.15, 1, 0)),
    "translate x": ("TranslateX", 0.5, 1, lambda i: affine(i, 1, 0, 0.225 * i.width, 0, 1, 0)),
    "translate y": ("TranslateY", 0.5, -1, lambda i: affine(i, 1, 0, 0, 0, 1, -0.225 * i.height)),
}


@pytest.mark.parametrize("name", WARPS)
def test_warps_are_pillows(picture: np.ndarray, name: str) -> None:
    """But for the seam to the fill, which Pillow cuts hard and OpenCV softly: two pixels wide."""
    operation, level, sign, theirs = WARPS[name]
    result, expected = OPERATIONS[operation](picture, level, sign), np.asarray(theirs(Image.fromarray(picture)))
    filled = np.asarray(theirs(Image.new("L", picture.shape[1::-1], 255).convert("RGB")))[..., 0] != 255
    seam = np.zeros_like(filled)
    for axis in (0, 1):
        for step in (1, 2):
            for way in (-step, step):
                seam |= filled != np.roll(filled, way, axis=axis)
    seam[[0, 1, -2, -1]] = seam[:, [0, 1, -2, -1]] = True
    difference = np.abs(result.astype(int) - expected)[~seam]
    assert 0.02 < filled.mean() < 0.5
    assert seam.mean() < 0.2
    assert np.percentile(difference, 99.5) <= 2
    assert difference.max() <= 8
    assert (result[filled & ~seam] == 128).all()


@pytest.mark.parametrize("name", OPERATIONS)
def test_strength_grows_with_the_magnitude(picture: np.ndarray, name: str) -> None:
    """From nothing to much, in either direction; three operations have no strength, and two begin above nothing."""
    for sign in (-1.0, 1.0):
        change = [
            float(np.abs(OPERATIONS[name](picture, level, sign).astype(int) - picture).mean()) for level in (0, 0.4, 1)
        ]
        if name in ("AutoContrast", "Equalize", "Invert"):
            assert change[0] == change[1] == change[2] > 1
        else:
            assert change[0] <= change[1] < change[2]
            assert (change[0] < 0.5) == (name != "Posterize")


def test_flat_images_stay(picture: np.ndarray) -> None:
    flat = np.full_like(picture, 77)
    assert np.array_equal(randaugment.autocontrast(flat), flat)
    assert np.array_equal(randaugment.equalize(flat), flat)
    tiny = picture[:1, :1]
    for operation in OPERATIONS.values():
        assert operation(np.ascontiguousarray(tiny), 0.9, 1.0).shape == (1, 1, 3)


def test_each_operation_is_drawn_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of the 15 for 1/15 of the draws, half of which are applied, with the given strength and either sign."""
    calls: list[tuple[int, float, float]] = []

    def spy(number: int) -> Callable[[np.ndarray, float, float], np.ndarray]:
        def operation(image: np.ndarray, level: float, sign: float) -> np.ndarray:
            calls.append((number, level, sign))
            return image

        return operation

    monkeypatch.setattr(randaugment, "_ALL", tuple(spy(number) for number in range(15)))
    augment = RandAugment(layers=2, magnitude=9, std=0.5)
    rng, image = np.random.default_rng(0), np.zeros((2, 2, 3), np.uint8)
    for _ in range(6000):
        augment(image, rng)
    numbers, levels, signs = (np.array(column) for column in zip(*calls, strict=True))
    assert len(calls) == pytest.approx(6000, abs=4 * np.sqrt(3000))
    counts = np.bincount(numbers.astype(int), minlength=15)
    assert counts == pytest.approx(np.full(15, 400), abs=4 * np.sqrt(400))
    assert levels.mean() == pytest.approx(0.9, abs=0.005)
    assert levels.std() == pytest.approx(0.05, abs=0.005)
    assert levels.max() == 1.0
    assert signs.mean() == pytest.approx(0, abs=0.06)


def test_layers_magnitude_and_std_matter(picture: np.ndarray) -> None:
    def results(**options: float) -> list[np.ndarray]:
        augment = RandAugment(**{"layers": 2, "magnitude": 9, "std": 0.5, **options})  # type: ignore[arg-type]
        return [augment(picture, np.random.default_rng(seed)) for seed in range(8)]

    plain = results()
    assert all(np.array_equal(a, b) for a, b in zip(plain, results(), strict=True))
    for options in ({"layers": 4}, {"magnitude": 3}, {"std": 2.0}):
        assert any(not np.array_equal(a, b) for a, b in zip(plain, results(**options), strict=True))
    assert all(result is picture for result in results(layers=0))
    with pytest.raises(ValueError, match=r"a magnitude in 0…10 and a std >= 0, got 2, 11, 0.5"):
        results(magnitude=11)
