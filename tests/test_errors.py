"""How the sentences of user errors name things."""

from __future__ import annotations

import pytest

from vitdet.errors import UserError, did_you_mean, some


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ([], ""),
        (["a"], "a"),
        (["a", "b"], "a, b"),
        (list("abcde"), "a, b, c, d, e"),
        (tuple("abcdef"), "a, b, c, d, e and 1 more"),
        ([str(number) for number in range(80)], "0, 1, 2, 3, 4 and 75 more"),
    ],
)
def test_some(names: list[str], text: str) -> None:
    assert some(names) == text


def test_some_of_another_number() -> None:
    assert some(["a", "b", "c"], most=2) == "a, b and 1 more"


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("epoch", "did you mean 'epochs'?"),
        ("bathc", "did you mean 'batch'?"),
        ("zzz", "known: epochs, batch, ema"),  # in the order given
        ("", "known: epochs, batch, ema"),
    ],
)
def test_did_you_mean(word: str, text: str) -> None:
    assert did_you_mean(word, ["epochs", "batch", "ema"]) == text
    assert did_you_mean(word, iter({"epochs": 1, "batch": 2, "ema": 3})) == text  # read once


def test_a_user_error_is_a_value_error() -> None:
    """So that callers of the Python interface need not know the class."""
    assert issubclass(UserError, ValueError)
