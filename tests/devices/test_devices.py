"""Devices: Core, options, metrics, ids, extensions, query."""

from __future__ import annotations

import importlib
import logging
import pkgutil
import sys
import threading
from collections.abc import Callable
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.devices.backends.base import Backend
from subgraph.devices.device import Device
from subgraph.devices.device_sources import BACKENDS, HELPER_MODULES, PLUGINS
from subgraph.devices.query import origins
from subgraph.system.registry import Registry

X = np.array([[1, -2, 3]], np.float32)


def net(name: str = "net") -> sg.Graph:
    x = sg.input("x", ("N", 3))
    w = sg.parameter("w", np.arange(12, dtype=np.float32).reshape(3, 4))
    b = sg.parameter("b", np.ones(4, np.float32))
    hidden = ops.Relu(ops.Add(ops.MatMul(x, w, name="mm"), b, name="add"), name="relu")
    return sg.Graph([x], [ops.Sigmoid(hidden, name="sig")], name)


@attrs.frozen
class Options(sg.DeviceOptions):
    SPEED: int = sg.option(3, "how fast", minimum=1, maximum=9)
    RATIO: float = sg.option(0.5, "how much", maximum=1)
    COLOR: str = sg.option("red", "which", values=("red", "blue"))
    LOUD: bool = sg.option(False, "whether")
    SERIAL: str = sg.option("A1", "number", read_only=True)


class MyDevice(sg.Device):
    options_class = Options
    starts = 0

    def start(self) -> None:
        type(self).starts += 1

    def supports(self, node: sg.Node, options: sg.DeviceOptions) -> bool | sg.Reject:
        if node.op_type == "Sigmoid":
            return sg.Reject("no exponential unit")
        return node.op_type in ("MatMul", "Add", "Relu")


@pytest.fixture
def core() -> sg.Core:
    made = sg.Core()
    made.register_device("MYDEV", MyDevice)
    return made


def test_a_device_is_registered_by_class_or_instance(core: sg.Core) -> None:
    core.register_device("OTHER", MyDevice())
    assert {"MYDEV", "OTHER", "REFERENCE"} <= set(core.available_devices)
    assert not {"HETERO", "MULTI", "AUTO"} & set(core.available_devices)
    assert core.query_model(net(), "OTHER") == {"mm": "OTHER", "add": "OTHER", "relu": "OTHER"}
    core.register_device("OTHER", MyDevice)  # the same owner
    with pytest.raises(sg.DeviceError, match=r"two owners: .*reference and .*MyDevice"):
        core.register_device("REFERENCE", MyDevice)
    with pytest.raises(sg.DeviceError, match=r"'A\.B'"):
        core.register_device("A.B", MyDevice)
    core.unregister_device("OTHER")
    with pytest.raises(sg.DeviceError, match="no device named 'OTHER'"):
        core.device("OTHER")


def test_each_module_defines_one_device_or_is_a_helper() -> None:
    devices: dict[str, int] = {}
    for package in (PLUGINS, BACKENDS):
        for info in pkgutil.iter_modules(importlib.import_module(package).__path__):
            module = importlib.import_module(f"{package}.{info.name}")
            own = [x for x in vars(module).values() if isinstance(x, type) and x is not Backend]
            own = [x for x in own if issubclass(x, Device) and x.__module__ == module.__name__]
            devices[info.name] = len(own)
    assert devices == {name: int(name not in HELPER_MODULES) for name in devices}
    assert devices.keys() >= set(HELPER_MODULES)


def test_an_unknown_device_lists_the_nearest(core: sg.Core) -> None:
    with pytest.raises(sg.DeviceError, match="did you mean 'MYDEV'"):
        core.compile_model(net(), "MYDEVV")
    with pytest.raises(sg.DeviceError, match="takes no list"):
        core.compile_model(net(), "MYDEV:REFERENCE")


def test_query_says_why_not(core: sg.Core) -> None:
    found = core.query_model(net(), "MYDEV")
    assert set(found) == {"mm", "add", "relu"}
    assert found.reasons == {"sig": "no exponential unit"}
    with pytest.raises(sg.UnsupportedOpError, match=r"'sig' \(Sigmoid\): no exponential unit"):
        core.compile_model(net(), "MYDEV")


