"""A proof that rows are independent holds in runs, and networks that mix rows are not proved."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops, passes
from subgraph.operators.batch_axes import BatchRule, along, elementwise, first_input
from subgraph.operators.operator import find_operator, register_operator, unregister_operator
from subgraph.passes.shapes.independent_rows import row_dependence

RNG = np.random.default_rng(3)
SHAPE = (4, 3, 6)  # of a row
ROWS = 7  # in the types that random graphs are made with; a prime that divides no other size


def floats(*shape: int) -> Any:
    return RNG.standard_normal(shape).astype(np.float32)


def weight(*shape: int) -> sg.Value:
    return sg.parameter(f"w{len(shape)}_{RNG.integers(1 << 40)}", floats(*shape))


def integers(*numbers: int) -> Any:
    return np.array(numbers, np.int64)


def rows_agree(graph: sg.Graph, arrays: Sequence[Any]) -> bool:
    """Return whether results of a batch are those of its rows."""
    model = sg.compile_model(graph, "REFERENCE")
    whole = list(model(arrays).values())
    count = len(arrays[0])
    rows = [model([array[k : k + 1] for array in arrays]).values() for k in range(count)]
    joined = [np.concatenate(parts) for parts in zip(*rows, strict=True)]
    return all(
        a.shape == b.shape and np.allclose(a, b, rtol=1e-4, atol=1e-5)
        for a, b in zip(whole, joined, strict=True)
    )


# ---------------------------------------------------------------- random graphs

Step = Callable[[sg.Value], sg.Value]


def _shape(x: sg.Value, value: sg.Value) -> tuple[int, ...]:
    typed = passes.apply_pass(sg.Graph([x], [value]), "InferTypes").outputs[0].type
    assert isinstance(typed, sg.TensorType)
    return tuple(dim for dim in typed.shape or () if isinstance(dim, int))


def _target(sizes: Sequence[int]) -> Any:
    """Return the target of a Reshape for any number of rows."""
    return integers(*(-1 if size % ROWS == 0 else size for size in sizes))


def _merge(rng: random.Random, sizes: tuple[int, ...], axis: int) -> Step:
    other = (axis + 1) % len(sizes)
    if other:
        sizes = (*sizes[:axis], sizes[axis] * sizes[other], *sizes[other + 1 :])
    return lambda x: ops.Reshape(x, _target(sizes))


def _divide(rng: random.Random, sizes: tuple[int, ...], axis: int) -> Step:
    size = sizes[axis]
    part = rng.choice([k for k in (1, 2, 3, 4, 6) if size % k == 0])
    parts = rng.choice([(part, size // part), (size // part, part)])
    return lambda x: ops.Reshape(x, _target((*sizes[:axis], *parts, *sizes[axis + 1 :])))


def _exchange(rng: random.Random, sizes: tuple[int, ...], axis: int) -> Step:
    """Exchange two sizes without moving an element."""
    other = rng.randrange(len(sizes))
    target = list(sizes)
    target[axis], target[other] = target[other], target[axis]
    return lambda x: ops.Reshape(x, _target(target))


def _transpose(rng: random.Random, sizes: tuple[int, ...], axis: int) -> Step:
    perm = rng.sample(range(len(sizes)), len(sizes))
    return lambda x: ops.Transpose(x, perm=perm)


def _slice(rng: random.Random, sizes: tuple[int, ...], axis: int) -> Step:
    last = np.iinfo(np.int64).max
    start, end = rng.choice([(0, last), (1, last), (0, 2), (0, -1)])
    return lambda x: ops.Slice(x, integers(start), integers(end), integers(axis))


def _halves(rng: random.Random, sizes: tuple[int, ...], axis: int) -> Step:
    """Join an axis with itself, and take a half that follows from the size."""

    def step(x: sg.Value) -> sg.Value:
        twice = ops.Concat(x, ops.Neg(x), axis=axis)
        size = ops.Shape(x, start=axis, end=axis + 1)
        if rng.random() < 0.5:
            return ops.Slice(twice, size, ops.Add(size, size), integers(axis))
        return ops.Split(twice, num_outputs=2, axis=axis, outputs=2)[1]

    return step


def _weighted(rng: random.Random, sizes: tuple[int, ...], axis: int) -> Step:
    w = weight(
        *[1] * axis, sizes[axis] if sizes[axis] % ROWS else 1, *[1] * (len(sizes) - axis - 1)
    )
    return lambda x: ops.Mul(w, x)


def _product(rng: random.Random, sizes: tuple[int, ...], axis: int) -> Step:
    if sizes[-1] % ROWS == 0 or rng.random() < 0.3:
        order = [*range(len(sizes) - 2), len(sizes) - 1, len(sizes) - 2]
        return lambda x: ops.MatMul(x, ops.Transpose(x, perm=order))
    w = weight(sizes[-1], 5)
    return lambda x: ops.MatMul(x, w)


def _filled(rng: random.Random, sizes: tuple[int, ...], axis: int) -> Step:
    """Add a tensor of ones whose shape follows from the input's."""
    return lambda x: ops.Add(x, ops.ConstantOfShape(ops.Shape(x), value=np.ones(1, np.float32)))


