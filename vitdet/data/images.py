"""The one decoder: every image that training, evaluation or prediction sees comes through here.

Pillow decodes, also plain JPEG: OpenCV is a fifth faster there (1.5 against 1.9 ms for 640 x 480) with equal pixels,
but reads damaged files without complaint, and two decoders could come to differ.
"""

from __future__ import annotations

import io
import warnings
from pathlib import Path

import numpy as np
from PIL import Image, ImageCms, ImageOps

from vitdet.errors import UserError

MAX_PIXELS = 178_956_970  # half a GiB as RGB; a larger image is refused before memory is taken
# What counts as an image in a folder or behind a pattern; a file named by itself may be called anything.
IMAGE_SUFFIXES = frozenset(
    ".avif .bmp .gif .jfif .jpe .jpeg .jpg .jp2 .mpo .png .ppm .tif .tiff .webp".split()  # noqa: SIM905 - a table
)
_SIXTEEN_BIT_MODES = ("I;16", "I;16L", "I;16B", "I;16N", "I")


def decode_image(source: str | Path | bytes) -> np.ndarray:
    """Read an image file, or the bytes of one, as upright RGB.

    EXIF orientation is applied, transparency is composited on white, CMYK, LAB, palette and gray become RGB, 16 bits
    are scaled to 8, and of an animation the first frame is taken.

    Returns:
        (height, width, 3) uint8 array, contiguous.

    Raises:
        UserError: the file is missing, empty, damaged, no image, or has more than ``MAX_PIXELS`` pixels.
    """
    name = "the given bytes" if isinstance(source, bytes) else str(source)
    if not isinstance(source, bytes):
        _check_file(Path(source))
    elif not source:
        raise UserError("cannot read an image from 0 bytes: give the content of an image file")
    try:
        with warnings.catch_warnings():
            # Pillow warns of large images and odd metadata; the bound below and the decoder itself decide here.
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source) as image:
                _check_pixels(image.size, name)
                image.load()
                return to_rgb(image)
    except UserError:
        raise
    except Image.DecompressionBombError as error:
        raise UserError(f"{name} has more than {MAX_PIXELS} pixels: shrink it before use") from error
    except Image.UnidentifiedImageError as error:
        raise UserError(f"{name} is not an image in a known format: replace or remove it") from error
    except Exception as error:  # Pillow's plugins raise almost any type on damaged bytes
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UserError(f"{name} cannot be decoded ({reason}): replace or remove it") from error


def image_size(path: str | Path) -> tuple[int, int]:
    """(height, width) of the upright image, from the file's header alone.

    Raises:
        UserError: as :func:`decode_image`, as far as the header shows it.
    """
    _check_file(Path(path))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(path) as image:
                width, height = image.size
                turned = image.getexif().get(0x0112, 1) in (5, 6, 7, 8)
    except Exception as error:  # as above
        raise UserError(f"{path} is not an image in a known format: replace or remove it") from error
    return (width, height) if turned else (height, width)


def to_rgb(image: Image.Image) -> np.ndarray:
    """A Pillow image as upright RGB, by the rules of :func:`decode_image`: (height, width, 3) uint8, contiguous."""
    image = _upright(image)
    if image.mode in _SIXTEEN_BIT_MODES or image.mode == "F":
        return _gray_to_rgb(_to_eight_bits(image))
    if image.mode == "LAB":
        lab, srgb = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        image = ImageCms.profileToProfile(image, lab, srgb, outputMode="RGB") or image
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        image = image.convert("LA") if image.mode == "La" else image
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image)
    if image.mode != "RGB":
        image = image.convert("RGB")
    return np.array(image)


def _check_file(path: Path) -> None:
    """Raise unless ``path`` is a file with something in it."""
    if not path.is_file():
        kind = "is a folder, not an image file" if path.is_dir() else "does not exist"
        raise UserError(f"image {path} {kind}: check the path")
    if path.stat().st_size == 0:
        raise UserError(f"image {path} is empty (0 bytes): replace or remove it")


def _check_pixels(size: tuple[int, int], name: str) -> None:
    """Raise if ``size`` (width, height) is over the bound."""
    width, height = size
    if width * height > MAX_PIXELS:
        raise UserError(f"{name} has {width} x {height} pixels, more than {MAX_PIXELS}: shrink it before use")


def _upright(image: Image.Image) -> Image.Image:
    """Apply the EXIF orientation; unreadable metadata says nothing about the pixels and is passed over."""
    try:
        orientation = image.getexif().get(0x0112, 1)
    except Exception:
        return image
    return ImageOps.exif_transpose(image) if orientation in range(2, 9) else image


def _to_eight_bits(image: Image.Image) -> np.ndarray:
    """16-bit and float gray as (height, width) uint8; float images up to 1 count as [0, 1], others as [0, 255]."""
    values = np.asarray(image).astype(np.float64)
    values = np.nan_to_num(values, nan=0.0, posinf=255.0, neginf=0.0)
    scale = 1 / 257  # 255 / 65535
    if image.mode == "F":
        scale = 255 if values.max() <= 1 else 1
    gray = np.clip(np.rint(values * scale), 0, 255).astype(np.uint8)
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        gray[values == transparent] = 255
    return gray


def _gray_to_rgb(gray: np.ndarray) -> np.ndarray:
    """(height, width) to (height, width, 3)."""
    return np.repeat(gray[:, :, None], 3, axis=2)
