"""Drawing: pixels change where they should and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vitdet.inference.visualize import contact_sheet, draw_boxes, draw_ground_truth


def gray(height: int = 200, width: int = 300) -> np.ndarray:
    return np.full((height, width, 3), 128, dtype=np.uint8)


def test_ground_truth_is_drawn_beside_the_image() -> None:
    image = gray()
    drawn = draw_ground_truth(image, torch.tensor([[100.0, 60.0, 220.0, 180.0]]), ["cat"])
    assert (image == 128).all()
    changed = (drawn != 128).any(-1)
    assert changed[120, 99:102].any()  # the left edge
    assert not changed[80:170, 110:210].any()  # the inside
    assert changed[45:60, 100:130].any()  # the name, above the box
    assert not changed[:, 250:].any()


def test_a_class_has_one_colour_and_another_class_another() -> None:
    boxes = np.array([[10.0, 50, 60, 90], [110, 50, 160, 90], [210, 50, 260, 90]])
    drawn = draw_ground_truth(gray(), boxes, ["cat", "dog", "cat"])
    first, second, third = (tuple(drawn[70, x]) for x in (10, 110, 210))
    assert first == third
    assert first != second


def test_the_first_box_is_on_top() -> None:
    boxes = np.array([[50.0, 50, 150, 150], [50, 100, 150, 190]])  # one's left edge continues the other's
    ahead = draw_boxes(gray(), boxes, np.array([0, 1]), ["a", "b"])
    behind = draw_boxes(gray(), boxes[::-1], np.array([1, 0]), ["b", "a"])
    assert tuple(ahead[135, 50]) == tuple(ahead[80, 50])
    assert tuple(behind[135, 50]) == tuple(behind[170, 50])


def test_nothing_to_draw_changes_nothing() -> None:
    assert (draw_ground_truth(gray(), torch.zeros(0, 4), []) == 128).all()


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
