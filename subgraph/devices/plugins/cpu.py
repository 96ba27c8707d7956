"""CPU: regions as programs of compiled kernels on this machine's cores.

`CpuDevice.transform` fuses operators (the pass ``CpuFusion``). A query makes a dry run of the
lowerings. `CpuDevice.create_op` makes an op of `subgraph.engine.cpu.region_op`. Nodes without a
kernel run on REFERENCE.
"""

from __future__ import annotations

import platform
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

import attrs

from subgraph.devices.device import Device
from subgraph.devices.model_input import region_form
from subgraph.devices.query import PreparedGraph
from subgraph.dtypes import DTYPES, HALF_FLOATS
from subgraph.engine.cpu.region_op import CpuSubgraphOp
from subgraph.engine.cpu.region_options import CpuRegionOptions
from subgraph.engine.planner.dry_run import dry_run
from subgraph.engine.planner.lowering import LOWERINGS
from subgraph.engine.planner.plan_types import PlanOptions
from subgraph.engine.program import pool
from subgraph.engine.region.region_op import Guards
from subgraph.graph.graph import Graph, Value
from subgraph.graph.parameters import Parameter
from subgraph.graph.types import TensorType
from subgraph.operators.subgraph_op import SubgraphOp
from subgraph.passes.fuse.blockwise import is_blockwise
from subgraph.passes.shapes.independent_rows import independent_form
from subgraph.runtime.control_flow import is_branching
from subgraph.runtime.settings import DeviceOptions, option
from subgraph.system import host
from subgraph.system.registry import Registry
from subgraph.transform.pass_manager import Checks, apply_pass

# Options on which the fused form of a graph depends.
_FUSION_OPTIONS = ("FUSION", "WEIGHTS_PRECISION", "DYNAMIC_QUANTIZATION_GROUP_SIZE")
_COMPRESSED = ("int8", "int4")  # values of ``WEIGHTS_PRECISION``: dtypes of numbers in blocks


@attrs.frozen
class CpuOptions(DeviceOptions):
    """Options of CPU."""

    INFERENCE_NUM_THREADS: int = option(
        0, "threads of all streams together; 0: one for each core", minimum=0, maximum=1024
    )
    NUM_STREAMS: int = option(
        0, "requests that run at the same time; 0: by PERFORMANCE_HINT", minimum=0, maximum=1024
    )
    FUSION: bool = option(True, "fuse operators into one kernel where that is possible")
    BLOCKED_LAYOUT: bool = option(True, "run convolutions in the blocked layout NCHWc")
    WINOGRAD: bool = option(True, "allow Winograd convolution, with slightly different rounding")
    WEIGHTS_PRECISION: str = option(
        "",
        "dtype that holds float32 weights: bfloat16 those of matrix products and convolutions, "
        "int8 and int4 those of matrix products, with a scale for each block; empty: the model's",
        values=("", "bfloat16", *_COMPRESSED),
    )
    DYNAMIC_QUANTIZATION_GROUP_SIZE: int = option(
        0,
        "in products with weights of 2 to 8 bits, round the other operand to int8, with a scale "
        "for each so many elements of a row at most; 0: only where the model allows it",
        minimum=0,
    )
    BATCH_ROWS: int = option(
        0,
        "rows of a batch that run at a time in models that compute rows independently; 0: by the "
        "sizes of values and weights",
        minimum=0,
    )
    PLAN_CACHE_SIZE: int = option(64, "sets of input shapes whose plans are cached", minimum=1)


class CpuDevice(Device):
    """The cores of this machine."""

    options_class: ClassVar[type[DeviceOptions]] = CpuOptions
    fallback: ClassVar[tuple[str, ...]] = ("REFERENCE",)
    lowerings: ClassVar[Registry[Any] | None] = LOWERINGS

    def transform(self, graph: Graph, options: DeviceOptions) -> Graph:
        """Return the fused graph."""
        assert isinstance(options, CpuOptions)
        return fuse(graph, options)[0]

    def _prepare(self, graph: Graph, options: DeviceOptions) -> PreparedGraph:
        assert isinstance(options, CpuOptions)
        fused, guards = fuse(graph, options)
        found = dry_run(fused, plan_options(options))
        return PreparedGraph(fused, found.refused, (guards, found))

    def _op_for(self, graph: Graph, options: DeviceOptions) -> SubgraphOp:
        # The op fuses the graph itself, and again if a constant changes that a fusion depends on.
        return self.create_op(graph, options)

    def _use_prepared(self, op: SubgraphOp, prepared: PreparedGraph) -> None:
        assert isinstance(op, CpuSubgraphOp)
        op.adopt(prepared.graph, *prepared.found)

    def create_op(self, graph: Graph, options: DeviceOptions) -> SubgraphOp:
        """Return the op that runs ``graph``."""
        assert isinstance(options, CpuOptions)
        threads = threads_per_stream(options)
        region = CpuRegionOptions(
            plan=plan_options(options),
            pools=_pools(streams(options), threads) if threads > 1 else (),
            plans=options.PLAN_CACHE_SIZE,
            profiling=options.ENABLE_PROFILING,
            compile_seconds=options.COMPILE_TIMEOUT,
            rows=options.BATCH_ROWS,
            independent=independent_form,
        )
        op = CpuSubgraphOp(graph, region, lambda inner: fuse(inner, options))
        op.device = self.name
        op.fusion = " ".join(f"{name}={getattr(options, name)}" for name in _FUSION_OPTIONS)
        return op

    def optimal_requests(self, options: DeviceOptions) -> int:
        """Return the number of streams."""
        assert isinstance(options, CpuOptions)
        return streams(options)

    def metrics(self) -> dict[str, Any]:
        """Return the read-only properties."""
        bfloat16 = ["BF16"] if host.multiplies_bfloat16() else []
        return {
            **super().metrics(),
            "FULL_DEVICE_NAME": _processor_name(),
            "DEVICE_ARCHITECTURE": f"{platform.machine()} {host.isa().name}",
            "OPTIMIZATION_CAPABILITIES": [
                "FP32",
                "FP64",
                *bfloat16,
                "INT8",
                "BIN",
                "EXPORT_IMPORT",
            ],
            "RANGE_FOR_STREAMS": (1, host.core_count()),
        }

    def version(self) -> str:
        """Return the versions of Subgraph and of the compilers of its kernels."""
        from importlib.metadata import version

        compilers = (f"{name} {version(name)}" for name in ("numba", "llvmlite"))
        return ", ".join((super().version(), *compilers))

    def request_range(self) -> tuple[int, int, int]:
        """Return up to one request for each core."""
        return 1, host.core_count(), 1


