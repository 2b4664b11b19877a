"""What a prediction run leaves in its folder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vitdet.errors import UserError
from vitdet.evaluation.coco import CocoEvaluator
from vitdet.inference.outputs import SHEET, PredictionWriter, format_table
from vitdet.results import Classification, Detections
from vitdet.structures import ClassMap

CLASS_MAP = ClassMap(ids=(3, 90), names=("cat", "dog"))


def found(path: str | Path | None, labels: tuple[int, ...] = (1,)) -> Detections:
    return Detections(
        boxes_xyxy=torch.tensor([[10.0, 20.0, 40.0, 80.0]]).repeat(len(labels), 1),
        scores=torch.full((len(labels),), 0.75),
        labels=torch.tensor(labels, dtype=torch.int64),
        names=[CLASS_MAP.names[label] for label in labels],
        image_size=(100, 120),
        path=None if path is None else Path(path),
    )


def classified(path: str | Path | None, labels: tuple[int, ...] = (1, 0)) -> Classification:
    return Classification(
        scores=torch.tensor([0.75, 0.25])[: len(labels)],
        labels=torch.tensor(labels),
        names=[CLASS_MAP.names[label] for label in labels],
        image_size=(100, 120),
        path=None if path is None else Path(path),
        attention=np.zeros((100, 120), dtype=np.float32),
    )


def files(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_pictures_never_replace_one_another(tmp_path: Path) -> None:
    sources = ["a/x.jpg", "b/x.jpeg", "c/X.JPG", "d/x_2.jpg", "e/x.png", "f/x.tif", None, "g/ähm .webp"]
    with PredictionWriter(tmp_path / "new" / "out", CLASS_MAP) as writer:
        pictures = [writer.write(found(source)).name for source in sources]
    expected = ["x.jpg", "x_2.jpg", "X_3.jpg", "x_2_2.jpg", "x.png", "x_4.jpg", "image_7.jpg", "ähm .jpg"]
    assert pictures == expected
    assert files(tmp_path / "new" / "out") == sorted([*expected, "predictions.json"])
    with Image.open(tmp_path / "new" / "out" / "x.png") as picture:
        assert (picture.format, picture.size) == ("PNG", (120, 100))
        assert np.array_equal(np.asarray(picture), found(None).plot())
    with Image.open(tmp_path / "new" / "out" / "x_4.jpg") as picture:
        assert (picture.format, picture.size) == ("JPEG", (120, 100))


def test_no_picture_takes_the_sheets_place(tmp_path: Path) -> None:
    with PredictionWriter(tmp_path, CLASS_MAP) as writer:
        pictures = [writer.write(found(source)).name for source in ("a/sheet.jpg", "a/Sheet.png", "b/SHEET.webp")]
    assert pictures == ["sheet_2.jpg", "Sheet.png", "SHEET_3.jpg"]
    assert SHEET == "sheet.jpg"


def test_predictions_are_a_coco_result_list(tmp_path: Path) -> None:
    with PredictionWriter(tmp_path, CLASS_MAP) as writer:
        writer.write(found("in/a.jpg", (1, 0)))
        writer.write(found("in/none.jpg", ()))
        writer.write(found(None))
        writer.write(found("in/b.jpg"), image_id=139)
    rows = json.loads((tmp_path / "predictions.json").read_text())
    box = {"bbox": [10.0, 20.0, 30.0, 60.0], "score": 0.75}
    assert rows == [
        {"image_id": 1, "category_id": 90, **box, "file_name": "in/a.jpg"},
        {"image_id": 1, "category_id": 3, **box, "file_name": "in/a.jpg"},
        {"image_id": 3, "category_id": 90, **box, "file_name": "image_3.jpg"},
        {"image_id": 139, "category_id": 90, **box, "file_name": "in/b.jpg"},
    ]
    annotation = {"id": 1, "image_id": 139, "category_id": 90, "bbox": box["bbox"]}
    categories = [{"id": 3, "name": "cat"}, {"id": 90, "name": "dog"}]
    evaluator = CocoEvaluator(
        {"images": [{"id": i} for i in (1, 3, 139)], "categories": categories, "annotations": [annotation]}
    )
    evaluator.update(rows)
    assert evaluator.compute()["AR100"] == 1.0


def test_summary_and_table(tmp_path: Path) -> None:
    writer = PredictionWriter(tmp_path, CLASS_MAP)
    writer.write(found("a.jpg", (1, 0, 1)))
    writer.write(found("b.jpg", (1,)))
    summary = writer.close()
    assert summary == {"images": 2, "objects": 4, "per_class": {"cat": 1, "dog": 3}}
    assert writer.close() == summary
    assert format_table(summary).splitlines() == [
        " class           objects",
        " dog                   3",
        " cat                   1",
        " all (2 images)        4",
    ]


def test_classifications(tmp_path: Path) -> None:
    """A picture and a row an image; the summary counts images by their best class."""
    with PredictionWriter(tmp_path, CLASS_MAP) as writer:
        pictures = [
            writer.write(classified("in/a.png")),
            writer.write(classified(None, (0, 1))),
            writer.write(classified("in/b.jpg")),
        ]
        summary = writer.close()
    assert [picture.name for picture in pictures] == ["a.png", "image_2.jpg", "b.jpg"]
    assert files(tmp_path) == ["a.png", "b.jpg", "image_2.jpg", "predictions.json"]
    assert np.array_equal(np.asarray(Image.open(pictures[0])), classified(None).plot())
    dog = [{"name": "dog", "label": 1, "score": 0.75}, {"name": "cat", "label": 0, "score": 0.25}]
    cat = [{"name": "cat", "label": 0, "score": 0.75}, {"name": "dog", "label": 1, "score": 0.25}]
    assert json.loads((tmp_path / "predictions.json").read_text()) == [
        {"file_name": "in/a.png", "classes": dog},
        {"file_name": "image_2.jpg", "classes": cat},
        {"file_name": "in/b.jpg", "classes": dog},
    ]
    assert summary == {"images": 3, "per_class": {"cat": 1, "dog": 2}}
    assert format_table(summary).splitlines() == [
        " class            images",
        " dog                   2",
        " cat                   1",
        " all (3 images)        3",
    ]


def test_classes_of_one_name_are_counted_together(tmp_path: Path) -> None:
    with PredictionWriter(tmp_path, ClassMap(ids=(134, 517), names=("crane", "crane"))) as writer:
        writer.write(classified("a.jpg", (0,)))
        writer.write(classified("b.jpg", (1,)))
        assert writer.close()["per_class"] == {"crane": 2}


def test_no_images_leave_an_empty_list(tmp_path: Path) -> None:
    assert PredictionWriter(tmp_path, CLASS_MAP).close() == {"images": 0, "objects": 0, "per_class": {}}
    assert json.loads((tmp_path / "predictions.json").read_text()) == []


def test_an_error_leaves_the_predictions_of_the_last_run(tmp_path: Path) -> None:
    (tmp_path / "predictions.json").write_text("[1]")

    def fail() -> None:
        with PredictionWriter(tmp_path, CLASS_MAP) as writer:
            writer.write(found("a.jpg"))
            raise KeyError("interrupted")

    with pytest.raises(KeyError):
        fail()
    assert files(tmp_path) == ["a.jpg", "predictions.json"]
    assert (tmp_path / "predictions.json").read_text() == "[1]"


def test_a_source_in_the_output_folder_is_never_replaced(tmp_path: Path) -> None:
    Image.new("RGB", (120, 100)).save(tmp_path / "a.jpg")
    before = (tmp_path / "a.jpg").read_bytes()
    with (
        PredictionWriter(tmp_path / "sub" / "..", CLASS_MAP) as writer,
        pytest.raises(UserError, match="choose another"),
    ):
        writer.write(found(tmp_path / "a.jpg"))
    assert (tmp_path / "a.jpg").read_bytes() == before


def test_an_output_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError, match="cannot be made, because a file has that name; choose another"):
            PredictionWriter(folder, CLASS_MAP)
