"""DETR's weights from its publisher's layout, what is said about them, and what is refused.

Hugging Face's layout is in tests/parity/test_detr_huggingface.py.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torchvision.models import resnet50

import vitdet
from vitdet.errors import UserError
from vitdet.structures import Preprocessing
from vitdet.weights.classes import COCO, NO_CLASS, as_coco, category_ids, coco_names, coco_names_by_id
from vitdet.weights.describe import describe_folder, name_of_file
from vitdet.weights.detr import convert
from vitdet.zoo import MODELS, describe_source

WIDTH, HIDDEN, QUERIES = 32, 48, 10


class Published(nn.Module):
    """The names of the publisher's file; torch's own layers have those of its Transformer."""

    def __init__(self, rows: int = 92) -> None:
        super().__init__()
        options = {"d_model": WIDTH, "nhead": 8, "dim_feedforward": HIDDEN, "dropout": 0.1, "batch_first": True}
        self.transformer = nn.ModuleDict(
            {
                "encoder": nn.ModuleDict({"layers": nn.ModuleList([nn.TransformerEncoderLayer(**options)])}),
                "decoder": nn.ModuleDict(
                    {
                        "layers": nn.ModuleList([nn.TransformerDecoderLayer(**options) for _ in range(2)]),
                        "norm": nn.LayerNorm(WIDTH),
                    }
                ),
            }
        )
        self.class_embed = nn.Linear(WIDTH, rows)
        layers = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)]
        self.bbox_embed = nn.ModuleDict({"layers": nn.ModuleList(layers)})
        self.query_embed = nn.Embedding(QUERIES, WIDTH)
        self.input_proj = nn.Conv2d(2048, WIDTH, 1)
        body = resnet50()
        del body.fc
        self.backbone = nn.ModuleList([nn.ModuleDict({"body": body})])

    def published_state(self) -> dict[str, Tensor]:
        """With random norms and biases; frozen batch norms count nothing."""
        state = {name: value for name, value in self.state_dict().items() if not name.endswith("num_batches_tracked")}
        return {name: value + 0.05 * torch.rand_like(value) for name, value in state.items()}


@pytest.fixture(scope="module")
def published() -> tuple[Published, dict[str, Tensor]]:
    """The reference with what its file holds."""
    torch.manual_seed(0)
    model = Published()
    state = model.published_state()
    model.load_state_dict(state, strict=False)
    return model.eval(), state


def test_a_publishers_file_is_loaded(published: tuple[Published, dict[str, Tensor]], tmp_path: Path) -> None:
    reference, state = published
    path = tmp_path / "detr-r50-e632da11.pth"
    torch.save({"model": state, "args": argparse.Namespace(backbone="resnet50"), "epoch": 499}, path)
    model = vitdet.load_model(path)
    metadata = model.metadata
    assert metadata.name == "detr_r50"
    assert metadata.arguments == {
        "num_classes": 91, "width": WIDTH, "hidden": HIDDEN, "encoder_layers": 1, "decoder_layers": 2,
        "num_queries": QUERIES,
    }  # fmt: skip
    assert metadata.preprocessing == Preprocessing(
        (800, 800), (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), longest=1333
    )
    assert metadata.class_map.ids == tuple(range(91))
    assert metadata.class_map.names[17] == "cat"
    assert metadata.class_map.names[12] == NO_CLASS
    tokens, memory = torch.randn(2, 5, WIDTH), torch.randn(2, 7, WIDTH)
    theirs = reference.transformer
    with torch.no_grad():
        for ours, their in zip(model.encoder.layers, theirs["encoder"]["layers"], strict=True):
            torch.testing.assert_close(ours(tokens), their(tokens), rtol=0, atol=1e-5)
        for ours, their in zip(model.decoder.layers, theirs["decoder"]["layers"], strict=True):
            torch.testing.assert_close(ours(tokens, memory), their(tokens, memory), rtol=0, atol=1e-5)
    assert torch.equal(model.decoder.norm.weight, state["transformer.decoder.norm.weight"])
    assert torch.equal(model.query_pos, state["query_embed.weight"])
    assert torch.equal(model.project.weight, state["input_proj.weight"])
    assert torch.equal(model.score_head.bias, state["class_embed.bias"])
    assert torch.equal(model.box_head.layers[2].weight, state["bbox_embed.layers.2.weight"])
    assert torch.equal(model.backbone.stages[2][5].convs[1].conv.weight, state["backbone.0.body.layer3.5.conv2.weight"])
    assert torch.equal(model.backbone.stem[0].norm.running_var, state["backbone.0.body.bn1.running_var"])


def test_weights_do_not_say_whether_they_are_of_dc5(
    published: tuple[Published, dict[str, Tensor]], tmp_path: Path
) -> None:
    path = tmp_path / "checkpoint.pth"
    torch.save({"model": published[1]}, path)
    with pytest.raises(UserError, match=r"last stage is dilated; pass model=detr_r50 or detr_r50_dc5"):
        describe_source(path)
    assert describe_source(path, model="detr_r50_dc5").name == "detr_r50_dc5"
    assert vitdet.load_model(path, model="detr_r50_dc5").backbone.strides == [16]


def test_another_variant_is_told(published: tuple[Published, dict[str, Tensor]], tmp_path: Path) -> None:
    path = tmp_path / "detr-r101-2c7b67e5.pth"
    torch.save({"model": published[1]}, path)
    told = "cannot be loaded: the weights are of 'detr_r50', not of 'detr_r101'; leave out the name"
    with pytest.raises(UserError, match=told):
        vitdet.load_model(path)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("detr-r50-e632da11.pth", "detr_r50"),
        ("detr-r50-dc5-f0fb7ef5.pth", "detr_r50_dc5"),
        ("detr-r101-2c7b67e5.pth", "detr_r101"),
        ("detr-r101-dc5-a2e86def.pth", "detr_r101_dc5"),
        ("detr-r50-panoptic-00ce5173.pth", None),
    ],
)
def test_published_file_names(file: str, name: str | None) -> None:
    assert name_of_file(file, MODELS) == name


def test_other_layouts_are_refused() -> None:
    with pytest.raises(UserError, match="panoptic"):
        convert({"detr.class_embed.weight": torch.zeros(251, 256)})
    with pytest.raises(UserError, match=r"no DETR's .* \(the first is 'cls_token'\)"):
        convert({"cls_token": torch.zeros(1, 1, 8)})


def test_class_names() -> None:
    assert len(COCO) == len(coco_names()) == 80
    names = coco_names_by_id()
    assert len(names) == 91
    assert names.count(NO_CLASS) == 11
    assert (names[1], names[90]) == ("person", "toothbrush")
    planned = [*names]
    planned[12], planned[26] = "street sign", "hat"  # as descriptions on the Hub have them
    assert as_coco(planned) == names
    assert as_coco(["cat", "dog"]) == ["cat", "dog"]
    assert as_coco([f"LABEL_{i}" for i in range(91)])[12] == "LABEL_12"


def test_coco_in_the_words_of_voc() -> None:
    """As Hugging Face's descriptions of RT-DETR have it: AP can only be measured on classes of the same names."""
    words = {"motorcycle": "motorbike", "airplane": "aeroplane", "couch": "sofa", "potted plant": "pottedplant"}
    words |= {"dining table": "diningtable", "tv": "tvmonitor"}
    told = [words.get(name, name) for name in coco_names()]
    assert as_coco(told) == coco_names()
    assert as_coco(told[:-1]) == told[:-1], "a custom set keeps its own words"


