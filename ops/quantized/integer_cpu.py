"""ConvInteger, and QLinearConv in the plain layout, on the CPU device."""

from __future__ import annotations

import math

import attrs
import numpy as np

from subgraph.engine.planner.constants import contiguous_array
from subgraph.engine.planner.lowering import (
    Argument,
    Lowering,
    Operand,
    Unsupported,
    Weight,
    lowering,
)
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.graph import Node
from subgraph.graph.types import Array
from subgraph.ops.movement.copies_cpu import emit_fill
from subgraph.ops.movement.geometry import Geometry, conv_geometry
from subgraph.ops.shared.tile_planning import grain
from subgraph.system import host

from .arguments import ColumnsArguments, IntegerProductArguments, QuadsArguments

_BYTES = ("uint8", "int8")
_VECTORS = 2  # of a panel


@attrs.define
class Sides:
    """The two sides of a product as the kernel reads them; `IntegerProductArguments` says more.

    Attributes:
        a: Left sides.
        b: Right sides.
        za: Zero points of the rows of A.
        ra: Sums of the rows of A less their zero points.
        sb: Sums of the columns of B.
        zb: Zero points of the columns of B.
        columns: Columns of a right side, rounded up to whole panels.
    """

    a: Argument
    b: Argument
    za: Argument
    ra: Argument
    sb: Argument
    zb: Argument
    columns: int


def _zero_point(operand: Operand | None) -> Array:
    """Return a zero point, flat; it must be known."""
    if operand is None:
        return np.zeros(1, np.int32)
    if operand.known is None:
        raise Unsupported("a zero point that is computed at run time")
    return operand.known.astype(np.int32).reshape(-1)


def _check(*operands: Operand) -> None:
    for operand in operands:
        if operand.dtype not in _BYTES:
            raise Unsupported(f"an integer product of {operand.dtype}")


def _lanes() -> int:
    return host.lanes("int32")


