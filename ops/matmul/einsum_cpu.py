"""Einsum on the CPU device: transpositions, reductions and batched matrix products."""

from __future__ import annotations

import math
from collections.abc import Sequence

from subgraph.engine.planner.lowering import Lowering, Unsupported, lowering
from subgraph.engine.planner.operands import Operand
from subgraph.graph.graph import Node
from subgraph.operators.requirements import decoded
from subgraph.ops.elementwise.cpu import temporary
from subgraph.ops.movement.copies_cpu import emit_copy
from subgraph.ops.movement.cpu import element_bytes
from subgraph.ops.reduce.cpu import emit_reduction
from subgraph.ops.shared.delegation import delegate, viewed
from subgraph.ops.shared.strides import contiguous


@lowering("Einsum", dtypes=("float32", "float64"))
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
    if x.storage is not None and x.source is None:
        return x
    copy = temporary(low, x.dtype, x.shape)
    steps = contiguous(x.shape)
    emit_copy(low, x, copy, x.shape, steps, steps, item=x.itemsize)
    return copy
