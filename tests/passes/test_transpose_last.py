"""TransposeLast, and the layer scale of FoldScale: operators between two orders of an image.

The results are compared with those of ONNX Runtime, and the Transposes are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import subgraph as sg
from subgraph import ops, passes
from subgraph.graph.types import Array
from subgraph.passes.patterns import weight_values
from tests.support.peer import check_results, session_of, uniform

LAST, FIRST = [0, 2, 3, 1], [0, 3, 1, 2]
CHANNELS = 32


def _weight(name: str, *shape: int) -> sg.Value:
    """Return a weight; graphs that name one twice get two values of one parameter."""
    parameter = _parameter(name, shape)
    return sg.Value(name, parameter.type, parameter=parameter)


@cache
def _parameter(name: str, shape: tuple[int, ...]) -> sg.Parameter:
    array = uniform(*shape, seed=len(name)) / np.float32(8)
    found = sg.parameter(f"{name}.{shape}", array).parameter
    assert found is not None
    return found


def _conv(x: sg.Value, name: str, groups: int = 1) -> sg.Value:
    channels = CHANNELS // groups
    return ops.Conv(x, _weight(name, CHANNELS, channels, 3, 3), pads=[1] * 4, group=groups)


def _image(batch: int = 1) -> sg.Value:
    return sg.input("x", (batch, CHANNELS, 6, 5))


def _check(graph: sg.Graph, *shapes: Sequence[int]) -> sg.Graph:
    """Compare the rewritten graph and the compiled one with ONNX Runtime; return the former."""
    session = session_of(graph)
    inputs = [uniform(*shape, seed=k) for k, shape in enumerate(shapes)]
    moved = passes.apply_pass(graph, "TransposeLast")
    for each in (moved, graph):
        for threads in (1, 2):
            config = {"INFERENCE_NUM_THREADS": threads}
            check_results(sg.compile_model(each, "CPU", config), session, inputs, tolerance=1e-4)
    return moved


def _count(graph: sg.Graph, op_type: str) -> int:
    return Counter(node.op_type for node in graph.nodes)[op_type]


def _operands(graph: sg.Graph, op_type: str) -> list[str]:
    """Return the operators that compute the first operands of an operator's nodes."""
    nodes = [node for node in graph.nodes if node.op_type == op_type]
    sources = [node.inputs[0].producer for node in nodes if node.inputs[0] is not None]
    return ["" if source is None else source.op_type for source in sources]


def _without_weights(graph: sg.Graph) -> list[str]:
    """Return the operators of a graph that are not computed from weights alone."""
    weights = weight_values(graph)
    return [node.op_type for node in graph.nodes if node.outputs[0] not in weights]


def _block(x: sg.Value, name: str) -> sg.Value:
    """Return a block of ConvNeXt: its residual has the channels first, its products last."""
    rows = ops.Transpose(_conv(x, f"{name}.dw", groups=CHANNELS), perm=LAST)
    wide = ops.Gelu(ops.MatMul(rows, _weight(f"{name}.up", CHANNELS, 48)))
    narrow = ops.Add(
        ops.MatMul(wide, _weight(f"{name}.down", 48, CHANNELS)), _weight("b", CHANNELS)
    )
    scale = _weight(f"{name}.scale", CHANNELS, 1, 1)
    return ops.Add(ops.Mul(ops.Transpose(narrow, perm=FIRST), scale), x)


def test_residuals_of_blocks_stay_in_the_order_of_the_products() -> None:
    x = _image()
    y = ops.Transpose(ops.Transpose(x, perm=LAST), perm=FIRST)  # as after a LayerNormalization
    for k in range(3):
        y = _block(y, f"block{k}")
    graph = sg.Graph([x], [ops.Transpose(y, perm=LAST)])
    moved = _check(graph, (1, CHANNELS, 6, 5))
    # One Transpose before and one after each depthwise convolution, and that of the input.
    assert _count(moved, "Transpose") == 7
    assert _operands(moved, "Conv") == ["Transpose"] * 3
    fused = _without_weights(passes.apply_pass(graph, "CpuFusion"))
    assert not {"Mul", "Add", "FusedElementwise"} & set(fused)


