"""Finds the steps of a saturation-checked product whose 16-bit sums may saturate ("faults").

The tile adds two products in 16 bits. Their sum fits if the larger of the two bytes is at most
32767 / (the largest sum of two weights of one sign): these bounds are packed with the weights
(``qlinear_packing.guards``), the largest bytes are found once for each patch. The few steps of a
panel for which that does not hold are listed, for the tile to correct them.
"""

from __future__ import annotations

from typing import Any

from numba.extending import register_jitable

from subgraph.engine.codegen.arguments import WordBlock
from subgraph.engine.codegen.simd import ld_u8, st_i8, st_i64, vec

from .arguments import QuantizedProductArguments
from .qlinear_packing import LINE

PAIRS = 4  # pairs of bytes in a double step


class TileStrides(WordBlock):
    """Strides of the operands of an integer tile, in bytes.

    Attributes:
        block: Of A between blocks.
        plane: Of A between kernel planes.
        row: Of A between kernel rows.
        tap: Of A between taps of a kernel row.
        step: Of B between steps.
    """

    block: int
    plane: int
    row: int
    tap: int
    step: int


def largest_finder() -> Any:
    """Return ``f(product, patch, pixels, to)``, which finds the largest bytes of a patch."""
    eight, line = vec("uint8", 8), vec("uint8", LINE)
    load8, max8, store8, zero8 = eight.load, eight.max, eight.store, eight.zero
    splat, store = line.splat, line.store

    @register_jitable
    def find_largest(product: QuantizedProductArguments, patch: int, pixels: int, to: int) -> None:
        """Write the largest byte that each pair of the double steps of the input blocks reads.

        Args:
            product: The arguments of the product.
            patch: Address of the patch, ``[blocks][pixels][bytes of a pixel]``.
            pixels: Pixels of the patch.
            to: Address of the bytes, in the order of a row of bounds, and 8 bytes of scratch.
        """
        blocks, step, inner = product.blocks, product.pixel, product.inner
        doubles = step // 8
        row = (blocks * inner * PAIRS + LINE - 1) // LINE * LINE
        eight_bytes = to + row  # scratch after the row
        for i in range(0, row, LINE):
            store(to + i, splat(0))
        for b in range(blocks):
            for o in range(doubles):
                at = patch + b * pixels * step + 8 * o
                most = zero8()
                # The largest byte of a channel over all pixels of the patch, whichever tap reads
                # it. That is more than a single tile reads, but is found once for all tiles and
                # panels.
                for p in range(pixels):
                    most = max8(most, load8(at + p * step))
                store8(eight_bytes, most)
                # A run of adjacent taps reads the channels again for each tap, ``doubles`` steps
                # later.
                for i in range(o, inner, doubles):
                    for k in range(PAIRS):
                        larger = max(ld_u8(eight_bytes + 2 * k), ld_u8(eight_bytes + 2 * k + 1))
                        st_i8(to + (b * inner + i) * PAIRS + k, larger)

    return find_largest


def fault_finder() -> Any:
    """Return ``f(product, bounds, reach, to, most, strides)``: the steps that may saturate."""
    line = vec("uint8", LINE)
    load, some = line.load, line.any

    @register_jitable
    def find_faults(
        product: QuantizedProductArguments,
        bounds: int,
        reach: int,
        to: int,
        most: int,
        strides: TileStrides,
    ) -> int:
        """List the steps of a panel that may saturate; return their number.

        Args:
            product: The arguments of the product.
            bounds: Address of the panel's bounds.
            reach: Address of the largest bytes, see `largest_finder`.
            to: Address of the list: offsets of A and of B, two int64, in bytes.
            most: Capacity of the list; ``most + 1`` is returned if there are more.
            strides: Strides of the operands.
        """
        blocks, inner = product.blocks, product.inner * PAIRS
        high, along = product.kernel_height, product.kernel_width
        down = product.kernel_depth * high
        if product.width_merged != 0:
            along = 1
        row = (blocks * inner + LINE - 1) // LINE * LINE
        count = 0
        for tap in range(down * along):
            line = tap // along
            a = line // high * strides.plane + line % high * strides.row + tap % along * strides.tap
            for first in range(0, row, LINE):
                # Most lines have no fault: 16 pairs are compared at once. Padding has a largest
                # byte of 0.
                if not some(load(reach + first) > load(bounds + first)):
                    continue
                # A step of the tile is two pairs, which are corrected together.
                for i in range(first, min(first + LINE, blocks * inner), 2):
                    fits = ld_u8(reach + i) <= ld_u8(bounds + i)
                    if fits and ld_u8(reach + i + 1) <= ld_u8(bounds + i + 1):
                        continue
                    if count == most:
                        return most + 1
                    b, step = i // inner, i % inner // 2
                    step_of_b = (b * down * along + tap) * (inner // 2) + step
                    st_i64(to + 16 * count, a + b * strides.block + 4 * step)
                    st_i64(to + 16 * count + 8, step_of_b * strides.step)
                    count += 1
            bounds += row
        return count

    return find_faults
