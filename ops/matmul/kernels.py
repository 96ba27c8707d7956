"""Kernels of matrix products: packing of operands, blocked GEMM over contraction tiles.

``gemm`` computes ``C = act(init + A @ B + residual)`` for a batch of products; ``pack_b`` packs B
into panels, ``[panel][K][columns of the panel]``. A panel holds ``nv * lanes`` columns row by row;
the last one has as many whole vectors as it needs, padded with zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.extending import register_jitable

from subgraph.dtypes import item_bytes
from subgraph.engine.codegen.argument_views import along, stack_block, view_of
from subgraph.engine.codegen.arguments import WordBlock
from subgraph.engine.codegen.matrix_registers import (
    LANES,
    REGISTER_BYTES,
    ROWS,
    full_rows,
    tile_use,
)
from subgraph.engine.codegen.simd import call_kernel, ld, st, vec
from subgraph.engine.codegen.tile import rows_of, stack_words
from subgraph.engine.codegen.tiling import MATRIX_DEPTH, MATRIX_TILE, TileBlock
from subgraph.engine.codegen.transpose import transposer
from subgraph.ops.movement.kernels import row_copy
from subgraph.ops.shared.register_kernels import column_pairer, row_pairer, row_rounder
from subgraph.system import host

from .arguments import (
    GemmArguments,
    GroupedGemmArguments,
    PackRightArguments,
    RoundRowsArguments,
)

_tile_block = stack_block(TileBlock)


class Block(WordBlock):
    """A block of C.

    Attributes:
        row: First row of the block.
        rows: Number of rows.
        panel: First panel of the block.
        last_panel: The panel after the last one.
    """

    row: int
    rows: int
    panel: int
    last_panel: int


_block = stack_block(Block)


@register_jitable
def _batch_offset(indices: tuple[int, int, int], steps: int) -> int:
    """Return the offset in bytes of the matrix with these indices along the levels of a batch.

    ``steps`` is a field of `GemmArguments`: the bytes between matrices along each level.
    """
    i, j, k = indices
    return i * along(steps, 0) + j * along(steps, 1) + k * along(steps, 2)


def pack_b(*, dtype: str, lanes: int, nv: int) -> Callable[..., None]:
    """Return the kernel of `PackRightArguments`, which packs matrices into panels.

    Args:
        dtype: Dtype of the elements.
        lanes: Elements of a vector.
        nv: Vectors of a row of a panel.
    """
    arguments = view_of(PackRightArguments)
    v = vec(dtype, lanes)
    load, store, splat = v.load, v.store, v.splat
    rows, transposed, strided = _panel_packers(dtype, lanes)
    item = item_bytes(dtype)
    width = nv * lanes

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        depth, n, ks, ns = a.depth, a.columns, a.row_step, a.column_step
        panels, factor = a.panels, a.factor
        for unit in range(begin, end):
            matrix, panel = unit // panels, unit % panels
            first = panel * width
            count = min(width, n - first)
            # Tiles load whole vectors, so that the last panel is padded with zeros to such.
            columns = (count + lanes - 1) // lanes * lanes
            source = a.source + matrix * a.source_matrix + first * ns
            target = a.target + matrix * a.target_matrix + first * depth * item
            if ns == item:
                rows(source, target, depth, count, ks, columns)
            elif ks == item:
                transposed(source, target, depth, count, ns, columns)
            else:
                strided(source, target, depth, count, ks, ns, columns)
            # Here the factor is multiplied once with each element of B, instead of in every tile.
            if factor != 1.0:
                for i in range(0, depth * columns, lanes):
                    store(target + i * item, load(target + i * item) * splat(factor))

    return kernel


def pair_b() -> Callable[..., None]:
    """Return the kernel that rounds matrices to panels of registers, of `PackRightArguments`.

    Rows or columns of the source are adjacent elements of float32. The factor is not read.
    """
    arguments = view_of(PackRightArguments)
    pair_rows, pair_columns = row_pairer(), column_pairer()
    width = MATRIX_TILE[1] * LANES

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        steps = (a.depth + MATRIX_DEPTH - 1) // MATRIX_DEPTH
        for unit in range(begin, end):
            matrix, panel = unit // a.panels, unit % a.panels
            first = panel * width
            count = min(width, a.columns - first)
            source = a.source + matrix * a.source_matrix + first * a.column_step
            target = a.target + matrix * a.target_matrix + first // LANES * steps * REGISTER_BYTES
            if a.column_step == 4:
                pair_rows(source, a.row_step, a.depth, count, target)
            else:
                pair_columns(source, a.column_step, count, a.depth, target)

    return kernel


def _panel_packers(dtype: str, lanes: int) -> tuple[Any, Any, Any]:
    """Return ``(rows, transposed, strided)``, which pack a panel of B.

    ``source`` is B's first element of the panel, ``target`` the packed panel with rows of
    ``columns`` elements, whole vectors. The panel has ``depth`` rows and ``count`` columns.
    """
    v = vec(dtype, lanes)
    load, store, zero, load_n = v.load, v.store, v.zero, v.load_n
    load1, store1 = ld(dtype), st(dtype)
    transpose_block, item = transposer(dtype, lanes), item_bytes(dtype)

    @register_jitable
    def rows(source: int, target: int, depth: int, count: int, ks: int, columns: int) -> None:
        """Pack rows of contiguous elements, ``ks`` bytes apart."""
        for k in range(depth):
            s, d = source + k * ks, target + k * columns * item
            for j in range(0, columns, lanes):
                if j + lanes <= count:
                    store(d + j * item, load(s + j * item))
                else:
                    store(d + j * item, load_n(s + j * item, count - j))

    @register_jitable
    def transposed(source: int, target: int, depth: int, count: int, ns: int, columns: int) -> None:
        """Pack columns of contiguous elements, ``ns`` bytes apart."""
        for j in range(0, columns, lanes):
            taken = min(lanes, count - j)
            to = target + j * item
            if taken < lanes:
                for k in range(depth):
                    store(to + k * columns * item, zero())
            for k in range(0, depth, lanes):
                s, d = source + j * ns + k * item, to + k * columns * item
                transpose_block(s, ns, taken, min(lanes, depth - k), d, columns * item)

    @register_jitable
    def strided(
        source: int, target: int, depth: int, count: int, ks: int, ns: int, columns: int
    ) -> None:
        """Pack elements that are ``ks`` bytes apart in columns and ``ns`` bytes in rows."""
        for k in range(depth):
            d = target + k * columns * item
            for j in range(0, columns, lanes):
                store(d + j * item, zero())
            for n in range(count):
                store1(d + n * item, load1(source + k * ks + n * ns))

    return rows, transposed, strided


@register_jitable(forceinline=True)
def _operands(product: GemmArguments, batch: int) -> tuple[int, int, int, int]:
    """Return the addresses of A, B, C and the residual (0: none) of a product of the batch."""
    last, rest = batch % product.size2, batch // product.size2
    indices = rest // product.size1, rest % product.size1, last
    a = product.a + _batch_offset(indices, product.a_steps)
    b = product.b + _batch_offset(indices, product.b_steps)
    to = _batch_offset(indices, product.c_steps)
    residual = product.residual
    if residual != 0:
        residual += to
    return a, b, product.c + to, residual


@register_jitable(forceinline=True)
def _set_strides(product: GemmArguments, t: TileBlock, vector: int, b_vector: int) -> None:
    """Set the arguments that all tiles of a kernel share.

    Args:
        product: The kernel's arguments.
        t: The tile's arguments.
        vector: Bytes of a vector of the results.
        b_vector: Bytes of a vector of B.
    """
    t.outer_count = product.a_blocks
    t.outer_a = product.a_block
    t.middle_count = 1
    t.inner_count = 1
    t.a_row = product.a_row
    t.a_step = product.a_column
    t.a_register = product.a_register
    t.b_vector = b_vector
    t.start_row = 0
    t.c_row = product.c_row
    t.c_vector = product.c_vector
    t.start_vector = vector
    t.residual_row = product.residual_row
    t.residual_vector = product.residual_vector
    t.flags = product.flags
    t.low = product.low
    t.high = product.high


def gemm(
    *, dtype: str, lanes: int, mr: int, nv: int, weights: str = "", operands: str = ""
) -> Callable[..., None]:
    """Return the kernel of `GemmArguments`, a batch of matrix products.

    ``C[b0, b1, b2] = act(init + A[...] @ B[...] + residual)``. The activation is the identity,
    bounds below and above, or what the kernel ``activation`` applies to a finished tile.

    Args:
        dtype: Dtype of A and C.
        lanes: Elements of a vector.
        mr: Rows of a contraction tile.
        nv: Vectors of a row of a contraction tile.
        weights: ``"bfloat16"`` or ``"float16"`` if B is packed so, "" if as ``dtype``.
        operands: ``"bfloat16"`` for matrix tiles: A and B are registers of them. "" for tiles of
            ``dtype``.
    """
    arguments = view_of(GemmArguments)
    item = item_bytes(dtype)
    item_b = 2 if weights or operands else item
    width = nv * lanes
    run_block = _block_runner(dtype, lanes, mr, nv, item_b, bool(operands))
    prepare, finish = tile_use(bool(operands))

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        product = arguments(args)
        t, where = _tile_block(), _block()
        m = product.m
        mb, pb = product.block_rows, product.block_panels
        panels = (product.n + width - 1) // width
        row_blocks = (m + mb - 1) // mb
        panel_blocks = (panels + pb - 1) // pb
        _set_strides(product, t, lanes * item, REGISTER_BYTES if operands else lanes * item_b)
        prepare()
        for unit in range(begin, end):
            batch, rest = unit // (row_blocks * panel_blocks), unit % (row_blocks * panel_blocks)
            # Neighbouring units share the panels of B if rows come first, else the rows of A.
            if product.rows_first != 0:
                rb, cb = rest % row_blocks, rest // row_blocks
            else:
                rb, cb = rest // panel_blocks, rest % panel_blocks
            a, b, c, res = _operands(product, batch)
            row = rb * mb
            rows = min(mb, m - row)
            where.row = row
            where.rows = rows
            where.panel = cb * pb
            where.last_panel = min(panels, cb * pb + pb)
            run_block(product, t, a, b, c, res, where)
        finish()

    return kernel


def grouped(
    *, dtype: str, lanes: int, mr: int, nv: int, index: str, weights: str = ""
) -> Callable[..., None]:
    """Return the kernel of `GroupedGemmArguments`: ``C[i] = A[i] @ B[indices[i]]``.

    The rows of A that use a matrix are copied together, so that it is read once for many of them.

    Args:
        dtype: Dtype of A and C.
        lanes: Elements of a vector.
        mr: Rows of a contraction tile.
        nv: Vectors of a row of a contraction tile.
        index: Dtype of the indices.
        weights: ``"bfloat16"`` or ``"float16"`` if B is packed so, "" if as ``dtype``.
    """
    arguments = view_of(GroupedGemmArguments)
    item, item_index = item_bytes(dtype), item_bytes(index)
    item_b = 2 if weights else item
    width = nv * lanes
    run_block = _block_runner(dtype, lanes, mr, nv, item_b, False)
    copy_row = row_copy(item)
    load_index, load_place, store_place = ld(index), ld("int64"), st("int64")

    @register_jitable
    def scatter(a: GroupedGemmArguments, made: int, places: int, rows: int, where: Block) -> None:
        """Copy the block's columns of the rows in scratch memory to their rows of C."""
        first = where.panel * width
        count = min(a.n, where.last_panel * width) - first
        for i in range(rows):
            to = a.c + load_place(places + i * 8) * a.c_row + first * item
            copy_row(to, made + i * a.c_row + first * item, count * item)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        product = arguments(args)
        t, where = _tile_block(), _block()
        panels = (product.n + width - 1) // width
        panel_blocks = (panels + product.block_panels - 1) // product.block_panels
        _set_strides(product, t, lanes * item, lanes * item_b)
        places = product.scratch + worker * product.scratch_bytes
        taken = places + product.block_rows * 8
        made = taken + product.block_rows * product.a_row
        where.row = 0
        for unit in range(begin, end):
            matrix, block = unit // panel_blocks, unit % panel_blocks
            b = product.b + matrix * along(product.b_steps, 2)
            where.panel = block * product.block_panels
            where.last_panel = min(panels, where.panel + product.block_panels)
            rows = 0
            for row in range(product.m):
                chosen = load_index(product.indices + row * item_index)
                if chosen == matrix or chosen + product.matrices == matrix:
                    source = product.a + row * product.a_row
                    copy_row(taken + rows * product.a_row, source, product.a_row)
                    store_place(places + rows * 8, row)
                    rows += 1
                if rows == product.block_rows or (rows > 0 and row == product.m - 1):
                    where.rows = rows
                    run_block(product, t, taken, b, made, 0, where)
                    scatter(product, made, places, rows, where)
                    rows = 0

    return kernel


