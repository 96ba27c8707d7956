"""OPENCL: regions as kernel launches on a GPU or another OpenCL device, such as PoCL's CPU.

Hardware is searched at the first use of the device. Graphs are fused and planned as for CPU, with
the lowerings in ``ops/<family>/opencl.py``. CPU and REFERENCE run nodes without a kernel.
"""

from __future__ import annotations

from typing import Any, ClassVar

import attrs
import numpy as np

from subgraph.devices.device import Device
from subgraph.devices.model_input import region_form
from subgraph.devices.query import PreparedGraph
from subgraph.engine.planner.dry_run import dry_run
from subgraph.engine.planner.plan_types import PlanOptions
from subgraph.engine.region.region_op import Guards, RegionOptions
from subgraph.errors import ConfigError, DeviceError
from subgraph.graph.graph import Graph
from subgraph.graph.parameters import Parameter
from subgraph.opencl.lowering import CL_LOWERINGS, ClLowering
from subgraph.opencl.region_op import ClSubgraphOp
from subgraph.opencl.runtime import SIMULATOR, ClTraits, Runtime, find_devices, runtime
from subgraph.opencl.tuning import ClTuning, stored, tuned
from subgraph.operators.builder import input, operator, parameter
from subgraph.operators.subgraph_op import SubgraphOp
from subgraph.runtime.settings import DeviceOptions, option
from subgraph.system.registry import Registry
from subgraph.transform.pass_manager import apply_pass

# Rows and columns of the matrices whose product tuning measures, and runs of each choice, of which
# the shortest counts (estimates).
_TUNING_SIZE = 768
_TUNING_RUNS = 5


@attrs.frozen
class OpenclOptions(DeviceOptions):
    """Options of OPENCL."""

    FUSION: bool = option(True, "fuse operators into one kernel where that is possible")
    KERNELS: str = option(
        "AUTO",
        "kernels for a GPU or a CPU; AUTO: by the type of the device",
        values=("AUTO", "CPU", "GPU"),
    )
    TUNE: bool = option(
        False, "measure sizes of blocks and groups once, and store the best on disk"
    )
    PLAN_CACHE_SIZE: int = option(8, "sets of input shapes whose plans are cached", minimum=1)


