"""Shape values: elements of small tensors that follow from shapes and constants.

Type inference propagates them, so that a Reshape by ``Concat(Gather(Shape(x), 0), 12, -1)`` gets
its shape. A shape value is an object array of numbers (symbolic integers among them), bools, names
of symbolic dimensions, and None for unknown elements.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from subgraph.errors import ShapeError
from subgraph.graph.graph import Node, Value
from subgraph.graph.symbolic import SymInt, is_symbolic, object_array, single
from subgraph.graph.types import (
    DTYPE_OF_ONNX,
    ONNX_DTYPE,
    Array,
    Shape,
    TensorType,
    ValueType,
    numpy_dtype,
)
from subgraph.operators.operator import operator_of
from subgraph.operators.schema import INTERNAL_DOMAIN


class _Operands(NamedTuple):
    """A node, and what is known of its inputs.

    Attributes:
        node: The node.
        inputs: Shape values of its inputs, None for those not known.
        types: Types of its inputs, None for those not known.
    """

    node: Node
    inputs: Sequence[Array | None]
    types: Sequence[ValueType | None]


Rule = Callable[[_Operands], "Array | None"]

# Elements of the largest tensor whose elements are propagated; shapes have far fewer (estimate).
LIMIT = 256
_NOT_NUMBERS = frozenset({type(None), str, np.str_})


def from_array(array: Array) -> Array | None:
    """Return a small array of numbers as a shape value, None for any other array."""
    if array.size > LIMIT or array.dtype.kind not in "biuf":
        return array if has_symbolic(array) else None
    return array.astype(object)


def to_array(known: Array | None, type_: ValueType | None) -> Array | None:
    """Return a shape value as an array of the dtype of ``type_``; None if not all are numbers.

    With symbolic integers among its elements it stays an array of objects.
    """
    if known is None or not isinstance(type_, TensorType) or type_.dtype == "string":
        return None
    kinds = set(map(type, known.ravel().tolist()))
    if not kinds.isdisjoint(_NOT_NUMBERS):
        return None
    if SymInt in kinds:
        return known
    try:
        return known.astype(numpy_dtype(type_.dtype))
    except OverflowError:
        return None  # out of the dtype's range, as sizes of a damaged model can be


def has_symbolic(array: Array) -> bool:
    """Return whether symbolic integers are among the elements."""
    return array.dtype.kind == "O" and SymInt in map(type, array.ravel().tolist())


def concretized(array: Array, dtype: str) -> Array:
    """Return the array in ``dtype`` with its symbolic integers concretized, if it has any.

    Concretizing fixes the plan to the present sizes (see `subgraph.graph.symbolic`).
    """
    return array.astype(numpy_dtype(dtype)) if has_symbolic(array) else array


def is_partial(known: Array | None) -> bool:
    """Return whether elements of a shape value are not numbers: names of dimensions, or None."""
    if known is None or known.dtype.kind != "O":
        return False
    return not _NOT_NUMBERS.isdisjoint(map(type, known.ravel().tolist()))


def is_arithmetic(node: Node) -> bool:
    """Return whether a node's operator is typical of shape arithmetic, and not of layers."""
    if node.subgraph is not None:
        return all(map(is_arithmetic, node.subgraph.nodes))
    return _rule_of(node) is not None or (
        not node.domain and node.op_type in _OTHER_SHAPE_OPERATORS
    )


def follows_from_shapes(value: Value) -> bool:
    """Return whether a value is shape arithmetic of shapes and constants alone."""
    work, seen = [value], {value}
    while work:
        found = work.pop()
        node = found.producer
        if found.parameter is not None or (node is not None and operator_of(node).by_type):
            continue
        if node is None or not is_arithmetic(node):
            return False
        sources = [source for source in node.sources if source not in seen]
        seen.update(sources)
        work += sources
    return True


def sizes_follow_from_shapes(node: Node) -> bool:
    """Return whether no value that a run computes is an input beside the first, as of Reshape."""
    return all(value is None or follows_from_shapes(value) for value in node.inputs[1:])


def _rule_of(node: Node) -> Rule | None:
    """Return the rule of a node's operator; "Required" returns its first input."""
    if node.domain:
        return _first if (node.domain, node.op_type) == (INTERNAL_DOMAIN, "Required") else None
    return _RULES.get(node.op_type)


