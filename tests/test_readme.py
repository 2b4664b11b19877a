"""What the README tells people to type exists."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from pathlib import Path

import pytest
import typer

from vitdet.cli import app
from vitdet.config import apply_override, find_config, load_config
from vitdet.zoo import list_models

ROOT = Path(__file__).resolve().parents[1]
SHELL = ("bash", "sh", "shell", "console", "text", "")
STARTS = ("vitdet ", "make ", "torchrun ", "python tools/")


def blocks(text: str) -> list[tuple[str, str]]:
    """(language, content) of the fenced blocks."""
    return re.findall(r"^```(\w*)[^\n]*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[str]:
    """The commands in shell blocks: continued lines joined, prompts and trailing comments removed."""
    found = []
    for language, content in blocks(text):
        if language in SHELL:
            for line in re.sub(r"\s*\\\n\s*", " ", content).splitlines():
                line = re.sub(r"\s+#.*", "", line.strip().removeprefix("$ "))
                found += [part.strip() for part in line.split("&&") if part.strip().startswith(STARTS)]
    return found


def readme() -> str:
    path = ROOT / "README.md"
    assert path.is_file(), "there is no README.md"
    return path.read_text()


def words_of(command: str) -> list[str]:
    """A ``vitdet`` command's words after the name; of ``torchrun`` and ``python tools/``, the tool's command."""
    words = shlex.split(command)
    if words[0] == "vitdet":
        return words[1:]
    position = next((i for i, word in enumerate(words) if word.startswith("tools/")), None)
    if position is None:
        assert words[words.index("-m") + 1] == "vitdet", f"{command}: starts neither a tool nor the package"
        return words[words.index("-m") + 2 :]
    assert (ROOT / words[position]).is_file(), f"{command}: there is no {words[position]}"
    name = Path(words[position]).stem
    return [name, *words[position + 1 :]] if name in {"train", "eval", "predict", "benchmark"} else []


def check_command(command: str) -> None:
    """Options and arguments parse; configurations and their overrides are real."""
    words = words_of(command)
    if not words or "--help" in words:
        return
    group = typer.main.get_command(app)
    context = group.make_context("vitdet", list(words), resilient_parsing=False)
    name, rest = words[0], words[1:]
    assert name in group.commands, f"{command}: there is no command {name!r}"
    child = group.commands[name]
    while hasattr(child, "commands"):
        assert rest, command
        assert rest[0] in child.commands, f"{command}: there is no command {rest[0]!r}"
        child, rest = child.commands[rest[0]], rest[1:]
    values = child.make_context(name, list(rest), parent=context).params
    if values.get("config") is not None:
        check_configuration(command, values["config"], values["overrides"] or [])


def check_configuration(command: str, config: str, overrides: list[str]) -> None:
    """A shipped configuration with overrides that it takes; one that a person is to write themselves only parses."""
    for override in overrides:
        apply_override({}, override)
    if not config.startswith(("my", "path/")):
        assert find_config(config).is_file(), command
        load_config(config, overrides)


def test_there_are_commands_and_python() -> None:
    """Else nothing below would check anything."""
    text = readme()
    found = commands(text)
    assert any(command.startswith("vitdet train") for command in found)
    assert any(command.startswith("vitdet predict") for command in found)
    assert any(command.startswith("make ") for command in found)
    assert any(language == "python" for language, _ in blocks(text))


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for command in commands(readme()):
        if command.startswith("make "):
            asked = {word for word in shlex.split(command)[1:] if "=" not in word and not word.startswith("-")}
            assert asked <= targets, f"{command}: the Makefile has {sorted(targets)}"


def test_commands_parse() -> None:
    for command in commands(readme()):
        if not command.startswith("make "):
            check_command(command)


def test_python_compiles_and_its_names_exist() -> None:
    """Imports from the package resolve, ``vitdet.NAME`` is public, and named models are in the zoo."""
    import vitdet

    for language, content in blocks(readme()):
        if language != "python":
            continue
        tree = ast.parse(content)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vitdet":
                module = importlib.import_module(node.module or "")
                for alias in node.names:
                    assert hasattr(module, alias.name), f"{node.module} has no {alias.name}"
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "vitdet":
                assert node.attr in vitdet.__all__, f"vitdet.{node.attr} is not public"
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("create_model"):
                assert ast.literal_eval(node.args[0]) in list_models(), ast.unparse(node)


def test_named_files_exist() -> None:
    """Links to files of the repository, and configurations wherever they are named."""
    text = readme()
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if not re.match(r"[a-z]+:", target):
            assert (ROOT / target).exists(), f"a link leads to {target}, which does not exist"
    for name in re.findall(r"configs/[\w.-]+\.yaml", text):
        assert (ROOT / name).is_file(), name


@pytest.mark.parametrize(
    "command",
    [
        "vitdet trian configs/rtdetr_nano_bccd.yaml",
        "vitdet train nowhere.yaml",
        "vitdet train rtdetr_nano_bccd train.epoch=3",
        "vitdet eval best.safetensors",
        "vitdet eval best.safetensors --data x --nope",
        "vitdet data mke digits x",
        "torchrun --nproc-per-node 2 tools/trian.py x.yaml",
        "python tools/eval.py best.safetensors --dta x",
        "vitdet train vit_small_patch14_dinov2_probe train.freeze=head augment.mosaic=1",
        "vitdet predict best.safetensors a.jpg --out x --atention",
        "vitdet benchmark tim --data x",
        "vitdet benchmark timm --data x --config nowhere.yaml",
        "python tools/benchmark.py timm",
    ],
)
def test_a_wrong_command_is_seen(command: str) -> None:
    """The check itself."""
    with pytest.raises((AssertionError, ValueError, typer.TyperException)):
        check_command(command)


def test_commands_are_found() -> None:
    text = "```bash\n$ vitdet eval a \\\n    --data b  # why\ncd x && make demo\n```\n\n```python\nvitdet = 1\n```\n"
    assert commands(text) == ["vitdet eval a --data b", "make demo"]
    check_command("torchrun --nproc-per-node 8 tools/train.py configs/rtdetr_nano_bccd.yaml train.epochs=3")
    check_command("vitdet data make digits out --train 10")
    check_command("vitdet benchmark timm --data imagenette96 --minutes 30")
    check_command("vitdet eval best.safetensors --data x --confusion y.png")
