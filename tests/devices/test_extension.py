"""Custom operators with kernels for devices: `Operator.kernels`, `Device.add_kernel`."""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper

import subgraph as sg
from subgraph import ops
from subgraph.engine.planner.lowering import LOWERINGS, Lowering, Unsupported
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.types import TensorType
from subgraph.opencl.lowering import ClLowering
from subgraph.opencl.runtime import ClSource
from subgraph.operators.schema import find_schema

X = np.linspace(-2, 2, 600, dtype=np.float32).reshape(2, 300)
KERNELS = """
from subgraph.engine.codegen.simd import ld_f32, ld_f64, ld_i64, st_f32

def blended():
    def kernel(args, begin, end, worker):
        x, y, factor = ld_i64(args), ld_i64(args + 8), ld_f64(args + 16)
        for i in range(begin, end):
            st_f32(y + 4 * i, ld_f32(x + 4 * i) * factor + 1)
    return kernel
"""
CODE = """
__kernel void blended(__global const float *x, int xo, __global float *y, int yo, float factor) {
    int i = get_global_id(0);
    y[yo + i] = x[xo + i] * factor + 1;
}
"""


def schema(op_type: str) -> sg.Schema:
    return sg.Schema(
        op_type,
        "test.extension",
        inputs=("x",),
        outputs=("y",),
        attributes={"factor": sg.Attribute("factor", "float", default=2.0)},
    )


def compute(node: sg.Node, inputs: Any) -> Any:
    return [inputs[0] * np.float32(node.attrs.get("factor", 2.0)) + np.float32(1)]


def on_cpu(node: sg.Node, low: Lowering) -> None:
    x, y = low.input(0), low.output()
    if x.dtype != "float32":
        raise Unsupported(f"Blend on {x.dtype} has no kernel")
    low.in_place(y, x)
    words = [x, y, float(node.attrs.get("factor", 2.0))]
    low.emit(Kernel("blend_kernels.code", "blended"), words, units=x.size, grain=4096)


def on_opencl(node: sg.Node, low: ClLowering) -> None:
    x, y = low.input(0), low.output()
    low.require("float32")
    factor = float(node.attrs.get("factor", 2.0))
    low.launch(ClSource("blend", CODE), "blended", [x, y, factor], (x.size,))


def graph(op_type: str, dtype: str = "float32") -> sg.Graph:
    x = sg.input("x", ("N", 300), dtype)
    y = getattr(ops, op_type)(ops.Relu(x, name="relu"), factor=3.0, name="blend")
    return sg.Graph([x], [ops.Neg(y, name="neg")], "net")


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "blend_kernels").mkdir()
    (tmp_path / "blend_kernels" / "__init__.py").write_text("")
    (tmp_path / "blend_kernels" / "code.py").write_text(KERNELS)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    monkeypatch.delitem(sys.modules, "blend_kernels", raising=False)


@pytest.mark.parametrize("started", [False, True])
def test_a_custom_operator_runs_by_its_kernels(kernels: None, started: bool) -> None:
    core = sg.Core()
    if started:
        core.available_devices  # noqa: B018
    blend = sg.Operator(
        schema("Blend"), compute, lambda n, t, v: [t[0]], {"CPU": on_cpu, "OPENCL": on_opencl}
    )
    core.add_extension(blend)
    core.add_extension(blend)
    net = graph("Blend")
    want = core.compile_model(net, "REFERENCE")(X)[0]
    np.testing.assert_allclose(want, -(np.maximum(X, 0) * 3 + 1), rtol=1e-6)
    for device in ("CPU", "OPENCL"):
        assert dict(core.query_model(net, device)) == dict.fromkeys(
            ("relu", "blend", "neg"), device
        )
        model = core.compile_model(net, device, {"ENABLE_PROFILING": True})
        assert model.execution_devices == [device]
        request = model.create_infer_request()
        np.testing.assert_allclose(request.infer(X)[0], want, rtol=1e-6)
        assert any("blended" in entry.kernel for entry in request.profile())
    doubles = graph("Blend", "float64")
    found = core.query_model(doubles, "CPU")
    assert "Blend on float64 has no kernel" in found.reasons["blend"]
    model = core.compile_model(doubles, "CPU")
    np.testing.assert_allclose(model(X.astype(np.float64))[0], want, rtol=1e-6)


ROUNDS = 3
BOOL, INT = TensorProto.BOOL, TensorProto.INT64


