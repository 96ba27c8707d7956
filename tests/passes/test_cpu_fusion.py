"""Fusions of the CPU device: every spelling is found, gives the same, swallows nothing needed."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops, passes
from subgraph.graph.types import Array
from subgraph.ops.shared.activations import ACTIVATIONS
from subgraph.passes.fuse import cpu_fusion
from subgraph.passes.patterns import (
    MATCHERS,
    Context,
    Match,
    fusions,
    pattern,
    weight_values,
)

rng = np.random.default_rng(0)
fresh = count()


def values(*shape: int) -> Array:
    return rng.standard_normal(shape).astype(np.float32)


def weight(name: str, *shape: int) -> sg.Value:
    return sg.parameter(name, values(*shape))


def number(name: str, value: float) -> sg.Value:
    return sg.parameter(name, np.float32(value))


def fused_ops(graph: sg.Graph) -> list[str]:
    """Return the operators that run, without those on weights alone."""
    fused = passes.apply_pass(graph, "CpuFusion")
    fused.verify()
    weights = weight_values(fused)
    return [node.op_type for node in fused.nodes if node.outputs[0] not in weights]


def check(graph: sg.Graph, *inputs: Array) -> None:
    want = sg.compile_model(graph, "REFERENCE")(list(inputs))
    got = sg.compile_model(graph, "CPU")(list(inputs))
    for k in range(len(want)):
        scale = float(np.abs(want[k]).max())
        np.testing.assert_allclose(got[k], want[k], rtol=0, atol=2e-5 * scale)


# ---------------------------------------------------------------- GELU


def gelu_torchscript(x: Any) -> Any:
    plus = ops.Add(ops.Erf(ops.Div(x, number("root", math.sqrt(2)))), number("one", 1.0))
    return ops.Mul(ops.Mul(x, plus), number("half", 0.5))


def gelu_dynamo(x: Any) -> Any:
    plus = ops.Add(ops.Erf(ops.Div(x, number("root", math.sqrt(2)))), number("one", 1.0))
    return ops.Mul(x, ops.Mul(number("half", 0.5), plus))


def gelu_half_first(x: Any) -> Any:
    plus = ops.Add(number("one", 1.0), ops.Erf(ops.Mul(x, number("root", math.sqrt(0.5)))))
    return ops.Mul(ops.Mul(x, number("half", 0.5)), plus)


def gelu_tanh_pow(x: Any) -> Any:
    cube = ops.Mul(ops.Pow(x, number("three", 3.0)), number("k", 0.044715))
    inside = ops.Mul(ops.Add(x, cube), number("slope", math.sqrt(2 / math.pi)))
    plus = ops.Add(ops.Tanh(inside), number("one", 1.0))
    return ops.Mul(ops.Mul(x, number("half", 0.5)), plus)


def gelu_tanh_products(x: Any) -> Any:
    square = ops.Mul(ops.Mul(x, x), number("k", 0.044715))
    inside = ops.Mul(ops.Mul(x, number("slope", math.sqrt(2 / math.pi))), ops.Add(square, one()))
    return ops.Mul(ops.Mul(x, ops.Add(ops.Tanh(inside), one())), number("half", 0.5))


def one() -> sg.Value:
    return number(f"one{next(fresh)}", 1.0)


GELUS: list[Callable[[Any], Any]] = [
    gelu_torchscript,
    gelu_dynamo,
    gelu_half_first,
    gelu_tanh_pow,
    gelu_tanh_products,
]


@pytest.mark.parametrize("spelled", GELUS, ids=lambda f: f.__name__)
def test_gelu_in_every_spelling(spelled: Callable[[Any], Any]) -> None:
    x = sg.input("x", ("N", 8), "float32")
    graph = sg.Graph([x], [spelled(x)])
    assert fused_ops(graph) == ["Gelu"]
    check(graph, 3 * values(5, 8))


@pytest.mark.parametrize("spelled", GELUS, ids=lambda f: f.__name__)
def test_gelu_after_a_product(spelled: Callable[[Any], Any]) -> None:
    x = sg.input("x", ("N", 8), "float32")
    linear = ops.Add(ops.MatMul(x, weight("w", 8, 20)), weight("b", 20))
    graph = sg.Graph([x], [spelled(linear)])
    assert fused_ops(graph) == ["FusedMatMul"]
    check(graph, values(5, 8))


def test_no_gelu_with_other_numbers() -> None:
    x = sg.input("x", (4, 8), "float32")
    plus = ops.Add(ops.Erf(ops.Div(x, number("root", 1.5))), number("one", 1.0))
    graph = sg.Graph([x], [ops.Mul(ops.Mul(x, plus), number("half", 0.5))])
    assert fused_ops(graph) == ["FusedElementwise"]
    check(graph, values(4, 8))


def test_a_value_needed_elsewhere_is_not_swallowed() -> None:
    x = sg.input("x", (4, 8), "float32")
    erf = ops.Erf(ops.Div(x, number("root", math.sqrt(2))))
    made = ops.Mul(ops.Mul(x, ops.Add(erf, number("one", 1.0))), number("half", 0.5))
    graph = sg.Graph([x], [made, erf])
    assert "Gelu" not in fused_ops(graph)
    check(graph, values(4, 8))


def test_silu_and_hard_swish() -> None:
    x = sg.input("x", (4, 8), "float32")
    graph = sg.Graph([x], [ops.Mul(x, ops.Sigmoid(x))])
    assert fused_ops(graph) == ["Swish"]
    check(graph, values(4, 8))
    graph = sg.Graph([x], [ops.Mul(ops.HardSigmoid(x, alpha=1 / 6, beta=0.5), x)])
    assert fused_ops(graph) == ["HardSwish"]
    check(graph, values(4, 8))


def clipped(x: Any) -> Any:
    return ops.Clip(ops.Add(number("three", 3.0), x), number("zero", 0.0), number("six", 6.0))


HARD_SWISHES: dict[str, Callable[[Any], Any]] = {
    "product, quotient": lambda x: ops.Div(ops.Mul(x, clipped(x)), number("d", 6.0)),
    "quotient, product": lambda x: ops.Mul(ops.Div(clipped(x), number("d", 6.0)), x),
    "two products": lambda x: ops.Mul(number("d", 1 / 6), ops.Mul(clipped(x), x)),
}


@pytest.mark.parametrize("form", HARD_SWISHES)
def test_hard_swish_of_primitives(form: str) -> None:
    x = sg.input("x", (2, 8, 5, 5), "float32")
    alone = sg.Graph([x], [HARD_SWISHES[form](x)])
    assert fused_ops(alone) == ["HardSwish"]
    check(alone, 4 * values(2, 8, 5, 5))
    y = ops.Conv(x, weight("w", 16, 8, 1, 1))
    after = sg.Graph([x], [HARD_SWISHES[form](y)])
    assert fused_ops(after) == ["FusedConv"]
    check(after, 4 * values(2, 8, 5, 5))


def test_no_hard_swish_with_other_numbers_or_operands() -> None:
    x, z = (sg.input(name, (4, 8), "float32") for name in "xz")
    part = ops.Clip(ops.Add(x, number("two", 2.0)), number("zero", 0.0), number("six", 6.0))
    for made in (
        ops.Div(ops.Mul(x, part), number("d", 6.0)),
        ops.Div(ops.Mul(x, clipped(x)), number("d", 5.0)),
        ops.Div(ops.Mul(z, clipped(x)), number("d", 6.0)),
    ):
        graph = sg.Graph([x, z], [made])
        assert fused_ops(graph) == ["FusedElementwise"]
        check(graph, 4 * values(4, 8), values(4, 8) + 5)


def test_mish_of_primitives() -> None:
    x = sg.input("x", (2, 8, 5, 5), "float32")
    alone = sg.Graph([x], [ops.Mul(x, ops.Tanh(ops.Softplus(x)))])
    assert fused_ops(alone) == ["Mish"]
    check(alone, values(2, 8, 5, 5))
    y = ops.Conv(x, weight("w", 16, 8, 1, 1))
    after = sg.Graph([x], [ops.Mul(ops.Tanh(ops.Softplus(y)), y)])
    assert fused_ops(after) == ["FusedConv"]
    check(after, values(2, 8, 5, 5))


# ---------------------------------------------------------------- normalizations


def axes(*numbers: int) -> sg.Value:
    return sg.parameter(f"axes{next(fresh)}", np.array(numbers))


def layer_norm(x: Any, *, division: str = "div", square: str = "pow", bias: bool = True) -> Any:
    centered = ops.Sub(x, ops.ReduceMean(x, axes(-1)))
    if square == "pow":
        squared = ops.Pow(centered, number("two", 2.0))
    else:
        squared = ops.Mul(centered, centered)
    root = ops.Sqrt(ops.Add(ops.ReduceMean(squared, axes(-1)), number("epsilon", 1e-5)))
    made = ops.Div(centered, root) if division == "div" else ops.Mul(centered, ops.Reciprocal(root))
    made = ops.Mul(made, weight("scale", 12))
    return ops.Add(made, weight("bias", 12)) if bias else made


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("square", ["pow", "mul"])
@pytest.mark.parametrize("division", ["div", "reciprocal"])
def test_layer_norm_in_every_spelling(division: str, square: str, bias: bool) -> None:
    x = sg.input("x", ("N", 5, 12), "float32")
    graph = sg.Graph([x], [layer_norm(x, division=division, square=square, bias=bias)])
    assert fused_ops(graph) == ["LayerNormalization"]
    check(graph, values(2, 5, 12))


def test_layer_norm_follows_its_weights() -> None:
    x = sg.input("x", (2, 5, 12), "float32")
    graph = sg.Graph([x], [layer_norm(x)])
    model, reference = sg.compile_model(graph, "CPU"), sg.compile_model(graph, "REFERENCE")
    data = values(2, 5, 12)
    model(data)
    for name in ("scale", "bias", "epsilon"):
        parameter = model.parameters[name]
        parameter.assign(parameter.array * 2 + 1)
        np.testing.assert_allclose(model(data)[0], reference(data)[0], rtol=1e-4, atol=1e-5)


def test_rms_norm() -> None:
    x = sg.input("x", ("N", 5, 12), "float32")
    square = ops.Pow(x, number("two", 2.0))
    root = ops.Sqrt(ops.Add(ops.ReduceMean(square, axes(-1)), number("epsilon", 1e-5)))
    made = ops.Mul(weight("scale", 12), ops.Mul(x, ops.Div(number("one", 1.0), root)))
    graph = sg.Graph([x], [made])
    assert fused_ops(graph) == ["RMSNormalization"]
    check(graph, values(2, 5, 12))


def test_softmax_spelled_out() -> None:
    x = sg.input("x", ("N", 5, 12), "float32")
    power = ops.Exp(ops.Sub(x, ops.ReduceMax(x, axes(-1))))
    graph = sg.Graph([x], [ops.Div(power, ops.ReduceSum(power, axes(-1)))])
    assert fused_ops(graph) == ["Softmax"]
    check(graph, values(2, 5, 12))


# ---------------------------------------------------------------- attention


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
    """Batches and heads in one dimension; the dynamo exporter splits them off after K is turned."""
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


# ---------------------------------------------------------------- convolutions and chains


def test_a_scale_chain_as_light_models_write_it() -> None:
    x = sg.input("x", (1, 3, 9, 9), "float32")
    conv = ops.Conv(x, weight("w", 20, 3, 3, 3))
    parts = [weight(n, 20) for n in ("scale", "bias", "mean")]
    norm = ops.BatchNormalization(conv, *parts, sg.parameter("var", np.abs(values(20)) + 0.5))
    scaled = ops.Mul(norm, ops.Unsqueeze(weight("s", 20), axes(1, 2)))
    shifted = ops.Add(scaled, ops.Unsqueeze(weight("t", 20), axes(1, 2)))
    graph = sg.Graph([x], [ops.Relu(shifted)])
    assert fused_ops(graph) == ["FusedConv"]
    check(graph, values(1, 3, 9, 9))
    query = sg.query_model(graph, "CPU")
    assert {node.name for node in graph.nodes} == set(query)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_norm_goes_into_a_transposed_convolution(groups: int) -> None:
    x = sg.input("x", (1, 6, 5, 4), "float32")
    w = weight("w", 6, 8 // groups, 4, 4)
    conv = ops.ConvTranspose(x, w, weight("b", 8), strides=[2, 2], pads=[1] * 4, group=groups)
    parts = [weight(n, 8) for n in ("scale", "bias", "mean")]
    norm = ops.BatchNormalization(conv, *parts, sg.parameter("var", np.abs(values(8)) + 0.5))
    graph = sg.Graph([x], [ops.Mul(norm, weight("s", 8, 1, 1))])
    found = fused_ops(graph)
    assert found == (["ConvTranspose"] if groups == 1 else ["ConvTranspose", "FusedElementwise"])
    check(graph, values(1, 6, 5, 4))


def test_norms_between_convolutions_go_into_both() -> None:
    x = at = sg.input("x", (1, 16, 6, 6), "float32")
    for name in ("a", "b", "c"):
        at = ops.Conv(at, weight(f"w{name}", 16, 16, 1, 1))
        parts = [weight(f"{part}{name}", 16) for part in ("scale", "bias", "mean")]
        variance = sg.parameter(f"var{name}", np.abs(values(16)) + 0.5)
        at = ops.BatchNormalization(at, *parts, variance)
    graph = sg.Graph([x], [at])
    assert fused_ops(graph) == ["Conv"] * 3
    check(graph, values(1, 16, 6, 6))


@pytest.mark.parametrize("op", ["Add", "Sum"])
def test_a_residual_joins_once(op: str) -> None:
    x, z = (sg.input(name, (1, 16, 6, 6), "float32") for name in "xz")
    left = ops.Conv(x, weight("l", 16, 16, 1, 1))
    right = ops.Conv(z, weight("r", 16, 16, 3, 3), pads=[1, 1, 1, 1])
    graph = sg.Graph([x, z], [ops.Relu(getattr(ops, op)(left, right))])
    assert sorted(fused_ops(graph)) == ["Conv", "FusedConv"]
    check(graph, values(1, 16, 6, 6), values(1, 16, 6, 6))


def test_a_convolution_added_to_its_own_input() -> None:
    x = sg.input("x", (1, 16, 6, 6), "float32")
    graph = sg.Graph([x], [ops.Add(ops.Conv(x, weight("w", 16, 16, 1, 1)), x)])
    assert fused_ops(graph) == ["FusedConv"]
    check(graph, values(1, 16, 6, 6))


def test_a_norm_that_stands_alone_is_one_loop() -> None:
    x = sg.input("x", (2, 5, 6, 7), "float32")
    parts = [weight(n, 5) for n in ("scale", "bias", "mean")]
    norm = ops.BatchNormalization(x, *parts, sg.parameter("var", np.abs(values(5)) + 0.5))
    graph = sg.Graph([x], [ops.Relu(ops.Mul(norm, weight("s", 5, 1, 1)))])
    assert fused_ops(graph) == ["FusedElementwise"]
    check(graph, values(2, 5, 6, 7))


def test_a_spelled_out_activation_joins_the_loop_around_it() -> None:
    # Torch writes a group norm's scale, its shift and SiLU so.
    x = sg.input("x", (2, 6, 5), "float32")
    scaled: Any = ops.Mul(x, sg.parameter("scale", values(6, 1)))
    shifted = ops.Add(scaled, sg.parameter("shift", values(6, 1)))
    graph = sg.Graph([x], [ops.Neg(ops.Mul(shifted, ops.Sigmoid(shifted)))])
    assert fused_ops(graph) == ["FusedElementwise"]
    check(graph, 3 * values(2, 6, 5))


def test_an_elementwise_diamond_is_one_loop() -> None:
    x = sg.input("x", (3, 40), "float32")
    a = ops.Exp(ops.Neg(ops.Abs(x)))
    made = ops.Div(ops.Sub(a, weight("w", 40)), ops.Add(a, number("one", 1.0)))
    graph = sg.Graph([x], [made])
    assert fused_ops(graph) == ["FusedElementwise"]
    check(graph, values(3, 40))


def test_an_inner_value_that_is_an_output_stays() -> None:
    x = sg.input("x", (3, 40), "float32")
    a = ops.Exp(x)
    graph = sg.Graph([x], [ops.Neg(ops.Sqrt(a)), a])
    assert fused_ops(graph) == ["Exp", "FusedElementwise"]
    check(graph, values(3, 40))


@pytest.mark.parametrize(
    ("name", "attributes"),
    [
        *(
            (name, {key: default + 0.1 for key, default in form.parameters})
            for name, form in ACTIVATIONS.items()
            if name not in ("Clip", "GeluTanh", "Silu")
        ),
        ("Gelu", {"approximate": "tanh"}),
        ("Swish", {}),
    ],
)
def test_activations_after_convolution_and_product(name: str, attributes: dict[str, Any]) -> None:
    x = sg.input("x", (1, 8, 6, 6), "float32")
    act = getattr(ops, name)
    graph = sg.Graph([x], [act(ops.Conv(x, weight("w", 24, 8, 3, 3)), **attributes)])
    assert fused_ops(graph) == ["FusedConv"]
    check(graph, values(1, 8, 6, 6))
    y = sg.input("y", (5, 8), "float32")
    product = ops.Gemm(y, weight("v", 8, 9), weight("c", 9), alpha=0.5, beta=2.0)
    graph = sg.Graph([y], [act(product, **attributes)])
    assert fused_ops(graph) == ["FusedMatMul"]
    check(graph, values(5, 8))


def test_passes_run_where_there_is_something_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    applied: list[str] = []
    apply = cpu_fusion.apply_pass

    def listening(graph: sg.Graph, which: Any, **options: Any) -> sg.Graph:
        names = [which] if isinstance(which, str) else which
        found = [p.name for p in options.get("properties", ())]
        applied.extend([*names, *found])
        return apply(graph, which, **options)

    monkeypatch.setattr(cpu_fusion, "apply_pass", listening)
    x = sg.input("x", shape=(1, 3, 8, 8), dtype="float32")
    passes.apply_pass(sg.Graph([x], [ops.Relu(x)]), "CpuFusion")
    needy = {"PadDynamicOutputs", "ConstantsToParameters", "ReshapeFirst"}
    assert {"PartitionGraph", "FoldScale"} <= set(applied)
    assert not {*needy, "cpu_transformer", "cpu_activation", "cpu_epilogue"} & set(applied)
    applied.clear()
    y = ops.Pad(ops.Transpose(x, perm=[0, 1, 3, 2]), ops.Constant(value_ints=[0] * 8))
    z = ops.NonZero(ops.Mul(y, ops.Sigmoid(y)))
    passes.apply_pass(sg.Graph([x], [z, ops.ReduceMean(y)]), "CpuFusion")
    assert {*needy, "cpu_transformer", "cpu_activation"} <= set(applied)


def test_a_fusion_is_declared_where_it_is_written() -> None:
    """A new one is one file: `CpuFusion` finds its stage and what it needs by the registry."""

    @pattern("activation", "Sinh", needs=("Asinh",))
    def tangent(context: Context, node: sg.Node) -> Match | None:
        user = context.sole_user(node.outputs[0], "Asinh")
        if user is None:
            return None
        return Match((node, user), "Neg", node.inputs, domain="", version=13, opaque=False)

    x = sg.input("x", (3,))
    graph = sg.Graph([x], [ops.Asinh(ops.Sinh(x))])
    try:
        fused = passes.apply_pass(graph, "CpuFusion")
        assert [node.op_type for node in fused.nodes] == ["Neg"]
        assert tangent in fusions(MATCHERS, "activation", {"Sinh", "Asinh"})
        assert tangent not in fusions(MATCHERS, "activation", {"Sinh", "Relu"})
        assert tangent not in fusions(MATCHERS, "epilogue")
    finally:
        MATCHERS.unregister("activation tangent")


def test_reasons_and_names_survive_fusion() -> None:
    x = sg.input("x", (1, 8, 6, 6), "float32")
    y = ops.Relu(ops.Conv(x, weight("w", 8, 8, 1, 1), name="conv"), name="act")
    graph = sg.Graph([x], [ops.Relu(ops.Det(y, name="det"), name="end")])
    found = sg.query_model(graph, "CPU")
    assert {"conv", "act", "end"} == set(found)
    assert "det" in found.reasons


def test_a_pattern_that_would_never_run_is_refused() -> None:
    wrong: Any = "activatio"
    with pytest.raises(sg.PassError, match="'activatio'; did you mean 'activation'"):
        pattern(wrong, "Exp")
    with pytest.raises(sg.PassError, match="name the operators"):
        pattern("activation")


@pytest.mark.parametrize("answer", [True, "error"])
def test_an_error_of_a_pattern_names_it(answer: Any) -> None:
    def faulty_pattern(context: Context, node: sg.Node) -> Any:
        return {}[answer] if answer == "error" else answer

    x = sg.input("x", (2,))
    graph = sg.Graph([x], [ops.Sinh(x, name="start")])
    faulty = pattern("activation", "Sinh")(faulty_pattern)
    try:
        with pytest.raises(
            sg.PassError, match=r"test_cpu_fusion.py:.*faulty_pattern (raised KeyError|gave True)"
        ):
            passes.apply_pass(graph, "CpuFusion")
    finally:
        MATCHERS.unregister(f"activation {faulty.__name__}")
