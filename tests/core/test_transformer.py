"""The 2017 Transformer and its halves: the paper's numbers, torch's own modules, and the laws of decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitdet.core.attention import Attention
from vitdet.core.cache import KeyValueCache
from vitdet.core.decoding import beam_search
from vitdet.core.positions import sinusoidal_1d
from vitdet.core.transformer import TokenTransformer, Transformer, base, big

DOUBLE = torch.float64
VOCABULARY, START, STOP = 11, 1, 2
SMALL: dict[str, Any] = {"width": 16, "heads": 4, "hidden": 24, "dropout": 0.0}
PAIR: dict[str, Any] = {**SMALL, "encoder_layers": 2, "decoder_layers": 2}


def lively(model: Any) -> Any:
    """In float64, with branches that outweigh the tokens themselves: else every token is its own best successor."""
    for name, parameter in model.named_parameters():
        is_scale = "norm" in name and name.endswith("weight")
        nn.init.normal_(parameter, mean=float(is_scale), std=0.1 if parameter.ndim == 1 or "vectors" in name else 1.0)
    return model.to(DOUBLE).eval()


def tokens(batch: int, count: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, count))


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_the_papers_sizes() -> None:
    """Table 3 of arXiv 1706.03762, in millions. Its 65 for base fit a matrix of some 41,000 rows, not of 37,000."""
    with torch.device("meta"):
        assert parameters(base()) == 63_082_496
        assert parameters(base()) == pytest.approx(65e6, rel=0.03)
        assert parameters(big()) == pytest.approx(213e6, rel=0.01)
        for expected, options in (
            (65, {}),
            (36, {"encoder_layers": 2, "decoder_layers": 2}),
            (50, {"encoder_layers": 4, "decoder_layers": 4}),
            (80, {"encoder_layers": 8, "decoder_layers": 8}),
            (28, {"width": 256}),
            (168, {"width": 1024}),
            (53, {"hidden": 1024}),
            (90, {"hidden": 4096}),
        ):
            assert round(parameters(base(41_000, **options)) / 1e6) == pytest.approx(expected, abs=1)
        model = base()
    assert model.encoder.layers[0].self_attention.heads == 8
    assert (len(model.encoder.layers), len(model.decoder.layers)) == (6, 6)
    assert (model.embedding.dropout.p, big(9, width=16, hidden=8).embedding.dropout.p) == (0.1, 0.3)
    assert model.decoder.layers[5].feed_forward.expand.out_features == 2048


def test_shared_key_value_heads_save_projections() -> None:
    """Of 4 heads, 1 key/value head leaves a quarter of both projections, in six attentions (2 encoder, 4 decoder)."""
    for make, attentions in (
        (lambda **options: Transformer(VOCABULARY, **PAIR, **options), 6),
        (lambda **options: TokenTransformer(VOCABULARY, causal=True, layers=2, **SMALL, **options), 2),
    ):
        saved = parameters(make()) - parameters(make(kv_heads=1))
        assert saved == attentions * 2 * (3 / 4) * (16 * 16 + 16)


def copy_attention(ours: Attention, theirs: nn.MultiheadAttention) -> None:
    theirs.in_proj_weight.data.copy_(ours.qkv.weight)
    theirs.in_proj_bias.data.copy_(ours.qkv.bias)
    theirs.out_proj.load_state_dict(ours.out.state_dict())


def copy_block(ours: nn.Module, theirs: Any) -> None:
    """Into torch's encoder or decoder layer."""
    copy_attention(ours.self_attention, theirs.self_attn)
    norms = [ours.self_attention_residual, ours.feed_forward_residual]
    if hasattr(ours, "cross_attention"):
        copy_attention(ours.cross_attention, theirs.multihead_attn)
        norms.insert(1, ours.cross_attention_residual)
    theirs.linear1.load_state_dict(ours.feed_forward.expand.state_dict())
    theirs.linear2.load_state_dict(ours.feed_forward.contract.state_dict())
    for number, residual in enumerate(norms, start=1):
        getattr(theirs, f"norm{number}").load_state_dict(residual.norm.state_dict())


