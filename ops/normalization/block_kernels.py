"""Kernels of GroupNormalization and InstanceNormalization in blocks of channels, in three steps.

Each lane collects the mean and the sum of squared distances of the pixels of a part; the moments of
the parts, blocks and lanes of a group become a factor and a summand for each channel; these are
applied. Moments are joined by the formula of Chan, Golub and LeVeque, "Updating Formulae and a
Pairwise Algorithm for Computing Sample Variances" (1979), in an order that does not depend on the
number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from numba.extending import register_jitable

from subgraph.engine.codegen.argument_views import view_of
from subgraph.engine.codegen.simd import shuffle, vec

from .arguments import BlockMomentsArguments, BlockScaleArguments, GroupFactorsArguments

Function = Callable[..., Any]
_CHUNK_PIXELS = 256  # vectors of 64 bytes that fill half of an L1 cache


def block_moments(*, dtype: str, lanes: int) -> Function:
    """Return the kernel of `BlockMomentsArguments`.

    Args:
        dtype: Of the elements.
        lanes: Channels of a block.
    """
    arguments = view_of(BlockMomentsArguments)
    v = vec(dtype, lanes)
    load, store, splat, fma = v.load, v.store, v.splat, v.fma
    step = lanes * v.itemsize
    joined = _joined(dtype, lanes)

    @register_jitable
    def chunk_moments(x: int, pixels: int) -> Any:
        """Return the mean and the sum of squared distances of some pixels."""
        stop = x + pixels * step
        a, b, at = splat(0.0), splat(0.0), x
        while at + step < stop:
            a, b = a + load(at), b + load(at + step)
            at += 2 * step
        if at < stop:
            a = a + load(at)
        mean = (a + b) * splat(1.0 / pixels)
        a, b, at = splat(0.0), splat(0.0), x
        while at + step < stop:
            p, q = load(at) - mean, load(at + step) - mean
            a, b = fma(p, p, a), fma(q, q, b)
            at += 2 * step
        if at < stop:
            p = load(at) - mean
            a = fma(p, p, a)
        return mean, a + b

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        for unit in range(begin, end):
            first = unit % a.parts * a.part
            last = min(a.pixels, first + a.part)
            block = a.x + unit // a.parts * a.pixels * step
            mean, squares, count = splat(0.0), splat(0.0), 0
            for at in range(first, last, _CHUNK_PIXELS):
                size = min(_CHUNK_PIXELS, last - at)
                other, others = chunk_moments(block + at * step, size)
                mean, squares = joined(mean, squares, count, other, others, size)
                count += size
            store(a.moments + 2 * unit * step, mean)
            store(a.moments + (2 * unit + 1) * step, squares)

    return kernel


def group_factors(*, dtype: str, lanes: int, together: int) -> Function:
    """Return the kernel of `GroupFactorsArguments`.

    Args:
        dtype: Of the elements.
        lanes: Channels of a block.
        together: Adjacent lanes of one group, a power of 2.
    """
    arguments = view_of(GroupFactorsArguments)
    v = vec(dtype, lanes)
    load, store, load_n, splat, root, fma = v.load, v.store, v.load_n, v.splat, v.sqrt, v.fma
    item = v.itemsize
    step = lanes * item
    joined, total = _joined(dtype, lanes), _lane_sums(dtype, lanes, together)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        parts, blocks = a.parts, a.blocks
        for unit in range(begin, end):
            moments = a.moments + unit * blocks * parts * 2 * step
            mean, squares, count = splat(0.0), splat(0.0), 0
            for k in range(blocks * parts):
                size = min(a.part, a.pixels - k % parts * a.part)
                other, others = load(moments), load(moments + step)
                mean, squares = joined(mean, squares, count, other, others, size)
                count += size
                moments += 2 * step
            whole = total(mean) * splat(1.0 / together)
            apart = mean - whole
            squares = total(fma(apart * apart, splat(float(count)), squares))
            variance = squares * splat(1.0 / (count * together))
            deviation = splat(1.0) / root(variance + splat(a.epsilon))
            for block in range(blocks):
                channel = (unit % a.units * blocks + block) * lanes
                taken = min(lanes, a.channels - channel)
                factor = load_n(a.scale + channel * item, taken) * deviation
                shift = load_n(a.bias + channel * item, taken) - whole * factor
                to = a.factors + (unit * blocks + block) * 2 * step
                store(to, factor)
                store(to + step, shift)

    return kernel


def scale_blocks(*, dtype: str, lanes: int) -> Function:
    """Return the kernel of `BlockScaleArguments`, which multiplies and adds a vector of each block.

    Args:
        dtype: Of the elements.
        lanes: Channels of a block.
    """
    arguments = view_of(BlockScaleArguments)
    v = vec(dtype, lanes)
    load, store, fma = v.load, v.store, v.fma
    step = lanes * v.itemsize

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        for unit in range(begin, end):
            block, first = unit // a.parts, unit % a.parts * a.part
            factors = a.factors + 2 * block * step
            factor, shift = load(factors), load(factors + step)
            at = (block * a.pixels + first) * step
            for offset in range(at, at + min(a.part, a.pixels - first) * step, step):
                store(a.y + offset, fma(load(a.x + offset), factor, shift))

    return kernel


def _joined(dtype: str, lanes: int) -> Function:
    """Return ``f(mean, squares, count, mean, squares, count)``: the moments of both sets."""
    v = vec(dtype, lanes)
    splat, fma = v.splat, v.fma

    @register_jitable
    def joined(
        mean: Any, squares: Any, count: int, other: Any, others: Any, size: int
    ) -> tuple[Any, Any]:
        apart = other - mean
        share = size / (count + size)
        squares = fma(apart * apart, splat(share * count), squares + others)
        return fma(apart, splat(share), mean), squares

    return joined


def _lane_sums(dtype: str, lanes: int, together: int) -> Function:
    """Return ``f(vector)``: in each lane the sum of the ``together`` lanes of its group."""

    @register_jitable
    def unchanged(x: Any) -> Any:
        return x

    total: Function = unchanged
    for bit in range(together.bit_length() - 1):
        total = _with_others(total, dtype, lanes, [lane ^ 1 << bit for lane in range(lanes)])
    return total


def _with_others(first: Function, dtype: str, lanes: int, picks: Sequence[int]) -> Function:
    """Return ``f(vector)``: the result of ``first``, and its elements in the order ``picks``."""
    exchange = shuffle(dtype, lanes, picks)

    @register_jitable
    def add_others(x: Any) -> Any:
        x = first(x)
        return x + exchange(x, x)

    return add_others
