"""QLinearMatMul, its fused form and MatMulInteger on the CPU, on the tiles of ``qlinear_cpu``.

Weights are a matrix. Where the machine multiplies bytes they are held as signed bytes whatever
their zero points: unsigned ones less 128. What is left of a zero point, ``e[n]``, leaves the sums
once they are added up: ``sum (A[m] - za) (W[n] - e[n])`` is ``sum (A[m] - za) W[n] - e[n] r[m]``,
with ``r[m] = sum (A[m] - za)``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs
import numpy as np

from subgraph.engine.planner.lowering import Argument, Lowering, Operand, Unsupported, lowering
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.graph import Node
from subgraph.graph.types import Array
from subgraph.operators.schema import INTERNAL_DOMAIN
from subgraph.ops.matmul.integer_gemm_cpu import MAX_FLOAT32_TERMS, emit_int8_product
from subgraph.ops.movement.geometry import Geometry
from subgraph.ops.shared.tile_planning import grain, round_up
from subgraph.system import host

from .arguments import PanelsArguments
from .qlinear_cpu import (
    BYTES,
    Quantised,
    Shape,
    Sums,
    Weights,
    choose_tile,
    emit_tiles,
    has_usual_zero,
    quantised,
    sums_of,
    usual_zero,
    zero_sources,
    zero_word,
)
from .qlinear_packing import BLOCK, Tile, column_vector, guards, integer_tile, packed

# Multiplications of a matrix of which panels are not worth the while.
_SMALL = 1 << 13


@lowering("QLinearMatMul", dtypes=BYTES)
def qlinear_matmul(node: Node, low: Lowering) -> None:
    """Lower QLinearMatMul."""
    q = quantised(node, low)
    if q.y.size:
        _product(node, q)


@lowering("FusedQLinearMatMul", domain=INTERNAL_DOMAIN, dtypes=BYTES)
def fused_matmul(node: Node, low: Lowering) -> None:
    """Lower MatMul or Gemm between DequantizeLinear and QuantizeLinear."""
    q = quantised(node, low)
    if q.y.size:
        _product(node, q)


@lowering("MatMulInteger", dtypes=BYTES)
def matmul_integer(node: Node, low: Lowering) -> None:
    """Lower MatMulInteger; the zero point of A may be computed at run time, as quantisers do."""
    a, b, y = low.input(0), low.input(1), low.output()
    if a.dtype not in BYTES or b.dtype not in BYTES:
        raise Unsupported(f"an integer product of {a.dtype} and {b.dtype}")
    zeros = low.optional(2), low.optional(3)
    none = (-math.inf, math.inf, 0)
    q = Quantised(
        low, a, None, zeros[0], b, None, zeros[1], None, None, None, None, y, none
    )  # fmt: skip
    if not b.constant:
        if not (y.size and _computed_product(q)):
            emit_int8_product(low, a, b, zeros, y)
        return
    if zeros[0] is not None and zeros[0].size != 1:
        raise Unsupported("an integer product with zero points for each row")
    if zeros[1] is not None and not (zeros[1].constant and zeros[1].size in (1, b.shape[-1])):
        raise Unsupported(
            "a zero point of weights that is computed at run time or of another shape"
        )
    if y.size:
        _product(node, q)


def _product(node: Node, q: Quantised) -> None:
    """Emit a product with a matrix of weights: rows are the pixels of a convolution."""
    turned = bool(node.attrs.get("transB", 0))
    if q.w.rank != 2 or q.x.rank < 1:
        raise Unsupported("an integer product whose right side is not a matrix of weights")
    depth, outputs = q.w.shape[::-1] if turned else q.w.shape
    rows = math.prod(q.x.shape[:-1])
    if q.x.shape[-1] != depth or not depth:
        raise Unsupported(f"a product of depths {q.x.shape[-1]} and {depth}")
    tile = choose_tile(q, source="rows")
    double = 8 // tile.item
    kin = -(-depth // double)

    def as_rows(weight: Array) -> Array:
        return weight if turned else weight.T

    def runs(weight: Array) -> Array:
        padded = np.zeros((outputs, kin * double), weight.dtype)
        padded[:, :depth] = weight
        return padded

    def of_rows(make: Callable[..., Array]) -> Callable[..., Array]:
        def made(weight: Array, *zeros: Array) -> Array:
            return make(as_rows(weight), *zeros, *usual)

        return made

    # Pairs hold weights less their own zero points, bytes hold them less the usual one.
    pairs = tile.flavour == "pairs"
    zeros = zero_sources(q.w_zero) if pairs else []
    usual = [] if pairs else [np.full(1, usual_zero(q.w), q.w.dtype)]
    recipe = f"integer product {tile.flavour} {tile.weights} {tile.nv}x{tile.lanes} {int(turned)}"
    weight = q.low.weight(recipe, of_rows(packed(tile, 1, runs)), q.w, *zeros)
    bounds: Argument = 0
    if tile.flavour == "guarded":
        make = of_rows(guards(tile, 1, (1, 1, kin), runs))
        bounds = q.low.weight(f"bounds of {recipe}", make, q.w)

    def sums(values: Array) -> Array:
        total: Array = as_rows(values).sum(1)
        return total

    item = 1 if q.output in BYTES else 4
    line = (1, 1, 1)
    g = Geometry(1, 1, depth, outputs, (1, 1, rows), (1, 1, rows), line, line, line, (0, 0, 0))
    shape = Shape(
        "rows", 1, kin * 8, kin, kin, True, round_up(outputs, BLOCK), outputs, depth,
        0, 0, outputs * item, BLOCK * item,
    )  # fmt: skip
    weights = Weights(weight, bounds, _excess(q, tile, outputs))
    emit_tiles(q, tile, g, shape, weights, sums_of(q, tile, 1, outputs, sums, turned))


@attrs.frozen
class _Stack:
    """Matrices [M, K] times [K, N] of a product, one or several."""

    matrices: int
    m: int
    depth: int
    n: int
    a_step: int  # elements between the left sides


def _stack(a: Operand, b: Operand) -> _Stack | None:
    """Return the matrices of a product; None where stacks broadcast or there is nothing to do."""
    if not (a.rank and b.rank and a.size and b.size):
        return None
    depth, n, stack = a.shape[-1], b.shape[-1] if b.rank > 1 else 1, b.shape[:-2]
    rows = math.prod(a.shape[:-1])
    if a.rank <= 2 or b.rank <= 2:
        return _Stack(math.prod(stack), rows, depth, n, 0)
    if a.shape[:-2] != stack:
        return None
    m = a.shape[-2]
    return _Stack(math.prod(stack), m, depth, n, m * depth)


def _computed_product(q: Quantised) -> bool:
    """Emit the product of two sides that are computed at run time; return whether tiles take it."""
    s = _stack(q.x, q.w)
    if s is None or not _tiles_pay(q, s):
        return False
    if q.x_zero is not None and q.x_zero.size != 1:
        return False
    if q.w_zero is not None and q.w_zero.size != 1 and q.w_zero.shape != (s.n,):
        return False
    tile, columns, kin = integer_tile("quads", "int8"), round_up(s.n, BLOCK), -(-s.depth // 8)
    weights, sums = _pack(q, tile, s)
    g = Geometry(
        s.matrices, 1, s.depth, s.n, (1, 1, s.m), (1, 1, s.m), (1, 1, 1), (1, 1, 1), (1, 1, 1),
        (0, 0, 0),
    )  # fmt: skip
    shape = Shape(
        "rows", 1, kin * 8, kin, kin, True, columns, s.n, s.depth,
        s.a_step, 4 * s.m * s.n, 4 * s.n, 4 * BLOCK,
    )  # fmt: skip
    apart = 8 * kin * columns if s.matrices > 1 else 0
    emit_tiles(q, tile, g, shape, weights, sums, apart=apart)
    return True


def _pack(q: Quantised, tile: Tile, s: _Stack) -> tuple[Weights, Sums]:
    """Emit the panels of the right sides; return the weights and their sums."""
    low, b, zero = q.low, q.w, q.w_zero
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
        zeros=zero_word(low, zero, b.dtype),
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
    return Weights(panels, 0, excess), Sums(start, 0, 0, totals)


def _tiles_pay(q: Quantised, s: _Stack) -> bool:
    """Return whether products of bytes are faster than those of floats that hold their sums."""
    forced = q.low.options.get("INTEGER_FLAVOUR")
    if forced is not None:
        return bool(forced == "quads")
    # To hold more terms takes float64, with half the elements in a vector.
    return s.depth > MAX_FLOAT32_TERMS or (host.has_vnni() and s.m * s.depth * s.n >= _SMALL)


def _excess(q: Quantised, tile: Tile, outputs: int) -> Argument:
    """Return what packed columns are too large by: zero points less what packing takes off."""
    if tile.flavour == "pairs" or has_usual_zero(q.w, q.w_zero):
        return 0
    usual, spread = usual_zero(q.w), column_vector(1, outputs, "int32")

    def make(zero: Array) -> Array:
        return spread(zero.astype(np.int32) - usual)

    zero = q.w_zero if q.w_zero is not None else np.zeros(1, q.w.dtype)
    return q.low.weight(f"zero points less {usual} for {outputs}", make, zero)
