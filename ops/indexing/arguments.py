"""Arguments of the kernels that take and put elements by index."""

from __future__ import annotations

from subgraph.engine.codegen.arguments import Address, KernelArguments


class SegmentSumArguments(KernelArguments):
    """Arguments of `segment_sum`; a work unit is a bag.

    Attributes:
        rows: First element of the rows, which are contiguous.
        offsets: Where the bags begin and the last one ends, int64.
        y: First element of the sums, a row for each bag.
        count: Number of rows.
        columns: Elements of a row.
    """

    rows: Address
    offsets: Address
    y: Address
    count: int
    columns: int
