"""DETR as a whole: published sizes, padding, outputs of training, and what it does without objects."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from vitdet.backbones.resnet import Bottleneck, ResNet
from vitdet.detectors import detr
from vitdet.detectors.detr import DETR
from vitdet.losses.criterion import Criterion
from vitdet.losses.matcher import HungarianMatcher
from vitdet.structures import Targets

BUILDERS = [detr.detr_r50, detr.detr_r50_dc5, detr.detr_r101, detr.detr_r101_dc5]


@pytest.fixture
def small() -> Callable[..., DETR]:
    """Builds a small one."""

    def build(num_classes: int = 3, **options) -> DETR:
        backbone = ResNet(
            depths=(1, 1, 1, 1), block=Bottleneck, stem=(8,), widths=(4, 8, 16, 32), pooled=False, out_stages=(3,)
        )
        numbers = {
            "width": 32, "heads": 4, "hidden": 48, "encoder_layers": 2, "decoder_layers": 3, "num_queries": 10,
            "dropout": 0.0,
        }  # fmt: skip
        return DETR(backbone, num_classes=num_classes, **(numbers | options))

    return build


@pytest.mark.parametrize(
    ("build", "count"),
    list(zip(BUILDERS, [41_524_768, 41_524_768, 60_464_672, 60_464_672], strict=True)),
    ids=["r50", "r50_dc5", "r101", "r101_dc5"],
)
def test_published_number_of_parameters(build: Callable[..., DETR], count: int) -> None:
    """Of 91 rows of classes. The publisher's program prints 41,302,368 for R50: what it trains, without 222,400."""
    with torch.device("meta"):
        model = build(91)
        assert sum(p.numel() for p in model.parameters()) == count
        frozen = [*model.backbone.stem.parameters(), *model.backbone.stages[0].parameters()]
        assert sum(p.numel() for p in frozen) == 222_400
        assert model.backbone.strides == [16 if "dc5" in build.__name__ else 32]
        output = model.eval()(torch.empty(2, 3, 97, 160))
        assert output.logits.shape == (2, 100, 92)
        assert output.boxes.shape == (2, 100, 4)
        assert output.num_classes == 91


def test_the_values_of_the_padding_do_not_matter_to_the_transformer(small: Callable[..., DETR]) -> None:
    """Where the map has them; near the border convolutions see them."""
    model = small().eval()
    maps = torch.randn(2, 128, 6, 5)
    sizes = torch.tensor([[4 * 32, 5 * 32], [6 * 32, 2 * 32]])

    class Given(nn.Module):
        maps: Tensor

        def forward(self, images: Tensor) -> list[Tensor]:
            del images
            return [self.maps]

    backbone = Given()
    model.backbone = backbone
    found = []
    for filling in (0.0, 7.0):
        backbone.maps = maps.clone()
        backbone.maps[0, :, 4:] = filling
        backbone.maps[1, :, :, 2:] = -filling
        with torch.inference_mode():
            found.append(model(torch.empty(2, 3, 192, 160), sizes=sizes))
    torch.testing.assert_close(found[0].logits, found[1].logits, rtol=0, atol=1e-6)
    for row, (height, width) in enumerate(((4, 5), (6, 2))):  # and each is as it would be alone
        backbone.maps = maps[row : row + 1, :, :height, :width]
        with torch.inference_mode():
            alone = model(torch.empty(1, 3, 32 * height, 32 * width))
        torch.testing.assert_close(alone.logits[0], found[0].logits[row], rtol=0, atol=1e-5)
        torch.testing.assert_close(alone.boxes[0], found[0].boxes[row], rtol=0, atol=1e-5)


def test_sizes_of_unpadded_images_change_nothing(small: Callable[..., DETR]) -> None:
    model, images = small().eval(), torch.randn(2, 3, 100, 131)
    with torch.inference_mode():
        without, told = model(images), model(images, sizes=torch.tensor([[100, 131]] * 2))
    torch.testing.assert_close(without.logits, told.logits, rtol=0, atol=1e-5)


def test_every_layer_is_supervised_in_training_and_the_last_one_is_the_answer(small: Callable[..., DETR]) -> None:
    model, images = small(), torch.randn(2, 3, 64, 96)
    output = model.train()(images)
    assert list(output.supervised) == ["decoder_0", "decoder_1", "decoder_2"]
    assert output.supervised["decoder_2"].logits is output.logits
    assert not torch.allclose(output.supervised["decoder_0"].logits, output.logits)
    evaluated = model.eval()(images)
    assert evaluated.supervised == {}
    assert evaluated.no_object


@pytest.mark.parametrize("counts", [(2, 0), (0, 0)])
def test_all_parameters_learn_whatever_the_targets(small: Callable[..., DETR], counts: tuple[int, int]) -> None:
    model = small().train()
    boxes = [torch.rand(n, 4) * 0.2 + 0.3 for n in counts]
    targets = Targets.from_lists(boxes, [torch.randint(3, (n,)) for n in counts])
    criterion = Criterion(matcher=HungarianMatcher(class_cost=1.0, softmax=True), no_object=0.1)
    losses = criterion(model(torch.randn(2, 3, 64, 64), targets), targets)
    losses["total"].backward()
    missing = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert missing == []


def test_dropout_acts_in_training(small: Callable[..., DETR]) -> None:
    images = torch.randn(1, 3, 64, 64)
    model = small(dropout=0.5).train()
    model.backbone.eval()
    assert not torch.allclose(model(images).logits, model(images).logits)
    assert torch.equal(model.eval()(images).logits, model(images).logits)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 30, "heads": 2}, "divisible by 4"),
        ({"dropout": 1.0}, r"dropout in \[0, 1\)"),
        ({"num_queries": 0}, "num_queries"),
    ],
)
def test_wrong_numbers_are_refused(small: Callable[..., DETR], options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(**options)


def test_a_backbone_in_patches_takes_no_padded_batches() -> None:
    from vitdet.zoo import create_model

    with torch.device("meta"):
        assert create_model("detr_r50", num_classes=2).takes_sizes
        model = create_model("detr_r50", num_classes=2, backbone="vit_tiny_patch16_224")
    assert (model.stride, model.takes_sizes) == (32, False)


def test_a_loss_for_other_logits_is_refused(small: Callable[..., DETR]) -> None:
    output = small().train()(torch.randn(1, 3, 64, 64))
    targets = Targets.from_lists([torch.zeros(0, 4)], [torch.zeros(0, dtype=torch.int64)])
    with pytest.raises(ValueError, match="a logit for 'no object'"):
        Criterion(matcher=HungarianMatcher())(output, targets)
