"""Parts of fused attention: packing, mask, softmax and results of a panel of queries.

Keys are rows and queries are lanes, see ``kernels.py``. Each function here returns a compiled
function over addresses, which a kernel calls. Steps are bytes; a row holds ``count`` queries in
``ceil(count / lanes)`` vectors.
"""

from __future__ import annotations

from typing import Any

from numba.extending import register_jitable

from subgraph.engine.codegen.simd import ld, vec
from subgraph.engine.codegen.transpose import transposer
from subgraph.engine.codegen.vmath import function

_LOWEST = float("-inf")


def matrix_transposer(dtype: str, lanes: int) -> Any:
    """Return ``f(source, step, rows, columns, to, row)``, which transposes a matrix.

    Its rows are ``step`` bytes apart at ``source``; those of the result, one for each column,
    ``row`` bytes apart at ``to``.
    """
    transpose, item = transposer(dtype, lanes), vec(dtype, lanes).itemsize

    @register_jitable
    def transpose_all(source: int, step: int, rows: int, columns: int, to: int, row: int) -> None:
        for d in range(0, columns, lanes):
            for j in range(0, rows, lanes):
                at, target = source + j * step + d * item, to + d * row + j * item
                count, width = min(lanes, rows - j), min(lanes, columns - d)
                transpose(at, step, count, width, target, row)

    return transpose_all


def query_packer(dtype: str, lanes: int) -> Any:
    """Return ``f(q, step, count, depth, to, scale)``, which packs a panel of queries.

    ``count`` queries of ``depth`` elements, ``step`` bytes apart, become ``depth`` rows at ``to``.
    """
    v = vec(dtype, lanes)
    load, store, splat, zero, item = v.load, v.store, v.splat, v.zero, v.itemsize
    transpose, size = matrix_transposer(dtype, lanes), lanes * v.itemsize

    @register_jitable
    def pack_queries(q: int, step: int, count: int, depth: int, to: int, scale: float) -> None:
        """Write the queries, times ``scale``, transposed; lanes without a query are 0."""
        factor = splat(scale)
        row = (count + lanes - 1) // lanes * size
        # The transposition writes only lanes that have a query. The other lanes of the last vector
        # would keep what an earlier unit left in the scratch.
        if count * item < row:
            for d in range(depth):
                store(to + (d + 1) * row - size, zero())
        transpose(q, step, count, depth, to, row)
        # The scale is applied to the queries: a query has as many elements as a key, but as many
        # scores as there are keys.
        for at in range(to, to + depth * row, size):
            store(at, load(at) * factor)

    return pack_queries


def score_bounder(dtype: str, lanes: int) -> Any:
    """Return ``f(begin, end, bound)``, which replaces scores s by ``bound * tanh(s)``.

    The addresses are those of the first score and after the last one; scores are whole vectors.
    """
    v, tanh = vec(dtype, lanes), function("tanh", dtype, lanes)
    load, store, splat, size = v.load, v.store, v.splat, lanes * v.itemsize

    @register_jitable
    def bound_scores(begin: int, end: int, bound: float) -> None:
        for at in range(begin, end, size):
            store(at, tanh(load(at)) * splat(bound))

    return bound_scores


def score_adder(dtype: str, lanes: int) -> Any:
    """Return ``f(begin, end, added)``, which adds as many numbers at ``added`` to scores."""
    v = vec(dtype, lanes)
    load, store, size = v.load, v.store, lanes * v.itemsize

    @register_jitable
    def add_to_scores(begin: int, end: int, added: int) -> None:
        for at in range(begin, end, size):
            store(at, load(at) + load(added + at - begin))

    return add_to_scores