def propagate(
    node: Node, inputs: Sequence[Array | None], types: Sequence[ValueType | None]
) -> Array | None:
    """Return the shape value of a node's first output, None if nothing is known of it.

    Args:
        node: A node of any operator; for one without a rule the result is None.
        inputs: Shape values of its inputs, None for those not known.
        types: Types of its inputs, None for those not known.
    """
    rule = _rule_of(node)
    if rule is None:
        return None
    try:
        known = rule(_Operands(node, inputs, types))
    except (LookupError, ValueError, TypeError, ArithmeticError):
        # The rules check nothing; infer_types reports operands that do not fit.
        return None
    if known is None or known.size > LIMIT:
        return None
    wide = node.attrs.get("to") == ONNX_DTYPE["float64"] or (
        isinstance(types[0], TensorType) and types[0].dtype == "float64" if types else False
    )
    return known if wide else _map(_single, known)


def _single(item: Any) -> Any:
    # float32 operators round after every step.
    return single(item) if isinstance(item, float) else item


def _shape_of(type_: ValueType | None) -> Shape | None:
    return type_.shape if isinstance(type_, TensorType) else None


def _shape(of: _Operands) -> Array | None:
    shape = _shape_of(of.types[0])
    if shape is None:
        return None
    begin, end = of.node.attrs.get("start", 0), of.node.attrs.get("end", len(shape))
    return object_array(shape[begin:end])


def _size(of: _Operands) -> Array | None:
    type_ = of.types[0]
    if not isinstance(type_, TensorType) or not type_.is_static:
        return None
    return np.array(math.prod(type_.sizes), dtype=object)


def _constant(of: _Operands) -> Array | None:
    for key in ("value", "value_int", "value_ints", "value_float", "value_floats"):
        if key in of.node.attrs:
            return from_array(np.asarray(of.node.attrs[key]))
    return None


def _first(of: _Operands) -> Array | None:
    return of.inputs[0]


def _to_int32(item: Any) -> Any:
    number = math.trunc(item)
    # Symbolic integers are sizes of arrays, and comparing them would fix a plan to these sizes.
    return None if isinstance(number, int) and not -(1 << 31) <= number < 1 << 31 else number


# Conversions to the dtypes in which shapes are computed; others would have to wrap around or lose
# digits. Symbolic integers stay symbolic, which `int` and `float` would concretize.
_CASTS: dict[str, Callable[[Any], Any]] = {
    "int32": _to_int32,
    "int64": math.trunc,
    "float32": lambda item: item * 1.0,
    "float64": lambda item: item * 1.0,
    "bool": bool,
}


def _cast(of: _Operands) -> Array | None:
    convert = _CASTS.get(DTYPE_OF_ONNX.get(of.node.attrs["to"], ""))
    if convert is None:
        return None

    def one(item: Any) -> Any:
        if isinstance(item, str):
            return item if convert is not bool else None
        return None if item is None else convert(item)

    return _map(one, of.inputs[0])


def _map(function: Callable[..., Any], *inputs: Array | None) -> Array | None:
    if any(item is None for item in inputs):
        return None
    apply: Any = np.frompyfunc(function, len(inputs), 1)
    return _as_array(apply(*inputs))


def _as_array(result: Any) -> Array:
    """Return the result of a NumPy function as an array; NumPy returns elements for rank 0."""
    return np.asarray(result, dtype=object)


def _axes(of: _Operands) -> tuple[int, ...] | None:
    if "axes" in of.node.attrs:
        return tuple(of.node.attrs["axes"])
    if len(of.inputs) > 1:
        return None if of.inputs[1] is None else tuple(int(axis) for axis in of.inputs[1].ravel())
    return ()


def _unsqueeze(of: _Operands) -> Array | None:
    axes = _axes(of)
    return None if of.inputs[0] is None or axes is None else np.expand_dims(of.inputs[0], axes)


def _squeeze(of: _Operands) -> Array | None:
    data, axes = of.inputs[0], _axes(of)
    if data is None or axes is None:
        return None
    if not axes and (len(of.inputs) < 2 or of.node.inputs[1] is None):
        axes = tuple(d for d, size in enumerate(data.shape) if size == 1)
    return np.squeeze(data, axes)


def _gather(of: _Operands) -> Array | None:
    data, index = of.inputs
    if data is None or index is None:
        return None
    return _as_array(np.take(data, index.astype(np.int64), axis=of.node.attrs.get("axis", 0)))


def _concat(of: _Operands) -> Array | None:
    parts: list[Array] = []
    for known, type_ in zip(of.inputs, of.types, strict=True):
        shape = _shape_of(type_)
        if known is None and shape is not None and len(shape) == 1 and isinstance(shape[0], int):
            # Only the number of elements is known. One element above the limit is enough for
            # `propagate` to drop the result.
            known = np.full(min(shape[0], LIMIT + 1), None, dtype=object)
        if known is None:
            return None
        parts.append(known)
    return np.concatenate(parts, axis=of.node.attrs.get("axis", 1))


