"""A virtual device of a user's own: requests of a model run on two devices in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import attrs
import numpy as np

import subgraph as sg
from subgraph import ops
from subgraph.devices.device import DeviceList
from subgraph.devices.virtual import VirtualDevice, VirtualModel
from subgraph.runtime.cancel import Cancel
from subgraph.runtime.settings import option


@attrs.frozen
class Options(sg.DeviceOptions):
    DEVICE_PRIORITIES: str = option("", "the devices, separated by commas")


class TurnsRunner(sg.Runner):
    """Runs each time on the next of its runners."""

    def __init__(self, runners: Sequence[sg.Runner], cancel: Cancel) -> None:
        super().__init__(cancel)
        self.runners, self.runs = runners, count()

    def run(self, inputs: Sequence[Any]) -> Sequence[Any]:
        runner = self.runners[next(self.runs) % len(self.runners)]
        return self.filled(runner.run(inputs))


class TurnsModel(VirtualModel):
    def __init__(
        self, graph: sg.Graph, models: Sequence[sg.CompiledModel], listed: DeviceList
    ) -> None:
        names = ",".join(device.name for device in listed.devices)
        super().__init__(graph, device=f"TURNS:{names}", options=listed.options)
        self.models = models

    @property
    def running(self) -> Sequence[sg.CompiledModel]:
        return self.models

    def create_runner(self, cancel: Cancel) -> sg.Runner:
        return TurnsRunner([model.create_runner(cancel) for model in self.models], cancel)


class Turns(VirtualDevice):
    options_class = Options
    caches = False

    def compile_model(
        self, graph: sg.Graph, config: Mapping[str, Any] | None = None
    ) -> sg.CompiledModel:
        listed, core = self.configured(config), self.known_core
        models = [
            core.compile_model(graph, device.name, listed.config_of(device))
            for device in listed.devices
        ]
        return TurnsModel(graph, models, listed)


class Constant(sg.Device):
    """Answers every request with a number of its class."""

    number = 1.0

    def supports(self, node: sg.Node, options: Any) -> bool:
        return True

    def create_op(self, graph: sg.Graph, options: Any) -> sg.SubgraphOp:
        return ConstantOp(graph, self.number)


class Two(Constant):
    number = 2.0


class ConstantOp(sg.SubgraphOp):
    def __init__(self, subgraph: sg.Graph, number: float) -> None:
        super().__init__(subgraph)
        self.number = number

    def forward(self, inputs: list[Any]) -> list[Any]:
        return [np.full_like(inputs[0], self.number)]


def test_runs_alternate() -> None:
    core = sg.Core()
    for name, device in (("TURNS", Turns), ("ONE", Constant), ("TWO", Two)):
        core.register_device(name, device)
    x = sg.input("x", (2,))
    model = core.compile_model(sg.Graph([x], [ops.Neg(x)]), "TURNS:ONE,TWO")
    assert [model(np.zeros(2, np.float32))[0][0] for _ in range(4)] == [1, 2, 1, 2]
    assert model.execution_devices == ["ONE", "TWO"]


def test_an_exported_model_is_that_of_the_first_device() -> None:
    """Without an ``export_model`` of its own, a file could never be imported as it is."""
    core = sg.Core()
    core.register_device("TURNS", Turns)
    sg.testing.check_device("TURNS:CPU,REFERENCE", core=core, only=["export"])