def with_bodies(op_type: str) -> tuple[sg.Graph, Any]:
    """Return an If, a Loop and a Scan with the operator inside, in one row; what they compute.

    The Loop's body has an If of its own, whose branches read values of the two graphs around.
    """

    def info(name: str, dims: Any, dtype: int = TensorProto.FLOAT) -> Any:
        return helper.make_tensor_value_info(name, dtype, dims)

    def blend(source: str, target: str, factor: float) -> Any:
        return helper.make_node(op_type, [source], [target], domain="test.extension", factor=factor)

    def branch(name: str, source: str, factor: float) -> Any:
        nodes = [blend(source, f"{name}_b", factor), helper.make_node("Neg", [f"{name}_b"], [name])]
        return helper.make_graph(nodes, name, [], [info(name, [2, 300])])

    def choose(source: str, target: str) -> Any:
        then, other = branch(f"{target}_then", source, 0.5), branch(f"{target}_else", "x", 0.25)
        return helper.make_node(
            "If", ["wanted"], [target], then_branch=then, else_branch=other, name=target
        )

    loop = helper.make_graph(
        [
            blend("state", "bent", 0.75),
            choose("bent", "next"),
            helper.make_node("Identity", ["go"], ["on"]),
        ],
        "loop",
        [info("i", [], INT), info("go", [], BOOL), info("state", [2, 300])],
        [info("on", [], BOOL), info("next", [2, 300]), info("bent", [2, 300])],
    )
    scan = helper.make_graph(
        [
            blend("row", "turned", -0.5),
            helper.make_node("Add", ["sum", "turned"], ["total"]),
            helper.make_node("Identity", ["turned"], ["kept"]),
        ],
        "scan",
        [info("sum", [300]), info("row", [300])],
        [info("total", [300]), info("kept", [300])],
    )
    nodes = [
        helper.make_node("Relu", ["x"], ["hot"]),
        choose("hot", "first"),
        helper.make_node("Loop", ["rounds", "", "first"], ["last", "all"], body=loop),
        helper.make_node(
            "Scan", ["zero", "last"], ["sum_of", "rows"], body=scan, num_scan_inputs=1
        ),
    ]
    weights = [
        helper.make_tensor("rounds", INT, [], [ROUNDS]),
        helper.make_tensor("zero", TensorProto.FLOAT, [300], [0.0] * 300),
    ]
    outputs = [info("sum_of", [300]), info("rows", [2, 300]), info("all", [ROUNDS, 2, 300])]
    inputs = [info("x", [2, 300]), info("wanted", [], BOOL)]
    made = helper.make_graph(nodes, "bodies", inputs, outputs, weights)
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("test.extension", 1)]

    def expected(x: Any, wanted: Any) -> list[Any]:
        def chosen(source: Any) -> Any:
            return -(source * np.float32(0.5) + 1 if wanted else x * np.float32(0.25) + 1)

        state, bents = chosen(np.maximum(x, 0)), []
        for _ in range(ROUNDS):
            bents.append(state * np.float32(0.75) + 1)
            state = chosen(bents[-1])
        turned = state * np.float32(-0.5) + 1
        return [turned.sum(0), turned, np.stack(bents)]

    return sg.load(helper.make_model(made, opset_imports=opsets, ir_version=9)), expected


@pytest.mark.parametrize("has_kernels", [True, False])
@pytest.mark.parametrize(
    "device",
    [
        "REFERENCE",
        "CPU",
        "OPENCL",
        "HETERO:CPU,REFERENCE",
        "HETERO:OPENCL,CPU,REFERENCE",
        "MULTI:OPENCL,CPU",
        "AUTO",
        "AUTO:OPENCL,CPU",
    ],
)
def test_a_custom_operator_in_bodies(kernels: None, device: str, has_kernels: bool) -> None:
    core = sg.Core()
    op_type = "Bent" if has_kernels else "Bare"
    by_device: dict[str, Any] = {"CPU": on_cpu, "OPENCL": on_opencl} if has_kernels else {}
    core.add_extension(sg.Operator(schema(op_type), compute, lambda n, t, v: [t[0]], by_device))
    net, expected = with_bodies(op_type)
    model = core.compile_model(net, device, {})
    stream = io.BytesIO()
    model.export_model(stream)
    stream.seek(0)
    again = core.import_model(stream)
    for wanted in (True, False):
        given = {"x": X, "wanted": np.array(wanted)}
        for each in (model, again):
            for found, want in zip(each(given).values(), expected(X, wanted), strict=True):
                np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)
    if device in ("CPU", "OPENCL", "HETERO:CPU,REFERENCE"):
        home = device.removeprefix("HETERO:").partition(",")[0] if has_kernels else "REFERENCE"
        for each in (model, again):
            assert set(homes_of(each.graph, op_type)) == {home}


