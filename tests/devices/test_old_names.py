"""Options and metrics under the names that earlier versions of OpenVINO have for them."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.runtime.settings import OLD_NAMES

X = np.ones((2, 3), np.float32)


def relu() -> sg.Graph:
    x = sg.input("x", (2, 3))
    return sg.Graph([x], [ops.Relu(x)], "relu")


@pytest.mark.parametrize(
    "device", ["CPU", "REFERENCE", "HETERO:CPU,REFERENCE", "MULTI:CPU,REFERENCE", "AUTO:CPU"]
)
@pytest.mark.parametrize("value", [True, "YES"])
def test_perf_count_profiles(device: str, value: Any) -> None:
    model = sg.compile_model(relu(), device, {"PERF_COUNT": value})
    assert model.get_property("PERF_COUNT") is True
    assert model.get_property("ENABLE_PROFILING") is True
    request = model.create_infer_request()
    request.infer(X)
    assert request.profile()


def test_old_names_of_options_in_every_place(monkeypatch: pytest.MonkeyPatch) -> None:
    core = sg.Core()
    core.set_property("CPU", {"CPU_THREADS_NUM": 3})
    assert core.get_property("CPU", "CPU_THREADS_NUM") == 3
    assert core.get_property("CPU", "INFERENCE_NUM_THREADS") == 3
    core.set_property({"CPU_THROUGHPUT_STREAMS": 2})
    model = core.compile_model(relu(), "CPU", {"CPU_THREADS_NUM": 4})
    assert model.get_property("INFERENCE_NUM_THREADS") == 4
    assert model.get_property("NUM_STREAMS") == 2
    model = core.compile_model(relu(), "HETERO", {"TARGET_FALLBACK": "CPU,REFERENCE"})
    assert model.device == "HETERO:CPU,REFERENCE"
    nested: dict[str, Any] = {"CPU": {"CPU_THREADS_NUM": 5}}
    for config in (nested, {"CPU_THREADS_NUM": 5}):
        model = core.compile_model(relu(), "HETERO:CPU,REFERENCE", config)
        assert core.device("CPU").options_for(model.configs["CPU"]).INFERENCE_NUM_THREADS == 5
    monkeypatch.setenv("SUBGRAPH_REFERENCE_PERF_COUNT", "yes")
    assert core.get_property("REFERENCE", "ENABLE_PROFILING") is True
    monkeypatch.setenv("SUBGRAPH_REFERENCE_ENABLE_PROFILING", "no")
    assert core.get_property("REFERENCE", "ENABLE_PROFILING") is False
    with pytest.raises(sg.ConfigError, match="ENABLE_PROFILING' takes bool, got 'maybe'"):
        core.set_property("CPU", {"PERF_COUNT": "maybe"})


def test_what_was_named_last_counts() -> None:
    config = {"ENABLE_PROFILING": False, "PERF_COUNT": True}
    assert sg.compile_model(relu(), "CPU", config).get_property("ENABLE_PROFILING") is True
    backwards = dict(reversed(config.items()))
    assert sg.compile_model(relu(), "CPU", backwards).get_property("ENABLE_PROFILING") is False


def test_an_import_takes_old_names(tmp_path: Path) -> None:
    path = tmp_path / "model.blob"
    sg.compile_model(relu(), "CPU").export_model(path)
    model = sg.import_model(path, "CPU", {"PERF_COUNT": True})
    assert model.get_property("ENABLE_PROFILING") is True


def test_old_names_of_metrics() -> None:
    core = sg.Core()
    assert core.get_property("CPU", "IMPORT_EXPORT_SUPPORT") is True
    assert core.compile_model(relu(), "CPU").get_property("MODEL_NAME") == "relu"
    assert not set(OLD_NAMES) & set(core.get_property("CPU", "SUPPORTED_PROPERTIES"))


def test_a_device_may_have_an_option_of_an_old_name_of_its_own() -> None:
    @attrs.frozen
    class Options(sg.DeviceOptions):
        PERF_COUNT: int = sg.option(0, "how many counters the hardware uses", minimum=0)

    class Counting(sg.Device):
        options_class = Options

        def supports(self, node: sg.Node, options: Any) -> bool:
            return True

    class Foreign(sg.Device):
        """Reads its configuration by itself, as OpenVINO's guide shows."""

        seen: Mapping[str, Any] | None = None

        def query_model(
            self, graph: sg.Graph, config: Mapping[str, Any] | None = None
        ) -> dict[str, str]:
            return {node.name: self.name for node in graph.nodes}

        def compile_model(
            self, graph: sg.Graph, config: Mapping[str, Any] | None = None
        ) -> sg.CompiledModel:
            Foreign.seen = config
            return sg.CompiledModel(graph, device=self.name)

        def get_property(self, name: str) -> Any:
            if name == "SUPPORTED_CONFIG_KEYS":
                return ["PERF_COUNT"]
            if name == "SUPPORTED_PROPERTIES":
                return {"PERF_COUNT": "RW"}
            raise KeyError(name)

    core = sg.Core()
    core.register_device("COUNTING", Counting)
    core.register_device("FOREIGN", Foreign)
    core.set_property("COUNTING", {"PERF_COUNT": 7})
    assert core.get_property("COUNTING", "PERF_COUNT") == 7
    assert core.get_property("COUNTING", "ENABLE_PROFILING") is False
    core.compile_model(relu(), "FOREIGN", {"PERF_COUNT": "YES"})
    assert Foreign.seen == {"PERF_COUNT": "YES"}
    core.compile_model(relu(), "HETERO:FOREIGN", {"PERF_COUNT": "YES"})
    assert Foreign.seen is not None
    assert Foreign.seen["PERF_COUNT"] == "YES"