def test_what_is_said_to_be_supported_compiles(core: sg.Core) -> None:
    x = sg.input("x", ("N", 3))
    weight = np.arange(12, dtype=np.float32).reshape(3, 4)
    w = sg.parameter("w", weight)
    graph = sg.Graph([x], [ops.Relu(ops.MatMul(x, w)), x], "part")
    model = core.compile_model(graph, "MYDEV")
    results = model(X)
    np.testing.assert_array_equal(results[0], np.maximum(X @ weight, 0))
    np.testing.assert_array_equal(results[1], X)
    assert model.execution_devices == ["MYDEV"]
    assert model.get_property("NETWORK_NAME") == "part"


def test_options_have_an_order_of_precedence(
    core: sg.Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = core.device("MYDEV")

    def now(config: Any = None) -> int:
        return device.options_for(config).SPEED

    assert now() == 3
    monkeypatch.setenv("SUBGRAPH_MYDEV_SPEED", "4")
    assert now() == core.get_property("MYDEV", "SPEED") == 4
    core.set_property("MYDEV", {"SPEED": 5})
    assert now() == core.get_property("MYDEV", "SPEED") == 5
    assert now({"SPEED": 6}) == 6
    assert now() == 5
    monkeypatch.setenv("SUBGRAPH_MYDEV_SPEED", "fast")
    with pytest.raises(sg.ConfigError, match="environment variable SUBGRAPH_MYDEV_SPEED"):
        now()


def test_an_environment_variable_that_is_no_option_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SUBGRAPH_CPU_FUZION", "1")
    sg.Core().get_property("CPU", "FUSION")
    assert "SUBGRAPH_CPU_FUZION is ignored" in caplog.text
    assert "'FUSION'" in caplog.text


def test_a_graphics_processor_is_reached_by_opencl() -> None:
    with pytest.raises(sg.DeviceError, match="reached by OPENCL"):
        sg.Core().get_property("GPU", "FULL_DEVICE_NAME")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("SPEDE", 1, "did you mean 'SPEED'"),
        ("SPEED", 0, r"takes int \(1..9\), got 0"),
        ("SPEED", 2.5, "takes int"),
        ("SPEED", True, "takes int"),
        ("SPEED", "many", "takes int"),
        ("RATIO", 1.5, r"takes float \(..1\), got 1.5"),
        ("COLOR", "green", r"red, blue"),
        ("COLOR", 3, "takes str"),
        ("LOUD", "perhaps", "takes bool"),
        ("SERIAL", "B2", "only be read"),
    ],
)
def test_wrong_options(core: sg.Core, key: str, value: Any, message: str) -> None:
    for call in (
        lambda: core.set_property("MYDEV", {"RATIO": 0.1, key: value}),
        lambda: core.compile_model(net(), "MYDEV", {key: value}),
    ):
        with pytest.raises(sg.ConfigError, match=message):
            call()
    assert core.get_property("MYDEV", "RATIO") == 0.5


def test_a_configuration_is_a_dict(core: sg.Core) -> None:
    x = sg.input("x", (2,))
    with pytest.raises(sg.ConfigError, match="the config is 5; give a dict"):
        core.compile_model(sg.Graph([x], [sg.ops.Relu(x)]), "CPU", 5)  # type: ignore[arg-type]


def test_options_take_text(core: sg.Core) -> None:
    core.set_property("MYDEV", {"SPEED": "7", "LOUD": "YES", "RATIO": "0.25", "COLOR": "blue"})
    got = [core.get_property("MYDEV", k) for k in ("SPEED", "LOUD", "RATIO", "COLOR", "SERIAL")]
    assert got == [7, True, 0.25, "blue", "A1"]


def test_set_property_for_all_devices(core: sg.Core) -> None:
    core.set_property({"SPEED": 8, "PERFORMANCE_HINT": "THROUGHPUT"})
    assert core.get_property("MYDEV", "SPEED") == 8
    assert core.get_property("REFERENCE", "PERFORMANCE_HINT") == "THROUGHPUT"
    with pytest.raises(sg.ConfigError, match="no device has a property 'NOBODY'"):
        core.set_property({"SPEED": 5, "NOBODY": 1})
    assert core.get_property("MYDEV", "SPEED") == 8
    wrong: Any = 3
    for call in (
        lambda: core.set_property("MYDEV", wrong),
        lambda: core.set_property(wrong),
        lambda: core.compile_model(net(), "MYDEV", wrong),
    ):
        with pytest.raises(sg.ConfigError, match="the config is 3; give a dict"):
            call()
    with pytest.raises(sg.ConfigError, match="an option is named by a string"):
        core.set_property("MYDEV", {wrong: 1})
    with pytest.raises(sg.DeviceError, match="a device is named by a string"):
        core.compile_model(net(), wrong)


