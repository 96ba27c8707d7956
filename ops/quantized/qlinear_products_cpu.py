"""QLinearMatMul, its fused form and MatMulInteger on the CPU, over integer tiles.

Weights are a matrix. Where the machine multiplies bytes they are packed as int8 for all zero
points: uint8 less 128. The excess of a zero point over that, ``e[n]``, is subtracted from the sums:
``sum (A[m] - za) (W[n] - e[n])`` is ``sum (A[m] - za) W[n] - e[n] r[m]``, with ``r[m] = sum (A[m] -
za)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs
import numpy as np

from subgraph.engine.codegen.tiling import MATRIX_ROW_BYTES
from subgraph.engine.planner.lowering import Lowering, Unsupported, lowering
from subgraph.engine.planner.operands import Argument, Operand
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.graph import Node
from subgraph.graph.types import Array
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.matmul.integer_gemm_cpu import MAX_FLOAT32_TERMS, emit_int8_product
from subgraph.ops.movement.geometry import Geometry
from subgraph.ops.shared.tile_planning import grain, round_up
from subgraph.system import host

from .arguments import PanelsArguments
from .qlinear_operands import (
    BYTES,
    QuantizedOperands,
    Requantization,
    Weights,
    choose_tile,
    fits_int8,
    integer_operands,
    read_operands,
    requantization_of,
    signed_zero_point,
    zero_point_argument,
    zero_point_sources,
)
from .qlinear_packing import (
    BLOCK,
    Tile,
    column_vector,
    guards,
    integer_tile,
    packed,
)
from .qlinear_tiles_cpu import Shape, emit_tiles

# Multiplications of a product for which packing panels takes less time than they save (estimate).
_MIN_TILE_MULTIPLICATIONS = 1 << 13


@lowering("QLinearMatMul", dtypes=BYTES)
@lowering("FusedQLinearMatMul", domain=INTERNAL_DOMAIN, dtypes=BYTES)
def qlinear_matmul(node: Node, low: Lowering) -> None:
    """Lower QLinearMatMul, and MatMul or Gemm between DequantizeLinear and QuantizeLinear."""
    q = read_operands(node, low)
    if q.y.size:
        _emit_product(node, q)


@lowering("MatMulInteger", dtypes=BYTES)
def matmul_integer(node: Node, low: Lowering) -> None:
    """Lower MatMulInteger; DynamicQuantizeLinear computes the zero point of A at run time."""
    q = integer_operands(low)
    a, b, y, zeros = q.x, q.w, q.y, (q.x_zero, q.w_zero)
    # A right side that is computed at run time is packed in each run, or multiplied as floats if
    # that is faster.
    if not b.constant:
        if not (y.size and _emit_computed_product(q)):
            emit_int8_product(low, a, b, zeros, y)
        return
    if zeros[0] is not None and zeros[0].size != 1:
        raise Unsupported("an integer product with zero points for each row")
    if zeros[1] is not None and not (zeros[1].constant and zeros[1].size in (1, b.shape[-1])):
        raise Unsupported(
            "a zero point of weights that is computed at run time or of another shape"
        )
    if y.size:
        _emit_product(node, q)


def _emit_product(node: Node, q: QuantizedOperands) -> None:
    """Emit a product with a matrix of weights: rows are the pixels of a convolution."""
    transposed = bool(node.attrs.get("transB", 0))
    if q.w.rank != 2:
        raise Unsupported("an integer product whose right side is not a matrix of weights")
    depth, outputs = q.w.shape[::-1] if transposed else q.w.shape
    rows = math.prod(q.x.shape[:-1])
    if not depth:
        raise Unsupported("a product of empty matrices")
    tile = choose_tile(q, depth, source="rows")
    double = 8 // tile.item
    double_steps = _double_steps(tile, depth)

    def as_rows(weight: Array) -> Array:
        return weight if transposed else weight.T

    def runs(weight: Array) -> Array:
        padded = np.zeros((outputs, double_steps * double), weight.dtype)
        padded[:, :depth] = weight
        return padded

    # Packing takes outputs as rows, as convolutions have them.
    def of_rows(make: Callable[..., Array]) -> Callable[..., Array]:
        def made(weight: Array, *zeros: Array) -> Array:
            return make(as_rows(weight), *zeros, *offset)

        return made

    # Tiles of pairs hold weights less their own zero points, others less `signed_zero_point`.
    pairs = tile.flavour == "pairs"
    zeros = zero_point_sources(q.w_zero) if pairs else []
    offset = [] if pairs else [np.full(1, signed_zero_point(q.w), q.w.dtype)]
    recipe = (
        f"integer product {tile.flavour} {tile.weights} {tile.nv}x{tile.lanes} {int(transposed)}"
    )
    weight = q.low.weight(recipe, of_rows(packed(tile, 1, runs)), q.w, *zeros)
    bounds: Argument = 0
    if tile.flavour == "checked":
        make = of_rows(guards(tile, 1, (1, 1, double_steps), runs))
        bounds = q.low.weight(f"bounds of {recipe}", make, q.w)

    def sums(values: Array) -> Array:
        total: Array = as_rows(values).sum(1)
        return total

    item = 1 if q.y.dtype in BYTES else 4
    # The rows of the left side are the pixels of a 1x1 convolution, along the width.
    line = (1, 1, 1)
    g = Geometry(1, 1, depth, outputs, (1, 1, rows), (1, 1, rows), line, line, line, (0, 0, 0))
    shape = _row_shape(depth, outputs, item, double_steps)
    weights = Weights(weight, bounds, _excess(q, tile, outputs))
    emit_tiles(q, tile, g, shape, weights, requantization_of(q, tile, 1, outputs, sums, transposed))


def _double_steps(tile: Tile, depth: int) -> int:
    """Return the double steps of rows of a matrix: eight bytes of a patch each."""
    elements = MATRIX_ROW_BYTES if tile.matrix else 8 // tile.item
    return round_up(depth, elements) * tile.item // 8


def _row_shape(depth: int, outputs: int, item: int, inner: int, x_image: int = 0) -> Shape:
    """Return the sizes of a product whose rows are the pixels of a convolution.

    Args:
        depth: Elements of a row of the left side.
        outputs: Columns of the result.
        item: Bytes of an element of the result.
        inner: Double steps of the depth.
        x_image: Bytes between left sides; 0 also for a single one.
    """
    return Shape(
        source="rows",
        blocks=1,
        pixel=inner * 8,
        inner=inner,
        last_inner=inner,
        width_merged=True,
        columns=round_up(outputs, BLOCK),
        stored=outputs,
        channels=depth,
        x_blocks=1,
        x_image=x_image,
        y_image=0,
        y_group=0,
        y_pixel=outputs * item,
        y_block=BLOCK * item,
    )


@attrs.frozen
class _Stack:
    """Matrices [M, K] times [K, N] of a product, one or several.

    Attributes:
        matrices: How many.
        m: M.
        depth: K.
        n: N.
        a_step: Elements between the left sides; 0: all have the same.
    """

    matrices: int
    m: int
    depth: int
    n: int
    a_step: int


def _stack(a: Operand, b: Operand) -> _Stack | None:
    """Return the matrices of a product; None if their stacks broadcast or an operand is empty."""
    if not (a.rank and b.rank and a.size and b.size):
        return None
    # A right side of one matrix serves all rows of the left side as one product; a left side of one
    # matrix is read again for each right side.
    depth, n, stack = a.shape[-1], b.shape[-1] if b.rank > 1 else 1, b.shape[:-2]
    rows = math.prod(a.shape[:-1])
    if a.rank <= 2 or b.rank <= 2:
        return _Stack(math.prod(stack), rows, depth, n, 0)
    if a.shape[:-2] != stack:
        return None
    m = a.shape[-2]
    return _Stack(math.prod(stack), m, depth, n, m * depth)


def _emit_computed_product(q: QuantizedOperands) -> bool:
    """Emit the product of two operands of which none is a weight, if tiles are the faster way.

    Returns:
        False if nothing was emitted.
    """
    s = _stack(q.x, q.w)
    if s is None or not _tiles_are_faster(q, s):
        return False
    if q.x_zero is not None and q.x_zero.size != 1:
        return False
    if q.w_zero is not None and q.w_zero.size != 1 and q.w_zero.shape != (s.n,):
        return False
    tile, double_steps = integer_tile("quads", "int8"), -(-s.depth // 8)
    weights, sums = _emit_packing(q, tile, s)
    g = Geometry(
        s.matrices, 1, s.depth, s.n, (1, 1, s.m), (1, 1, s.m), (1, 1, 1), (1, 1, 1), (1, 1, 1),
        (0, 0, 0),
    )  # fmt: skip
    shape = _row_shape(s.depth, s.n, 4, double_steps, s.a_step)
    shape = attrs.evolve(shape, y_image=4 * s.m * s.n)
    # A double step has eight bytes of each column.
    weights_image = 8 * double_steps * shape.columns if s.matrices > 1 else 0
    emit_tiles(q, tile, g, shape, weights, sums, weights_image=weights_image)
    return True


def _emit_packing(q: QuantizedOperands, tile: Tile, s: _Stack) -> tuple[Weights, Requantization]:
    """Emit the step that packs the right sides; return them and how sums become the result."""
    low, b, zero = q.low, q.w, q.w_zero
    # Tiles run double steps, so that the number of quads is even.
    columns, quads = round_up(s.n, BLOCK), round_up(s.depth, 8) // 4
    panels = low.scratch(4 * s.matrices * columns * quads)
    totals, excess = (low.scratch(4 * s.matrices * columns) for _ in range(2))
    arguments = PanelsArguments(
        x=b,
        y=panels,
        sums=totals,
        excess=excess,
        depth=s.depth,
        row_size=s.n,
        columns=columns,
        quads=quads,
        zeros=zero_point_argument(low, zero, b.dtype),
        zero_step=int(zero is not None and zero.size > 1),
    )
    units = s.matrices * -(-columns // (tile.lanes * tile.nv))
    kernel = Kernel(
        "subgraph.ops.quantized.qlinear_panel_kernels",
        "panels",
        dtype=b.dtype,
        lanes=tile.lanes,
        vectors=tile.nv,
    )
    low.emit(kernel, arguments, units, grain=grain(units, 4 * b.size), bytes=2 * b.nbytes)
    spread = column_vector(1, s.n, "int32")
    start = low.weight(f"integer bias 1x{s.n}", spread, np.zeros(1, np.int32))
    return Weights(panels, 0, excess), Requantization(start, 0, 0, totals)


def _tiles_are_faster(q: QuantizedOperands, s: _Stack) -> bool:
    """Return whether int8 tiles are faster than a float product that holds the sums exactly."""
    forced = q.low.options.get("INTEGER_FLAVOUR")
    if forced is not None:
        return bool(forced == "quads")
    # Sums of more terms need float64, with half the elements in a vector.
    return s.depth > MAX_FLOAT32_TERMS or (
        host.has_vnni() and s.m * s.depth * s.n >= _MIN_TILE_MULTIPLICATIONS
    )


def _excess(q: QuantizedOperands, tile: Tile, outputs: int) -> Argument:
    """Return the excess of packed columns: zero points less the one that packing subtracts."""
    # Tiles of pairs have weights less their own zero points. Weights that fit int8 have exactly the
    # zero point that packing subtracts.
    if tile.flavour == "pairs" or fits_int8(q.w, q.w_zero):
        return 0
    offset, spread = signed_zero_point(q.w), column_vector(1, outputs, "int32")

    def make(zero: Array) -> Array:
        return spread(zero.astype(np.int32) - offset)

    zero = q.w_zero if q.w_zero is not None else np.zeros(1, q.w.dtype)
    return q.low.weight(f"zero points less {offset} for {outputs}", make, zero)
