"""Options of the CPU's regions."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from subgraph.engine.program.pool import Pool
from subgraph.engine.region.region_op import RegionOptions
from subgraph.graph.graph import Graph


@attrs.frozen
class CpuRegionOptions(RegionOptions):
    """How a region of the CPU is run.

    Attributes:
        pools: The thread pool of each stream; empty: steps run only on the calling thread.
        rows: Rows of a batch that run at a time, if rows are independent; 0: chosen by sizes.
        independent: Returns a graph for any number of rows that are proved to be independent, None
            if there is none; None: nothing is proved.
    """

    pools: tuple[Pool, ...] = ()
    rows: int = 0
    independent: Callable[[Graph], Graph | None] | None = None
