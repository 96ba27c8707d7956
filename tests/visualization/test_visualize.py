"""Pictures of models: what they show, that they are well formed, and that names stay text."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.passes import apply_pass
from subgraph.visualization import visualize as module
from subgraph.visualization.scene import contents_of

SVG = "{http://www.w3.org/2000/svg}"
DIGITS = Path(__file__).parents[2] / "examples" / "digits.onnx"


class Page(HTMLParser):
    """What a browser finds in a page.

    Attributes:
        scripts: Text of each script element.
        tags: Name of each element.
        attributes: Name of each attribute.
        text: All text outside of scripts and styles.
    """

    def __init__(self, html: str) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.text = ""
        self._inside = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes.update(name for name, _ in attrs)
        self._inside = tag
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] += data
        elif self._inside != "style":
            self.text += data

    @property
    def details(self) -> dict[str, dict[str, Any]]:
        """The details of the boxes by their titles."""
        return {one["title"]: one for one in json.loads(self.scripts[0])}


def boxes_of(picture: sg.Visualization) -> list[ET.Element]:
    drawing = ET.fromstring(picture.svg)
    return [group for group in drawing.iter(f"{SVG}g") if group.get("data-box") is not None]


def part(box: ET.Element, name: str) -> ET.Element:
    """Return the first element of a name in a box."""
    found = box.find(f"{SVG}{name}")
    assert found is not None
    return found


def titles(picture: sg.Visualization) -> list[str]:
    """Return the first text of each box."""
    return ["".join(part(box, "text").itertext()) for box in boxes_of(picture)]


def partitioned() -> sg.Graph:
    graph = sg.load(DIGITS)
    graph.attrs["subgraph_property"] = sg.ContainOpSelector({"Conv", "BatchNormalization", "Relu"})
    return apply_pass(graph, "PartitionGraph", min_size=2)


def named_graph(name: str) -> sg.Graph:
    x = sg.input("x", (2,), "float32")
    node = ops.Relu(x, name=name)
    return sg.Graph([x], [ops.Tanh(node, name="last")], name)


def test_every_node_has_a_box_with_its_operator_and_type() -> None:
    graph = sg.load(DIGITS)
    picture = sg.visualize(graph)
    drawn = titles(picture)
    for op in {node.op_type for node in graph.nodes}:
        assert drawn.count(op) == sum(node.op_type == op for node in graph.nodes)
    assert {"image", "probability"} <= set(drawn)
    details = Page(picture.html).details
    for node in graph.nodes:
        rows = dict(details[node.name]["rows"])
        assert rows["operator"].split("@")[0] == node.op_type
        assert str(node.outputs[0].type) in rows["output 0"]


def test_regions_are_frames_around_their_nodes_in_one_colour() -> None:
    cut = partitioned()
    regions = [node for node in cut.nodes if node.subgraph is not None]
    picture = sg.visualize(cut)
    frames = [box for box in boxes_of(picture) if box.get("class") == "frame owner0"]
    assert len(frames) == len(regions) > 1
    inside = 0
    for frame in frames:
        outer = part(frame, "rect").attrib
        for box in boxes_of(picture):
            inner = part(box, "rect").attrib
            if box is not frame and box.get("class") == "node":
                inside += all(
                    float(outer[at]) < float(inner[at])
                    and float(inner[at]) + float(inner[size])
                    < float(outer[at]) + float(outer[size])
                    for at, size in (("x", "width"), ("y", "height"))
                )
    assert inside == sum(len(graph.nodes) for node in regions for _, graph in contents_of(node))


def test_the_page_says_why_each_node_is_where_it_is() -> None:
    cut = partitioned()
    page = Page(sg.visualize(cut).html)
    inner = [n for node in cut.nodes for _, graph in contents_of(node) for n in graph.nodes]
    assert len(inner) > 10
    for node in (*cut.nodes, *inner):
        assert page.details[node.name]["why"] == list(sg.explain(cut, node).reasons)
    (pool,) = (node.name for node in cut.nodes if node.op_type == "MaxPool")
    assert "operator MaxPool is not among those selected" in page.text
    assert pool in page.text


def test_a_compiled_model_shows_the_devices_and_times_of_its_nodes() -> None:
    model = sg.compile_model(DIGITS, "HETERO:CPU,REFERENCE", {"ENABLE_PROFILING": True})
    request = model.create_infer_request()
    request.infer([np.zeros((1, 1, 8, 8), np.float32)])
    picture = sg.visualize(model, profile=request.profile())
    page = Page(picture.html)
    (region,) = model.graph.nodes
    assert dict(page.details[region.name]["rows"])["device"] == "CPU"
    assert "Slowest nodes" in page.text
    assert 'class="heat"' in picture.svg
    for entry in request.profile():
        rows = dict(page.details[entry.node]["rows"])
        assert rows["time"].endswith("% of the run")
    assert 'class="heat"' not in sg.visualize(model).svg


def test_a_query_shows_devices_and_refusals() -> None:
    x = sg.input("x", (2, 2), "float32")
    graph = sg.Graph([x], [ops.Relu(ops.Det(ops.Exp(x, name="exp"), name="det"), name="relu")])
    graph.outputs[0].name = "y"
    found = sg.QueryResult({"exp": "ONE", "relu": "OTHER"}, {"det": "no Det here"})
    picture = sg.visualize(graph, query=found)
    classes = {
        (part(box, "title").text or "").split("\n")[0]: box.get("class")
        for box in boxes_of(picture)
    }
    assert classes["exp"] == "node owner0"
    assert classes["det"] == "node"
    assert classes["relu"] == "node owner1"
    page = Page(picture.html)
    assert page.details["det"]["why"] == ["no Det here"]
    assert "Taken by no device (1)" in page.text
    assert "ONE (1)" in page.text
    assert "OTHER (1)" in page.text


def test_bodies_are_drawn_inside_their_node() -> None:
    condition, x = sg.input("c", (), "bool"), sg.input("x", (2,), "float32")
    outer = sg.capture(x)
    then = sg.Graph([], [ops.Relu(outer, name="yes")], "then")
    other = sg.Graph([], [ops.Tanh(sg.capture(x), name="no")], "else")
    graph = sg.Graph(
        [condition, x], [ops.If(condition, then_branch=then, else_branch=other, name="either")]
    )
    picture = sg.visualize(graph)
    page = Page(picture.html)
    details = page.details
    assert {"either", "yes", "no"} <= set(details)
    assert "then_branch" in page.text
    assert "else_branch" in page.text
    assert [box.get("class") for box in boxes_of(picture)].count("frame") == 1
    assert len(boxes_of(picture)) == 2 + 3 + 2 + 2 + 1  # inputs, nodes, captures, outputs


@pytest.mark.parametrize(
    "name",
    [
        "</script><script>alert(1)</script>",
        '"><img src=x onerror=alert(1)>',
        "<!--<script>",
        "a&amp;b&lt;",
        "]]></style><svg onload=alert(1)>",
        "tab\tand\x00nul\x1b\x7f",
        "lone \udcff surrogate",
        "right \u202eto left\u2028 line",
        " ",
        "long" * 1000,
    ],
)
def test_hostile_names_stay_text(name: str, tmp_path: Path) -> None:
    graph = named_graph(name)
    picture = sg.visualize(graph)
    page, plain = Page(picture.html), Page(sg.visualize(named_graph("plain")).html)
    assert page.tags == plain.tags
    assert page.attributes == plain.attributes
    assert len(page.scripts) == 2
    assert name in page.details
    ET.fromstring(picture.svg)  # well formed
    for ending in ("html", "svg", "dot"):
        picture.save(tmp_path / f"picture.{ending}")
        assert (tmp_path / f"picture.{ending}").read_text(encoding="utf-8")
    shown = picture._repr_html_()
    assert Page(shown).tags == ["iframe"]
    assert 'sandbox="allow-scripts"' in shown


def test_the_page_loads_nothing_and_runs_its_own_script_alone() -> None:
    html = sg.visualize(DIGITS).html
    assert "default-src 'none'" in html
    assert "script-src 'sha256-" in html
    page = Page(html)
    assert not page.attributes & {"src", "href", "onload", "onclick"}
    assert "link" not in page.tags
    assert "fetch" not in page.scripts[1]


def test_the_language_of_graphviz_keeps_names_as_they_are() -> None:
    x = sg.input("x", (2,), "float32")
    graph = sg.Graph([x], [ops.Relu(x, name='schön "so"')])
    assert '[label="Relu\\nschön \\"so\\""]' in sg.visualize(graph).dot


def test_another_ending_is_an_error(tmp_path: Path) -> None:
    picture = sg.visualize(named_graph("relu"))
    with pytest.raises(sg.ConfigError, match=r"saved as \.html, \.svg, \.dot.*got '.*cut\.png'"):
        picture.save(tmp_path / "cut.png")
    assert not list(tmp_path.iterdir())


def test_an_empty_graph_and_a_graph_of_an_input_alone() -> None:
    assert not boxes_of(sg.visualize(sg.Graph([], [])))
    x = sg.input("x", ("n",), "float32")
    assert titles(sg.visualize(sg.Graph([x], [x]))) == ["x", "x"]


def test_large_models_have_closed_regions_and_larger_ones_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cut = partitioned()
    closed = sg.visualize(cut, contents=False)
    monkeypatch.setattr(module, "MOST_BOXES", len(cut.nodes))
    picture = sg.visualize(cut)
    assert picture.svg == closed.svg
    assert "frame" not in {box.get("class") for box in boxes_of(picture)}
    assert "node owner0" in {box.get("class") for box in boxes_of(picture)}
    monkeypatch.setattr(module, "MOST_BOXES", len(cut.nodes) - 1)
    with pytest.raises(sg.LimitError, match=r"has 17 nodes, and a picture at most 16; draw a part"):
        sg.visualize(cut)


def test_deeply_nested_bodies_do_not_exhaust_the_stack() -> None:
    x = sg.input("x", (2,), "float32")
    graph = sg.Graph([x], [ops.Relu(x, name="relu")], "innermost")
    for depth in range(1500):
        outer = sg.input("x", (2,), "float32")
        node = sg.subgraph_node(graph, name=f"around{depth}", inputs=[outer])
        graph = sg.Graph([outer], node.outputs, "around")
    assert len(boxes_of(sg.visualize(graph))) == 1500 * 3 + 3


def test_an_imported_model_has_the_picture_of_the_exported_one(tmp_path: Path) -> None:
    model = sg.compile_model(DIGITS, "HETERO:CPU,REFERENCE")
    model.export_model(tmp_path / "model.sgb")
    assert titles(sg.visualize(sg.import_model(tmp_path / "model.sgb"))) == titles(
        sg.visualize(model)
    )


def test_a_wrong_query_is_an_error() -> None:
    with pytest.raises(sg.ConfigError, match="query: a result of query_model"):
        sg.visualize(named_graph("relu"), query={"relu": "CPU"})  # pyright: ignore[reportArgumentType]
