"""What configurations and file names are taken to say, and the preprocessing that belongs to each publisher."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from vitdet.errors import UserError
from vitdet.weights.describe import (
    Description,
    describe_file,
    describe_folder,
    imagenet_class_names,
    imagenet_synsets,
    name_of_file,
)
from vitdet.weights.preprocessing import HALF, IMAGENET, from_huggingface, from_timm, from_torchvision, official, sides
from vitdet.weights.shown import classifier_arguments, rtdetr_arguments

KNOWN = [
    "vit_tiny_patch16_224", "vit_base_patch16_224", "vit_base_patch16_384", "vit_small_patch14_dinov2",
    "vit_base_patch14_reg4_dinov2", "deit_tiny_patch16_224", "deit_tiny_distilled_patch16_224",
    "swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256", "swinv2_base_window12to16_192to256",
]  # fmt: skip


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("vit_b_16-c867db91.pth", "vit_base_patch16_224"),
        ("vit_b_16_swag-9ac1b537.pth", "vit_base_patch16_224"),
        ("swin_t-704ceda3.pth", "swin_tiny_patch4_window7_224"),
        ("swin_v2_t-b137f0e2.pth", "swinv2_tiny_window8_256"),
        ("deit_tiny_patch16_224-a1311bcf.pth", "deit_tiny_patch16_224"),
        ("deit_tiny_distilled_patch16_224-b40b3cf7.pth", "deit_tiny_distilled_patch16_224"),
        ("swin_tiny_patch4_window7_224_22kto1k_finetune.pth", "swin_tiny_patch4_window7_224"),
        ("swinv2_tiny_patch4_window8_256.pth", "swinv2_tiny_window8_256"),
        ("swinv2_base_patch4_window12to16_192to256_22kto1k_ft.pth", "swinv2_base_window12to16_192to256"),
        ("dinov2_vits14_pretrain.pth", "vit_small_patch14_dinov2"),
        ("dinov2_vitb14_reg4_pretrain.pth", "vit_base_patch14_reg4_dinov2"),
        ("ViT-B_16.npz", "vit_base_patch16_224"),
        ("B_16-i21k-300ep-lr_0.001-aug_medium1.npz", "vit_base_patch16_224"),
        ("Ti_16.npz", "vit_tiny_patch16_224"),
        ("vit_base_patch16_384.augreg_in21k_ft_in1k.safetensors", "vit_base_patch16_384"),
        ("vit_tiny_patch16_2240.pth", None),
        ("vit_l_16-852ce7e3.pth", None),  # not among the known ones here
        ("best.pth", None),
        ("Backbone.pth", None),
    ],
)
def test_names_of_files(file: str, name: str | None) -> None:
    assert name_of_file(file, KNOWN) == name


STRETCH = {"size": {"height": 224, "width": 224}, "image_mean": HALF[0], "image_std": HALF[1], "resample": 2}


@pytest.mark.parametrize(
    ("kind", "processor", "expected"),
    [
        # As published: google/vit-base-patch16-224, microsoft/swin-tiny…, facebook/dinov2-small, facebook/deit-…
        ("vit", STRETCH, ([224, 224], HALF, "bilinear", None)),
        (
            "swin",
            {"do_resize": True, "image_mean": IMAGENET[0], "image_std": IMAGENET[1], "resample": 3, "size": 224},
            ([224, 224], IMAGENET, "bicubic", None),
        ),
        (
            "dinov2",
            {
                "size": {"shortest_edge": 256}, "crop_size": {"height": 224, "width": 224}, "do_center_crop": True,
                "resample": 3, "image_mean": IMAGENET[0], "image_std": IMAGENET[1],
            },
            ([224, 224], IMAGENET, "bicubic", 0.875),
        ),
        (
            "deit",
            {
                "crop_size": 224, "do_center_crop": True, "image_mean": IMAGENET[0], "image_std": IMAGENET[1],
                "resample": 3, "size": 256,
            },
            ([224, 224], IMAGENET, "bicubic", 0.875),
        ),
        ("rt_detr", {"size": {"height": 640, "width": 640}, "do_normalize": False, "image_mean": IMAGENET[0]},
         ([640, 640], ([0.0] * 3, [1.0] * 3), "bilinear", None)),
        ("vit", {"size": {"shortest_edge": 200}}, ([200, 200], HALF, "bilinear", 1.0)),
        ("vit", {"do_resize": False}, ([384, 384], HALF, "bilinear", None)),
        # Nothing said.
        ("vit", None, ([384, 384], HALF, "bilinear", None)),
        ("swinv2", None, ([384, 384], IMAGENET, "bicubic", None)),
        ("dinov3_vit", None, ([384, 384], IMAGENET, "bilinear", None)),
        ("dinov2", None, ([384, 384], IMAGENET, "bicubic", 384 / 439)),
        ("rt_detr", None, ([384, 384], ([0.0] * 3, [1.0] * 3), "bilinear", None)),
    ],
)  # fmt: skip
def test_image_processors(kind: str, processor: dict[str, Any] | None, expected: tuple[Any, ...]) -> None:
    got = from_huggingface(processor, kind, (384, 384))
    size, norm, interpolation, crop = expected
    assert got["size"] == size
    assert (got["mean"], got["std"]) == (list(norm[0]), list(norm[1]))
    assert got["interpolation"] == interpolation
    assert got["crop"] == pytest.approx(crop)


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        ({"resample": 1}, "resample 1 is not supported; it must be 2 (bilinear) or 3 (bicubic)"),
        ({"rescale_factor": 1 / 127.5}, "is not supported; only 1 / 255 is"),
        ({"do_rescale": False}, "rescale_factor None is not supported; only 1 / 255 is"),
        ({"size": {"longest_edge": 3}}, "[None, None] is no image size"),
        ({"size": {"height": 0, "width": 5}}, "[0, 5] is no image size"),
        ({"size": "large"}, "'large' is no image size; it must be a side or height and width, each at most 16384"),
    ],
)
def test_image_processors_beyond_us(processor: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError) as error:
        from_huggingface(processor, "vit", (224, 224))
    assert expected in str(error.value)


def test_timm_configurations() -> None:
    """Against timm's own reading of them, over all it publishes of the two families."""
    from timm.data import resolve_data_config
    from timm.models import get_pretrained_cfg, list_pretrained

    for name in list_pretrained(["vit_*", "deit*", "swin*"]):
        config = get_pretrained_cfg(name).to_dict()
        theirs = resolve_data_config(pretrained_cfg=config)
        ours = from_timm(config)
        assert tuple(ours["size"]) == tuple(theirs["input_size"][1:])
        assert (tuple(ours["mean"]), tuple(ours["std"])) == (tuple(theirs["mean"]), tuple(theirs["std"]))
        assert ours["interpolation"] == theirs["interpolation"]
        assert ours["crop"] == (None if theirs["crop_mode"] == "squash" else theirs["crop_pct"])


