"""DFT and STFT on the CPU device."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from subgraph.dtypes import FLOATS
from subgraph.engine.planner.lowering import Lowering, Unsupported, lowering
from subgraph.engine.planner.operands import Operand
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.graph import Node
from subgraph.graph.types import Array
from subgraph.operators.schema import is_before
from subgraph.ops.elementwise.cpu import cast_to, emit_cast, widened
from subgraph.ops.movement.cpu import known
from subgraph.ops.shared.delegation import viewed
from subgraph.ops.shared.strides import contiguous, normal_axis

from .arguments import LinesArguments

# Fewer samples take less time than another thread takes to start on them; an estimate.
_MIN_SAMPLES_PER_THREAD = 4096


def factors(size: int) -> list[int]:
    """Return the factors of a length: as many fours as possible, then primes."""
    found: list[int] = []
    radix = 4
    while size > 1:
        while size % radix == 0:
            found.append(radix)
            size //= radix
        radix = {4: 2, 2: 3}.get(radix, radix + 2)
        # What remains has no factor up to its square root, so it is a prime.
        if radix * radix > size and radix > 4 and size > 1:
            found.append(size)
            break
    return found


def _table(_: Array, *, size: int) -> Array:
    """Return cosine and sine of the roots of unity, [size, 2]."""
    angles = -2 * np.pi * np.arange(size) / size
    # Exact zeros at multiples of a quarter turn, so that zeros of the result stay zeros.
    table = np.stack([np.cos(angles), np.sin(angles)], -1)
    table[np.abs(table) < 1e-15] = 0
    return table


def _emit_lines(
    low: Lowering,
    x: Operand,
    y: Operand,
    window: Operand | None,
    numbers: tuple[int, int, int],
    units: int,
    *,
    hermitian: bool = False,
    inverse: bool = False,
    **strides: int,
) -> None:
    """Emit the step that transforms all lines.

    Args:
        low: The lowering that gets the step.
        x: Samples, real or complex: [..., 1] or [..., 2].
        y: Results, likewise.
        window: A factor for each sample; None: none.
        numbers: Samples, length and results of a line.
        units: Number of lines.
        hermitian: Whether x is the first half of lines with Hermitian symmetry.
        inverse: Whether the transform is inverse.
        **strides: Where the lines lie in x and y: these fields of `LinesArguments`.
    """
    size = numbers[1]
    parts = factors(size)
    table = low.weight(f"circle {size}", partial(_table, size=size), np.zeros(1))
    arguments = LinesArguments(
        x=x,
        y=y,
        window=window or 0,
        table=table,
        samples=numbers[0],
        size=size,
        results=numbers[2],
        x_numbers=x.shape[-1],
        y_numbers=y.shape[-1],
        **strides,
        hermitian=int(hermitian),
        direction=-1 if inverse else 1,
        **low.worker_scratch(32 * size),
        factor_count=len(parts),
        factors=parts,
    )
    # A pass with factor r takes r complex products for each of the results.
    flops = 4 * units * size * sum(parts)
    kernel = Kernel("subgraph.ops.signal.kernels", "lines", dtype=x.dtype)
    grain = max(1, _MIN_SAMPLES_PER_THREAD // size)
    low.emit(kernel, arguments, units, grain=grain, flops=flops, bytes=x.nbytes + y.nbytes)


@lowering("DFT", dtypes=FLOATS)
def dft(node: Node, low: Lowering) -> None:
    """Lower DFT along any axis, forward or inverse, one-sided or two-sided."""
    x, y = low.input(0), low.output()
    inverse = bool(node.attrs.get("inverse", 0))
    onesided = bool(node.attrs.get("onesided", 0))
    axis = int(node.attrs.get("axis", 1))
    if not is_before(node, 20):
        axis = -2 if low.optional(2) is None else int(known(low, 2).reshape(-1)[0])
    axis = normal_axis(axis, x.rank)
    hermitian = inverse and onesided
    if inverse and not onesided and x.dtype == "float32":
        # ONNX's tests expect the rounding errors of NumPy's float32 where results are zero.
        raise Unsupported("a two-sided inverse DFT of float32")
    size = 2 * (x.shape[axis] - 1) if hermitian else x.shape[axis]
    if low.optional(1) is not None:
        size = int(known(low, 1).reshape(-1)[0])
    if size < 1 or not x.size or not y.size:
        raise Unsupported(f"DFT of length {size} of {x.shape}")
    converted, result = widened(low, x, y)
    if y.shape[axis] > size or y.rank != x.rank or y.shape[-1] not in (1, 2):
        raise Unsupported(f"DFT of length {size} that gives {y.shape}")
    # Samples beyond the length are cut off, and missing ones count as zeros, as ONNX asks for
    # dft_length.
    samples = min(x.shape[axis], size // 2 + 1 if hermitian else size)
    inner = math.prod(x.shape[axis + 1 : -1])
    x_steps, y_steps = contiguous(x.shape), contiguous(y.shape)
    _emit_lines(
        low,
        converted,
        result,
        None,
        (samples, size, y.shape[axis]),
        math.prod(x.shape[:axis]) * inner,
        hermitian=hermitian,
        inverse=inverse,
        x_step=x_steps[axis],
        y_step=y_steps[axis],
        lines=inner,
        x_outer=x.shape[axis] * x_steps[axis],
        y_outer=y.shape[axis] * y_steps[axis],
        x_line=x.shape[-1],
        y_line=y.shape[-1],
    )
    emit_cast(low, result, y)


@lowering("STFT", dtypes=FLOATS)
def stft(node: Node, low: Lowering) -> None:
    """Lower STFT: each frame is a line, multiplied with the window."""
    x, y, window = low.input(0), low.output(), low.optional(2)
    hop = int(known(low, 1).reshape(-1)[0])
    if low.optional(3) is not None:
        size = int(known(low, 3).reshape(-1)[0])
    else:
        size = x.shape[1] if window is None else window.shape[0]
    if not x.size:
        raise Unsupported(f"STFT of {x.shape}")
    if y.size == 0:
        return
    if x.rank == 2:
        x = viewed(low, x, (*x.shape, 1))
    converted, result = widened(low, x, y)
    window = None if window is None else cast_to(low, window, converted.dtype)
    frames, results = y.shape[1], y.shape[2]
    parts = x.shape[2]
    _emit_lines(
        low,
        converted,
        result,
        window,
        (size, size, results),
        x.shape[0] * frames,
        x_step=parts,
        y_step=2,
        lines=frames,
        x_outer=x.shape[1] * parts,
        y_outer=frames * results * 2,
        x_line=hop * parts,
        y_line=results * 2,
    )
    emit_cast(low, result, y)
