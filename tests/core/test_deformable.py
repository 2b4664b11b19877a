"""Deformable attention: a plain loop, maps whose samples are known, and the published module."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from vitdet.core.deformable import DeformableAttention, sample_levels

SHAPES = [(3, 5), (2, 2), (1, 4)]
TOKENS = 15 + 4 + 4


def bilinear(plane: list[list[float]], x: float, y: float) -> float:
    """``plane[row][column]`` at (x, y) in [0, 1]; cell centres stand at (i + 0.5) / size; outside is 0."""
    height, width = len(plane), len(plane[0])
    column, row = x * width - 0.5, y * height - 0.5
    total = 0.0
    for i in (math.floor(row), math.floor(row) + 1):
        for j in (math.floor(column), math.floor(column) + 1):
            if 0 <= i < height and 0 <= j < width:
                total += plane[i][j] * (1 - abs(row - i)) * (1 - abs(column - j))
    return total


def reference(value: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
    batch, queries, heads, levels, points = weights.shape
    depth = value.shape[-1]
    result = torch.zeros(batch, queries, heads * depth, dtype=value.dtype)
    for b, q, h, d in torch.cartesian_prod(*map(torch.arange, (batch, queries, heads, depth))).tolist():
        start = 0
        for level in range(levels):
            height, width = SHAPES[level]
            plane = value[b, start : start + height * width, h, d].view(height, width).tolist()
            start += height * width
            for p in range(points):
                x, y = locations[b, q, h, level, p].tolist()
                result[b, q, h * depth + d] += weights[b, q, h, level, p] * bilinear(plane, x, y)
    return result


def samples(batch: int, queries: int, heads: int, depth: int, points: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random value, locations (some of them outside the maps) and weights."""
    value = torch.randn(batch, TOKENS, heads, depth, dtype=torch.float64)
    locations = torch.rand(batch, queries, heads, len(SHAPES), points, 2, dtype=torch.float64) * 1.6 - 0.3
    weights = torch.rand(batch, queries, heads, len(SHAPES), points, dtype=torch.float64)
    return value, locations, weights


def sample(value: Tensor, locations: Tensor, weights: Tensor, **options) -> Tensor:
    """With as many points in each level."""
    points = [weights.shape[4]] * len(SHAPES)
    return sample_levels(value, SHAPES, locations.flatten(3, 4), weights.flatten(3), points=points, **options)


def test_sampling_equals_a_plain_loop() -> None:
    value, locations, weights = samples(batch=2, queries=3, heads=2, depth=2, points=4)
    expected = reference(value, locations, weights)
    assert expected.abs().min() > 1e-3
    torch.testing.assert_close(sample(value, locations, weights), expected, rtol=0, atol=1e-12)


def test_sampling_gradients() -> None:
    inputs = samples(batch=1, queries=2, heads=2, depth=1, points=2)
    for one in inputs:
        one.requires_grad_()
    assert torch.autograd.gradcheck(sample, inputs)


def bare(width: int, heads: int, points: int, levels: int = len(SHAPES)) -> DeformableAttention:
    """Values and output pass through unchanged, the weights are equal, the offsets are the biases alone."""
    module = DeformableAttention(width, heads, levels=levels, points=points)
    for layer in (module.value, module.out):
        nn.init.eye_(layer.weight)
    return module


def coordinates(shapes: list[tuple[int, int]]) -> Tensor:
    """(1, M, 2): every token holds its own (x, y), so that a bilinear sample inside gives its location."""
    levels = []
    for height, width in shapes:
        y, x = torch.meshgrid((torch.arange(height) + 0.5) / height, (torch.arange(width) + 0.5) / width, indexing="ij")
        levels.append(torch.stack([x, y], -1).flatten(0, 1))
    return torch.cat(levels)[None]


@pytest.mark.parametrize("points", [1, 4])
def test_an_offset_of_all_points_reaches_the_edge(points: int) -> None:
    module = bare(2, 1, points, levels=2)
    with torch.no_grad():
        module.offsets.bias.copy_(torch.tensor([1.0, -1.0]).mul(points).repeat(2 * points))
    boxes = torch.tensor([[[0.5, 0.4, 0.3, 0.2], [0.3, 0.6, 0.2, 0.5]]])
    shapes = [(20, 30), (40, 10)]
    found = module(torch.zeros(1, 2, 2), coordinates(shapes), reference_boxes=boxes, shapes=shapes)
    # right and upper edges
    torch.testing.assert_close(found, torch.tensor([[[0.65, 0.3], [0.4, 0.35]]]), rtol=0, atol=1e-5)


