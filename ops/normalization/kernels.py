"""Kernels of normalizations: over rows (LayerNormalization, RMS), groups of channels, LRN."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.extending import register_jitable

from subgraph.engine.codegen import vmath
from subgraph.engine.codegen.argument_views import view_of
from subgraph.engine.codegen.simd import shuffle, vec

from .arguments import (
    GroupNormArguments,
    LocalNormArguments,
    LocalNormBlockedArguments,
    RowNormArguments,
)

Function = Callable[..., Any]


def _moments(dtype: str, lanes: int) -> tuple[Function, Function]:
    """Return ``total(x, n)`` and ``squares(x, n, mean)``, the sum of squared distances."""
    v = vec(dtype, lanes)
    load, load_m, mask_n = v.load, v.load_m, v.mask_n
    select, splat, fma = v.select, v.splat, v.fma
    total_of, item = v.sum, v.itemsize
    step = lanes * item

    @register_jitable
    def total(x: int, size: int) -> Any:
        # Four sums hide the latency of additions, and lose fewer digits than a single long one.
        a, b, c, d = splat(0.0), splat(0.0), splat(0.0), splat(0.0)
        stop = x + size * item
        while x + 4 * step <= stop:
            a, b = a + load(x), b + load(x + step)
            c, d = c + load(x + 2 * step), d + load(x + 3 * step)
            x += 4 * step
        while x + step <= stop:
            a = a + load(x)
            x += step
        if x < stop:
            b = b + load_m(x, mask_n((stop - x) // item))
        return total_of((a + b) + (c + d))

    @register_jitable
    def squares(x: int, size: int, mean: float) -> Any:
        # A pass of its own after the mean: the difference of the mean square and the squared mean
        # loses most digits where the mean is large beside the deviation.
        a, b, c, d = splat(0.0), splat(0.0), splat(0.0), splat(0.0)
        m = splat(mean)
        stop = x + size * item
        while x + 4 * step <= stop:
            p, q = load(x) - m, load(x + step) - m
            r, s = load(x + 2 * step) - m, load(x + 3 * step) - m
            a, b, c, d = fma(p, p, a), fma(q, q, b), fma(r, r, c), fma(s, s, d)
            x += 4 * step
        while x + step <= stop:
            p = load(x) - m
            a = fma(p, p, a)
            x += step
        if x < stop:
            mask = mask_n((stop - x) // item)
            # Lanes after the end are loaded as 0, and each would add the square of the mean.
            p = select(mask, load_m(x, mask) - m, splat(0.0))
            b = fma(p, p, b)
        return total_of((a + b) + (c + d))

    return total, squares


def _inverse_deviation(dtype: str) -> Function:
    """Return ``f(variance, epsilon)``: 1 / sqrt(variance + epsilon)."""
    one = vec(dtype, 1)
    splat1, get1, root1 = one.splat, one.get, one.sqrt

    @register_jitable
    def inverse(variance: float, epsilon: float) -> Any:
        return get1(splat1(1.0) / root1(splat1(variance) + splat1(epsilon)), 0)

    return inverse


def rows(*, dtype: str, lanes: int, centred: bool, bias: bool) -> Function:
    """Return the kernel of `RowNormArguments`: LayerNormalization and RMSNormalization.

    Args:
        dtype: Of the elements.
        lanes: Elements of a vector.
        centred: Subtract the mean first (LayerNormalization).
        bias: Add the bias.
    """
    arguments = view_of(RowNormArguments)
    v = vec(dtype, lanes)
    load, store, splat, fma = v.load, v.store, v.splat, v.fma
    load_m, store_m, mask_n = v.load_m, v.store_m, v.mask_n
    total, squares = _moments(dtype, lanes)
    inverse = _inverse_deviation(dtype)
    item = v.itemsize
    step = lanes * item
    one = vec(dtype, 1)
    store1, splat1 = one.store, one.splat

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        size, scales, biases = a.size, a.scale, a.bias
        epsilon = a.epsilon
        whole = size // lanes * step
        rest = size - size // lanes * lanes
        mask = mask_n(rest)
        for unit in range(begin, end):
            x, y = a.x + unit * size * item, a.y + unit * size * item
            mean = total(x, size) / size if centred else 0.0
            deviation = inverse(squares(x, size, mean) / size, epsilon)
            if a.means != 0:
                store1(a.means + unit * item, splat1(mean))
            if a.deviations != 0:
                store1(a.deviations + unit * item, splat1(deviation))
            m, d = splat(mean), splat(deviation)
            for i in range(0, whole, step):
                t = (load(x + i) - m) * d
                if bias:
                    store(y + i, fma(t, load(scales + i), load(biases + i)))
                else:
                    store(y + i, t * load(scales + i))
            if rest > 0:
                t = (load_m(x + whole, mask) - m) * d
                s = load_m(scales + whole, mask)
                if bias:
                    store_m(y + whole, mask, fma(t, s, load_m(biases + whole, mask)))
                else:
                    store_m(y + whole, mask, t * s)

    return kernel


def groups(*, dtype: str, lanes: int) -> Function:
    """Return the kernel of `GroupNormArguments`: GroupNormalization and InstanceNormalization.

    Args:
        dtype: Of the elements.
        lanes: Elements of a vector.
    """
    arguments = view_of(GroupNormArguments)
    v = vec(dtype, lanes)
    load, store, splat, fma = v.load, v.store, v.splat, v.fma
    load_m, store_m, mask_n = v.load_m, v.store_m, v.mask_n
    bcast, item = v.bcast, v.itemsize
    total, squares = _moments(dtype, lanes)
    inverse = _inverse_deviation(dtype)
    step = lanes * item

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        count, channels, pixels = a.groups, a.channels, a.pixels
        epsilon = a.epsilon
        size = channels * pixels
        for unit in range(begin, end):
            x, y = a.x + unit * size * item, a.y + unit * size * item
            mean = total(x, size) / size
            deviation = splat(inverse(squares(x, size, mean) / size, epsilon))
            at = unit % count * a.group_step * item
            for _ in range(channels):
                # Statistics and parameters of a channel join into one multiply-add for each
                # element.
                factor = bcast(a.scale + at) * deviation
                shift = bcast(a.bias + at) - splat(mean) * factor
                left = pixels
                while left >= lanes:
                    store(y, fma(load(x), factor, shift))
                    x += step
                    y += step
                    left -= lanes
                if left > 0:
                    mask = mask_n(left)
                    store_m(y, mask, fma(load_m(x, mask), factor, shift))
                    x += left * item
                    y += left * item
                at += a.channel_step * item

    return kernel


def local_response(*, dtype: str, lanes: int, three_quarters: bool) -> Function:
    """Return the kernel of `LocalNormArguments`.

    Args:
        dtype: Of the elements.
        lanes: Elements of a vector.
        three_quarters: The exponent is 3/4, computed by square roots.
    """
    arguments = view_of(LocalNormArguments)
    v = vec(dtype, lanes)
    load_m, store_m, mask_n, splat, fma = v.load_m, v.store_m, v.mask_n, v.splat, v.fma
    power = _power(v, three_quarters)
    item = v.itemsize

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        channels, pixels, before, after = a.channels, a.pixels, a.before, a.after
        alpha, bias, beta = a.alpha, a.bias, a.beta
        tiles = (pixels + lanes - 1) // lanes
        step = pixels * item
        for unit in range(begin, end):
            image, first = unit // tiles, unit % tiles * lanes
            mask = mask_n(pixels - first)
            at = (image * channels * pixels + first) * item
            x, y = a.x + at, a.y + at
            for c in range(channels):
                total = splat(0.0)
                # Squares are added anew for each channel: in a running sum, from which squares are
                # subtracted again, the rounding errors of large ones would remain.
                for k in range(max(0, c - before), min(channels, c + after + 1)):
                    t = load_m(x + k * step, mask)
                    total = fma(t, t, total)
                base = fma(total, splat(alpha), splat(bias))
                store_m(y + c * step, mask, load_m(x + c * step, mask) / power(base, beta))

    return kernel


def _power(v: Any, three_quarters: bool) -> Function:
    """Return ``f(base, beta)``: base to the power of beta, or of 3/4."""
    root, splat = v.sqrt, v.splat
    exp, log = (vmath.function(name, v.dtype, v.lanes) for name in ("exp", "log"))

    @register_jitable
    def power(base: Any, beta: float) -> Any:
        if three_quarters:
            r = root(base)
            return r * root(r)
        return exp(splat(beta) * log(base))

    return power


def local_response_blocked(
    *, dtype: str, lanes: int, before: int, after: int, three_quarters: bool
) -> Function:
    """Return the kernel of `LocalNormBlockedArguments`.

    Args:
        dtype: Of the elements.
        lanes: Channels of a block.
        before: Channels before one whose squares are added, fewer than ``lanes``.
        after: Channels after one whose squares are added, fewer than ``lanes``.
        three_quarters: The exponent is 3/4, computed by square roots.
    """
    arguments = view_of(LocalNormBlockedArguments)
    v = vec(dtype, lanes)
    load, store, splat, fma, zero = v.load, v.store, v.splat, v.fma, v.zero
    power = _power(v, three_quarters)
    step = lanes * v.itemsize
    window = _window(dtype, lanes, before, after)

    def kernel(args: int, begin: int, end: int, worker: int) -> None:
        a = arguments(args)
        blocks, pixels = a.blocks, a.pixels
        alpha, bias, beta = a.alpha, a.bias, a.beta
        plane = pixels * step
        for unit in range(begin, end):
            block = unit % blocks
            x, y = a.x + unit * plane, a.y + unit * plane
            for i in range(0, plane, step):
                current = load(x + i)
                # A window reaches less than a block of channels to either side, so the two adjacent
                # blocks are enough; beyond the first and last block squares are 0.
                previous = load(x + i - plane) if block > 0 else zero()
                next_ = load(x + i + plane) if block + 1 < blocks else zero()
                total = window(previous * previous, current * current, next_ * next_)
                store(y + i, current / power(fma(total, splat(alpha), splat(bias)), beta))

    return kernel


def _window(dtype: str, lanes: int, before: int, after: int) -> Function:
    """Return ``f(previous, current, next)``: for each lane the sum over its neighbours.

    The three vectors are consecutive channels; it adds ``before`` lanes before each of the middle
    one's, and ``after`` lanes after it.
    """
    down = [shuffle(dtype, lanes, [lanes - k + i for i in range(lanes)]) for k in range(1, lanes)]
    up = [shuffle(dtype, lanes, [k + i for i in range(lanes)]) for k in range(1, lanes)]
    chain = _middle

    for k in range(before):
        chain = _extended(chain, down[k], True)
    for k in range(after):
        chain = _extended(chain, up[k], False)
    return chain


@register_jitable
def _middle(previous: Any, current: Any, next_: Any) -> Any:
    return current


def _extended(chain: Function, shift: Any, from_low: bool) -> Function:
    """Return ``chain`` plus one shifted vector, from the previous or into the next."""

    @register_jitable
    def extended(previous: Any, current: Any, next_: Any) -> Any:
        total = chain(previous, current, next_)
        return total + (shift(previous, current) if from_low else shift(current, next_))

    return extended
