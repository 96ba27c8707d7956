"""Reference of SVMClassifier and SVMRegressor, support vector machines as libsvm's.

onnx.reference lacks some transforms and integer labels, and fails without support vectors. A class
is chosen by votes of all pairs of classes; its probability follows from those of the pairs by the
second method of Wu, Lin and Weng, "Probability Estimates for Multi-class Classification by Pairwise
Coupling" (2004).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise
from typing import Any

import attrs
import numpy as np

from subgraph.errors import ShapeError
from subgraph.graph.graph import Node
from subgraph.graph.types import Array
from subgraph.operators.reference import attributes

from .arguments import ACCURACY, LEAST_PROBABILITY, MAX_ITERATIONS
from .scores import label_array, logistic, prepared, rows, transformed, two_scores


@attrs.frozen(eq=False)
class Svm:
    """The parameters of a support vector machine.

    Attributes:
        vectors: Support vectors [vectors, features]; without any, the machine is linear.
        coefficients: The attribute, flat: of regressors one for each vector; of classifiers
            [classes - 1, vectors]; of linear machines one for each feature (of each class).
        rho: Constant of each pair of classes, or of the regressor.
        kernel: Name of the kernel function: LINEAR, POLY, RBF or SIGMOID.
        gamma: Factor of products or distances in it.
        offset: Its ``coef0``, added to products.
        degree: Exponent of POLY.
    """

    vectors: Array
    coefficients: Array
    rho: Array
    kernel: str
    gamma: float
    offset: float
    degree: float

    def products(self, x: Array, vectors: Array) -> Array:
        """Return the kernel function of each sample and vector, [samples, vectors]."""
        if self.kernel == "RBF":
            difference = x[:, None] - vectors[None]
            result: Array = np.exp(-self.gamma * (difference * difference).sum(axis=2))
            return result
        found = x @ vectors.T
        if self.kernel == "POLY":
            return (self.gamma * found + self.offset) ** self.degree
        if self.kernel == "SIGMOID":
            return np.tanh(self.gamma * found + self.offset)
        return found


def regressor_svm(node: Node) -> Svm:
    """Return the parameters of an SVMRegressor.

    Raises:
        ShapeError: there is not one coefficient for each support vector.
    """
    count = int(attributes(node)["n_supports"] or 0)
    svm = _svm(node, count)
    if count and svm.coefficients.size != count:
        raise ShapeError(f"{svm.coefficients.size} coefficients for {count} support vectors")
    return svm


def classifier_svm(node: Node) -> Svm:
    """Return the parameters of an SVMClassifier."""
    return _svm(node, sum(attributes(node)["vectors_per_class"] or ()))


def _svm(node: Node, count: int) -> Svm:
    """Return the parameters of a machine with ``count`` support vectors."""
    options = attributes(node)
    numbers = {
        name: np.array(options[name] or (), np.float32)
        for name in ("support_vectors", "coefficients", "rho", "kernel_params")
    }
    vectors = numbers["support_vectors"]
    if not numbers["coefficients"].size or not numbers["rho"].size:
        raise ShapeError("coefficients and rho are needed")
    if count < 0 or vectors.size % max(count, 1):
        raise ShapeError(f"{vectors.size} numbers for {count} support vectors")
    gamma, offset, degree = (*map(float, numbers["kernel_params"][:3]), 0.0, 0.0, 0.0)[:3]
    return Svm(
        vectors=vectors.reshape(count, -1) if count else np.zeros((0, 0), np.float32),
        coefficients=numbers["coefficients"],
        rho=numbers["rho"],
        kernel=str(options["kernel_type"]) if count else "LINEAR",
        gamma=gamma,
        offset=offset,
        degree=degree,
    )


def svm_regressor(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return one score of each sample, float32 [samples, 1]; 1 or -1 with ``one_class``."""
    options = attributes(node)
    svm = prepared(node, regressor_svm)
    x = rows(inputs[0]).astype(np.float32)
    row = svm.coefficients[None]
    scores = svm.products(x, svm.vectors) @ row.T if len(svm.vectors) else svm.products(x, row)
    scores = (scores + svm.rho[0]).astype(np.float32)
    if options["one_class"]:
        return [np.where(scores > 0, 1, -1).astype(np.float32)]
    return [transformed(scores, str(options["post_transform"]))]


