"""Resize and augmentation: pixels and boxes move together, and all chance comes from the given generator."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image
from timm.data import create_transform
from torchvision import transforms
from torchvision.transforms import InterpolationMode

from vitdet.data.transforms import (
    EvalTransform,
    Sample,
    TrainTransform,
    render,
    resize,
    to_input,
)
from vitdet.data.windows import best_iou, iou_crop
from vitdet.structures import Preprocessing

SIZE = (64, 80)
COLOURS = np.array([(255, 40, 40), (40, 255, 40), (40, 40, 255)], dtype=np.uint8)


def squares() -> Sample:
    """Three squares of full colour on gray; each label is the channel of its colour."""
    image = np.full((120, 200, 3), 90, dtype=np.uint8)
    boxes = np.array([[10, 20, 50, 60], [80, 50, 140, 110], [150, 10, 190, 50]], dtype=np.float32)
    for colour, (x0, y0, x1, y1) in zip(COLOURS, boxes.astype(int), strict=True):
        image[y0:y1, x0:x1] = colour
    return image, boxes, np.arange(3)


def assert_boxes_fit(image: np.ndarray, boxes: np.ndarray, labels: np.ndarray) -> None:
    """Each box is where the pixels of its colour are, to within a pixel of interpolation."""
    for box, label in zip(boxes, labels, strict=True):
        full = image[..., label].astype(int)
        others = np.delete(image, label, axis=2).max(axis=2)
        rows, columns = np.nonzero((full > others + 90) & (full > 130))
        found = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
        assert np.abs(box - found).max() <= 1.3, (box, found)


def draws(transform: TrainTransform, count: int = 30, size: tuple[int, int] = SIZE) -> list[Sample]:
    return [transform(*squares(), size=size, rng=np.random.default_rng(seed)) for seed in range(count)]


@pytest.mark.parametrize(
    "size", [(256, 320), (100, 700), (700, 100), (640, 640), (13, 7), (479, 641), (960, 1280), (1, 1)], ids=str
)
def test_resize_is_pillows(size: tuple[int, int]) -> None:
    """On noise, where every rounding shows: one gray level at most."""
    image = np.random.default_rng(0).integers(0, 256, (480, 640, 3), dtype=np.uint8)
    ours = resize(image, size)
    theirs = np.asarray(Image.fromarray(image).resize((size[1], size[0]), Image.Resampling.BILINEAR))
    assert ours.shape == theirs.shape
    assert ours.dtype == np.uint8
    assert ours.flags.c_contiguous
    assert np.abs(ours.astype(int) - theirs.astype(int)).max() <= 1
    assert np.array_equal(resize(image, size, exact=True), theirs)


@pytest.mark.parametrize("size", [(248, 330), (700, 900), (640, 480), (13, 7), (100, 700), (1, 1)], ids=str)
def test_bicubic_is_pillows(size: tuple[int, int]) -> None:
    """One gray level, but for one value in 50,000; the last enlarges the width only, and rows are done first."""
    image = np.random.default_rng(0).integers(0, 256, (480, 640, 3), dtype=np.uint8)
    ours = resize(image, size, interpolation="bicubic")
    rows = Image.fromarray(image).resize((size[1], 480), Image.Resampling.BICUBIC)
    difference = np.abs(ours.astype(int) - np.asarray(rows.resize((size[1], size[0]), Image.Resampling.BICUBIC)))
    assert ours.shape == (*size, 3)
    assert difference.max() <= 2
    assert (difference > 1).mean() < 2e-5
    assert not np.array_equal(ours, resize(image, size)) or size == (1, 1)


def torchvision_input(image: np.ndarray, preprocessing: Preprocessing) -> np.ndarray:
    """What torchvision and timm evaluate on, for a square size."""
    assert preprocessing.crop is not None
    side = preprocessing.size[0]
    mode = InterpolationMode(preprocessing.interpolation)
    steps = [transforms.Resize(round(side / preprocessing.crop - 0.49), mode), transforms.CenterCrop(side)]
    return np.asarray(transforms.Compose(steps)(Image.fromarray(image)))


@pytest.mark.parametrize(
    ("size", "crop", "interpolation"), [(224, 0.9, "bicubic"), (224, 224 / 256, "bilinear"), (96, 1.0, "bicubic")]
)
@pytest.mark.parametrize("image_size", [(375, 500), (501, 333), (224, 224), (60, 91), (17, 120), (300, 37)], ids=str)
def test_input_is_torchvisions(image_size: tuple[int, int], size: int, crop: float, interpolation: str) -> None:
    """Also for images smaller than the input, and for long ones."""
    image = np.random.default_rng(0).integers(0, 256, (*image_size, 3), dtype=np.uint8)
    preprocessing = Preprocessing((size, size), interpolation=interpolation, crop=crop)
    ours, theirs = to_input(image, preprocessing), torchvision_input(image, preprocessing)
    assert ours.shape == theirs.shape == (size, size, 3)
    assert ours.flags.c_contiguous
    assert np.array_equal(ours, theirs)


def test_input_is_timms() -> None:
    image = np.random.default_rng(0).integers(0, 256, (320, 261, 3), dtype=np.uint8)
    for crop in (0.875, 0.9, 0.95, 1.0):
        for side in (96, 224):
            timms = create_transform(side, interpolation="bicubic", crop_pct=crop, mean=(0, 0, 0), std=(1, 1, 1))
            theirs = timms(Image.fromarray(image)).permute(1, 2, 0).mul(255).round().numpy()
            ours = to_input(image, Preprocessing((side, side), interpolation="bicubic", crop=crop))
            assert np.array_equal(ours, theirs)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_what_is_measured_is_what_is_predicted_on(interpolation: str) -> None:
    image, boxes, labels = squares()
    seen, _, _ = EvalTransform(interpolation=interpolation)(image, boxes, labels, size=SIZE)
    assert np.array_equal(seen, to_input(image, Preprocessing(SIZE, interpolation=interpolation)))


def test_input_without_crop_is_stretched() -> None:
    image = squares()[0]
    for interpolation in ("bilinear", "bicubic"):
        ours = to_input(image, Preprocessing(SIZE, interpolation=interpolation))
        assert np.array_equal(ours, resize(image, SIZE, interpolation=interpolation, exact=True))


@pytest.mark.parametrize("size", [(60, 120), (120, 60), (100, 37)], ids=str)
@pytest.mark.parametrize("image_size", [(90, 180), (180, 90), (77, 78)], ids=str)
def test_an_input_that_is_not_square(image_size: tuple[int, int], size: tuple[int, int]) -> None:
    """A gradient shows scale and place: the resized image just covers the size, and its middle is kept."""
    height, width = image_size
    image = np.empty((height, width, 3), dtype=np.uint8)
    image[..., 0], image[..., 1], image[..., 2] = np.arange(height)[:, None], np.arange(width), 0
    result = to_input(image, Preprocessing(size, crop=1.0)).astype(float)
    factor = max(size[0] / height, size[1] / width)
    for channel, axis in ((0, 0), (1, 1)):
        line = result[:, size[1] // 2, channel] if axis == 0 else result[size[0] // 2, :, channel]
        middle = line[len(line) // 4 : -(len(line) // 4)]  # away from the edges, where the filter is cut
        slope = (middle[-1] - middle[0]) / (len(middle) - 1)
        assert slope == pytest.approx(1 / factor, abs=1.5 / len(middle))  # levels are whole
        assert line.mean() == pytest.approx((image_size[axis] - 1) / 2, abs=1.0 / factor + 0.5)


def test_a_very_long_image_is_cut_first() -> None:
    """A strip of 40,000 pixels takes no more memory than its middle, and shows what the whole one would."""
    strip = np.zeros((16, 40_000, 3), dtype=np.uint8)
    strip[:, 19_998:20_002] = 255
    for image in (strip, np.ascontiguousarray(strip.transpose(1, 0, 2))):
        result = to_input(image, Preprocessing((32, 32), crop=1.0))
        line = result[16, :, 0] if image is strip else result[:, 16, 0]
        assert line[0] == line[-1] == 0
        assert (line[13:19] > 200).all()
        assert np.array_equal(line, line[::-1])


def test_resize_takes_read_only_images() -> None:
    image = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    expected = resize(image, (20, 20))
    image.flags.writeable = False
    assert np.array_equal(resize(image, (20, 20)), expected)


def test_resize_takes_views() -> None:
    image = np.random.default_rng(0).integers(0, 256, (40, 50, 3), dtype=np.uint8)
    assert np.array_equal(resize(image[5:30, 7:41], (12, 12)), resize(image[5:30, 7:41].copy(), (12, 12)))
    assert np.array_equal(resize(image, (40, 50)), image)


def test_eval_transform() -> None:
    image, boxes, labels = squares()
    result, moved, same = EvalTransform()(image, boxes, labels, size=SIZE)
    assert np.array_equal(result, resize(image, SIZE))
    assert moved == pytest.approx(boxes * [80 / 200, 64 / 120, 80 / 200, 64 / 120])
    assert np.array_equal(same, labels)


def test_without_options_training_is_evaluation() -> None:
    sample = squares()
    ours = TrainTransform()(*sample, size=SIZE, rng=np.random.default_rng(0))
    for value, expected in zip(ours, EvalTransform()(*sample, size=SIZE), strict=True):
        assert np.array_equal(value, expected)


@pytest.mark.parametrize("option", ["hflip", "vflip", "rotate90", "zoom_out", "iou_crop"])
def test_boxes_follow_the_pixels(option: str) -> None:
    results = draws(TrainTransform(**{option: 1.0}))
    for image, boxes, labels in results:
        assert image.shape == (*SIZE, 3)
        assert image.flags.c_contiguous
        assert boxes.dtype == np.float32
        assert len(boxes) == len(labels) > 0
        assert boxes.min() >= 0
        assert (boxes[:, 2] <= SIZE[1]).all()
        assert (boxes[:, 3] <= SIZE[0]).all()
        assert_boxes_fit(image, boxes, labels)
    assert any(not np.array_equal(image, resize(squares()[0], SIZE)) for image, _, _ in results)


def test_scale_jitter_both_ways() -> None:
    sides = []
    for image, boxes, labels in draws(TrainTransform(scale_jitter=(0.5, 2.0)), 60, size=(120, 200)):
        assert_boxes_fit(image, boxes, labels)
        first = boxes[labels == 0]
        sides += [box[2] - box[0] for box in first if box.min() > 1 and box[2] < 199 and box[3] < 119]
    assert min(sides) < 30 < 45 < max(sides)  # it is 40 wide


def test_hflip_is_exact() -> None:
    image, boxes, labels = squares()
    flipped, moved, _ = TrainTransform(hflip=1.0)(image, boxes, labels, size=(120, 200), rng=np.random.default_rng(0))
    assert np.array_equal(flipped, image[:, ::-1])
    assert moved.tolist() == [[150, 20, 190, 60], [60, 50, 120, 110], [10, 10, 50, 50]]


def test_rotate90_turns_each_way() -> None:
    """On a square result the turned picture is numpy's, for all three turns."""
    image, boxes, labels = squares()
    seen = set()
    for seed in range(20):
        rng = np.random.default_rng(seed)
        turned, _, _ = TrainTransform(rotate90=1.0)(image, boxes, labels, size=(96, 96), rng=rng)
        plain = resize(image, (96, 96))
        seen |= {turns for turns in range(4) if np.array_equal(turned, np.rot90(plain, turns))}
    assert seen == {1, 2, 3}


