"""Our DETR equals Hugging Face's when both hold the same weights: outputs with and without padding, losses, gradients.

The weights are random, but none is left at a value at which a whole branch would do nothing. They travel through the
file that ``save_pretrained`` writes and through ``vitdet.load_model``, as a published checkpoint does.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vitdet
from vitdet.backbones.resnet import Bottleneck, ResNet
from vitdet.detectors.detr import DETR
from vitdet.detectors.postprocess import postprocess
from vitdet.losses.criterion import Criterion
from vitdet.losses.matcher import HungarianMatcher
from vitdet.structures import DetectorOutput, Preprocessing, Targets
from vitdet.weights.detr import HUGGINGFACE_RULES
from vitdet.weights.files import read_state
from vitdet.weights.rules import convert_state_dict, load_strict

transformers = pytest.importorskip("transformers", reason="the reference implementation is not installed")

SMALL = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_queries": 20, "num_labels": 7, "dropout": 0.0,
}  # fmt: skip


def with_random_values(model: nn.Module) -> nn.Module:
    """Give every parameter and statistic a value that matters, at a size that keeps activations near 1."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if name.endswith("num_batches_tracked"):
                continue
            noise = torch.randn(value.shape, generator=generator)
            if name.endswith("running_var"):
                value.copy_(1 + noise.abs())
            elif name.endswith("running_mean"):
                value.copy_(0.1 * noise)
            elif value.ndim > 1:
                value.copy_(noise * ((2 if value.ndim == 4 else 1) / value[0].numel()) ** 0.5)
            elif name.endswith("weight"):
                value.copy_(1 + 0.2 * noise)
            else:
                value.copy_(0.1 * noise)
        for name, value in model.state_dict().items():  # attention that chooses: else all queries say the same
            if name.endswith(("q_proj.weight", "k_proj.weight", "class_labels_classifier.weight")):
                value.mul_(3)
            elif name.endswith(("input_projection.weight", "query_position_embeddings.weight")):
                value.mul_(8)
    return model


def small_reference() -> nn.Module:
    """Theirs on a narrow ResNet of their own."""
    backbone = transformers.ResNetConfig(
        embedding_size=16, hidden_sizes=[32, 64, 128, 256], depths=[1, 2, 1, 2], out_features=["stage4"]
    )
    config = transformers.DetrConfig(backbone_config=backbone, **SMALL)
    return with_random_values(transformers.DetrForObjectDetection(config))


def small_ours() -> DETR:
    """The same of ours."""
    backbone = ResNet(
        depths=(1, 2, 1, 2), block=Bottleneck, stem=(16,), widths=(8, 16, 32, 64), pooled=False, out_stages=(3,),
        frozen_norm=True,
    )  # fmt: skip
    return DETR(
        backbone, num_classes=7, width=64, heads=4, hidden=96, encoder_layers=2, decoder_layers=3, num_queries=20,
        dropout=0.0,
    )  # fmt: skip


@pytest.fixture
def pair(tmp_path: Path) -> tuple[nn.Module, DETR]:
    """Both with the same weights."""
    theirs, ours = small_reference(), small_ours()
    theirs.save_pretrained(tmp_path)
    report = load_strict(ours, convert_state_dict(read_state(tmp_path / "model.safetensors"), HUGGINGFACE_RULES))
    assert str(report) == "all fit"
    return theirs, ours


def batch(sizes: list[tuple[int, int]]) -> tuple[Tensor, Tensor, Tensor]:
    """Images padded with zeros to the largest height and width, their sizes, and their mask (1 inside)."""
    generator = torch.Generator().manual_seed(1)
    height, width = (max(size[axis] for size in sizes) for axis in (0, 1))
    images, mask = torch.zeros(len(sizes), 3, height, width), torch.zeros(len(sizes), height, width)
    for row, (h, w) in enumerate(sizes):
        coarse = torch.randn(1, 3, 6, 6, generator=generator)
        images[row, :, :h, :w] = nn.functional.interpolate(coarse, (h, w), mode="bilinear")[0]
        mask[row, :h, :w] = 1
    return images, torch.tensor(sizes), mask


