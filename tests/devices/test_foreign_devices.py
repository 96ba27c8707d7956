"""Devices of third parties that do everything their own way, or something wrong."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.devices.calls import capability_of, compile_queried

X = np.array([[1, -2, 3]], np.float32)


@pytest.fixture
def core() -> sg.Core:
    return sg.Core()


def net() -> sg.Graph:
    x = sg.input("x", ("N", 3))
    w = sg.parameter("w", np.arange(12, dtype=np.float32).reshape(3, 4))
    b = sg.parameter("b", np.ones(4, np.float32))
    hidden = ops.Relu(ops.Add(ops.MatMul(x, w, name="mm"), b, name="add"), name="relu")
    return sg.Graph([x], [ops.Sigmoid(hidden, name="sig")], "net")


class Minimal(sg.Device):
    """A device as terse as the design allows: everything its own, nothing of the defaults."""

    def __init__(self) -> None:  # does not call the base's
        self.settings: dict[str, Any] = {"GAIN": 1}

    def query_model(self, graph: sg.Graph, config: Any = None) -> dict[str, str]:
        return {n.name: "MINIMAL" for n in graph.nodes if n.op_type in ("MatMul", "Relu")}

    def compile_model(self, graph: sg.Graph, config: Any = None) -> sg.CompiledModel:
        return sg.compile_model(graph, "REFERENCE")

    def import_model(self, stream: Any, config: Any = None) -> sg.CompiledModel:
        return sg.compile_model(stream.read(), "REFERENCE")

    def get_property(self, name: str) -> Any:
        return self.settings[name]

    def set_property(self, properties: Any) -> None:
        self.settings.update(properties)


def test_a_device_that_overrides_everything(tmp_path: Path) -> None:
    core = sg.Core()
    core.register_device("MIN", Minimal())  # under another name than it calls itself
    assert "MIN" in core.available_devices
    core.set_property("MIN", {"GAIN": 2})
    assert core.get_property("MIN", "GAIN") == 2
    found = core.query_model(net(), "MIN")
    assert found == {"mm": "MIN", "relu": "MIN"}
    assert found.reasons["add"] == "MIN does not list it as supported"
    want = core.compile_model(net(), "REFERENCE")(X)[0]
    for device in ("MIN", "HETERO:MIN,REFERENCE", "MULTI:MIN,REFERENCE", "AUTO:MIN"):
        graph = net()
        model = core.compile_model(graph, device)
        np.testing.assert_allclose(model(X)[0], want, rtol=1e-6)
        graph.parameters["w"].assign(np.zeros((3, 4), np.float32))
        np.testing.assert_allclose(model(X)[0], 1 / (1 + np.exp(-np.ones((1, 4)))), rtol=1e-6)
    sg.save(net(), tmp_path / "net.onnx")
    imported = core.import_model(tmp_path / "net.onnx", "MIN")
    np.testing.assert_allclose(imported(X)[0], want, rtol=1e-6)


def _device(**methods: Any) -> type[sg.Device]:
    return type("Broken", (sg.Device,), methods)


def _rename(graph: sg.Graph) -> None:
    graph.nodes[0].name = "renamed"


def _zero(graph: sg.Graph) -> None:
    graph.parameters["w"].assign(np.zeros((3, 4), np.float32))


@pytest.mark.parametrize("hook", ["query_model", "compile_model", "transform", "create_op"])
@pytest.mark.parametrize(
    ("change", "what"), [(_rename, "the graph"), (_zero, "parameters of the graph")]
)
def test_a_hook_that_changes_its_graph(change: Any, what: str, hook: str) -> None:
    """As of a pass: the graph is the user's, or that of a region which other devices may run."""

    def hooked(self: Any, graph: sg.Graph, given: Any = None) -> Any:
        change(graph)
        return getattr(super(odd, self), hook)(graph, given)

    odd = _device(**{hook: hooked}, supports=lambda self, node, options: True)
    core = sg.Core()
    core.register_device("ODD", odd)
    message = rf"device ODD: {hook} changed {what} '.*' that it was given"
    with pytest.raises(sg.DeviceError, match=message):
        core.compile_model(net(), "ODD")


def _takes_all(self: sg.Device, graph: sg.Graph, config: Any = None) -> dict[str, str]:
    return {node.name: self.name for node in graph.nodes}


def _raises(self: sg.Device, graph: sg.Graph, config: Any = None) -> Any:
    raise ValueError("no such unit")