def fuse(graph: Graph, options: CpuOptions, prefix: str = "") -> tuple[Graph, Guards]:
    """Return the graph that the device plans, in its fused form.

    Args:
        graph: The graph of a region, or a branch of an If in it; it is not changed.
        options: Options of CPU.
        prefix: What names of new parameters begin with; no other branch has the same.

    Returns:
        The fused graph, and the parameters whose values its form depends on, with their versions.
    """
    guards: dict[Parameter, int] = {}
    size = options.DYNAMIC_QUANTIZATION_GROUP_SIZE
    graph = region_form(graph, guards, partial(_with_few_bits, group_size=size, prefix=prefix))
    if options.WEIGHTS_PRECISION in _COMPRESSED:
        bits = DTYPES[options.WEIGHTS_PRECISION].bits
        graph = apply_pass(
            graph, "BlockwiseProducts", group_size=size, compress=bits, prefix=prefix
        )
    _fuse_branches(graph, options, prefix, guards)
    if any(_is_half(value) for value in graph.values()):
        graph = apply_pass(graph, "WidenHalf")
    if options.FUSION:
        # The passes inside share one copy of the graph; only the final result is verified.
        with Checks(input=False, output=False):
            graph = apply_pass(graph, "CpuFusion", guards=guards, prefix=prefix)
        graph.verify()
    return graph, tuple(guards.items())


def _with_few_bits(graph: Graph, group_size: int, prefix: str) -> Graph:
    """Return the graph in which weights of few bits, as the model has them, stay packed."""
    if not any(map(is_blockwise, graph.nodes)):
        return graph
    return apply_pass(graph, "BlockwiseProducts", group_size=group_size, prefix=prefix)


def _fuse_branches(
    graph: Graph, options: CpuOptions, prefix: str, guards: dict[Parameter, int]
) -> None:
    """Fuse the branches of Ifs, which become parts of the program.

    Constants in them become parameters of the graph. Their names begin with the path of the branch,
    since a constant in another branch, or in the graph around it, may have the same name.
    """
    branching = [node for node in graph.nodes if is_branching(node)]
    for node in branching:
        for key, body in node.attrs.items():
            if isinstance(body, Graph):
                node.attrs[key], read = fuse(body, options, f"{prefix}{node.name}/{key}/")
                guards.update(read)
    if branching:
        graph.refresh_parameters()


def _is_half(value: Value) -> bool:
    return isinstance(value.type, TensorType) and value.type.dtype in HALF_FLOATS


def plan_options(options: CpuOptions) -> PlanOptions:
    """Return the options on which plans depend."""
    names = ("INFERENCE_PRECISION", "WINOGRAD", "WEIGHTS_PRECISION")
    properties = {name: getattr(options, name) for name in names}
    return PlanOptions(
        threads=threads_per_stream(options), blocked=options.BLOCKED_LAYOUT, properties=properties
    )


def streams(options: CpuOptions) -> int:
    """Return the number of concurrent requests for which the device has threads."""
    if options.NUM_STREAMS:
        return options.NUM_STREAMS
    if options.PERFORMANCE_HINT == "THROUGHPUT":
        return options.PERFORMANCE_HINT_NUM_REQUESTS or _threads(options)
    return 1


@cache
def _pools(count: int, threads: int) -> tuple[pool.Pool, ...]:
    """Return the thread pools, shared by the process, of a number of streams."""
    # `pool.shared` is the first pool of every number of streams, so that models that differ in this
    # number share its threads.
    return (pool.shared(threads), *(pool.Pool(threads) for _ in range(count - 1)))


def _threads(options: CpuOptions) -> int:
    return options.INFERENCE_NUM_THREADS or host.core_count()


def threads_per_stream(options: CpuOptions) -> int:
    """Return the number of threads of one request."""
    # The streams divide the threads, so that concurrent requests do not use more threads than there
    # are cores.
    return max(1, _threads(options) // streams(options))


@cache
def _processor_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
