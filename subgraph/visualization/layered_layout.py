"""The layered drawing of an acyclic graph: boxes in ranks from top to bottom, edges between them.

The steps are those of Sugiyama, Tagawa and Toda, "Methods for Visual Understanding of Hierarchical
System Structures" (1981): ranks, an order within each rank with few crossings, coordinates. Edges
over several ranks pass through bends, which are vertices without a size; all edges of one source
share them, so that a mask that a hundred nodes read is one line. The horizontal coordinates are
those of Brandes and Köpf, "Fast and Simple Horizontal Coordinate Assignment" (2001), by which long
edges and chains of nodes are straight. Nothing recurses.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence
from itertools import pairwise

import attrs

# Distances in the unit of the boxes' sizes, pixels of a drawing that is not scaled: between two
# boxes of a rank, between two bends, and between ranks.
BOX_GAP = 22.0
BEND_GAP = 10.0
RANK_GAP = 30.0
# Passes over all ranks that reorder each; later ones change little (estimate). Long edges of large
# graphs have many bends: at most this number of vertices is ordered in all passes together, which
# takes about a second (estimate).
_PASSES = 8
_ORDERED_VERTICES = 300_000

Point = tuple[float, float]


@attrs.frozen(eq=False)
class Layout:
    """Where boxes and edges lie; x grows to the right, y downward.

    Attributes:
        corners: The upper left corner of each box.
        routes: For each edge its points, from the lower edge of the source to the upper edge of the
            target. Between two points of one x the line is straight; else it crosses the gap
            between two ranks.
        width: Width of the whole drawing, from 0.
        height: Its height, from 0.
    """

    corners: list[Point]
    routes: list[list[Point]]
    width: float
    height: float


def layered_layout(
    sizes: Sequence[Point], edges: Sequence[tuple[int, int]], inputs: int = 0
) -> Layout:
    """Lay out an acyclic graph.

    Args:
        sizes: Width and height of each box.
        edges: Source and target of each edge, numbers of boxes; boxes are numbered in topological
            order. An edge may occur several times.
        inputs: Number of boxes, the first ones, that are the inputs of the graph. Boxes that depend
            on none of them, such as constants, stand as low as their users allow.
    """
    if not sizes:
        return Layout([], [], 0.0, 0.0)
    ranks, floats = _ranks(len(sizes), edges, inputs)
    vertices = _Vertices(ranks, floats, edges)
    _reduce_crossings(vertices)
    widths = [width for width, _ in sizes] + [0.0] * (len(vertices.rank) - len(sizes))
    x = _horizontal(vertices, widths, len(sizes))
    left = min(x[v] - widths[v] / 2 for v in range(len(widths)))
    x = [at - left for at in x]
    tops, bottoms = _vertical(vertices.order, [height for _, height in sizes])
    corners = [(x[v] - widths[v] / 2, tops[ranks[v]]) for v in range(len(sizes))]
    routes: list[list[Point]] = []
    for (source, target), bends in zip(edges, vertices.bends, strict=True):
        points = [(x[source], tops[ranks[source]] + sizes[source][1])]
        if sizes[source][1] < bottoms[ranks[source]] - tops[ranks[source]]:
            points.append((x[source], bottoms[ranks[source]]))
        for bend in bends:
            points.append((x[bend], tops[vertices.rank[bend]]))
            points.append((x[bend], bottoms[vertices.rank[bend]]))
        points.append((x[target], tops[ranks[target]]))
        routes.append(points)
    right = max(x[v] + widths[v] / 2 for v in range(len(widths)))
    return Layout(corners, routes, right, bottoms[-1])


def _ranks(
    count: int, edges: Sequence[tuple[int, int]], inputs: int
) -> tuple[list[int], list[bool]]:
    """Return the rank of each box, 1 more than that of its last source, and which boxes float.

    Boxes float that depend on no input; see `layered_layout`.
    """
    ranks = [0] * count
    users: list[list[int]] = [[] for _ in range(count)]
    is_fixed = bytearray(count)
    is_fixed[:inputs] = b"\1" * inputs
    for source, target in edges:
        users[source].append(target)
    for box in range(count):
        for user in users[box]:
            ranks[user] = max(ranks[user], ranks[box] + 1)
            is_fixed[user] |= is_fixed[box]
    for box in reversed(range(count)):
        if users[box] and (box < inputs or not is_fixed[box]):
            ranks[box] = min(ranks[user] for user in users[box]) - 1
    return ranks, [not fixed for fixed in is_fixed]


class _Vertices:
    """The boxes, the bends of long edges, and their order.

    Attributes:
        rank: Rank of each vertex; boxes come first.
        floats: For each vertex whether it depends on no input.
        above: For each vertex its neighbours in the rank above.
        below: For each vertex its neighbours in the rank below.
        bends: For each edge its bends from top to bottom.
        order: For each rank its vertices from left to right.
    """

    def __init__(
        self, ranks: Sequence[int], floats: Sequence[bool], edges: Sequence[tuple[int, int]]
    ) -> None:
        self.rank = list(ranks)
        self.floats = list(floats)
        self.above: list[list[int]] = [[] for _ in ranks]
        self.below: list[list[int]] = [[] for _ in ranks]
        self.bends: list[list[int]] = []
        chains: dict[int, list[int]] = {}
        joined: set[tuple[int, int]] = set()
        for source, target in edges:
            chain = chains.setdefault(source, [source])
            needed = ranks[target] - ranks[source]
            while len(chain) < needed:
                chain.append(self._add_bend(chain[-1]))
            last = chain[needed - 1]
            if (last, target) not in joined:
                joined.add((last, target))
                self._join(last, target)
            self.bends.append(chain[1:needed])
        self.order = self._first_order()

    def _add_bend(self, upper: int) -> int:
        bend = len(self.rank)
        self.rank.append(self.rank[upper] + 1)
        self.floats.append(self.floats[upper])
        self.above.append([])
        self.below.append([])
        self._join(upper, bend)
        return bend

    def _join(self, upper: int, lower: int) -> None:
        self.below[upper].append(lower)
        self.above[lower].append(upper)

    def _first_order(self) -> list[list[int]]:
        """Return an order in which the vertices of each branch stand together."""
        order: list[list[int]] = [[] for _ in range(max(self.rank) + 1)]
        found = bytearray(len(self.rank))
        roots = sorted(range(len(self.rank)), key=self.rank.__getitem__)
        for root in roots:
            stack = [root]
            while stack:
                vertex = stack.pop()
                if found[vertex]:
                    continue
                found[vertex] = 1
                order[self.rank[vertex]].append(vertex)
                stack.extend(reversed(self.below[vertex]))
        return order


def _reduce_crossings(vertices: _Vertices) -> None:
    """Reorder each rank by the mean position of the neighbours, alternately from above and below.

    The order with the fewest crossings stays.
    """
    order = vertices.order
    best, fewest = [list(row) for row in order], _crossings(vertices)
    passes = min(_PASSES, max(2, _ORDERED_VERTICES // len(vertices.rank)))
    for count in range(passes):
        if not fewest:
            break
        downward = count % 2 == 0
        neighbours = vertices.above if downward else vertices.below
        places = [0] * len(vertices.rank)
        for row in order if downward else reversed(order):
            centres = _centres(row, neighbours, places)
            row.sort(key=centres.__getitem__)
            for place, vertex in enumerate(row):
                places[vertex] = place
        crossings = _crossings(vertices)
        if crossings < fewest:
            best, fewest = [list(row) for row in order], crossings
    vertices.order = best


def _centres(
    row: Sequence[int], neighbours: Sequence[Sequence[int]], places: Sequence[int]
) -> dict[int, float]:
    """Return the mean place of each vertex's neighbours; its own place if it has none.

    Args:
        row: The vertices of a rank, from left to right.
        neighbours: For each vertex its neighbours in the rank that was ordered before.
        places: The place of each vertex of that rank.
    """
    centres: dict[int, float] = {}
    for place, vertex in enumerate(row):
        around = neighbours[vertex]
        total = sum(map(places.__getitem__, around))
        centres[vertex] = total / len(around) if around else float(place)
    return centres


def _crossings(vertices: _Vertices) -> int:
    """Return the number of pairs of edges that cross."""
    total = 0
    for row in vertices.order[1:]:
        upper = vertices.order[vertices.rank[row[0]] - 1] if row else []
        place = {vertex: k for k, vertex in enumerate(upper)}
        seen: list[int] = []
        for vertex in row:
            ends = [place[other] for other in vertices.above[vertex]]
            if len(ends) > 1:
                ends.sort()
            for end in ends:
                total += len(seen) - bisect_right(seen, end)
            for end in ends:
                insort(seen, end)
    return total


def _vertical(
    order: Sequence[Sequence[int]], heights: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Return the upper and the lower end of each rank."""
    tops: list[float] = []
    bottoms: list[float] = []
    at = 0.0
    for row in order:
        tops.append(at)
        at += max((heights[v] for v in row if v < len(heights)), default=0.0)
        bottoms.append(at)
        at += RANK_GAP
    return tops, bottoms


