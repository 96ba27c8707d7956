"""Tree ensembles of ai.onnx.ml on the CPU device: what their leaves add up to.

All comparisons become one: ``x <= threshold``, with NaN led on its own way. Trees that compare with
equality or with sets, take the least or the highest vote, or work in double precision, run on the
reference.
"""

from __future__ import annotations

from typing import NamedTuple

import attrs
import numpy as np

from subgraph.engine.planner.constants import contiguous_array
from subgraph.engine.planner.lowering import Lowering, Unsupported, Weight, lowering
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.graph import Node
from subgraph.graph.types import Array
from subgraph.operators.reference import attributes
from subgraph.ops.composite.cpu import delegate
from subgraph.ops.elementwise.cpu import temporary
from subgraph.ops.elementwise.expressions import text

from .arguments import EnsembleArguments
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
    ensemble_of,
    numbers_of,
    old_forest_of,
)
from .trees_layout import BLOCK, RECORD

_DELEGATES = {"LOGISTIC": "Sigmoid", "SOFTMAX": "Softmax"}


@attrs.frozen(eq=False)
class _Packed:
    """A forest as the kernel reads it: see ``trees_kernels.py``."""

    nodes: Array
    roots: Array
    targets: Array
    weights: Array
    features: int
    voted: int
    alone: bool
    positive: bool
    lost: bool


class _Pair(NamedTuple):
    """How one score decides between two classes: see the attributes of `EnsembleArguments`."""

    voted: int
    second_above: float
    first_constant: float
    first_factor: float


def _pack(forest: Forest) -> _Packed:
    inner = forest.modes != LEAF
    modes, splits = forest.modes[inner], forest.splits[inner]
    if not np.isin(modes, (LEQ, LT, GTE, GT)).all() or not np.isfinite(splits).all():
        raise Unsupported("trees that compare with equality, sets or infinities")
    if forest.splits.dtype != np.float32 or forest.weights.dtype != np.float32:
        raise Unsupported("trees in double precision")
    # x < s is x <= the number before s; x >= s and x > s are the opposites of x < s and x <= s.
    before = np.isin(modes, (LT, GTE))
    thresholds = np.where(before, np.nextafter(splits, np.float32(-np.inf)), splits)
    if not np.isfinite(thresholds).all():
        raise Unsupported("trees that compare with the lowest number")
    if max(RECORD * len(inner), len(forest.targets)) >= 1 << 31:
        raise Unsupported(f"trees of {len(inner)} nodes")
    swapped = np.isin(modes, (GTE, GT))
    on_false, on_true = RECORD * forest.children[:, inner]
    nodes = np.zeros((len(inner), 6), np.int32)
    nodes[inner, 0] = forest.features[inner]
    nodes[inner, 1] = thresholds.astype(np.float32).view(np.int32)
    nodes[inner, 2] = np.where(swapped, on_false, on_true)
    nodes[inner, 3] = np.where(swapped, on_true, on_false)
    nodes[inner, 4] = np.where(forest.missing[inner], on_true, on_false)
    leaves = np.flatnonzero(~inner)
    nodes[leaves, 1] = forest.first[leaves]
    nodes[leaves, 2:5] = RECORD * leaves[:, None]
    nodes[leaves, 5] = np.diff(forest.first)[leaves]
    return _Packed(
        nodes=nodes,
        roots=(RECORD * forest.roots).astype(np.int32),
        targets=forest.targets.astype(np.int32),
        weights=forest.weights,
        features=int(forest.features[inner].max(initial=0)) + 1,
        voted=int(forest.targets.max(initial=-1)) + 1,
        alone=len(np.unique(forest.targets)) == 1,
        positive=bool(np.all(forest.weights >= 0)),
        lost=bool(np.any(nodes[inner, 4] != nodes[inner, 3])),
    )


def _packed_ensemble(node: Node) -> _Packed:
    return _pack(ensemble_of(node))


def _packed_old(node: Node) -> _Packed:
    return _pack(old_forest_of(node))


@lowering("TreeEnsemble", domain=ML, dtypes={"float32"})
def tree_ensemble(node: Node, low: Lowering) -> None:
    """Lower TreeEnsemble."""
    given = attributes(node)
    aggregate, name = int(given["aggregate_function"]), int(given["post_transform"])
    if not 0 <= aggregate < len(AGGREGATES) or not 0 <= name < len(TRANSFORMS):
        raise Unsupported("a TreeEnsemble with unknown numbers")
    packed = prepared(node, _packed_ensemble)
    _emit(low, packed, AGGREGATES[aggregate], TRANSFORMS[name], np.zeros(0, np.float32))