def homes_of(graph: sg.Graph, op_type: str) -> Iterator[str]:
    """Yield where each node of the type runs, in bodies too."""
    for node in graph.nodes:
        if node.op_type == op_type:
            yield "REFERENCE"
        for body in node.bodies:
            yield from homes_of(body, op_type)
        if node.subgraph is not None and node.op is not None:
            inside = list(homes_of(node.subgraph, op_type))
            yield from (
                inside if type(node.op) is sg.DefaultSubgraphOp else [node.op.device] * len(inside)
            )


def test_devices_say_whether_they_take_kernels() -> None:
    core = sg.Core()
    other = sg.Operator(schema("Other"), compute, None, {"CUP": on_cpu})
    with pytest.raises(sg.DeviceError, match="no device named 'CUP'; did you mean 'CPU'"):
        core.add_extension(other)
    core.device("REFERENCE")
    third = sg.Operator(schema("Third"), compute, None, {"REFERENCE": on_cpu})
    with pytest.raises(sg.DeviceError, match="REFERENCE takes no kernels"):
        core.add_extension(third)

    class Chip(sg.Device):
        taken: dict[str, Any]

        def start(self) -> None:
            self.taken = {}

        def add_kernel(self, operator: str, kernel: Any) -> None:
            self.taken[operator] = kernel

    core = sg.Core()
    core.register_device("CHIP", Chip)
    core.add_extension(sg.Operator(schema("Fourth"), compute, None, {"CHIP": on_cpu}))
    chip = core.device("CHIP")
    assert isinstance(chip, Chip)
    assert chip.taken == {"test.extension::Fourth": on_cpu}


def test_an_extension_that_a_device_refuses_leaves_nothing() -> None:
    """A device that has started refuses: the operator is as unknown as before, on every device."""
    core = sg.Core()
    core.device("CPU")
    core.device("REFERENCE")
    refused = sg.Operator(schema("Fifth"), compute, None, {"CPU": on_cpu, "REFERENCE": on_cpu})
    with pytest.raises(sg.DeviceError, match="REFERENCE takes no kernels"):
        core.add_extension(refused)
    assert not LOWERINGS.find("test.extension::Fifth")
    assert find_schema("Fifth", "test.extension") is None
    core.add_extension(sg.Operator(schema("Fifth"), compute, None, {"CPU": on_cpu}))


