"""Which steps of a guarded product may saturate: from the bytes that are read and from the weights.

``tile_int`` adds two products in 16 bits. They cannot saturate where the larger of the bytes is at
most 32767 / (largest sum of two weights of one sign): the latter is packed with the weights
(``qlinear_packing.guards``), the former is found once a strip. The few steps of a panel for which
that does not hold are listed, for the tile to correct them.
"""

from __future__ import annotations

from typing import Any

from numba.extending import register_jitable

from subgraph.engine.codegen.arguments import WordBlock
from subgraph.engine.codegen.simd import ld_u8, st_i8, st_i64, vec

from .arguments import QuantisedProductArguments

LINE = 16  # bounds compared at a time; rows of them are padded to as many
PAIRS = 4  # of bytes in a double step


class TileStrides(WordBlock):
    """Strides of the operands of an integer tile, in bytes.

    Attributes:
        block: Of A between blocks.
        row: Of A between kernel rows.
        tap: Of A between taps of a kernel row.
        step: Of B between steps.
    """

    block: int
    row: int
    tap: int
    step: int


def guards() -> tuple[Any, Any]:
    """Return ``(find_largest, find_faults)``; both take `QuantisedProductArguments`.

    ``find_largest(product, strip, pixels, to)``: the largest byte that each pair of the double
    steps of the input blocks reads, in the order of a row of bounds. A strip is
    ``[blocks][pixels][bytes of a pixel]``.

    ``find_faults(product, bounds, reach, to, most, strides) -> count``: list the steps of a panel
    that may saturate, as bytes in A and in B; ``most + 1`` if there are more than ``most``.
    ``strides``: a `TileStrides`.
    """
    eight, line = vec("uint8", 8), vec("uint8", LINE)
    load8, max8, store8, zero8 = eight.load, eight.max, eight.store, eight.zero
    load, splat, store, some = line.load, line.splat, line.store, line.any

    @register_jitable
    def find_largest(product: QuantisedProductArguments, strip: int, pixels: int, to: int) -> None:
        blocks, step, inner = product.blocks, product.pixel, product.inner
        doubles = step // 8
        row = (blocks * inner * PAIRS + LINE - 1) // LINE * LINE
        held = to + row  # room for eight bytes
        for i in range(0, row, LINE):
            store(to + i, splat(0))
        for b in range(blocks):
            for o in range(doubles):
                at = strip + b * pixels * step + 8 * o
                most = zero8()
                for p in range(pixels):
                    most = max8(most, load8(at + p * step))
                store8(held, most)
                for i in range(o, inner, doubles):
                    for k in range(PAIRS):
                        whole = max(ld_u8(held + 2 * k), ld_u8(held + 2 * k + 1))
                        st_i8(to + (b * inner + i) * PAIRS + k, whole)

    @register_jitable
    def find_faults(
        product: QuantisedProductArguments,
        bounds: int,
        reach: int,
        to: int,
        most: int,
        strides: TileStrides,
    ) -> int:
        blocks, inner = product.blocks, product.inner * PAIRS
        down, along = product.kernel_height, 1 if product.along != 0 else product.kernel_width
        row = (blocks * inner + LINE - 1) // LINE * LINE
        count = 0
        for tap in range(down * along):
            a = tap // along * strides.row + tap % along * strides.tap
            for first in range(0, row, LINE):
                if not some(load(reach + first) > load(bounds + first)):
                    continue
                for i in range(first, min(first + LINE, blocks * inner), 2):
                    fits = ld_u8(reach + i) <= ld_u8(bounds + i)
                    if fits and ld_u8(reach + i + 1) <= ld_u8(bounds + i + 1):
                        continue
                    if count == most:
                        return most + 1
                    b, step = i // inner, i % inner // 2
                    place = (b * down * along + tap) * (inner // 2) + step
                    st_i64(to + 16 * count, a + b * strides.block + 4 * step)
                    st_i64(to + 16 * count + 8, place * strides.step)
                    count += 1
            bounds += row
        return count

    return find_largest, find_faults
