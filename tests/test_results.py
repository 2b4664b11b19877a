"""What is found in an image: its values, COCO rows, files and pictures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitdet.results import Classification, Detections, coco_rows
from vitdet.structures import ClassMap

CLASS_MAP = ClassMap(ids=(3, 90), names=("cat", "dog"))


def two_objects(**changes: object) -> Detections:
    values: dict = {
        "boxes_xyxy": torch.tensor([[10.0, 20.0, 40.0, 80.0], [0.0, 0.0, 5.0, 6.0]]),
        "scores": torch.tensor([0.75, 0.5]),
        "labels": torch.tensor([1, 0]),
        "names": ["dog", "cat"],
        "image_size": (100, 120),
    }
    return Detections(**(values | changes))


def no_objects() -> Detections:
    return Detections(torch.zeros(0, 4), torch.zeros(0), torch.zeros(0, dtype=torch.int64), [], (30, 40))


def test_detections_as_plain_values() -> None:
    found = two_objects(path=Path("a/b.jpg"))
    assert len(found) == 2
    assert found.to_dict() == {
        "path": str(Path("a/b.jpg")),
        "height": 100,
        "width": 120,
        "detections": [
            {"name": "dog", "label": 1, "score": 0.75, "box_xyxy": [10.0, 20.0, 40.0, 80.0]},
            {"name": "cat", "label": 0, "score": 0.5, "box_xyxy": [0.0, 0.0, 5.0, 6.0]},
        ],
    }
    assert [row["name"] for row in found] == ["dog", "cat"]
    assert no_objects().to_dict()["detections"] == []


def test_detections_as_coco_rows() -> None:
    assert two_objects().to_coco(17, CLASS_MAP) == [
        {"image_id": 17, "category_id": 90, "bbox": [10.0, 20.0, 30.0, 60.0], "score": 0.75},
        {"image_id": 17, "category_id": 3, "bbox": [0.0, 0.0, 5.0, 6.0], "score": 0.5},
    ]
    assert no_objects().to_coco(17, CLASS_MAP) == []


def test_coco_rows_of_half_precision_are_plain_numbers() -> None:
    """As written to JSON: an id of the data set for each label, xywh, numbers of Python."""
    boxes, scores = torch.tensor([[10.0, 20.0, 40.0, 80.0]]), torch.tensor([0.75])
    rows = coco_rows(boxes.bfloat16(), scores.bfloat16(), torch.tensor([1]), image_id=17, class_map=CLASS_MAP)
    assert rows == [{"image_id": 17, "category_id": 90, "bbox": [10.0, 20.0, 30.0, 60.0], "score": 0.75}]
    assert json.loads(json.dumps(rows)) == rows


def test_detections_as_supervision() -> None:
    found = two_objects().to_supervision()
    assert found.xyxy.tolist() == [[10.0, 20.0, 40.0, 80.0], [0.0, 0.0, 5.0, 6.0]]
    assert found.class_id.tolist() == [1, 0]
    assert found.confidence.tolist() == [0.75, 0.5]
    assert found.data["class_name"].tolist() == ["dog", "cat"]
    assert len(no_objects().to_supervision()) == 0


def test_plot_draws_the_boxes_and_leaves_the_image() -> None:
    image = np.full((100, 120, 3), 128, dtype=np.uint8)
    drawn = two_objects(image=image).plot()
    assert drawn.shape == (100, 120, 3)
    assert drawn.dtype == np.uint8
    assert (image == 128).all()
    changed = (drawn != 128).any(-1)
    assert changed[50, 9:12].any()  # the left edge of the first box
    assert not changed[50, 20:30].any()  # its inside
    assert not changed[90:, 60:].any()  # far away from both


def test_plot_without_an_image_or_objects_is_a_white_page() -> None:
    assert (no_objects().plot() == 255).all()
    assert no_objects().plot().shape == (30, 40, 3)


def test_save_as_picture_or_json(tmp_path: Path) -> None:
    found = two_objects()
    found.save(tmp_path / "a.png")
    assert np.array_equal(np.asarray(Image.open(tmp_path / "a.png")), found.plot())
    found.save(tmp_path / "a.json")
    assert json.loads((tmp_path / "a.json").read_text()) == found.to_dict()


def three_classes(**changes: object) -> Classification:
    values: dict = {
        "scores": torch.tensor([0.75, 0.125, 0.0625]),
        "labels": torch.tensor([4, 0, 2]),
        "names": ["dog", "cat", "cow"],
        "image_size": (100, 120),
    }
    return Classification(**(values | changes))


def test_classification_as_plain_values() -> None:
    found = three_classes(path=Path("a/b.jpg"))
    assert (len(found), found.name, found.score) == (3, "dog", 0.75)
    classes = [
        {"name": "dog", "label": 4, "score": 0.75},
        {"name": "cat", "label": 0, "score": 0.125},
        {"name": "cow", "label": 2, "score": 0.0625},
    ]
    assert found.to_dict() == {"path": str(Path("a/b.jpg")), "height": 100, "width": 120, "classes": classes}
    assert list(found) == classes


def test_classification_drawn() -> None:
    image = np.full((100, 120, 3), 128, dtype=np.uint8)
    drawn = three_classes(image=image).plot()
    assert drawn.shape == (100, 120, 3)
    assert drawn.dtype == np.uint8
    assert (image == 128).all()
    assert (drawn[:40] != 128).any()  # the caption
    assert (drawn[60:] == 128).all()
    assert (three_classes().plot()[60:] == 255).all()  # a white page without an image


def test_classification_drawn_with_attention() -> None:
    image = np.full((100, 120, 3), 128, dtype=np.uint8)
    attention = np.zeros((100, 120), dtype=np.float32)
    attention[60:, 60:] = 1
    drawn = three_classes(image=image, attention=attention).plot()
    assert (image == 128).all()
    assert drawn[80, 100].argmax() == 0  # red
    assert drawn[80, 20].argmax() == 2  # blue


def test_classification_saved(tmp_path: Path) -> None:
    found = three_classes()
    found.save(tmp_path / "a.png")
    assert np.array_equal(np.asarray(Image.open(tmp_path / "a.png")), found.plot())
    found.save(tmp_path / "a.JSON")
    assert json.loads((tmp_path / "a.JSON").read_text()) == found.to_dict()


@pytest.mark.parametrize("make", [three_classes, two_objects])
def test_json_never_holds_nan(make: Callable[..., Classification | Detections], tmp_path: Path) -> None:
    scores = torch.full((len(make()),), float("nan"))
    with pytest.raises(ValueError, match="not JSON compliant"):
        make(scores=scores).save(tmp_path / "a.json")
    assert not (tmp_path / "a.json").exists()
