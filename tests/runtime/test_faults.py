"""Faults that are nobody's device's: a user's own op that raises; files for fewer devices."""

from __future__ import annotations

import io
import logging
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops, passes
from subgraph.engine.executable.executable_plan import ExecutablePlan

X = np.ones((2, 4), np.float32)


class Picky(sg.SubgraphOp):
    """Computes Relu; refuses large numbers."""

    def forward(self, inputs: list[Any]) -> list[Any]:
        if inputs[0].max() > 5:
            raise RuntimeError("too large for me")
        return [np.maximum(inputs[0], 0)]


class PickyProperty(sg.SubgraphProperty):
    def create_subgraph_selector(self) -> sg.SubgraphSelector:
        return sg.ContainOpSelector({"Relu"})

    def create_subgraph_node(self, subgraph: sg.Graph, subgraph_id: int) -> sg.Node:
        return sg.subgraph_node(subgraph, op=Picky(subgraph), name=f"picky{subgraph_id}")


def graph() -> sg.Graph:
    x = sg.input("x", ("N", 4))
    return sg.Graph([x], [ops.Neg(ops.Relu(x, name="relu"), name="neg")], "net")


@pytest.mark.parametrize(
    "device", ["CPU", "REFERENCE", "HETERO:CPU,REFERENCE", "MULTI:CPU,REFERENCE", "AUTO"]
)
def test_a_users_op_that_raises_takes_no_device_out(device: str, caplog: Any) -> None:
    work = graph()
    work.attrs["subgraph_property"] = PickyProperty()
    cut = passes.apply_pass(work, "PartitionGraph")
    model = sg.compile_model(cut, device, {"RUNTIME_FALLBACK": False})
    requests = [model.create_infer_request() for _ in range(4)]
    with caplog.at_level(logging.WARNING):
        for number, request in enumerate(requests):
            request.start_async(X * (10 if number == 2 else 1))
        for number, request in enumerate(requests):
            if number == 2:
                with pytest.raises(sg.DeviceError, match=r"picky0.*too large for me") as caught:
                    request.wait()
                assert not caught.value.lost
            else:
                np.testing.assert_array_equal(request.wait()[0], -X)  # type: ignore[index]
    np.testing.assert_array_equal(requests[2].infer(X)[0], -X)
    assert not [r for r in caplog.records if "goes on without" in r.getMessage()]


def test_a_file_is_imported_for_fewer_devices() -> None:
    """What was configured for a device that is not asked for is no error."""
    core, work = sg.Core(), graph()
    work.node("relu").metadata = {"affinity": "REFERENCE"}
    config = {"CPU": {"FUSION": False}, "REFERENCE": {"PERFORMANCE_HINT": "LATENCY"}}
    model = core.compile_model(work, "HETERO:CPU,REFERENCE", config)
    stream = io.BytesIO()
    model.export_model(stream)
    for device in ("HETERO:REFERENCE", "HETERO:CPU", "HETERO:REFERENCE,CPU", "CPU", "AUTO"):
        stream.seek(0)
        np.testing.assert_array_equal(core.import_model(stream, device)(X)[0], -X)


def test_a_device_lost_after_some_runs(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """A run like the last one takes a shorter way; what fails there is taken over all the same."""
    model = sg.Core().compile_model(graph(), "CPU")
    wanted = model(X)[0]
    np.testing.assert_array_equal(model(X)[0], wanted)
    runs: list[int] = []

    def lost(*_: Any) -> Any:
        runs.append(1)
        raise sg.DeviceError("device lost")

    monkeypatch.setattr(ExecutablePlan, "run", lost)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            np.testing.assert_allclose(model(X)[0], wanted, rtol=1e-6)
    assert caplog.text.count("continues on REFERENCE: device lost") == 1
    assert caplog.text.count("runs on REFERENCE from now on") == 1
    assert runs


def test_a_run_that_found_no_memory_is_made_elsewhere_and_the_next_is_not(
    monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    model = sg.Core().compile_model(graph(), "CPU")
    wanted = model(X)[0]
    runs: list[int] = []

    def full(*_: Any) -> Any:
        runs.append(1)
        raise MemoryError("3 TiB")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(ExecutablePlan, "run", full)
        for _ in range(2):
            tried = len(runs)
            np.testing.assert_allclose(model(X)[0], wanted, rtol=1e-6)
            assert len(runs) > tried, "each run asks the CPU first"
    assert caplog.text.count("failed on device CPU; the run continues on REFERENCE: 3 TiB") == 1
    assert model.execution_devices == ["CPU"]
    np.testing.assert_array_equal(model(X)[0], wanted)