def _horizontal(vertices: _Vertices, widths: Sequence[float], boxes: int) -> list[float]:
    """Return the centre of each vertex: the mean of the middle two of four extreme placements.

    Args:
        vertices: The vertices.
        widths: Width of each vertex.
        boxes: Number of boxes; later vertices are bends.
    """
    conflicts = _conflicts(vertices, boxes)
    placements: list[list[float]] = []
    for neighbours, rows in (
        (vertices.above, vertices.order),
        (vertices.below, vertices.order[::-1]),
    ):
        for mirrored in (False, True):
            directed = [row[::-1] for row in rows] if mirrored else rows
            roots = _align(directed, neighbours, conflicts, vertices.floats)
            x = _compact(directed, roots, widths, boxes)
            placements.append([-at for at in x] if mirrored else x)
    narrowest = min(placements, key=lambda x: max(x) - min(x))
    for number, x in enumerate(placements):
        pick = max if number % 2 else min  # placements to the right end where the narrowest ends
        shift = pick(narrowest) - pick(x)
        placements[number] = [at + shift for at in x]
    return [sum(sorted(four)[1:3]) / 2 for four in zip(*placements, strict=True)]


def _conflicts(vertices: _Vertices, boxes: int) -> set[tuple[int, int]]:
    """Return the edges that cross an edge between two bends, which shall be straight."""
    found: set[tuple[int, int]] = set()
    for upper, row in pairwise(vertices.order):
        place = {vertex: k for k, vertex in enumerate(upper)}
        left, begin = 0, 0
        for number, vertex in enumerate(row):
            inner = _bend_above(vertices, vertex, boxes)
            if inner is None and number < len(row) - 1:
                continue
            right = len(upper) if inner is None else place[inner]
            for other in row[begin : number + 1]:
                for end in vertices.above[other]:
                    outside = place[end] < left or place[end] > right
                    if outside and not (end >= boxes and other >= boxes):
                        found.add((end, other))
            begin, left = number + 1, right
    return found


