"""Our DEIMv2 equals transformers' when both hold the same weights, which travel through ``save_pretrained``'s file.

transformers' port differs from the authors' code in four ways (see :mod:`vitdet.detectors.deimv2`), which are options
of ours: here it is the port that is compared; the authors' numbers are in ``tests/weights/test_deimv2_real.py``.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.parity.random_detectors import (
    as_they_pair,
    assert_same_outputs,
    random_images,
    some_labels,
    with_random_values,
)
from vitdet.backbones.spatial_adapter import SpatialAdapter
from vitdet.backbones.vit import ViT
from vitdet.detectors.deimv2 import deimv2, deimv2_atto, deimv2_n
from vitdet.detectors.rtdetr import RTDETR
from vitdet.losses.criterion import Criterion
from vitdet.losses.matcher import HungarianMatcher
from vitdet.structures import DetectorOutput, Targets
from vitdet.weights.deimv2 import arguments, convert
from vitdet.weights.rules import load_strict

transformers = pytest.importorskip("transformers", reason="the reference implementation is not installed")

PORT = {"project_tokens": True, "refine_positions": True, "activation": "relu"}
B0 = {
    "hidden_sizes": [64, 256, 512, 1024], "depths": [3, 3, 3, 3], "stem_channels": [3, 16, 16], "out_indices": [3, 4],
    "stage_in_channels": [16, 64, 256, 512], "stage_mid_channels": [16, 32, 64, 128],
    "stage_out_channels": [64, 256, 512, 1024], "stage_num_blocks": [1, 1, 2, 1], "stage_numb_of_layers": [3] * 4,
    "use_learnable_affine_block": True,
}  # fmt: skip
ATTO = {
    "hidden_sizes": [64, 256, 256], "depths": [3, 3, 3], "stem_channels": [3, 16, 16], "out_indices": [3],
    "stage_in_channels": [16, 64, 256], "stage_mid_channels": [16, 32, 64], "stage_out_channels": [64, 256, 256],
    "stage_num_blocks": [1, 1, 1], "stage_downsample": [False, True, True], "stage_light_block": [False, False, True],
    "stage_kernel_size": [3, 3, 3], "stage_numb_of_layers": [3] * 3, "stage_downsample_strides": [2] * 3,
    "use_learnable_affine_block": True,
}  # fmt: skip


def reference_atto(*, but: tuple[str, ...] = (), **options) -> nn.Module:
    """Their model with the numbers of the published Atto."""
    config = transformers.Deimv2Config(
        backbone_config=transformers.HGNetV2Config(**ATTO), encoder_type="lite", encoder_layers=0,
        encoder_in_channels=[256], feat_strides=[16], encoder_hidden_dim=64, hidden_expansion=0.34, depth_mult=0.5,
        d_model=64, decoder_in_channels=[64, 64], num_feature_levels=2, decoder_n_points=[4, 2], decoder_layers=3,
        decoder_ffn_dim=160, num_queries=100, use_gateway=False, share_bbox_head=True, num_labels=80,
        decoder_activation_function="silu", **options,
    )  # fmt: skip
    return with_random_values(transformers.Deimv2ForObjectDetection(config), but=but)


def reference_n() -> nn.Module:
    """Their model with the numbers of the published N."""
    config = transformers.Deimv2Config(
        backbone_config=transformers.HGNetV2Config(**B0), encoder_in_channels=[512, 1024], feat_strides=[16, 32],
        encode_proj_layers=[1], encoder_hidden_dim=128, encoder_ffn_dim=512, hidden_expansion=0.34, depth_mult=0.5,
        d_model=128, decoder_in_channels=[128, 128], num_feature_levels=2, decoder_n_points=[6, 6], decoder_layers=3,
        decoder_ffn_dim=512, num_labels=80,
    )  # fmt: skip
    return with_random_values(transformers.Deimv2ForObjectDetection(config))


def reference_dinov3(*, gated: bool) -> nn.Module:
    """Their model on a small DINOv3, with the parts of the published L and X."""
    backbone = transformers.DINOv3ViTConfig(
        hidden_size=48, num_attention_heads=3, num_hidden_layers=3, intermediate_size=96, layerscale_value=0.5,
        use_gated_mlp=gated, hidden_act="silu" if gated else "gelu", num_register_tokens=4, key_bias=True,
        out_indices=[1, 2, 3], apply_layernorm=True, reshape_hidden_states=True,
    )  # fmt: skip
    config = transformers.Deimv2Config(
        backbone_config=backbone, spatial_tuning_adapter_inplanes=8, encoder_hidden_dim=64, encoder_ffn_dim=128,
        encoder_in_channels=[64, 64, 64], d_model=64, decoder_in_channels=[64, 64, 64], decoder_n_points=[3, 6, 3],
        decoder_layers=2, decoder_ffn_dim=128, num_queries=50, num_labels=7, encoder_has_trailing_conv=False,
    )  # fmt: skip
    return with_random_values(transformers.Deimv2ForObjectDetection(config))


def our_dinov3(*, gated: bool) -> RTDETR:
    """The same of ours."""
    vit = ViT(
        width=48, layers=3, heads=3, hidden=96, positions="rotary", registers=4, layer_scale=1.0, norm_eps=1e-5,
        activation="swiglu" if gated else "gelu", out_layers=(0, 1, 2),
    )  # fmt: skip
    return deimv2(
        SpatialAdapter(vit, width=64, inner=8), 7, encoder_width=64, encoder_hidden=128, width=64, decoder_hidden=64,
        decoder_layers=2, num_queries=50, position_activation="relu", **PORT,
    )  # fmt: skip


PAIRS = {
    "atto": (reference_atto, partial(deimv2_atto, 80, position_activation="silu", **PORT)),
    "n": (reference_n, partial(deimv2_n, 80, position_activation="relu", **PORT)),
    "dinov3": (partial(reference_dinov3, gated=False), partial(our_dinov3, gated=False)),
    "dinov3_gated": (partial(reference_dinov3, gated=True), partial(our_dinov3, gated=True)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_same_outputs_from_their_file(name: str, tmp_path: Path) -> None:
    reference, build = PAIRS[name]
    theirs = reference().eval()
    theirs.save_pretrained(tmp_path)
    model = build().eval()
    state = convert(load_file(tmp_path / "model.safetensors"))
    load_strict(model, state, allow_missing=("*.num_batches_tracked",))
    assert_same_outputs(theirs, model, [(320, 320), (256, 384)])


@pytest.mark.parametrize("option", ["project_tokens", "refine_positions", "activation"])
def test_every_way_of_the_port_matters(option: str, tmp_path: Path) -> None:
    """With the authors' way in its place the outputs are others."""
    theirs = reference_atto().eval()
    theirs.save_pretrained(tmp_path)
    model = deimv2_atto(80, **{name: value for name, value in PORT.items() if name != option}).eval()
    state = convert(load_file(tmp_path / "model.safetensors"))
    unknown = ("query_selection.proposals.project.*",) if option == "project_tokens" else ()
    load_strict(model, state, allow_missing=("*.num_batches_tracked",), allow_unexpected=unknown)
    images = random_images(1, 320, 320)
    with torch.inference_mode():
        expected, output = theirs(images), model(images)
    assert (expected.logits.amax() - output.logits.amax()).abs() > 3e-4  # three times the tolerance above


