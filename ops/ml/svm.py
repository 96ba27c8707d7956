"""SVMClassifier and SVMRegressor, for the reference.

onnx.reference has neither all transforms nor integer labels, and fails without support vectors.
Libsvm's rules: votes of every pair of classes, pairwise probabilities joined by the second method
of Wu, Lin and Weng, "Probability Estimates for Multi-class Classification" (2004).
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

from .scores import label_array, logistic, prepared, rows, transformed, two_scores


@attrs.frozen(eq=False)
class Machine:
    """The numbers of a machine as arrays.

    Attributes:
        vectors: Support vectors [vectors, features]; without any, the machine is linear.
        coefficients: As the attribute has them.
        rho: Constant of each pair of classes.
        kernel: Name of the kernel function.
        gamma: Its factor.
        offset: Its ``coef0``.
        degree: Its exponent.
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
        if vectors.shape[1] != x.shape[1]:
            raise ShapeError(f"{x.shape[1]} features for vectors of {vectors.shape[1]}")
        if self.kernel == "RBF":
            away = x[:, None] - vectors[None]
            near: Array = np.exp(-self.gamma * (away * away).sum(axis=2))
            return near
        found = x @ vectors.T
        if self.kernel == "POLY":
            return (self.gamma * found + self.offset) ** self.degree
        if self.kernel == "SIGMOID":
            return np.tanh(self.gamma * found + self.offset)
        if self.kernel != "LINEAR":
            raise ShapeError(f"kernel_type {self.kernel!r} is unknown")
        return found


def regressor_machine(node: Node) -> Machine:
    """Return the machine of a SVMRegressor."""
    return _machine(node, int(attributes(node)["n_supports"] or 0))


def classifier_machine(node: Node) -> Machine:
    """Return the machine of a SVMClassifier."""
    return _machine(node, sum(attributes(node)["vectors_per_class"] or ()))


def _machine(node: Node, count: int) -> Machine:
    given = attributes(node)
    numbers = {
        name: np.array(given[name] or (), np.float32)
        for name in ("support_vectors", "coefficients", "rho", "kernel_params")
    }
    held = numbers["support_vectors"]
    if not numbers["coefficients"].size or not numbers["rho"].size:
        raise ShapeError("coefficients and rho are needed")
    if count < 0 or held.size % max(count, 1):
        raise ShapeError(f"{held.size} numbers for {count} support vectors")
    gamma, offset, degree = (*map(float, numbers["kernel_params"][:3]), 0.0, 0.0, 0.0)[:3]
    return Machine(
        vectors=held.reshape(count, -1) if count else np.zeros((0, 0), np.float32),
        coefficients=numbers["coefficients"],
        rho=numbers["rho"],
        kernel=str(given["kernel_type"]) if count else "LINEAR",
        gamma=gamma,
        offset=offset,
        degree=degree,
    )


