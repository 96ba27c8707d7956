"""The OPENCL device: models, mixed placement, weights, requests, variants, tuning, faults."""

from __future__ import annotations

import json
import logging
import random as random_module
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
import light_models
import numpy as np
import onnxruntime
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.devices.export import region_nodes
from subgraph.devices.plugins.opencl import OpenclDevice
from subgraph.engine.planner.memory import assign_offsets
from subgraph.engine.planner.plan import Planner
from subgraph.errors import DeviceError
from subgraph.graph.types import Array
from subgraph.opencl import executable_plan, runtime, tuning
from subgraph.opencl.region_op import ClSession, ClSubgraphOp
from tests.support.opencl import core, graph_of, needs_device, random

pytestmark = needs_device
DIGITS = Path(__file__).parents[2] / "examples" / "digits.onnx"
LIGHT = ("light_squeezenet", "light_shufflenet")


def model_and_results(name: str) -> tuple[sg.Graph, list[Array], list[Array]]:
    """Return a model, inputs, and what ONNX Runtime gives."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    source: Any = DIGITS
    if name != "digits":
        source = light_models.light_model(name)
    raw = source.read_bytes() if isinstance(source, Path) else source.SerializeToString()
    session = onnxruntime.InferenceSession(raw, options, providers=["CPUExecutionProvider"])
    arrays = {
        i.name: random(*(d if isinstance(d, int) else 2 for d in i.shape))
        for i in session.get_inputs()
    }
    results: list[Any] = session.run(None, arrays)
    return sg.load(source), list(arrays.values()), results


@pytest.fixture(scope="module", params=["digits", *LIGHT])
def case(request: Any) -> tuple[sg.Graph, list[Array], list[Array]]:
    return model_and_results(request.param)


def assert_same(model: sg.CompiledModel, arrays: list[Array], wanted: list[Array]) -> None:
    results = model(arrays)
    for k, want in enumerate(wanted):
        np.testing.assert_allclose(results[k], want, rtol=1e-4, atol=1e-4)


def test_models(case: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Everything runs on OPENCL itself."""
    graph, arrays, wanted = case
    answer = core().query_model(graph, "OPENCL")
    assert set(answer.values()) == {"OPENCL"}, answer.reasons
    with caplog.at_level(logging.WARNING):
        assert_same(core().compile_model(graph, "OPENCL"), arrays, wanted)
    assert not caplog.records


def test_random_affinities(case: Any) -> None:
    """Nodes on OPENCL, CPU and REFERENCE by chance."""
    graph, arrays, wanted = case
    mixed = graph.clone()
    chance = random_module.Random(1)
    for node in mixed.nodes:
        place = chance.choices(["OPENCL", "CPU", "REFERENCE"], [8, 8, 1])[0]
        node.metadata = {**(node.metadata or {}), "affinity": place}
    assert_same(core().compile_model(mixed, "HETERO:OPENCL,CPU,REFERENCE"), arrays, wanted)


def test_multi(case: Any) -> None:
    graph, arrays, wanted = case
    assert_same(core().compile_model(graph, "MULTI:OPENCL,CPU"), arrays, wanted)


# ---------------------------------------------------------------- properties


def test_properties() -> None:
    device = core().device("OPENCL")
    assert device.get_property("AVAILABLE_DEVICES") == [
        str(k) for k in range(len(runtime.find_devices()))
    ]
    assert device.get_property("FULL_DEVICE_NAME")
    assert "FP32" in device.get_property("OPTIMIZATION_CAPABILITIES")
    with pytest.raises(sg.ConfigError, match="KERNELS"):
        core().compile_model(model_and_results("digits")[0], "OPENCL", {"KERNELS": "TPU"})


def test_a_second_device_that_is_not_there() -> None:
    with pytest.raises(sg.SubgraphError, match="no id '77'"):
        core().compile_model(model_and_results("digits")[0], "OPENCL.77")


# ---------------------------------------------------------------- weights and requests


def scaled() -> tuple[sg.Graph, Any]:
    x = sg.input("x", (4, 6), "float32")
    w = sg.parameter("w", random(6, 5))
    return sg.Graph([x], [ops.Relu(ops.MatMul(x, w))]), w.parameter


