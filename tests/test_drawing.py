"""Drawing: pixels change where they should and nowhere else."""

from __future__ import annotations

import numpy as np
import pytest

from vitdet.drawing import blend_heat, draw_boxes, draw_caption


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


ROWS = [("golden retriever", "0.91"), ("tench", "0.05"), ("chainsaw", "0.01")]


def rows_of_text(drawn: np.ndarray) -> int:
    """Lines of light text, counted as runs of picture rows that hold bright pixels."""
    bright = (drawn > 200).all(-1).any(-1).astype(int)
    return int((np.diff(np.concatenate([[0], bright])) == 1).sum())


def test_a_caption_is_written_into_the_corner() -> None:
    image = gray()
    drawn = draw_caption(image, [("cow", "0.91"), ("ox", "0.05"), ("sow", "0.01")])
    assert (image == 128).all()
    changed = (drawn != 128).any(-1)
    assert changed[5, 5:50].all()  # the panel
    assert not changed[100:].any()
    assert not changed[:, 200:].any()
    assert (drawn[:100, :100].astype(int).sum(-1) > 600).any()  # light text on it
    assert rows_of_text(drawn) == 3


def test_a_caption_grows_with_the_image() -> None:
    heights = [int((draw_caption(gray(side, side), ROWS) != 128).any(-1).any(-1).sum()) for side in (240, 480, 960)]
    assert heights[1] > 1.7 * heights[0]
    assert heights[2] > 1.7 * heights[1]


@pytest.mark.parametrize("size", [(20, 20), (60, 90), (96, 96), (3, 3)])
def test_a_caption_never_leaves_or_covers_the_image(size: tuple[int, int]) -> None:
    height, width = size
    drawn = draw_caption(gray(height, width), [("x" * 500, "0.91"), *ROWS])
    assert drawn.shape == (height, width, 3)
    if height >= 60:
        changed = (drawn != 128).any(-1)
        assert changed.any()
        assert not changed[height // 2 :].any()
        assert not changed[:, width - 2 :].any()


def test_a_long_name_is_cut_and_its_value_is_not() -> None:
    """The right end of the panel, with the value, is the same whatever stands before it."""
    long, longer = (draw_caption(gray(96, 96), [("m" * count, "0.91")]) for count in (40, 90))
    assert np.array_equal(long, longer)
    short = draw_caption(gray(96, 96), [("m", "0.91")])
    assert (long != 128).any(-1).any(0).sum() > (short != 128).any(-1).any(0).sum() + 20


def test_accents_and_other_alphabets_have_letters() -> None:
    """Not the box that stands for a letter that the font lacks."""
    pictures = [draw_caption(gray(), [(letter, "")]) for letter in ("ä", "ж", "λ", "é", "\ue000")]
    for first in range(len(pictures)):
        for second in range(first):
            assert not np.array_equal(pictures[first], pictures[second])


def test_no_rows_change_nothing() -> None:
    assert (draw_caption(gray(), []) == 128).all()


def test_heat_is_blue_where_cold_and_red_where_hot() -> None:
    image, heat = gray(4, 6), np.zeros((4, 6), dtype=np.float32)
    heat[:, 2:4], heat[:, 4:] = 0.5, 1.0
    drawn = blend_heat(image, heat)
    assert drawn.shape == image.shape
    assert drawn.dtype == np.uint8
    assert (image == 128).all()
    assert drawn[0, 0].argmax() == 2
    assert drawn[0, 2].argmax() == 1
    assert drawn[0, 5].argmax() == 0


def test_the_image_shows_through_the_heat() -> None:
    image = np.zeros((2, 2, 3), dtype=np.uint8)
    image[0] = 200
    difference = blend_heat(image, np.full((2, 2), 0.3)).astype(int)
    assert ((difference[0] - difference[1]) == 100).all()
