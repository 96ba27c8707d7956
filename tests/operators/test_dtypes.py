"""Every data type of ONNX on every device: copied, moved, held, in sequences, optional."""

from __future__ import annotations

import io

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import subgraph as sg
from subgraph import ops
from subgraph.dtypes import NOT_RAW
from subgraph.graph.types import ONNX_DTYPE, Array, numpy_dtype
from subgraph.tools import backend

pytestmark = pytest.mark.filterwarnings("ignore")
_DTYPES = sorted(ONNX_DTYPE)
_DEVICES = ["REFERENCE", "CPU", "AUTO", "HETERO:CPU,REFERENCE"]
_OPSET = [helper.make_opsetid("", 26)]


def _sample(dtype: str) -> Array:
    held = helper.tensor_dtype_to_np_dtype(ONNX_DTYPE[dtype])
    if dtype == "string":
        return np.array([["a", "bé"], ["", "z"]], object)
    if dtype.startswith("complex"):
        return np.array([[1 + 2j, 3], [-1j, 0]], held)
    other = 2 if dtype == "float8_e8m0fnu" else 0  # powers of two have no zero
    return np.array([[1, other], [1, 1]]).astype(held)


def _tensor(array: Array, name: str, dtype: str) -> onnx.TensorProto:
    if dtype == "string":
        texts = [text.encode() for text in array.reshape(-1)]
        return helper.make_tensor(name, TensorProto.STRING, array.shape, texts)
    return numpy_helper.from_array(array, name)


def _info(name: str, dtype: str) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, ONNX_DTYPE[dtype], [2, 2])


def _same(got: Array, want: Array) -> None:
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    assert np.array_equal(got, want)


@pytest.mark.parametrize("device", _DEVICES)
@pytest.mark.parametrize("dtype", _DTYPES)
def test_values_are_copied_held_and_moved(dtype: str, device: str) -> None:
    x = _sample(dtype)
    nodes = [
        helper.make_node("Identity", ["x"], ["same"]),
        helper.make_node("Transpose", ["w"], ["turned"]),
        helper.make_node("Reshape", ["turned", "shape"], ["flat"]),
        helper.make_node("Concat", ["flat", "flat"], ["twice"], axis=0),
        helper.make_node("Gather", ["twice", "places"], ["picked"]),
        helper.make_node("Slice", ["picked", "from", "to"], ["cut"]),
        helper.make_node("Constant", [], ["constant"], value=_tensor(x, "c", dtype)),
    ]
    numbers = {"shape": [4], "places": [5, 0, 3], "from": [0], "to": [2]}
    held = [numpy_helper.from_array(np.array(v, np.int64), k) for k, v in numbers.items()]
    outputs = [_info("same", dtype), _info("constant", dtype)]
    outputs.append(helper.make_tensor_value_info("cut", ONNX_DTYPE[dtype], [2]))
    graph = helper.make_graph(
        nodes, "g", [_info("x", dtype)], outputs, [_tensor(x, "w", dtype), *held]
    )
    same, constant, cut = backend.run_model(
        helper.make_model(graph, opset_imports=_OPSET), [x], device
    )
    _same(same, x)
    _same(constant, x)
    _same(cut, x.T.reshape(4)[[1, 0]])


@pytest.mark.parametrize("dtype", ["int2", "int4", "uint2", "uint4"])
def test_elements_that_share_bytes_in_files_are_moved_by_kernels(dtype: str) -> None:
    """In memory such an element takes a byte, as every other of 8 bits."""
    x = sg.input("x", (3, 5), dtype)
    y = ops.Flatten(ops.Transpose(x, perm=[1, 0]))
    graph = sg.Graph([x], [y])
    assert not sg.query_model(graph, "CPU").reasons
    given = (np.arange(15) % 2).astype(np.float32).astype(numpy_dtype(dtype)).reshape(3, 5)
    _same(sg.compile_model(graph, "CPU")([given])[0], given.T)


@pytest.mark.parametrize("device", _DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "bool", "string", "complex64"])
def test_sequences_and_optionals(dtype: str, device: str) -> None:
    x = _sample(dtype)
    kind = helper.make_tensor_type_proto(ONNX_DTYPE[dtype], [2, 2])
    nothing = helper.make_optional_type_proto(kind)
    then = helper.make_graph(
        [helper.make_node("OptionalGetElement", ["x"], ["a"])], "then", [], [_info("a", dtype)]
    )
    other = helper.make_graph(
        [helper.make_node("Identity", ["w"], ["b"])], "else", [], [_info("b", dtype)]
    )
    nodes = [
        helper.make_node("OptionalHasElement", ["x"], ["there"]),
        helper.make_node("If", ["there"], ["y"], then_branch=then, else_branch=other),
        helper.make_node("SequenceConstruct", ["y", "w"], ["s"]),
        helper.make_node("SequenceAt", ["s", "k"], ["z"]),
        helper.make_node("SequenceLength", ["s"], ["n"]),
    ]
    w = x[::-1].copy()
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_value_info("x", nothing)],
        [_info("y", dtype), _info("z", dtype), helper.make_tensor_value_info("n", 7, [])],
        [_tensor(w, "w", dtype), numpy_helper.from_array(np.array(-2), "k")],
    )
    ready = backend.prepare(helper.make_model(graph, opset_imports=_OPSET), device)
    for given, want in ((x, x), (None, w)):
        y, z, n = ready.run([given])
        _same(y, want)
        _same(z, want)
        assert n == 2


@pytest.mark.parametrize("dtype", sorted(NOT_RAW - {"string"}))
def test_weights_whose_elements_share_bytes_are_exported(dtype: str) -> None:
    numbers = np.arange(4096) % 2
    w = sg.parameter("w", numbers.astype(np.float32).astype(numpy_dtype(dtype)))
    x = sg.input("x", (4096,))
    file = io.BytesIO()
    sg.compile_model(sg.Graph([x], [ops.Add(x, ops.Cast(w, to=1))]), "CPU").export_model(file)
    file.seek(0)
    model = sg.default_core().import_model(file, "CPU")
    np.testing.assert_array_equal(model([np.zeros(4096, np.float32)])[0], numbers)
