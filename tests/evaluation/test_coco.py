"""COCO metrics: both backends against published numbers, the reference's own output, and values worked out by hand."""

from __future__ import annotations

import contextlib
import copy
import io
import json
from pathlib import Path

import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from vitdet.errors import UserError
from vitdet.evaluation.coco import CocoEvaluator, format_class_table, format_table

BACKENDS = ("hotcoco", "pycocotools")
ORDER = ("AP", "AP50", "AP75", "APs", "APm", "APl", "AR1", "AR10", "AR100", "ARs", "ARm", "ARl")


def evaluate(ground_truth: dict, results: list[dict], backend: str = "hotcoco") -> dict:
    evaluator = CocoEvaluator(ground_truth, backend=backend)
    evaluator.update(results)
    return evaluator.compute()


def one_object(**annotation: object) -> dict:
    """One image with one 40x50 box of the first of two classes."""
    row = {"id": 1, "image_id": 7, "category_id": 3, "bbox": [10, 20, 40, 50], "area": 2000, "iscrowd": 0, **annotation}
    categories = [{"id": 3, "name": "cat"}, {"id": 9, "name": "dog"}]
    return {"images": [{"id": 7, "width": 100, "height": 100}], "categories": categories, "annotations": [row]}


def detection(box: list[float], score: float = 0.9, category_id: int = 3, image_id: int = 7) -> dict:
    return {"image_id": image_id, "category_id": category_id, "bbox": box, "score": score}