@pytest.mark.parametrize(("name", "variant"), [("atto", "deimv2_atto"), ("n", "deimv2_n")])
def test_the_weights_tell_which_model_they_are_of(name: str, variant: str, tmp_path: Path) -> None:
    PAIRS[name][0]().save_pretrained(tmp_path)
    found, shown = arguments(convert(load_file(tmp_path / "model.safetensors")))
    assert found == variant
    assert shown == {"num_classes": 80, "project_tokens": True}


@pytest.mark.parametrize("denoising", [0, 100], ids=["without denoising", "with denoising"])
@pytest.mark.parametrize("alpha", [None, 0.4])
def test_same_losses(alpha: float | None, denoising: int, tmp_path: Path) -> None:
    """Matchability-aware loss and the union of matches.

    Both draw the noise of the denoising queries in the same order, and nothing else. Their distillation of denoising
    queries weighs matched and other ones by their own numbers, not by the union's, as it is without a union.
    """
    theirs = reference_atto(
        but=(".up", ".reg_scale"), freeze_backbone_batch_norms=False, num_denoising=denoising, focal_loss_gamma=1.5,
        mal_alpha=alpha,
    )  # fmt: skip
    theirs.save_pretrained(tmp_path)
    model = deimv2_atto(80, position_activation="silu", denoising_queries=denoising, **PORT)
    without = () if denoising else ("denoising.*",)
    state = convert(load_file(tmp_path / "model.safetensors"))
    load_strict(model, state, allow_missing=("*.num_batches_tracked",), allow_unexpected=without)
    images, (labels, boxes) = random_images(2, 256, 320), some_labels()
    given = [{"class_labels": k, "boxes": b} for k, b in zip(labels, boxes, strict=True)]
    torch.manual_seed(0)
    expected = theirs.train()(images, labels=given)
    targets = Targets.from_lists(boxes, labels)
    torch.manual_seed(0)
    output = as_they_pair(model.train()(images, targets))
    losses = {}
    for union, kind in ((True, "one_to_one"), (False, "given")):
        criterion = Criterion(
            matcher=HungarianMatcher(), classification="mal", mal_alpha=1.0 if alpha is None else alpha, union=union
        )
        some = {name: one for name, one in output.supervised.items() if one.matching == kind}
        if some:
            losses |= criterion(DetectorOutput(output.logits, output.boxes, some), targets)
    losses.pop("total")
    suffixes = {"decoder_pre": "_aux_0", "decoder_0": "_aux_1", "final": "", "encoder": "_aux_2"}
    if denoising:
        suffixes |= {"denoising_pre": "_dn_0", "denoising_0": "_dn_1", "denoising_1": "_dn_2"}
        assert expected.loss_dict.pop("loss_ddf_dn_2") == 0  # the teacher of itself
    terms = {"mal": "loss_mal", "box": "loss_bbox", "giou": "loss_giou", "fgl": "loss_fgl", "ddf": "loss_ddf"}
    names = {name: terms[name.split("/")[1]] + suffixes[name.split("/")[0]] for name in losses}
    assert set(expected.loss_dict) == set(names.values())
    for name, other in names.items():
        torch.testing.assert_close(losses[name], expected.loss_dict[other], rtol=1e-4, atol=1e-4, msg=name)
    torch.testing.assert_close(torch.stack([*losses.values()]).sum(), expected.loss, rtol=1e-4, atol=1e-4)