def test_every_supported_property_can_be_read(core: sg.Core) -> None:
    for name in ("MYDEV", "REFERENCE", "HETERO", "MULTI", "AUTO"):
        supported = core.get_property(name, "SUPPORTED_PROPERTIES")
        assert {"AVAILABLE_DEVICES", "FULL_DEVICE_NAME", "RANGE_FOR_ASYNC_INFER_REQUESTS"} <= set(
            supported
        )
        for key in supported:
            core.get_property(name, key)
    assert core.get_property("MYDEV", "SUPPORTED_PROPERTIES")["SERIAL"] == "RO"
    assert "SERIAL" in core.get_property("MYDEV", "SUPPORTED_METRICS")
    assert "SERIAL" not in core.get_property("MYDEV", "SUPPORTED_CONFIG_KEYS")
    assert "SPEED" in core.get_property("MYDEV", "SUPPORTED_CONFIG_KEYS")
    with pytest.raises(sg.ConfigError, match="did you mean 'FULL_DEVICE_NAME'"):
        core.get_property("MYDEV", "FULL_NAME_DEVICE")
    model = core.compile_model(net(), "REFERENCE")
    for key in model.get_property("SUPPORTED_PROPERTIES"):
        model.get_property(key)
    assert "NETWORK_NAME" in model.get_property("SUPPORTED_METRICS")
    assert "DEVICE_ID" in model.get_property("SUPPORTED_CONFIG_KEYS")
    with pytest.raises(sg.ConfigError, match="did you mean 'NETWORK_NAME'"):
        model.get_property("NETWORK_NAM")


def test_an_error_of_a_device_s_constructor_is_named() -> None:
    class Broken(sg.Device):
        def __init__(self) -> None:
            super().__init__()
            raise KeyError("cores")

    core = sg.Core()
    core.register_device("BROKEN", Broken)
    with pytest.raises(sg.DeviceError, match="device BROKEN cannot start: KeyError: 'cores'"):
        core.compile_model(net(), "BROKEN")


def test_a_device_that_cannot_start_says_why_once(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(sg.Device):
        tries = 0

        def start(self) -> None:
            type(self).tries += 1
            raise OSError("no such chip")

    core = sg.Core()
    core.register_device("BROKEN", Broken)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert "BROKEN" not in core.available_devices
    assert caplog.text.count("no such chip") == 1
    assert core.failed_devices["BROKEN"] == "device BROKEN cannot start: no such chip"

    with pytest.raises(sg.DeviceError, match="cannot start: no such chip"):
        core.compile_model(net(), "BROKEN")
    assert Broken.tries == 1
    core.compile_model(net(), "REFERENCE")


def test_a_missing_optional_package_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Optional(sg.Device):
        def start(self) -> None:
            raise sg.DeviceError("pip install it") from ImportError("none")

    core = sg.Core()
    core.register_device("OPTIONAL", Optional)
    with caplog.at_level(logging.WARNING):
        assert "OPTIONAL" not in core.available_devices
    assert not caplog.text
    with pytest.raises(sg.DeviceError, match="pip install it"):
        core.compile_model(sg.Graph(), "OPTIONAL")


def test_threads_wait_while_a_registry_is_filled() -> None:
    """Several devices compile at the same time, in a process that has not yet loaded any pass."""
    begun, go = threading.Event(), threading.Event()

    def discover() -> None:
        begun.set()
        assert "early" not in registry  # what is loaded may look into the registry itself
        go.wait(20)
        registry.register("late", 1, "here")

    registry: Registry[int] = Registry("thing", sg.SubgraphError, discover)
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(registry.get("late"))) for _ in "12"]
    threads[0].start()
    begun.wait(20)
    threads[1].start()
    threads[1].join(0.05)
    go.set()
    for thread in threads:
        thread.join(20)
    assert found == [1, 1]


