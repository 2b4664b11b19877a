"""Attention: equal to torch's own module with the same weights, and the laws that hold for any weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vitdet.core.attention import Attention, explicit_attention, scaled_dot_product_attention
from vitdet.core.masks import causal_mask, sliding_window_mask
from vitdet.core.positions import alibi_bias, rotary_1d, rotate

DOUBLE = torch.float64


def tokens(count: int = 6, width: int = 16, batch: int = 2) -> Tensor:
    return torch.randn(batch, count, width, dtype=DOUBLE, requires_grad=True)


def attention(**options) -> Attention:
    """With biases that matter, which start at 0."""
    module = Attention(16, 4, **options).to(DOUBLE)
    if module.qkv.bias is not None:
        nn.init.normal_(module.qkv.bias)
        nn.init.normal_(module.out.bias)
    return module


def torch_twin(ours: Attention) -> nn.MultiheadAttention:
    theirs = nn.MultiheadAttention(16, 4, batch_first=True, dtype=DOUBLE)
    theirs.in_proj_weight.data.copy_(ours.qkv.weight)
    theirs.in_proj_bias.data.copy_(ours.qkv.bias)
    theirs.out_proj.load_state_dict(ours.out.state_dict())
    return theirs


def gradients(output: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    probe = torch.linspace(-1, 1, output.numel(), dtype=DOUBLE).view_as(output)
    return list(torch.autograd.grad((output * probe).sum(), inputs))


def assert_same(ours: tuple[Tensor, list[Tensor]], theirs: tuple[Tensor, list[Tensor]]) -> None:
    torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=1e-10)
    for mine, other in zip(gradients(*ours), gradients(*theirs), strict=True):
        assert mine.abs().max() > 1e-3
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-10)


def test_self_attention_equals_torch() -> None:
    ours, x, pos = attention(), tokens(), tokens()
    theirs = torch_twin(ours)
    allowed = torch.rand(6, 6) < 0.7
    allowed.fill_diagonal_(True)
    mine = ours(x, query_pos=pos, mask=allowed)
    other = theirs(x + pos, x + pos, x, attn_mask=~allowed, need_weights=False)[0]
    assert_same(
        (mine, [x, pos, ours.qkv.weight, ours.qkv.bias, ours.out.weight]),
        (other, [x, pos, theirs.in_proj_weight, theirs.in_proj_bias, theirs.out_proj.weight]),
    )


@pytest.mark.parametrize("with_memory_pos", [False, True])
def test_cross_attention_equals_torch(with_memory_pos: bool) -> None:
    ours, x, pos, memory, memory_pos = attention(), tokens(), tokens(), tokens(9), tokens(9)
    theirs = torch_twin(ours)
    keys = memory + memory_pos if with_memory_pos else memory
    mine = ours(x, memory, query_pos=pos, memory_pos=memory_pos if with_memory_pos else None)
    other = theirs(x + pos, keys, memory, need_weights=False)[0]
    assert_same(
        (mine, [x, pos, memory, ours.qkv.weight, ours.qkv.bias]),
        (other, [x, pos, memory, theirs.in_proj_weight, theirs.in_proj_bias]),
    )


def test_weights_equal_torch() -> None:
    ours, x, memory = attention(), tokens(), tokens(9)
    collected: list[Tensor] = []
    mixed = ours(x, memory, collect=collected)
    (weights,) = collected
    expected, expected_weights = torch_twin(ours)(x, memory, memory, average_attn_weights=False)
    torch.testing.assert_close(mixed, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(weights, expected_weights, rtol=0, atol=1e-10)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "mask": {"mask": True},
    "bias": {"bias": True},
    "mask and bias": {"mask": True, "bias": True},
    "causal": {"causal": True},
    "causal, mask and bias": {"causal": True, "mask": True, "bias": True},
    "window": {"window": 2},
    "causal window and bias": {"causal": True, "window": 3, "bias": True},
}


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("memory", [5, 8])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_fused_equals_explicit(case: dict[str, Any], memory: int, kv_heads: int) -> None:
    q = torch.randn(2, 4, 5, 3, dtype=DOUBLE, requires_grad=True)
    k, v = (torch.randn(2, kv_heads, memory, 3, dtype=DOUBLE, requires_grad=True) for _ in range(2))
    mask = (torch.rand(2, 1, 5, memory) < 0.6) | (torch.arange(memory) == 0)
    bias = torch.randn(4, 5, memory, dtype=DOUBLE, requires_grad=True)
    options = {
        "mask": mask if case.get("mask") else None,
        "bias": bias if case.get("bias") else None,
        "causal": case.get("causal", False),
        "window": case.get("window"),
    }
    explicit, weights = explicit_attention(q, k, v, **options)
    inputs = [q, k, v, bias] if case.get("bias") else [q, k, v]
    assert_same((scaled_dot_product_attention(q, k, v, **options), inputs), (explicit, inputs))

    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 5, dtype=DOUBLE))
    allowed = mask.expand(2, 4, 5, memory) if case.get("mask") else torch.ones(2, 4, 5, memory, dtype=torch.bool)
    if case.get("causal"):
        allowed = allowed & (torch.arange(memory) <= torch.arange(5)[:, None] + memory - 5)
    if window := case.get("window"):
        allowed = allowed & ((torch.arange(memory) - torch.arange(5)[:, None] - memory + 5).abs() < window)
    assert torch.equal(weights > 0, allowed)


@pytest.mark.parametrize("learning", [True, False])
@pytest.mark.parametrize(
    "case", [CASES["plain"], CASES["mask and bias"], CASES["causal"]], ids=["plain", "mask", "causal"]
)
def test_half_precision_is_as_exact_as_its_numbers(case: dict[str, bool], learning: bool) -> None:
    """Whichever path bfloat16 takes, within a few of its steps of 1/256."""
    q = torch.randn(2, 4, 40, 8, dtype=torch.bfloat16, requires_grad=learning)
    k, v = (torch.randn(2, 2, 40, 8, dtype=torch.bfloat16) for _ in range(2))
    options = {
        "mask": (torch.rand(2, 1, 40, 40) < 0.6) | torch.eye(40, dtype=torch.bool) if case.get("mask") else None,
        "bias": torch.randn(4, 40, 40) if case.get("bias") else None,
        "causal": case.get("causal", False),
    }
    found = scaled_dot_product_attention(q, k, v, **options)
    assert found.dtype == torch.bfloat16
    expected, _ = explicit_attention(q.double(), k.double(), v.double(), **options)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=0.04)
    assert expected.std() > 0.2
    dropped = scaled_dot_product_attention(q, k, v, dropout=0.5)
    assert (dropped.double() - explicit_attention(q.double(), k.double(), v.double())[0]).abs().max() > 0.2


def test_bias_multiplies_the_odds() -> None:
    """softmax(s + ln 3) gives three times the odds; a bias of one value for all changes nothing."""
    q, k, v = (torch.randn(1, 1, 4, 2, dtype=DOUBLE) for _ in range(3))
    bias = torch.zeros(4, 4, dtype=DOUBLE)
    bias[:, 0] = torch.log(torch.tensor(3.0))
    plain, biased = explicit_attention(q, k, v)[1], explicit_attention(q, k, v, bias=bias)[1]
    torch.testing.assert_close(biased[..., 0] / biased[..., 1], 3 * plain[..., 0] / plain[..., 1])
    torch.testing.assert_close(explicit_attention(q, k, v, bias=torch.ones(4, 4))[1], plain)


def test_scores_are_scaled_by_the_head_width() -> None:
    q = torch.full((1, 1, 1, 4), 2.0)
    k = torch.tensor([[1.0, 1, 1, 1], [0, 0, 0, 0]]).view(1, 1, 2, 4)
    _, weights = explicit_attention(q, k, k)
    assert weights.flatten().tolist() == pytest.approx([0.982014, 0.017986], abs=1e-6)  # sigmoid(8 / √4)


def test_blind_to_order_without_positions() -> None:
    module, x, pos, order = attention(), tokens(), tokens(), torch.tensor([3, 0, 5, 1, 4, 2])
    torch.testing.assert_close(module(x[:, order]), module(x)[:, order], rtol=0, atol=1e-10)
    moved = module(x[:, order], query_pos=pos) - module(x, query_pos=pos)[:, order]
    assert moved.abs().max() > 0.01
    # Nor does the order of the memory matter.
    memory = tokens()
    torch.testing.assert_close(module(x, memory[:, order]), module(x, memory), rtol=0, atol=1e-10)


def test_positions_never_enter_the_values() -> None:
    module, x = attention(), tokens(1)  # a single token takes its own value, whatever the scores
    torch.testing.assert_close(module(x, query_pos=tokens(1)), module(x))
    torch.testing.assert_close(module(x, x, memory_pos=tokens(1)), module(x))


def test_causal_output_ignores_the_future() -> None:
    module, x = attention(), tokens()
    changed = x.detach().clone()
    changed[:, 4:] = torch.randn(2, 2, 16, dtype=DOUBLE)
    before, after = module(x, causal=True), module(changed, causal=True)
    torch.testing.assert_close(after[:, :4], before[:, :4], rtol=0, atol=1e-10)
    assert (after[:, 4:] - before[:, 4:]).abs().amax(-1).min() > 0.01
    assert (module(changed) - module(x))[:, :4].abs().max() > 0.01


def test_causal_queries_may_be_the_last_ones_only() -> None:
    """Decoding goes on from where it stopped: the last queries over the whole memory give the last rows."""
    q, k, v = (torch.randn(1, 2, 7, 3, dtype=DOUBLE) for _ in range(3))
    whole = scaled_dot_product_attention(q, k, v, causal=True)
    for count in (1, 3):
        part = scaled_dot_product_attention(q[:, :, -count:], k, v, causal=True)
        torch.testing.assert_close(part, whole[:, :, -count:], rtol=0, atol=1e-10)


def test_grouped_heads_equal_repeated_ones() -> None:
    grouped, full, x, memory = attention(kv_heads=2), attention(), tokens(), tokens(9)
    assert grouped.qkv.weight.shape == (16 + 2 * 8, 16)

    def repeated(rows: Tensor) -> Tensor:
        q, k, v = rows.split([16, 8, 8])
        k, v = (part.unflatten(0, (2, 4)).repeat_interleave(2, dim=0).flatten(0, 1) for part in (k, v))
        return torch.cat([q, k, v])

    full.qkv.weight.data.copy_(repeated(grouped.qkv.weight))
    full.qkv.bias.data.copy_(repeated(grouped.qkv.bias))
    full.out.load_state_dict(grouped.out.state_dict())
    torch.testing.assert_close(grouped(x, memory), full(x, memory), rtol=0, atol=1e-10)
    torch.testing.assert_close(grouped(x), full(x), rtol=0, atol=1e-10)


def test_normalised_queries_and_keys_have_no_scale() -> None:
    for qk_norm in ("rms", None):
        module, x = attention(bias=False, qk_norm=qk_norm), tokens()
        before = module(x)
        with torch.no_grad():
            module.qkv.weight[:16] *= 5  # queries
            module.qkv.weight[16:32] *= 7  # keys
        change = (module(x) - before).abs().max()
        assert change < 1e-4 if qk_norm else change > 0.1
    # Each head on its own: every query head has root mean square 1.
    q, k, _ = attention(qk_norm="rms").project(x, None, None, None)
    for part in (q, k):
        torch.testing.assert_close(part.square().mean(-1), torch.ones(2, 4, 6, dtype=DOUBLE), rtol=0, atol=1e-4)


def test_dropout_in_training_only() -> None:
    module, x = attention(dropout=0.5), tokens()
    without = attention()
    without.load_state_dict(module.state_dict())
    assert (module(x) - module(x)).abs().max() > 0.01
    torch.testing.assert_close(module.eval()(x), without(x))
    torch.testing.assert_close(without(x), without(x), rtol=0, atol=0)


def test_without_bias() -> None:
    module = attention(bias=False)
    assert [name for name, _ in module.named_parameters()] == ["qkv.weight", "out.weight"]
    assert module(torch.zeros(1, 3, 16, dtype=DOUBLE)).abs().max() == 0
    assert attention()(torch.zeros(1, 3, 16, dtype=DOUBLE)).abs().max() > 0


def test_projections_start_xavier_uniform_each_on_its_own() -> None:
    module = Attention(64, 4)
    bound = (6 / (64 + 64)) ** 0.5
    for weight in (*module.qkv.weight.split(64), module.out.weight):
        assert 0.95 * bound < weight.abs().max() <= bound  # the joint matrix would have bound · √(1/2)
    assert module.qkv.bias.abs().max() == module.out.bias.abs().max() == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 10, "heads": 4}, r"got width=10, heads=4, kv_heads=4"),
        ({"width": 16, "heads": 4, "kv_heads": 3}, r"kv_heads the heads; got width=16, heads=4, kv_heads=3"),
    ],
)
def test_impossible_heads_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Attention(**options)


@pytest.mark.parametrize("with_bias", [False, True])
def test_who_may_see_nothing_gets_nothing(with_bias: bool) -> None:
    """On every path: zeros, zero weights and no gradient, where 0 / 0 would be NaN."""
    q, k, v = (torch.randn(2, 2, 3, 4, requires_grad=True) for _ in range(3))
    mask = torch.tensor([True, False, True])[:, None].expand(3, 3)
    bias = torch.randn(2, 3, 3) if with_bias else None
    explicit, weights = explicit_attention(q, k, v, mask=mask, bias=bias)
    fused = scaled_dot_product_attention(q, k, v, mask=mask, bias=bias)
    half = scaled_dot_product_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), mask=mask, bias=bias)
    for found in (explicit, fused, half):
        assert found[:, :, 1].eq(0).all()
        assert found[:, :, [0, 2]].abs().amin() > 0
        (gradient,) = torch.autograd.grad(found.float().square().sum(), q)
        assert gradient[:, :, 1].eq(0).all()
        assert gradient.isfinite().all()
    assert weights[:, :, 1].eq(0).all()


def test_half_precision_gradients() -> None:
    """The path that bfloat16 takes in training on a CPU, against float64."""
    q, k, v = (torch.randn(2, 4, 40, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    exact = [part.detach().double().requires_grad_() for part in (q, k, v)]
    mask = (torch.rand(40, 40) < 0.6) | torch.eye(40, dtype=torch.bool)
    found = torch.autograd.grad(scaled_dot_product_attention(q, k, v, mask=mask).float().square().sum(), [q, k, v])
    reference = explicit_attention(*exact, mask=mask)[0].square().sum()
    for mine, other in zip(found, torch.autograd.grad(reference, exact), strict=True):
        assert mine.dtype == torch.bfloat16
        torch.testing.assert_close(mine.double(), other, rtol=0.05, atol=0.02 * other.abs().max().item())


def test_scaling_makes_the_variance_of_scores_one() -> None:
    """q · k of independent standard normal D-vectors has variance D, hence the division by √D (section 3.2.1)."""
    for width in (16, 64):
        q, k = torch.randn(1, 1, 500, width), torch.randn(1, 1, 400, width)
        assert (q @ k.transpose(-2, -1)).var().item() == pytest.approx(width, rel=0.05)
        _, weights = explicit_attention(q, k, torch.zeros(1, 1, 400, width))
        logs = weights.log()  # the scores, but for a constant for each query
        assert logs.var(dim=-1).mean().item() == pytest.approx(1, rel=0.05)


def test_shared_products_equal_single_ones() -> None:
    """Self-attention projects once for all three; told that the memory is the tokens, it projects in two products."""
    module, x, pos = attention(kv_heads=2), tokens(), tokens()
    inputs = [x, module.qkv.weight, module.qkv.bias]
    assert_same((module(x), inputs), (module(x, x), inputs))
    inputs.append(pos)
    assert_same((module(x, query_pos=pos), inputs), (module(x, x, query_pos=pos, memory_pos=pos), inputs))


@pytest.mark.parametrize("qk_norm", [None, "rms", "layer", "cosine"])
@pytest.mark.parametrize("kv_heads", [4, 1])
def test_collecting_weights_changes_nothing(kv_heads: int, qk_norm: str | None) -> None:
    module, x, collected = attention(kv_heads=kv_heads, qk_norm=qk_norm), tokens(), []
    options: dict[str, Any] = {"causal": True, "window": 4, "bias": alibi_bias(4, 6, 6), "rotary": rotary_1d(6, 4)}
    inputs = [x, *module.parameters()]
    assert_same((module(x, **options, collect=collected), inputs[:2]), (module(x, **options), inputs[:2]))
    (weights,) = collected
    assert weights.shape == (2, 4, 6, 6)
    assert torch.equal(weights > 0, (causal_mask(6, 6) & sliding_window_mask(6, 6, 4)).expand(2, 4, 6, 6))


def test_multi_query_attention_equals_repeated_heads() -> None:
    single, full, x = attention(kv_heads=1), attention(), tokens()
    for mine, other in ((single.qkv.weight, full.qkv.weight), (single.qkv.bias, full.qkv.bias)):
        q, k, v = mine.data.split([16, 4, 4])
        repeats = [4] + [1] * (mine.ndim - 1)
        other.data.copy_(torch.cat([q, k.repeat(repeats), v.repeat(repeats)]))
    full.out.load_state_dict(single.out.state_dict())
    torch.testing.assert_close(single(x), full(x), rtol=0, atol=1e-10)


def test_keys_without_bias() -> None:
    """As with a key bias of zero; and it is never learnt."""
    module, zeroed, x = attention(key_bias=False), attention(), tokens()
    zeroed.load_state_dict(module.state_dict())
    memory, rotation = tokens(9), rotary_1d(6, 4)
    with_bias = zeroed(x, rotary=rotation)  # without rotation, a key bias adds the same to all scores of a query
    zeroed.qkv.bias.data[16:32] = 0
    for context in ({}, {"memory": memory}, {"query_pos": tokens()}, {"rotary": rotation}):
        torch.testing.assert_close(module(x, **context), zeroed(x, **context), rtol=0, atol=1e-10)
    assert (module(x, rotary=rotation) - with_bias).abs().max() > 1e-3
    (gradient,) = torch.autograd.grad(module(x, rotary=rotation).square().sum(), module.qkv.bias)
    assert gradient[16:32].eq(0).all()
    assert gradient[:16].abs().amin() > 0
    assert gradient[32:].abs().amin() > 0


def test_the_last_bias_alone() -> None:
    assert [name for name, _ in attention(bias=False, qk_norm=None).named_parameters() if "bias" in name] == []
    module = Attention(16, 4, bias=False, out_bias=True)
    assert [name for name, _ in module.named_parameters()] == ["qkv.weight", "out.weight", "out.bias"]
    module = Attention(16, 4, out_bias=False)
    assert [name for name, _ in module.named_parameters()] == ["qkv.weight", "qkv.bias", "out.weight"]


def test_rotary_attention_sees_offsets_only() -> None:
    """A shift of all positions changes nothing, and rotated heads are what is compared, after their norm."""
    module, x = attention(qk_norm="rms"), tokens()
    found = module(x, rotary=rotary_1d(6, 4))
    torch.testing.assert_close(module(x, rotary=rotary_1d(6, 4, start=40)), found, rtol=0, atol=1e-5)
    assert (module(x) - found).abs().max() > 1e-3
    q, k, v = module.project(x, None, None, None)
    mixed, _ = explicit_attention(rotate(q, rotary_1d(6, 4)), rotate(k, rotary_1d(6, 4)), v)
    torch.testing.assert_close(found, module.out(mixed.transpose(1, 2).flatten(2)), rtol=0, atol=1e-10)
    with pytest.raises(ValueError, match="rotary positions are for self-attention; a memory has positions of its own"):
        module(x, tokens(9), rotary=rotary_1d(6, 4))


def test_a_sliding_window_is_a_banded_mask() -> None:
    module, x = attention(), tokens()
    band = (torch.arange(6)[:, None] - torch.arange(6)).abs() < 3
    torch.testing.assert_close(module(x, window=3), module(x, mask=band), rtol=0, atol=1e-10)
    both = module(x, window=3, causal=True)
    torch.testing.assert_close(both, module(x, mask=band.tril()), rtol=0, atol=1e-10)
    assert (both - module(x, causal=True)).abs().max() > 1e-3
    torch.testing.assert_close(module(x, window=6), module(x), rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["rms", "layer", "cosine"])
def test_each_way_of_normalising_is_its_own(name: str) -> None:
    module, x = attention(qk_norm=name), tokens()
    others = [attention(qk_norm=other) for other in (None, "rms", "layer", "cosine") if other != name]
    for other in others:
        other.load_state_dict(module.state_dict(), strict=False)
        assert (module(x) - other(x)).abs().max() > 1e-3
