"""Weights of quantized convolutions and products as integer tiles read them.

Panels of columns, vectors of bias and scales, and the guards of products that may saturate; see
`subgraph.engine.codegen.tile_int`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import attrs
import numpy as np

from subgraph.engine.codegen.tiling import MATRIX_TILE
from subgraph.graph.types import Array
from subgraph.ops.shared.tile_planning import round_up
from subgraph.system import host

BLOCK = 16  # channels of a block, outputs of a store: ``tile_int.BLOCK``, without numba
QUAD = 4  # adjacent taps that a step of a depthwise convolution multiplies as bytes
# Channels of the two vectors of sums of a depthwise convolution over pairs of taps: to interleave
# two pixels of 256 bits (vpunpcklwd, vpunpckhwd) takes the lower or upper four of each 128 bits.
PAIR_CHANNELS = ([*range(4), *range(8, 12)], [*range(4, 8), *range(12, 16)])
LINE = 16  # bounds that `saturation_kernels` compares at a time; rows of bounds are padded to it

# How a step of an integer tile multiplies; see `subgraph.engine.codegen.tile_int`.
Flavour = Literal["pairs", "quads", "checked", "matrix"]
# The kind of memory that a patch is copied from; see `subgraph.ops.quantized.patches`.
PatchSource = Literal["blocked", "image", "rows"]


@attrs.frozen
class Tile:
    """How an integer product runs on this machine.

    Attributes:
        lanes: int32 elements of a vector.
        mr: Most rows of a tile.
        nv: Most vectors of a row.
        flavour: How a step multiplies.
        weights: Dtype of packed weights, "int8" or "int16".
    """

    lanes: int
    mr: int
    nv: int
    flavour: Flavour
    weights: str

    @property
    def item(self) -> int:
        """Bytes of an element of the left side, a patch."""
        return 2 if self.flavour == "pairs" else 1

    @property
    def step_elements(self) -> int:
        """Elements of a step: four bytes of A."""
        return 4 // self.item

    @property
    def matrix(self) -> bool:
        """Whether this is a matrix tile, whose operands are padded to steps of 64 bytes."""
        return self.flavour == "matrix"


def integer_tile(flavour: Flavour, weights: str) -> Tile:
    """Return the tile of this machine, as ``tile_int.integer_tile_shape`` does, without numba."""
    # Sums of mr x nv vectors, nv of B and one of A fit in the registers: 24 + 3 of 32 or 12 + 3 of
    # 16. A panel has whole blocks of 16 columns, so that narrow vectors need more of them.
    lanes = max(4, host.lanes("int32"))
    if flavour == "matrix":
        return Tile(lanes, *MATRIX_TILE, flavour, weights)
    if host.has_32_registers():
        mr, nv = (12, 2) if lanes == BLOCK else (6, BLOCK // lanes)
    else:
        mr, nv = (6, 2) if lanes == 8 else (2, BLOCK // lanes)
    return Tile(lanes, mr, nv, flavour, weights)


def column_vector(groups: int, outputs: int, dtype: str) -> Callable[[Array], Array]:
    """Return a function that spreads numbers to the padded columns of all groups.

    Args:
        groups: Groups.
        outputs: Outputs of a group; its columns are rounded up to 16.
        dtype: Dtype of the result.

    Returns:
        ``f(numbers)`` of one number, or one for each output of all groups; columns that pad are 0.
    """
    padded = round_up(outputs, BLOCK)

    def make(values: Array) -> Array:
        whole = np.zeros((groups, padded), dtype)
        whole[:, :outputs] = np.broadcast_to(values.reshape(-1), groups * outputs).reshape(
            groups, outputs
        )
        return whole.reshape(-1)

    return make


def packed(tile: Tile, groups: int, runs: Callable[[Array], Array]) -> Callable[..., Array]:
    """Return the function that packs weights from ``(weights, zero points)``.

    Args:
        tile: The tile.
        groups: Groups.
        runs: ``weights [outputs, ...] -> [outputs, K]``, K in the order of the patch, padded to
            whole double steps (eight bytes of the patch).
    """
    dtype, columns = tile.weights, tile.lanes * tile.nv

    def make(weight: Array, *zeros: Array) -> Array:
        rows = runs(centred_weights(weight, *zeros))
        rows = rows.reshape(groups, -1, rows.shape[-1])
        padded = np.zeros((groups, round_up(rows.shape[1], BLOCK), rows.shape[2]), dtype)
        padded[:, : rows.shape[1]] = rows
        pieces: list[Array] = []
        for matrix in padded:
            for first in range(0, matrix.shape[0], columns):
                panel = matrix[first : first + columns]
                steps = panel.reshape(panel.shape[0], -1, tile.step_elements)
                # A step of all columns is contiguous, in the order in which a tile reads it. The
                # last panel of a group has only its own columns.
                pieces.append(np.ascontiguousarray(steps.swapaxes(0, 1)).reshape(-1))
        return np.concatenate(pieces)

    return make


def centred_weights(weight: Array, *zeros: Array) -> Array:
    """Return weights less their zero points, as int16."""
    # The difference of two bytes needs nine bits.
    signed = weight.astype(np.int16)
    if not zeros:
        return signed
    return signed - zeros[0].astype(np.int16).reshape(-1, *[1] * (weight.ndim - 1))


def guards(
    tile: Tile, groups: int, shape: tuple[int, int, int], runs: Callable[[Array], Array]
) -> Callable[..., Array]:
    """Return the function that computes bounds of the input for each pair of weights of a panel.

    If both bytes are at most the bound, the sum of the two products fits into 16 bits; see
    ``saturation_kernels``.

    Args:
        tile: The tile.
        groups: Groups.
        shape: Blocks of the input, taps, double steps of the inner loop.
        runs: As for `packed`.
    """
    blocks, taps, inner = shape
    columns = tile.lanes * tile.nv

    def make(weight: Array, *zeros: Array) -> Array:
        rows = runs(centred_weights(weight, *zeros))
        full = np.zeros((rows.shape[0], blocks * taps * inner * 8), np.int16)
        full[:, : rows.shape[1]] = rows
        pairs = full.reshape(rows.shape[0], -1, 2)
        # Bytes of the input are not negative: a sum of two products is largest if weights of the
        # other sign meet 0. The bound for negative sums uses 32767, too, where 32768 would fit.
        above, below = (np.maximum(sign * pairs, 0).sum(2) for sign in (1, -1))
        sums: Array = np.maximum(above, below).reshape(groups, -1, blocks, taps, 4 * inner)
        firsts = list(range(0, sums.shape[1], columns))
        # A correction takes a step of all columns of a panel, so that one bound serves them all.
        largest = np.maximum.reduceat(sums, firsts, axis=1)
        # A bound of 255 holds for every byte. Taps are outermost: the largest bytes of a patch are
        # the same for all taps, and one row of them is compared with a row of bounds for each tap.
        fitting = np.minimum(32767 // np.maximum(largest, 1), 255).swapaxes(2, 3)
        row = 4 * blocks * inner
        bounds = np.full((*fitting.shape[:3], round_up(row, LINE)), 255, np.uint8)
        bounds[..., :row] = fitting.reshape(*fitting.shape[:3], row)
        return bounds

    return make
