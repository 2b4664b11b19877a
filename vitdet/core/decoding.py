"""From next-token logits to sequences: greedily, or by beam search."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Steps(Protocol):
    """What a search walks along: a batch of sequences that remembers what it was told so far."""

    def advance(self, tokens: Tensor) -> Tensor:
        """Append (B, n) tokens; the logits (B, K) of what comes next."""

    def expand(self, copies: int) -> None:
        """Every sequence becomes ``copies`` neighbouring ones."""

    def reorder(self, rows: Tensor) -> None:
        """Sequence b goes on from what sequence ``rows[b]`` was, which is a copy of the same one."""


def greedy_search(steps: Steps, prompt: Tensor, *, stop: int, length: int, padding: int) -> Tensor:
    """The likeliest token, again and again.

    Args:
        steps: the model. prompt: (B, n), what every sequence starts with.
        stop: the token that ends a sequence. length: the most tokens to make. padding: what follows the end.

    Returns:
        (B, T) tokens after the prompt, ``stop`` included; T is at most ``length``.
    """
    if length < 1:
        raise ValueError(f"length is the most tokens to make and at least 1, got {length}")
    logits, made = steps.advance(prompt), []
    finished = torch.zeros(len(prompt), dtype=torch.bool, device=prompt.device)
    while True:
        chosen = logits.argmax(dim=-1).masked_fill(finished, padding)
        finished = finished | (chosen == stop)
        made.append(chosen)
        if len(made) == length or finished.all():
            return torch.stack(made, dim=1)
        logits = steps.advance(chosen[:, None])


def beam_search(
    steps: Steps, prompt: Tensor, *, beams: int, stop: int, length: int, padding: int, length_penalty: float = 0.6
) -> Tensor:
    """The best of the sequences that end in ``stop`` or are ``length`` long, following the ``beams`` best starts.

    A sequence Y is worth log P(Y) / ((5 + |Y|) / 6)^length_penalty (arXiv 1609.08144, eq. 14; the 2017 paper has 4
    beams and a penalty of 0.6, section 6.1). With every start followed, that is the best of all sequences; with one
    and no penalty, it is :func:`greedy_search`. It stops once no start can overtake what is finished.

    Args:
        beams: how many starts. length_penalty: at least 0; more favours longer sequences.
        steps, prompt, stop, length, padding: as in :func:`greedy_search`.

    Returns:
        (B, T) tokens after the prompt, ``stop`` included; T is at most ``length``.
    """
    if length_penalty < 0 or length < 1 or beams < 1:
        raise ValueError(
            f"length_penalty is at least 0, length and beams at least 1; got {length_penalty}, {length} and {beams}"
        )
    logs = steps.advance(prompt).float().log_softmax(dim=-1)  # (B, K)
    steps.expand(beams)
    (batch, vocabulary), device = logs.shape, prompt.device
    first_row = torch.arange(batch, device=device)[:, None] * beams
    logs = logs[:, None].expand(-1, beams, -1)  # (B, beams, K)
    scores = torch.full((batch, beams), float("-inf"), device=device)
    scores[:, 0] = 0  # the beams are still one and the same
    starts = torch.full((batch, beams, length), padding, device=device)
    best_score, best = scores.new_full((batch, 1), float("-inf")), starts[:, :1]
    for step in range(length):
        # Each start ends in one way only: twice as many candidates leave enough that go on.
        found, places = (scores[..., None] + logs).flatten(1).topk(2 * beams, dim=-1)  # (B, 2 beams)
        parents, tokens = places // vocabulary, places % vocabulary
        candidates = _rows(starts, parents)
        candidates[..., step] = tokens
        ended = found.masked_fill(tokens != stop, float("-inf"))[:, :beams] / _penalty(step + 1, length_penalty)
        best_score, winner = torch.cat([best_score, ended], dim=1).max(dim=1, keepdim=True)
        best = _rows(torch.cat([best, candidates[:, :beams]], dim=1), winner)
        scores, going_on = found.masked_fill(tokens == stop, float("-inf")).topk(beams, dim=-1)  # (B, beams)
        starts = _rows(candidates, going_on)
        attainable = scores[:, :1] / _penalty(length, length_penalty)
        if step + 1 == length or (best_score >= attainable).all():
            break
        steps.reorder((first_row + parents.gather(1, going_on)).flatten())
        logs = steps.advance(starts[..., step].reshape(-1, 1)).float().log_softmax(dim=-1).unflatten(0, (batch, beams))
    chosen = torch.where(best_score >= attainable, best[:, 0], starts[:, 0])
    return chosen[:, : step + 1]


def _penalty(length: int, exponent: float) -> float:
    """What the log-probability of a sequence of this length is divided by."""
    return ((5 + length) / 6) ** exponent


def _rows(sequences: Tensor, index: Tensor) -> Tensor:
    """Rows (B, n, T) of (B, m, T) sequences, by (B, n)."""
    return sequences.gather(1, index[..., None].expand(-1, -1, sequences.shape[-1]))