@pytest.mark.parametrize(
    ("name", "file", "resized", "interpolation"),
    [
        ("vit_base_patch16_224", "vit_b_16-c867db91.pth", 256, "bilinear"),
        ("vit_base_patch16_224", "renamed.pth", 256, "bilinear"),
        ("vit_base_patch16_224", "vit_b_16_lc_swag-4e70ced5.pth", 224, "bicubic"),
        ("vit_large_patch16_224", "vit_l_16-852ce7e3.pth", 242, "bilinear"),
        ("swin_tiny_patch4_window7_224", "swin_t-704ceda3.pth", 232, "bicubic"),
        ("swinv2_tiny_window8_256", "swin_v2_t-b137f0e2.pth", 260, "bicubic"),
    ],
)
def test_torchvision_files(name: str, file: str, resized: int, interpolation: str) -> None:
    found = from_torchvision(name, file)
    assert found is not None
    prepared, classes = found
    assert prepared["size"][0] / prepared["crop"] == pytest.approx(resized)
    assert (prepared["mean"], prepared["interpolation"]) == (IMAGENET[0], interpolation)
    assert (len(classes), classes[0]) == (1000, "tench")


def test_what_torchvision_does_not_have() -> None:
    assert from_torchvision("vit_small_patch14_dinov2", "a.pth") is None
    names = ["encoder.layers.encoder_layer_0.ln_1.weight"]
    assert describe_file(Path("a.pth"), names, "vit_small_patch14_dinov2", (224, 224)) == Description(
        "vit_small_patch14_dinov2"
    )


