"""Every allocation, file operation, thread start and call of a driver fails once, in turn.

Nothing breaks for good.

A first run of a scenario counts the calls; each of them then fails in a run of its own. Allowed is
a right result, or a clean error. Afterwards the same objects work, in another thread too (no lock
is held), and no temporary file, thread or open file is left.
"""

from __future__ import annotations

import gc
import io
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

try:
    import resource
except ImportError:  # not on Windows
    resource = None

import subgraph as sg
from subgraph import ops
from subgraph.engine.program.pool import Pool
from subgraph.engine.toolchain import toolchain
from subgraph.graph.types import Array
from subgraph.system import objectcache, signing
from subgraph.system.objectcache import ObjectCode
from tests.support.faults import DRIVER_FAULT, FAULTS, Fault, failing
from tests.support.opencl import needs_device

pytestmark = pytest.mark.filterwarnings("ignore")
_MOST_IN_CI = 5  # of a scenario's calls
_SECONDS = 30  # what holds a lock for longer holds it for good


def graph() -> sg.Graph:
    """Return a network of a few kernels, with weights that are packed."""
    rng = np.random.default_rng(0)
    x = sg.input("x", ("N", 16))
    weights = [rng.uniform(-1, 1, (16, 16)).astype(np.float32) for _ in range(2)]
    y = ops.Relu(ops.Gemm(x, sg.parameter("w", weights[0])), name="relu")
    y = ops.MatMul(ops.Softmax(y), sg.parameter("v", weights[1]))
    return sg.Graph([x], [ops.Add(y, x)], "net")


X, Y = (np.random.default_rng(k).uniform(-1, 1, (2 + k, 16)).astype(np.float32) for k in (1, 2))

ROWS = (2, 3, 4, 64, 128)
MANY = {n: np.random.default_rng(n).uniform(-1, 1, (n, 16)).astype(np.float32) for n in ROWS}


def right(results: Any, given: Array = X) -> bool:
    """Return whether results are those of `graph`."""
    w, v = (p.array for p in graph().parameters.values())
    y = np.exp(np.maximum(given @ w, 0))
    return np.allclose(results, y / y.sum(1, keepdims=True) @ v + given, 1e-4, 1e-5)


@attrs.frozen
class Scenario:
    """What a user does.

    Attributes:
        prepare: Makes what the run needs, given a folder; nothing fails meanwhile.
        run: Does it; returns whether the result is right.
    """

    prepare: Callable[[Path], Any]
    run: Callable[[Any], bool]


SCENARIOS: dict[str, Scenario] = {}


def scenario(
    prepare: Callable[[Path], Any],
) -> Callable[[Callable[[Any], bool]], Callable[[Any], bool]]:
    """Register the decorated function as what happens to what ``prepare`` makes."""

    def register(run: Callable[[Any], bool]) -> Callable[[Any], bool]:
        SCENARIOS[run.__name__] = Scenario(prepare, run)
        return run

    return register


def _file(folder: Path) -> Path:
    sg.save(graph(), folder / "net.onnx", external_data=True)
    return folder / "net.onnx"


def _model(folder: Path) -> sg.CompiledModel:
    return sg.Core().compile_model(graph(), "CPU")


def _ran(folder: Path) -> sg.CompiledModel:
    model = _model(folder)
    model(X)
    return model


def _blob(folder: Path) -> Path:
    _ran(folder).export_model(folder / "net.blob")
    return folder / "net.blob"


@scenario(_file)
def load_a_file(path: Path) -> bool:
    return right(sg.compile_model(sg.load(path), "REFERENCE")(X)[0])


@scenario(lambda folder: (graph(), folder))
def save_a_file(given: tuple[sg.Graph, Path]) -> bool:
    work, folder = given
    sg.save(work, folder / "saved.onnx", external_data=True)
    return sorted(sg.load(folder / "saved.onnx").parameters) == ["v", "w"]


@scenario(lambda folder: (sg.Core(), graph()))
def compile_for_cpu(given: tuple[sg.Core, sg.Graph]) -> bool:
    core, work = given
    return right(core.compile_model(work, "CPU")(X)[0])


@scenario(lambda folder: (sg.Core(), graph()))
def compile_for_several(given: tuple[sg.Core, sg.Graph]) -> bool:
    core, work = given
    work = work.clone()
    work.node("relu").metadata = {"affinity": "REFERENCE"}
    return all(
        right(core.compile_model(work, device)(X)[0])
        for device in ("HETERO:CPU,REFERENCE", "MULTI:CPU,REFERENCE", "AUTO:CPU,REFERENCE")
    )


