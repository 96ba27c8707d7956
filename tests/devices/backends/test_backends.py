"""Devices over other libraries: the kit of devices, new weights, refusals, missing packages.

Results are compared with those of REFERENCE, by the kit and here.
"""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.numpy_helper
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.devices.backends import base
from subgraph.graph.types import Array
from tests.support.backends import PACKAGES, installed, is_missing, unusable

INSTALLED = installed(*PACKAGES)
NEVER_FOR_ALL = {"refusals"}  # ONNX Runtime refuses nothing that the kit tries
FLOAT = sg.TensorType("float32", ("N", 6))


def dense(
    name: str = "dense", last: Callable[..., Any] = ops.Softmax
) -> tuple[sg.Graph, sg.Parameter]:
    rng = np.random.default_rng(3)
    x = sg.input("x", type=FLOAT)
    w = sg.parameter("w", rng.standard_normal((6, 4)).astype(np.float32))
    assert w.parameter is not None
    return sg.Graph([x], [last(ops.Relu(ops.MatMul(x, w)))], name), w.parameter


def rows(count: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal((count, 6)).astype(np.float32)


def expected(graph: sg.Graph, **inputs: Array) -> sg.Results:
    return sg.compile_model(graph, "REFERENCE")(**inputs)


@pytest.mark.parametrize("device", INSTALLED)
def test_the_kit(device: str) -> None:
    report = sg.testing.check_device(device, max_examples=4)
    assert set(report.passed) | NEVER_FOR_ALL >= set(sg.testing.DEVICE_CHECKS)
    assert report.runs > 50


@pytest.mark.parametrize("device", INSTALLED)
def test_a_region_beside_cpu(device: str) -> None:
    graph, _ = dense(last=ops.Sigmoid)
    model = sg.compile_model(graph, f"HETERO:{device},CPU")
    assert model.get_property("EXECUTION_DEVICES") == [device]
    np.testing.assert_allclose(model(x=rows(3))[0], expected(graph, x=rows(3))[0], atol=1e-6)


@pytest.mark.parametrize("device", INSTALLED)
def test_a_region_behind_a_node_of_unknown_type(device: str) -> None:
    """Regions were compiled for the types that the graph had before anyone inferred them."""
    x = sg.input("x", type=sg.TensorType("float32", (4, 3, 3)))
    unknown = sg.Node("Det", [x], name="det").outputs[0]
    assert unknown.type is None
    graph = sg.Graph([x], [ops.Relu(ops.Add(unknown, np.float32(1)))], "untyped")
    config = {"RUNTIME_FALLBACK": False}
    model = sg.compile_model(graph, f"HETERO:{device},REFERENCE", config)
    assert device in model.get_property("EXECUTION_DEVICES")
    data = np.random.default_rng(0).standard_normal((4, 3, 3)).astype(np.float32)
    np.testing.assert_allclose(model(data)[0], expected(graph, x=data)[0], rtol=1e-5)


@pytest.mark.parametrize("device", INSTALLED)
@pytest.mark.parametrize("weights", ["inside", "inputs"])
def test_results_are_the_callers_own(device: str, weights: str) -> None:
    """A library may return an input, a weight or another result as a result, or a view of one."""
    x = sg.input("x", type=sg.TensorType("float32", (8, 8)))
    w = sg.parameter("w", np.random.default_rng(1).standard_normal((8, 8)).astype(np.float32))
    product = ops.Relu(ops.MatMul(x, w))
    outputs = [product, ops.Identity(product), ops.Transpose(product), ops.Reshape(product, [-1])]
    outputs += [ops.Identity(x), ops.Reshape(x, [4, 16]), ops.Identity(w), ops.Reshape(w, [64])]
    outputs += ops.Split(product, num_outputs=2)
    graph = sg.Graph([x], outputs, "views")
    model = sg.compile_model(graph, f"HETERO:{device},REFERENCE", {"WEIGHTS": weights})
    data = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
    untouched = data.copy()
    for _ in range(3):
        found, right = model(data), expected(graph, x=untouched)
        for k in range(len(outputs)):
            np.testing.assert_allclose(found[k], right[k], atol=1e-6)
            found[k][...] = np.nan


@pytest.mark.slow  # PyTorch's compiler takes seconds for each shape
@pytest.mark.skipif(bool(unusable("TORCH")), reason=unusable("TORCH"))
@pytest.mark.skipif(not shutil.which("c++"), reason="PyTorch's compiler needs a C++ compiler")
@pytest.mark.parametrize("weights", ["inside", "inputs"])
def test_torch_compiles_a_region_as_a_whole(weights: str) -> None:
    """Axes and sizes that are weights used to cut the region into single operators."""
    counters = importlib.import_module("torch._dynamo.utils").counters
    counters.clear()
    x, w = sg.input("x", type=FLOAT), sg.parameter("w", np.ones((6, 4), np.float32))
    assert w.parameter is not None
    hidden = ops.ReduceMean(ops.Unsqueeze(ops.Relu(ops.MatMul(x, w)), [1]), [1], keepdims=0)
    graph = sg.Graph([x], [ops.Softmax(ops.Reshape(hidden, [-1, 2, 2]))], "axes")
    config = {"COMPILE": True, "WEIGHTS": weights, "RUNTIME_FALLBACK": False}
    model = sg.compile_model(graph, "TORCH", config)
    for count in (3, 2, 3):
        w.parameter.assign(np.random.default_rng(count).random((6, 4), np.float32))
        found = model(x=rows(count))[0]
        np.testing.assert_allclose(found, expected(graph, x=rows(count))[0], atol=1e-6)
    assert counters["stats"]["unique_graphs"] >= 2
    assert not counters["graph_break"]


@pytest.mark.skipif(bool(unusable("TORCH")), reason=unusable("TORCH"))
def test_torch_compiles_nothing_whose_sizes_are_computed() -> None:
    """A trace would have the sizes of its example in it."""
    x = sg.input("x", type=sg.TensorType("float32", (2, 6)))
    shape = sg.input("shape", type=sg.TensorType("int64", (2,)))
    graph = sg.Graph([x, shape], [ops.Relu(ops.Reshape(x, shape))], "computed")
    found = sg.Core().query_model(graph, "TORCH", {"COMPILE": True})
    [reshape, relu] = (node.name for node in graph.nodes)
    assert [*found] == [relu]
    assert "axes and sizes that are computed" in found.reasons[reshape]
    assert [*sg.query_model(graph, "TORCH")] == [reshape, relu]


@pytest.mark.parametrize("device", INSTALLED)
@pytest.mark.parametrize("weights", ["inside", "inputs"])
def test_new_weights_are_seen(device: str, weights: str) -> None:
    graph, parameter = dense()
    model = sg.compile_model(graph, device, {"WEIGHTS": weights, "RUNTIME_FALLBACK": False})
    for seed in range(4):
        parameter.assign(np.random.default_rng(seed).standard_normal((6, 4)).astype(np.float32))
        for count in (2, 5):
            x = rows(count, seed)
            np.testing.assert_allclose(model(x=x)[0], expected(graph, x=x)[0], atol=1e-6)


@pytest.mark.parametrize("device", installed(*(name for name in PACKAGES if name != "CUDNN")))
def test_weights_passed_at_every_run_need_no_new_model(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, parameter = dense()
    kind = type(sg.default_core().device(device))
    compiled: list[int] = []
    original = kind.compile_library_model  # pyright: ignore[reportAttributeAccessIssue]

    def counted(self: Any, model: bytes, options: Any) -> Any:
        compiled.append(len(model))
        return original(self, model, options)

    monkeypatch.setattr(kind, "compile_library_model", counted)
    counts: dict[str, int] = {}
    for weights in ("inside", "inputs"):
        config = {"WEIGHTS": weights, "RUNTIME_FALLBACK": False}
        model = sg.compile_model(graph, device, config)
        model(x=rows(2))
        compiled.clear()
        parameter.assign(np.ones((6, 4), np.float32))
        np.testing.assert_allclose(model(x=rows(2))[0], np.full((2, 4), 0.25), atol=1e-6)
        counts[weights] = len(compiled)
    assert counts == {"inside": 1, "inputs": 0}


@pytest.mark.parametrize("device", INSTALLED)
def test_bounds_that_are_weights_do_not_drive_a_region_away(device: str) -> None:
    """Bounds that are inputs are not in oneDNN's Clip, which left the whole region to CPU."""
    x = sg.input("x", type=FLOAT)
    w = sg.parameter("w", np.eye(6, dtype=np.float32))
    low = sg.parameter("low", np.float32(0.0))
    high = sg.parameter("high", np.float32(0.5))
    graph = sg.Graph([x], [ops.Clip(ops.MatMul(x, w), low, high)], "clip")
    assert high.parameter is not None
    config = {"WEIGHTS": "inputs", "RUNTIME_FALLBACK": False}
    model = sg.compile_model(graph, f"HETERO:{device},CPU", config)
    assert model.execution_devices == [device]
    for bound in (0.5, 0.25):
        high.parameter.assign(np.float32(bound))
        np.testing.assert_allclose(model(x=rows(3))[0], np.clip(rows(3), 0, bound), atol=1e-6)


def test_tvm_converts_and_builds_in_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads failed in TVM, and lost the process's standard output."""
    pytest.importorskip("tvm", reason="apache-tvm is not installed")
    device: Any = sg.default_core().device("TVM")
    inside: list[int] = [0]
    most: list[int] = []

    class Frontend:
        def from_onnx(self, *_: Any, **__: Any) -> None:
            inside[0] += 1
            most.append(inside[0])
            time.sleep(0.05)
            inside[0] -= 1
            raise ValueError("not converted")

    monkeypatch.setattr(device, "_frontend", Frontend())
    graph, _ = dense()
    model = sg.to_onnx(graph).SerializeToString()

    def build() -> None:
        with pytest.raises(ValueError, match="not converted"):
            device.compile_library_model(model, device.options_for({}))

    before = sys.stdout
    threads = [threading.Thread(target=build) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sys.stdout is before
    assert most == [1, 1, 1]


@pytest.mark.parametrize("device", INSTALLED)
def test_as_a_property(device: str, tmp_path: Path) -> None:
    graph, _ = dense(last=ops.Sigmoid)
    name = device.lower()
    assert name in sg.list_properties()
    cut = sg.optimize_for(graph, name, min_size=2, INFERENCE_NUM_THREADS=1)
    ops_of_cut = [node.op for node in cut.nodes]
    sg.save(cut, tmp_path / "cut.onnx")
    loaded = sg.load(tmp_path / "cut.onnx")
    for op in (*ops_of_cut, *[node.op for node in loaded.nodes]):
        assert isinstance(op, base.BackendOp)
        assert op.options.INFERENCE_NUM_THREADS == 1
    x = rows(3)
    for each in (cut, loaded):
        model = sg.compile_model(each, "CPU")
        np.testing.assert_allclose(model(x=x)[0], expected(graph, x=x)[0], atol=1e-6)


@pytest.mark.parametrize("device", INSTALLED)
def test_a_view_alone_is_no_region_of_a_property(device: str) -> None:
    x = sg.input("x", type=FLOAT)
    view = ops.Reshape(ops.Sin(x, name="before"), np.array([-1, 3]), name="view")
    graph = sg.Graph([x], [ops.Exp(view, name="after")])
    cut = sg.optimize_for(graph, device.lower(), exclude=["before", "after"])
    assert [node.name for node in cut.nodes if node.subgraph is not None] == []
    # oneDNN itself has no kernel for a view alone.
    reason = "oneDNN has no kernel" if device == "ONEDNN" else "views alone"
    assert reason in str(sg.explain(cut, "view"))


@pytest.mark.parametrize("device", INSTALLED)
@pytest.mark.parametrize("kind", ["read-only", "reversed", "transposed"])
def test_inputs_of_any_memory(device: str, kind: str) -> None:
    graph, _ = dense()
    x = {"read-only": rows(6), "reversed": rows(6)[::-1], "transposed": rows(6).T}[kind]
    x.flags.writeable = kind != "read-only"
    model = sg.compile_model(graph, device, {"RUNTIME_FALLBACK": False})
    np.testing.assert_allclose(model(x=x)[0], expected(graph, x=x)[0], atol=1e-6)


@pytest.mark.parametrize("device", INSTALLED)
def test_two_inputs_of_indices_have_memory_of_their_own(device: str) -> None:
    """OPENVINO freed its copy of the first before the run, and the second got the same memory."""
    table = sg.parameter("table", np.arange(1200, dtype=np.float32).reshape(300, 4))
    first, second = (sg.input(name, type=sg.TensorType("int64", (300,))) for name in "ab")
    rows_of = [ops.Gather(table, first), ops.Gather(table, second)]
    graph = sg.Graph([first, second], [ops.Sub(*rows_of)], "lookups")
    model = sg.compile_model(graph, f"HETERO:{device},CPU", {"RUNTIME_FALLBACK": False})
    inputs = {"a": np.arange(300), "b": np.arange(300)[::-1].copy()}
    np.testing.assert_array_equal(model(**inputs)[0], expected(graph, **inputs)[0])


@pytest.mark.parametrize("device", INSTALLED)
def test_bodies_and_outer_values_go_with_their_node(device: str) -> None:
    x = sg.input("x", type=sg.TensorType("float32", (3,)))
    flag = sg.input("flag", type=sg.TensorType("bool", ()))
    w = sg.parameter("w", np.arange(3, dtype=np.float32))
    yes = sg.Graph([], [ops.Mul(sg.capture(x), w)], "yes")
    no = sg.Graph([], [ops.Sub(sg.capture(x), w)], "no")
    graph = sg.Graph([x, flag], [ops.If(flag, then_branch=yes, else_branch=no)], "branches")
    model = sg.compile_model(graph, f"HETERO:{device},CPU,REFERENCE")
    array = np.ones(3, np.float32)
    for chosen in (True, False):
        inputs = {"x": array, "flag": np.array(chosen)}
        np.testing.assert_allclose(model(**inputs)[0], expected(graph, **inputs)[0])


@pytest.mark.parametrize("device", INSTALLED)
def test_nodes_without_a_common_opset_run_elsewhere(device: str) -> None:
    x = sg.input("x", type=sg.TensorType("float32", (3,)))
    first = sg.Node("Dropout", [x], version=11, outputs=1)
    bounds = [sg.parameter("low", np.float32(-5)), sg.parameter("high", np.float32(0.5))]
    second = sg.Node("Clip", [first.outputs[0], *bounds], version=13)
    graph = sg.Graph([x], second.outputs, "versions")
    inputs = {"x": np.ones(3, np.float32)}
    for model in (
        sg.compile_model(graph, f"HETERO:{device},REFERENCE"),
        sg.compile_model(sg.optimize_for(graph, device.lower()), "REFERENCE"),
    ):
        np.testing.assert_array_equal(model(**inputs)[0], expected(graph, **inputs)[0])


def test_refusals_have_the_reason_of_the_library() -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    x = sg.input("x", type=sg.TensorType("float32", (2, 2)))
    node = sg.Node("Unheard", [x], outputs=1, domain="of.nobody", name="odd")
    node.outputs[0].type = x.type
    found = sg.query_model(sg.Graph([x], node.outputs, "odd"), "ONNXRUNTIME")
    assert not found
    assert "ONNX Runtime" in found.reasons["odd"]
    assert "Unheard" in found.reasons["odd"]
    drawn = sg.Graph([x], [ops.RandomNormalLike(x)], "drawn")
    found = sg.query_model(drawn, "ONNXRUNTIME")
    assert "random" in next(iter(found.reasons.values()))


def test_int64_other_than_indices_is_not_left_to_openvino() -> None:
    pytest.importorskip("openvino", reason="openvino is not installed")
    x = sg.input("x", type=sg.TensorType("int64", (2,)))
    big = np.array([2**40, -(2**40)])
    graph = sg.Graph([x], [ops.Add(x, x)], "sum")
    assert not sg.query_model(graph, "OPENVINO")
    np.testing.assert_array_equal(sg.compile_model(graph, "OPENVINO")(x=big)[0], big + big)


def test_unknown_providers_are_refused() -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    graph, _ = dense()
    with pytest.raises(sg.SubgraphError, match=r"PROVIDERS is 'Warp'.*CPUExecutionProvider"):
        sg.compile_model(graph, "ONNXRUNTIME", {"PROVIDERS": "Warp"})


def test_answers_for_some_options_are_not_those_for_others() -> None:
    """What a library says with wrong options must not decide about the same nodes without them."""
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    x = sg.input("x", type=sg.TensorType("float32", (5, 11)))
    graph = sg.Graph([x], [ops.Neg(ops.Tanh(x))], "asked_twice")
    with pytest.raises(sg.ConfigError, match=r"PROVIDERS is 'Warp'.*CPUExecutionProvider"):
        sg.query_model(graph, "ONNXRUNTIME", {"PROVIDERS": "Warp"})
    assert len(sg.query_model(graph, "ONNXRUNTIME")) == 2


@pytest.mark.parametrize("device", installed("OPENVINO", "TORCH"))
@pytest.mark.parametrize("name", ["WARP", "CPU:WARP", "meta"])
def test_a_device_that_the_library_lacks_is_an_error(device: str, name: str) -> None:
    graph, _ = dense()
    message = rf"device {device}: DEVICE is '{name}'"
    with pytest.raises(sg.ConfigError, match=message):
        sg.compile_model(graph, device, {"DEVICE": name})
    with pytest.raises(sg.ConfigError, match=message):
        sg.query_model(graph, device, {"DEVICE": name})


def test_nodes_without_users_are_asked_about_like_others() -> None:
    """The library was given an empty model for each, and one answer to it held for all of them."""
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")

    def queried(op_type: str, domain: str = "") -> sg.QueryResult:
        x = sg.input("x", type=sg.TensorType("float32", (2, 3)))
        unused = sg.Node(op_type, [x], outputs=1, name="unused", domain=domain)
        unused.outputs[0].type = x.type
        graph = sg.Graph([x], [ops.Neg(ops.Relu(x))], "unused_node", nodes=[unused])
        return sg.query_model(graph, "ONNXRUNTIME")

    assert len(queried("Tanh")) == 3
    found = queried("Unheard", "of.nobody")
    assert len(found) == 2
    assert "Unheard" in found.reasons["unused"]
    assert len(queried("Tanh")) == 3


def test_a_node_is_written_once_for_a_query(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    graph, _ = dense()
    core = sg.Core()
    core.device("ONNXRUNTIME")
    written: list[int] = []
    original = base._serialized  # pyright: ignore[reportPrivateUsage]

    def counted(model: sg.Graph, array_of: Any) -> bytes:
        written.append(len(model.nodes))
        return original(model, array_of)

    monkeypatch.setattr(base, "_serialized", counted)
    assert len(core.query_model(graph, "ONNXRUNTIME")) == 3
    assert sorted(written) == [1, 1, 1, 3]


def test_weights_of_a_query_are_tried_as_zeros_and_not_copied_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    device: Any = sg.Core().device("ONNXRUNTIME")
    tried: list[Any] = []
    monkeypatch.setattr(
        device, "try_library_model", lambda model, _: tried.append(onnx.load_from_string(model))
    )
    rng = np.random.default_rng(0)
    x = sg.input("x", type=sg.TensorType("float32", (1, 40)))
    w = sg.parameter("w", rng.standard_normal((40, 50)).astype(np.float32))
    b = sg.parameter("b", rng.standard_normal(50).astype(np.float32))
    graph = sg.Graph([x], [ops.Add(ops.MatMul(x, w), b)], "large_weight")
    for _ in range(2):
        assert len(device.query_model(graph)) == 2
    (model,) = tried
    arrays = {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    np.testing.assert_array_equal(arrays["w"], np.zeros((40, 50), np.float32))
    assert b.parameter is not None
    np.testing.assert_array_equal(arrays["b"], b.parameter.array)


@pytest.mark.parametrize(
    ("requirement", "message"),
    [
        ("subgraph_no_such_library >= 1.0", r"pip install 'subgraph_no_such_library >= 1.0'"),
        ("numpy >= 999.0", r"Arrays [\d.]+ is too old, 999.0 is needed: pip install"),
    ],
)
def test_a_missing_or_old_package_says_what_to_install(requirement: str, message: str) -> None:
    module = requirement.partition(" ")[0]
    with pytest.raises(sg.DeviceError, match=message):
        base.import_library(module, requirement, "Arrays", lambda: importlib.import_module(module))


def test_backends_are_listed_and_start_only_when_named() -> None:
    code = (
        "import sys, subgraph as sg; core = sg.Core(); names = core.available_devices; "
        "print(sorted({'onnxruntime', 'openvino', 'torch', 'tvm'} & set(sys.modules)), names)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.startswith("[]")
    assert "ONNXRUNTIME" not in out.stdout
    states = {state.name: state for state in sg.backends()}
    assert set(states) == set(PACKAGES)
    for name, state in states.items():
        assert bool(state.problem) == bool(unusable(name)), state
        assert is_missing(name) == ("pip install" in state.problem)


def test_a_name_of_no_device_is_near_a_backend() -> None:
    graph, _ = dense()
    with pytest.raises(sg.DeviceError, match="OPENVINO"):
        sg.compile_model(graph, "OPENVIN")
