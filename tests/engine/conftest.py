"""A tiny data set and toy parts for the trainer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.tiny import write_set


@pytest.fixture(scope="session")
def tiny_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six images of red and blue rectangles; not to be written to."""
    return write_set(tmp_path_factory.mktemp("tiny"))
