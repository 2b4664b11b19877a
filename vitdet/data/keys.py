"""What a sampler asks of a data set, and where a sample's randomness comes from."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class SampleKey(NamedTuple):
    """One wanted sample. It carries the epoch because persistent workers never see the loader's own.

    Attributes:
        index: position in the data set.
        epoch: the epoch, part of the sample's randomness.
        size: (height, width) of the wanted image.
        strong: whether the strong augmentations are on.
        copy: tells apart the samples of one image within an epoch (repeated augmentation).
        mix: whether, where strong, a sample may be made of several images.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index, which no key needs
    epoch: int
    size: tuple[int, int]
    strong: bool
    copy: int = 0
    mix: bool = True

    def generator(self, seed: int) -> np.random.Generator:
        """The sample's only source of randomness, from (seed, epoch, index) and the number of the copy."""
        entropy = [seed, self.epoch, self.index]
        return np.random.default_rng([*entropy, self.copy] if self.copy else entropy)