def _counted(rng: random.Random, sizes: tuple[int, ...], axis: int) -> Step:
    """Multiply by a size of the input."""
    return lambda x: ops.Mul(x, ops.Cast(ops.Shape(x, start=axis, end=axis + 1), to=1))


def _along(
    make: Callable[[Any, int], Any],
) -> Callable[[random.Random, tuple[int, ...], int], Step]:
    return lambda rng, sizes, axis: lambda x: make(x, axis)


STEPS: dict[str, Callable[[random.Random, tuple[int, ...], int], Step]] = {
    "merge": _merge,
    "divide": _divide,
    "exchange": _exchange,
    "transpose": _transpose,
    "slice": _slice,
    "halves": _halves,
    "weighted": _weighted,
    "product": _product,
    "filled": _filled,
    "counted": _counted,
    "softmax": _along(lambda x, axis: ops.Softmax(x, axis=axis)),
    "old softmax": _along(lambda x, axis: ops.Sub(x, ops.Hardmax(x, axis=axis))),
    "normalize": _along(lambda x, axis: ops.LpNormalization(x, axis=axis, p=2)),
    "mean": _along(lambda x, axis: ops.Sub(x, ops.ReduceMean(x, integers(axis)))),
    "maximum": _along(lambda x, axis: ops.ReduceMax(x, integers(axis), keepdims=0)),
    "sum": _along(lambda x, axis: ops.CumSum(x, np.int64(axis))),
    "backwards": _along(
        lambda x, axis: ops.Slice(
            x, integers(-1), integers(-(1 << 40)), integers(axis), integers(-1)
        )
    ),
    "gather": _along(lambda x, axis: ops.Gather(x, integers(1, 0, 0), axis=axis)),
    "element": _along(lambda x, axis: ops.Gather(x, np.int64(1), axis=axis)),
    "pad": _along(lambda x, axis: ops.Pad(x, integers(1, 0), np.float32(2), integers(axis))),
    "tile": _along(
        lambda x, axis: ops.Tile(x, integers(*[1] * axis, 2, *[1] * (x.type.rank - axis - 1)))
    ),
    "largest": _along(lambda x, axis: ops.TopK(x, integers(1), axis=axis, outputs=2)[0]),
    "unsqueeze": _along(lambda x, axis: ops.Unsqueeze(x, integers(axis))),
    "tanh": _along(lambda x, axis: ops.Tanh(x)),
    "itself": _along(
        lambda x, axis: ops.Where(
            ops.Greater(x, np.float32(0)), ops.Clip(x, np.float32(-1), np.float32(1)), x
        )
    ),
}


