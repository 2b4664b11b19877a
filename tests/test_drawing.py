"""Drawing: pixels change where they should and nowhere else."""

from __future__ import annotations

import numpy as np

from vitdet.drawing import draw_boxes


def gray(height: int = 200, width: int = 300) -> np.ndarray:
    return np.full((height, width, 3), 128, dtype=np.uint8)


def test_a_box_and_its_caption() -> None:
    image = gray()
    drawn = draw_boxes(image, np.array([[100.0, 60.0, 220.0, 180.0]]), np.array([0]), ["cat"])
    assert (image == 128).all()
    changed = (drawn != 128).any(-1)
    assert changed[120, 99:102].any()  # the left edge
    assert not changed[80:170, 110:210].any()  # the inside
    assert changed[45:60, 100:130].any()  # the name, above the box
    assert not changed[:, 250:].any()


def test_a_class_has_one_colour_and_another_class_another() -> None:
    boxes = np.array([[10.0, 50, 60, 90], [110, 50, 160, 90], [210, 50, 260, 90]])
    drawn = draw_boxes(gray(), boxes, np.array([0, 1, 0]), ["cat", "dog", "cat"])
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
    assert (draw_boxes(gray(), np.zeros((0, 4)), np.zeros(0), []) == 128).all()
