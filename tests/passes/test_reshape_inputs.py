"""`sg.reshape`: a model of a batch of 1 computes each item of a larger batch as it did alone."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import subgraph as sg
from subgraph import ops

RNG = np.random.default_rng(7)


def floats(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float32)


def numbers(name: str, *values: int) -> sg.Value:
    return sg.parameter(name, np.array(values, np.int64))


def shape_of(value: sg.Value) -> tuple[Any, ...]:
    assert isinstance(value.type, sg.TensorType)
    assert value.type.shape is not None
    return value.type.shape


def results(graph: sg.Graph, arrays: Sequence[Any], device: str = "REFERENCE") -> list[Any]:
    return list(sg.compile_model(graph, device)(arrays).values())


def check_batch(graph: sg.Graph, axis: int = 0, out_axis: int = 0) -> sg.Graph:
    """Check that a batch of three items has the results of the items by the original graph.

    Args:
        graph: A graph of one input with a batch of 1.
        axis: The batch axis of the input.
        out_axis: That of the outputs.
    """
    (value,) = graph.inputs
    shape = list(shape_of(value))
    assert shape[axis] == 1
    items = [floats(*shape) for _ in range(3)]
    expected = [results(graph, [item]) for item in items]
    whole = np.concatenate(items, axis)
    for size in ("batch", 3):
        shape[axis] = size
        reshaped = sg.reshape(graph, {value.name: shape})
        saved = sg.to_onnx(reshaped)
        onnx.checker.check_model(saved, full_check=True)
        session = onnxruntime.InferenceSession(saved.SerializeToString())
        for found in (
            results(reshaped, [whole]),
            results(reshaped, [whole], "CPU"),
            session.run(None, {value.name: whole}),
        ):
            for k, array in enumerate(found):
                stacked = np.concatenate([item[k] for item in expected], out_axis)
                np.testing.assert_allclose(array, stacked, rtol=2e-5, atol=2e-5)
        assert all(shape_of(v)[out_axis] == size for v in reshaped.outputs)
    return reshaped


# ---------------------------------------------------------------- random chains

# An axis is a tuple of parts, outermost first; the batch is the part "B", of size 1.
Axes = list[tuple[str, ...]]


def _random_chain(seed: int) -> tuple[sg.Graph, int]:
    """Return a chain of operators in which items of a batch never meet, with constant targets.

    Returns:
        The graph, and the batch axis of its result, which has no other part.
    """
    rng = random.Random(seed)
    sizes = {"B": 1} | {f"p{k}": rng.choice([2, 3, 4, 5]) for k in range(5)}
    axes: Axes = [("B",), ("p0", "p1"), ("p2",), ("p3", "p4")]
    x = value = sg.input("x", shape=_shape(axes, sizes))
    for step in range(rng.randint(2, 8)):
        kind = rng.choice(["transpose", "reshape", "unary", "product", "softmax"])
        if kind == "transpose":
            order = rng.sample(range(len(axes)), len(axes))
            value, axes = ops.Transpose(value, perm=order), [axes[k] for k in order]
        elif kind == "unary":
            value = ops.Tanh(value)
        elif "B" in axes[-1]:
            continue
        elif kind == "softmax":
            value = ops.Softmax(value, axis=-1)
        elif kind == "product":
            width = _shape(axes, sizes)[-1]
            value = ops.MatMul(value, sg.parameter(f"w{step}", floats(width, width) / width))
        else:
            axes = _merged_or_split(axes, rng)
            value = ops.Reshape(value, numbers(f"shape{step}", *_shape(axes, sizes)))
    # In the end the batch is alone again, in front.
    batch = next(k for k, axis in enumerate(axes) if "B" in axis)
    if len(axes[batch]) > 1:
        at = axes[batch].index("B")
        parts = [axes[batch][:at], ("B",), axes[batch][at + 1 :]]
        axes = [*axes[:batch], *(part for part in parts if part), *axes[batch + 1 :]]
        value = ops.Reshape(value, numbers("apart", *_shape(axes, sizes)))
        batch = axes.index(("B",))
    return sg.Graph([x], [value]), batch


def _merged_or_split(axes: Axes, rng: random.Random) -> Axes:
    """Return axes of which two neighbours are one, or one is two.

    The batch joins the axis before it, as PyTorch's flatten of (tokens, batch) does, or the axis
    behind it if it is the first, as with heads of an attention.
    """
    k = rng.randrange(len(axes) - 1)
    merges = rng.random() < 0.5
    if merges and (axes[k + 1] != ("B",) or k + 1 < len(axes) - 1):
        if "B" not in axes[k] or k == 0:
            return [*axes[:k], axes[k] + axes[k + 1], *axes[k + 2 :]]
        return axes
    if len(axes[k]) < 2:
        return axes
    at = rng.randrange(1, len(axes[k]))
    return [*axes[:k], axes[k][:at], axes[k][at:], *axes[k + 1 :]]


def _shape(axes: Axes, sizes: dict[str, int]) -> list[int]:
    return [int(np.prod([sizes[part] for part in axis])) for axis in axes]


@given(st.integers(0, 2**32))
@settings(max_examples=30, deadline=None)
def test_items_of_a_random_chain_stay_apart(seed: int) -> None:
    graph, batch = _random_chain(seed)
    check_batch(graph, 0, batch)


def test_a_split_of_tokens_and_batch_keeps_the_batch_on_its_side() -> None:
    """In (tokens * batch, width) the batch is inside of the tokens, however they are split."""
    x = sg.input("x", shape=(1, 6, 4))
    merged = ops.Reshape(ops.Transpose(x, perm=[1, 0, 2]), numbers("merged", 6, 4))
    split = ops.Softmax(ops.Reshape(merged, numbers("split", 2, 3, 4)), axis=0)
    apart = ops.Reshape(split, numbers("apart", 6, 1, 4))
    check_batch(sg.Graph([x], [ops.Transpose(apart, perm=[1, 0, 2])]))


# ---------------------------------------------------------------- what models of exporters hold


def test_heads_of_tokens_before_the_batch() -> None:
    """PyTorch's MultiheadAttention: (tokens, batch, width) to (tokens, batch * heads, width)."""
    x = sg.input("x", shape=(1, 6, 8))
    tokens = ops.Transpose(x, perm=[1, 0, 2])
    heads = ops.Transpose(ops.Reshape(tokens, numbers("a", 6, 4, 2)), perm=[1, 0, 2])
    scores = ops.Softmax(ops.MatMul(heads, ops.Transpose(heads, perm=[0, 2, 1])), axis=-1)
    mixed = ops.Transpose(ops.MatMul(scores, heads), perm=[1, 0, 2])
    flat = ops.Reshape(mixed, numbers("b", 6, 8))
    y = ops.Reshape(ops.MatMul(flat, sg.parameter("w", floats(8, 3))), numbers("c", 6, 1, 3))
    check_batch(sg.Graph([x], [ops.Transpose(y, perm=[1, 0, 2])]))


