"""Rules about the repository itself: who may import whom, what may be written where, and one place a concept."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "vitdet"

LEAVES = {"boxes", "structures", "distributed", "errors"}
# Top-level part -> parts it may import. A dotted entry allows that one module only. "*" is everything below the top.
MAY_IMPORT: dict[str, set[str]] = {
    "boxes": {"errors"},
    "structures": {"boxes", "drawing", "errors"},
    "distributed": {"errors"},
    "errors": set(),
    "devices": {"errors"},
    "drawing": {"boxes", "errors"},
    "core": set(),
    "backbones": {"core", "errors"},
    "detectors": {"core", "backbones"} | LEAVES,
    "classifiers": {"core", "backbones"} | LEAVES,
    "losses": LEAVES,
    "data": LEAVES,
    "evaluation": LEAVES,
    "engine": {"structures", "distributed", "errors"},
    "weights": {"errors"},
    "export": {"core", "backbones"} | LEAVES,
    "zoo": {"core", "backbones", "detectors", "classifiers", "weights", "engine.checkpoint"} | LEAVES,
    "inference": {"data", "export", "zoo", "detectors.postprocess", "devices", "drawing"} | LEAVES,
    "config": {"errors"},
    "build": {"*"},
    "cli": {"*"},
    "__main__": {"cli"},
    "__init__": {"*"},
}
TOP = {"cli", "__main__", "__init__"}  # imported by nothing of ours

# Built from pieces, so that this file may be searched too.
FORBIDDEN = [
    re.compile(pattern)
    for pattern in (
        "/" + r"work/(main|shared)",
        "/" + r"tmp/w\b",
        r"(?<![\w.])/" + r"root\b",
        "/" + r"home/[a-z]",
        r"\b(files\.|test\.)?pypi\." + r"(org|python)",
        r"python" + r"hosted\.org",
        r"download\." + r"pytorch\.org",
        r"regis" + r"try\.npmjs",
        r"(extra-)?index" + r"-url",
        r"find" + r"-links",
    )
]


def python_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def module_of(path: Path) -> str:
    """``vitdet/core/blocks.py`` -> ``vitdet.core.blocks``; a package's ``__init__.py`` -> the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def part_of(module: str) -> str:
    """``vitdet.core.blocks`` -> ``core``; the package itself is ``__init__``."""
    pieces = module.split(".")
    return pieces[1] if len(pieces) > 1 else "__init__"


MODULES = {module_of(path): path for path in python_files(PACKAGE)}


def our_module(name: str) -> str | None:
    """The module of ours that importing ``name`` runs: ``vitdet.core.blocks.EncoderBlock`` -> ``vitdet.core.blocks``.

    None where it is another package's.
    """
    pieces = name.split(".")
    while pieces and ".".join(pieces) not in MODULES:
        pieces.pop()
    return ".".join(pieces) or None


def imports_of(path: Path, source: str | None = None) -> Iterator[tuple[str, int]]:
    """(module of ours, line) for each import in a file, wherever in the file it stands."""
    package = module_of(path) if path.name == "__init__.py" else module_of(path).rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text() if source is None else source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names = [str(a.value) for a in node.args[:1] if isinstance(a, ast.Constant)]
        else:
            continue
        for name in names:
            if name == "vitdet.__version__":  # a constant of the lazy package, to be had for nothing
                continue
            if name.split(".")[0] == "vitdet" and (module := our_module(name)):
                yield module, node.lineno


def allowed(importer: str, module: str) -> bool:
    """May the part ``importer`` import ``module``?"""
    part = part_of(module)
    if part == importer:
        return True
    if part in TOP:
        return part in MAY_IMPORT[importer] or (part == "__init__" and "*" in MAY_IMPORT[importer])
    inner = module.removeprefix("vitdet.")
    return any(entry in ("*", part, inner) for entry in MAY_IMPORT[importer])


def test_every_part_has_its_place() -> None:
    parts = {part_of(module) for module in MODULES}
    assert parts <= MAY_IMPORT.keys(), "give these their place in MAY_IMPORT: " + ", ".join(parts - MAY_IMPORT.keys())


