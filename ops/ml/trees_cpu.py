"""Tree ensembles of ai.onnx.ml on the CPU device.

All comparisons are rewritten as ``x <= threshold``, with a child of its own for NaN. Trees that
compare with equality or with sets, aggregate by minimum or maximum, or work in double precision,
run on the reference.
"""

from __future__ import annotations

from typing import NamedTuple

import attrs
import numpy as np

from subgraph.engine.planner.constants import contiguous_array
from subgraph.engine.planner.lowering import Lowering, Unsupported, lowering
from subgraph.engine.planner.operands import Weight
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.graph import Node
from subgraph.graph.types import Array
from subgraph.operators.reference import attributes
from subgraph.operators.requirements import decoded

from .arguments import BLOCK_SAMPLES, NODE_BYTES, EnsembleArguments
from .dense_cpu import emit_transform, scores_operand
from .scores import ML, prepared
from .trees import (
    AGGREGATES,
    GT,
    GTE,
    LEAF,
    LEQ,
    LT,
    TRANSFORMS,
    Forest,
    ensemble_forest,
    node_list_forest,
    numbers_of,
)


@attrs.frozen(eq=False)
class _PackedForest:
    """A forest as the kernel reads it (``trees_kernels.py``), and what lowerings ask of it.

    Attributes:
        nodes: All nodes, int32 [nodes, 6].
        roots: Root of each tree, in bytes from the first node.
        targets: Target of each vote.
        weights: Weight of each vote.
        targets_needed: Targets that there must be.
        one_target: All votes are for one target.
        positive: No weight is negative.
        nan_child: Some node has another child for NaN than for numbers above its threshold.
    """

    nodes: Array
    roots: Array
    targets: Array
    weights: Array
    targets_needed: int
    one_target: bool
    positive: bool
    nan_child: bool


class _Pair(NamedTuple):
    """How one score decides between two classes; see `EnsembleArguments`.

    Attributes:
        voted: The class that has all votes.
        second_above: Score above which a sample is of the second class.
        first_constant: The first class's score less ``first_factor * score``.
        first_factor: Factor of the score in the first class's.
    """

    voted: int = 0
    second_above: float = 0.0
    first_constant: float = 0.0
    first_factor: float = 0.0


def _pack(forest: Forest) -> _PackedForest:
    """Return a forest as the kernel reads it.

    Raises:
        Unsupported: The kernel cannot make its comparisons, or it is too large for int32.
    """
    inner = forest.modes != LEAF
    modes, splits = forest.modes[inner], forest.splits[inner]
    if not np.isin(modes, (LEQ, LT, GTE, GT)).all() or not np.isfinite(splits).all():
        raise Unsupported("trees that compare with equality, sets or infinities")
    if forest.splits.dtype != np.float32 or forest.weights.dtype != np.float32:
        raise Unsupported("trees in double precision")
    # x < s is x <= the float before s; x >= s and x > s are x < s and x <= s with children swapped.
    strict = np.isin(modes, (LT, GTE))
    thresholds = np.where(strict, np.nextafter(splits, np.float32(-np.inf)), splits)
    if not np.isfinite(thresholds).all():
        raise Unsupported("trees that compare with the lowest float")
    if max(NODE_BYTES * len(inner), len(forest.targets)) >= 1 << 31:
        raise Unsupported(f"trees of {len(inner)} nodes")
    swapped = np.isin(modes, (GTE, GT))
    on_false, on_true = NODE_BYTES * forest.children[:, inner]
    nodes = np.zeros((len(inner), 6), np.int32)
    nodes[inner, 0] = forest.features[inner]
    nodes[inner, 1] = thresholds.astype(np.float32).view(np.int32)
    nodes[inner, 2] = np.where(swapped, on_false, on_true)
    nodes[inner, 3] = np.where(swapped, on_true, on_false)
    nodes[inner, 4] = np.where(forest.missing[inner], on_true, on_false)
    leaves = np.flatnonzero(~inner)
    nodes[leaves, 1] = forest.first[leaves]
    # A leaf is its own child for every answer, which ends a traversal without another comparison of
    # modes.
    nodes[leaves, 2:5] = NODE_BYTES * leaves[:, None]
    nodes[leaves, 5] = np.diff(forest.first)[leaves]
    return _PackedForest(
        nodes=nodes,
        roots=(NODE_BYTES * forest.roots).astype(np.int32),
        targets=forest.targets.astype(np.int32),
        weights=forest.weights,
        targets_needed=int(forest.targets.max(initial=-1)) + 1,
        one_target=len(np.unique(forest.targets)) == 1,
        positive=bool(np.all(forest.weights >= 0)),
        nan_child=bool(np.any(nodes[inner, 4] != nodes[inner, 3])),
    )


def _packed(node: Node) -> _PackedForest:
    make = ensemble_forest if node.op_type == "TreeEnsemble" else node_list_forest
    return _pack(make(node))


