"""Searches over a tiny model whose every sequence can be listed."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from vitdet.core.decoding import beam_search, greedy_search

VOCABULARY, STOP, PADDING = 3, 2, 7


class Table:
    """Logits by everything said before, looked up in a random table; remembers what it was told."""

    def __init__(self, batch: int, length: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.logits = [
            {
                prefix: 2 * torch.randn(VOCABULARY, generator=generator)
                for n in range(length)
                for prefix in itertools.product(range(VOCABULARY), repeat=n)
            }
            for _ in range(batch)
        ]
        self.said: list[tuple[int, list[int]]] = [(row, []) for row in range(batch)]
        self.calls = 0

    def advance(self, tokens: Tensor) -> Tensor:
        self.calls += 1
        if tokens.shape[1] == 2:  # the prompt
            return torch.stack([self.logits[row][()] for row, _ in self.said])
        self.said = [
            (row, [*before, token]) for (row, before), (token,) in zip(self.said, tokens.tolist(), strict=True)
        ]
        return torch.stack([self.logits[r].get(tuple(s), torch.zeros(VOCABULARY)) for r, s in self.said])

    def expand(self, copies: int) -> None:
        self.said = [one for one in self.said for _ in range(copies)]

    def reorder(self, rows: Tensor) -> None:
        assert all(self.said[new][0] == row for new, (row, _) in zip(rows.tolist(), self.said, strict=True))
        self.said = [self.said[row] for row in rows.tolist()]


def worth(table: Table, row: int, sequence: tuple[int, ...], penalty: float) -> float:
    logs = [table.logits[row][sequence[:n]].log_softmax(0)[token].item() for n, token in enumerate(sequence)]
    return sum(logs) / ((5 + len(sequence)) / 6) ** penalty


def all_sequences(length: int) -> list[tuple[int, ...]]:
    """Those that end in STOP, and those cut off at the length."""
    return [
        (*start, end)
        for n in range(length)
        for start in itertools.product(range(VOCABULARY - 1), repeat=n)
        for end in (range(VOCABULARY) if n == length - 1 else (STOP,))
    ]


def prompt(batch: int) -> Tensor:
    return torch.zeros(batch, 2, dtype=torch.long)


@pytest.mark.parametrize("penalty", [0.0, 0.6, 3.0])
def test_with_every_start_followed_the_best_is_found(penalty: float) -> None:
    batch, length = 12, 4
    table = Table(batch, length, seed=1)
    found = beam_search(
        table, prompt(batch), beams=30, stop=STOP, length=length, padding=PADDING, length_penalty=penalty
    )
    lengths = set()
    for row in range(batch):
        best = max(all_sequences(length), key=lambda sequence, row=row: worth(table, row, sequence, penalty))
        lengths.add(len(best))
        assert [token for token in found[row].tolist() if token != PADDING] == list(best)
        assert found[row, len(best) :].eq(PADDING).all()
    assert len(lengths) > 1 or penalty == 3.0


def plainly(table: Table, row: int, beams: int, length: int, penalty: float) -> tuple[int, ...]:
    """Beam search of one sequence over lists, to the full length: nothing is stopped early."""
    starts: list[tuple[int, ...]] = [()]
    finished: list[tuple[int, ...]] = []
    for _ in range(length):
        longer = [(*start, token) for start in starts for token in range(VOCABULARY)]
        longer.sort(key=lambda sequence: worth(table, row, sequence, 0.0), reverse=True)
        finished += [sequence for sequence in longer[:beams] if sequence[-1] == STOP]
        starts = [sequence for sequence in longer if sequence[-1] != STOP][:beams]
    return max([*finished, starts[0]], key=lambda sequence: worth(table, row, sequence, penalty))


@pytest.mark.parametrize("penalty", [0.0, 1.0, 3.0])
@pytest.mark.parametrize("beams", [1, 2, 3])
def test_equal_to_a_plain_search(beams: int, penalty: float) -> None:
    length = 5
    options = {"stop": STOP, "length": length, "padding": PADDING, "length_penalty": penalty}
    for seed in range(40):  # one by one: in a batch, the last to be done would hide that others stop too early
        table = Table(1, length, seed)
        (found,) = beam_search(table, prompt(1), beams=beams, **options).tolist()
        assert [token for token in found if token != PADDING] == list(plainly(table, 0, beams, length, penalty))


def test_more_beams_find_better_sequences() -> None:
    batch, length = 40, 5
    totals = []
    for beams in (1, 2, 16):
        table = Table(batch, length, seed=2)
        found = beam_search(
            table, prompt(batch), beams=beams, stop=STOP, length=length, padding=PADDING, length_penalty=0.0
        )
        sequences = [tuple(token for token in row if token != PADDING) for row in found.tolist()]
        totals.append(sum(worth(table, row, sequence, 0.0) for row, sequence in enumerate(sequences)))
    assert totals[0] < totals[1] <= totals[2]


def test_one_beam_is_greedy() -> None:
    batch, length = 40, 5
    greedy = greedy_search(Table(batch, length, 3), prompt(batch), stop=STOP, length=length, padding=PADDING)
    one = beam_search(
        Table(batch, length, 3), prompt(batch), beams=1, stop=STOP, length=length, padding=PADDING, length_penalty=0.0
    )
    assert torch.equal(one, greedy)
    table = Table(batch, length, 3)
    for row, sequence in enumerate(greedy.tolist()):
        for place, token in enumerate(sequence):
            if STOP in sequence[:place]:
                assert token == PADDING
            else:
                assert token == table.logits[row][tuple(sequence[:place])].argmax()
    assert greedy.eq(STOP).any(1).double().mean() > 0.5
    assert not greedy.eq(STOP).any(1).all()


def test_a_longer_penalty_favours_longer_sequences() -> None:
    batch, length = 40, 5
    lengths = []
    for penalty in (0.0, 2.0):
        found = beam_search(
            Table(batch, length, 4), prompt(batch), beams=16, stop=STOP, length=length, padding=PADDING,
            length_penalty=penalty,
        )  # fmt: skip
        lengths.append(found.ne(PADDING).sum().item())
    assert lengths[0] < lengths[1]
    with pytest.raises(ValueError, match=r"length_penalty is at least 0, length and beams at least 1; got -1"):
        beam_search(Table(1, 1, 0), prompt(1), beams=1, stop=2, length=1, padding=0, length_penalty=-1)


@pytest.mark.parametrize("search", ["greedy", "beam"])
def test_a_sequence_is_decoded_the_same_alone_and_in_a_batch(search: str) -> None:
    batch, length = 6, 5
    table = Table(batch, length, seed=5)

    def run(steps: Table, count: int) -> list[list[int]]:
        options = {"stop": STOP, "length": length, "padding": PADDING}
        found = (
            greedy_search(steps, prompt(count), **options)
            if search == "greedy"
            else beam_search(steps, prompt(count), beams=3, **options)
        )
        return [[token for token in row if token != PADDING] for row in found.tolist()]

    together = run(table, batch)
    for row in range(batch):
        alone = Table(batch, length, seed=5)
        alone.logits, alone.said = [alone.logits[row]], [(0, [])]
        assert run(alone, 1) == [together[row]]


def test_it_stops_as_soon_as_all_have() -> None:
    for search in (
        lambda table: greedy_search(table, prompt(2), stop=STOP, length=50, padding=PADDING),
        lambda table: beam_search(table, prompt(2), beams=2, stop=STOP, length=50, padding=PADDING),
    ):
        table = Table(2, 1, seed=0)
        for logits in table.logits:
            logits[()] = torch.tensor([0.0, 0.0, 20.0])
        assert search(table).tolist() == [[STOP], [STOP]]
        assert table.calls == 1
