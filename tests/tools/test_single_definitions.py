"""What the project says once: a second definition of the same thing is found here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from subgraph.operators.schema import INTERNAL_DOMAIN

ROOT = Path(__file__).parents[2]
FOLDERS = ("subgraph", "ops", "passes")


@cache
def sources() -> dict[str, ast.Module]:
    """Return the syntax tree of every module of the package, by its path."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    own = [path.relative_to(ROOT) for path in paths]
    # subgraph/ops and subgraph/passes are links to the folders beside.
    real = [path for path in own if path.parts[1] not in ("ops", "passes")]
    return {path.as_posix(): ast.parse((ROOT / path).read_text()) for path in real}


def literals(tree: ast.AST) -> Iterator[str]:
    """Yield the texts of a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def assigned(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a module assigns anywhere."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def files_of(test: str) -> list[str]:
    """Return the files that assign a name."""
    return [path for path, tree in sources().items() if test in assigned(tree)]


def test_one_alias_for_arrays() -> None:
    assert files_of("Array") == ["subgraph/graph/types.py"]


def test_one_name_for_the_domain_of_internal_operators() -> None:
    found = [
        path
        for path, tree in sources().items()
        if any(text.partition("::")[0] == INTERNAL_DOMAIN for text in literals(tree))
    ]
    assert found == ["subgraph/operators/schema.py"]
