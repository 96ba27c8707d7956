"""Metrics of devices and compiled models: versions, ranges of requests, checked types."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest

import subgraph as sg
from subgraph import ops
from subgraph.system import host


def relu() -> sg.Graph:
    x = sg.input("x", (2, 3))
    return sg.Graph([x], [ops.Relu(x)], "relu")


class Several(sg.Device):
    def supports(self, node: sg.Node, options: Any) -> bool:
        return True

    def optimal_requests(self, options: Any) -> int:
        return 5


def test_versions_of_devices() -> None:
    core = sg.Core()
    versions = core.get_versions()
    assert versions["subgraph"] == sg.__version__
    assert set(core.available_devices) <= set(versions)
    assert versions["REFERENCE"] == sg.__version__
    assert versions["CPU"].startswith(f"{sg.__version__}, numba ")
    assert "llvmlite" in versions["CPU"]
    assert core.get_versions("CPU") == {k: versions[k] for k in ("subgraph", "CPU")}
    assert list(core.get_versions("HETERO:CPU, REFERENCE")) == ["subgraph", "CPU", "REFERENCE"]
    assert core.get_property("CPU", "VERSION") == versions["CPU"]
    assert sg.get_versions("CPU") == core.get_versions("CPU")
    with pytest.raises(sg.DeviceError, match="no device named 'CPV'"):
        sg.get_versions("CPV")


def test_version_of_a_foreign_device(monkeypatch: pytest.MonkeyPatch) -> None:
    core = sg.Core()
    core.register_device("SEVERAL", Several)
    package = types.ModuleType("acme")
    monkeypatch.setattr(package, "__version__", "3.1", raising=False)
    monkeypatch.setitem(sys.modules, "acme", package)
    monkeypatch.setattr(Several, "__module__", "acme.devices")
    assert core.get_versions("SEVERAL")["SEVERAL"] == "3.1"
    assert core.get_property("SEVERAL", "VERSION") == "3.1"

    class Silent(Several):
        def get_property(self, name: str) -> Any:
            raise KeyError(name)

    core.register_device("SILENT", Silent)
    monkeypatch.setattr(Silent, "__module__", "nowhere.at_all")
    assert core.get_versions("SILENT")["SILENT"] == "unknown"


def test_each_device_says_how_many_requests_are_of_use() -> None:
    core = sg.Core()
    core.register_device("SEVERAL", Several)
    name = "RANGE_FOR_ASYNC_INFER_REQUESTS"
    assert core.get_property("SEVERAL", name) == (1, 5, 1)
    assert core.get_property("CPU", name) == (1, host.core_count(), 1)
    assert core.get_property("REFERENCE", name) == (1, 1, 1)
    for device, most in (("HETERO", 2), ("MULTI", 6), ("AUTO", 5)):
        core.set_property(device, {"DEVICE_PRIORITIES": "SEVERAL,REFERENCE"})
        assert core.get_property(device, name) == (1, most, 1)
    for device in core.available_devices:
        first, last, step = core.get_property(device, name)
        model = core.compile_model(relu(), device)
        assert first <= model.get_property("OPTIMAL_NUMBER_OF_INFER_REQUESTS") <= last
        assert step == 1


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AVAILABLE_DEVICES", "0"),
        ("AVAILABLE_DEVICES", [0, 1]),
        ("FULL_DEVICE_NAME", None),
        ("OPTIMIZATION_CAPABILITIES", {"FP32": True}),
        ("RANGE_FOR_ASYNC_INFER_REQUESTS", 4),
        ("RANGE_FOR_ASYNC_INFER_REQUESTS", (4, 1, 1)),
        ("RANGE_FOR_ASYNC_INFER_REQUESTS", (1, 4)),
        ("RANGE_FOR_ASYNC_INFER_REQUESTS", (0, 4, 1)),
        ("EXPORT_IMPORT", "YES"),
        ("VERSION", 3),
        ("CONCURRENT_REGIONS", 1),
    ],
)
def test_a_standard_metric_of_another_type_is_an_error(name: str, value: Any) -> None:
    class Wrong(Several):
        def metrics(self) -> dict[str, Any]:
            return {**super().metrics(), name: value}

    core = sg.Core()
    core.register_device("WRONG", Wrong)
    with pytest.raises(sg.DeviceError, match=f"device WRONG: metric '{name}' is .*; it has to be"):
        core.get_property("WRONG", name)


def test_metrics_of_models_have_types_and_others_are_free() -> None:
    with pytest.raises(sg.DeviceError, match="'EXECUTION_DEVICES' is 'CPU'; it has to be a list"):
        sg.CompiledModel(relu(), device="MINE", metrics={"EXECUTION_DEVICES": "CPU"})
    model = sg.CompiledModel(relu(), device="MINE", metrics={"TILES": {1, 2}})
    assert model.get_property("TILES") == {1, 2}


def test_asking_for_the_version_alone_takes_it() -> None:
    class Counting(Several):
        asked = 0

        def version(self) -> str:
            Counting.asked += 1
            return "1"

    core = sg.Core()
    core.register_device("COUNTING", Counting)
    core.compile_model(relu(), "HETERO:COUNTING")
    assert "VERSION" in core.get_property("COUNTING", "SUPPORTED_METRICS")
    assert Counting.asked == 0
    assert core.get_property("COUNTING", "VERSION") == "1"