def mask_writer(dtype: str, lanes: int) -> Any:
    """Return ``f(mask, step, key_step, count, keys, scores)``, which writes a mask to the scores.

    The mask has ``step`` bytes between queries (0: one row for all) and ``key_step`` between keys,
    which are adjacent unless ``step`` is 0.
    """
    v = vec(dtype, lanes)
    store, splat, load1 = v.store, v.splat, ld(dtype)
    transpose, size = matrix_transposer(dtype, lanes), lanes * v.itemsize

    @register_jitable
    def write_mask(mask: int, step: int, key_step: int, count: int, keys: int, scores: int) -> None:
        """Write the mask, transposed, to where the product adds the scores."""
        row = (count + lanes - 1) // lanes * size
        if step == 0:
            for k in range(keys):
                for at in range(scores + k * row, scores + (k + 1) * row, size):
                    store(at, splat(load1(mask + k * key_step)))
            return
        transpose(mask, step, count, keys, scores, row)

    return write_mask


def future_masker(dtype: str, lanes: int) -> Any:
    """Return ``f(limit, keys, vectors, scores)``: scores of later keys become minus infinity.

    Query j of the panel sees key k of the block if ``j >= limit + k``.
    """
    v = vec(dtype, lanes)
    load, store, splat, select, iota = v.load, v.store, v.splat, v.select, v.iota
    size = lanes * v.itemsize

    @register_jitable
    def mask_future(limit: int, keys: int, vectors: int, scores: int) -> None:
        """Set the scores of keys that a query does not see."""
        # Keys before this range are seen even by query 0, as ``0 >= limit + k``, and so by all.
        for k in range(max(0, 1 - limit), keys):
            for j in range(vectors):
                at = scores + (k * vectors + j) * size
                # Lane numbers are compared as floats. A limit beyond 2**24 is rounded in float32,
                # but is so far from all lane numbers that the result is the same.
                seen = iota() >= splat(float(limit + k - j * lanes))
                store(at, select(seen, load(at), splat(_LOWEST)))

    return mask_future


def past_masker(dtype: str, lanes: int) -> Any:
    """Return ``f(limit, keys, vectors, scores)``: scores of too early keys become minus infinity.

    Query j of the panel sees key k of the block if ``j < limit + k``.
    """
    v = vec(dtype, lanes)
    load, store, splat, select, iota = v.load, v.store, v.splat, v.select, v.iota
    size = lanes * v.itemsize

    @register_jitable
    def mask_past(limit: int, keys: int, vectors: int, scores: int) -> None:
        """Set the scores of keys that a query no longer sees."""
        # The keys after this range are seen even by the panel's last query.
        for k in range(min(keys, vectors * lanes - limit)):
            for j in range(vectors):
                at = scores + (k * vectors + j) * size
                # As in `mask_future`, rounding in float32 has no effect.
                seen = iota() < splat(float(limit + k - j * lanes))
                store(at, select(seen, load(at), splat(_LOWEST)))

    return mask_past


def block_softmax(dtype: str, lanes: int) -> Any:
    """Return ``f(scores, keys, vectors, state, later)``: the online softmax of a block.

    After Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
    """
    v = vec(dtype, lanes)
    load, store, splat, zero = v.load, v.store, v.splat, v.zero
    largest, select, size = v.max, v.select, lanes * v.itemsize
    exp = function("exp_flushed", dtype, lanes)

    @register_jitable
    def softmax(scores: int, keys: int, vectors: int, state: int, later: bool) -> None:
        """Replace a block of scores by weights; update maximum and sum of each query.

        ``state`` has a row of maxima and one of sums. In a ``later`` block, not the head's first,
        it gets a row of factors, by which the results of earlier blocks must be multiplied.
        """
        row = vectors * size
        even = scores + keys // 2 * 2 * row
        for j in range(0, row, size):
            top, other = splat(_LOWEST), splat(_LOWEST)
            if later:
                top = load(state + j)
            before = top
            # Two maxima halve the chain of dependent operations. `max` passes over NaN in its first
            # operand: it is the exponential of the score, and so the sum, that must show the NaN.
            for at in range(scores + j, even, 2 * row):
                top, other = largest(load(at), top), largest(load(at + row), other)
            if keys & 1:
                top = largest(load(even + j), top)
            top = largest(other, top)
            # -inf - -inf is NaN, but a query may see no key of this block and some of a later one.
            base = select(top > splat(_LOWEST), top, zero())
            total = zero()
            if later:
                # The maximum never falls, so that the factor is at most 1. It is 0, not NaN, where
                # no earlier key was seen.
                factor = exp(before - base)
                total = load(state + row + j) * factor
                store(state + 2 * row + j, factor)
            for at in range(scores + j, scores + keys * row, row):
                weight = exp(load(at) - base)
                store(at, weight)
                total = total + weight
            # The state keeps minus infinity, not the base of 0: with a maximum of 0, all weights of
            # a later block with very negative scores would underflow to 0.
            store(state + j, top)
            store(state + row + j, total)

    return softmax


