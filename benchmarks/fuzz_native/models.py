"""Target: the bytes of a model file, loaded, compiled for CPU and run."""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import onnx
from google.protobuf.message import DecodeError
from robustness import damaged_bytes, damaged_message

import subgraph as sg
from subgraph.graph.types import TensorType, numpy_dtype
from subgraph.testing import conformance

from .draw import EDGE_NUMBERS
from .outcome import refuses

_MAX_ELEMENTS = 1 << 16  # of an input or stored tensor
_MAX_SEED_BYTES = 2048  # bytes
_MAX_SEEDS_PER_OPERATORS = 1  # seeds with the same list of operators


def seeds() -> Iterator[bytes]:
    """Yield small models of ONNX's suite: for each list of operators the first ones."""
    kept: Counter[tuple[str, ...]] = Counter()
    for case in conformance.cases():
        if case.kind != "real":
            model, _ = case.load()
            content = model.SerializeToString()
            operators = tuple(node.op_type for node in model.graph.node)
            if len(content) <= _MAX_SEED_BYTES and kept[operators] < _MAX_SEEDS_PER_OPERATORS:
                kept[operators] += 1
                yield content


def run(data: bytes) -> None:
    """Load, compile and run a model; its bytes determine the inputs."""
    compiled: list[sg.CompiledModel] = []
    if not refuses(lambda: compiled.append(sg.compile_model(sg.load(data), "CPU"))):
        model = compiled[0]
        rng = np.random.default_rng(zlib.crc32(data))
        given = [_given(port.type, rng) for port in model.inputs]
        if all(item is not None for item in given):
            refuses(lambda: model(given))


def _given(type_: Any, rng: np.random.Generator) -> Any:
    """Return an array for an input; None if it would be too large or is no numeric tensor."""
    if not isinstance(type_, TensorType) or type_.dtype == "string":
        return None
    shape = [d if isinstance(d, int) else int(rng.integers(0, 6)) for d in type_.shape or (3,)]
    dtype = numpy_dtype(type_.dtype)
    if np.prod([float(max(d, 1)) for d in shape]) > _MAX_ELEMENTS:
        return None
    array = rng.integers(-9, 9, shape)
    if dtype.kind in "iu" and array.size and rng.random() < 0.3:
        info = np.iinfo(dtype)
        array.reshape(-1)[0] = np.clip(
            int(rng.choice(EDGE_NUMBERS)), info.min, min(info.max, 2**62)
        )
    with np.errstate(all="ignore"):
        return array.astype(dtype)


def mutate(data: bytes, largest: int, seed: int) -> bytes:
    """Return a changed model: its fields, or its bytes if they are no valid message.

    Args:
        data: The bytes.
        largest: Largest number of bytes of the result.
        seed: Seed of the changes.
    """
    rng = random.Random(seed)
    try:
        model = onnx.ModelProto.FromString(data)
    except DecodeError:
        return damaged_bytes(data, rng)[:largest]
    if rng.random() < 0.1:
        return damaged_bytes(data, rng)[:largest]
    try:
        for _ in range(rng.randint(1, 3)):
            if rng.random() < 0.5 and _change_size(model.graph, rng):
                continue
            model = onnx.ModelProto.FromString(damaged_message(model, rng))
        changed = model.SerializeToString()
    except (DecodeError, ValueError):  # an earlier change has made a name or number invalid
        return damaged_bytes(data, rng)[:largest]
    return changed if len(changed) <= largest else data


def _change_size(graph: onnx.GraphProto, rng: random.Random) -> bool:
    """Give a stored tensor another size with data of that size, or an input another dimension."""
    tensors = [
        *graph.initializer,
        *(a.t for n in graph.node for a in n.attribute if a.HasField("t")),
    ]
    tensors = [t for t in tensors if t.data_type not in (0, onnx.TensorProto.STRING)]
    infos = [i for i in graph.input if i.type.tensor_type.shape.dim]
    if infos and (not tensors or rng.random() < 0.4):
        dim = rng.choice(rng.choice(infos).type.tensor_type.shape.dim)
        if rng.random() < 0.5:
            dim.dim_param = rng.choice("NMK")
        else:
            dim.dim_value = rng.choice((0, 1, 2, 3, 4, 5, 7, 8, 16, 17, dim.dim_value + 1))
        return True
    if not tensors:
        return False
    return _resize(rng.choice(tensors), rng)


def _resize(tensor: onnx.TensorProto, rng: random.Random) -> bool:
    try:
        array = onnx.numpy_helper.to_array(tensor)
    except Exception:
        return False  # an earlier change has made it invalid
    shape = list(array.shape)
    if shape and rng.random() < 0.7:
        axis = rng.randrange(len(shape))
        shape[axis] = rng.choice(
            (0, 1, 2, shape[axis] + 1, max(shape[axis] - 1, 0), 2 * shape[axis])
        )
    elif shape and rng.random() < 0.5:
        shape.pop(rng.randrange(len(shape)))
    else:
        shape.insert(rng.randint(0, len(shape)), rng.choice((1, 2)))
    if len(shape) > 8 or np.prod(shape) > _MAX_ELEMENTS:
        return False
    resized: Any = np.resize(array, shape) if array.size else np.zeros(shape, array.dtype)
    if resized.dtype.kind in "iu" and resized.size and rng.random() < 0.3:
        info = np.iinfo(resized.dtype)
        resized.reshape(-1)[rng.randrange(resized.size)] = max(
            min(rng.choice(EDGE_NUMBERS), info.max), info.min
        )
    tensor.CopyFrom(onnx.numpy_helper.from_array(resized, tensor.name))
    return True
