"""Values and checks for tests of fusions."""

from __future__ import annotations

import numpy as np

import subgraph as sg
from subgraph import passes
from subgraph.graph.types import Array
from subgraph.passes.patterns import weight_values

rng = np.random.default_rng(0)


def values(*shape: int) -> Array:
    return rng.standard_normal(shape).astype(np.float32)


def weight(name: str, *shape: int) -> sg.Value:
    return sg.parameter(name, values(*shape))


def number(name: str, value: float) -> sg.Value:
    return sg.parameter(name, np.float32(value))


def fused_ops(graph: sg.Graph) -> list[str]:
    """Return the operators that run, without those on weights alone."""
    fused = passes.apply_pass(graph, "CpuFusion")
    fused.verify()
    weights = weight_values(fused)
    return [node.op_type for node in fused.nodes if node.outputs[0] not in weights]


def check(graph: sg.Graph, *inputs: Array) -> None:
    want = sg.compile_model(graph, "REFERENCE")(list(inputs))
    got = sg.compile_model(graph, "CPU")(list(inputs))
    for k in range(len(want)):
        scale = float(np.abs(want[k]).max())
        np.testing.assert_allclose(got[k], want[k], rtol=0, atol=2e-5 * scale)
