"""A small network of the tests of exported and cached models, and how they compare models."""

from __future__ import annotations

import io

import numpy as np

import subgraph as sg
from subgraph import ops
from subgraph.devices.export import region_nodes
from subgraph.engine.cpu.region_op import CpuSubgraphOp
from subgraph.graph.types import Array

X = np.linspace(-1, 1, 2 * 3 * 8 * 8, dtype=np.float32).reshape(2, 3, 8, 8)


def net(seed: int = 0, size: int = 8) -> sg.Graph:
    rng = np.random.default_rng(seed)
    x = sg.input("x", ("N", 3, size, size))
    w = sg.parameter("w", rng.standard_normal((16, 3, 3, 3)).astype(np.float32))
    b = sg.parameter("b", rng.standard_normal(16).astype(np.float32))
    m = sg.parameter("m", rng.standard_normal((16, 10)).astype(np.float32))
    y = ops.Relu(ops.Conv(x, w, b, pads=[1, 1, 1, 1], name="conv"), name="relu")
    pooled = ops.Flatten(ops.GlobalAveragePool(y, name="pool"), name="flat")
    return sg.Graph([x], [ops.MatMul(pooled, m, name="mm"), ops.Abs(y, name="abs")], "net")


def same(a: sg.CompiledModel, b: sg.CompiledModel, x: Array = X) -> None:
    for one, other in zip(a(x).values(), b(x).values(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def exported(model: sg.CompiledModel) -> bytes:
    stream = io.BytesIO()
    model.export_model(stream)
    return stream.getvalue()


def region(model: sg.CompiledModel) -> CpuSubgraphOp:
    """Return the op of the only region of a model, which is CPU's."""
    (node,) = region_nodes(model.graph)
    assert isinstance(node.op, CpuSubgraphOp)
    return node.op


def ladder() -> sg.Graph:
    """Return seven elementwise nodes: two diamonds in a row, and an output beside them."""
    x = sg.input("x", (4,))
    a, b = ops.Relu(x, name="a"), ops.Sin(x, name="b")
    c = ops.Add(a, b, name="c")
    d, e = ops.Tanh(c, name="d"), ops.Cos(c, name="e")
    return sg.Graph([x], [ops.Sub(d, e, name="f"), ops.Neg(a, name="g")], name="ladder")