def round_rows() -> Callable[..., None]:
    """Return the kernel of `RoundRowsArguments`, which rounds A to registers of matrix tiles."""
    arguments = view_of(RoundRowsArguments)
    round_adjacent, load1, store1 = row_rounder(), ld("float32"), st("float32")
    copied = stack_words(ROWS * MATRIX_DEPTH // 2)  # 16 rows of a step, of float32
    v = vec("float32", LANES)
    load, store = v.load, v.store

    @register_jitable
    def copy_elements(a: RoundRowsArguments, at: int, rows: int, count: int, copy: int) -> None:
        """Copy a step of rows whose elements are ``column_step`` bytes apart."""
        for row in range(rows):
            for k in range(count):
                to = copy + (row * MATRIX_DEPTH + k) * 4
                store1(to, load1(at + row * a.row_step + k * a.column_step))

    @register_jitable
    def copy_blocks(a: RoundRowsArguments, at: int, rows: int, columns: int, copy: int) -> None:
        """Copy 16 columns of rows that are adjacent."""
        for row in range(rows):
            store(copy + (row * MATRIX_DEPTH + columns) * 4, load(at + row * a.row_step))

    @register_jitable
    def round_copied(a: RoundRowsArguments, source: int, rows: int, target: int) -> None:
        """Round rows whose elements are not all adjacent, step by step."""
        copy = copied()
        for first in range(0, a.depth, MATRIX_DEPTH):
            count = min(MATRIX_DEPTH, a.depth - first)
            if a.block == 0:
                copy_elements(a, source + first * a.column_step, rows, count, copy)
            else:
                for k in range(0, count, LANES):
                    block, column = (first + k) // a.block, (first + k) % a.block
                    copy_blocks(a, source + block * a.block_step + column * 4, rows, k, copy)
            to = target + first // MATRIX_DEPTH * REGISTER_BYTES
            round_adjacent(copy, MATRIX_DEPTH * 4, rows, count, 1.0, to)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        steps = (a.depth + MATRIX_DEPTH - 1) // MATRIX_DEPTH
        registers = (a.rows + ROWS - 1) // ROWS
        for unit in range(begin, end):
            first = unit % registers * ROWS
            source = a.source + unit // registers * a.source_matrix + first * a.row_step
            rows, target = min(ROWS, a.rows - first), a.target + unit * steps * REGISTER_BYTES
            if a.block == 0 and a.column_step == 4:
                round_adjacent(source, a.row_step, rows, a.depth, 1.0, target)
            else:
                round_copied(a, source, rows, target)

    return kernel


def _block_runner(dtype: str, lanes: int, mr: int, nv: int, item_b: int, matrix: bool) -> Any:
    """Return ``f(product, t, a, b, c, res, where)``, which runs the tiles of a block of C.

    ``item_b`` is the bytes of an element of B. ``matrix`` says that the tiles are matrix tiles.
    """
    item, width = item_bytes(dtype), nv * lanes
    # Steps along K of a step of the tile.
    unit = MATRIX_DEPTH if matrix else 1
    height = full_rows if matrix else rows_of
    line = width * item
    # Products over tile registers were tuned without prefetching.
    prefetches = not matrix or not host.has_bfloat16_tiles()
    copy, round_rows = stack_words(mr * line // 8), row_rounder()

    @register_jitable
    def round_tile(
        product: GemmArguments, c: int, row: int, rows: int, first: int, at: int
    ) -> None:
        """Write a tile of C at ``at`` as registers of a left operand."""
        to = c + first // MATRIX_DEPTH * REGISTER_BYTES
        for i in range(0, rows, ROWS):
            target = to + (row + i) // ROWS * product.c_register
            round_rows(at + i * line, line, min(ROWS, rows - i), MATRIX_DEPTH, 1.0, target)

    @register_jitable
    def run_block(
        product: GemmArguments, t: TileBlock, a: int, b: int, c: int, res: int, where: Block
    ) -> None:
        """Run the tiles of a block.

        Args:
            product: The kernel's arguments.
            t: Tile block: the arguments of the contraction tile.
            a: Address of A.
            b: Address of B.
            c: Address of C.
            res: Address of the residual; 0: none.
            where: The block.
        """
        row, rows, panel, last_panel = where.row, where.rows, where.panel, where.last_panel
        n, crs, ldb = product.n, product.c_row, product.b_row
        steps = (product.k + unit - 1) // unit
        t.steps = steps // product.a_blocks
        t.last_depth = (product.k % MATRIX_DEPTH + 1) // 2 * 2 if matrix else 0
        tile_copy = copy() if matrix else 0
        for p in range(panel, last_panel):
            first = p * width
            count = min(width, n - first)
            vectors = (count + lanes - 1) // lanes
            tail = count - (vectors - 1) * lanes
            # The masked tile stores only the columns that exist of the last vector.
            tile = product.tile if tail == lanes else product.masked_tile
            t.tail = tail
            # Rows of a packed panel are adjacent; those of an unpacked B are ``b_row`` bytes apart.
            if ldb == 0:
                step = vectors * lanes * item_b * unit
                t.b = b + first * steps * unit * item_b
            else:
                step = ldb
                t.b = b + first * item
            t.b_step = step
            t.outer_b = t.steps * step
            t.start = product.init + first * item if product.init != 0 else 0
            # The tiles of a packed panel together prefetch the next panel.
            pace = 2 * step // max(1, (rows + mr - 1) // mr) if prefetches and ldb == 0 else 0
            coming = t.b + (steps * step if ldb == 0 else 0)
            t.pace = pace
            i = 0
            while i < rows:
                m = height(rows - i, mr)
                to = (row + i) * crs + p * nv * product.c_vector
                t.a = a + ((row + i) // ROWS * t.a_register if matrix else (row + i) * t.a_row)
                t.c = c + to
                if matrix and product.c_register != 0:
                    t.c = tile_copy
                    t.c_row = line
                if res != 0:
                    t.residual = res + (row + i) * product.residual_row
                    t.residual += p * nv * product.residual_vector
                t.ahead = coming
                coming += steps // 2 * pace
                call_kernel(tile, t, m, vectors, 0)
                if product.activation != 0:
                    call_kernel(product.activation, t, m, vectors, 0)
                if matrix and product.c_register != 0:
                    round_tile(product, c, row + i, m, first, tile_copy)
                i += m

    return run_block
