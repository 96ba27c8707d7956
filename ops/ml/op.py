"""Operators of ai.onnx.ml, and the reference of those without a model.

onnx.reference has neither CastMap nor CategoryMapper nor ZipMap, and LabelEncoder only with opset
2's attributes. Its DictVectorizer fails if a key is not in the vocabulary, or there is none. The
references of models are in ``trees.py``, ``svm.py`` and ``linear.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from subgraph.errors import ShapeError
from subgraph.graph.graph import Node
from subgraph.graph.limits import check_memory
from subgraph.graph.types import Array, MapType, TensorType, numpy_dtype
from subgraph.operators.batch_axes import along
from subgraph.operators.operator import declare
from subgraph.operators.reference import attributes
from subgraph.operators.requirements import any_tensor, any_value
from subgraph.ops.elementwise.op import first_type

from . import operands, types
from .linear import linear_classifier, linear_regressor
from .scores import ML
from .svm import svm_classifier, svm_regressor
from .trees import tree_ensemble, tree_ensemble_classifier, tree_ensemble_regressor


def zip_map(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return for each row a map from class to value, a number of Python."""
    keys = node.attrs.get("classlabels_strings") or node.attrs.get("classlabels_int64s") or ()
    rows: Array = inputs[0].reshape(1, -1) if inputs[0].ndim == 1 else inputs[0]
    return [[dict(zip(keys, row, strict=True)) for row in rows.tolist()]]