def test_device_ids() -> None:
    class Twins(MyDevice):
        def device_ids(self) -> list[str]:
            return ["0", "1"]

    core = sg.Core()
    core.register_device("TWINS", Twins)
    assert {"TWINS.0", "TWINS.1"} <= set(core.available_devices)
    core.set_property("TWINS.1", {"SPEED": 9})
    assert [core.get_property(n, "SPEED") for n in ("TWINS", "TWINS.0", "TWINS.1")] == [3, 3, 9]
    assert core.get_property("TWINS.1", "DEVICE_ID") == "1"
    assert set(core.query_model(net(), "TWINS.1").values()) == {"TWINS.1"}
    with pytest.raises(sg.DeviceError, match="no id '7'; ids: '0', '1'"):
        core.device("TWINS.7")
    for name in ("REFERENCE.1", "REFERENCE."):
        with pytest.raises(sg.DeviceError, match="leave the id out"):
            core.device(name)


def test_a_name_with_an_empty_id_leaves_the_device_as_it_is(core: sg.Core) -> None:
    core.set_property("CPU", {"FUSION": False})
    before = core.device("CPU")
    with pytest.raises(sg.DeviceError, match="leave the id out"):
        core.device("CPU.")
    assert core.device("CPU") is before
    assert core.get_property("CPU", "FUSION") is False


def test_query_goes_through_the_transformation_that_compile_uses() -> None:
    class Fusing(MyDevice):
        """Fuses Add and Relu into one node, and knows no MatMul."""

        def transform(self, graph: sg.Graph, options: sg.DeviceOptions) -> sg.Graph:
            fused = graph.clone()
            names = [node.name for node in fused.nodes]
            if "add" in names and "relu" in names:
                add, relu = fused.node("add"), fused.node("relu")
                both = sg.Node(
                    "AddRelu", add.inputs, domain="mine", metadata={"origin": "add\nrelu"}
                )
                both.outputs[0].type = relu.outputs[0].type
                fused.rewire({relu.outputs[0]: both.outputs[0]})
            return fused

        def supports(self, node: sg.Node, options: sg.DeviceOptions) -> bool | sg.Reject:
            return node.op_type in self.known

        known: tuple[str, ...] = ("AddRelu",)

    core = sg.Core()
    device = Fusing()
    core.register_device("FUSING", device)
    assert set(core.query_model(net(), "FUSING")) == {"add", "relu"}
    device.known = ("Relu", "Add", "Sigmoid")  # knows the parts, not what they become
    found = core.query_model(net(), "FUSING")
    assert set(found) == {"sig"}
    assert set(found.reasons) == {"mm", "add", "relu"}


def test_origins_of_a_fused_node_are_those_inside() -> None:
    inner = net("inner")
    assert sorted(origins(sg.subgraph_node(inner))) == ["add", "mm", "relu", "sig"]


def test_an_extension_adds_an_operator() -> None:
    schema = sg.Schema("Triple", "test.devices", inputs=("x",), outputs=("y",))
    triple = sg.Operator(schema, lambda node, values: [values[0] * 3], lambda n, t, v: [t[0]])
    core = sg.Core()
    core.add_extension(triple)
    core.add_extension(triple)
    x = sg.input("x", ("N", 3))
    graph = sg.Graph([x], [ops.Triple(x)])
    assert core.compile_model(graph, "REFERENCE")(X)[0].tolist() == (X * 3).tolist()
    other = sg.Operator(schema, test_device_ids)  # type: ignore[arg-type]
    with pytest.raises(sg.UnsupportedOpError, match="two owners"):
        core.add_extension(other)


def test_a_failing_compile_leaves_the_device_usable(core: sg.Core) -> None:
    class Moody(MyDevice):
        angry = True

        def create_op(self, graph: sg.Graph, options: Any) -> sg.SubgraphOp:
            if self.angry:
                raise sg.DeviceError("out of memory")
            return super().create_op(graph, options)

        def supports(self, node: sg.Node, options: sg.DeviceOptions) -> bool:
            return True

    device = Moody()
    core.register_device("MOODY", device)
    with pytest.raises(sg.DeviceError, match="out of memory"):
        core.compile_model(net(), "MOODY")
    device.angry = False
    assert core.compile_model(net(), "MOODY")(X)[0].shape == (1, 4)


class Counting(sg.Device):
    """Counts its starts."""

    starts = 0

    def start(self) -> None:
        self.starts += 1


