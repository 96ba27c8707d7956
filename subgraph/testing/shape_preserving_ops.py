"""Operators that preserve the shape of their input, for the small models of `check_device`."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence

import attrs
import numpy as np

from subgraph.errors import SubgraphError
from subgraph.graph.graph import Graph, Value
from subgraph.graph.types import Array
from subgraph.operators.builder import input, operator, parameter

Shape = tuple[int | str, ...]
_ROWS: Shape = ("N", 6)
_IMAGES: Shape = ("N", 4, 6, 6)
_PLAIN = (
    *("Relu", "Tanh", "Sigmoid", "Neg", "Abs", "Identity", "LeakyRelu", "Elu", "Erf", "Softmax"),
    *("Softplus", "Softsign", "HardSigmoid", "Floor", "Sin", "Cos", "Atan", "Exp", "Sign", "Not"),
)
_WITH_WEIGHT = ("Add", "Mul", "Sub", "Div", "Max", "Min", "PRelu")


def _numbers(name: str, shape: Sequence[int], low: float = -1.0) -> Array:
    """Return uniform random numbers in [low, 1) that depend only on the name and the shape."""
    generator = np.random.default_rng(zlib.crc32(name.encode()))
    return generator.uniform(low, 1.0, shape).astype(np.float32)


@attrs.frozen(eq=False)
class ShapePreservingOp:
    """One operator, applied so that its result has the shape of its input.

    Attributes:
        name: Name of the operator.
        shape: Shape of input and result; the first dimension is symbolic.
        apply: ``(input, name) -> result``; the name distinguishes the weights.
        dtype: Element type of input and result.
        has_weights: Whether it has weights.
    """

    name: str
    shape: Shape
    apply: Callable[[Value, str], Value]
    dtype: str = "float32"
    has_weights: bool = False

    def input(self, name: str = "x", *, fixed: bool = False) -> Value:
        """Return a graph input of the shape; ``fixed``: the first dimension is 2, not symbolic."""
        shape = (2, *self.shape[1:]) if fixed else self.shape
        return input(name, shape, self.dtype)

    def chain(self, length: int, *, fixed: bool = False) -> Graph:
        """Return a graph that applies the operator ``length`` times in a row."""
        x = value = self.input(fixed=fixed)
        for number in range(length):
            value = self.apply(value, f"{self.name}{number}")
        return Graph([x], [value], f"{self.name}_chain")


def _weight(name: str, shape: Sequence[int], low: float = -1.0) -> Value:
    return parameter(f"{name}_w", _numbers(name, shape, low))


def _gemm(x: Value, name: str) -> Value:
    bias = parameter(f"{name}_b", _numbers(f"{name}_b", (6,)))
    made: Value = operator("Gemm")(x, _weight(name, (6, 6)), bias)
    return made


def _conv(x: Value, name: str) -> Value:
    made: Value = operator("Conv")(x, _weight(name, (4, 4, 3, 3)), pads=[1, 1, 1, 1])
    return made


def _batch_normalization(x: Value, name: str) -> Value:
    parts = [parameter(f"{name}_{k}", _numbers(f"{name}{k}", (4,), 0.5)) for k in "sbmv"]
    made: Value = operator("BatchNormalization")(x, *parts)
    return made


def _layer_normalization(x: Value, name: str) -> Value:
    made: Value = operator("LayerNormalization")(x, _weight(name, (6,)))
    return made


def _pool(op_type: str) -> Callable[[Value, str], Value]:
    def apply(x: Value, name: str) -> Value:
        made: Value = operator(op_type)(x, kernel_shape=[3, 3], pads=[1, 1, 1, 1])
        return made

    return apply


def _with_weight(op_type: str) -> Callable[[Value, str], Value]:
    def apply(x: Value, name: str) -> Value:
        made: Value = operator(op_type)(x, _weight(name, (6,), 0.5))
        return made

    return apply


def _plain(op_type: str) -> Callable[[Value, str], Value]:
    def apply(x: Value, name: str) -> Value:
        made: Value = operator(op_type)(x)
        return made

    return apply


def _matmul(x: Value, name: str) -> Value:
    made: Value = operator("MatMul")(x, _weight(name, (6, 6)))
    return made


def _pieces() -> list[ShapePreservingOp]:
    found = [
        ShapePreservingOp("MatMul", _ROWS, _matmul, has_weights=True),
        ShapePreservingOp("Gemm", _ROWS, _gemm, has_weights=True),
        ShapePreservingOp("Conv", _IMAGES, _conv, has_weights=True),
    ]
    found += [
        ShapePreservingOp(op, _ROWS, _with_weight(op), has_weights=True) for op in _WITH_WEIGHT
    ]
    found += [
        ShapePreservingOp("BatchNormalization", _IMAGES, _batch_normalization, has_weights=True),
        ShapePreservingOp("LayerNormalization", _ROWS, _layer_normalization, has_weights=True),
        ShapePreservingOp("MaxPool", _IMAGES, _pool("MaxPool")),
        ShapePreservingOp("AveragePool", _IMAGES, _pool("AveragePool")),
    ]
    kinds: Mapping[str, str] = {"Not": "bool"}
    found += [ShapePreservingOp(op, _ROWS, _plain(op), kinds.get(op, "float32")) for op in _PLAIN]
    return found


def sorted_by_support(
    takes: Callable[[Graph], bool],
) -> tuple[list[ShapePreservingOp], list[ShapePreservingOp], bool]:
    """Sort the operators by whether a device takes a chain of two.

    Args:
        takes: Whether the device takes every node of a graph.

    Returns:
        The operators that the device takes, those that it refuses, and whether it takes them only
        with static shapes.
    """
    for fixed in (False, True):
        taken: list[ShapePreservingOp] = []
        refused: list[ShapePreservingOp] = []
        for piece in _pieces():
            try:
                known = takes(piece.chain(2, fixed=fixed))
            except SubgraphError:
                known = False
            (taken if known else refused).append(piece)
        if taken:
            return taken, refused, fixed
    return [], _pieces(), False