@lowering("TreeEnsembleRegressor", domain=ML, dtypes={"float32"})
def tree_ensemble_regressor(node: Node, low: Lowering) -> None:
    """Lower TreeEnsembleRegressor."""
    given, packed = attributes(node), prepared(node, _packed_old)
    base = numbers_of(given, "base_values")
    _emit(low, packed, text(given["aggregate_function"]), text(given["post_transform"]), base)


@lowering("TreeEnsembleClassifier", domain=ML, dtypes={"float32"})
def tree_ensemble_classifier(node: Node, low: Lowering) -> None:
    """Lower TreeEnsembleClassifier whose labels are numbers."""
    given, packed = attributes(node), prepared(node, _packed_old)
    base = numbers_of(given, "base_values")
    labels = np.array(given["classlabels_int64s"] or (), np.int64)
    if given["classlabels_strings"] or not labels.size:
        raise Unsupported("labels that are strings")
    if len(labels) == 2 and packed.alone and base.size < 2:
        _emit_pair(low, packed, text(given["post_transform"]), base, labels)
        return
    _emit(low, packed, "SUM", text(given["post_transform"]), base, labels)


def _emit_pair(low: Lowering, packed: _Packed, transform: str, base: Array, labels: Array) -> None:
    """Emit two classes that one score tells apart, as the reference's ``_one_of_two`` has it."""
    (voted,) = np.unique(packed.targets)
    second = 0.5 if packed.positive else 0.0
    if voted:
        _emit(low, packed, "SUM", transform, base, labels, _Pair(int(voted), second, 0.0, 0.0))
        return
    # A sigmoid takes the opposite score; no other transform is applied to a lone first score.
    ones = 1.0 if packed.positive and transform != "LOGISTIC" else 0.0
    if transform.startswith("SOFTMAX"):
        transform = "NONE"
    _emit(low, packed, "SUM", transform, base, labels, _Pair(int(voted), second, ones, -1.0))


def _emit(
    low: Lowering,
    packed: _Packed,
    aggregate: str,
    transform: str,
    base: Array,
    labels: Array | None = None,
    pair: _Pair | None = None,
) -> None:
    """Emit the kernel and what becomes of its scores."""
    x, y = low.input(0), low.output(0 if labels is None else 1)
    samples, features = (1, *x.shape)[-2:]
    count = y.shape[-1]
    if x.rank not in (1, 2) or y.shape != (samples, count) or features < packed.features:
        raise Unsupported(f"trees over samples of shape {x.shape}")
    if count < max(packed.voted, 1) or (labels is not None and len(labels) != count):
        raise Unsupported(f"votes for {packed.voted} targets of {count}")
    if base.size not in (0, 1, count) or base.dtype != np.float32:
        raise Unsupported(f"{base.size} base values for {count} targets")
    if aggregate not in ("SUM", "AVERAGE") or transform not in ("NONE", *_DELEGATES):
        raise Unsupported(f"trees with {aggregate} and {transform}")
    step = "" if transform == "SOFTMAX" and count == 1 else _DELEGATES.get(transform, "")
    scores = temporary(low, "float32", y.shape) if step else y
    filled = np.broadcast_to(base if base.size else np.zeros(1, np.float32), (count,))

    def weight(name: str, array: Array) -> Weight:
        return low.weight(f"trees {name}", contiguous_array, np.ascontiguousarray(array))

    scratch = low.scratch(BLOCK * count, per_worker=True)
    arguments = EnsembleArguments(
        x=x,
        scores=scores,
        labels=0 if labels is None else low.output(0),
        nodes=weight("nodes", packed.nodes),
        roots=weight("roots", packed.roots),
        targets=weight("targets", packed.targets),
        weights=weight("weights", packed.weights),
        base=weight("base", filled),
        class_labels=weight("labels", np.zeros(1, np.int64) if labels is None else labels),
        samples=samples,
        features=features,
        count=count,
        trees=len(packed.roots),
        divisor=float(max(len(packed.roots), 1)) if aggregate == "AVERAGE" else 1.0,
        base_votes=int(base.size > 0),
        scratch=scratch,
        scratch_bytes=scratch.nbytes,
        voted=0 if pair is None else pair.voted,
        second_above=0.0 if pair is None else pair.second_above,
        first_constant=0.0 if pair is None else pair.first_constant,
        first_factor=0.0 if pair is None else pair.first_factor,
    )
    found = "scores" if labels is None else "labels" if pair is None else "pair"
    kernel = Kernel("subgraph.ops.ml.trees_kernels", "ensemble", found=found, lost=packed.lost)
    low.emit(kernel, arguments, -(-samples // BLOCK), grain=1, bytes=x.nbytes + y.nbytes)
    if step:
        delegate(low, step, [scores], y)
