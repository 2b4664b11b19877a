"""Vision Transformer (arXiv 2010.11929), with what DeiT, DINOv2 and DINOv3 add to it, on the shared core.

One thing differs from the published code, and changes no output: what is learnt as the position of a class,
distillation or register token is part of that token here, as the two only ever occur as their sum.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from vitdet.core.attention import Attention
from vitdet.core.blocks import EncoderBlock
from vitdet.core.norms import make_norm
from vitdet.core.positions import LearnedPositions, Rotation, resample_positions, rotary_2d, sinusoidal_2d
from vitdet.core.stacks import EncoderStack, drop_path_rates

POSITIONS = ("learned", "sincos", "rotary", "none")


class PatchEmbedding(nn.Module):
    """Square patches, flattened to (channel, row, column) and projected: a convolution whose stride is its kernel.

    As a matrix product it takes less time than as a convolution: 128×3×96×96 in bfloat16 on two CPU cores, forward and
    backward, patches of 8, 12 and 16 take 16, 8 and 5 ms instead of 29, 20 and 24.
    """

    def __init__(self, patch: int, width: int) -> None:
        super().__init__()
        self.patch = patch
        self.project = nn.Linear(3 * patch * patch, width)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, h·p, w·p) to (B, h·w, C)."""
        patches = images.unflatten(3, (-1, self.patch)).unflatten(2, (-1, self.patch))  # (B, 3, h, p, w, p)
        patches = patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)  # (B, h·w, 3·p·p)
        return self.project(patches)


def keep_random(
    tokens: Tensor, rotation: Rotation | None, *, prefix: int, rate: float
) -> tuple[Tensor, Rotation | None]:
    """Drop ``rate`` of the patch tokens at random, others in each image, and never the prefix (arXiv 2212.00794).

    Args:
        tokens: (B, prefix + N, C). rotation: of all of them, or None.

    Returns:
        (B, prefix + kept, C), and the rotation of those that are kept, (B, 1, prefix + kept, D/2).
    """
    batch, patches = tokens.shape[0], tokens.shape[1] - prefix
    order = torch.rand(batch, patches, device=tokens.device).argsort(dim=1)
    kept = order[:, : max(1, int(patches * (1 - rate)))] + prefix
    first = torch.arange(prefix, device=tokens.device).expand(batch, -1)
    index = torch.cat([first, kept], dim=1)  # (B, prefix + kept)
    rows = torch.arange(batch, device=tokens.device)[:, None]
    if rotation is not None:
        rotation = Rotation(*(table[index][:, None] for table in rotation))
    return tokens[rows, index], rotation


