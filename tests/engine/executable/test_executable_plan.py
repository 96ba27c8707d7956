"""Executable plans: a plan that exceeds the memory budget is refused before memory is reserved."""

from __future__ import annotations

import io
from collections.abc import Callable

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.engine.executable import executable_plan
from subgraph.graph.limits import limited

pytestmark = pytest.mark.plain_memory
LARGE = np.ones((1000, 64), np.float32)
BUDGET = 400_000  # below what the plan for these rows needs


def chain(rows: int | str) -> sg.Graph:
    """Return a graph with an intermediate value of the input's size."""
    x = sg.input("x", (rows, 64))
    return sg.Graph([x], [ops.MatMul(ops.Softmax(x, axis=0), np.eye(64, dtype=np.float32))], "net")


@pytest.fixture
def reserved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list to which the sizes of all arenas are appended."""
    sizes: list[int] = []
    allocate = executable_plan.mapped_empty

    def counted(nbytes: int) -> object:
        sizes.append(nbytes)
        return allocate(nbytes)

    monkeypatch.setattr(executable_plan, "mapped_empty", counted)
    return sizes


def refused(run: Callable[[], object], reserved: list[int]) -> None:
    """Check that a run is refused without memory, and works once the budget allows it."""
    reserved.clear()
    with limited(memory=BUDGET), pytest.raises(sg.LimitError, match="a region, for the values"):
        run()
    assert reserved == []
    run()
    assert max(reserved) > BUDGET // 2


def test_an_imported_program_over_the_budget(reserved: list[int]) -> None:
    core, stream = sg.Core(), io.BytesIO()
    model = core.compile_model(chain(len(LARGE)), "CPU")
    model(LARGE)
    model.export_model(stream)
    stream.seek(0)
    imported = core.import_model(stream, "CPU")
    refused(lambda: imported(LARGE), reserved)


@pytest.mark.parametrize("runs", [0, 1, 2])
def test_a_plan_of_another_request_over_the_budget(runs: int, reserved: list[int]) -> None:
    model = sg.Core().compile_model(chain("N"), "CPU")
    for rows in (2, 3, len(LARGE)):
        model(LARGE[:rows])
    request = model.create_infer_request()
    for rows in range(2, 2 + runs):
        request.infer(LARGE[:rows])
    refused(lambda: request.infer(LARGE), reserved)
