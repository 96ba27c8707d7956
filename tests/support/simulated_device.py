"""A device that computes as REFERENCE does and fails when told to, for tests of several devices."""

from __future__ import annotations

import threading
import time
from typing import Any

import attrs
import numpy as np
import onnxruntime
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import Array
from subgraph.runtime import breaker

X = np.linspace(-2, 2, 6, dtype=np.float32).reshape(2, 3)


@attrs.frozen
class Options(sg.DeviceOptions):
    KNOB: int = sg.option(1, "a knob", minimum=0)


class Recorder(sg.DefaultSubgraphOp):
    """Runs like the default op; counts, sleeps, fails as its device says."""

    def __init__(self, graph: sg.Graph, owner: Simulated) -> None:
        super().__init__(graph)
        self.owner = owner

    def session(self) -> sg.Session:
        return RecorderSession(self)


class RecorderSession(sg.Session):
    def __init__(self, op: Recorder) -> None:
        super().__init__(op)
        self.inner = sg.DefaultSubgraphOp.session(op)
        self.owner = op.owner

    def __call__(self, inputs: Any, outputs: Any = None) -> Any:
        self.owner.runs += 1
        if self.owner.pause:
            time.sleep(self.owner.pause)
        if self.owner.meeting is not None and self.owner.runs == self.owner.meeting[0]:
            self.owner.meeting[1].wait(20)
        if self.owner.lost:
            raise sg.DeviceError("device lost")
        if len(inputs[0]) == self.owner.refused_rows:
            raise sg.UnsupportedOpError(f"{len(inputs[0])} rows")
        return self.inner(inputs, outputs)


class Simulated(sg.Device):
    """A device that takes the operators in ``takes`` (None: all)."""

    options_class = Options
    takes: set[str] | None = None

    def __init__(self, takes: set[str] | None = None) -> None:
        self.takes = takes
        self.runs = 0
        self.pause = 0.0
        self.lost = False
        self.refused_rows = 0
        self.meeting: tuple[int, threading.Barrier] | None = None
        self.refuses_to_compile = False
        self.compiled: list[list[str]] = []
        self.threads: set[int] = set()
        self.knobs: list[int] = []

    def supports(self, node: sg.Node, options: Any) -> bool | sg.Reject:
        if self.takes is None or node.op_type in self.takes:
            return True
        return sg.Reject(f"no {node.op_type} here")

    def create_op(self, graph: sg.Graph, options: Any) -> sg.SubgraphOp:
        if self.refuses_to_compile:
            raise sg.DeviceError("kernel does not build")
        self.compiled.append([node.name for node in graph.nodes])
        self.threads.add(threading.get_ident())
        self.knobs.append(options.KNOB)
        return Recorder(graph, self)


def seven() -> sg.Graph:
    """Return the worked example of the reference: 1-2-(3, 4)-5-6-7, of which A lacks 4."""
    x = sg.input("x", ("N", 3))
    two = ops.Relu(ops.Relu(x, name="1"), name="2")
    five = ops.Add(ops.Relu(two, name="3"), ops.Neg(two, name="4"), name="5")
    return sg.Graph([x], [ops.Relu(ops.Relu(five, name="6"), name="7")], "seven")


def expected(graph: sg.Graph, x: Array = X) -> list[Array]:
    session = onnxruntime.InferenceSession(sg.to_onnx(graph).SerializeToString())
    return list(session.run(None, {"x": x}))


def check(model: sg.CompiledModel, graph: sg.Graph, x: Array = X) -> None:
    for got, want in zip(model(x).values(), expected(graph, x), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def two_devices() -> tuple[sg.Core, Simulated, Simulated]:
    """Return a Core with the devices A, which takes three operators, and B, which takes all."""
    core = sg.Core()
    a, b = Simulated({"Relu", "Add", "Mul"}), Simulated()
    core.register_device("A", a)
    core.register_device("B", b)
    return core, a, b


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(breaker, "time", self)

    def monotonic(self) -> float:
        return self.now


def relu() -> sg.Graph:
    x = sg.input("x", ("N", 3))
    return sg.Graph([x], [ops.Relu(x, name="relu")], "one")
