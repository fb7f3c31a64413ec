"""A folder imports only folders above it, also inside functions and for types."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "sosampler"
# Top to bottom. `sosampler/__init__` is a lazy table of public names and may name every folder.
ORDER = [
    "errors",
    "_util",
    "video",
    "classifiers",
    "samplers",
    "policies",
    "baselines",
    "engine",
    "inference",
    "datasets",
    "bank",
    "reels",
    "figures",
    "evaluation",
    "training",
    "report",
    "paper",
    "integrations",
    "ui",
    "bench",
    "demo",
    "cli",
    "__main__",
]


def folder_of(module: str) -> str | None:
    """Return the folder of a dotted module name; None for the package itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else None


def imported(tree: ast.AST) -> list[str]:
    """Return dotted names of all modules of the package that a file imports, at any depth."""
    names: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return [name for name in names if name.split(".")[0] == "sosampler"]


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_up(path: Path) -> None:
    own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if own == "__init__":
        return
    for name in imported(ast.parse(path.read_text(encoding="utf-8"))):
        folder = folder_of(name)
        if folder is None or (SOURCE / folder).exists() or (SOURCE / f"{folder}.py").exists():
            assert ORDER.index(folder or "errors") <= ORDER.index(own), f"{own} imports {name}, which lies below it"
        else:  # a public name of the package, which could lie anywhere
            assert folder in ("__version__",) or own in ("bench", "demo", "cli"), f"{own} imports {name} from the root"


def test_every_folder_has_a_layer() -> None:
    there = {path.name.removesuffix(".py") for path in SOURCE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert there - {"__init__", "__pycache__", "py.typed"} == set(ORDER)


def test_no_test_reads_files_beside_the_repository() -> None:
    root = Path(__file__).parents[1]
    for path in sorted(root.glob("tests/**/*.py")):
        depth = len(path.relative_to(root).parts)
        for match in re.finditer(r"__file__\)(?:\.resolve\(\))?\.parents\[(\d+)\]", path.read_text(encoding="utf-8")):
            assert int(match[1]) < depth, f"{path}: {match[0]} lies outside of the repository"
