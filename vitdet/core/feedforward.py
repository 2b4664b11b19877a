"""The token-wise feed-forward network and the multi-layer perceptron of DETR's heads."""

from __future__ import annotations

import itertools

from torch import Tensor, nn

ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU}


class FeedForward(nn.Module):
    """Linear, activation, linear (arXiv 1706.03762, section 3.3), or its gated form SwiGLU (arXiv 2002.05202).

    Args:
        width: C, of input and output. hidden: inner width.
        activation: ``"relu"``, ``"gelu"``, ``"silu"`` or ``"swiglu"`` (then the first layer has 2 * hidden outputs).
        bias: whether the two layers have one. dropout: after the activation, in training.
    """

    def __init__(
        self, width: int, hidden: int, *, activation: str = "gelu", bias: bool = True, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if activation != "swiglu" and activation not in ACTIVATIONS:
            raise ValueError(f"unknown activation {activation!r}; use one of {[*ACTIVATIONS, 'swiglu']}")
        self.gated = activation == "swiglu"
        self.expand = nn.Linear(width, 2 * hidden if self.gated else hidden, bias=bias)
        self.activation = nn.SiLU() if self.gated else ACTIVATIONS[activation]()
        self.dropout = nn.Dropout(dropout)
        self.contract = nn.Linear(hidden, width, bias=bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, N, C) to (B, N, C), each token on its own."""
        if self.gated:
            gate, inner = self.expand(tokens).chunk(2, dim=-1)
            inner = self.activation(gate) * inner
        else:
            inner = self.activation(self.expand(tokens))
        return self.contract(self.dropout(inner))


class MLP(nn.Module):
    """``layers`` linear layers with ReLU, or another ``activation``, between them: DETR's box head and position head.

    The last has no bias without ``out_bias``.
    """

    def __init__(
        self, width_in: int, hidden: int, width_out: int, *, layers: int, out_bias: bool = True,
        activation: str = "relu",
    ) -> None:  # fmt: skip
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"unknown activation {activation!r}; use one of {list(ACTIVATIONS)}")
        self.activation = ACTIVATIONS[activation]()
        widths = [width_in, *[hidden] * (layers - 1)]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
        self.layers.append(nn.Linear(widths[-1], width_out, bias=out_bias))

    def forward(self, inputs: Tensor) -> Tensor:
        """(…, width_in) to (…, width_out)."""
        for layer in self.layers[:-1]:
            inputs = self.activation(layer(inputs))
        return self.layers[-1](inputs)
