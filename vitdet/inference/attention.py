"""Where a Vision Transformer looked: maps over an image from the weights of its self-attention layers.

The weights are (B, H, N, N) a layer, row = query. Tokens stand in the order class, distillation, registers, and then
the patches, row-major; ``prefix`` is the number before the patches. The maps are of the class token as query; of a
model that has none, or averages the patches instead of using it (``class_token=False``), they are the mean over all
patches as queries. They say where information came from, which is not the same as why the model decided so.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from vitdet.errors import UserError
from vitdet.structures import Preprocessing

METHODS = ("rollout", "last")


def head_maps(weights: Tensor, *, prefix: int, grid: tuple[int, int], class_token: bool = True) -> Tensor:
    """What each head of one layer attends to.

    Args:
        weights: (B, H, N, N) of the layer.
        prefix: tokens before the patches.
        grid: (h, w) of the patches.
        class_token: whether the first of the prefix tokens is the query, else the patches.

    Returns:
        (B, H, h, w), the attention itself: a head's map sums to 1 less what goes to the prefix tokens.

    Raises:
        ValueError: prefix and grid do not add up to N tokens.
    """
    height, width = grid
    if prefix + height * width != weights.shape[-1]:
        raise ValueError(
            f"{prefix} prefix tokens and a grid of {height} x {width} patches are not {weights.shape[-1]} tokens"
        )
    return _query_rows(weights, prefix, class_token)[..., prefix:].unflatten(-1, grid)


def last_layer_map(weights: Sequence[Tensor], prefix: int, *, class_token: bool = True) -> Tensor:
    """The last layer's attention of the class token to the patches, the mean over its heads.

    Args:
        weights: (B, H, N, N) of each layer, the first first.
        prefix: tokens before the patches.
        class_token: whether the first of the prefix tokens is the query, else the patches.

    Returns:
        (B, h * w), each image's map stretched to [0, 1]; 0 where it is flat.
    """
    return _stretched(_query_rows(weights[-1].float().mean(dim=1), prefix, class_token)[:, prefix:])


def rollout(weights: Sequence[Tensor], *, prefix: int, class_token: bool = True) -> Tensor:
    """Attention rollout: what of each patch has reached the class token through all layers.

    arXiv 2005.00928, section 3: the mean over heads, half of it the residual connection, A = (W + I) / 2, and the
    product of the layers' A, of which only the class token's row is computed.

    Args:
        weights: (B, H, N, N) of each layer, the first first.
        prefix: tokens before the patches.
        class_token: whether the first of the prefix tokens is the query, else the patches.

    Returns:
        (B, h * w), each image's map stretched to [0, 1]; 0 where it is flat.
    """
    return _stretched(rollout_rows(weights, prefix=prefix, class_token=class_token)[:, prefix:])


def rollout_rows(weights: Sequence[Tensor], *, prefix: int, class_token: bool = True) -> Tensor:
    """The shares of all tokens in the rollout: (B, N), each row summing to 1; arguments as for :func:`rollout`."""
    batch, _, tokens, _ = weights[0].shape
    start = _query_rows(torch.eye(tokens, device=weights[0].device), prefix, class_token)  # (N,)
    row = start.expand(batch, 1, tokens)  # (B, 1, N)
    for layer in reversed(weights):  # from the output to the input: a vector times a matrix, not N of them
        mixed = layer.float().mean(dim=1)  # (B, N, N)
        mixed = mixed / mixed.sum(dim=-1, keepdim=True)  # the residual's half stays a half where rounding or a mask ate
        row = 0.5 * (row @ mixed + row)
    return row[:, 0]


def to_image(heat: Tensor, *, image_size: tuple[int, int], preprocessing: Preprocessing) -> np.ndarray:
    """A map over a model's input, laid over the original image.

    Args:
        heat: (h, w) in [0, 1], over the whole input.
        image_size: (height, width) of the original image.
        preprocessing: how the input was made of it; what a centre crop has cut off is 0.

    Returns:
        (height, width) float32 in [0, 1], bilinear between the centres of the patches.
    """
    height, width = image_size
    top, left, bottom, right = _window(image_size, preprocessing)
    seen = (bottom - top, right - left)
    large = nn.functional.interpolate(heat.float().cpu()[None, None], size=seen, mode="bilinear")[0, 0]
    whole = np.zeros((height, width), dtype=np.float32)
    whole[top:bottom, left:right] = large.numpy()
    return whole


def image_maps(model: nn.Module, images: Tensor, *, method: str) -> Tensor:
    """The map of each image of a batch, by a model that offers its attention weights.

    Args:
        model: in evaluation mode, see :func:`check_model`.
        images: (B, 3, height, width), normalised.
        method: ``"rollout"`` or ``"last"``.

    Returns:
        (B, h, w) in [0, 1].
    """
    prefix: int = model.prefix_tokens  # type: ignore[assignment]
    grid: tuple[int, int] = model.grid(images)  # type: ignore[operator]
    class_token = getattr(model, "pooling", "token").startswith("token")
    maps = []
    for image in images.split(1):  # one by one: at 518 pixels the weights of an image alone take half a gigabyte
        weights = model.attention_weights(image)  # type: ignore[operator]
        if method == "rollout":
            maps.append(rollout(weights, prefix=prefix, class_token=class_token))
        else:
            maps.append(last_layer_map(weights, prefix, class_token=class_token))
    return torch.cat(maps).unflatten(1, grid)


def check_model(model: nn.Module, method: str) -> None:
    """Raise a UserError where the method is unknown or the model does not offer its attention weights.

    Those that do have ``attention_weights(images) -> list[Tensor]`` ((B, H, N, N) a layer), ``prefix_tokens`` and
    ``grid(images) -> (h, w)``, and say by ``pooling`` (``"token…"`` where absent) whether they use their class token. A
    model with a ``backbone`` has what its backbone has.
    """
    if method not in METHODS:
        raise UserError(f"attention is {method!r}; choose {' or '.join(map(repr, METHODS))}")
    backbone = getattr(model, "backbone", model)
    if not (hasattr(model, "attention_weights") and hasattr(backbone, "attention_weights")):
        raise UserError(
            f"{type(backbone).__name__} has no attention over the whole image to show; use a Vision Transformer "
            "(vit_*, deit_*), not a Swin, a ResNet or a detector"
        )


def _query_rows(matrix: Tensor, prefix: int, class_token: bool) -> Tensor:
    """(…, N, N) -> (…, N): the class token's row, or without one the mean of the patches' rows."""
    return matrix[..., 0, :] if class_token and prefix else matrix[..., prefix:, :].mean(dim=-2)


def _stretched(heat: Tensor) -> Tensor:
    """(B, n), each row from its least to its greatest value stretched to 0…1."""
    low, high = heat.amin(dim=1, keepdim=True), heat.amax(dim=1, keepdim=True)
    span = high - low
    # Rounding makes a flat map uneven in its last digits, and stretching them would show noise.
    return torch.where(span > 1e-5 * high, (heat - low) / span.clamp(min=torch.finfo(heat.dtype).tiny), 0.0)


def _window(image_size: tuple[int, int], preprocessing: Preprocessing) -> tuple[int, int, int, int]:
    """Top, left, bottom, right of what the model saw of an image, in whole pixels of it."""
    height, width = image_size
    if preprocessing.crop is None:
        return 0, 0, height, width
    # Pixels of the image a pixel of the input: the image just covers size / crop.
    scale = preprocessing.crop * min(height / preprocessing.size[0], width / preprocessing.size[1])
    seen_h, seen_w = (scale * side for side in preprocessing.size)
    top, left = round((height - seen_h) / 2), round((width - seen_w) / 2)
    bottom, right = round((height + seen_h) / 2), round((width + seen_w) / 2)
    return top, left, max(bottom, top + 1), max(right, left + 1)