def test_equal_to_torch() -> None:
    """The whole model: shared matrix, √C, sine positions, padding, causality, logits; and the gradient."""
    ours = lively(Transformer(VOCABULARY, **PAIR))
    options = {"dropout": 0.0, "batch_first": True, "dtype": DOUBLE}
    encoder = [nn.TransformerEncoderLayer(16, 4, 24, **options) for _ in range(2)]
    decoder = [nn.TransformerDecoderLayer(16, 4, 24, **options) for _ in range(2)]
    for mine, other in zip([*ours.encoder.layers, *ours.decoder.layers], [*encoder, *decoder], strict=True):
        copy_block(mine, other)
    source, target = tokens(3, 6), tokens(3, 5)
    source[0, 4:] = 0
    matrix = ours.embedding.vectors.weight

    def embed(sequence: Tensor) -> Tensor:
        return F.embedding(sequence, matrix) * 4 + sinusoidal_1d(sequence.shape[1], 16)

    memory, found, ignored = embed(source), embed(target), source == 0
    for layer in encoder:
        memory = layer(memory, src_key_padding_mask=ignored)
    future = torch.ones(5, 5, dtype=torch.bool).triu(1)
    for layer in decoder:
        found = layer(found, memory, tgt_mask=future, memory_key_padding_mask=ignored)
    expected, logits = found @ matrix.T, ours(source, target)
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-8)
    gradients = [torch.autograd.grad(each.square().sum(), matrix)[0] for each in (logits, expected)]
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)


def test_logits_start_with_the_variance_of_one() -> None:
    """Normed outputs times vectors of length 1: the loss starts near ln K; embeddings start as large as positions."""
    model = Transformer(1000, width=64, heads=4, hidden=64, encoder_layers=1, decoder_layers=1)
    logits = model(torch.randint(1, 1000, (4, 9)), torch.randint(1, 1000, (4, 9)))
    assert logits.std().item() == pytest.approx(1, rel=0.2)
    embedded = model.embedding.vectors(torch.arange(1000)) * 8
    assert embedded.square().mean().item() == pytest.approx(1, rel=0.05)


def test_dropout_of_embeddings() -> None:
    model = Transformer(VOCABULARY, **{**PAIR, "dropout": 0.5})
    embedded = model.embedding(tokens(64, 8))
    assert embedded.eq(0).double().mean().item() == pytest.approx(0.5, abs=0.05)
    assert model.eval().embedding(tokens(64, 8)).ne(0).all()


VARIANTS: dict[str, dict[str, Any]] = {
    "paper": {},
    "rotary, grouped, pre-norm": {
        "positions": "rotary", "kv_heads": 2, "placement": "pre", "norm": "rms", "activation": "swiglu", "bias": False,
    },
    "alibi, multi-query, peri-norm": {"positions": "alibi", "kv_heads": 1, "placement": "peri"},
    "no positions, res-post-norm": {"positions": "none", "placement": "res_post"},
}  # fmt: skip
variants = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())


@variants
def test_padding_changes_nothing(options: dict[str, Any]) -> None:
    model = lively(Transformer(VOCABULARY, **PAIR, **options))
    source, target = tokens(2, 6), tokens(2, 5)
    source[0, 4:] = 0
    target[0, 3:] = 0
    found = model(source, target)
    torch.testing.assert_close(found[:1, :3], model(source[:1, :4], target[:1, :3]), rtol=0, atol=1e-8)
    torch.testing.assert_close(found[1:], model(source[1:], target[1:]), rtol=0, atol=1e-8)
    unpadded = Transformer(VOCABULARY, padding=None, **PAIR, **options).to(DOUBLE)
    unpadded.load_state_dict(model.state_dict())
    assert (unpadded(source, target) - found)[0, :3].abs().max() > 1e-4
    torch.testing.assert_close(unpadded(source, target)[1:], found[1:], rtol=0, atol=1e-8)


@variants
@torch.no_grad()
def test_cached_decoding_equals_uncached(options: dict[str, Any]) -> None:
    model = lively(Transformer(VOCABULARY, **PAIR, **options))
    source, target = tokens(2, 6), tokens(2, 7)
    source[0, 4:] = 0
    memory, mask = model.encode(source)
    caches = [(KeyValueCache(), KeyValueCache()) for _ in range(2)]
    pieces = [
        model.decode(target[:, a:b], memory, mask=mask, caches=caches) for a, b in ((0, 1), (1, 2), (2, 5), (5, 7))
    ]
    torch.testing.assert_close(torch.cat(pieces, 1), model(source, target), rtol=0, atol=1e-8)


