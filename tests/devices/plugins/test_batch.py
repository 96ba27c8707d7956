"""BATCH: concurrent requests run together, and each gets what it would get alone."""

from __future__ import annotations

import io
import logging
import pickle
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.devices.plugins import batch
from subgraph.graph.types import numpy_dtype
from tests.support.children import in_child

W = np.random.default_rng(0).standard_normal((4, 3)).astype(np.float32)


class Slow(sg.Device):
    """Runs graphs by the reference, slowly; it notes the rows of each run.

    Attributes:
        rows: Rows of each run.
        gate: Set while runs may begin.
        before: Called with the inputs before each run.
    """

    fallback = ()

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.before: Callable[[Sequence[Any]], None] = lambda _: None

    def supports(self, node: sg.Node, options: Any) -> bool:
        return True

    def create_op(self, graph: sg.Graph, options: Any) -> sg.SubgraphOp:
        return _SlowOp(graph, self)


class _SlowOp(sg.SubgraphOp):
    def __init__(self, subgraph: sg.Graph, device: Slow) -> None:
        super().__init__(subgraph)
        self.slow = device
        self.run = sg.DefaultSubgraphOp(subgraph).session()

    def forward(self, inputs: Any) -> Any:
        arrays = [item for item in inputs if isinstance(item, np.ndarray)]
        self.slow.rows.append(arrays[0].shape[0])
        self.slow.gate.wait()
        self.slow.before(arrays)
        return self.run(inputs)


@pytest.fixture
def slow() -> Slow:
    return Slow()


def product(rows: int | str = 1) -> sg.Graph:
    x = sg.input("x", shape=(rows, 4))
    return sg.Graph([x], [ops.MatMul(x, sg.parameter("w", W))])


def unproved(rows: int | str = 1) -> sg.Graph:
    """Return a graph as `product` whose rows are independent, but not proved to be."""
    graph = product(rows)
    (x,), (y,) = graph.inputs, graph.outputs
    nothing = ops.Mul(ops.ReduceSum(x, keepdims=0), sg.parameter("zero", np.float32(0)))
    return sg.Graph([x], [ops.Add(y, nothing)])


def compiled(slow: Slow, graph: sg.Graph, size: int = 8, **config: Any) -> Any:
    core = sg.Core()
    core.register_device("SLOW", slow)
    return core.compile_model(graph, f"BATCH:SLOW({size})", config)


def started(model: Any, slow: Slow, inputs: Sequence[Any]) -> list[sg.InferRequest]:
    """Return requests of which the first runs while the others wait, then all at once."""
    requests = [model.create_infer_request() for _ in inputs]
    slow.rows.clear()
    slow.gate.clear()
    requests[0].start_async(inputs[0])
    while not slow.rows:
        time.sleep(0.001)
    for request, arrays in zip(requests[1:], inputs[1:], strict=True):
        request.start_async(arrays)
    while len(model._batches._waiting) < len(inputs) - 1:
        time.sleep(0.001)
    slow.gate.set()
    return requests


def result(request: sg.InferRequest) -> Any:
    found = request.wait(20)
    assert found is not None
    return found[0]


def rows_of(*values: float) -> list[Any]:
    return [np.full((1, 4), value, np.float32) for value in values]


def test_requests_that_wait_run_together(slow: Slow) -> None:
    model = compiled(slow, product())
    assert model.get_property("OPTIMAL_BATCH_SIZE") == 8
    assert model.execution_devices == ["SLOW"]
    inputs = rows_of(*range(12))
    for request, array in zip(started(model, slow, inputs), inputs, strict=True):
        np.testing.assert_allclose(result(request), array @ W, rtol=1e-5)
    assert slow.rows == [1, 8, 3], "one alone, those that waited in batches of at most 8"


def test_the_first_batch_is_compared_if_nothing_is_proved(slow: Slow) -> None:
    model = compiled(slow, unproved())
    inputs = rows_of(*range(12))
    for rows in ([1, 8, *[1] * 8, 3], [1, 8, 3]):  # the second time it is known
        for request, array in zip(started(model, slow, inputs), inputs, strict=True):
            np.testing.assert_allclose(result(request), array @ W, rtol=1e-5)
        assert slow.rows == rows


