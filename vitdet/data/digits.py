"""A detection set that needs no network: real handwritten digits, scattered over made-up backgrounds.

The digits are the 1797 scans of 8 x 8 pixels that scikit-learn ships (UCI, E. Alpaydin and C. Kaynak, 1998, CC BY 4.0).
Each is enlarged smoothly, turned a little, tinted and placed; its box is tight around the ink. No scan that occurs in
a training scene occurs in a validation scene.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from vitdet.errors import UserError

VERSION = 1  # raise it when the same arguments give other pictures
MARKER = "digits.json"  # written last: a folder that has it is complete
MAX_DIGITS = 8
EMPTY_SHARE = 0.03  # scenes without any digit
DIGIT_SIZES = (20, 64)  # pixels, longer side of the ink
VAL_SCANS = 0.2  # share of the scans that only validation scenes use
INK_EDGE = 0.3  # opacity from which a pixel counts as ink for the box
MAX_OVERLAP = 0.1  # of the smaller box
LUMA = np.array([0.299, 0.587, 0.114], dtype=np.float32)


@dataclass(frozen=True)
class Digit:
    """One digit in a scene: class 0…9 and its tight box, ``xyxy`` pixels."""

    label: int
    box: tuple[int, int, int, int]


def make_digits(
    root: str | Path,
    *,
    train: int = 600,
    val: int = 120,
    size: tuple[int, int] = (192, 192),
    seed: int = 0,
    classification: bool = True,
) -> str:
    """Write the digit scenes as COCO JSON, and optionally the single digits as folders of images.

    Writes ``annotations/instances_{train,val}.json``, ``{train,val}/000001.jpg`` …, and
    ``classification/{train,val}/{0..9}/*.png``; category ids are 1…10 for the digits 0…9. The same arguments give the
    same pictures. Everything is written beside ``root`` and renamed at the end, so that no half of a set is ever there.

    Args:
        root: the folder to make.
        train, val: numbers of scenes.
        size: (height, width) of a scene, each side at least 96 pixels.
        seed: of everything random.
        classification: also write the single digits.

    Returns:
        One line that says what was written, or that it was there already.

    Raises:
        UserError: ``root`` holds something else; a number out of range.
    """
    root = Path(root)
    height, width = size
    if train < 1 or val < 1:
        raise UserError(f"the digit set needs at least 1 scene a split, got train={train}, val={val}")
    if min(size) < 96:
        raise UserError(f"digit scenes of {height} x {width} pixels are too small: use at least 96 x 96")
    parameters: dict[str, Any] = {
        "version": VERSION,
        "train": train,
        "val": val,
        "seed": seed,
        "classification": classification,
    }
    parameters["size"] = [height, width]
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        if _is_complete(root, parameters):
            return f"{root} already holds this digit set ({train} + {val} scenes)"
        raise UserError(f"{root} is not empty and holds something else: choose another folder or remove it")
    scans, labels = _load_scans()
    root.parent.mkdir(parents=True, exist_ok=True)
    partial = root.parent / f".{root.name}.{os.getpid()}.partial"
    try:
        _write_set(partial, scans, labels, parameters)
        partial.replace(root)
    except OSError:
        if not _is_complete(root, parameters):  # else another process was quicker
            raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return f"wrote {train} + {val} digit scenes of {height} x {width} pixels to {root}"


def draw_scene(
    scans: np.ndarray, labels: np.ndarray, *, size: tuple[int, int], rng: np.random.Generator
) -> tuple[np.ndarray, list[Digit]]:
    """Draw one scene with digits from ``scans`` (n, 8, 8) in [0, 1], ``labels`` (n,).

    Returns:
        The image (height, width, 3) uint8 RGB, and the digits that it shows.
    """
    image = _background(size, rng)  # float32, [0, 255]
    digits: list[Digit] = []
    count = 0 if rng.random() < EMPTY_SHARE else int(rng.integers(1, MAX_DIGITS + 1))
    for _ in range(count):
        scan = int(rng.integers(len(scans)))
        ink = _ink(scans[scan], rng)
        place = _find_place(ink.shape, size, [digit.box for digit in digits], rng)
        if place is None:
            continue
        x0, y0, x1, y1 = place
        patch = image[y0:y1, x0:x1]
        colour = _ink_colour(patch.reshape(-1, 3).mean(axis=0), rng)
        patch += ink[:, :, None] * (colour - patch)
        digits.append(Digit(int(labels[scan]), place))
    image += rng.normal(0.0, rng.uniform(1.0, 6.0), size=image.shape).astype(np.float32)
    return np.clip(np.rint(image), 0, 255).astype(np.uint8), digits


def _is_complete(root: Path, parameters: dict[str, Any]) -> bool:
    """Whether ``root`` holds the set that these parameters give."""
    try:
        return json.loads((root / MARKER).read_text()) == parameters
    except (OSError, ValueError):
        return False


def _load_scans() -> tuple[np.ndarray, np.ndarray]:
    """The scans (1797, 8, 8) float32 in [0, 1], and their digits (1797,)."""
    from sklearn.datasets import load_digits  # a second to import, and only needed here

    content = load_digits()
    return (content.images / 16).astype(np.float32), content.target.astype(np.int64)


def _write_set(folder: Path, scans: np.ndarray, labels: np.ndarray, parameters: dict[str, Any]) -> None:
    """Write the whole set into ``folder``."""
    order = np.random.default_rng([parameters["seed"], 0]).permutation(len(scans))
    first = round(len(scans) * VAL_SCANS)
    (folder / "annotations").mkdir(parents=True)
    for number, (split, chosen) in enumerate((("train", order[first:]), ("val", order[:first])), start=1):
        _write_split(folder, split, scans[chosen], labels[chosen], parameters, stream=number)
        if parameters["classification"]:
            _write_singles(folder / "classification" / split, scans, labels, chosen)
    (folder / MARKER).write_text(json.dumps(parameters))


def _write_split(
    folder: Path, split: str, scans: np.ndarray, labels: np.ndarray, parameters: dict[str, Any], *, stream: int
) -> None:
    """Write one split's scenes and annotations; ``stream`` separates the random numbers of the splits."""
    (folder / split).mkdir()
    height, width = parameters["size"]
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number in range(1, parameters[split] + 1):
        rng = np.random.default_rng([parameters["seed"], stream, number])
        image, digits = draw_scene(scans, labels, size=(height, width), rng=rng)
        name = f"{number:06d}.jpg"
        _write_image(folder / split / name, image[:, :, ::-1], [cv2.IMWRITE_JPEG_QUALITY, 95])
        images.append({"id": number, "file_name": name, "height": height, "width": width})
        for digit in digits:
            x0, y0, x1, y1 = digit.box
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": number,
                    "category_id": digit.label + 1,
                    "bbox": [x0, y0, x1 - x0, y1 - y0],
                    "area": (x1 - x0) * (y1 - y0),
                    "iscrowd": 0,
                }
            )
    categories = [{"id": digit + 1, "name": str(digit)} for digit in range(10)]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (folder / "annotations" / f"instances_{split}.json").write_text(json.dumps(content))


def _write_singles(folder: Path, scans: np.ndarray, labels: np.ndarray, chosen: np.ndarray) -> None:
    """Write scans as 32 x 32 gray images, in one folder a digit, named by the number of the scan."""
    for digit in range(10):
        (folder / str(digit)).mkdir(parents=True)
    for number in chosen:
        enlarged = cv2.resize(scans[number], (32, 32), interpolation=cv2.INTER_CUBIC)
        gray = np.clip(np.rint(enlarged * 255), 0, 255).astype(np.uint8)
        _write_image(folder / str(labels[number]) / f"{number:04d}.png", gray, [])


def _write_image(path: Path, image: np.ndarray, options: list[int]) -> None:
    """Encode and write; OpenCV's own writer fails silently and dislikes non-ASCII paths."""
    done, content = cv2.imencode(path.suffix, image, options)
    if not done:
        raise OSError(f"cannot encode {path}")
    path.write_bytes(content.tobytes())


def _background(size: tuple[int, int], rng: np.random.Generator) -> np.ndarray:
    """A colour gradient with soft clouds and a few faint rings and strokes: (height, width, 3) float32."""
    height, width = size
    base = rng.uniform(35, 220) + rng.uniform(-30, 30, size=3)
    corners = base + rng.uniform(-28, 28, size=(2, 2, 1)) + rng.uniform(-10, 10, size=(2, 2, 3))
    image: np.ndarray = cv2.resize(corners.astype(np.float32), (width, height), interpolation=cv2.INTER_LINEAR)
    cells = int(rng.integers(4, 12))
    clouds = rng.normal(0.0, rng.uniform(0.0, 9.0), size=(cells, cells)).astype(np.float32)
    image += cv2.resize(clouds, (width, height), interpolation=cv2.INTER_CUBIC)[:, :, None]
    marks = np.zeros((height, width), dtype=np.float32)
    for _ in range(int(rng.integers(0, 4))):
        x, y, dx, dy = (rng.uniform(-0.1, 1.1, size=4) * [width, height, width, height]).astype(int).tolist()
        shade, thickness = float(rng.uniform(-22, 22)), int(rng.integers(2, 7))
        if rng.random() < 0.5:
            cv2.line(marks, (x, y), (dx, dy), shade, thickness, cv2.LINE_AA)
        else:
            cv2.circle(marks, (x, y), int(rng.integers(12, 70)), shade, thickness, cv2.LINE_AA)
    image += cv2.GaussianBlur(marks, (0, 0), 1.2)[:, :, None]
    return np.clip(image, 8, 247)


def _ink(scan: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """One scan, enlarged, slightly turned and stretched, cut tight: (h, w) float32 opacity."""
    longest = float(np.exp(rng.uniform(*np.log(DIGIT_SIZES))))
    stretch = np.exp(rng.uniform(-0.12, 0.12, size=2))
    # Twice the room that an unturned scan takes, so that no corner is lost; the cut below removes the rest.
    side = int(np.ceil(longest * 2))
    angle = np.deg2rad(rng.uniform(-14, 14))
    scale = longest / len(scan)
    rotation = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    linear = rotation * stretch * scale  # scan pixels to ink pixels
    shift = (side - 1) / 2 - linear @ np.full(2, (len(scan) - 1) / 2)
    matrix = np.concatenate([linear, shift[:, None]], axis=1)
    opacity = cv2.warpAffine(scan, matrix, (side, side), flags=cv2.INTER_CUBIC)
    edge = np.clip((opacity - 0.18) / 0.42, 0.0, 1.0)
    opacity = edge * edge * (3 - 2 * edge)  # smoothstep: strokes with soft but narrow edges
    rows, columns = np.flatnonzero((opacity > INK_EDGE).any(axis=1)), np.flatnonzero((opacity > INK_EDGE).any(axis=0))
    return opacity[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


def _find_place(
    shape: tuple[int, ...],
    size: tuple[int, int],
    taken: list[tuple[int, int, int, int]],
    rng: np.random.Generator,
) -> tuple[int, int, int, int] | None:
    """A random place for (h, w) within the scene that hardly overlaps the boxes there are; None after 40 misses."""
    height, width = shape
    for _ in range(40):
        x0, y0 = int(rng.integers(size[1] - width + 1)), int(rng.integers(size[0] - height + 1))
        box = (x0, y0, x0 + width, y0 + height)
        if all(_overlap(box, other) <= MAX_OVERLAP for other in taken):
            return box
    return None


def _overlap(first: tuple[int, int, int, int], second: tuple[int, int, int, int]) -> float:
    """The shared area of two boxes over the area of the smaller."""
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    if width <= 0 or height <= 0:
        return 0.0
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (first, second)]
    return width * height / min(areas)


def _ink_colour(background: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """A tinted colour at least 70 gray levels darker or lighter than the background (3,): (3,) float32."""
    gray = float(background @ LUMA)
    room = {-1: gray - 10, 1: 245 - gray}
    sides = [sign for sign, levels in room.items() if levels >= 75]
    sign = sides[int(rng.integers(len(sides)))]
    tint = rng.uniform(-45, 45, size=3).astype(np.float32)
    tint -= float(tint @ LUMA)  # changes the hue, not the brightness
    return np.clip(gray + sign * rng.uniform(75, room[sign]) + tint, 0, 255).astype(np.float32)