@pytest.mark.parametrize("allow_zero", [0, 1])
def test_an_activation_joins_its_convolution(allow_zero: int) -> None:
    """As in SegFormer: the result of the convolution becomes rows, then GELU is spelled out."""
    x = _image(2)
    shape = np.array([2, CHANNELS, 30])
    rows = ops.Reshape(_conv(x, "dw", groups=CHANNELS), shape, allowzero=allow_zero)
    rows = ops.Transpose(rows, perm=[0, 2, 1])
    bent = ops.Add(ops.Erf(ops.Div(rows, np.float32(2**0.5))), np.float32(1))
    bent = ops.Mul(rows, ops.Mul(np.float32(0.5), bent))
    graph = sg.Graph([x], [ops.MatMul(bent, _weight("w", CHANNELS, 8))])
    moved = _check(graph, (2, CHANNELS, 6, 5))
    assert _operands(moved, "MatMul") == ["Transpose"]
    assert _operands(moved, "Transpose") == ["Reshape"]
    assert _operands(moved, "Reshape") == ["Mul"]
    kinds = _without_weights(passes.apply_pass(graph, "CpuFusion"))
    assert kinds == ["FusedConv", "Reshape", "Transpose", "MatMul"]


def test_a_transpose_and_its_inverse_cancel() -> None:
    x = _image()
    rows = ops.Relu(ops.Transpose(_conv(x, "a"), perm=LAST))
    y = _conv(ops.Transpose(rows, perm=FIRST), "b")
    moved = _check(sg.Graph([x], [y]), (1, CHANNELS, 6, 5))
    assert _count(moved, "Transpose") == 0


def test_another_transpose_is_no_inverse() -> None:
    x = _image()
    rows = ops.Relu(ops.Transpose(_conv(x, "a"), perm=LAST))
    graph = sg.Graph([x], [ops.Tanh(ops.Transpose(rows, perm=[0, 2, 1, 3]))])
    moved = _check(graph, (1, CHANNELS, 6, 5))
    assert _count(moved, "Transpose") == 2


def test_results_that_are_outputs_keep_their_order_and_name() -> None:
    x = _image()
    rows = ops.Relu(ops.Transpose(_conv(x, "a"), perm=LAST))
    graph = sg.Graph([x], [rows, ops.Transpose(rows, perm=FIRST)])
    names = [value.name for value in graph.outputs]
    moved = _check(graph, (1, CHANNELS, 6, 5))
    assert [value.name for value in moved.outputs] == names
    assert _count(moved, "Transpose") == 1


def test_a_broadcast_operand_is_moved_too() -> None:
    """The factors of squeeze and excitation have the axes of the image, of size 1."""
    x = _image()
    y = _conv(x, "a")
    factors = ops.Sigmoid(ops.ReduceMean(y, np.array([2, 3]), keepdims=1))
    rows = ops.Mul(ops.Transpose(y, perm=LAST), ops.Transpose(factors, perm=LAST))
    graph = sg.Graph([x], [ops.MatMul(rows, _weight("w", CHANNELS, 8))])
    moved = _check(graph, (1, CHANNELS, 6, 5))
    assert _count(moved, "Transpose") == 1


def _two_orders(y: Any) -> Any:
    exchanged = ops.Transpose(ops.Softmax(ops.Transpose(y, perm=[0, 1, 3, 2])), perm=[0, 3, 2, 1])
    return ops.Add(ops.Transpose(y, perm=LAST), exchanged)


def _with_rows(y: Any) -> Any:
    return ops.Add(ops.Transpose(y, perm=LAST), sg.input("rows", (1, 6, 5, CHANNELS)))


def _with_table(y: Any) -> Any:
    return ops.Add(ops.Transpose(y, perm=LAST), _weight("table", 6, 5, CHANNELS))


def _scaled_tokens(y: Any) -> Any:
    """A vector of channels would have to be moved by the Reshape, too."""
    tokens = ops.Transpose(ops.Reshape(y, np.array([1, CHANNELS, 30])), perm=[0, 2, 1])
    return ops.Softmax(ops.Mul(tokens, _weight("vector", CHANNELS)))


def _used_twice(y: Any) -> Any:
    rows = ops.Transpose(y, perm=LAST)
    return ops.Concat(ops.Relu(rows), ops.Tanh(rows), rows, axis=3)


def _without_convolution(y: Any) -> Any:
    return ops.Relu(ops.Transpose(ops.Softmax(y, axis=1), perm=LAST))


@pytest.mark.parametrize(
    "rows",
    [_two_orders, _with_rows, _with_table, _scaled_tokens, _used_twice, _without_convolution],
)
def test_what_would_not_save_a_transpose_stays(rows: Any) -> None:
    """Orders that differ, an operand in the other order, more results than operands, no image."""
    x = _image()
    result = rows(_conv(x, "a"))
    others = [each for each in _free(result) if each is not x]
    graph = sg.Graph([x, *others], [result])
    before = [node.op_type for node in graph.nodes]
    moved = _check(graph, (1, CHANNELS, 6, 5), *[(1, 6, 5, CHANNELS)] * len(others))
    assert [node.op_type for node in moved.nodes] == before


