"""Imports go one way, and importing the package costs nothing."""

import ast
import subprocess
import sys
from collections.abc import Collection, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import get_args

import pytest

from lightning_memfit.techniques.core.registry import STRATEGIES, TECHNIQUES
from lightning_memfit.techniques.core.technique import Numerics

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "lightning_memfit"

# What each folder may import beside itself: the table of docs/architecture.md.
ALLOWED = {
    "memory": set(),
    "device": {"memory"},
    "optim": {"memory"},
    "nvme": {"memory", "device", "profile", "estimate"},
    "checkpointing": {"memory"},
    "adapters": {"memory"},
    "profile": {"memory", "device", "checkpointing"},
    "estimate": {"optim", "memory", "device", "profile", "checkpointing"},
    "measure": {"memory", "device"},
    "techniques": {"adapters", "memory", "device", "profile", "estimate", "optim", "checkpointing", "nvme"},
    "planner": {"memory", "device", "optim", "profile", "estimate", "techniques", "checkpointing"},
    "reliability": {"memory"},
    "fitting": {
        *("memory", "device", "profile", "estimate", "techniques", "measure", "planner", "checkpointing"),
        "reliability",
    },
    "bench": {"memory", "device", "profile", "estimate", "techniques", "fitting", "measure"},
    "strategies": {
        *("techniques", "memory", "device", "optim", "checkpointing", "profile", "estimate", "nvme"),
        "reliability",
    },
    "models": {"memory", "optim", "adapters"},
    "data": {"memory", "device"},
}

# Where the text "cuda" may be written, and why; everybody else asks a `DeviceKind`.
NAMES_CUDA = {
    "lightning_memfit/memory/kind.py": "the one module that knows what it means",
}


def imported_folders(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] + [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "cli" or parts[:2] == ["lightning_memfit", "cli"]:
                found.add("cli")
            elif parts[0] == "lightning_memfit" and len(parts) > 1 and (PACKAGE / parts[1]).is_dir():
                found.add(parts[1])
    return found


@pytest.mark.parametrize("folder", sorted(ALLOWED))
def test_folder_imports_only_what_lies_below_it(folder: str) -> None:
    for path in (PACKAGE / folder).rglob("*.py"):
        forbidden = imported_folders(path) - ALLOWED[folder] - {folder}
        assert not forbidden, f"{path.relative_to(ROOT)} imports {', '.join(sorted(forbidden))}"


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def executed(tree: ast.AST) -> Iterator[ast.AST]:
    """Nodes of a file, those of functions included, without what type checkers alone read."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        yield node
        yield from executed(node)


def imported_modules(path: Path, known: Collection[str], for_types: bool = False) -> set[str]:
    found = set()
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree) if for_types else executed(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= submodules & set(known) or {node.module}
    return (found & set(known)) - {module_name(path)}


@pytest.mark.parametrize("for_types", [False, True])
def test_no_modules_import_each_other_in_a_circle(for_types: bool) -> None:
    """Imports inside functions count: they hide a circle from Python, not from a reader; nor do those for types."""
    paths = {
        module_name(path): path for folder in ("lightning_memfit", "cli") for path in (ROOT / folder).rglob("*.py")
    }
    graph = {name: imported_modules(path, paths, for_types) for name, path in paths.items()}
    if for_types:
        del graph["lightning_memfit"]  # it names for type checkers what it resolves on first use
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("import circle: " + " <- ".join(error.args[1]))


def test_planner_and_fitting_name_no_technique() -> None:
    """They ask records (`Technique`), so that a new technique touches neither."""
    words = set(get_args(Numerics))  # `tf32` is a way of computing, too
    names = {technique.name for technique in (*TECHNIQUES, *STRATEGIES)} - words
    for folder in ("planner", "fitting"):
        for path in (PACKAGE / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and node.value in names:
                    pytest.fail(f"{path.relative_to(ROOT)}:{node.lineno} names {node.value!r}")


def test_one_module_knows_what_cuda_means() -> None:
    found = set()
    for path in sorted([*PACKAGE.rglob("*.py"), *(ROOT / "cli").rglob("*.py")]):
        texts = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
        if any(isinstance(text, str) and (text == "cuda" or text.startswith("cuda:")) for text in texts):
            found.add(str(path.relative_to(ROOT)))
    assert found == set(NAMES_CUDA), "Ask a question of `lightning_memfit.memory.kind.DeviceKind` instead."


def test_every_folder_has_a_place_in_the_map() -> None:
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert folders == set(ALLOWED)
    text = (ROOT / "docs" / "architecture.md").read_text()
    assert [folder for folder in folders if f"`{folder}/`" not in text] == []


def test_importing_the_package_touches_nothing() -> None:
    code = (
        "import sys, lightning_memfit\n"
        "heavy = {'torch', 'lightning', 'transformers', 'deepspeed', 'wandb', 'bitsandbytes', 'datasets', 'numpy'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert output.stdout.strip() == "[]"


def test_public_names_can_be_imported() -> None:
    import lightning_memfit

    for name in lightning_memfit.__all__:
        assert getattr(lightning_memfit, name) is not None
    with pytest.raises(AttributeError, match="Public names"):
        _ = lightning_memfit.NoSuchName