@cache
def random_graph(seed: int) -> sg.Graph | None:
    """Return a chain of random operators along random axes; None if one does not fit."""
    rng = random.Random(seed)
    first = example = sg.input("x", shape=(ROWS, *SHAPE))
    x = value = sg.input("x", shape=("N", *SHAPE))
    for _ in range(rng.randint(1, 6)):
        sizes = _shape(first, example)
        if not sizes or 0 in sizes or len(sizes) > 5:
            return None
        make = STEPS[rng.choice(list(STEPS))]
        axis = rng.randrange(len(sizes))
        state = rng.getstate()
        try:
            step = make(rng, sizes, axis)
            inner = rng.getstate()
            example = step(example)
            rng.setstate(inner)
            value = step(value)
        except sg.ShapeError:
            rng.setstate(state)
            continue
    sizes = _shape(first, example)
    batch = [axis for axis, size in enumerate(sizes) if size == ROWS]
    if batch:  # the batch is the first axis again
        perm = [batch[0], *(axis for axis in range(len(sizes)) if axis != batch[0])]
        value = ops.Transpose(value, perm=perm)
    return sg.Graph([x], [value])


SEEDS = range(600)


def proved(seeds: Sequence[int]) -> Iterator[sg.Graph]:
    """Yield the random graphs for which the proof is found."""
    for seed in seeds:
        graph = random_graph(seed)
        if graph is not None and not row_dependence(graph):
            yield graph


def test_what_is_proved_of_random_graphs_holds_in_runs() -> None:
    count = 0
    for graph in proved(SEEDS):
        assert rows_agree(graph, [floats(3, *SHAPE)]), str(graph)
        count += 1
    assert count > len(SEEDS) / 4


@contextmanager
def declared(op_type: str, rule: BatchRule) -> Generator[None]:
    """Give an operator another rule."""
    operator = find_operator(op_type)
    assert operator is not None
    old = operator.batch
    object.__setattr__(operator, "batch", rule)
    try:
        yield
    finally:
        object.__setattr__(operator, "batch", old)


def _unmoved(call: Any) -> Any:
    return [call.axis_of(0)]


@pytest.mark.parametrize(
    ("op_type", "rule"),
    [
        ("Softmax", first_input),
        ("CumSum", first_input),
        ("LpNormalization", elementwise),
        ("Slice", _unmoved),
        ("Reshape", lambda call: [call.filled(0)]),
        ("Hardmax", elementwise),
    ],
)
def test_a_wrong_rule_is_found(op_type: str, rule: BatchRule) -> None:
    with declared(op_type, rule):
        found = [graph for graph in proved(SEEDS) if _fails(graph)]
    assert found


def _fails(graph: sg.Graph) -> bool:
    try:
        return not rows_agree(graph, [floats(3, *SHAPE)])
    except sg.SubgraphError:
        return True


# ---------------------------------------------------------------- single operators


def _x(*row: int) -> sg.Value:
    return sg.input("x", shape=("N", *row))


def _heads(x: sg.Value) -> sg.Value:
    """Tokens of width 8 in 2 heads that are merged with the batch, and back."""
    rows = ops.Reshape(ops.Transpose(x, perm=[1, 0, 2]), integers(5, -1, 4))
    scores = ops.MatMul(ops.Transpose(rows, perm=[1, 0, 2]), ops.Transpose(rows, perm=[1, 2, 0]))
    mixed = ops.MatMul(ops.Softmax(scores), ops.Transpose(rows, perm=[1, 0, 2]))
    tokens = ops.Reshape(ops.Transpose(mixed, perm=[1, 0, 2]), integers(-1, 8))
    back = ops.Reshape(ops.Gemm(tokens, weight(8, 8)), integers(5, -1, 8))
    return ops.Transpose(back, perm=[1, 0, 2])


def _sequence(x: sg.Value, op_type: str, gates: int, **attributes: Any) -> sg.Value:
    w, r = weight(1, gates * 3, 8), weight(1, gates * 3, 3)
    count = 3 if op_type == "LSTM" else 2
    found = getattr(ops, op_type)(x, w, r, hidden_size=3, outputs=count, **attributes)
    return found[0] if attributes else ops.Transpose(found[1], perm=[1, 0, 2])


