"""Fused attention over matrix tiles of bfloat16.

Here queries are rows and keys are columns, other than in ``kernels.py``: weights are then rows of A
as they are, and so are queries; values are pairs of rows of B, and results rows of the output. Only
the keys have to be transposed. Both products round their operands: queries, times the scale, and
keys; weights of the softmax and values. The softmax is float32. Keys are read in blocks, with
running maximum and sum, as there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.extending import register_jitable

from subgraph.engine.codegen.argument_views import stack_block, view_of
from subgraph.engine.codegen.arguments import WordBlock
from subgraph.engine.codegen.bfloat16 import store_bfloat16
from subgraph.engine.codegen.matrix_product import multiply_rows
from subgraph.engine.codegen.matrix_registers import (
    LANES,
    REGISTER_BYTES,
    ROW_BYTES,
    ROWS,
    configure_tiles,
    release_tiles,
)
from subgraph.engine.codegen.simd import ld_f32, vec
from subgraph.engine.codegen.tiling import MATRIX_DEPTH
from subgraph.engine.codegen.vmath import function
from subgraph.ops.shared.register_kernels import column_pairer, row_pairer, row_rounder

from .arguments import MatrixAttentionArguments
from .kernels import first_position, head_operands, visible_keys
from .panel_parts import mask_scanner

_VECTOR = LANES * 4  # bytes of a vector of float32
_QUERIES = 2 * ROWS  # of a panel
_STATE = _QUERIES * 4  # bytes of one number for each query of a panel
_LOWEST = float("-inf")


class Panel(WordBlock):
    """A panel of queries and a block of keys.

    Attributes:
        first: First query of the panel.
        count: Queries of the panel.
        queries: Registers of the queries.
        results: Rows of results, before the division by the sums of weights.
        state: Maxima and sums of the queries.
        key: First key of the block.
        block: Keys of the block.
        keys: Keys of the block that the panel sees.
        mask: Mask of the head; 0: none.
        offset: Keys before the first query.
        shared: Scratch of the block; see `MatrixAttentionArguments`.
    """

    first: int
    count: int
    queries: int
    results: int
    state: int
    key: int
    block: int
    keys: int
    mask: int
    offset: int
    shared: int


_panel = stack_block(Panel)


@register_jitable
def _steps_of(size: int) -> int:
    """Return the steps of matrix tiles along a size."""
    return (size + MATRIX_DEPTH - 1) // MATRIX_DEPTH


@register_jitable
def _vectors_of(size: int) -> int:
    """Return the vectors of float32 that a size fills."""
    return (size + LANES - 1) // LANES


def _maxima_finder() -> Any:
    """Return ``f(a, p)``, which prepares the scores of a panel and finds the maxima of vectors.

    The mask is added; scores of keys that a query does not see become minus infinity, up to a whole
    step of keys. The maximum of each lane goes to a vector for each query at ``a.rows``.
    """
    v = vec("float32", LANES)
    load, load_n, store, splat = v.load, v.load_n, v.store, v.splat
    largest, select, iota = v.max, v.select, v.iota

    @register_jitable
    def masked(a: MatrixAttentionArguments, p: Panel, row: int, column: int, count: int) -> Any:
        """Return a vector of scores, with the mask of ``count`` of its keys."""
        score = load(p.shared + a.scores + row * a.line + column * 4)
        if p.mask != 0:
            at = p.mask + (p.first + row) * a.mask_row + (p.key + column) * a.mask_key
            if a.mask_key == 0:
                score = score + splat(ld_f32(at))
            elif count == LANES:
                score = score + load(at)
            else:
                score = score + load_n(at, count)
        return score

    @register_jitable
    def find_maxima(a: MatrixAttentionArguments, p: Panel) -> None:
        width = _steps_of(p.keys) * MATRIX_DEPTH
        for row in range(p.count):
            line = p.shared + a.scores + row * a.line
            seen = p.keys
            if a.causal != 0:
                seen = max(0, min(seen, p.first + row + p.offset + 1 - p.key))
            whole = seen // LANES * LANES
            top, other = splat(_LOWEST), splat(_LOWEST)
            # `max` passes over NaN in its first operand: it is the exponential of the score, and so
            # the sum, that must show the NaN.
            if p.mask != 0:
                for column in range(0, whole, LANES):
                    score = masked(a, p, row, column, LANES)
                    store(line + column * 4, score)
                    top = largest(score, top)
            else:
                even = whole // (2 * LANES) * (2 * LANES)
                for at in range(line, line + even * 4, 2 * _VECTOR):
                    top, other = largest(load(at), top), largest(load(at + _VECTOR), other)
                if even < whole:
                    top = largest(load(line + even * 4), top)
            top = largest(other, top)
            if whole < width:
                rest = seen - whole
                if rest > 0:
                    score = masked(a, p, row, whole, rest)
                    score = select(iota() < splat(float(rest)), score, splat(_LOWEST))
                    store(line + whole * 4, score)
                    top = largest(score, top)
                    whole += LANES
                for column in range(whole, width, LANES):
                    store(line + column * 4, splat(_LOWEST))
            store(p.shared + a.rows + row * _VECTOR, top)

    return find_maxima


def _panel_softmax() -> Any:
    """Return ``f(a, p)``: the online softmax of a block of keys.

    The scores become weights, as registers of A. Maximum and sum of each query are updated. In a
    block that is not the head's first one, the results of earlier blocks are multiplied by the
    factors that the change of the maxima makes.
    """
    v = vec("float32", LANES)
    load, store, splat, select, zero = v.load, v.store, v.splat, v.select, v.zero
    largest, row_max, row_sum = v.max, v.row_max, v.row_sum
    exp, find_maxima = function("exp_bfloat16", "float32", LANES), _maxima_finder()

    @register_jitable
    def weigh(a: MatrixAttentionArguments, p: Panel, base: int) -> None:
        """Write the weights, and the sum of each lane to a vector for each query."""
        steps = _steps_of(p.keys)
        register = a.block_steps * REGISTER_BYTES
        for row in range(p.count):
            at = p.shared + a.scores + row * a.line
            to = p.shared + a.weights + row // ROWS * register + row % ROWS * ROW_BYTES
            subtracted = splat(ld_f32(base + row * 4))
            total, other = zero(), zero()
            for _ in range(steps):
                weight = exp(load(at) - subtracted)
                store_bfloat16(to, weight)
                total = total + weight
                weight = exp(load(at + _VECTOR) - subtracted)
                store_bfloat16(to + ROW_BYTES // 2, weight)
                other = other + weight
                at += 2 * _VECTOR
                to += REGISTER_BYTES
            store(p.shared + a.rows + row * _VECTOR, total + other)

    @register_jitable
    def rescale(a: MatrixAttentionArguments, p: Panel, factors: int) -> None:
        """Multiply the results of earlier blocks by the factors of their queries."""
        size = _vectors_of(a.value_size) * _VECTOR
        for row in range(p.count):
            factor = splat(ld_f32(factors + row * 4))
            first = p.results + row * size
            for at in range(first, first + size, _VECTOR):
                store(at, load(at) * factor)

    @register_jitable
    def softmax(a: MatrixAttentionArguments, p: Panel) -> None:
        rows = p.shared + a.rows
        base = rows + _QUERIES * _VECTOR
        factors = base + _STATE
        is_later = p.key > 0
        find_maxima(a, p)
        for j in range(0, p.count, LANES):
            top, at = row_max(rows + j * _VECTOR), p.state + j * 4
            before = splat(_LOWEST)
            if is_later:
                before = load(at)
            top = largest(before, top)
            # -inf - -inf is NaN, but a query may see no key of this block and some of a later one.
            # The state keeps minus infinity, not the base of 0: with a maximum of 0, all weights of
            # a later block with very negative scores would underflow to 0.
            finite = select(top > splat(_LOWEST), top, zero())
            store(at, top)
            store(base + j * 4, finite)
            if is_later:
                # The maximum never falls, so that the factor is at most 1. It is 0, not NaN, where
                # no earlier key was seen.
                store(factors + j * 4, exp(before - finite))
        weigh(a, p, base)
        for j in range(0, p.count, LANES):
            total, at = row_sum(rows + j * _VECTOR), p.state + _STATE + j * 4
            if is_later:
                total = total + load(at) * load(factors + j * 4)
            store(at, total)
        if is_later:
            rescale(a, p, factors)

    return softmax


def _panel_attention() -> Any:
    """Return ``f(a, p)``, which updates the results of a panel by a block of keys."""
    softmax = _panel_softmax()

    @register_jitable
    def attend(a: MatrixAttentionArguments, p: Panel) -> None:
        depth, vectors = _steps_of(a.key_size), _vectors_of(a.value_size)
        steps = _steps_of(p.keys)
        multiply_rows(
            p.count,
            p.queries,
            depth * REGISTER_BYTES,
            p.shared,
            _vectors_of(p.block) * REGISTER_BYTES,
            steps * 2,
            depth,
            p.shared + a.scores,
            a.line,
            0,
        )
        softmax(a, p)
        multiply_rows(
            p.count,
            p.shared + a.weights,
            a.block_steps * REGISTER_BYTES,
            p.shared + a.v_registers,
            vectors * REGISTER_BYTES,
            vectors,
            steps,
            p.results,
            vectors * _VECTOR,
            p.key,
        )

    return attend


def _result_writer() -> Any:
    """Return ``f(a, p, out)``: divides the results of a panel by their sums and writes them."""
    v = vec("float32", LANES)
    load, store, store_n = v.load, v.store, v.store_n
    splat, select, zero = v.splat, v.select, v.zero

    @register_jitable
    def write(a: MatrixAttentionArguments, p: Panel, out: int) -> None:
        sums = p.state + _STATE
        for at in range(sums, sums + p.count * 4, _VECTOR):
            total = load(at)
            inverse = splat(1.0) / total
            if a.zero_unseen != 0:
                inverse = select(total > zero(), inverse, zero())
            store(at, inverse)
        values = a.value_size
        for row in range(p.count):
            inverse = splat(ld_f32(sums + row * 4))
            source = p.results + row * _vectors_of(values) * _VECTOR
            to = out + (p.first + row) * a.y_row
            for column in range(0, values, LANES):
                result = load(source + column * 4) * inverse
                if a.zero_unseen == 2:  # the results of a query with a score of NaN are NaN
                    result = select(inverse > zero(), result, zero())
                if column + LANES <= values:
                    store(to + column * 4, result)
                else:
                    store_n(to + column * 4, values - column, result)

    return write


def _block_loader() -> Any:
    """Return ``f(a, k, v, key, keys, shared)``: writes the registers of a block of keys."""
    pair_rows, pair_columns = row_pairer(), column_pairer()

    @register_jitable
    def load_block(
        a: MatrixAttentionArguments, k: int, v: int, key: int, keys: int, shared: int
    ) -> None:
        """Write the registers of the keys and of their values; both are B of a product.

        Args:
            a: The kernel's arguments.
            k: Keys of the head.
            v: Values of the head.
            key: First key of the block.
            keys: Keys of the block.
            shared: Scratch of the block.
        """
        # Columns beyond the keys, up to a whole step, are products whose scores are not used.
        if a.k_across != 0:
            pair_rows(k + key * 4, a.k_line, a.key_size, keys, shared)
        else:
            pair_columns(k + key * a.k_line, a.k_line, keys, a.key_size, shared)
        to = shared + a.v_registers
        if a.v_across != 0:
            pair_columns(v + key * 4, a.v_line, a.value_size, keys, to)
        else:
            pair_rows(v + key * a.v_line, a.v_line, keys, a.value_size, to)

    return load_block


def attention() -> Callable[..., None]:
    """Return the kernel of `MatrixAttentionArguments`."""
    arguments = view_of(MatrixAttentionArguments)
    round_rows, load_block = row_rounder(), _block_loader()
    attend, write = _panel_attention(), _result_writer()
    hides_all, shows_each = mask_scanner("float32", LANES)

    @register_jitable
    def select_panel(a: MatrixAttentionArguments, p: Panel, start: int, first: int) -> None:
        """Set the fields of a panel that are the same for all blocks of keys."""
        at = p.shared - (a.panels - (first - start) // _QUERIES) * a.panel_bytes
        p.first = first
        p.count = min(_QUERIES, a.queries - first)
        p.queries = at
        p.results = at + 2 * _steps_of(a.key_size) * REGISTER_BYTES
        p.state = at + a.panel_bytes - 2 * _STATE

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        p = _panel()
        p.shared = a.scratch + worker * a.scratch_bytes + a.panels * a.panel_bytes
        unit_queries = a.panels * _QUERIES
        pieces = (a.queries + unit_queries - 1) // unit_queries
        configure_tiles(MATRIX_DEPTH)
        for unit in range(begin, end):
            start = unit % pieces * unit_queries
            stop = min(a.queries, start + unit_queries)
            head, batch = unit // pieces % a.heads, unit // pieces // a.heads
            q, k, v, p.mask = head_operands(a, batch, head)
            for first in range(start, stop, _QUERIES):
                select_panel(a, p, start, first)
                from_q = q + first * a.q_row
                round_rows(from_q, a.q_row, p.count, a.key_size, a.scale, p.queries)
            p.offset = first_position(a, batch)
            visible, step = visible_keys(a, stop, p.offset), a.mask_row
            # See `kernels.attention`; the first block initializes the state of all panels.
            skips = p.mask != 0 and a.mask_key == 4 and a.causal == 0
            skips = skips and shows_each(p.mask + start * step, step, stop - start, a.keys)
            for key in range(0, visible, a.keys_block):
                keys, masks = min(a.keys_block, visible - key), p.mask + key * 4
                leaves_out = skips and key > 0
                if leaves_out and hides_all(masks + start * step, step, stop - start, keys):
                    continue
                load_block(a, k, v, key, keys, p.shared)
                for first in range(start, stop, _QUERIES):
                    seen = visible_keys(a, min(first + _QUERIES, a.queries), p.offset) - key
                    rows = min(_QUERIES, a.queries - first)
                    if leaves_out and hides_all(masks + first * step, step, rows, keys):
                        seen = 0
                    if seen > 0:
                        select_panel(a, p, start, first)
                        p.key = key
                        p.block = keys
                        p.keys = min(keys, seen)
                        attend(a, p)
            out = a.y + batch * a.y_batch + head * a.y_head
            for first in range(start, stop, _QUERIES):
                select_panel(a, p, start, first)
                write(a, p, out)
        release_tiles()

    return kernel
