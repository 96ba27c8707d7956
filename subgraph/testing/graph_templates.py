"""Templates of random graphs: for each operator a function that applies it to values of a pool."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import attrs
import numpy as np
from hypothesis import strategies as st

import subgraph as sg
from subgraph.graph.graph import Graph, Value
from subgraph.graph.types import TensorType, numpy_dtype

Draw = Callable[[st.SearchStrategy[Any]], Any]
Apply = Callable[[Draw, "Pool", str], Any]


class NoOperandError(Exception):
    """The pool has no value of the kind that a template needs."""


@attrs.define
class Pool:
    """The values of a random graph that further nodes may use.

    Attributes:
        values: The values, all of static shape, in the order in which they were made.
        weights: Number of weights that were made; the next one's name follows from it.
        rng: Generator of the weights' elements.
        inputs: Graph inputs that were made instead of weights.
        fed: Whether `weight` returns a graph input or another value half the time.
        weighted: Whether `weight` returns weights only, and `like` nothing.
    """

    values: list[Value]
    weights: int = 0
    rng: np.random.Generator = attrs.field(factory=lambda: np.random.default_rng(0))
    inputs: list[Value] = attrs.field(factory=list[Value])
    fed: bool = False
    weighted: bool = False

    def pick(
        self,
        draw: Draw,
        dtypes: Collection[str] = ("float32",),
        rank: int = 0,
        most: int = 9,
        *,
        empty: bool = False,
    ) -> Value:
        """Draw a value of the pool.

        Args:
            draw: Given by hypothesis.
            dtypes: Allowed dtypes.
            rank: Smallest number of dimensions.
            most: Largest number of dimensions.
            empty: Whether values without elements are allowed.

        Raises:
            NoOperandError: the pool has no such value.
        """
        found = [v for v in self.values if dtype(v) in dtypes and rank <= len(dims(v)) <= most]
        found = [v for v in found if empty or 0 not in dims(v)]
        if not found:
            raise NoOperandError
        # 0, to which hypothesis shrinks, is the newest value, so that shrunk graphs are chains.
        return found[-1 - draw_int(draw, 0, len(found) - 1)]

    def like(self, draw: Draw, shape: Sequence[int], kind: str) -> Value | None:
        """Draw a value of the pool, None if it has none of this shape and dtype.

        Args:
            draw: Given by hypothesis.
            shape: The shape.
            kind: The dtype.
        """
        if self.weighted:
            return None
        found = [v for v in self.values if dtype(v) == kind and dims(v) == tuple(shape)]
        return found[-1 - draw_int(draw, 0, len(found) - 1)] if found else None

    def weight(self, shape: Sequence[int], scale: float = 0.5, low: float = -1) -> Value:
        """Return a float32 weight or, if ``fed`` and ``low`` is negative, perhaps another value.

        Args:
            shape: The shape.
            scale: Factor of the elements.
            low: The elements are uniform in [low, 1) times ``scale``.
        """
        self.weights += 1
        if self.fed and not self.weighted and low < 0 and self.rng.random() < 0.5:
            same = [v for v in self.values if dtype(v) == "float32" and dims(v) == tuple(shape)]
            if same and self.rng.random() < 0.5:
                return same[self.rng.integers(len(same))]
            return self.feed(shape)
        array = self.rng.uniform(low, 1, tuple(shape)).astype(np.float32) * np.float32(scale)
        return sg.parameter(f"w{self.weights}", array)

    def feed(self, shape: Sequence[int]) -> Value:
        """Add a float32 graph input of this shape."""
        self.inputs.append(sg.input(f"y{len(self.inputs)}", tuple(shape), "float32"))
        return self.inputs[-1]

    def constant(self, numbers: Any, dtype: str = "int64") -> Value:
        """Return a weight of these numbers."""
        self.weights += 1
        return sg.parameter(f"w{self.weights}", np.array(numbers, numpy_dtype(dtype)))


def draw_int(draw: Draw, low: int, high: int) -> int:
    """Draw a whole number in [low, high].

    Args:
        draw: Given by hypothesis.
        low: Smallest number, to which hypothesis shrinks.
        high: Largest number.
    """
    return int(draw(st.integers(low, high)))


def dims(value: Value) -> tuple[int, ...]:
    """Return the static shape of a value of the pool."""
    assert isinstance(value.type, TensorType)
    return value.type.sizes


def dtype(value: Value) -> str:
    """Return the dtype of a value of the pool."""
    assert isinstance(value.type, TensorType)
    return value.type.dtype


TEMPLATES: dict[str, Apply] = {}


def template(*names: str, table: dict[str, Apply] = TEMPLATES) -> Callable[[Apply], Apply]:
    """Return a decorator that registers the template of these operators in ``table``.

    A template is a function ``(draw, pool, name) -> value, tuple of values, or None`` if the drawn
    operands do not fit the operator. It raises NoOperandError if the pool has none for it.
    """

    def register(apply: Apply) -> Apply:
        table.update(dict.fromkeys(names, apply))
        return apply

    return register


def operator_of(name: str) -> str:
    """Return the operator of a template's name, which may end in "*" or "#" and more."""
    return name.removesuffix("*").partition("#")[0]


