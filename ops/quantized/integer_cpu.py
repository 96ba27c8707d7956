"""ConvInteger, and QLinearConv in the plain layout, on the CPU device."""

from __future__ import annotations

import math

import attrs
import numpy as np

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
from subgraph.ops.movement.geometry import conv_geometry
from subgraph.ops.shared.tile_planning import grain, round_up
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
    """

    a: Argument
    b: Argument
    za: Argument
    ra: Argument
    sb: Argument
    zb: Argument


def _zero_point(operand: Operand | None) -> Array:
    """Return a zero point, flat; it must be known."""
    if operand is None:
        return np.zeros(1, np.int32)
    if operand.known is None:
        raise Unsupported("a zero point that is computed at run time")
    return operand.known.astype(np.int32).reshape(-1)


def _as_given(array: Array) -> Array:
    return array


def _constant(low: Lowering, array: Array) -> Weight:
    return low.weight("integer constant", _as_given, np.ascontiguousarray(array))


def _check(*operands: Operand) -> None:
    for operand in operands:
        if operand.dtype not in _BYTES:
            raise Unsupported(f"an integer product of {operand.dtype}")


def _lanes() -> int:
    return host.lanes("int32")


def _emit(
    low: Lowering, sides: Sides, y: Operand, sizes: tuple[int, int, int], *,
    stack: tuple[int, int] = (1, 1), b_bytes: int = 0, sums: int = 0,
    scale: Argument = 0, per_row: bool = False, zero: int = 0, bias: Argument = 0,
) -> None:  # fmt: skip
    """Emit ``integer_kernels.product``.

    Args:
        low: Where the step goes.
        sides: The two sides.
        y: The result.
        sizes: M, N and K of a matrix, K padded to quads.
        stack: Matrices and groups.
        b_bytes: Bytes between right sides.
        sums: Elements between the sums of columns of matrices.
        scale: Factors of the sums; 0: the result is int32.
        per_row: There is a factor for each row, else for each column.
        zero: Zero point of the result.
        bias: Added to the sums of each row; 0: nothing.
    """
    m, n, depth = sizes
    lanes = _lanes()
    width = lanes * _VECTORS
    # Without VNNI a quad takes several instructions and registers: of 16, fewer hold sums.
    rows = 8 if host.has_vnni() or host.has_32_registers() else 4
    scratch = low.scratch(rows * width * 4, per_worker=True)
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
        sums_step=sums,
        scale=scale,
        row_scales=int(per_row),
        c_zero=zero,
        scratch=scratch,
        scratch_bytes=scratch.nbytes,
        b_bytes=b_bytes,
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


def _scales(low: Lowering, indices: tuple[int, int, int], count: int, pad: int) -> Weight:
    """Return ``left scale * right scale / output scale`` as float32.

    Args:
        low: The lowering.
        indices: Inputs that are the three scales.
        count: Number of results.
        pad: They are padded to a multiple of this.
    """
    operands = [low.input(index) for index in indices]
    if any(not operand.constant for operand in operands):
        raise Unsupported("a scale that is computed at run time")

    def make(left: Array, right: Array, out: Array) -> Array:
        scale = (left * right / out).astype(np.float32).reshape(-1)
        padded = np.zeros(round_up(count, pad), np.float32)
        padded[:count] = scale
        return padded

    return low.weight(f"integer scales {count} of {pad}", make, *operands)


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
    lanes = _lanes()
    width = lanes * _VECTORS
    depth, outputs = g.inputs * g.taps, g.groups * g.outputs
    quads, matrices = -(-g.inputs // 4), g.images * g.groups
    step = 4 * quads * g.taps
    zx, zw = _zero_point(x_zero), _zero_point(w_zero)
    if zx.size != 1 or zw.size not in (1, outputs):
        raise Unsupported("a convolution with several zero points of its input")
    flip_x, flip_w = (128 if x.dtype == "uint8" else 0), (128 if w.dtype == "int8" else 0)
    za = (np.zeros(outputs, np.int32) + zw + flip_w).astype(np.int32)

    def bytes_of(weight: Array) -> Array:
        rows = np.zeros((outputs, g.taps, 4 * quads), np.uint8)
        own = weight.reshape(outputs, g.inputs, g.taps).swapaxes(1, 2)
        rows[:, :, : g.inputs] = (own.astype(np.int16) + flip_w) & 255
        return rows

    def row_sums(weight: Array) -> Array:
        rows = weight.reshape(outputs, depth).astype(np.int32) + flip_w
        sums: Array = rows.sum(1, dtype=np.int32) - depth * za
        return sums

    left = low.weight(f"integer rows {outputs}x{g.inputs}x{g.taps} of {w.dtype}", bytes_of, w)
    ra = low.weight(f"integer row sums of {w.dtype} less {zw.tolist()}", row_sums, w)
    panels = -(-g.pixels // width)
    b_bytes = panels * step * width
    right = low.scratch(matrices * b_bytes)
    sums = low.scratch(matrices * panels * width * 4)
    pixels = math.prod(g.source)
    four = low.scratch(matrices * quads * pixels * 4)
    low.emit(
        Kernel("subgraph.ops.quantized.integer_kernels", "quads_s8", dtype=x.dtype),
        QuadsArguments(x=x, y=four, channels=g.inputs, pixels=pixels),
        matrices * quads,
        grain=grain(matrices * quads, 4 * x.size),
        bytes=2 * x.size,
    )
    pad = ((int(zx[0]) & 255) ^ flip_x) * 0x01010101
    last = pad & (2 ** (8 * (g.inputs - 4 * (quads - 1))) - 1)
    arguments = ColumnsArguments(
        x=four,
        target=right,
        sums=sums,
        pad=pad,
        last_pad=last,
        quads=quads,
        panels=panels,
        **g.arguments(),
    )
    units = matrices * panels
    low.emit(
        Kernel(
            "subgraph.ops.quantized.integer_kernels", "columns_s8", lanes=lanes, vectors=_VECTORS
        ),
        arguments,
        units,
        grain=grain(units, 8 * matrices * b_bytes),
        bytes=matrices * b_bytes,
    )
    zb = low.scratch(panels * width * 4)
    emit_fill(low, zb, panels * width, np.full(1, int(zx[0]) - flip_x, np.int32))
    sides = Sides(left, right, _constant(low, za), ra, sums, zb)
    _emit(
        low, sides, y, (g.outputs, g.pixels, step), stack=(matrices, g.groups),
        b_bytes=b_bytes, sums=panels * width, scale=scale, per_row=True,
        zero=zero, bias=bias,
    )  # fmt: skip


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
    scale = _scales(low, (1, 4, 6), low.input(3).shape[0], 1)
    _conv(
        node, low, low.input(0), low.input(3), low.optional(2), low.optional(5),
        scale=scale, zero=int(zero[0]), bias=low.optional(8) or 0,
    )  # fmt: skip
