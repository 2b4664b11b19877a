"""Pictures side by side."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vitdet.data.images import decode_image
from vitdet.inference.visualize import contact_sheet, save_sheet


def test_contact_sheet_places_images_row_by_row() -> None:
    images = [np.full((10 * height, 40, 3), value, dtype=np.uint8) for value, height in ((10, 2), (20, 4), (30, 8))]
    sheet = contact_sheet(images, columns=2, tile=(20, 40), gap=2)
    assert sheet.shape == (2 * 22 + 2, 2 * 42 + 2, 3)
    assert (sheet[2:22, 2:42] == 10).all()  # fits as it is
    assert (sheet[2:22, 54:74] == 20).all()  # 40x40 shrunk to 20x20, in the middle
    assert (sheet[24:44, 17:27] == 30).all()  # 80x40 shrunk to 20x10, in the second row
    assert (sheet[:2] == 255).all()
    assert (sheet[24:44, 44:] == 255).all()
    assert contact_sheet(images[:1], columns=4, tile=(20, 40), gap=0).shape == (20, 40, 3)


def test_contact_sheet_needs_images() -> None:
    with pytest.raises(ValueError, match="a contact sheet needs images"):
        contact_sheet([])


def test_a_sheet_of_files(tmp_path: Path) -> None:
    for name, value in (("a.png", 60), ("b.png", 200)):
        Image.new("RGB", (320, 240), (value, value, value)).save(tmp_path / name)
    sheet = save_sheet([tmp_path / "b.png", tmp_path / "a.png"], tmp_path / "sheet.jpg")
    assert sheet == tmp_path / "sheet.jpg"
    picture = decode_image(sheet)
    assert picture.shape == (248, 652, 3)
    assert [int(picture[124, x].mean()) for x in (160, 490)] == pytest.approx([200, 60], abs=3)
