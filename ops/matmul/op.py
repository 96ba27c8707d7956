"""Matrix products, determinants, inverses: requirements of operands, and shape inference.

Det and ONNX Runtime's Inverse have no lowering: they run on the reference.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypeVar

from subgraph.errors import ShapeError
from subgraph.graph.graph import Node
from subgraph.graph.types import Dim, TensorType, ValueType
from subgraph.operators.batch_axes import Batch, BatchAxis, BatchCall, except_axes, matrix_product
from subgraph.operators.functions import declare_contributed
from subgraph.operators.operator import declare
from subgraph.operators.reference import standard
from subgraph.operators.requirements import (
    Tensor,
    is_known,
    require,
    require_broadcast,
    require_broadcast_together,
    require_dtype,
    require_rank,
    require_shape,
)
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.elementwise.op import Types, Values, first_type, same_dtype, tensor
from subgraph.ops.shared.half_precision import in_float32
from subgraph.ops.shared.strides import broadcast_shapes

from . import reference

_TERM = r"[A-Za-z]*(?:\.\.\.[A-Za-z]*)?"
_Size = TypeVar("_Size")
_EQUATION = re.compile(rf"({_TERM}(?:,{_TERM})*)(?:->({_TERM}))?")


def matmul_operands(node: Node, a: Tensor, b: Tensor) -> None:
    """Require that A's columns fit B's rows, and that stacks broadcast (ONNX MatMul, 1 to 13).

    Args:
        node: The node.
        a: ``[..., M, K]`` or ``[K]``.
        b: ``[..., K, N]`` or ``[K]``, of a's dtype.

    Raises:
        ShapeError: They do not fit.
    """
    require_dtype("B", b, a.dtype)
    require_product(a, b)


def require_product(a: Tensor, b: Tensor) -> None:
    """Require that A has as many columns as B rows, and that stacks broadcast as in NumPy."""
    rows, columns = b.shape, a.shape
    if not rows or not columns:
        raise ShapeError("a matrix product of a scalar")
    depth = rows[-2:][0]
    if not columns[-1] == depth:
        raise ShapeError(
            f"A {list(columns)} has {columns[-1]} columns, B {list(rows)} has {depth} rows"
        )
    for left, right in zip(columns[-3::-1], rows[-3::-1], strict=False):
        if not (left == right or left == 1 or right == 1):
            raise ShapeError(f"the stacks of A {list(columns)} and B {list(rows)} do not broadcast")


def gemm_operands(node: Node, a: Tensor, b: Tensor, c: Tensor | None = None) -> None:
    """Require that A and B fit, and that C broadcasts to their product (ONNX Gemm, 1 to 13).

    Args:
        node: The node, with ``transA`` and ``transB``.
        a: ``[M, K]``, or its transpose.
        b: ``[K, N]``, or its transpose.
        c: Broadcasts to ``[M, N]``; None: none.

    Raises:
        ShapeError: They do not fit.
    """
    require_rank("A", a, 2)
    require_rank("B", b, 2)
    require_dtype("B", b, a.dtype)
    require_dtype("C", c, a.dtype)
    left, right = _transposed(node, a, b)
    require_product(left, right)
    require_broadcast("C", c, (left.shape[0], right.shape[1]), "the product")


def _transposed(node: Node, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return both sides, transposed if Gemm's ``transA`` and ``transB`` say so."""
    left = Tensor(a.dtype, a.shape[::-1]) if node.attrs.get("transA", 0) else a
    right = Tensor(b.dtype, b.shape[::-1]) if node.attrs.get("transB", 0) else b
    return left, right


