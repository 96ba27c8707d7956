"""Features, encoders of numbers and linear models of ai.onnx.ml on the CPU device.

All but the encoders use kernels of other families. Strings, and transforms without a kernel, run on
the reference.
"""

from __future__ import annotations

import numpy as np

from subgraph.engine.planner.constants import contiguous_array, derived_operand
from subgraph.engine.planner.lowering import Lowering, Unsupported, lowering
from subgraph.engine.planner.operands import Operand
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.graph import Node
from subgraph.graph.types import Array, dtype_of
from subgraph.operators.reference import attributes
from subgraph.operators.requirements import decoded
from subgraph.ops.checks.cpu import emit_range_check
from subgraph.ops.elementwise.cpu import Source, emit_expression, source, temporary
from subgraph.ops.elementwise.expressions import Expression
from subgraph.ops.indexing.arguments import OneHotArguments
from subgraph.ops.reduce.cpu import emit_argminmax, emit_reduction
from subgraph.ops.shared.delegation import delegate, viewed

from .arguments import SearchArguments
from .linear import parameters
from .operands import label_table
from .scores import ML, prepared

# Operators that compute a ``post_transform``.
_TRANSFORMS = {"NONE": "", "LOGISTIC": "Sigmoid", "SOFTMAX": "Softmax"}
_MIN_ELEMENTS_PER_THREAD = 1024  # of the encoders (estimate: more work than starting a thread)
_NORMS = {"MAX": "max", "L1": "l1", "L2": "l2"}
_NUMBERS = ("float32", "float64", "int64", "int32")


def weight_operand(low: Lowering, recipe: str, array: Array) -> Operand:
    """Return an array that was made from attributes as an operand that is a weight.

    Args:
        low: The lowering, which caches weights.
        recipe: Names the array among those of the node.
        array: The array.
    """
    array = np.ascontiguousarray(array)
    weight = low.weight(f"ml {recipe}", contiguous_array, array)
    return derived_operand(f"{low.node.name} {recipe}", dtype_of(array), array.shape, weight)


def emit_transform(low: Lowering, name: str, scores: Operand, y: Operand) -> None:
    """Emit a ``post_transform``, if it is not the identity.

    Args:
        low: Where the step goes.
        name: The ``post_transform``.
        scores: Scores [samples, classes] in the operand that `scores_operand` returned.
        y: The output.
    """
    operator = _operator_of(name, y)
    if operator:
        delegate(low, operator, [scores], y)


def scores_operand(low: Lowering, name: str, y: Operand) -> Operand:
    """Return the operand for the scores that a transform reads: ``y`` if it is the identity.

    Args:
        low: The lowering.
        name: The ``post_transform``.
        y: The output [samples, classes].

    Raises:
        Unsupported: There is no kernel of the transform.
    """
    return temporary(low, "float32", y.shape) if _operator_of(name, y) else y


def _operator_of(name: str, y: Operand) -> str:
    """Return the operator that computes a transform, "" for the identity."""
    if name not in _TRANSFORMS:
        raise Unsupported(f"post_transform {name!r}")
    return "" if name == "SOFTMAX" and y.shape[-1] == 1 else _TRANSFORMS[name]


def samples_of(low: Lowering) -> Operand:
    """Return the first input as rows of features; a vector is one row."""
    x = low.input(0)
    return x if x.rank == 2 else viewed(low, x, (1, *x.shape))


# ---------------------------------------------------------------- features


@lowering("Scaler", domain=ML, dtypes=_NUMBERS)
def scaler(node: Node, low: Lowering) -> None:
    """Lower Scaler: (x - offset) * scale."""
    x, y = low.input(0), low.output()
    e = Expression()
    work = "float64" if x.dtype == "float64" else "float32"
    value = e.cast(e.input(x.dtype), work)
    sources: list[Source] = [source(x)]
    for op, name, default in (("sub", "offset", 0.0), ("mul", "scale", 1.0)):
        numbers = np.array(node.attrs.get(name, (default,)), work)
        value = e(op, value, e.input(work))
        sources.append(source(weight_operand(low, name, numbers)))
    emit_expression(low, e, sources, [(e.cast(value, "float32"), y)])


@lowering("Imputer", domain=ML, dtypes=("float32", "float64", "int64"))
def imputer(node: Node, low: Lowering) -> None:
    """Lower Imputer: replaces one number, or NaN, by another."""
    x, y, options = low.input(0), low.output(), attributes(node)
    kind = "int64s" if x.dtype == "int64" else "floats"
    numbers = np.array(options[f"imputed_value_{kind}"] or (), x.dtype)
    sought = options[f"replaced_value_{kind[:-1]}"]
    if x.rank != 2 or not numbers.size or sought is None:
        raise Unsupported("an Imputer with numbers of another type than X, or X not of rank 2")
    e = Expression()
    value = e.input(x.dtype)
    missing = e("isnan", value) if sought != sought else e("eq", value, e.number(sought, x.dtype))
    result = e("where", missing, e.input(x.dtype), value, dtype=x.dtype)
    imputed = source(weight_operand(low, "imputed", numbers))
    emit_expression(low, e, [source(x), imputed], [(result, y)])