def svm_classifier(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return labels, and probabilities of classes or the scores of all pairs of classes."""
    options = attributes(node)
    svm = prepared(node, classifier_svm)
    labels = label_array(options["classlabels_strings"], options["classlabels_ints"])
    x, name = rows(inputs[0]).astype(np.float32), str(options["post_transform"])
    if not len(svm.vectors):
        return _linear_classifier(svm, x, labels, name)
    scores = _pair_scores(svm, x, len(labels), options["vectors_per_class"])
    votes = np.zeros((len(x), len(labels)), np.int64)
    for column, (i, j) in enumerate(combinations(range(len(labels)), 2)):
        votes[:, i] += scores[:, column] > 0
        votes[:, j] += scores[:, column] <= 0
    found = labels[votes.argmax(axis=1)]
    a = np.array(options["prob_a"] or (), np.float32)
    b = np.array(options["prob_b"] or (), np.float32)
    if not a.size:
        if len(labels) == 2:
            return [found, two_scores(scores[:, 0], name, signed=name == "NONE")]
        return [found, transformed(scores, name)]
    if not len(a) == len(b) == scores.shape[1]:
        raise ShapeError(f"{len(a)} and {len(b)} probabilities for {scores.shape[1]} pairs")
    each = np.clip(1 - logistic(scores * a + b), LEAST_PROBABILITY, 1 - LEAST_PROBABILITY)
    return [found, transformed(_class_probabilities(each, len(labels)), name)]


def _linear_classifier(svm: Svm, x: Array, labels: Array, name: str) -> Sequence[Any]:
    """Return labels and scores of a machine that has a row of coefficients for each class."""
    scores = svm.products(x, svm.coefficients.reshape(len(labels), -1))
    scores = (scores + svm.rho[0]).astype(np.float32)
    best = scores.argmax(axis=1)
    if len(labels) == 2:
        # As in ONNX Runtime: with weights of both signs, a score above 0 means the second class.
        least = 0.5 if np.all(svm.coefficients >= 0) else 0.0
        top = scores.max(axis=1)
        best = np.where(top >= least if least else top > 0, 1, best)
    return [labels[best], transformed(scores, name)]


def _pair_scores(svm: Svm, x: Array, classes: int, counts: Sequence[int]) -> Array:
    """Return the score of each pair of classes, [samples, pairs]."""
    ends = np.append(0, np.cumsum(counts))
    pairs = list(combinations(range(classes), 2))
    wanted = (classes - 1) * len(svm.vectors)
    if len(counts) != classes or min(counts) < 0 or svm.coefficients.size < wanted:
        raise ShapeError(f"{len(counts)} counts and {svm.coefficients.size} coefficients")
    if svm.rho.size < len(pairs):
        raise ShapeError(f"{svm.rho.size} constants for {len(pairs)} pairs of classes")
    found = svm.products(x, svm.vectors).astype(np.float64)
    weights = svm.coefficients[:wanted].reshape(classes - 1, -1).astype(np.float64)
    ranges = [slice(a, b) for a, b in pairwise(ends)]
    scores = [
        found[:, ranges[i]] @ weights[j - 1, ranges[i]]
        + found[:, ranges[j]] @ weights[i, ranges[j]]
        + svm.rho[column]
        for column, (i, j) in enumerate(pairs)
    ]
    return np.stack(scores, axis=1).astype(np.float32)


def _class_probabilities(each: Array, classes: int) -> Array:
    """Return the probabilities of classes, [samples, classes], from those of pairs.

    Minimizes ``p^T Q p`` with ``sum p = 1`` by the iteration of Wu, Lin and Weng (algorithm 2).

    Args:
        each: Probability of the first class of each pair, [samples, pairs].
        classes: Number of classes.
    """
    samples = len(each)
    r = np.zeros((samples, classes, classes))
    for column, (i, j) in enumerate(combinations(range(classes), 2)):
        r[:, i, j], r[:, j, i] = each[:, column], 1 - each[:, column]
    q = -np.swapaxes(r, 1, 2) * r
    diagonal = np.arange(classes)
    q[:, diagonal, diagonal] = (r * r).sum(axis=1)
    p = np.full((samples, classes), 1 / classes)
    for _ in range(MAX_ITERATIONS):
        qp = np.einsum("sij,sj->si", q, p)
        pqp = (p * qp).sum(axis=1)
        moving = np.abs(qp - pqp[:, None]).max(axis=1, initial=0) >= ACCURACY / classes
        if not moving.any():
            break
        for i in range(classes):
            step = np.where(moving, (pqp - qp[:, i]) / q[:, i, i], 0)
            p[:, i] += step
            pqp = (pqp + step * (step * q[:, i, i] + 2 * qp[:, i])) / (1 + step) ** 2
            qp = (qp + step[:, None] * q[:, i]) / (1 + step)[:, None]
            p /= (1 + step)[:, None]
    return p.astype(np.float32)
