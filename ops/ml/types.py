"""Output types of the operators of ai.onnx.ml for which onnx has no rule, or one that says less.

All functions take the node, the types of its inputs, and the values of inputs, which none reads.
"""

from __future__ import annotations

import math

from subgraph.graph.graph import Node
from subgraph.graph.types import Dim, TensorType, ValueType
from subgraph.operators.reference import attributes
from subgraph.ops.elementwise.op import Types, Values, shape_of


def _samples(types: Types) -> Dim:
    """Return the number of samples, rows of the first input; a vector is one."""
    shape = shape_of(types[0])
    return None if shape is None else 1 if len(shape) == 1 else shape[0] if shape else None


def _features(types: Types) -> Dim:
    shape = shape_of(types[0])
    return shape[-1] if shape else None


def float32_type(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Return float32 of the input's shape.

    Args:
        node: Not used.
        types: Of the input.
        values: Not used.
    """
    return [TensorType("float32", shape_of(types[0]))]


def feature_vectorizer_types(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Return float32 rows as wide as all inputs together.

    Args:
        node: A FeatureVectorizer; ``inputdimensions`` are the widths of its inputs, if given.
        types: Of all inputs.
        values: Not used.
    """
    widths = node.attrs.get("inputdimensions")
    if widths is None:
        shapes = [shape_of(type_) for type_ in types]
        widths = [shape[-1] if shape else None for shape in shapes]
    known = [width for width in widths if isinstance(width, int)]
    total = sum(known) if len(known) == len(widths) else None
    return [TensorType("float32", (_samples(types), total))]


def array_feature_extractor_types(
    node: Node, types: Types, values: Values
) -> list[ValueType | None]:
    """Return the type of the chosen columns; a vector is one row.

    Args:
        node: Not used.
        types: Of the rows, and of the indices of columns.
        values: Not used.
    """
    x, indices = types[0], shape_of(types[1])
    rows = shape_of(x)
    if not isinstance(x, TensorType) or not rows or indices is None:
        return [TensorType(x.dtype) if isinstance(x, TensorType) else None]
    several = [dim for dim in indices if dim != 1]
    count: Dim = several[0] if len(several) == 1 else None
    if all(isinstance(dim, int) for dim in several):
        count = math.prod(dim for dim in several if isinstance(dim, int))
    return [TensorType(x.dtype, (*(rows[:-1] or (1,)), count))]


def linear_regressor_types(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Return the type of a score for each target.

    Args:
        node: A LinearRegressor.
        types: Of the samples.
        values: Not used.
    """
    return [TensorType("float32", (_samples(types), int(attributes(node)["targets"])))]


def svm_regressor_types(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Return the type of one score for each sample.

    Args:
        node: Not used.
        types: Of the samples.
        values: Not used.
    """
    return [TensorType("float32", (_samples(types), 1))]


def tree_regressor_types(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Return the type of a score for each target.

    Args:
        node: A TreeEnsembleRegressor; without ``n_targets``, its votes say how many there are.
        types: Of the samples.
        values: Not used.
    """
    options = attributes(node)
    targets = options["n_targets"]
    count = max(options["target_ids"] or (0,)) + 1 if targets is None else targets
    return [TensorType("float32", (_samples(types), int(count)))]


def _label_and_scores(node: Node, types: Types, count: Dim) -> list[ValueType | None]:
    """Return the types of a label and ``count`` scores for each sample."""
    options, samples = attributes(node), _samples(types)
    label = "string" if options["classlabels_strings"] else "int64"
    return [TensorType(label, (samples,)), TensorType("float32", (samples, count))]


def _class_count(node: Node, numbers: str) -> int:
    """Return the number of labels: strings, or integers in the attribute ``numbers``."""
    options = attributes(node)
    return len(options["classlabels_strings"] or options[numbers] or ())


def tree_classifier_types(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Return the types of the label and of a score for each class.

    Args:
        node: A TreeEnsembleClassifier.
        types: Of the samples.
        values: Not used.
    """
    return _label_and_scores(node, types, _class_count(node, "classlabels_int64s"))


def linear_classifier_types(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Return the types of the label and of the scores: two if one decides between two classes.

    Args:
        node: A LinearClassifier.
        types: Of the samples.
        values: Not used.
    """
    features = _features(types)
    count: Dim = None
    if isinstance(features, int):
        count = len(attributes(node)["coefficients"] or ()) // max(features, 1)
        count = 2 if count == 1 and _class_count(node, "classlabels_ints") == 2 else count
    return _label_and_scores(node, types, count)


def svm_classifier_types(node: Node, types: Types, values: Values) -> list[ValueType | None]:
    """Return the types of the label, and of probabilities of classes or scores of their pairs.

    Args:
        node: An SVMClassifier.
        types: Of the samples.
        values: Not used.
    """
    options, count = attributes(node), _class_count(node, "classlabels_ints")
    pairs = bool(sum(options["vectors_per_class"] or ())) and not options["prob_a"] and count != 2
    return _label_and_scores(node, types, count * (count - 1) // 2 if pairs else count)
