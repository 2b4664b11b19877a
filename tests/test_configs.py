"""Every shipped run: it loads, its model can be built, and its header says what it yields."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TypeGuard

import pytest
import torch

from vitdet.config import AnyRunConfig, ClassificationRunConfig, RunConfig, load_config
from vitdet.zoo import create_model, is_classifier, list_models, size_argument

CONFIGS = sorted((Path(__file__).resolve().parents[1] / "configs").glob("*"))
CLASSES = {"coco": 80, "voc": 20, "bccd": 3, "digits": 10, "imagenet": 1000, "imagenette": 10}
FIGURE = {"detection": r"\bAP(50)?\b[^\n]*\d", "classification": r"\btop-1\b[^\n]* \d\d(\.\d)?\b|\btop-1\b[^\n]* 0\.\d"}

pytestmark = pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)


def header(path: Path) -> list[str]:
    """The comment lines before the first value."""
    lines = []
    for line in path.read_text().splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("# ").rstrip())
    return lines


def is_detection(config: AnyRunConfig) -> TypeGuard[RunConfig]:
    """Whether the run trains a detector."""
    return isinstance(config, RunConfig)


def test_it_loads_and_its_model_builds(path: Path) -> None:
    config = load_config(path)
    classes = CLASSES.get(path.stem.rpartition("_")[2], 4)
    arguments = {**size_argument(config.model.name, config.data.size), **config.model.overrides}
    with torch.device("meta"):
        model = create_model(config.model.name, num_classes=classes, **arguments)
        assert sum(parameter.numel() for parameter in model.parameters()) > 4e5
        assert is_classifier(config.model.name) == isinstance(config, ClassificationRunConfig)
        if isinstance(config, ClassificationRunConfig):
            assert model.eval()(torch.empty(2, 3, *config.data.size)).shape == (2, classes)
    assert all(side % model.stride == 0 for size in (config.data.size, *config.data.sizes) for side in size)


def test_it_is_named_by_model_and_data(path: Path) -> None:
    config = load_config(path)
    assert path.suffix == ".yaml"
    assert config.model.name in list_models()
    if path.stem != "finetune_detector":  # which is for any model and any data
        way = "(deim_)?" if is_detection(config) else ""  # a way of training models of others
        assert re.fullmatch(rf"{way}{config.model.name}_[a-z0-9]+", path.stem), path.stem
    assert Path(config.output) == Path("runs") / path.stem


def test_its_data_is_named_by_no_machine(path: Path) -> None:
    assert not Path(load_config(path).data.root).is_absolute()


def test_its_header_says_what_it_yields(path: Path) -> None:
    """Command, hardware, time, result or expected metric, source."""
    lines = header(path)
    text = "\n".join(lines)
    assert lines, f"{path.name} begins with no comment"
    assert re.search(rf"(vitdet train|torchrun .*tools/train\.py) .*{path.stem}", text), "the command"
    assert re.search(r"\b(CPUs?|cores?|GPUs?|H\d00|A100|T4)\b", text), "the hardware"
    assert re.search(r"\d\s*(h|hours?|min|minutes?)\b", text), "the time"
    assert re.search(FIGURE[load_config(path).task], text), "the result or expected metric"
    assert re.search(r"arXiv|https://|[Ss]ource", text), "the source"


def test_its_command_is_right(path: Path) -> None:
    """The file's own name and overrides, in the command that the header gives."""
    text = " ".join(header(path))
    command = re.search(r"(?:vitdet train|tools/train\.py) (\S+)((?: [a-z_.]+=\S+)*)", text)
    assert command, "the header names no command"
    assert Path(command[1]).name.removesuffix(".yaml") == path.stem
    load_config(path, command[2].split())


def test_nothing_is_left_to_fill_in(path: Path) -> None:
    text = path.read_text()
    assert not re.search(r"not measured|TODO|GOES HERE", text)