class OpenclDevice(Device):
    """The OpenCL devices of this machine; ``OPENCL`` is the first, ``OPENCL.1`` the second."""

    options_class: ClassVar[type[DeviceOptions]] = OpenclOptions
    fallback: ClassVar[tuple[str, ...]] = ("CPU", "REFERENCE")
    lowerings: ClassVar[Registry[Any] | None] = CL_LOWERINGS

    def start(self) -> None:
        """Find the devices."""
        find_devices()

    def device_ids(self) -> list[str]:
        """Return "0", "1", ...: positions among the machine's devices, GPUs first."""
        try:
            return [str(k) for k in range(len(find_devices()))]
        except DeviceError:
            return []

    def transform(self, graph: Graph, options: DeviceOptions) -> Graph:
        """Return the fused graph."""
        assert isinstance(options, OpenclOptions)
        return fuse(graph, options)[0]

    def _prepare(self, graph: Graph, options: DeviceOptions) -> PreparedGraph:
        assert isinstance(options, OpenclOptions)
        fused = self.transform(graph, options)
        return PreparedGraph(fused, dry_run(fused, self._plan_options(options)).refused)

    def _op_for(self, graph: Graph, options: DeviceOptions) -> SubgraphOp:
        # The op fuses the graph itself, and again if a constant changes that a fusion depends on.
        return self.create_op(graph, options)

    def create_op(self, graph: Graph, options: DeviceOptions) -> SubgraphOp:
        """Return the op that runs ``graph``."""
        assert isinstance(options, OpenclOptions)
        region = RegionOptions(
            plan=self._plan_options(options),
            plans=options.PLAN_CACHE_SIZE,
            profiling=options.ENABLE_PROFILING,
            compile_seconds=options.COMPILE_TIMEOUT,
        )
        op = ClSubgraphOp(graph, region, lambda inner: fuse(inner, options), self._runtime(options))
        op.device = self.name
        op.fusion = f"FUSION={options.FUSION}"
        return op

    def _runtime(self, options: DeviceOptions) -> Runtime:
        chosen, ids = options.DEVICE_ID or "0", self.device_ids()
        if ids and chosen not in ids:
            raise ConfigError(
                f"{self.name}: option 'DEVICE_ID' is {chosen!r}; this machine has the ids "
                f"{', '.join(ids)}"
            )
        return runtime(int(chosen))

    def optimal_requests(self, options: DeviceOptions) -> int:
        """Return 2: the inputs of one request are uploaded while another is computed."""
        return 2

    def _plan_options(self, options: OpenclOptions) -> PlanOptions:
        found = self._runtime(options)
        traits = found.traits
        if options.KERNELS != "AUTO":
            traits = attrs.evolve(traits, is_gpu=options.KERNELS == "GPU")
        if options.TUNE:
            tuning = tuned(found, lambda choice: _product_seconds(found, traits, choice))
        else:
            tuning = stored(found) or ClTuning()
        return _plan_options(traits, tuning)

    def metrics(self) -> dict[str, Any]:
        """Return the read-only properties."""
        found = self._runtime(self.options_for(None))
        kind = "gpu" if found.traits.is_gpu else "cpu"
        capabilities = ["FP32", "EXPORT_IMPORT"]
        capabilities += ["FP64"] if found.traits.fp64 else []
        capabilities += ["FP16"] if found.traits.fp16 else []
        return {
            **super().metrics(),
            "FULL_DEVICE_NAME": found.name,
            "DEVICE_TYPE": "simulator" if found.device.platform.name == SIMULATOR else kind,
            "DEVICE_ARCHITECTURE": found.device.version.strip(),
            "OPTIMIZATION_CAPABILITIES": capabilities,
        }

    def version(self) -> str:
        """Return the versions of Subgraph and of the driver."""
        driver = self._runtime(self.options_for(None)).device.driver_version
        return f"{super().version()}, driver {driver.strip()}"


def fuse(graph: Graph, options: OpenclOptions) -> tuple[Graph, Guards]:
    """Return the graph that the device plans, in its fused form.

    Args:
        graph: The graph of a region; it is not changed.
        options: Options of OPENCL.

    Returns:
        The fused graph, and the parameters whose values its form depends on, with their versions.
    """
    guards: dict[Parameter, int] = {}
    graph = region_form(graph, guards)
    graph = apply_pass(graph, "WidenHalf", rules=CL_LOWERINGS)
    if options.FUSION:
        graph = apply_pass(graph, "CpuFusion", guards=guards, integers=False)
    return graph, tuple(guards.items())


def _plan_options(traits: ClTraits, tuning: ClTuning) -> PlanOptions:
    properties = {"traits": traits, "tuning": tuning}
    return PlanOptions(blocked=False, properties=properties, lowering=ClLowering)


def _product_seconds(found: Runtime, traits: ClTraits, tuning: ClTuning) -> float:
    """Return the least seconds of a few runs of a matrix product.

    Args:
        found: The device's runtime.
        traits: The device's traits.
        tuning: The sizes of blocks and groups to measure.
    """
    size = _TUNING_SIZE
    matrix = np.ones((size, size), np.float32)
    x = input("x", (size, size), "float32")
    graph = Graph(inputs=[x], outputs=[operator("MatMul")(x, parameter("w", matrix))])
    region = RegionOptions(plan=_plan_options(traits, tuning), profiling=True)
    op = ClSubgraphOp(graph, region, lambda inner: fuse(inner, OpenclOptions()), found)
    session = op.session()
    best = float("inf")
    for _ in range(_TUNING_RUNS):
        session([matrix])
        # The minimum is the measurement that other work on the machine disturbed least; the first
        # run also builds the programs.
        best = min(best, sum(entry.seconds for entry in session.profile()))
    return best
