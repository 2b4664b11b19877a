"""Accuracies against scikit-learn and by hand; what several processes measured; the confusion matrix as a picture."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import confusion_matrix, log_loss, top_k_accuracy_score

from vitdet.errors import UserError
from vitdet.evaluation.classification import (
    ClassificationEvaluator,
    format_class_table,
    format_table,
    save_confusion,
)
from vitdet.structures import ClassMap


def class_map(count: int) -> ClassMap:
    return ClassMap(ids=tuple(range(100, 100 + count)), names=tuple(f"class {i}" for i in range(count)))


def measure(logits: torch.Tensor, labels: torch.Tensor, batch: int = 7) -> dict:
    evaluator = ClassificationEvaluator(class_map(logits.shape[1]))
    for start in range(0, len(labels), batch):
        evaluator.update(logits[start : start + batch], labels[start : start + batch])
    return evaluator.compute()


def by_hand() -> dict:
    """Three classes, of which the last has no image; of the first one image of two is right."""
    evaluator = ClassificationEvaluator(ClassMap(ids=(1, 2, 3), names=("cat", "dog", "cow")))
    logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 2.0], [0.0, 5.0, 1.0]])
    evaluator.update(logits, torch.tensor([0, 0, 1]))
    return evaluator.compute()


def test_equal_to_scikit_learn() -> None:
    logits, labels = torch.randn(200, 12) * 2, torch.randint(11, (200,))  # no image of the last class
    metrics = measure(logits, labels)
    every = list(range(12))
    scores, truth = logits.double().numpy(), labels.numpy()
    assert metrics["top1"] == pytest.approx(top_k_accuracy_score(truth, scores, k=1, labels=every), abs=1e-12)
    assert metrics["top5"] == pytest.approx(top_k_accuracy_score(truth, scores, k=5, labels=every), abs=1e-12)
    expected = confusion_matrix(truth, scores.argmax(1), labels=every)
    assert metrics["confusion"] == expected.tolist()
    probabilities = logits.double().softmax(1).numpy()
    assert metrics["loss"] == pytest.approx(log_loss(truth, probabilities, labels=every), abs=1e-6)
    for label in range(11):
        values = metrics["per_class"][f"class {label}"]
        assert values["images"] == (truth == label).sum()
        assert values["top1"] == pytest.approx(expected[label, label] / expected[label].sum())


def test_worked_out_by_hand() -> None:
    metrics = by_hand()
    assert metrics["top1"] == pytest.approx(2 / 3)
    assert metrics["top5"] == 1.0  # of three classes, the best three
    assert metrics["images"] == 3
    first = math.log(math.e**2 + math.e + 1)
    assert metrics["loss"] == pytest.approx((first - 2 + first + math.log(math.e**5 + math.e + 1) - 5) / 3, abs=1e-6)
    assert metrics["confusion"] == [[1, 0, 1], [0, 1, 0], [0, 0, 0]]
    assert metrics["per_class"] == {
        "cat": {"top1": 0.5, "images": 2},
        "dog": {"top1": 1.0, "images": 1},
        "cow": {"top1": None, "images": 0},
    }
    assert json.loads(json.dumps(metrics, allow_nan=False)) == metrics


def test_equal_logits_rank_by_label() -> None:
    metrics = measure(torch.zeros(100, 100), torch.arange(100))
    assert metrics["top1"] == 1 / 100
    assert metrics["top5"] == 5 / 100
    assert [row[0] for row in metrics["confusion"]] == [1] * 100


def test_one_class() -> None:
    metrics = measure(torch.zeros(3, 1), torch.zeros(3, dtype=torch.int64))
    assert (metrics["top1"], metrics["top5"], metrics["loss"], metrics["confusion"]) == (1.0, 1.0, 0.0, [[3]])


def test_batches_and_processes_do_not_matter() -> None:
    """Uneven shares, in another order, one process without an image: the same figures, to the last bit."""
    logits, labels = torch.randn(41, 9), torch.randint(9, (41,))
    whole = measure(logits, labels, batch=41)
    assert measure(logits, labels, batch=1) == whole
    together = ClassificationEvaluator(class_map(9))
    for part in (slice(20, 41), slice(0, 0), slice(0, 20)):
        process = ClassificationEvaluator(class_map(9))
        process.update(logits[part], labels[part])
        together.add_rows(process.state_rows())
    assert together.compute() == whole


def test_half_precision_logits() -> None:
    logits, labels = torch.randn(30, 6).bfloat16(), torch.randint(6, (30,))
    assert measure(logits, labels) == measure(logits.float(), labels)


def test_shared_names_are_told_apart() -> None:
    evaluator = ClassificationEvaluator(ClassMap(ids=(134, 517, 3), names=("crane", "crane", "cat")))
    evaluator.update(torch.eye(3), torch.tensor([0, 1, 1]))
    per_class = evaluator.compute()["per_class"]
    assert {name: values["images"] for name, values in per_class.items()} == {
        "crane (134)": 1,
        "crane (517)": 2,
        "cat": 0,
    }


def test_what_cannot_be_measured_is_named() -> None:
    evaluator = ClassificationEvaluator(class_map(3))
    with pytest.raises(UserError, match="no image was measured"):
        evaluator.compute()
    with pytest.raises(UserError, match=r"gives \(2, 4\) logits, but the data has 3 classes"):
        evaluator.update(torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(UserError, match="logits that are not finite"):
        evaluator.update(torch.tensor([[0.0, float("nan"), 0.0]]), torch.tensor([0]))
    for label in (-1, 3):
        with pytest.raises(UserError, match="a label is not in 0…2"):
            evaluator.update(torch.zeros(1, 3), torch.tensor([label]))
    with pytest.raises(UserError, match="no image was measured"):  # and nothing of it was kept
        evaluator.compute()


def test_tables() -> None:
    metrics = by_hand()
    assert format_table(metrics).splitlines() == [
        " top-1 accuracy    0.6667",
        " top-5 accuracy    1.0000",
        f" cross-entropy     {metrics['loss']:.4f}",
        " images                 3",
    ]
    assert format_class_table(metrics).splitlines() == [
        " class   top-1  images",
        " cat    0.5000       2",
        " dog    1.0000       1",
        " cow         -       0",
    ]


def cells(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB")).astype(int)


@pytest.mark.parametrize("count", [1, 2, 20, 45, 1000])
def test_a_confusion_matrix_of_any_size(tmp_path: Path, count: int) -> None:
    """Perfect answers: the diagonal from the top left to the bottom right is the darkest blue, the corners white."""
    labels = torch.arange(count)
    metrics = measure(10 * torch.eye(count), labels, batch=1000)
    save_confusion(metrics, tmp_path / "confusion.png")
    pixels = cells(tmp_path / "confusion.png")
    assert 300 < pixels.shape[0] < 3000
    assert 300 < pixels.shape[1] < 3000
    if count > 1:
        white = (pixels > 240).all(axis=2)
        assert white.mean() > 0.4
    dark = (pixels == (8, 48, 107)).all(axis=2)  # the end of the colour map
    rows, columns = dark.nonzero()
    inside = columns < pixels.shape[1] * 0.88  # without the colour bar
    if 2 < count <= 45:
        assert np.corrcoef(rows[inside], columns[inside])[0, 1] > 0.9
    assert dark.any()


def test_rows_are_coloured_by_their_shares(tmp_path: Path) -> None:
    """A rare class that is always right is as dark as a frequent one."""
    logits = torch.tensor([[1.0, 0.0]] * 50 + [[0.0, 1.0]])
    save_confusion(measure(logits, torch.tensor([0] * 50 + [1]), batch=51), tmp_path / "a.png")
    dark = (cells(tmp_path / "a.png") == (8, 48, 107)).all(axis=2)
    width = dark.shape[1]
    halves = dark[:, : width * 3 // 4].sum(axis=1).nonzero()[0]
    assert halves.max() - halves.min() > dark.shape[0] * 0.6  # both cells of the diagonal


def test_names_of_all_kinds_can_be_drawn(tmp_path: Path) -> None:
    """No formula, no warning about letters that the font lacks, and a limit to the length."""
    names = ("$a^_$", "猫", "x" * 200)
    evaluator = ClassificationEvaluator(ClassMap(ids=(0, 1, 2), names=names))
    evaluator.update(torch.eye(3), torch.tensor([0, 1, 2]))
    save_confusion(evaluator.compute(), tmp_path / "a.png")
    assert cells(tmp_path / "a.png").shape[1] < 1200
