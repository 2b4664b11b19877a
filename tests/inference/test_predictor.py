"""The predictor with a model whose answer is known: it finds the one bright rectangle of an image."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

import vitdet
from vitdet.data.images import decode_image
from vitdet.data.transforms import EvalTransform
from vitdet.errors import UserError
from vitdet.inference.predictor import Predictor
from vitdet.structures import ClassMap, DetectorOutput, Preprocessing

SIZE = (64, 96)


class BrightRectangle(nn.Module):
    """Query 0 is the rectangle of bright pixels, class 1, scored by its mean red; query 1 reaches beyond the image."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.batches: list[int] = []
        class_map = ClassMap(ids=(4, 8), names=("dark", "bright"))
        self.metadata = SimpleNamespace(class_map=class_map, preprocessing=Preprocessing(size=SIZE))

    def forward(self, images: Tensor) -> DetectorOutput:
        assert not self.training
        assert torch.is_inference_mode_enabled()
        assert images.dtype == torch.float32
        assert images.shape[1:] == (3, *SIZE)
        self.batches.append(len(images))
        logits = torch.full((len(images), 2, 2), -10.0)
        boxes = torch.full((len(images), 2, 4), 0.5)
        for index, image in enumerate(images):
            bright = image[1] > 0.5
            rows, columns = bright.any(1).nonzero().flatten(), bright.any(0).nonzero().flatten()
            y0, y1, x0, x1 = (
                rows[0] / SIZE[0],
                (rows[-1] + 1) / SIZE[0],
                columns[0] / SIZE[1],
                (columns[-1] + 1) / SIZE[1],
            )
            boxes[index, 0] = torch.stack([(x0 + x1) / 2, (y0 + y1) / 2, x1 - x0, y1 - y0])
            logits[index, 0, 1] = torch.logit(image[0, rows[0] : rows[-1], columns[0] : columns[-1]].mean())
            boxes[index, 1, 2:] = 1.2
            logits[index, 1, 0] = torch.logit(torch.tensor(0.3))
        return DetectorOutput(logits, boxes)