@pytest.mark.parametrize(
    "sizes",
    [[(256, 256)], [(160, 288)], [(203, 333)], [(192, 320), (256, 160)], [(203, 333), (330, 201), (96, 97)]],
    ids=["square", "wide", "odd", "padded", "padded to an odd size"],
)
def test_same_outputs(pair: tuple[nn.Module, DETR], sizes: list[tuple[int, int]]) -> None:
    theirs, ours = pair[0].eval(), pair[1].eval()
    images, tensor, mask = batch(sizes)
    with torch.inference_mode():
        expected = theirs(images, pixel_mask=mask)
        output = ours(images, sizes=tensor if len(sizes) > 1 else None)
    assert output.no_object
    assert expected.logits.std(1).min() > 0.05  # queries say different things
    assert expected.pred_boxes.std(1).min() > 2e-3
    torch.testing.assert_close(output.logits, expected.logits, rtol=0, atol=5e-5)
    torch.testing.assert_close(output.boxes, expected.pred_boxes, rtol=0, atol=1e-5)


BIG = {"d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96}


def resnet_of_theirs(depths: list[int]) -> Any:
    """The configuration of transformers' own ResNet with bottlenecks."""
    return transformers.ResNetConfig(depths=depths, out_features=["stage4"])


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({**BIG, "backbone": "resnet50", "dilation": True}, "detr_r50_dc5"),
        ({**BIG, "backbone_config": [3, 4, 6, 3]}, "detr_r50"),
        pytest.param({**BIG, "backbone_config": [3, 4, 23, 3]}, "detr_r101", marks=pytest.mark.slow),
        pytest.param({"backbone": "resnet50"}, "detr_r50", marks=pytest.mark.slow),
        pytest.param({"backbone": "resnet101", "dilation": True}, "detr_r101_dc5", marks=pytest.mark.slow),
    ],
    ids=["timm's", "transformers'", "transformers' R101", "published R50", "published R101"],
)
def test_from_a_folder(config: dict[str, Any], name: str, tmp_path: Path) -> None:
    """With timm's ResNet, which the main files on the Hub hold, and with theirs."""
    if "backbone_config" in config:
        config = {**config, "backbone_config": resnet_of_theirs(config["backbone_config"])}
    theirs = with_random_values(transformers.DetrForObjectDetection(transformers.DetrConfig(**config, num_labels=91)))
    theirs.save_pretrained(tmp_path)
    model = vitdet.load_model(tmp_path)
    assert model.metadata.name == name
    mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    assert model.metadata.preprocessing == Preprocessing((800, 800), mean, std, longest=1333)
    images, sizes, mask = batch([(96, 160), (128, 96)])
    images = images.double()  # random weights let rounding grow from layer to layer
    with torch.inference_mode():
        expected = theirs.double().eval()(images, pixel_mask=mask)
        output = model.double()(images, sizes=sizes)
    torch.testing.assert_close(output.logits, expected.logits, rtol=0, atol=1e-4)
    torch.testing.assert_close(output.boxes.double(), expected.pred_boxes, rtol=0, atol=1e-4)


@pytest.fixture
def targets() -> tuple[list[Tensor], list[Tensor]]:
    """Boxes and labels of two images."""
    boxes = [
        torch.tensor([[0.3, 0.4, 0.2, 0.3], [0.6, 0.5, 0.5, 0.8], [0.8, 0.2, 0.1, 0.1]]),
        torch.tensor([[0.5, 0.5, 0.9, 0.3]]),
    ]
    return boxes, [torch.tensor([3, 6, 3]), torch.tensor([0])]


def criterion() -> Criterion:
    """The published one: weights 1, 5, 2 for matching and loss, 0.1 for no object."""
    return Criterion(matcher=HungarianMatcher(class_cost=1.0, softmax=True), no_object=0.1)


def as_labels(boxes: list[Tensor], labels: list[Tensor]) -> list[dict[str, Tensor]]:
    return [{"class_labels": k, "boxes": b} for k, b in zip(labels, boxes, strict=True)]


