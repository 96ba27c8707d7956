"""The layered layout: boxes lie apart, no line crosses a box, simple graphs are straight."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subgraph.visualization.layered_layout import BOX_GAP, Layout, Point, layered_layout

Edges = list[tuple[int, int]]
SIZES = st.tuples(st.sampled_from([12.0, 60.0, 150.0]), st.sampled_from([20.0, 40.0, 300.0]))


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[Point], Edges, int]:
    sizes = draw(st.lists(SIZES, min_size=1, max_size=24))
    edges: Edges = []
    for box in range(1, len(sizes)):
        edges += [(source, box) for source in draw(st.lists(st.integers(0, box - 1), max_size=3))]
    inputs = draw(st.integers(0, len(sizes)))
    # Inputs have no source.
    return sizes, [(source, target) for source, target in edges if target >= inputs], inputs


def box_of(layout: Layout, sizes: list[Point], box: int) -> tuple[float, float, float, float]:
    (x, y), (width, height) = layout.corners[box], sizes[box]
    return x, y, x + width, y + height


@given(graphs())
def test_boxes_lie_apart_inside_the_drawing(drawn: tuple[list[Point], Edges, int]) -> None:
    sizes, edges, inputs = drawn
    layout = layered_layout(sizes, edges, inputs)
    boxes = [box_of(layout, sizes, box) for box in range(len(sizes))]
    for left, top, right, bottom in boxes:
        assert left >= -1e-6
        assert right <= layout.width + 1e-6
        assert top >= 0
        assert bottom <= layout.height + 1e-6
    for number, one in enumerate(boxes):
        for other in boxes[:number]:
            beside = other[2] + BOX_GAP <= one[0] + 1e-6 or one[2] + BOX_GAP <= other[0] + 1e-6
            assert beside or one[3] < other[1] or other[3] < one[1]


@given(graphs())
def test_lines_lead_down_from_source_to_target_and_cross_no_box(
    drawn: tuple[list[Point], Edges, int],
) -> None:
    sizes, edges, inputs = drawn
    layout = layered_layout(sizes, edges, inputs)
    boxes = [box_of(layout, sizes, box) for box in range(len(sizes))]
    for (source, target), route in zip(edges, layout.routes, strict=True):
        (first_x, first_y), (last_x, last_y) = route[0], route[-1]
        assert first_y == boxes[source][3]
        assert boxes[source][0] <= first_x <= boxes[source][2]
        assert last_y == boxes[target][1]
        assert boxes[target][0] <= last_x <= boxes[target][2]
        for (x, y), (next_x, next_y) in pairwise(route):
            assert next_y >= y
            for left, top, right, bottom in boxes:
                crosses = top < next_y - 1e-6 and y + 1e-6 < bottom
                if crosses and x == next_x:  # a line that is not straight is between two ranks
                    assert x <= left + 1e-6 or x >= right - 1e-6
                else:
                    assert not crosses


def test_nothing_has_no_size() -> None:
    layout = layered_layout([], [])
    assert (layout.corners, layout.routes, layout.width, layout.height) == ([], [], 0.0, 0.0)


def test_a_chain_is_straight() -> None:
    sizes = [(40.0, 20.0), (90.0, 20.0), (60.0, 20.0), (20.0, 20.0)]
    layout = layered_layout(sizes, [(0, 1), (1, 2), (2, 3)])
    middles = {x + width / 2 for (x, _), (width, _) in zip(layout.corners, sizes, strict=True)}
    assert len(middles) == 1


@pytest.mark.parametrize("constants", [0, 1, 4])
def test_constants_do_not_bend_a_chain(constants: int) -> None:
    sizes, edges = [(40.0, 20.0)], []
    last = 0
    for _ in range(6):
        first = len(sizes)
        sizes += [(40.0, 20.0)] * (constants + 1)
        edges += [(box, first + constants) for box in (last, *range(first, first + constants))]
        last = first + constants
    layout = layered_layout(sizes, edges, 1)
    chain = range(constants + 1, len(sizes), constants + 1)
    assert len({layout.corners[box][0] for box in (0, *chain)}) == 1
    # Each constant stands one rank above its user, not at the top.
    for source, target in edges:
        assert layout.corners[target][1] - layout.corners[source][1] < 60


def test_lines_that_need_not_cross_do_not() -> None:
    edges = [(0, 3), (1, 2)]
    layout = layered_layout([(40.0, 20.0)] * 4, edges)
    ends = sorted((route[0][0], route[-1][0]) for route in layout.routes)
    assert ends[0][1] < ends[1][1]


def test_one_line_serves_all_users_of_a_source() -> None:
    count = 10
    chain = [(box, box + 1) for box in range(count)]
    mask = [(0, box) for box in range(2, count + 1)]
    layout = layered_layout([(40.0, 20.0)] * (count + 1), [*chain, *mask])
    longest = set(layout.routes[-1])
    for route in layout.routes[count:]:
        assert set(route[:-1]) <= longest | {route[-1]}
    assert layout.width < 150
