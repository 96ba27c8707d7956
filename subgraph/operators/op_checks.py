"""Checks of subgraph ops: how they run, the types that they state, and the types of results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from subgraph.errors import (
    DeviceError,
    PartitionError,
    ShapeError,
    SubgraphError,
    UnsupportedOpError,
    described,
)
from subgraph.graph.graph import Graph, Value
from subgraph.graph.result_arrays import is_array, is_list
from subgraph.graph.types import TensorType, ValueType, dtype_of, numpy_dtype, with_sizes
from subgraph.system.hooks import Hook
from subgraph.system.registry import nearest
from subgraph.weights.cache import WeightCache

# The type of an output, its dtype, and a predicate for its shape; None: the type is not known.
Check = tuple[TensorType, np.dtype[Any], Callable[[tuple[int, ...]], bool]] | None
DEFAULT_DEVICE = "default"  # the device of an op that names none
# (inner graph, types of its inputs) -> types of its outputs.
region_types: Hook[[Graph, Sequence[ValueType | None]], list[ValueType | None]] = Hook(
    "types of a region"
)


class CheckedOp(Protocol):
    """The part of `SubgraphOp` that these checks read."""

    device: str
    subgraph: Graph

    @property
    def says_types(self) -> bool:
        """Whether the op has an ``infer_types`` of its own."""
        ...

    def infer_types(self, inputs: Sequence[ValueType | None]) -> Sequence[ValueType | None]:
        """Return the types of the outputs for these types of the inputs; None: not known."""
        ...


def check_op(op: object, base: type[object]) -> None:
    """Check that an op can run, when its node is made rather than at its first run.

    Args:
        op: An instance of a child class of ``base``.
        base: The class `SubgraphOp`, of which the op's class has to override ``forward`` or
            ``session``.

    Raises:
        PartitionError: the op overrides neither, or an attribute of the child hides one that the
            base class needs.
    """
    kind = type(op)
    name = kind.__name__
    runs = any(getattr(kind, each) is not getattr(base, each) for each in ("forward", "session"))
    # An object may have a ``forward`` of its own, for example one that wraps another for a test.
    if not runs and "forward" not in vars(op):
        own = {key for key in vars(kind) if not key.startswith("__")}
        near = nearest("forward", own) if own else "it has no method of its own"
        raise PartitionError(
            f"{name} overrides neither forward nor session: write forward(self, inputs), which "
            f"returns a list of arrays ({near})"
        )
    # A child class that stores its own weights under this name would fail later, in code of the
    # framework that its author does not know.
    needed = {"weights": WeightCache, "subgraph": Graph, "device": str, "concurrent": bool}
    for attribute, wanted in needed.items():
        held = getattr(op, attribute)
        if not isinstance(held, wanted):
            raise _hidden(name, attribute, held, f"a {wanted.__name__}")
    held = getattr(op, "fallback", None)
    if held is not None and not hasattr(held, "replace_session"):
        raise _hidden(name, "fallback", held, "the devices that run the subgraph when it fails")


def _hidden(op: str, attribute: str, held: object, wanted: str) -> PartitionError:
    return PartitionError(
        f"{op} has set its attribute {attribute!r} to {held!r}; the base class needs it for "
        f"{wanted}: choose another name"
    )


def output_types(op: CheckedOp, inputs: Sequence[ValueType | None]) -> list[ValueType | None]:
    """Return the result of ``op.infer_types``, checked.

    Raises:
        ShapeError: the inputs do not fit, the method raised, or it returned other than types.
    """
    try:
        given: Any = type(op).infer_types(op, inputs)
    except SubgraphError:
        raise
    except Exception as error:
        raise ShapeError(f"{type(op).__name__}.infer_types raised {described(error)}") from error
    wanted = len(op.subgraph.outputs)
    if not is_list(given):
        shown = repr(given)
    elif len(given) != wanted:
        shown = f"{len(given)} types"
    else:
        strange = [t for t in given if t is not None and not isinstance(t, ValueType)]
        if not strange:
            return list(given)
        shown = repr(strange[0])
    raise ShapeError(
        f"{type(op).__name__}.infer_types returned {shown} for subgraph {op.subgraph.name!r}; "
        f"return a list of {wanted} types such as sg.TensorType('float32', (2, 3)), None for one "
        "not known"
    )


def checks_for(op: CheckedOp, inputs: Sequence[Any]) -> list[Check]:
    """Return a check for each result of a run with these inputs.

    Raises:
        ShapeError: the inputs do not fit the inner graph.
    """
    # Types of the inner graph hold for inputs of the stated types, so inference runs only for
    # others, and for sizes that no input names.
    sizes = None if op.says_types else _named_sizes(op.subgraph.inputs, inputs)
    if sizes is not None:
        types = [with_sizes(value.type, sizes) for value in op.subgraph.outputs]
        if all(not isinstance(type_, TensorType) or type_.is_static for type_ in types):
            return [expected_result(type_) for type_ in types]
    return inferred_checks(op, inputs)


def inferred_checks(op: CheckedOp, inputs: Sequence[Any]) -> list[Check]:
    """Return the checks of `checks_for` as they follow from the inputs alone.

    The names of sizes in the inner graph are not read, which a model file may state wrongly.

    Raises:
        ShapeError: the inputs do not fit the inner graph.
    """
    types = [
        TensorType(dtype_of(item), item.shape) if is_array(item) else value.type
        for value, item in zip(op.subgraph.inputs, inputs, strict=True)
    ]
    try:
        return [expected_result(type_) for type_ in output_types(op, types)]
    except UnsupportedOpError:  # an operator inside has no type inference
        return [None] * len(op.subgraph.outputs)


def first_misfit(results: Sequence[Any], checks: Sequence[Check]) -> int | None:
    """Return the position of the first result that fails its check; None if all pass."""
    for position, (result, check) in enumerate(zip(results, checks, strict=True)):
        if check is not None:
            _, dtype, fits = check
            if getattr(result, "dtype", None) != dtype or not fits(result.shape):
                return position
    return None


def _named_sizes(values: Sequence[Value], inputs: Sequence[Any]) -> dict[str, int] | None:
    """Return the sizes of the named dimensions of inputs.

    Args:
        values: The inputs of an inner graph.
        inputs: One item for each.

    Returns:
        The sizes by name; None if an array does not have the type that the graph states.
    """
    sizes: dict[str, int] = {}
    for value, item in zip(values, inputs, strict=True):
        check = expected_result(value.type)
        if check is None or not is_array(item):
            continue
        type_, dtype, fits = check
        if item.dtype != dtype or not fits(item.shape):
            return None
        for dim, size in zip(type_.shape or (), item.shape, strict=False):
            if isinstance(dim, str) and sizes.setdefault(dim, size) != size:
                return None
    return sizes


def expected_result(type_: ValueType | None) -> Check:
    """Return the check of an array that has to be of a type; None if the type is not known."""
    if not isinstance(type_, TensorType):
        return None
    dims = type_.shape
    dtype = numpy_dtype(type_.dtype)
    if dims is None:
        return type_, dtype, lambda shape: True
    if type_.is_static:
        return type_, dtype, dims.__eq__
    known = [(k, dim) for k, dim in enumerate(dims) if isinstance(dim, int)]

    def fits(shape: tuple[int, ...]) -> bool:
        return len(shape) == len(dims) and all(shape[k] == dim for k, dim in known)

    return type_, dtype, fits


def result_type_error(op: CheckedOp, position: int, result: Any, wanted: TensorType) -> DeviceError:
    """Return the error for a result of ``op.forward`` that has another type than its output.

    Args:
        op: The op that ran.
        position: Number of the output.
        result: What ``forward`` returned for it.
        wanted: Type that follows from the inputs of the run.
    """
    value = op.subgraph.outputs[position]
    dtype = getattr(result, "dtype", None)
    got = f"a {type(result).__name__}" if dtype is None else f"{dtype}{list(result.shape)}"
    given = f"{got} for output {value.name!r} of subgraph {op.subgraph.name!r}"
    return contract_error(op, given, f"it is {wanted}: return a NumPy array of that type")


def contract_error(op: CheckedOp, given: str, wanted: str) -> DeviceError:
    """Return the error for results of ``op.forward`` that break its contract.

    Args:
        op: The op that ran. Of an accelerator's op the error moves the region to its fallback.
        given: What ``forward`` returned, in words.
        wanted: What it has to return, in words.
    """
    error = DeviceError(f"{type(op).__name__}.forward returned {given}; {wanted}")
    error.lost = op.device != DEFAULT_DEVICE
    return error