def make(op_type: str, /, *inputs: Any, **attributes: Any) -> Any:
    """Return the outputs of a new node of an operator of ONNX's own domain."""
    return getattr(sg.ops, op_type)(*inputs, **attributes)


@template(
    *("Relu", "Sigmoid", "Tanh", "Sin", "Cos", "Neg", "Abs", "Floor", "Softplus", "Erf"),
    *("LeakyRelu", "Elu", "HardSigmoid", "HardSwish", "Identity", "Sign", "Softsign", "Selu"),
    *("Ceil", "Round", "Gelu", "Mish"),
)
def _unary(draw: Draw, pool: Pool, name: str) -> Any:
    return make(name, pool.pick(draw))


@template("Add", "Sub", "Mul", "Max", "Min", "Greater", "Less", "LessOrEqual", "Sum", "Mean")
def _binary(draw: Draw, pool: Pool, name: str) -> Any:
    x = pool.pick(draw)
    y = pool.like(draw, dims(x), "float32") if draw(st.booleans()) else None
    if y is None:
        keep = [d if draw(st.booleans()) else 1 for d in dims(x)]
        # A factor or a bias often has fewer dimensions.
        first = pool.rng.integers(len(keep) + 1) if pool.weighted else 0
        y = pool.weight(dims(x)[first:] if pool.weighted else keep)
    return make(name, x, y) if draw(st.booleans()) else make(name, y, x)


@template("And", "Or", "Xor", "Not")
def _logical(draw: Draw, pool: Pool, name: str) -> Any:
    x = pool.pick(draw, ("bool",))
    return make(name, x, *([] if name == "Not" else [pool.like(draw, dims(x), "bool")]))


@template("Where")
def _where(draw: Draw, pool: Pool, name: str) -> Any:
    condition = pool.pick(draw, ("bool",))
    x = pool.like(draw, dims(condition), "float32")
    return None if x is None else make(name, condition, x, pool.weight(dims(x)[-1:]))


@template("GlobalAveragePool", "GlobalMaxPool")
def _global_pool(draw: Draw, pool: Pool, name: str) -> Any:
    return make(name, pool.pick(draw, rank=3))


@template("BatchNormalization")
def _batch_norm(draw: Draw, pool: Pool, name: str) -> Any:
    x = pool.pick(draw, rank=2)
    shape = dims(x)[1:2]
    given = [pool.weight(shape) for _ in range(3)]
    return make(name, x, *given, pool.weight(shape, 1, 0.5), outputs=1)


@template("InstanceNormalization")
def _instance_norm(draw: Draw, pool: Pool, name: str) -> Any:
    x = pool.pick(draw, rank=3)
    shape = dims(x)[1:2]
    return make(name, x, pool.weight(shape), pool.weight(shape))