def result_writer(dtype: str, lanes: int) -> Any:
    """Return ``f(out, step, count, values, source, state, zero_unseen)``: writes a panel's results.

    ``source`` has ``values`` rows of results, ``state`` a row of sums of weights; the output gets
    ``count`` rows of ``values`` elements, ``step`` bytes apart.
    """
    v = vec(dtype, lanes)
    load, store, splat, zero = v.load, v.store, v.splat, v.zero
    select, transpose = v.select, matrix_transposer(dtype, lanes)
    size = lanes * v.itemsize

    @register_jitable
    def write(
        out: int, step: int, count: int, values: int, source: int, state: int, zero_unseen: int
    ) -> None:
        """Divide the results by the sums of weights, and transpose them.

        ``zero_unseen``: a sum of 0 divides as 1, so that its query gives 0 (1), not NaN (0); with a
        sum of NaN it gives 0 as well (2).
        """
        row = (count + lanes - 1) // lanes * size
        for j in range(0, row, size):
            total = load(state + row + j)
            seen = total > zero()
            if zero_unseen != 0:
                total = select(seen, total, splat(1.0))
            inverse = splat(1.0) / total
            for at in range(source + j, source + values * row, row):
                result = load(at) * inverse
                store(at, select(seen, result, zero()) if zero_unseen == 2 else result)
        transpose(source, row, values, count, out, step)

    return write


# A mask of at most this hides a key: beside a key that a query sees its weight is 0 in float32.
_HIDDEN = -1e30


def mask_scanner(dtype: str, lanes: int) -> tuple[Any, Any]:
    """Return two functions that say which keys the rows of a mask hide.

    ``hides_all(mask, step, rows, keys)`` returns whether no row shows any of the keys, and
    ``shows_each(mask, step, rows, keys)`` whether each row shows some. Rows are ``step`` bytes
    apart, and their elements adjacent; with 0 all rows are the first one.
    """
    v = vec(dtype, lanes)
    load, splat, every = v.load, v.splat, v.all
    load1, item = ld(dtype), v.itemsize

    @register_jitable
    def shows(row: int, keys: int) -> bool:
        """Return whether a row shows one of its keys; one of NaN counts."""
        whole = keys // lanes * lanes
        for k in range(0, whole, lanes):
            if not every(load(row + k * item) <= splat(_HIDDEN)):
                return True
        rest = whole
        while rest < keys and load1(row + rest * item) <= _HIDDEN:
            rest += 1
        return rest < keys

    @register_jitable
    def hides_all(mask: int, step: int, rows: int, keys: int) -> bool:
        hidden = 0
        count = rows if step != 0 else 1
        while hidden < count and not shows(mask + hidden * step, keys):
            hidden += 1
        return hidden == count

    @register_jitable
    def shows_each(mask: int, step: int, rows: int, keys: int) -> bool:
        shown = 0
        count = rows if step != 0 else 1
        while shown < count and shows(mask + shown * step, keys):
            shown += 1
        return shown == count

    return hides_all, shows_each
