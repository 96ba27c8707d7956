"""Fusions of the CPU device: every spelling is found, gives the same, swallows nothing needed."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import count
from typing import Any

import numpy as np
import onnx
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
)
from tests.passes.fusions import check, fused_ops, number, values, weight

fresh = count()


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


@pytest.mark.parametrize("form", ["gelu", "hard swish"])
def test_constants_of_more_axes_give_the_result_their_axes(form: str) -> None:
    x = sg.input("x", (4, 8), "float32")
    added = {"gelu": 1.0, "hard swish": 3.0}[form]
    wide = sg.parameter("wide", np.full((1, 1, 1), added, np.float32))
    if form == "gelu":
        plus = ops.Add(ops.Erf(ops.Div(x, number("root", math.sqrt(2)))), wide)
        made = ops.Mul(ops.Mul(x, plus), number("half", 0.5))
    else:
        part = ops.Clip(ops.Add(x, wide), number("zero", 0.0), number("six", 6.0))
        made = ops.Div(ops.Mul(x, part), number("d", 6.0))
    check(sg.Graph([x], [made]), 4 * values(4, 8))


def test_a_bias_added_to_a_gemm_has_no_factor() -> None:
    x = sg.input("x", (4, 8), "float32")
    made = ops.Gemm(x, weight("w", 8, 20), alpha=0.5, beta=3.0)
    graph = sg.Graph([x], [ops.Relu(ops.Add(made, weight("b", 20)))])
    assert fused_ops(graph) == ["FusedMatMul"]
    check(graph, values(4, 8))


def _old_model(
    nodes: list[onnx.NodeProto], inputs: dict[str, list[int]], weights: dict[str, Array]
) -> sg.Graph:
    """Return a model of opset 6, before which NumPy's rules of broadcasting did not hold."""
    ends = [
        onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape)
        for name, shape in (*inputs.items(), ("y", inputs["x"]))
    ]
    constants = [onnx.numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = onnx.helper.make_graph(nodes, "old", ends[:-1], ends[-1:], constants)
    opsets = [onnx.helper.make_opsetid("", 6)]
    return sg.load(onnx.helper.make_model(graph, opset_imports=opsets, ir_version=3))


def test_slopes_of_channels_of_old_opsets_in_a_loop() -> None:
    node = onnx.helper.make_node
    nodes = [node("PRelu", ["x", "slope"], ["p"]), node("Sigmoid", ["p"], ["y"])]
    graph = _old_model(nodes, {"x": [2, 3, 3, 3]}, {"slope": values(3)})
    check(graph, values(2, 3, 3, 3))


@pytest.mark.parametrize("form", ["products", "norm", "attention"])
def test_no_pattern_of_operands_aligned_at_an_axis(form: str) -> None:
    """Before opset 7, the attribute ``axis`` says where the second operand broadcasts."""
    node = onnx.helper.make_node
    first: dict[str, Any] = {"broadcast": 1, "axis": 0}
    weights = {"a": values(4), "w": values(4, 4), "v": values(4, 4)}
    shape = [4, 4]
    if form == "products":
        nodes = [
            node("MatMul", ["x", "w"], ["one"]),
            node("MatMul", ["x", "v"], ["product"]),
            node("Add", ["product", "a"], ["other"], **first),
            node("Add", ["one", "other"], ["y"]),
        ]
    elif form == "norm":
        weights["epsilon"] = np.array([1e-5], np.float32)
        nodes = [
            node("Mul", ["x", "x"], ["square"]),
            node("ReduceMean", ["square"], ["mean"], axes=[1]),
            node("Add", ["mean", "epsilon"], ["plus"], broadcast=1),
            node("Sqrt", ["plus"], ["root"]),
            node("Div", ["x", "root"], ["norm"], broadcast=1),
            node("Mul", ["norm", "a"], ["y"], **first),
        ]
    else:
        shape = [4, 4, 4]
        nodes = [
            node("Transpose", ["x"], ["transposed"], perm=[0, 2, 1]),
            node("MatMul", ["x", "transposed"], ["scores"]),
            node("Add", ["scores", "w"], ["masked"], **first),
            node("Softmax", ["masked"], ["soft"], axis=2),
            node("MatMul", ["soft", "x"], ["y"]),
        ]
    check(_old_model(nodes, {"x": shape}, weights), values(*shape))


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
