"""Types and dtypes: names, aliases, equality, text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

import subgraph as sg
from subgraph.graph.types import DTYPE_OF_ONNX, ONNX_DTYPE, canonical_dtype, dtype_of, numpy_dtype
from subgraph.operators.protobuf import type_from_proto, type_to_proto
from subgraph.operators.type_inference import merge


def test_the_dtype_table_is_onnxs() -> None:
    for name, number in TensorProto.DataType.items():
        if name == "UNDEFINED":
            continue
        dtype = DTYPE_OF_ONNX[number]
        assert ONNX_DTYPE[dtype] == number
        assert numpy_dtype(dtype) == helper.tensor_dtype_to_np_dtype(number)
        if dtype != "string":
            assert dtype_of(np.zeros(2, numpy_dtype(dtype))) == dtype


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("float", "float32"),
        ("double", "float64"),
        (np.float16, "float16"),
        (np.dtype("i4"), "int32"),
        (bool, "bool"),
        (float, "float64"),
        (str, "string"),
        ("bfloat16", "bfloat16"),
        (np.dtype(object), "string"),
    ],
)
def test_spellings_of_dtypes(given: Any, name: str) -> None:
    assert canonical_dtype(given) == name
    assert sg.TensorType(given).dtype == name


@pytest.mark.parametrize("wrong", ["float33", "datetime64[s]", 3, "f3"])
def test_what_is_no_dtype(wrong: Any) -> None:
    with pytest.raises(sg.ShapeError):
        sg.TensorType(wrong)


def test_shapes() -> None:
    shape: Any = ("N", 3, None, np.int64(4), "")
    type_ = sg.TensorType("float32", shape)
    assert type_.shape == ("N", 3, None, 4, None)
    assert type_.rank == 5
    assert not type_.is_static
    assert str(type_) == "float32[N, 3, ?, 4, ?]"
    assert str(sg.TensorType("int8")) == "int8[*]"
    assert sg.TensorType("int8").rank is None
    assert sg.TensorType("int8", ()).is_static
    assert type_ == sg.TensorType("float32", ["N", 3, None, 4, None])
    assert len({type_, sg.TensorType("float32", type_.shape)}) == 1
    for wrong in ([-1], [1.5], [True], [object()]):
        with pytest.raises(sg.ShapeError):
            sg.TensorType("float32", wrong)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


NESTED = sg.OptionalType(
    sg.SequenceType(sg.MapType("int64", sg.SparseTensorType("float16", (2, "N"))))
)


@pytest.mark.parametrize(
    "type_",
    [
        sg.TensorType("float32", ("N", 2, None)),
        sg.TensorType("string"),
        sg.TensorType("bfloat16", ()),
        NESTED,
        sg.SequenceType(None),
    ],
)
def test_types_to_onnx_and_back(type_: Any) -> None:
    assert type_from_proto(type_to_proto(type_)) == type_
    assert hash(type_) == hash(type_from_proto(type_to_proto(type_)))


def test_text_of_nested_types() -> None:
    assert str(NESTED) == "optional(seq(map(int64, sparse(float16[2, N]))))"


def test_merging_what_two_sources_say() -> None:
    def tensor(*dims: int | str | None) -> sg.TensorType:
        return sg.TensorType("float32", dims)

    assert merge(tensor("N", None, 3), tensor("M", 2, "K")) == tensor("N", 2, 3)
    assert merge(sg.TensorType("float32"), tensor(2)) == tensor(2)
    assert merge(tensor(2), sg.TensorType("float32")) == tensor(2)
    assert merge(tensor(2), tensor(3)) is None
    assert merge(tensor(2), tensor(2, 2)) is None
    assert merge(tensor(2), sg.TensorType("int8", (2,))) is None
    assert merge(sg.SequenceType(None), sg.SequenceType(tensor(2))) == sg.SequenceType(tensor(2))
    assert merge(sg.SequenceType(tensor(2)), tensor(2)) is None
