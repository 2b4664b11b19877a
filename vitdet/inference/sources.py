"""What a user may call an image: a path, a folder, a pattern, an array, a tensor, a Pillow image, or many of these."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitdet.data.images import IMAGE_SUFFIXES, to_rgb
from vitdet.errors import UserError


def iterate_images(images: Any) -> Iterator[Path | np.ndarray]:
    """Each image in the order given, as the path of a file (not opened) or as a (height, width, 3) uint8 RGB copy.

    Args:
        images: one of, or an iterable of: the path of a file; a folder (the images directly in it, sorted by name);
            a glob pattern (``**`` crosses folders; sorted); a (height, width, 3) RGB or (height, width) gray uint8
            array; a (3, height, width) tensor, uint8 or float in [0, 1]; a Pillow image.

    Raises:
        UserError: a folder or pattern without images, an array or tensor of another kind.
    """
    if isinstance(images, (str, Path, np.ndarray, Tensor, Image.Image)):
        images = [images]
    elif not isinstance(images, Iterable):
        raise UserError(f"{images!r} is no image; give a path, an array, a tensor, a Pillow image or a list of these")
    for item in images:
        if isinstance(item, (str, Path)):
            yield from _expand(str(item))
        elif isinstance(item, np.ndarray):
            yield _from_array(item)
        elif isinstance(item, Tensor):
            yield _from_tensor(item)
        elif isinstance(item, Image.Image):
            yield _from_pillow(item)
        else:
            raise UserError(
                f"{type(item).__name__} {item!r:.80} is no image; give paths, arrays, tensors or Pillow images"
            )


def _expand(text: str) -> list[Path]:
    """The file itself, the images of a folder, or those that match a pattern."""
    path = Path(text).expanduser()
    if path.is_dir():
        found = sorted(file for file in path.iterdir() if _is_image(file))
        if not found:
            raise UserError(
                f"the folder {path} has no images; check it, or reach into sub-folders with {path}/**/*.jpg"
            )
        return found
    if path.exists() or not glob.has_magic(text):
        return [path]  # the decoder reports one that does not exist
    found = sorted(file for file in map(Path, glob.glob(str(path), recursive=True)) if _is_image(file))  # noqa: PTH207
    if not found:
        raise UserError(f"no image matches {text}; check the pattern, and put it in quotes on the command line")
    return found


def _is_image(path: Path) -> bool:
    """Hidden files are passed over: some systems leave ``._name.jpg`` beside ``name.jpg``."""
    return path.suffix.lower() in IMAGE_SUFFIXES and not path.name.startswith(".") and path.is_file()


def _from_array(array: np.ndarray) -> np.ndarray:
    """A copy, so that the caller may use the array again for the next frame of a video."""
    if array.dtype != np.uint8:
        raise UserError(f"an image array must be uint8, not {array.dtype}; scale it to 0…255 and convert it")
    if array.ndim == 2:
        array = np.repeat(array[:, :, None], 3, axis=2)
    if array.ndim != 3 or array.shape[2] != 3 or 0 in array.shape:
        raise UserError(
            f"an image array must be (height, width, 3) RGB or (height, width) gray, not {array.shape}; "
            "give a batch as a list of images"
        )
    return np.array(array, order="C")


def _from_tensor(tensor: Tensor) -> np.ndarray:
    if tensor.ndim != 3 or tensor.shape[0] != 3 or 0 in tensor.shape:
        raise UserError(
            f"an image tensor must be (3, height, width), not {tuple(tensor.shape)}; give a batch as a list of images"
        )
    tensor = tensor.detach().cpu()
    if tensor.is_floating_point():
        low, high = (float(value) for value in tensor.float().aminmax())
        if not (low >= 0 and high <= 1):  # also where they are NaN
            raise UserError(
                f"a float image tensor must be in [0, 1], not {low:.3g}…{high:.3g}; undo the normalisation, "
                "or give 0…255 as uint8"
            )
        tensor = (tensor.float() * 255).round().to(torch.uint8)
    if tensor.dtype != torch.uint8:
        raise UserError(f"an image tensor must be uint8, or float in [0, 1], not {tensor.dtype}; convert it")
    return np.array(tensor.permute(1, 2, 0).numpy(), order="C")  # (height, width, 3)


def _from_pillow(image: Image.Image) -> np.ndarray:
    try:
        return to_rgb(image)
    except OSError as error:  # Pillow reads the pixels of an opened file only now
        raise UserError(f"the Pillow image {image!r} cannot be decoded ({error}); replace the file") from error
