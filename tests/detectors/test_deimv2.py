"""DEIMv2 as a whole: published sizes, any image, any targets."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from vitdet.detectors import deimv2
from vitdet.detectors.deimv2 import deimv2_atto, deimv2_n
from vitdet.detectors.rtdetr import RTDETR
from vitdet.structures import Targets

Build = Callable[..., RTDETR]


def merged_parameters(net: nn.Module) -> int:
    """As the authors count: norms merged, RepVGG blocks too, heads of the last layer only; what denoises, too."""
    scales = {f"{name}.weight" for name, module in net.named_modules() if isinstance(module, nn.BatchNorm2d)}
    last = len(net.decoder.layers) - 1
    count = 0
    for name, parameter in net.named_parameters():
        part = name.split(".")
        early = part[0] == "decoder" and part[1] in ("score_heads", "quality_heads") and int(part[2]) != last
        repeated = ".blocks." in name and name.startswith("encoder.") and ".conv1." in name
        if name not in scales and not early and not repeated:
            count += parameter.numel()
    return count


@pytest.mark.parametrize(
    ("name", "millions"),
    [("atto", 0.5), ("femto", 1.0), ("pico", 1.5), ("n", 3.6), ("s", 9.7), ("m", 18.1), ("l", 32.2), ("x", 50.3)],
)
def test_published_numbers_of_parameters(name: str, millions: float) -> None:
    """In hundred thousands, as the repository's table has them."""
    with torch.device("meta"):
        model = getattr(deimv2, f"deimv2_{name}")(80)
    assert round(merged_parameters(model) / 1e6, 1) == millions


@pytest.mark.parametrize(("height", "width"), [(64, 64), (32, 96), (160, 64)])
@pytest.mark.parametrize("build", [deimv2_atto, deimv2_n])
def test_any_size_divisible_by_32(height: int, width: int, build: Build) -> None:
    model = build(3).eval()
    with torch.inference_mode():
        output = model(torch.rand(2, 3, height, width))
    tokens = height * width // 256 + height * width // 1024
    queries = min(model.query_selection.num_queries, tokens)
    assert output.logits.shape == (2, queries, 3)
    assert output.boxes.shape == (2, queries, 4)
    assert output.supervised == {}


def make_targets(*counts: int) -> Targets:
    boxes = [torch.cat([torch.rand(n, 2) * 0.6 + 0.2, torch.rand(n, 2) * 0.3 + 0.05], dim=-1) for n in counts]
    return Targets.from_lists(boxes, [torch.randint(3, (n,)) for n in counts])


@pytest.mark.parametrize("counts", [(0, 0), (2, 0), (1, 5)])
def test_what_is_supervised(counts: tuple[int, int]) -> None:
    model = deimv2_atto(3).train()
    output = model(torch.rand(2, 3, 96, 96), make_targets(*counts))
    layers = ["pre", "0", "1", "2"]
    expected = {f"{kind}_{name}" for kind in ("decoder", "denoising") for name in layers} | {"encoder"}
    assert set(output.supervised) == expected
    assert output.logits is output.supervised["decoder_2"].logits
    assert all(one.logits.isfinite().all() and one.boxes.isfinite().all() for one in output.supervised.values())


def test_every_parameter_learns() -> None:
    model = deimv2_n(3).train()
    with torch.no_grad():  # off the start, at which heads, gates and offsets' weights are 0
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    output = model(torch.rand(2, 3, 96, 96), make_targets(2, 1))
    loss: Tensor = sum(one.logits.square().mean() + one.boxes.square().mean() for one in output.supervised.values())
    loss.backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize(
    "options",
    [
        {"gate": True}, {"share_box_head": False}, {"activation": "relu"}, {"position_activation": "relu"},
        {"refine_positions": True}, {"project_tokens": True}, {"bins": 16},
    ],
    ids=lambda options: next(iter(options)),
)  # fmt: skip
def test_every_option_changes_the_model(options: dict) -> None:
    def run(**extra: object) -> tuple[int, Tensor]:
        torch.manual_seed(0)
        model = deimv2_atto(3, **extra).eval()
        torch.manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
            return sum(p.numel() for p in model.parameters()), model(torch.rand(1, 3, 96, 96)).logits

    (count, logits), (other_count, other) = run(), run(**options)
    assert count != other_count or not torch.allclose(logits, other)


def test_a_lite_encoder_takes_one_map() -> None:
    from vitdet.backbones.hgnetv2 import hgnetv2_b0

    with pytest.raises(ValueError, match="the lite encoder takes one map of a backbone, this one gives 3"):
        deimv2.deimv2(hgnetv2_b0(), 3, fusion="lite")