def _emit(
    low: Lowering, sides: Sides, y: Operand, sizes: tuple[int, int, int], *,
    stack: tuple[int, int], scale: Argument, zero: int, bias: Argument,
) -> None:  # fmt: skip
    """Emit ``integer_kernels.product``.

    Args:
        low: Where the step goes.
        sides: The two sides.
        y: The result.
        sizes: M, N and K of a matrix, K padded to quads.
        stack: Matrices and groups.
        scale: Factor of the sums of each row; 0: the result is int32.
        zero: Zero point of the result.
        bias: Added to the sums of each row; 0: nothing.
    """
    m, n, depth = sizes
    lanes = _lanes()
    width = lanes * _VECTORS
    # Without VNNI a quad takes several instructions and registers: of 16, fewer hold sums.
    rows = 8 if host.has_vnni() or host.has_32_registers() else 4
    arguments = IntegerProductArguments(
        a=sides.a,
        b=sides.b,
        c=y,
        m=m,
        n=n,
        row_bytes=depth,
        groups=stack[1],
        a_zeros=sides.za,
        a_sums=sides.ra,
        b_sums=sides.sb,
        b_zeros=sides.zb,
        sums_step=sides.columns,
        scale=scale,
        c_zero=zero,
        **low.worker_scratch(rows * width * 4),
        b_bytes=sides.columns * depth,
        bias=bias,
    )
    units = stack[0] * -(-m // rows) * -(-n // width)
    flops = 2 * stack[0] * m * n * depth
    low.emit(
        Kernel(
            "subgraph.ops.quantized.integer_kernels",
            "product",
            lanes=lanes,
            vectors=_VECTORS,
            rows=rows,
            output=y.dtype,
        ),
        arguments,
        units,
        grain=grain(units, flops),
        flops=flops,
        bytes=stack[0] * (m * depth + n * depth + m * n),
    )


def _scales(low: Lowering) -> Weight:
    """Return ``x_scale * w_scale / y_scale`` of a QLinearConv, float32 for each output channel."""
    operands = [low.input(index) for index in (1, 4, 6)]
    if any(not operand.constant for operand in operands):
        raise Unsupported("a scale that is computed at run time")
    count = low.input(3).shape[0]

    def make(x_scale: Array, w_scale: Array, y_scale: Array) -> Array:
        scale = (x_scale * w_scale / y_scale).astype(np.float32).reshape(-1)
        return np.ascontiguousarray(np.broadcast_to(scale, (count,)))

    return low.weight(f"integer scales {count}", make, *operands)


def _conv(
    node: Node, low: Lowering, x: Operand, w: Operand, x_zero: Operand | None,
    w_zero: Operand | None, *, scale: Argument = 0, zero: int = 0, bias: Argument = 0,
) -> None:  # fmt: skip
    """Emit a convolution: the weights are the left side of a product, the windows of x the right.

    Args:
        node: The convolution.
        low: Its lowering.
        x: The input.
        w: The weights.
        x_zero: Zero point of x.
        w_zero: Zero point of w, or one for each output channel.
        scale: Factors of the sums of output channels; 0: the result is int32.
        zero: Zero point of the result.
        bias: Added to the sums of output channels; 0: nothing.
    """
    _check(x, w)
    y = low.output()
    if not w.constant:
        raise Unsupported("weights of an integer convolution that are computed at run time")
    g = conv_geometry(node, x, w, y)
    outputs = g.groups * g.outputs
    zx, zw = _zero_point(x_zero), _zero_point(w_zero)
    if zx.size != 1 or zw.size not in (1, outputs):
        raise Unsupported("a convolution with several zero points of its input")
    a, za, ra = _rows_of_weights(low, w, g, zw)
    b, sb, columns = _emit_windows(low, x, g, int(zx[0]))
    zb = low.scratch(columns * 4)
    point = int(zx[0]) - (128 if x.dtype == "uint8" else 0)
    emit_fill(low, zb, columns, np.full(1, point, np.int32))
    _emit(
        low, Sides(a, b, za, ra, sb, zb, columns), y, (g.outputs, g.pixels, _row_bytes(g)),
        stack=(g.images * g.groups, g.groups), scale=scale, zero=zero, bias=bias,
    )  # fmt: skip


def _row_bytes(g: Geometry) -> int:
    """Return the bytes of a row of weights: inputs padded to quads, for each tap."""
    return 4 * -(-g.inputs // 4) * g.taps


def _rows_of_weights(
    low: Lowering, w: Operand, g: Geometry, zeros: Array
) -> tuple[Weight, Weight, Weight]:
    """Return weights as unsigned bytes, their zero points, and their sums less the zero points."""
    depth, outputs = g.inputs * g.taps, g.groups * g.outputs
    flip = 128 if w.dtype == "int8" else 0
    za = (np.zeros(outputs, np.int32) + zeros + flip).astype(np.int32)

    def bytes_of(weight: Array) -> Array:
        rows = np.zeros((outputs, g.taps, _row_bytes(g) // g.taps), np.uint8)
        taps_first = weight.reshape(outputs, g.inputs, g.taps).swapaxes(1, 2)
        rows[:, :, : g.inputs] = (taps_first.astype(np.int16) + flip) & 255
        return rows

    def row_sums(weight: Array) -> Array:
        rows = weight.reshape(outputs, depth).astype(np.int32) + flip
        sums: Array = rows.sum(1, dtype=np.int32) - depth * za
        return sums

    rows = low.weight(f"integer rows {outputs}x{g.inputs}x{g.taps} of {w.dtype}", bytes_of, w)
    sums = low.weight(f"integer row sums of {w.dtype} less {zeros.tolist()}", row_sums, w)
    return rows, low.weight("integer constant", contiguous_array, za), sums


def _emit_windows(
    low: Lowering, x: Operand, g: Geometry, zero: int
) -> tuple[Argument, Argument, int]:
    """Emit the copy of all windows of x, as panels of columns of signed bytes.

    Args:
        low: Where the steps go.
        x: The input.
        g: The sizes of the convolution.
        zero: Zero point of x, which pads it.

    Returns:
        The panels, the sums of their columns, and the columns of a matrix.
    """
    lanes = _lanes()
    width = lanes * _VECTORS
    quads, matrices = -(-g.inputs // 4), g.images * g.groups
    panels, pixels = -(-g.pixels // width), math.prod(g.source)
    flip = 128 if x.dtype == "uint8" else 0
    target = low.scratch(matrices * panels * width * _row_bytes(g))
    sums = low.scratch(matrices * panels * width * 4)
    four = low.scratch(matrices * quads * pixels * 4)
    low.emit(
        Kernel("subgraph.ops.quantized.integer_kernels", "quads_s8", dtype=x.dtype),
        QuadsArguments(x=x, y=four, channels=g.inputs, pixels=pixels),
        matrices * quads,
        grain=grain(matrices * quads, 4 * x.size),
        bytes=2 * x.size,
    )
    pad = ((zero & 255) ^ flip) * 0x01010101
    last = pad & (2 ** (8 * (g.inputs - 4 * (quads - 1))) - 1)
    arguments = ColumnsArguments(
        x=four,
        target=target,
        sums=sums,
        pad=pad,
        last_pad=last,
        quads=quads,
        panels=panels,
        **g.arguments(),
    )
    units, nbytes = matrices * panels, matrices * panels * width * _row_bytes(g)
    low.emit(
        Kernel(
            "subgraph.ops.quantized.integer_kernels", "columns_s8", lanes=lanes, vectors=_VECTORS
        ),
        arguments,
        units,
        grain=grain(units, 8 * nbytes),
        bytes=nbytes,
    )
    return target, sums, panels * width


@lowering("ConvInteger", dtypes=_BYTES)
def conv_integer(node: Node, low: Lowering) -> None:
    """Lower ConvInteger."""
    if low.output().size:
        _conv(node, low, low.input(0), low.input(1), low.optional(2), low.optional(3))


def qlinear_conv(node: Node, low: Lowering) -> None:
    """Emit QLinearConv in the plain layout, of any rank and groups."""
    y = low.output()
    if not y.size:
        return
    zero = _zero_point(low.optional(7))
    _conv(
        node, low, low.input(0), low.input(3), low.optional(2), low.optional(5),
        scale=_scales(low), zero=int(zero[0]), bias=low.optional(8) or 0,
    )  # fmt: skip