def _bend_above(vertices: _Vertices, vertex: int, boxes: int) -> int | None:
    if vertex < boxes:
        return None
    (above,) = vertices.above[vertex]
    return above if above >= boxes else None


def _align(
    rows: Sequence[Sequence[int]],
    neighbours: Sequence[Sequence[int]],
    conflicts: set[tuple[int, int]],
    floats: Sequence[bool],
) -> list[int]:
    """Return for each vertex the first vertex of its block; a block has one x.

    Args:
        rows: The ranks in the order of the alignment, each from the side to which it tends.
        neighbours: For each vertex those in the rank before.
        conflicts: Edges along which nothing is aligned, the upper vertex first.
        floats: Which vertices depend on no input. They have blocks of their own, so that a constant
            beside a chain of nodes does not bend the chain.
    """
    roots = list(range(len(floats)))
    is_taken = bytearray(len(floats))
    place = [0] * len(floats)
    for row in rows:
        for number, vertex in enumerate(row):
            place[vertex] = number
        last = -1
        for vertex in row:
            alike = [other for other in neighbours[vertex] if floats[other] == floats[vertex]]
            around = sorted(alike, key=place.__getitem__)
            for other in around[(len(around) - 1) // 2 : len(around) // 2 + 1]:
                crosses = (other, vertex) in conflicts or (vertex, other) in conflicts
                if not is_taken[other] and last < place[other] and not crosses:
                    is_taken[other] = 1
                    roots[vertex] = roots[other]
                    last = place[other]
                    break
    return roots


def _compact(
    rows: Iterable[Sequence[int]], roots: Sequence[int], widths: Sequence[float], boxes: int
) -> list[float]:
    """Return an x for each vertex: that of its block, as far as possible to one side.

    Args:
        rows: The ranks, each from the side to which it tends.
        roots: The block of each vertex.
        widths: Width of each vertex.
        boxes: Number of boxes; later vertices are bends.
    """
    after: dict[int, dict[int, float]] = {root: {} for root in roots}
    entries = dict.fromkeys(after, 0)
    for row in rows:
        for one, other in pairwise(row):
            gap = BEND_GAP if one >= boxes and other >= boxes else BOX_GAP
            distance = (widths[one] + widths[other]) / 2 + gap
            known = after[roots[one]]
            if roots[other] not in known:
                entries[roots[other]] += 1
            known[roots[other]] = max(known.get(roots[other], 0.0), distance)
    x = dict.fromkeys(after, 0.0)
    ready = [root for root, number in entries.items() if not number]
    for root in ready:  # grows while it is read, in topological order
        for other, distance in after[root].items():
            x[other] = max(x[other], x[root] + distance)
            entries[other] -= 1
            if not entries[other]:
                ready.append(other)
    for root in reversed(ready):  # blocks move toward those after them
        if after[root]:
            x[root] = max(x[root], min(x[other] - d for other, d in after[root].items()))
    return [x[root] for root in roots]
