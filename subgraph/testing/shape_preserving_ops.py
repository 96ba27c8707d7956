"""Operators that preserve the shape of their input, for the small models of `check_device`."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

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
    *("Softplus", "Softsign", "HardSigmoid", "Floor", "Sin", "Cos", "Atan", "Exp", "Sign"),
)
_WITH_WEIGHT = ("Add", "Mul", "Sub", "Div", "Max", "Min", "PRelu")


def _numbers(name: str, shape: Sequence[int], low: float = -1.0) -> Array:
    """Return uniform random numbers in [low, 1) that depend only on the name and the shape."""
    # A checksum instead of ``hash``, which Python salts in every process.
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


def _operator(
    op_type: str,
    shape: Shape = _ROWS,
    *weights: tuple[int, ...],
    low: float = -1.0,
    dtype: str = "float32",
    **attributes: Any,
) -> ShapePreservingOp:
    """Return an operator.

    Args:
        op_type: Name of the operator.
        shape: Shape of input and result.
        *weights: Shapes of its weights, which follow the input.
        low: Least element of the weights.
        dtype: Element type of input and result.
        **attributes: Its attributes.
    """

    def apply(x: Value, name: str) -> Value:
        names = (f"{name}_w{number}" for number in range(len(weights)))
        made = (parameter(n, _numbers(n, w, low)) for n, w in zip(names, weights, strict=True))
        result: Value = operator(op_type)(x, *made, **attributes)
        return result

    return ShapePreservingOp(op_type, shape, apply, dtype, has_weights=bool(weights))


def _operators() -> list[ShapePreservingOp]:
    window: dict[str, Any] = {"kernel_shape": [3, 3], "pads": [1, 1, 1, 1]}
    return [
        _operator("MatMul", _ROWS, (6, 6)),
        _operator("Gemm", _ROWS, (6, 6), (6,)),
        _operator("Conv", _IMAGES, (4, 4, 3, 3), pads=[1, 1, 1, 1]),
        *(_operator(op_type, _ROWS, (6,), low=0.5) for op_type in _WITH_WEIGHT),
        _operator("BatchNormalization", _IMAGES, *[(4,)] * 4, low=0.5),
        _operator("LayerNormalization", _ROWS, (6,)),
        _operator("MaxPool", _IMAGES, **window),
        _operator("AveragePool", _IMAGES, **window),
        *map(_operator, _PLAIN),
        _operator("Not", dtype="bool"),
    ]


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
    # Symbolic sizes first: the checks of several sizes need them.
    for fixed in (False, True):
        taken: list[ShapePreservingOp] = []
        refused: list[ShapePreservingOp] = []
        for piece in _operators():
            try:
                known = takes(piece.chain(2, fixed=fixed))
            except SubgraphError:
                known = False
            (taken if known else refused).append(piece)
        if taken:
            return taken, refused, fixed
    return [], _operators(), False