def test_zoom_out_covers_its_range() -> None:
    """The image takes between 1/16 and all of the area, and the rest is the fill."""
    shares = [float((image != 7).any(axis=2).mean()) for image, _, _ in draws(TrainTransform(zoom_out=1.0, fill=7), 60)]
    assert min(shares) < 0.1
    assert max(shares) > 0.7
    assert all(len(boxes) == 3 for _, boxes, _ in draws(TrainTransform(zoom_out=1.0), 60))


def test_iou_crop_keeps_what_it_promises() -> None:
    """Sides 0.3 to 1, aspect 0.5 to 2, and at least one box's centre inside; often it crops, sometimes it doesn't."""
    _, boxes, _ = squares()
    windows = [iou_crop((0, 0, 200, 120), boxes, np.random.default_rng(seed)) for seed in range(300)]
    whole = sum(window == (0, 0, 200, 120) for window in windows)
    assert 10 < whole < 150  # one bound in seven, and small boxes seldom allow 0.7 or 0.9
    for x0, y0, x1, y1 in windows:
        assert 0 <= x0 < x1 <= 200
        assert 0 <= y0 < y1 <= 120
        assert x1 - x0 >= 0.3 * 200 - 1
        assert y1 - y0 >= 0.3 * 120 - 1
        assert 0.5 <= (x1 - x0) / (y1 - y0) <= 2 or (x1 - x0, y1 - y0) == (200, 120)
        centres = (boxes[:, :2] + boxes[:, 2:]) / 2
        assert ((centres > [x0, y0]) & (centres < [x1, y1])).all(axis=1).any()


