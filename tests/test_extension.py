"""Custom operators with kernels for devices: `Operator.kernels`, `Device.add_kernel`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.engine.kernel import Kernel
from subgraph.engine.lowering import Lowering, Unsupported
from subgraph.opencl.lowering import ClLowering
from subgraph.opencl.runtime import ClSource

X = np.linspace(-2, 2, 600, dtype=np.float32).reshape(2, 300)
KERNELS = """
from subgraph.engine.simd import ld_f32, ld_f64, ld_i64, st_f32

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
        op_type, "test.extension", inputs=("x",), outputs=("y",), min_inputs=1, max_inputs=1,
        min_outputs=1, max_outputs=1,
        attributes={"factor": sg.Attribute("factor", "float", default=2.0)},
    )  # fmt: skip


def compute(node: sg.Node, inputs: Any) -> Any:
    return [inputs[0] * np.float32(node.attrs.get("factor", 2.0)) + np.float32(1)]


def on_cpu(node: sg.Node, low: Lowering) -> None:
    x, y = low.given(0), low.output()
    if x.dtype != "float32":
        raise Unsupported(f"Blend on {x.dtype} has no kernel")
    low.in_place(y, x)
    words = [x, y, float(node.attrs.get("factor", 2.0))]
    low.emit(Kernel("blend_kernels.code", "blended"), words, units=x.size, grain=4096)


def on_opencl(node: sg.Node, low: ClLowering) -> None:
    x, y = low.given(0), low.output()
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
