"""Attention from primitives: every spelling is found and computes the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from tests.passes.fusions import check, fused_ops, number, values, weight


def attention(x: Any, *, mask: Any = None, scale: str) -> Any:
    shape = sg.parameter("split", np.array([0, 0, 4, 6]))

    def heads(name: str) -> Any:
        linear = ops.Add(ops.MatMul(x, weight(f"w{name}", 24, 24)), weight(f"b{name}", 24))
        return ops.Reshape(linear, shape)

    q = ops.Transpose(heads("q"), perm=[0, 2, 1, 3])
    k = ops.Transpose(heads("k"), perm=[0, 2, 3, 1])
    v = ops.Transpose(heads("v"), perm=[0, 2, 1, 3])
    if scale == "both":
        q, k = ops.Mul(q, number("rq", 6**-0.25)), ops.Mul(k, number("rk", 6**-0.25))
    scores = ops.MatMul(q, k)
    if scale == "mul":
        scores = ops.Mul(scores, number("r", 6**-0.5))
    elif scale == "div":
        scores = ops.Div(scores, number("r", 6**0.5))
    if mask is not None:
        scores = ops.Add(scores, mask)
    made = ops.Transpose(ops.MatMul(ops.Softmax(scores), v), perm=[0, 2, 1, 3])
    return ops.Reshape(made, sg.parameter("join", np.array([0, 0, 24])))


@pytest.mark.parametrize("scale", ["mul", "div", "both", ""])
@pytest.mark.parametrize("mask", [True, False])
def test_attention_with_its_heads(mask: bool, scale: str) -> None:
    x = sg.input("x", (2, 7, 24), "float32")
    inputs = [x, sg.input("mask", (2, 1, 1, 7), "float32")] if mask else [x]
    made = attention(x, mask=inputs[1] if mask else None, scale=scale)
    graph = sg.Graph(inputs, [made])
    assert sorted(fused_ops(graph)) == ["Attention", *["FusedMatMul"] * 3]
    given = [values(2, 7, 24)]
    if mask:
        given.append(np.where(np.arange(7) < 5, 0, -1e4).astype(np.float32) * np.ones((2, 1, 1, 1)))
        given[1] = given[1].astype(np.float32)
    check(graph, *given)


def test_attention_on_heads_that_were_there() -> None:
    shape = (2, 4, 7, 6)
    q, k, v = (sg.input(name, shape, "float32") for name in "qkv")
    scores = ops.Mul(ops.MatMul(q, ops.Transpose(k, perm=[0, 1, 3, 2])), number("r", 0.4))
    graph = sg.Graph([q, k, v], [ops.MatMul(ops.Softmax(scores, axis=-1), v)])
    assert fused_ops(graph) == ["Attention"]
    check(graph, values(*shape), values(*shape), values(*shape))


@pytest.mark.parametrize("device", ["CPU", "OPENCL"])
@pytest.mark.parametrize("rows", [7, "T"])
@pytest.mark.parametrize("keys", [1, "S"])
def test_a_mask_of_one_key_is_added_to_all(keys: int | str, rows: int | str, device: str) -> None:
    shape = (2, 4, 7, 6)
    q, k, v = (sg.input(name, shape, "float32") for name in "qkv")
    mask = sg.input("mask", (1, 1, rows, keys), "float32")
    scores = ops.Add(ops.MatMul(q, ops.Transpose(k, perm=[0, 1, 3, 2])), mask)
    graph = sg.Graph([q, k, v, mask], [ops.MatMul(ops.Softmax(scores, axis=-1), v)])
    given = [values(*shape), values(*shape), values(*shape), values(1, 1, 7, 1)]
    want = sg.compile_model(graph, "REFERENCE")(given)[0]
    got = sg.compile_model(graph, device)(given)[0]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_scores_divided_by_zero_are_no_attention() -> None:
    shape = (2, 4, 7, 6)
    q, k, v = (sg.input(name, shape, "float32") for name in "qkv")
    scores = ops.Div(ops.MatMul(q, ops.Transpose(k, perm=[0, 1, 3, 2])), number("r", 0.0))
    graph = sg.Graph([q, k, v], [ops.MatMul(ops.Softmax(scores, axis=-1), v)])
    assert "Attention" not in fused_ops(graph)
    with np.errstate(all="ignore"):
        got = sg.compile_model(graph, "CPU")([values(*shape)] * 3)[0]
    assert np.isnan(got).all()


@pytest.mark.parametrize("device", ["CPU", "OPENCL"])
@pytest.mark.parametrize("queries", [1, 7, 40])
def test_attention_with_weights_of_nan_replaced(queries: int, device: str) -> None:
    """PyTorch's exporter gives 0 for queries that see no key; so does one with a score of NaN."""
    shape, few = (2, 4, 40, 6), (2, 4, queries, 6)
    q, k, v = (sg.input(n, s, "float32") for n, s in zip("qkv", (few, shape, shape), strict=True))
    mask = sg.input("mask", (2, 1, queries, 40), "float32")
    scores = ops.Add(ops.MatMul(q, ops.Transpose(k, perm=[0, 1, 3, 2])), mask)
    soft = ops.Softmax(scores, axis=-1)
    weights = ops.Where(ops.IsNaN(soft), np.float32(0), soft)
    graph = sg.Graph([q, k, v, mask], [ops.MatMul(weights, v)])
    assert fused_ops(graph) == ["Attention"]
    given = [values(*few), values(*shape), values(*shape)]
    hidden = np.zeros((2, 1, queries, 40), np.float32)
    hidden[0, :, queries // 2] = -np.inf
    hidden[1, :, :, 30:] = -np.inf
    given[0][1, 2, -1, 3] = np.nan
    want = sg.compile_model(graph, "REFERENCE")([*given, hidden])[0]
    got = sg.compile_model(graph, device)([*given, hidden])[0]
    assert not np.isnan(got).any()
    assert not got[0, :, queries // 2].any()
    assert not got[1, 2, -1].any()
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("device", ["CPU", "OPENCL"])
@pytest.mark.parametrize("queries", [1, 40])
@pytest.mark.parametrize("divisor", [3.0, 2.0])
def test_attention_with_bounded_scores(divisor: float, queries: int, device: str) -> None:
    """Gemma 2 bounds its scores before it adds the mask."""
    shape, few = (2, 4, 40, 6), (2, 4, queries, 6)
    q, k, v = (sg.input(n, s, "float32") for n, s in zip("qkv", (few, shape, shape), strict=True))
    mask = sg.input("mask", (2, 1, queries, 40), "float32")
    scores = ops.Mul(ops.MatMul(q, ops.Transpose(k, perm=[0, 1, 3, 2])), number("r", 0.8))
    scores = ops.Mul(ops.Tanh(ops.Div(scores, number("c", divisor))), number("d", 3.0))
    soft = ops.Softmax(ops.Add(scores, mask), axis=-1)
    graph = sg.Graph([q, k, v, mask], [ops.MatMul(soft, v)])
    assert (fused_ops(graph) == ["Attention"]) == (divisor == 3.0)
    given = [values(*few), values(*shape), values(*shape), values(2, 1, queries, 40)]
    want = sg.compile_model(graph, "REFERENCE")(given)[0]
    got = sg.compile_model(graph, device)(given)[0]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("other", ["value", "condition", "use"])
def test_other_choices_of_weights_are_no_attention(other: str) -> None:
    shape = (1, 2, 5, 6)
    q, k, v = (sg.input(name, shape, "float32") for name in "qkv")
    soft = ops.Softmax(ops.MatMul(q, ops.Transpose(k, perm=[0, 1, 3, 2])), axis=-1)
    test = ops.IsInf(soft) if other == "condition" else ops.IsNaN(soft)
    weights = ops.Where(test, np.float32(0.5 if other == "value" else 0), soft)
    made = ops.MatMul(weights, v)
    graph = sg.Graph([q, k, v], [made, ops.Neg(soft)] if other == "use" else [made])
    assert "Attention" not in fused_ops(graph)
    check(graph, values(*shape), values(*shape), values(*shape))


def test_heads_that_several_share_are_not_copied() -> None:
    """Keys and values that are repeated for heads of queries, as exporters write it."""

    def repeated(x: Any) -> Any:
        length = ops.Shape(x, start=2, end=3)
        whole = ops.Concat(np.array([2, 3, 4]), length, np.array([8]), axis=0)
        heads = ops.Concat(np.array([2, 12]), length, np.array([8]), axis=0)
        return ops.Reshape(ops.Expand(ops.Unsqueeze(x, np.array([2])), whole), heads)

    q = sg.input("q", (2, 12, "S", 8))
    k, v = (sg.input(name, (2, 3, "T", 8)) for name in "kv")
    keys = ops.Transpose(repeated(k), perm=(0, 1, 3, 2))
    scores = ops.Softmax(ops.MatMul(q, keys), axis=-1)
    graph = sg.Graph([q, k, v], [ops.MatMul(scores, repeated(v))])
    model = sg.compile_model(graph, "CPU")
    request = model.create_infer_request()
    reference = sg.compile_model(graph, "REFERENCE")
    for queries, length in ((1, 9), (1, 10), (1, 70), (33, 33), (50, 600)):
        given = [values(2, 12, queries, 8), values(2, 3, length, 8), values(2, 3, length, 8)]
        np.testing.assert_allclose(
            request.infer(given)[0], reference(given)[0], rtol=1e-4, atol=1e-5
        )
        assert {entry.op_type for entry in request.profile()} == {"Attention"}


def test_matrices_of_unknown_length_transposed_between_reshapes() -> None:
    """The dynamo exporter transposes keys of unknown length in a product of all heads."""
    q, k = (sg.input(n, (2, 4, s, 6)) for n, s in (("q", "S"), ("k", "T")))
    v = sg.input("v", (2, 4, "T", 6))
    sizes = [ops.Shape(k, start=at, end=at + 1) for at in range(4)]
    flat = ops.Reshape(k, ops.Concat(np.array([-1]), sizes[2], sizes[3], axis=0))
    shape = ops.Concat(sizes[0], sizes[1], sizes[3], sizes[2], axis=0)
    keys = ops.Reshape(ops.Transpose(flat, perm=(0, 2, 1)), shape)
    graph = sg.Graph([q, k, v], [ops.MatMul(ops.Softmax(ops.MatMul(q, keys), axis=-1), v)])
    assert "Attention" in fused_ops(sg.passes.apply_pass(graph, "InferTypes"))
    check(graph, values(2, 4, 5, 6), values(2, 4, 9, 6), values(2, 4, 9, 6))


@pytest.mark.parametrize("split", ["before", "after"])
@pytest.mark.parametrize("mask", [(), (7, 7), (4, 7, 7)])
def test_attention_of_torch_multihead_attention(split: str, mask: tuple[int, ...]) -> None:
    """Batches and heads in one dimension; the dynamo exporter transposes K first."""
    x = sg.input("x", (7, 1, 24), "float32")

    def heads(name: str) -> Any:
        rows = ops.Reshape(ops.MatMul(x, weight(f"w{name}", 24, 24)), np.array([7, 4, 6]))
        return ops.Transpose(rows, perm=[1, 0, 2])

    q, k, v = (heads(name) for name in "qkv")
    k = ops.Transpose(k, perm=[0, 2, 1])
    if split == "after":
        q, v = (ops.Reshape(part, np.array([1, 4, 7, 6])) for part in (q, v))
        k = ops.Mul(ops.Reshape(k, np.array([1, 4, 6, 7])), number("rk", 6**-0.25))
        q = ops.Mul(q, number("rq", 6**-0.25))
    scores = ops.MatMul(q, k)
    if mask:
        scores = ops.Add(scores, weight("mask", *mask))
    graph = sg.Graph([x], [ops.MatMul(ops.Softmax(scores, axis=-1), v)])
    found = fused_ops(graph)
    # Without a dimension for heads of its own, a mask for each head does not fit.
    assert ("Attention" in found) == (split == "after" or mask != (4, 7, 7))
    check(graph, values(7, 1, 24))
