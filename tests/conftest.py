"""What every test shares: no network, no surprise threads, fixed seeds, and where the real test data lies."""

from __future__ import annotations

import os

# Before anything imports the libraries that read them: no test may wait for, or depend on, a network.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"
os.environ.setdefault("MPLBACKEND", "Agg")

import random
from pathlib import Path

import numpy as np
import pytest
import torch

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers share the cores

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def _fixed_seeds() -> None:
    """The same random numbers in each test, whichever ran before it."""
    random.seed(0)
    np.random.seed(0)  # libraries still draw from the global generator
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of real test data, which is no part of the repository."""
    folder = Path(os.environ.get("VITDET_TEST_DATA") or ROOT.parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"no test data at {folder}; set VITDET_TEST_DATA to a folder that has it")
    return folder