def test_a_device_object_starts_once() -> None:
    """A second Core, or a second name, started it again and took its name and options."""
    device, first, second = Counting(), sg.Core(), sg.Core()
    first.register_device("COUNTS", device)
    second.register_device("EARLY", device)
    assert first.device("COUNTS") is device
    first.register_device("COUNTS", device)
    assert first.device("COUNTS") is device
    for core, name, where in [(first, "TWICE", "this"), (second, "COUNTS", "another")]:
        with pytest.raises(sg.DeviceError, match=f"'COUNTS' of {where} Core; register its class"):
            core.register_device(name, device)
    with pytest.raises(sg.DeviceError, match=r"EARLY cannot start: .* of another Core"):
        second.device("EARLY")
    assert (device.starts, device.name, device.core) == (1, "COUNTS", first)
    first.unregister_device("COUNTS")
    second.register_device("EARLY", device)
    assert second.device("EARLY") is device
    assert (device.starts, device.name, device.core) == (2, "EARLY", second)


class Slow(Counting):
    """Waits in its start until another thread has tried to start it."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.end = threading.Event(), threading.Event()

    def start(self) -> None:
        super().start()
        self.begun.set()
        assert self.end.wait(10)


class Registered(sg.Device):
    """A device of an entry point."""


REGISTERED = Registered()


def test_an_entry_point_names_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """An object would be a device of the first Core alone."""
    found = [
        metadata.EntryPoint(name, f"{__name__}:{value}", "subgraph.devices")
        for name, value in (("BYCLASS", "Registered"), ("BYOBJECT", "REGISTERED"))
    ]
    monkeypatch.setitem(sys.modules, __name__, SimpleNamespace(**globals()))
    monkeypatch.setattr(metadata, "entry_points", lambda group: found)  # pyright: ignore[reportUnknownLambdaType]
    for core in (sg.Core(), sg.Core()):
        assert isinstance(core.device("BYCLASS"), Registered)
        with pytest.raises(sg.DeviceError, match=r":REGISTERED gives .* must name a class"):
            core.device("BYOBJECT")


def test_a_device_object_starts_once_when_two_cores_start_it_at_the_same_time() -> None:
    device, first, second = Slow(), sg.Core(), sg.Core()
    first.register_device("FIRST", device)
    second.register_device("SECOND", device)
    thread = threading.Thread(target=first.device, args=["FIRST"])
    thread.start()
    try:
        assert device.begun.wait(10)
        with pytest.raises(sg.DeviceError, match=r"SECOND cannot start: .* being started"):
            second.device("SECOND")
    finally:
        device.end.set()
        thread.join()
    assert first.device("FIRST") is device
    assert (device.starts, device.name, device.core) == (1, "FIRST", first)


def test_a_device_object_whose_start_was_interrupted_starts_again() -> None:
    class Interrupted(Counting):
        def start(self) -> None:
            super().start()
            if self.starts == 1:
                raise KeyboardInterrupt

    device, first, second = Interrupted(), sg.Core(), sg.Core()
    first.register_device("FIRST", device)
    second.register_device("SECOND", device)
    with pytest.raises(KeyboardInterrupt):
        first.device("FIRST")
    assert second.device("SECOND") is device
    assert (device.name, device.core) == ("SECOND", second)


@pytest.mark.parametrize(
    "hook", ["query_model", "compile_model", "get_property", "set_property", "metrics", "supports"]
)
def test_a_stop_iteration_of_a_hook_is_reported_like_other_errors(hook: str) -> None:
    """It passed through, because of how contextlib treats errors that are raised from it."""

    def stop(*_: Any, **__: Any) -> Any:
        raise StopIteration

    methods = {"supports": lambda *_: True, "create_op": lambda self, graph, options: Ones(graph)}
    core = sg.Core()
    core.register_device("STOPS", type("Stops", (sg.Device,), {**methods, hook: stop}))
    calls: dict[str, Callable[[], Any]] = {
        "set_property": lambda: core.set_property("STOPS", {"NUM_STREAMS": 1}),
        "get_property": lambda: core.get_property("STOPS", "FULL_DEVICE_NAME"),
    }
    calls["metrics"] = calls["get_property"]
    with pytest.raises(sg.SubgraphError, match=r"STOPS: .* raised StopIteration"):
        calls.get(hook, lambda: core.compile_model(net(), "STOPS"))()


class Ones(sg.SubgraphOp):
    """Returns ones."""

    def forward(self, inputs: list[Any]) -> list[Any]:
        return [np.ones((1, 4), np.float32) for _ in self.subgraph.outputs]