def test_coordinates_stay_exact_in_bfloat16() -> None:
    """On a map of alternating cells, coordinates of 8 bits would be off by up to a 25th of a cell, here 0.08."""
    side = 40
    module = bare(2, 1, 1, levels=1)
    nn.init.zeros_(module.offsets.bias)
    y, x = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    memory = torch.stack([1.0 - 2 * (x % 2), 1.0 - 2 * (y % 2)], -1).view(1, side * side, 2)  # exact in bfloat16
    centres = torch.rand(1, 200, 2) * 0.2 + 0.75  # where bfloat16 is coarse
    tokens, sizes = torch.zeros(1, 200, 2), torch.full((1, 200, 2), 0.1)

    def attend(centres: Tensor) -> Tensor:
        boxes = torch.cat([centres, sizes], -1)
        return module(tokens, memory, reference_boxes=boxes, shapes=[(side, side)])

    expected = attend(centres)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = attend(centres)
    assert found.dtype == torch.bfloat16
    assert (found.float() - expected).abs().max() < 1e-2
    rounded = ((2 * centres - 1).bfloat16().float() + 1) / 2
    assert (attend(rounded) - expected).abs().max() > 0.05, "else this would show nothing"


def test_sampling_of_bfloat16_maps() -> None:
    value, locations, weights = (one.float() for one in samples(batch=2, queries=5, heads=2, depth=3, points=4))
    coarse, weights = value.bfloat16(), weights / weights.sum((-1, -2), keepdim=True)
    found = sample(coarse, locations, weights)
    assert found.dtype == torch.bfloat16
    expected = sample(coarse.float(), locations, weights)
    torch.testing.assert_close(found.float(), expected, rtol=2**-8, atol=1e-4)  # rounded once, at the end


def test_heads_read_their_own_channels_and_offsets() -> None:
    module = bare(4, 2, 1, levels=1)
    with torch.no_grad():
        module.offsets.bias.copy_(torch.tensor([1.0, 0.0, 0.0, 1.0]))
    memory = coordinates([(20, 20)]).repeat(1, 1, 2)
    boxes = torch.tensor([[[0.5, 0.5, 0.2, 0.4]]])
    found = module(torch.zeros(1, 1, 4), memory, reference_boxes=boxes, shapes=[(20, 20)])
    torch.testing.assert_close(found, torch.tensor([[[0.6, 0.5, 0.5, 0.7]]]), rtol=0, atol=1e-5)


def test_a_constant_map_gives_its_value() -> None:
    module = DeformableAttention(8, 2, levels=3, points=3)
    for layer in (module.weights, module.value, module.out):
        nn.init.normal_(layer.weight)
        nn.init.normal_(layer.bias)
    tokens, constant = torch.randn(2, 5, 8), torch.randn(2, 1, 8)
    boxes = torch.tensor([0.5, 0.5, 0.2, 0.2]).expand(2, 5, 4)
    shapes = [(16, 16), (12, 20), (9, 9)]
    found = module(tokens, constant.expand(2, 256 + 240 + 81, 8), reference_boxes=boxes, shapes=shapes)
    torch.testing.assert_close(found, module.out(module.value(constant)).expand(2, 5, 8), rtol=0, atol=1e-4)


def test_beyond_the_image_is_nothing() -> None:
    module = bare(2, 1, 1, levels=1)
    boxes = torch.tensor([[[3.0, 0.5, 0.1, 0.1]]])
    found = module(torch.zeros(1, 1, 2), torch.ones(1, 16, 2), reference_boxes=boxes, shapes=[(4, 4)])
    assert found.tolist() == [[[0.0, 0.0]]]