def test_best_iou() -> None:
    crops = np.array([[0, 0, 10, 10], [0, 0, 20, 20], [50, 50, 60, 60]])
    boxes = np.array([[0, 0, 10, 20], [8, 8, 40, 40]], dtype=np.float32)
    # The first: 100 shared of 200 with a box whose centre lies on its edge: not contained. The second: 200 of 400.
    assert best_iou(crops, boxes).tolist() == [-1.0, 0.5, -1.0]


def test_crop_drops_by_centre_and_clips() -> None:
    image, _, _ = squares()
    for result, moved, kept in draws(TrainTransform(iou_crop=1.0), 40, size=(120, 200)):
        assert set(kept.tolist()) <= {0, 1, 2}
        assert result.shape == image.shape
        assert (moved[:, 2:] - moved[:, :2] >= 1).all()
    assert any(len(kept) < 3 for _, _, kept in draws(TrainTransform(iou_crop=1.0), 40))


def test_tiny_boxes_are_dropped() -> None:
    """0.5 pixels wide in the result, 2 in the file."""
    image, _, _ = squares()
    boxes = np.array([[10, 10, 12, 50], [20, 20, 60, 60]], dtype=np.float32)
    _, kept, labels = TrainTransform()(image, boxes, np.array([4, 5]), size=(30, 50), rng=np.random.default_rng(0))
    assert labels.tolist() == [5]
    assert len(kept) == 1
    tolerant = TrainTransform(min_box_pixels=0.1)
    assert len(tolerant(image, boxes, np.array([4, 5]), size=(30, 50), rng=np.random.default_rng(0))[1]) == 2


