"""Heads for other classes: which rows are kept, value by value, and what is said."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.engine.tiny import tiny_values, write_set
from vitdet import create_model
from vitdet.build import build_trainer
from vitdet.build.class_heads import class_heads, keep_rows, match_classes, split_heads, tell_kept
from vitdet.build.parts import start_from
from vitdet.config import RunConfig
from vitdet.engine.checkpoint import save_weights
from vitdet.errors import UserError
from vitdet.structures import ClassMap, ModelMetadata, Preprocessing
from vitdet.weights.classes import coco_names_by_id


@pytest.mark.parametrize(
    ("ours", "theirs", "matches"),
    [
        (["car", "helmet", "person"], ["person", "dog", "car"], {0: 2, 2: 0}),
        ([" Car ", "PERSON"], ["person", "car"], {0: 1, 1: 0}),
        (["Car", "car"], ["car", "CAR"], {0: 1, 1: 0}),  # as they stand, first; then what is left
        (["Car", "car"], ["car", "x"], {1: 0}),
        (["crane", "owl"], ["crane", "owl", "crane"], {1: 1}),  # of which of the two cranes?
        (["crane", "crane"], ["crane"], {}),
        (["class_0", "class_1"], ["class_1", "class_0"], {}),  # numbers are no names
        (["class_0", "cat"], ["cat", "class_0"], {1: 0}),
        (["cat"], [], {}),
        (["N/A", "dog"], ["N/A", "N/A", "dog"], {1: 2}),
    ],
)
def test_which_classes_are_the_same(ours: list[str], theirs: list[str], matches: dict[int, int]) -> None:
    assert match_classes(ours, theirs) == matches


def test_rows_are_the_weights_own() -> None:
    own = {
        "score_head.weight": torch.zeros(3, 2), "score_head.bias": torch.zeros(3), "embedding": torch.zeros(4, 2),
        "conv": torch.zeros(3, 2, 1, 1), "absent": torch.zeros(3), "wider": torch.zeros(3, 5), "other": torch.zeros(7),
        "scalar": torch.zeros(()),
    }  # fmt: skip
    theirs = {
        "score_head.weight": torch.arange(8.0).view(4, 2), "score_head.bias": torch.arange(4.0) + 1,
        "embedding": torch.arange(10.0).view(5, 2) + 1, "conv": torch.arange(8.0).view(4, 2, 1, 1),
        "wider": torch.ones(4, 4), "other": torch.ones(7), "scalar": torch.ones(()),
    }  # fmt: skip
    kept = keep_rows(own, theirs, {0: 3, 2: 1}, classes=(3, 4))
    assert kept.keys() == {"score_head.weight", "score_head.bias", "embedding", "conv"}
    assert kept["score_head.weight"].tolist() == [[6, 7], [0, 0], [2, 3]]
    assert kept["score_head.bias"].tolist() == [4, 0, 2]
    assert kept["embedding"].tolist() == [[7, 8], [0, 0], [3, 4], [9, 10]]  # the last stands for no class
    assert kept["conv"].flatten().tolist() == [6, 7, 0, 0, 2, 3]
    assert not any(tensor.any() for tensor in own.values())
    assert keep_rows(own, theirs, {}, classes=(3, 4)).keys() == {"embedding"}


def test_what_is_said() -> None:
    told = tell_kept(["person", "helmet", "car"], ["person", "dog", "car"], {0: 0, 2: 2}, 0)
    assert told == (
        "knows other classes (person, dog, car): the heads keep the rows of person, car (2 of 3 classes); new: helmet"
    )
    assert tell_kept(["a", "b"], ["b", "a"], {0: 1, 1: 0}, 0) == (
        "knows other classes (b, a): the heads keep the rows of a, b (2 of 2 classes)"
    )
    assert tell_kept(["a"], ["a", "b"], {0: 0}, 3).endswith("(1 of 1 classes); 3 tensors start anew")
    assert tell_kept(["a"], [], {}, 3) == "knows no classes: 3 tensors start anew"


def save(path: Path, name: str, model: nn.Module, names: list[str], **arguments: object) -> None:
    classes = ClassMap(tuple(range(len(names))), tuple(names))
    metadata = ModelMetadata(name, {"num_classes": len(names), **arguments}, classes, Preprocessing((64, 64)))
    save_weights(path, model, metadata)


SMALL = {
    "rtdetr_nano": {"num_queries": 10},
    "dfine_n": {"num_queries": 10},
    "deimv2_atto": {"num_queries": 10},
    "detr_r50": {"num_queries": 10, "encoder_layers": 1, "decoder_layers": 1, "hidden": 32},
    "deit_tiny_distilled_patch16_224": {"layers": 1},
    "timm/resnet10t": {},
}
OURS, THEIRS = ["car", "helmet", "person"], ["person", "dog", "Car", "bus"]


@pytest.mark.parametrize("name", SMALL)
def test_every_family_keeps_the_rows(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = create_model(name, num_classes=4, **SMALL[name])
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(torch.randn_like(parameter))
    save(tmp_path / "a.safetensors", name, source, THEIRS, **SMALL[name])
    model = create_model(name, num_classes=3, **SMALL[name])
    fresh = {key: value.clone() for key, value in model.state_dict().items()}
    start_from(model, str(tmp_path / "a.safetensors"), name, ClassMap((1, 2, 3), tuple(OURS)), SMALL[name])
    started, theirs = model.state_dict(), source.state_dict()
    heads, _ = split_heads(started, class_heads(model))
    assert len(heads) >= 2
    for key, value in started.items():
        if key not in heads:
            assert torch.equal(value, theirs[key]), key
            continue
        assert torch.equal(value[[0, 2]], theirs[key][[2, 0]]), key
        assert torch.equal(value[1], fresh[key][1]), key
        assert torch.equal(value[3:], theirs[key][4:]), key
        assert len(value) - 3 == (1 if name.startswith("detr") or "embedding" in key else 0)
        assert value.shape[0] == len(theirs[key]) - 1
    told = "the heads keep the rows of car, person (2 of 3 classes); new: helmet"
    assert capsys.readouterr().err == (
        f"note: {tmp_path / 'a.safetensors'} knows other classes (person, dog, Car, bus): {told}\n"
    )


def test_nothing_else_depends_on_the_classes() -> None:
    """All tensors whose shapes change with their number are in the table, for one model of each family."""
    for name, options in SMALL.items():
        few, many = (create_model(name, num_classes=k, **options) for k in (3, 5))
        shapes = {key: value.shape for key, value in many.state_dict().items()}
        changed = {key for key, value in few.state_dict().items() if value.shape != shapes[key]}
        assert changed == split_heads(few.state_dict(), class_heads(few))[0].keys(), name


def test_detrs_no_object_is_kept_where_no_class_is(tmp_path: Path) -> None:
    options = SMALL["detr_r50"]
    source, model = (create_model("detr_r50", num_classes=k, **options) for k in (91, 2))
    save(tmp_path / "a.safetensors", "detr_r50", source, coco_names_by_id(), **options)
    before = model.score_head.weight.clone()
    start_from(model, str(tmp_path / "a.safetensors"), "detr_r50", ClassMap((1, 2), ("nut", "bolt")), options)
    assert torch.equal(model.score_head.weight[2], source.score_head.weight[91])
    assert torch.equal(model.score_head.weight[:2], before[:2])


def test_rows_that_read_another_layer_are_not_kept(tmp_path: Path) -> None:
    """Of a head behind a layer that this model does not have, though it is as wide."""
    name, options = "vit_tiny_patch16_224", {"layers": 1}
    source = create_model(name, num_classes=2, representation=192, **options)
    model = create_model(name, num_classes=2, **options)
    save(tmp_path / "a.safetensors", name, source, ["a", "b"], representation=192, **options)
    before = model.head.weight.clone()
    start_from(model, str(tmp_path / "a.safetensors"), name, ClassMap((1, 2), ("b", "a")), options)
    assert torch.equal(model.head.weight, before)
    assert torch.equal(model.backbone.class_token, source.backbone.class_token)


def test_everything_else_must_fit(tmp_path: Path) -> None:
    source = create_model("rtdetr_nano", num_classes=2, decoder_hidden=64)
    save(tmp_path / "a.safetensors", "rtdetr_nano", source, ["a", "b"], decoder_hidden=64)
    model = create_model("rtdetr_nano", num_classes=3)
    before = model.decoder.score_heads[0].weight.clone()
    with pytest.raises(UserError, match=r"^the weights do not fit RTDETR: 9 of another shape: decoder\.layers\.0\."):
        start_from(model, str(tmp_path / "a.safetensors"), "rtdetr_nano", ClassMap((1, 2, 3), ("a", "b", "c")), {})
    assert torch.equal(model.decoder.score_heads[0].weight, before)


@pytest.mark.parametrize(("written", "run"), [({"activation": "silu"}, {}), ({}, {"activation": "silu"})])
def test_arithmetic_that_no_shape_shows_must_be_the_same(
    written: dict[str, str], run: dict[str, str], tmp_path: Path
) -> None:
    """Else the weights would be another model's without a word."""
    options = SMALL["dfine_n"]
    source = create_model("dfine_n", num_classes=2, **options, **written)
    save(tmp_path / "a.safetensors", "dfine_n", source, ["a", "b"], **options, **written)
    model = create_model("dfine_n", num_classes=2, **options, **run)
    theirs, ours = written.get("activation", "relu"), run.get("activation", "relu")
    told = f"is of a model with activation={theirs}, and the run has {ours}; set model.overrides.activation={theirs}"
    with pytest.raises(UserError, match=re.escape(told)):
        start_from(model, str(tmp_path / "a.safetensors"), "dfine_n", ClassMap((1, 2), ("a", "b")), options | run)


