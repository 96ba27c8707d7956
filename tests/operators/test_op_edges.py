"""Ops of users at their edges: what the weight cache holds, names that are taken, no forward."""

from __future__ import annotations

import gc
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.graph.parameters import Snapshot, pinned
from subgraph.graph.types import Array

W = np.eye(4, dtype=np.float32)
ARRAY = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)


class Handle:
    """Stands for a session of a runtime over one version of a weight."""

    def __init__(self, weight: Array) -> None:
        self.weight = np.array(weight)
        self.closed = 0

    def run(self, x: Array) -> Array:
        assert not self.closed, "used after it was closed"
        return np.asarray(x @ self.weight)

    def close(self) -> None:
        self.closed += 1


def made(handles: list[Handle]) -> Callable[[Array], Handle]:
    def make(array: Array) -> Handle:
        handles.append(Handle(array))
        return handles[-1]

    return make


# What the cache holds


@pytest.mark.parametrize("make", [lambda a: (a + 1, a.T), lambda a: (a + 1, [a.T, "x"])])
def test_a_tuple_stays_one(make: Any) -> None:
    cache, w = sg.WeightCache(), sg.Parameter("w", W)
    first = cache.get("parts", make, w)
    assert type(first) is tuple
    assert not first[0].flags.writeable
    assert cache.get("parts", make, w) is first
    w.assign(W * 2)
    np.testing.assert_array_equal(cache.get("parts", make, w)[0], W * 2 + 1)


@pytest.mark.plain_memory
def test_the_arrays_of_a_tuple_count_as_memory() -> None:
    cache, w = sg.WeightCache(), sg.Parameter("w", W)
    cache.get("parts", lambda a: (a + 1, a), w)
    assert cache.stats().bytes == W.nbytes


def test_a_handle_is_made_once_for_each_version_and_closed_when_it_goes() -> None:
    handles: list[Handle] = []
    cache, w = sg.WeightCache(), sg.Parameter("w", W)
    make = made(handles)
    assert cache.get("handle", make, w) is cache.get("handle", make, w)
    w.assign(W * 2)
    assert not handles[0].closed  # the cache still has it
    cache.get("handle", make, w)
    assert [handle.closed for handle in handles] == [1, 0]
    cache.clear()
    assert [handle.closed for handle in handles] == [1, 1]


def test_a_handle_is_not_closed_while_a_run_may_see_its_version() -> None:
    handles: list[Handle] = []
    cache, w, other = sg.WeightCache(), sg.Parameter("w", W), sg.Parameter("other", W)

    def make(one: Array, two: Array) -> Handle:
        handles.append(Handle(one @ two))
        return handles[-1]

    cache.get("handle", make, w, other)
    snapshot = Snapshot([w, other])
    w.assign(W * 2)
    cache.get("handle", make, w, other)
    other.assign(W * 3)
    cache.get("handle", make, w, other)
    assert [handle.closed for handle in handles] == [0, 0, 0]
    with pinned(snapshot):
        assert cache.get("handle", make, w, other) is handles[0]
    del snapshot
    assert [handle.closed for handle in handles] == [1, 1, 0]
    assert len(handles) == 3


def test_a_handle_of_an_older_version_alone() -> None:
    handles: list[Handle] = []
    cache, w = sg.WeightCache(), sg.Parameter("w", W)
    make = made(handles)
    snapshot = Snapshot([w])
    w.assign(W * 2)
    cache.get("handle", make, w)
    with pinned(snapshot):
        assert cache.get("handle", make, w) is cache.get("handle", make, w)
    assert [handle.closed for handle in handles] == [0, 0]
    del snapshot
    assert [handle.closed for handle in handles] == [0, 1]


def test_the_parts_of_a_tuple_are_closed() -> None:
    handles: list[Handle] = []
    cache, w = sg.WeightCache(), sg.Parameter("w", W)
    make = made(handles)
    cache.get("parts", lambda a: (a + 1, (make(a), make(a))), w)
    w.assign(W * 2)
    cache.get("parts", lambda a: (a + 1, (make(a), make(a))), w)
    del w
    cache.clear()
    assert sorted(handle.closed for handle in handles) == [1, 1, 1, 1]


