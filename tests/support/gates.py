"""Models whose steps wait until a test opens them."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import Array


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