def fused_operands(
    node: Node, a: Tensor, b: Tensor, c: Tensor | None = None, r: Tensor | None = None
) -> None:
    """Require that C broadcasts to the product of A and B, and that R has its shape.

    FusedMatMul is ``act(alpha * A' @ B' + beta * C + R)``: a MatMul or Gemm with its attributes and
    those of an activation (see `subgraph.ops.shared.activations`). The operators that were
    fused would broadcast R, too; the kernel does not.

    Args:
        node: The FusedMatMul, with ``transA`` and ``transB``.
        a: ``[..., M, K]``, or its transpose.
        b: ``[..., K, N]``, or its transpose.
        c: Broadcasts to the product; None: none.
        r: Residual, of the product's shape; None: none.

    Raises:
        ShapeError: They do not fit.
    """
    require_dtype("B", b, a.dtype)
    a, b = _transposed(node, a, b)
    require_product(a, b)
    stacks = (a.shape[:-2], b.shape[:-2]) if a.rank > b.rank else (b.shape[:-2], a.shape[:-2])
    longer, shorter = stacks
    lead = list(longer)
    for k, size in enumerate(reversed(shorter), 1):
        lead[-k] = size if lead[-k] == 1 else lead[-k]
    shape = (*lead, *a.shape[-2:-1], *(b.shape[-1:] if b.rank > 1 else ()))
    for name, operand in (("C", c), ("R", r)):
        require_dtype(name, operand, a.dtype)
    require_broadcast("C", c, shape, "the product")
    require_shape("R", r, shape, "the product's")


def grouped_operands(node: Node, weights: Tensor, indices: Tensor, x: Tensor) -> None:
    """Require that vectors fit the matrices that they are multiplied with.

    FusedGroupedMatMul is ``W[i] @ x`` for columns x (``matrix_first``), or ``x @ W[i]`` for rows.
    The numbers of vectors and of indices broadcast.

    Args:
        node: The FusedGroupedMatMul.
        weights: W, ``[E, M, K]`` with ``matrix_first``, ``[E, K, N]`` without.
        indices: Numbers of matrices, ``[B]`` or ``[B, 1]``.
        x: ``[B, K, 1]`` with ``matrix_first``, ``[B, 1, K]`` without.

    Raises:
        ShapeError: They do not fit.
    """
    require_rank("W", weights, 3)
    require_rank("indices", indices, 1, 2)
    require_rank("x", x, 3)
    require_dtype("x", x, weights.dtype)
    require_dtype("indices", indices, "int32", "int64")
    first = bool(node.attrs.get("matrix_first"))
    wanted = (weights.shape[2], 1) if first else (1, weights.shape[1])
    if not x.shape[1:] == wanted:
        raise ShapeError(f"vectors {list(x.shape)} do not fit the matrices {list(weights.shape)}")


def distances_operands(node: Node, x: Tensor, y: Tensor) -> None:
    """Require that rows have the same length.

    FusedDistances is ``sum((x - y)**2)`` along the last axis.

    Args:
        node: The FusedDistances.
        x: Rows, ``[..., N, 1, K]``.
        y: Rows, ``[..., 1, M, K]``.

    Raises:
        ShapeError: They do not fit.
    """
    require_dtype("y", y, x.dtype)
    require(x.rank >= 3 and x.shape[-2] == 1, "x has shape {}", list(x.shape))
    require(y.rank >= 3 and y.shape[-3] == 1, "y has shape {}", list(y.shape))
    require(x.shape[-1] == y.shape[-1], "rows of {} and {} elements", x.shape[-1], y.shape[-1])
    require_broadcast_together(x, y)


def einsum_operands(node: Node, *operands: Tensor | None) -> None:
    """Require that equal letters stand for equal sizes (ONNX Einsum, 12).

    A size of one broadcasts, as in NumPy and ONNX Runtime.

    Raises:
        ShapeError: Sizes differ, or the equation is not well formed or does not fit the operands.
    """
    equation = node.attrs.get("equation", "")
    found = _EQUATION.fullmatch(str(equation).replace(" ", ""))
    if found is None or not equation:
        raise ShapeError(
            f"equation {equation!r} is not well formed; letters, commas, one '...' a term and "
            "'->' make one"
        )
    terms, result = found[1].split(","), found[2]
    require(len(terms) == len(operands), "{} terms for {} operands", len(terms), len(operands))
    letters = set("".join(terms)) - {",", "."}
    if result is not None:
        named = result.replace("...", "")
        require(set(named) <= letters, "the result {!r} has letters of no operand", result)
        require(len(set(named)) == len(named), "the result {!r} names a letter twice", result)
    sizes: dict[str | int, int] = {}
    dots = {o.rank - len(t) + 3 for t, o in zip(terms, operands, strict=True) if o and "..." in t}
    require(len(dots) < 2, "'...' of {!r} stands for {} dimensions", equation, sorted(dots))
    for k, (term, operand) in enumerate(zip(terms, operands, strict=True)):
        require(operand is not None, "operand {} is missing", k)
        assert operand is not None, "it was required"
        require_dtype(f"operand {k}", operand, *((operands[0].dtype,) if operands[0] else ()))
        for label, size in _labels(term, operand.shape, k):
            known = sizes.get(label, 1)
            require(
                known == 1 or size == 1 or known == size,
                "{!r} of {!r} is {} in one operand and {} in operand {}",
                label if isinstance(label, str) else "...",
                equation,
                known,
                size,
                k,
            )
            if label not in sizes or not is_known(known) or known == 1:
                sizes[label] = size


