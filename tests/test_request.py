"""Compiled models and requests: inputs, outputs, states, callbacks, asyncio, pools, pipelines."""

from __future__ import annotations

import array
import asyncio
import gc
import subprocess
import sys
import threading
import time
import tracemalloc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.runner import Runner, Stage
from subgraph.task_executor import TaskExecutor

Array = np.ndarray[Any, Any]


class Gate(sg.SubgraphOp):
    """Waits until it is opened, then adds one; says on which memory it worked."""

    def __init__(self, subgraph: sg.Graph) -> None:
        super().__init__(subgraph)
        self.open = threading.Event()
        self.started = threading.Event()
        self.open.set()
        self.seen: list[int] = []

    def forward(self, inputs: list[Any]) -> list[Array]:
        self.started.set()
        self.open.wait(20)
        self.seen.append(inputs[0].__array_interface__["data"][0])
        if (inputs[0] < 0).any():
            raise ValueError("negative input")
        return [inputs[0] + np.float32(1)]


def chain(count: int = 1) -> tuple[sg.CompiledModel, list[Gate]]:
    value = x = sg.input("x", ("N",))
    gates: list[Gate] = []
    for number in range(count):
        ix = sg.input("ix", ("N",))
        inner = sg.Graph([ix], [ops.Relu(ix)], f"inner{number}")
        gates.append(Gate(inner))
        value = sg.subgraph_node(inner, gates[-1], inputs=[value]).outputs[0]
    value.name = "y"
    return sg.CompiledModel(sg.Graph([x], [value], "net"), device="TEST"), gates


X = np.array([1, 2], np.float32)


@pytest.fixture
def gated() -> Iterator[tuple[sg.CompiledModel, Gate]]:
    model, gates = chain()
    yield model, gates[0]
    gates[0].open.set()


def two_inputs() -> sg.CompiledModel:
    a, b = sg.input("a", ("N", 2)), sg.input("b.in", ("N", "M"), "int64")
    k = sg.parameter("k", np.array([10], np.float32))
    total = ops.Mul(ops.Add(a, ops.Cast(b, to=1)), k, name="total")
    return sg.compile_model(sg.Graph([a, b, k], [total, ops.Neg(b, name="minus")]), "REFERENCE")


A, B = np.ones((3, 2), np.float32), np.ones((3, 1), np.int64)


def test_every_way_to_give_inputs() -> None:
    model = two_inputs()
    for results in (
        model(A, B),
        model([A, B]),
        model((A, B)),
        model({"a": A, "b.in": B}),
        model({0: A, 1: B}),
        model(a=A, **{"b.in": B}),
        model(A, **{"b.in": B}),
        model([[1, 1]] * 3, [[1]] * 3),
    ):
        assert results["total"].tolist() == [[20, 20]] * 3
        assert results[0] is results["total"]
        assert results[1].dtype == np.int64
        assert list(results) == ["total", "minus"]
        assert len(results) == 2
        assert dict(results)["minus"] is results[1]
        assert results.to_tuple()[1] is results[1]


