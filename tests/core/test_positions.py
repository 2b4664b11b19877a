"""Positions: what their theory promises, and equality with the published ones where those are right."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from vitdet.core.attention import explicit_attention
from vitdet.core.positions import (
    LearnedPositions,
    alibi_bias,
    exact_dtype,
    resample_positions,
    rotary_1d,
    rotary_2d,
    rotate,
    sinusoidal_1d,
    sinusoidal_2d,
    sinusoidal_shares,
)

DOUBLE = torch.float64


@pytest.mark.parametrize(("size", "channels", "temperature"), [(5, 32, 10000.0), (20, 256, 10000.0), (3, 8, 20.0)])
def test_equal_to_the_published_on_squares(size: int, channels: int, temperature: float) -> None:
    pytest.importorskip("transformers", reason="the reference implementation is not installed")
    from transformers.models.rt_detr.modeling_rt_detr import RTDetrSinePositionEmbedding

    theirs = RTDetrSinePositionEmbedding(channels, temperature)
    expected = theirs(width=size, height=size, device=torch.device("cpu"), dtype=torch.float32)
    found = sinusoidal_2d(size, size, channels, temperature=temperature)
    torch.testing.assert_close(found, expected.view(size * size, channels), rtol=0, atol=1e-5)


def test_by_hand() -> None:
    found = sinusoidal_2d(2, 3, 8, temperature=100.0)  # frequencies 1 and 100^(-1/2) = 0.1
    assert found.dtype == torch.float32
    assert found[0].tolist() == [0, 0, 1, 1, 0, 0, 1, 1]
    y, x = 1, 2
    expected = [f(v * w) for v in (y, x) for f in (math.sin, math.cos) for w in (1, 0.1)]
    assert found[y * 3 + x].tolist() == pytest.approx(expected, abs=1e-6)


def test_rows_share_their_first_half_and_columns_their_second() -> None:
    found = sinusoidal_2d(3, 5, 16).view(3, 5, 16)
    assert torch.equal(found[..., :8], found[:, :1, :8].expand(3, 5, 8))
    assert torch.equal(found[..., 8:], found[:1, :, 8:].expand(3, 5, 8))
    flat = found.flatten(0, 1)
    assert len(flat.unique(dim=0)) == 15
    # Mirrored along the diagonal, the two halves change places.
    mirrored = sinusoidal_2d(5, 3, 16).view(5, 3, 16).transpose(0, 1)
    assert torch.equal(torch.cat([mirrored[..., 8:], mirrored[..., :8]], dim=-1), found)


def test_a_step_is_a_rotation() -> None:
    """PE(pos + k) is one linear map of PE(pos), the same for all positions (arXiv 1706.03762, section 3.5)."""
    channels, step = 16, 3
    found = sinusoidal_2d(9, 9, channels).view(9, 9, 4, 4).double()
    angles = step * 10000.0 ** -(torch.arange(4, dtype=torch.float64) / 4)
    for axis in (0, 1):
        here = found.movedim(axis, 0)[:, :, 2 * axis : 2 * axis + 2]  # sine and cosine of this axis
        sine, cosine = here[:-step].unbind(2)
        turned = [sine * angles.cos() + cosine * angles.sin(), cosine * angles.cos() - sine * angles.sin()]
        torch.testing.assert_close(here[step:], torch.stack(turned, 2), rtol=0, atol=1e-6)


def test_channels_must_split_into_quarters() -> None:
    with pytest.raises(ValueError, match=r"need channels divisible by 4, got 18"):
        sinusoidal_2d(2, 2, 18)


def test_1d_by_hand() -> None:
    found = sinusoidal_1d(3, 4, temperature=100.0)  # frequencies 1 and 100^(-1/2) = 0.1, each a sine and a cosine
    assert found.dtype == torch.float32
    assert found[0].tolist() == [0, 1, 0, 1]
    assert found[2].tolist() == pytest.approx([math.sin(2), math.cos(2), math.sin(0.2), math.cos(0.2)], abs=1e-6)
    assert torch.equal(sinusoidal_1d(2, 4, start=1, temperature=100.0), found[1:])


def test_a_shift_is_one_linear_map() -> None:
    """Solved for on some positions, it holds on all others, and only rotates (arXiv 1706.03762, section 3.5)."""
    step, known = 7, 100
    table = sinusoidal_1d(400, 16, temperature=100.0).double()
    shift = torch.linalg.lstsq(table[:known], table[step : known + step]).solution
    torch.testing.assert_close(table[:-step] @ shift, table[step:], rtol=0, atol=1e-3)
    torch.testing.assert_close(shift @ shift.T, torch.eye(16, dtype=torch.float64), rtol=0, atol=1e-3)
    noise = torch.randn(400, 16, dtype=torch.float64)
    shift = torch.linalg.lstsq(noise[:known], noise[step : known + step]).solution
    assert (noise[:-step] @ shift - noise[step:]).abs().max() > 1, "else this would hold for any table"


def test_inner_products_depend_on_the_offset_only() -> None:
    channels = 32
    table = sinusoidal_1d(60, channels).double()
    products = table @ table.T
    torch.testing.assert_close(products[:-1, :-1], products[1:, 1:], rtol=0, atol=1e-5)
    frequencies = 10000.0 ** -(torch.arange(channels // 2, dtype=torch.float64) / (channels // 2))
    expected = (torch.arange(60)[:, None] * frequencies).cos().sum(1)
    torch.testing.assert_close(products[0], expected, rtol=0, atol=1e-5)
    assert products[30].argmax() == 30
    assert products[30, 30].item() == pytest.approx(channels / 2)


def complex_rotation(heads: Tensor, angles: Tensor) -> Tensor:
    """Channels i and i + D/2 as one complex number, times e^(i angle)."""
    first, second = heads.chunk(2, dim=-1)
    turned = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], dim=-1)


def test_rotary_scores_depend_on_the_offset_only() -> None:
    length, width = 20, 8
    q, k = (torch.randn(1, 1, 1, width, dtype=DOUBLE).expand(1, 1, length, width) for _ in range(2))
    rotation = rotary_1d(length, width)
    turned = rotate(q, rotation)
    scores = (turned @ rotate(k, rotation).transpose(-2, -1))[0, 0]
    torch.testing.assert_close(scores[:-1, :-1], scores[1:, 1:], rtol=0, atol=1e-5)
    assert scores[0].std() > 0.1
    torch.testing.assert_close(turned.norm(dim=-1), q.norm(dim=-1), rtol=0, atol=1e-5)
    assert torch.equal(turned[:, :, 0], q[:, :, 0])
    frequencies = 10000.0 ** -(torch.arange(4, dtype=DOUBLE) / 4)
    expected = complex_rotation(q, torch.arange(length)[:, None] * frequencies)
    torch.testing.assert_close(turned, expected, rtol=0, atol=1e-5)
    later = rotary_1d(length - 5, width, start=5)
    assert all(torch.equal(part, whole[5:]) for part, whole in zip(later, rotation, strict=True))


def test_rotary_on_a_map_depends_on_the_step_only() -> None:
    height, columns, width = 4, 6, 8
    q, k = (torch.randn(1, 1, 1, width, dtype=DOUBLE).expand(1, 1, height * columns, width) for _ in range(2))
    rotation = rotary_2d(height, columns, width)
    scores = rotate(q, rotation) @ rotate(k, rotation).transpose(-2, -1)
    by_place = scores.view(height, columns, height, columns)
    torch.testing.assert_close(by_place[:-1, :, :-1], by_place[1:, :, 1:], rtol=0, atol=1e-5)
    torch.testing.assert_close(by_place[:, :-1, :, :-1], by_place[:, 1:, :, 1:], rtol=0, atol=1e-5)
    assert by_place[0, 0, :, 0].std() > 0.01
    assert by_place[0, 0, 0].std() > 0.01


def test_rotary_on_a_map_by_hand() -> None:
    """Centres of 2 × 3 patches lie at y = ∓1/2 and x = -2/3, 0, 2/3; the periods are 1 and √100 = 10."""
    cos, sin = rotary_2d(2, 3, 8, prefix=2)
    assert cos[:2].eq(1).all()  # class and register tokens do not turn
    assert sin[:2].eq(0).all()
    angles = [2 * math.pi * v / period for v in (0.5, -2 / 3) for period in (1, 10)]  # row 1, column 0
    assert cos[2 + 3].tolist() == pytest.approx([math.cos(a) for a in angles], abs=1e-6)
    assert sin[2 + 3].tolist() == pytest.approx([math.sin(a) for a in angles], abs=1e-6)
    assert rotary_2d(2, 3, 8, temperature=4.0).cos[3, 1].item() == pytest.approx(math.cos(2 * math.pi * 0.5 / 2))
    # A map of one and a half times the size lies in the same square: its centre is where the other's is.
    assert rotary_2d(3, 3, 8).sin[4].eq(0).all()
    assert rotary_2d(1, 1, 8).sin[0].eq(0).all()


def test_alibi_is_minus_the_distance_times_the_slope() -> None:
    bias = alibi_bias(8, 3, 5)
    assert bias.shape == (8, 3, 5)
    for head in range(8):
        for query in range(3):
            for key in range(5):
                expected = -(2.0 ** -(head + 1)) * abs(query + 2 - key)  # 1/2, 1/4, … 1/256 (section 3 of the paper)
                assert bias[head, query, key].item() == pytest.approx(expected)
    sixteen = alibi_bias(16, 1, 2)[:, 0, 0]
    torch.testing.assert_close(sixteen, -(2.0 ** (-0.5 * torch.arange(1, 17))))


def test_alibi_weights_fall_with_the_distance() -> None:
    """Where nothing else speaks, each step away costs a factor of e^(-slope)."""
    zeros = torch.zeros(1, 8, 6, 4, dtype=DOUBLE)
    _, weights = explicit_attention(zeros, zeros, zeros, bias=alibi_bias(8, 6, 6), causal=True)
    last = weights[0, :, -1]
    assert (last.diff(dim=-1) > 0).all()
    slopes = (2.0 ** -torch.arange(1.0, 9)).double()
    torch.testing.assert_close(last[:, 1:] / last[:, :-1], slopes.exp()[:, None].expand(-1, 5), rtol=1e-6, atol=0)


def test_resampling_keeps_what_is_the_same() -> None:
    table = torch.randn(1, 12, 5)
    assert resample_positions(table, (3, 4), (3, 4)) is table
    flat = torch.ones(1, 12, 5) * torch.arange(5)
    torch.testing.assert_close(resample_positions(flat, (3, 4), (7, 5)), flat[:, :1].expand(1, 35, 5))
    half = resample_positions(table.bfloat16(), (3, 4), (6, 8))
    assert half.dtype == torch.bfloat16


def test_resampling_keeps_a_slope() -> None:
    """Away from the edges, cubic interpolation is exact on what is linear; centres stay centres."""

    def ramp(height: int, width: int) -> Tensor:
        y, x = torch.meshgrid((torch.arange(height) + 0.5) / height, (torch.arange(width) + 0.5) / width, indexing="ij")
        return torch.stack([y, x, 3 * y - 2 * x], dim=-1).flatten(0, 1)[None]

    for new in ((24, 30), (8, 6)):  # finer and coarser
        found, expected = resample_positions(ramp(16, 12), (16, 12), new), ramp(*new)
        inside = [
            part.view(*new, 3)[4:-4, 6:-6] if new[0] > 16 else part.view(*new, 3)[3:-3, 2:-2]
            for part in (found, expected)
        ]
        assert inside[0].numel() > 0
        torch.testing.assert_close(*inside, rtol=0, atol=1e-3)


def test_learnt_positions() -> None:
    module = LearnedPositions((3, 4), 5)
    assert torch.equal(module((3, 4)), module.table.flatten(1, 2))
    assert torch.equal(module((6, 8)), resample_positions(module.table.flatten(1, 2), (3, 4), (6, 8)))
    module((6, 8)).sum().backward()
    assert module.table.grad is not None
    torch.testing.assert_close(module.table.grad.sum(), torch.tensor(48.0 * 5))
    assert LearnedPositions((30, 30), 32).table.std().item() == pytest.approx(0.02, rel=0.05)


def test_equal_to_timm_at_another_size() -> None:
    layers = pytest.importorskip("timm.layers", reason="the reference implementation is not installed")
    table = torch.randn(1, 49, 6)
    for new in ((14, 14), (5, 9)):
        expected = layers.resample_abs_pos_embed(table, list(new), [7, 7], num_prefix_tokens=0)
        torch.testing.assert_close(resample_positions(table, (7, 7), new), expected)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sinusoidal_1d(2, 5), r"need an even number of channels, got 5"),
        (lambda: rotary_1d(2, 5), r"need an even head width, got 5"),
        (lambda: rotary_2d(2, 2, 6), r"need a head width divisible by 4, got 6"),
    ],
)
def test_impossible_widths_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_angles_are_exact_where_the_device_can() -> None:
    assert exact_dtype("mps") == torch.float32
    far = sinusoidal_1d(1, 2, start=10**7)  # in float32, position times frequency would be rounded first
    assert far[0].tolist() == pytest.approx([math.sin(10**7), math.cos(10**7)], abs=1e-6)


def test_shares_of_padded_images_by_hand() -> None:
    rows = torch.tensor([[True, True, False], [True, True, True]])
    columns = torch.tensor([[True, True, True, True], [True, False, False, False]])
    found = sinusoidal_shares(rows, columns, 8).unflatten(1, (3, 4))
    assert found.dtype == torch.float32
    for image, (height, width) in enumerate([(2, 4), (3, 1)]):
        for y in range(height):
            for x in range(width):
                expected = []
                for place, length in ((y, height), (x, width)):
                    angle = (place + 1) / (length + 1e-6) * 2 * math.pi
                    expected += [math.sin(angle), math.cos(angle), math.sin(angle / 100), math.cos(angle / 100)]
                assert found[image, y, x].tolist() == pytest.approx(expected, abs=1e-6)
    with pytest.raises(ValueError, match="divisible by 4"):
        sinusoidal_shares(rows, columns, 6)
