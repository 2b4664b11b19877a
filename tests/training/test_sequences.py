"""The Transformer learns: sequences reversed by encoder and decoder, copied by a decoder alone."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitdet.core.transformer import TokenTransformer, Transformer

PADDING, START, STOP, FIRST, VOCABULARY = 0, 1, 2, 3, 13
SHORTEST, LONGEST = 3, 10


def sources(count: int, generator: torch.Generator) -> Tensor:
    """(count, LONGEST) tokens of random lengths, filled up with padding."""
    lengths = torch.randint(SHORTEST, LONGEST + 1, (count, 1), generator=generator)
    tokens = torch.randint(FIRST, VOCABULARY, (count, LONGEST), generator=generator)
    return tokens.masked_fill(torch.arange(LONGEST) >= lengths, PADDING)


def reversed_with_stop(source: Tensor) -> Tensor:
    """(B, LONGEST + 1): [a b c 0 …] to [c b a STOP 0 …]."""
    lengths = (source != PADDING).sum(1, keepdim=True)
    place = lengths - 1 - torch.arange(LONGEST)
    turned = source.gather(1, place.clamp(min=0)).masked_fill(place < 0, PADDING)
    return F.pad(turned, (0, 1)).scatter(1, lengths, STOP)


def train(model: nn.Module, loss_of_step, steps: int, lr: float) -> None:
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98))  # section 5.3 of the paper
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_of_step().backward()
        optimizer.step()
        schedule.step()
    model.eval()


def exact(found: Tensor, expected: Tensor) -> float:
    """The share of sequences that are right in every token, the end included."""
    return (F.pad(found, (0, expected.shape[1] - found.shape[1])) == expected).all(1).double().mean().item()


def test_reversal_of_unseen_sequences() -> None:
    unseen = sources(600, torch.Generator().manual_seed(1)).unique(dim=0)
    assert len(unseen) > 500
    held_out = set(map(tuple, unseen.tolist()))
    model = Transformer(VOCABULARY, width=64, heads=4, hidden=128, encoder_layers=2, decoder_layers=2, dropout=0.0)
    generator = torch.Generator().manual_seed(2)

    def loss() -> Tensor:
        source = sources(64, generator)
        source = source[[row not in held_out for row in map(tuple, source.tolist())]]
        target = reversed_with_stop(source)
        told = F.pad(target[:, :-1], (1, 0), value=START)
        return F.cross_entropy(
            model(source, told).flatten(0, 1), target.flatten(), ignore_index=PADDING, label_smoothing=0.1
        )

    train(model, loss, steps=400, lr=3e-3)
    expected, options = reversed_with_stop(unseen), {"start": START, "stop": STOP, "length": LONGEST + 1}
    assert {int(n) for n in (unseen != PADDING).sum(1)} == set(range(SHORTEST, LONGEST + 1))
    assert exact(model.greedy(unseen, **options), expected) > 0.99
    assert exact(model.beam(unseen, beams=4, **options), expected) > 0.99


def test_copying_by_a_decoder_alone() -> None:
    """With rotary positions, shared key/value heads, RMSNorm and SwiGLU, as decoders are made today."""
    separator, length = 1, 6
    model = TokenTransformer(
        VOCABULARY, causal=True, width=64, heads=4, kv_heads=2, hidden=128, layers=2, dropout=0.0, positions="rotary",
        padding=None, norm="rms", activation="swiglu", bias=False,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(2)

    def words(count: int) -> tuple[Tensor, Tensor]:
        """Words, and each with the separator after it."""
        made = torch.randint(FIRST, VOCABULARY, (count, length), generator=generator)
        return made, F.pad(made, (0, 1), value=separator)

    def loss() -> Tensor:
        word, prompt = words(64)
        logits = model(torch.cat([prompt, word[:, :-1]], dim=1))[:, length:]
        return F.cross_entropy(logits.flatten(0, 1), word.flatten())

    train(model, loss, steps=80, lr=5e-3)
    word, prompt = words(500)  # of a million
    assert exact(model.greedy(prompt, stop=STOP, length=length), word) > 0.99
