"""Strips: what a unit of a quantised product reads of its input, with padding, in scratch memory.

Elements are 16-bit integers less their zero point (``pairs``), or unsigned bytes. Sources:

- ``blocked``: ``[N][C / 16][H][W][16]`` bytes, the strip ``[C / 16][h][w][16]``.
- ``image``: ``[N][C][H][W]`` with at most four channels, the strip ``[h][w][4]``.
- ``rows``: a matrix ``[W][C]``, the strip the same with rows padded to a multiple of eight bytes.
"""

from __future__ import annotations

from typing import Any

from numba.extending import register_jitable

from subgraph.engine.codegen.arguments import WordBlock
from subgraph.engine.codegen.simd import convert, ld_i8, ld_u8, st_i8, st_i16, vec
from subgraph.engine.codegen.tile_int import BLOCK

IMAGE = 4  # channels of a pixel of an image's strip
# Blocks, height and width of an image, its channels, bytes of a pixel in the strip.
Strip = tuple[int, int, int, int, int]


class StripBox(WordBlock):
    """The box of the input that a strip holds; some of it may be outside of the image.

    Attributes:
        row: Its first row.
        column: Its first column.
        rows: Its rows.
        columns: Its columns.
    """

    row: int
    column: int
    rows: int
    columns: int


def strip_item(flavour: str) -> int:
    """Return the bytes of an element of a strip."""
    return 2 if flavour == "pairs" else 1


def _element(dtype: str, flavour: str) -> tuple[Any, Any, Any, Any]:
    """Return ``(one, sixteen, clear, clear_block)``: how elements come into a strip.

    ``one(source, to, zero)`` brings one element, ``sixteen(source, to, zero)`` sixteen beside each
    other, ``clear(to, count, zero)`` sets elements to the zero point, ``clear_block`` sixteen.
    """
    load1 = ld_i8 if dtype == "int8" else ld_u8
    flip = 128 if dtype == "int8" else 0
    narrow, wide = vec(dtype, BLOCK), vec("int16", BLOCK)
    widen, load = convert(dtype, "int16", BLOCK), narrow.load
    store, splat = wide.store, wide.splat
    as_byte, byte = convert("int16", "int8", BLOCK), vec("int8", BLOCK)
    store_b, splat_b = byte.store, byte.splat

    if flavour == "pairs":

        @register_jitable
        def one(source: int, to: int, zero: int) -> None:
            st_i16(to, load1(source) - zero)

        @register_jitable
        def sixteen(source: int, to: int, zero: int) -> None:
            store(to, widen(load(source)) - splat(zero))

        @register_jitable
        def clear(to: int, count: int, zero: int) -> None:
            for i in range(count):
                st_i16(to + 2 * i, 0)

        @register_jitable
        def clear_block(to: int, zero: int) -> None:
            store(to, splat(0))
    else:

        @register_jitable
        def one(source: int, to: int, zero: int) -> None:
            st_i8(to, load1(source) + flip)

        @register_jitable
        def sixteen(source: int, to: int, zero: int) -> None:
            store_b(to, as_byte(widen(load(source)) + splat(flip)))

        @register_jitable
        def clear(to: int, count: int, zero: int) -> None:
            for i in range(count):
                st_i8(to + i, zero + flip)

        @register_jitable
        def clear_block(to: int, zero: int) -> None:
            store_b(to, splat_b(zero + flip))

    return one, sixteen, clear, clear_block


def _pixels_of_bytes(dtype: str) -> Any:
    """Return ``beside(source, to, apart, channels)``: sixteen pixels of an image's strip.

    Channels that the image lacks hold anything: their weights are zero.
    """
    byte, pixels = vec("uint8", BLOCK), vec("int32", BLOCK)
    load, store, splat, shl = byte.load, pixels.store, pixels.splat, pixels.shl
    widen = convert("uint8", "int32", BLOCK)
    signs = -0x7F7F7F80 if dtype == "int8" else 0  # 0x80 in each byte

    @register_jitable
    def beside(source: int, to: int, apart: int, channels: int) -> None:
        values = splat(signs)
        for c in range(channels):
            values = values ^ shl(widen(load(source + c * apart)), splat(8 * c))
        store(to, values)

    return beside


def strip_copier(dtype: str, flavour: str, source: str) -> Any:
    """Return ``copy(strip, x, to, zero, where)``: lay out a strip.

    ``strip``: blocks, height and width of an image, channels, bytes of a pixel in the strip.
    ``where``: the box of the input that it holds.

    Args:
        dtype: ``"uint8"`` or ``"int8"``: of the input.
        flavour: ``"pairs"``, ``"quads"`` or ``"guarded"``.
        source: ``"blocked"``, ``"image"`` or ``"rows"``.
    """
    one, sixteen, clear, clear_block = _element(dtype, flavour)
    item = strip_item(flavour)
    beside = _pixels_of_bytes(dtype)

    @register_jitable
    def blocked(strip: Strip, x: int, to: int, zero: int, where: StripBox) -> None:
        blocks, height, width, _, _ = strip
        h0, w0, nh, nw = where.row, where.column, where.rows, where.columns
        left = min(max(-w0, 0), nw)
        right = max(min(width - w0, nw), left)
        for b in range(blocks):
            for h in range(h0, h0 + nh):
                row = x + ((b * height + h) * width + w0) * BLOCK
                inside = 0 <= h < height
                for w in range(left if inside else nw):
                    clear_block(to + w * BLOCK * item, zero)
                if inside:
                    for w in range(left, right):
                        sixteen(row + w * BLOCK, to + w * BLOCK * item, zero)
                    for w in range(right, nw):
                        clear_block(to + w * BLOCK * item, zero)
                to += nw * BLOCK * item

    @register_jitable
    def image(strip: Strip, x: int, to: int, zero: int, where: StripBox) -> None:
        _, height, width, channels, _ = strip
        h0, w0, nh, nw = where.row, where.column, where.rows, where.columns
        clear(to, nh * nw * IMAGE, zero)
        left = min(max(-w0, 0), nw)
        right = max(min(width - w0, nw), left)
        for i in range(nh):
            h = h0 + i
            if h < 0 or h >= height:
                continue
            first, at = left, to + i * nw * IMAGE * item
            row = x + h * width + w0
            if item == 1:
                while first + BLOCK <= right:
                    beside(row + first, at + first * IMAGE, height * width, channels)
                    first += BLOCK
            for c in range(channels):
                for w in range(first, right):
                    one(row + c * height * width + w, at + (w * IMAGE + c) * item, zero)

    @register_jitable
    def rows(strip: Strip, x: int, to: int, zero: int, where: StripBox) -> None:
        _, _, _, depth, step = strip
        whole = depth // BLOCK * BLOCK
        for r in range(where.columns):
            at, start = x + (where.column + r) * depth, to + r * step
            for k in range(0, whole, BLOCK):
                sixteen(at + k, start + k * item, zero)
            for k in range(whole, depth):
                one(at + k, start + k * item, zero)
            clear(start + depth * item, step // item - depth, zero)

    return {"blocked": blocked, "image": image, "rows": rows}[source]
