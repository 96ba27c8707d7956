"""Bernoulli and Multinomial for the REFERENCE device.

onnx.reference lacks Multinomial, and its Bernoulli draws from the generator of the process. Random
numbers come from NumPy's generators: the standard fixes their distribution, not the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from subgraph.graph.graph import Node
from subgraph.graph.types import DTYPE_OF_ONNX, Array, numpy_dtype
from subgraph.operators.reference import attributes


def _generator(seed: Any) -> np.random.Generator:
    """Return a generator: with a seed it gives the same numbers in every run."""
    if seed is None:
        return np.random.default_rng()
    return np.random.default_rng(int(np.float32(seed).view(np.uint32)))


def multinomial(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return classes drawn by rows of unnormalised log-probabilities."""
    options = attributes(node)
    logits: Array = inputs[0]
    size = int(options["sample_size"])
    rows = logits.astype(np.float64)
    powers = np.exp(rows - rows.max(axis=1, keepdims=True))
    sums = np.cumsum(powers / powers.sum(axis=1, keepdims=True), axis=1)
    drawn: Array = _generator(options["seed"]).random((logits.shape[0], size))
    found: list[Array] = [
        np.searchsorted(row_sums, row, side="right")
        for row_sums, row in zip(sums, drawn, strict=True)
    ]
    result: Array = np.minimum(np.array(found).reshape(drawn.shape), logits.shape[1] - 1)
    return [result.astype(numpy_dtype(DTYPE_OF_ONNX[int(options["dtype"])]))]


def bernoulli(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return 1 with the probability that the input element is, else 0."""
    options = attributes(node)
    x: Array = inputs[0]
    shape: tuple[int, ...] = x.shape
    drawn: Array = np.less(_generator(options["seed"]).random(shape), x.astype(np.float64))
    number = options["dtype"]
    dtype = x.dtype if number is None else numpy_dtype(DTYPE_OF_ONNX[int(number)])
    return [drawn.astype(dtype)]
