"""Reference of TreeEnsemble, TreeEnsembleRegressor and TreeEnsembleClassifier.

The attributes of both forms are converted to one `Forest`, which all samples traverse at once.
onnx.reference lacks transforms, aggregates, integer labels and the double attributes of version 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from subgraph.errors import ShapeError
from subgraph.graph.graph import Node
from subgraph.graph.limits import check_memory
from subgraph.graph.types import Array
from subgraph.operators.reference import attributes
from subgraph.operators.requirements import require_choices

from .scores import label_array, prepared, rows, transformed, two_scores

# Modes of nodes, numbered as TreeEnsemble numbers them; LEAF is this file's own.
LEQ, LT, GTE, GT, EQ, NEQ, MEMBER, LEAF = range(8)
_MODES = {
    **{"BRANCH_LEQ": LEQ, "BRANCH_LT": LT, "BRANCH_GTE": GTE, "BRANCH_GT": GT},
    **{"BRANCH_EQ": EQ, "BRANCH_NEQ": NEQ, "LEAF": LEAF},
}
_COMPARE: dict[int, Any] = {
    **{LEQ: np.less_equal, LT: np.less, GTE: np.greater_equal, GT: np.greater},
    **{EQ: np.equal, NEQ: np.not_equal},
}
# As TreeEnsemble numbers them.
AGGREGATES = ("AVERAGE", "SUM", "MIN", "MAX")
TRANSFORMS = ("NONE", "SOFTMAX", "LOGISTIC", "SOFTMAX_ZERO", "PROBIT")


@attrs.frozen(eq=False)
class Forest:
    """All nodes of all trees. A leaf has a range of the votes, each a weight for a target.

    Attributes:
        roots: Root of each tree, an index of a node.
        features: The feature that a node compares, 0 for leaves.
        modes: How it compares: `LEQ` ... `MEMBER`; `LEAF` for leaves.
        splits: The number that it compares with.
        children: Next node if the comparison is false, and if it is true, [2, nodes].
        missing: Whether the comparison is true for NaN.
        members: The sets of numbers of `MEMBER` nodes, by node.
        first: First vote of each node; one entry more than nodes.
        targets: Target of each vote.
        weights: Weight of each vote.
    """

    roots: Array
    features: Array
    modes: Array
    splits: Array
    children: Array
    missing: Array
    members: Mapping[int, Array]
    first: Array
    targets: Array
    weights: Array

    def leaves(self, x: Array) -> Array:
        """Return the leaf that each sample reaches in each tree, [samples, trees]."""
        nodes = np.repeat(self.roots[None], len(x), axis=0)
        while True:
            sample, tree = np.nonzero(self.modes[nodes] != LEAF)
            if not sample.size:
                return nodes
            node = nodes[sample, tree]
            value = x[sample, self.features[node]]
            answer = self._comparisons(node, value) | (np.isnan(value) & self.missing[node])
            nodes[sample, tree] = self.children[answer.astype(int), node]

    def checked(self) -> Forest:
        """Return the forest, whose trees have no cycles and no negative features or targets.

        Nodes are removed from the roots on, as by Kahn's algorithm for a topological order; nodes
        that remain lie on cycles.

        Raises:
            ShapeError: A tree has a cycle, or a feature or target is negative.
        """
        inner = self.modes != LEAF
        parents = np.bincount(self.children[:, inner].reshape(-1), minlength=len(inner))
        front, removed = np.flatnonzero(parents == 0), 0
        while front.size:
            removed += front.size
            children = self.children[:, front[inner[front]]].reshape(-1)
            # Two nodes of the front can share a child. `subtract.at` counts each of them; an
            # indexed subtraction would count the child once.
            np.subtract.at(parents, children, 1)
            children = np.unique(children)
            front = children[parents[children] == 0]
        if removed < len(inner):
            raise ShapeError("the nodes of a tree form a cycle")
        for name, numbers in (("feature", self.features), ("target", self.targets)):
            if numbers.size and numbers.min() < 0:
                raise ShapeError(f"a tree has {name} {numbers.min()}; it must not be negative")
        return self

    def _comparisons(self, node: Array, value: Array) -> Array:
        """Return the comparison of each node with its value."""
        modes, answer = self.modes[node], np.zeros(len(node), bool)
        for mode in np.unique(modes):
            here = modes == mode
            if mode != MEMBER:
                answer[here] = _COMPARE[int(mode)](value[here], self.splits[node[here]])
                continue
            for each in np.unique(node[here]):
                these = here & (node == each)
                answer[these] = np.isin(value[these], self.members[int(each)])
        return answer

    def votes(self, x: Array, count: int, aggregate: str) -> tuple[Array, Array]:
        """Return the aggregated votes for targets.

        Args:
            x: Samples [samples, features].
            count: Number of targets.
            aggregate: How the votes of trees are combined, one of `AGGREGATES`.

        Returns:
            Scores [samples, count], 0 without votes; and whether there was a vote for each.
        """
        check_memory(16 * len(x) * count, f"scores of {len(x)} samples for {count} targets")
        scores = np.zeros((len(x), count), self.weights.dtype)
        voted = np.zeros((len(x), count), bool)
        counts = np.diff(self.first)
        for leaves in self.leaves(x).T:
            for k in range(int(counts[leaves].max(initial=0))):
                (sample,) = np.nonzero(counts[leaves] > k)
                vote = self.first[leaves[sample]] + k
                at = sample, self.targets[vote]
                weight = self.weights[vote]
                if aggregate == "MIN":
                    weight = np.where(voted[at], np.minimum(scores[at], weight), weight)
                elif aggregate == "MAX":
                    weight = np.where(voted[at], np.maximum(scores[at], weight), weight)
                else:
                    weight = scores[at] + weight
                scores[at], voted[at] = weight, True
        if aggregate == "AVERAGE":
            scores /= max(len(self.roots), 1)
        return scores, voted


# --- version 5: interior nodes and leaves apart --------------------------------------------------


def ensemble_forest(node: Node) -> Forest:
    """Return the trees of a TreeEnsemble, whose leaves are numbered after its interior nodes."""
    options = attributes(node)
    for name, value in options.items():
        shape: tuple[int, ...] = getattr(value, "shape", (0,))  # other attributes are no tensors
        if len(shape) != 1:
            raise ShapeError(f"{name} has shape {list(shape)}; it must be a list")
    modes = np.asarray(options["nodes_modes"]).reshape(-1).astype(np.int64)
    splits = np.asarray(options["nodes_splits"]).reshape(-1)
    weights = np.asarray(options["leaf_weights"]).reshape(-1)
    count, leaves = len(modes), len(weights)
    _check_lengths(options, "nodes_", count, splits)
    if np.any((modes < 0) | (modes > MEMBER)):
        raise ShapeError(f"nodes_modes holds {modes.max()}")
    children = [
        _children(options, f"nodes_{way}nodeids", options[f"nodes_{way}leafs"], count, leaves)
        for way in ("false", "true")
    ]
    if len(options["leaf_targetids"]) != leaves:
        raise ShapeError(
            f"{len(options['leaf_targetids'])} leaf_targetids for {leaves} leaf_weights"
        )
    filled = np.zeros(leaves, np.int64)
    return Forest(
        roots=_within(np.array(options["tree_roots"], np.int64), count, "tree_roots"),
        features=np.append(np.array(options["nodes_featureids"], np.int64), filled),
        modes=np.append(modes, filled + LEAF),
        splits=np.append(splits, filled.astype(splits.dtype)),
        children=np.append(children, [filled, filled], axis=1),
        missing=np.append(_flags(options["nodes_missing_value_tracks_true"], count), filled > 0),
        members=_members(modes, options["membership_values"]),
        first=np.append(np.zeros(count, np.int64), np.arange(leaves + 1)),
        targets=np.array(options["leaf_targetids"], np.int64),
        weights=weights,
    ).checked()


def _children(
    options: Mapping[str, Any], name: str, are_leaves: Sequence[int], count: int, leaves: int
) -> Array:
    """Return the nodes that an attribute names, leaves being numbered after interior nodes.

    Args:
        options: The node's attributes.
        name: The attribute.
        are_leaves: Whether each entry is the number of a leaf (1), not of an interior node.
        count: Number of interior nodes.
        leaves: Number of leaves.
    """
    indices, leaf = np.array(options[name], np.int64), np.array(are_leaves, bool)
    _within(indices[leaf], leaves, name)
    _within(indices[~leaf], count, name)
    return np.where(leaf, indices + count, indices)


def _within(indices: Array, count: int, name: str) -> Array:
    """Return indices, all in [0, count); ``name`` is what errors call them."""
    if indices.size and not 0 <= indices.min() <= indices.max() < count:
        raise ShapeError(f"{name} points outside of {count}")
    return indices


def _flags(listed: Sequence[int] | None, count: int) -> Array:
    flags = np.array(listed or [0] * count, bool)
    if len(flags) != count:
        raise ShapeError(f"{len(flags)} flags for {count} nodes")
    return flags


def _members(modes: Array, listed: Any) -> dict[int, Array]:
    """Return the sets of `MEMBER` nodes, by node; NaN ends each set in the attribute."""
    (nodes,) = np.nonzero(modes == MEMBER)
    if not nodes.size:
        return {}
    values = np.array([] if listed is None else listed).reshape(-1)
    (ends,) = np.nonzero(np.isnan(values))
    sets = np.split(values, ends + 1)
    if len(ends) < len(nodes):
        raise ShapeError(f"{len(ends)} sets for {len(nodes)} nodes that compare with sets")
    return {int(p): s[~np.isnan(s)] for p, s in zip(nodes, sets, strict=False)}


def _check_lengths(options: Mapping[str, Any], prefix: str, count: int, splits: Array) -> None:
    """Require that all attributes of nodes have ``count`` entries."""
    names = ("featureids", "truenodeids", "falsenodeids", "trueleafs", "falseleafs")
    lengths = {name: len(options[prefix + name]) for name in names} | {"splits": len(splits)}
    wrong = {name: length for name, length in lengths.items() if length != count}
    if wrong:
        raise ShapeError(f"{count} modes, but {wrong}")


def tree_ensemble(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the scores of each sample in the samples' dtype."""
    options = attributes(node)
    forest = prepared(node, ensemble_forest)
    x: Array = inputs[0]
    aggregate, name = int(options["aggregate_function"]), int(options["post_transform"])
    if not 0 <= aggregate < len(AGGREGATES) or not 0 <= name < len(TRANSFORMS):
        raise ShapeError(f"aggregate_function={aggregate}, post_transform={name} are unknown")
    targets = options["n_targets"]
    count = int(forest.targets.max(initial=-1)) + 1 if targets is None else int(targets)
    scores, _ = forest.votes(x, count, AGGREGATES[aggregate])
    if name:
        scores = transformed(scores, TRANSFORMS[name])
    return [scores.astype(x.dtype)]