def _free(value: sg.Value) -> list[sg.Value]:
    """Return the inputs without producer or parameter that an expression reads."""
    found: dict[sg.Value, None] = {}
    work = [value]
    while work:
        each = work.pop()
        if each.producer is None and each.parameter is None:
            found[each] = None
        elif each.producer is not None:
            work.extend(each.producer.sources)
    return list(found)


def test_scales_along_an_axis_stay_with_it() -> None:
    """Without the attribute, a vector of scales of QuantizeLinear belongs to axis 1."""
    x = _image()
    rows = ops.Transpose(_conv(x, "a"), perm=LAST)
    scales = sg.parameter("scales", np.linspace(0.1, 0.6, 6, dtype=np.float32))
    quantized = ops.QuantizeLinear(rows, scales, sg.parameter("zeros", np.zeros(6, np.uint8)))
    graph = sg.Graph([x], [ops.Transpose(ops.Cast(quantized, to=1), perm=FIRST)])
    moved = _check(graph, (1, CHANNELS, 6, 5))
    assert _operands(moved, "QuantizeLinear") == ["Transpose"]


@pytest.mark.parametrize(("version", "moved"), [(6, False), (16, True)])
def test_slopes_of_an_old_version_belong_to_axis_1(version: int, moved: bool) -> None:
    """All axes have one size, so that both versions accept the vector."""
    x = sg.input("x", (1, CHANNELS, CHANNELS, CHANNELS))
    rows = ops.Transpose(_conv(x, "a"), perm=LAST)
    bent = sg.Node("PRelu", [rows, _weight("slopes", CHANNELS)], version=version)
    bent.outputs[0].type = rows.type
    graph = sg.Graph([x], [ops.Transpose(bent.outputs[0], perm=FIRST)])
    found = passes.apply_pass(graph, "TransposeLast")
    assert (_operands(found, "PRelu") == ["Conv"]) is moved
    array = [uniform(1, CHANNELS, CHANNELS, CHANNELS)]
    wanted = sg.compile_model(graph, "REFERENCE")(array)[0]
    result = sg.compile_model(graph, "CPU")(array)[0]
    np.testing.assert_allclose(result, wanted, rtol=1e-4, atol=1e-4)


def test_the_batch_may_be_symbolic() -> None:
    x = sg.input("x", ("batch", CHANNELS, 6, 5))
    rows = ops.Gelu(ops.Transpose(_conv(x, "a"), perm=LAST))
    graph = sg.Graph([x], [ops.MatMul(rows, _weight("w", CHANNELS, 8))])
    moved = _check(graph, (3, CHANNELS, 6, 5))
    assert _operands(moved, "MatMul") == ["Transpose"]


# ---------------------------------------------------------------- random graphs


@st.composite
def _graphs(draw: st.DrawFn) -> sg.Graph:
    """Return convolutions, Transposes, Reshapes and elementwise operators in any order."""
    x = sg.input("x", (2, CHANNELS, 6, 5))
    images: list[sg.Value] = [x]
    rows: list[sg.Value] = []
    tokens: list[sg.Value] = []

    def pick(values: list[sg.Value]) -> sg.Value:
        return draw(st.sampled_from(values))

    def elementwise(values: list[sg.Value], *vector: int) -> sg.Value:
        a = pick(values)
        match draw(st.integers(0, 5)):
            case 0:
                return ops.Tanh(a)
            case 1:
                return ops.Add(a, pick(values))
            case 2:
                return ops.Mul(a, _weight(f"v{draw(st.integers(0, 3))}{len(vector)}", *vector))
            case 3:
                return ops.Sub(np.float32(0.5), a)
            case 4:
                return ops.Where(ops.Greater(a, np.float32(0)), a, pick(values))
            case _:
                return ops.Clip(a, np.float32(-1), np.float32(1))

    for _ in range(draw(st.integers(3, 14))):
        match draw(st.integers(0, 6)):
            case 0:
                images.append(_conv(pick(images), f"c{draw(st.integers(0, 3))}"))
            case 1:
                images.append(elementwise(images, CHANNELS, 1, 1))
            case 2:
                rows.append(ops.Transpose(pick(images), perm=LAST))
            case 3:
                flat = ops.Reshape(pick(images), np.array([2, CHANNELS, -1]))
                tokens.append(ops.Transpose(flat, perm=[0, 2, 1]))
            case 4 if rows:
                rows.append(elementwise(rows, CHANNELS))
            case 5 if tokens:
                tokens.append(elementwise(tokens, CHANNELS))
            case 6 if rows:
                images.append(ops.Transpose(pick(rows), perm=FIRST))
            case _ if tokens:
                flat = ops.Transpose(pick(tokens), perm=[0, 2, 1])
                images.append(ops.Reshape(flat, np.array([2, CHANNELS, 6, 5])))
            case _:
                images.append(ops.Sigmoid(pick(images)))
    results = [ops.Identity(values[-1]) for values in (images, rows, tokens) if values]
    return sg.Graph([x], results, "random")


