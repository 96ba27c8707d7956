"""Operators that are composed of others on the CPU device.

Hardmax, MeanVarianceNormalization, BitCast and Einsum. `delegate` lowers another operator between
given operands, into the steps of the current node; `viewed` reshapes an operand for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from subgraph.engine.planner.constants import derived_operand
from subgraph.engine.planner.lowering import (
    Lowering,
    Operand,
    Unsupported,
    lowering,
)
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.graph import Node, Value
from subgraph.graph.types import Array, TensorType
from subgraph.operators.requirements import decoded
from subgraph.operators.schema import is_before
from subgraph.ops.elementwise.cpu import emit_expression, source, temporary
from subgraph.ops.elementwise.expressions import Expression
from subgraph.ops.indexing.arguments import OneHotArguments
from subgraph.ops.movement.copies_cpu import emit_copy
from subgraph.ops.movement.cpu import element_bytes
from subgraph.ops.reduce.cpu import emit_argminmax, emit_reduction
from subgraph.ops.shared.strides import contiguous, normal_axis

_FLOATS = ("float32", "float64")


def delegate(
    low: Lowering,
    op_type: str,
    inputs: Sequence[Operand],
    output: Operand,
    **attributes: Any,
) -> None:
    """Lower ``op_type`` from inputs to an output, into the steps of ``low``.

    Args:
        low: The lowering that gets the steps.
        op_type: An operator of the standard.
        inputs: Its operands.
        output: Its only output.
        attributes: Its attributes.

    Raises:
        Unsupported: There is no lowering of that operator for the first input's dtype.
    """
    rule = low.registry.find(op_type)
    if rule is None or (rule.dtypes is not None and inputs[0].dtype not in rule.dtypes):
        raise Unsupported(f"{low.node.op_type} needs {op_type} of {inputs[0].dtype}")
    values = [Value(o.name, TensorType(o.dtype, o.shape)) for o in inputs]
    result = Value(output.name, TensorType(output.dtype, output.shape))
    node = Node(op_type, values, outputs=[result], name=low.node.name, attrs=attributes)
    inner = type(low)(
        node,
        inputs,
        [output],
        threads=low.threads,
        options=low.options,
        float_block=low.float_block,
    )
    rule.function(node, inner)
    low.steps.extend(inner.steps)


def _reshaped(array: Array, *, shape: tuple[int, ...]) -> Array:
    """Reshape the content of a weight."""
    return array.reshape(shape)


def viewed(low: Lowering, operand: Operand, shape: Sequence[int]) -> Operand:
    """Return an operand with the same content in another shape.

    Args:
        low: The lowering of the node, which derives a constant's new form.
        operand: The operand, plain layout.
        shape: The new shape, of as many elements.

    Returns:
        An operand over the same memory; for a constant, over a weight computed from it.
    """
    shape = tuple(shape)
    if operand.constant:
        weight = low.weight(f"as {shape}", partial(_reshaped, shape=shape), operand)
        return derived_operand(operand.name, operand.dtype, shape, weight)
    same = Operand(operand.name, operand.dtype, shape)
    same.storage, same.offset = operand.storage, operand.offset
    return same


def softmax_sizes(node: Node, x: Operand) -> tuple[int, int]:
    """Return the elements of a row of Softmax or Hardmax, and those between two of them in x.

    Before opset 13, a row has all dimensions from the axis on.
    """
    old = is_before(node, 13)
    axis = normal_axis(int(node.attrs.get("axis", 1 if old else -1)), x.rank)
    if old:
        return math.prod(x.shape[axis:]), 1
    return x.shape[axis] if x.rank else 1, math.prod(x.shape[axis + 1 :])


@lowering("Hardmax", dtypes=_FLOATS)
def hardmax(node: Node, low: Lowering) -> None:
    """Lower Hardmax: 1 at the first largest element along the axis, 0 elsewhere."""
    x, y = low.input(0), low.output()
    if x.size == 0:
        return
    size, inner = softmax_sizes(node, x)
    outer = x.size // (size * inner)
    indices = temporary(low, "int64", (outer, inner))
    emit_argminmax(low, x, indices, size, inner, largest=True, last=False)
    zero_and_one = low.weight("hardmax", np.array, np.array([0, 1], x.dtype))
    kernel = Kernel("subgraph.ops.indexing.kernels", "one_hot", item=x.itemsize)
    arguments = OneHotArguments(
        indices=indices, values=zero_and_one, y=y, depth=size, inner=inner, wraps=0
    )
    low.emit(kernel, arguments, outer, bytes=y.nbytes)


@lowering("MeanVarianceNormalization", dtypes=_FLOATS)
def mean_variance(node: Node, low: Lowering) -> None:
    """Lower MeanVarianceNormalization: (x - mean) / (standard deviation + 1e-9)."""
    x, y = low.input(0), low.output()
    if x.size == 0:
        return
    axes = [normal_axis(int(a), x.rank) for a in node.attrs.get("axes", (0, 2, 3))]
    shape = [1 if d in axes else n for d, n in enumerate(x.shape)]
    mean, squares = temporary(low, x.dtype, shape), temporary(low, x.dtype, shape)
    centred = temporary(low, x.dtype, x.shape)
    emit_reduction(low, "mean", x, mean, axes)
    e = Expression()
    value, middle = e.input(x.dtype), e.input(x.dtype)
    emit_expression(low, e, [source(x), source(mean)], [(e("sub", value, middle), centred)])
    emit_reduction(low, "sumsq", centred, squares, axes)
    e = Expression()
    value, total = e.input(x.dtype), e.input(x.dtype)
    count = e.number(float(math.prod(x.shape[a] for a in axes)), x.dtype)
    deviation = e("add", e("sqrt", e("div", total, count)), 1e-9)
    result = e("div", value, deviation)
    emit_expression(low, e, [source(centred), source(squares)], [(result, y)])


@lowering("BitCast")
def bit_cast(node: Node, low: Lowering) -> None:
    """Lower BitCast: the output is the same memory with another dtype."""
    x, y = low.input(0), low.output()
    if element_bytes(x) != element_bytes(y):
        raise Unsupported(f"BitCast of {x.dtype} to {y.dtype}")
    low.alias(y, x)


# ---------------------------------------------------------------- Einsum


@lowering("Einsum", dtypes=_FLOATS)
def einsum(node: Node, low: Lowering) -> None:
    """Lower Einsum from left to right: each pair of operands is one batched matrix product."""
    operands = [low.input(k) for k in range(len(low.inputs))]
    y = low.output()
    terms, result = _equation(decoded(node.attrs["equation"]), [o.rank for o in operands])
    if y.size == 0:
        return
    if any(o.size == 0 for o in operands):
        raise Unsupported("Einsum of empty tensors")
    sizes: dict[str, int] = {}
    for term, operand in zip(terms, operands, strict=True):
        for name, size in zip(term, operand.shape, strict=True):
            if sizes.setdefault(name, size) != size:
                raise Unsupported("Einsum that broadcasts a named axis")
    product, names = operands[0], terms[0]
    for k, (operand, term) in enumerate(zip(operands[1:], terms[1:], strict=True), 1):
        later = {name for rest in terms[k + 1 :] for name in rest} | set(result)
        product, names = _contract(low, (product, names), (operand, term), later, sizes)
    product, names = _reduced(low, product, names, set(result), sizes)
    steps = dict(zip(names, contiguous(product.shape), strict=True))
    item = element_bytes(y)
    emit_copy(
        low, product, y, y.shape, [steps[name] for name in result], contiguous(y.shape), item=item
    )


def _equation(equation: str, ranks: Sequence[int]) -> tuple[list[str], str]:
    """Parse the equation: return one letter for each axis of each operand, and of the result.

    The dimensions of an ellipsis get Greek letters.

    Args:
        equation: The attribute of Einsum.
        ranks: Rank of each operand.

    Raises:
        Unsupported: The equation does not fit the operands.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    parts = left.split(",")
    if len(parts) != len(ranks):
        raise Unsupported(f"Einsum {equation!r} of {len(ranks)} operands")
    spare = [chr(code) for code in range(0x3B1, 0x3B1 + 16)]
    terms: list[str] = []
    for part, rank in zip(parts, ranks, strict=True):
        count = rank - len(part.replace("...", ""))
        if count < 0 or ("..." not in part and count):
            raise Unsupported(f"Einsum {equation!r} does not fit ranks {list(ranks)}")
        terms.append(part.replace("...", "".join(spare[len(spare) - count :])))
    longest = max((t for t in terms), key=lambda t: sum(c in spare for c in t), default="")
    dots = "".join(c for c in longest if c in spare)
    if arrow:
        return terms, right.replace("...", dots)
    letters = sorted({c for term in terms for c in term if c not in spare})
    once = [c for c in letters if sum(term.count(c) for term in terms) == 1]
    return terms, dots + "".join(once)