def square_operands(node: Node, x: Tensor) -> None:
    """Raise ShapeError unless the input holds square matrices."""
    require(x.rank >= 2, "the input has shape {}; it must hold matrices", list(x.shape))
    require(x.shape[-1] == x.shape[-2], "a matrix is {} by {}", x.shape[-2], x.shape[-1])


def einsum(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Infer the type of Einsum: the size of each letter of the result, broadcast over operands.

    Args:
        node: The node, with its ``equation``.
        types: Types of the inputs; None where unknown.
        values: Known contents of the inputs (unused).
    """
    dtype = same_dtype(types)
    found = _EQUATION.fullmatch(str(node.attrs.get("equation", "")).replace(" ", ""))
    if dtype is None or found is None:
        return [None]
    sizes: dict[str | int, list[tuple[Dim, ...]]] = {}
    for k, (term, type_) in enumerate(zip(found[1].split(","), types, strict=True)):
        operand = tensor(type_)
        if operand is None or operand.shape is None:
            return [TensorType(dtype)]
        for label, size in _labels(term, operand.shape, k):
            sizes.setdefault(label, []).append((size,))
    letters = sorted(label for label in sizes if isinstance(label, str))
    dots = sorted(label for label in sizes if isinstance(label, int))
    result = found[2]
    labels: list[str | int]
    if result is None:  # as in NumPy: dimensions of '...', then the letters that occur once
        text = found[1].replace("...", "")
        labels = [*dots, *(letter for letter in letters if text.count(letter) == 1)]
    else:
        before, ellipsis, after = result.partition("...")
        labels = [*before, *(dots if ellipsis else ()), *after]
    dims = [broadcast_shapes(sizes[label]) for label in labels]
    return [TensorType(dtype, [None if dim is None else dim[0] for dim in dims])]


def _labels(term: str, shape: Sequence[_Size], k: int) -> list[tuple[str | int, _Size]]:
    """Return a label for each dimension: its letter, or its index from the end within ``...``."""
    before, dots, after = term.partition("...")
    ellipsis_rank = len(shape) - len(before) - len(after)
    require(
        ellipsis_rank == 0 or (ellipsis_rank > 0 and bool(dots)),
        "term {!r} does not fit operand {} of shape {}",
        term,
        k,
        list(shape),
    )
    labels: list[str | int] = [*before, *range(-ellipsis_rank, 0), *after]
    return list(zip(labels, shape, strict=True))


def matmul(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Infer the type of MatMul: the last two dimensions multiplied, the others broadcast.

    Args:
        node: The node.
        types: Types of the inputs; None where unknown.
        values: Known contents of the inputs (unused).
    """
    return [product_type(same_dtype(types), types[0], types[1])]


def product_type(
    dtype: str | None, left: ValueType | None, right: ValueType | None
) -> ValueType | None:
    """Return the type of a matrix product, of unknown shape if an operand's is.

    Args:
        dtype: Dtype of the product; None where unknown.
        left: Type of the left operand, ``[..., M, K]`` or ``[K]``; None where unknown.
        right: Type of the right operand, ``[..., K, N]`` or ``[K]``; None where unknown.

    Raises:
        ShapeError: The stacks do not broadcast.
    """
    a, b = tensor(left), tensor(right)
    if dtype is None or a is None or b is None or a.shape is None or b.shape is None:
        return None if dtype is None else TensorType(dtype)
    tall = a.shape if len(a.shape) > 1 else (1, *a.shape)
    wide = b.shape if len(b.shape) > 1 else (*b.shape, 1)
    lead = broadcast_shapes([tall[:-2], wide[:-2]])
    rows = tall[-2:-1] if len(a.shape) > 1 else ()
    columns = wide[-1:] if len(b.shape) > 1 else ()
    return TensorType(dtype, (*(lead or ()), *rows, *columns))


def gemm(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Infer the type of Gemm: the product of two matrices, transposed as the node says.

    Args:
        node: The node, with ``transA`` and ``transB``.
        types: Types of the inputs; None where unknown.
        values: Known contents of the inputs (unused).
    """
    dtype = same_dtype([kind for kind in types if kind is not None])
    a, b = tensor(types[0]), tensor(types[1])
    if a is None or b is None or a.shape is None or b.shape is None:
        return [None if dtype is None else TensorType(dtype)]
    left = a.shape[::-1] if node.attrs.get("transA", 0) else a.shape
    right = b.shape[::-1] if node.attrs.get("transB", 0) else b.shape
    return [TensorType(a.dtype, (left[0], right[1]))]


def gemm_batch(call: BatchCall) -> Sequence[Batch]:
    """The batch is in rows of A or columns of B, as they are after transposition, or in C."""
    found: set[BatchAxis] = set()
    for k, rows, name in ((0, 0, "transA"), (1, 1, "transB")):
        batch = call.axis_of(k)
        if batch is not None:
            if batch.axis != (1 - rows if call.node.attrs.get(name, 0) else rows):
                return [None]
            found.add(batch.at(rows))
    c = call.axis_of(2)
    if c is not None:
        found.add(c.at(c.axis + 2 - len(call.shapes[2])))
    return [found.pop() if len(found) == 1 else None]


def einsum_batch(call: BatchCall) -> Sequence[Batch]:
    """The batch is one letter, or one dimension of ``...``, of all operands that have it."""
    equation = _EQUATION.fullmatch(str(call.node.attrs["equation"]).replace(" ", ""))
    if equation is None or equation[2] is None:
        return [None]
    labels: set[str | int] = set()
    found: set[BatchAxis] = set()
    for k, (term, shape) in enumerate(zip(equation[1].split(","), call.shapes, strict=True)):
        batch = call.axis_of(k)
        names = [label for label, _ in _labels(term, shape, k)]
        if batch is not None:
            labels.add(names[batch.axis])
            found.add(batch.at(0))
            if names.count(names[batch.axis]) > 1:
                return [None]
    result = [label for label, _ in _labels(equation[2], call.results[0], -1)]
    if len(labels) != 1 or len(found) != 1 or not labels <= set(result):
        return [None]
    return [found.pop().at(result.index(labels.pop()))]


def _of_matrices(call: BatchCall) -> Sequence[int]:
    return (-2, -1)


declare_contributed(
    "Inverse",
    "X -> Y",
    attributes={},
    requires=square_operands,
    infer=first_type,
    compute=in_float32(reference.inverse),
    batch=except_axes(_of_matrices),
)
# The operators of this family, each in all its versions.
declare(
    "Det",
    requires=square_operands,
    compute=in_float32(standard),
    batch=except_axes(_of_matrices),
)
declare("Einsum", requires=einsum_operands, infer=einsum, batch=einsum_batch)
declare(
    "Gemm",
    requires=gemm_operands,
    infer=gemm,
    compute=reference.gemm,
    speculatable=True,
    batch=gemm_batch,
)
declare(
    "MatMul", requires=matmul_operands, infer=matmul, speculatable=True, batch=matrix_product(0, 1)
)
declare("FusedMatMul", domain=INTERNAL_DOMAIN, requires=fused_operands)
declare("FusedDistances", domain=INTERNAL_DOMAIN, requires=distances_operands)
declare("FusedGroupedMatMul", domain=INTERNAL_DOMAIN, requires=grouped_operands)