@scenario(_model)
def first_run(model: sg.CompiledModel) -> bool:
    return right(model(X)[0])


@scenario(_ran)
def next_run_and_a_new_shape(model: sg.CompiledModel) -> bool:
    return all(right(model(given)[0], given) for given in (X, X, Y, X))


@scenario(_ran)
def run_shapes_in_turn(model: sg.CompiledModel) -> bool:
    request = model.create_infer_request()
    # A shape that comes back gets an executable plan of its own, others rebind one.
    return all(right(request.infer(MANY[rows])[0], MANY[rows]) for rows in (2, 3, 4, 2, 64, 3, 2))


def _request_of_shapes(folder: Path) -> sg.InferRequest:
    request = _model(folder).create_infer_request()
    for rows in (2, 3, 2, 3):
        request.infer(MANY[rows])
    return request


@scenario(_request_of_shapes)
def run_larger_shapes_and_the_first_again(request: sg.InferRequest) -> bool:
    return all(right(request.infer(MANY[rows])[0], MANY[rows]) for rows in (64, 2, 128, 3))


def _loop_request(folder: Path) -> sg.InferRequest:
    number, going = sg.input("number", (), dtype="int64"), sg.input("going", (), dtype="bool")
    x, last, rounds = (
        sg.input("x", ("N", 4)),
        sg.input("last", ("N", 4)),
        sg.input("m", (), "int64"),
    )
    doubled = ops.Add(last, last)
    body = sg.Graph([number, going, last], [going, doubled, ops.Relu(doubled)], "body")
    loop = ops.Loop(rounds, None, x, body=body, name="loop")
    request = (
        sg.Core().compile_model(sg.Graph([x, rounds], list(loop)), "CPU").create_infer_request()
    )
    run_a_loop_of_shapes(request)
    return request


@scenario(_loop_request)
def run_a_loop_of_shapes(request: sg.InferRequest) -> bool:
    for rows, rounds in ((2, 3), (64, 3), (2, 20), (0, 0), (3, 1), (2, 3)):
        given = np.linspace(-1, 1, rows * 4, dtype=np.float32).reshape(rows, 4)
        last, scans = request.infer({"x": given, "m": np.array(rounds)}).values()
        powers = 2.0 ** np.arange(1, rounds + 1, dtype=np.float32)
        if not np.array_equal(last, given * np.float32(2**rounds)):
            return False
        if not np.array_equal(scans, np.maximum(powers[:, None, None] * given, 0)):
            return False
    return True


@scenario(_ran)
def run_after_a_weight_changed(model: sg.CompiledModel) -> bool:
    parameter = model.parameters["w"]
    parameter.assign(parameter.array * 2)
    parameter.assign(parameter.array / 2)
    return right(model(X)[0])


@scenario(lambda folder: sg.Core())
def start_threads_for_large_products(core: sg.Core) -> bool:
    x, side = sg.input("x", ("N", 256)), np.eye(256, dtype=np.float32)
    y = ops.MatMul(ops.Relu(ops.MatMul(x, sg.parameter("w", side))), sg.parameter("v", side))
    given = np.ones((512, 256), np.float32)
    pool = Pool(3)  # whose threads are started by the first program that it runs
    with pytest.MonkeyPatch.context() as own:
        own.setattr("subgraph.devices.plugins.cpu._pools", lambda count, threads: (pool,))
        try:
            model = core.compile_model(sg.Graph([x], [y]), "CPU", {"INFERENCE_NUM_THREADS": 3})
            return bool(np.array_equal(model(given)[0], given))
        finally:
            pool.close()


@scenario(_ran)
def run_asynchronously(model: sg.CompiledModel) -> bool:
    requests = [model.create_infer_request() for _ in range(3)]
    called: list[Any] = []
    requests[0].set_callback(called.append)
    for request in requests:
        request.start_async(X)
    right_ones = [right((request.wait() or [None])[0]) for request in requests]
    return all(right_ones) and called == [requests[0]]


@scenario(lambda folder: (_ran(folder), folder / "out.blob"))
def export_a_model(given: tuple[sg.CompiledModel, Path]) -> bool:
    model, path = given
    model.export_model(path)
    return right(sg.Core().import_model(path, "CPU")(X)[0])


@scenario(_blob)
def import_a_model(path: Path) -> bool:
    return right(sg.Core().import_model(path, "CPU")(X)[0])


@scenario(lambda folder: _blob(folder).read_bytes())
def import_a_stream(content: bytes) -> bool:
    return right(sg.Core().import_model(io.BytesIO(content), "CPU")(X)[0])


