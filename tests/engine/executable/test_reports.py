"""Reports of kernels about operands: raised by the run that made them, and forgotten after it."""

from __future__ import annotations

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.devices.export import region_nodes
from subgraph.engine.cpu.region_op import CpuSubgraphOp
from subgraph.engine.cpu.region_session import CpuSession
from subgraph.engine.executable.executable_plan import ExecutablePlan

ROWS = np.arange(12, dtype=np.float32).reshape(4, 3)


def test_a_report_of_a_run_that_failed_is_forgotten() -> None:
    """The next run of a program does not raise what one that never came to its end had found."""
    x, i = sg.input("x", (4, 5000), "float32"), sg.input("i", (2,), "int64")
    graph = sg.Graph([x, i], [ops.Gather(x, i)])
    (node,) = region_nodes(sg.compile_model(graph, "CPU").graph)
    assert isinstance(node.op, CpuSubgraphOp)
    session = node.op.session()
    assert isinstance(session, CpuSession)
    data, right = np.ones((4, 5000), np.float32), np.array([0, 1])
    session([data, right])
    (program,) = session._bound.values()
    assert isinstance(program, ExecutablePlan)
    assert program._slot is not None
    program._slot._words[0] = 1  # as a kernel leaves it before a later step fails
    assert session([data, right])[0].shape == (2, 5000)


def test_an_index_in_a_loop_is_reported() -> None:
    x, n = sg.input("x", (4, 3), "float32"), sg.input("n", (), "int64")
    i, going, total = (sg.input("i", (), "int64"), sg.input("c", (), "bool"), sg.input("t", (3,)))
    row = ops.Gather(sg.capture(x), i, name="culprit")
    body = sg.Graph(
        inputs=[i, going, total], outputs=[ops.Identity(going), ops.Add(total, row)], name="body"
    )
    start = sg.parameter("start", np.zeros(3, np.float32))
    y = ops.Loop(n, None, start, body=body)
    model = sg.compile_model(sg.Graph(inputs=[x, n], outputs=[y]), "CPU")
    np.testing.assert_array_equal(model([ROWS, np.array(4)])[0], ROWS.sum(0))
    for count in (6, 1 << 62):  # the loop ends with the first report, not with its last iteration
        with pytest.raises(sg.ShapeError, match=r"culprit.*outside"):
            model([ROWS, np.array(count)])
    np.testing.assert_array_equal(model([ROWS, np.array(3)])[0], ROWS[:3].sum(0))