def scene(height: int, width: int, score: int = 204) -> np.ndarray:
    """A rectangle over the middle half of a black image; its red is the score, of 255."""
    image = np.zeros((height, width, 3), dtype=np.uint8)
    image[height // 4 : 3 * height // 4, width // 4 : 3 * width // 4] = (score, 255, 255)
    return image


@pytest.fixture
def model() -> BrightRectangle:
    return BrightRectangle()


@pytest.fixture
def predictor(model: BrightRectangle) -> Predictor:
    return Predictor(model, device="cpu", batch_size=2)


def test_boxes_are_in_pixels_of_the_original_image(predictor: Predictor) -> None:
    for height, width in ((64, 96), (128, 96), (32, 480)):
        [found] = predictor(scene(height, width))
        assert found.image_size == (height, width)
        assert found.names == ["bright"]
        assert found.labels.tolist() == [1]
        assert found.scores.tolist() == pytest.approx([0.8], abs=0.01)
        expected = torch.tensor([[width / 4, height / 4, 3 * width / 4, 3 * height / 4]])
        pixel = torch.tensor([width / SIZE[1], height / SIZE[0]] * 2)  # of the resized image
        assert ((found.boxes_xyxy - expected).abs() <= 1.01 * pixel).all()


def test_pixels_are_those_that_evaluation_sees(model: BrightRectangle, shared_data: Path) -> None:
    path = min((shared_data / "detection" / "coco_mini" / "val" / "images").iterdir())
    seen: list[Tensor] = []
    model.register_forward_pre_hook(lambda _, arguments: seen.append(arguments[0]))
    Predictor(model, device="cpu")([path, path])
    no_boxes, no_labels = np.zeros((0, 4), dtype=np.float32), np.zeros(0, dtype=np.int64)
    image, _, _ = EvalTransform()(decode_image(path), no_boxes, no_labels, size=SIZE)
    wanted = torch.from_numpy(image).permute(2, 0, 1) / 255
    assert torch.equal(seen[0], torch.stack([wanted, wanted]))


def test_order_is_kept_over_batches(predictor: Predictor, model: BrightRectangle) -> None:
    images = [scene(40 + index, 60, 150 + 10 * index) for index in range(7)]
    results = predictor(images)
    assert [result.image_size[0] for result in results] == [40 + index for index in range(7)]
    scores = [result.scores[0].item() for result in results]
    assert scores == sorted(scores)
    assert model.batches == [2, 2, 2, 1]
    assert scores == [predictor(image)[0].scores[0].item() for image in images]  # batched as one by one


def test_boxes_are_clipped_unless_told_otherwise(model: BrightRectangle) -> None:
    image = scene(100, 200)
    clipped = Predictor(model, device="cpu", threshold=0.2)(image)[0]
    assert clipped.names == ["bright", "dark"]
    assert clipped.boxes_xyxy[1].tolist() == [0, 0, 200, 100]
    unclipped = Predictor(model, device="cpu", threshold=0.2, clip=False)(image)[0]
    assert unclipped.boxes_xyxy[1].tolist() == pytest.approx([-20, -10, 220, 110], abs=1e-4)


def test_threshold_and_top_k(model: BrightRectangle) -> None:
    predictor = Predictor(model, device="cpu")
    image = scene(64, 96)
    assert [len(predictor(image, threshold)[0]) for threshold in (None, 0.9, 0.5, 0.2, 0.0)] == [1, 0, 1, 2, 4]
    assert Predictor(model, device="cpu", top_k=1, threshold=0.0)(image)[0].names == ["bright"]


def test_files_keep_their_path_and_image(predictor: Predictor, model: BrightRectangle, tmp_path: Path) -> None:
    for name in ("b.png", "a.png"):
        Image.fromarray(scene(64, 96)).save(tmp_path / name)
    results = predictor(tmp_path)
    assert [result.path for result in results] == [tmp_path / "a.png", tmp_path / "b.png"]
    assert np.array_equal(results[0].image, scene(64, 96))
    assert predictor(scene(64, 96))[0].path is None
    assert Predictor(model, device="cpu", keep_images=False)(tmp_path / "a.png")[0].image is None


def test_mirrored_by_exif(predictor: Predictor, tmp_path: Path) -> None:
    image = Image.fromarray(scene(60, 90))
    exif = image.getexif()
    exif[0x0112] = 6  # shown turned by 90°
    image.save(tmp_path / "turned.png", exif=exif)
    assert predictor(tmp_path / "turned.png")[0].image_size == (90, 60)


def test_stream_reads_only_as_far_as_needed(predictor: Predictor) -> None:
    given = 0

    def endless() -> Iterator[np.ndarray]:
        nonlocal given
        while True:
            given += 1
            yield scene(32, 48)

    stream = predictor.stream(endless())
    assert len([next(stream) for _ in range(3)]) == 3
    assert given <= 10  # two batches of 2 run, at most two and one image read ahead
    stream.close()


def test_results_before_a_bad_image_are_given(predictor: Predictor, tmp_path: Path) -> None:
    (tmp_path / "bad.jpg").write_text("no image")
    stream = predictor.stream([scene(32, 48)] * 3 + [tmp_path / "bad.jpg"])  # batches of two
    assert len([next(stream), next(stream)]) == 2
    with pytest.raises(UserError, match=r"bad\.jpg is not an image in a known format"):
        next(stream)


def test_a_missing_file_is_named(predictor: Predictor, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none\.jpg does not exist"):
        predictor(tmp_path / "none.jpg")


def test_no_images(predictor: Predictor, model: BrightRectangle) -> None:
    assert predictor([]) == []
    assert model.batches == []


def test_a_source_is_loaded_by_the_zoo(model: BrightRectangle, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | Path] = []
    zoo = SimpleNamespace(load_model=lambda source: asked.append(source) or model)
    monkeypatch.setitem(sys.modules, "vitdet.zoo", zoo)
    monkeypatch.setattr(vitdet, "zoo", zoo, raising=False)
    assert Predictor("rtdetr_r18:coco", device="cpu").model is model
    assert asked == ["rtdetr_r18:coco"]


def test_auto_is_the_accelerator_if_there_is_one(model: BrightRectangle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert Predictor(model).device == torch.device("cpu")


def test_bad_arguments_are_named(model: BrightRectangle) -> None:
    with pytest.raises(UserError, match="the device 'gpu0' cannot be used here; choose 'cpu' or 'auto'"):
        Predictor(model, device="gpu0")
    with pytest.raises(UserError, match=r"threshold is 50; scores are in \[0, 1\]"):
        Predictor(model, threshold=50)
    with pytest.raises(UserError, match="threshold is nan"):
        Predictor(model, device="cpu").stream([], threshold=float("nan"))
    with pytest.raises(UserError, match="batch_size is 0; it must be at least 1"):
        Predictor(model, batch_size=0)
    with pytest.raises(UserError, match=r"the model Linear has no metadata .*; load it with vitdet\.load_model"):
        Predictor(nn.Linear(1, 1))


def test_a_foreign_class_map_is_named(model: BrightRectangle) -> None:
    model.metadata.class_map = ClassMap(ids=(1,), names=("thing",))
    with pytest.raises(UserError, match="the model has 2 classes but its class map 1; load the map"):
        Predictor(model, device="cpu")(scene(32, 48))


class LeftHalf(nn.Module):
    """Answers with a box around the left half of every image, and notes what it is shown."""

    def __init__(self) -> None:
        super().__init__()
        self.metadata = SimpleNamespace(
            class_map=ClassMap((1, 2), ("a", "b")), preprocessing=Preprocessing((40, 40), longest=80)
        )
        self.shown: list[tuple[tuple[int, ...], list | None]] = []

    def forward(self, images: Tensor, sizes: Tensor | None = None) -> DetectorOutput:
        self.shown.append((tuple(images.shape), None if sizes is None else sizes.tolist()))
        logits = torch.tensor([[[0.0, 5.0, 0.0], [0.0, 0.0, 9.0]]]).expand(len(images), -1, -1)
        boxes = torch.tensor([[[0.25, 0.5, 0.5, 1.0]] * 2]).expand(len(images), -1, -1)
        return DetectorOutput(logits, boxes, no_object=True)


def test_from_images_of_several_sizes_to_detections() -> None:
    model = LeftHalf()
    predictor = Predictor(model, device="cpu", batch_size=2)
    images = [np.zeros((100, 150, 3), np.uint8), np.zeros((200, 100, 3), np.uint8), np.zeros((100, 100, 3), np.uint8)]
    found = predictor(images)
    assert model.shown == [((2, 3, 80, 60), [[40, 60], [80, 40]]), ((1, 3, 40, 40), None)]
    for result, image in zip(found, images, strict=True):
        assert result.names == ["b"]  # the second query sees no object
        height, width = image.shape[:2]
        assert result.boxes_xyxy.tolist() == [[0, 0, width / 2, height]]