def svm_regressor(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return one score of each sample, float32 [samples, 1]; of one class, 1 or -1."""
    given = attributes(node)
    machine = prepared(node, regressor_machine)
    x = rows(inputs[0]).astype(np.float32)
    row = machine.coefficients[None]
    if len(machine.vectors):
        scores = machine.products(x, machine.vectors) @ row.T
    else:
        scores = machine.products(x, row)
    scores = (scores + machine.rho[0]).astype(np.float32)
    if given["one_class"]:
        return [np.where(scores > 0, 1, -1).astype(np.float32)]
    return [transformed(scores, str(given["post_transform"]))]


def svm_classifier(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the label of each sample, and probabilities or the scores of every pair of classes."""
    given = attributes(node)
    machine = prepared(node, classifier_machine)
    labels = label_array(given["classlabels_strings"], given["classlabels_ints"])
    x, name = rows(inputs[0]).astype(np.float32), str(given["post_transform"])
    if not len(machine.vectors):
        return _linear(machine, x, labels, name)
    scores = _pairs(machine, x, len(labels), given["vectors_per_class"])
    votes = np.zeros((len(x), len(labels)), np.int64)
    for column, (i, j) in enumerate(combinations(range(len(labels)), 2)):
        votes[:, i] += scores[:, column] > 0
        votes[:, j] += scores[:, column] <= 0
    found = labels[votes.argmax(axis=1)]
    a = np.array(given["prob_a"] or (), np.float32)
    b = np.array(given["prob_b"] or (), np.float32)
    if not a.size:
        if len(labels) == 2:
            return [found, two_scores(scores[:, 0], name, signed=name == "NONE")]
        return [found, transformed(scores, name)]
    if not len(a) == len(b) == scores.shape[1]:
        raise ShapeError(f"{len(a)} and {len(b)} probabilities for {scores.shape[1]} pairs")
    each = np.clip(1 - logistic(scores * a + b), 1e-7, 1 - 1e-7)
    return [found, transformed(_joined(each, len(labels)), name)]


def _linear(machine: Machine, x: Array, labels: Array, name: str) -> Sequence[Any]:
    """Return labels and scores of a machine that has a row of coefficients for each class."""
    scores = machine.products(x, machine.coefficients.reshape(len(labels), -1))
    scores = (scores + machine.rho[0]).astype(np.float32)
    best = scores.argmax(axis=1)
    if len(labels) == 2:
        # With weights of both signs any score above zero speaks for the second class.
        least = 0.5 if np.all(machine.coefficients >= 0) else 0.0
        top = scores.max(axis=1)
        best = np.where(top >= least if least else top > 0, 1, best)
    return [labels[best], transformed(scores, name)]


def _pairs(machine: Machine, x: Array, classes: int, counts: Sequence[int]) -> Array:
    """Return the score of each pair of classes, [samples, pairs]."""
    ends = np.append(0, np.cumsum(counts))
    pairs = list(combinations(range(classes), 2))
    wanted = (classes - 1) * len(machine.vectors)
    if len(counts) != classes or min(counts) < 0 or machine.coefficients.size < wanted:
        raise ShapeError(f"{len(counts)} counts and {machine.coefficients.size} coefficients")
    if machine.rho.size < len(pairs):
        raise ShapeError(f"{machine.rho.size} constants for {len(pairs)} pairs of classes")
    found = machine.products(x, machine.vectors).astype(np.float64)
    weights = machine.coefficients[:wanted].reshape(classes - 1, -1).astype(np.float64)
    ranges = [slice(a, b) for a, b in pairwise(ends)]
    scores = [
        found[:, ranges[i]] @ weights[j - 1, ranges[i]]
        + found[:, ranges[j]] @ weights[i, ranges[j]]
        + machine.rho[column]
        for column, (i, j) in enumerate(pairs)
    ]
    return np.stack(scores, axis=1).astype(np.float32)


def _joined(each: Array, classes: int) -> Array:
    """Return the probability of each class from those of the pairs, [samples, classes]."""
    samples = len(each)
    r = np.zeros((samples, classes, classes))
    for column, (i, j) in enumerate(combinations(range(classes), 2)):
        r[:, i, j], r[:, j, i] = each[:, column], 1 - each[:, column]
    q = -np.swapaxes(r, 1, 2) * r
    diagonal = np.arange(classes)
    q[:, diagonal, diagonal] = (r * r).sum(axis=1)
    p = np.full((samples, classes), 1 / classes)
    for _ in range(100):
        qp = np.einsum("sij,sj->si", q, p)
        pqp = (p * qp).sum(axis=1)
        moving = np.abs(qp - pqp[:, None]).max(axis=1, initial=0) >= 0.005 / classes
        if not moving.any():
            break
        for i in range(classes):
            step = np.where(moving, (pqp - qp[:, i]) / q[:, i, i], 0)
            p[:, i] += step
            pqp = (pqp + step * (step * q[:, i, i] + 2 * qp[:, i])) / (1 + step) ** 2
            qp = (qp + step[:, None] * q[:, i]) / (1 + step)[:, None]
            p /= (1 + step)[:, None]
    return p.astype(np.float32)
