"""Requests: inputs and outputs, states, callbacks, asyncio, pools, pipelines, profiles."""

from __future__ import annotations

import array
import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.devices.model_op import CompiledModelOp
from subgraph.graph.types import Array
from subgraph.runtime.runner import Runner, Stage
from subgraph.runtime.task_executor import TaskExecutor
from tests.support.gates import Gate, chain

X = np.array([1, 2], np.float32)


class OnlyDlpack:
    """A tensor of another library, of which nothing is known but the DLPack protocol."""

    def __init__(self, held: Array) -> None:
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


@pytest.mark.parametrize("carries", [False, True])
def test_the_memory_of_preset_outputs_is_not_shared(carries: bool) -> None:
    """The outputs were written over each other."""
    x, past = sg.input("x", ("N", 4)), sg.input("past", ("P", 4))
    outputs = [ops.Concat(past, x, axis=0, name="present"), ops.Relu(x), ops.Neg(x)]
    graph = sg.Graph([x, past], outputs)
    names = [value.name for value in graph.outputs]
    model = sg.compile_model(graph, "REFERENCE")
    request = model.create_infer_request(states={"past": names[0]} if carries else False)
    memory = np.zeros((9, 4), np.float32)
    request.set_output(names[1], memory[:3])
    with pytest.raises(sg.ShapeError, match=f"'{names[2]}'.* with that of output '{names[1]}'"):
        request.set_output(names[2], memory[2:5])
    request.set_output(names[2], memory[3:6])
    request.set_output(names[1], memory[:3])  # its own array is replaced
    request.set_output(names[2], None)
    request.set_output(names[1], memory[::2][:3, ::-1])
    request.set_output(names[2], memory[1::2][:3])  # rows between those of the other
    data = np.arange(-6, 6, dtype=np.float32).reshape(3, 4)
    request.infer(x=data, **({} if carries else {"past": data}))
    np.testing.assert_array_equal(memory[:5:2, ::-1], np.maximum(data, 0))
    np.testing.assert_array_equal(memory[1:6:2], -data)


@pytest.mark.parametrize("strides", [(0, 4), (4, 4), (16, 0), (16, -3)])
def test_elements_of_a_preset_output_do_not_share_memory(strides: tuple[int, int]) -> None:
    x = sg.input("x", ("N", "M"))
    request = sg.compile_model(sg.Graph([x], [ops.Relu(x)]), "REFERENCE").create_infer_request()
    memory = np.zeros(64, np.float32)
    array = np.lib.stride_tricks.as_strided(memory[16:], (3, 4), strides)
    with pytest.raises(sg.ShapeError, match="elements of the array share memory, its strides are"):
        request.set_output(0, array)
    request.set_output(0, array[:1, :1])  # one element
    request.set_output(0, np.zeros((5, 3, 4), np.float32)[:, 1, ::-1])


def test_ports_tell_shape_and_dtype() -> None:
    x, free = sg.input("x", ("N", 3, None), "int8"), sg.input("free", None)
    many = sg.Value("many", sg.SequenceType(sg.TensorType("float32")))
    model = sg.CompiledModel(sg.Graph([x, many, free], [ops.Neg(x)]), device="TEST")
    told = [(port.shape, port.dtype) for port in model.inputs]
    assert told == [(("N", 3, None), "int8"), (None, None), (None, "float32")]


def test_set_input_and_get_output(gated: tuple[sg.CompiledModel, Gate]) -> None:
    request = gated[0].create_infer_request()
    with pytest.raises(sg.RequestError, match="no results"):
        request.get_output()
    request.set_input(0, X)
    request.infer()
    assert request.get_output("y").tolist() == [2, 3]
    with pytest.raises(sg.MissingInputError, match="no input 'y'"):
        request.set_input("y", X)


@pytest.mark.parametrize("seconds", [float("inf"), 1e300, 10**30])
def test_times_above_those_of_python(gated: tuple[sg.CompiledModel, Gate], seconds: float) -> None:
    """They were an OverflowError while the run went on."""
    model, gate = gated
    request = model.create_infer_request()
    gate.open.clear()
    request.start_async(X)
    threading.Timer(0.05, gate.open.set).start()
    assert request.wait(seconds) is not None