# --- versions 1 to 4: all nodes in one list, votes by node -------------------------------------


def node_list_forest(node: Node) -> Forest:
    """Return the trees of a TreeEnsembleRegressor or TreeEnsembleClassifier.

    Its nodes are one list, named by tree and number; votes name a node.
    """
    options = attributes(node)
    prefix = "target" if node.op_type == "TreeEnsembleRegressor" else "class"
    trees, numbers = options["nodes_treeids"] or (), options["nodes_nodeids"] or ()
    count = len(numbers)
    index_of = {key: k for k, key in enumerate(zip(trees, numbers, strict=True))}
    require_choices(node, "nodes_modes", _MODES)
    modes = np.array([_MODES[mode] for mode in options["nodes_modes"] or ()], np.int64)
    if len(index_of) < count or len(modes) != count:
        raise ShapeError("a node of the trees is listed twice or has no mode")
    features = np.array(options["nodes_featureids"] or (), np.int64)
    if len(features) != count:
        raise ShapeError(f"{len(features)} nodes_featureids for {count} nodes")
    splits = numbers_of(options, "nodes_values")
    inner = modes != LEAF
    children = np.zeros((2, count), np.int64)
    for row, way in enumerate(("nodes_falsenodeids", "nodes_truenodeids")):
        if len(options[way] or ()) != count:
            raise ShapeError(f"{len(options[way] or ())} {way} for {count} nodes")
        for k in np.nonzero(inner)[0]:
            # A child that does not exist becomes -1, which the check of ranges below reports.
            children[row, k] = index_of.get((trees[k], options[way][k]), -1)
    _within(children[:, inner], count, "a child")
    is_root = np.ones(count, bool)
    is_root[children[:, inner].reshape(-1)] = False
    keys = zip(options[f"{prefix}_treeids"] or (), options[f"{prefix}_nodeids"] or (), strict=True)
    owners = _within(np.array([index_of.get(key, -1) for key in keys], np.int64), count, "a vote")
    # Votes of a node must be adjacent; a stable order keeps the order of their additions.
    order = np.argsort(owners, kind="stable")
    votes = np.bincount(owners, minlength=count) if owners.size else np.zeros(count, np.int64)
    targets = np.array(options[f"{prefix}_ids"] or (), np.int64)
    weights = numbers_of(options, f"{prefix}_weights")
    if not len(owners) == len(targets) == len(weights) or len(splits) != count:
        raise ShapeError("votes or nodes have attributes of different lengths")
    # Other nodes that no node leads to, behind the first of their tree, are never visited.
    (orphans,) = np.nonzero(is_root)
    tree_of_orphan = np.array(trees, np.int64)[orphans]
    first_of_tree = np.unique(tree_of_orphan, return_index=True)[1]
    return Forest(
        roots=np.sort(orphans[first_of_tree]),
        features=np.where(inner, features, 0),
        modes=modes,
        splits=splits,
        children=children,
        missing=_flags(options["nodes_missing_value_tracks_true"], count),
        members={},
        first=np.append(0, np.cumsum(votes)),
        targets=targets[order],
        weights=weights[order],
    ).checked()


