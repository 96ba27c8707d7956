"""`check_device` on our devices, on two of third parties, and on devices that break one rule."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import onnxruntime
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.devices.backends.libraries.translation import writable_view
from subgraph.graph.types import Array
from tests.support.foreign_devices import FOREIGN, NumpyDevice, NumpyOp, OrtDevice

OURS = [
    *("REFERENCE", "CPU", "OPENCL", "HETERO:CPU,REFERENCE"),
    *(
        pytest.param(device, marks=pytest.mark.slow)
        for device in ("AUTO", "MULTI:CPU,REFERENCE", "HETERO:OPENCL,CPU")
    ),
]
APPLY_TO_ALL = set(sg.testing.DEVICE_CHECKS) - {"refusals", "failure", "threads"}


@pytest.mark.parametrize("device", OURS)
def test_our_devices(device: str) -> None:
    report = sg.testing.check_device(device, max_examples=10)
    assert set(report.passed) >= APPLY_TO_ALL
    assert {*report.passed, *report.skipped} == set(sg.testing.DEVICE_CHECKS)
    assert ("failure" in report.passed) == (device != "REFERENCE")
    assert report.runs > 200
    assert report.nodes["MatMul"]
    assert f"{device}: " in str(report)


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_devices(name: str) -> None:
    core = sg.Core()
    core.register_device(name, FOREIGN[name])
    report = sg.testing.check_device(name, core=core)
    assert set(report.passed) >= APPLY_TO_ALL | {"refusals", "failure"}
    assert ("threads" in report.passed) == (name == "ORT")
    shared = sg.testing.check_device(f"HETERO:{name},CPU", core=core, only=["weights", "failure"])
    assert shared.passed == ["weights", "failure"]


class OrtOp(sg.SubgraphOp):
    """Runs a region by a session of ONNX Runtime, with its weights as inputs."""

    def __init__(self, subgraph: sg.Graph) -> None:
        super().__init__(subgraph)
        model = sg.to_onnx(sg.region_model(subgraph, weights="inputs"))
        self.run = onnxruntime.InferenceSession(model.SerializeToString()).run

    def forward(self, inputs: list[Any]) -> list[Array]:
        given = [x.array if isinstance(x, sg.Parameter) else x for x in inputs]
        names = [value.name for value in self.subgraph.inputs]
        return [np.array(each) for each in self.run(None, dict(zip(names, given, strict=True)))]


class FloatOf(sg.SubgraphSelector):
    """Takes operators whose operands are all float32."""

    def __init__(self, takes: set[str]) -> None:
        self.takes = takes

    def select(self, node: sg.Node) -> bool:
        types = [None if value is None else value.type for value in node.inputs]
        floats = (isinstance(t, sg.TensorType) and t.dtype == "float32" for t in types)
        return node.op_type in self.takes and all(floats)

    def select_input(self, node: sg.Node, input_node: sg.Node) -> bool:
        return self.select(input_node)

    def select_output(self, node: sg.Node, output_node: sg.Node) -> bool:
        return self.select(output_node)


def property_of(kind: type[sg.SubgraphOp], takes: set[str]) -> type[sg.SubgraphProperty]:
    def create_subgraph_selector(self: Any) -> sg.SubgraphSelector:
        return FloatOf(takes)

    def create_subgraph_node(self: Any, subgraph: sg.Graph, subgraph_id: int) -> Any:
        return sg.subgraph_node(subgraph, op=kind(subgraph))

    methods = {"create_subgraph_selector": create_subgraph_selector}
    name = f"{kind.__name__}Property"
    return type(
        name, (sg.SubgraphProperty,), {**methods, "create_subgraph_node": create_subgraph_node}
    )


@pytest.mark.parametrize(
    "prop",
    [
        sg.ContainOpSelector({"Conv", "Relu", "Add"}),
        property_of(OrtOp, {"MatMul", "Relu", "Gemm"}),
        property_of(NumpyOp, {"Abs", "Neg", "Tanh", "Relu"}),
    ],
    ids=["ours", "onnxruntime", "numpy"],
)
def test_properties(prop: Any) -> None:
    found = sg.testing.check_property(prop, max_examples=15)
    assert found.calls
    assert found.own_calls or prop.__class__ is sg.ContainOpSelector


class Stale(NumpyOp):
    """Reads its weights once."""

    def __init__(self, graph: sg.Graph) -> None:
        super().__init__(graph)
        self.held: dict[int, Array] = {}

    def forward(self, inputs: list[Any]) -> list[Array]:
        for number, given in enumerate(inputs):
            if isinstance(given, sg.Parameter):
                inputs[number] = self.held.setdefault(number, given.array)
        return super().forward(inputs)


class OneShape(NumpyOp):
    """Has a buffer of the first shape that it sees."""

    shape: tuple[int, ...] | None = None

    def forward(self, inputs: list[Any]) -> list[Array]:
        given = next(x for x in inputs if not isinstance(x, sg.Parameter))
        self.shape = self.shape or given.shape
        if given.shape != self.shape and given.size:
            raise sg.UnsupportedOpError(f"compiled for {self.shape}, got {given.shape}")
        return super().forward(inputs)


class NotEmpty(NumpyOp):
    def forward(self, inputs: list[Any]) -> list[Array]:
        given = next(x for x in inputs if not isinstance(x, sg.Parameter))
        given.max()  # raises for arrays without elements
        return super().forward(inputs)


class ChangesInputs(NumpyOp):
    """Writes to its inputs by a library that does not see that they are read-only."""

    def forward(self, inputs: list[Any]) -> list[Array]:
        results = super().forward(inputs)
        for given in inputs:
            if not isinstance(given, sg.Parameter) and given.flags.c_contiguous:
                writable_view(given)[...] = 0
        return results


class OneBuffer(NumpyOp):
    """Hands out the same array at every run."""

    def __init__(self, graph: sg.Graph) -> None:
        super().__init__(graph)
        self.buffers: dict[Any, list[Array]] = {}

    def forward(self, inputs: list[Any]) -> list[Array]:
        results = super().forward(inputs)
        key = (threading.get_ident(), *(each.shape for each in results))
        kept = self.buffers.setdefault(key, results)
        for target, source in zip(kept, results, strict=True):
            target[...] = source
        return kept


class Swapped(NumpyOp):
    def forward(self, inputs: list[Any]) -> list[Array]:
        return super().forward(inputs)[::-1]


class WrongScalars(NumpyOp):
    def forward(self, inputs: list[Any]) -> list[Array]:
        return [x + 1 if x.ndim != 2 else x for x in super().forward(inputs)]


class NotThreadSafe(NumpyOp):
    """Keeps what belongs to a run in the op."""

    current: list[Any]

    def forward(self, inputs: list[Any]) -> list[Array]:
        self.current = inputs
        threading.Event().wait(0.002)
        return super().forward(self.current)


class Elsewhere(NumpyOp):
    """Says that another device ran it."""

    def session(self) -> sg.Session:
        return ElsewhereSession(self)


class ElsewhereSession(sg.Session):
    def profile(self) -> list[sg.ProfileEntry]:
        return [sg.ProfileEntry("node", "Add", "OTHER", "kernel", 0.0)]


def with_op(kind: type[NumpyOp]) -> type[sg.Device]:
    def create_op(self: Any, graph: sg.Graph, options: Any) -> sg.SubgraphOp:
        return kind(graph)

    return type(f"{kind.__name__}Device", (NumpyDevice,), {"create_op": create_op})


class CompilesLess(NumpyDevice):
    def create_op(self, graph: sg.Graph, options: Any) -> sg.SubgraphOp:
        if len(graph.nodes) > 1:
            raise sg.UnsupportedOpError("one node at a time")
        return super().create_op(graph, options)


class NoReasons(OrtDevice):
    def query_model(self, graph: sg.Graph, config: Any = None) -> Any:
        return dict(super().query_model(graph, config))


class TakesAnyOption(NumpyDevice):
    def options_for(self, config: Any) -> Any:
        known = sg.DeviceOptions.__attrs_attrs__  # type: ignore[attr-defined]
        names = {field.name for field in known}
        return super().options_for({k: v for k, v in (config or {}).items() if k in names})


class LosesAProperty(NumpyDevice):
    def supported_properties(self) -> dict[str, str]:
        return {**super().supported_properties(), "TEMPERATURE": "RO"}


class FitsEverywhere(NumpyDevice):
    def capability(self) -> dict[str, str]:
        return {}


@attrs.frozen
class ThreadOptions(sg.DeviceOptions):
    INFERENCE_NUM_THREADS: int = sg.option(1, "threads", minimum=1)


class ManyThreads(NumpyDevice):
    options_class = ThreadOptions
    ended = threading.Event()

    def create_op(self, graph: sg.Graph, options: Any) -> sg.SubgraphOp:
        for _ in range(4):
            threading.Thread(target=self.ended.wait, args=(60,), daemon=True).start()
        return super().create_op(graph, options)


class Forgets(NumpyDevice):
    """Imports what it has exported as a model of the default executor."""

    def import_graph(self, graph: sg.Graph, config: Any, header: Any, stored: Any) -> Any:
        return sg.compile_model(sg.inline_subgraphs(graph), "REFERENCE")


BROKEN: list[tuple[str, type[sg.Device], str]] = [
    ("weights", with_op(Stale), "after weights were changed"),
    ("shapes", with_op(OneShape), "compiled for"),
    ("empty", with_op(NotEmpty), "zero-size"),
    ("memory", with_op(ChangesInputs), "a run changed its inputs"),
    ("memory", with_op(OneBuffer), "a later run changed results"),
    ("outputs", with_op(Swapped), "differs at"),
    ("random", with_op(WrongScalars), "on the random graph"),
    ("requests", with_op(NotThreadSafe), "four"),
    ("profile", with_op(Elsewhere), "OTHER"),
    ("query", CompilesLess, "one node at a time"),
    ("refusals", NoReasons, "gives no reason"),
    ("errors", TakesAnyOption, "no error about 'NO_SUCH_OPTION'"),
    ("properties", LosesAProperty, "TEMPERATURE"),
    ("export", FitsEverywhere, "capability() is empty"),
    ("export", Forgets, "an imported model runs on"),
    ("threads", ManyThreads, "threads more"),
]


@pytest.mark.parametrize(("check", "device", "text"), BROKEN, ids=lambda v: str(v)[:30])
def test_a_device_that_breaks_a_rule_is_found(
    check: str, device: type[sg.Device], text: str
) -> None:
    ManyThreads.ended.clear()
    try:
        with pytest.raises(sg.DeviceError) as caught:
            sg.testing.check_device(device, only=[check])
    finally:
        ManyThreads.ended.set()
    assert f"{check} ({sg.testing.DEVICE_CHECKS[check]})" in str(caught.value)
    assert text in str(caught.value)


def test_a_device_that_takes_nothing_is_not_passed_in_vain() -> None:
    class Idle(sg.Device):
        pass

    with pytest.raises(sg.DeviceError, match=r"takes none of MatMul, .*models=\[...\]"):
        sg.testing.check_device(Idle)


def test_models_of_ones_own_count() -> None:
    class Clips(sg.Device):
        def supports(self, node: sg.Node, options: Any) -> bool:
            return node.op_type == "Clip"

        def create_op(self, graph: sg.Graph, options: Any) -> sg.SubgraphOp:
            return Clip(graph)

    class Clip(sg.SubgraphOp):
        def forward(self, inputs: list[Any]) -> list[Array]:
            return [np.maximum(inputs[0], 0)]

    x = sg.input("x", ("N", 3))
    graph = sg.Graph([x], [ops.Clip(x, np.float32(0), name="clip")], "clip")
    report = sg.testing.check_device(Clips, models=[graph], only=["query", "shapes"])
    assert report.passed == ["query", "shapes"]
    wrong = sg.Graph([x], [ops.Relu(x, name="relu")], "relu")
    with pytest.raises(sg.DeviceError, match=r"leaves out \['relu'\]"):
        sg.testing.check_device(Clips, models=[graph, wrong], only=["query"])


def test_unknown_names() -> None:
    with pytest.raises(sg.ConfigError, match="no check 'weight' of devices; did you mean"):
        sg.testing.check_device("CPU", only=["weight"])
    with pytest.raises(sg.DeviceError, match="no device named 'CPUU'"):
        sg.testing.check_device("CPUU")


def test_every_check_can_fail() -> None:
    found: set[str] = {check for check, _, _ in BROKEN}
    assert set(sg.testing.DEVICE_CHECKS) - found == {"failure"}
    checks: Callable[..., Any] = sg.testing.check_device

    class Stubborn(NumpyDevice):
        """Says that it runs what it does not."""

        def create_op(self, graph: sg.Graph, options: Any) -> sg.SubgraphOp:
            return StubbornOp(graph)

    class StubbornOp(NumpyOp):
        fallback = property(lambda self: None, lambda self, value: None)  # type: ignore[assignment]

    with pytest.raises(sg.DeviceError, match="a failure injected by check_device"):
        checks(Stubborn, only=["failure"])
