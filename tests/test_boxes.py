"""Box arithmetic: values by hand, laws that hold for any boxes, and equality with torchvision."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchvision.ops import box_iou, generalized_box_iou

from vitdet import boxes as box_ops

COORDINATE = st.floats(-1000, 1000, width=32)
SIDE = st.floats(0, 500, width=32)
BOX = st.tuples(COORDINATE, COORDINATE, SIDE, SIDE).map(lambda b: (b[0], b[1], b[0] + b[2], b[1] + b[3]))
BOXES = st.lists(BOX, min_size=1, max_size=5).map(lambda rows: torch.tensor(rows, dtype=torch.float64))


def test_conversions_by_hand() -> None:
    xyxy = torch.tensor([[10.0, 20.0, 40.0, 80.0]])
    assert box_ops.xyxy_to_cxcywh(xyxy).tolist() == [[25.0, 50.0, 30.0, 60.0]]
    assert box_ops.cxcywh_to_xyxy(torch.tensor([[25.0, 50.0, 30.0, 60.0]])).tolist() == xyxy.tolist()
    assert box_ops.xyxy_to_xywh(xyxy).tolist() == [[10.0, 20.0, 30.0, 60.0]]
    assert box_ops.area(xyxy).tolist() == [1800.0]


@pytest.mark.parametrize(
    ("other", "iou", "giou"),
    [
        ([0.0, 0.0, 2.0, 2.0], 1.0, 1.0),  # the same
        ([1.0, 1.0, 3.0, 3.0], 1 / 7, 1 / 7 - 2 / 9),  # overlap 1, union 7, hull 9
        ([0.5, 0.5, 1.5, 1.5], 1 / 4, 1 / 4),  # inside: the hull is the outer box
        ([2.0, 0.0, 4.0, 2.0], 0.0, 0.0),  # side by side: the hull is the union
        ([3.0, 3.0, 5.0, 5.0], 0.0, 8 / 25 - 1),  # apart: union 8, hull 25
    ],
)
def test_iou_and_giou_by_hand(other: list[float], iou: float, giou: float) -> None:
    pair = box_ops.iou_and_giou(torch.tensor([0.0, 0.0, 2.0, 2.0]), torch.tensor(other))
    assert [value.item() for value in pair] == pytest.approx([iou, giou], abs=1e-7)


def test_shapes_broadcast() -> None:
    first, second = torch.rand(2, 3, 4), torch.rand(2, 5, 4)
    assert box_ops.cxcywh_to_xyxy(first).shape == (2, 3, 4)
    assert box_ops.iou_and_giou(first[0, :0, None], second[0, None])[0].shape == (0, 5)
    matrix = box_ops.iou_and_giou(first[:, :, None], second[:, None])[1]
    assert matrix.shape == (2, 3, 5)
    assert torch.equal(matrix[1, 2, 4], box_ops.iou_and_giou(first[1, 2], second[1, 4])[1])


@settings(deadline=None, max_examples=60)
@given(BOXES)
def test_conversions_are_inverse(boxes: Tensor) -> None:
    assert torch.allclose(box_ops.cxcywh_to_xyxy(box_ops.xyxy_to_cxcywh(boxes)), boxes, rtol=0, atol=1e-9)
    assert torch.allclose(box_ops.xyxy_to_xywh(boxes)[:, 2:].prod(-1), box_ops.area(boxes))


@settings(deadline=None, max_examples=60)
@given(BOXES, BOXES)
def test_bounds_and_symmetry(first: Tensor, second: Tensor) -> None:
    iou, giou = box_ops.iou_and_giou(first[:, None], second[None])
    assert iou.min() >= 0
    assert iou.max() <= 1
    assert giou.min() > -1 - 1e-12
    assert (giou <= iou + 1e-12).all()
    assert torch.equal(box_ops.iou_and_giou(second[:, None], first[None])[0].T, iou)
    moved = box_ops.iou_and_giou((first * 4 + 8)[:, None], (second * 4 + 8)[None])[1]  # neither depends on the unit
    sturdy = (box_ops.area(first) > 1)[:, None] & (box_ops.area(second) > 1)[None]
    assert torch.allclose(moved[sturdy], giou[sturdy], atol=1e-9)


@settings(deadline=None, max_examples=60)
@given(BOXES, BOXES)
def test_equal_to_torchvision(first: Tensor, second: Tensor) -> None:
    second = second + torch.tensor([0.0, 0.0, 0.5, 0.5])  # torchvision divides by zero for two empty boxes
    iou, giou = box_ops.iou_and_giou(first[:, None], second[None])
    assert torch.allclose(iou, box_iou(first, second), atol=1e-12)
    assert torch.allclose(giou, generalized_box_iou(first, second), atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_degenerate_boxes_give_numbers_and_finite_gradients(dtype: torch.dtype) -> None:
    rows = [[1.0, 1, 1, 1], [1, 1, 1, 5], [0, 0, 0, 0], [2, 2, 4, 4], [3, 3, 2, 2]]  # points, a line, a box, inverted
    first = torch.tensor(rows, dtype=dtype, requires_grad=True)
    second = torch.tensor(rows, dtype=dtype, requires_grad=True)
    iou, giou = box_ops.iou_and_giou(first[:, None], second[None])
    assert torch.isfinite(iou).all()
    assert torch.isfinite(giou).all()
    assert iou[:3, :3].abs().max() == 0
    (iou.sum() + giou.sum()).backward()
    assert torch.isfinite(first.grad).all()
    assert torch.isfinite(second.grad).all()


def test_gradients_are_those_of_finite_differences() -> None:
    first = torch.tensor([[0.1, 0.2, 0.6, 0.9], [0.0, 0.0, 0.2, 0.3]], dtype=torch.float64, requires_grad=True)
    second = torch.tensor([[0.3, 0.1, 0.8, 0.7], [0.5, 0.6, 0.9, 0.8]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda a, b: box_ops.iou_and_giou(a, b)[1], (first, second))