def _reduced(
    low: Lowering, x: Operand, names: str, needed: set[str], sizes: dict[str, int]
) -> tuple[Operand, str]:
    """Take diagonals of repeated axes, and sum over axes that are not in ``needed``."""
    if len(set(names)) < len(names):
        steps: dict[str, int] = {}
        for name, step in zip(names, contiguous(x.shape), strict=True):
            steps[name] = steps.get(name, 0) + step
        names = "".join(steps)
        shape = [sizes[name] for name in names]
        diagonal = temporary(low, x.dtype, shape)
        emit_copy(
            low,
            x,
            diagonal,
            shape,
            list(steps.values()),
            contiguous(shape),
            item=x.itemsize,
        )
        x = diagonal
    unneeded = [d for d, name in enumerate(names) if name not in needed]
    if not unneeded:
        return x, names
    remaining = [d for d in range(len(names)) if d not in unneeded]
    total = temporary(low, x.dtype, [x.shape[d] for d in remaining])
    emit_reduction(low, "sum", x, total, unneeded)
    return total, "".join(names[d] for d in remaining)


def _ordered(low: Lowering, x: Operand, names: str, order: str) -> Operand:
    """Return an operand with its axes transposed to ``order``."""
    if names == order:
        return x
    steps = dict(zip(names, contiguous(x.shape), strict=True))
    sizes = dict(zip(names, x.shape, strict=True))
    shape = [sizes[name] for name in order]
    transposed = temporary(low, x.dtype, shape)
    strides = [steps[name] for name in order]
    emit_copy(low, x, transposed, shape, strides, contiguous(shape), item=x.itemsize)
    return transposed


