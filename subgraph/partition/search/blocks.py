"""Biconnected blocks of a graph: Hopcroft and Tarjan's algorithm (1973), without recursion.

Two blocks share at most one node, and every way from one to the other goes through such nodes. A
link between two nodes is in the one block that holds both.
"""

from __future__ import annotations

from subgraph.partition.search.structures import Blocks, ContractedGraph, PerNode


def find_blocks(graph: ContractedGraph, blocks: Blocks, count: int) -> None:
    """Find the blocks of the undirected contracted graph.

    Args:
        graph: The contracted graph.
        blocks: Gets the blocks.
        count: Number of nodes.
    """
    used = 0
    time = 1
    blocks.count = 0
    for root in range(count):
        if blocks.discovered[root] or graph.representative[root] != root:
            continue
        time = _visit(blocks, root, -1, time)
        blocks.stack[0] = root
        depth = 1
        passed = 0
        while depth:
            node = blocks.stack[depth - 1]
            link = next_neighbour(graph, blocks.cursor, node)
            if link >= 0:
                there = graph.representative[link]
                if not blocks.discovered[there]:
                    time = _visit(blocks, there, node, time)
                    blocks.passed[passed] = there
                    passed += 1
                    blocks.stack[depth] = there
                    depth += 1
                elif blocks.discovered[there] < blocks.low[node] and there != blocks.parent[node]:
                    blocks.low[node] = blocks.discovered[there]
                continue
            depth -= 1
            above = blocks.parent[node]
            if above < 0:
                continue
            if blocks.low[node] < blocks.discovered[above]:
                blocks.low[above] = min(blocks.low[above], blocks.low[node])
                continue
            block = blocks.count
            blocks.count += 1
            blocks.top[block] = above
            blocks.next_block[block] = blocks.first_block[above]
            blocks.first_block[above] = block + 1
            blocks.begin[block] = used
            while True:
                passed -= 1
                member = blocks.passed[passed]
                blocks.nodes[used] = member
                used += 1
                blocks.home[member] = block + 1
                if member == node:
                    break
            blocks.end[block] = used


def _visit(blocks: Blocks, node: int, parent: int, time: int) -> int:
    blocks.discovered[node] = blocks.low[node] = time
    blocks.parent[node] = parent
    blocks.cursor[node] = 0
    return time + 1


def next_neighbour(graph: ContractedGraph, cursor: PerNode, node: int) -> int:
    """Return the next consumer of a node, then the next producer; -1 after the last one.

    Args:
        graph: The contracted graph.
        cursor: For each node the number of neighbours that were returned; increased by one.
        node: The node.
    """
    at = cursor[node]
    cursor[node] = at + 1
    outs = graph.out_end[node] - graph.out_at[node]
    if at < outs:
        return graph.out_links[graph.out_at[node] + at]
    at += graph.in_at[node] - outs
    if at < graph.in_end[node]:
        return graph.in_links[at]
    return -1
