"""Compile kernels ahead of time, so that the first run of a model finds them on disk.

Models say best which kernels they need: each is compiled for the CPU and run once on random inputs.
Without models, small graphs of the usual operator families stand in for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import subgraph as sg
from subgraph import ops
from subgraph.cli_inputs import input_arrays, ports
from subgraph.engine import toolchain
from subgraph.graph import Graph


def warm_models(models: Sequence[Path], report: Callable[[str], None]) -> int:
    """Compile what these models need; without models, what common ones do.

    Args:
        models: ONNX files.
        report: Called with the name of each kernel that is compiled.

    Returns:
        How many kernels were compiled; the others were on disk.
    """
    compiled: list[str] = []

    def listener(event: Any) -> None:
        if event.seconds is None:
            return
        compiled.append(event.kernel.description)
        report(event.kernel.description)

    end = toolchain.listen(listener)
    try:
        for graph in [sg.load(path) for path in models] or list(common_graphs()):
            for threads in (1, 0):
                model = sg.compile_model(graph, "CPU", {"INFERENCE_NUM_THREADS": threads})
                model(input_arrays(ports(graph), [], {}, 0))
    finally:
        end()
    return len(compiled)


def common_graphs() -> Iterator[Graph]:
    """Yield small graphs whose kernels are those of convolutional networks and transformers."""
    yield _convolutions()
    yield _transformer()
    yield _perceptron()


def _weight(name: str, *shape: int) -> Any:
    return sg.parameter(name, np.full(shape, 0.01, np.float32))


def _convolutions() -> Graph:
    x = sg.input("image", (1, 3, 64, 64))
    h = ops.Relu(ops.Conv(x, _weight("stem", 64, 3, 7, 7), strides=[2, 2], pads=[3] * 4))
    h = ops.MaxPool(h, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    for k, stride in enumerate((1, 2)):
        wide = ops.Conv(h, _weight(f"a{k}", 64, 64, 3, 3), pads=[1] * 4, strides=[stride] * 2)
        deep = ops.Clip(ops.Conv(ops.Relu(wide), _weight(f"b{k}", 64, 64, 1, 1)), 0.0, 6.0)
        depth = ops.Conv(deep, _weight(f"c{k}", 64, 1, 3, 3), pads=[1] * 4, group=64)
        h = ops.Relu(ops.Add(depth, wide))
    h = ops.Concat(h, ops.AveragePool(h, kernel_shape=[3, 3], pads=[1] * 4), axis=1)
    pooled = ops.Flatten(ops.GlobalAveragePool(h))
    return Graph([x], [ops.Softmax(ops.Gemm(pooled, _weight("fc", 128, 10), _weight("bias", 10)))])


def _transformer(width: int = 64, heads: int = 4) -> Graph:
    x = sg.input("x", (1, 16, width))
    ones, zeros = _weight("scale", width), _weight("shift", width)

    def split(name: str) -> Any:
        projected = ops.Add(ops.MatMul(x, _weight(name, width, width)), _weight(f"{name}_b", width))
        shape = np.array([1, 16, heads, width // heads], np.int64)
        return ops.Transpose(ops.Reshape(projected, shape), perm=[0, 2, 1, 3])

    q, k, v = split("q"), split("k"), split("v")
    scores = ops.Mul(ops.MatMul(q, ops.Transpose(k, perm=[0, 1, 3, 2])), 0.25)
    mixed = ops.Transpose(ops.MatMul(ops.Softmax(scores), v), perm=[0, 2, 1, 3])
    joined = ops.Reshape(mixed, np.array([1, 16, width], np.int64))
    h = ops.LayerNormalization(ops.Add(x, ops.MatMul(joined, _weight("o", width, width))), ones)
    inner = ops.Gelu(ops.Add(ops.MatMul(h, _weight("up", width, 256)), _weight("up_b", 256)))
    h = ops.Add(h, ops.MatMul(inner, _weight("down", 256, width)))
    return Graph([x], [ops.LayerNormalization(h, ones, zeros)])


def _perceptron() -> Graph:
    x = sg.input("x", (1, 16))
    h = ops.Relu(ops.Gemm(x, _weight("a", 16, 32), _weight("a_b", 32)))
    return Graph([x], [ops.Sigmoid(ops.Gemm(h, _weight("b", 32, 4), _weight("b_b", 4)))])
