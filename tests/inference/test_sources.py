"""What counts as an image: every kind gives the same pixels, everything else a sentence that helps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vitdet.data.images import decode_image
from vitdet.errors import UserError
from vitdet.inference.sources import iterate_images


@pytest.fixture
def picture() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)


@pytest.fixture
def folder(tmp_path: Path, picture: np.ndarray) -> Path:
    (tmp_path / "below").mkdir()
    (tmp_path / "empty").mkdir()
    for name in ("b.png", "a.JPG", "c[1].png", "below/d.png", "._a.jpg"):
        Image.fromarray(picture).save(tmp_path / name)
    (tmp_path / "notes.txt").write_text("no image")
    return tmp_path


def names(images: Any, base: Path) -> list[str]:
    return [item.relative_to(base).as_posix() for item in iterate_images(images) if isinstance(item, Path)]


def test_every_kind_gives_the_same_pixels(picture: np.ndarray, folder: Path) -> None:
    tensor = torch.from_numpy(picture).permute(2, 0, 1)
    kinds = [picture, Image.fromarray(picture), tensor, tensor.float() / 255, tensor.half() / 255, folder / "b.png"]
    for item in iterate_images(kinds):
        array = decode_image(item) if isinstance(item, Path) else item
        assert np.array_equal(array, picture)
        assert array.flags.c_contiguous


def test_gray_arrays_become_rgb(picture: np.ndarray) -> None:
    [array] = iterate_images(picture[:, :, 0])
    assert isinstance(array, np.ndarray)
    assert np.array_equal(array, np.stack([picture[:, :, 0]] * 3, axis=2))


def test_arrays_are_copied(picture: np.ndarray) -> None:
    def frames() -> Any:  # a video reader that fills the same array again and again
        frame = np.zeros((4, 4, 3), dtype=np.uint8)
        for value in range(3):
            frame[:] = value
            yield frame

    assert [int(item[0, 0, 0]) for item in iterate_images(frames()) if isinstance(item, np.ndarray)] == [0, 1, 2]
    shared = torch.from_numpy(picture).permute(2, 0, 1)
    [from_array], [from_tensor] = iterate_images(picture), iterate_images(shared)
    assert not np.shares_memory(from_array, picture)
    assert not np.shares_memory(from_tensor, picture)


def test_folders_patterns_and_files_in_order(folder: Path) -> None:
    assert names(folder, folder) == ["a.JPG", "b.png", "c[1].png"]
    assert names(str(folder / "*.png"), folder) == ["b.png", "c[1].png"]
    assert names(str(folder / "**" / "*.png"), folder) == ["b.png", "below/d.png", "c[1].png"]
    assert names(folder / "*", folder) == ["a.JPG", "b.png", "c[1].png"]
    assert names(str(folder / "c[1].png"), folder) == ["c[1].png"]  # a file's name comes before a pattern
    assert names([folder / "b.png", folder / "below", str(folder / "a.JPG")], folder) == [
        "b.png",
        "below/d.png",
        "a.JPG",
    ]
    assert names([], folder) == []


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.zeros((4, 4, 3), dtype=np.float32), "must be uint8, not float32; scale it to 0…255"),
        (np.zeros((4, 4, 4), dtype=np.uint8), r"\(height, width\) gray, not \(4, 4, 4\); give a batch as a list"),
        (np.zeros((2, 4, 4, 3), dtype=np.uint8), r"not \(2, 4, 4, 3\); give a batch as a list"),
        (np.zeros((0, 4, 3), dtype=np.uint8), r"not \(0, 4, 3\)"),
        (torch.zeros(4, 4, 3), r"must be \(3, height, width\), not \(4, 4, 3\)"),
        (torch.zeros(1, 3, 4, 4), r"not \(1, 3, 4, 4\); give a batch as a list of images"),
        (torch.full((3, 4, 4), 1.5), r"must be in \[0, 1\], not 1.5…1.5; undo the normalisation"),
        (torch.full((3, 4, 4), float("nan")), r"must be in \[0, 1\], not nan…nan"),
        (torch.zeros(3, 4, 4, dtype=torch.int64), r"uint8, or float in \[0, 1\], not torch.int64; convert it"),
        ([5], "int 5 is no image; give paths"),
        (5, "5 is no image; give a path"),
        ("nothing/*.jpg", r"no image matches nothing/\*.jpg; check the pattern"),
    ],
)
def test_what_is_no_image_is_named(image: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        list(iterate_images(image))


def test_an_empty_folder_is_named(folder: Path) -> None:
    with pytest.raises(UserError, match=r"the folder .*empty has no images; check it, or reach into sub-folders with"):
        list(iterate_images(folder / "empty"))


def test_a_damaged_pillow_image_is_named(folder: Path) -> None:
    content = (folder / "b.png").read_bytes()
    (folder / "cut.png").write_bytes(content[: len(content) // 2])
    with Image.open(folder / "cut.png") as image, pytest.raises(UserError, match=r"Pillow image .* cannot be decoded"):
        list(iterate_images(image))
