"""Convolutions in float64 NumPy, one tap at a time: what tests compare kernels with."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from subgraph.graph.types import Array


def reference(
    x: Array,
    w: Array,
    strides: Sequence[int],
    dilations: Sequence[int],
    pads: Sequence[int],
    groups: int,
) -> Array:
    """Convolve in float64, one tap at a time."""
    rank = x.ndim - 2
    kernel = w.shape[2:]
    width = [(0, 0), (0, 0), *zip(pads[:rank], pads[rank:], strict=True)]
    padded = np.pad(x.astype(np.float64), width)
    out = [
        (padded.shape[2 + i] - (kernel[i] - 1) * dilations[i] - 1) // strides[i] + 1
        for i in range(rank)
    ]
    images, channels = x.shape[0], x.shape[1]
    result = np.zeros((images, groups, w.shape[0] // groups, *out))
    split_w = w.reshape(groups, w.shape[0] // groups, *w.shape[1:]).astype(np.float64)
    for tap in itertools.product(*map(range, kernel)):
        index = tuple(
            slice(t * d, t * d + (o - 1) * s + 1, s)
            for t, d, o, s in zip(tap, dilations, out, strides, strict=True)
        )
        part = padded[(slice(None), slice(None), *index)]
        part = part.reshape(images, groups, channels // groups, -1)
        weights = split_w[(slice(None), slice(None), slice(None), *tap)]
        sums = np.einsum("ngip,goi->ngop", part, weights)
        result += sums.reshape(result.shape)
    return result.reshape(images, w.shape[0], *out)


def transposed(
    x: Array,
    w: Array,
    strides: Sequence[int],
    dilations: Sequence[int],
    before: Sequence[int],
    out: Sequence[int],
    groups: int,
) -> Array:
    """Scatter every input pixel times every tap, in float64."""
    images, channels = x.shape[:2]
    full = [
        max((n - 1) * s + (k - 1) * d + 1, o + b)
        for n, s, k, d, o, b in zip(
            x.shape[2:], strides, w.shape[2:], dilations, out, before, strict=True
        )
    ]
    result = np.zeros((images, groups, w.shape[1], *full))
    split_x = x.reshape(images, groups, channels // groups, -1).astype(np.float64)
    split_w = w.reshape(groups, channels // groups, *w.shape[1:]).astype(np.float64)
    for tap in itertools.product(*map(range, w.shape[2:])):
        index = tuple(
            slice(t * d, t * d + (n - 1) * s + 1, s)
            for t, d, n, s in zip(tap, dilations, x.shape[2:], strides, strict=True)
        )
        weights = split_w[(slice(None), slice(None), slice(None), *tap)]
        sums = np.einsum("ngip,gio->ngop", split_x, weights)
        target = result[(slice(None), slice(None), slice(None), *index)]
        target += sums.reshape(target.shape)
    index = tuple(slice(b, b + o) for b, o in zip(before, out, strict=True))
    return result[(slice(None), slice(None), slice(None), *index)].reshape(
        images, groups * w.shape[1], *out
    )


def close(got: Array, wanted: Array, tolerance: float = 5e-6) -> None:
    scale = max(float(np.abs(wanted).max(initial=0.0)), 1.0)
    if got.dtype == np.float64:
        tolerance *= 1e-7
    np.testing.assert_allclose(got, wanted, rtol=0, atol=tolerance * scale)
