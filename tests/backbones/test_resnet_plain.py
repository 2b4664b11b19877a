"""The plain ResNet equals torchvision's, dilated and not, when both hold the same weights.

To be joined to tests/backbones/test_resnet.py.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torchvision.models import resnet50 as reference
from torchvision.models._utils import IntermediateLayerGetter
from torchvision.ops import FrozenBatchNorm2d

from vitdet.backbones.resnet import BasicBlock, ResNet, resnet50
from vitdet.errors import UserError
from vitdet.weights.resnet import convert
from vitdet.weights.rules import load_strict

COUNTERS = ("*.num_batches_tracked",)


def lively(model: nn.Module) -> nn.Module:
    """Batch statistics and scales that matter."""
    with torch.no_grad():
        for name, value in model.state_dict().items():
            if name.endswith("running_var"):
                value.uniform_(1, 3)
            elif value.ndim == 1 and value.is_floating_point():
                value.add_(0.1 * torch.randn_like(value))
    return model


@pytest.mark.parametrize("dilated", [False, True], ids=["plain", "dilated"])
@pytest.mark.parametrize("size", [(64, 96), (97, 75)], ids=["even", "odd"])
def test_equal_to_torchvisions(dilated: bool, size: tuple[int, int]) -> None:
    theirs = lively(reference(replace_stride_with_dilation=[False, False, dilated])).eval()
    ours = resnet50(dilated=dilated).eval()
    load_strict(ours, convert(theirs.state_dict()), allow_unexpected=COUNTERS)
    layers = {"layer2": "0", "layer3": "1", "layer4": "2"}
    images = torch.randn(2, 3, *size)
    with torch.inference_mode():
        expected = list(IntermediateLayerGetter(theirs, layers)(images).values())
        found = ours(images)
    assert ours.strides == [8, 16, 16 if dilated else 32]
    for one, other, channels in zip(found, expected, ours.channels, strict=True):
        assert one.shape[1] == channels
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_dilation_changes_the_last_stage_only() -> None:
    plain, dilated = resnet50().eval(), resnet50(dilated=True).eval()
    dilated.load_state_dict(plain.state_dict())
    images = torch.randn(1, 3, 64, 64)
    with torch.inference_mode():
        one, other = plain(images), dilated(images)
    assert torch.equal(one[1], other[1])
    assert other[2].shape[-2:] == one[1].shape[-2:]


def test_frozen_norms_have_no_parameters() -> None:
    frozen = resnet50(frozen_norm=True)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in frozen.modules())
    assert sum(isinstance(module, FrozenBatchNorm2d) for module in frozen.modules()) == 53
    assert sum(parameter.numel() for parameter in frozen.parameters()) == 23_454_912
    load_strict(frozen, convert(reference().state_dict()), allow_unexpected=COUNTERS)


def test_basic_blocks_without_pools_project_where_they_must() -> None:
    network = ResNet(depths=(1, 1), block=BasicBlock, stem=(16,), widths=(16, 32), pooled=False, out_stages=(0, 1))
    assert isinstance(network.stages[0][0].shortcut, nn.Identity)
    assert [tuple(one.shape) for one in network(torch.randn(1, 3, 32, 32))] == [(1, 16, 8, 8), (1, 32, 4, 4)]


def test_a_file_of_another_network_is_refused() -> None:
    with pytest.raises(UserError, match=r"no plain ResNet's \(the first is 'cls_token'\)"):
        convert({"cls_token": torch.zeros(1, 1, 8)})