@pytest.mark.parametrize(
    ("args", "named", "error", "message"),
    [
        ((), {"a": A}, sg.MissingInputError, "not given input 'b.in'"),
        ((), {"a": A, "bb": B}, sg.MissingInputError, r"no input 'bb'.*a: float32\[N, 2\]"),
        ((A, B, A, A), {}, sg.MissingInputError, "takes 3 inputs, got 4"),
        ((A, B), {"a": A}, sg.MissingInputError, "given twice"),
        ((A, B[:2]), {}, sg.ShapeError, "'N' is 3 in input 'a' and 2 in input 'b.in'"),
        ((A[:, :1], B), {}, sg.ShapeError, r"float32\[N, 2\], got float32\[3, 1\]"),
        ((A[0], B), {}, sg.ShapeError, r"got float32\[2\]"),
        ((A.astype(np.float64), B), {}, sg.ShapeError, r"got float64.*astype\('float32'\)"),
        ((A, [[1.5]] * 3), {}, sg.ShapeError, "would change as int64"),
        ((A, object()), {}, sg.ShapeError, "'b.in'.*got a object"),
        ((A, [[2**70]] * 3), {}, sg.ShapeError, "'b.in'"),
    ],
)
def test_wrong_inputs(args: Any, named: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        two_inputs()(*args, **named)


def test_the_other_byte_order_is_converted() -> None:
    results = two_inputs()(A.astype(A.dtype.newbyteorder()), B.astype(B.dtype.newbyteorder()))
    assert results["total"].tolist() == two_inputs()(A, B)["total"].tolist()


def test_an_unsafe_python_number_is_refused() -> None:
    x = sg.input("x", (2,), "int8")
    model = sg.compile_model(sg.Graph([x], [ops.Neg(x)]), "REFERENCE")
    assert model([[1, 2]])[0].dtype == np.int8
    with pytest.raises(sg.ShapeError, match="does not fit int8"):
        model([[1, 300]])


def test_results_know_their_names() -> None:
    results = two_inputs()(A, B)
    with pytest.raises(sg.MissingInputError, match="did you mean 'total'"):
        results["totall"]
    with pytest.raises(IndexError):
        results[2]


def test_optional_input_overrides_for_one_run_only() -> None:
    model = two_inputs()
    assert model.inputs[2].default is model.parameters["k"]
    other = model(A, B, k=np.array([100], np.float32))
    assert other[0][0, 0] == 200
    assert model(A, B)[0][0, 0] == 20
    model.parameters["k"].assign(np.array([5], np.float32))
    assert model(A, B)[0][0, 0] == 10


def test_an_override_reaches_folded_weights_and_leaves_the_cache_right() -> None:
    class Folds(sg.SubgraphOp):
        def forward(self, inputs: list[Any]) -> list[Array]:
            return [inputs[0] * self.weights.get("square", np.square, inputs[1])]

    x = sg.input("x", ("N",))
    w = sg.parameter("w", np.array([3], np.float32))
    inner = sg.Graph([x, w], [ops.Mul(x, w)], "inner")
    node: Any = sg.subgraph_node(inner, Folds(inner), "r")
    model = sg.CompiledModel(sg.Graph(node.inputs, node.outputs))
    for _ in range(2):
        assert model(X)[0].tolist() == [9, 18]
        assert model(X, np.array([2], np.float32))[0].tolist() == [4, 8]
    assert node.op.weights.stats().redone <= 2


class OnlyDlpack:
    """A tensor of another library, of which nothing is known but the DLPack protocol."""

    def __init__(self, held: np.ndarray[Any, Any]) -> None:
        self.held = held

    def __dlpack__(self, **options: Any) -> Any:
        return self.held.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.held.__dlpack_device__()


def test_inputs_are_not_copied(gated: tuple[sg.CompiledModel, Gate]) -> None:
    model, gate = gated
    address = X.__array_interface__["data"][0]
    tensor = OnlyDlpack(X)
    buffer = array.array("f", [1, 2])
    model(X)
    model(tensor)
    model(X.data)
    model(buffer)
    assert gate.seen[:3] == [address] * 3
    assert gate.seen[3] == buffer.buffer_info()[0]


def test_preset_outputs(gated: tuple[sg.CompiledModel, Gate]) -> None:
    model, _ = gated
    request = model.create_infer_request()
    target = np.zeros(2, np.float32)
    request.set_output("y", target)
    assert request.infer(X)[0] is target
    assert target.tolist() == [2, 3]
    request.set_output(0, None)
    assert request.infer(X)[0] is not target
    with pytest.raises(sg.ShapeError, match="cannot be written into"):
        request.set_output("y", np.zeros(2))
    with pytest.raises(sg.ShapeError, match="writable"):
        request.set_output("y", (1, 2))
    with pytest.raises(sg.MissingInputError, match="no output 'z'"):
        request.set_output("z", target)


@pytest.mark.parametrize("device", ["CPU", "REFERENCE", "HETERO:CPU,REFERENCE"])
def test_a_preset_output_of_another_shape_than_the_result(device: str) -> None:
    x = sg.input("x", ("N", 4))
    model = sg.compile_model(sg.Graph([x], [ops.Relu(x)]), device)
    request = model.create_infer_request()
    request.set_output(0, np.zeros((3, 4), np.float32))
    with pytest.raises(sg.ShapeError, match=r"output 0 has shape \(2, 4\) in this run.*\(3, 4\)"):
        request.infer(np.ones((2, 4), np.float32))
    assert request.infer(np.ones((3, 4), np.float32))[0].sum() == 12


def test_set_input_and_get_output(gated: tuple[sg.CompiledModel, Gate]) -> None:
    request = gated[0].create_infer_request()
    with pytest.raises(sg.RequestError, match="no results"):
        request.get_output()
    request.set_input(0, X)
    request.infer()
    assert request.get_output("y").tolist() == [2, 3]
    with pytest.raises(sg.MissingInputError, match="no input 'y'"):
        request.set_input("y", X)


def test_start_wait_and_timeout(gated: tuple[sg.CompiledModel, Gate]) -> None:
    model, gate = gated
    request = model.create_infer_request()
    with pytest.raises(sg.RequestError, match="not started"):
        request.wait()
    gate.open.clear()
    request.start_async(X)
    assert request.wait(0.01) is None
    assert request.is_busy
    for call in (
        lambda: request.infer(X),
        lambda: request.start_async(X),
        lambda: request.set_callback(None),
        lambda: request.set_input("x", X),
        request.profile,
    ):
        with pytest.raises(sg.RequestError, match="busy"):
            call()
    with pytest.raises(sg.RequestError, match="still running"):
        _ = request.results
    gate.open.set()
    results = request.wait(20)
    assert results is not None
    assert results["y"].tolist() == [2, 3]
    assert request.results is results
    assert not request.is_busy


def test_cancel_before_and_between_steps() -> None:
    model, gates = chain(3)
    request, other = model.create_infer_request(), model.create_infer_request()
    gates[0].open.clear()
    request.start_async(X)
    other.start_async(X)
    assert gates[0].started.wait(20)
    request.cancel()
    other.cancel()
    gates[0].open.set()
    for each in (request, other):
        with pytest.raises(sg.RequestCancelledError):
            each.wait(20)
    assert not gates[1].seen
    request.cancel()  # nothing runs: nothing happens
    assert request.infer(X)[0].tolist() == [4, 5]
    request.start_async(X)
    assert request.wait(20) is request.results
    assert request.results[0].tolist() == [4, 5]


def test_errors_of_a_run_are_raised_by_wait(gated: tuple[sg.CompiledModel, Gate]) -> None:
    model, _ = gated
    request = model.create_infer_request()
    request.start_async(-X)
    with pytest.raises(sg.DeviceError, match="negative input"):
        request.wait(20)
    with pytest.raises(sg.RequestError, match="failed"):
        _ = request.results
    assert request.infer(X)[0].tolist() == [2, 3]


def test_callback_gets_request_and_error(gated: tuple[sg.CompiledModel, Gate]) -> None:
    request = gated[0].create_infer_request()
    calls: list[Any] = []
    request.set_callback(lambda r, error: calls.append((r, error, r.results if not error else 0)))
    request.start_async(X)
    results = request.wait(20)
    assert calls == [(request, None, results)]
    request.start_async(-X)
    with pytest.raises(sg.DeviceError):
        request.wait(20)
    assert isinstance(calls[1][1], sg.DeviceError)
    for callback in (lambda: calls.append("none"), lambda r: calls.append(r)):
        request.set_callback(callback)
        request.start_async(X)
        request.wait(20)
    assert calls[2:] == ["none", request]


def test_an_exception_in_a_callback_is_reported(
    gated: tuple[sg.CompiledModel, Gate], caplog: pytest.LogCaptureFixture
) -> None:
    request = gated[0].create_infer_request()

    def bad(_: Any) -> None:
        raise KeyError("user's mistake")

    request.set_callback(bad)
    request.start_async(X)
    with pytest.raises(KeyError, match="user's mistake") as caught:
        request.wait(20)
    assert "raised by the callback of a request of model" in caught.value.__notes__[0]
    assert "callback" in caplog.text
    wrong: Any = 3
    with pytest.raises(sg.ConfigError, match="a callback is a function"):
        request.set_callback(wrong)
    assert request.results[0].tolist() == [2, 3]


def test_a_callback_may_start_the_request_again(gated: tuple[sg.CompiledModel, Gate]) -> None:
    request = gated[0].create_infer_request()
    done = threading.Event()
    rounds: list[float] = []

    def again(r: sg.InferRequest) -> None:
        rounds.append(r.results[0][0])
        if len(rounds) < 5:
            r.start_async(r.results[0])
        else:
            done.set()

    request.set_callback(again)
    request.start_async(X)
    assert done.wait(20)
    assert rounds == [2, 3, 4, 5, 6]


def test_await_in_asyncio(gated: tuple[sg.CompiledModel, Gate]) -> None:
    model, _ = gated

    async def one(k: int) -> Array:
        request = model.create_infer_request()
        request.start_async(X + np.float32(k))
        return (await request)[0]

    async def all_of_them() -> list[Array]:
        return await asyncio.gather(*(one(k) for k in range(20)))

    for k, result in enumerate(asyncio.run(all_of_them())):
        assert result.tolist() == [2 + k, 3 + k]

    async def failing() -> None:
        request = model.create_infer_request()
        request.start_async(-X)
        await request

    with pytest.raises(sg.DeviceError, match="negative"):
        asyncio.run(failing())

    async def not_started() -> None:
        await model.create_infer_request()

    with pytest.raises(sg.RequestError, match="not started"):
        asyncio.run(not_started())


def test_queue_runs_everything_and_collects_errors() -> None:
    model, _ = chain(2)
    pool = sg.InferQueue(model, 3)
    got: dict[int, list[float]] = {}
    pool.set_callback(lambda request, k: got.__setitem__(k, request.results[0].tolist()))
    for k in range(50):
        pool.start_async([X + np.float32(k)], k)
    pool.wait_all()
    assert got == {k: [3.0 + k, 4.0 + k] for k in range(50)}
    assert pool.is_ready()
    pool.start_async([-X])
    with pytest.raises(sg.DeviceError, match="negative"):
        pool.wait_all()
    for _ in range(3):
        pool.start_async([-X])
    with pytest.raises(sg.DeviceError, match="3 runs"):
        pool.wait_all()
    with pytest.raises(sg.MissingInputError):
        pool.start_async({"z": X})
    pool.wait_all()


def test_stages_of_different_requests_overlap() -> None:
    """While one request computes, the next one's inputs are uploaded: each waits to see it."""
    more = threading.Condition()
    uploads, overlapped = [0], list[bool]()

    class Staged(sg.CompiledModel):
        def create_stages(self, runner: Runner) -> list[Stage]:
            def upload(inputs: Any) -> Any:
                with more:
                    uploads[0] += 1
                    more.notify_all()
                return [inputs[0] * 2]

            def compute(inputs: Any) -> Any:
                following = min(len(overlapped) + 2, 12)
                with more:
                    overlapped.append(more.wait_for(lambda: uploads[0] >= following, 60))
                return runner.run(inputs)

            return [Stage(lanes[0], upload), Stage(lanes[1], compute)]

    lanes = [TaskExecutor("upload"), TaskExecutor("compute")]
    model = Staged(chain()[0].graph)
    pool = sg.InferQueue(model, 4)
    got: list[list[float]] = []
    pool.set_callback(lambda request, _: got.append(request.results[0].tolist()))
    for _ in range(12):
        pool.start_async([X])
    pool.wait_all()
    assert overlapped == [True] * 12
    assert got == [[3, 5]] * 12


def test_requests_and_threads_go_with_their_model() -> None:
    model, gates = chain(2)
    request = model.create_infer_request()
    request.start_async(X)
    request.wait(20)
    before = threading.active_count()
    ref, op = weakref.ref(model), weakref.ref(gates[0])
    del model, request, gates
    gc.collect()
    deadline = time.monotonic() + 10
    while (ref() or op() or threading.active_count() >= before) and time.monotonic() < deadline:
        time.sleep(0.01)
        gc.collect()
    assert ref() is None
    assert op() is None
    assert threading.active_count() < before


class Scaled(sg.SubgraphOp):
    """x * a + b over cached copies of the two weights."""

    def forward(self, inputs: list[Any]) -> list[Array]:
        x, a, b = inputs
        both = self.weights.get("pair", lambda p, q: np.stack([p, q]), a, b)
        time.sleep(0)
        return [x * both[0] + self.weights.get("negated", np.negative, b) * -1 + a.array - both[0]]


def test_ten_thousand_requests_over_sixteen_threads_with_changing_weights() -> None:
    x = sg.input("x", ("N",))
    held = [sg.Parameter(name, np.full(64, k, np.float32)) for name, k in (("a", 1), ("b", -1))]
    a, b = (sg.parameter(p.name, p) for p in held)
    scaled: list[Scaled] = []
    value = x
    for _ in range(2):
        ix, ia, ib = sg.input("ix", ("N",)), *(sg.parameter(p.name, p) for p in held)
        inner = sg.Graph([ix, ia, ib], [ops.Add(ops.Mul(ix, ia), ib)], "inner")
        scaled.append(Scaled(inner))
        value = sg.subgraph_node(inner, scaled[-1], inputs=[value, a, b]).outputs[0]
    model = sg.CompiledModel(sg.Graph([x], [value, ops.Add(a, b)]))
    stop = threading.Event()
    problems: list[str] = []

    def write() -> None:
        k = 1
        while not stop.is_set():
            k += 1
            with sg.transaction():
                held[0].assign(np.full(64, k, np.float32))
                held[1].assign(np.full(64, -k, np.float32))
            time.sleep(0.0002)

    ones = np.ones(64, np.float32)
    barrier = threading.Barrier(16)

    def read(number: int) -> None:
        request = model.create_infer_request()
        barrier.wait()
        for k in range(625):
            if k % 3 == 0:
                results = model(ones)
            elif k % 3 == 1:
                results = request.infer(ones)
            else:
                request.start_async(ones)
                results = request.wait(60)
                if results is None:
                    problems.append("timeout")
                    return
            # x = 1: 1*k - k = 0, then 0*k - k = -k, the same k everywhere; and k - k = 0.
            if np.unique(results[0]).size != 1 or results[1].any() or results[0][0] > -1:
                problems.append(f"{number}: {results[0][:4]} {results[1][:4]}")

    writer = threading.Thread(target=write)
    readers = [threading.Thread(target=read, args=(n,)) for n in range(16)]
    np.unique(model(ones)[0])  # loads the modules that this needs
    tracemalloc.start()
    try:
        writer.start()
        for thread in readers:
            thread.start()
        for thread in readers:
            thread.join(120)
        assert not any(thread.is_alive() for thread in readers), "deadlock"
        stop.set()
        writer.join()
        gc.collect()
        model(ones)
        gc.collect()
        alive = sum(op.weights.stats().bytes for op in scaled)
        assert alive <= 2 * (512 + 256)  # one version, shared by both nodes, counted in each
        traced = tracemalloc.get_traced_memory()[0]
    finally:
        stop.set()
        tracemalloc.stop()
    assert not problems, problems[:5]
    assert traced < 1_000_000


def coupled() -> tuple[sg.Graph, list[sg.Parameter]]:
    """Return a graph whose first output is zero and second constant while weights are coupled."""
    rng = np.random.default_rng(0)
    start = rng.standard_normal((32, 32)).astype(np.float32)
    x = sg.input("x", ("N", 32))
    weights = [sg.Parameter(f"w{k}", start) for k in range(2)]
    branches = [ops.Relu(ops.Gemm(x, sg.parameter(w.name, w))) for w in weights]
    graph = sg.Graph([x], [ops.Sub(*branches), ops.Tanh(branches[0])], "coupled")
    return graph, weights


@pytest.mark.parametrize("device", ["CPU", "HETERO:CPU,REFERENCE", "MULTI:CPU,REFERENCE"])
def test_compiled_weights_change_during_requests(device: str) -> None:
    graph, weights = coupled()
    for number, node in enumerate(graph.nodes):
        if device.startswith("HETERO"):
            node.metadata = {"affinity": ["CPU", "REFERENCE"][number % 2]}
    model = sg.compile_model(graph, device)
    x = np.ones((3, 32), np.float32)
    stop = threading.Event()
    problems: list[str] = []

    def write() -> None:
        rng = np.random.default_rng(1)
        while not stop.is_set():
            new = rng.standard_normal((32, 32)).astype(np.float32)
            with sg.transaction():
                for weight in weights:
                    weight.assign(new)
            time.sleep(0.0005)

    def read() -> None:
        request = model.create_infer_request()
        for k in range(120):
            if k % 2:
                results = request.infer(x)
            else:
                request.start_async(x)
                results = request.wait(60)
                if results is None:
                    problems.append("timeout")
                    return
            if results[0].any():
                problems.append(str(np.abs(results[0]).max()))

    writer = threading.Thread(target=write)
    readers = [threading.Thread(target=read) for _ in range(8)]
    writer.start()
    for thread in readers:
        thread.start()
    for thread in readers:
        thread.join(120)
    stop.set()
    writer.join()
    assert not any(thread.is_alive() for thread in readers), "deadlock"
    assert not problems, problems[:5]
    final = np.maximum(x @ weights[0].array, 0)
    np.testing.assert_allclose(model(x)[1], np.tanh(final), rtol=1e-4, atol=1e-5)


def test_a_callback_may_wait_for_other_requests(gated: tuple[sg.CompiledModel, Gate]) -> None:
    model, _ = gated
    first, second = model.create_infer_request(), model.create_infer_request()
    seen: list[float] = []

    def nested(request: sg.InferRequest) -> None:
        second.set_callback(lambda r: seen.append(r.results[0][0]))
        second.start_async(request.results[0])
        results = second.wait(20)
        assert results is not None
        seen.append(results[0][0])

    first.set_callback(nested)
    first.start_async(X)
    assert first.wait(20) is not None
    assert seen == [3, 3]

    pool = sg.InferQueue(model, 1)
    values: list[float] = []

    def more(request: sg.InferRequest, left: int) -> None:
        values.append(request.results[0][0])
        if left:
            other = request.results[0]
            threading.Thread(target=pool.start_async, args=([other], left - 1)).start()

    pool.set_callback(more)
    pool.start_async([X], 3)
    deadline = time.monotonic() + 20
    while len(values) < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert values == [2, 3, 4, 5]


def test_callbacks_do_not_overlap() -> None:
    model, _ = chain()
    inside: list[int] = []
    most: list[int] = []

    def callback(request: sg.InferRequest) -> None:
        inside.append(1)
        most.append(len(inside))
        time.sleep(0.001)
        inside.pop()

    requests = [model.create_infer_request() for _ in range(8)]
    for request in requests:
        request.set_callback(callback)
        request.start_async(X)
    for request in requests:
        request.wait(20)
    assert max(most) == 1


def test_requests_work_in_a_forked_child() -> None:
    code = """
import os, warnings
import numpy as np, subgraph as sg
from subgraph import ops
warnings.simplefilter("ignore")
x = sg.input("x", ("N",))
model = sg.compile_model(sg.Graph([x], [ops.Neg(x)]), "REFERENCE")
request = model.create_infer_request()
def run():
    called = []
    request.set_callback(lambda r: called.append(1))
    request.start_async(np.ones(2, np.float32))
    assert request.wait(20)[0].tolist() == [-1, -1] and called
run()
child = os.fork()
run()
if child:
    assert os.waitpid(child, 0)[1] == 0
    print("fine")
else:
    os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "fine", done.stderr


@pytest.mark.parametrize(
    "device", ["REFERENCE", "CPU", "HETERO:CPU,REFERENCE", "MULTI:CPU,REFERENCE", "AUTO:CPU"]
)
@pytest.mark.parametrize("config", [{}, {"ENABLE_PROFILING": True}])
def test_profile_of_each_node(device: str, config: Any) -> None:
    graph, _ = coupled()
    model = sg.compile_model(graph, device, config)
    request = model.create_infer_request()
    with pytest.raises(sg.RequestError, match="has not run"):
        sg.compile_model(graph, device).create_infer_request().profile()
    request.infer(np.ones((3, 32), np.float32))
    profile = request.profile()
    assert profile
    for entry in profile:
        assert entry.seconds > 0
        assert entry.node
        assert entry.kernel
        assert entry.device in device
    if device == "REFERENCE":
        assert [entry.op_type for entry in profile] == [node.op_type for node in graph.nodes]