def _indices(x: sg.Value, size: int) -> sg.Value:
    """Return indices in [0, size) that depend on the elements."""
    return ops.Cast(ops.Mod(ops.Mul(ops.Abs(x), np.float32(50)), np.float32(size), fmod=1), to=7)


def _norm(x: sg.Value, **attributes: Any) -> sg.Value:
    w = [sg.parameter(name, np.abs(floats(5))) for name in ("scale", "bias", "mean", "variance")]
    found = ops.BatchNormalization(x, *w, outputs=3 if attributes else 1, **attributes)
    return found[0] if attributes else found


def _expanded(x: sg.Value) -> sg.Value:
    """Expand as PyTorch exports it, which replaces sizes of -1 by 1."""
    sizes = ops.Concat(ops.Shape(x, end=1), integers(-1, 2, -1), axis=0)
    return ops.Expand(x, ops.Where(ops.Equal(sizes, integers(-1)), integers(1), sizes))


# Graphs of rows of [5, 8].
INDEPENDENT: dict[str, Callable[[sg.Value], sg.Value]] = {
    "heads": _heads,
    "Gemm": lambda x: ops.Gemm(ops.Flatten(x), weight(7, 40), transB=1),
    "Gemm of columns": lambda x: ops.Transpose(
        ops.Gemm(weight(40, 7), ops.Flatten(x), transA=1, transB=1)
    ),
    "bilinear": lambda x: ops.Einsum(x, weight(8, 3), x, equation="nta,ab,nsa->nbts"),
    "dots": lambda x: ops.Einsum(x, weight(8, 3), equation="...a,ab->...b"),
    "Conv": lambda x: ops.Conv(x, weight(4, 5, 3), pads=[1, 1]),
    "ConvTranspose": lambda x: ops.ConvTranspose(x, weight(5, 2, 3)),
    "pools": lambda x: ops.Add(ops.GlobalMaxPool(x), ops.AveragePool(x, kernel_shape=[2])),
    "MaxPool": lambda x: ops.MaxPool(x, kernel_shape=[2], outputs=2)[0],
    "BatchNormalization": _norm,
    "LayerNormalization": lambda x: ops.LayerNormalization(x, weight(5, 8), axis=1),
    "GroupNormalization": lambda x: ops.InstanceNormalization(x, weight(5), weight(5)),
    "MeanVarianceNormalization": lambda x: ops.MeanVarianceNormalization(x, axes=[1, 2]),
    "LRN": lambda x: ops.LRN(x, size=3),
    "GRU": lambda x: _sequence(ops.Transpose(x, perm=[1, 0, 2]), "GRU", 3),
    "LSTM": lambda x: _sequence(ops.Transpose(x, perm=[1, 0, 2]), "LSTM", 4),
    "RNN": lambda x: _sequence(x, "RNN", 1, layout=1),
    "Attention": lambda x: ops.Attention(x, x, x, q_num_heads=2, kv_num_heads=2),
    "embedding": lambda x: ops.Gather(weight(9, 3), _indices(x, 9)),
    "GatherElements": lambda x: ops.GatherElements(x, _indices(x, 8), axis=2),
    "GatherND": lambda x: ops.GatherND(
        x,
        ops.Unsqueeze(_indices(ops.ReduceMax(x, integers(2), keepdims=0), 5), integers(2)),
        batch_dims=1,
    ),
    "ScatterElements": lambda x: ops.ScatterElements(x, _indices(x, 8), ops.Neg(x), axis=2),
    "ScatterND": lambda x: ops.Transpose(
        ops.ScatterND(
            ops.Transpose(x, perm=[1, 0, 2]),
            np.array([[1], [0]]),
            ops.Slice(ops.Transpose(x, perm=[1, 0, 2]), integers(0), integers(2), integers(0)),
        ),
        perm=[1, 0, 2],
    ),
    "OneHot": lambda x: ops.OneHot(_indices(x, 6), integers(6), floats(2), axis=1),
    "ReverseSequence": lambda x: ops.ReverseSequence(
        x, _indices(ops.ReduceMax(x, integers(1, 2), keepdims=0), 5), batch_axis=0, time_axis=1
    ),
    "Resize": lambda x: ops.Resize(x, None, np.array([1, 1, 2], np.float32), mode="linear"),
    "Resize to sizes": lambda x: ops.Resize(
        x, None, None, ops.Concat(ops.Shape(x, end=1), integers(5, 3), axis=0)
    ),
    "Expand": lambda x: ops.Concat(
        x,
        ops.Expand(weight(1, 1, 8), ops.Concat(ops.Shape(x, end=1), integers(1, 8), axis=0)),
        axis=1,
    ),
    "Tile": lambda x: ops.Mul(
        x, ops.Tile(weight(1, 5, 8), ops.Concat(ops.Shape(x, end=1), integers(1, 1), axis=0))
    ),
    "guidance": lambda x: ops.Split(
        ops.Softmax(ops.Concat(x, ops.Neg(x), axis=0)), axis=0, num_outputs=2, outputs=2
    )[1],
    "QuantizeLinear": lambda x: ops.DequantizeLinear(
        ops.QuantizeLinear(x, np.float32(0.1), np.uint8(128)), np.float32(0.1), np.uint8(128)
    ),
    "Trilu": lambda x: ops.Trilu(x),
    "Dropout": lambda x: ops.Dropout(x, outputs=2)[0],
    "Expand by a test of sizes": lambda x: _expanded(ops.Reshape(x, integers(-1, 5, 1, 8))),
    "BiasGelu": lambda x: ops.BiasGelu(x, weight(8)),
    "SwiGLU": lambda x: ops.SwiGLU(x, ops.Neg(x)),
    "CastLike": lambda x: ops.CastLike(x, ops.Transpose(x, perm=[1, 0, 2])),
}