def greedily(logits_of: Any, batch: int, length: int) -> Tensor:
    """Without a cache: everything anew for every token."""
    said = torch.full((batch, 1), START)
    for _ in range(length):
        ended = said.eq(STOP).any(1)
        said = torch.cat([said, logits_of(said)[:, -1].argmax(-1).masked_fill(ended, 0)[:, None]], dim=1)
    return said[:, 1:]


@variants
def test_greedy_decoding(options: dict[str, Any]) -> None:
    model = lively(Transformer(VOCABULARY, **PAIR, **options))
    source = tokens(8, 6)
    source[::2, 3:] = 0
    expected = greedily(lambda said: model(source, said), 8, 9)
    found = model.greedy(source, start=START, stop=STOP, length=9)
    assert torch.equal(F.pad(found, (0, 9 - found.shape[1])), expected)
    assert len(expected.unique(dim=0)) > 1
    one_beam = model.beam(source, start=START, stop=STOP, length=9, beams=1, length_penalty=0.0)
    assert torch.equal(one_beam, found)


@torch.no_grad()
def probability(model: Transformer, source: Tensor, found: Tensor) -> Tensor:
    """(B,) log-probabilities of what was decoded, padding left out, computed without a cache."""
    said = F.pad(found[:, :-1], (1, 0), value=START)
    logs = model(source, said).log_softmax(-1).gather(2, found[..., None])[..., 0]
    over = found.eq(STOP).cumsum(1) - found.eq(STOP).long() > 0
    return logs.masked_fill(over, 0).sum(1)


def test_beams_over_the_cache_are_those_of_the_model() -> None:
    """A full search over two tokens equals trying all of them; and batches decode as their rows do alone."""
    model, source = lively(Transformer(VOCABULARY, positions="rotary", **PAIR)), tokens(6, 5)
    source[:3, 3:] = 0
    options = {"start": START, "stop": STOP, "length": 2, "length_penalty": 0.0}
    found = model.beam(source, beams=VOCABULARY**2, **options)
    pairs = torch.cartesian_prod(torch.arange(VOCABULARY), torch.arange(VOCABULARY))
    pairs = pairs[(pairs[:, 0] != STOP) | (pairs[:, 1] == 0)]  # one row for all that follows the end
    for row in range(6):
        values = probability(model, source[row : row + 1].expand(len(pairs), -1), pairs)
        assert F.pad(found[row], (0, 2 - found.shape[1])).tolist() == pairs[values.argmax()].tolist()
    options["length"] = 8
    together = model.beam(source, beams=3, **options)
    for row in range(6):
        alone = model.beam(source[row : row + 1], beams=3, **options)
        assert torch.equal(F.pad(alone, (0, together.shape[1] - alone.shape[1])), together[row : row + 1])
    assert probability(model, source, together).sum() >= probability(
        model, source, model.greedy(source, start=START, stop=STOP, length=8)
    ).sum()  # fmt: skip


class Anew:
    """Steps without a cache: everything is computed again for every token."""

    def __init__(self, model: Transformer, source: Tensor) -> None:
        self.model, self.source, self.said = model, source, source[:, :0]

    def advance(self, tokens: Tensor) -> Tensor:
        self.said = torch.cat([self.said, tokens], dim=1)
        return self.model(self.source, self.said)[:, -1]

    def expand(self, copies: int) -> None:
        self.source, self.said = (part.repeat_interleave(copies, dim=0) for part in (self.source, self.said))

    def reorder(self, rows: Tensor) -> None:
        self.source, self.said = self.source[rows], self.said[rows]


@variants
@torch.no_grad()
def test_beams_with_a_cache_are_those_without(options: dict[str, Any]) -> None:
    model, source = lively(Transformer(VOCABULARY, **PAIR, **options)), tokens(8, 6)
    source[::2, 3:] = 0
    for stop in (STOP, -1):  # the latter never comes
        found = model.beam(source, start=START, stop=stop, length=7, beams=4)
        steps, prompt = Anew(model, source), torch.full((8, 1), START)
        expected = beam_search(steps, prompt, beams=4, stop=stop, length=7, padding=0, length_penalty=0.6)
        assert torch.equal(found, expected)
    assert len(found.unique(dim=0)) > 1


