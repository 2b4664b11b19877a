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
    "structures": {"errors"},
    "results": {"boxes", "drawing", "structures"},
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
    "illustrations": {"core", "errors"},
    "export": {"core", "backbones"} | LEAVES,
    "zoo": {"core", "backbones", "detectors", "classifiers", "weights", "engine.checkpoint"} | LEAVES,
    "inference": {"data", "export", "zoo", "detectors.postprocess", "devices", "drawing", "results"} | LEAVES,
    "config": {"errors"},
    "build": {"*"},
    "benchmark": {"*"},
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
        ("criterion of detectors", r"(?!Classification).*Criterion"),
        ("criterion of classifiers", r"Classification\w*Criterion"),
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


# Named like a part of the Transformer, and none: made of convolutions, or of the core's own parts.
NO_SECOND_ONES = {
    "backbones.hgnetv2.AggregationBlock",
    "backbones.layers.ConvNorm",
    "backbones.pyramid.ChannelNorm",
    "backbones.resnet.BasicBlock",
    "classifiers.AttentionPool",
    "detectors.hybrid_encoder.ChainedFusionBlock",
    "detectors.hybrid_encoder.FusionBlock",
    "detectors.hybrid_encoder.RepVggBlock",
}
PART_NAME = re.compile(
    r"\w*(Attention|Attn|MHA|FeedForward|FFN|Mlp|MLP|SwiGLU)\w*|\w*(Norm|Block|EncoderLayer|DecoderLayer)(\dd)?"
)
TORCH_PART = re.compile(
    r"scaled_dot_product_attention|multi_?head_?attention\w*|Transformer(Encoder|Decoder)?(Layer)?", re.I
)
PRODUCTS = {"matmul", "bmm", "baddbmm", "einsum"}
ACTIVATIONS = {"GELU", "ReLU", "SiLU", "gelu", "relu", "silu"}
NORM_STEPS = {"rsqrt", "layer_norm", "rms_norm"}


def calls_in(node: ast.AST) -> list[str]:
    """The last name of everything called, and ``matmul`` for ``@``: ``nn.Linear(…)`` -> ``Linear``."""
    found = []
    for inner in ast.walk(node):
        if isinstance(inner, ast.Call):
            found.append(ast.unparse(inner.func).rpartition(".")[2])
        elif isinstance(inner, ast.BinOp | ast.AugAssign) and isinstance(inner.op, ast.MatMult):
            found.append("matmul")
    return found


def torch_parts(tree: ast.Module) -> Iterator[str]:
    """Attention and Transformer layers of torch's, wherever they are named."""
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.ImportFrom) else []
        if isinstance(node, ast.Attribute) and not ast.unparse(node.value).startswith("vitdet"):
            names = [node.attr]
        from_us = isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vitdet.core.transformer")
        for name in names:
            if TORCH_PART.fullmatch(name) and not from_us:
                yield f"line {node.lineno}: {name} belongs to vitdet/core"


def second_implementations(module: str, source: str) -> list[str]:
    """What a module outside the core has of attention, feed-forward, norm or block that is not the core's."""
    tree = ast.parse(source)
    wrong = list(torch_parts(tree))
    for node in tree.body:
        calls, name = calls_in(node), getattr(node, "name", "")
        made = set(calls)
        stranger = f"{module.removeprefix('vitdet.')}.{name}" not in NO_SECOND_ONES
        is_class = isinstance(node, ast.ClassDef)
        reasons = {
            "is named like a part of the core": is_class and stranger and PART_NAME.fullmatch(name),
            "is attention: a softmax and a matrix product": made & {"softmax", "Softmax"} and made & PRODUCTS,
            "is a feed-forward: two linear layers and an activation": calls.count("Linear") > 1 and made & ACTIVATIONS,
            "is a norm": (is_class or isinstance(node, ast.FunctionDef)) and made & NORM_STEPS,
            "is a block: attention and feed-forward": stranger and {"Attention", "FeedForward"} <= made,
        }
        wrong += [f"line {node.lineno}: {name or 'the module'} {reason}" for reason, holds in reasons.items() if holds]
    return wrong


# What the detectors share -> what nothing else can be written without.
WRITTEN_ONCE = {
    "vitdet/core/deformable.py": [r"\bgrid_sample\(", r"class \w*Deformable\w*\("],
    "vitdet/detectors/denoising.py": [r"class Denoising\w*", r"label_noise / 2"],
    "vitdet/detectors/query_selection.py": [r"class QuerySelection\(", r"def make_anchors\("],
    "vitdet/losses/matcher.py": [r"\blinear_sum_assignment\(", r"class \w*Matcher\b"],
    "vitdet/losses/criterion.py": [r"in output\.supervised\.items\(\)"],
    "vitdet/detectors/hybrid_encoder.py": [r"class HybridEncoder\(", r"def attend_within\("],
}