TERMS = {"ce": ("loss_ce", 1), "box": ("loss_bbox", 5), "giou": ("loss_giou", 2)}


@pytest.mark.parametrize("empty", [False, True], ids=["objects", "none"])
def test_same_losses_of_every_layer(
    pair: tuple[nn.Module, DETR], targets: tuple[list[Tensor], list[Tensor]], empty: bool
) -> None:
    """By their loss function on our outputs: their model feeds each layer's normed output to the next (their
    ``auxiliary_loss``), which the published code does not.
    """
    from transformers.loss.loss_for_object_detection import ForObjectDetectionLoss

    theirs, ours = pair
    boxes, labels = targets
    if empty:
        boxes, labels = [box[:0] for box in boxes], [label[:0] for label in labels]
    images, sizes, _ = batch([(96, 160), (128, 96)])
    output = ours.train()(images, sizes=sizes)
    assert list(output.supervised) == ["decoder_0", "decoder_1", "decoder_2"]
    logits = torch.stack([one.logits for one in output.supervised.values()])
    found = torch.stack([one.boxes for one in output.supervised.values()])
    theirs.config.auxiliary_loss = True
    total, expected, _ = ForObjectDetectionLoss(
        output.logits, as_labels(boxes, labels), images.device, output.boxes, theirs.config, logits, found
    )
    losses = criterion()(output, Targets.from_lists(boxes, labels))
    for layer, suffix in {"decoder_0": "_0", "decoder_1": "_1", "decoder_2": ""}.items():
        for term, (name, weight) in TERMS.items():
            torch.testing.assert_close(
                losses[f"{layer}/{term}"], weight * expected[name + suffix].reshape(()), rtol=1e-4, atol=1e-5
            )
    torch.testing.assert_close(losses["total"], total.reshape(()), rtol=1e-4, atol=1e-5)


def test_same_gradients_of_the_last_layer(
    pair: tuple[nn.Module, DETR], targets: tuple[list[Tensor], list[Tensor]]
) -> None:
    theirs, ours = pair[0].train(), pair[1].train()
    images, sizes, mask = batch([(96, 160), (128, 96)])
    expected = theirs(images, pixel_mask=mask, labels=as_labels(*targets))
    output = ours(images, sizes=sizes)
    last = DetectorOutput(output.logits, output.boxes, {"last": output.supervised["decoder_2"]}, no_object=True)
    total = criterion()(last, Targets.from_lists(*targets))["total"]
    torch.testing.assert_close(total, expected.loss.reshape(()), rtol=1e-4, atol=1e-4)
    total.backward()
    expected.loss.backward()
    known = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    gradients = convert_state_dict(known, HUGGINGFACE_RULES)
    assert len(gradients) > 50
    for name, gradient in gradients.items():  # without the backbone: of one that is not timm's they train nothing
        mine = ours.get_parameter(name).grad
        assert mine is not None, name
        assert (mine - gradient).norm() / gradient.norm().clamp(min=1e-2) < 1e-3, name


def test_same_detections() -> None:
    """By their processor, which leaves the queries in their order."""
    logits, boxes = 3 * torch.randn(3, 20, 8), torch.rand(3, 20, 4)
    sizes = torch.tensor([[480, 640], [333, 500], [1, 2000]])
    expected = transformers.DetrImageProcessor().post_process_object_detection(
        SimpleNamespace(logits=logits, pred_boxes=boxes), threshold=0.6, target_sizes=sizes
    )
    found = postprocess(DetectorOutput(logits, boxes, no_object=True), sizes, threshold=0.6)
    for (found_boxes, scores, labels), wanted in zip(found, expected, strict=True):
        order = wanted["scores"].argsort(descending=True)
        assert 0 < len(order) < 20
        assert torch.equal(labels, wanted["labels"][order])
        torch.testing.assert_close(scores, wanted["scores"][order], rtol=0, atol=1e-6)
        torch.testing.assert_close(found_boxes, wanted["boxes"][order], rtol=1e-5, atol=1e-4)
