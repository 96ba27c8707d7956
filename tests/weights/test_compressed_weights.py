"""Weights of 8 and 4 bits: products equal those of weights that NumPy rounds by blocks."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import Array
from subgraph.operators.schema import MICROSOFT

BLOCKS = {"int8": 128, "int4": 32}
QUICK = settings(max_examples=40, deadline=None)
_rng = np.random.default_rng(0)


def rounded(weights: Array, precision: str) -> Array:
    """Return weights ``[depth, columns]`` rounded to multiples of the scale of their block."""
    depth = len(weights)
    block = min(BLOCKS[precision], int(np.gcd(depth, 1 << 20)))
    most = 2 ** int(precision[3:]) - 1
    blocks = weights.astype(np.float32).reshape(depth // block, block, -1)
    high = np.maximum(blocks.max(1, keepdims=True), 0)
    low = np.minimum(blocks.min(1, keepdims=True), 0)
    scale = np.maximum((high - low) / np.float32(most), np.finfo(np.float32).tiny)
    zero = np.rint(-low / scale)
    counts = np.clip(np.rint(blocks / scale) + zero, 0, most) - zero
    return (counts * scale).reshape(weights.shape)


def weights_of(depth: int, columns: int) -> Array:
    return _rng.standard_normal((depth, columns)).astype(np.float32)


def model_of(
    weights: Array, precision: str, **config: object
) -> tuple[sg.CompiledModel, sg.Graph, Array]:
    """Return a product of one row as a compiled model and as a graph, and the row."""
    x = sg.input("x", shape=("N", len(weights)), dtype="float32")
    graph = sg.Graph([x], [ops.MatMul(x, sg.parameter("w", weights))])
    model = sg.compile_model(graph, "CPU", {"WEIGHTS_PRECISION": precision, **config})
    return model, graph, _rng.standard_normal((1, len(weights))).astype(np.float32)


@pytest.mark.parametrize("precision", BLOCKS)
@QUICK
@given(
    rows=st.sampled_from([1, 2, 5, 33, 70]),
    depth=st.sampled_from([16, 48, 64, 112, 128, 272, 512]),
    more=st.integers(0, 40),
    transposed=st.booleans(),
    biased=st.booleans(),
    threads=st.integers(1, 2),
    seed=st.integers(0, 1 << 30),
)
def test_products(
    precision: str, rows: int, depth: int, more: int, transposed: bool, biased: bool, threads: int,
    seed: int,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    columns = -(-(1 << 14) // depth) + more
    a = rng.standard_normal((rows, depth)).astype(np.float32)
    b = rng.standard_normal((depth, columns)).astype(np.float32)
    c = [rng.standard_normal((1, columns)[seed % 2 :]).astype(np.float32)] if biased else []
    x = sg.input("x", ("N", depth), "float32")
    held = [sg.parameter("b", b.T.copy() if transposed else b), *(sg.parameter("c", v) for v in c)]
    graph = sg.Graph([x], [ops.Gemm(x, *held, transB=int(transposed))])
    config = {"WEIGHTS_PRECISION": precision, "INFERENCE_NUM_THREADS": threads}
    got = sg.compile_model(graph, "CPU", config)([a])[0]
    wanted = a.astype(np.float64) @ rounded(b, precision) + sum(c)
    np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-4 * depth**0.5)


@pytest.mark.parametrize("precision", BLOCKS)
@pytest.mark.parametrize(("depth", "columns"), [(8, 4096), (1000, 40), (64, 64)])
def test_weights_that_have_no_blocks_or_are_small_stay(
    precision: str, depth: int, columns: int
) -> None:
    weights = weights_of(depth, columns)
    model, graph, x = model_of(weights, precision)
    np.testing.assert_array_equal(model([x])[0], sg.compile_model(graph, "CPU")([x])[0])


@pytest.mark.parametrize("precision", BLOCKS)
def test_zeros_stay_and_special_values_stay_in_their_column(precision: str) -> None:
    weights = weights_of(64, 300)
    weights[:, 0] = 0
    weights[5:20, 1] = 0
    weights[3, 2], weights[4, 3], weights[:, 4] = np.nan, np.inf, 1e-42
    ones = np.eye(64, dtype=np.float32)
    model, _, _ = model_of(weights, precision)
    got = model([ones])[0]
    assert not got[:, 0].any()
    assert not got[5:20, 1].any()
    assert np.isnan(got[:, 2:4]).any(axis=0).all()
    assert np.isfinite(got[:, 4]).all()
    fine = np.delete(np.arange(300), [2, 3])
    np.testing.assert_allclose(got[:, fine], rounded(weights[:, fine], precision), atol=1e-6)


@pytest.mark.parametrize("precision", BLOCKS)
def test_updates_are_followed(precision: str) -> None:
    weights = weights_of(256, 128)
    model, _, x = model_of(weights, precision)
    np.testing.assert_allclose(model([x])[0], x @ rounded(weights, precision), atol=1e-3)
    other = weights_of(256, 128)
    model.parameters["w"].assign(other)
    np.testing.assert_allclose(model([x])[0], x @ rounded(other, precision), atol=1e-3)


def test_files_have_the_option_and_an_import_may_set_another() -> None:
    weights = weights_of(256, 128)
    model, _, x = model_of(weights, "int8")
    file = io.BytesIO()
    model.export_model(file)
    for config, precision in (({}, "int8"), ({"WEIGHTS_PRECISION": "int4"}, "int4")):
        again = sg.Core().import_model(file.getvalue(), "CPU", config)
        np.testing.assert_allclose(again([x])[0], x @ rounded(weights, precision), atol=1e-3)
    config = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 32}
    rows_too = sg.Core().import_model(file.getvalue(), "CPU", config)([x])[0]
    assert np.abs(rows_too - x @ rounded(weights, "int8")).max() > 1e-3


@pytest.mark.parametrize("device", ["AUTO", "HETERO:CPU,REFERENCE", "BATCH:CPU"])
def test_other_devices_pass_the_option_on(device: str) -> None:
    weights = weights_of(256, 128)
    _, graph, x = model_of(weights, "")
    model = sg.compile_model(graph, device, {"WEIGHTS_PRECISION": "int4"})
    np.testing.assert_allclose(model([x])[0], x @ rounded(weights, "int4"), atol=1e-3)


@pytest.mark.parametrize("form", ["constant", "transposed", "contributed", "float16", "stack"])
def test_forms_of_weights(form: str) -> None:
    """Weights of a file: a Constant, transposed, inside a function, of half precision; a batch."""
    kind = np.float16 if form == "float16" else np.float32
    weights, x = weights_of(256, 128).astype(kind), _rng.standard_normal((2, 3, 256)).astype(kind)
    held = helper.make_tensor_value_info
    dtype = helper.np_dtype_to_tensor_dtype(weights.dtype)
    data = weights.T.copy() if form in ("transposed", "contributed") else weights
    tensor = helper.make_tensor("w", dtype, data.shape, data.tobytes(), raw=True)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    if form == "constant":
        nodes.insert(0, helper.make_node("Constant", [], ["w"], value=tensor))
    if form == "transposed":
        tensor.name = "t"
        nodes.insert(0, helper.make_node("Transpose", ["t"], ["w"], perm=[1, 0]))
    if form == "contributed":
        nodes = [helper.make_node("FusedMatMul", ["x", "w"], ["y"], domain=MICROSOFT, transB=1)]
    graph = helper.make_graph(
        nodes, "g", [held("x", dtype, ["A", "B", 256])], [held("y", dtype, ["A", "B", 128])],
        [] if form == "constant" else [tensor],
    )  # fmt: skip
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(MICROSOFT, 1)]
    file = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    model = sg.compile_model(file, "CPU", {"WEIGHTS_PRECISION": "int8"})
    wanted = x.astype(np.float64) @ rounded(weights, "int8")
    np.testing.assert_allclose(model([x])[0], wanted, rtol=2e-3, atol=1e-3)


def _branch(weights: Array) -> Any:
    """Return a model with products in the branches of an If, with constants of one name."""
    taken = sg.input("taken", (), "bool")
    x = sg.input("x", ("N", 256), "float32")
    then, other = (
        sg.Graph([], [ops.MatMul(sg.capture(x), ops.Constant(value=held, name="k"))])
        for held in (weights, -weights)
    )
    graph = sg.Graph([taken, x], [ops.If(taken, then_branch=then, else_branch=other)])
    return graph, [np.array(True)]


def _body(weights: Array, count: Any = None) -> Any:
    """Return a model with two products in the body of a Loop, which is unfolded."""
    number, go = sg.input("i", (), "int64"), sg.input("c", (), "bool")
    before = sg.input("b", ("N", 256), "float32")
    product = ops.MatMul(before, sg.parameter("w", weights))
    same = ops.MatMul(product, sg.parameter("e", np.eye(256, dtype=np.float32)))
    body = sg.Graph([number, go, before], [ops.Identity(go), same])
    x = sg.input("x", ("N", 256), "float32")
    once, first = ops.Constant(value=np.array(1)), ops.Constant(value=np.array(True))
    inputs = [x] if count is None else [count, x]
    return sg.Graph(inputs, [ops.Loop(once if count is None else count, first, x, body=body)]), []


def _loop(weights: Array) -> Any:
    """Return a model with a product in the body of a Loop whose iterations an input says."""
    graph, _ = _body(weights, sg.input("n", (), "int64"))
    return graph, [np.array(1)]


@pytest.mark.parametrize("make", [_branch, _body, _loop])
def test_bodies(make: Callable[[Array], Any]) -> None:
    weights = weights_of(256, 256)
    graph, arrays = make(weights)
    x = _rng.standard_normal((1, 256)).astype(np.float32)
    model = sg.compile_model(graph, "CPU", {"WEIGHTS_PRECISION": "int4"})
    got = model([*arrays, x])[0]
    np.testing.assert_allclose(got, x @ rounded(weights, "int4"), atol=1e-3)


def test_rows_may_be_rounded_too() -> None:
    """The option for models of few bits holds for compressed weights."""
    weights = weights_of(256, 128)
    model, _, x = model_of(weights, "int8", DYNAMIC_QUANTIZATION_GROUP_SIZE=32)
    got, exact = model([x])[0], x @ rounded(weights, "int8")
    assert 1e-5 < np.abs(got - exact).max() < 0.02 * np.abs(exact).max()
