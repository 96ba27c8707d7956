"""Hooks: each one that a module declares is answered by a function that takes its arguments."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import subgraph
from subgraph.system import hooks

ROOT = Path(subgraph.__file__).parent


def declared() -> dict[str, int]:
    """Return how many arguments each declared hook is called with, by its name."""
    found: dict[str, int] = {}
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.AnnAssign) or not isinstance(node.value, ast.Call):
                continue
            if isinstance(node.value.func, ast.Name) and node.value.func.id == "Hook":
                name = ast.literal_eval(node.value.args[0])
                arguments = node.annotation.slice.elts[0]  # type: ignore[attr-defined]
                found[name] = len(arguments.elts)
    return found


DECLARED = declared()


def test_each_hook_has_an_answer_and_each_answer_a_hook() -> None:
    assert hooks._loaders.keys() == DECLARED.keys()


@pytest.mark.parametrize("name", sorted(DECLARED))
def test_an_answer_takes_the_arguments_of_its_hook(name: str) -> None:
    signature = inspect.signature(hooks._loaders[name]())
    signature.bind(*range(DECLARED[name]))