def test_a_class_token_is_repeated() -> None:
    x = sg.input("x", shape=(1, 5, 4))
    token = sg.parameter("token", floats(1, 1, 4))
    check_batch(sg.Graph([x], [ops.Concat(token, x, axis=1)]))


@pytest.mark.parametrize("operator", ["LSTM", "GRU", "RNN"])
def test_initial_states_are_repeated(operator: str) -> None:
    gates = {"LSTM": 4, "GRU": 3, "RNN": 1}[operator]
    x = sg.input("x", shape=(6, 1, 3))
    w, r = sg.parameter("w", floats(1, gates * 4, 3)), sg.parameter("r", floats(1, gates * 4, 4))
    states = [sg.parameter(f"h{k}", floats(1, 1, 4)) for k in range(1 + (operator == "LSTM"))]
    y = getattr(ops, operator)(x, w, r, None, None, *states, hidden_size=4)[0]
    check_batch(sg.Graph([x], [y]), 1, 2)


def test_equal_initial_states_of_a_larger_batch() -> None:
    x = sg.input("x", shape=(6, 2, 3))
    w, r = sg.parameter("w", floats(1, 12, 3)), sg.parameter("r", floats(1, 12, 4))
    zeros = sg.parameter("h", np.zeros((1, 2, 4), np.float32))
    graph = sg.Graph([x], [ops.GRU(x, w, r, None, None, zeros, hidden_size=4)[0]])
    reshaped = sg.reshape(graph, {"x": (6, "N", 3)})
    array = floats(6, 4, 3)
    found = results(reshaped, [array])[0]
    halves = [results(graph, [array[:, k : k + 2]])[0] for k in (0, 2)]
    np.testing.assert_allclose(found, np.concatenate(halves, 2), rtol=1e-5, atol=1e-6)


def test_a_mask_that_is_taken_by_number() -> None:
    """Masks of transformers: elements (0, token) of a (batch, tokens) mask, by GatherND."""
    x = sg.input("x", shape=(1, 5))
    at = np.stack(np.broadcast_arrays(0, np.arange(5)), -1).reshape(1, 1, 1, 5, 2)
    check_batch(sg.Graph([x], [ops.GatherND(x, sg.parameter("at", at))]))


