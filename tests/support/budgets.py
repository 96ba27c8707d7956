"""Models as bytes, and bounds of the time and memory that a test may take."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import onnx
from onnx import TensorProto, helper

_FLOAT = TensorProto.FLOAT


def tensor_info(name: str, shape: Sequence[int | str] | None, dtype: int = _FLOAT) -> Any:
    return helper.make_tensor_value_info(name, dtype, shape)


def model_bytes(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    weights: Sequence[onnx.TensorProto] = (),
    functions: Sequence[onnx.FunctionProto] = (),
) -> bytes:
    graph = helper.make_graph(nodes, "g", inputs, outputs, list(weights))
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("own", 1)]
    model = helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=10)
    return model.SerializeToString()


@contextmanager
def within(seconds: float) -> Generator[None]:
    begin = time.perf_counter()
    yield
    assert time.perf_counter() - begin < seconds


@contextmanager
def peak_below(count: int) -> Generator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < count
    finally:
        tracemalloc.stop()