def test_equal_to_the_published_module() -> None:
    transformers = pytest.importorskip("transformers", reason="the reference implementation is not installed")
    from transformers.models.rt_detr.modeling_rt_detr import RTDetrMultiscaleDeformableAttention

    config = transformers.RTDetrConfig(d_model=32, num_feature_levels=3)
    theirs = RTDetrMultiscaleDeformableAttention(config, num_heads=4, n_points=2)
    ours = DeformableAttention(32, 4, levels=3, points=2)
    names = {"offsets": "sampling_offsets", "weights": "attention_weights", "value": "value_proj", "out": "output_proj"}
    for mine, other in names.items():
        layer = getattr(ours, mine)
        nn.init.normal_(layer.weight, std=0.2)
        nn.init.normal_(layer.bias)
        getattr(theirs, other).load_state_dict(layer.state_dict())
    tokens, pos, memory = torch.randn(2, 7, 32), torch.randn(2, 7, 32), torch.randn(2, TOKENS, 32)
    boxes = torch.rand(2, 7, 4)
    expected, _ = theirs(
        tokens, encoder_hidden_states=memory, position_embeddings=pos, reference_points=boxes[:, :, None],
        spatial_shapes=torch.tensor(SHAPES), spatial_shapes_list=SHAPES,
    )  # fmt: skip
    found = ours(tokens, memory, reference_boxes=boxes, shapes=SHAPES, query_pos=pos)
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_starts_as_published() -> None:
    """Eight heads look along the eight directions of the compass, point p at distance p + 1 (Deformable DETR, A.4)."""
    module = DeformableAttention(16, 8, levels=2, points=3)
    compass = torch.tensor([[1, 0], [1, 1], [0, 1], [-1, 1], [-1, 0], [-1, -1], [0, -1], [1, -1]])
    start = module.offsets.bias.view(8, 2, 3, 2)
    for level in range(2):
        for point in range(3):
            torch.testing.assert_close(start[:, level, point], compass * (point + 1.0), rtol=0, atol=1e-5)
    for zero in (module.offsets.weight, module.weights.weight, module.weights.bias, module.value.bias, module.out.bias):
        assert zero.abs().max() == 0
    assert 0.3 < module.value.weight.abs().max() <= (6 / 32) ** 0.5


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ValueError, match=r"heads must divide the width, got width=10, heads=4"):
        DeformableAttention(10, 4, levels=1, points=1)


def test_levels_have_their_own_number_of_points() -> None:
    """Points of weight 0 are as good as none."""
    value, locations, weights = samples(batch=2, queries=3, heads=2, depth=2, points=4)
    counts = [3, 1, 4]
    kept = torch.cat([torch.arange(4) < count for count in counts])  # (S·P,)
    weights = weights * kept.view(len(SHAPES), 4)
    few = sample_levels(
        value, SHAPES, locations.flatten(3, 4)[..., kept, :], weights.flatten(3)[..., kept], points=counts
    )
    torch.testing.assert_close(few, sample(value, locations, weights), rtol=0, atol=1e-12)


def test_discrete_sampling_equals_a_plain_loop() -> None:
    """The maps are not square, and some locations lie outside."""
    value, locations, weights = samples(batch=2, queries=3, heads=2, depth=2, points=4)
    expected = torch.zeros(2, 3, 4, dtype=torch.float64)
    starts = [0, 15, 19]
    for b, q, h, s, p in torch.cartesian_prod(*map(torch.arange, (2, 3, 2, 3, 4))).tolist():
        height, width = SHAPES[s]
        x, y = locations[b, q, h, s, p].tolist()
        column = min(max(math.floor(x * width + 0.5), 0), width - 1)
        row = min(max(math.floor(y * height + 0.5), 0), height - 1)
        cell = value[b, starts[s] + row * width + column, h]  # (D,)
        expected[b, q, 2 * h : 2 * h + 2] += weights[b, q, h, s, p] * cell
    torch.testing.assert_close(sample(value, locations, weights, sampling="discrete"), expected, rtol=0, atol=1e-12)


def test_discrete_sampling_leaves_the_offsets() -> None:
    module = DeformableAttention(8, 2, levels=3, points=2, sampling="discrete")
    boxes = torch.rand(1, 4, 4)
    module(torch.randn(1, 4, 8), torch.randn(1, TOKENS, 8), reference_boxes=boxes, shapes=SHAPES).sum().backward()
    trained = {name for name, parameter in module.named_parameters() if parameter.grad is not None}
    assert trained == {name for name, _ in module.named_parameters() if not name.startswith("offsets.")}


