"""The decoder: right pixels, right way up, and one sentence for whatever cannot be read."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from vitdet.data.images import MAX_PIXELS, decode_image, image_size, to_rgb
from vitdet.errors import UserError

DAMAGED_AFTER_THE_HEADER = {"pillow/broken_data_stream.png", "pillow/truncated_end_chunk.png"}


def encoded(image: Image.Image, kind: str, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def test_awkward_images(shared_data: Path) -> None:
    """Each file of the collection has the size its manifest implies, or is a user error; nothing else happens."""
    folder = shared_data / "awkward"
    entries = json.loads((folder / "MANIFEST.json").read_text())
    refusals = {}
    for entry in entries:
        name, path = entry["path"], folder / entry["path"]
        try:
            image = decode_image(path)
        except UserError as error:
            refusals[name] = str(error)
            continue
        width, height = entry["size"]
        size = (width, height) if (entry["orientation"] or 1) >= 5 else (height, width)
        assert (image.shape, image.dtype) == ((*size, 3), np.uint8), name
        assert image.flags.c_contiguous, name
        assert image_size(path) == size, name
    refused = {entry["path"] for entry in entries if entry["decode"] != "ok"} | DAMAGED_AFTER_THE_HEADER
    assert refusals.keys() == refused
    assert all(str(folder / name) in sentence and "\n" not in sentence for name, sentence in refusals.items())
    assert len(entries) > 100


def test_made_images(shared_data: Path) -> None:
    folder = shared_data / "awkward" / "made"
    shapes, messages = {}, {}
    for path in folder.iterdir():
        if path.name == "large_144MP_gray.png":
            continue
        try:
            shapes[path.name] = decode_image(path).shape
        except UserError as error:
            messages[path.name] = str(error)
    assert shapes.pop("strip_6000x3.png") == (3, 6000, 3)
    assert shapes.pop("one_pixel.png") == (1, 1, 3)
    assert shapes.pop("png_named.jpg") == (150, 200, 3)
    assert set(shapes.values()) == {(128, 128, 3)}
    assert len(shapes) == 4  # hidden, upper case, without suffix, and not in ASCII
    assert messages == {
        "empty.jpg": f"image {folder / 'empty.jpg'} is empty (0 bytes): replace or remove it",
        "text.jpg": f"{folder / 'text.jpg'} is not an image in a known format: replace or remove it",
    }


@pytest.mark.slow
def test_a_very_large_image(shared_data: Path) -> None:
    assert decode_image(shared_data / "awkward" / "made" / "large_144MP_gray.png").shape == (12000, 12000, 3)


def test_a_large_image_is_decoded_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between one and two times its own bound Pillow warns; ours is the only bound."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    assert decode_image(encoded(Image.new("L", (15, 10), 3), "PNG")).shape == (10, 15, 3)


def test_a_plain_jpeg_has_pillows_pixels(tmp_path: Path) -> None:
    picture = np.random.default_rng(0).integers(0, 256, (37, 53, 3), dtype=np.uint8)
    path = tmp_path / "plain.jpg"
    Image.fromarray(picture).save(path, quality=90)
    expected = np.asarray(Image.open(path).convert("RGB"))
    assert np.array_equal(decode_image(path), expected)
    assert np.array_equal(decode_image(path.read_bytes()), expected)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied(tmp_path: Path, orientation: int) -> None:
    """The picture is stored turned so that the tag brings it back: red left, blue right at the bottom."""
    upright = np.zeros((4, 6, 3), dtype=np.uint8)
    upright[:, 0] = (255, 0, 0)
    upright[3, 5] = (0, 0, 255)
    inverse = {1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 8, 7: 7, 8: 6}[orientation]
    carrier = Image.fromarray(upright)
    carrier.getexif()[0x0112] = inverse
    stored = ImageOps.exif_transpose(carrier)
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / "turned.png"
    stored.save(path, exif=exif)
    assert np.array_equal(decode_image(path), upright)
    assert image_size(path) == (4, 6)


def test_transparency_is_white() -> None:
    half = Image.new("RGBA", (2, 1), (200, 100, 0, 255))
    half.putpixel((1, 0), (200, 100, 0, 0))
    assert decode_image(encoded(half, "PNG")).tolist() == [[[200, 100, 0], [255, 255, 255]]]
    gray = Image.new("LA", (2, 1), (50, 255))
    gray.putpixel((1, 0), (50, 0))
    assert to_rgb(gray).tolist() == [[[50, 50, 50], [255, 255, 255]]]
    keyed = encoded(Image.new("L", (1, 1), 7), "PNG", transparency=7)
    assert decode_image(keyed).tolist() == [[[255, 255, 255]]]


def test_sixteen_bits_are_scaled() -> None:
    """0, a half, all of 16 bits are 0, a half, all of 8; Pillow's own conversion would clip at 255."""
    deep = Image.fromarray(np.array([[0, 128 * 257, 65535]], dtype=np.uint16))
    assert decode_image(encoded(deep, "PNG"))[0, :, 0].tolist() == [0, 128, 255]
    assert decode_image(encoded(deep, "TIFF"))[0, :, 2].tolist() == [0, 128, 255]


def test_float_images() -> None:
    unit = Image.fromarray(np.array([[0.0, 0.5, 1.0]], dtype=np.float32))
    levels = Image.fromarray(np.array([[0.0, 128.0, 300.0]], dtype=np.float32))
    assert to_rgb(unit)[0, :, 0].tolist() == [0, 128, 255]
    assert to_rgb(levels)[0, :, 0].tolist() == [0, 128, 255]


def test_cmyk_and_palette_become_rgb() -> None:
    cmyk = Image.new("CMYK", (1, 1), (0, 255, 255, 0))
    assert to_rgb(cmyk).tolist() == [[[255, 0, 0]]]
    assert to_rgb(Image.new("RGB", (1, 1), (9, 99, 199)).convert("P", palette=Image.Palette.ADAPTIVE)).shape == (
        1,
        1,
        3,
    )
    assert to_rgb(Image.new("1", (1, 1), 1)).tolist() == [[[255, 255, 255]]]


def test_the_first_frame_is_taken() -> None:
    frames = [Image.new("RGB", (3, 3), colour) for colour in ("red", "blue")]
    animation = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert decode_image(animation)[0, 0].tolist() == [255, 0, 0]


def test_a_bomb_is_refused_from_its_header() -> None:
    """A header that promises 20000 x 20000 pixels, and nothing behind it."""
    picture = bytearray(encoded(Image.new("1", (8, 8)), "BMP"))
    picture[18:26] = (20000).to_bytes(4, "little") * 2
    with pytest.raises(UserError, match=f"more than {MAX_PIXELS} pixels|more than {MAX_PIXELS}: shrink it"):
        decode_image(bytes(picture))


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    picture = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    path = tmp_path / "cut.jpg"
    path.write_bytes(encoded(Image.fromarray(picture), "JPEG")[:-800])
    with pytest.raises(UserError, match=r"cut\.jpg cannot be decoded .*truncated"):
        decode_image(path)


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere\.png does not exist: check the path"):
        decode_image(tmp_path / "nowhere.png")
    with pytest.raises(UserError, match="is a folder, not an image file"):
        decode_image(tmp_path)
    with pytest.raises(UserError, match="0 bytes"):
        decode_image(b"")
    with pytest.raises(UserError, match="the given bytes is not an image"):
        decode_image(b"hello")
