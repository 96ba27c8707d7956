"""The table of dtypes, against the onnx package, NumPy and ml_dtypes."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import onnx.defs
import pytest
from onnx import TensorProto, helper

from subgraph.dtypes import DTYPES, FLOATS, NOT_RAW, item_bytes
from subgraph.engine.codegen.irtools import ELEMENTS
from subgraph.graph.types import numpy_dtype
from subgraph.operators.schema_types import from_onnx


def test_every_type_of_onnx_is_there() -> None:
    numbers = set(TensorProto.DataType.values()) - {TensorProto.UNDEFINED}
    assert numbers <= {each.number for each in DTYPES.values()}
    assert len({each.number for each in DTYPES.values()}) == len(DTYPES)


@pytest.mark.parametrize("name", [name for name in DTYPES if name != "string"])
def test_sizes_are_those_of_numpy(name: str) -> None:
    assert item_bytes(name) == numpy_dtype(name).itemsize
    assert (DTYPES[name].bits < 8) == (name in NOT_RAW)


@pytest.mark.parametrize("name", DTYPES)
def test_numbers_are_those_of_onnx(name: str) -> None:
    number = DTYPES[name].number
    if number in TensorProto.DataType.values():
        assert numpy_dtype(name) == helper.tensor_dtype_to_np_dtype(number)


def test_schemas_of_a_newer_onnx_package_may_allow_a_dtype_that_the_table_lacks() -> None:
    """Such a package adds it to many operators, of which all other dtypes have to keep working."""
    found = onnx.defs.get_schema("Relu", 14)
    types = [*found.inputs[0].types, "tensor(float5e3m1)"]
    item = SimpleNamespace(name="X", types=types, type_str="T", is_homogeneous=True)
    same = {name: getattr(found, name) for name in dir(found) if not name.startswith("_")}
    newer = SimpleNamespace(**{**same, "inputs": [item]})
    assert from_onnx(newer).input_dtypes == from_onnx(found).input_dtypes


def test_kinds_are_those_of_numpy() -> None:
    kinds = {"float": "f", "int": "i", "uint": "u", "bool": "b", "complex": "c", "string": "O"}
    for name, each in DTYPES.items():
        held = numpy_dtype(name)
        if held.isbuiltin == 1:
            assert held.kind == kinds[each.kind], name
    assert {name for name in FLOATS if DTYPES[name].kind != "float"} == set()


def test_registers_hold_what_the_table_says() -> None:
    assert len(ELEMENTS) == 10
    for name, (numba_type, llvm, size) in ELEMENTS.items():
        assert (str(numba_type), size) == (name, np.dtype(name).itemsize)
        assert str(llvm) in ("double", "float", f"i{8 * size}")
