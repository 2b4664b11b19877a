"""What the illustration of positions shows is true, and the tool draws it."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitdet.illustrations import alibi_biases, draw_positions, main, rotary_similarity, sinusoidal_similarity


@pytest.mark.parametrize("similarity", [sinusoidal_similarity, rotary_similarity])
def test_similarity_peaks_at_the_reference_and_falls_to_both_sides(similarity) -> None:
    curve = similarity(129, 256, 64)
    assert curve.argmax() == 64
    assert curve[64].item() == pytest.approx(1)
    torch.testing.assert_close(curve, curve.flip(0), rtol=0, atol=1e-6)
    means = curve[64:].unfold(0, 7, 7).mean(1)  # of as many offsets as the fastest channel takes to turn once
    assert (means.diff() < 0).all()
    assert curve[64:].diff().abs().max() < 0.1, "smoothly"
    torch.testing.assert_close(similarity(129, 256, 30)[:60], curve[34:94], rtol=0, atol=1e-6)  # whatever the position


def test_sinusoidal_products_are_rotary_scores_of_equal_vectors() -> None:
    torch.testing.assert_close(sinusoidal_similarity(40, 64, 9), rotary_similarity(40, 64, 9), rtol=0, atol=1e-6)


def test_alibi_biases_peak_at_the_reference() -> None:
    biases = alibi_biases(65, 32)
    assert biases.shape == (8, 65)
    assert biases[:, 32].eq(0).all()
    torch.testing.assert_close(biases, biases.flip(1))
    torch.testing.assert_close(biases[:, :32].diff(dim=1), (2.0 ** -torch.arange(1, 9))[:, None].expand(8, 31))


def test_the_tool_writes_a_picture(repository: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    path, tool = tmp_path / "new" / "positions.png", repository / "tools" / "positional_encoding.py"
    monkeypatch.setattr(sys, "argv", [tool.name, "--out", str(path), "--length", "40", "--channels", "32"])
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(str(tool), run_name="__main__")
    assert (caught.value.code, capsys.readouterr().out.strip()) == (0, str(path))
    with Image.open(path) as image:
        assert image.format == "PNG"
        picture = np.asarray(image.convert("RGB"))
    assert picture.shape == (960, 1440, 3)
    for quarter in (picture[:480, :720], picture[:480, 720:], picture[480:, :720], picture[480:, 720:]):
        assert len(np.unique(quarter.reshape(-1, 3), axis=0)) > 100  # something is drawn in each
    assert draw_positions(tmp_path / "other.png", length=41, channels=32).read_bytes() != path.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--channels", "7"], "an even number of channels, got 128, 7"),
        (["--length", "1"], "a length of at least 2 and an even number of channels, got 1, 256"),
        (["--out", "positions.words"], "words"),
    ],
)
def test_mistakes(arguments: list[str], message: str, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1
