"""Shared by the references of ai.onnx.ml's models: samples, labels, and transforms of scores.

Where the standard is silent, as on the scores of two classes of which one has a score, results are
those of ONNX Runtime, for which such models are exported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from subgraph.errors import ShapeError
from subgraph.graph.graph import Node
from subgraph.graph.types import Array

ML = "ai.onnx.ml"
_Made = TypeVar("_Made")
_MAX_PREPARED = 32  # models in the cache below, of which the oldest is dropped (estimate)
_PREPARED: dict[Any, tuple[Sequence[Any], Any]] = {}


def prepared(node: Node, make: Callable[[Node], _Made]) -> _Made:
    """Return ``make(node)``, cached: it must depend on the node's attributes and version only."""
    values = tuple(node.attrs.values())
    key = (make, node.version, tuple(node.attrs), tuple(map(id, values)))
    entry = _PREPARED.get(key)
    if entry is None:
        keys = list(_PREPARED)  # at once: other threads may add entries during an iteration
        for oldest in keys[: max(len(keys) + 1 - _MAX_PREPARED, 0)]:
            _PREPARED.pop(oldest, None)
        # The entry holds the attributes, so that no other object gets an id of the key.
        entry = _PREPARED[key] = (values, make(node))
    made: _Made = entry[1]
    return made


def rows(x: Array) -> Array:
    """Return the samples as rows of float32, or of float64 if they have it; a vector is one."""
    x = x.reshape(1, -1) if x.ndim == 1 else x
    return x if x.dtype == np.float64 else x.astype(np.float32)


def label_array(*choices: Sequence[Any] | None) -> Array:
    """Return the class labels, strings or int64, from the first attribute that is given."""
    for choice in choices:
        if choice:
            return np.array(choice, object if isinstance(choice[0], str) else np.int64)
    raise ShapeError("no class labels are given")


def logistic(x: Array) -> Array:
    """Return 1 / (1 + exp(-x)), without overflow for x of either sign."""
    # The exponent is never positive, so the exponential cannot overflow.
    found = 1 / (1 + np.exp(-np.abs(x)))
    return np.where(x < 0, 1 - found, found).astype(x.dtype)


def _probit(x: Array) -> Array:
    """Return the quantile of the normal distribution, as ONNX Runtime approximates it.

    Winitzki, "A handy approximation for the error function and its inverse" (2008).
    """
    x = (2 * x - 1).astype(np.float32)
    log = np.log((1 - x) * (1 + x))
    v = 2 / (np.float32(3.14159) * np.float32(0.147)) + np.float32(0.5) * log
    inner = np.sqrt(v * v - log / np.float32(0.147)) - v
    found: Array = np.sqrt(np.float32(2)) * np.where(x < 0, -1, 1) * np.sqrt(inner)
    return found


def _softmax(x: Array) -> Array:
    # The largest exponent is 0, so nothing overflows and the sum is at least 1.
    found: Array = np.exp(x - x.max(axis=1, keepdims=True, initial=-np.inf))
    shares: Array = found / found.sum(axis=1, keepdims=True)
    return shares


def _softmax_zero(x: Array) -> Array:
    """Return a softmax in which zeros, below 1e-7 as in ONNX Runtime, stay zeros."""
    most: Array = x.max(axis=1, keepdims=True, initial=-np.inf)
    counts: Array = np.abs(x) > 1e-7
    powers: Array = np.exp(x - most)
    found: Array = np.where(counts, powers, x * np.exp(-most))
    shares: Array = found / np.where(counts, found, 0).sum(axis=1, keepdims=True)
    return shares


_TRANSFORMS: dict[str, Callable[[Array], Array]] = {
    "NONE": lambda x: x,
    "LOGISTIC": logistic,
    "SOFTMAX": _softmax,
    "SOFTMAX_ZERO": _softmax_zero,
    "PROBIT": _probit,
}


def transformed(scores: Array, name: str) -> Array:
    """Return the scores [samples, classes] after a ``post_transform``, as float32."""
    if scores.shape[1] == 1 and name.startswith("SOFTMAX"):
        return scores.astype(np.float32)  # the softmax of one class would be 1
    return _TRANSFORMS[name](scores).astype(np.float32)


def two_scores(score: Array, name: str, *, signed: bool) -> Array:
    """Return the scores [samples, 2] of two classes of which only the second has a score.

    Args:
        score: Score of the second class for each sample.
        name: The ``post_transform``.
        signed: The second class has scores above 0; else scores are shares, and it has those above
            one half.
    """
    if name == "PROBIT":
        return np.stack([_probit(score), np.zeros_like(score)], 1).astype(np.float32)
    if name == "LOGISTIC":
        return np.stack([logistic(-score), logistic(score)], 1).astype(np.float32)
    if not signed:
        return np.stack([1 - score, score], 1).astype(np.float32)
    return np.stack([-score, score], 1).astype(np.float32)
