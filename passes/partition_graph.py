"""The pass PartitionGraph: cuts a graph by the properties in its attributes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from subgraph.errors import PartitionError
from subgraph.graph.graph import Graph
from subgraph.partition.driver import partition
from subgraph.partition.options import Options
from subgraph.partition.property import properties_from
from subgraph.partition.search.backend import SearchCode, use_code
from subgraph.transform.pass_manager import register_pass


def _compiled_search() -> SearchCode:
    from subgraph.engine.program.search_code import CompiledSearch  # small graphs need none of it

    return CompiledSearch()


use_code(_compiled_search)


@register_pass("PartitionGraph")
def partition_graph(
    graph: Graph,
    *,
    properties: Any = None,
    strategy: str | None = None,
    min_size: int | None = None,
    max_subgraphs: int | None = None,
    include: Iterable[str] | None = None,
    exclude: Iterable[str] | None = None,
    **options: Any,
) -> Graph:
    """Partition ``graph`` and return the new graph, regions replaced by subgraph nodes.

    Args:
        graph: Its attribute ``"subgraph_property"`` holds a property, a selector, a class of these
            or a registered name, or a list of such, applied in order.
        properties: The same, instead of the attribute.
        strategy: Order of growth, "selector" or "hetero"; None: the choice of each property.
        min_size: Regions of fewer nodes are not replaced; None: the choice of each property.
        max_subgraphs: At most so many regions of each property, the largest, are replaced; None:
            the choice of each property.
        include: Names of nodes that join regions although no selector is asked.
        exclude: Names of nodes that stay outside of regions.
        **options: Passed to the properties' own ``pre_partition``.

    Raises:
        PartitionError: there is no property, an option does not fit, or a selector or property
            raised or answered with an unexpected type.
    """
    found = graph.attrs.get("subgraph_property") if properties is None else properties
    if found is None:
        raise PartitionError(
            f"graph {graph.name!r} has no property: set graph.attrs['subgraph_property'] to a "
            "SubgraphProperty, a selector or a registered name (or a list), or call "
            "sg.optimize_for(graph, name)"
        )
    chosen = Options(
        strategy=strategy,
        min_size=min_size,
        max_subgraphs=max_subgraphs,
        include=include,
        exclude=exclude,
        more=options,
    )
    return partition(graph, properties_from(found), chosen)
