"""Biconnected blocks of a graph: Hopcroft and Tarjan's algorithm (1973), without recursion.

Two blocks share at most one node, and every way from one to the other goes through such nodes. A
link between two nodes is in the one block that holds both.

Tables: block b has the node ``top[b]`` and ``block_list[block_at[b]:block_end[b]]``. Every node has
one block in which it is not the top, ``home`` (plus one); those in which it is the top are
``first_block`` (plus one) and what follows it in ``next_block`` (plus one).
"""

from __future__ import annotations

from subgraph.partition.search.tables import Tables


def find_blocks(s: Tables, count: int) -> None:
    """Find the blocks of the undirected contracted graph of ``count`` nodes."""
    used = 0
    time = 1
    s.blocks = 0
    for root in range(count):
        if s.found[root] or s.rep[root] != root:
            continue
        time = _visit(s, root, -1, time)
        s.stack[0] = root
        depth = 1
        passed = 0
        while depth:
            node = s.stack[depth - 1]
            link = next_neighbour(s, node)
            if link >= 0:
                there = s.rep[link]
                if not s.found[there]:
                    time = _visit(s, there, node, time)
                    s.passed[passed] = there
                    passed += 1
                    s.stack[depth] = there
                    depth += 1
                elif s.found[there] < s.low[node] and there != s.parent[node]:
                    s.low[node] = s.found[there]
                continue
            depth -= 1
            above = s.parent[node]
            if above < 0:
                continue
            if s.low[node] < s.found[above]:
                s.low[above] = min(s.low[above], s.low[node])
                continue
            block = s.blocks
            s.blocks += 1
            s.top[block] = above
            s.next_block[block] = s.first_block[above]
            s.first_block[above] = block + 1
            s.block_at[block] = used
            while True:
                passed -= 1
                member = s.passed[passed]
                s.block_list[used] = member
                used += 1
                s.home[member] = block + 1
                if member == node:
                    break
            s.block_end[block] = used


def _visit(s: Tables, node: int, parent: int, time: int) -> int:
    s.found[node] = s.low[node] = time
    s.parent[node] = parent
    s.cursor[node] = 0
    return time + 1


def next_neighbour(s: Tables, node: int) -> int:
    """Return the next consumer of a node, or after these the next producer; -1 after the last."""
    at = s.cursor[node]
    s.cursor[node] = at + 1
    outs = s.out_end[node] - s.out_at[node]
    if at < outs:
        return s.out_links[s.out_at[node] + at]
    at += s.in_at[node] - outs
    if at < s.in_end[node]:
        return s.in_links[at]
    return -1
