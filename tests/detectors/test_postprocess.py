"""Top-k selection and scaling to pixels: by hand, and against the published image processor."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vitdet.detectors.postprocess import postprocess, select_top_k
from vitdet.structures import DetectorOutput


@pytest.mark.parametrize("threshold", [0.0, 0.6])
def test_equal_to_the_published_processor(threshold: float) -> None:
    from transformers import RTDetrImageProcessor

    logits, boxes = torch.randn(3, 50, 7), torch.rand(3, 50, 4)
    sizes = torch.tensor([[480, 640], [333, 500], [1, 2000]])
    expected = RTDetrImageProcessor().post_process_object_detection(
        SimpleNamespace(logits=logits, pred_boxes=boxes), threshold=threshold, target_sizes=sizes
    )
    found = postprocess(DetectorOutput(logits, boxes), sizes, top_k=50, threshold=threshold)
    assert len(found) == 3
    for (found_boxes, scores, labels), wanted in zip(found, expected, strict=True):
        assert 0 < len(scores) <= 50
        assert torch.equal(labels, wanted["labels"])
        torch.testing.assert_close(scores, wanted["scores"], rtol=0, atol=1e-6)
        torch.testing.assert_close(found_boxes, wanted["boxes"], rtol=1e-5, atol=1e-5)


def test_one_query_may_give_two_detections() -> None:
    logits = torch.tensor([[[2.0, 1.0, -9.0], [-9.0, 0.0, -9.0]]])
    boxes = torch.tensor([[[0.5, 0.5, 0.2, 0.4], [0.25, 0.5, 0.5, 1.2]]])
    [(found, scores, labels)] = postprocess(DetectorOutput(logits, boxes), torch.tensor([[100, 200]]), top_k=3)
    assert labels.tolist() == [0, 1, 1]
    assert scores.tolist() == pytest.approx([0.880797, 0.731059, 0.5], abs=1e-6)
    # The last one reaches beyond the image and is left so.
    torch.testing.assert_close(found, torch.tensor([[80.0, 30, 120, 70], [80, 30, 120, 70], [0, -10, 100, 110]]))


def test_no_more_than_there_are() -> None:
    scores, labels, boxes = select_top_k(torch.randn(2, 3, 4), torch.rand(2, 3, 4), top_k=300)
    assert scores.shape == labels.shape == (2, 12)
    assert boxes.shape == (2, 12, 4)
    assert (scores[:, 1:] <= scores[:, :-1]).all()
    assert labels.sort(dim=1).values.tolist() == [[0] * 3 + [1] * 3 + [2] * 3 + [3] * 3] * 2


def test_strong_logits_keep_their_order() -> None:
    logits = torch.tensor([[[30.0], [50.0], [40.0]]])  # all have the sigmoid 1.0 in float32
    boxes = torch.arange(3.0).view(1, 3, 1).expand(1, 3, 4)
    scores, _, chosen = select_top_k(logits, boxes, 3)
    assert scores.tolist() == [[1.0, 1.0, 1.0]]
    assert chosen[0, :, 0].tolist() == [1.0, 2.0, 0.0]


def test_half_precision_gives_float32() -> None:
    output = DetectorOutput(torch.randn(1, 5, 3).bfloat16(), torch.rand(1, 5, 4).bfloat16())
    [(boxes, scores, labels)] = postprocess(output, torch.tensor([[4000, 6001]]))
    assert (boxes.dtype, scores.dtype, labels.dtype) == (torch.float32, torch.float32, torch.int64)


def test_nothing_above_the_threshold() -> None:
    output = DetectorOutput(torch.full((2, 5, 3), -3.0), torch.rand(2, 5, 4))
    for boxes, scores, labels in postprocess(output, torch.tensor([[10, 10], [20, 20]]), threshold=0.5):
        assert boxes.shape == (0, 4)
        assert scores.shape == labels.shape == (0,)


def test_selection_can_be_exported() -> None:
    class Selection(torch.nn.Module):
        def forward(self, logits: torch.Tensor, boxes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            return select_top_k(logits, boxes, 4)

    batch = torch.export.Dim("batch", min=1, max=8)
    example = (torch.randn(2, 5, 3), torch.rand(2, 5, 4))
    exported = torch.export.export(Selection(), example, dynamic_shapes=({0: batch}, {0: batch})).module()
    other = (torch.randn(3, 5, 3), torch.rand(3, 5, 4))
    for ours, wanted in zip(exported(*other), select_top_k(*other, 4), strict=True):
        assert torch.equal(ours, wanted)