@settings(max_examples=40, deadline=None)
@given(_graphs())
def test_random_graphs(graph: sg.Graph) -> None:
    moved = _check(graph, (2, CHANNELS, 6, 5))
    assert _count(moved, "Transpose") <= _count(graph, "Transpose")
    again = passes.apply_pass(moved, "TransposeLast")
    assert _count(again, "Transpose") <= _count(moved, "Transpose")


# ---------------------------------------------------------------- scales of columns


def _matmul(shape: Sequence[int], *steps: tuple[Any, Array | sg.Value]) -> sg.Graph:
    x = sg.input("x", shape)
    y = ops.MatMul(x, _weight("w", 8, 16))
    for op, operand in steps:
        y = op(y, operand)
    return sg.Graph([x], [y])


@pytest.mark.parametrize("shape", [(3, 8), (2, 3, 8), (2, 1, 3, 8)])
@pytest.mark.parametrize("size", [(16,), (1, 16)])
def test_scales_of_columns_go_into_the_weight(shape: Sequence[int], size: tuple[int, ...]) -> None:
    graph = _matmul(
        shape,
        (ops.Add, _weight("bias", *size)),
        (ops.Mul, _weight("scale", *size)),
        (ops.Add, _weight("second", *size)),
    )
    assert _without_weights(passes.apply_pass(graph, "FoldScale")) == ["MatMul", "Add"]
    _check(graph, shape)


def test_a_folded_scale_follows_its_parameter() -> None:
    graph = _matmul((3, 8), (ops.Mul, scale := _weight("scale", 16)))
    model = sg.compile_model(graph, "CPU")
    x = uniform(3, 8)
    before = model([x])[0]
    assert scale.parameter is not None
    scale.parameter.assign(np.asarray(scale.parameter.array) * np.float32(2))
    np.testing.assert_allclose(model([x])[0], before * 2, rtol=1e-6)


@pytest.mark.parametrize(
    ("op", "size"), [(ops.Mul, (3, 1)), (ops.Mul, (3, 16)), (ops.Add, (16,)), (ops.Add, (1,))]
)
def test_other_operands_stay(op: Any, size: tuple[int, ...]) -> None:
    """One number for each row, for each element, a bias alone, and one number that is added."""
    graph = _matmul((3, 8), (op, _weight("other", *size)))
    assert _without_weights(passes.apply_pass(graph, "FoldScale")) == ["MatMul", op.__name__]
    _check(graph, (3, 8))


@pytest.mark.parametrize("size", [(), (1,)])
@pytest.mark.parametrize("product", ["Conv", "ConvTranspose", "MatMul"])
def test_one_number_goes_into_the_weight(product: str, size: tuple[int, ...]) -> None:
    """As residual networks for images scale their branches; also between other scales."""
    shape = (3, 16) if product == "MatMul" else (1, 16, 6, 5)
    x, number = sg.input("x", shape), _weight("number", *size)
    last = (16,) if product == "MatMul" else (16, 1, 1)
    sizes = (16, 16) if product == "MatMul" else (16, 16, 3, 3)
    weight = _weight("w", *sizes)
    y = ops.Mul(getattr(ops, product)(x, weight), number)
    y = ops.Mul(ops.Mul(ops.Add(y, _weight("bias", *last)), _weight("scale", *last)), number)
    once = ops.Mul(getattr(ops, product)(x, _weight("v", *sizes)), number)
    graph = sg.Graph([x], [y, once])
    kinds = Counter(_without_weights(passes.apply_pass(graph, "FoldScale")))
    assert kinds == Counter({product: 2} | ({"Add": 1} if product == "MatMul" else {}))
    _check(graph, shape)