def _contract(
    low: Lowering,
    first: tuple[Operand, str],
    second: tuple[Operand, str],
    later: set[str],
    sizes: dict[str, int],
) -> tuple[Operand, str]:
    """Multiply two operands and sum over the axes that nothing later needs.

    Args:
        low: The lowering that gets the steps.
        first: The first operand and a letter for each of its axes.
        second: The second operand, likewise.
        later: Letters of the result and of all later operands.
        sizes: The size of each letter's axis.

    Returns:
        The product and a letter for each of its axes.
    """
    a, names_a = _reduced(low, *first, later | set(second[1]), sizes)
    b, names_b = _reduced(low, *second, later | set(names_a), sizes)
    shared = [c for c in names_a if c in names_b]
    batch = "".join(c for c in shared if c in later)
    summed = "".join(c for c in shared if c not in later)
    rows = "".join(c for c in names_a if c not in names_b)
    columns = "".join(c for c in names_b if c not in names_a)
    count, m, n, k = (math.prod(sizes[c] for c in part) for part in (batch, rows, columns, summed))
    # A view holds the memory that its operand has now. Copy operands whose memory is set later.
    left = viewed(low, _owned(low, _ordered(low, a, names_a, batch + rows + summed)), (count, m, k))
    right = viewed(
        low, _owned(low, _ordered(low, b, names_b, batch + summed + columns)), (count, k, n)
    )
    product = temporary(low, a.dtype, (count, m, n))
    delegate(low, "MatMul", [left, right], product)
    names = batch + rows + columns
    return viewed(low, product, [sizes[c] for c in names]), names


def _owned(low: Lowering, x: Operand) -> Operand:
    """Return an operand that has memory of its own: a copy of a parameter or a derived weight."""
    if x.storage is not None and x.parameter is None and x.derived is None:
        return x
    copy = temporary(low, x.dtype, x.shape)
    steps = contiguous(x.shape)
    emit_copy(low, x, copy, x.shape, steps, steps, item=x.itemsize)
    return copy
