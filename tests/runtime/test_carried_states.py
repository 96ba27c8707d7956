"""States that a request carries from an output to an input of the next run, as of decoders."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.engine.executable.executable_plan import ExecutablePlan
from subgraph.graph import growing
from subgraph.graph.types import Array
from subgraph.runtime import request_state

DEVICES = ["CPU", "REFERENCE", "OPENCL", "HETERO:REFERENCE,CPU", "MULTI:CPU,REFERENCE", "BATCH:CPU"]
HEADS, SIZE = 2, 8
Made = dict[str, Array]


@pytest.fixture(autouse=True)
def nan_behind_the_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill the room behind states with NaN, which no kernel may read."""

    def filled(array: Array, capacity: int) -> Array:
        view = growing.reserved(array, capacity)
        buffer = growing.buffer_of(view)
        assert buffer is not None
        buffer[..., array.shape[-2] :, :] = np.nan
        return view

    monkeypatch.setattr(request_state, "reserved", filled)


def cache(name: str, batch: int | str = "B") -> sg.Value:
    return sg.input(name, (batch, HEADS, f"P_{name}", SIZE))


def new(name: str, batch: int | str = "B") -> sg.Value:
    return sg.input(name, (batch, HEADS, "S", SIZE))


def attention() -> sg.Graph:
    """Attention of the standard, with cached keys and values."""
    q, k, v = (new(name) for name in "qkv")
    keys, values = cache("past.0.key"), cache("past.0.value")
    y = ops.Attention(q, k, v, None, keys, values, is_causal=1, outputs=3)
    return named(
        sg.Graph([q, k, v, keys, values], list(y), "attention"),
        ["y", "present.0.key", "present.0.value"],
    )


def concatenated() -> sg.Graph:
    """Keys and values joined by Concat, and products and Softmax as exporters write them."""
    q, k, v = (new(name) for name in "qkv")
    past = [cache("past_key_values.0.key"), cache("past_key_values.0.value")]
    keys, values = (ops.Concat(p, x, axis=2) for p, x in zip(past, (k, v), strict=True))
    scores = ops.Mul(ops.MatMul(q, ops.Transpose(keys, perm=(0, 1, 3, 2))), np.float32(0.3))
    y = ops.MatMul(ops.Softmax(scores, axis=-1), values)
    graph = sg.Graph([q, k, v, *past], [y, keys, values], "concatenated")
    return named(graph, ["y", "present.0.key", "present.0.value"])


def shared() -> sg.Graph:
    """One cache that two nodes extend, whose elements others read, and that is a result as well."""
    q, k, v = (new(name) for name in "qkv")
    past = cache("past")
    first, second = ops.Concat(past, k, axis=2), ops.Concat(past, v, axis=2)
    total = ops.ReduceSum(past, np.array([2]), keepdims=1)
    y = ops.Add(ops.ReduceSum(ops.Add(first, second), np.array([2]), keepdims=1), total)
    graph = sg.Graph([q, k, v, past], [ops.Add(y, q), first, second, ops.Identity(past)], "shared")
    return named(graph, ["y", "present", "second", "unchanged"])


def rows() -> sg.Graph:
    """A cache of rank 3, to which a row is appended in front of and behind another."""
    q, k, v = (new(name) for name in "qkv")
    past = sg.input("past", (HEADS, "P", SIZE))
    one, two = (ops.ReduceMean(x, np.array([0]), keepdims=0) for x in (k, v))
    joined = ops.Concat(past, one, two, axis=1)
    y = ops.Add(ops.ReduceMax(joined, np.array([1]), keepdims=1), q)
    return named(sg.Graph([q, k, v, past], [y, joined], "rows"), ["y", "present"])


def named(graph: sg.Graph, names: Sequence[str]) -> sg.Graph:
    for value, name in zip(graph.outputs, names, strict=True):
        value.name = name
    return graph


def tokens(rng: np.random.Generator, batch: int, count: int) -> Made:
    shape = (batch, HEADS, count, SIZE)
    return {name: rng.standard_normal(shape).astype(np.float32) for name in "qkv"}