class Meeting(sg.SubgraphOp):
    """Notes how many runs are inside at a time, and waits a moment for others."""

    inside = 0
    most = 0
    lock = threading.Lock()
    together = threading.Event()

    def forward(self, inputs: list[Any]) -> list[Any]:
        kind = type(self)
        with kind.lock:
            kind.inside += 1
            kind.most = max(kind.most, kind.inside)
            if kind.inside == 2:
                kind.together.set()
        kind.together.wait(0.1)
        with kind.lock:
            kind.inside -= 1
        return [np.maximum(inputs[0], 0)]


class Slow(sg.Device):
    def supports(self, node: sg.Node, options: Any) -> bool:
        return True

    def create_op(self, graph: sg.Graph, options: Any) -> sg.SubgraphOp:
        return Meeting(graph)

    def optimal_requests(self, options: Any) -> int:
        return 2


@pytest.mark.parametrize("exclusive", [True, False])
@pytest.mark.parametrize("device", ["SLOW", "HETERO:SLOW", "MULTI:SLOW"])
def test_exclusive_requests_of_all_models_run_one_at_a_time(device: str, exclusive: bool) -> None:
    core = sg.Core()
    core.register_device("SLOW", Slow)
    Meeting.most = 0
    Meeting.together.clear()
    config = {"EXCLUSIVE_ASYNC_REQUESTS": exclusive}
    models = [core.compile_model(relu(), device, config) for _ in range(2)]
    requests = [model.create_infer_request() for model in models for _ in range(2)]
    for request in requests:
        request.start_async(X)
    for request in requests:
        results = request.wait(20)
        assert results is not None
        np.testing.assert_array_equal(results[0], X)
    assert Meeting.most == 1 if exclusive else Meeting.most >= 2


def test_the_table_of_the_docs_is_complete() -> None:
    text = (Path(__file__).parents[2] / "docs" / "devices.md").read_text()
    for old, new in OLD_NAMES.items():
        rows = [line for line in text.splitlines() if f"`{old}`" in line and line.startswith("|")]
        assert len(rows) == 1, old
        assert rows[0].endswith(f"| `{new}` |")