def reference(ground_truth: dict, results: list[dict]) -> tuple[np.ndarray, str]:
    """The twelve numbers of pycocotools used as its own demo does, and what it prints as summary."""
    with contextlib.redirect_stdout(io.StringIO()):
        truth = COCO()
        truth.dataset = copy.deepcopy(ground_truth)
        truth.createIndex()
        evaluation = COCOeval(truth, truth.loadRes(copy.deepcopy(results)), "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        evaluation.summarize()
    return evaluation.stats, printed.getvalue()


@pytest.mark.parametrize("backend", BACKENDS)
def test_published_numbers_of_the_coco_api(shared_data: Path, backend: str) -> None:
    folder = shared_data / "oracles" / "cocoapi_val2014_100"
    ground_truth = json.loads((folder / "instances_val2014_100.json").read_text())
    results = json.loads((folder / "instances_val2014_fakebbox100_results.json").read_text())
    expected = json.loads((folder / "expected_full_precision_pycocotools_2.0.11.json").read_text())["bbox"]
    metrics = evaluate(ground_truth, results, backend)
    assert [metrics[key] for key in ORDER] == pytest.approx(expected["stats"], abs=1e-12)
    per_class = {name: -1 if values["AP"] is None else values["AP"] for name, values in metrics["per_class"].items()}
    assert per_class == pytest.approx(expected["per_class_AP"], abs=1e-12)
    assert list(per_class) == list(expected["per_class_AP"])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model", ["atto", "femto"])
def test_numbers_of_a_trained_detector(shared_data: Path, backend: str, model: str) -> None:
    folder = shared_data / "oracles" / "deimv2_real"
    ground_truth = json.loads((shared_data / "detection" / "coco_mini" / "val" / "instances.json").read_text())
    results = json.loads((folder / f"{model}_shared_val_detections.json").read_text())
    expected = json.loads((folder / "expected_metrics.json").read_text())
    metrics = evaluate(ground_truth, results, backend)
    wanted = expected["stored_file_top100_per_image"][f"{model}_shared_val"]
    assert [metrics[key] for key in ORDER] == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_small_case_equals_the_reference(shared_data: Path, backend: str) -> None:
    folder = shared_data / "oracles" / "small_cases"
    ground_truth = json.loads((folder / "gt_dataset.json").read_text())
    results = json.loads((folder / "dt_dataset.json").read_text())
    metrics = evaluate(ground_truth, results, backend)
    assert [metrics[key] for key in ORDER] == pytest.approx(reference(ground_truth, results)[0], abs=1e-12)


def random_case(seed: int) -> tuple[dict, list[dict]]:
    """Crowds, tied scores, absent classes, images without objects, and 150 detections of one class in one image."""
    generator = np.random.default_rng(seed)

    def boxes(count: int) -> list[list[float]]:
        return np.hstack([generator.uniform(0, 300, (count, 2)), generator.uniform(2, 200, (count, 2))]).tolist()

    ground_truth: dict = {
        "images": [{"id": int(i)} for i in (5, 900, 12, 77)],
        "categories": [{"id": i, "name": str(i)} for i in (1, 4, 90)],
        "annotations": [],
    }
    results = []
    for image in (5, 900, 12):
        for box in boxes(20):
            row = {"id": len(ground_truth["annotations"]), "image_id": image, "bbox": box, "area": box[2] * box[3]}
            row |= {"category_id": int(generator.choice([1, 4])), "iscrowd": int(generator.random() < 0.1)}
            ground_truth["annotations"].append(row)
            moved = (np.array(box) + generator.normal(0, 4, 4)).clip(min=1).tolist()
            results.append(detection(moved, round(generator.random(), 1), row["category_id"], image))
    results += [detection(box, round(generator.random(), 2), 4, 77) for box in boxes(150)]
    return ground_truth, results


@pytest.mark.parametrize("seed", range(3))
def test_backends_agree(seed: int) -> None:
    ground_truth, results = random_case(seed)
    fast, slow = (evaluate(ground_truth, results, backend) for backend in BACKENDS)
    assert fast == slow  # to the last bit
    assert 0.1 < fast["AP"] < 0.9
    for annotation in ground_truth["annotations"]:  # the reference takes a match with annotation 0 for none
        annotation["id"] += 1
    assert [fast[key] for key in ORDER] == pytest.approx(reference(ground_truth, results)[0], abs=1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_values_by_hand(backend: str) -> None:
    # IoU of the 40x50 box with its left 33x50 part is 0.825: a hit at 0.50, 0.55 … 0.80, seven of the ten thresholds.
    metrics = evaluate(one_object(), [detection([10, 20, 33, 50])], backend)
    assert metrics["AP"] == pytest.approx(0.7)
    assert metrics["AP50"] == metrics["AP75"] == pytest.approx(1.0)
    assert metrics["APm"] == pytest.approx(0.7)
    assert (metrics["APs"], metrics["APl"]) == (-1.0, -1.0)
    assert metrics["AR1"] == metrics["AR100"] == metrics["ARm"] == pytest.approx(0.7)
    assert metrics["per_class"] == {
        "cat": {"AP": pytest.approx(0.7), "AP50": pytest.approx(1.0)},
        "dog": dict.fromkeys(("AP", "AP50")),
    }


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_better_scored_miss_halves_the_precision(backend: str) -> None:
    metrics = evaluate(one_object(), [detection([10, 20, 40, 50], 0.5), detection([60, 60, 9, 9], 0.6)], backend)
    assert metrics["AP"] == pytest.approx(0.5)
    assert metrics["AR1"] == 0.0
    assert metrics["AR10"] == 1.0


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_the_hundred_best_of_an_image_and_class_count(backend: str) -> None:
    misses = [detection([60, 60, 9, 9], 0.6 + 0.001 * index) for index in range(100)]
    assert evaluate(one_object(), [*misses, detection([10, 20, 40, 50], 0.5)], backend)["AR100"] == 0.0
    assert evaluate(one_object(), [*misses[1:], detection([10, 20, 40, 50], 0.5)], backend)["AR100"] == 1.0


@pytest.mark.parametrize("backend", BACKENDS)
def test_annotation_zero_can_be_found(backend: str) -> None:
    assert evaluate(one_object(id=0), [detection([10, 20, 40, 50])], backend)["AP"] == pytest.approx(1.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_area_and_crowd_may_be_absent(backend: str) -> None:
    ground_truth = one_object()
    del ground_truth["annotations"][0]["area"], ground_truth["annotations"][0]["iscrowd"]
    metrics = evaluate(ground_truth, [detection([10, 20, 40, 50])], backend)
    assert (metrics["APm"], metrics["APs"]) == (pytest.approx(1.0), -1.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_predictions(backend: str) -> None:
    for metrics in (CocoEvaluator(one_object(), backend=backend).compute(), evaluate(one_object(), [], backend)):
        assert [metrics[key] for key in ORDER] == [0, 0, 0, -1, 0, -1, 0, 0, 0, -1, 0, -1]
        assert metrics["per_class"]["cat"] == {"AP": 0.0, "AP50": 0.0}


@pytest.mark.parametrize("backend", BACKENDS)
def test_no_ground_truth(backend: str) -> None:
    ground_truth = {**one_object(), "annotations": []}
    empty = {"images": [], "annotations": [], "categories": []}
    for metrics in (evaluate(ground_truth, [detection([1, 1, 5, 5])], backend), evaluate(empty, [], backend)):
        assert [metrics[key] for key in ORDER] == [-1.0] * 12
        assert all(values == {"AP": None, "AP50": None} for values in metrics["per_class"].values())


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_is_printed_and_the_ground_truth_stays(backend: str, capfd: pytest.CaptureFixture[str]) -> None:
    ground_truth = one_object()
    before = copy.deepcopy(ground_truth)
    evaluator = CocoEvaluator(ground_truth, backend=backend)
    evaluator.update([detection([10, 20, 40, 50])])
    assert evaluator.compute() == evaluator.compute()
    assert ground_truth == before
    assert capfd.readouterr() == ("", "")


def test_batches_add_up() -> None:
    ground_truth, results = random_case(0)
    evaluator = CocoEvaluator(ground_truth)
    for image in (900, 5, 77, 12):
        evaluator.update([row for row in results if row["image_id"] == image])
    assert evaluator.compute() == evaluate(ground_truth, results)


def test_categories_with_one_name_stay_apart() -> None:
    ground_truth = one_object()
    ground_truth["categories"][1]["name"] = "cat"
    assert list(evaluate(ground_truth, [])["per_class"]) == ["cat (3)", "cat (9)"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (detection([1, 2, 3, 4], image_id=8), "image_id 8, which the ground truth does not have; evaluate against"),
        (
            detection([1, 2, 3, 4], category_id=0),
            r"category_id 0, but the ground truth has \[3, 9\]; write the data set's",
        ),
        (
            detection([1, 2, 3, 4], score=float("nan")),
            "image 7 has the box .* score nan, which are not all finite; look",
        ),
        (detection([1, 2, float("inf"), 4]), r"image 7 has the box \[1.0, 2.0, inf, 4.0\].* not all finite; look"),
        (detection([1, 2, 3]), r"'bbox': \[1, 2, 3\].* is no detection; it needs image_id"),
        ({"image_id": 7, "category_id": 3, "bbox": [1, 2, 3, 4]}, "is no detection; it needs image_id, category_id"),
    ],
)
def test_bad_rows_are_named(row: dict, message: str) -> None:
    evaluator = CocoEvaluator(one_object())
    with pytest.raises(UserError, match=message):
        evaluator.update([row])


def test_an_image_given_twice_is_named() -> None:
    evaluator = CocoEvaluator(one_object())
    evaluator.update([detection([10, 20, 40, 50]), detection([11, 20, 40, 50])])
    with pytest.raises(UserError, match="results of image 7 were given before; give all rows of an image once"):
        evaluator.update([detection([10, 20, 40, 50])])


def test_bad_ground_truth_is_named() -> None:
    with pytest.raises(UserError, match=r"ground truth has no 'categories', only \['annotations', 'images'\]; give"):
        CocoEvaluator({"images": [], "annotations": []})
    with pytest.raises(
        UserError, match="annotation 1 names image_id 8 and category_id 3, not both of which are listed"
    ):
        CocoEvaluator(one_object(image_id=8))
    incomplete = one_object()
    del incomplete["annotations"][0]["bbox"]
    with pytest.raises(UserError, match="annotation 1 lacks 'bbox'; repair"):
        CocoEvaluator(incomplete)
    with pytest.raises(UserError, match="backend 'fast' is unknown; choose one of hotcoco, pycocotools"):
        CocoEvaluator(one_object(), backend="fast")


def test_table_is_the_one_the_reference_prints() -> None:
    ground_truth, results = random_case(1)
    for annotation in ground_truth["annotations"]:  # the reference takes a match with annotation 0 for none
        annotation["id"] += 1
    printed = reference(ground_truth, results)[1]
    assert format_table(evaluate(ground_truth, results)) == printed.rstrip("\n")


def test_class_table() -> None:
    metrics = {"per_class": {"traffic light": {"AP": 0.1234, "AP50": 1.0}, "cat": {"AP": None, "AP50": None}}}
    assert format_class_table(metrics).splitlines() == [
        " class             AP   AP50",
        " traffic light  0.123  1.000",
        " cat                -      -",
    ]
