"""The data set of whole images, its cache and its loader: the key and the seed decide, nothing else."""

from __future__ import annotations

import functools
import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vitdet.data import classification
from vitdet.data.augment import ClassificationEvalTransform, ClassificationTransform
from vitdet.data.cache import ImageCache
from vitdet.data.classification import ClassificationDataset
from vitdet.data.formats import read_classification_set
from vitdet.data.images import decode_image
from vitdet.data.keys import SampleKey
from vitdet.data.loaders import EpochBatchSampler, collate_images, make_loader
from vitdet.data.records import ClassificationSet
from vitdet.data.transforms import resize
from vitdet.errors import UserError
from vitdet.structures import Preprocessing

KEY = SampleKey(index=2, epoch=0, size=(16, 16), strong=True)
STRONG = ClassificationTransform(rand_augment_layers=2, three_augment=True, colour_jitter=0.3, erasing=0.5)
EVAL = ClassificationEvalTransform(Preprocessing((16, 16)))


@pytest.fixture
def data(tmp_path: Path, write_image: Callable[..., Path]) -> ClassificationSet:
    """Six pictures of two classes."""
    for seed in range(6):
        write_image(tmp_path / "set" / "train" / f"c{seed % 2}" / f"{seed}.png", (20, 24), seed=seed)
    return read_classification_set(tmp_path / "set", "train")


def test_an_evaluation_sample(data: ClassificationSet) -> None:
    dataset = ClassificationDataset(data, transform=EVAL)
    image, target = dataset[KEY]
    assert len(dataset) == 6
    assert np.array_equal(image, resize(decode_image(data.paths[2]), (16, 16), exact=True))
    assert target == {"label": 0, "index": 2}
    assert dataset[KEY._replace(index=3)][1] == {"label": 1, "index": 3}


def test_the_key_decides(data: ClassificationSet) -> None:
    first, second = (ClassificationDataset(data, transform=STRONG) for _ in range(2))
    keys = [SampleKey(i, epoch, (16, 16), True, copy) for i in range(3) for epoch in range(2) for copy in range(2)]
    expected = [first[key][0] for key in keys]
    assert all(np.array_equal(second[k][0], e) for k, e in zip(reversed(keys), reversed(expected), strict=True))
    assert len({image.tobytes() for image in expected}) == 12  # index, epoch and copy each make a difference
    assert not np.array_equal(ClassificationDataset(data, transform=STRONG, seed=1)[keys[0]][0], expected[0])
    assert not np.array_equal(first[keys[0]._replace(strong=False)][0], expected[0])


def test_the_first_copy_draws_as_without_copies() -> None:
    assert KEY.generator(7).random() == np.random.default_rng([7, 0, 2]).random()
    assert KEY._replace(copy=1).generator(7).random() == np.random.default_rng([7, 0, 2, 1]).random()


