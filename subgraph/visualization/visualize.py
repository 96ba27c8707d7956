"""`visualize`: a picture of a model, of its partition, and of where and how long its nodes run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from os import PathLike
from pathlib import Path
from typing import Any

import attrs

from subgraph.devices.model_input import read_model
from subgraph.devices.query import QueryResult
from subgraph.errors import ConfigError, LimitError, require_type
from subgraph.graph.graph import Graph, Node, Value
from subgraph.operators.operator import operator_key
from subgraph.operators.subgraph_op import ProfileEntry
from subgraph.partition.explanation import Explanation, explanations
from subgraph.runtime.compiled_model import CompiledModel, devices_of
from subgraph.visualization import ENDINGS
from subgraph.visualization.details import Details, Sources, node_details, value_details
from subgraph.visualization.dot import to_dot
from subgraph.visualization.page import Table, make_page, package_text
from subgraph.visualization.scene import (
    OUTPUT,
    Box,
    Scene,
    contents_of,
    make_scene,
    operators_of,
    with_type,
)
from subgraph.visualization.svg import draw_svg

# Drawings of more boxes take a browser seconds for each movement (estimate); the contents of
# subgraph nodes are left out then.
MOST_BOXES = 20_000
# Above this number of nodes no reasons are looked for: paths that would have closed a cycle are
# searched for each node anew (estimate: 5 s).
_MOST_EXPLAINED = 5_000
_MOST_ROWS = 300  # of a table of the overview


@attrs.frozen(eq=False, repr=False)
class Visualization:
    """A picture of a model; a notebook shows it where it is the value of a cell.

    Attributes:
        title: Its title.
        svg: The drawing alone, as SVG. Names, types and reasons are shown by viewers that show the
            titles of elements.
        dot: The graph in Graphviz's language, which its programs draw.
        html: A page with the drawing, a search, an overview and the details of each node. It loads
            nothing and needs no network.
    """

    title: str
    svg: str
    dot: str
    html: str

    def save(self, path: str | PathLike[str]) -> None:
        """Write the picture to a file that ends in ``.html``, ``.svg`` or ``.dot``.

        Raises:
            ConfigError: the path has another ending.
            OSError: the file cannot be written.
        """
        target = Path(path)
        ending = target.suffix.lower()
        if ending not in ENDINGS:
            raise ConfigError(
                f"a picture is saved as {', '.join(ENDINGS)}, by the ending of its path; "
                f"got {str(path)!r}"
            )
        text = {".html": self.html, ".svg": self.svg, ".dot": self.dot}[ending]
        target.write_text(text, encoding="utf-8", errors="replace")

    def _repr_html_(self) -> str:
        """Return the page for a notebook, in a frame that keeps it apart from the notebook."""
        page = escape(self.html)
        return (
            f'<iframe srcdoc="{page}" sandbox="allow-scripts" '
            'style="width: 100%; height: 40rem; border: 1px solid #cbd5e1"></iframe>'
        )

    def __repr__(self) -> str:
        return f"<Visualization {self.title!r}: save() writes .html, .svg or .dot>"


def visualize(
    model: Graph | CompiledModel | str | PathLike[str],
    *,
    contents: bool = True,
    query: QueryResult | None = None,
    profile: Iterable[ProfileEntry] = (),
) -> Visualization:
    """Draw a model, the regions of its partition, and the graphs inside nodes of control flow.

    Regions are frames in the colour of their property, or of the device that runs them. The page
    says of each node why it is in its region, or in none.

    Args:
        model: A graph, for example one that ``PartitionGraph`` returned, a compiled model, or the
            path of a model.
        contents: Whether the graphs inside nodes are drawn; False: each region is one box. Above
            20,000 nodes in all they are not.
        query: The result of ``query_model`` for the graph: nodes get the colour of the device that
            takes them, and the reasons of the devices that refuse them.
        profile: The profile of a request: nodes are the redder the more of the time they take.

    Raises:
        LimitError: the graph has more than 20,000 nodes outside of regions.
    """
    require_type(query, (QueryResult, type(None)), ConfigError, "query: a result of query_model")
    devices: dict[Node, str] = {}
    if isinstance(model, CompiledModel):
        graph = model.graph
        devices = {node: ", ".join(devices_of(node)) for node in graph.nodes}
    else:
        graph = read_model(model)
    _check_size(graph)
    nodes = [node for inner in graph.levels(regions=True) for node in inner.nodes]
    entries: dict[str, list[ProfileEntry]] = {}
    for entry in profile:
        entries.setdefault(entry.node, []).append(entry)
    known = explanations(graph) if len(nodes) <= _MOST_EXPLAINED else {}
    total = sum(entry.seconds for found in entries.values() for entry in found)
    sources = Sources(known, query, devices, entries, _seconds(nodes, entries), total)
    scene = make_scene(graph, is_open=contents and len(nodes) <= MOST_BOXES)
    owners = _colour(scene, sources)
    details = [_details(box, sources) for box in scene.boxes]
    heats = [_share(box, sources) for box in scene.boxes]
    title = graph.name or "model"
    tips = ["\n".join([one.title, *one.why[:3]]) for one in details]
    style = package_text("drawing.css")
    svg = draw_svg(scene, tips, heats, style, title)
    tables = list(_tables(graph, scene, sources))
    page = make_page(title, svg, owners, tables, details)
    return Visualization(title, svg, to_dot(graph), page)


def _seconds(
    nodes: Sequence[Node], entries: Mapping[str, Sequence[ProfileEntry]]
) -> dict[Node, float]:
    """Return the time of each node, those inside others last in ``nodes``."""
    found: dict[Node, float] = {}
    for node in reversed(nodes):
        own = sum(entry.seconds for entry in entries.get(node.name, ()))
        if not own:
            own = sum(found[inner] for _, graph in contents_of(node) for inner in graph.nodes)
        found[node] = own
    return found


def _check_size(graph: Graph) -> None:
    if len(graph.nodes) > MOST_BOXES:
        raise LimitError(
            f"graph {graph.name!r} has {len(graph.nodes)} nodes, and a picture at most "
            f"{MOST_BOXES}; draw a part of it: sg.visualize(node.subgraph) draws one region"
        )


def _colour(scene: Scene, sources: Sources) -> dict[str, int]:
    """Set the owner of each box, and return the number of nodes of each owner."""
    names: dict[str, int] = {}
    counts: Counter[str] = Counter()
    for box in scene.boxes:
        if isinstance(box.thing, Node):
            owner = sources.owner(box.thing)
            if owner:
                box.owner = names.setdefault(owner, len(names))
                inner = box.thing.subgraph
                counts[owner] += 1 if inner is None else len(inner.nodes)
    return {name: counts[name] for name in names}


def _details(box: Box, sources: Sources) -> Details:
    if isinstance(box.thing, Value):
        return value_details(box.thing, box.kind)
    return node_details(box.thing, sources)


def _share(box: Box, sources: Sources) -> float:
    if isinstance(box.thing, Value) or not sources.total:
        return 0.0
    return sources.seconds[box.thing] / sources.total


def _tables(graph: Graph, scene: Scene, sources: Sources) -> Iterator[Table]:
    """Yield the tables of the overview."""
    numbers = {box.thing: k for k, box in enumerate(scene.boxes) if box.kind != OUTPUT}
    operators = operators_of(graph, 8)
    facts = [("nodes", str(len(graph.nodes))), ("operators", operators)]
    facts += [("input", with_type(v)) for v in graph.inputs if v.parameter is None]
    facts += [("output", with_type(value)) for value in graph.outputs]
    if sources.total:
        facts.append(("time", f"{sources.total * 1e3:.4g} ms"))
    yield Table("The model", (), [(None, row) for row in facts])
    regions = [node for node in graph.nodes if node.subgraph is not None]
    rows = [(numbers[node], _region_row(node, sources)) for node in regions]
    columns = ("name", "nodes", "device" if sources.devices else "property")
    yield Table(f"Regions ({len(regions)})", columns, rows[:_MOST_ROWS], _rest(rows))
    if sources.total:
        timed = [(sources.seconds[n], n) for n in numbers if isinstance(n, Node)]
        timed = sorted((pair for pair in timed if pair[0]), key=lambda pair: -pair[0])
        slow = [
            (numbers[n], (n.name, f"{s * 1e3:.4g} ms", f"{s / sources.total:.1%}"))
            for s, n in timed
            if n.subgraph is None
        ]
        yield Table("Slowest nodes", ("node", "time", "share"), slow[:25])
    refused = _refused(graph, sources)
    rows = [(numbers[n], (n.name, operator_key(n.op_type, n.domain), w)) for n, w in refused]
    title = "In no region" if sources.query is None else "Taken by no device"
    columns = ("node", "operator", "why")
    yield Table(f"{title} ({len(rows)})", columns, rows[:_MOST_ROWS], _rest(rows))


def _rest(rows: list[Any]) -> str:
    return f"and {len(rows) - _MOST_ROWS} more" if len(rows) > _MOST_ROWS else ""


def _region_row(node: Node, sources: Sources) -> tuple[str, str, str]:
    assert node.subgraph is not None, "regions are subgraph nodes"
    return node.name, str(len(node.subgraph.nodes)), sources.owner(node)


def _refused(graph: Graph, sources: Sources) -> list[tuple[Node, str]]:
    """Return the nodes that are in no region, or that no device takes, and the first reasons."""
    found: list[tuple[Node, str]] = []
    for node in graph.nodes:
        if sources.query is not None:
            if node.name not in sources.query:
                found.append((node, str(sources.query.reasons.get(node.name, ""))))
        elif node.subgraph is None and node in sources.explanations:
            known: Explanation = sources.explanations[node]
            found.append((node, known.reasons[0] if known.reasons else ""))
    return found
