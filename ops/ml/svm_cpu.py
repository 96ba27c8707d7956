"""Support vector machines of ai.onnx.ml on the CPU device.

Products of samples and support vectors are a Gemm, distances have a kernel of their own; a linear
machine is one row of weights for each score. The scores of classifiers are added up in float64, as
on the reference, since their signs are votes: a sample at the same distance of two classes has a
score of 0, which sums of rounded products miss.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

import attrs
import numpy as np

from subgraph.engine.planner.constants import contiguous_array
from subgraph.engine.planner.lowering import Lowering, Unsupported, lowering
from subgraph.engine.planner.operands import Operand
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.graph import Node
from subgraph.graph.types import Array
from subgraph.operators.reference import attributes
from subgraph.operators.requirements import decoded
from subgraph.ops.elementwise.cpu import cast_to, emit_cast, emit_expression, source, temporary
from subgraph.ops.elementwise.expressions import Expression, Term
from subgraph.ops.shared.delegation import delegate

from .arguments import (
    LEAST_PROBABILITY,
    DistancesArguments,
    PairScoresArguments,
    ProbabilitiesArguments,
    VotesArguments,
)
from .dense_cpu import (
    emit_labels,
    emit_linear,
    emit_transform,
    samples_of,
    scores_operand,
    weight_operand,
)
from .scores import ML, prepared
from .svm import Svm, classifier_svm, regressor_svm

_UNIT_SAMPLES = 4  # samples of a work unit of `svm_kernels.distances`: those of its tile
# Least work of a thread (estimates: more work than starting a thread).
_MIN_DISTANCE_UNITS = 4
_MIN_SAMPLES_OF_VOTES = 1024
_MIN_SAMPLES_OF_SCORES = 64  # of scores of pairs, and of probabilities of classes


@attrs.frozen(eq=False)
class _ScoringSvm:
    """A support vector machine with coefficients by score.

    Attributes:
        svm: The parameters.
        rows: Coefficients [scores, vectors], float64; of a linear machine [1, features].
        rho: Constants of the scores.
        ends: Of classifiers the index of the first vector of each class, then their number.
    """

    svm: Svm
    rows: Array
    rho: Array
    ends: Array


def _regressor(node: Node) -> _ScoringSvm:
    svm = regressor_svm(node)
    return _ScoringSvm(
        svm,
        svm.coefficients[None].astype(np.float64),
        svm.rho[:1],
        np.zeros(0, np.int64),
    )


def _classifier(node: Node) -> _ScoringSvm:
    """Return the machine of an SVMClassifier, with a row of coefficients for each pair of classes.

    In a row the coefficients of vectors of other classes are 0.
    """
    svm, counts = classifier_svm(node), attributes(node)["vectors_per_class"] or ()
    classes, vectors = len(counts), len(svm.vectors)
    pairs = list(combinations(range(classes), 2))
    if not pairs or min(counts) < 0 or not vectors:
        raise Unsupported("an SVM without support vectors, or of one class")
    if svm.coefficients.size < (classes - 1) * vectors or svm.rho.size < len(pairs):
        raise Unsupported("too few coefficients or constants")
    weights = svm.coefficients[: (classes - 1) * vectors].reshape(classes - 1, -1)
    ends = np.append(0, np.cumsum(counts)).astype(np.int64)
    of = [slice(a, b) for a, b in pairwise(ends)]
    rows = np.zeros((len(pairs), vectors))
    for row, (i, j) in zip(rows, pairs, strict=True):
        row[of[i]], row[of[j]] = weights[j - 1, of[i]], weights[i, of[j]]
    return _ScoringSvm(svm, rows, svm.rho[: len(pairs)], ends)


def _power(e: Expression, x: Term, degree: float) -> Term:
    """Return ``x ** degree``, by products for degrees up to 3."""
    if degree in (1.0, 2.0, 3.0):
        result = x
        for _ in range(int(degree) - 1):
            result = e("mul", result, x)
        return result
    return e("pow", x, e.number(degree, x.dtype))


def _emit_kernel_function(low: Lowering, svm: Svm, x: Operand, found: Operand) -> None:
    """Emit the kernel function of each sample and support vector.

    Args:
        low: Where the steps go.
        svm: The parameters.
        x: Samples [samples, features].
        found: The results [samples, vectors], float32 or float64.
    """
    vectors, gamma = svm.vectors, svm.gamma
    samples, features = x.shape
    count = len(vectors)
    products = temporary(low, "float32", found.shape)
    if svm.kernel == "RBF":
        lanes = low.lanes("float32")
        padded = np.zeros((features, -(-count // (2 * lanes)) * 2 * lanes), np.float32)
        padded[:, :count] = vectors.T
        kernel = Kernel("subgraph.ops.ml.svm_kernels", "distances", lanes=lanes)
        table = low.weight(f"ml vectors {lanes}", contiguous_array, padded)
        arguments = DistancesArguments(
            x=x, y=products, table=table, samples=samples, features=features, vectors=count
        )
        flops = 3 * samples * features * count
        units = -(-samples // _UNIT_SAMPLES)
        low.emit(
            kernel, arguments, units, grain=_MIN_DISTANCE_UNITS, flops=flops, bytes=products.nbytes
        )
    else:
        delegate(low, "Gemm", [x, weight_operand(low, "vectors", vectors)], products, transB=1)
    e = Expression()
    value = e.input("float32")
    if svm.kernel == "RBF":
        value = e("exp", e("mul", value, e.number(-gamma, "float32")))
    else:
        scaled = e("mul", value, e.number(gamma, "float32"))
        value = e("add", scaled, e.number(svm.offset, "float32"))
        value = e("tanh", value) if svm.kernel == "SIGMOID" else _power(e, value, svm.degree)
    emit_expression(low, e, [source(products)], [(e.cast(value, found.dtype), found)])


def _emit_linear_scores(
    low: Lowering, model: _ScoringSvm, x: Operand, scores: Operand, dtype: str
) -> bool:
    """Emit the scores of a linear machine; emit nothing and return False for another.

    Args:
        low: Where the steps go.
        model: The machine.
        x: Samples [samples, features].
        scores: The result [samples, scores], float32.
        dtype: In which products are added up, float32 or float64.
    """
    svm = model.svm
    if len(svm.vectors) and svm.kernel != "LINEAR":
        return False
    # With a linear kernel the sum over support vectors is one vector of weights, computed here
    # once.
    rows = model.rows @ svm.vectors.astype(np.float64) if len(svm.vectors) else model.rows
    found = scores if dtype == scores.dtype else temporary(low, dtype, scores.shape)
    emit_linear(low, cast_to(low, x, dtype), rows.astype(dtype), model.rho.astype(dtype), found)
    if found is not scores:
        emit_cast(low, found, scores)
    return True


@lowering("SVMRegressor", domain=ML, dtypes={"float32"})
def svm_regressor(node: Node, low: Lowering) -> None:
    """Lower SVMRegressor; with ``one_class`` the score is 1 or -1."""
    options, model = attributes(node), prepared(node, _regressor)
    x, y = samples_of(low), low.output()
    name = "NONE" if options["one_class"] else decoded(options["post_transform"])
    scores = scores_operand(low, name, y)
    if not _emit_linear_scores(low, model, x, scores, "float32"):
        found = temporary(low, "float32", (x.shape[0], len(model.svm.vectors)))
        _emit_kernel_function(low, model.svm, x, found)
        emit_linear(low, found, model.rows.astype(np.float32), model.rho, scores)
    if options["one_class"]:
        e = Expression()
        inside = e("gt", e.input("float32"), 0.0)
        one, other = e.number(1.0, "float32"), e.number(-1.0, "float32")
        emit_expression(
            low, e, [source(scores)], [(e("where", inside, one, other, dtype="float32"), y)]
        )
    else:
        emit_transform(low, name, scores, y)


@lowering("SVMClassifier", domain=ML, dtypes={"float32"})
def svm_classifier(node: Node, low: Lowering) -> None:
    """Lower SVMClassifier whose labels are numbers."""
    options, model = attributes(node), prepared(node, _classifier)
    x, y, name = samples_of(low), low.output(1), decoded(options["post_transform"])
    labels = np.array(options["classlabels_ints"] or (), np.int64)
    classes, pairs = len(options["vectors_per_class"]), len(model.rows)
    samples = x.shape[0]
    a, b = (np.array(options[f"prob_{which}"] or (), np.float32) for which in "ab")
    if options["classlabels_strings"] or len(labels) != classes:
        raise Unsupported("string labels")
    if (
        len(a) not in (0, pairs)
        or len(a) != len(b)
        or y.shape != (samples, classes if a.size or classes == 2 else pairs)
    ):
        raise Unsupported(f"{len(a)} and {len(b)} probabilities for {pairs} pairs")
    if not a.size and classes == 2 and name != "NONE":
        raise Unsupported("a transform of the one score of two classes")
    scores = temporary(low, "float32", (samples, pairs))
    if not _emit_linear_scores(low, model, x, scores, "float64"):
        _emit_pair_scores(low, model, x, scores)
    winners = temporary(low, "int64", (samples,))
    arguments = VotesArguments(
        scores=scores,
        winners=winners,
        classes=classes,
        pairs=pairs,
        **low.worker_scratch(8 * classes),
    )
    kernel = Kernel("subgraph.ops.ml.svm_kernels", "votes")
    low.emit(kernel, arguments, samples, grain=_MIN_SAMPLES_OF_VOTES, bytes=scores.nbytes)
    emit_labels(low, winners, labels)
    if a.size:
        probabilities = scores_operand(low, name, y)
        _emit_class_probabilities(low, scores, probabilities, (a, b), classes)
        emit_transform(low, name, probabilities, y)
    elif classes == 2:
        _emit_two_scores(low, scores, y)
    else:
        result = scores_operand(low, name, y)
        emit_cast(low, scores, result)
        emit_transform(low, name, result, y)


def _emit_pair_scores(low: Lowering, model: _ScoringSvm, x: Operand, scores: Operand) -> None:
    """Emit the scores of pairs, each a sum over the vectors of its two classes."""
    found = temporary(low, "float64", (x.shape[0], len(model.svm.vectors)))
    _emit_kernel_function(low, model.svm, x, found)
    rows, rho = np.ascontiguousarray(model.rows), model.rho.astype(np.float64)
    arguments = PairScoresArguments(
        products=found,
        scores=scores,
        coefficients=low.weight("svm rows", contiguous_array, rows),
        constants=low.weight("svm constants", contiguous_array, rho),
        ends=low.weight("svm ends", contiguous_array, model.ends),
        classes=len(model.ends) - 1,
        vectors=len(model.svm.vectors),
    )
    kernel = Kernel("subgraph.ops.ml.svm_kernels", "pair_scores", lanes=low.lanes("float64"))
    flops = 2 * x.shape[0] * model.rows.size
    grain = _MIN_SAMPLES_OF_SCORES
    low.emit(kernel, arguments, x.shape[0], grain=grain, flops=flops, bytes=found.nbytes)


def _emit_two_scores(low: Lowering, score: Operand, y: Operand) -> None:
    """Emit the scores of two classes from one: its negative, and itself."""
    e = Expression()
    value, sign = e.input("float32"), e.input("float32")
    signs = source(weight_operand(low, "signs", np.array([-1, 1], np.float32)))
    emit_expression(low, e, [source(score), signs], [(e("mul", value, sign), y)])


def _emit_class_probabilities(
    low: Lowering, scores: Operand, y: Operand, factors: Sequence[Array], classes: int
) -> None:
    """Emit the probability of each class.

    Args:
        low: Where the steps go.
        scores: Of pairs of classes.
        y: Probabilities [samples, classes].
        factors: ``prob_a`` and ``prob_b``: 1 - the probability of the first class of a pair is
            ``sigmoid(a * score + b)`` (Platt).
        classes: Number of classes.
    """
    a, b = (source(weight_operand(low, name, f)) for name, f in zip("ab", factors, strict=True))
    e = Expression()
    value, factor, added = (e.input("float32") for _ in range(3))
    other = e("sigmoid", e("add", e("mul", value, factor), added))
    one = e.cast(e("sub", e.number(1.0, "float32"), other), "float64")
    # The iteration divides by sums of squares of these; probabilities of exactly 0 or 1 could make
    # them 0.
    bounded = e("max", e("min", one, 1 - LEAST_PROBABILITY), LEAST_PROBABILITY)
    each = temporary(low, "float64", scores.shape)
    emit_expression(low, e, [source(scores), a, b], [(bounded, each)])
    scratch = low.worker_scratch(8 * classes * (classes + 2))
    arguments = ProbabilitiesArguments(pairs=each, y=y, classes=classes, **scratch)
    kernel = Kernel("subgraph.ops.ml.svm_kernels", "class_probabilities")
    low.emit(kernel, arguments, scores.shape[0], grain=_MIN_SAMPLES_OF_SCORES, bytes=y.nbytes)
