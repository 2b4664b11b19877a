"""Attention maps from the theory: what identity, uniform and pointed attention must roll out to, and where it lands."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from vitdet.data.transforms import to_input
from vitdet.errors import UserError
from vitdet.inference.attention import (
    check_model,
    head_maps,
    image_maps,
    last_layer_map,
    rollout,
    rollout_rows,
    to_image,
)
from vitdet.structures import Preprocessing

B, H, L, GRID = 2, 3, 4, (3, 4)
PATCHES = GRID[0] * GRID[1]


def random_weights(prefix: int) -> list[Tensor]:
    tokens = prefix + PATCHES
    return [(2 * torch.randn(B, H, tokens, tokens)).softmax(-1) for _ in range(L)]


def pointed_at(token: int, prefix: int, share: float = 0.5) -> list[Tensor]:
    """Every token gives ``share`` of its attention to one, and the rest to all evenly."""
    tokens = prefix + PATCHES
    weights = torch.full((1, H, tokens, tokens), (1 - share) / tokens)
    weights[..., token] += share
    return [weights] * L


@pytest.mark.parametrize(("prefix", "class_token"), [(0, True), (1, True), (5, True), (5, False)])
def test_rollout_is_the_product_of_the_layers(prefix: int, class_token: bool) -> None:
    """Equation 1 of the paper, as whole matrices, of which ours computes a single row."""
    weights = random_weights(prefix)
    product = torch.eye(prefix + PATCHES).expand(B, -1, -1)
    for layer in weights:
        mixed = 0.5 * layer.mean(1) + 0.5 * torch.eye(prefix + PATCHES)
        product = mixed / mixed.sum(-1, keepdim=True) @ product
    expected = product[:, 0] if prefix and class_token else product[:, prefix:].mean(1)
    found = rollout_rows(weights, prefix=prefix, class_token=class_token)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found.sum(-1), torch.ones(B))
    patches = expected[:, prefix:]
    low, high = patches.amin(1, keepdim=True), patches.amax(1, keepdim=True)
    found = rollout(weights, prefix=prefix, class_token=class_token)
    torch.testing.assert_close(found, (patches - low) / (high - low))


def test_the_order_of_the_layers_matters() -> None:
    weights = random_weights(1)
    assert (rollout_rows(weights, prefix=1) - rollout_rows(weights[::-1], prefix=1)).abs().max() > 0.01


@pytest.mark.parametrize("prefix", [0, 1, 2])
def test_uniform_attention_rolls_out_to_uniform(prefix: int) -> None:
    tokens = prefix + PATCHES
    weights = [torch.full((B, H, tokens, tokens), 1 / tokens)] * 12
    rows = rollout_rows(weights, prefix=prefix)
    torch.testing.assert_close(rows[:, prefix:], rows[:, -1:].expand(-1, PATCHES))
    if prefix == 0:
        torch.testing.assert_close(rows, torch.full((B, tokens), 1 / tokens))
    else:  # half of what the class token has stays with it at every layer
        assert rows[0, -1].item() == pytest.approx((1 - 0.5**12) / tokens, rel=1e-5)
    assert (rollout(weights, prefix=prefix) == 0).all()
    assert (last_layer_map(weights, prefix) == 0).all()


def test_rounding_is_not_blown_up_to_a_pattern() -> None:
    weights = [torch.full((1, H, 13, 13), 1 / 13) * (1 + 1e-7 * torch.randn(1, H, 13, 13)) for _ in range(L)]
    assert rollout_rows(weights, prefix=1)[0, 1:].unique().numel() > 1
    assert (rollout(weights, prefix=1) == 0).all()
    assert (last_layer_map(weights, 1) == 0).all()


def test_the_residual_keeps_its_half() -> None:
    """Rows that sum to less than 1, by rounding or dropped weights, are made whole."""
    weights = random_weights(1)
    less = [layer * (0.5 + torch.rand(B, 1, 1 + PATCHES, 1) / 2) for layer in weights]
    torch.testing.assert_close(rollout_rows(less, prefix=1), rollout_rows(weights, prefix=1))


def test_identity_attention_moves_nothing() -> None:
    weights = [torch.eye(1 + PATCHES).expand(B, H, -1, -1)] * L
    rows = rollout_rows(weights, prefix=1)
    assert rows[:, 0].tolist() == [1.0] * B
    assert (rows[:, 1:] == 0).all()
    assert (rollout(weights, prefix=1) == 0).all()
    torch.testing.assert_close(
        rollout_rows([torch.eye(PATCHES).expand(1, 1, -1, -1)], prefix=0), torch.full((1, PATCHES), 1 / PATCHES)
    )


@pytest.mark.parametrize("prefix", [0, 1, 2])
@pytest.mark.parametrize("patch", [0, 6, PATCHES - 1])
def test_a_patch_that_all_attend_to_shows_up(prefix: int, patch: int) -> None:
    weights = pointed_at(prefix + patch, prefix)
    for heat in (rollout(weights, prefix=prefix), last_layer_map(weights, prefix)):
        assert heat.shape == (1, PATCHES)
        assert heat.argmax().item() == patch
        assert heat.max().item() == 1
        assert heat.min().item() == 0
    maps = head_maps(weights[-1], prefix=prefix, grid=GRID)
    assert maps.shape == (1, H, *GRID)
    assert divmod(maps[0, 0].argmax().item(), GRID[1]) == divmod(patch, GRID[1])  # row-major


def test_only_rollout_sees_through_the_layers() -> None:
    """Patch 3 tells patch 7, then 7 the class token: the last layer shows the messenger, rollout the source too."""
    first, second = torch.eye(1 + PATCHES), torch.eye(1 + PATCHES)
    first[1 + 7] = nn.functional.one_hot(torch.tensor(1 + 3), 1 + PATCHES)
    second[0] = nn.functional.one_hot(torch.tensor(1 + 7), 1 + PATCHES)
    weights = [matrix.float()[None, None] for matrix in (first, second)]
    assert last_layer_map(weights, 1).nonzero()[:, 1].tolist() == [7]
    assert rollout(weights, prefix=1).nonzero()[:, 1].tolist() == [3, 7]
    assert rollout_rows(weights, prefix=1)[0, [0, 4, 8]].tolist() == [0.5, 0.25, 0.25]


def test_heads_are_kept_apart_and_averaged() -> None:
    weights = random_weights(2)[-1]
    maps = head_maps(weights, prefix=2, grid=GRID)
    assert torch.equal(maps, weights[:, :, 0, 2:].reshape(B, H, *GRID))
    mean = maps.mean(1).flatten(1)
    expected = (mean - mean.amin(1, keepdim=True)) / (mean.amax(1, keepdim=True) - mean.amin(1, keepdim=True))
    torch.testing.assert_close(last_layer_map([weights], 2), expected)
    without = head_maps(weights, prefix=2, grid=GRID, class_token=False)
    torch.testing.assert_close(without.flatten(2), weights[:, :, 2:, 2:].mean(2))
    mean = without.mean(1).flatten(1)
    found = last_layer_map([weights], 2, class_token=False)
    torch.testing.assert_close(
        found * (mean.max(1).values - mean.min(1).values)[:, None] + mean.min(1).values[:, None], mean
    )
    with pytest.raises(ValueError, match="1 prefix tokens and a grid of 3 x 4 patches are not 14 tokens"):
        head_maps(weights, prefix=1, grid=GRID)


def test_half_precision_weights() -> None:
    weights = random_weights(1)
    half = [layer.bfloat16() for layer in weights]
    torch.testing.assert_close(rollout(half, prefix=1), rollout(weights, prefix=1), atol=0.03, rtol=0)
    assert rollout(half, prefix=1).dtype == torch.float32


def test_a_stretched_input_is_laid_over_the_whole_image() -> None:
    heat = torch.tensor([[0.0, 1.0], [0.25, 0.5]])
    whole = to_image(heat, image_size=(60, 100), preprocessing=Preprocessing(size=(32, 32)))
    assert whole.shape == (60, 100)
    assert whole.dtype == np.float32
    assert [whole[0, 0], whole[0, -1], whole[-1, 0], whole[-1, -1]] == [0.0, 1.0, 0.25, 0.5]
    assert whole[0, 49:51].tolist() == pytest.approx([0.49, 0.51])
    assert whole.min() >= 0
    assert whole.max() <= 1


@pytest.mark.parametrize(
    ("image_size", "size", "crop"),
    [
        ((300, 500), (64, 64), 0.875),
        ((500, 300), (64, 64), 1.0),
        ((480, 640), (64, 96), 0.5),
        ((40, 30), (64, 64), 0.9),
    ],
)
def test_a_centre_crop_is_undone(image_size: tuple[int, int], size: tuple[int, int], crop: float) -> None:
    """The map lies where the pixels came from, as the transform itself shows, and is 0 outside."""
    height, width = image_size
    preprocessing = Preprocessing(size=size, crop=crop)
    whole = to_image(torch.ones(4, 4), image_size=image_size, preprocessing=preprocessing)
    rows, columns = whole.any(1).nonzero()[0], whole.any(0).nonzero()[0]
    assert whole[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].all()
    places = np.zeros((height, width, 3), dtype=np.uint8)
    places[..., 0] = np.linspace(0, 255, height)[:, None]
    places[..., 1] = np.linspace(0, 255, width)
    seen = to_input(places, preprocessing)
    step = 0.5 / crop * min(height / size[0], width / size[1]) + 1.5
    for found, channel, length in ((rows, 0, height), (columns, 1, width)):
        first, last = (seen[at, at, channel] / 255 * (length - 1) for at in (0, -1))
        assert found[0] == pytest.approx(first, abs=step + length / 255)
        assert found[-1] == pytest.approx(last, abs=step + length / 255)
    assert 0 < whole.mean() <= 1
    assert whole.mean() == pytest.approx(
        size[0] * size[1] * (crop * min(height / size[0], width / size[1])) ** 2 / (height * width), rel=0.06
    )


def test_a_sliver_still_has_a_map() -> None:
    whole = to_image(torch.ones(2, 2), image_size=(1, 500), preprocessing=Preprocessing(size=(64, 64), crop=0.1))
    assert whole.sum() >= 1


class Looks(nn.Module):
    """Patches of 2 x 2 pixels and a class token; every token attends to the brightest patch alone."""

    prefix_tokens = 1

    def grid(self, images: Tensor) -> tuple[int, int]:
        return images.shape[2] // 2, images.shape[3] // 2

    def attention_weights(self, images: Tensor) -> list[Tensor]:
        patches = nn.functional.avg_pool2d(images.mean(1, keepdim=True), 2).flatten(1)
        weights = torch.zeros(len(images), H, 1 + patches.shape[1], 1 + patches.shape[1])
        for row, best in zip(weights, patches.argmax(1), strict=True):
            row[:, :, 1 + best] = 1
        return [weights] * L


@pytest.mark.parametrize("method", ["rollout", "last"])
def test_maps_of_a_batch(method: str) -> None:
    images = torch.zeros(3, 3, 8, 12)
    for index, (row, column) in enumerate([(0, 0), (2, 5), (3, 1)]):
        images[index, :, 2 * row : 2 * row + 2, 2 * column : 2 * column + 2] = 1
    maps = image_maps(Looks(), images, method=method)
    assert maps.shape == (3, 4, 6)
    assert [divmod(one.argmax().item(), 6) for one in maps] == [(0, 0), (2, 5), (3, 1)]
    for index in range(3):
        torch.testing.assert_close(maps[index], image_maps(Looks(), images[index : index + 1], method=method)[0])


@pytest.mark.parametrize(("pooling", "expected"), [("token", (0, 0)), ("average", (1, 2)), ("attention", (1, 2))])
@pytest.mark.parametrize("method", ["rollout", "last"])
def test_a_class_token_that_is_not_used_is_not_asked(pooling: str, expected: tuple[int, int], method: str) -> None:
    """Its own attention points elsewhere than that of the patches, which are averaged."""

    class Averages(Looks):
        def attention_weights(self, images: Tensor) -> list[Tensor]:
            weights = torch.zeros(len(images), H, 13, 13)
            weights[:, :, 0, 1] = 1
            weights[:, :, 1:, 1 + 1 * 4 + 2] = 1
            return [weights]

    model = Averages()
    model.pooling = pooling
    [heat] = image_maps(model, torch.zeros(1, 3, 6, 8), method=method)
    assert divmod(heat.argmax().item(), 4) == expected


def test_a_model_without_attention_is_named() -> None:
    check_model(Looks(), "last")
    whole = Looks()
    whole.backbone = Looks()
    check_model(whole, "rollout")
    whole.backbone = nn.Linear(1, 1)  # a classifier offers it for any backbone
    with pytest.raises(UserError, match="Linear has no attention"):
        check_model(whole, "rollout")
    with pytest.raises(
        UserError, match=r"Conv2d has no attention .*use a Vision Transformer \(vit_\*, deit_\*\), not a"
    ):
        check_model(nn.Conv2d(3, 3, 1), "rollout")
    with pytest.raises(UserError, match="attention is 'first'; choose 'rollout' or 'last'"):
        check_model(Looks(), "first")