def _gives_nothing(self: sg.Device, graph: sg.Graph, config: Any = None) -> Any:
    return None


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (_device(query_model=_raises), "device NEW: query_model raised ValueError: no such unit"),
        (_device(query_model=_gives_nothing), "device NEW: query_model gave None; it must return"),
        (
            _device(query_model=_takes_all, compile_model=_raises),
            "device NEW: compile_model raised ValueError: no such unit, given graph 'net'",
        ),
        (
            _device(query_model=_takes_all, compile_model=_gives_nothing),
            "device NEW: compile_model gave None; it must return a CompiledModel",
        ),
    ],
)
def test_a_device_that_misbehaves_is_named(
    core: sg.Core, broken: type[sg.Device], message: str, caplog: pytest.LogCaptureFixture
) -> None:
    core.register_device("NEW", broken)
    graph = net()
    with pytest.raises(sg.DeviceError, match=message):
        core.compile_model(graph, "NEW")
    if "query" in message:
        with pytest.raises(sg.DeviceError, match=message):
            core.query_model(graph, "NEW")
        with pytest.raises(sg.DeviceError, match=message):
            core.compile_model(graph, "HETERO:NEW,REFERENCE")
    else:  # the next device compiles what it could not
        model = core.compile_model(graph, "HETERO:NEW,REFERENCE")
        assert {node.op.device for node in model.graph.nodes if node.op} == {"REFERENCE"}
        assert "cannot compile" in caplog.text


def test_what_is_no_device_is_not_registered(core: sg.Core) -> None:
    wrong: Any = 3
    with pytest.raises(sg.DeviceError, match=r"'NEW': 3 is no sg\.Device"):
        core.register_device("NEW", wrong)
    with pytest.raises(sg.DeviceError, match="device name 3 is empty or has"):
        core.register_device(wrong, Minimal)


def _say(method: str, error: Exception) -> type[sg.Device]:
    """Return a device of which one method raises."""

    def raising(self: sg.Device, *given: Any) -> Any:
        raise error

    takes = {"query_model": _takes_all, "supports": lambda *_: True}
    return _device(**{**takes, method: raising})


@pytest.mark.parametrize("error", [RuntimeError("bus 3"), AttributeError("unit"), OSError("gone")])
def test_errors_of_its_methods_name_device_and_method(core: sg.Core, error: Exception) -> None:
    text = f"raised {type(error).__name__}: {error}, given"
    core.register_device("NEW", _say("get_property", error))
    assert "NEW" in core.available_devices
    with pytest.raises(sg.DeviceError, match=f"device NEW: get_property {text} 'ANY'"):
        core.get_property("NEW", "ANY")
    core.register_device("SET", _say("set_property", error))
    with pytest.raises(sg.DeviceError, match=f"device SET: set_property {text} {{'A': 1}}"):
        core.set_property("SET", {"A": 1})
    core.register_device("IN", _say("import_model", error))
    for source in (b"bytes", io.BytesIO(b"stream")):
        with pytest.raises(sg.DeviceError, match=f"device IN: import_model {text} 'a stream'"):
            core.import_model(source, "IN")
    core.register_device("ASKED", _say("query_model", error))
    for ask in (core.query_model, core.compile_model):
        for device in ("ASKED", "HETERO:ASKED,CPU", "MULTI:ASKED", "AUTO:ASKED"):
            with pytest.raises(sg.DeviceError, match=f"ASKED: query_model {text} graph"):
                ask(net(), device)


def test_a_wrong_key_or_value_is_a_config_error(core: sg.Core) -> None:
    core.register_device("NEW", _say("get_property", KeyError("ANY")))
    with pytest.raises(sg.ConfigError, match="device NEW: get_property raised KeyError: 'ANY'"):
        core.get_property("NEW", "ANY")
    core.register_device("SET", _say("set_property", ValueError("not odd")))
    with pytest.raises(sg.ConfigError, match="device SET: set_property raised ValueError: not odd"):
        core.set_property("SET", {"A": 2})


def test_an_import_that_gives_no_model(core: sg.Core, tmp_path: Path) -> None:
    core.register_device("NEW", _device(import_model=_gives_nothing))
    path = tmp_path / "file"
    path.write_bytes(b"mine")
    with pytest.raises(sg.DeviceError, match="device NEW: import_model gave None; it must return"):
        core.import_model(path, "NEW")


def _query(**answer: Any) -> type[sg.Device]:
    def query_model(self: sg.Device, graph: sg.Graph, config: Any = None) -> Any:
        return answer

    return _device(query_model=query_model)


@pytest.mark.parametrize("device", ["NEW", "HETERO:NEW,REFERENCE", "MULTI:NEW", "AUTO:NEW"])
@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (_query(mmm="NEW"), "device NEW: query_model names a node 'mmm', which graph 'net' does"),
        (_query(mm="NEWER"), "query_model places node 'mm' on 'NEWER', which is no device here"),
        (_query(mm="CPU"), "query_model places node 'mm' on 'CPU', which is no device here; it"),
        (_query(mm=True), "query_model places node 'mm' on True, which is no device here"),
    ],
)
def test_a_query_that_names_what_is_not_there(
    core: sg.Core, broken: type[sg.Device], message: str, device: str
) -> None:
    core.register_device("NEW", broken)
    for ask in (core.query_model, core.compile_model):
        with pytest.raises(sg.DeviceError, match=message):
            ask(net(), device)


def test_a_query_may_name_inputs_and_weights(core: sg.Core) -> None:
    """As OpenVINO's plugins do; they follow their users."""
    core.register_device("NEW", _query(mm="NEW", x="NEW", w="NEW"))
    assert core.query_model(net(), "NEW") == {"mm": "NEW"}


