"""Fused attention over matrix tiles of bfloat16; see `subgraph.ops.attention.kernels`.

Keys are rows and queries are lanes there and here. Both products round their operands: queries,
times the scale, and keys; weights of the softmax and values. The softmax is float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.extending import register_jitable

from subgraph.engine.codegen.argument_views import stack_block, view_of
from subgraph.engine.codegen.matrix_tile import (
    LANES,
    REGISTER_BYTES,
    ROW_BYTES,
    ROWS,
    configure_tiles,
    release_tiles,
)
from subgraph.engine.codegen.simd import call_kernel, memset, vec
from subgraph.engine.codegen.tiling import MATRIX_DEPTH, MATRIX_TILE, TileBlock
from subgraph.ops.shared.register_kernels import row_pairer, row_rounder

from .arguments import MatrixAttentionArguments
from .kernels import head_operands, panel_writer, visible_keys
from .panel_parts import (
    block_softmax,
    future_masker,
    mask_writer,
    matrix_transposer,
    query_packer,
)

_tile_block = stack_block(TileBlock)
_VECTOR = LANES * 4  # bytes of a vector of float32
_ROW = MATRIX_TILE[1] * _VECTOR  # bytes of a row of a panel of 32 queries
_QUERIES = MATRIX_TILE[1] * LANES


@register_jitable
def _whole_steps(size: int) -> int:
    """Return a size rounded up to whole steps of a matrix tile."""
    return (size + MATRIX_DEPTH - 1) // MATRIX_DEPTH * MATRIX_DEPTH


def _line_loader() -> Any:
    """Return ``f(source, step, lines, length, transposed, copy, target)``: lines as registers of A.

    The lines, of ``length`` adjacent elements, are ``step`` bytes apart. If they are to be
    ``transposed``, the rows of A are the elements of all lines; ``copy`` is memory for them.
    """
    transpose, round_rows = matrix_transposer("float32", LANES), row_rounder()

    @register_jitable
    def load_lines(
        source: int, step: int, lines: int, length: int, transposed: bool, copy: int, target: int
    ) -> None:
        if transposed:
            pitch = (lines + LANES - 1) // LANES * _VECTOR
            transpose(source, step, lines, length, copy, pitch)
            round_rows(copy, pitch, length, lines, target)
        else:
            round_rows(source, step, lines, length, target)

    return load_lines


@register_jitable
def _multiply(
    a: MatrixAttentionArguments, t: TileBlock, left: int, rows: int, depth: int, vectors: int
) -> None:
    """Run the tiles of a product, whose B and first row of C are set.

    Args:
        a: The kernel's arguments.
        t: Tile block. If `start` is set, the sums are added to C; `row_bias` is that of row 0.
        left: Registers of A.
        rows: Rows of A and C.
        depth: Elements of a row in the registers of A; `steps` may be fewer.
        vectors: Vectors of a row of C.
    """
    register = _whole_steps(depth) // MATRIX_DEPTH * REGISTER_BYTES
    t.a_register = register
    t.b_step = vectors * REGISTER_BYTES
    line = vectors * _VECTOR
    t.c_row = line
    t.start_row = line
    first, bias = t.c, t.row_bias
    adds = t.start != 0
    for row in range(0, rows, MATRIX_TILE[0]):
        t.a = left + row // ROWS * register
        t.c = first + row * line
        t.start = t.c if adds else 0
        t.row_bias = bias + row * 4 if bias != 0 else 0
        call_kernel(a.tile, t, min(MATRIX_TILE[0], rows - row), vectors, 0)


def _panel_attention() -> Any:
    """Return ``f(a, t, panel, first, key, keys, block, mask, shared)``: attends to some keys."""
    write_mask, mask_future = mask_writer("float32", LANES), future_masker("float32", LANES)
    softmax, pair_rows = block_softmax("float32", LANES), row_pairer()
    v = vec("float32", LANES)
    load, store = v.load, v.store

    @register_jitable
    def rescale(out: int, factors: int, values: int, vectors: int) -> None:
        """Multiply the results of earlier blocks by the factors of their queries."""
        for j in range(vectors):
            factor = load(factors + j * _VECTOR)
            for row in range(values):
                at = out + (row * vectors + j) * _VECTOR
                store(at, load(at) * factor)

    @register_jitable
    def attend(
        a: MatrixAttentionArguments,
        t: TileBlock,
        panel: int,
        first: int,
        key: int,
        keys: int,
        block: int,
        mask: int,
        shared: int,
    ) -> None:
        """Update the results of a panel by a block of keys.

        Args:
            a: The kernel's arguments.
            t: Tile block.
            panel: Scratch of the panel: registers of its queries, results, state of the softmax.
            first: Its first query.
            key: First key of the block.
            keys: Keys of the block that the panel sees.
            block: Keys of the block.
            mask: Mask of the head; 0: none.
            shared: Scratch of the block: registers of keys, of values, and of weights, scores.
        """
        depth, values = a.key_size, a.value_size
        vectors = (min(_QUERIES, a.queries - first) + LANES - 1) // LANES
        line = vectors * _VECTOR
        out = panel + _whole_steps(depth) * _ROW // 2
        state = out + values * _ROW
        v_registers = shared + a.v_registers
        weights, scores = shared + a.weights, shared + a.scores
        t.row_bias = 0
        t.start = 0
        if mask != 0:
            step, key_step = a.mask_row, a.mask_key
            at = mask + first * step + key * key_step
            # As in `subgraph.ops.attention.kernels`: a number for each key is a bias of its row.
            if step == 0 and key_step == 4:
                t.row_bias = at
            else:
                write_mask(at, step, key_step, min(_QUERIES, a.queries - first), keys, scores)
                t.start = scores
        t.b = panel
        t.c = scores
        t.steps = _whole_steps(depth) // MATRIX_DEPTH
        _multiply(a, t, shared, keys, depth, vectors)
        if a.causal != 0:
            mask_future(key - a.offset - first, keys, vectors, scores)
        softmax(scores, keys, vectors, state, key > 0)
        padded = _whole_steps(keys)
        memset(scores + keys * line, 0, (padded - keys) * line)
        pair_rows(scores, padded, vectors, weights)
        if key > 0:
            rescale(out, state + 2 * line, values, vectors)
        t.row_bias = 0
        t.start = out if key > 0 else 0
        t.b = weights
        t.c = out
        t.steps = padded // MATRIX_DEPTH
        _multiply(a, t, v_registers, values, block, vectors)

    return attend


def attention() -> Callable[..., None]:
    """Return the kernel of `MatrixAttentionArguments`."""
    arguments = view_of(MatrixAttentionArguments)
    pack_queries, pair_rows = query_packer("float32", LANES), row_pairer()
    load_lines, attend = _line_loader(), _panel_attention()
    write_panel = panel_writer("float32", LANES, MATRIX_TILE[1])

    @register_jitable
    def load_queries(a: MatrixAttentionArguments, q: int, count: int, copy: int, to: int) -> None:
        """Write ``count`` queries, times the scale, as registers of B."""
        depth, line = a.key_size, (count + LANES - 1) // LANES * _VECTOR
        pack_queries(q, a.q_row, count, depth, copy, a.scale)
        memset(copy + depth * line, 0, (_whole_steps(depth) - depth) * line)
        pair_rows(copy, _whole_steps(depth), line // _VECTOR, to)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        t = _tile_block()
        t.outer_count = 1
        t.middle_count = 1
        t.inner_count = 1
        t.a_row = ROW_BYTES
        t.a_step = REGISTER_BYTES
        t.b_vector = REGISTER_BYTES
        t.c_vector = _VECTOR
        t.start_vector = _VECTOR
        queries, depth, values = a.queries, a.key_size, a.value_size
        query_rows = _whole_steps(depth) // 2  # rows of a panel that the registers of Q fill
        panel_bytes = (query_rows + values + 3) * _ROW
        first_panel = a.scratch + worker * a.scratch_bytes
        shared = first_panel + a.panels * panel_bytes
        pieces = (queries + a.panels * _QUERIES - 1) // (a.panels * _QUERIES)
        configure_tiles(MATRIX_DEPTH)
        for unit in range(begin, end):
            start = unit % pieces * a.panels * _QUERIES
            stop = min(queries, start + a.panels * _QUERIES)
            head, batch = unit // pieces % a.heads, unit // pieces // a.heads
            q, k, v_at, mask = head_operands(a, batch, head)
            for first in range(start, stop, _QUERIES):
                panel = first_panel + (first - start) // _QUERIES * panel_bytes
                count = min(_QUERIES, queries - first)
                load_queries(a, q + first * a.q_row, count, shared + a.scores, panel)
            visible = visible_keys(a, stop)
            for key in range(0, visible, a.keys_block):
                keys = min(a.keys_block, visible - key)
                copy = shared + a.scores
                if a.k_across != 0:
                    load_lines(k + key * 4, a.k_line, depth, keys, True, copy, shared)
                else:
                    load_lines(k + key * a.k_line, a.k_line, keys, depth, False, copy, shared)
                to = shared + a.v_registers
                if a.v_across != 0:
                    load_lines(v_at + key * 4, a.v_line, values, keys, False, copy, to)
                else:
                    load_lines(v_at + key * a.v_line, a.v_line, keys, values, True, copy, to)
                for first in range(start, stop, _QUERIES):
                    panel = first_panel + (first - start) // _QUERIES * panel_bytes
                    seen = visible_keys(a, min(first + _QUERIES, queries)) - key
                    if seen > 0:
                        attend(a, t, panel, first, key, min(keys, seen), keys, mask, shared)
            out = a.y + batch * a.y_batch + head * a.y_head
            for first in range(start, stop, _QUERIES):
                panel = first_panel + (first - start) // _QUERIES * panel_bytes
                write_panel(a, panel, out, first, query_rows, values, queries)
        release_tiles()

    return kernel
