"""Biconnected blocks of a graph: Hopcroft and Tarjan's algorithm (1973), without recursion."""

from __future__ import annotations

from collections.abc import Sequence

Links = Sequence[Sequence[int]]


def find_blocks(
    ins: Links, outs: Links, rep: Sequence[int]
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the blocks of the undirected graph, and for each node the numbers of its blocks.

    Two blocks share at most one node, and every way from one to the other goes through such nodes.
    A link between two nodes is in the one block that holds both.

    Args:
        ins: Producers of each node.
        outs: Consumers of each node.
        rep: The node that stands for each node; only those that stand for themselves count.
    """
    count = len(rep)
    blocks: list[list[int]] = []
    blocks_of: list[list[int]] = [[] for _ in range(count)]
    found = [-1] * count
    low = [0] * count
    parent = [-1] * count
    time = 0
    for root in range(count):
        if found[root] >= 0 or rep[root] != root:
            continue
        found[root] = low[root] = time
        time += 1
        passed = [root]
        stack = [(root, iter((*outs[root], *ins[root])))]
        while stack:
            node, links = stack[-1]
            for other in links:
                there = rep[other]
                if found[there] < 0:
                    found[there] = low[there] = time
                    time += 1
                    parent[there] = node
                    passed.append(there)
                    stack.append((there, iter((*outs[there], *ins[there]))))
                    break
                if found[there] < low[node] and there != parent[node]:
                    low[node] = found[there]
            else:
                stack.pop()
                above = parent[node]
                if above < 0:
                    continue
                if low[node] < found[above]:
                    low[above] = min(low[above], low[node])
                    continue
                start = len(passed) - 1
                while passed[start] != node:
                    start -= 1
                block = [above, *passed[start:]]
                del passed[start:]
                for member in block:
                    blocks_of[member].append(len(blocks))
                blocks.append(block)
    return blocks, blocks_of
