"""The blocks (biconnected components) of a graph, as a block-cut tree.

Two blocks share at most one node, a cut vertex, and every path from one to the other goes through
cut vertices. An edge is in the one block that holds both its nodes.

The algorithm is that of J. Hopcroft and R. Tarjan, "Algorithm 447: efficient algorithms for graph
manipulation" (Communications of the ACM 16, 1973), without recursion: a depth-first search, in
which a node closes a block below its parent if its subtree reaches no node before the parent. It
takes linear time.
"""

from __future__ import annotations

from subgraph.partition.search.structures import Blocks, ContractedGraph, PerNode


def find_blocks(graph: ContractedGraph, blocks: Blocks, count: int) -> None:
    """Find the blocks of the contracted graph, whose edges count as undirected.

    Args:
        graph: The contracted graph.
        blocks: Gets the blocks.
        count: Number of nodes.
    """
    time = 1
    blocks.count = 0
    for root in range(count):
        if blocks.discovered[root] or graph.representative[root] != root:
            continue
        time = _discover(blocks, root, -1, time)
        blocks.path[0] = root
        depth = 1
        pending = 0
        while depth:
            node = blocks.path[depth - 1]
            neighbour = next_neighbour(graph, blocks.cursor, node)
            if neighbour >= 0:
                neighbour = graph.representative[neighbour]
                if not blocks.discovered[neighbour]:
                    time = _discover(blocks, neighbour, node, time)
                    blocks.pending[pending] = neighbour
                    pending += 1
                    blocks.path[depth] = neighbour
                    depth += 1
                elif neighbour != blocks.parent[node]:
                    blocks.low[node] = min(blocks.low[node], blocks.discovered[neighbour])
                continue
            depth -= 1
            parent = blocks.parent[node]
            if parent < 0:
                continue
            if blocks.low[node] < blocks.discovered[parent]:
                blocks.low[parent] = min(blocks.low[parent], blocks.low[node])
            else:
                pending = _close_block(blocks, parent, node, pending)


def _discover(blocks: Blocks, node: int, parent: int, time: int) -> int:
    """Visit ``node`` from ``parent`` for the first time; return the time of the next visit."""
    blocks.discovered[node] = blocks.low[node] = time
    blocks.parent[node] = parent
    blocks.cursor[node] = 0
    return time + 1


def _close_block(blocks: Blocks, top: int, node: int, pending: int) -> int:
    """Make a block of ``top`` and the pending nodes from ``node`` on.

    Args:
        blocks: Gets the block.
        top: The block's first node.
        node: Its second node, in the order of the search.
        pending: Number of pending nodes.

    Returns:
        The number of pending nodes that are left.
    """
    block = blocks.count
    used = blocks.end[block - 1] if block else 0
    blocks.count += 1
    blocks.top[block] = top
    blocks.next_sibling[block] = blocks.first_child[top]
    blocks.first_child[top] = block + 1
    blocks.begin[block] = used
    member = -1
    while member != node:
        pending -= 1
        member = blocks.pending[pending]
        blocks.nodes[used] = member
        used += 1
        blocks.parent_block[member] = block + 1
    blocks.end[block] = used
    return pending


def next_neighbour(graph: ContractedGraph, cursor: PerNode, node: int) -> int:
    """Return the next consumer of a node, then the next producer; -1 after the last one.

    Args:
        graph: The contracted graph.
        cursor: For each node the number of neighbours that were returned; increased by one.
        node: The node.
    """
    edge = cursor[node]
    cursor[node] = edge + 1
    consumer_count = graph.out_end[node] - graph.out_begin[node]
    if edge < consumer_count:
        return graph.consumers[graph.out_begin[node] + edge]
    edge += graph.in_begin[node] - consumer_count
    if edge < graph.in_end[node]:
        return graph.producers[edge]
    return -1