@scenario(lambda folder: folder)
def compile_into_a_folder(folder: Path) -> bool:
    for _ in range(2):
        model = sg.Core().compile_model(graph(), "CPU", {"CACHE_DIR": str(folder / "models")})
        if not right(model(X)[0]):
            return False
    return True


@scenario(lambda folder: folder)
def use_the_kernel_cache(folder: Path) -> bool:
    key, code = "ab" * 32, ObjectCode(("exp",), b"code", 0)
    before = os.environ.get("SUBGRAPH_CACHE_DIR")
    os.environ["SUBGRAPH_CACHE_DIR"] = str(folder)
    try:
        written = objectcache.write(key, code)
        found = objectcache.read(key)
    finally:
        os.environ.pop("SUBGRAPH_CACHE_DIR")
        if before is not None:
            os.environ["SUBGRAPH_CACHE_DIR"] = before
    return found in (None, code) and (found is None or written)


@scenario(lambda folder: folder)
def make_a_key_for_exports(folder: Path) -> bool:
    with pytest.MonkeyPatch.context() as own:
        own.setattr(signing, "_key_folder", lambda: folder)
        made = signing._key.__wrapped__()
        again = signing._key.__wrapped__()
    return len(made) == len(again) == signing.SIGNATURE_BYTES


@scenario(lambda folder: (sg.Core(), graph()))
def load_kernels_again(given: tuple[sg.Core, sg.Graph]) -> bool:
    core, work = given
    core.compile_model(work, "CPU")(X)
    kernels = [kernel for kernel, _ in toolchain._addresses]
    toolchain.forget(next(kernel for kernel in kernels if ".matmul." in kernel.module))
    return right(core.compile_model(work, "CPU")(X)[0])


def _on_opencl(folder: Path) -> sg.CompiledModel:
    return sg.Core().compile_model(graph(), "OPENCL", {"RUNTIME_FALLBACK": False})


def _ran_on_opencl(folder: Path) -> sg.CompiledModel:
    model = _on_opencl(folder)
    model(X)
    return model


def compile_for_opencl(given: tuple[sg.Core, sg.Graph]) -> bool:
    core, work = given
    return right(core.compile_model(work, "OPENCL", {"RUNTIME_FALLBACK": False})(X)[0])


def first_run_on_opencl(model: sg.CompiledModel) -> bool:
    return right(model(X)[0])


def new_shape_and_weight_on_opencl(model: sg.CompiledModel) -> bool:
    parameter = model.parameters["w"]
    parameter.assign(parameter.array * 2)
    parameter.assign(parameter.array / 2)
    return all(right(model(given)[0], given) for given in (X, Y, X))


def run_asynchronously_on_opencl(model: sg.CompiledModel) -> bool:
    requests = [model.create_infer_request() for _ in range(2)]
    for request in requests:
        request.start_async(X)
    results = [(request.wait() or [None])[0] for request in requests]
    return all(map(right, results))


OPENCL_SCENARIOS = {
    "compile": Scenario(lambda folder: (sg.Core(), graph()), compile_for_opencl),
    "first run": Scenario(_on_opencl, first_run_on_opencl),
    "new shape and weight": Scenario(_ran_on_opencl, new_shape_and_weight_on_opencl),
    "asynchronous": Scenario(_ran_on_opencl, run_asynchronously_on_opencl),
}


# --- the test ----------------------------------------------------------------------------------


def _clean(error: BaseException, kind: str) -> bool:
    """Return whether an error is one that a user may get for a fault of this kind."""
    if isinstance(error, sg.InternalError):
        return False
    return isinstance(error, (sg.SubgraphError, *[MemoryError] * (kind == "memory")))


def _temporary(folder: Path) -> list[str]:
    return [str(path) for path in folder.rglob("*") if ".tmp" in path.name or path.name[0] == "."]


def _handles() -> int:
    return len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0


def _in_a_thread(run: Callable[[], bool]) -> bool:
    """Run in another thread, where no lock of this one helps; False if that takes too long."""
    ended: list[bool] = []
    thread = threading.Thread(target=lambda: ended.append(run()), daemon=True)
    thread.start()
    thread.join(_SECONDS)
    return ended == [True]


def _settled(value: Callable[[], int], most: int) -> bool:
    """Return whether a number falls to ``most`` within seconds: threads need time to end."""
    end = time.monotonic() + 5
    while value() > most and time.monotonic() < end:
        gc.collect()
        time.sleep(0.01)
    return value() <= most