def test_results_have_cocos_ids() -> None:
    assert category_ids(coco_names()) == tuple(COCO)
    assert category_ids(coco_names()[::-1]) == tuple(range(80))
    assert category_ids(["cat"]) == (0,)


def test_names_are_torchvisions() -> None:
    """An independent list, whose first row is the background."""
    from torchvision.models.detection import FasterRCNN_ResNet50_FPN_Weights

    assert coco_names_by_id()[1:] == FasterRCNN_ResNet50_FPN_Weights.COCO_V1.meta["categories"][1:]


def write_description(folder: Path, config: dict, processor: dict | None = None) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "detr", **config}))
    if processor is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))


@pytest.mark.parametrize(
    "size",
    [{"size": 600, "max_size": 1000}, {"size": {"shortest_edge": 600, "longest_edge": 1000}}],
    ids=["older", "newer"],
)
def test_what_a_folder_says(tmp_path: Path, size: dict) -> None:
    write_description(tmp_path, {"dilation": True, "encoder_attention_heads": 4, "decoder_attention_heads": 4}, size)
    said = describe_folder(tmp_path, MODELS)
    assert said.arguments == {"heads": 4, "dilated": True}
    assert said.preprocessing is not None
    assert Preprocessing.from_dict(said.preprocessing).longest == 1000
    assert said.preprocessing["size"] == [600, 600]


@pytest.mark.parametrize(
    "config", [{"position_embedding_type": "learned"}, {"activation_function": "gelu"}, {"encoder_ffn_dim": 1024}]
)
def test_what_is_not_ours_is_refused(tmp_path: Path, config: dict) -> None:
    write_description(tmp_path, config)
    with pytest.raises(UserError, match="not supported for DETR"):
        describe_folder(tmp_path, MODELS)


def test_our_own_file_keeps_the_proportions(published: tuple[Published, dict[str, Tensor]], tmp_path: Path) -> None:
    """Saved and loaded again, bit for bit, with its preprocessing."""
    from vitdet.engine.checkpoint import save_weights

    path = tmp_path / "detr-r50-e632da11.pth"
    torch.save({"model": published[1]}, path)
    first = vitdet.load_model(path)
    save_weights(tmp_path / "ours.safetensors", first, first.metadata)
    second = vitdet.load_model(tmp_path / "ours.safetensors")
    assert second.metadata == first.metadata
    assert all(torch.equal(value, first.state_dict()[name]) for name, value in second.state_dict().items())