def test_start_wait_and_timeout(gated: tuple[sg.CompiledModel, Gate]) -> None:
    model, gate = gated
    request = model.create_infer_request()
    with pytest.raises(sg.RequestError, match="not started"):
        request.wait()
    gate.open.clear()
    request.start_async(X)
    assert request.wait(0.01) is None
    assert request.wait(-1) is None
    with pytest.raises(sg.ConfigError, match="NaN as seconds"):
        request.wait(float("nan"))
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


def test_infer_that_is_cancelled_gives_no_results() -> None:
    """In its last step too: what that has left out is not known."""
    model, gates = chain(2)
    request = model.create_infer_request()
    request.infer(X)
    gates[-1].started.clear()
    gates[-1].open.clear()

    def cancel() -> None:
        assert gates[-1].started.wait(20)
        request.cancel()
        gates[-1].open.set()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(cancel)
        with pytest.raises(sg.RequestCancelledError):
            request.infer(X)
    with pytest.raises(sg.RequestError, match="no results"):
        request.results  # noqa: B018
    assert request.infer(X)[0].tolist() == [3, 4]


def test_cancel_reaches_the_steps_of_a_region_that_is_a_model() -> None:
    model, gates = chain(2)
    region = CompiledModelOp(model.graph.clone(), model, "TEST")
    x = sg.input("x", ("N",))
    node = sg.subgraph_node(region.subgraph, region, inputs=[x])
    request = sg.CompiledModel(sg.Graph([x], node.outputs), device="OUTER").create_infer_request()
    gates[0].open.clear()
    request.start_async(X)
    assert gates[0].started.wait(20)
    request.cancel()
    gates[0].open.set()
    with pytest.raises(sg.RequestCancelledError):
        request.wait(20)
    assert not gates[1].seen
    assert request.infer(X)[0].tolist() == [3, 4]


def test_errors_of_a_run_are_raised_by_wait(gated: tuple[sg.CompiledModel, Gate]) -> None:
    model, _ = gated
    request = model.create_infer_request()
    request.start_async(-X)
    with pytest.raises(sg.DeviceError, match="negative input"):
        request.wait(20)
    with pytest.raises(sg.RequestError, match="failed"):
        _ = request.results
    assert request.infer(X)[0].tolist() == [2, 3]


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


class ClosingLoop(asyncio.SelectorEventLoop):
    """A loop that its thread closes just as another thread is about to call it."""

    closing = False

    def call_soon_threadsafe(self, *args: Any, **context: Any) -> Any:
        if self.closing:
            self.close()
        return super().call_soon_threadsafe(*args, **context)


def test_a_loop_that_closes_as_a_run_ends_stops_no_other(
    gated: tuple[sg.CompiledModel, Gate],
) -> None:
    model, gate = gated
    gate.open.clear()
    request = model.create_infer_request()
    request.start_async(X)

    async def listened() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await request

    closing, other = ClosingLoop(), asyncio.new_event_loop()
    closing.run_until_complete(listened())
    closing.closing = True

    async def result() -> Array:
        other.call_later(0.1, gate.open.set)
        async with asyncio.timeout(5):
            return (await request)[0]

    assert other.run_until_complete(result()).tolist() == [2, 3]
    other.close()


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


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([], "create_stages gave"),
        (5, "create_stages gave 5; it must return a list of"),
        ([lambda inputs: inputs], "create_stages gave"),
        (
            [Stage(TaskExecutor("lane"), lambda inputs: None)],
            "gave NoneType; it must return",
        ),
        ([Stage(TaskExecutor("lane"), lambda inputs: [])], "one for each of 1 outputs"),
    ],
)
def test_stages_that_are_none_are_an_error(stages: Any, message: str) -> None:
    class Staged(sg.CompiledModel):
        def create_stages(self, runner: Runner) -> list[Stage]:
            made: list[Stage] = stages
            return made

    model = Staged(chain()[0].graph)
    with pytest.raises(sg.DeviceError, match=message):
        model(X)
    with pytest.raises(sg.DeviceError, match=message):
        model.create_infer_request().infer(X)
    nothing: Any = 5
    with pytest.raises(sg.DeviceError, match="got 5"):
        Stage(nothing, len)
    with pytest.raises(sg.DeviceError, match="is 5"):
        Stage(TaskExecutor("lane"), nothing)


