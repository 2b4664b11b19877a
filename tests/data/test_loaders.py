"""Order, sizes and resuming of batches; what a batch holds; workers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

from vitdet.data.detection import DetectionDataset
from vitdet.data.loaders import EpochBatchSampler, collate, collate_images, make_loader
from vitdet.data.records import DetectionSet
from vitdet.data.transforms import EvalTransform, TrainTransform
from vitdet.errors import UserError

MakeSet = Callable[..., DetectionSet]
SIZES = [(32, 32), (32, 64), (64, 64)]


def sampler(**options: Any) -> EpochBatchSampler:
    return EpochBatchSampler(**{"length": 23, "batch_size": 4, "seed": 3, "sizes": [(32, 32)], **options})


def indices(batches: EpochBatchSampler) -> list[list[int]]:
    return [[key.index for key in batch] for batch in batches]


def joined(parts: Iterable[Iterable[Any]]) -> list[Any]:
    return list(chain.from_iterable(parts))


def test_an_epoch_is_a_permutation() -> None:
    batches = sampler()
    first = indices(batches)
    assert len(first) == len(batches) == 5
    assert all(len(batch) == 4 for batch in first)
    assert len({index for batch in first for index in batch}) == 20
    assert indices(batches) == first == indices(sampler())
    batches.set_epoch(1)
    assert indices(batches) != first
    assert indices(sampler(seed=4)) != first
    assert indices(sampler(epoch=1)) == indices(batches)


def test_evaluation_takes_everything_in_order() -> None:
    batches = sampler(shuffle=False, drop_last=False)
    assert joined(indices(batches)) == list(range(23))
    assert len(batches) == 6


def test_keys_carry_epoch_size_and_policy() -> None:
    batches = sampler(sizes=SIZES, strong_until=2)
    seen = set()
    for epoch in range(4):
        batches.set_epoch(epoch)
        for batch in batches:
            assert len({key.size for key in batch}) == 1
            assert {(key.epoch, key.strong) for key in batch} == {(epoch, epoch < 2)}
            seen.add(batch[0].size)
    assert seen == set(SIZES)
    assert all(key.strong for batch in sampler(epoch=99) for key in batch)


def test_the_last_epochs_have_one_size_where_given() -> None:
    batches = sampler(sizes=SIZES, strong_until=2, final_size=(96, 96))
    sizes = {}
    for epoch in (1, 2):
        batches.set_epoch(epoch)
        sizes[epoch] = {key.size for batch in batches for key in batch}
    assert (96, 96) not in sizes[1]
    assert sizes[2] == {(96, 96)}


def test_strong_augmentation_may_begin_later() -> None:
    """And sizes are drawn from the first epoch on, as DEIM does."""
    sizes = [(32, 32), (64, 64)]
    sampler = EpochBatchSampler(
        length=64, batch_size=2, seed=0, sizes=sizes, strong_from=2, strong_until=4, final_size=(96, 96)
    )
    keys = []
    for epoch in range(5):
        sampler.set_epoch(epoch)
        keys.append([key for batch in sampler for key in batch])
    assert [{key.strong for key in epoch} for epoch in keys] == [{False}, {False}, {True}, {True}, {False}]
    assert [{key.size for key in epoch} for epoch in keys] == [{*sizes}] * 4 + [{(96, 96)}]


def test_images_are_mixed_in_some_epochs() -> None:
    batches = sampler(mix=(1, 3))
    found = []
    for epoch in range(4):
        batches.set_epoch(epoch)
        found.append({key.mix for batch in batches for key in batch})
    assert found == [{False}, {True}, {True}, {False}]
    assert all(key.mix for batch in sampler(epoch=99) for key in batch)


def test_resuming_continues_with_the_next_batch() -> None:
    whole = list(sampler(sizes=SIZES, epoch=2))
    resumed = sampler(sizes=SIZES)
    resumed.set_epoch(2)
    resumed.set_start(3)
    assert list(resumed) == whole[3:]
    assert (len(resumed), resumed.batches_per_epoch) == (2, 5)
    assert list(sampler(sizes=SIZES, epoch=2, start_batch=3)) == whole[3:]
    resumed.set_epoch(3)
    assert list(resumed) == list(sampler(sizes=SIZES, epoch=3))


def test_ranks_share_an_epoch() -> None:
    """Together the ranks take what one process with the whole batch takes, and always the same size."""
    ranks = [list(sampler(sizes=SIZES, batch_size=2, rank=rank, world_size=3)) for rank in range(3)]
    alone = list(sampler(sizes=SIZES, batch_size=6))
    assert [len(batches) for batches in ranks] == [3, 3, 3]
    for parts, whole in zip(zip(*ranks, strict=True), alone, strict=True):
        assert sorted(joined(parts)) == sorted(whole)
        assert len({key.size for part in parts for key in part}) == 1
        assert [len(part) for part in parts] == [2, 2, 2]


def test_ranks_evaluate_each_sample_once() -> None:
    parts = [sampler(shuffle=False, drop_last=False, rank=rank, world_size=5) for rank in range(5)]
    assert sorted(joined(joined(indices(part)) for part in parts)) == list(range(23))
    assert all(len(part) == len(list(part)) for part in parts)


def test_a_small_data_set_still_gives_a_batch() -> None:
    assert sorted(indices(sampler(length=5, batch_size=8))[0]) == [0, 1, 2, 3, 4]
    ranks = [indices(sampler(length=5, batch_size=8, rank=rank, world_size=2)) for rank in range(2)]
    assert [[len(batch) for batch in batches] for batches in ranks] == [[3], [3]]  # equal, so one sample comes twice
    assert {index for batches in ranks for index in batches[0]} == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, "length and batch_size must be at least 1, got 0 and 4"),
        ({"sizes": []}, "sizes must hold"),
        ({"rank": 2, "world_size": 2}, "rank must be in 0…1, got 2"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        sampler(**options)


def test_collate() -> None:
    images = [np.random.default_rng(seed).integers(0, 256, (20, 40, 3), dtype=np.uint8) for seed in range(2)]
    targets = [
        {
            "boxes": np.array([[4, 5, 12, 15]], np.float32),
            "labels": np.array([2]),
            "image_id": 9,
            "orig_size": (30, 50),
        },
        {"boxes": np.zeros((0, 4), np.float32), "labels": np.zeros(0, np.int64), "image_id": 8, "orig_size": (60, 70)},
    ]
    batch = collate(list(zip(images, targets, strict=True)))
    assert batch["images"].dtype == torch.uint8
    assert batch["images"].is_contiguous()
    assert np.array_equal(batch["images"].numpy(), np.stack(images).transpose(0, 3, 1, 2))
    assert batch["targets"].boxes[0, 0].tolist() == pytest.approx([0.2, 0.5, 0.2, 0.5])
    assert batch["targets"].valid.tolist() == [[True], [False]]
    assert batch["targets"].labels.tolist() == [[2], [0]]
    assert batch["image_ids"] == [9, 8]
    assert batch["orig_sizes"].tolist() == [[30, 50], [60, 70]]
    assert batch["orig_sizes"].dtype == torch.int64
    with pytest.raises(ValueError, match=r"one size, got \(20, 40\) and \(40, 20\)"):
        collate([(images[0], targets[0]), (images[1].transpose(1, 0, 2), targets[1])])


def test_collate_without_any_object() -> None:
    target = {
        "boxes": np.zeros((0, 4), np.float32),
        "labels": np.zeros(0, np.int64),
        "image_id": 1,
        "orig_size": (1, 1),
    }
    assert collate([(np.zeros((8, 8, 3), np.uint8), target)] * 2)["targets"].boxes.shape == (2, 0, 4)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_workers_change_nothing(make_set: MakeSet) -> None:
    """Two epochs through persistent workers, the second begun in its middle, are the epochs without workers."""
    transform = TrainTransform(photometric=1.0, zoom_out=0.5, iou_crop=0.8, hflip=0.5)
    loaders = []
    for workers in (0, 2):
        dataset = DetectionDataset(make_set(), transform=transform, mosaic=0.5, mixup=0.5, cache=workers > 0)
        batches = EpochBatchSampler(length=6, batch_size=2, seed=0, sizes=SIZES)
        loaders.append(make_loader(dataset, batch_sampler=batches, workers=workers))
    for epoch, start in ((0, 0), (1, 1)):
        results = []
        for loader in loaders:
            loader.batch_sampler.set_epoch(epoch)
            loader.batch_sampler.set_start(start)
            assert len(loader) == 3 - start
            results.append(list(loader))
        assert len(results[0]) == len(results[1]) == 3 - start
        for alone, worked in zip(*results, strict=True):
            assert torch.equal(alone["images"], worked["images"])
            assert torch.equal(alone["targets"].boxes, worked["targets"].boxes)
            assert alone["image_ids"] == worked["image_ids"]


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_user_error_stays_one_sentence(make_set: MakeSet, workers: int) -> None:
    data = make_set()
    data.records[3].path.write_bytes(b"no image")
    dataset = DetectionDataset(data, transform=EvalTransform())
    batches = EpochBatchSampler(length=6, batch_size=2, seed=0, sizes=[(32, 32)], shuffle=False)
    sentence = f"{data.records[3].path} is not an image in a known format: replace or remove it"
    with pytest.raises(UserError, match=f"^{re.escape(sentence)}$"):
        list(make_loader(dataset, batch_sampler=batches, workers=workers))


def test_repeated_augmentation() -> None:
    """The epoch keeps its length and shows a third of the images, each three times, in copies 0, 1, 2."""
    batches = sampler(length=24, batch_size=6, repeats=3)
    keys = joined(batches)
    assert len(batches) == 4
    assert len(keys) == len(set(keys)) == 24
    copies = {index: sorted(key.copy for key in keys if key.index == index) for index in {key.index for key in keys}}
    assert len(copies) == 8
    assert set(map(tuple, copies.values())) == {(0, 1, 2)}
    assert all(len({key.index for key in batch}) == 2 for batch in batches)
    batches.set_epoch(1)
    assert {key.index for key in batches.__iter__().__next__()} != {key.index for key in keys[:6]}
    assert {key.copy for key in joined(sampler())} == {0}
    whole = list(sampler(length=24, batch_size=6, repeats=3))
    assert list(sampler(length=24, batch_size=6, repeats=3, start_batch=2)) == whole[2:]


def test_repeated_copies_are_dealt_to_the_ranks() -> None:
    """Each rank sees another copy of the same images."""
    ranks = [list(sampler(length=24, batch_size=4, repeats=2, rank=rank, world_size=2)) for rank in range(2)]
    for first, second in zip(*ranks, strict=True):
        assert [key.index for key in first] == [key.index for key in second]
        assert {key.copy for key in first} == {0}
        assert {key.copy for key in second} == {1}


def test_repeats_of_few_images() -> None:
    """Fewer images than a batch, on two ranks: the samples that fill up are whole keys too."""
    ranks = [joined(sampler(length=5, batch_size=8, repeats=2, rank=rank, world_size=2)) for rank in range(2)]
    assert [len(keys) for keys in ranks] == [3, 3]
    assert len({(key.index, key.copy) for key in joined(ranks)}) == 5


@pytest.mark.parametrize("options", [{"repeats": 0}, {"repeats": 2, "shuffle": False}])
def test_wrong_repeats(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="repeats must be at least 1, and 1 without shuffle"):
        sampler(**options)


@pytest.mark.parametrize("size", [(20, 40), (1, 1), (1, 9), (7, 1)])
def test_collate_images(size: tuple[int, int]) -> None:
    images = [np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8) for seed in range(3)]
    samples = [(image, {"label": label, "index": 10 + label}) for image, label in zip(images, (2, 0, 1), strict=True)]
    batch = collate_images(samples, num_classes=4)
    assert np.array_equal(batch["images"].numpy(), np.stack(images).transpose(0, 3, 1, 2))
    assert batch["images"].is_contiguous()
    assert batch["labels"].tolist() == [2, 0, 1]
    assert batch["labels"].dtype == torch.int64
    assert batch["targets"].probabilities.tolist() == [[0, 0, 1, 0], [1, 0, 0, 0], [0, 1, 0, 0]]
    assert batch["targets"].teacher is None
    assert batch["indices"] == [12, 10, 11]
