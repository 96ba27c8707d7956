"""Packing of weights into the forms that kernels read.

Each weight is packed by one call of a compiled kernel, which releases Python's global interpreter
lock, so that several weights are packed at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from subgraph.engine.codegen.arguments import KernelArguments
from subgraph.engine.planner.operands import Argument
from subgraph.engine.program.pool import call
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.types import Array
from subgraph.ops.shared.tile_planning import Tiles, round_up
from subgraph.system.large_pages import aligned_empty
from subgraph.weights.mapped_files import release_array

from .arguments import PackArguments, PairArguments, WinogradPackArguments

# Elements rounded to bfloat16 at a time: the 256 KiB of a temporary of float32 stay in L2
# (estimate).
_ROUNDED_ELEMENTS = 1 << 16
# Bytes of weights packed before their pages of the mapped file are released (estimate).
_SLICE_BYTES = 16 << 20
# Values of a tile at the 9 points of Winograd's algorithm with stride 2.
_STRIDED_VALUES = 25
_LINE = 16  # rows of a matrix packed together: 16 floats of a column fill a cache line of 64 bytes


def packed_size(columns: int, depth: int, of: Tiles) -> int:
    """Return the number of elements of the panels of a matrix.

    Args:
        columns: Columns of the matrix, padded to whole vectors.
        depth: Rows of the matrix.
        of: The contraction tiles.
    """
    return depth * round_up(columns, of.lanes)


def matrix_panels(of: Tiles, change: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Return a function that packs each of a stack of matrices ``change(weight)[S, K, N]``."""

    def pack(weight: Array) -> Array:
        stack = change(weight)
        return narrowed(pack_matrices(stack, of), of, stack.shape[0], stack.shape[2])

    return pack


