"""The graphs that `subgraph warmup` compiles without a model: valid, run, on kernels throughout."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import subgraph as sg
from subgraph.tools.cli_inputs import input_arrays, ports
from subgraph.tools.warmup import prepared_graphs, warm
from subgraph.tools.warmup_graphs import FAMILIES

DIGITS = Path(__file__).parents[2] / "examples" / "digits.onnx"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_whole_on_the_cpu(family: str) -> None:
    graph = FAMILIES[family]()
    graph.verify()
    kept = sg.Core().query_model(graph, "CPU")
    outside = [node for node in graph.nodes if node.name not in kept]
    assert all(node.bodies for node in outside)  # loops, whose bodies are regions
    arrays = input_arrays(ports(graph), {}, {}, 0)
    found = sg.compile_model(graph, "CPU")(arrays)
    expected = sg.compile_model(graph, "REFERENCE")(arrays)
    # There half of the products round their input to int8: 64 times half a step, times 0.07.
    most = 0.05 if family == "weights of few bits" else 1e-4
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-3, atol=most, err_msg=name)


def test_what_is_warm_is_not_compiled_again() -> None:
    graphs = prepared_graphs([DIGITS])
    seen: list[tuple[int, str]] = []
    warm(graphs, lambda done, doing: seen.append((done, doing)))
    assert seen[0] == (0, "digits")
    assert warm(graphs, lambda done, doing: None) == 0
