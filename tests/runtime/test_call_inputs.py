"""Calling a compiled model: every way to give inputs, what is refused, results, overrides."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import Array

A, B = np.ones((3, 2), np.float32), np.ones((3, 1), np.int64)
X = np.array([1, 2], np.float32)


def two_inputs() -> sg.CompiledModel:
    a, b = sg.input("a", ("N", 2)), sg.input("b.in", ("N", "M"), "int64")
    k = sg.parameter("k", np.array([10], np.float32))
    total = ops.Mul(ops.Add(a, ops.Cast(b, to=1)), k, name="total")
    return sg.compile_model(sg.Graph([a, b, k], [total, ops.Neg(b, name="minus")]), "REFERENCE")


def test_every_way_to_give_inputs() -> None:
    model = two_inputs()
    for results in (
        model(A, B),
        model([A, B]),
        model((A, B)),
        model({"a": A, "b.in": B}),
        model({0: A, 1: B}),
        model(a=A, **{"b.in": B}),
        model(A, **{"b.in": B}),
        model([[1, 1]] * 3, [[1]] * 3),
    ):
        assert results["total"].tolist() == [[20, 20]] * 3
        assert results[0] is results["total"]
        assert results[1].dtype == np.int64
        assert list(results) == ["total", "minus"]
        assert len(results) == 2
        assert dict(results)["minus"] is results[1]
        assert results.to_tuple()[1] is results[1]


@pytest.mark.parametrize(
    ("args", "named", "error", "message"),
    [
        ((), {"a": A}, sg.MissingInputError, "not given input 'b.in'"),
        ((), {"a": A, "bb": B}, sg.MissingInputError, r"no input 'bb'.*a: float32\[N, 2\]"),
        ((A, B, A, A), {}, sg.MissingInputError, "takes 3 inputs, got 4"),
        ((A, B), {"a": A}, sg.MissingInputError, "given twice"),
        ((A, B[:2]), {}, sg.ShapeError, "'N' is 3 in input 'a' and 2 in input 'b.in'"),
        ((A[:, :1], B), {}, sg.ShapeError, r"float32\[N, 2\], got float32\[3, 1\]"),
        ((A[0], B), {}, sg.ShapeError, r"got float32\[2\]"),
        ((A.astype(np.float64), B), {}, sg.ShapeError, r"got float64.*astype\('float32'\)"),
        ((A, [[1.5]] * 3), {}, sg.ShapeError, "would change as int64"),
        ((A, object()), {}, sg.ShapeError, "'b.in'.*got a object"),
        ((A, [[2**70]] * 3), {}, sg.ShapeError, "'b.in'"),
    ],
)
def test_wrong_inputs(args: Any, named: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        two_inputs()(*args, **named)


def test_the_other_byte_order_is_converted() -> None:
    results = two_inputs()(A.astype(A.dtype.newbyteorder()), B.astype(B.dtype.newbyteorder()))
    assert results["total"].tolist() == two_inputs()(A, B)["total"].tolist()


def test_an_unsafe_python_number_is_refused() -> None:
    x = sg.input("x", (2,), "int8")
    model = sg.compile_model(sg.Graph([x], [ops.Neg(x)]), "REFERENCE")
    assert model([[1, 2]])[0].dtype == np.int8
    with pytest.raises(sg.ShapeError, match="does not fit int8"):
        model([[1, 300]])


def test_results_know_their_names() -> None:
    results = two_inputs()(A, B)
    with pytest.raises(sg.MissingInputError, match="did you mean 'total'"):
        results["totall"]
    with pytest.raises(IndexError):
        results[2]


def test_optional_input_overrides_for_one_run_only() -> None:
    model = two_inputs()
    assert model.inputs[2].default is model.parameters["k"]
    other = model(A, B, k=np.array([100], np.float32))
    assert other[0][0, 0] == 200
    assert model(A, B)[0][0, 0] == 20
    model.parameters["k"].assign(np.array([5], np.float32))
    assert model(A, B)[0][0, 0] == 10


def test_an_override_reaches_folded_weights_and_leaves_the_cache_right() -> None:
    class Folds(sg.SubgraphOp):
        def forward(self, inputs: list[Any]) -> list[Array]:
            return [inputs[0] * self.weights.get("square", np.square, inputs[1])]

    x = sg.input("x", ("N",))
    w = sg.parameter("w", np.array([3], np.float32))
    inner = sg.Graph([x, w], [ops.Mul(x, w)], "inner")
    node: Any = sg.subgraph_node(inner, Folds(inner), "r")
    model = sg.CompiledModel(sg.Graph(node.inputs, node.outputs))
    for _ in range(2):
        assert model(X)[0].tolist() == [9, 18]
        assert model(X, np.array([2], np.float32))[0].tolist() == [4, 8]
    assert node.op.weights.stats().redone <= 2


@pytest.mark.parametrize("device", ["CPU", "REFERENCE", "HETERO:CPU,REFERENCE"])
def test_a_preset_output_of_another_shape_than_the_result(device: str) -> None:
    x = sg.input("x", ("N", 4))
    model = sg.compile_model(sg.Graph([x], [ops.Relu(x)]), device)
    request = model.create_infer_request()
    request.set_output(0, np.zeros((3, 4), np.float32))
    with pytest.raises(sg.ShapeError, match=r"output 0 has shape \(2, 4\) in this run.*\(3, 4\)"):
        request.infer(np.ones((2, 4), np.float32))
    assert request.infer(np.ones((3, 4), np.float32))[0].sum() == 12


@pytest.mark.parametrize("device", ["REFERENCE", "CPU", "HETERO:CPU,REFERENCE", "MULTI:CPU"])
def test_a_value_that_is_an_output_twice(device: str) -> None:
    """ONNX allows it: one name, two positions."""
    x = sg.input("x", (2,))
    y = ops.Relu(x, name="y")
    model = sg.compile_model(sg.Graph([x], [y, x, y, ops.Neg(y, name="z")]), device)
    stream = io.BytesIO()
    model.export_model(stream)
    stream.seek(0)
    given = np.array([1, -2], np.float32)
    relu = np.maximum(given, 0)
    for each in (model, sg.import_model(stream)):
        for results in (each(given), each.create_infer_request().infer(given)):
            assert len(each.outputs) == 4
            assert list(results) == ["y", "x", "z"]
            np.testing.assert_array_equal(results.to_tuple(), [relu, given, relu, -relu])
            np.testing.assert_array_equal(list(results.to_dict().values()), [relu, given, -relu])
            assert "Results({'y'" in repr(results)


WORDS = np.array(["ab", "żó"])


@pytest.mark.parametrize(
    "given",
    [
        WORDS,
        WORDS.astype(object),
        np.char.encode(WORDS, "utf-8"),
        [w.encode() for w in WORDS],
        np.char.encode(WORDS, "utf-8").astype(object),
    ],
    ids=["text", "objects", "bytes", "list of bytes", "objects of bytes"],
)
@pytest.mark.parametrize("device", ["CPU", "REFERENCE"])
def test_strings_may_be_text_or_bytes_in_utf_8(given: Any, device: str) -> None:
    words = sg.input("words", (2,), "string")
    codes = {"keys_strings": tuple(WORDS.tolist()), "values_int64s": (1, 2)}
    node = sg.Node("LabelEncoder", [words], domain="ai.onnx.ml", version=2, attrs=codes)
    model = sg.compile_model(sg.Graph([words], node.outputs), device)
    assert model({"words": given})[0].tolist() == [1, 2]
    assert model({"words": WORDS.astype(object)})[0].tolist() == [1, 2]
    assert model({"words": given})[0].tolist() == [1, 2]  # after the same shape and dtype
    with pytest.raises(sg.ShapeError, match="words"):
        model(np.array([b"ab", b"\xff"]))


def test_items_of_a_sequence_are_converted_like_other_inputs() -> None:
    texts = ("string", WORDS), ("string", np.char.encode(WORDS, "utf-8").astype(object))
    for dtype, given in (*texts, ("float32", np.array([1, 2], ">f4"))):
        items = sg.Value("items", sg.SequenceType(sg.TensorType(dtype, (2,))))
        graph = sg.Graph([items], [ops.SequenceAt(items, np.array(0))])
        found = sg.compile_model(graph, "REFERENCE")({"items": [given]})[0]
        assert found.tolist() == (WORDS if dtype == "string" else given).tolist()
        assert found.dtype == {"string": np.dtype(object), "float32": np.dtype("f4")}[dtype]


@pytest.mark.parametrize(
    ("dtype", "given", "reason"),
    [
        ("int4", [1.5, 2], "would change"),
        ("int4", [100, 2], "does not fit"),
        ("uint4", [-1, 2], "does not fit"),
        ("int8", [1.5, 2], "would change"),
        ("int4", [-8, 7], ""),
        ("bfloat16", [1.5, 2], ""),
        ("float8_e5m2", [1, 2], ""),
    ],
)
def test_numbers_of_python_for_dtypes_that_numpy_lacks(
    dtype: str, given: list[float], reason: str
) -> None:
    x = sg.input("x", (2,), dtype)
    model = sg.compile_model(sg.Graph([x], [ops.Identity(x)]), "REFERENCE")
    if not reason:
        assert model({"x": given})[0].astype(float).tolist() == given
        return
    with pytest.raises(sg.ShapeError, match=reason):
        model({"x": given})
