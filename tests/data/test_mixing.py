"""Mosaic and mixup of samples; mixup and cutmix of batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from vitdet.data.mixing import MIN_VISIBLE, BatchMixer, mixup, mosaic
from vitdet.data.transforms import Sample
from vitdet.structures import ImageTargets


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


# --- a batch mixed with itself


def batch(size: int = 6, side: int = 20) -> tuple[Tensor, ImageTargets]:
    """Image i is flat with level i, and of class i."""
    images = torch.arange(size, dtype=torch.float32).view(-1, 1, 1, 1).repeat(1, 3, side, side + 4)
    return images.to(memory_format=torch.channels_last), ImageTargets.from_labels(torch.arange(size), size)


def own_shares(targets: ImageTargets) -> Tensor:
    return targets.probabilities.diagonal()


@pytest.mark.parametrize("alpha", [0.2, 0.8, 1.0])
def test_batch_mixup(alpha: float) -> None:
    """Pixels and labels are blended by one weight, which is Beta(alpha, alpha)."""
    mixer = BatchMixer(mixup=alpha)
    weights = []
    for _ in range(600):
        images, targets = mixer(*batch())
        share = own_shares(targets)[0]
        weights.append(float(share))
        levels = torch.arange(6.0)
        expected = share * levels + (1 - share) * levels.flip(0)
        assert torch.allclose(images, expected.view(-1, 1, 1, 1).expand_as(images), atol=1e-5)
        assert torch.allclose(targets.probabilities @ levels, expected, atol=1e-5)
    assert np.mean(weights) == pytest.approx(0.5, abs=0.06)
    assert np.var(weights) == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.15)


def test_batch_cutmix() -> None:
    """The mass of a label is the share of its pixels, also where the box leaves the image; both have one rectangle."""
    mixer = BatchMixer(cutmix=1.0)
    areas = []
    for _ in range(400):
        before, _ = batch()
        images, targets = mixer(*batch())
        foreign = (images != before)[0, 0]
        areas.append(float(foreign.float().mean()))
        assert own_shares(targets)[0] == pytest.approx(1 - areas[-1], abs=1e-6)
        assert own_shares(targets)[2] == own_shares(targets)[0]
        assert torch.equal(images[1][:, foreign], before[4][:, foreign])
        assert torch.equal(images[1][:, ~foreign], before[1][:, ~foreign])
        rows, columns = foreign.any(dim=1).sum(), foreign.any(dim=0).sum()
        assert int(rows * columns) == int(foreign.sum())
        assert targets.probabilities.sum(dim=1) == pytest.approx(np.ones(6), abs=1e-6)
    # A span of length r around a uniform point of [0, 1] has r - r^2 / 4 of its length inside on average, each side of
    # the box has r = sqrt(1 - lambda), and lambda is uniform.
    r = np.sqrt(np.linspace(0, 1, 10_001))
    assert np.mean(areas) == pytest.approx(np.mean((r - r**2 / 4) ** 2), abs=0.05)


def test_switch_and_probability() -> None:
    def kinds(**options: float) -> tuple[int, int, int]:
        mixer = BatchMixer(**options)
        counts = [0, 0, 0]
        for _ in range(200):
            before, _ = batch()
            images, targets = mixer(*batch())
            changed = images != before
            counts[0 if not changed.any() else 1 if changed[0].all() else 2] += 1
            assert (own_shares(targets)[0] < 1) == bool(changed.any())
        return counts[0], counts[1], counts[2]

    assert kinds() == (200, 0, 0)
    none, blended, cut = kinds(mixup=0.8, cutmix=8.0)
    assert none <= 4
    assert 70 < blended < 130
    assert blended + cut + none == 200
    assert kinds(mixup=0.8, cutmix=8.0, switch=0.0)[2] == 0
    assert kinds(mixup=8.0, cutmix=8.0, switch=1.0)[1] <= 4  # a box may cover the image
    assert 60 < kinds(mixup=8.0, probability=0.5)[0] < 140


def test_mixing_repeats_with_torchs_seed() -> None:
    """The state of numpy and of Python is not touched, nor asked for."""
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        np.random.random(7)
        mixer = BatchMixer(mixup=0.8, cutmix=1.0)
        results.append([mixer(*batch()) for _ in range(5)])
    for (images, targets), (again, same) in zip(*results, strict=True):
        assert torch.equal(images, again)
        assert torch.equal(targets.probabilities, same.probabilities)


@pytest.mark.parametrize("options", [{"mixup": 1.0}, {"cutmix": 1.0}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mixing_keeps_memory_dtype_and_format(options: dict[str, float], dtype: torch.dtype) -> None:
    images, targets = batch()
    images = images.to(dtype)
    rows = targets.probabilities.clone()
    mixed, new = BatchMixer(**options)(images, targets)
    assert mixed.data_ptr() == images.data_ptr()
    assert mixed.dtype == dtype
    assert mixed.is_contiguous(memory_format=torch.channels_last)
    assert new.probabilities.dtype == torch.float32
    assert torch.equal(targets.probabilities, rows)


@pytest.mark.parametrize("options", [{"mixup": 1.0}, {"cutmix": 1.0}], ids=str)
def test_an_image_without_a_partner_stays(options: dict[str, float]) -> None:
    """Of an odd batch the one in the middle, which a batch of one consists of."""
    for size in (1, 5):
        before, plain = batch(size)
        for _ in range(5):
            images, targets = BatchMixer(**options)(*batch(size))
            assert torch.allclose(images[size // 2], before[size // 2])
            assert torch.allclose(targets.probabilities[size // 2], plain.probabilities[size // 2])


def test_what_cannot_be_mixed() -> None:
    images, targets = batch()
    targets.teacher = torch.zeros(6, dtype=torch.int64)
    with pytest.raises(ValueError, match="mix the batch before the teacher sees it"):
        BatchMixer(mixup=1.0)(images, targets)
    with pytest.raises(ValueError, match="switch is a probability, got 2"):
        BatchMixer(switch=2)
    with pytest.raises(ValueError, match="alphas of beta distributions, >= 0, got -1 and 0"):
        BatchMixer(mixup=-1)
