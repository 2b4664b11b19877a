"""Reading a run's configuration: YAML, ``section.key=value`` overrides, and a sentence with all problems at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from vitdet.config.sections import TASKS, AnyRunConfig, ClassificationRunConfig, RunConfig
from vitdet.errors import UserError, did_you_mean


def check_config(values: dict[str, Any]) -> AnyRunConfig:
    """Plain values to a run's configuration, by their ``task``.

    Raises:
        ValueError: pydantic's, with all problems; or an unknown task.
    """
    return task_config(values).model_validate(values)


def task_config(values: dict[str, Any]) -> type[RunConfig] | type[ClassificationRunConfig]:
    """The class of configuration that ``task`` asks for; detection where it is not given."""
    task = values.get("task", "detection")
    if not isinstance(task, str) or task not in TASKS:
        raise UserError(f"there is no task {task!r}; {did_you_mean(str(task), list(TASKS))}")
    return TASKS[task]


def find_config(path: str | Path) -> Path:
    """The file itself, or the one of this name among the configurations that come with the package."""
    path = Path(path)
    if path.is_file():
        return path
    package = Path(__file__).resolve().parents[1]
    folders = [package / "configs", package.parent / "configs"]
    for folder in folders if path.parent in (Path(), Path("configs")) else []:
        for name in (path.name, f"{path.name}.yaml"):
            if (folder / name).is_file():
                return folder / name
    shipped = sorted({one.name for folder in folders for one in folder.glob("*.yaml")})
    raise UserError(f"there is no configuration {path}; give a YAML file or one of those shipped: {', '.join(shipped)}")


def load_config(path: str | Path, overrides: list[str] | None = None) -> AnyRunConfig:
    """Read a run's YAML, apply ``section.key=value`` overrides and check everything.

    Raises:
        UserError: one sentence that names the file and every wrong key or value.
    """
    path = find_config(path)
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = getattr(error, "problem_mark", None)
        line = f" at line {where.line + 1}" if where else ""
        raise UserError(f"{path} is not valid YAML{line}; mend the file") from error
    if not isinstance(values, dict):
        kind = "nothing" if values is None else type(values).__name__
        raise UserError(f"{path} must hold sections such as 'model:' and 'data:', got {kind}")
    for override in overrides or []:
        apply_override(values, override)
    try:
        return check_config(values)
    except ValidationError as error:
        config = task_config(values)
        raise UserError(f"{path}: {'; '.join(explain(problem, config) for problem in error.errors())}") from error


def apply_override(values: dict[str, Any], override: str) -> None:
    """Set ``a.b=c`` in nested values; ``c`` is read as YAML, so numbers, lists and null have their types."""
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise UserError(f"cannot read the override {override!r}; write section.key=value, such as train.epochs=10")
    *parents, last = key.strip().split(".")
    for parent in parents:
        if values.get(parent) is None:
            values[parent] = {}
        values = values[parent]
        if not isinstance(values, dict):
            raise UserError(f"the override {override!r} goes into {parent!r}, which is no section")
    try:
        values[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UserError(f"the value of the override {override!r} is not valid YAML; quote it") from error


def explain(problem: Any, kind: type[BaseModel]) -> str:
    """One of pydantic's problems as a clause."""
    place = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"unknown key {place!r}{_closest(problem['loc'], kind)}"
    if problem["type"] == "missing":
        return f"{place!r} is missing"
    if problem["type"] == "value_error":
        return f"{place!r} {problem['ctx']['error']}" if place else str(problem["ctx"]["error"])
    message = problem["msg"]
    if problem["type"] == "model_type":
        message = "should be a section of keys"
    return f"{place!r} {message[:1].lower()}{message[1:]}, got {problem['input']!r}".replace("got None", "got nothing")


def _closest(place: tuple[Any, ...], kind: type[BaseModel]) -> str:
    """What an unknown key may have meant, in brackets."""
    section: Any = kind
    for part in place[:-1]:
        section = section.model_fields[part].annotation
    return f" ({did_you_mean(str(place[-1]), section.model_fields)})"
