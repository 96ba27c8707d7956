"""SegmentSum on the CPU device: one unit is a bag."""

from __future__ import annotations

from subgraph.engine.planner.lowering import Lowering, Unsupported, lowering
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.graph import Node
from subgraph.graph.symbolic import larger
from subgraph.operators.schema import INTERNAL_DOMAIN

from .arguments import SegmentSumArguments

_WORK = 8192  # numbers that are worth a thread


@lowering("SegmentSum", domain=INTERNAL_DOMAIN, dtypes=("float32", "float64"))
def segment_sum(node: Node, low: Lowering) -> None:
    """Lower the sums, and the means."""
    rows, offsets, y = low.given(0), low.given(1), low.output()
    if offsets.dtype != "int64":
        raise Unsupported(f"SegmentSum with offsets of {offsets.dtype}")
    if y.size == 0:
        return
    kernel = Kernel(
        "subgraph.ops.indexing.segment_kernels",
        "segment_sum",
        dtype=rows.dtype,
        lanes=low.lanes(rows.dtype),
        mean=bool(node.attrs.get("mean", 0)),
    )
    arguments = SegmentSumArguments(
        rows=rows, offsets=offsets, y=y, count=rows.shape[0], columns=rows.shape[1]
    )
    each = larger(1, rows.size // larger(1, y.shape[0]))
    low.emit(
        kernel,
        arguments,
        y.shape[0],
        grain=larger(1, _WORK // each),
        flops=rows.size,
        bytes=rows.nbytes + y.nbytes,
    )
