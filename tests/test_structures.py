"""The contracts: class maps, preprocessing, padded targets."""

from __future__ import annotations

import json

import pytest
import torch

from vitdet.structures import ClassMap, ImageTargets, Preprocessing, Targets

CLASS_MAP = ClassMap(ids=(3, 90), names=("cat", "dog"))


def test_class_map() -> None:
    assert len(CLASS_MAP) == 2
    assert CLASS_MAP.label_of_id == {3: 0, 90: 1}
    assert ClassMap.from_dict(json.loads(json.dumps(CLASS_MAP.to_dict()))) == CLASS_MAP


def test_class_map_refuses_what_is_ambiguous() -> None:
    with pytest.raises(ValueError, match="as many names as ids, got 2 and 1"):
        ClassMap(ids=(1, 2), names=("cat",))
    with pytest.raises(ValueError, match=r"ids must be unique, got \[1, 1\]"):
        ClassMap(ids=(1, 1), names=("cat", "dog"))


def test_preprocessing_normalizes_each_channel() -> None:
    pixels = torch.tensor([0, 51, 255], dtype=torch.uint8).view(1, 3, 1, 1)
    plain = Preprocessing(size=(4, 6)).normalize(pixels)
    assert plain.dtype == torch.float32
    assert plain.flatten().tolist() == pytest.approx([0.0, 0.2, 1.0])
    scaled = Preprocessing(size=(4, 6), mean=(0.5, 0.1, 0.0), std=(0.5, 0.2, 4.0)).normalize(pixels)
    assert scaled.flatten().tolist() == pytest.approx([-1.0, 0.5, 0.25])


@pytest.mark.parametrize(
    "norm",
    [{"mean": ("a", 0, 0)}, {"std": (1.0, 0.0, 1.0)}, {"mean": (0.0, 0.0)}, {"std": (1.0, float("nan"), 1.0)}],
    ids=str,
)
def test_mean_and_std_are_checked(norm: dict) -> None:
    """They may come from a file's header, and would spoil the first image without a word."""
    with pytest.raises(ValueError, match="mean and std"):
        Preprocessing((8, 8), **norm)


def test_preprocessing_survives_json() -> None:
    preprocessing = Preprocessing(size=(480, 640), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    assert Preprocessing.from_dict(json.loads(json.dumps(preprocessing.to_dict()))) == preprocessing


def test_targets_are_padded_to_the_longest() -> None:
    boxes = [torch.full((2, 4), 0.5), torch.zeros(0, 4), torch.full((1, 4), 0.25)]
    labels = [torch.tensor([4, 1]), torch.zeros(0, dtype=torch.int64), torch.tensor([2])]
    targets = Targets.from_lists(boxes, labels)
    assert len(targets) == 3
    assert targets.boxes.shape == (3, 2, 4)
    assert targets.labels.tolist() == [[4, 1], [0, 0], [2, 0]]
    assert targets.valid.tolist() == [[True, True], [False, False], [True, False]]
    assert targets.boxes[..., 0].tolist() == [[0.5, 0.5], [0.0, 0.0], [0.25, 0.0]]


def test_targets_without_objects_or_images() -> None:
    empty = Targets.from_lists([torch.zeros(0, 4)] * 2, [torch.zeros(0, dtype=torch.int64)] * 2)
    assert empty.boxes.shape == (2, 0, 4)
    assert empty.to("cpu").valid.shape == (2, 0)
    assert len(Targets.from_lists([], [])) == 0


@pytest.mark.gpu
def test_targets_in_page_locked_memory() -> None:
    targets = Targets.from_lists([torch.rand(2, 4), torch.rand(1, 4)], [torch.tensor([4, 1]), torch.tensor([2])])
    pinned = targets.pin_memory()
    for name in ("boxes", "labels", "valid"):
        assert getattr(pinned, name).is_pinned()
        assert torch.equal(getattr(pinned, name), getattr(targets, name))


def test_targets_need_a_label_for_each_box() -> None:
    with pytest.raises((RuntimeError, ValueError)):
        Targets.from_lists([torch.zeros(3, 4)], [torch.zeros(2, dtype=torch.int64)])


def test_preprocessing_is_checked() -> None:
    with pytest.raises(ValueError, match="'bilinear' or 'bicubic', got 'nearest'"):
        Preprocessing(size=(4, 6), interpolation="nearest")
    for crop in (0.0, 1.5):
        with pytest.raises(ValueError, match=rf"in \(0, 1\], got {crop}"):
            Preprocessing(size=(4, 6), crop=crop)


def test_preprocessing_of_a_classifier_survives_json() -> None:
    classifier = Preprocessing(size=(224, 224), interpolation="bicubic", crop=0.875)
    assert Preprocessing.from_dict(json.loads(json.dumps(classifier.to_dict()))) == classifier
    old = {"size": [4, 6], "mean": [0, 0, 0], "std": [1, 1, 1]}  # as written before there was a choice
    assert Preprocessing.from_dict(old) == Preprocessing(size=(4, 6))


def test_image_targets() -> None:
    targets = ImageTargets.from_labels(torch.tensor([2, 0]), 3)
    assert targets.probabilities.tolist() == [[0, 0, 1], [1, 0, 0]]
    assert targets.probabilities.dtype == torch.float32
    assert len(targets) == 2
    assert targets.to("cpu").teacher is None
    taught = ImageTargets(targets.probabilities, torch.tensor([1, 1])).to("cpu")
    assert taught.teacher is not None
    assert taught.teacher.tolist() == [1, 1]
