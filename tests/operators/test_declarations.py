"""Every operator is declared in one place, from which all that needs it finds it by its name."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops, passes
from subgraph.engine.planner.lowering import LOWERINGS
from subgraph.opencl.lowering import CL_LOWERINGS
from subgraph.operators.operator import (
    OPERATORS,
    declare,
    find_operator,
    is_view,
    operator_key,
    register_operator,
    unregister_operator,
)
from subgraph.operators.schema import CUSTOM_SCHEMAS, standard_operators
from subgraph.system.registry import Files
from tests.tools.test_single_definitions import sources

# What a pass writes as other operators (`subgraph.passes.gradient`).
REPLACED = {"ai.onnx.preview.training::Gradient"}


def test_every_operator_of_the_standard_is_declared() -> None:
    standard = {operator_key(name, domain) for name, domain in standard_operators()}
    assert standard - set(OPERATORS.names()) == REPLACED


def test_every_lowering_is_of_a_declared_operator() -> None:
    users = {operator_key(op_type, domain) for domain, op_type in CUSTOM_SCHEMAS}
    lowered = {*LOWERINGS.names(), *CL_LOWERINGS.names()} - users
    assert len(lowered) > 100
    assert not {name for name in lowered if find_operator(name) is None}


DECLARED = """
import sys
from subgraph.operators.operator import OPERATORS
from subgraph.system.registry import Registry
def register(self, name, value, owner, **options):
    if self is OPERATORS:
        print(name, owner.rpartition(":")[0])
    plain(self, name, value, owner, **options)
plain, Registry.register = Registry.register, register
OPERATORS.names()
"""


def test_the_file_of_an_operator_is_found_by_its_name() -> None:
    """So that a look-up imports that file, and not all."""
    done = subprocess.run(
        [sys.executable, "-c", DECLARED], capture_output=True, text=True, check=True
    )
    rows = [line.split(" ", 1) for line in done.stdout.splitlines()]
    assert len(rows) > 250
    for name, file in rows:
        path = Path(file.partition(":")[0])
        assert path.name == "op.py" or path.parent.name == "contrib", file
        assert f'"{name.rpartition("::")[2]}"' in path.read_text(), name


def test_declarations_end_their_file() -> None:
    """What a family has is seen at a glance."""
    for path, tree in sources().items():
        if not path.startswith("ops/") or "/contrib/" in path:
            continue
        calls = [
            isinstance(each, ast.Expr)
            and isinstance(each.value, ast.Call)
            and getattr(each.value.func, "id", "") in ("declare", "_declare")
            for each in tree.body
        ]
        at_the_end = path.endswith("/op.py") and all(calls[calls.index(True) :])
        assert not any(calls) or at_the_end, f"{path}: declare operators at the end of op.py"


def test_a_second_declaration_is_refused() -> None:
    declare("TwiceDeclared", domain="test.declarations")
    try:
        with pytest.raises(sg.UnsupportedOpError, match="two owners"):
            declare("TwiceDeclared", domain="test.declarations")
    finally:
        OPERATORS.unregister("test.declarations::TwiceDeclared")


def test_fields_of_a_users_operator_reach_passes_and_type_inference() -> None:
    """A view and an operator with a shape operand, as Reshape and Expand are."""

    def infer(node: sg.Node, types: Any, values: Any) -> Any:
        dims = None if values[1] is None else list(values[1])
        return [sg.TensorType(types[0].dtype, dims)]

    def compute(node: sg.Node, inputs: Any) -> Any:
        return [np.broadcast_to(inputs[0], inputs[1])]

    schema = sg.Schema("Spread", "test.declarations", inputs=("x", "shape"), outputs=("y",))
    operator = sg.Operator(schema, compute, infer, view=True, grows=True, shape_at=1)
    register_operator(operator)
    try:
        x = sg.input("x", ("N", 4))
        rows = ops.Shape(x, start=0, end=1)
        y = ops.Spread(ops.Relu(x), ops.Concat(rows, np.array([4]), axis=0))
        graph = passes.apply_pass(sg.Graph([x], [ops.Neg(y)]), "InferTypes")
        assert graph.outputs[0].type == sg.TensorType("float32", ("N", 4))
        assert [is_view(n) for n in graph.nodes if n.op_type in ("Spread", "Neg")] == [True, False]
        result = sg.compile_model(graph, "CPU")(x=-np.ones((2, 4), np.float32))[0]
        assert np.array_equal(result, np.zeros((2, 4)))
        plain = sg.input("plain", (4,))
        wide = ops.Spread(plain, np.array([1 << 40, 4]))
        with pytest.raises(sg.LimitError):  # the size is checked before it is computed
            sg.compile_model(sg.Graph([plain], [wide]), "REFERENCE")(plain=np.ones(4, np.float32))
    finally:
        unregister_operator(operator)


@pytest.mark.parametrize("op_type", ["Relu", "Softmax"])
def test_a_user_cannot_define_an_operator_that_is_declared(op_type: str) -> None:
    def compute(node: sg.Node, inputs: Any) -> Any:
        return inputs

    declared = find_operator(op_type)
    with pytest.raises(sg.UnsupportedOpError, match=rf"'{op_type}' has two owners: .*op\.py.* and"):
        sg.Core().add_extension(sg.Operator(sg.Schema(op_type), compute))
    assert find_operator(op_type) is declared
    assert ("", op_type) not in CUSTOM_SCHEMAS


def test_files_are_chosen_by_their_full_name() -> None:
    seen: list[str] = []

    def keep(name: str) -> bool:
        seen.append(name)
        return False

    Files("subgraph.ops", keep).load_all()
    assert "subgraph.ops.conv.op" in seen