@pytest.mark.parametrize(
    ("name", "side", "crop"),
    [
        ("deit_tiny_patch16_224", 224, 224 / 256),
        ("deit_base_patch16_384", 384, 384 / 438),
        ("swin_tiny_patch4_window7_224", 224, 224 / 256),
        ("swinv2_tiny_window8_256", 256, 256 / 292),
        ("swin_base_patch4_window12_384", 384, None),
    ],
)
def test_official_evaluation(name: str, side: int, crop: float | None) -> None:
    said = official(name, (side, side))
    assert said["size"] == [side, side]
    assert (said["mean"], said["interpolation"]) == (IMAGENET[0], "bicubic")
    assert said["crop"] == pytest.approx(crop)
    assert describe_file(Path(f"{name}.pth"), [], name, (side, side)).preprocessing == said
    assert describe_file(Path(f"{name}.safetensors"), [], name, (side, side)).preprocessing is None


def test_class_names(shared_data: Path, tmp_path: Path) -> None:
    lines = (shared_data / "classification" / "imagenet1000_wnid_names.txt").read_text().splitlines()
    names = imagenet_class_names(1000)
    assert names is not None
    assert len(names) == len(lines) == 1000
    synsets = imagenet_synsets()
    assert list(synsets) == [line.split()[0] for line in lines]
    assert list(synsets.values()) == names
    alike = sum(line.split()[1].replace("_", " ") in name for line, name in zip(lines, names, strict=True))
    assert alike > 950, "the words of two publishers for the same class, in the same order"
    assert len(imagenet_class_names(21843) or []) == 21843
    assert imagenet_class_names(10) is None
    config: dict[str, Any] = {"architecture": "x.tag", "num_classes": 2, "label_names": ["n1", "n2"]}
    for given, expected in [
        ({}, ["n1", "n2"]),
        ({"label_descriptions": {"n1": "cat"}}, ["cat", "n2"]),
        ({"label_names": {"1": "b", "0": "a"}}, ["a", "b"]),
        ({"label_names": None}, None),
    ]:
        (tmp_path / "config.json").write_text(json.dumps(config | given))
        said = describe_folder(tmp_path, KNOWN)
        assert (said.name, said.class_names, said.arguments["num_classes"]) == ("x", expected, 2)


def test_arguments_of_timm(tmp_path: Path) -> None:
    given = {"img_size": 96, "num_heads": 4, "depth": 3, "global_pool": "avg", "drop_rate": 0.1}
    for name, expected in [
        ("vit_tiny_patch16_224", {"image_size": (96, 96), "heads": 4, "pooling": "average", "num_classes": 1000}),
        ("other", {**given, "num_classes": 1000}),  # stays timm's
    ]:
        (tmp_path / "config.json").write_text(json.dumps({"architecture": name, "model_args": given}))
        assert describe_folder(tmp_path, KNOWN).arguments == expected


def test_timms_pooling_beside_its_arguments(tmp_path: Path) -> None:
    """Where it writes it on its Hub; DINOv3's is the average there, and the class token in our architecture."""
    for given, expected in [({"global_pool": "avg"}, {"pooling": "average"}), ({"global_pool": ""}, {}), ({}, {})]:
        (tmp_path / "config.json").write_text(json.dumps({"architecture": "vit_tiny_patch16_224", **given}))
        assert describe_folder(tmp_path, KNOWN).arguments == {**expected, "num_classes": 1000}


