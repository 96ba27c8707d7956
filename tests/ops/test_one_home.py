"""An operator has one home: all that is said of it stands in the folder of its family.

``ops/contrib`` is apart: its operators are function bodies over those of the standard.
"""

from __future__ import annotations

import ast
import inspect
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from subgraph import ops
from subgraph.operators.operator import OPERATORS
from subgraph.operators.requirements import any_tensor, any_value

FAMILIES = Path(ops.__file__).parent
# The functions that say of operators, whose names are their positional arguments, where a part is.
SAYING = ("declare", "lowering", "cl_lowering", "cl_shared")


def _statements() -> Iterator[tuple[str, str, str]]:
    """Yield the function that was called, an operator's name with its domain, and the family."""
    for path in FAMILIES.glob("*/*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call) or ast.unparse(call.func) not in SAYING:
                continue
            domain = "".join(
                ast.unparse(word.value) for word in call.keywords if word.arg == "domain"
            )
            for argument in call.args:
                inner = argument.value if isinstance(argument, ast.Starred) else argument
                for name in inner.elts if isinstance(inner, ast.Tuple) else [inner]:
                    if isinstance(name, ast.Constant):
                        yield ast.unparse(call.func), f"{domain}:{name.value}", path.parent.name


def test_the_parts_of_an_operator_stand_in_one_folder() -> None:
    homes: dict[str, dict[str, str]] = defaultdict(dict)
    for part, operator, family in _statements():
        homes[operator][part] = family
    assert {part for parts in homes.values() for part in parts} == set(SAYING)
    assert len(homes) > 200
    assert {name: parts for name, parts in homes.items() if len({*parts.values()}) > 1} == {}


def test_the_requirement_of_an_operator_stands_beside_its_declaration() -> None:
    declared = {name: family for part, name, family in _statements() if part == "declare"}
    families = {name.rpartition(":")[2]: family for name, family in declared.items()}
    elsewhere: dict[str, str] = {}
    for key, operator in OPERATORS.items():
        name = key.rpartition("::")[2]
        if operator.requires in (any_tensor, any_value):  # they require nothing of one operator
            continue
        if operator.requires is not None and operator.body is None and name in families:
            home = Path(inspect.getfile(operator.requires)).parent
            if home != FAMILIES / families[name]:
                elsewhere[key] = str(home)
    assert elsewhere == {}