def numbers_of(options: Mapping[str, Any], name: str) -> Array:
    """Return float attributes: float32, or the dtype of a tensor (version 3)."""
    tensor = options.get(f"{name}_as_tensor")
    if tensor is not None:
        return np.asarray(tensor).reshape(-1)
    return np.array(options[name] or (), np.float32)


def _in_dtype_of(forest: Forest, x: Array) -> Forest:
    """Return the forest with float64 weights if the samples are float64."""
    if x.dtype != np.float64 or forest.weights.dtype == np.float64:
        return forest
    return attrs.evolve(forest, weights=forest.weights.astype(np.float64))


def tree_ensemble_regressor(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the scores of each sample in float32, the operator's only output type."""
    options = attributes(node)
    x = rows(inputs[0])
    forest = _in_dtype_of(prepared(node, node_list_forest), x)
    targets = options["n_targets"]
    count = int(forest.targets.max(initial=0)) + 1 if targets is None else int(targets)
    scores, _ = forest.votes(x, count, str(options["aggregate_function"]))
    base = numbers_of(options, "base_values")
    if base.size not in (0, 1, count):
        raise ShapeError(f"{base.size} base values for {count} targets")
    scores = scores + base.astype(scores.dtype) if base.size else scores
    return [transformed(scores, str(options["post_transform"]))]


def tree_ensemble_classifier(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the label and the scores of each sample; scores are float32."""
    options = attributes(node)
    x = rows(inputs[0])
    forest = _in_dtype_of(prepared(node, node_list_forest), x)
    labels = label_array(options["classlabels_strings"], options["classlabels_int64s"])
    name, base = str(options["post_transform"]), numbers_of(options, "base_values")
    scores, voted = forest.votes(x, len(labels), "SUM")
    if len(labels) == 2 and len(np.unique(forest.targets)) == 1 and base.size < 2:
        return _one_of_two(forest, scores, base, labels, name)
    if base.size not in (0, 1, len(labels)):
        raise ShapeError(f"{base.size} base values for {len(labels)} classes")
    if base.size:
        scores, voted = scores + base.astype(scores.dtype), np.ones_like(voted)
    # A class without votes wins only where no class has any.
    best = np.where(voted | ~voted.any(axis=1, keepdims=True), scores, -np.inf).argmax(axis=1)
    return [labels[best], transformed(scores, name)]


def _one_of_two(
    forest: Forest, scores: Array, base: Array, labels: Array, name: str
) -> Sequence[Any]:
    """Return labels and scores where all votes are for one of two classes."""
    voted = int(forest.targets[0])
    scores[:, voted] += base.astype(scores.dtype).sum()
    positive = bool(np.all(forest.weights >= 0))
    second = scores[:, voted] > (0.5 if positive else 0)
    found = labels[second.astype(int)]
    if voted:
        return [found, transformed(scores, name)]
    # As in ONNX Runtime: votes for the first class alone count for the second.
    return [found, two_scores(scores[:, 0], name, signed=not positive)]