def test_elements_of_a_flat_item() -> None:
    """as_strided of PyTorch's exporter: elements of the flat tensor by number."""
    x = sg.input("x", shape=(1, 4, 6))
    at = np.arange(24).reshape(1, 4, 6).transpose(0, 2, 1)
    y = ops.Gather(ops.Reshape(x, numbers("flat", -1)), sg.parameter("at", at), axis=0)
    check_batch(sg.Graph([x], [y]))


def test_sizes_of_a_resize() -> None:
    x = sg.input("x", shape=(1, 3, 4, 4))
    small = ops.MaxPool(x, kernel_shape=[2, 2], strides=[2, 2])
    y = ops.Resize(small, None, None, numbers("sizes", 1, 3, 4, 4), mode="linear")
    graph = sg.Graph([x], [y])
    check_batch(graph)
    reshaped = sg.reshape(graph, {"x": (2, 3, "H", "W")})
    assert results(reshaped, [floats(2, 3, 8, 6)])[0].shape == (2, 3, 8, 6)


def test_sizes_that_are_computed_stay_as_they_are() -> None:
    """They follow the input already, though they are known while the graph is typed."""
    x = sg.input("x", shape=(1, 3, 4, 4))
    first = ops.Gather(ops.Shape(x), numbers("at", 0, 1))
    sizes = ops.Concat(first, numbers("hw", 8, 8), axis=0)
    check_batch(sg.Graph([x], [ops.Resize(x, None, None, sizes, mode="nearest")]))


def test_expand_keeps_a_changed_size() -> None:
    x = sg.input("x", shape=(1, 4, 1))
    check_batch(sg.Graph([x], [ops.Expand(x, numbers("to", 1, 4, 3))]))
    reshaped = sg.reshape(sg.Graph([x], [ops.Expand(x, numbers("to", 1, 4, 3))]), {"x": (2, 7, 1)})
    assert shape_of(reshaped.outputs[0]) == (2, 7, 3)


def test_two_sizes_of_one_reshape() -> None:
    x = sg.input("x", shape=(1, 8, 12, 3))
    windows = ops.Reshape(x, numbers("a", 1, 2, 4, 3, 4, 3))
    y = ops.Reshape(ops.Transpose(windows, perm=[0, 1, 3, 2, 4, 5]), numbers("b", 6, 16, 3))
    graph = sg.Graph([x], [y])
    reshaped = sg.reshape(graph, {"x": ("N", "H", "W", 3)})
    array = floats(2, 16, 4, 3)
    expected = array.reshape(2, 4, 4, 1, 4, 3).transpose(0, 1, 3, 2, 4, 5).reshape(8, 16, 3)
    np.testing.assert_array_equal(results(reshaped, [array])[0], expected)


# ---------------------------------------------------------------- names, errors


def test_names_of_dimensions() -> None:
    x, y = sg.input("x", shape=("N", "T")), sg.input("y", shape=("N", 4))
    graph = sg.Graph([x, y], [ops.Relu(x), ops.Tanh(y)])
    fixed = sg.reshape(graph, {"N": 2, "T": "tokens"})
    assert [shape_of(v) for v in fixed.inputs] == [(2, "tokens"), (2, 4)]
    assert [shape_of(v) for v in fixed.outputs] == [(2, "tokens"), (2, 4)]
    mixed = sg.reshape(graph, {"y": (None, 4), "N": 3}, batch="M")
    assert [shape_of(v) for v in mixed.inputs] == [("M", "T"), (None, 4)]
    assert [shape_of(v) for v in graph.outputs] == [("N", "T"), ("N", 4)]


def test_defaults_and_scalars_keep_their_shapes() -> None:
    x, k = sg.input("x", shape=(1, 2)), sg.input("k", shape=())
    bias = sg.parameter("bias", floats(1, 2))
    graph = sg.Graph([x, k, bias], [ops.Add(ops.Mul(x, k), bias)])
    reshaped = sg.reshape(graph, batch=3)
    assert [shape_of(v) for v in reshaped.inputs] == [(3, 2), (), (1, 2)]
    with pytest.raises(sg.ShapeError, match="'bias' has a default"):
        sg.reshape(graph, {"bias": (3, 2)})