def test_a_task_that_raises_does_not_end_its_executor(caplog: pytest.LogCaptureFixture) -> None:
    executor, done = TaskExecutor("lane"), threading.Event()
    executor.submit(lambda: [].pop())
    executor.submit(done.set)
    assert done.wait(20)
    assert "a task of 'subgraph-lane-1' raised" in caplog.text
    wrong: Any = "2"
    with pytest.raises(sg.ConfigError, match="got '2'"):
        TaskExecutor("lane", threads=wrong)
    with pytest.raises(sg.ConfigError, match="a task is a function"):
        executor.submit(wrong)


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
    x = sg.input("x", ("N", 32))
    hidden = ops.Relu(ops.Gemm(x, sg.parameter("w", np.eye(32, dtype=np.float32))))
    graph = sg.Graph([x], [ops.Sub(hidden, x), ops.Tanh(hidden)])
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


def test_names_and_positions_that_are_not_there_are_said() -> None:
    x = sg.input("x", (2,))
    graph = sg.Graph([x], [ops.Add(x, sg.parameter("scale", np.ones(2, np.float32)))])
    model = sg.compile_model(graph, "REFERENCE")
    with pytest.raises(sg.MissingInputError, match="no parameter 'scal'; did you mean 'scale'"):
        model.parameters["scal"]
    with pytest.raises(KeyError):
        graph.parameters["scal"]
    with pytest.raises(sg.ModelError, match="there is no output 5; the model has 1") as caught:
        model([np.ones(2, np.float32)])[5]
    assert isinstance(caught.value, IndexError)
    wrong: Any = 5
    with pytest.raises(sg.ModelError, match=r"int is no sg\.Graph"):
        sg.to_onnx(wrong)
    with pytest.raises(sg.ModelError, match=r"int is no sg\.Graph"):
        sg.save(wrong, "never.onnx")
    with pytest.raises(sg.ModelError, match="the text form is a str, got int"):
        sg.parse(wrong)


@pytest.mark.parametrize("device", ["CPU", "REFERENCE", "OPENCL"])
@pytest.mark.parametrize("shift", [0, 1, -1, 3])
@pytest.mark.parametrize("rows", [3, 4000])
def test_an_input_may_share_memory_with_an_output(rows: int, shift: int, device: str) -> None:
    """Large arrays are used as they are, and a run read what it had written."""
    x = sg.input("x", ("N", 64))
    w = sg.parameter("w", np.ones((64, 64), np.float32))
    model = sg.compile_model(sg.Graph([x], [ops.MatMul(x, w), ops.Neg(x)]), device)
    memory = np.zeros((rows + 8, 64), np.float32)
    data = memory[4 : 4 + rows]
    data[...] = np.arange(rows)[:, None] % 7
    expected = data.copy()
    request = model.create_infer_request()
    request.set_output(0, memory[4 + shift : 4 + shift + rows])
    results = request.infer([data])
    np.testing.assert_array_equal(results[0], expected @ np.ones((64, 64), np.float32))
    np.testing.assert_array_equal(results[1], -expected)


@pytest.mark.parametrize("device", ["CPU", "REFERENCE", "OPENCL"])
@pytest.mark.parametrize("count", [4, 1 << 20])
def test_an_array_that_became_read_only_is_not_written(count: int, device: str) -> None:
    x = sg.input("x", ("N",))
    request = sg.compile_model(sg.Graph([x], [ops.Exp(x)]), device).create_infer_request()
    array = np.zeros(count, np.float32)
    request.set_output(0, array)
    array.flags.writeable = False
    with pytest.raises(sg.ShapeError, match="read-only"):
        request.infer([np.ones(count, np.float32)])
    assert not array.any()