def _gives(method: str, value: Any) -> type[sg.Device]:
    takes = {"supports": lambda *_: True}
    return _device(**{**takes, method: lambda *_: value})


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (_gives("transform", None), "device NEW: transform gave None; it must return a Graph"),
        (_gives("create_op", 3), "device NEW: create_op gave 3; it must return a SubgraphOp"),
        (
            _say("supports", KeyError("unit")),
            r"device NEW: supports raised KeyError: 'unit', given node 'mm' \(MatMul\)",
        ),
        (
            _gives("supports", None),
            r"device NEW: supports gave None for node 'mm' \(MatMul\); it must return True, False",
        ),
        (
            _say("transform", KeyError("unit")),
            "device NEW: transform raised KeyError: 'unit', given",
        ),
        (
            _say("create_op", KeyError("unit")),
            "device NEW: create_op raised KeyError: 'unit', given",
        ),
    ],
)
def test_what_a_device_writes_for_the_defaults(
    core: sg.Core, broken: type[sg.Device], message: str
) -> None:
    if "supports" in message and "query_model" in vars(broken):
        del broken.query_model
    core.register_device("NEW", broken)
    with pytest.raises(sg.DeviceError, match=message):
        core.compile_model(net(), "NEW")


@pytest.mark.parametrize("value", [None, 3, [1], "text"])
@pytest.mark.parametrize("method", ["metrics", "device_ids"])
def test_odd_answers_about_itself_harm_nobody(core: sg.Core, method: str, value: Any) -> None:
    core.register_device("NEW", _gives(method, value))
    assert {"CPU", "REFERENCE"} <= set(core.available_devices)
    for device in ("NEW", "AUTO", "HETERO:NEW,CPU"):
        assert core.compile_model(net(), device)(X)[0].shape == (1, 4)


def test_what_is_no_name_file_or_number(core: sg.Core) -> None:
    model: Any = core.compile_model(net(), "CPU")
    nothing: Any = None
    for ask in (model.get_property, lambda name: core.get_property("CPU", name)):
        with pytest.raises(sg.ConfigError, match="a property is named by a string"):
            ask(nothing)
    with pytest.raises(sg.BlobError, match="cannot import a NoneType; give a path, bytes or"):
        core.import_model(nothing)
    with pytest.raises(sg.BlobError, match="open for text"):
        model.export_model(io.StringIO())
    wrong: Any
    for wrong in (-1, "2"):
        with pytest.raises(sg.ConfigError, match="number of its requests, 0 or more; got"):
            sg.InferQueue(model, wrong)


@pytest.mark.parametrize("held", [5, dict, sg.Device])
def test_options_class_is_checked_when_the_device_is_registered(held: Any) -> None:
    """The first query said that attrs did not like a class."""
    kind = type("Foreign", (sg.Device,), {"options_class": held})
    with pytest.raises(sg.DeviceError, match=r"'FOREIGN': options_class of Foreign is .*a child"):
        sg.Core().register_device("FOREIGN", kind)


@pytest.mark.parametrize("held", ["CPU", 5, (5,)])
def test_fallback_is_checked_when_the_device_is_registered(held: Any) -> None:
    """The text was read letter by letter: no device named 'C'."""
    kind = type("Foreign", (sg.Device,), {"fallback": held})
    with pytest.raises(sg.DeviceError, match=r"'FOREIGN': fallback of Foreign is .*a tuple"):
        sg.Core().register_device("FOREIGN", kind)


@pytest.mark.parametrize("name", ["FULL_DEVICE_NAME", "SUPPORTED_PROPERTIES"])
@pytest.mark.parametrize("answer", [None, 5, ["FULL_DEVICE_NAME"]])
def test_metrics_are_checked(answer: Any, name: str) -> None:
    core = sg.Core()
    core.register_device("FOREIGN", type("Foreign", (sg.Device,), {"metrics": lambda _: answer}))
    with pytest.raises(sg.DeviceError, match=r"FOREIGN: metrics of Foreign returned .*a dict"):
        core.get_property("FOREIGN", name)


@pytest.mark.parametrize("answer", [None, {"driver": object()}, ["driver"]])
def test_capability_is_checked(answer: Any) -> None:
    """An export failed in json, or wrote a file that no import could read."""
    device = type("Foreign", (sg.Device,), {"capability": lambda _: answer})()
    with pytest.raises(sg.DeviceError, match=r"capability gave .*must return a dict of texts"):
        capability_of(device)


def test_compile_supported_is_checked() -> None:
    """HETERO reported that None has no attribute graph, and did not name the device."""
    methods = {"supports": lambda *_: True, "compile_supported": lambda *_: None}
    core = sg.Core()
    core.register_device("FOREIGN", type("Foreign", (sg.Device,), methods))
    device, x = core.device("FOREIGN"), sg.input("x", (4,))
    with pytest.raises(sg.DeviceError, match="FOREIGN: compile_supported gave None; it must"):
        compile_queried(device, sg.Graph([x], [ops.Relu(x)]), None)
