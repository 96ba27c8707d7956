"""Descriptions of matrix products: stacks of matrices inside operands, and their batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs

from subgraph.engine.planner.lowering import Unsupported
from subgraph.engine.planner.operands import Argument, Operand
from subgraph.engine.planner.views import is_in_blocks
from subgraph.graph.graph import Node
from subgraph.graph.types import Array
from subgraph.ops.shared.strides import Ints, broadcast_sizes, broadcast_strides, collapse
from subgraph.ops.shared.tile_planning import Activation, Tiles

_LEVELS = 3  # dimensions of a batch in the arguments of kernels, after merging


@attrs.frozen
class Matrix:
    """A stack of matrices inside an operand.

    Attributes:
        operand: The operand.
        shape: Sizes of the stack: the leading dimensions.
        rows: Rows of a matrix.
        columns: Columns of a matrix.
        row_step: Elements from a row to the next one.
        column_step: Elements from a column to the next one.
        block: Adjacent columns, if they are in blocks; 0: all.
        block_step: Elements from a block of columns to the next one.
    """

    operand: Operand
    shape: tuple[int, ...]  # of the stack
    rows: int
    columns: int
    row_step: int
    column_step: int
    block: int = 0
    block_step: int = 0

    @property
    def transposed(self) -> Matrix:
        """The transposed matrices."""
        return Matrix(
            self.operand, self.shape, self.columns, self.rows, self.column_step, self.row_step
        )


@attrs.define
class Product:
    """``act(alpha * A @ B + beta * C + R)``.

    Attributes:
        a: Left matrices.
        b: Right matrices.
        out: The results.
        act: The activation.
        alpha: Factor of the product.
        beta: Factor of C.
        bias: C, which broadcasts to the results; None: none.
        residual: R, shaped as the results; None: none.
        tiles: The contraction tiles; None: chosen by the sizes and options.
        panels: B, packed for ``tiles`` by a step that was emitted; None: it is packed by the
            product.
    """

    a: Matrix
    b: Matrix
    out: Operand
    act: Activation
    alpha: float = 1.0
    beta: float = 1.0
    bias: Operand | None = None
    residual: Operand | None = None
    tiles: Tiles | None = None
    panels: Argument | None = None


def matrix(operand: Operand, vector: str = "row") -> Matrix:
    """Return an operand as a stack of matrices; a vector is one row or one column (``vector``).

    Raises:
        Unsupported: The operand is a scalar.
    """
    shape = operand.shape
    if not shape:
        raise Unsupported("MatMul of a scalar")
    if operand.layout == "strided":
        rows, lanes = math.prod(shape[:-1]), operand.view[-1][-1][0]
        if not is_in_blocks(operand.view, shape, lanes):
            raise Unsupported("a product of a view that is no image in blocks")
        return Matrix(operand, (), rows, shape[-1], lanes, 1, lanes, rows * lanes)
    if len(shape) == 1:
        shape = (1, *shape) if vector == "row" else (*shape, 1)
    return Matrix(operand, shape[:-2], shape[-2], shape[-1], shape[-1], 1)


def factors_of(node: Node, left: Operand, right: Operand) -> tuple[Matrix, Matrix]:
    """Return the factors of a product, transposed as ``transA`` and ``transB`` of the node say."""
    a, b = matrix(left), matrix(right, "column")
    if a.block and node.attrs.get("transA", 0):
        raise Unsupported("a product of a transposed view")
    a = a.transposed if node.attrs.get("transA", 0) else a
    return a, b.transposed if node.attrs.get("transB", 0) else b


def is_transposed(b: Matrix) -> bool:
    """Return whether the matrices are stored column by column."""
    return b.row_step == 1 and b.column_step != 1


def matrices_of(b: Matrix, array: Array) -> Array:
    """Return the content of an operand as its matrices, ``[stack, rows, columns]``."""
    count = math.prod(b.shape)
    if is_transposed(b):
        return array.reshape((count, b.columns, b.rows)).swapaxes(1, 2)
    return array.reshape((count, b.rows, b.columns))


def batched(a: Matrix, b: Matrix) -> tuple[Matrix, Ints, list[Ints]]:
    """Return A, the batch sizes (three levels) and the strides of A, B, C along them, in elements.

    If all matrices of A share one B, they become one matrix with more rows.

    Raises:
        Unsupported: The batch has more than three dimensions that do not merge.
    """
    stack = broadcast_sizes(a.shape, b.shape)
    if (
        math.prod(b.shape) == 1
        and (a.row_step == a.columns or a.block)
        and math.prod(stack) == math.prod(a.shape)
    ):
        rows = math.prod(a.shape) * a.rows
        return attrs.evolve(a, shape=(), rows=rows), (1,) * _LEVELS, [(0,) * _LEVELS] * 3
    scales = (a.rows * a.columns, b.rows * b.columns, a.rows * b.columns)
    strides = [
        [step * scale for step in broadcast_strides(shape, stack)]
        for shape, scale in zip((a.shape, b.shape, stack), scales, strict=True)
    ]
    sizes, steps = collapse(stack, strides)
    missing = _LEVELS - len(sizes)
    if missing < 0:
        raise Unsupported(f"a batch over {len(sizes)} dimensions that do not merge")
    return a, (*(1,) * missing, *sizes), [(*(0,) * missing, *of) for of in steps]


def batch_steps(sizes: Sequence[int], steps: Sequence[Sequence[int]], of: Tiles) -> dict[str, Any]:
    """Return the fields of `GemmArguments` that describe the batch.

    Args:
        sizes: Sizes of the three levels.
        steps: Elements between matrices of A, B and C along them.
        of: The contraction tiles.
    """
    a_item = of.weight_item if of.operands else of.item
    found: dict[str, Any] = {"size1": sizes[1], "size2": sizes[2]}
    for name, own, nbytes in zip("abc", steps, (a_item, of.weight_item, of.item), strict=True):
        found[f"{name}_steps"] = [step * nbytes for step in own]
    return found