def test_the_cache_decodes_once(data: ClassificationSet, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(classification, "decode_image", lambda path: calls.append(path.name) or decode_image(path))
    cached = ClassificationDataset(data, transform=STRONG, cache=True)
    plain = ClassificationDataset(data, transform=STRONG)
    cached.images.fill()
    assert len(calls) == 6
    for epoch in range(2):
        for index in range(6):
            key = KEY._replace(index=index, epoch=epoch)
            assert np.array_equal(cached[key][0], plain[key][0])
    assert len(calls) == 6 + 12
    content = pickle.dumps(cached)
    assert len(content) < 6 * 20 * 24 * 3  # the images stay behind
    assert np.array_equal(pickle.loads(content)[KEY][0], plain[KEY][0])


def test_a_full_cache_stops_decoding() -> None:
    """Filling ends with the first image that has no room: a large data set must not be decoded in vain."""
    calls: list[int] = []
    cache = ImageCache(
        lambda index: calls.append(index) or np.full(100 + index, index % 256, np.uint8), length=1000, limit=350
    )
    cache.fill()
    assert calls == [0, 1, 2, 3]
    assert [cache[index][0] for index in (0, 2, 3, 3, 999)] == [0, 2, 3, 3, 231]
    assert calls == [0, 1, 2, 3, 3, 3, 999]
    cache.share_limit(2)  # filled, so it is shared and stays
    assert cache[1].size == 101
    assert len(calls) == 7
    off = ImageCache(lambda index: calls.append(index) or np.zeros(1, np.uint8), length=5, limit=0)
    off.fill()
    assert len(calls) == 7
    part = ImageCache(lambda index: np.zeros(100, np.uint8), length=5, limit=400)
    part.share_limit(2)
    part.fill()
    assert len(part._images) == 2


def test_images_of_all_kinds_are_rgb(tmp_path: Path) -> None:
    """A gray, a palette, a transparent, a turned and a 16-bit image in one class folder."""
    folder = tmp_path / "train" / "a"
    folder.mkdir(parents=True)
    colour = Image.fromarray(np.random.default_rng(0).integers(0, 256, (10, 20, 3), dtype=np.uint8))
    colour.convert("L").save(folder / "gray.png")
    colour.quantize(16).save(folder / "palette.png")
    clear = colour.convert("RGBA")
    clear.putalpha(0)
    clear.save(folder / "rgba.png")
    exif = Image.Exif()
    exif[0x0112] = 6
    colour.save(folder / "turned.jpg", exif=exif)
    Image.fromarray(np.full((10, 20), 65535, np.uint16)).save(folder / "sixteen.png")
    (tmp_path / "train" / "b").mkdir()
    colour.save(tmp_path / "train" / "b" / "colour.png")
    data = read_classification_set(tmp_path, "train")
    dataset = ClassificationDataset(data, transform=EVAL)
    images = {data.paths[i].stem: dataset[KEY._replace(index=i)][0] for i in range(6)}
    assert all(image.shape == (16, 16, 3) and image.dtype == np.uint8 for image in images.values())
    assert np.ptp(images["gray"], axis=2).max() == 0
    assert (images["rgba"] == 255).all()
    assert (images["sixteen"] == 255).all()
    assert decode_image(folder / "turned.jpg").shape == (20, 10, 3)
    assert np.ptp(images["palette"], axis=2).max() > 0


def make(data: ClassificationSet, *, workers: int, cache: bool = False, repeats: int = 1) -> Any:
    dataset = ClassificationDataset(data, transform=STRONG, cache=cache)
    batches = EpochBatchSampler(length=6, batch_size=2, seed=0, sizes=[(16, 16), (24, 32)], repeats=repeats)
    collate = functools.partial(collate_images, num_classes=2)
    return make_loader(dataset, batch_sampler=batches, workers=workers, collate=collate)


def assert_equal(first: list[dict[str, Any]], second: list[dict[str, Any]]) -> None:
    assert len(first) == len(second) > 0
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one["images"], other["images"])
        assert torch.equal(one["labels"], other["labels"])
        assert torch.equal(one["targets"].probabilities, other["targets"].probabilities)
        assert one["indices"] == other["indices"]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_workers_change_nothing(data: ClassificationSet) -> None:
    """Two epochs through persistent workers, the second begun in its middle, are the epochs without workers."""
    alone, worked = make(data, workers=0, repeats=2), make(data, workers=2, cache=True, repeats=2)
    for epoch, start in ((0, 0), (1, 1)):
        for loader in (alone, worked):
            loader.batch_sampler.set_epoch(epoch)
            loader.batch_sampler.set_start(start)
        assert_equal(list(alone), list(worked))


def test_a_spawned_worker_gives_the_same(data: ClassificationSet, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = make(data, workers=1, cache=True)
    loader.loader.multiprocessing_context = multiprocessing.get_context("spawn")
    assert_equal(list(make(data, workers=0)), list(loader))


def test_a_broken_image_is_named(data: ClassificationSet) -> None:
    data.paths[3].write_bytes(b"no image")
    with pytest.raises(UserError, match=rf"{data.paths[3].name} is not an image in a known format"):
        list(make(data, workers=0))
