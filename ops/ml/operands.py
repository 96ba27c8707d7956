"""Requirements of the operators of ai.onnx.ml: their operands and attributes.

Models are attributes: they are converted to arrays once (`scores.prepared`), and compared with the
samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from subgraph.errors import ShapeError
from subgraph.graph.graph import Node
from subgraph.graph.types import ValueType
from subgraph.operators.reference import attributes
from subgraph.operators.requirements import (
    Tensor,
    require,
    require_choice,
    require_dtype,
    require_rank,
    require_whole_number,
    require_within,
)

from .scores import prepared
from .svm import classifier_svm, regressor_svm
from .trees import AGGREGATES, TRANSFORMS, Forest, ensemble_forest, node_list_forest


def label_table(node: Node) -> tuple[str, Any, str, Any]:
    """Return the keys and the values of a LabelEncoder since opset 2, each after its kind.

    A kind is the end of an attribute's name: "strings", "int64s", "floats" or "tensor".

    Raises:
        ShapeError: There are none, or not as many values as keys.
    """
    options = attributes(node)

    def first(role: str) -> tuple[str, Any]:
        for kind in ("strings", "int64s", "floats", "tensor"):
            items = options.get(f"{role}_{kind}")
            if items is not None and len(items):
                return kind, items
        raise ShapeError(f"{role} are missing")

    (key_kind, keys), (value_kind, values) = first("keys"), first("values")
    require(
        len(keys) == len(values), "{} keys and {} values do not pair up", len(keys), len(values)
    )
    return key_kind, keys, value_kind, values


def label_encoder_operands(node: Node, x: Tensor) -> None:
    """Require keys and values in pairs (ONNX LabelEncoder, 2 to 4)."""
    if node.version != 1:
        label_table(node)


def cast_map_operands(node: Node, x: ValueType | Tensor) -> None:
    """Raise ShapeError unless the attributes name a type and a form, and a width if sparse."""
    require_choice(node, "cast_to", "TO_FLOAT", "TO_FLOAT", "TO_STRING", "TO_INT64")
    if require_choice(node, "map_form", "DENSE", "DENSE", "SPARSE") == "SPARSE":
        require_whole_number(node, "max_map", 1, least=1)


def _features(x: Tensor) -> int:
    """Return the features of a sample; a vector is one sample."""
    require_rank("X", x, 1, 2)
    return x.shape[-1]


def _one_or_each(name: str, numbers: Sequence[Any] | None, count: int) -> None:
    """Require at most one number, or one for each of ``count`` features."""
    found = len(numbers or ())
    require(found <= 1 or count == found, "{} has {} numbers for {} features", name, found, count)


def scaler_operands(node: Node, x: Tensor) -> None:
    """Raise ShapeError unless offset and scale are one number, or one for each feature."""
    for name in ("offset", "scale"):
        _one_or_each(name, node.attrs.get(name), x.shape[-1] if x.rank else 1)


def imputer_operands(node: Node, x: Tensor) -> None:
    """Raise ShapeError unless imputed values are one number, or one for each feature."""
    for name in ("imputed_value_floats", "imputed_value_int64s"):
        _one_or_each(name, node.attrs.get(name), x.shape[-1] if x.rank else 1)


def normalizer_operands(node: Node, x: Tensor) -> None:
    """Raise ShapeError unless the input has rank 1 or 2, and the standard knows the norm."""
    require_choice(node, "norm", "MAX", "MAX", "L1", "L2")
    _features(x)


def zip_map_operands(node: Node, x: Tensor) -> None:
    """Raise ShapeError unless there is a label for each column."""
    labels = node.attrs.get("classlabels_strings") or node.attrs.get("classlabels_int64s") or ()
    count = _features(x)
    require(count == len(labels), "{} labels for {} columns", len(labels), count)


def feature_vectorizer_operands(node: Node, *parts: Tensor) -> None:
    """Raise ShapeError unless all inputs have as many rows, and each has a width."""
    require(len(parts) >= 1, "no input is given")
    widths = node.attrs.get("inputdimensions")
    if widths is not None:
        require(len(widths) == len(parts), "{} widths for {} inputs", len(widths), len(parts))
        require(all(width >= 0 for width in widths), "inputdimensions {} are negative", widths)
    for k, part in enumerate(parts):
        _features(part)
        found, wanted = (1 if p.rank == 1 else p.shape[0] for p in (part, parts[0]))
        require(found == wanted, "input {} has {} rows, input 0 {}", k, found, wanted)


def array_feature_extractor_operands(node: Node, x: Tensor, indices: Tensor) -> None:
    """Raise ShapeError unless X has columns, and those that known indices name.

    Args:
        node: The ArrayFeatureExtractor.
        x: Rows, the last dimension being columns.
        indices: Columns to extract, int64.
    """
    require(x.rank >= 1, "X is a scalar")
    require_dtype("Y", indices, "int64")
    size = x.shape[-1]
    require(indices.size >= 1, "Y names no column")
    require(size >= 1, "X has no columns")
    require_within("Y", indices, 0, size - 1)


def one_hot_encoder_operands(node: Node, x: Tensor) -> None:
    """Raise ShapeError unless categories are either integers or strings."""
    kinds = [name for name in ("cats_int64s", "cats_strings") if node.attrs.get(name)]
    require(len(kinds) == 1, "{} of cats_int64s and cats_strings are given, not one", len(kinds))


def linear_regressor_operands(node: Node, x: Tensor) -> None:
    """Raise ShapeError unless there is a coefficient for each target and feature."""
    targets = attributes(node)["targets"]
    require(targets >= 1, "targets is {}", targets)
    _linear(node, x, targets)


def linear_classifier_operands(node: Node, x: Tensor) -> None:
    """Raise ShapeError unless each score has a coefficient for each feature, and a label."""
    options = attributes(node)
    labels = options["classlabels_strings"] or options["classlabels_ints"] or ()
    require(len(labels) >= 1, "no class labels are given")
    features = _features(x)
    classes = len(options["coefficients"] or ()) // features if features >= 1 else 0
    _linear(node, x, classes)
    require(classes <= 1 or classes <= len(labels), "{} labels for {} scores", len(labels), classes)


def _linear(node: Node, x: Tensor, scores: int) -> None:
    """Require a linear model of so many scores that fits the samples ``x``."""
    options, features = attributes(node), _features(x)
    require_choice(node, "post_transform", "NONE", *TRANSFORMS)
    count, added = len(options["coefficients"] or ()), len(options["intercepts"] or ())
    fits = scores >= 1 and count == scores * features
    require(fits, "{} coefficients for {} scores of {} features", count, scores, features)
    require(added == 0 or scores == added, "{} intercepts for {} scores", added, scores)


def svm_operands(node: Node, x: Tensor) -> None:
    """Raise ShapeError unless samples have as many features as support vectors."""
    regresses = node.op_type == "SVMRegressor"
    require_choice(node, "post_transform", "NONE", *TRANSFORMS)
    require_choice(node, "kernel_type", "LINEAR", "LINEAR", "POLY", "RBF", "SIGMOID")
    count = len(node.attrs.get("kernel_params") or ())
    require(count in (0, 3), "kernel_params has {} numbers; it needs 0 or 3", count)
    svm = prepared(node, regressor_svm if regresses else classifier_svm)
    features, vectors = _features(x), svm.vectors
    if len(vectors):
        wanted = vectors.shape[1]
        require(features == wanted, "{} features for vectors of {}", features, wanted)
    elif regresses:
        wanted = svm.coefficients.size
        require(features == wanted, "{} features for {} coefficients", features, wanted)


def regressor_operands(node: Node, x: Tensor) -> None:
    """Raise ShapeError unless the features and targets of the trees exist."""
    targets = attributes(node)["n_targets"]
    require_choice(node, "aggregate_function", "SUM", *AGGREGATES)
    require_choice(node, "post_transform", "NONE", *TRANSFORMS)
    _trees(prepared(node, node_list_forest), x, targets)


def classifier_operands(node: Node, x: Tensor) -> None:
    """Raise ShapeError unless the features and classes of the trees exist."""
    options = attributes(node)
    require_choice(node, "post_transform", "NONE", *TRANSFORMS)
    labels = options["classlabels_strings"] or options["classlabels_int64s"] or ()
    _trees(prepared(node, node_list_forest), x, len(labels))


def ensemble_operands(node: Node, x: Tensor) -> None:
    """Raise ShapeError unless the features and targets of the trees exist."""
    require_rank("X", x, 2)
    _trees(prepared(node, ensemble_forest), x, attributes(node)["n_targets"])


def _trees(forest: Forest, x: Tensor, targets: int | None) -> None:
    """Require that trees compare features of ``x``, and vote for known targets (None: any)."""
    features = _features(x)
    most = int(np.max(forest.features, initial=-1))
    require(most < features, "a tree compares feature {} of {}", most, features)
    if targets is not None:
        most = int(np.max(forest.targets, initial=-1))
        require(targets >= 1, "there are {} targets", targets)
        require(most < targets, "a leaf votes for target {} of {}", most, targets)