@pytest.mark.parametrize("positions", ["sinusoidal", "rotary", "alibi", "none"])
def test_positions_alone_tell_order(positions: str) -> None:
    model, order = (
        lively(TokenTransformer(VOCABULARY, causal=False, positions=positions, layers=2, **SMALL)),
        [2, 0, 3, 1],
    )
    sequence = tokens(1, 4)
    change = (model(sequence[:, order]) - model(sequence)[:, order]).abs().max()
    assert change < 1e-10 if positions == "none" else change > 1e-3


def test_the_two_halves_see_to_both_sides_and_back() -> None:
    before, after = torch.tensor([[3, 4, 5, 6]]), torch.tensor([[3, 4, 5, 7]])
    for causal in (False, True):
        model = lively(TokenTransformer(VOCABULARY, causal=causal, layers=2, **SMALL))
        change = (model.encode(after) - model.encode(before)).abs().amax(-1)[0]
        assert change[3] > 1e-3
        assert change[:3].max() < 1e-12 if causal else change[:3].min() > 1e-4


def test_the_encoder_alone_is_the_transformers() -> None:
    whole = lively(Transformer(VOCABULARY, **PAIR))
    half = lively(TokenTransformer(VOCABULARY, causal=False, layers=2, placement="post", activation="relu", **SMALL))
    half.embedding.load_state_dict(whole.embedding.state_dict())
    half.stack.load_state_dict(whole.encoder.state_dict())
    source = tokens(2, 5)
    source[0, 3:] = 0
    torch.testing.assert_close(half.encode(source), whole.encode(source)[0], rtol=0, atol=0)
    torch.testing.assert_close(half(source), half.encode(source) @ half.embedding.vectors.weight.T)
    with pytest.raises(ValueError, match="only a causal model goes on after a prompt; make it with causal=True"):
        half.greedy(source, stop=STOP, length=3)


@variants
@pytest.mark.parametrize("window", [None, 3])
def test_a_decoder_alone_goes_on(window: int | None, options: dict[str, Any]) -> None:
    model = lively(TokenTransformer(VOCABULARY, causal=True, layers=2, window=window, **{**SMALL, **options}))
    prompt = tokens(4, 5)

    def logits_of(said: Tensor) -> Tensor:
        return model(torch.cat([prompt, said[:, 1:]], dim=1))  # the prompt stands for the start token

    found = model.greedy(prompt, stop=STOP, length=6)
    assert torch.equal(F.pad(found, (0, 6 - found.shape[1])), greedily(logits_of, 4, 6))
    one_beam = model.beam(prompt, beams=1, stop=STOP, length=6, length_penalty=0.0)
    assert torch.equal(one_beam, found)
    wide = TokenTransformer(VOCABULARY, causal=True, layers=2, **{**SMALL, **options}).to(DOUBLE)
    wide.load_state_dict(model.state_dict())
    assert ((wide(prompt) - model(prompt)).abs().max() > 1e-4) == (window is not None)


def test_sources_of_nothing_but_padding_are_finite() -> None:
    model = Transformer(VOCABULARY, **PAIR)
    logits = model(torch.zeros(1, 4, dtype=torch.long), tokens(1, 3))
    logits.sum().backward()
    assert logits.isfinite().all()
    assert all(parameter.grad is not None and parameter.grad.isfinite().all() for parameter in model.parameters())


def test_finished_sequences_are_filled_up() -> None:
    """With the padding token; where there is none, with the token that ended them."""
    for padding, filling in ((0, 0), (None, STOP)):
        torch.manual_seed(0)  # of a model that stops
        model = lively(Transformer(VOCABULARY, padding=padding, **PAIR))
        found = model.greedy(tokens(40, 6), start=START, stop=STOP, length=8)
        ended = found.eq(STOP).cumsum(1) - found.eq(STOP).long() > 0
        assert ended.any()
        assert found[ended].eq(filling).all()


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match=r"positions 'learnt'; use one of \['sinusoidal', 'rotary', 'alibi', 'none'\]"):
        Transformer(VOCABULARY, positions="learnt", **PAIR)
    for model, rest in (
        (Transformer(VOCABULARY, **PAIR), {"start": START}),
        (TokenTransformer(VOCABULARY, causal=True, layers=1, **SMALL), {}),
    ):
        for search in (model.greedy, model.beam):
            with pytest.raises(ValueError, match=r"for a model in evaluation mode; call its .eval\(\) first"):
                search(tokens(1, 3), stop=STOP, length=2, **rest)