def test_denoising_labels_may_be_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files for inference leave them out; and a run may do without."""
    options = SMALL["dfine_n"]
    for theirs, ours in [(0, 20), (20, 0)]:
        source = create_model("dfine_n", num_classes=2, **options, denoising_queries=theirs)
        save(tmp_path / "a.safetensors", "dfine_n", source, ["a", "b"], **options, denoising_queries=theirs)
        model = create_model("dfine_n", num_classes=2, **options, denoising_queries=ours)
        start_from(model, str(tmp_path / "a.safetensors"), "dfine_n", ClassMap((1, 2), ("a", "b")), options)
        state = source.state_dict()
        assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items() if not k.startswith("denoising."))
        assert ("has no labels of denoising queries" in capsys.readouterr().err) == (theirs == 0)


def test_a_run_keeps_the_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the configuration on: of red and blue, blue is known to the new data."""
    first = build_trainer(RunConfig.model_validate(tiny_values(write_set(tmp_path / "a"), tmp_path / "first")))
    save_weights(tmp_path / "a.safetensors", first.model, first.metadata)
    root = write_set(tmp_path / "b", categories={3: "green", 7: "Blue"})
    values = tiny_values(root, tmp_path / "second")
    values["model"]["weights"] = str(tmp_path / "a.safetensors")
    values["seed"] = 5
    capsys.readouterr()
    second = build_trainer(RunConfig.model_validate(values))
    for key in ("decoder.score_heads.0.weight", "denoising.embedding.weight"):
        old, new = first.model.state_dict()[key], second.model.state_dict()[key]
        assert torch.equal(new[1], old[1])
        assert torch.equal(new[2:], old[2:])
        assert not torch.equal(new[0], old[0])
    assert (
        "knows other classes (red, blue): the heads keep the rows of Blue (1 of 2 classes); new: green"
    ) in capsys.readouterr().err
