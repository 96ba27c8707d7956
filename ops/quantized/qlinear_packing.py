"""Weights of quantised convolutions and products as their tiles read them; see ``engine.tile_int``.

Panels of columns, vectors of bias and scales, and the guards of products that may saturate.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import attrs
import numpy as np

from subgraph.graph.types import Array
from subgraph.ops.shared.tile_planning import round_up
from subgraph.system import host

BLOCK = 16  # channels of a block, outputs of a store: ``tile_int.BLOCK``, without numba
LINE = 16  # ``guarded_kernels.LINE``

# How a step of an integer tile multiplies; see `subgraph.engine.codegen.tile_int`.
Flavour = Literal["pairs", "quads", "guarded"]
# What a strip is copied from; see `subgraph.ops.quantized.strips`.
StripSource = Literal["blocked", "image", "rows"]


@attrs.frozen
class Tile:
    """How an integer product runs on this machine: the numbers of ``tile_int.int_tile``."""

    lanes: int
    mr: int
    nv: int
    flavour: Flavour
    weights: str

    @property
    def item(self) -> int:
        """Bytes of an element of a strip."""
        return 2 if self.flavour == "pairs" else 1

    @property
    def together(self) -> int:
        """Elements of a step: four bytes of A."""
        return 4 // self.item


def integer_tile(flavour: Flavour, weights: str) -> Tile:
    """Return the tile of this machine; the same choice as ``tile_int.int_tile``, without numba."""
    lanes = max(4, host.lanes("int32"))
    if host.has_32_registers():
        mr, nv = (12, 2) if lanes == BLOCK else (6, BLOCK // lanes)
    else:
        mr, nv = (6, 2) if lanes == 8 else (2, BLOCK // lanes)
    return Tile(lanes, mr, nv, flavour, weights)


def column_vector(groups: int, outputs: int, dtype: str) -> Callable[[Array], Array]:
    """Return what spreads one number, or one for each output, to the padded columns."""
    padded = round_up(outputs, BLOCK)

    def make(values: Array) -> Array:
        whole = np.zeros((groups, padded), dtype)
        whole[:, :outputs] = np.broadcast_to(values.reshape(-1), groups * outputs).reshape(
            groups, outputs
        )
        return whole.reshape(-1)

    return make


def packed(tile: Tile, groups: int, runs: Callable[[Array], Array]) -> Callable[..., Array]:
    """Return the recipe of weights from ``(weights, zero points)``.

    Args:
        tile: The tile.
        groups: Groups.
        runs: Brings weights ``[outputs, ...]`` to ``[outputs, K]``, K in the order of the strip,
            padded to whole double steps.
    """
    dtype, columns = tile.weights, tile.lanes * tile.nv

    def make(weight: Array, *zeros: Array) -> Array:
        rows = runs(signed_weights(weight, *zeros))
        rows = rows.reshape(groups, -1, rows.shape[-1])
        padded = np.zeros((groups, round_up(rows.shape[1], BLOCK), rows.shape[2]), dtype)
        padded[:, : rows.shape[1]] = rows
        pieces: list[Array] = []
        for matrix in padded:
            for first in range(0, matrix.shape[0], columns):
                panel = matrix[first : first + columns]
                steps = panel.reshape(panel.shape[0], -1, tile.together)
                pieces.append(np.ascontiguousarray(steps.swapaxes(0, 1)).reshape(-1))
        return np.concatenate(pieces)

    return make


def signed_weights(weight: Array, *zeros: Array) -> Array:
    """Return weights less their zero points, in 16 bits."""
    signed = weight.astype(np.int16)
    if not zeros:
        return signed
    return signed - zeros[0].astype(np.int16).reshape(-1, *[1] * (weight.ndim - 1))


def guards(
    tile: Tile, groups: int, shape: tuple[int, int, int], runs: Callable[[Array], Array]
) -> Callable[..., Array]:
    """Return the recipe of the largest byte that each pair of weights of a panel may meet.

    Sums of two products with it stay within 16 bits; see ``guarded_kernels``.

    Args:
        tile: The tile.
        groups: Groups.
        shape: Blocks of the input, taps, double steps of the inner loop.
        runs: As for `packed`.
    """
    blocks, taps, inner = shape
    columns = tile.lanes * tile.nv

    def make(weight: Array, *zeros: Array) -> Array:
        rows = runs(signed_weights(weight, *zeros))
        full = np.zeros((rows.shape[0], blocks * taps * inner * 8), np.int16)
        full[:, : rows.shape[1]] = rows
        pairs = full.reshape(rows.shape[0], -1, 2)
        above, below = (np.maximum(sign * pairs, 0).sum(2) for sign in (1, -1))
        sums: Array = np.maximum(above, below).reshape(groups, -1, blocks, taps, 4 * inner)
        firsts = list(range(0, sums.shape[1], columns))
        largest = np.maximum.reduceat(sums, firsts, axis=1)
        fitting = np.minimum(32767 // np.maximum(largest, 1), 255).swapaxes(2, 3)
        row = 4 * blocks * inner
        bounds = np.full((*fitting.shape[:3], round_up(row, LINE)), 255, np.uint8)
        bounds[..., :row] = fitting.reshape(*fitting.shape[:3], row)
        return bounds

    return make