@template("Concat")
def _concat(draw: Draw, pool: Pool, name: str) -> Any:
    x = pool.pick(draw, rank=1)
    # Every Concat doubles a value; a dozen of them in a row must not fill the memory (elements, an
    # estimate).
    if np.prod(dims(x)) > 500:
        return None
    y = pool.like(draw, dims(x), "float32")
    return make(name, x, y, axis=draw_int(draw, 0, len(dims(x)) - 1))


@template("Split")
def _split(draw: Draw, pool: Pool, name: str) -> Any:
    x = pool.pick(draw, rank=1)
    axis = draw_int(draw, 0, len(dims(x)) - 1)
    size = dims(x)[axis]
    if size < 2:
        return None
    first = draw_int(draw, 1, size - 1)
    return make(name, x, pool.constant([first, size - first]), axis=axis, outputs=2)


@template("Transpose")
def _transpose(draw: Draw, pool: Pool, name: str) -> Any:
    x = pool.pick(draw, ("float32", "bool", "int64", "float16"), rank=1, empty=True)
    return make(name, x, perm=draw(st.permutations(range(len(dims(x))))))


@template("Flatten")
def _flatten(draw: Draw, pool: Pool, name: str) -> Any:
    x = pool.pick(draw, rank=2)
    return make(name, x, axis=draw_int(draw, 0, len(dims(x)) - 1))


@template("If")
def _branch(draw: Draw, pool: Pool, name: str) -> Any:
    flag = pool.pick(draw, ("bool",))
    x = pool.pick(draw, rank=1)
    if not dims(flag):
        return None
    pool.weights += 1
    one = make("ReduceMax", make("Cast", flag, to=6), keepdims=0)
    condition = make("Cast", one, to=9)
    then = Graph(outputs=[sg.ops.Neg(sg.ops.Relu(sg.capture(x)))], name=f"then{pool.weights}")
    factor = pool.constant(3, dtype(x))
    other = sg.ops.Tanh(sg.ops.Mul(sg.capture(x), sg.capture(factor)))
    orelse = Graph(outputs=[other], name=f"else{pool.weights}")
    return make(name, condition, then_branch=then, else_branch=orelse)


def grow(draw: Draw, pool: Pool, table: Mapping[str, Apply], steps: int) -> None:
    """Apply drawn operators to values of the pool and add their results to it.

    Args:
        draw: Given by hypothesis.
        pool: The pool.
        table: Templates by operator.
        steps: Number of draws; operators without fitting operands add nothing.
    """
    for _ in range(steps):
        apply_one(draw, pool, table)


def apply_one(draw: Draw, pool: Pool, table: Mapping[str, Apply]) -> list[Value]:
    """Apply a drawn operator to values of the pool and add its results to it.

    Args:
        draw: Given by hypothesis.
        pool: The pool.
        table: Templates by operator.

    Returns:
        The results; [] if the pool has no operands for the operator.
    """
    name = draw(st.sampled_from(tuple(table)))
    made = None
    with suppress(NoOperandError):
        made = table[name](draw, pool, operator_of(name))
    if made is None:
        return []
    results: list[Value] = list(made) if isinstance(made, tuple) else [made]  # pyright: ignore[reportUnknownArgumentType]
    pool.values += [v for v in results if isinstance(v.type, TensorType) and v.type.is_static]
    return results


def drawn_outputs(draw: Draw, made: Sequence[Value]) -> list[Value]:
    """Draw the outputs of a graph, each once.

    All values that no node uses are outputs, or their nodes would be removed. Some used ones are
    outputs too, because a region must then keep an intermediate value.

    Args:
        draw: Given by hypothesis.
        made: The results of the graph's nodes, at least one.
    """
    used = {v for value in made if value.producer for v in value.producer.sources}
    extra = draw(st.lists(st.sampled_from(made), max_size=2))
    ends = [v for v in made if v not in used or v in extra]
    return list(dict.fromkeys(ends)) or [made[-1]]