def narrowed(panels: Array, of: Tiles, matrices: int, outputs: int) -> Array:
    """Return packed weights in the tiles' dtype of weights; bfloat16 is rounded to nearest even.

    Args:
        panels: The panels of all matrices.
        of: The contraction tiles.
        matrices: Number of matrices.
        outputs: Columns of a matrix; its panels have whole vectors.
    """
    if of.operands:
        columns = round_up(outputs, of.lanes)
        return _paired(panels, of, columns, panels.size // max(matrices * columns, 1))
    if not of.weights:
        return panels
    if of.weights == "float16":
        result = aligned_empty(panels.shape, np.dtype(np.float16))
        result[...] = panels
        return result
    result = aligned_empty(panels.shape, np.dtype(np.uint16))
    for start in range(0, panels.size, _ROUNDED_ELEMENTS):
        bits = panels[start : start + _ROUNDED_ELEMENTS].view(np.uint32)
        # The sum carries into the upper 16 bits exactly when the lower ones are more than half, or
        # half and the upper part is odd: round to nearest, ties to even.
        odd = (bits >> 16) & 1
        # A NaN whose payload lies in the lower 16 bits would be truncated to infinity, so its quiet
        # bit is set instead of rounding it.
        nan = (bits & 0x7FFFFFFF) > 0x7F800000
        rounded = np.where(nan, bits | 0x400000, bits + (odd + 0x7FFF)) >> 16
        result[start : start + _ROUNDED_ELEMENTS] = rounded
    return result


def _paired(panels: Array, of: Tiles, columns: int, depth: int) -> Array:
    """Return panels of float32 as registers of pairs of bfloat16, as matrix tiles read B."""
    result = aligned_empty(panels.shape, np.dtype(np.uint16))
    if panels.size:
        arguments = PairArguments(
            source=panels.ctypes.data,
            target=result.ctypes.data,
            columns=columns,
            width=of.width,
            depth=depth,
        )
        kernel = Kernel("subgraph.ops.movement.packing_kernels", "pair")
        _run(kernel, arguments, panels.size // (columns * depth) * -(-columns // of.width))
    return result


def pack_matrices(stack: Array, of: Tiles) -> Array:
    """Pack matrices ``[S, K, N]`` of any strides into panels; return a flat array.

    Rows are padded with zeros to whole steps of the tiles.
    """
    count, depth, columns = stack.shape
    depth = round_up(depth, of.depth_step)
    target = _empty((count, packed_size(columns, depth, of)), of)
    for matrix, panels in zip(stack, target, strict=True):
        _pack(matrix.T[:, :, None], panels, depth, of)
    return target.reshape(-1)


def pack_blocks(stack: Array, of: Tiles) -> Array:
    """Pack weights ``[S, O, I, taps]`` into panels with rows (block of inputs, tap, input); flat.

    A block has as many inputs as a vector, or as a step of matrix tiles.
    """
    count, outputs, inputs, taps = stack.shape
    block = max(of.lanes, of.depth_step)
    depth = round_up(inputs, block)
    target = _empty((count, packed_size(outputs, depth * taps, of)), of)
    for weight, panels in zip(stack, target, strict=True):
        _pack(weight, panels, depth, of)
    return target.reshape(-1)


def pack_winograd(weight: Array, of: Tiles, m: int) -> Array:
    """Transform weights for Winograd's algorithm with stride 1 and pack them at each point.

    Args:
        weight: ``[O, I, taps, taps]``.
        of: The contraction tiles.
        m: Outputs of a tile along an axis.

    Returns:
        The panels of the ``(m + taps - 1)^2`` points, one point after the other, flat.
    """
    weight = np.ascontiguousarray(weight, of.dtype)
    outputs, inputs, taps = weight.shape[:3]
    depth = round_up(inputs, of.lanes)
    size = packed_size(outputs, depth, of)
    target = _empty(((m + taps - 1) ** 2, size), of)
    more = taps_variant(taps)
    kernel = Kernel(
        "subgraph.ops.movement.packing_kernels",
        "winograd",
        dtype=of.dtype,
        lanes=of.lanes,
        m=m,
        **more,
    )
    arguments = WinogradPackArguments(
        source=weight.ctypes.data,
        target=target.ctypes.data,
        outputs=outputs,
        padded=round_up(outputs, of.lanes),
        width=of.width,
        inputs=inputs,
        depth=depth,
        point=size * of.item,
    )
    _run(kernel, arguments, -(-outputs // of.width))
    return target.reshape(-1)


def taps_variant(taps: int) -> dict[str, int]:
    """Return the variant of Winograd's kernels for ``taps`` along an axis; 3 is the default."""
    return {} if taps == 3 else {"taps": taps}


def pack_winograd_strided(weight: Array, of: Tiles) -> Array:
    """Transform ``[O, I, 3, 3]`` for stride 2 and pack each of the 9 points; flat.

    Along an axis, point 0 has two values: the first weight, and the middle one; point 1 two: the
    sum of the first and the last, and the middle one; point 2 (infinity) one, the last weight.
    """
    # All weights of a tap are contiguous, so that sums and packing read memory in order.
    taps = np.ascontiguousarray(weight.transpose(2, 3, 0, 1), of.dtype)
    outputs, inputs = weight.shape[:2]
    size = packed_size(outputs, round_up(inputs, of.lanes), of)
    target = _empty((_STRIDED_VALUES * size,), of)
    done = 0
    for rows in _strided_values(list(taps)):
        across = [_strided_values(list(row)) for row in rows]
        for j in range(3):
            values = [value for row in across for value in row[j]]
            panels = target[done : done + len(values) * size]
            panels[...] = pack_blocks(np.stack(values).transpose(1, 2, 0)[None], of)
            done += len(values) * size
    return target


def _strided_values(w: Sequence[Array]) -> list[list[Array]]:
    """Return the weights' values along an axis at each of the three points."""
    # Stride 2 splits the inputs into even ones, which meet the first and last weight, and odd ones,
    # which meet only the middle weight: two values at a finite point, one at infinity.
    return [[w[0], w[1]], [w[0] + w[2], w[1]], [w[2]]]


def _empty(shape: tuple[int, ...], of: Tiles) -> Array:
    # Aligned, so that the weight cache need not copy it.
    return aligned_empty(shape, np.dtype(of.dtype))


def pack_call(
    source: Argument,
    target: Argument,
    shape: Sequence[int],
    strides: Sequence[int],
    depth: int,
    of: Tiles,
) -> tuple[Kernel, PackArguments, int]:
    """Return the kernel `pack`, its arguments and its number of work units.

    Args:
        source: Weights ``[columns, inputs, taps]``.
        target: The panels.
        shape: The shape of the source.
        strides: Its strides in bytes.
        depth: Inputs of the target, whole blocks.
        of: The contraction tiles.
    """
    columns, inputs, taps = shape
    by_column, by_input, by_tap = strides
    arguments = PackArguments(
        source=source,
        target=target,
        columns=columns,
        padded=round_up(columns, of.lanes),
        width=of.width,
        inputs=inputs,
        depth=depth,
        # With one tap the inputs are in order, so any number of rows can be packed together.
        block=max(of.lanes, of.depth_step) if taps > 1 else _LINE,
        taps=taps,
        by_column=by_column,
        by_input=by_input,
        by_tap=by_tap,
    )
    kernel = Kernel("subgraph.ops.movement.packing_kernels", "pack", item=of.item, lanes=of.lanes)
    return kernel, arguments, -(-columns // of.width)


def _pack(source: Array, target: Array, depth: int, of: Tiles) -> None:
    """Pack ``[columns, inputs, taps]`` with the kernel `pack`."""
    if not target.size:
        return
    source = np.asarray(source, of.dtype)
    addresses = source.ctypes.data, target.ctypes.data
    kernel, arguments, units = pack_call(*addresses, source.shape, source.strides, depth, of)
    part = max(1, _SLICE_BYTES * units // max(1, source.nbytes))
    for first in range(0, units, part):
        last = min(first + part, units)
        _run(kernel, arguments, last, first)
        if part < units:
            release_array(source[first * of.width : last * of.width])


def _run(kernel: Kernel, arguments: KernelArguments, units: int, first: int = 0) -> None:
    block = np.array(arguments.words(), np.int64)
    call(kernel.address, block.ctypes.data, first, units, 0)
