"""What is installed: the version, the entry point, what an import costs, what the wheel holds."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import vitdet


def test_version_is_written_once_in_each_place(repository: Path) -> None:
    declared = re.search(r'^version = "([^"]+)"', (repository / "pyproject.toml").read_text(), re.MULTILINE)
    assert declared
    assert vitdet.__version__ == declared[1]


def test_command_is_installed() -> None:
    try:
        distribution = metadata.distribution("vitdet")
    except metadata.PackageNotFoundError:
        pytest.skip("the package is not installed, only found on the path")
    commands = {entry.name: entry.value for entry in distribution.entry_points}
    assert commands["vitdet"] == "vitdet.cli:main"


def test_import_is_light() -> None:
    """``import vitdet`` (and so ``vitdet --help``) doesn't wait for the heavy libraries."""
    code = "import sys, vitdet; assert vitdet.__version__; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    heavy = {"torch", "torchvision", "numpy", "scipy", "matplotlib", "albumentations", "cv2", "supervision"}
    assert "vitdet" in loaded
    assert not heavy & set(loaded)


@pytest.mark.slow
def test_wheel_holds_package_and_configs(repository: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(tmp_path), "."]
    subprocess.run(command, cwd=repository, check=True)
    (wheel,) = tmp_path.glob("vitdet-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    for folder, prefix in ((repository / "vitdet", "vitdet"), (repository / "configs", "vitdet/configs")):
        for path in [*folder.rglob("*.py"), *folder.rglob("*.yaml")]:
            assert f"{prefix}/{path.relative_to(folder).as_posix()}" in names
    assert "vitdet/py.typed" in names  # type checkers believe the hints of a package that has it
    assert not any(name.startswith(("tests/", "tools/", "configs/")) for name in names)