def test_calls_of_many_threads(slow: Slow) -> None:
    model = compiled(slow, product("N"))
    wrong: list[Any] = []

    def call(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(30):
            array = rng.standard_normal((rng.integers(1, 5), 4)).astype(np.float32)
            found = model(array)[0]
            if found.shape != (len(array), 3) or not np.allclose(found, array @ W, atol=1e-5):
                wrong.append((array, found))

    threads = [threading.Thread(target=call, args=(seed,)) for seed in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert 1 < max(slow.rows) <= 8
    assert model._batches._free == 1


def test_other_shapes_and_weights_are_other_batches(slow: Slow) -> None:
    x = sg.input("x", shape=(1, "T"))
    w = sg.parameter("w", np.float32(2))
    model = compiled(slow, sg.Graph([x], [ops.Mul(x, w)]))
    short, long = np.ones((1, 2), np.float32), np.ones((1, 3), np.float32)
    requests = started(model, slow, [short, short, long, short, long])
    assert [result(request).shape[1] for request in requests] == [2, 2, 3, 2, 3]
    assert slow.rows == [1, 2, 2], "two of each shape"
    slow.gate.clear()
    requests = [model.create_infer_request() for _ in range(5)]
    for k, request in enumerate(requests):
        model.parameters["w"].assign(np.float32(k))
        request.start_async(short)
        while len(model._batches._waiting) < k:
            time.sleep(0.001)
    slow.gate.set()
    assert [result(request)[0, 0] for request in requests] == [0, 1, 2, 3, 4]


def test_an_error_is_that_of_its_request(slow: Slow) -> None:
    model = compiled(slow, product())

    def refuse(arrays: Sequence[Any]) -> None:
        if np.isnan(arrays[0]).any():
            raise ValueError("not a number")

    slow.before = refuse
    inputs = rows_of(0, 1, np.nan, 3)
    requests = started(model, slow, inputs)
    for k, (request, array) in enumerate(zip(requests, inputs, strict=True)):
        if k == 2:
            with pytest.raises(Exception, match="not a number"):
                request.wait()
        else:
            np.testing.assert_allclose(result(request), array @ W, rtol=1e-5)


def test_an_interrupt_loses_no_other_request(slow: Slow) -> None:
    model = compiled(slow, product())
    model._batches._is_checked = True
    interrupts = [KeyboardInterrupt()]

    def interrupt(arrays: Sequence[Any]) -> None:
        if len(arrays[0]) > 1 and interrupts:
            raise interrupts.pop()

    slow.before = interrupt
    inputs = rows_of(0, 1, 2, 3)
    requests = started(model, slow, inputs)
    with pytest.raises(KeyboardInterrupt):
        requests[1].wait()
    for k in (0, 2, 3):
        np.testing.assert_allclose(result(requests[k]), inputs[k] @ W, rtol=1e-5)
    np.testing.assert_allclose(model(inputs[1])[0], inputs[1] @ W, rtol=1e-5)


class _Interrupted(threading.Event):
    """An event whose wait an interrupt ends, before or after ``opens`` is set and a turn came."""

    opens: threading.Event | None = None

    def wait(self, timeout: float | None = None) -> bool:
        if self.opens is not None:
            self.opens.set()
            super().wait(timeout)
        raise KeyboardInterrupt


@pytest.mark.parametrize("has_turn", [False, True])
def test_an_interrupted_thread_that_waits(
    slow: Slow, has_turn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it waits for its turn, or got it at that moment, the next one goes on."""
    model = compiled(slow, product())
    (first,) = started(model, slow, rows_of(0))
    first.wait()
    slow.gate.clear()
    slow.rows.clear()
    first.start_async(rows_of(1)[0])
    while not slow.rows:
        time.sleep(0.001)
    event = _Interrupted()
    event.opens = slow.gate if has_turn else None
    with monkeypatch.context() as patch:
        patch.setattr(batch, "_waiting", lambda inputs: batch._Waiting(inputs, 1, None, event))
        with pytest.raises(KeyboardInterrupt):
            model(rows_of(3)[0])
    slow.gate.set()
    np.testing.assert_allclose(result(first), rows_of(1)[0] @ W, rtol=1e-5)
    np.testing.assert_allclose(model(rows_of(2)[0])[0], rows_of(2)[0] @ W, rtol=1e-5)
    assert model._batches._free == 1


def test_rows_that_depend_on_each_other(slow: Slow, caplog: pytest.LogCaptureFixture) -> None:
    x = sg.input("x", shape=("N", 4))
    model = compiled(slow, sg.Graph([x], [ops.Softmax(x, axis=0)]))
    inputs = rows_of(0, 1, 2)
    with caplog.at_level(logging.WARNING):
        for request in started(model, slow, inputs):
            np.testing.assert_allclose(result(request), np.ones((1, 4)))
    assert "not independently" in caplog.text
    for request in started(model, slow, inputs[:1]):
        np.testing.assert_allclose(result(request), np.ones((1, 4)))
    assert slow.rows == [1]


def test_requests_that_wait_while_rows_turn_out_to_depend(slow: Slow) -> None:
    """They had joined the queue before; later batches of it ran together, unchecked."""
    x = sg.input("x", shape=("N", 4))
    model = compiled(slow, sg.Graph([x], [ops.Softmax(x, axis=0)]))
    for request in started(model, slow, rows_of(*range(12))):
        np.testing.assert_allclose(result(request), np.ones((1, 4)))
    assert slow.rows == [1, 8, *[1] * 11]


def test_parts_of_a_request_while_rows_turn_out_to_depend(slow: Slow) -> None:
    x = sg.input("x", shape=("N", 4))
    model = compiled(slow, sg.Graph([x], [ops.Softmax(x, axis=0)]), 2)
    array = np.ones((4, 4), np.float32)

    def other_request_ends(_: Any) -> None:
        model._batches._is_whole = model._batches._is_checked = True

    slow.before = other_request_ends
    np.testing.assert_allclose(model(array)[0], array / 4)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "complex64"])
def test_rounding_is_no_dependence_of_rows(dtype: str) -> None:
    alone = np.arange(1, 9).astype(numpy_dtype(dtype))
    rounded = (np.arange(1, 9) * 1.01).astype(numpy_dtype(dtype))
    assert np.count_nonzero(rounded != alone) > 4
    assert batch._same(rounded, alone)
    assert not batch._same(alone[::-1], alone)


@pytest.mark.parametrize(("graph", "compared"), [(product, []), (unproved, [10])])
def test_more_rows_than_a_batch_are_divided(
    slow: Slow, graph: Callable[[str], sg.Graph], compared: list[int]
) -> None:
    """Without a proof the first time is compared with a whole run."""
    model = compiled(slow, graph("N"), 4)
    array = np.random.default_rng(1).standard_normal((10, 4)).astype(np.float32)
    slow.rows.clear()
    for _ in range(2):
        np.testing.assert_allclose(model(array)[0], array @ W, rtol=1e-5, atol=1e-6)
    assert slow.rows == [4, 4, 2, *compared, 4, 4, 2]
    single = compiled(Slow(), product("N"), 1)
    np.testing.assert_allclose(single(array)[0], array @ W, rtol=1e-5, atol=1e-6)


def test_rows_that_depend_on_each_other_are_not_divided(
    slow: Slow, caplog: pytest.LogCaptureFixture
) -> None:
    x = sg.input("x", shape=("N", 4))
    model = compiled(slow, sg.Graph([x], [ops.Softmax(x, axis=0)]), 2)
    array = np.ones((6, 4), np.float32)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            np.testing.assert_allclose(model(array)[0], array / 6)
    assert caplog.text.count("not independently") == 1


def gram(x: sg.Value) -> Any:
    return ops.MatMul(x, ops.Transpose(x))


def pairs(x: sg.Value) -> Any:
    shape = sg.parameter("shape", np.array([-1, 2, 4]))
    return ops.Reshape(ops.Reshape(x, shape), ops.Shape(x))


@pytest.mark.parametrize("build", [gram, pairs])
def test_parts_that_fail_or_do_not_fit_are_a_dependence_of_rows(
    slow: Slow, caplog: pytest.LogCaptureFixture, build: Callable[[sg.Value], Any]
) -> None:
    x = sg.input("x", shape=("N", 4))
    graph = sg.Graph([x], [build(x)])
    model = compiled(slow, graph, 3)
    array = np.random.default_rng(1).standard_normal((4, 4)).astype(np.float32)
    (expected,) = sg.compile_model(graph, "REFERENCE")(array).to_tuple()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            np.testing.assert_allclose(model(array)[0], expected, rtol=1e-5)
    assert caplog.text.count("not independently") == 1


def test_a_free_device_waits_if_asked(slow: Slow) -> None:
    model = compiled(slow, product(), AUTO_BATCH_TIMEOUT=300)
    slow.rows.clear()
    requests = [model.create_infer_request() for _ in range(3)]
    for request, array in zip(requests, rows_of(1, 2, 3), strict=True):
        request.start_async(array)
    for request, array in zip(requests, rows_of(1, 2, 3), strict=True):
        np.testing.assert_allclose(result(request), array @ W, rtol=1e-5)
    assert slow.rows[0] == 3


@pytest.mark.parametrize(
    ("device", "error", "text"),
    [
        ("BATCH:CPU(0)", sg.ConfigError, "takes one device"),
        ("BATCH:CPU,REFERENCE", sg.ConfigError, "takes one device"),
        ("BATCH", sg.ConfigError, "takes one device"),
        ("BATCH:MULTI(2)", sg.ConfigError, "cannot run 'MULTI'"),
        ("BATCH:NONE(2)", sg.DeviceError, "NONE"),
    ],
)
def test_devices_that_it_does_not_take(device: str, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        sg.compile_model(product(), device)


def test_a_model_that_needs_more_rows_than_one(caplog: pytest.LogCaptureFixture) -> None:
    x = sg.input("x", shape=("N", 4))
    fourth = ops.ReduceSum(ops.Gather(x, np.array([3])), keepdims=0)
    model = sg.compile_model(sg.Graph([x], [ops.Add(x, fourth)], "odd"), "BATCH:CPU")
    assert "'odd' one by one: batches of sample inputs do not run" in caplog.text
    given = np.ones((5, 4), np.float32)
    np.testing.assert_array_equal(model(given)[0], 5 * given)


def test_models_without_a_batch(caplog: pytest.LogCaptureFixture) -> None:
    """Their requests run one by one, as OpenVINO's BATCH runs them."""
    x, k = sg.input("x", shape=(3, 4)), sg.input("k", shape=())
    fixed = ops.Add(ops.MatMul(np.ones((3, 3), np.float32), x), np.ones((3, 4), np.float32))
    arrays = {"x": np.ones((3, 4), np.float32), "k": np.float32(2)}
    for inputs, output, why in (
        ([x, k], ops.Mul(x, k), r"input 'k' is float32\[\], whose first dimension is no batch"),
        ([x], ops.ReduceSum(x, keepdims=0), "output .* is float32.*, whose first dimension"),
        ([x], fixed, r"output .* is float32\[3, 4\], whose first dimension is no batch"),
        ([], ops.Relu(sg.parameter("w", arrays["x"])), r"output .*, whose first dimension"),
    ):
        graph = sg.Graph(inputs, [output], "odd")
        given = {value.name: arrays[value.name] for value in inputs}
        expected = sg.compile_model(graph, "REFERENCE")(given)[0]
        for device in ("BATCH:CPU(2)", "BATCH:CPU"):
            caplog.clear()
            model = sg.compile_model(graph, device)
            assert re.search(f"BATCH runs requests of 'odd' one by one: .*{why}", caplog.text)
            assert len([r for r in caplog.records if "BATCH" in r.message]) == 1
            requests = [model.create_infer_request() for _ in range(4)]
            for request in requests:
                request.start_async(given)
            again = pickle.loads(pickle.dumps(model))
            for found in (*map(result, requests), again(given)[0]):
                np.testing.assert_allclose(found, expected)
            assert model.get_property("OPTIMAL_BATCH_SIZE") == 1


def test_a_partitioned_model_runs_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    cut = sg.optimize_for(product(), sg.ContainOpSelector({"MatMul"}))
    model = sg.compile_model(cut, "BATCH:CPU(2)")
    assert "is a subgraph node" in caplog.text
    np.testing.assert_allclose(model(rows_of(2)[0])[0], rows_of(2)[0] @ W, rtol=1e-5)


def test_the_size_is_measured() -> None:
    model = sg.compile_model(product(), "BATCH:CPU")
    assert model.get_property("OPTIMAL_BATCH_SIZE") in (1, 2, 4, 8, 16, 32, 64)
    array = np.ones((5, 4), np.float32)
    np.testing.assert_allclose(model(array)[0], array @ W, rtol=1e-5)


def test_short_runs_are_not_joined_but_divided_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that wait for each other cost more than a run of 10 us, which is all of any size."""
    monkeypatch.setattr(batch, "_seconds", lambda *_: 1e-5)
    model: Any = sg.compile_model(product(), "BATCH:CPU")
    assert model.get_property("OPTIMAL_BATCH_SIZE") == 1
    assert model._batches._part == 64
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_allclose(again(rows_of(2)[0])[0], rows_of(2)[0] @ W, rtol=1e-5)


def test_query_export_and_pickle() -> None:
    graph = product()
    found = sg.query_model(graph, "BATCH:CPU(4)")
    assert dict(found) == {node.name: "BATCH" for node in graph.nodes}
    model = sg.compile_model(graph, "BATCH:CPU(4)")
    stream = io.BytesIO()
    model.export_model(stream)
    stream.seek(0)
    array = np.ones((3, 4), np.float32)
    for again in (sg.import_model(stream, "BATCH"), pickle.loads(pickle.dumps(model))):
        assert again.get_property("OPTIMAL_BATCH_SIZE") == 4
        np.testing.assert_allclose(again(array)[0], array @ W, rtol=1e-5)


def test_a_forked_child_begins_without_the_parents_runs(slow: Slow) -> None:
    model = compiled(slow, product())
    model(rows_of(1)[0])
    slow.gate.clear()
    request = model.create_infer_request()
    slow.rows.clear()
    request.start_async(rows_of(1)[0])
    while not slow.rows:
        time.sleep(0.001)

    def child() -> None:
        slow.gate = threading.Event()
        slow.gate.set()
        np.testing.assert_allclose(model(rows_of(2)[0])[0], rows_of(2)[0] @ W, rtol=1e-5)

    in_child(child)
    slow.gate.set()
    request.wait()
