"""Anchors by hand; the best tokens, and nothing but them, become queries."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vitdet.detectors.query_selection import QuerySelection, TokenProposals, make_anchors

SHAPES = [(4, 6), (2, 3)]
TOKENS = 24 + 6


def selection(num_queries: int = 7) -> QuerySelection:
    module = QuerySelection(16, num_classes=5, num_queries=num_queries)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


def test_anchors_by_hand() -> None:
    anchors, valid = make_anchors([(2, 4), (1, 2)], base=0.1)
    expected = [[(x + 0.5) / 4, (y + 0.5) / 2, 0.1, 0.1] for y in range(2) for x in range(4)]
    expected += [[0.25, 0.5, 0.2, 0.2], [0.75, 0.5, 0.2, 0.2]]
    assert valid.all()
    torch.testing.assert_close(anchors.sigmoid(), torch.tensor(expected))
    assert make_anchors([(1, 1)])[0].sigmoid()[0].tolist() == pytest.approx([0.5, 0.5, 0.05, 0.05])


def test_anchors_at_the_border_are_invalid() -> None:
    anchors, valid = make_anchors([(60, 40)])  # half a cell: 1/120 < 0.01 < 1/80
    valid = valid.view(60, 40)
    assert valid[1:-1].all()
    assert not valid[[0, -1]].any()
    assert (anchors.view(60, 40, 4)[0] == 0).all()
    assert make_anchors([(60, 40)], margin=0.005)[1].all()
    # From the sixth level on an anchor would be larger than the image.
    assert not make_anchors([(1, 1)] * 6)[1][5].any()
    assert make_anchors([(1, 1)] * 6)[1][:5].all()


def test_the_highest_scores_are_taken() -> None:
    module, memory = selection(), torch.randn(3, TOKENS, 16)
    found = module(memory, SHAPES)
    _, all_logits, all_box_logits = module.proposals(memory, SHAPES)
    assert all_logits.shape == (3, TOKENS, 5)
    assert all_box_logits.shape == (3, TOKENS, 4)
    anchors, _ = make_anchors(SHAPES)
    for image in range(3):
        scores = [(row.max().item(), i) for i, row in enumerate(all_logits[image])]
        best = [i for _, i in sorted(scores, reverse=True)[:7]]
        assert torch.equal(found.logits[image], all_logits[image, best])
        assert torch.equal(found.box_logits[image], all_box_logits[image, best])
        tokens = module.proposals.project(memory[image, best])
        torch.testing.assert_close(found.tokens[image], tokens)
        torch.testing.assert_close(found.logits[image], module.proposals.score_head(tokens), rtol=1e-5, atol=1e-5)
        boxes = module.proposals.box_head(tokens) + anchors[best]
        torch.testing.assert_close(found.box_logits[image], boxes, rtol=1e-5, atol=1e-5)


def test_no_more_queries_than_tokens() -> None:
    found = selection(300)(torch.randn(2, TOKENS, 16), SHAPES)
    assert found.tokens.shape == (2, TOKENS, 16)
    assert found.logits.shape == (2, TOKENS, 5)


def test_queries_are_cut_from_the_graph_and_boxes_are_not() -> None:
    memory = torch.randn(1, TOKENS, 16, requires_grad=True)
    found = selection()(memory, SHAPES)
    assert not found.tokens.requires_grad
    for one in (found.logits, found.box_logits):
        gradient = torch.autograd.grad(one.sum(), memory, retain_graph=True)[0]
        assert (gradient.abs().amax(-1) > 0).sum() == 7


def test_invalid_tokens_have_no_say() -> None:
    module, memory, shapes = selection(), torch.randn(1, 60 * 40, 16), [(60, 40)]
    _, valid = make_anchors(shapes)
    broken = torch.where(valid, memory, float("nan"))
    _, expected, _ = module.proposals(memory, shapes)
    _, logits, box_logits = module.proposals(broken, shapes)
    assert torch.equal(logits, expected)
    assert torch.equal(module(broken, shapes).box_logits, module(memory, shapes).box_logits)
    outside = box_logits[:, ~valid[:, 0]].sigmoid()
    assert torch.equal(outside, torch.ones_like(outside))  # box (1, 1, 1, 1), as published


def test_starts_from_the_anchors_at_the_prior() -> None:
    module = TokenProposals(16, num_classes=5)
    _, _, box_logits = module(torch.randn(1, TOKENS, 16), SHAPES)
    torch.testing.assert_close(box_logits[0], make_anchors(SHAPES)[0])
    assert module.score_head.bias.sigmoid().tolist() == pytest.approx([0.01] * 5)