def test_photometric_changes_colours_only() -> None:
    image, boxes, labels = squares()
    changed = 0
    for result, moved, kept in draws(TrainTransform(photometric=1.0), 20, size=(120, 200)):
        changed += not np.array_equal(result, image)
        assert np.array_equal(moved, boxes)
        assert np.array_equal(kept, labels)
    assert changed >= 15  # nothing is drawn once in 32
    assert all(np.array_equal(result, image) for result, _, _ in draws(TrainTransform(), 3, size=(120, 200)))


def test_photometric_steps_are_independent() -> None:
    """Each acts half of the time, and not all together: contrast and channel order are seen apart and both."""
    image, boxes, labels = squares()
    image[:5] = 90  # a gray edge shows brightness and contrast only
    seen = set()
    for seed in range(60):
        rng = np.random.default_rng(seed)
        result, _, _ = TrainTransform(photometric=1.0)(image, boxes, labels, size=(120, 200), rng=rng)
        brighter = abs(int(result[0, 0, 0]) - 90) > 1
        swapped = bool((result[25, 20].argmax(), result[60, 100].argmax()) != (0, 1))
        seen.add((brighter, swapped))
    assert seen == {(False, False), (False, True), (True, False), (True, True)}


def test_the_canvas_is_not_distorted() -> None:
    """The published order distorts before it zooms out: the fill stays as it is."""
    for image, _, _ in draws(TrainTransform(photometric=1.0, zoom_out=1.0, fill=0), 20):
        assert (image == 0).all(axis=2).any()
    everything = TrainTransform(photometric=1.0, zoom_out=1.0, iou_crop=1.0, hflip=0.5, vflip=0.5, rotate90=0.5)
    for image, boxes, _ in draws(everything, 40):
        assert image.shape == (*SIZE, 3)
        assert len(boxes) > 0


