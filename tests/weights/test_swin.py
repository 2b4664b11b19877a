"""Layouts that no installed library has in memory; the others are in the parity tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from vitdet.backbones.swin import Swin
from vitdet.classifiers import Classifier
from vitdet.errors import UserError
from vitdet.weights.rules import load_strict
from vitdet.weights.swin import convert

timm = pytest.importorskip("timm")
transformers = pytest.importorskip("transformers")

SMALL = {"img_size": 32, "window_size": 2, "embed_dim": 8, "depths": (1, 1, 2, 1), "num_heads": (1, 1, 2, 2)}


def timm_state(name: str) -> dict[str, Tensor]:
    model = timm.create_model(name, num_classes=3, **SMALL)
    return {name: torch.randn_like(tensor) for name, tensor in model.state_dict().items()}


def official(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """timm's names as the authors' repository writes them, with what it writes beside the parameters."""
    theirs = {}
    for name, tensor in state.items():
        name = re.sub(r"layers\.(\d)\.downsample", lambda m: f"layers.{int(m[1]) - 1}.downsample", name)
        theirs[name.replace("head.fc.", "head.")] = tensor
    for stage in range(4):
        theirs[f"layers.{stage}.blocks.0.attn.relative_position_index"] = torch.zeros(4, 4, dtype=torch.long)
        theirs[f"layers.{stage}.blocks.0.attn.relative_coords_table"] = torch.zeros(1, 3, 3, 2)
    theirs["layers.2.blocks.1.attn_mask"] = torch.zeros(4, 4, 4)
    return theirs


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "swinv2_tiny_window8_256"])
def test_the_authors_layout(name: str) -> None:
    state = timm_state(name)
    ours, again = convert(state), convert(official(state))
    assert again.keys() == ours.keys()
    assert all(torch.equal(again[key], ours[key]) for key in ours)


def test_every_tensor_finds_its_place() -> None:
    for version, name in ((1, "swin_tiny_patch4_window7_224"), (2, "swinv2_tiny_window8_256")):
        backbone = Swin(
            version=version, width=8, depths=(1, 1, 2, 1), heads=(1, 1, 2, 2), window=2, image_size=(32, 32)
        )  # fmt: skip
        model = Classifier(backbone, num_classes=3, pooling="average")
        report = load_strict(model, convert(timm_state(name)))
        assert str(report) == "all fit"


def test_keys_get_a_bias_of_zeros() -> None:
    state = timm_state("swinv2_tiny_window8_256")
    bias = convert(state)["backbone.stages.2.layers.1.self_attention.attention.qkv.bias"]
    queries, keys, values = bias.chunk(3)
    assert torch.equal(queries, state["layers.2.blocks.1.attn.q_bias"])
    assert torch.equal(values, state["layers.2.blocks.1.attn.v_bias"])
    assert not keys.any()


def test_kernels_become_matrices() -> None:
    state = timm_state("swin_tiny_patch4_window7_224")
    weight = convert(state)["backbone.embed.project.weight"]
    assert weight.shape == (8, 48)
    assert torch.equal(weight[:, 16:20], state["patch_embed.proj.weight"][:, 1, 0])


def test_the_source_is_left_as_it_was() -> None:
    state = timm_state("swinv2_tiny_window8_256")
    names = list(state)
    convert(state)
    assert list(state) == names


def test_without_a_head() -> None:
    state = {name: tensor for name, tensor in timm_state("swin_tiny_patch4_window7_224").items() if "head" not in name}
    assert all(name.startswith("backbone.") for name in convert(state))


@pytest.mark.parametrize("version", ["", "v2"])
def test_names_in_hugging_faces_files(version: str, tmp_path: Path) -> None:
    config = getattr(transformers, f"Swin{version}Config")(
        image_size=32, window_size=2, embed_dim=8, depths=[1, 1, 2, 1], num_heads=[1, 1, 2, 2]
    )
    model = getattr(transformers, f"Swin{version}ForImageClassification")(config)
    model.save_pretrained(tmp_path)
    published = load_file(tmp_path / "model.safetensors")
    assert any(".attention.self.query." in name for name in published)
    in_memory, from_file = convert(model.state_dict()), convert(published)
    assert in_memory.keys() == from_file.keys()
    assert all(torch.equal(in_memory[name], from_file[name]) for name in in_memory)


def test_masked_pre_training_leaves_a_token_behind() -> None:
    state = timm_state("swin_tiny_patch4_window7_224")
    assert convert({**state, "mask_token": torch.zeros(1, 1, 8)}).keys() == convert(state).keys()


def test_other_peoples_models_are_refused() -> None:
    state = {"blocks.0.attn.qkv.weight": torch.zeros(3, 1)}
    with pytest.raises(UserError, match=r"no Swin Transformer's .*'blocks.0.attn.qkv.weight'\); name the model"):
        convert(state)
    with pytest.raises(UserError, match="the first is 'missing'"):
        convert({})
