"""The key/value cache: what it holds, and that decoding with it equals decoding without."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from vitdet.core.attention import Attention
from vitdet.core.cache import KeyValueCache
from vitdet.core.positions import alibi_bias, rotary_1d

DOUBLE = torch.float64


def test_holds_what_was_appended() -> None:
    cache, keys, values = KeyValueCache(), torch.randn(2, 3, 9, 4), torch.randn(2, 3, 9, 4)
    for start, end in ((0, 2), (2, 3), (3, 8), (8, 9)):
        assert len(cache) == start
        found = cache.append(keys[:, :, start:end], values[:, :, start:end])
        assert torch.equal(found[0], keys[:, :, :end])
        assert torch.equal(found[1], values[:, :, :end])
    assert torch.equal(torch.stack(cache.content()), torch.stack([keys, values]))


def test_memory_is_bounded_and_seldom_moved() -> None:
    cache, one, places = KeyValueCache(), torch.randn(1, 2, 1, 4), set()
    for length in range(1, 201):
        keys, _ = cache.append(one, one)
        places.add(keys.data_ptr())
        assert keys.untyped_storage().nbytes() <= 2 * length * one.nbytes
    assert len(places) <= 9  # doubled, not copied for every token


def test_rows_follow_their_beams() -> None:
    cache, keys, values = KeyValueCache(), torch.randn(3, 1, 2, 4), torch.randn(3, 1, 2, 4)
    cache.append(keys, values)
    cache.reorder(torch.tensor([2, 0, 0]))
    assert torch.equal(cache.content()[0], keys[[2, 0, 0]])
    more = torch.randn(3, 1, 1, 4)
    assert torch.equal(cache.append(more, more)[1], torch.cat([values[[2, 0, 0]], more], dim=2))
    cache.repeat(2)
    assert torch.equal(cache.content()[0][:, :, :2], keys[[2, 2, 0, 0, 0, 0]])
    empty = KeyValueCache()
    empty.reorder(torch.tensor([0]))
    empty.repeat(3)
    assert len(empty) == 0


def test_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="the cache is empty; append to it first"):
        KeyValueCache().content()
    learning = torch.randn(1, 1, 1, 4, requires_grad=True)
    with pytest.raises(ValueError, match=r"decoding without gradients; use torch.no_grad\(\)"):
        KeyValueCache().append(learning, learning)


# What a self-attention over `count` tokens after `start` others is told.
CONTEXTS: dict[str, Any] = {
    "causal": lambda start, count: {},
    "rotary": lambda start, count: {"rotary": rotary_1d(count, 4, start=start)},
    "alibi": lambda start, count: {"bias": alibi_bias(4, count, start + count)},
    "window": lambda start, count: {"window": 3},
    "rotary and window": lambda start, count: {"rotary": rotary_1d(count, 4, start=start), "window": 2},
}


@pytest.mark.parametrize("options", [{}, {"kv_heads": 2, "qk_norm": "rms"}], ids=["plain", "grouped"])
@pytest.mark.parametrize("context", CONTEXTS.values(), ids=CONTEXTS.keys())
@torch.no_grad()
def test_cached_self_attention_equals_uncached(context: Any, options: dict[str, Any]) -> None:
    module, x = Attention(16, 4, **options).to(DOUBLE), torch.randn(2, 9, 16, dtype=DOUBLE)
    whole = module(x, causal=True, **context(0, 9))
    if context(0, 9):
        assert (whole - module(x, causal=True)).abs().max() > 1e-3
    for cuts in ([0, *range(1, 10)], [0, 4, 5, 9]):  # token by token; a prompt, then pieces
        cache = KeyValueCache()
        pieces = [module(x[:, a:b], causal=True, cache=cache, **context(a, b - a)) for a, b in itertools.pairwise(cuts)]
        torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=0, atol=1e-10)
        assert len(cache) == 9


@torch.no_grad()
def test_reordered_rows_go_on_as_the_row_they_were() -> None:
    module, x = Attention(16, 4).to(DOUBLE), torch.randn(3, 4, 16, dtype=DOUBLE)
    rows, cache = torch.tensor([1, 1, 0]), KeyValueCache()
    module(x[:, :3], causal=True, cache=cache)
    cache.reorder(rows)
    found = module(x[rows, 3:], causal=True, cache=cache)
    torch.testing.assert_close(found, module(x, causal=True)[rows, 3:], rtol=0, atol=1e-10)


@torch.no_grad()
def test_a_memory_is_projected_once() -> None:
    module, x, memory = Attention(16, 4, qk_norm="layer").to(DOUBLE), *torch.randn(2, 2, 5, 16, dtype=DOUBLE)
    mask, pos = torch.arange(5)[None] < 3, torch.randn(2, 5, 16, dtype=DOUBLE)
    whole, cache = module(x, memory, memory_pos=pos, mask=mask), KeyValueCache()
    first = module(x[:, :2], memory, memory_pos=pos, mask=mask, cache=cache)
    # What it is called with later is not looked at: keys and values are there.
    rest = module(x[:, 2:], torch.full_like(memory, float("nan")), mask=mask, cache=cache)
    torch.testing.assert_close(torch.cat([first, rest], dim=1), whole, rtol=0, atol=1e-10)
    assert len(cache) == 5


@torch.no_grad()
def test_query_positions_are_seen_with_a_cached_memory() -> None:
    module, x, memory = Attention(16, 4).to(DOUBLE), *torch.randn(2, 2, 5, 16, dtype=DOUBLE)
    pos: Tensor = torch.randn(2, 5, 16, dtype=DOUBLE)
    cache = KeyValueCache()
    expected = module(x, memory, query_pos=pos, cache=cache)
    torch.testing.assert_close(module(x, memory, query_pos=pos, cache=cache), expected, rtol=0, atol=1e-10)
    assert (module(x, memory, cache=cache) - expected).abs().max() > 1e-3