@lowering("Binarizer", domain=ML, dtypes=("float32", "float64"))
def binarizer(node: Node, low: Lowering) -> None:
    """Lower Binarizer: 1 above the threshold, else 0."""
    x = low.input(0)
    e = Expression()
    above = e("gt", e.input(x.dtype), e.number(float(attributes(node)["threshold"]), x.dtype))
    emit_expression(low, e, [source(x)], [(e.cast(above, x.dtype), low.output())])


@lowering("Normalizer", domain=ML, dtypes={"float32"})
def normalizer(node: Node, low: Lowering) -> None:
    """Lower Normalizer: rows divided by their norms where these are not 0."""
    x = samples_of(low)
    y = viewed(low, low.output(), x.shape)
    op = _NORMS[decoded(attributes(node)["norm"])]
    if not x.size:
        raise Unsupported("a Normalizer of an empty tensor")
    norm = temporary(low, x.dtype, (x.shape[0], 1))
    emit_reduction(low, op, x, norm, [1])
    e = Expression()
    value, size = e.input(x.dtype), e.input(x.dtype)
    # A row of zeros has the norm 0 and stays as it is, instead of becoming NaN.
    result = e("where", e("eq", size, 0.0), value, e("div", value, size), dtype=x.dtype)
    emit_expression(low, e, [source(x), source(norm)], [(result, y)])


@lowering("FeatureVectorizer", domain=ML, dtypes={"float32"})
def feature_vectorizer(node: Node, low: Lowering) -> None:
    """Lower FeatureVectorizer whose inputs have the given widths, to Concat."""
    parts = [low.input(k) for k in range(len(low.inputs))]
    widths = node.attrs.get("inputdimensions") or tuple(part.shape[-1] for part in parts)
    fits = all(part.rank == 2 and part.dtype == "float32" for part in parts)
    if not fits or list(widths) != [part.shape[1] for part in parts]:
        raise Unsupported("a FeatureVectorizer that cuts or pads")
    delegate(low, "Concat", parts, low.output(), axis=1)


@lowering("ArrayFeatureExtractor", domain=ML)
def array_feature_extractor(node: Node, low: Lowering) -> None:
    """Lower ArrayFeatureExtractor: Gather along the last axis."""
    x, indices, y = low.input(0), low.input(1), low.output()
    known = indices.known
    emit_range_check(low, indices, "Y", 0, x.shape[-1] - 1)
    flat = None if known is None else known.reshape(-1)
    row = Operand(indices.name, indices.dtype, (indices.size,), known=flat)
    row.storage, row.offset = indices.storage, indices.offset
    shape = (*x.shape[:-1], indices.size)
    delegate(low, "Gather", [x, row], viewed(low, y, shape), axis=x.rank - 1)


# ---------------------------------------------------------------- encoders of numbers


def _emit_search(low: Lowering, x: Operand, y: Operand, keys: Array, values: Array) -> None:
    """Emit the step that finds each element among the keys and writes its value.

    Args:
        low: Where the step goes.
        x: The elements.
        y: The values.
        keys: Keys, of the elements' dtype; of equal ones the first counts.
        values: One for each key, and one more for elements that are no key, of y's dtype.
    """
    missing = np.isnan(keys) if keys.dtype.kind == "f" else np.zeros(len(keys), bool)
    nan = values[:-1][missing][:1]
    # NaN cannot be found by comparisons, so its value stands apart, behind the default. Without a
    # key NaN the default takes that place.
    sought, first = np.unique(keys[~missing], return_index=True)
    order = np.concatenate([values[:-1][~missing][first], values[-1:], nan, values[-1:]])
    if not sought.size:
        raise Unsupported("an encoder without keys")
    kernel = Kernel("subgraph.ops.ml.encoder_kernels", "search", dtype=x.dtype, item=y.itemsize)
    table = low.weight("ml keys", contiguous_array, sought)
    results = low.weight("ml values", contiguous_array, order)
    arguments = SearchArguments(x=x, y=y, keys=table, values=results, count=len(sought))
    low.emit(kernel, arguments, x.size, grain=_MIN_ELEMENTS_PER_THREAD, bytes=x.nbytes + y.nbytes)


def _label_table(node: Node) -> tuple[Array, Array]:
    """Return the keys of a LabelEncoder, and their values and the default value."""
    options = attributes(node)
    key_kind, keys, value_kind, values = label_table(node)
    dtypes = {"int64s": np.int64, "floats": np.float32}
    if key_kind not in dtypes or value_kind not in dtypes:
        raise Unsupported("a LabelEncoder of strings or tensors")
    default = options["default_int64" if value_kind == "int64s" else "default_float"]
    return np.array(keys, dtypes[key_kind]), np.array([*values, default], dtypes[value_kind])


