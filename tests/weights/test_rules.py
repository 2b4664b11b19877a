"""Renaming by rules, joining of parts, and strict loading."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vitdet.errors import UserError
from vitdet.weights.rules import convert_state_dict, load_strict


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(2, 3)
        self.head = nn.Linear(3, 4)


def test_rules_apply_in_turn() -> None:
    source = {"model.enc.0.fc1.weight": torch.ones(2), "anchors": torch.ones(3)}
    rules = [(r"^model\.", ""), (r"^enc\.(\d+)\.", r"encoder.\1.mlp."), (r"\.fc1\.", ".expand."), ("^anchors$", None)]
    converted = convert_state_dict(source, rules)
    assert list(converted) == ["encoder.0.mlp.expand.weight"]


def test_parts_are_stacked_by_their_number() -> None:
    q, k, v = torch.randn(3, 4, 4).unbind(0)
    source = {"a.v.weight": v, "a.q.weight": q, "a.k.weight": k}
    rules = [(rf"\.{name}\.(weight|bias)$", rf".qkv.\1[{index}]") for index, name in enumerate("qkv")]
    torch.testing.assert_close(convert_state_dict(source, rules)["a.qkv.weight"], torch.cat([q, k, v]), rtol=0, atol=0)
    with pytest.raises(UserError, match=r"'a\.qkv\.weight' lack part 1 of 3;"):
        convert_state_dict({"a.q.weight": q, "a.v.weight": v}, rules)


def test_tied_copies_are_one_and_conflicts_are_named() -> None:
    rules = [(r"^(decoder\.)?head\.", "class_head.")]
    tied = {"head.weight": torch.ones(2), "decoder.head.weight": torch.ones(2)}
    assert list(convert_state_dict(tied, rules)) == ["class_head.weight"]
    tied["decoder.head.weight"] = torch.zeros(2)
    with pytest.raises(UserError, match=r"'head\.weight' and 'decoder\.head\.weight' differ"):
        convert_state_dict(tied, rules)


def test_load_strict_fills_every_value() -> None:
    source, model = Small(), Small()
    report = load_strict(model, source.state_dict())
    assert (report.missing, report.unexpected, report.reshaped) == ([], [], [])
    assert str(report) == "all fit"
    for name, tensor in source.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("head.bias"), r"Small: 1 missing: head\.bias;"),
        (lambda state: state.update(extra=torch.ones(1)), r"Small: 1 unexpected: extra;"),
        (
            lambda state: state.update({"head.bias": torch.ones(7)}),
            r"Small: 1 of another shape: head\.bias \[7\] instead of \[4\];",
        ),
    ],
    ids=["missing", "unexpected", "reshaped"],
)
def test_load_strict_refuses(change, message: str) -> None:
    model, state = Small(), Small().state_dict()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    change(state)
    with pytest.raises(UserError, match=message):
        load_strict(model, state)
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0)


def test_load_strict_allows_what_is_named() -> None:
    model, state = Small(), Small().state_dict()
    own_head = model.head.weight.detach().clone()
    state["head.weight"] = torch.zeros(9, 3)
    del state["head.bias"]
    state["teacher.x"] = torch.zeros(1)
    report = load_strict(
        model, state, allow_missing=["head.*"], allow_unexpected=["teacher.*"], allow_reshaped=["head.*"]
    )
    assert report.missing == ["head.bias"]
    assert report.unexpected == ["teacher.x"]
    assert report.reshaped == [("head.weight", (9, 3), (4, 3))]
    torch.testing.assert_close(model.head.weight.detach(), own_head, rtol=0, atol=0)
    torch.testing.assert_close(model.body.weight.detach(), state["body.weight"], rtol=0, atol=0)


def test_a_wrong_file_is_told_briefly() -> None:
    with pytest.raises(UserError, match=r"4 missing: .* 40 unexpected: w0, w1, w2, w3, w4 and 35 more;"):
        load_strict(Small(), {f"w{index}": torch.ones(1) for index in range(40)})
