"""Strategy ``selector``: grow a region from a start node breadth first, asking the selector.

The order is MXNet's: from each node first its producers in input order, then its consumers in
topological order; a node refused over one edge may be asked again over another. Other than MXNet's,
growth does not continue from a candidate with a path to or from an earlier candidate over a node
that cannot join. At the lower end of the path the candidate waits, and continues if the node on the
path joins later; at the upper end it is barred. So the region stays near its start, growth does not
run through the rest of the graph, and the candidates are convex when it ends. `search.frontier`
maintains this; here the selector is asked.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

from subgraph.partition.search.region_growth import PRODUCERS
from subgraph.partition.search.search import Search
from subgraph.partition.selector import SubgraphSelector
from subgraph.partition.selector_driver import INPUT, OUTPUT, SelectorDriver


def grow(
    driver: SelectorDriver, search: Search, via: array[int], selector: SubgraphSelector, start: int
) -> tuple[list[int], list[int]]:
    """Grow a region from ``start`` by the answers of ``selector``; see `Search.grown`.

    Args:
        driver: Checks the selector's answers.
        search: The search, which knows the free nodes.
        via: Gets for each candidate the node from which it was found; for the start, itself.
        selector: The selector of the region.
        start: The start node.
    """
    # The search runs as compiled code and stops whenever it needs answers, so the selector, which
    # is Python, is asked about all neighbours of one side of a node between two calls.
    nodes, forced, refuse = driver.work.nodes, driver.work.forced, driver.refusals.append
    command, asked, answers, run = search.command, search.asked, search.answers, search.run
    question: Callable[[Any, Any], Any]
    via[start] = start
    count = search.begin_growth(start)
    while count:
        node = command[1]
        this = nodes[node]
        if command[2] == PRODUCERS:
            method, question = INPUT, selector.select_input
        else:
            method, question = OUTPUT, selector.select_output
        for k in range(count):
            other = asked[k]
            try:
                answer = True if forced[other] else question(this, nodes[other])
            except Exception as error:
                driver.fail(selector, method, node, other, error)
            if answer is True or (
                answer is not False and driver.is_yes(answer, selector, method, node, other)
            ):
                answers[k] = 1
                via[other] = node
            else:
                refuse((other, method, node, answer))
        count = run()
    return search.grown()