class ViT(nn.Module):
    """Patches and a few learnt tokens through a stack of pre-norm encoder blocks; see also the backbones' contract.

    Args:
        width: C. layers: L. heads: of the attention. hidden: inner width of the feed-forward (of each of its two halves
            with ``"swiglu"``).
        patch: side of a patch in pixels.
        image_size: (height, width) in pixels that learnt positions are made for; images may have any other size that
            ``patch`` divides.
        class_token: whether there is one. distillation_token: DeiT's (arXiv 2012.12877). registers: how many
            (arXiv 2309.16588).
        positions: ``"learned"``, added and resampled for other sizes; ``"sincos"``, added, see :func:`sinusoidal_2d`;
            ``"rotary"``, DINOv3's, see :func:`rotary_2d`; or ``"none"``. They are the patches' only.
        activation: of the feed-forward. norm_eps: of all norms.
        final_norm: whether the last block is followed by a norm.
        layer_scale: first value of the factors on the branches (CaiT, DeiT III, DINO), None for none.
        drop_path: stochastic depth's rate in the last block, growing to it linearly.
        dropout: of attention weights, inner activations and branches. token_dropout: of channels of the tokens, after
            the positions. patch_dropout: share of patch tokens that ``tokens`` leaves out in training; maps are whole.
        qk_norm: of queries and keys, see :class:`Attention`. bias: whether linear layers of the blocks have one.
        key_bias: whether the keys have one, too (not in DINOv3).
        out_layers: the blocks whose output becomes a map, 0 the first and -1 the last.
    """

    def __init__(
        self, *, width: int, layers: int, heads: int, hidden: int, patch: int = 16,
        image_size: tuple[int, int] = (224, 224), class_token: bool = True, distillation_token: bool = False,
        registers: int = 0, positions: str = "learned", activation: str = "gelu", norm_eps: float = 1e-6,
        final_norm: bool = True, layer_scale: float | None = None, drop_path: float = 0.0, dropout: float = 0.0,
        token_dropout: float = 0.0, patch_dropout: float = 0.0, qk_norm: str | None = None, bias: bool = True,
        key_bias: bool = True, out_layers: Sequence[int] = (-1,),
    ) -> None:  # fmt: skip
        super().__init__()
        if positions not in POSITIONS:
            raise ValueError(f"unknown positions {positions!r}; use one of {list(POSITIONS)}")
        if not 0 <= patch_dropout < 1:
            raise ValueError(f"patch_dropout is the share of patches left out, in [0, 1), got {patch_dropout}")
        self.width, self.patch, self.head_width = width, patch, width // heads
        self.position_kind, self.patch_dropout, self.out_layers = positions, patch_dropout, tuple(out_layers)
        self.channels, self.strides = [width] * len(self.out_layers), [patch] * len(self.out_layers)
        self.depth = layers + 1
        self.patch_embedding = PatchEmbedding(patch, width)
        self.class_token = nn.Parameter(torch.empty(1, 1, width)) if class_token else None
        self.distillation_token = nn.Parameter(torch.empty(1, 1, width)) if distillation_token else None
        self.registers = nn.Parameter(torch.empty(1, registers, width)) if registers else None
        self.positions = LearnedPositions(self._cut(*image_size), width) if positions == "learned" else None
        self.token_dropout = nn.Dropout(token_dropout)
        attention = partial(Attention, width, heads, bias=bias, key_bias=key_bias, qk_norm=qk_norm, dropout=dropout)
        blocks = [
            EncoderBlock(
                width, heads, hidden, activation=activation, placement="pre", norm_eps=norm_eps, dropout=dropout,
                drop_path=rate, layer_scale=layer_scale, bias=bias, attention=attention(),
            )
            for rate in drop_path_rates(drop_path, layers)
        ]  # fmt: skip
        self.encoder = EncoderStack(blocks, norm=make_norm("layer", width, eps=norm_eps) if final_norm else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """As the models that curves are compared with: truncated normals of deviation 0.02, zero biases.

        The projection of the patches keeps the uniform values of a fresh linear layer, which are a convolution's too.
        """
        for token in self._prefix():
            nn.init.trunc_normal_(token, std=0.02)
        for module in self.encoder.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def _prefix(self) -> list[Tensor]:
        """The learnt tokens (1, count, C) in their order."""
        return [t for t in (self.class_token, self.distillation_token, self.registers) if t is not None]

    @property
    def prefix_tokens(self) -> int:
        """How many tokens come before those of the patches."""
        return sum(token.shape[1] for token in self._prefix())

    def _cut(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of patches."""
        if height % self.patch or width % self.patch or not height or not width:
            raise ValueError(
                f"images of {height}×{width} pixels cannot be cut into patches of {self.patch}; "
                f"make both sides multiples of {self.patch}"
            )
        return height // self.patch, width // self.patch

    def grid(self, images: Tensor) -> tuple[int, int]:
        """(h, w): rows and columns of the patches of (B, 3, height, width) images."""
        return self._cut(images.shape[-2], images.shape[-1])

    def _embed(self, images: Tensor) -> tuple[Tensor, Rotation | None]:
        """The tokens (B, prefix + N, C) that enter the first block, and their rotation where positions are rotary."""
        height, width = self.grid(images)
        # Under autocast, too, what the blocks add to has the parameters' precision.
        tokens = self.patch_embedding(images).to(self.patch_embedding.project.weight.dtype)  # (B, N, C)
        if self.positions is not None:
            tokens = tokens + self.positions((height, width))
        elif self.position_kind == "sincos":
            tokens = tokens + sinusoidal_2d(height, width, self.width, device=tokens.device).to(tokens.dtype)
        prefix = [token.expand(tokens.shape[0], -1, -1) for token in self._prefix()]
        tokens = self.token_dropout(torch.cat([*prefix, tokens], dim=1))  # (B, prefix + N, C)
        if self.position_kind != "rotary":
            return tokens, None
        return tokens, rotary_2d(height, width, self.head_width, prefix=self.prefix_tokens, device=tokens.device)

    def tokens(self, images: Tensor) -> Tensor:
        """(B, 3, height, width) to (B, prefix + N, C): after the last block and the final norm."""
        tokens, rotation = self._embed(images)
        if self.training and self.patch_dropout:
            tokens, rotation = keep_random(tokens, rotation, prefix=self.prefix_tokens, rate=self.patch_dropout)
        return self.encoder(tokens, rotary=rotation)

    def forward(self, images: Tensor) -> list[Tensor]:
        """(B, 3, height, width) to one map (B, C, h, w) for each of ``out_layers``, with the final norm."""
        tokens, rotation = self._embed(images)
        taps = self.encoder.taps(tokens, self.out_layers, rotary=rotation)
        return [tap[:, self.prefix_tokens :].mT.unflatten(2, self.grid(images)) for tap in taps]

    def attention_weights(self, images: Tensor) -> list[Tensor]:
        """The weights (B, H, prefix + N, prefix + N) of each of the L blocks; row n is what token n attends to."""
        tokens, rotation = self._embed(images)
        weights: list[Tensor] = []
        self.encoder(tokens, rotary=rotation, collect=weights)
        return weights

    def depth_of(self, parameter_name: str) -> int:
        """0 for patches, tokens and positions, 1 … L for the blocks, ``depth`` = L + 1 for the final norm."""
        if match := re.match(r"encoder\.layers\.(\d+)\.", parameter_name):
            return int(match[1]) + 1
        return self.depth if parameter_name.startswith("encoder.") else 0

    def adapt(self, state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The same state, with learnt positions of another grid resampled to this model's.

        A table (1, h, w, C) says what it is of; one that others published, (1, h·w, C), is taken to be of a square, or
        else of this model's grid.

        Raises:
            ValueError: the positions are neither on a grid nor as many as either of these has.
        """
        table = state.get("positions.table")
        if self.positions is None or table is None:
            return state
        new = self.positions.grid
        if table.ndim == 3:
            side = math.isqrt(table.shape[1])
            grid = (side, side) if side * side == table.shape[1] else new
            if grid[0] * grid[1] != table.shape[1]:
                raise ValueError(
                    f"{table.shape[1]} positions are no square grid, so they cannot be resampled to {new}; "
                    "give the model the image_size that they were made for"
                )
            table = table.unflatten(1, grid)
        if table.ndim != 4:
            raise ValueError(f"a table of positions is (1, h, w, C), not {tuple(table.shape)}; fetch the file again")
        old = (table.shape[1], table.shape[2])
        return {**state, "positions.table": resample_positions(table.flatten(1, 2), old, new).unflatten(1, new)}
