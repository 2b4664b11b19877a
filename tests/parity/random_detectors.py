"""What comparisons of detectors share: weights that matter, images that differ everywhere, the order of queries.

The weights are random, but no value that a fresh model has at 0 or 1 is left there (heads, norms, running statistics,
sampling offsets), or whole branches would be compared that do nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitdet.structures import DetectorOutput, SupervisedOutput
from vitdet.weights import rtdetr
from vitdet.weights.files import read_state
from vitdet.weights.rules import LoadReport, load_strict

Converter = Callable[[Mapping[str, Tensor]], dict[str, Tensor]]


def with_random_values(model: nn.Module, *, but: tuple[str, ...] = ()) -> nn.Module:
    """Give every parameter and statistic a value that matters, at a size that keeps activations near 1.

    ``but``: ends of names that keep theirs.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(like: Tensor, std: float) -> Tensor:
        return std * torch.randn(like.shape, generator=generator)

    def uniform(like: Tensor, low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(like.shape, generator=generator)

    with torch.no_grad():
        for name, value in model.state_dict().items():
            if name.endswith(("num_batches_tracked", "points_scale", *but)):
                continue
            if name.endswith("running_var"):
                value.copy_(uniform(value, 1, 3))
            elif name.endswith("running_mean"):
                value.copy_(normal(value, 0.1))
            elif value.ndim > 1:
                fan_in = value[0].numel()
                scale = 0.1 if "sampling_offsets" in name else 1.0  # or points leave the image
                value.copy_(normal(value, scale * (2 / fan_in if value.ndim == 4 else 1 / fan_in) ** 0.5))
            elif name.endswith("weight"):
                value.copy_(uniform(value, 0.5, 1.5))
            else:
                value.add_(normal(value, 0.1))  # keeps the prior of the scores and the pattern of the sampling points
    return model


def untied(model: nn.Module) -> nn.Module:
    """A transformers detector whose layers have heads of their own, each held twice with equal values.

    So are the published files; a fresh model with ``tie_word_embeddings`` would have one head for all layers.
    """
    for name in ("class_embed", "bbox_embed"):
        getattr(model, name).load_state_dict(getattr(model.model.decoder, name).state_dict())
    return model


def load_theirs(
    model: nn.Module, folder: Path, *, converter: Converter = rtdetr.convert, allow_reshaped: tuple[str, ...] = ()
) -> LoadReport:  # fmt: skip
    """What ``save_pretrained`` wrote into a model of ours, which may have been built without denoising queries."""
    without = () if model.denoising is not None else ("denoising.*",)
    state = converter(read_state(folder / "model.safetensors"))
    return load_strict(
        model, state, allow_missing=("*.num_batches_tracked", "denoising.*"), allow_unexpected=without,
        allow_reshaped=allow_reshaped,
    )  # fmt: skip


def random_images(batch: int, height: int, width: int) -> Tensor:
    """Noise at several scales: tokens must differ from one another for the selection among them to be one."""
    generator = torch.Generator().manual_seed(1)
    layers = [torch.rand(batch, 3, cells, cells, generator=generator) for cells in (3, 7, 20, 90)]
    return torch.stack([F.interpolate(one, (height, width), mode="bilinear") for one in layers]).mean(0)


def theirs_in_our_order(logits: Tensor, boxes: Tensor, ours: DetectorOutput) -> tuple[Tensor, Tensor]:
    """Reorder queries whose selection scores tie in float32; the decoder doesn't know their order.

    Each of ours takes the nearest of theirs, and none may be taken twice.
    """
    mine, other = torch.cat([ours.logits, ours.boxes], -1), torch.cat([logits, boxes], -1)
    nearest = torch.cdist(mine, other, p=float("inf")).argmin(-1)  # (B, Q)
    for row in nearest:
        assert len(row.unique()) == len(row), "two of our queries are nearest to the same one of theirs"
    rows = torch.arange(len(nearest))[:, None]
    return logits[rows, nearest], boxes[rows, nearest]


def assert_same_outputs(theirs: nn.Module, ours: nn.Module, sizes: list[tuple[int, int]]) -> None:
    """Logits and boxes to 1e-4 on an image of each (height, width), of which one tells rows from columns."""
    assert any(height != width for height, width in sizes)
    for height, width in sizes:
        images = random_images(1, height, width)
        with torch.inference_mode():
            expected, output = theirs(images), ours(images)
        assert expected.logits.std() > 0.3
        assert expected.pred_boxes.std(1).min() > 1e-3
        logits, boxes = theirs_in_our_order(expected.logits, expected.pred_boxes, output)
        torch.testing.assert_close(output.logits, logits, rtol=0, atol=1e-4)
        torch.testing.assert_close(output.boxes, boxes, rtol=0, atol=1e-4)


def some_labels() -> tuple[list[Tensor], list[Tensor]]:
    """Labels and ``cxcywh`` boxes of two images."""
    labels = [torch.tensor([3, 71, 3]), torch.tensor([0])]
    boxes = [
        torch.tensor([[0.3, 0.4, 0.2, 0.3], [0.6, 0.5, 0.5, 0.8], [0.8, 0.2, 0.1, 0.1]]),
        torch.tensor([[0.5, 0.5, 0.9, 0.3]]),
    ]
    return labels, boxes


def as_they_pair(output: DetectorOutput) -> DetectorOutput:
    """A D-FINE's or DEIMv2's predictions as transformers' loss sees them.

    The distributions of layer i are beside the scores and boxes of the prediction before it, the first box being their
    first prediction, and the two lists are as long as the shorter one; the last layer's object queries have no
    distributions there, and boxes are kept in the image. (The authors' code pairs as ours does.)
    """
    given = output.supervised
    paired: dict[str, SupervisedOutput] = {}
    for kind in ("decoder", "denoising"):
        pre = f"{kind}_pre"
        order = [pre, *(name for name in given if name.startswith(f"{kind}_") and name != pre)]
        for before, name in itertools.pairwise(order[:-1] if kind == "decoder" else order if pre in given else []):
            boxes = given[before].boxes.clamp(0, 1)
            paired[before] = replace(given[before], boxes=boxes, edges=given[name].edges)
    paired["final"] = SupervisedOutput(output.logits, output.boxes.clamp(0, 1))
    paired["encoder"] = SupervisedOutput(given["encoder"].logits, given["encoder"].boxes)
    return DetectorOutput(output.logits, output.boxes, paired)