def test_imports_go_one_way() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module}"
        for own, path in MODULES.items()
        for module, line in imports_of(path)
        if not allowed(part_of(own), module)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("file", "source", "module"),
    [
        ("core/attention.py", "import vitdet.boxes", "vitdet.boxes"),
        ("losses/box.py", "def f():\n    from vitdet.core import attention", "vitdet.core"),
        ("data/coco.py", "from ..losses.box import iou", "vitdet.losses"),
        ("structures.py", "from . import data", "vitdet.data"),
        ("engine/trainer.py", "if TYPE_CHECKING:\n    from vitdet.data import coco", "vitdet.data"),
    ],
)
def test_a_wrong_import_is_seen(file: str, source: str, module: str) -> None:
    """The check itself, on imports in all their spellings."""
    found = list(imports_of(PACKAGE / file, source))
    assert found, f"nothing found in {source!r}"
    assert all(name.startswith(module) and not allowed(part_of(module_of(PACKAGE / file)), name) for name, _ in found)


def test_no_import_cycles() -> None:
    """Modules that import one another when loaded, or later, cannot be read or tested alone."""
    edges = {own: {m for m, _ in imports_of(path) if m not in (own, "vitdet")} for own, path in MODULES.items()}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, "import cycle: " + " -> ".join([*trail[trail.index(module) :], module])
        if module in done:
            return
        for other in sorted(edges[module]):
            if not module.startswith(other + "."):  # a package's __init__ gathers its own modules
                visit(other, (*trail, module))
        done.add(module)

    for module in sorted(edges):
        visit(module, ())


def tracked_files() -> list[Path]:
    """What is, or is about to be, in the repository."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listing.returncode != 0:
        pytest.skip("not a git checkout")
    return [ROOT / name for name in listing.stdout.splitlines() if (ROOT / name).is_file()]


def test_no_machine_is_mentioned() -> None:
    """Paths of somebody's machine and addresses of package indices belong to that machine, not here."""
    wrong = []
    for path in tracked_files():
        if path.suffix not in {"", ".py", ".md", ".toml", ".yaml", ".yml", ".json", ".txt", ".xml"}:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
            wrong += [f"{path.relative_to(ROOT)}:{number}: {p.pattern}" for p in FORBIDDEN if p.search(line)]
    assert not wrong, "\n".join(wrong)


def test_files_stay_small() -> None:
    large = [f"{path.relative_to(ROOT)}" for path in tracked_files() if path.stat().st_size > 1_000_000]
    assert not large, "over 1 MB: " + ", ".join(large)


@pytest.mark.parametrize("path", python_files(ROOT / "tools"), ids=lambda path: path.name)
def test_tools_are_thin(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 40, "a tool parses nothing and decides nothing: move the work into the package"
    assert ast.get_docstring(ast.parse(text))


def public_without_docstring(tree: ast.Module) -> Iterator[str]:
    """Module, public classes, functions and methods; what is nested in a function is its own affair."""
    stack: list[tuple[str, ast.AST]] = [("module", tree)]
    while stack:
        name, node = stack.pop()
        if not ast.get_docstring(node):
            yield f"{name} (line {getattr(node, 'lineno', 1)})"
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for child in ast.iter_child_nodes(node):
            is_definition = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            if is_definition and not child.name.startswith("_"):
                stack.append((child.name, child))


@pytest.mark.parametrize("module", sorted(MODULES))
def test_public_things_are_documented(module: str) -> None:
    missing = list(public_without_docstring(ast.parse(MODULES[module].read_text())))
    assert not missing, f"{MODULES[module].relative_to(ROOT)}: no docstring on " + ", ".join(missing)


@pytest.mark.parametrize(
    ("concept", "name"),
    [
        ("deformable attention", r"(MultiScale|MS)?Deformable(Cross)?Attention"),
        ("denoising queries", r"\w*[Dd]enoising|(make|prepare|add)_denoising\w*"),
        ("query selection", r".*(QuerySelection|select_queries|QuerySelector)"),
        ("matcher", r".*(Matcher|hungarian\w*|match(_targets)?)"),
        ("criterion", r".*Criterion"),
    ],
)
def test_one_place_a_concept(concept: str, name: str) -> None:
    """One class or public function holds each of the parts that this family of models tends to copy."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for path in MODULES.values()
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_")
        if re.fullmatch(name, node.name)
    ]
    assert len(found) == 1, f"{concept}: {found}"