def test_weights_change() -> None:
    """Each run uses the weights as they are; they are uploaded once for each version."""
    graph, w = scaled()
    model = core().compile_model(graph, "OPENCL")
    store = executable_plan.device_weights(runtime.runtime(0))
    x = random(4, 6)
    for factor in (1, 2, 3):
        w.assign(random(6, 5) * np.float32(factor))
        before = store.uploads
        for _ in range(3):
            wanted = np.maximum(x @ w.array, 0)
            np.testing.assert_allclose(model([x])[0], wanted, rtol=1e-4, atol=1e-4)
        assert store.uploads - before == 1


def test_many_requests_at_once() -> None:
    graph, w = scaled()
    model = core().compile_model(graph, "OPENCL")
    wrong: list[str] = []

    def work(seed: int) -> None:
        request = model.create_infer_request()
        for k in range(20):
            x = random(4, 6) + np.float32(seed * 100 + k)
            if not np.allclose(request.infer([x])[0], np.maximum(x @ w.array, 0), rtol=1e-3):
                wrong.append(f"{seed} {k}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong


GATED = """
import threading
import numpy as np
import subgraph as sg
from subgraph.opencl import executable_plan as bound, runtime
api, kernels = runtime.opencl(), threading.Event()


class Gated:
    def __getattr__(self, name):
        return enqueue if name == "enqueue_nd_range_kernel" else getattr(api, name)


def enqueue(queue, *args):
    gates.append(api.UserEvent(queue.context))
    event = api.enqueue_nd_range_kernel(queue, *args, wait_for=[gates[-1]])
    kernels.set()
    return event


gates = []
bound.opencl = lambda: Gated()
x = sg.input("x", ("N", 8), "float32")
model = sg.compile_model(sg.Graph([x], [sg.ops.Relu(x)]), "OPENCL")
request = model.create_infer_request()
request.start_async(np.full((2, 8), -1, np.float32))
kernels.wait()
assert request.wait(0.2) is None
gates[0].set_status(api.command_execution_status.COMPLETE)
assert not request.wait()[0].any()
"""


def test_other_threads_run_while_the_device_works() -> None:
    """The kernel waits for this thread, which therefore must not wait for the kernel."""
    subprocess.run([sys.executable, "-c", GATED], check=True, timeout=120)


def test_a_request_is_uploaded_while_the_device_works_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Waiting for results takes a thread of its own, so the next request starts meanwhile."""
    graph, w = scaled()
    model = core().compile_model(graph, "OPENCL")
    assert model.optimal_requests == 2
    begun, go_on = threading.Semaphore(0), threading.Event()
    plan = executable_plan.ClExecutablePlan
    enqueue, finish = plan.enqueue, plan.finish

    def counted(self: Any, *args: Any) -> Any:
        pending = enqueue(self, *args)
        begun.release()
        return pending

    def gated(self: Any, pending: Any) -> Any:
        assert go_on.wait(60)
        return finish(self, pending)

    data = [random(4, 6) for _ in range(4)]
    wanted = [np.maximum(x @ w.array, 0) for x in data]
    requests = [model.create_infer_request() for _ in data]
    for request in requests:
        request.infer([data[0]])
    monkeypatch.setattr(plan, "enqueue", counted)
    monkeypatch.setattr(plan, "finish", gated)
    targets = [np.zeros_like(y) for y in wanted]
    for request, x, target in zip(requests, data, targets, strict=True):
        request.set_output(0, target)
        request.start_async([x])
    for _ in requests:  # all of them, though none has ended
        assert begun.acquire(timeout=60)
    requests[3].cancel()
    go_on.set()
    for request, target, y in zip(requests[:3], targets, wanted, strict=False):
        assert request.wait()[0] is target  # type: ignore[index]
        np.testing.assert_allclose(target, y, rtol=1e-3)
    with pytest.raises(sg.RequestCancelledError):
        requests[3].wait()
    np.testing.assert_allclose(requests[3].infer([data[3]])[0], wanted[3], rtol=1e-3)


def test_a_device_lost_while_results_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU takes over from OPENCL in the second half of a run."""
    graph, w = scaled()
    model = core().compile_model(graph, "OPENCL")
    x = random(4, 6)

    def lost(*_: Any) -> Any:
        raise sg.DeviceError("lost")

    monkeypatch.setattr(executable_plan.ClExecutablePlan, "finish", lost)
    request = model.create_infer_request()
    for _ in range(2):
        request.start_async([x])
        results = request.wait()
        assert results is not None
        np.testing.assert_allclose(results[0], np.maximum(x @ w.array, 0), rtol=1e-3)


def test_shapes_change() -> None:
    x = sg.input("x", ("N", "M"), "float32")
    model = core().compile_model(sg.Graph([x], [ops.Softmax(ops.Add(x, x))]), "OPENCL")
    for shape in ((2, 3), (5, 1), (0, 4), (2, 3), (33, 65)):
        array = random(*shape)
        e = np.exp(2 * array)
        wanted = e / e.sum(axis=1, keepdims=True)
        np.testing.assert_allclose(model([array])[0], wanted, rtol=1e-4, atol=1e-6)


def test_exported_and_imported(tmp_path: Path) -> None:
    graph, arrays, wanted = model_and_results("digits")
    path = tmp_path / "digits.sgc"
    core().compile_model(graph, "OPENCL").export_model(str(path))
    assert_same(core().import_model(str(path), "OPENCL"), arrays, wanted)


# ---------------------------------------------------------------- tuning


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("SUBGRAPH_CACHE_DIR", str(tmp_path))
    tuning.stored.cache_clear()
    yield tmp_path
    tuning.stored.cache_clear()


def test_tuning_is_kept(cache: Path) -> None:
    found = runtime.runtime(0)
    tried: list[tuning.ClTuning] = []

    def measure(choice: tuning.ClTuning) -> float:
        tried.append(choice)
        return float(len(tried) != 2)

    best = tuning.tuned(found, measure)
    assert best == tried[1]
    assert len(tried) == len(list(tuning.candidates(found)))
    tuning.stored.cache_clear()
    assert tuning.tuned(found, measure) == best == tuning.stored(found)
    assert len(tried) == len(list(tuning.candidates(found)))


@pytest.mark.parametrize("damage", ["", "[]", '{"rows": 0}', '{"rows": "many"}', '{"sloth": 1}'])
def test_a_damaged_choice_is_ignored(cache: Path, damage: str) -> None:
    found = runtime.runtime(0)
    tuning.tuned(found, lambda choice: 1.0)
    (file,) = (cache / "opencl").iterdir()
    assert json.loads(file.read_text())
    file.write_text(damage)
    tuning.stored.cache_clear()
    assert tuning.stored(found) is None


def test_tuned_by_measurement(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = list(tuning.candidates(runtime.runtime(0)))[:2]
    monkeypatch.setattr(tuning, "candidates", lambda found: iter(few))
    graph, arrays = graph_of("MatMul", [random(70, 40), random(40, 50)], (1,))
    model = core().compile_model(graph, "OPENCL", {"TUNE": True})
    assert tuning.stored(runtime.runtime(0)) in few
    wanted = random(70, 40) @ random(40, 50)
    np.testing.assert_allclose(model(arrays)[0], wanted, rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------- faults


def api_error(kind: str, code: int, routine: str) -> Exception:
    api = runtime.opencl()
    record = api._cl._ErrorRecord(routine, code, routine)
    return getattr(api, kind)(record)


@attrs.define
class Faulty:
    """The module pyopencl with a function that fails when asked to."""

    api: Any
    name: str
    error: Exception
    broken: Callable[[], bool]

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.api, name)
        if name != self.name:
            return found

        def call(*args: Any, **kwargs: Any) -> Any:
            if self.broken():
                raise self.error
            return found(*args, **kwargs)

        return call


def alone() -> OpenclDevice:
    """Return the device without others that could take over."""
    return OpenclDevice()


def chain() -> tuple[sg.Graph, Array, Array]:
    x = sg.input("x", (3, 4), "float32")
    product = ops.MatMul(x, sg.parameter("w", random(4, 5)), name="the_product")
    graph = sg.Graph([x], [ops.ReduceSum(product, keepdims=0)])
    array = random(3, 4)
    return graph, array, np.asarray((array @ random(4, 5)).sum())


def test_lost_while_it_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request fails with the kernel and the node in the message; the next one works."""
    graph, array, wanted = chain()
    model = alone().compile_model(graph, {})
    lost = threading.Event()
    error = api_error("RuntimeError", -36, "clEnqueueNDRangeKernel")
    faulty = Faulty(runtime.opencl(), "enqueue_nd_range_kernel", error, lost.is_set)
    monkeypatch.setattr(executable_plan, "opencl", lambda: faulty)
    request, other = model.create_infer_request(), model.create_infer_request()
    np.testing.assert_allclose(other.infer([array])[0], wanted, rtol=1e-4)
    lost.set()
    with pytest.raises(DeviceError, match=r"(panels|tiles) of node 'the_product'"):
        request.infer([array])
    lost.clear()
    for again in (request, other):
        np.testing.assert_allclose(again.infer([array])[0], wanted, rtol=1e-4)


_FORKS = """
import sys
import numpy as np
import subgraph as sg
from subgraph import ops
from tests.support.children import in_child

x = sg.input("x", ("N", 4), "float32")
w = sg.parameter("w", np.full((4, 5), 2, np.float32))
graph = sg.Graph([x], [ops.Relu(ops.MatMul(x, w, name="the_product"))])
core, array = sg.Core(), np.ones((3, 4), np.float32)
models = []
if sys.argv[1] == "listed":
    assert "OPENCL" in core.available_devices
elif sys.argv[1] == "ran":
    for name in ("OPENCL", "HETERO:OPENCL,CPU", "MULTI:OPENCL,CPU"):
        models.append(core.compile_model(graph, name))
    requests = [model.create_infer_request() for model in models]
    for request in requests:
        assert (request.infer([array])[0] == 8).all()

def check():
    for name in ("OPENCL", "HETERO:OPENCL,CPU", "MULTI:OPENCL,CPU", "AUTO"):
        models.append(core.compile_model(graph, name))
    for model in models:
        assert (model([array])[0] == 8).all()
        assert (model([array[:2]])[0] == 8).all()
        request = model.create_infer_request()
        request.start_async([array])
        assert (request.wait(20)[0] == 8).all()
    if sys.argv[1] == "ran":
        for request in requests:
            assert (request.infer([array])[0] == 8).all()
    try:
        strict = core.compile_model(graph, "OPENCL", {"RUNTIME_FALLBACK": False})
        strict([array])
        assert sys.argv[1] == "unused"
    except sg.DeviceError as error:
        assert "does not work in forked processes" in str(error), error

in_child(check, seconds=100)
"""


@pytest.mark.parametrize("parent", ["unused", "listed", "ran"])
def test_a_forked_child_does_not_wait_for_threads_of_its_parent(parent: str) -> None:
    """PoCL waits without end in a child of a process that has listed its devices."""
    ran = subprocess.run(
        [sys.executable, "-c", _FORKS, parent], capture_output=True, text=True, timeout=200
    )
    assert ran.returncode == 0, ran.stderr[-3000:]


def test_a_driver_is_refused_in_a_forked_child(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """NVIDIA's driver ends such a child by SIGSEGV at its first call; CPU takes over instead."""
    graph, array, wanted = chain()
    model, fallible = (each.compile_model(graph, "OPENCL") for each in (core(), sg.Core()))
    strict = alone().compile_model(graph, {})
    requests = [each.create_infer_request() for each in (model, strict)]
    for request in requests:
        np.testing.assert_allclose(request.infer([array])[0], wanted, rtol=1e-4)
    opened = runtime.runtime(0)
    monkeypatch.setattr(opened, "survives_fork", False)
    monkeypatch.setattr(opened, "_process", -1)
    for request in (requests[1], strict.create_infer_request()):
        with pytest.raises(DeviceError, match=r"used before this process was forked.*'spawn'"):
            request.infer([array])
    with caplog.at_level(logging.WARNING):
        np.testing.assert_allclose(requests[0].infer([array])[0], wanted, rtol=1e-4)
        np.testing.assert_allclose(fallible([array])[0], wanted, rtol=1e-4)
    assert "continues on CPU" in caplog.text


def test_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread's request fails all the time, those of others do not."""
    graph, array, wanted = chain()
    model = alone().compile_model(graph, {})
    victim = threading.get_ident()
    error = api_error("RuntimeError", -36, "clEnqueueNDRangeKernel")
    faulty = Faulty(
        runtime.opencl(),
        "enqueue_nd_range_kernel",
        error,
        lambda: threading.get_ident() == victim,
    )
    monkeypatch.setattr(executable_plan, "opencl", lambda: faulty)
    results: list[Any] = []

    def work() -> None:
        request = model.create_infer_request()
        results.extend(float(request.infer([array])[0]) for _ in range(10))

    thread = threading.Thread(target=work)
    thread.start()
    request = model.create_infer_request()
    for _ in range(5):
        with pytest.raises(DeviceError):
            request.infer([array])
    thread.join(60)
    np.testing.assert_allclose(results, [wanted] * 10, rtol=1e-4)


def test_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, array, wanted = chain()
    model = alone().compile_model(graph, {})
    full = threading.Event()
    full.set()
    error = api_error("MemoryError", -4, "clCreateBuffer")
    faulty = Faulty(runtime.opencl(), "Buffer", error, full.is_set)
    monkeypatch.setattr(runtime, "opencl", lambda: faulty)
    request = model.create_infer_request()
    with pytest.raises(DeviceError, match="MB left"):
        request.infer([array])
    full.clear()
    np.testing.assert_allclose(request.infer([array])[0], wanted, rtol=1e-4)


@pytest.mark.parametrize("begin", [2**36, 4 * 2**31 - 64])  # bytes; the second one ends beyond
def test_an_operand_beyond_the_range_of_indices(
    begin: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = sg.input("x", (64, 64))
    product = ops.MatMul(x, sg.parameter("w", random(64, 64)))
    graph = sg.Graph([x], [ops.Softmax(ops.MatMul(product, product))])

    def far(sizes: Any, lives: Any) -> Any:
        offsets, total = assign_offsets(sizes, lives)
        return [begin + offset for offset in offsets], total

    monkeypatch.setattr(Planner, "place_storages", lambda self, *args: far(*args))
    model = alone().compile_model(graph, {})
    with pytest.raises(DeviceError, match="kernels count to 2\\^31"):
        model.create_infer_request().infer([random(64, 64)])


def test_a_program_that_does_not_build(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message has the compiler's words, the program and the node."""
    graph, arrays = graph_of("Sinh", [random(3, 4)])
    monkeypatch.setattr(runtime.ClSource, "code", lambda self: "__kernel void run( { nonsense }")
    source = runtime.ClSource("elementwise", "broken")
    with pytest.raises(DeviceError, match=r"'elementwise' .*does not build"):
        runtime.runtime(0).kernel(source, "run")
    found = runtime.runtime(0)
    monkeypatch.setattr(found, "_programs", {})
    model = alone().compile_model(graph, {})
    with pytest.raises(DeviceError, match=r"(?s)'tried' \(Sinh\).*does not build"):
        model(arrays)


def test_another_device_takes_over(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With CPU behind it, a lost device costs a warning, one more at last, and no wrong result."""
    graph, array, wanted = chain()
    model = core().compile_model(graph, "OPENCL")
    error = api_error("RuntimeError", -36, "clEnqueueNDRangeKernel")
    faulty = Faulty(runtime.opencl(), "enqueue_nd_range_kernel", error, lambda: True)
    monkeypatch.setattr(executable_plan, "opencl", lambda: faulty)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            np.testing.assert_allclose(model([array])[0], wanted, rtol=1e-4)
    first, last = (r.getMessage() for r in caplog.records if r.name == "subgraph")
    assert "continues on CPU" in first
    assert "failed 3 times in a row on OPENCL and runs on CPU from now on" in last


def test_more_elements_than_kernels_count() -> None:
    """Such a node is refused with a reason, before any memory is asked for."""
    x = sg.input("x", (1 << 16, 1 << 15), "uint8")
    answer = core().query_model(sg.Graph([x], [ops.BitwiseNot(x, name="big")]), "OPENCL")
    assert "big" not in answer
    assert "2^31" in str(answer.reasons["big"])


def test_buffers_of_other_shapes_count_against_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inputs of eight shapes took eight times the memory of one."""
    monkeypatch.setenv("SUBGRAPH_MEMORY_LIMIT", "48M")
    x = sg.input("x", ("N",))
    graph = sg.Graph([x], [ops.ReduceSum(ops.Abs(x))])
    (node,) = region_nodes(core().compile_model(graph, "OPENCL").graph)
    assert isinstance(node.op, ClSubgraphOp)
    session = node.op.session()
    assert isinstance(session, ClSession)
    for count in (4 << 20, (4 << 20) - 1, (4 << 20) - 2):  # 16 MiB each, twice
        session([np.ones(count, np.float32)])
        assert len(session._bound) == 1
