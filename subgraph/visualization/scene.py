"""The boxes and edges of a graph and of the graphs inside its nodes, with their places.

The contents of a subgraph node, or of a node with bodies, are laid out first and drawn inside the
node's frame, so that a frame has the size of its contents when the graph around is laid out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import attrs

from subgraph.graph.graph import Graph, Node, Value
from subgraph.operators.operator import operator_key
from subgraph.visualization.layered_layout import Layout, Point, layered_layout

NODE, FRAME, INPUT, OUTPUT = "node", "frame", "input", "output"  # kinds of boxes

# Sizes in pixels. A character of the titles' font is at most 7.4 wide on average (12 pixels, bold),
# one of other texts 6.2 (10 pixels); estimates, generous enough for other fonts.
TITLE_HEIGHT = 22.0
_TITLE_CHARACTER = 7.4
_LINE_CHARACTER = 6.2
_NODE_HEIGHT = 36.0
_PORT_HEIGHT = 20.0
_CAPTION_HEIGHT = 14.0
_PADDING = 12.0
_LEAST_WIDTH = 52.0
# Longer texts are cut off; the full one is in the details.
_MOST_CHARACTERS = 34


@attrs.define(eq=False)
class Box:
    """A rectangle of the drawing.

    Attributes:
        kind: NODE, FRAME for a node with its contents, INPUT or OUTPUT of a graph.
        thing: The node, or the value.
        title: The first line.
        line: The second line, may be empty.
        x: Left side.
        y: Upper side.
        width: Width.
        height: Height.
        owner: Index of who runs the node or made its region, -1: none.
    """

    kind: str
    thing: Node | Value
    title: str
    line: str = ""
    x: float = 0.0
    y: float = 0.0
    width: float = 0.0
    height: float = 0.0
    owner: int = -1


@attrs.frozen(eq=False)
class Edge:
    """A line between two boxes of one graph.

    Attributes:
        value: The value that passes.
        source: Number of the box that has it.
        target: Number of the box that uses it.
        points: The line's points from the source to the target.
    """

    value: Value
    source: int
    target: int
    points: list[Point]


@attrs.define(eq=False)
class Scene:
    """A whole drawing.

    Attributes:
        boxes: All boxes, frames before their contents.
        edges: All edges.
        captions: The names of bodies, each with the left end of its baseline.
        width: Width of the drawing.
        height: Its height.
    """

    boxes: list[Box] = attrs.field(factory=list[Box])
    edges: list[Edge] = attrs.field(factory=list[Edge])
    captions: list[tuple[str, Point]] = attrs.field(factory=list[tuple[str, Point]])
    width: float = 0.0
    height: float = 0.0


def make_scene(graph: Graph, *, is_open: bool) -> Scene:
    """Lay out a graph.

    Args:
        graph: The graph.
        is_open: Whether the contents of nodes are drawn.
    """
    top = _Level(graph)
    levels = [top]
    for level in levels:  # grows while it is read
        if is_open:
            levels.extend(level.open_nodes())
    for level in reversed(levels):  # contents before what is around them
        level.lay_out()
    scene = Scene(width=top.layout.width + 2 * _PADDING, height=top.layout.height + 2 * _PADDING)
    top.x = top.y = _PADDING
    for level in levels:
        level.draw(scene)
    return scene


def contents_of(node: Node) -> list[tuple[str, Graph]]:
    """Return the graphs inside a node with the names to show: its subgraph, or its bodies."""
    if node.subgraph is not None:
        return [("", node.subgraph)]
    return [(name, held) for name, held in node.attrs.items() if isinstance(held, Graph)]


def shown_inputs(graph: Graph) -> Iterator[Value]:
    """Yield the inputs and captures that are drawn: weights are not."""
    for value in (*graph.inputs, *graph.captures):
        if value.parameter is None:
            yield value


class _Level:
    """One graph and its place in the drawing, below its caption if it has one.

    Attributes:
        graph: The graph.
        x: Left side.
        y: Upper side.
        layout: The places of its boxes, relative to the corner below the caption.
    """

    def __init__(self, graph: Graph, caption: str = "") -> None:
        self.graph = graph
        self.x = self.y = 0.0
        self.layout = Layout([], [], 0.0, 0.0)
        self._caption = cut_off(caption)
        self._boxes: list[Box] = []
        self._inside: dict[int, list[_Level]] = {}  # contents by number of the box
        self._uses: list[tuple[Value, int, int]] = []

    @property
    def width(self) -> float:
        """Width of the graph and of its caption."""
        return max(self.layout.width, len(self._caption) * _LINE_CHARACTER)

    @property
    def height(self) -> float:
        """Height of the graph with its caption."""
        return self.layout.height + (_CAPTION_HEIGHT if self._caption else 0.0)

    def open_nodes(self) -> list[_Level]:
        """Return a level for each graph inside a node; the node becomes a frame."""
        opened: list[_Level] = []
        first = sum(1 for _ in shown_inputs(self.graph))
        for number, node in enumerate(self.graph.nodes, first):
            inside = [_Level(graph, name) for name, graph in contents_of(node)]
            if inside:
                self._inside[number] = inside
                opened += inside
        return opened

    def lay_out(self) -> None:
        """Find the size and place of each box; the levels inside are laid out already."""
        ends: dict[Value, int] = {}
        for value in shown_inputs(self.graph):
            ends[value] = self._add_port(INPUT, value)
        for node in self.graph.nodes:
            number = self._add_node(node)
            self._use(ends, dict.fromkeys(node.sources), number)
            ends.update((value, number) for value in node.outputs)
        for value in self.graph.outputs:
            self._use(ends, (value,), self._add_port(OUTPUT, value))
        sizes = [(box.width, box.height) for box in self._boxes]
        inputs = sum(box.kind == INPUT for box in self._boxes)
        self.layout = layered_layout(sizes, [(s, t) for _, s, t in self._uses], inputs)

    def _use(self, ends: Mapping[Value, int], values: Iterable[Value], user: int) -> None:
        self._uses += [(value, ends[value], user) for value in values if value in ends]

    def _add_port(self, kind: str, value: Value) -> int:
        title = cut_off(value.name)
        line = cut_off(str(value.type or ""))
        width = max(len(title) * _LINE_CHARACTER, len(line) * _LINE_CHARACTER)
        height = _PORT_HEIGHT + (12.0 if line else 0.0)
        box = Box(kind, value, title, line, width=width + 20.0, height=height)
        self._boxes.append(box)
        return len(self._boxes) - 1

    def _add_node(self, node: Node) -> int:
        number = len(self._boxes)
        inside = self._inside.get(number)
        if inside is None:
            box = Box(NODE, node, *_lines(node), height=_NODE_HEIGHT)
            box.width = max(
                _LEAST_WIDTH,
                len(box.title) * _TITLE_CHARACTER + 14.0,
                len(box.line) * _LINE_CHARACTER + 14.0,
            )
        else:
            box = Box(FRAME, node, _frame_title(node))
            title = len(box.title) * _TITLE_CHARACTER + 2 * _PADDING
            box.width = max(_width_of(inside) + 2 * _PADDING, title)
            box.height = TITLE_HEIGHT + max(level.height for level in inside) + 2 * _PADDING
        self._boxes.append(box)
        return number

    def draw(self, scene: Scene) -> None:
        """Add the boxes and edges to the drawing, and place the levels inside."""
        first = len(scene.boxes)
        x, y = self.x, self.y
        if self._caption:
            scene.captions.append((self._caption, (x, y + _CAPTION_HEIGHT - 4.0)))
            y += _CAPTION_HEIGHT
        for number, box in enumerate(self._boxes):
            left, top = self.layout.corners[number]
            box.x, box.y = x + left, y + top
            scene.boxes.append(box)
            inside = self._inside.get(number, ())
            at = box.x + (box.width - _width_of(inside)) / 2
            for level in inside:
                level.x, level.y = at, box.y + TITLE_HEIGHT + _PADDING
                at += level.width + _PADDING
        for (value, source, target), route in zip(self._uses, self.layout.routes, strict=True):
            points = [(x + across, y + down) for across, down in route]
            scene.edges.append(Edge(value, first + source, first + target, points))


def _width_of(levels: Sequence[_Level]) -> float:
    """Return the width of graphs beside each other."""
    return sum(level.width for level in levels) + _PADDING * (len(levels) - 1)


def _lines(node: Node) -> tuple[str, str]:
    """Return the title of a node and its second line: the type of its first output."""
    if node.subgraph is not None:
        return cut_off(node.name), cut_off(operators_of(node.subgraph))
    kind = node.outputs[0].type if node.outputs else None
    return cut_off(_operator(node)), cut_off(str(kind or ""))


def _frame_title(node: Node) -> str:
    if node.subgraph is None:
        return cut_off(f"{_operator(node)} {node.name}")
    count = len(node.subgraph.nodes)
    return f"{cut_off(node.name)}: {count} node{'s' * (count != 1)}"


def _operator(node: Node) -> str:
    return operator_key(node.op_type, node.domain)


def operators_of(graph: Graph, most: int = 3) -> str:
    """Return the most frequent operators of a graph, without subgraph nodes: "12 Conv, 9 Relu"."""
    plain = (node for node in graph.nodes if node.subgraph is None)
    found = Counter(map(_operator, plain)).most_common(most)
    return ", ".join(f"{count} {name}" for name, count in found)


def cut_off(text: str, most: int = _MOST_CHARACTERS) -> str:
    """Return a text of at most ``most`` characters, its end cut off."""
    return text if len(text) <= most else text[: most - 1] + "…"


def with_type(value: Value) -> str:
    """Return the name of a value with its type."""
    return f"{value.name}: {value.type or '?'}"