def test_without_objects() -> None:
    everything = TrainTransform(
        photometric=1.0, zoom_out=0.5, iou_crop=1.0, hflip=0.5, vflip=0.5, rotate90=0.5, scale_jitter=(0.5, 2)
    )
    image = squares()[0]
    none = np.zeros((0, 4), dtype=np.float32)
    for seed in range(20):
        rng = np.random.default_rng(seed)
        result, boxes, labels = everything(image, none, np.zeros(0, dtype=np.int64), size=SIZE, rng=rng)
        assert result.shape == (*SIZE, 3)
        assert boxes.shape == (0, 4)
        assert labels.shape == (0,)


@pytest.mark.parametrize(
    ("option", "strong", "composed", "acts"),
    [
        ("zoom_out", False, False, False),
        ("iou_crop", False, False, False),
        ("photometric", False, False, False),
        ("hflip", False, False, True),
        ("zoom_out", True, True, False),
        ("iou_crop", True, True, False),
        ("photometric", True, True, True),
        ("vflip", True, True, True),
    ],
)
def test_policy(option: str, strong: bool, composed: bool, acts: bool) -> None:
    """What is strong ends early; a mosaic, already composed, is neither zoomed nor cropped again."""
    image, boxes, labels = squares()
    transform = TrainTransform(**{option: 1.0})
    changed = False
    for seed in range(10):
        rng = np.random.default_rng(seed)
        result, _, _ = transform(image, boxes, labels, size=(120, 200), rng=rng, strong=strong, composed=composed)
        changed |= not np.array_equal(result, image)
    assert changed is acts


def test_only_the_generator_decides() -> None:
    transform = TrainTransform(photometric=1.0, zoom_out=0.5, iou_crop=0.8, hflip=0.5, vflip=0.5, rotate90=0.5)
    first, second = draws(transform, 8), draws(transform, 8)
    for one, two in zip(first, second, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(one, two, strict=True))
    assert not np.array_equal(first[0][0], first[1][0])


def test_the_source_is_left_alone() -> None:
    image, boxes, labels = squares()
    for seed in range(10):
        transform = TrainTransform(photometric=1.0, hflip=1.0, vflip=1.0)
        transform(image, boxes, labels, size=(120, 200), rng=np.random.default_rng(seed))
    for value, expected in zip((image, boxes, labels), squares(), strict=True):
        assert np.array_equal(value, expected)


def test_render_beside_the_image() -> None:
    image, boxes, _ = squares()
    result, moved = render(image, boxes, window=(300, 300, 400, 400), size=(5, 6), fill=3)
    assert (result == 3).all()
    assert result.shape == (5, 6, 3)
    assert moved.shape == (0, 4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TrainTransform(hflip=1.5), "hflip is a probability, got 1.5"),
        (lambda: TrainTransform(scale_jitter=(2.0, 1.0)), r"scale_jitter is a range .* got \(2.0, 1.0\)"),
        (lambda: TrainTransform(scale_jitter=(0.0, 1.0)), "scale_jitter is a range"),
    ],
)
def test_wrong_options(make: Callable[[], TrainTransform], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()
