"""Patches: the input of a work unit of a quantized product, copied with padding to scratch memory.

Elements are 16-bit integers less their zero point (``pairs``), or unsigned bytes. Sources:

- ``blocked``: ``[N][C / 16][D][H][W][16]`` bytes, the patch ``[C / 16][d][h][w][16]``. Matrix tiles
  read ``[C / 64][d][h][w][64]``, the channels beyond C undefined: their weights are zero.
- ``image``: ``[N][C][D][H][W]`` with at most four channels, the patch ``[d][h][w][C]``.
- ``rows``: a matrix ``[W][C]``, the patch the same with rows padded to a multiple of eight bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.extending import register_jitable

from subgraph.engine.codegen.arguments import WordBlock
from subgraph.engine.codegen.irtools import (
    I8,
    I64,
    INT64,
    VOID,
    concatenate,
    define,
    load_at,
    shuffle_vectors,
    splat_value,
    store_at,
)
from subgraph.engine.codegen.matrix_registers import ROW_BYTES
from subgraph.engine.codegen.simd import convert, ld_i8, ld_u8, st_i8, st_i16, vec
from subgraph.engine.codegen.tile_int import BLOCK

CHANNELS = ROW_BYTES  # channels of a pixel of a patch for matrix tiles
# Blocks, depth, height and width of an image, its channels, bytes of a pixel in the patch.
Patch = tuple[int, int, int, int, int, int]


class PatchBox(WordBlock):
    """The box of the input that a patch covers; parts outside the image are padding.

    Attributes:
        plane: Its first plane.
        planes: Its planes.
        plane_step: Planes of the image from one of the box to the next.
        row: Its first row.
        column: Its first column.
        rows: Its rows.
        columns: Its columns.
    """

    plane: int
    planes: int
    plane_step: int
    row: int
    column: int
    rows: int
    columns: int


def element_bytes(flavour: str) -> int:
    """Return the bytes of an element of a patch."""
    return 2 if flavour == "pairs" else 1


def _element(dtype: str, flavour: str) -> tuple[Any, Any, Any, Any]:
    """Return ``(one, sixteen, clear, clear_block)``, which write elements of a patch.

    ``one(source, to, zero)`` copies one element, ``sixteen(source, to, zero)`` sixteen adjacent
    ones; ``clear(to, count, zero)`` sets elements to the zero point, ``clear_block`` sixteen.
    """
    # Products of bytes (vpdpbusd, vpmaddubsw) take unsigned bytes on the left side, so that signed
    # ones are stored plus 128. The zero point moves by as much (`qlinear_operands`).
    load1, pairs = ld_i8 if dtype == "int8" else ld_u8, flavour == "pairs"
    flip = 128 if dtype == "int8" else 0
    narrow, wide = vec(dtype, BLOCK), vec("int16", BLOCK)
    widen, load = convert(dtype, "int16", BLOCK), narrow.load
    store, splat = wide.store, wide.splat
    as_byte, byte = convert("int16", "int8", BLOCK), vec("int8", BLOCK)
    store_b, splat_b = byte.store, byte.splat

    @register_jitable
    def one(source: int, to: int, zero: int) -> None:
        if pairs:
            st_i16(to, load1(source) - zero)
        else:
            st_i8(to, load1(source) + flip)

    @register_jitable
    def sixteen(source: int, to: int, zero: int) -> None:
        if pairs:
            store(to, widen(load(source)) - splat(zero))
        else:
            store_b(to, as_byte(widen(load(source)) + splat(flip)))

    @register_jitable
    def clear(to: int, count: int, zero: int) -> None:
        for i in range(count):
            if pairs:
                st_i16(to + 2 * i, 0)
            else:
                st_i8(to + i, zero + flip)

    @register_jitable
    def clear_block(to: int, zero: int) -> None:
        if pairs:
            store(to, splat(0))
        else:
            store_b(to, splat_b(zero + flip))

    return one, sixteen, clear, clear_block


def _interleaver(dtype: str, channels: int) -> Any:
    """Return ``interleave(source, to, plane)``: writes sixteen pixels of an image's patch.

    Channels are ``plane`` bytes apart in the image.
    """
    lines = [BLOCK * c + w for w in range(BLOCK) for c in range(channels)]

    def emit(builder: Any, _context: Any, args: Sequence[Any]) -> None:
        source, to, plane = args
        kind = ir.VectorType(I8, BLOCK)
        parts = [
            load_at(builder, builder.add(source, builder.mul(plane, I64(c))), kind, 1)
            for c in range(channels)
        ]
        pixels = shuffle_vectors(builder, concatenate(builder, parts), None, lines)
        # The highest bit of a signed byte is exchanged: the same as adding 128.
        if dtype == "int8":
            pixels = builder.xor(pixels, splat_value(builder, I8(128), len(lines)))
        store_at(builder, to, pixels, 1)

    return define(VOID, [INT64, INT64, INT64], emit)


def patch_copier(dtype: str, flavour: str, source: str) -> Any:
    """Return ``copy(patch, x, to, zero, where)``, which copies the box ``where`` of an image.

    ``patch``: blocks and sizes of the image, its channels, bytes of a pixel in the patch. ``x`` is
    the image, ``to`` the patch, ``zero`` the zero point.

    Args:
        dtype: ``"uint8"`` or ``"int8"``: of the input.
        flavour: ``"pairs"``, ``"quads"``, ``"checked"`` or ``"matrix"``.
        source: ``"blocked"``, ``"image"`` or ``"rows"``.
    """
    copiers = {"blocked": _blocked_copier, "image": _image_copier, "rows": _rows_copier}
    return copiers[source](dtype, flavour)


def _blocked_copier(dtype: str, flavour: str) -> Any:
    """Return the function that copies a patch of an image in blocks of 16 channels.

    Matrix tiles read pixels of four blocks; the last ones may have fewer.
    """
    _, sixteen, _, clear_block = _element(dtype, flavour)
    together = CHANNELS // BLOCK if flavour == "matrix" else 1
    part = BLOCK * element_bytes(flavour)
    pixel = together * part

    @register_jitable
    def copy_pixels(x: int, block: int, blocks: int, to: int, pixels: int, zero: int) -> None:
        """Copy pixels of up to ``together`` blocks, ``block`` bytes apart."""
        if blocks >= together:
            for w in range(pixels):
                source, target = x + w * BLOCK, to + w * pixel
                for j in range(together):
                    sixteen(source + j * block, target + j * part, zero)
            return
        for j in range(blocks):
            for w in range(pixels):
                sixteen(x + j * block + w * BLOCK, to + w * pixel + j * part, zero)

    @register_jitable
    def clear(to: int, pixels: int, zero: int) -> None:
        for at in range(to, to + pixels * pixel, part):
            clear_block(at, zero)

    @register_jitable
    def blocked(patch: Patch, x: int, to: int, zero: int, where: PatchBox) -> None:
        blocks, depth, height, width, _, _ = patch
        h0, w0, nh, nw = where.row, where.column, where.rows, where.columns
        left = min(max(-w0, 0), nw)
        # Not less than ``left`` for a box that lies wholly outside the image along the width.
        right = max(min(width - w0, nw), left)
        block = depth * height * width * BLOCK
        for b in range(0, blocks, together):
            for p in range(where.planes):
                d = where.plane + p * where.plane_step
                for h in range(h0, h0 + nh):
                    if 0 <= d < depth and 0 <= h < height:
                        row = x + b * block + ((d * height + h) * width + w0 + left) * BLOCK
                        clear(to, left, zero)
                        target = to + left * pixel
                        copy_pixels(row, block, blocks - b, target, right - left, zero)
                        clear(to + right * pixel, nw - right, zero)
                    else:
                        clear(to, nw, zero)
                    to += nw * pixel

    return blocked


def _image_copier(dtype: str, flavour: str) -> Any:
    """Return the function that copies a patch of an image of at most four channels."""
    one, _, clear, _ = _element(dtype, flavour)
    item = element_bytes(flavour)
    by_one, by_two, by_three, by_four = (_interleaver(dtype, c) for c in (1, 2, 3, 4))

    @register_jitable
    def interleave(source: int, to: int, plane: int, channels: int) -> None:
        if channels == 1:
            by_one(source, to, plane)
        elif channels == 2:
            by_two(source, to, plane)
        elif channels == 3:
            by_three(source, to, plane)
        else:
            by_four(source, to, plane)

    @register_jitable
    def image(patch: Patch, x: int, to: int, zero: int, where: PatchBox) -> None:
        _, depth, height, width, channels, _ = patch
        h0, w0, nh, nw = where.row, where.column, where.rows, where.columns
        volume = depth * height * width
        # All at once, as rows and columns that the image lacks lie between those that it has.
        clear(to, where.planes * nh * nw * channels, zero)
        left = min(max(-w0, 0), nw)
        right = max(min(width - w0, nw), left)
        for p in range(where.planes):
            d = where.plane + p * where.plane_step
            if d < 0 or d >= depth:
                continue
            for i in range(nh):
                h = h0 + i
                if h < 0 or h >= height:
                    continue
                first, at = left, to + (p * nh + i) * nw * channels * item
                row = x + (d * height + h) * width + w0
                # Sixteen pixels at a time as far as all of them are inside, since the patch has
                # padding after them and the image may end there.
                if item == 1:
                    while first + BLOCK <= right:
                        interleave(row + first, at + first * channels, volume, channels)
                        first += BLOCK
                for c in range(channels):
                    for w in range(first, right):
                        one(row + c * volume + w, at + (w * channels + c) * item, zero)

    return image


def _rows_copier(dtype: str, flavour: str) -> Any:
    """Return the function that copies rows of a matrix."""
    one, sixteen, clear, _ = _element(dtype, flavour)
    item = element_bytes(flavour)

    @register_jitable
    def rows(patch: Patch, x: int, to: int, zero: int, where: PatchBox) -> None:
        _, _, _, _, depth, step = patch
        whole = depth // BLOCK * BLOCK
        for r in range(where.columns):
            at, start = x + (where.column + r) * depth, to + r * step
            for k in range(0, whole, BLOCK):
                sixteen(at + k, start + k * item, zero)
            for k in range(whole, depth):
                one(at + k, start + k * item, zero)
            # The zero point is 0 in the sum of a row (`qlinear_kernels`), and its products are
            # those of weights that are 0.
            clear(start + depth * item, step // item - depth, zero)

    return rows
