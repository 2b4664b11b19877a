"""A JAX ``.npz`` in the published layout gives the logits that its arrays mean.

What they mean is computed here from the layout's shapes alone: convolution kernels are (row, column, channel, out),
dense ones (in, out), those of queries, keys and values (C, H, D), that of the output (H, D, C).
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from vitdet.classifiers import CLASSIFIERS
from vitdet.weights.rules import load_strict
from vitdet.weights.vit import convert

PATCH, SIDE, WIDTH, HEADS, HIDDEN, LAYERS, CLASSES, REPRESENTATION = 8, 24, 32, 4, 48, 2, 5, 20


def arrays(*, representation: bool) -> dict[str, np.ndarray]:
    """Random values under the published names, in the published shapes."""
    rng, depth = np.random.default_rng(0), WIDTH // HEADS
    shapes: dict[str, tuple[int, ...]] = {
        "cls": (1, 1, WIDTH),
        "embedding/kernel": (PATCH, PATCH, 3, WIDTH),
        "embedding/bias": (WIDTH,),
        "Transformer/posembed_input/pos_embedding": (1, 1 + (SIDE // PATCH) ** 2, WIDTH),
        "Transformer/encoder_norm/scale": (WIDTH,),
        "Transformer/encoder_norm/bias": (WIDTH,),
        "head/kernel": (REPRESENTATION if representation else WIDTH, CLASSES),
        "head/bias": (CLASSES,),
    }
    if representation:
        shapes |= {"pre_logits/kernel": (WIDTH, REPRESENTATION), "pre_logits/bias": (REPRESENTATION,)}
    for layer in range(LAYERS):
        block = f"Transformer/encoderblock_{layer}/"
        for norm in ("LayerNorm_0", "LayerNorm_2"):
            shapes |= {block + norm + "/scale": (WIDTH,), block + norm + "/bias": (WIDTH,)}
        attention = block + "MultiHeadDotProductAttention_1/"
        for part in ("query", "key", "value"):
            shapes |= {f"{attention}{part}/kernel": (WIDTH, HEADS, depth), f"{attention}{part}/bias": (HEADS, depth)}
        shapes |= {attention + "out/kernel": (HEADS, depth, WIDTH), attention + "out/bias": (WIDTH,)}
        for index, (inputs, outputs) in enumerate([(WIDTH, HIDDEN), (HIDDEN, WIDTH)]):
            dense = f"{block}MlpBlock_3/Dense_{index}/"
            shapes |= {dense + "kernel": (inputs, outputs), dense + "bias": (outputs,)}
    values = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    for name, value in values.items():
        if name.endswith("kernel"):
            value *= 0.15
        elif name.endswith("scale"):
            value *= 0.3
            value += 1
        else:
            value *= 0.3
    return values


def meaning(w: dict[str, Tensor], images: Tensor) -> Tensor:
    """The logits, by the layout's shapes."""

    def norm(x: Tensor, name: str) -> Tensor:
        return F.layer_norm(x, (WIDTH,), w[name + "/scale"], w[name + "/bias"], eps=1e-6)

    def dense(x: Tensor, name: str) -> Tensor:
        return torch.einsum("...i,io->...o", x, w[name + "/kernel"]) + w[name + "/bias"]

    cells = images.permute(0, 2, 3, 1).unfold(1, PATCH, PATCH).unfold(2, PATCH, PATCH)  # (B, h, w, 3, p, p)
    x = torch.einsum("byxcij,ijco->byxo", cells, w["embedding/kernel"]) + w["embedding/bias"]
    x = torch.cat([w["cls"].expand(len(x), 1, WIDTH), x.reshape(len(x), -1, WIDTH)], dim=1)
    x = x + w["Transformer/posembed_input/pos_embedding"]
    for layer in range(LAYERS):
        block = f"Transformer/encoderblock_{layer}/"
        attention, y = block + "MultiHeadDotProductAttention_1/", norm(x, block + "LayerNorm_0")
        q, k, v = (
            torch.einsum("bnc,chd->bnhd", y, w[f"{attention}{part}/kernel"]) + w[f"{attention}{part}/bias"]
            for part in ("query", "key", "value")
        )
        scores = torch.einsum("bnhd,bmhd->bhnm", q, k) / (WIDTH // HEADS) ** 0.5
        mixed = torch.einsum("bhnm,bmhd->bnhd", scores.softmax(-1), v)
        x = x + torch.einsum("bnhd,hdc->bnc", mixed, w[attention + "out/kernel"]) + w[attention + "out/bias"]
        y = F.gelu(dense(norm(x, block + "LayerNorm_2"), block + "MlpBlock_3/Dense_0"))
        x = x + dense(y, block + "MlpBlock_3/Dense_1")
    features = norm(x, "Transformer/encoder_norm")[:, 0]
    if "pre_logits/kernel" in w:
        features = dense(features, "pre_logits").tanh()
    return dense(features, "head")


@pytest.mark.parametrize("representation", [False, True], ids=["plain", "pre_logits"])
@torch.no_grad()
def test_npz(representation: bool, tmp_path: Path) -> None:
    np.savez(tmp_path / "vit.npz", **arrays(representation=representation))
    with np.load(tmp_path / "vit.npz", allow_pickle=False) as file:
        theirs = {name: torch.from_numpy(file[name]) for name in file}
    model = CLASSIFIERS["vit_tiny_patch16_224"](
        CLASSES, width=WIDTH, layers=LAYERS, heads=HEADS, hidden=HIDDEN, patch=PATCH, image_size=(SIDE, SIDE),
        representation=REPRESENTATION if representation else None,
    )  # fmt: skip
    load_strict(model.eval(), convert(theirs))
    images = torch.randn(2, 3, SIDE, SIDE)
    expected = meaning(theirs, images)
    assert expected.std() > 0.1
    torch.testing.assert_close(model(images), expected, atol=1e-4, rtol=1e-4)