def fed_back(
    graph: sg.Graph, pairs: dict[str, str], batch: int
) -> Callable[[Made], tuple[Made, Made]]:
    """Return a function that runs the reference with the results of its previous run.

    It returns its results, and the states after the run.
    """
    model = sg.compile_model(graph, "REFERENCE")
    states: Made = {}
    for name in pairs:
        shape = model.inputs[[p.name for p in model.inputs].index(name)].shape
        assert shape is not None
        sizes = [d if isinstance(d, int) else batch if d == "B" else 0 for d in shape]
        states[name] = np.zeros(sizes, np.float32)

    def run(inputs: Made) -> tuple[Made, Made]:
        results = model({**inputs, **states})
        states.update({name: np.array(results[result]) for name, result in pairs.items()})
        return {name: np.array(results[name]) for name in results}, dict(states)

    return run


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", [attention, concatenated, shared, rows])
@pytest.mark.parametrize(
    "lengths", [(5, 1, 1, 1, 1), (1, 3, 2, 1, 4, 9, 1, 1), (4, 1, 1, 70, 1, 1)]
)
def test_results_are_those_of_results_fed_back(
    make: Callable[[], sg.Graph], device: str, lengths: Sequence[int], monkeypatch: Any
) -> None:
    """Also when a buffer is full, after a longer part, and with results that the caller changes."""
    monkeypatch.setattr(request_state, "_MIN_ROOM", 3)
    rng, graph = np.random.default_rng(len(lengths)), make()
    batch = 3
    request = sg.compile_model(make(), device).create_infer_request(states=True)
    pairs = {
        port.name: port.name.replace("past_key_values", "past").replace("past", "present")
        for port in sg.compile_model(graph, "REFERENCE").inputs
        if "past" in port.name
    }
    step = fed_back(graph, pairs, batch)
    for count in lengths:
        inputs = tokens(rng, batch, count)
        (want, states), got = step(inputs), request.infer(inputs)
        assert set(got) == set(want) - set(pairs.values())
        for name, array in got.items():
            np.testing.assert_allclose(array, want[name], rtol=1e-5, atol=1e-5, err_msg=name)
            array[...] = np.nan  # the caller's own
        for state in request.query_state():
            np.testing.assert_allclose(state.state, states[state.name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("parallel", [False, True])
def test_regions_that_append_to_one_state(parallel: bool) -> None:
    """Two regions extend the same state; one of them appends in place, also at the same time."""
    past = sg.input("past", (1, "P", 64))
    rows = [sg.input(name, (1, 1, 64)) for name in ("one", "two")]
    joined = [ops.Concat(past, row, axis=1) for row in rows]
    sums = [ops.ReduceSum(ops.Abs(each), np.array([1])) for each in joined]
    graph = sg.Graph([past, *rows], [*sums, *joined], "two_regions")
    named(graph, ["a", "b", "present", "other"])
    for node in graph.nodes:
        node.metadata = {"affinity": "REFERENCE" if node.op_type == "Abs" else "CPU"}
    options = {"PARALLEL_REGIONS": parallel}
    model = sg.compile_model(graph, "HETERO:CPU,REFERENCE", options)
    request = model.create_infer_request(states=True)
    rng, want = np.random.default_rng(0), np.zeros((1, 0, 64), np.float32)
    for _ in range(40):
        one, two = (rng.standard_normal((1, 1, 64)).astype(np.float32) for _ in range(2))
        got = request.infer(one=one, two=two)
        other = np.concatenate([want, two], axis=1)
        want = np.concatenate([want, one], axis=1)
        np.testing.assert_array_equal(got["other"], other)
        np.testing.assert_array_equal(request.query_state()[0].state, want)
        np.testing.assert_allclose(got["b"], np.abs(other).sum(axis=1, keepdims=True), rtol=1e-5)


def test_states_are_appended_in_place() -> None:
    rng = np.random.default_rng(0)
    request = sg.compile_model(attention(), "CPU").create_infer_request(states=True)
    memories: list[Any] = []
    for count in (70, 1, 1, 1, 1):
        request.infer(tokens(rng, 2, count))
        memories.append(request._runner.states()["past.0.key"].base)
    # The prompt's result is an array of its own; the steps after it share a buffer.
    assert all(memory is memories[2] for memory in memories[2:])


def test_states_are_set_reset_and_copied() -> None:
    rng = np.random.default_rng(0)
    model = sg.compile_model(attention(), "CPU")
    request = model.create_infer_request(
        states={"past.0.key": "present.0.key", "past.0.value": "present.0.value"}
    )
    assert [state.name for state in request.query_state()] == ["past.0.key", "past.0.value"]
    prompt, step = tokens(rng, 1, 6), tokens(rng, 1, 1)
    request.infer(prompt)
    saved = {state.name: state.state for state in request.query_state()}
    first = request.infer(step)["y"]
    for state in request.query_state():
        state.state = saved[state.name]
    np.testing.assert_array_equal(request.infer(step)["y"], first)
    other = model.create_infer_request(states=True)
    for state in other.query_state():
        state.state = saved[state.name]
        saved[state.name][...] = np.nan  # it was copied
    np.testing.assert_array_equal(other.infer(step)["y"], first)
    request.reset_state()
    np.testing.assert_array_equal(
        request.infer(prompt)["y"], model.create_infer_request(states=True).infer(prompt)["y"]
    )
    with pytest.raises(sg.ModelError, match="is float32 of shape"):
        request.query_state()[0].state = np.zeros((1, HEADS, 3, SIZE), np.float64)


def test_a_run_that_fails_leaves_the_states() -> None:
    rng = np.random.default_rng(0)
    request = sg.compile_model(attention(), "CPU").create_infer_request(states=True)
    for count in (4, 1, 1):
        request.infer(tokens(rng, 1, count))
    before = [state.state for state in request.query_state()]
    wrong = tokens(rng, 1, 1)
    wrong["k"] = rng.standard_normal((1, HEADS, 2, SIZE)).astype(np.float32)
    with pytest.raises(sg.SubgraphError):
        request.infer(wrong)
    for state, array in zip(request.query_state(), before, strict=True):
        np.testing.assert_array_equal(state.state, array)


def test_a_step_after_one_that_failed_appends_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    model = sg.compile_model(attention(), "CPU", {"RUNTIME_FALLBACK": False})
    request = model.create_infer_request(states=True)
    for count in (4, 1, 1):
        request.infer(tokens(rng, 1, count))
    memory = request._runner.states()["past.0.key"].base
    with monkeypatch.context() as patched:

        def fail(*_: Any) -> None:
            raise MemoryError

        patched.setattr(ExecutablePlan, "run", fail)
        with pytest.raises(sg.DeviceError):
            request.infer(tokens(rng, 1, 1))
    request.infer(tokens(rng, 1, 1))
    assert request._runner.states()["past.0.key"].base is memory


def test_a_result_that_cannot_be_copied_leaves_the_states(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    request = sg.compile_model(shared(), "CPU").create_infer_request(states={"past": "second"})
    for count in (4, 1, 1):
        request.infer(tokens(rng, 1, count))
    before = request.query_state()[0].state

    def no_memory(array: Array) -> bool:
        if array.shape[-2] == 1:  # the result y, which is copied beside the state
            raise MemoryError
        return growing.is_growing(array)

    monkeypatch.setattr(request_state, "is_growing", no_memory)
    with pytest.raises(MemoryError):
        request.infer(tokens(rng, 1, 1))
    np.testing.assert_array_equal(request.query_state()[0].state, before)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_run_that_is_cancelled_leaves_the_states(asynchronous: bool) -> None:
    requests: list[Any] = []

    def compute(node: sg.Node, inputs: Sequence[Any]) -> list[Array]:
        if inputs[0][0, 0] < 0:
            requests[0].cancel()
        return [inputs[0]]

    core = sg.Core()
    core.add_extension(
        sg.Operator(
            schema=sg.Schema("CancelsRequest", "com.example", inputs=("x",), outputs=("y",)),
            compute=compute,
            infer=lambda node, types, values: [types[0]],
        )
    )
    x, past = sg.input("x", (1, 64)), sg.input("past", ("P", 64))
    cancels: Any = ops.CancelsRequest
    present = ops.Concat(past, cancels(x), axis=0)
    graph = named(sg.Graph([x, past], [ops.Neg(present), present]), ["y", "present"])
    request = core.compile_model(graph, "CPU").create_infer_request(states={"past": "present"})
    requests.append(request)
    want = np.zeros((0, 64), np.float32)
    # The batch of the state is not stated: it begins with one row, as the other input has.
    request.query_state()[0].state = want
    for k, number in enumerate((1, 2, 3, -4, 5, -6, -7, 8, 9)):
        row = np.full((1, 64), number, np.float32)
        if asynchronous:
            request.start_async(x=row)
        run = request.wait if asynchronous else lambda row=row: request.infer(x=row)
        if number < 0:
            with pytest.raises(sg.RequestCancelledError):
                run()
            continue
        before = np.zeros((1, 64), np.float32) if k == 0 else want
        want = np.concatenate([before, row])
        results: Any = run()
        np.testing.assert_array_equal(results["y"], -want)
        np.testing.assert_array_equal(request.query_state()[0].state, want)


def test_asynchronous_runs_and_outputs_of_the_caller() -> None:
    rng = np.random.default_rng(0)
    graph = attention()
    request = sg.compile_model(graph, "CPU").create_infer_request(states=True)
    step = fed_back(
        attention(), {"past.0.key": "present.0.key", "past.0.value": "present.0.value"}, 1
    )
    for count in (5, 1, 1, 1):
        inputs = tokens(rng, 1, count)
        out = np.empty((1, HEADS, count, SIZE), np.float32)
        request.set_output("y", out)
        request.start_async(inputs)
        results = request.wait()
        assert results is not None
        assert results["y"] is out
        np.testing.assert_allclose(out, step(inputs)[0]["y"], rtol=1e-5, atol=1e-5)
    assert request.get_input("q") is inputs["q"]
    with pytest.raises(sg.MissingInputError, match="no input 'past"):
        request.set_input("past.0.key", out)


@pytest.mark.parametrize("mode", ["linear", "circular"])
@pytest.mark.parametrize("device", ["CPU", "REFERENCE"])
def test_a_cache_of_fixed_size_is_overwritten(mode: str, device: str) -> None:
    """The form of opset 24: rows scattered to positions that an input says."""
    places, update = sg.input("places", (2,), "int64"), sg.input("x", (2, HEADS, 2, SIZE))
    past = sg.input("past", (2, HEADS, 6, SIZE))
    present = ops.TensorScatter(past, update, places, axis=2, mode=mode)
    graph = named(sg.Graph([places, update, past], [ops.Neg(present), present]), ["y", "present"])
    request = sg.compile_model(graph, device).create_infer_request(states=True)
    want = np.zeros((2, HEADS, 6, SIZE), np.float32)
    rng, memories = np.random.default_rng(0), list[Any]()
    for k in range(5):
        at = np.array([k % 5, (3 * k) % 5]) if mode == "linear" else np.array([k, 7 * k])
        x = rng.standard_normal((2, HEADS, 2, SIZE)).astype(np.float32)
        for sample, first in enumerate(at):
            for row in range(2):
                want[sample, :, (first + row) % 6] = x[sample, :, row]
        np.testing.assert_array_equal(request.infer(places=at, x=x)["y"], -want)
        np.testing.assert_array_equal(request.query_state()[0].state, want)
        memories.append(request._runner.states()["past"].base)
    assert device != "CPU" or all(memory is memories[0] for memory in memories)


def test_a_cache_that_others_read_is_not_overwritten() -> None:
    places, update = sg.input("places", (1,), "int64"), sg.input("x", (1, HEADS, 1, SIZE))
    past = sg.input("past", (1, HEADS, 4, SIZE))
    present = ops.TensorScatter(past, update, places, axis=2)
    y = ops.Sub(present, past)
    graph = named(sg.Graph([places, update, past], [y, present]), ["y", "present"])
    request = sg.compile_model(graph, "CPU").create_infer_request(states=True)
    want = np.zeros((1, HEADS, 4, SIZE), np.float32)
    for k in range(4):
        x = np.full((1, HEADS, 1, SIZE), k + 1, np.float32)
        after = want.copy()
        after[:, :, k] = x[:, :, 0]
        np.testing.assert_array_equal(request.infer(places=np.array([k]), x=x)["y"], after - want)
        want = after


@pytest.mark.parametrize("name", ["Required", "Shape"])
def test_a_cache_that_an_operator_of_the_user_reads_is_not_overwritten(name: str) -> None:
    """Its operator has the name of one that reads shapes only."""
    core = sg.Core()
    core.add_extension(
        sg.Operator(
            schema=sg.Schema(name, "com.example", inputs=("x", "y"), outputs=("z",)),
            compute=lambda node, inputs: [inputs[1].copy()],
            infer=lambda node, types, values: [types[1]],
        )
    )
    places, update = sg.input("places", (1,), "int64"), sg.input("x", (1, HEADS, 1, SIZE))
    past = sg.input("past", (1, HEADS, 4, SIZE))
    present = ops.TensorScatter(past, update, places, axis=2)
    reader = sg.Node(name, [ops.ReduceSum(present), past], domain="com.example", version=1)
    graph = named(sg.Graph([places, update, past], [*reader.outputs, present]), ["y", "present"])
    request = core.compile_model(graph, "CPU").create_infer_request(states=True)
    before = np.zeros((1, HEADS, 4, SIZE), np.float32)
    for k in range(4):
        x = np.full((1, HEADS, 1, SIZE), k + 1, np.float32)
        np.testing.assert_array_equal(request.infer(places=np.array([k]), x=x)["y"], before)
        before[:, :, k] = x[:, :, 0]


@pytest.mark.parametrize(
    ("states", "message"),
    [
        ({"past.0.key": "nothing"}, "no output 'nothing'"),
        ({"nothing": "y"}, "no input 'nothing'"),
        ({"past.0.key": "y", "past.0.value": "y"}, "in two states"),
        (["past.0.key"], "states are a dict"),
    ],
)
def test_states_that_do_not_exist(states: Any, message: str) -> None:
    model = sg.compile_model(attention(), "CPU")
    with pytest.raises(sg.SubgraphError, match=message):
        model.create_infer_request(states=states)


@pytest.mark.parametrize("device", ["CPU", "REFERENCE"])
def test_states_of_texts_and_numbers(device: str) -> None:
    """States that do not grow in place: strings, scalars, an array along its last axis."""
    words, more = sg.input("past_words", (1, "W"), "string"), sg.input("more", (1, "M"), "string")
    count, total = sg.input("past_count", (), "int64"), sg.input("past_row", ("R",))
    outputs = [
        ops.Concat(words, more, axis=1),
        ops.Add(count, np.array(1)),
        ops.Concat(total, np.ones(3, np.float32), axis=0),
    ]
    graph = sg.Graph([words, more, count, total], outputs, "texts")
    named(graph, ["present_words", "present_count", "present_row"])
    request = sg.compile_model(graph, device).create_infer_request(states=True)
    for word in "abc":
        assert not request.infer(more=np.array([[word]], object))
    states = {state.name: state.state for state in request.query_state()}
    assert states["past_words"].tolist() == [["a", "b", "c"]]
    assert states["past_count"] == 3
    assert states["past_row"].shape == (9,)


def test_states_that_do_not_fit() -> None:
    x = sg.input("x", ("N",))
    model = sg.compile_model(sg.Graph([x], [ops.Cast(x, to=7)]), "CPU")
    with pytest.raises(sg.ConfigError, match="dtypes differ"):
        model.create_infer_request(states={"x": model.outputs[0].name})
    listed = sg.Graph([x], [ops.SequenceConstruct(x)])
    with pytest.raises(sg.ConfigError, match="dtypes differ"):
        sg.compile_model(listed, "CPU").create_infer_request({"x": listed.outputs[0].name})
    with pytest.raises(sg.ConfigError, match="no inputs 'past"):
        model.create_infer_request(states=True)
    request = sg.compile_model(attention(), "CPU").create_infer_request(states=True)
    request.infer(tokens(np.random.default_rng(0), 1, 1))
    with pytest.raises(sg.RequestError, match="ENABLE_PROFILING"):
        request.profile()