@pytest.mark.parametrize("name", INDEPENDENT)
def test_independent_rows_are_proved(name: str) -> None:
    x = _x(5, 8)
    graph = sg.Graph([x], [INDEPENDENT[name](x)])
    assert not row_dependence(graph)
    assert rows_agree(graph, [floats(3, 5, 8)])


def test_several_inputs() -> None:
    """Indices and states have the batch, too; a default is the same for all rows."""
    x = sg.input("x", shape=("N", "T", 8))
    state = sg.input("state", shape=("N", 1, 3))
    lengths = sg.input("lengths", shape=("N",), dtype="int32")
    y = ops.GRU(x, weight(1, 9, 8), weight(1, 9, 3), None, lengths, state, hidden_size=3, layout=1)
    graph = sg.Graph([x, state, lengths], [y[0]])
    assert not row_dependence(graph)
    assert rows_agree(graph, [floats(3, 4, 8), floats(3, 1, 3), np.array([4, 2, 1], np.int32)])


def _mean_of_batch(x: sg.Value) -> sg.Value:
    return ops.Sub(x, ops.ReduceMean(x, integers(0)))


# Graphs of rows of [5, 8] whose results depend on other rows, on their number or on their place.
MIXING: dict[str, Callable[[sg.Value], sg.Value]] = {
    "softmax": lambda x: ops.Softmax(x, axis=0),
    "mean": _mean_of_batch,
    "statistics": lambda x: _norm(x, training_mode=1),
    "product": lambda x: ops.MatMul(
        ops.MatMul(ops.Flatten(x), ops.Transpose(ops.Flatten(x))), ops.Flatten(x)
    ),
    "Gemm of rows": lambda x: ops.Add(
        ops.ReduceMax(ops.Gemm(ops.Flatten(x), ops.Flatten(x), transA=1)), x
    ),
    "Reshape": lambda x: ops.Transpose(ops.Reshape(x, integers(5, -1, 8)), perm=[1, 0, 2]),
    "cumulative sum": lambda x: ops.CumSum(x, np.int64(0)),
    "flip": lambda x: ops.Slice(x, integers(-1), integers(-(1 << 40)), integers(0), integers(-1)),
    "first row": lambda x: ops.Sub(x, ops.Gather(x, integers(0), axis=0)),
    "rest": lambda x: ops.Slice(x, integers(1), integers(1 << 40), integers(0)),
    "at most 20000 rows": lambda x: ops.Slice(x, integers(0), integers(20000), integers(0)),
    "number of rows": lambda x: ops.Div(x, ops.Cast(ops.Shape(x, end=1), to=1)),
    "as many columns as rows": lambda x: ops.ReduceSum(
        ops.Slice(x, integers(0), ops.Shape(x, end=1), integers(2)), integers(2)
    ),
    "one row is another case": lambda x: ops.Mul(
        x, ops.Cast(ops.Equal(ops.Shape(x, end=1), integers(1)), to=1)
    ),
    "smaller of two sizes": lambda x: ops.Slice(
        x, integers(0), ops.Min(ops.Shape(x, end=1), integers(3)), integers(2)
    ),
    "remainder": lambda x: ops.Mul(x, ops.Cast(ops.Mod(ops.Shape(x, end=1), integers(2)), to=1)),
    "place": lambda x: ops.Add(
        x,
        ops.Reshape(
            ops.Cast(ops.Range(np.int64(0), ops.Squeeze(ops.Shape(x, end=1)), np.int64(1)), to=1),
            integers(-1, 1, 1),
        ),
    ),
    "Squeeze of a batch of 1": lambda x: ops.Add(ops.Squeeze(ops.ReduceMax(x, integers(2))), x),
    "halves of the batch": lambda x: ops.Split(x, axis=0, num_outputs=2, outputs=2)[0],
    "NonZero": lambda x: ops.Transpose(ops.NonZero(x)),
    "places of the largest": lambda x: ops.MaxPool(x, kernel_shape=[2], outputs=2)[1],
    "ranges of a batch": lambda x: ops.DynamicQuantizeLinear(x, outputs=3)[0],
    "random": lambda x: ops.RandomNormalLike(x),
    "Dropout in training": lambda x: ops.Dropout(x, np.float32(0.5), np.array(True), outputs=2)[0],
    "all rows at once": lambda x: ops.Reshape(x, integers(1, -1, 8)),
    "unknown operator": lambda x: ops.SequenceAt(ops.SequenceConstruct(x), np.int64(0)),
    "no rows": lambda x: ops.Add(weight(5, 8), weight(5, 8)),
}