@lowering("TreeEnsemble", domain=ML, dtypes={"float32"})
def tree_ensemble(node: Node, low: Lowering) -> None:
    """Lower TreeEnsemble."""
    options = attributes(node)
    aggregate, name = int(options["aggregate_function"]), int(options["post_transform"])
    if not 0 <= aggregate < len(AGGREGATES) or not 0 <= name < len(TRANSFORMS):
        raise Unsupported("a TreeEnsemble with an unknown aggregate or transform")
    packed = prepared(node, _packed)
    _emit(low, packed, AGGREGATES[aggregate], TRANSFORMS[name], np.zeros(0, np.float32))


@lowering("TreeEnsembleRegressor", domain=ML, dtypes={"float32"})
def tree_ensemble_regressor(node: Node, low: Lowering) -> None:
    """Lower TreeEnsembleRegressor."""
    options, packed = attributes(node), prepared(node, _packed)
    base = numbers_of(options, "base_values")
    _emit(
        low,
        packed,
        decoded(options["aggregate_function"]),
        decoded(options["post_transform"]),
        base,
    )


@lowering("TreeEnsembleClassifier", domain=ML, dtypes={"float32"})
def tree_ensemble_classifier(node: Node, low: Lowering) -> None:
    """Lower TreeEnsembleClassifier whose labels are numbers."""
    options, packed = attributes(node), prepared(node, _packed)
    base = numbers_of(options, "base_values")
    labels = np.array(options["classlabels_int64s"] or (), np.int64)
    if options["classlabels_strings"] or not labels.size:
        raise Unsupported("string labels")
    if len(labels) == 2 and packed.one_target and base.size < 2:
        _emit_pair(low, packed, decoded(options["post_transform"]), base, labels)
        return
    _emit(low, packed, "SUM", decoded(options["post_transform"]), base, labels)


def _emit_pair(
    low: Lowering, packed: _PackedForest, transform: str, base: Array, labels: Array
) -> None:
    """Emit two classes of which one has all votes, as the reference's ``_one_of_two``."""
    (voted,) = np.unique(packed.targets)
    second = 0.5 if packed.positive else 0.0
    if voted:
        _emit(low, packed, "SUM", transform, base, labels, _Pair(int(voted), second))
        return
    # The first class has 1 - score or, by the sign of weights or for LOGISTIC, -score; SOFTMAX is
    # not applied (see `two_scores`).
    ones = 1.0 if packed.positive and transform != "LOGISTIC" else 0.0
    if transform.startswith("SOFTMAX"):
        transform = "NONE"
    _emit(low, packed, "SUM", transform, base, labels, _Pair(int(voted), second, ones, -1.0))


def _emit(
    low: Lowering,
    packed: _PackedForest,
    aggregate: str,
    transform: str,
    base: Array,
    labels: Array | None = None,
    pair: _Pair | None = None,
) -> None:
    """Emit the kernel, and the transform of its scores.

    Args:
        low: Where the steps go.
        packed: The forest.
        aggregate: One of `AGGREGATES`.
        transform: The ``post_transform``.
        base: Base values: none, one for all targets, or one for each.
        labels: Of classifiers with integer labels, one for each class.
        pair: How one score decides between two classes, if it does.
    """
    x, y = low.input(0), low.output(0 if labels is None else 1)
    samples, features = (1, *x.shape)[-2:]
    count = y.shape[-1]
    if count < max(packed.targets_needed, 1) or (labels is not None and len(labels) != count):
        raise Unsupported(f"votes for {packed.targets_needed} targets of {count}")
    if base.size not in (0, 1, count) or base.dtype != np.float32:
        raise Unsupported(f"{base.size} base values for {count} targets")
    if aggregate not in ("SUM", "AVERAGE"):
        raise Unsupported(f"trees aggregated by {aggregate}")
    scores = scores_operand(low, transform, y)
    votes = np.broadcast_to(base if base.size else np.zeros(1, np.float32), (count,))

    def weight(name: str, array: Array) -> Weight:
        return low.weight(f"trees {name}", contiguous_array, array)

    arguments = EnsembleArguments(
        x=x,
        scores=scores,
        labels=0 if labels is None else low.output(0),
        nodes=weight("nodes", packed.nodes),
        roots=weight("roots", packed.roots),
        targets=weight("targets", packed.targets),
        weights=weight("weights", packed.weights),
        base=weight("base", votes),
        class_labels=weight("labels", np.zeros(1, np.int64) if labels is None else labels),
        samples=samples,
        features=features,
        count=count,
        trees=len(packed.roots),
        divisor=float(max(len(packed.roots), 1)) if aggregate == "AVERAGE" else 1.0,
        base_votes=int(base.size > 0),
        **low.worker_scratch(BLOCK_SAMPLES * count),
        **(pair or _Pair())._asdict(),
    )
    results = "scores" if labels is None else "labels" if pair is None else "pair"
    kernel = Kernel(
        "subgraph.ops.ml.trees_kernels", "ensemble", results=results, nan_child=packed.nan_child
    )
    low.emit(kernel, arguments, -(-samples // BLOCK_SAMPLES), grain=1, bytes=x.nbytes + y.nbytes)
    emit_transform(low, transform, scores, y)