@lowering("LabelEncoder", domain=ML, dtypes=("int64", "float32"))
def label_encoder(node: Node, low: Lowering) -> None:
    """Lower LabelEncoder between numbers, since opset 2."""
    x, y = low.input(0), low.output()
    if node.version == 1:
        raise Unsupported("a LabelEncoder of strings")
    keys, values = prepared(node, _label_table)
    if dtype_of(keys) != x.dtype or dtype_of(values) != y.dtype:
        raise Unsupported(f"keys that are {keys.dtype} for {x.dtype}")
    _emit_search(low, x, y, keys, values)


def _categories(node: Node) -> Array:
    return np.array(attributes(node)["cats_int64s"] or (), np.int64)


@lowering("OneHotEncoder", domain=ML, dtypes=("int64", "float32"))
def one_hot_encoder(node: Node, low: Lowering) -> None:
    """Lower OneHotEncoder of numbers, with a row of zeros for one that is no category."""
    x, y = low.input(0), low.output()
    categories = prepared(node, _categories)
    keys, count = categories.astype(x.dtype), len(categories)
    # In float32 large categories can become equal, and then a search would find the wrong column.
    exact = np.array_equal(keys.astype(np.int64), categories) and len(np.unique(keys)) == count
    if not exact or not count or not attributes(node)["zeros"] or x.rank not in (1, 2):
        raise Unsupported("a OneHotEncoder that may raise, or with equal categories")
    if y.size != x.size * count:
        raise Unsupported(f"a OneHotEncoder of {count} categories with output {y.shape}")
    columns = temporary(low, "int64", x.shape)
    _emit_search(low, x, columns, keys, np.arange(count + 1))
    # An element that is no category gets the index behind the last, which sets no column.
    ends = low.weight("ml one hot", contiguous_array, np.array([0, 1], np.float32))
    kernel = Kernel("subgraph.ops.indexing.kernels", "one_hot", item=y.itemsize)
    arguments = OneHotArguments(indices=columns, values=ends, y=y, depth=count, inner=1, wraps=0)
    low.emit(kernel, arguments, x.size, grain=_MIN_ELEMENTS_PER_THREAD, bytes=y.nbytes)


# ---------------------------------------------------------------- linear models


def _linear(node: Node, x: Operand) -> tuple[Array, Array]:
    """Return weights [scores, features] and intercepts [scores] for samples ``x``."""
    coefficients, added = prepared(node, parameters)
    if not coefficients.size:
        raise Unsupported("a linear model without coefficients")
    weights = coefficients.reshape(-1, x.shape[1])
    return weights, added if added.size else np.zeros(len(weights), np.float32)


def emit_linear(low: Lowering, x: Operand, weights: Array, added: Array, scores: Operand) -> None:
    """Emit ``x W^T + b``.

    Args:
        low: Where the step goes.
        x: Samples [samples, features].
        weights: W [scores, features].
        added: b [scores].
        scores: The result [samples, scores].
    """
    factors = weight_operand(low, "rows", weights)
    delegate(low, "Gemm", [x, factors, weight_operand(low, "added", added)], scores, transB=1)


@lowering("LinearRegressor", domain=ML, dtypes={"float32"})
def linear_regressor(node: Node, low: Lowering) -> None:
    """Lower LinearRegressor."""
    x, y, name = samples_of(low), low.output(), decoded(attributes(node)["post_transform"])
    weights, added = _linear(node, x)
    scores = scores_operand(low, name, y)
    emit_linear(low, x, weights, added, scores)
    emit_transform(low, name, scores, y)


@lowering("LinearClassifier", domain=ML, dtypes={"float32"})
def linear_classifier(node: Node, low: Lowering) -> None:
    """Lower LinearClassifier whose labels are numbers, with a score for each."""
    options, x = attributes(node), samples_of(low)
    labels = np.array(options["classlabels_ints"] or (), np.int64)
    weights, added = _linear(node, x)
    count = len(added)
    if options["classlabels_strings"] or count < 2 or len(labels) < count:
        raise Unsupported("string labels, or two classes with one score")
    y, name = low.output(1), decoded(options["post_transform"])
    scores = scores_operand(low, name, y)
    emit_linear(low, x, weights, added, scores)
    classes = temporary(low, "int64", (x.shape[0],))
    emit_argminmax(low, scores, classes, count, 1, largest=True, last=False)
    emit_labels(low, classes, labels)
    emit_transform(low, name, scores, y)


def emit_labels(low: Lowering, classes: Operand, labels: Array) -> None:
    """Emit the step that writes the label of each sample to the first output.

    Args:
        low: Where the step goes.
        classes: Index of each sample's class, int64.
        labels: Label of each class, int64.
    """
    delegate(low, "Gather", [weight_operand(low, "labels", labels), classes], low.output(0), axis=0)
