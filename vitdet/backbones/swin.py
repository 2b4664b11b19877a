"""Swin Transformer v1 (arXiv 2103.14030) and v2 (arXiv 2111.09883): shifted windows in four stages of halving maps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from vitdet.backbones.vit import PatchEmbedding
from vitdet.core.attention import Attention
from vitdet.core.blocks import EncoderBlock
from vitdet.core.norms import make_norm
from vitdet.core.positions import resample_positions
from vitdet.core.stacks import EncoderStack, drop_path_rates
from vitdet.core.windows import ContinuousBias, TableBias, WindowAttention


class PatchMerging(nn.Module):
    """Four neighbours become one token of twice the channels (arXiv 2103.14030, section 3.1).

    Args:
        width: C. norm_last: norm after the linear layer (v2) instead of before it.
    """

    def __init__(self, width: int, *, norm_last: bool) -> None:
        super().__init__()
        self.norm_last = norm_last
        self.reduction = nn.Linear(4 * width, 2 * width, bias=False)
        self.norm = make_norm("layer", 2 * width if norm_last else 4 * width)

    def forward(self, tokens: Tensor, grid: tuple[int, int]) -> Tensor:
        """(B, h·w, C) to (B, ⌈h/2⌉·⌈w/2⌉, 2·C); a missing neighbour is zeros."""
        maps = F.pad(tokens.unflatten(1, grid), (0, 0, 0, grid[1] % 2, 0, grid[0] % 2))
        pairs = maps.unflatten(2, (-1, 2)).unflatten(1, (-1, 2))  # (B, h/2, y, w/2, x, C)
        fours = pairs.permute(0, 1, 3, 4, 2, 5).flatten(3).flatten(1, 2)  # (B, N/4, 4·C), y changes before x
        return self.norm(self.reduction(fours)) if self.norm_last else self.reduction(self.norm(fours))


def swin_block(
    width: int, heads: int, *, version: int, window: tuple[int, int], reference: tuple[int, int], shifted: bool,
    drop_path: float,
) -> EncoderBlock:  # fmt: skip
    """A block of either version: v2 has its norms after the branches, cosine attention and a continuous bias.

    Args:
        reference: the window that v2's offsets are relative to. The rest: see :class:`Swin`, :class:`WindowAttention`.
    """
    if version == 1:
        attention = Attention(width, heads)
        bias: nn.Module = TableBias(window, heads)
    else:
        attention = Attention(width, heads, qk_norm="cosine", key_bias=False)
        bias = ContinuousBias(reference, heads)
    return EncoderBlock(
        width, heads, 4 * width, placement="pre" if version == 1 else "res_post", drop_path=drop_path,
        attention=WindowAttention(attention, position_bias=bias, window=window, shifted=shifted),
    )  # fmt: skip


class Swin(nn.Module):
    """Swin Transformer giving the maps of its stages, at strides 4, 8, 16 and 32, or its last tokens.

    Args:
        version: 1 or 2. width: C of the first stage, doubled by each further one.
        depths: blocks of each stage. heads: of each stage.
        window: side of the windows, in tokens.
        image_size: (height, width) in pixels that the windows are cut to fit: a stage's window is at most its map.
            Images of any other size can be given.
        pretrained_windows: of version 2, side of each stage's windows in pre-training, where they have been enlarged
            since: the offsets stay relative to those.
        drop_path: stochastic depth's rate in the last block; the first has 0.
        out_stages: indices of the stages whose maps ``forward`` gives; those after the last of them are not built.
        out_norms: whether each map goes through a norm of its own, as detectors want it. The last map's is the one that
            ``tokens`` ends with.
    """

    prefix_tokens = 0

    def __init__(
        self, *, version: int = 1, width: int = 96, depths: Sequence[int] = (2, 2, 6, 2),
        heads: Sequence[int] = (3, 6, 12, 24), window: int = 7, image_size: tuple[int, int] = (224, 224),
        pretrained_windows: Sequence[int] | None = None, drop_path: float = 0.0,
        out_stages: Sequence[int] = (0, 1, 2, 3), out_norms: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self._check(version, depths, heads, window, image_size, pretrained_windows, out_stages)
        self.depths, self.out_stages = tuple(depths[: max(out_stages) + 1]), tuple(out_stages)
        stages = range(len(self.depths))
        widths = [width * 2**i for i in stages]
        self.channels, self.strides = [widths[i] for i in out_stages], [4 * 2**i for i in out_stages]
        self.depth = sum(self.depths) + 1
        maps = [[math.ceil(side / (4 * 2**i)) for side in image_size] for i in stages]
        windows = [(min(window, height), min(window, width)) for height, width in maps]
        references = windows if pretrained_windows is None else [(side, side) for side in pretrained_windows]
        rates = iter(drop_path_rates(drop_path, sum(self.depths)))
        self.embed = PatchEmbedding(4, width)
        self.embed_norm = make_norm("layer", width)
        self.merges = nn.ModuleList(PatchMerging(c, norm_last=version == 2) for c in widths[:-1])
        self.stages = nn.ModuleList(
            EncoderStack(
                swin_block(
                    widths[i], heads[i], version=version, window=windows[i], reference=references[i],
                    shifted=position % 2 == 1, drop_path=next(rates),
                )
                for position in range(self.depths[i])
            )
            for i in stages
        )  # fmt: skip
        self.norm = make_norm("layer", widths[-1])
        self.out_norms = nn.ModuleDict()
        self.last_normed = out_norms
        if out_norms:
            self.out_norms.update({str(i): make_norm("layer", widths[i]) for i in self.out_stages if i < stages[-1]})
        self.reset_parameters(version)

    @staticmethod
    def _check(
        version: int, depths: Sequence[int], heads: Sequence[int], window: int, image_size: tuple[int, int],
        pretrained_windows: Sequence[int] | None, out_stages: Sequence[int],
    ) -> None:  # fmt: skip
        """Refuse what cannot be built."""
        if version not in (1, 2):
            raise ValueError(f"there is no Swin version {version!r}; use 1 or 2")
        if window < 1:
            raise ValueError(f"window is the side of the windows in tokens and at least 1, got {window}")
        if len(image_size) != 2 or min(image_size) < 1:
            raise ValueError(f"image_size is (height, width) in pixels, got {image_size}")
        if len(heads) != len(depths):
            raise ValueError(f"heads and depths go by stage and are equally many, got {len(heads)} and {len(depths)}")
        if not out_stages or not set(out_stages) <= set(range(len(depths))):
            raise ValueError(f"out_stages name stages from 0 to {len(depths) - 1}, got {list(out_stages)}")
        if pretrained_windows is not None and (version == 1 or len(pretrained_windows) != len(depths)):
            raise ValueError(
                f"pretrained_windows are one a stage, of version 2 only, got {list(pretrained_windows)} for version "
                f"{version} with {len(depths)} stages"
            )

    def reset_parameters(self, version: int) -> None:
        """Truncated normal of deviation 0.02, zero bias, for linear layers after the embedding.

        In version 2 each branch starts at zero: its norm's scale does (arXiv 2111.09883, section 3.2).
        """
        for module in (*self.merges.modules(), *self.stages.modules()):
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif version == 2 and isinstance(module, EncoderBlock):
                for residual in (module.self_attention_residual, module.feed_forward_residual):
                    nn.init.zeros_(residual.norm.weight)  # type: ignore[arg-type]

    def _stages(self, images: Tensor) -> Iterator[tuple[Tensor, tuple[int, int]]]:
        """Tokens (B, h·w, C) and (h, w) after each stage."""
        height, width = images.shape[-2:]
        if height % 4 or width % 4:
            raise ValueError(f"Swin cuts images into patches of 4×4, which do not tile {height}×{width}; pad or resize")
        grid = (height // 4, width // 4)
        exact = self.norm.weight.dtype  # of the residual stream: under autocast, linear layers give less
        tokens = self.embed_norm(self.embed(images)).to(exact)  # (B, N, C)
        for index, stage in enumerate(self.stages):
            if index:
                tokens = self.merges[index - 1](tokens, grid).to(exact)
                grid = ((grid[0] + 1) // 2, (grid[1] + 1) // 2)
            tokens = stage(tokens, grid=grid)
            yield tokens, grid

    def tokens(self, images: Tensor) -> Tensor:
        """(B, 3, h, w) to (B, N, C): the last stage's tokens, normed. Sides are divisible by 4."""
        *_, (tokens, _) = self._stages(images)
        return self.norm(tokens)

    def forward(self, images: Tensor) -> list[Tensor]:
        """(B, 3, h, w), sides divisible by 4, to one (B, C_s, ⌈h/stride_s⌉, ⌈w/stride_s⌉) map per stage given."""
        maps = {}
        for index, (tokens, grid) in enumerate(self._stages(images)):
            if index in self.out_stages:
                if str(index) in self.out_norms:
                    tokens = self.out_norms[str(index)](tokens)
                elif self.last_normed:
                    tokens = self.norm(tokens)
                maps[index] = tokens.transpose(1, 2).unflatten(2, grid)  # (B, C, h, w), channels last in memory
        return [maps[index] for index in self.out_stages]

    def depth_of(self, name: str) -> int:
        """The layer a parameter belongs to: 0 the embedding, 1 … L the blocks, L + 1 the norms of what comes out.

        A patch merging goes with the block before it, as in the official fine-tuning code.
        """
        part, _, rest = name.partition(".")
        if part.startswith("embed"):
            return 0
        if part == "merges":
            return sum(self.depths[: int(rest.split(".")[0]) + 1])
        if part == "stages":
            stage, _, block, *_ = rest.split(".")
            return sum(self.depths[: int(stage)]) + int(block) + 1
        return self.depth

    def adapt(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The same state for this model's windows: version 1's tables resampled, bicubic; version 2 needs nothing."""
        adapted = dict(state)
        for path, module in self.named_modules():
            name = f"{path}.table"
            if isinstance(module, TableBias) and name in state:
                adapted[name] = resample_table(state[name], module.window)
        return adapted


def resample_table(table: Tensor, window: tuple[int, int]) -> Tensor:
    """A relative-position table (offsets, H) of a square window for another (height, width)."""
    new = (2 * window[0] - 1, 2 * window[1] - 1)
    if table.shape[0] == new[0] * new[1]:
        return table
    side = math.isqrt(table.shape[0])
    if side * side != table.shape[0]:
        raise ValueError(
            f"a relative-position table of {table.shape[0]} rows is not of a square window; give one that is"
        )
    return resample_positions(table[None], (side, side), new)[0]


_TINY = {"width": 96, "depths": (2, 2, 6, 2), "heads": (3, 6, 12, 24)}
_SMALL = {"width": 96, "depths": (2, 2, 18, 2), "heads": (3, 6, 12, 24)}
_BASE = {"width": 128, "depths": (2, 2, 18, 2), "heads": (4, 8, 16, 32)}
_LARGE = {"width": 192, "depths": (2, 2, 18, 2), "heads": (6, 12, 24, 48)}
# The larger windows of these were fine-tuned from windows of 12 at 192 pixels, where the last stage's map is 6×6.
_ENLARGED = (12, 12, 12, 6)

_V1 = partial(Swin, version=1)
_V2 = partial(Swin, version=2)

# Sizes: arXiv 2103.14030, section 3.3, and arXiv 2111.09883, section 3.5; the names are timm's.
SWIN: dict[str, Callable[..., Swin]] = {
    "swin_tiny_patch4_window7_224": partial(_V1, **_TINY, window=7, image_size=(224, 224)),
    "swin_small_patch4_window7_224": partial(_V1, **_SMALL, window=7, image_size=(224, 224)),
    "swin_base_patch4_window7_224": partial(_V1, **_BASE, window=7, image_size=(224, 224)),
    "swin_base_patch4_window12_384": partial(_V1, **_BASE, window=12, image_size=(384, 384)),
    "swin_large_patch4_window7_224": partial(_V1, **_LARGE, window=7, image_size=(224, 224)),
    "swin_large_patch4_window12_384": partial(_V1, **_LARGE, window=12, image_size=(384, 384)),
    "swinv2_tiny_window8_256": partial(_V2, **_TINY, window=8, image_size=(256, 256)),
    "swinv2_tiny_window16_256": partial(_V2, **_TINY, window=16, image_size=(256, 256)),
    "swinv2_small_window8_256": partial(_V2, **_SMALL, window=8, image_size=(256, 256)),
    "swinv2_small_window16_256": partial(_V2, **_SMALL, window=16, image_size=(256, 256)),
    "swinv2_base_window8_256": partial(_V2, **_BASE, window=8, image_size=(256, 256)),
    "swinv2_base_window16_256": partial(_V2, **_BASE, window=16, image_size=(256, 256)),
    "swinv2_base_window12_192": partial(_V2, **_BASE, window=12, image_size=(192, 192)),
    "swinv2_base_window12to16_192to256": partial(
        _V2, **_BASE, window=16, image_size=(256, 256), pretrained_windows=_ENLARGED
    ),
    "swinv2_base_window12to24_192to384": partial(
        _V2, **_BASE, window=24, image_size=(384, 384), pretrained_windows=_ENLARGED
    ),
    "swinv2_large_window12_192": partial(_V2, **_LARGE, window=12, image_size=(192, 192)),
    "swinv2_large_window12to16_192to256": partial(
        _V2, **_LARGE, window=16, image_size=(256, 256), pretrained_windows=_ENLARGED
    ),
    "swinv2_large_window12to24_192to384": partial(
        _V2, **_LARGE, window=24, image_size=(384, 384), pretrained_windows=_ENLARGED
    ),
}
