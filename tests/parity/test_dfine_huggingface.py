"""Our D-FINE equals Hugging Face's when both hold the same weights; see :mod:`tests.parity.random_detectors`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from tests.parity.random_detectors import (
    as_they_pair,
    assert_same_outputs,
    load_theirs,
    random_images,
    some_labels,
    untied,
    with_random_values,
)
from vitdet.detectors.dfine import dfine_n, dfine_s
from vitdet.losses.criterion import Criterion
from vitdet.losses.matcher import HungarianMatcher
from vitdet.structures import Targets
from vitdet.weights import dfine

transformers = pytest.importorskip("transformers", reason="the reference implementation is not installed")

B0 = {
    "stem_channels": [3, 16, 16], "stage_in_channels": [16, 64, 256, 512], "stage_mid_channels": [16, 32, 64, 128],
    "stage_out_channels": [64, 256, 512, 1024], "stage_num_blocks": [1, 1, 2, 1], "stage_numb_of_layers": [3, 3, 3, 3],
    "hidden_sizes": [64, 256, 512, 1024], "use_learnable_affine_block": True,
}  # fmt: skip


def reference_s(*, but: tuple[str, ...] = (), **options) -> nn.Module:
    """Their model with the numbers of the published S."""
    config = transformers.DFineConfig(
        backbone_config=transformers.HGNetV2Config(**B0, out_features=["stage2", "stage3", "stage4"]),
        encoder_in_channels=[256, 512, 1024], hidden_expansion=0.5, depth_mult=0.34, decoder_layers=3,
        decoder_n_points=[3, 6, 3], num_labels=80, tie_word_embeddings=False, **options,
    )  # fmt: skip
    return untied(with_random_values(transformers.DFineForObjectDetection(config), but=but))


def reference_n(**options) -> nn.Module:
    """Their model with the numbers of the published N: two levels."""
    config = transformers.DFineConfig(
        backbone_config=transformers.HGNetV2Config(**B0, out_features=["stage3", "stage4"]),
        encoder_in_channels=[512, 1024], feat_strides=[16, 32], encode_proj_layers=[1], encoder_hidden_dim=128,
        encoder_ffn_dim=512, hidden_expansion=0.34, depth_mult=0.5, d_model=128, decoder_in_channels=[128, 128],
        decoder_ffn_dim=512, num_feature_levels=2, decoder_layers=3, decoder_n_points=[6, 6], num_labels=80,
        tie_word_embeddings=False, **options,
    )  # fmt: skip
    return untied(with_random_values(transformers.DFineForObjectDetection(config)))


@pytest.mark.parametrize(("reference", "ours"), [(reference_n, dfine_n), (reference_s, dfine_s)], ids=["n", "s"])
def test_same_outputs_from_their_file(reference, ours, tmp_path: Path) -> None:
    theirs = reference().eval()
    theirs.save_pretrained(tmp_path)
    model = ours(80).eval()
    report = load_theirs(model, tmp_path, converter=dfine.convert)
    assert all(name.endswith("num_batches_tracked") for name in report.missing)
    assert not report.unexpected
    assert not report.reshaped
    assert model.decoder.up == theirs.model.decoder.up != 0.5
    assert_same_outputs(theirs, model, [(640, 640), (480, 640)])


@pytest.mark.parametrize("denoising", [0, 100], ids=["without denoising", "with denoising"])
def test_same_losses_and_gradients(denoising: int, tmp_path: Path) -> None:
    """Their loss takes ``up`` and ``reg_scale`` from the configuration, not from the weights.

    Both draw the noise of the denoising queries in the same order, and nothing else.
    """
    theirs = reference_s(but=(".up", ".reg_scale"), freeze_backbone_batch_norms=False, num_denoising=denoising)
    theirs.save_pretrained(tmp_path)
    ours = dfine_s(80, denoising_queries=denoising)
    load_theirs(ours, tmp_path, converter=dfine.convert)
    images, (labels, boxes) = random_images(2, 224, 256), some_labels()
    given = [{"class_labels": k, "boxes": b} for k, b in zip(labels, boxes, strict=True)]
    torch.manual_seed(0)
    expected = theirs.train()(images, labels=given)
    targets = Targets.from_lists(boxes, labels)
    torch.manual_seed(0)
    losses = Criterion(matcher=HungarianMatcher())(as_they_pair(ours.train()(images, targets)), targets)
    suffixes = {"decoder_pre": "_aux_0", "decoder_0": "_aux_1", "final": "", "encoder": "_aux_2"}
    if denoising:
        suffixes |= {"denoising_pre": "_dn_0", "denoising_0": "_dn_1", "denoising_1": "_dn_2"}
        assert expected.loss_dict.pop("loss_ddf_dn_2") == 0  # the teacher of itself
    terms = {"vfl": "loss_vfl", "box": "loss_bbox", "giou": "loss_giou", "fgl": "loss_fgl", "ddf": "loss_ddf"}
    found = {
        f"{name}/{term}": other + suffix
        for name, suffix in suffixes.items()
        for term, other in terms.items()
        if f"{name}/{term}" in losses
    }
    assert set(losses) == {*found, "total"}
    assert set(expected.loss_dict) == set(found.values())
    for name, other in found.items():
        torch.testing.assert_close(losses[name], expected.loss_dict[other], rtol=1e-4, atol=1e-4, msg=name)
    torch.testing.assert_close(losses["total"], expected.loss, rtol=1e-4, atol=1e-4)

    losses["total"].backward()
    expected.loss.backward()
    their_gradients = dfine.convert({name: p.grad for name, p in theirs.named_parameters() if p.grad is not None})
    mine = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
    assert mine.keys() <= their_gradients.keys()
    # The scores of the layer that their loss leaves out.
    assert not any(gradient.any() for name, gradient in their_gradients.items() if name not in mine)
    tolerance = 1e-2 if denoising else 1e-3  # one query can be a large share of a class's gradient
    for name, gradient in mine.items():
        # In norm, since one activation at ReLU's edge may fall on either side. A shift before batch statistics has no
        # effect, nor has a factor: such gradients are rounding alone, of large sums where there is one for a whole map.
        expected_gradient = their_gradients[name]
        least = 1.0 if ".affine." in name else 1e-2
        error = (gradient - expected_gradient).norm() / expected_gradient.norm().clamp(min=least)
        assert error < tolerance, name