def test_a_handle_may_say_how_it_is_closed() -> None:
    closed: list[int] = []
    cache, w = sg.WeightCache(), sg.Parameter("w", W)
    assert cache.get("number", lambda a: 7, w, close=closed.append) == 7
    cache.clear()
    assert closed == [7]


def test_a_close_that_fails_is_said(caplog: pytest.LogCaptureFixture) -> None:
    def fail(handle: object) -> None:
        raise RuntimeError("the driver is gone")

    cache, w = sg.WeightCache(), sg.Parameter("w", W)
    cache.get("number", lambda a: 7, w, close=fail)
    cache.clear()
    assert "the driver is gone" in caplog.text


# An op with a session of its own


class SessionOp(sg.SubgraphOp):
    """Keeps the framework's names for itself, as users do without knowing."""

    def __init__(self, subgraph: sg.Graph) -> None:
        super().__init__(subgraph)
        self.handles: list[Handle] = []
        taken: Any = self
        for name in ("session", "prepare", "release", "restore", "to_export", "infer_types", "use"):
            setattr(taken, name, f"my own {name}")

    def forward(self, inputs: list[Any]) -> list[Array]:
        x, w = inputs
        taken: Any = self
        taken.leave = None
        return [self.weights.get("handle", made(self.handles), w).run(x)]


class SessionProperty(sg.SubgraphProperty):
    op: type[sg.SubgraphOp] = SessionOp

    def create_subgraph_selector(self) -> sg.SubgraphSelector:
        return sg.ContainOpSelector({"MatMul"})

    def create_subgraph_node(self, subgraph: sg.Graph, subgraph_id: int) -> sg.Node:
        return sg.subgraph_node(subgraph, op=self.op(subgraph), name=f"mine_{subgraph_id}")


def network() -> sg.Graph:
    x, w = sg.input("x", ("N", 4)), sg.parameter("w", W)
    return sg.Graph([x], [ops.Relu(ops.MatMul(x, w))], name="network")


def test_an_op_may_use_the_frameworks_names() -> None:
    cut = sg.optimize_for(network(), SessionProperty())
    op = cut.nodes[0].op
    assert isinstance(op, SessionOp)
    model = sg.compile_model(cut, "REFERENCE")
    for factor in (1, 2, 3):
        model.parameters["w"].assign(W * factor)
        for _ in range(2):
            np.testing.assert_array_equal(model(ARRAY)[0], np.maximum(ARRAY * factor, 0))
    assert len(op.handles) == 3
    assert op.handles[0].closed == 1
    assert not op.handles[-1].closed
    handles = op.handles
    with pytest.raises(sg.BlobError, match="SessionOp"):
        model.export_model(io.BytesIO())
    del model, op, cut
    gc.collect()
    assert [handle.closed for handle in handles] == [1, 1, 1]


# What is found when an op is defined


class NoForward(sg.SubgraphOp):
    def foward(self, inputs: list[Any]) -> list[Any]:
        return inputs


def test_a_missing_forward_is_found_when_the_node_is_made() -> None:
    property = SessionProperty()
    property.op = NoForward
    with pytest.raises(sg.PartitionError, match=r"write forward.*did you mean 'foward'") as caught:
        sg.optimize_for(network(), property)
    assert "NoForward" in str(caught.value)


def test_a_forward_of_the_object_is_one() -> None:
    class Late(sg.SubgraphOp):
        def __init__(self, subgraph: sg.Graph) -> None:
            super().__init__(subgraph)
            run: Any = lambda inputs: [inputs[0] @ inputs[1].array]  # noqa: E731
            self.forward = run

    property = SessionProperty()
    property.op = Late
    cut = sg.optimize_for(network(), property)
    result = sg.compile_model(cut, "REFERENCE")(ARRAY)[0]
    np.testing.assert_array_equal(result, np.maximum(ARRAY, 0))


@pytest.mark.parametrize("name", ["weights", "subgraph", "fallback", "concurrent"])
def test_an_attribute_that_the_framework_reads_is_said(name: str) -> None:
    class Taken(SessionOp):
        def __init__(self, subgraph: sg.Graph) -> None:
            super().__init__(subgraph)
            setattr(self, name, {"a": 1})

    property = SessionProperty()
    property.op = Taken
    with pytest.raises(sg.PartitionError, match=rf"Taken has set its attribute '{name}'"):
        sg.optimize_for(network(), property)