def _check(scene: Scenario, fault: Fault, number: int, folder: Path) -> str:
    """Let one call fail; return what is wrong, "" if nothing is."""
    folder.mkdir()
    prepared = scene.prepare(folder)
    gc.collect()
    threads, handles = threading.active_count(), _handles()
    name = ""
    with failing(fault, number) as count:
        try:
            if not scene.run(prepared):
                return "a wrong result"
        except BaseException as error:
            if not _clean(error, fault.kind):
                return f"{type(error).__name__}: {error}"
        finally:
            name = count.names[number - 1] if len(count.names) >= number else "an allocation"
    if left := _temporary(folder):
        return f"left after {name}: {left}"
    if not _in_a_thread(partial(scene.run, prepared)):
        return f"does not work after {name}"
    del prepared
    if not _settled(threading.active_count, threads):
        return f"threads left after {name}: {threading.enumerate()}"
    if not _settled(_handles, handles):
        return f"open files left after {name}"
    shutil.rmtree(folder)
    return ""


def _calls(scene: Scenario, fault: Fault, folder: Path) -> int:
    """Return how many calls of a kind a run makes, once everything is imported."""
    calls = 0
    for turn in range(2):
        (folder / f"count{turn}").mkdir()
        prepared = scene.prepare(folder / f"count{turn}")
        with failing(fault, 0) as count:
            assert scene.run(prepared)
        calls = count.calls
    return calls


def _sample(calls: int, most: int) -> Iterator[int]:
    """Yield numbers of calls, evenly spread, the first and the last among them."""
    yield from sorted(
        {1 + round(k * (calls - 1) / max(most - 1, 1)) for k in range(min(most, calls))}
    )


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize(
    "most", [_MOST_IN_CI, pytest.param(10**6, marks=pytest.mark.slow)], ids=["sample", "all"]
)
def test_one_call_fails(name: str, fault: str, most: int, tmp_path: Path) -> None:
    _fail_each(SCENARIOS[name], FAULTS[fault], most, tmp_path)


@needs_device
@pytest.mark.parametrize("fault", [*FAULTS, "driver"])
@pytest.mark.parametrize("name", OPENCL_SCENARIOS)
@pytest.mark.parametrize(
    "most", [_MOST_IN_CI, pytest.param(10**6, marks=pytest.mark.slow)], ids=["sample", "all"]
)
def test_one_call_fails_on_opencl(name: str, fault: str, most: int, tmp_path: Path) -> None:
    _fail_each(OPENCL_SCENARIOS[name], {**FAULTS, "driver": DRIVER_FAULT}[fault], most, tmp_path)


def _fail_each(scene: Scenario, fault: Fault, most: int, tmp_path: Path) -> None:
    calls = _calls(scene, fault, tmp_path)
    assert calls or fault.kind != "driver", "every scenario of OPENCL calls the driver"
    wrong: list[str] = []
    for number in _sample(calls, most):
        if what := _check(scene, fault, number, tmp_path / str(number)):
            wrong.append(f"call {number} of {calls}: {what}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.skipif(resource is None, reason="files cannot be limited on this system")
@pytest.mark.parametrize("most", [0, 1, 100, 1000, 5000])
@pytest.mark.parametrize(
    "name", ["save_a_file", "export_a_model", "compile_into_a_folder", "use_the_kernel_cache"]
)
def test_the_disk_is_full_after_some_bytes(name: str, most: int, tmp_path: Path) -> None:
    assert resource is not None
    scene = SCENARIOS[name]
    prepared = scene.prepare(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # As Python does; an OpenCL driver's compiler may have put a handler of its own there.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        assert scene.run(prepared)
    except sg.FileError:
        assert name != "use_the_kernel_cache", "what is not kept is compiled again"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert _temporary(tmp_path) == []
    assert scene.run(prepared)


def test_an_allocation_of_another_thread_fails() -> None:
    ended: list[str] = []

    def allocate() -> None:
        try:
            np.empty(1000)
            ended.append("all is well")
        except MemoryError:
            ended.append("no memory")

    for number in (0, 1):
        with failing(FAULTS["memory"], number) as count:
            thread = threading.Thread(target=allocate)
            thread.start()
            thread.join()
        assert count.calls == 1
    assert ended == ["all is well", "no memory"]


def test_calls_are_counted_and_one_fails(tmp_path: Path) -> None:
    def touch() -> None:
        (tmp_path / "a").write_bytes(b"1")
        np.empty(3)
        np.empty(2)
        threading.Thread(target=int).start()

    for fault, calls in {"memory": 2, "full disk": 1, "threads": 1}.items():
        with failing(FAULTS[fault], 0) as count:
            touch()
        assert count.calls == calls, fault
        for number in range(1, calls + 1):
            error = type(FAULTS[fault].error())
            with failing(FAULTS[fault], number), pytest.raises(error):
                touch()
        with failing(FAULTS[fault], calls + 1):
            touch()