@pytest.mark.parametrize(
    ("shapes", "error", "text"),
    [
        ({"z": (2, 4)}, sg.MissingInputError, "'z' is neither an input of .graph. nor a symbolic"),
        ({"x": (2, 4, 1)}, sg.ShapeError, "number of dimensions stays"),
        ({"x": 4}, sg.ShapeError, "a shape is a list of dimensions; got 4"),
        ({"x": (2, -1)}, sg.ShapeError, "dimension -1"),
        ({"T": (2,)}, sg.ShapeError, "'T': its new size is a number or name"),
        ({"x": (2, 5)}, sg.ShapeError, "(?s)MatMul.*5 columns"),
        ({"s": (2,)}, sg.ShapeError, "which has no shape"),
    ],
)
def test_shapes_that_do_not_fit(shapes: Any, error: type[Exception], text: str) -> None:
    x, t = sg.input("x", shape=(1, 4)), sg.input("t", shape=("T",))
    s = sg.input("s", type=sg.SequenceType(sg.TensorType("float32", (1,))))
    y = ops.MatMul(x, sg.parameter("w", floats(4, 2)))
    graph = sg.Graph([x, t, s], [y, ops.Relu(t), ops.SequenceLength(s)])
    with pytest.raises(error, match=text):
        sg.reshape(graph, shapes)


@pytest.mark.parametrize("kind", ["Gather", "Squeeze", "Slice", "ScatterND"])
def test_the_first_item_alone_is_an_error(kind: str) -> None:
    """Results of a larger batch would be computed from its first item without a word."""
    x = sg.input("x", shape=(1, 4))
    if kind == "Gather":
        y = ops.Gather(x, sg.parameter("k", np.array(0)), axis=0)
    elif kind == "Squeeze":
        y = ops.Squeeze(x, numbers("axes", 0))
    elif kind == "Slice":
        y = ops.Slice(x, numbers("a", 0), numbers("b", 1), numbers("c", 0))
    else:
        at = sg.parameter("at", np.array([[0, 2]]))
        y = ops.ScatterND(x, at, sg.parameter("new", floats(1)))
    graph = sg.Graph([x], [y])
    if kind == "Squeeze":  # of an axis of a size other than 1, which is an error by itself
        with pytest.raises(sg.ShapeError, match="Squeeze"):
            sg.reshape(graph, batch=2)
        return
    with pytest.raises(sg.ShapeError, match=f"{kind}.* takes the first item of a batch of 1"):
        sg.reshape(graph, batch="N")


def test_a_partitioned_graph_keeps_its_numbers() -> None:
    x = sg.input("x", shape=("N", 2, 3))
    graph = sg.Graph([x], [ops.Relu(ops.Reshape(x, numbers("to", -1, 6)))])
    graph.attrs["subgraph_property"] = _All()
    cut = sg.passes.apply_pass(graph, "PartitionGraph")
    assert shape_of(sg.reshape(cut, {"N": 4}).outputs[0]) == (4, 6)
    with pytest.raises(sg.ShapeError, match=r"is a subgraph node.*sg\.inline_subgraphs"):
        sg.reshape(cut, {"x": ("N", 2, 4)})


class _All(sg.SubgraphProperty):
    def create_subgraph_selector(self) -> sg.SubgraphSelector:
        return sg.ContainOpSelector({"Reshape", "Relu"})


def test_sizes_that_fit_some_inputs_only(caplog: pytest.LogCaptureFixture) -> None:
    x = sg.input("x", shape=(1, 4))
    graph = sg.Graph([x], [ops.Add(x, sg.parameter("table", floats(1, 4)))])
    with caplog.at_level(logging.WARNING, logger="subgraph"):
        sg.reshape(graph, {"x": ("N", "T")})
    assert r"may not fit all sizes" in caplog.text
    assert "[N, 4*T]" in caplog.text or "[N, T]" in caplog.text
    caplog.clear()
    sg.reshape(graph, {"x": ("N", 4)})
    assert not caplog.text


def test_a_renamed_batch_reaches_outputs_through_sizes_without_a_dimension() -> None:
    """No dimension can express the 2 * N rows of a Reshape that merges the batch with heads."""
    x = sg.input("x", shape=("N", 6, 8))
    rows = ops.Reshape(ops.Transpose(x, perm=[1, 0, 2]), numbers("merged", 6, -1, 4))
    back = ops.Reshape(ops.Relu(rows), numbers("apart", 6, -1, 8))
    graph = sg.Graph([x], [ops.Transpose(back, perm=[1, 0, 2])])
    for size in ("M", "N", 5):
        assert shape_of(sg.reshape(graph, batch=size).outputs[0]) == (size, 6, 8)
    model = sg.compile_model(graph, "BATCH:CPU(2)")
    array = floats(5, 6, 8)
    np.testing.assert_array_equal(model(array)[0], np.maximum(array, 0))