@pytest.mark.parametrize("name", MIXING)
def test_mixed_rows_are_not_proved(name: str) -> None:
    x = _x(5, 8)
    assert row_dependence(sg.Graph([x], [MIXING[name](x)]))


def test_the_reason_names_the_first_node_that_mixes() -> None:
    x = _x(5, 8)
    y = ops.Relu(ops.Softmax(ops.Tanh(x), axis=0, name="mixes"))
    assert row_dependence(sg.Graph([x], [y])) == "node 'mixes' (Softmax) may mix rows"
    assert "output" in row_dependence(sg.Graph([x], [ops.Transpose(x, perm=[1, 0, 2])]))


def test_inputs_must_share_one_batch() -> None:
    for other in ((1, 4), ("M", 4), (), (None, 4)):
        x, y = sg.input("x", shape=("N", 4)), sg.input("y", shape=other)
        assert "inputs" in row_dependence(sg.Graph([x, y], [ops.Add(x, x)]))


def test_a_users_operator_declares_a_rule() -> None:
    def compute(node: sg.Node, inputs: Any) -> Any:
        return [inputs[0] - inputs[0].max(axis=-1, keepdims=True)]

    def infer(node: sg.Node, types: Any, values: Any) -> Any:
        return [types[0]]

    for rule, proves in ((None, False), (along(0), True)):
        schema = sg.Schema("MinusMax", "test.rows", inputs=("x",), outputs=("y",))
        operator = sg.Operator(schema, compute, infer, batch=rule)
        register_operator(operator)
        try:
            x = _x(4)
            graph = sg.Graph([x], [ops.MinusMax(x)])
            assert (not row_dependence(graph)) == proves
            assert not proves or rows_agree(graph, [floats(3, 4)])
        finally:
            unregister_operator(operator)
