"""Output types of the operators of ai.onnx.ml for which ONNX has no rule, or a vaguer one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from subgraph.graph.graph import Node
from subgraph.graph.types import Dim, TensorType, ValueType
from subgraph.operators.reference import attributes

Types = Sequence[ValueType | None]
Values = Sequence[Any]


def _shape(type_: ValueType | None) -> tuple[Dim, ...] | None:
    return type_.shape if isinstance(type_, TensorType) else None


def _samples(types: Types) -> Dim:
    """Return how many rows of features the first input has."""
    shape = _shape(types[0])
    return None if shape is None else 1 if len(shape) == 1 else shape[0] if shape else None


def _features(types: Types) -> Dim:
    shape = _shape(types[0])
    return shape[-1] if shape else None


def scaled(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Give float32 of the input's shape."""
    return [TensorType("float32", _shape(types[0]))]


def imputed(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Give the input's type."""
    return [types[0]]


def side_by_side(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Give rows as wide as all inputs together."""
    widths = node.attrs.get("inputdimensions")
    if widths is None:
        shapes = [_shape(type_) for type_ in types]
        widths = [shape[-1] if shape else None for shape in shapes]
    known = [width for width in widths if isinstance(width, int)]
    total = sum(known) if len(known) == len(widths) else None
    return [TensorType("float32", (_samples(types), total))]


def extracted(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Give an element of each row for each place; what has no rows is one."""
    x, places = types[0], _shape(types[1])
    rows = _shape(x)
    if not isinstance(x, TensorType) or not rows or places is None:
        return [TensorType(x.dtype) if isinstance(x, TensorType) else None]
    several = [dim for dim in places if dim != 1]
    count: Dim = several[0] if len(several) == 1 else None
    if all(isinstance(dim, int) for dim in several):
        count = math.prod(dim for dim in several if isinstance(dim, int))
    return [TensorType(x.dtype, (*(rows[:-1] or (1,)), count))]


def linear_scores(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Give a score for each target."""
    return [TensorType("float32", (_samples(types), int(attributes(node)["targets"])))]


def machine_score(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Give one score."""
    return [TensorType("float32", (_samples(types), 1))]


def tree_scores(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Give a score for each target; how many there are may have to be counted."""
    given = attributes(node)
    targets = given["n_targets"]
    count = max(given["target_ids"] or (0,)) + 1 if targets is None else targets
    return [TensorType("float32", (_samples(types), int(count)))]


def _labelled(node: Node, types: Types, count: Dim) -> list[ValueType | None]:
    """Return the types of a label and ``count`` scores for each sample."""
    given, samples = attributes(node), _samples(types)
    label = "string" if given["classlabels_strings"] else "int64"
    return [TensorType(label, (samples,)), TensorType("float32", (samples, count))]


def _classes(node: Node, numbers: str) -> int:
    given = attributes(node)
    return len(given["classlabels_strings"] or given[numbers] or ())


def tree_classes(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Give the label and a score for each class."""
    return _labelled(node, types, _classes(node, "classlabels_int64s"))


def linear_classes(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Give the label and the scores, two where one score tells two classes apart."""
    features = _features(types)
    count: Dim = None
    if isinstance(features, int):
        count = len(attributes(node)["coefficients"] or ()) // max(features, 1)
        count = 2 if count == 1 and _classes(node, "classlabels_ints") == 2 else count
    return _labelled(node, types, count)


def machine_classes(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Give the label, and probabilities of the classes or the scores of their pairs."""
    given, count = attributes(node), _classes(node, "classlabels_ints")
    pairs = bool(sum(given["vectors_per_class"] or ())) and not given["prob_a"] and count != 2
    return _labelled(node, types, count * (count - 1) // 2 if pairs else count)
