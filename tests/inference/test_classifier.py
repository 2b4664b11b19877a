"""The predictor with a classifier whose answer is known: its logits are the mean colours of the image."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from vitdet.data.images import decode_image
from vitdet.data.transforms import to_input
from vitdet.errors import UserError
from vitdet.inference.predictor import Predictor
from vitdet.results import Classification
from vitdet.structures import ClassMap, Preprocessing

NAMES = ("red", "green", "blue", "none", "never", "at all", "no")


class MeanColour(nn.Module):
    """Seven classes, of which the first three are the colours; attends to the middle patch of 2 x 2 of the input."""

    prefix_tokens = 2

    def __init__(self, *, crop: float | None = None) -> None:
        super().__init__()
        class_map = ClassMap(ids=tuple(range(7)), names=NAMES)
        preprocessing = Preprocessing(size=(8, 8), mean=(0.5,) * 3, std=(0.5,) * 3, crop=crop)
        self.metadata = SimpleNamespace(class_map=class_map, preprocessing=preprocessing)
        self.scale = 4.0

    def forward(self, images: Tensor) -> Tensor:
        assert not self.training
        logits = torch.full((len(images), 7), -self.scale)
        logits[:, :3] = self.scale * images.mean((2, 3))
        return logits

    def grid(self, images: Tensor) -> tuple[int, int]:
        return images.shape[2] // 2, images.shape[3] // 2

    def attention_weights(self, images: Tensor) -> list[Tensor]:
        assert torch.is_inference_mode_enabled()
        h, w = self.grid(images)
        weights = torch.zeros(len(images), 1, 2 + h * w, 2 + h * w)
        weights[..., 2 + (h // 2) * w + w // 2] = 1
        return [weights] * 2


def colour(red: int, green: int, blue: int, size: tuple[int, int] = (20, 30)) -> np.ndarray:
    return np.full((*size, 3), (red, green, blue), dtype=np.uint8)


def test_classes_best_first() -> None:
    [found] = Predictor(MeanColour(), device="cpu")(colour(255, 51, 204))
    assert isinstance(found, Classification)
    expected = torch.tensor([4.0, -2.4, 2.4, -4, -4, -4, -4]).softmax(0)
    assert found.names == ["red", "blue", "green", "none", "never"]  # equal ones by label
    assert found.labels.tolist() == [0, 2, 1, 3, 4]
    torch.testing.assert_close(found.scores, expected[[0, 2, 1, 3, 4]])
    assert found.scores.dtype == torch.float32
    assert found.image_size == (20, 30)
    assert found.attention is None
    assert found.path is None


@pytest.mark.parametrize(("top", "count"), [(1, 1), (3, 3), (100, 7)])
def test_at_most_top_classes_whatever_the_threshold(top: int, count: int) -> None:
    predictor = Predictor(MeanColour(), device="cpu", top=top, threshold=1.0)
    assert len(predictor(colour(255, 0, 0))[0]) == count
    assert len(predictor(colour(255, 0, 0), 0.999)[0]) == count


def test_batched_as_one_by_one() -> None:
    images = [colour(10 * index, 200 - 10 * index, 90, (20 + index, 30)) for index in range(7)]
    predictor = Predictor(MeanColour(), device="cpu", batch_size=3, attention=True)
    results = predictor(images)
    assert [result.image_size[0] for result in results] == [20 + index for index in range(7)]
    for image, result in zip(images, results, strict=True):
        [alone] = predictor(image)
        assert result.to_dict() == alone.to_dict()
        assert np.array_equal(result.attention, alone.attention)
        assert np.array_equal(result.image, image)


def test_strong_half_precision_logits_keep_their_order() -> None:
    """In bfloat16 the softmax of these rounds to 1 and 0 twice; float32 and ranking the logits do not."""

    class Half(MeanColour):
        def forward(self, images: Tensor) -> Tensor:
            return torch.tensor([[300.0, 310, 302, 0, 0, 0, 0]]).bfloat16().expand(len(images), -1)

    [found] = Predictor(Half(), device="cpu", top=3)(colour(1, 2, 3))
    assert found.names == ["green", "blue", "red"]
    assert found.scores.dtype == torch.float32
    assert found.scores[1].item() == pytest.approx(np.exp(-8) / (1 + np.exp(-8) + np.exp(-10)), rel=1e-4)


def test_pixels_are_those_of_the_models_own_geometry(shared_data: Path) -> None:
    path = min((shared_data / "detection" / "coco_mini" / "val" / "images").iterdir())
    for crop in (None, 0.875):
        model = MeanColour(crop=crop)
        seen: list[Tensor] = []
        model.register_forward_pre_hook(lambda _, arguments, seen=seen: seen.append(arguments[0]))
        Predictor(model, device="cpu")(path)
        pixels = to_input(decode_image(path), model.metadata.preprocessing)
        expected = (torch.from_numpy(pixels).permute(2, 0, 1) / 255 - 0.5) / 0.5
        torch.testing.assert_close(seen[0][0], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("attention", [True, "rollout", "last"])
def test_attention_lies_over_the_image(attention: bool | str) -> None:
    [found] = Predictor(MeanColour(), device="cpu", attention=attention)(colour(1, 2, 3, (40, 80)))
    assert found.attention is not None
    assert found.attention.shape == (40, 80)
    assert found.attention.dtype == np.float32
    assert np.unravel_index(found.attention.argmax(), (40, 80)) == pytest.approx(
        (25, 50), abs=5
    )  # patch (2, 2) of 4 x 4
    assert found.attention[0, 0] == 0


def test_attention_with_a_centre_crop() -> None:
    [found] = Predictor(MeanColour(crop=1.0), device="cpu", attention="last")(colour(1, 2, 3, (40, 80)))
    rows, columns = found.attention.nonzero()
    assert columns.min() >= 20
    assert columns.max() < 60  # the middle square
    assert (rows.mean(), columns.mean()) == pytest.approx((24.5, 44.5), abs=0.6)


def test_what_a_classifier_cannot_do_is_named() -> None:
    class Plain(nn.Linear):
        metadata = MeanColour().metadata

    with pytest.raises(UserError, match="Plain has no attention over the whole image to show"):
        Predictor(Plain(1, 1), device="cpu", attention=True)
    with pytest.raises(UserError, match="attention is 'first'; choose 'rollout' or 'last'"):
        Predictor(MeanColour(), device="cpu", attention="first")
    with pytest.raises(UserError, match="top is 0; it must be at least 1"):
        Predictor(MeanColour(), device="cpu", top=0)


def test_a_foreign_class_map_is_named() -> None:
    model = MeanColour()
    model.metadata.class_map = ClassMap(ids=(1,), names=("thing",))
    with pytest.raises(UserError, match="the model has 7 classes but its class map 1; load the map"):
        Predictor(model, device="cpu")(colour(1, 2, 3))


def test_scores_that_are_not_finite_are_named(tmp_path: Path) -> None:
    model = MeanColour()
    model.scale = float("nan")
    Image.fromarray(colour(1, 2, 3)).save(tmp_path / "a.png")
    with pytest.raises(UserError, match=r"scores for .*a\.png are not finite; look for diverged weights"):
        Predictor(model, device="cpu")(tmp_path / "a.png")


def test_features_are_no_classes() -> None:
    model = MeanColour()
    model.metadata.class_map = ClassMap(ids=(), names=())
    with pytest.raises(UserError, match="gives features and knows no classes; train a head on it first"):
        Predictor(model, device="cpu")(colour(1, 2, 3))
