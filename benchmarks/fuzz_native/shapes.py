"""Target: valid models on inputs of wrong shapes and values; CPU is compared with REFERENCE.

The bytes choose a case of ONNX's suite, the inputs that become constants, the shapes that the model
states, and changes of the inputs' shapes and values (indices out of range). Both devices must raise
an error, or both must return the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np
import onnx

import subgraph as sg
from subgraph.testing import conformance

from .draw import EDGE_NUMBERS, Draw
from .outcome import Finding

_MAX_ELEMENTS = 1 << 14  # of a changed input
_MAX_ITERATIONS = 1000  # of a Loop: it runs for as long as it is asked to
_MAX_MODEL_BYTES = 1 << 16  # bytes of a case's model
# Categories with random results, or without numbers.
_SKIPPED_CATEGORIES = ("random", "strings, text")


@cache
def _cases() -> list[conformance.Case]:
    kept: list[conformance.Case] = []
    for case in conformance.cases():
        if (
            case.kind in ("node", "simple")
            and case.category not in _SKIPPED_CATEGORIES
            and "_expanded" not in case.name
        ):
            model, sets = case.load()
            arrays = sets and all(isinstance(item, np.ndarray) for item in sets[0][0])
            numbers = arrays and all(item.dtype.kind in "iufb" for item in sets[0][0])
            if numbers and sets[0][0] and model.ByteSize() <= _MAX_MODEL_BYTES:
                kept.append(case)
    return kept


def seeds() -> Iterator[bytes]:
    """Yield an input for every case."""
    rng = random.Random(0)
    for number in range(len(_cases())):
        yield number.to_bytes(2, "big") + rng.randbytes(16)


def run(data: bytes) -> None:
    """Run one input."""
    draw = Draw(data)
    number = draw.below(len(_cases()))
    case = _cases()[number]
    _, sets = case.load()
    shapes = draw.below(3)
    constants = draw.byte() & draw.byte() if draw.often(0.3) else 0
    inputs = [_changed(item, draw) for item in sets[0][0]]
    model, _ = case.load()
    op_type = model.graph.node[0].op_type
    if op_type == "Loop":  # the first input is the number of iterations
        inputs[0] = np.asarray(np.minimum(inputs[0], _MAX_ITERATIONS))
    kept = tuple(k for k in range(len(inputs)) if constants >> k & 1)
    if kept:
        content = _model(number, shapes, kept, [inputs[k] for k in kept])
        models = [_compiled(content, device) for device in ("REFERENCE", "CPU")]
    else:
        models = [_shared(number, shapes, device) for device in ("REFERENCE", "CPU")]
    given = [item for k, item in enumerate(inputs) if k not in kept]
    expected, got = (_ended(model, given) for model in models)
    _compare(op_type, expected, got, case.name)


def _changed(item: Any, draw: Draw) -> Any:
    """Return an array unchanged, of another shape, or with a few other values."""
    if item.dtype.names is not None or draw.often(0.5):
        return item
    shape = list(item.shape)
    if draw.often(0.7) and shape:
        for _ in range(1 + draw.below(2)):
            axis = draw.below(len(shape))
            size = shape[axis]
            shape[axis] = draw.choice((size + 1, max(size - 1, 0), 0, 1, 2, 2 * size, 17, 33))
    elif draw.often(0.3) and shape:
        shape.pop(draw.below(len(shape)))
    elif draw.often(0.3):
        shape.insert(draw.below(len(shape) + 1), draw.choice((1, 2)))
    if int(np.prod(shape)) > _MAX_ELEMENTS:
        return item
    made: Any = np.resize(item, shape) if item.size else np.zeros(shape, item.dtype)
    if made.dtype.kind in "iu" and made.size and draw.often(0.5):
        info = np.iinfo(made.dtype)
        for _ in range(1 + draw.below(2)):
            number = max(min(draw.choice(EDGE_NUMBERS), int(info.max)), int(info.min))
            made.reshape(-1)[draw.below(made.size)] = number
    return made


def _model(number: int, shapes: int, kept: Sequence[int], arrays: Sequence[Any]) -> bytes:
    """Return a case's model with some inputs as constants.

    Args:
        number: Number of the case.
        shapes: 0: equal sizes have equal names; 1: each size has its own name; 2: no shapes.
        kept: Positions of the inputs that become constants.
        arrays: Their values.
    """
    model = onnx.ModelProto()
    model.CopyFrom(_cases()[number].load()[0])
    graph = model.graph
    del graph.value_info[:]
    for k, info in enumerate([*graph.input, *graph.output]):
        tensor = info.type.tensor_type
        if k >= len(graph.input) or shapes == 2:
            tensor.ClearField("shape")
        elif shapes == 1 or k not in kept:
            for axis, dim in enumerate(tensor.shape.dim):
                dim.dim_param = f"d{k}_{axis}" if shapes == 1 else f"d{dim.dim_value}"
    names = [graph.input[k].name for k in kept]
    for name, array in zip(names, arrays, strict=True):
        graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    left = [info for info in graph.input if info.name not in names]
    del graph.input[:]
    graph.input.extend(left)
    return model.SerializeToString()


def _compiled(content: bytes, device: str) -> Any:
    """Return a compiled model, or the SubgraphError of compilation."""
    try:
        return sg.compile_model(sg.load(content), device)
    except sg.InternalError:
        raise
    except sg.SubgraphError as error:
        return error


@lru_cache(256)
def _shared(number: int, shapes: int, device: str) -> Any:
    return _compiled(_model(number, shapes, (), ()), device)


def _ended(model: Any, given: Sequence[Any]) -> Any:
    """Return the results, or the SubgraphError of compilation or of the run."""
    if isinstance(model, sg.SubgraphError):
        return model
    try:
        results = model([np.array(item) for item in given])
        return [results[k] for k in range(len(model.outputs))]
    except sg.InternalError:
        raise
    except sg.SubgraphError as error:
        return error


def _compare(name: str, expected: Any, got: Any, case: str) -> None:
    if any(isinstance(ended, sg.LimitError) for ended in (expected, got)):
        return  # devices need different amounts of memory for one model
    refused = [isinstance(ended, sg.SubgraphError) for ended in (expected, got)]
    if all(refused):
        return
    if any(refused):
        who, why = ("REFERENCE", expected) if refused[0] else ("CPU", got)
        raise Finding(f"{name}: only {who} refuses; {case}: {type(why).__name__}: {why}")
    for one, other in zip(expected, got, strict=True):
        _compare_values(name, one, other, case)


def _compare_values(name: str, one: Any, other: Any, case: str) -> None:
    if not isinstance(one, np.ndarray):
        return
    if one.shape != other.shape or one.dtype != other.dtype:
        types = f"{other.dtype}{other.shape}, not {one.dtype}{one.shape}"
        raise Finding(f"{name}: other type; {case}: {types}")
    if one.dtype.kind in "OSU":
        if one.tolist() != other.tolist():
            raise Finding(f"{name}: other strings; {case}")
        return
    if not one.size:
        return  # NumPy cannot convert some shapes without elements: their other sizes overflow
    close = one.astype(np.float64), other.astype(np.float64)
    tolerance = 1e-2 if one.dtype.itemsize <= 2 else 1e-3
    scale = float(np.nanmax(np.abs(close[0]), initial=1.0, where=np.isfinite(close[0])))
    if not np.allclose(*close, tolerance, tolerance * scale, equal_nan=True):
        values = f"{other.reshape(-1)[:8]}, not {one.reshape(-1)[:8]}"
        raise Finding(f"{name}: other values; {case}: {values}")