def _slice(of: _Operands) -> Array | None:
    data = of.inputs[0]
    given = zip(of.inputs[1:], of.node.inputs[1:], strict=True)
    if data is None or any(known is None and value is not None for known, value in given):
        return None
    if "starts" in of.node.attrs:
        listed: list[Any] = [of.node.attrs.get(name) for name in ("starts", "ends", "axes")]
    else:
        listed = [None if known is None else known.ravel() for known in of.inputs[1:]]
    starts, ends, axes, steps = cast("Sequence[Any]", [*listed, None, None][:4])
    for k in range(len(starts)):
        axis = k if axes is None else int(axes[k])
        step = 1 if steps is None else int(steps[k])
        selected = slice_of(data.shape[axis], starts[k], ends[k], step)
        data = np.take(data, range(data.shape[axis])[selected], axis)
    return data


def _transpose(of: _Operands) -> Array | None:
    return None if of.inputs[0] is None else of.inputs[0].transpose(of.node.attrs.get("perm"))


def slice_size(size: int, start: int, end: int, step: int) -> int:
    """Return how many elements of an axis Slice selects.

    Args:
        size: Elements of the axis.
        start: First element; negative: counted from the end.
        end: Element to stop before; negative: counted from the end.
        step: Distance of the selected elements, negative for backwards.

    Raises:
        ShapeError: the step is 0.
    """
    begin, stop = slice_ends(size, start, end, step)
    return max(-((begin - stop) // step), 0)


def slice_of(size: int, start: int, end: int, step: int) -> slice:
    """Return what Slice selects on an axis as a slice for NumPy; for arguments see `slice_ends`."""
    begin, stop = slice_ends(size, start, end, step)
    return slice(begin, None if stop < 0 else stop, step)


def slice_ends(size: int, start: int, end: int, step: int) -> tuple[int, int]:
    """Return the first index that Slice selects on an axis, and the index that it stops before.

    With a negative step a start before the first element means the first; Python's slices are
    empty then.

    Args:
        size: Elements of the axis.
        start: First element; negative: counted from the end.
        end: Element to stop before; negative: counted from the end.
        step: Distance of the selected elements, negative for backwards.

    Raises:
        ShapeError: the step is 0.
    """
    if step == 0:
        raise ShapeError("a step of 0")
    if size == 0:
        return 0, 0
    start, end = (at + size if at < 0 else at for at in (start, end))
    # Backwards the selection may end before element 0, which is -1; forwards after the last one.
    first, last = (-1, size - 1) if step < 0 else (0, size)
    return min(max(start, 0), last), min(max(end, first), last)


def _reshape(of: _Operands) -> Array | None:
    data, shape = of.inputs
    if data is None or shape is None or has_symbolic(shape):
        return None
    return data.reshape([int(dim) for dim in shape])


def _where(of: _Operands) -> Array | None:
    return _map(_pick, *of.inputs)


def _pick(condition: Any, one: Any, other: Any) -> Any:
    return None if condition is None else one if condition else other


def _constant_of_shape(of: _Operands) -> Array | None:
    if of.inputs[0] is None or has_symbolic(of.inputs[0]):
        return None
    shape = [int(dim) for dim in of.inputs[0]]
    if math.prod(shape) > LIMIT or any(dim < 0 for dim in shape):
        return None
    value = np.asarray(of.node.attrs.get("value", 0.0)).ravel()[0]
    return np.full(shape, value.item(), dtype=object)


def _expand(of: _Operands) -> Array | None:
    data, shape = of.inputs
    if data is None or shape is None or has_symbolic(shape):
        return None
    wanted = np.broadcast_shapes(data.shape, tuple(int(dim) for dim in shape))
    return np.broadcast_to(data, wanted) if math.prod(wanted) <= LIMIT else None


def _range(of: _Operands) -> Array | None:
    if any(item is None for item in of.inputs):
        return None
    start, limit, delta = (item.item() for item in of.inputs if item is not None)
    count = max(math.ceil((limit - start) / delta), 0)
    # The rank and length of a shape value are fixed in a plan; its elements may be symbolic.
    if is_symbolic(count):
        return None
    return object_array([start + k * delta for k in range(count)]) if count <= LIMIT else None


def _reduce(function: Callable[[Sequence[Any]], Any]) -> Rule:
    def rule(of: _Operands) -> Array | None:
        data, axes = of.inputs[0], _axes(of)
        if data is None or data.ndim != 1 or axes not in ((), (0,), (-1,)):
            return None
        if not axes and of.node.attrs.get("noop_with_empty_axes", 0):
            return data
        if any(item is None or isinstance(item, str) for item in data):
            return None
        result = np.array(function(list(data)), dtype=object)
        return result.reshape(1) if of.node.attrs.get("keepdims", 1) else result

    return rule


def _elements(function: Callable[..., Any]) -> Rule:
    """Return the rule of an elementwise operator whose function takes names and None, too."""

    def rule(of: _Operands) -> Array | None:
        return _map(function, *of.inputs)

    return rule


def _is_number(item: Any) -> bool:
    return item is not None and not isinstance(item, str)


def _numbers(function: Callable[..., Any]) -> Rule:
    """Return the rule of an elementwise operator that is unknown where an operand is no number."""

    def one(*items: Any) -> Any:
        return function(*items) if all(map(_is_number, items)) else None

    return _elements(one)


def _arithmetic(
    function: Callable[[Any, Any], Any], neutral: int, *, commutes: bool = True
) -> Rule:
    """Return the rule of an operator that returns the other operand, a name also, for ``neutral``.

    Args:
        function: The operator on numbers.
        neutral: The right operand that changes nothing.
        commutes: Whether a left operand changes nothing either.
    """

    def one(a: Any, b: Any) -> Any:
        if commutes and _is_number(a) and a == neutral:
            return b
        if _is_number(b) and b == neutral:
            return a
        return function(a, b) if _is_number(a) and _is_number(b) else None

    return _elements(one)


def _floor(item: Any) -> Any:
    return math.floor(item) * 1.0  # ONNX's Floor and Ceil return floats


def _ceil(item: Any) -> Any:
    return math.ceil(item) * 1.0


def _and(a: Any, b: Any) -> Any:
    return a and b


def _or(a: Any, b: Any) -> Any:
    return a or b


def _divide(a: Any, b: Any) -> Any:
    if isinstance(a, int) and isinstance(b, int):
        # ONNX rounds integer division towards zero.
        return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)
    return a / b


def _equal(a: Any, b: Any) -> Any:
    if a is None or b is None:
        return None
    if isinstance(a, str) or isinstance(b, str):
        # A dimension is never negative. Two of different names may be equal.
        if a == b:
            return True
        number = b if isinstance(a, str) else a
        return False if not isinstance(number, str) and number < 0 else None
    return a == b


def _mod(of: _Operands) -> Array | None:
    # With fmod=1 the result has the sign of the dividend, in Python that of the divisor.
    return None if of.node.attrs.get("fmod", 0) else _numbers(operator.mod)(of)


# Operators without a rule that `is_arithmetic` counts as shape arithmetic.
_OTHER_SHAPE_OPERATORS = {
    *("Abs", "Clip", "CumSum", "Flatten", "GatherElements", "GatherND", "OneHot", "Pad", "Pow"),
    *("Reciprocal", "Round", "ScatterElements", "ScatterND", "Sign", "Split", "Sum", "Tile", "Xor"),
}
_RULES: dict[str, Rule] = {
    "Shape": _shape,
    "Size": _size,
    "Constant": _constant,
    "Identity": _first,
    "Cast": _cast,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Gather": _gather,
    "Concat": _concat,
    "Slice": _slice,
    "Reshape": _reshape,
    "Transpose": _transpose,
    "Where": _where,
    "ConstantOfShape": _constant_of_shape,
    "Expand": _expand,
    "Range": _range,
    "ReduceProd": _reduce(math.prod),
    "ReduceSum": _reduce(sum),
    "ReduceMax": _reduce(max),
    "ReduceMin": _reduce(min),
    "Add": _arithmetic(operator.add, 0),
    "Sub": _numbers(operator.sub),
    "Mul": _arithmetic(operator.mul, 1),
    "Div": _arithmetic(_divide, 1, commutes=False),
    "Mod": _mod,
    "Min": _numbers(min),
    "Max": _numbers(max),
    "Neg": _numbers(operator.neg),
    "Floor": _numbers(_floor),
    "Ceil": _numbers(_ceil),
    "Sqrt": _numbers(math.sqrt),
    "Equal": _elements(_equal),
    "Less": _numbers(operator.lt),
    "Greater": _numbers(operator.gt),
    "LessOrEqual": _numbers(operator.le),
    "GreaterOrEqual": _numbers(operator.ge),
    "Not": _numbers(operator.not_),
    "And": _numbers(_and),
    "Or": _numbers(_or),
}
