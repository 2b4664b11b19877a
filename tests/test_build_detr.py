"""Runs on images that keep their proportions, in padded batches, and models whose rows are category ids (DETR's)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from pydantic import ValidationError
from torch import Tensor, nn

import vitdet
from tests.engine.tiny import tiny_values, write_set
from vitdet.build import build_trainer, evaluate_source, run_training
from vitdet.build.detection import build_eval_loader, build_evaluation, labels_in_data, read_split
from vitdet.build.parts import check_class_map
from vitdet.config import RunConfig
from vitdet.engine.checkpoint import save_weights
from vitdet.errors import UserError
from vitdet.structures import ClassMap, DetectorOutput, ModelMetadata, Preprocessing
from vitdet.weights.classes import NO_CLASS, coco_names_by_id

SMALL = {"width": 32, "heads": 4, "hidden": 48, "encoder_layers": 1, "decoder_layers": 2, "num_queries": 10}


@pytest.fixture(scope="module")
def tiny_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_set(tmp_path_factory.mktemp("tiny"))


def values(root: Path, output: Path, **sections: Any) -> dict[str, Any]:
    """A run of a small DETR; ``sections`` change some keys."""
    plain: dict[str, Any] = {
        **tiny_values(root, output),
        "model": {"name": "detr_r50", "overrides": SMALL},
        "loss": {"classification": "ce", "match_class": 1.0},
    }
    plain["data"] |= {"size": [48, 48], "sizes": [[32, 32], [48, 48]], "longest": 80}
    plain["augment"] = {"size_crop": 0.5, "hflip": 0.5}
    plain["train"] |= {"epochs": 1, "batch": 3}
    for name, change in sections.items():
        plain[name] = {**plain.get(name, {}), **change}
    return plain


def test_sizes_arrive(tiny_set: Path, tmp_path: Path) -> None:
    trainer = build_trainer(RunConfig.model_validate(values(tiny_set, tmp_path)))
    transform = trainer.loader.dataset.transform
    assert (transform.longest, transform.shorter, transform.size_crop) == (80, (32, 48), 0.5)
    assert trainer.sampler.sizes == [(48, 48)]
    assert trainer.metadata.preprocessing == Preprocessing((48, 48), longest=80)
    batches = list(trainer.loader)
    assert any("sizes" in batch for batch in batches)
    for batch in batches:
        sizes = batch.get("sizes", torch.tensor([batch["images"].shape[2:]] * 3))
        assert sizes.amax(0).tolist() == list(batch["images"].shape[2:])
        assert set(sizes.amin(1).tolist()) <= {32, 48}


def test_a_run_on_padded_batches(tiny_set: Path, tmp_path: Path) -> None:
    metrics = run_training(RunConfig.model_validate(values(tiny_set, tmp_path / "run")))
    assert 0 <= metrics["AP"] <= 1
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["loss"].keys() == {"ce", "box", "giou", "total"}
    best = tmp_path / "run" / "best.safetensors"
    model = vitdet.load_model(best)
    assert model.metadata.preprocessing == Preprocessing((48, 48), longest=80)
    assert model.metadata.class_map == ClassMap((3, 7), ("red", "blue"))
    assert evaluate_source(best, root=tiny_set, device="cpu")["AP"] == pytest.approx(metrics["AP"], abs=1e-6)
    found = vitdet.Predictor(best, device="cpu", threshold=0.0)(tiny_set / "val")
    assert {name for one in found for name in one.names} <= {"red", "blue"}
    assert all(len(one) == 10 for one in found)  # a query gives one


def test_another_loss_is_refused(tiny_set: Path, tmp_path: Path) -> None:
    config = RunConfig.model_validate(values(tiny_set, tmp_path / "run", loss={"classification": "vfl"}))
    with pytest.raises(UserError, match="no object"):
        run_training(config)


@pytest.mark.parametrize(
    ("section", "change", "message"),
    [
        ("data", {"size": [48, 64]}, "the shorter side twice"),
        ("data", {"sizes": [[32, 48]]}, "the shorter side twice"),
        ("data", {"longest": 40}, "the shorter side twice"),
        ("augment", {"mosaic": 0.5}, "images differ in size"),
        ("augment", {"mixup": 0.5}, "images differ in size"),
    ],
)
def test_what_does_not_go_with_proportions(section: str, change: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValidationError, match=message):
        RunConfig.model_validate(values(tmp_path, tmp_path, **{section: change}))


def test_only_models_that_know_of_padding_get_it(tiny_set: Path, tmp_path: Path) -> None:
    plain = tiny_values(tiny_set, tmp_path / "run")
    plain["data"]["longest"] = 96
    with pytest.raises(UserError, match=r"data.longest is 96 but rtdetr_nano cannot tell an image from its padding"):
        build_trainer(RunConfig.model_validate(plain))
    model = vitdet.create_model("rtdetr_nano", num_classes=2)
    metadata = ModelMetadata("rtdetr_nano", {"num_classes": 2}, GAPS_FREE, Preprocessing((64, 64), longest=96))
    save_weights(tmp_path / "other.safetensors", model, metadata)
    with pytest.raises(UserError, match="'rtdetr_nano' cannot tell them from their padding"):
        vitdet.load_model(tmp_path / "other.safetensors")
    metadata = ModelMetadata("detr_r50", {"num_classes": 2, **SMALL}, GAPS_FREE, Preprocessing((64, 64), longest=10**9))
    save_weights(tmp_path / "far.safetensors", vitdet.create_model("detr_r50", num_classes=2, **SMALL), metadata)
    with pytest.raises(UserError, match="asks for images of 1000000000 pixels, and a side has at most 16384"):
        vitdet.load_model(tmp_path / "far.safetensors")


GAPS_FREE = ClassMap((3, 7), ("red", "blue"))
GAPS = ClassMap((0, 1, 2, 3), (NO_CLASS, "red", NO_CLASS, "blue"))


def test_ids_that_nothing_has_are_no_classes() -> None:
    data = GAPS_FREE
    assert labels_in_data(GAPS, data).tolist() == [-1, 0, -1, 1]
    assert labels_in_data(data, data).tolist() == [0, 1]
    own = ClassMap((0, 1, 2), ("cat", NO_CLASS, "dog"))  # a class of the data that happens to be called so
    assert labels_in_data(own, own).tolist() == [0, 1, 2]
    check_class_map(ModelMetadata("detr_r50", {}, GAPS, Preprocessing((48, 48))), data.names, "here")
    with pytest.raises(UserError, match=r"knows the classes red, blue but here has blue, red"):
        check_class_map(ModelMetadata("detr_r50", {}, GAPS, Preprocessing((48, 48))), ["blue", "red"], "here")
    with pytest.raises(ValueError, match="knows 2 classes and the data has 1"):
        labels_in_data(GAPS, ClassMap((3,), ("red",)))


def write_two_sizes(root: Path) -> Path:
    """A wide and a high image, one object each."""
    (root / "val").mkdir(parents=True)
    (root / "annotations").mkdir()
    content: dict[str, list] = {"images": [], "annotations": []}
    for number, (height, width) in enumerate([(60, 120), (100, 50)], start=1):
        Image.fromarray(np.full((height, width, 3), 90, np.uint8)).save(root / "val" / f"{number}.png")
        content["images"].append({"id": number, "file_name": f"{number}.png", "height": height, "width": width})
        box = {"bbox": [10, 20, 30, 35], "area": 30 * 35, "iscrowd": 0, "category_id": 3 if number == 1 else 7}
        content["annotations"].append({"id": number, "image_id": number, **box})
    content["categories"] = [{"id": 3, "name": "red"}, {"id": 7, "name": "blue"}]
    (root / "annotations" / "instances_val.json").write_text(json.dumps(content))
    return root


def test_padded_images_are_measured_in_their_own_pixels(tmp_path: Path) -> None:
    """A model that answers with the ground truth scores 1; a sure answer of no class is not counted."""
    data = read_split(write_two_sizes(tmp_path / "set"), "val")
    preprocessing = Preprocessing((40, 40), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), longest=70)
    loader = build_eval_loader(data, preprocessing, batch=2, workers=0, cache=False)

    class Oracle(nn.Module):
        metadata = ModelMetadata("detr_r50", {}, GAPS, preprocessing)

        def forward(self, images: Tensor, sizes: Tensor) -> DetectorOutput:
            assert images.shape == (2, 3, 70, 70)
            assert sizes.tolist() == [[35, 70], [70, 35]]
            inside = torch.full((2, 70, 70), False)
            inside[0, :35], inside[1, :, :35] = True, True
            assert torch.equal((images != 0).all(1), inside)
            (batch,) = loader
            labels = torch.tensor([1, 3])[batch["targets"].labels]  # (2, 1)
            logits = torch.zeros(2, 2, 5)
            logits[:, 0].scatter_(1, labels, 9.0)
            logits[:, 1, 2] = 20.0
            return DetectorOutput(logits, batch["targets"].boxes.expand(-1, 2, -1), no_object=True)

    found = build_evaluation(data, loader, backend="hotcoco", top_k=10, device=torch.device("cpu"))(Oracle())
    assert found["AP"] == pytest.approx(1.0)
    assert len(found["results"]) == 2


def test_coco_by_id_is_measured_on_its_80_classes(tmp_path: Path, shared_data: Path) -> None:
    """91 rows, as the publisher's files have them, against the 80 categories of the real thing."""
    model = vitdet.create_model("detr_r50", num_classes=91, **SMALL)
    names = ClassMap(tuple(range(91)), tuple(coco_names_by_id()))
    preprocessing = Preprocessing((64, 64), longest=96)
    model.metadata = ModelMetadata("detr_r50", {"num_classes": 91, **SMALL}, names, preprocessing)
    save_weights(tmp_path / "by_id.safetensors", model, model.metadata)
    found = evaluate_source(
        tmp_path / "by_id.safetensors", root=shared_data / "detection" / "coco_mini", device="cpu", workers=0
    )
    assert len(found["per_class"]) == 80
    known = {category for category, name in zip(names.ids, names.names, strict=True) if name != NO_CLASS}
    assert found["results"]
    assert {row["category_id"] for row in found["results"]} <= known