class Forgetful(sg.Device):
    """Takes kernels; raises ``error`` for one or when it has to forget one."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error
        self.taken: set[str] = set()

    def add_kernel(self, operator: str, kernel: Any) -> None:
        if self.error is not None:
            raise self.error
        self.taken.add(operator)

    def remove_kernel(self, operator: str) -> None:
        self.taken.remove(operator)
        if len(self.name) > 1:
            raise RuntimeError("the driver is gone")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("no")])
def test_an_interrupt_and_an_error_while_undoing_leave_nothing(error: BaseException) -> None:
    core = sg.Core()
    first, second = Forgetful(), Forgetful()
    for name, device in {"FIRST": first, "B": second, "C": Forgetful(error)}.items():
        core.register_device(name, device)
        core.device(name)
    kernels = {"FIRST": on_cpu, "B": on_cpu, "C": on_cpu}
    expected = type(error) if isinstance(error, KeyboardInterrupt) else sg.DeviceError
    with pytest.raises(expected):
        core.add_extension(sg.Operator(schema("Seventh"), compute, None, kernels))
    assert first.taken == second.taken == set()
    assert find_schema("Seventh", "test.extension") is None


def test_a_refusal_in_one_core_leaves_the_operator_to_another() -> None:
    operator = sg.Operator(schema("Eighth"), compute, None, {"C": on_cpu})
    core, other = sg.Core(), sg.Core()
    for each, error in ((core, None), (other, ValueError("no"))):
        each.register_device("C", Forgetful(error))
        each.device("C")
    core.add_extension(operator)
    with pytest.raises(sg.DeviceError):
        other.add_extension(operator)
    x = sg.input("x", X.shape)
    node = sg.Node("Eighth", [x], domain="test.extension")
    model = core.compile_model(sg.Graph([x], [node.outputs[0]]), "REFERENCE")
    np.testing.assert_allclose(model([X])[0], 2 * X + 1)


def test_a_device_that_refuses_when_it_starts_still_runs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    core = sg.Core()
    core.add_extension(sg.Operator(schema("Sixth"), compute, None, {"REFERENCE": on_cpu}))
    x = sg.input("x", X.shape)
    node = sg.Node("Sixth", [x], domain="test.extension")
    model = core.compile_model(sg.Graph([x], [node.outputs[0]]), "REFERENCE")
    np.testing.assert_allclose(model([X])[0], 2 * X + 1)
    assert "REFERENCE runs without the kernel of 'test.extension::Sixth'" in caplog.text


@pytest.mark.parametrize("device", ["CPU", "OPENCL"])
def test_a_kernel_with_a_fault_is_a_warning(device: str, caplog: pytest.LogCaptureFixture) -> None:
    """The reference runs the node, and nothing else would say that the kernel does not."""
    core = sg.Core()
    if device not in core.available_devices:
        pytest.skip("there is no OpenCL device")

    def misspelt(node: sg.Node, low: Any) -> None:
        low.input(0, grain=16)

    name = f"Misspelt{device.title()}"
    kernels = {device: misspelt}
    core.add_extension(sg.Operator(schema(name), compute, lambda n, types, v: types, kernels))
    x = sg.input("x", X.shape)
    graph = sg.Graph([x], [getattr(ops, name)(x)])
    for _ in range(2):
        np.testing.assert_allclose(core.compile_model(graph, device)([X])[0], 2 * X + 1)
    [said] = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert said.startswith(f"nodes of test.extension::{name} run without their kernel")
    assert "'grain'" in said


def test_wrong_keys_name_the_nearest() -> None:
    core = sg.Core()
    with pytest.raises(sg.ConfigError, match="did you mean 'INFERENCE_NUM_THREADS'"):
        core.set_property({"INFERENCE_NUM_THREAD": 1})
    for name in ("FULL_DEVICE_NAME", "SUPPORTED_PROPERTIES"):
        with pytest.raises(sg.ConfigError, match="can only be read"):
            core.set_property("CPU", {name: "x"})
        with pytest.raises(sg.ConfigError, match=name):
            core.compile_model(_plain(), "CPU", {name: "x"})


def _plain() -> sg.Graph:
    x = sg.input("x", (1,))
    return sg.Graph([x], [ops.Relu(x)])


@pytest.mark.parametrize("device", ["CPU", "OPENCL"])
@pytest.mark.parametrize("dtype", ["float64", "int8", ">f4"])
@pytest.mark.parametrize("size", [5, 20_000])  # copied to memory of the plan, read where it is
def test_results_of_another_dtype_or_byte_order_are_converted(
    device: str, dtype: str, size: int
) -> None:
    if device not in sg.default_core().available_devices:
        pytest.skip(f"{device} cannot start here")
    dtypes = iter((dtype, "float32", dtype, "float32"))

    def changing(node: sg.Node, inputs: Any) -> Any:
        return [(inputs[0] + 0.5).astype(next(dtypes))]

    op_type = f"Odd_{device}_{dtype.strip('>')}_{size}"
    sg.default_core().add_extension(sg.Operator(schema(op_type), changing))
    x = sg.input("x", (size,))
    odd = getattr(ops, op_type)(ops.Relu(x))
    odd.type = TensorType("float32", (size,))  # as a file states it; the operator states none
    model = sg.load(sg.to_onnx(sg.Graph([x], [ops.Neg(odd)])).SerializeToString())
    request = sg.compile_model(model, device).create_infer_request()
    data = np.arange(size, dtype=np.float32) % 100
    for expected in (data + 0.5).astype(dtype), data + np.float32(0.5), (data + 0.5).astype(dtype):
        result = request.infer([data])[0]
        assert result.dtype == np.float32
        np.testing.assert_array_equal(result, -expected.astype(np.float32))


@pytest.mark.parametrize(
    ("fields", "signature", "message"),
    [
        ({"schema": "Wrong"}, {}, "give an sg.Schema"),
        ({"compute": 3}, {}, "compute is 3; give a function"),
        ({"infer": [3]}, {}, "infer is .*; give a function"),
        ({"kernels": {"CPU": 3}}, {}, "kernel for CPU is 3; give a function"),
        ({"kernels": [len]}, {}, "give the kernels of .* by device, a dict"),
        ({}, {"inputs": "x"}, "give the names of .*, a tuple"),
        ({}, {"attributes": ["k"]}, "give the attributes of .*, a dict"),
        ({}, {"attributes": {"k": 1.0}}, "give an sg.Attribute for 'k'"),
        ({}, {"attributes": {"k": sg.Attribute("q", "float")}}, "'k' is named 'q'"),
        (
            {},
            {"attributes": {"k": sg.Attribute("k", "flaot")}},  # type: ignore[arg-type]
            "'k' has type 'flaot'; did you mean 'float'",
        ),
    ],
)
def test_a_field_of_a_wrong_type_is_an_error_of_the_registration(
    fields: dict[str, Any], signature: dict[str, Any], message: str
) -> None:
    made: Any = {"op_type": "Wrong", "domain": "subgraph.tests", **signature}
    given: Any = {"schema": sg.Schema(**made), "compute": lambda node, inputs: inputs, **fields}
    with pytest.raises(sg.ConfigError, match=message):
        sg.Core().add_extension(sg.Operator(**given))
    assert "Wrong" not in dir(ops)