def test_reach_is_a_share_of_the_box() -> None:
    found = []
    for reach in (0.5, 1.0):
        module = DeformableAttention(2, 1, levels=1, points=1, reach=reach, project=False)
        with torch.no_grad():
            module.offsets.bias.copy_(torch.tensor([1.0, -1.0]))
        boxes = torch.tensor([[[0.5, 0.5, 0.2, 0.4]]])
        memory = coordinates([(20, 20)])
        found.append(module(torch.zeros(1, 1, 2), memory, reference_boxes=boxes, shapes=[(20, 20)]))
    torch.testing.assert_close(torch.cat(found), torch.tensor([[[0.6, 0.3]], [[0.7, 0.1]]]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", ["default", "discrete"])
def test_equal_to_the_module_of_version_2(method: str) -> None:
    transformers = pytest.importorskip("transformers", reason="the reference implementation is not installed")
    from transformers.models.rt_detr_v2.modeling_rt_detr_v2 import RTDetrV2MultiscaleDeformableAttention

    config = transformers.RTDetrV2Config(
        d_model=32, decoder_attention_heads=4, decoder_n_levels=3, decoder_n_points=2, decoder_method=method
    )
    theirs = RTDetrV2MultiscaleDeformableAttention(config)
    sampling = {"default": "bilinear", "discrete": "discrete"}[method]
    ours = DeformableAttention(32, 4, levels=3, points=2, sampling=sampling)
    names = {"offsets": "sampling_offsets", "weights": "attention_weights", "value": "value_proj", "out": "output_proj"}
    share_values(ours, theirs, names)
    tokens, pos, memory = torch.randn(2, 7, 32), torch.randn(2, 7, 32), torch.randn(2, TOKENS, 32)
    boxes = torch.rand(2, 7, 4)
    expected, _ = theirs(
        tokens, encoder_hidden_states=memory, position_embeddings=pos, reference_points=boxes[:, :, None],
        spatial_shapes=torch.tensor(SHAPES), spatial_shapes_list=SHAPES,
    )  # fmt: skip
    found = ours(tokens, memory, reference_boxes=boxes, shapes=SHAPES, query_pos=pos)
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_equal_to_the_module_of_dfine() -> None:
    transformers = pytest.importorskip("transformers", reason="the reference implementation is not installed")
    from transformers.models.d_fine.modeling_d_fine import DFineMultiscaleDeformableAttention

    config = transformers.DFineConfig(
        d_model=32, decoder_attention_heads=4, num_feature_levels=3, decoder_n_points=[3, 6, 3]
    )
    theirs = DFineMultiscaleDeformableAttention(config)
    ours = DeformableAttention(32, 4, levels=3, points=(3, 6, 3), project=False)
    share_values(ours, theirs, {"offsets": "sampling_offsets", "weights": "attention_weights"})
    tokens, memory, boxes = torch.randn(2, 7, 32), torch.randn(2, TOKENS, 32), torch.rand(2, 7, 4)
    expected, _ = theirs(
        tokens, encoder_hidden_states=memory, reference_points=boxes[:, :, None], spatial_shapes=torch.tensor(SHAPES),
        spatial_shapes_list=SHAPES,
    )  # fmt: skip
    found = ours(tokens, memory, reference_boxes=boxes, shapes=SHAPES)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def share_values(ours: nn.Module, theirs: nn.Module, names: dict[str, str]) -> None:
    """Random values for both."""
    for mine, other in names.items():
        layer = getattr(ours, mine)
        nn.init.normal_(layer.weight, std=0.2)
        nn.init.normal_(layer.bias)
        getattr(theirs, other).load_state_dict(layer.state_dict())


def test_points_and_sampling_must_make_sense() -> None:
    with pytest.raises(ValueError, match=r"one for each of the 3 levels, at least 1; got \[4, 4\]"):
        DeformableAttention(8, 2, levels=3, points=(4, 4))
    with pytest.raises(ValueError, match=r"at least 1; got \[0, 0\]"):
        DeformableAttention(8, 2, levels=2, points=0)
    with pytest.raises(ValueError, match=r"unknown sampling 'nearest'; use one of \['bilinear', 'discrete'\]"):
        DeformableAttention(8, 2, levels=2, points=4, sampling="nearest")