@pytest.mark.parametrize(("place", "pattern"), [(place, one) for place, many in WRITTEN_ONCE.items() for one in many])
def test_what_detectors_share_is_written_once(place: str, pattern: str) -> None:
    found = [path.relative_to(ROOT).as_posix() for path in MODULES.values() if re.search(pattern, path.read_text())]
    assert found == [place]


def test_the_core_alone_implements_the_transformer() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {what}"
        for module, path in MODULES.items()
        if part_of(module) != "core"
        for what in second_implementations(module, path.read_text())
    ]
    assert not wrong, "\n".join(wrong)


def test_attention_is_computed_in_one_file() -> None:
    """Inside the core, too: softmax between matrix products, and torch's fused kernel, stand in attention.py."""
    found = set()
    for module, path in MODULES.items():
        if part_of(module) == "core":
            tree = ast.parse(path.read_text())
            together = [set(calls_in(node)) for node in tree.body]
            if any("softmax" in calls and PRODUCTS & calls for calls in together) or list(torch_parts(tree)):
                found.add(module)
    assert found == {"vitdet.core.attention"}


def test_exceptions_exist() -> None:
    classes = {
        f"{module.removeprefix('vitdet.')}.{node.name}"
        for module, path in MODULES.items()
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    }
    assert classes >= NO_SECOND_ONES, f"gone: {NO_SECOND_ONES - classes}"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("x = torch.nn.functional.scaled_dot_product_attention(q, k, v)", "belongs to vitdet/core"),
        ("def f():\n    layer = nn.MultiheadAttention(8, 2)", "belongs to vitdet/core"),
        ("from torch.nn import TransformerEncoderLayer as Layer", "belongs to vitdet/core"),
        ("from vitdet.core.attention import scaled_dot_product_attention", "belongs to vitdet/core"),
        ("class A(nn.Module):\n    def f(self):\n        return (q @ k.mT).softmax(-1) @ v", "is attention"),
        ("def f(q, k, v):\n    return torch.bmm(F.softmax(torch.bmm(q, k), 1), v)", "is attention"),
        ("class WindowAttention(nn.Module):\n    pass", "is named like"),
        ("class GatedMlpV2(nn.Module):\n    pass", "is named like"),
        ("class LayerNorm2d(nn.LayerNorm):\n    pass", "is named like"),
        ("class SwinBlock(nn.Module):\n    pass", "is named like"),
        ("class A(nn.Module):\n    def f(self):\n        self.a, self.b = nn.Linear(2, 4), nn.Linear(4, 2)\n"
         "    def g(self, x):\n        return self.b(F.gelu(self.a(x)))", "is a feed-forward"),
        ("def f():\n    return nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))", "is a feed-forward"),
        ("def f(x):\n    return x * x.square().mean(-1, keepdim=True).rsqrt()", "is a norm"),
        ("class A(nn.Module):\n    def f(self):\n        self.a = Attention(8, 2), FeedForward(8, 9)", "is a block"),
    ],
)  # fmt: skip
def test_a_second_implementation_is_seen(source: str, reason: str) -> None:
    """The check itself, on one of each kind."""
    assert any(reason in what for what in second_implementations("vitdet.detectors.new", source))


@pytest.mark.parametrize(
    "source",
    [
        "from vitdet.core.transformer import Transformer",
        "from vitdet.core.attention import Attention\nlayer = Attention(8, 2)",
        "def f(logits):\n    return logits.softmax(-1).max(-1)",
        "class Encoder(nn.Module):\n    def f(self):\n        self.block = EncoderBlock(8, 2, 16)",
        "class Head(nn.Module):\n    def f(self):\n        self.a, self.b = nn.Linear(2, 4), nn.Linear(2, 8)",
    ],
)
def test_use_of_the_core_is_no_second_implementation(source: str) -> None:
    assert second_implementations("vitdet.detectors.new", source) == []


def test_no_source_is_left_out_by_gitignore() -> None:
    """A pattern such as ``build/`` hides a package of that name from git, from the wheel and from ruff."""
    git = subprocess.run(["git", "rev-parse"], cwd=ROOT, capture_output=True, check=False)
    if git.returncode:
        pytest.skip("this is no checkout")
    hidden = subprocess.run(
        ["git", "ls-files", "--others", "--ignored", "--exclude-standard", "--", "vitdet", "tests", "tools", "configs"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    assert [path for path in hidden if path.endswith((".py", ".yaml"))] == []
