"""AddProducts: adapters of low rank and other sums of products, compared with ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops, passes
from subgraph.passes.patterns import weight_values
from tests.support.peer import check_results, session_of, uniform


def _weight(name: str, *shape: int) -> sg.Value:
    return sg.parameter(name, uniform(*shape, seed=len(name)) / np.float32(4))


def _operators(graph: sg.Graph) -> list[str]:
    """Return the operators on values, sorted, as they are after both passes."""
    graph = passes.apply_pass(graph, ["FoldScale", "AddProducts"])
    known = weight_values(graph)
    return sorted(node.op_type for node in graph.nodes if known.isdisjoint(node.outputs))


def _adapted(x: sg.Value, name: str, inputs: int, outputs: int, rank: int = 4) -> sg.Value:
    """Return a layer with bias and an adapter, as PEFT computes it."""
    layer = ops.Add(
        ops.MatMul(x, _weight(f"{name}.w", inputs, outputs)), _weight(f"{name}.b", outputs)
    )
    low = ops.MatMul(x, _weight(f"{name}.lora_A", inputs, rank))
    high = ops.MatMul(low, _weight(f"{name}.lora_B", rank, outputs))
    return ops.Add(layer, ops.Mul(high, np.float32(0.5)))


@pytest.mark.parametrize("shape", [(3, 16), (2, 3, 16), (2, 1, 1, 16)])
def test_adapters_are_parts_of_the_weights(shape: Sequence[int]) -> None:
    x = sg.input("x", tuple(shape))
    y = ops.Relu(_adapted(x, "first", 16, 24))
    graph = sg.Graph([x], [_adapted(y, "second", 24, 8)])
    assert _operators(graph) == ["Add", "Add", "MatMul", "MatMul", "Relu"]
    for device in ("CPU", "OPENCL"):
        model = sg.compile_model(graph, device)
        check_results(model, session_of(graph), [uniform(*shape)], tolerance=1e-4)


def test_several_adapters_of_one_layer() -> None:
    x = sg.input("x", (5, 16))
    y = _adapted(x, "layer", 16, 24)
    for k in "ab":
        low = ops.MatMul(x, _weight(f"{k}.lora_A", 16, 2))
        y = ops.Add(ops.MatMul(low, _weight(f"{k}.lora_B", 2, 24)), y)
    graph = sg.Graph([x], [y])
    assert _operators(graph) == ["Add", "MatMul"]
    check_results(
        sg.compile_model(graph, "CPU"), session_of(graph), [uniform(5, 16)], tolerance=1e-4
    )


def test_another_adapter_is_assigned_to_the_parameters() -> None:
    x = sg.input("x", (5, 16))
    graph = sg.Graph([x], [_adapted(x, "layer", 16, 24)])
    model, inputs = sg.compile_model(graph, "CPU"), [uniform(5, 16)]
    for name in ("layer.lora_A", "layer.lora_B", "layer.w", "layer.b"):
        parameter = graph.parameters[name]
        parameter.assign(np.asarray(parameter.array) * np.float32(3))
        check_results(model, session_of(graph), inputs, tolerance=1e-4)


def test_other_sums_stay() -> None:
    x, fed = sg.input("x", (5, 16)), sg.input("fed", (16, 24))

    def products(y: sg.Value, *others: sg.Value) -> int:
        return _operators(sg.Graph([x, fed], [y, *others])).count("MatMul")

    def product(name: str, of: sg.Value = x, *sizes: int) -> sg.Value:
        return ops.MatMul(of, _weight(name, *sizes or (16, 24)))

    used = product("w")
    assert products(ops.Add(used, product("v")), ops.Relu(used)) == 2
    assert products(ops.Add(used, product("v")), used) == 2
    assert products(ops.Add(product("w"), product("v", ops.Relu(x)))) == 2
    assert products(ops.Add(product("w"), ops.MatMul(x, fed))) == 2
    # Columns of one weight, and matrices of a batch, are broadcast.
    assert products(ops.Add(product("w"), product("v", x, 16, 1))) == 2
    assert products(ops.Add(product("w"), product("v", x, 3, 16, 24))) == 2
    # A number for each row is not a part of the weights.
    rows = ops.Add(product("w"), _weight("rows", 5, 1))
    assert products(ops.Add(rows, product("v"))) == 2
    # The product with A alone is used as well.
    low = product("lora_A", x, 16, 4)
    assert products(ops.Add(product("w"), product("lora_B", low, 4, 24)), low) == 3
    assert products(ops.Add(product("w"), product("v"))) == 1


@pytest.mark.parametrize("form", ["Cast", "DequantizeLinear"])
@pytest.mark.parametrize("moved", [False, True])
def test_weights_of_fewer_bits_stay_as_they_are_stored(form: str, moved: bool) -> None:
    x = sg.input("x", (3, 32))
    if form == "Cast":
        stored = sg.parameter("w", uniform(32, 32).astype(np.float16))
        weight = ops.Cast(stored, to=1)
    else:
        bytes_ = (uniform(32, 32) * 100).astype(np.int8)
        weight = ops.DequantizeLinear(sg.parameter("w", bytes_), np.float32(0.01))
    weight = ops.Transpose(weight, perm=[1, 0]) if moved else weight
    low = ops.MatMul(ops.MatMul(x, _weight("lora_A", 32, 4)), _weight("lora_B", 4, 32))
    graph = sg.Graph([x], [ops.Add(ops.MatMul(x, weight), low)])
    assert _operators(graph) == ["Add", "MatMul", "MatMul", "MatMul"]
    # ONNX Runtime rounds x to bytes where W is quantized, so that it is no peer here.
    given = [uniform(3, 32)]
    exact = sg.compile_model(graph, "REFERENCE")(given)[0]
    np.testing.assert_allclose(sg.compile_model(graph, "CPU")(given)[0], exact, atol=1e-4)


def test_long_sums_do_not_recurse() -> None:
    x = sg.input("x", (2, 4))
    y = ops.MatMul(x, _weight("w", 4, 4))
    for k in range(3000):
        y = ops.Add(y, _weight(f"b{k}", 4))
    assert len(passes.apply_pass(sg.Graph([x], [y]), "AddProducts").nodes) == 3001
