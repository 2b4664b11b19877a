"""Sinusoidal positions: what their theory promises, and equality with the published ones where those are right."""

from __future__ import annotations

import math

import pytest
import torch

from vitdet.core.positions import sinusoidal_2d


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
