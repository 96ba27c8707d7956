"""What the project says once: a second definition of the same thing is found here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from subgraph.dtypes import DTYPES, INTEGERS, UNSIGNED
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.system import host

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


def test_one_table_of_the_sizes_of_dtypes() -> None:
    """A dict from two dtypes or more to whole numbers is such a table."""
    found = {
        path
        for path, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Dict)
        and sum(isinstance(k, ast.Constant) and k.value in DTYPES for k in node.keys) > 1
        and all(isinstance(v, ast.Constant) and type(v.value) is int for v in node.values)
    }
    assert not found, "derive it from subgraph.dtypes.DTYPES"


def test_one_list_of_the_integers_of_kernels() -> None:
    """Also the table of unsigned integers by their bytes is such a list."""
    found = {
        path
        for path, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, (ast.Tuple, ast.Set, ast.List, ast.Dict))
        and set(literals(node)) in (set(INTEGERS), set(UNSIGNED.values()))
    }
    assert not found, "use INTEGERS or UNSIGNED of subgraph.dtypes"


def test_one_set_of_narrow_floats() -> None:
    found = {
        path
        for path, tree in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, (ast.Tuple, ast.Set, ast.List, ast.Call))
        and {"float16", "bfloat16"} == set(literals(node.value)) - {"float32", "float64"}
    }
    assert found == {"subgraph/dtypes.py"}


# Files that describe instruction sets; those of the toolchain choose code that was made before.
DESCRIBING = ("subgraph/system/", "subgraph/engine/toolchain/", "subgraph/tools/prebuild.py")
NAMES = {*host.__dict__["_LEVELS"], "avx512vl", "avx512vnni", "avxvnni", "f16c"} - {"scalar"}


def test_what_an_instruction_set_can_do_is_asked_by_name() -> None:
    """A new instruction set answers in one file; none compares names, features or registers."""
    asking = {
        path
        for path, tree in sources().items()
        if not path.startswith(DESCRIBING)
        for node in ast.walk(tree)
        if (isinstance(node, ast.Constant) and node.value in NAMES)
        or (
            isinstance(node, ast.Attribute)
            and ast.unparse(node).removeprefix("host.") in ("isa().name", "isa().has")
            and not path.endswith("plugins/cpu.py")
        )
    }
    assert not asking, "give the question a name in subgraph/system/host.py"


def test_random_operators_are_listed_nowhere() -> None:
    """Each is declared as random."""
    sets: list[str] = []
    for path, tree in sources().items():
        for node in ast.walk(tree):
            names = {"RandomNormal", "Bernoulli", "Multinomial"}
            if isinstance(node, (ast.Set, ast.List, ast.Tuple)) and names <= set(literals(node)):
                sets.append(path)
    assert not sets
