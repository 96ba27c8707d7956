"""Products with weights of 2, 4 or 8 bits in blocks on the CPU, whose weights stay packed.

Few rows are multiplied by weights that are unpacked in registers. For more rows each run unpacks
the weights first, into memory that the products of a model share.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np

from subgraph.engine.planner.lowering import Lowering, Unsupported, lowering
from subgraph.engine.planner.operands import Argument, Operand, Scratch
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.graph import Node
from subgraph.graph.symbolic import smaller
from subgraph.graph.types import Array
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.checks.cpu import emit_range_check
from subgraph.ops.matmul.cpu import emit_product
from subgraph.ops.matmul.products import Matrix, Product, matrix
from subgraph.ops.shared.tile_planning import (
    NO_ACTIVATION,
    Tiles,
    direct_tiles,
    grain,
    matrix_tiles,
    round_up,
)
from subgraph.system import host
from subgraph.system.large_pages import aligned_empty

from .arguments import (
    NUMBER_BASE,
    BlockwiseGroupsArguments,
    BlockwiseProductArguments,
    QuantizeRowsArguments,
    UnpackPanelsArguments,
)
from .weights import block_numbers

# Rows up to which unpacking weights in registers takes less time than unpacking them to memory, and
# the same beside matrix tiles; None: always (measured: 4096 x 4096 weights of 4 bits).
_MOST_FEW_ROWS, _MOST_ROWS_OF_BYTES = (32, 8), (None, 64)
_LEVEL_OF_BYTES = 4  # ``accuracy_level`` of MatMulNBits
_LEAST_GROUP = 16  # elements with one scale: those that `quantize_rows` rounds at a time
# Rows of a matrix that a grouped product copies together, and panels of a work unit (estimates).
_GROUP_ROWS, _UNIT_PANELS = 64, 12
# Rows of a tile: of 1 to 4, 4 took least time with 32 vector registers and with 16, although totals
# of blocks are not in registers then.
_TILE_ROWS = 4
_VECTORS = 2  # of a panel: two sums at a time hide the latency of a multiplication


@attrs.frozen
class _Form:
    """How the weights of a node are packed.

    Attributes:
        bits: Bits of a number.
        block: Rows of a block.
        parts: Blocks that have one scale and zero point in the model.
        depth: Rows of the matrix.
        columns: Columns of the matrix.
        lanes: Elements of a vector, which are columns.
        nv: Vectors of a panel.
    """

    bits: int
    block: int
    parts: int
    depth: int
    columns: int
    lanes: int
    nv: int

    @property
    def blocks(self) -> int:
        """Blocks of a column."""
        return -(-self.depth // self.block)

    @property
    def last_words(self) -> int:
        """Words of a column's last block whose rows exist."""
        return (self.depth - (self.blocks - 1) * self.block) * self.bits // 32

    @property
    def panels(self) -> int:
        """Panels of the matrix."""
        return -(-self.columns // (self.lanes * self.nv))

    def recipe(self, name: str) -> str:
        """Return the name of a computation from the node's operands."""
        blocks = f"{self.bits} {self.block} {self.parts}"
        return f"{name} {blocks} {self.depth}x{self.columns} {self.nv}x{self.lanes}"

    def packed(self, columns: Array) -> Array:
        """Return numbers ``[columns, n]`` as panels ``[n][column of the panel]``."""
        count, size = columns.shape
        width = self.lanes * self.nv
        made = aligned_empty((round_up(count, self.lanes) * size,), columns.dtype)
        whole = count // width * width
        panels = made[: whole * size].reshape(-1, size, width)
        panels[...] = columns[:whole].reshape(-1, width, size).transpose(0, 2, 1)
        if whole < count:
            last = made[whole * size :].reshape(size, -1)
            last[:, : count - whole] = columns[whole:].T
            last[:, count - whole :] = 0
        return made

    def words(self, weights: Array) -> Array:
        """Return the packed words of the weights, bytes of each column.

        The model may fill its last block with numbers that do not exist.
        """
        rows = np.ascontiguousarray(weights).reshape(self.columns, -1).view(np.dtype("<u4"))
        return self.packed(rows[:, : self.blocks * self.block * self.bits // 32])

    def numbers(self, scales: Array) -> Array:
        """Return numbers of the blocks, ``[columns * blocks]``, as panels."""
        return self._of_blocks(scales.reshape(self.columns, -1))

    def _of_blocks(self, numbers: Array) -> Array:
        """Return the model's numbers ``[columns, n]`` for each block, as panels."""
        return self.packed(np.repeat(numbers, self.parts, axis=1)[:, : self.blocks])

    def stack(self, make: Callable[[Array], Array]) -> Callable[[Array], Array]:
        """Return ``make`` for each matrix of a stack, one after the other."""
        return lambda matrices: np.concatenate([make(matrix) for matrix in matrices])

    @property
    def padded(self) -> int:
        """Columns, and those that fill the last vector."""
        return round_up(self.columns, self.lanes)

    def bias(self, row: Array) -> Array:
        """Return a number for each column, padded to whole vectors."""
        return self.packed(row.reshape(-1, 1))

    def zeros(self, packed: Array) -> Array:
        """Return packed zero points, bytes of each column, as panels of `NUMBER_BASE` plus each."""
        points = block_numbers(packed.reshape(self.columns, -1), self.bits)
        return self._of_blocks(points.astype(np.float32) + np.float32(NUMBER_BASE))


@lowering("FusedMatMulNBits", domain=INTERNAL_DOMAIN, dtypes=("float32",))
def matmul_n_bits(node: Node, low: Lowering) -> None:
    """Lower MatMulNBits whose weights are constant."""
    a, y, bias = low.input(0), low.output(), low.optional(5)
    if not y.size:
        return
    matrices = matrix_tiles(low, "float32")
    of = matrices or direct_tiles("float32")
    lanes = host.lanes("float32")
    rows = math.prod(a.shape[:-1])
    bytes_ = _rounds(node)
    most = (_MOST_ROWS_OF_BYTES if bytes_ else _MOST_FEW_ROWS)[matrices is not None]
    few = most is None or rows <= most
    form = _form(node, lanes, _VECTORS if few else of.nv)
    depth, columns = form.depth, form.columns
    if few:
        _emit_few_rows(low, form, rows, bias, bytes_)
        return
    b = Matrix(low.input(1), (), depth, columns, columns, 1)
    panels = _emit_panels(low, form, of)
    product = Product(matrix(a), b, y, NO_ACTIVATION, bias=bias, tiles=of, panels=panels)
    emit_product(low, product)


def _rounds(node: Node) -> bool:
    """Return whether A is rounded to int8, with a scale for each block."""
    level = int(node.attrs.get("accuracy_level", 0))
    return level == _LEVEL_OF_BYTES or int(node.attrs.get("group_size", 0)) > 0


def _form(node: Node, lanes: int, nv: int) -> _Form:
    """Return the form of the weights of a node; see the attributes of `_Form`."""
    bits, size, columns, depth = (
        int(node.attrs[name]) for name in ("bits", "block_size", "N", "K")
    )
    block, group = size, int(node.attrs.get("group_size", 0))
    while group and block > max(group, _LEAST_GROUP):
        block //= 2
    return _Form(bits, min(block, depth), size // block, depth, columns, lanes, nv)


def _weights(low: Lowering, form: _Form, first: int, *, stacked: bool = False) -> dict[str, Any]:
    """Return the fields of `BlockwiseArguments`.

    Args:
        low: The lowering, whose inputs from ``first`` on are weights, scales and zero points.
        form: The form of a matrix.
        first: Index of the input.
        stacked: The inputs are stacks of matrices.
    """
    b, scales, zeros = low.input(first), low.input(first + 1), low.optional(first + 2)

    def weight(name: str, make: Callable[[Array], Array], operand: Operand) -> Argument:
        kind = "blockwise stack" if stacked else "blockwise"
        return low.weight(
            form.recipe(f"{kind} {name}"), form.stack(make) if stacked else make, operand
        )

    return {
        "packed": weight("words", form.words, b),
        "scales": weight("scales", form.numbers, scales),
        "zeros": 0 if zeros is None else weight("zeros", form.zeros, zeros),
        "columns": form.columns,
        "blocks": form.blocks,
        "whole_words": form.block * form.bits // 32,
        "last_words": form.last_words,
    }


@lowering("FusedGroupedMatMulNBits", domain=INTERNAL_DOMAIN, dtypes=("float32",))
def grouped_matmul_n_bits(node: Node, low: Lowering) -> None:
    """Lower FusedGroupedMatMulNBits: each vector is multiplied by the matrix of its index."""
    x, indices, weights, y = low.input(0), low.input(1), low.input(2), low.output()
    rows = indices.size
    form = _form(node, host.lanes("float32"), _VECTORS)
    bits, columns, depth = form.bits, form.columns, form.depth
    if indices.known is not None or x.size != rows * depth or y.size != rows * columns:
        raise Unsupported("a grouped product with constant indices, or of vectors that broadcast")
    if not y.size:
        return
    matrices = weights.shape[0]
    emit_range_check(low, indices, "indices", -matrices, matrices - 1)
    bytes_ = _rounds(node)
    left, factors = _emit_bytes(low, form, rows) if bytes_ else (x, 0)
    mr = _TILE_ROWS
    group, item = smaller(rows, _GROUP_ROWS), 1 if bytes_ else 4
    size = group * (8 + depth * item + (8 * form.blocks if bytes_ else 0))
    panels = min(form.panels, _UNIT_PANELS)
    kernel = Kernel(
        "subgraph.ops.contrib.blockwise_kernels", "grouped_rows", bits=bits, lanes=form.lanes,
        mr=mr, nv=form.nv, index=indices.dtype, of_bytes=bytes_,
    )  # fmt: skip
    arguments = BlockwiseGroupsArguments(
        **_weights(low, form, 2, stacked=True),
        a=left,
        factors=factors,
        y=y,
        bias=0,
        rows=rows,
        depth=depth,
        indices=indices,
        matrices=matrices,
        words_step=form.padded * depth * bits // 8,
        numbers_step=form.padded * form.blocks * 4,
        block_panels=panels,
        block_rows=group,
        **low.worker_scratch(round_up(size, 64) + mr * form.nv * form.lanes * 4),
    )
    units, products = matrices * -(-form.panels // panels), rows * depth * columns
    moved = x.nbytes + y.nbytes + smaller(rows, matrices) * depth * columns * bits // 8
    low.emit(
        kernel, arguments, units, grain=grain(units, 2 * products + moved), flops=2 * products,
        bytes=moved,
    )  # fmt: skip


def _emit_few_rows(
    low: Lowering, form: _Form, rows: int, bias: Operand | None, bytes_: bool
) -> None:
    """Emit the product of few rows.

    Args:
        low: Gets the steps.
        form: The form of the weights.
        rows: Rows of A.
        bias: Added to all rows.
        bytes_: Whether A is rounded to bytes.
    """
    a, y = low.input(0), low.output()
    left, factors = _emit_bytes(low, form, rows) if bytes_ else (a, 0)
    added: Argument = 0
    if bias is not None:
        added = low.weight(form.recipe("blockwise bias"), form.bias, bias)
    mr = _TILE_ROWS
    kernel = Kernel(
        "subgraph.ops.contrib.blockwise_kernels", "few_rows",
        bits=form.bits, lanes=form.lanes, mr=mr, nv=form.nv, of_bytes=bytes_,
    )  # fmt: skip
    arguments = BlockwiseProductArguments(
        **_weights(low, form, 1),
        a=left,
        factors=factors,
        y=y,
        bias=added,
        rows=rows,
        depth=form.depth,
    )
    products = rows * form.depth * form.columns
    moved = a.nbytes + y.nbytes + form.depth * form.columns * form.bits // 8
    low.emit(
        kernel, arguments, form.panels,
        grain=grain(form.panels, 2 * products + moved), flops=2 * products, bytes=moved,
    )  # fmt: skip


def _emit_bytes(low: Lowering, form: _Form, rows: int) -> tuple[Scratch, Scratch]:
    """Emit the step that rounds A to bytes; return them, and the scales and sums of blocks."""
    blocks = rows * form.blocks
    target, factors = low.scratch(rows * form.depth), low.scratch(8 * blocks)
    arguments = QuantizeRowsArguments(
        x=low.input(0),
        target=target,
        factors=factors,
        depth=form.depth,
        blocks=form.blocks,
        width=form.block,
    )
    kernel = Kernel("subgraph.ops.contrib.blockwise_kernels", "quantize_rows", bits=form.bits)
    size = 5 * rows * form.depth
    low.emit(kernel, arguments, blocks, grain=grain(blocks, 8 * size), bytes=size)
    return target, factors


def _emit_panels(low: Lowering, form: _Form, of: Tiles) -> Scratch:
    """Emit the step that unpacks the weights to the panels of contraction tiles."""
    panel = round_up(form.depth, of.depth_step) * of.width * of.weight_item
    target = low.scratch(form.panels * panel)
    kernel = Kernel(
        "subgraph.ops.contrib.blockwise_kernels", "unpack_panels",
        bits=form.bits, lanes=form.lanes, nv=form.nv, operands=of.operands,
    )  # fmt: skip
    arguments = UnpackPanelsArguments(**_weights(low, form, 1), target=target, panel=panel)
    size = form.panels * panel
    low.emit(kernel, arguments, form.panels, grain=grain(form.panels, 4 * size), bytes=size)
    return target