@pytest.mark.parametrize(
    "told",
    [{"decoder_activation_function": "silu"}, {"normalize_before": True}, {"positional_encoding_temperature": 20}],
)
@pytest.mark.parametrize("kind", ["rt_detr", "rt_detr_v2", "d_fine"])
def test_arithmetic_that_is_not_ours(kind: str, told: dict[str, Any], tmp_path: Path) -> None:
    """It changes what transformers computes, and neither names nor shapes."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **told}))
    with pytest.raises(UserError, match=f"{next(iter(told))} .* is not supported for RT-DETR and D-FINE; only"):
        describe_folder(tmp_path, KNOWN)


def test_a_folder_without_description(tmp_path: Path) -> None:
    assert describe_folder(tmp_path, KNOWN) == Description()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"model_type": "swin", "use_absolute_embeddings": True}, "use_absolute_embeddings and activations other than"),
        ({"model_type": "dinov3_vit", "rope_theta": 10}, "rope_theta 10 is not supported; only 100 is"),
        ({"model_type": "dinov3_vit", "use_gated_mlp": True, "hidden_act": "gelu"}, "feed-forward with 'gelu' is not"),
        ({"model_type": "vit", "qkv_bias": False}, "attention without biases (qkv_bias) is not supported"),
        (
            {"model_type": "rt_detr", "encoder_attention_heads": 4},
            "encoders and decoders of different heads, ",
        ),
        ({"model_type": "rt_detr", "learn_initial_query": True}, "and learnt queries, are not supported for RT-DETR"),
    ],
)
def test_configurations_beyond_us(config: dict[str, Any], expected: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError) as error:
        describe_folder(tmp_path, KNOWN)
    assert str(error.value).startswith(f"{tmp_path} cannot be used: ")
    assert expected in str(error.value)


def test_sides() -> None:
    assert sides(7) == sides([7, 7]) == sides({"shortest_edge": 7}) == (7, 7)
    assert sides({"height": 3, "width": 5}) == (3, 5)
    with pytest.raises(UserError, match=r"\[1, 2, 3\] is no image size"):
        sides([1, 2, 3])


def test_what_weights_show() -> None:
    from vitdet.zoo import create_model

    def show(name: str, **options: Any) -> dict[str, Any]:
        with torch.device("meta"):
            return classifier_arguments(create_model(name, **options).state_dict())

    vit = show("vit_small_patch14_dinov2", num_classes=3, pooling="token_and_average", registers=2, image_size=(56, 56))
    expected = {"width": 384, "layers": 12, "hidden": 1536, "patch": 14, "registers": 2, "image_size": (56, 56)}
    assert vit.items() >= (expected | {"pooling": "token_and_average", "num_classes": 3, "class_token": True}).items()
    assert show("vit_giant_patch14_dinov2", layers=1)["activation"] == "swiglu"
    assert show("vit_tiny_patch16_224", representation=192, num_classes=0)["representation"] == 192
    assert "positions" not in show("vit_small_patch16_dinov3", layers=1)
    swin = show("swin_tiny_patch4_window7_224", num_classes=0)
    assert swin["heads"] == (3, 6, 12, 24)
    assert (swin["window"], swin["depths"], swin["version"]) == (7, (2, 2, 6, 2), 1)
    assert show("swinv2_tiny_window8_256")["version"] == 2
    with torch.device("meta"):
        name, arguments = rtdetr_arguments(create_model("rtdetr_r34", num_classes=7).state_dict())
    assert name == "rtdetr_r34"
    assert arguments.items() >= {"num_classes": 7, "encoder_expansion": 0.5, "decoder_layers": 4}.items()
    with (
        torch.device("meta"),
        pytest.raises(UserError, match=r"no RT-DETR on a backbone of \[1, 1, 2, 1\] blocks"),
    ):
        rtdetr_arguments(create_model("rtdetr_nano").state_dict())


def test_the_plain_baseline_is_prepared_as_its_authors_do() -> None:
    """timm does not know the name."""
    said = describe_file(Path("plain.pth"), [], "vit_small_patch16_224_plain", (224, 224)).preprocessing
    assert said == {"size": [224, 224], "mean": [0.5] * 3, "std": [0.5] * 3, "interpolation": "bilinear", "crop": 0.875}
