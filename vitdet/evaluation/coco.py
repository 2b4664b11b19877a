"""COCO's box metrics from COCO-style ground truth and result rows.

Two implementations of the same protocol stand behind it: hotcoco (fast) and pycocotools (the reference). Both are asked
only for the precision and recall tables; one function here turns those into the metrics.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from vitdet.errors import UserError
from vitdet.structures import ClassMap


class _Metric(NamedTuple):
    """Where a metric stands in the tables, which are indexed by IoU threshold, area range and detection limit."""

    key: str
    precision: bool
    iou: str
    area: str
    max_detections: int


_METRICS = (
    _Metric("AP", True, "0.50:0.95", "all", 100),
    _Metric("AP50", True, "0.50", "all", 100),
    _Metric("AP75", True, "0.75", "all", 100),
    _Metric("APs", True, "0.50:0.95", "small", 100),
    _Metric("APm", True, "0.50:0.95", "medium", 100),
    _Metric("APl", True, "0.50:0.95", "large", 100),
    _Metric("AR1", False, "0.50:0.95", "all", 1),
    _Metric("AR10", False, "0.50:0.95", "all", 10),
    _Metric("AR100", False, "0.50:0.95", "all", 100),
    _Metric("ARs", False, "0.50:0.95", "small", 100),
    _Metric("ARm", False, "0.50:0.95", "medium", 100),
    _Metric("ARl", False, "0.50:0.95", "large", 100),
)
_IOU_SLICES = {"0.50:0.95": slice(0, 10), "0.50": slice(0, 1), "0.75": slice(5, 6)}  # of 0.50, 0.55 … 0.95
_AREAS = ("all", "small", "medium", "large")
_DETECTION_LIMITS = (1, 10, 100)


class CocoEvaluator:
    """COCO box metrics of the detections of one pass over a data set.

    Args:
        ground_truth: a COCO data set: ``images`` (``id``), ``categories`` (``id``, ``name``) and ``annotations``
            (``image_id``, ``category_id``, ``bbox`` xywh in pixels; ``area`` is the box's where absent, ``iscrowd`` 0).
            It is copied as far as needed and left as it is.
        backend: ``"hotcoco"`` or ``"pycocotools"``: the same numbers.

    Raises:
        UserError: the ground truth lacks a section, or one of its annotations names an unknown image or category.
    """

    def __init__(self, ground_truth: Mapping[str, Any], *, backend: str = "hotcoco") -> None:
        if backend not in _BACKENDS:
            raise UserError(f"the evaluation backend {backend!r} is unknown; choose one of {', '.join(_BACKENDS)}")
        self._tables = _BACKENDS[backend]
        self._ground_truth = _checked_ground_truth(ground_truth)
        self._image_ids = {image["id"] for image in self._ground_truth["images"]}
        self._category_ids = {category["id"] for category in self._ground_truth["categories"]}
        self._seen: set[int] = set()
        self._rows: list[np.ndarray] = []

    def update(self, results: Sequence[Mapping[str, Any]]) -> None:
        """Add COCO result rows: ``image_id``, ``category_id``, ``bbox`` xywh in pixels, ``score``, and keys to ignore.

        All rows of an image come in one call, so that an image that was run twice (a distributed sampler repeats some
        to fill the last batch) is noticed instead of counted twice. Of each class, COCO counts an image's 100 best.

        Raises:
            UserError: a key is missing, an id is unknown, a number is not finite, or the image came in an earlier call.
        """
        rows = np.empty((len(results), 7))  # image, x, y, width, height, score, category: what hotcoco reads
        for position, result in enumerate(results):
            rows[position] = self._row(result)
        images = {int(image) for image in rows[:, 0]}
        repeated = images & self._seen
        if repeated:
            raise UserError(
                f"the results of image {min(repeated)} were given before; give all rows of an image once, in one update"
            )
        self._seen |= images
        self._rows.append(rows)

    def compute(self) -> dict[str, Any]:
        """The metrics, as fractions in [0, 1].

        Returns:
            ``AP AP50 AP75 APs APm APl AR1 AR10 AR100 ARs ARm ARl`` as floats, -1.0 where the ground truth has no object
            to measure (COCO's convention), and ``per_class``: name -> ``{"AP": …, "AP50": …}``, in the order of the
            category ids, None where the class has no object. A name that several categories share is followed by
            the id.
        """
        categories = sorted(self._ground_truth["categories"], key=lambda category: category["id"])
        precision, recall = self._tables(self._ground_truth, np.concatenate([np.empty((0, 7)), *self._rows]))
        metrics: dict[str, Any] = {metric.key: _mean(metric, precision, recall) for metric in _METRICS}
        metrics["per_class"] = _per_class(categories, precision)
        return metrics

    def _row(self, result: Mapping[str, Any]) -> tuple[float, ...]:
        """One checked result as the seven numbers."""
        try:
            image, category = result["image_id"], result["category_id"]
            x, y, width, height = (float(value) for value in result["bbox"])
            score = float(result["score"])
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(
                f"the result row {dict(result)} is no detection; it needs image_id, category_id, a number score, "
                "and bbox as four numbers [x, y, width, height]"
            ) from error
        if image not in self._image_ids:
            raise UserError(
                f"a result row names image_id {image!r}, which the ground truth does not have; "
                "evaluate against the data set that the results were made from"
            )
        if category not in self._category_ids:
            raise UserError(
                f"a result row names category_id {category!r}, but the ground truth has {sorted(self._category_ids)}; "
                "write the data set's own category ids, not labels"
            )
        if not all(math.isfinite(value) for value in (x, y, width, height, score)):
            raise UserError(
                f"a detection of image {image} has the box {[x, y, width, height]} and the score {score}, "
                "which are not all finite; look for a diverged model or a half-precision overflow"
            )
        return image, x, y, width, height, score, category


def format_table(metrics: Mapping[str, Any]) -> str:
    """The twelve lines in which the field prints COCO metrics."""
    lines = []
    for metric in _METRICS:
        title, short = ("Average Precision", "(AP)") if metric.precision else ("Average Recall", "(AR)")
        where = f"IoU={metric.iou:<9} | area={metric.area:>6} | maxDets={metric.max_detections:>3}"
        lines.append(f" {title:<18} {short} @[ {where} ] = {metrics[metric.key]:0.3f}")
    return "\n".join(lines)


def format_class_table(metrics: Mapping[str, Any]) -> str:
    """One line a class with its AP and AP50, ``-`` where the ground truth has no object of it."""
    width = max((len(name) for name in metrics["per_class"]), default=0)
    width = max(width, len("class"))
    lines = [f" {'class':<{width}}     AP   AP50"]
    for name, values in metrics["per_class"].items():
        cells = ("     -" if value is None else f"{value:6.3f}" for value in (values["AP"], values["AP50"]))
        lines.append(f" {name:<{width}} {' '.join(cells)}")
    return "\n".join(lines)


def _checked_ground_truth(ground_truth: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The three sections with only the keys that count, every one of them present.

    Annotations are numbered anew from 1: pycocotools takes a match with an annotation of id 0 for none.
    """
    for section in ("images", "annotations", "categories"):
        if section not in ground_truth:
            raise UserError(f"the ground truth has no {section!r}, only {sorted(ground_truth)}; give a COCO data set")
    images = [{"id": image["id"]} for image in ground_truth["images"]]
    categories = [{"id": category["id"], "name": category["name"]} for category in ground_truth["categories"]]
    known_images, known_categories = {image["id"] for image in images}, {category["id"] for category in categories}
    annotations = []
    for number, annotation in enumerate(ground_truth["annotations"], start=1):
        missing = {"image_id", "category_id", "bbox"} - annotation.keys()
        if missing:
            name = annotation.get("id", number)
            raise UserError(f"ground truth annotation {name} lacks {min(missing)!r}; repair the annotation file")
        image, category, box = annotation["image_id"], annotation["category_id"], list(annotation["bbox"])
        if image not in known_images or category not in known_categories:
            raise UserError(
                f"ground truth annotation {annotation.get('id', number)} names image_id {image} and category_id "
                f"{category}, not both of which are listed; repair the annotation file"
            )
        row = {"id": number, "image_id": image, "category_id": category, "bbox": box}
        row["area"] = annotation.get("area", box[2] * box[3])
        row["iscrowd"] = int(annotation.get("iscrowd", 0))
        annotations.append(row)
    return {"images": images, "categories": categories, "annotations": annotations}


def _hotcoco_tables(ground_truth: dict[str, Any], rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Precision (10 IoU, 101 recall, K, 4 areas, 3 limits) and recall (10, K, 4, 3); -1 where there is no object."""
    import hotcoco

    truth = hotcoco.COCO(ground_truth)
    evaluation = hotcoco.COCOeval(truth, truth.load_res(rows), "bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    tables = evaluation.eval
    assert tables is not None
    return tables["precision"], tables["recall"]


def _pycocotools_tables(ground_truth: dict[str, Any], rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same as :func:`_hotcoco_tables` from the reference implementation."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    # Built by hand rather than by loadRes, which takes no empty list and makes a polygon of every box.
    annotations = [
        {
            "id": number,
            "image_id": int(image),
            "category_id": int(category),
            "bbox": [x, y, width, height],
            "area": width * height,
            "iscrowd": 0,
            "score": score,
        }
        for number, (image, x, y, width, height, score, category) in enumerate(rows.tolist(), start=1)
    ]
    with contextlib.redirect_stdout(io.StringIO()):  # it reports its progress by print
        truth, found = COCO(), COCO()
        # A copy of each annotation, because evaluate() adds keys to them.
        truth.dataset = {**ground_truth, "annotations": [dict(row) for row in ground_truth["annotations"]]}
        found.dataset = {**ground_truth, "annotations": annotations}
        truth.createIndex()
        found.createIndex()
        evaluation = COCOeval(truth, found, "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
    return evaluation.eval["precision"], evaluation.eval["recall"]


_BACKENDS: dict[str, Callable[[dict[str, Any], np.ndarray], tuple[np.ndarray, np.ndarray]]] = {
    "hotcoco": _hotcoco_tables,
    "pycocotools": _pycocotools_tables,
}


def _mean(metric: _Metric, precision: np.ndarray, recall: np.ndarray) -> float:
    """The mean over thresholds and classes that have objects, -1.0 where none has."""
    table = precision if metric.precision else recall
    limit = _DETECTION_LIMITS.index(metric.max_detections)
    return _mean_of_measured(table[_IOU_SLICES[metric.iou]][..., _AREAS.index(metric.area), limit])


def _per_class(categories: Iterable[dict[str, Any]], precision: np.ndarray) -> dict[str, dict[str, float | None]]:
    pairs = [(category["id"], category["name"]) for category in categories]
    names = ClassMap(tuple(number for number, _ in pairs), tuple(name for _, name in pairs)).distinct_names
    table = precision[..., 0, -1]  # (10, 101, K): all areas, 100 detections
    per_class: dict[str, dict[str, float | None]] = {}
    for index, name in enumerate(names):
        values = {"AP": _mean_of_measured(table[:, :, index]), "AP50": _mean_of_measured(table[:1, :, index])}
        per_class[name] = {key: None if value == -1 else value for key, value in values.items()}
    return per_class


def _mean_of_measured(table: np.ndarray) -> float:
    measured = table[table > -1]
    return float(measured.mean()) if measured.size else -1.0
