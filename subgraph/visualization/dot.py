"""A graph in Graphviz's language, for its programs and others that read it."""

from __future__ import annotations

from typing import Any

from subgraph.graph.graph import Graph, Node


def to_dot(graph: Graph) -> str:
    """Return the graph in Graphviz's language: boxes are nodes, frames subgraph nodes."""
    lines = ["digraph {", "  rankdir=TB; node [shape=box, fontname=Helvetica, fontsize=10];"]
    ids: dict[Node, str] = {}

    def quote(text: str) -> str:
        plain = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        return f'"{plain}"'

    def box(node: Node, indent: str) -> None:
        ids[node] = f"n{len(ids)}"
        label = quote(f"{node.op_type}\n{node.name}")
        lines.append(f"{indent}{ids[node]} [label={label}];")

    ends: dict[Any, str] = {}
    for node in graph.nodes:
        if node.subgraph is None:
            box(node, "  ")
            ends.update((value, ids[node]) for value in node.outputs)
            continue
        lines.append(f"  subgraph cluster_{len(ids)} {{ label={quote(node.name)}; color=blue;")
        inner_ends: dict[Any, str] = {}
        for inner in node.subgraph.nodes:
            box(inner, "    ")
            inner_ends.update((value, ids[inner]) for value in inner.outputs)
        lines.append("  }")
        for inner in node.subgraph.nodes:
            for value in inner.sources:
                if value in inner_ends:
                    lines.append(f"  {inner_ends[value]} -> {ids[inner]};")
        for outer, value in zip(node.inputs, node.subgraph.inputs, strict=True):
            for inner in value.consumers:
                if outer in ends:
                    lines.append(f"  {ends[outer]} -> {ids[inner]};")
        for outer, value in zip(node.outputs, node.subgraph.outputs, strict=True):
            if value in inner_ends:
                ends[outer] = inner_ends[value]
    for node in graph.nodes:
        if node.subgraph is None:
            lines += [f"  {ends[v]} -> {ids[node]};" for v in node.sources if v in ends]
    return "\n".join([*lines, "}", ""])
