"""Evaluation of nodes on constants: common operators by NumPy, all others by the reference.

Constant folding of usual models thus need not import the reference (and onnx). Each function of
`NUMPY_FUNCTIONS` returns the node's only output, or None if its result could differ from the
reference's: for invalid inputs, and where NumPy's semantics differ from ONNX's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from subgraph.errors import LimitError
from subgraph.graph.graph import Node
from subgraph.graph.limits import check_memory, count_results
from subgraph.graph.types import DTYPE_OF_ONNX, Array, numpy_dtype
from subgraph.operators.inference import check_values
from subgraph.operators.shape_values import slice_of

NumpyFunction = Callable[[Node, Sequence[Any]], "Array | None"]
# Both numbers are estimates. Results of 4 KiB are too many and too small to be worth a count; 16 Mi
# elements are far more than shape arithmetic has.
_MIN_COUNTED_BYTES = 1 << 12  # bytes; larger results are counted against the memory budget
_MAX_ELEMENTS = 1 << 24  # larger results of small inputs are left to the reference's checks


def evaluate(node: Node, inputs: Sequence[Array | None]) -> list[Any]:
    """Return the outputs of a node on arrays, None where an input is left out.

    Raises:
        UnsupportedOpError: the operator has no definition in this version.
        ShapeError: the inputs do not fit the operator.
        LimitError: the outputs do not fit into the memory budget.
    """
    function = None if node.domain else NUMPY_FUNCTIONS.get(node.op_type)
    if function is not None:
        try:
            check_values(node, inputs)
            with np.errstate(all="ignore"):  # as on a device: infinities and NaN are results
                result = function(node, inputs)
        except LimitError:
            raise
        except (AttributeError, LookupError, OverflowError, TypeError, ValueError):
            result = None  # invalid inputs: the reference raises the error that says why
        if result is not None:
            if result.nbytes > _MIN_COUNTED_BYTES:
                count_results([result], node.name)
            return [result]
    from subgraph.operators.reference import evaluate as by_reference

    return by_reference(node, inputs)


def _transpose(node: Node, inputs: Sequence[Any]) -> Array:
    return np.transpose(inputs[0], node.attrs.get("perm"))


def _cast(node: Node, inputs: Sequence[Any]) -> Array | None:
    x, to = inputs[0], node.attrs.get("to")
    if not isinstance(to, int) or x.dtype.kind not in "biuf":
        return None
    target = numpy_dtype(DTYPE_OF_ONNX[to])
    if target.kind not in "iuf" or target.isbuiltin != 1 or x.dtype.isbuiltin != 1:
        return None  # ml_dtypes, such as float8, saturate
    if target.kind in "iu" and x.size and not np.can_cast(x.dtype, target, "safe"):
        # The reference converts numbers out of range; NaN fails both comparisons.
        bounds = np.iinfo(target)
        if not (x.min() >= bounds.min and x.max() < bounds.max):
            return None
    return np.asarray(x.astype(target))


def _unsqueeze(node: Node, inputs: Sequence[Any]) -> Array:
    return np.expand_dims(inputs[0], _numbers(node, inputs, 1, "axes"))


def _squeeze(node: Node, inputs: Sequence[Any]) -> Array:
    return np.asarray(np.squeeze(inputs[0], _numbers(node, inputs, 1, "axes")))


def _numbers(node: Node, inputs: Sequence[Any], position: int, name: str) -> Any:
    """Return ints that old versions have as an attribute, new ones as an input; None: absent."""
    if name in node.attrs:
        return tuple(int(v) for v in node.attrs[name])
    given = inputs[position] if position < len(inputs) else None
    return None if given is None else tuple(given.reshape(-1).tolist())


def _flatten(node: Node, inputs: Sequence[Any]) -> Array:
    axis, shape = int(node.attrs.get("axis", 1)), inputs[0].shape
    axis = axis + len(shape) if axis < 0 else axis
    result: Array = inputs[0].reshape(math.prod(shape[:axis]), math.prod(shape[axis:]))
    return result


def _expand(node: Node, inputs: Sequence[Any]) -> Array | None:
    shape = np.broadcast_shapes(inputs[0].shape, tuple(inputs[1].tolist()))
    return (
        np.array(np.broadcast_to(inputs[0], shape)) if math.prod(shape) <= _MAX_ELEMENTS else None
    )


def _tile(node: Node, inputs: Sequence[Any]) -> Array | None:
    x, repeats = inputs[0], inputs[1].tolist()
    if len(repeats) != x.ndim or x.size * math.prod(repeats) > _MAX_ELEMENTS:
        return None
    return np.tile(x, repeats)


def _range(node: Node, inputs: Sequence[Any]) -> Array | None:
    dtype: np.dtype[Any] = inputs[0].dtype
    begin, end, step = (int(each.item()) for each in inputs)
    if dtype.kind != "i" or not step or abs(end - begin) > _MAX_ELEMENTS * abs(step):
        return None
    return np.arange(begin, end, step).astype(dtype)


def _concat(node: Node, inputs: Sequence[Any]) -> Array | None:
    if any(each is None for each in inputs) or len({each.dtype for each in inputs}) != 1:
        return None
    check_memory(sum(each.nbytes for each in inputs), node.name)
    result: Array = np.concatenate(inputs, int(node.attrs["axis"]))
    return result


def _slice(node: Node, inputs: Sequence[Any]) -> Array:
    starts, ends, axes, steps = (
        _numbers(node, inputs, k, name)
        for k, name in enumerate(("starts", "ends", "axes", "steps"), 1)
    )
    x = inputs[0]
    place = [slice(None)] * x.ndim
    axes = range(len(starts)) if axes is None else axes
    steps = [1] * len(starts) if steps is None else steps
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        place[axis] = slice_of(x.shape[axis], start, end, step)
    return np.array(x[tuple(place)])


def _where(node: Node, inputs: Sequence[Any]) -> Array | None:
    condition: Array
    x: Array
    y: Array
    condition, x, y = inputs
    # NumPy would convert operands of other dtypes, which ONNX does not allow.
    return np.where(condition, x, y) if x.dtype == y.dtype and condition.dtype == bool else None


def _div(node: Node, inputs: Sequence[Any]) -> Array | None:
    x, y = inputs
    # ONNX rounds integer quotients towards zero, NumPy down. They agree for positive numbers.
    if x.dtype.kind != "i" or (x.size and x.min() < 0) or (y.size and y.min() <= 0):
        return _float_div(node, inputs)
    return np.asarray(x // y)


def _elementwise(function: Callable[..., Any], kinds: str = "fi") -> NumpyFunction:
    """Return the function of an operator on inputs whose first has one of these kinds of dtype."""

    def apply(node: Node, inputs: Sequence[Any]) -> Array | None:
        # In opsets 1 to 6 operands broadcast only by these attributes, by other rules than NumPy's.
        if "axis" in node.attrs or "broadcast" in node.attrs or inputs[0].dtype.kind not in kinds:
            return None
        return np.asarray(function(*inputs))

    return apply


def _reduction(function: Callable[..., Any]) -> NumpyFunction:
    def apply(node: Node, inputs: Sequence[Any]) -> Array | None:
        x, axes = inputs[0], _numbers(node, inputs, 1, "axes")
        # NumPy has no maximum of nothing.
        if not x.size or x.dtype.kind not in "fi" or node.attrs.get("noop_with_empty_axes", 0):
            return None
        keeps = bool(node.attrs.get("keepdims", 1))
        return np.asarray(function(x, axis=axes or None, keepdims=keeps)).astype(x.dtype)

    return apply


def _among(function: Callable[[Any, Any], Any]) -> NumpyFunction:
    def apply(node: Node, inputs: Sequence[Any]) -> Array | None:
        same = len({each.dtype for each in inputs}) == 1 and inputs[0].dtype.kind in "fi"
        return np.asarray(functools.reduce(function, inputs)) if same else None

    return apply


def _reshape(node: Node, inputs: Sequence[Any]) -> Array | None:
    shape: Any = node.attrs["shape"] if "shape" in node.attrs else inputs[1].tolist()
    # A 0 copies a dimension unless ``allowzero`` is set; the reference decides that.
    if 0 in shape:
        return None
    result: Array = inputs[0].reshape([int(dim) for dim in shape])
    return result


def _gather(node: Node, inputs: Sequence[Any]) -> Array | None:
    data, index = inputs
    axis = int(node.attrs.get("axis", 0))
    size = data.shape[axis] if data.ndim else 0
    if index.size and (index.min() < -size or index.max() >= size):
        return None
    return np.asarray(np.take(data, index, axis=axis))


def _gather_nd(node: Node, inputs: Sequence[Any]) -> Array | None:
    data, index = inputs
    if node.attrs.get("batch_dims", 0) or not index.ndim:
        return None
    return np.asarray(data[tuple(np.moveaxis(index, -1, 0))])


def _scatter_nd(node: Node, inputs: Sequence[Any]) -> Array | None:
    data, index, updates = inputs
    if node.attrs.get("reduction", "none") != "none" or not index.ndim:
        return None
    # NumPy would broadcast updates of another shape.
    if updates.shape != index.shape[:-1] + data.shape[index.shape[-1] :]:
        return None
    result: Array = data.copy()
    result[tuple(np.moveaxis(index, -1, 0))] = updates
    return result


def _scatter_elements(node: Node, inputs: Sequence[Any]) -> Array | None:
    data, index, updates = inputs
    if node.attrs.get("reduction", "none") != "none" or index.shape != updates.shape:
        return None
    if index.ndim != data.ndim:
        return None
    index_arrays = list(np.ix_(*(range(size) for size in index.shape)))
    index_arrays[int(node.attrs.get("axis", 0))] = index
    result: Array = data.copy()
    result[tuple(index_arrays)] = updates
    return result


def _constant_of_shape(node: Node, inputs: Sequence[Any]) -> Array | None:
    value = node.attrs.get("value")
    if not isinstance(value, np.ndarray) or math.prod(inputs[0].tolist()) > _MAX_ELEMENTS:
        return None
    content: Array = value  # pyright: ignore[reportUnknownVariableType]
    return np.full([int(dim) for dim in inputs[0]], content.reshape(-1)[0], content.dtype)


def _shape(node: Node, inputs: Sequence[Any]) -> Array:
    start, end = node.attrs.get("start", 0), node.attrs.get("end")
    return np.array(inputs[0].shape[start:end], np.int64)


_float_div = _elementwise(np.divide, "f")


def _constant(node: Node, inputs: Sequence[Any]) -> Array | None:
    value = node.attrs.get("value")
    if not isinstance(value, np.ndarray):
        return None
    content: Array = value  # pyright: ignore[reportUnknownVariableType]
    # The caller may write to a result; the attribute belongs to the graph.
    return content.copy()


NUMPY_FUNCTIONS: dict[str, NumpyFunction] = {
    "Add": _elementwise(np.add),
    "And": _elementwise(np.logical_and, "b"),
    "Cast": _cast,
    "Ceil": _elementwise(np.ceil, "f"),
    "Concat": _concat,
    "Constant": _constant,
    "ConstantOfShape": _constant_of_shape,
    "Div": _div,
    "Equal": _elementwise(np.equal, "fib"),
    "Expand": _expand,
    "Flatten": _flatten,
    "Floor": _elementwise(np.floor, "f"),
    "Gather": _gather,
    "GatherND": _gather_nd,
    "GreaterOrEqual": _elementwise(np.greater_equal),
    "Identity": lambda node, inputs: inputs[0],
    "Less": _elementwise(np.less),
    "Max": _among(np.maximum),
    "Min": _among(np.minimum),
    "Mul": _elementwise(np.multiply),
    "Neg": _elementwise(np.negative, "fi"),
    "Not": _elementwise(np.logical_not, "b"),
    "Range": _range,
    "Reciprocal": _elementwise(np.reciprocal, "f"),
    "ReduceMax": _reduction(np.max),
    "ReduceMin": _reduction(np.min),
    "ReduceProd": _reduction(np.prod),
    "Reshape": _reshape,
    "ScatterElements": _scatter_elements,
    "ScatterND": _scatter_nd,
    "Shape": _shape,
    "Size": lambda node, inputs: np.array(inputs[0].size, np.int64),
    "Slice": _slice,
    "Sqrt": _elementwise(np.sqrt, "f"),
    "Squeeze": _squeeze,
    "Sub": _elementwise(np.subtract),
    "Tile": _tile,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
    "Where": _where,
}
"""By operator of ONNX's own domain."""