def cast_map(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the values of a map in the order of its keys, as one row."""
    options = attributes(node)
    values: Mapping[int, Any] = inputs[0]
    kinds = {"TO_FLOAT": np.float32, "TO_STRING": str, "TO_INT64": np.int64}
    convert = kinds[str(options["cast_to"])]
    fill = "0" if convert is str else 0
    dtype: Any = object if convert is str else convert

    def item(value: Any) -> Any:
        return convert(float(value) if isinstance(value, str) and convert is not str else value)

    if str(options["map_form"]) == "SPARSE":
        width = int(options["max_map"])
        if width < 1 or any(not 0 <= int(key) < width for key in values):
            raise ShapeError(f"keys {sorted(values)[:8]} do not fit max_map={width}")
        check_memory(width * np.dtype(dtype).itemsize, f"a row of max_map={width} numbers")
        row: Array = np.full((1, width), convert(fill), dtype)
        for key, value in values.items():
            row[0, int(key)] = item(value)
        return [row]
    return [np.array([[item(values[key]) for key in sorted(values)]], dtype)]


def one_hot_encoder(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return a row of zeros for each element, with a one in the column of its category.

    Of equal categories the last one counts.

    Raises:
        ShapeError: An element is no category, and ``zeros`` is 0.
    """
    options = attributes(node)
    x: Array = inputs[0]
    categories = options["cats_int64s"] or options["cats_strings"]
    columns = {category: column for column, category in enumerate(categories)}
    check_memory(4 * x.size * len(categories), f"{x.size} rows of {len(categories)} categories")
    found = np.zeros((x.size, len(categories)), np.float32)
    for row, value in zip(found, x.reshape(-1).tolist(), strict=True):
        column = columns.get(value)
        if column is not None:
            row[column] = 1
        elif not options["zeros"]:
            raise ShapeError(f"{value!r} is no category, and zeros is 0")
    return [found.reshape(*x.shape, len(categories))]


def category_mapper(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return numbers for strings, or strings for numbers."""
    options = attributes(node)
    numbers, names = options["cats_int64s"] or (), options["cats_strings"] or ()
    if len(numbers) != len(names):
        raise ShapeError(f"{len(numbers)} numbers and {len(names)} strings do not pair up")
    x: Array = inputs[0]
    if x.dtype.kind in "OUT":
        return [
            _looked_up(x, dict(zip(names, numbers, strict=True)), options["default_int64"], "<i8")
        ]
    return [
        _looked_up(x, dict(zip(numbers, names, strict=True)), options["default_string"], object)
    ]


def _looked_up(x: Array, table: Mapping[Any, Any], default: Any, dtype: Any) -> Array:
    """Return the table's value for each element, ``default`` for those that it does not have."""
    found = [table.get(key, default) for key in x.reshape(-1).tolist()]
    result: Array = np.array(found, dtype).reshape(x.shape)
    return result


def label_encoder(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the value of each key; in opset 1 the index of a class in a list, or the reverse."""
    if node.version != 1:
        return _label_encoder_since_2(node, inputs[0])
    options = attributes(node)
    names = options["classes_strings"] or ()
    x: Array = inputs[0]
    if x.dtype.kind in "OUT":
        table = {name: index for index, name in enumerate(names)}
        return [_looked_up(x, table, options["default_int64"], "<i8")]
    return [_looked_up(x, dict(enumerate(names)), options["default_string"], object)]


def _label_encoder_since_2(node: Node, x: Array) -> Sequence[Any]:
    """Return the value of each key; keys and values are attributes of several dtypes."""
    options = attributes(node)
    _, keys, kind, numbers = operands.label_table(node)
    default: Any = {
        "strings": options.get("default_string"),
        "int64s": options.get("default_int64"),
        "floats": options.get("default_float"),
        "tensor": None,
    }[kind]
    dtype: Any = {"strings": object, "int64s": "<i8", "floats": "<f4"}.get(kind)
    if kind == "tensor":
        tensor = options.get("default_tensor")
        dtype = numbers.dtype
        missing: Any = "_Unused" if dtype.kind == "O" else -1 if dtype.kind in "iu" else -0.0
        default = missing if tensor is None else tensor.reshape(-1)[0]
        numbers = numbers.reshape(-1).tolist()
    names = np.asarray(keys).reshape(-1).tolist()
    if x.dtype.kind == "f":
        # By the standard NaN equals NaN (not so in ONNX Runtime). Attributes are float32.
        names = [_float_key(name) for name in names]
        flat = [_float_key(key) for key in x.reshape(-1).tolist()]
    else:
        flat = x.reshape(-1).tolist()
    table = dict(zip(reversed(names), reversed(list(numbers)), strict=True))
    result: Array = np.array([table.get(key, default) for key in flat], dtype)
    return [result.reshape(x.shape)]


def _float_key(value: float) -> Any:
    return "nan" if value != value else float(np.float32(value))


def dict_vectorizer(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return one row with the map's value for each word of the vocabulary; 0 ("") for no value."""
    words = node.attrs.get("string_vocabulary") or node.attrs.get("int64_vocabulary") or ()
    maps: list[Mapping[Any, Any]] = inputs[0]
    if isinstance(inputs[0], dict):
        maps = [inputs[0]]
    samples = [np.asarray(v) for m in maps for v in m.values()]
    declared = node.inputs[0].type if node.inputs and node.inputs[0] is not None else None
    value_type = declared.value if isinstance(declared, MapType) else None
    dtype: Any = samples[0].dtype if samples else np.dtype(np.float32)
    if isinstance(value_type, TensorType) and dtype.kind not in "OUT":
        dtype = numpy_dtype(value_type.dtype)
    fill: Any = "" if dtype.kind in "OUT" else 0
    rows = [[m.get(word, fill) for word in words] for m in maps]
    return [np.array(rows, object if dtype.kind in "OUT" else dtype)]


def scaler(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return (x - offset) * scale in float32, the operator's only output type."""
    x = inputs[0].astype(np.float64 if inputs[0].dtype == np.float64 else np.float32)
    offset = np.array(node.attrs.get("offset", (0.0,)), x.dtype)
    scale = np.array(node.attrs.get("scale", (1.0,)), x.dtype)
    return [((x - offset) * scale).astype(np.float32)]


def normalizer(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return rows of norm one in float32; a vector is one row, a row of norm 0 stays."""
    x: Array = inputs[0].astype(np.float32)
    rows = x.reshape(1, -1) if x.ndim == 1 else x
    match str(attributes(node)["norm"]):
        case "MAX":
            norm = rows.max(axis=1, keepdims=True, initial=-np.inf)
        case "L1":
            norm = np.abs(rows).sum(axis=1, keepdims=True)
        case _:
            norm = np.sqrt((rows * rows).sum(axis=1, keepdims=True))
    return [np.divide(rows, norm, out=rows.copy(), where=norm != 0).reshape(x.shape)]


def feature_vectorizer(node: Node, inputs: Sequence[Any]) -> Sequence[Any]:
    """Return the inputs side by side in float32, each cut or padded with 0 to its width."""
    parts = [x.reshape(1, -1) if x.ndim == 1 else x for x in inputs]
    widths = node.attrs.get("inputdimensions") or tuple(part.shape[-1] for part in parts)
    check_memory(4 * len(parts[0]) * sum(widths), f"inputdimensions {list(widths)[:8]}")
    filled: list[Array] = []
    for part, width in zip(parts, widths, strict=True):
        missing = max(width - part.shape[1], 0)
        filled.append(np.pad(part[:, :width].astype(np.float32), ((0, 0), (0, missing))))
    return [np.concatenate(filled, axis=1)]


# The operators of this family, each in all its versions.
_declare = partial(declare, domain=ML)
_declare(
    "ArrayFeatureExtractor",
    requires=operands.array_feature_extractor_operands,
    infer=types.array_feature_extractor_types,
    batch=along(0),
)
_declare("Binarizer", requires=any_tensor, batch=along(0))
_declare("CastMap", requires=operands.cast_map_operands, compute=cast_map)
_declare("CategoryMapper", requires=any_tensor, compute=category_mapper)
_declare("DictVectorizer", requires=any_value, compute=dict_vectorizer)
_declare(
    "FeatureVectorizer",
    requires=operands.feature_vectorizer_operands,
    infer=types.feature_vectorizer_types,
    compute=feature_vectorizer,
)
_declare("Imputer", requires=operands.imputer_operands, infer=first_type, batch=along(0))
_declare(
    "LabelEncoder", requires=operands.label_encoder_operands, compute=label_encoder, batch=along(0)
)
_declare(
    "LinearClassifier",
    requires=operands.linear_classifier_operands,
    infer=types.linear_classifier_types,
    compute=linear_classifier,
    batch=along(0),
)
_declare(
    "LinearRegressor",
    requires=operands.linear_regressor_operands,
    infer=types.linear_regressor_types,
    compute=linear_regressor,
    batch=along(0),
)
_declare(
    "Normalizer",
    requires=operands.normalizer_operands,
    infer=types.float32_type,
    compute=normalizer,
    batch=along(0),
)
_declare("OneHotEncoder", requires=operands.one_hot_encoder_operands, compute=one_hot_encoder)
_declare(
    "SVMClassifier",
    requires=operands.svm_operands,
    infer=types.svm_classifier_types,
    compute=svm_classifier,
    batch=along(0),
)
_declare(
    "SVMRegressor",
    requires=operands.svm_operands,
    infer=types.svm_regressor_types,
    compute=svm_regressor,
    batch=along(0),
)
_declare(
    "Scaler",
    requires=operands.scaler_operands,
    infer=types.float32_type,
    compute=scaler,
    batch=along(0),
)
_declare("TreeEnsemble", requires=operands.ensemble_operands, compute=tree_ensemble, batch=along(0))
_declare(
    "TreeEnsembleClassifier",
    requires=operands.classifier_operands,
    infer=types.tree_classifier_types,
    compute=tree_ensemble_classifier,
    batch=along(0),
)
_declare(
    "TreeEnsembleRegressor",
    requires=operands.regressor_operands,
    infer=types.tree_regressor_types,
    compute=tree_ensemble_regressor,
    batch=along(0),
)
_declare("ZipMap", requires=operands.zip_map_operands, compute=zip_map)
