"""Choice of the operator set versions under which a graph is saved, one for each domain.

The version of a node is the operator set in which it was written. The file may state another
version if the operator has the same schema there, or a schema that differs only in attributes that
the node does not set and in dtypes that it does not use.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from subgraph.errors import ModelError
from subgraph.graph.graph import Graph, Node
from subgraph.graph.types import TensorType
from subgraph.operators.schema import Schema, canonical_domain, find_schema, newest_opset

# Version of the default domain for a graph without nodes. An estimate: a version of 2020, which
# runtimes read.
_EMPTY_GRAPH = 13
# Newest version that most runtimes support (ONNX 1.17 of 2024 has opset 22).
_WIDELY_SUPPORTED = 21


@cache
def _history() -> dict[tuple[str, str], list[int]]:
    """Return the versions in which each (domain, operator) changed, ascending."""
    import onnx.defs

    found: dict[tuple[str, str], list[int]] = {}
    for schema in onnx.defs.get_all_schemas_with_history():
        key = canonical_domain(schema.domain), schema.name
        found.setdefault(key, []).append(schema.since_version)
    return {key: sorted(set(versions)) for key, versions in found.items()}


def choose_opsets(graph: Graph) -> dict[str, int]:
    """Return the opset version by domain to save ``graph`` under.

    A version in ``graph.opsets`` is preserved if it fits all nodes; otherwise the result is the
    smallest that fits.

    Raises:
        ModelError: two nodes need versions of one domain that exclude each other.
    """
    # Comparing schemas is slow, and a model of thousands of nodes has few kinds of them.
    examples: dict[Any, Node] = {}
    for current in graph.levels(regions=True):
        for node in current.nodes:
            if node.subgraph is None:
                examples.setdefault(_kind(node), node)
    by_domain: dict[str, list[Node]] = {domain: [] for domain in graph.opsets}
    for node in examples.values():
        by_domain.setdefault(node.domain, []).append(node)
    if not by_domain:
        return {"": _EMPTY_GRAPH}
    return {domain: _choose(domain, nodes, graph.opsets) for domain, nodes in by_domain.items()}


def _kind(node: Node) -> Any:
    """Return a key that is equal for nodes that fit the same operator set versions."""
    dtypes = tuple([None if v is None else getattr(v.type, "dtype", "") for v in node.inputs])
    attributes = tuple(node.attrs) if node.attrs else ()
    return node.domain, node.op_type, node.version, attributes, dtypes


def _choose(domain: str, nodes: Sequence[Node], stated: Mapping[str, int]) -> int:
    """Return the version of one domain; ``stated`` are the graph's own versions by domain."""
    low, high = 1, newest_opset(domain) + 1
    versions: set[int] = set()
    for node in nodes:
        version = node.version or newest_opset(domain)
        history = _history().get((domain, node.op_type))
        if history is None:
            versions.add(version)
            continue
        at = bisect_right(history, version)
        since = history[max(at - 1, 0)]
        low = max(low, since)
        # The schema holds until the operator changed next.
        high = min(high, history[at] if at < len(history) else high)
        versions.add(since)
    wanted = stated.get(domain)
    # Operators of a domain that onnx does not know have no history to compare.
    if newest_opset(domain) == 1 and domain not in {key[0] for key in _history()}:
        return wanted or max(versions, default=1)
    if wanted is not None and (
        low <= wanted < high or _incompatible_node(domain, nodes, wanted) is None
    ):
        return wanted
    # Prefer a version that most runtimes support; newer ones often only add dtypes.
    for older in range(_WIDELY_SUPPORTED, low) if wanted is None and domain == "" else ():
        if _incompatible_node(domain, nodes, older) is None:
            return older
    if low < high:
        return low
    # No version has the schemas of all nodes; one in which the differences do not matter is enough.
    for candidate in sorted({low, *versions}, reverse=True):
        if _incompatible_node(domain, nodes, candidate) is None:
            return candidate
    raise _conflict(domain, nodes, low)


def _incompatible_node(domain: str, nodes: Iterable[Node], version: int) -> Node | None:
    """Return a node whose meaning differs under operator set ``version``; None if none does."""
    for node in nodes:
        own = find_schema(node.op_type, domain, node.version)
        there = find_schema(node.op_type, domain, version)
        if own is None or (there is not None and own.since_version == there.since_version):
            continue
        if there is None or not _same_meaning(node, own, there) or not _takes(node, there):
            return node
    return None


def _same_meaning(node: Node, own: Schema, there: Schema) -> bool:
    """Return whether a node means the same under its own schema and that of another version."""
    if there.deprecated or own.inputs != there.inputs or own.outputs != there.outputs:
        return False
    if not there.min_inputs <= len(node.inputs) <= there.max_inputs:
        return False
    for name in {*own.attributes, *there.attributes}:
        ours, theirs = own.attributes.get(name), there.attributes.get(name)
        if ours is not None and theirs is not None:
            if (ours.kind, ours.default) != (theirs.kind, theirs.default):
                return False
        elif name in node.attrs or (theirs is not None and theirs.required):
            return False
    # Since opset 18, a Split into equal parts has to state their number by an attribute.
    return node.op_type != "Split" or len(node.inputs) > 1 or own.inputs == ("input",)


def _takes(node: Node, there: Schema) -> bool:
    """Return whether the operator of an opset takes the dtypes of the node's inputs."""
    for position, value in enumerate(node.inputs):
        if value is not None and isinstance(value.type, TensorType):
            allowed = there.dtypes_of(position)
            if allowed and value.type.dtype not in allowed:
                return False
    return True


def _conflict(domain: str, nodes: Iterable[Node], version: int) -> ModelError:
    node = _incompatible_node(domain, nodes, version)
    newest = max(nodes, key=_since)
    assert node is not None, "only called for a conflict"
    return ModelError(
        f"node {node.name!r} ({node.op_type}, opset {node.version}) and node {newest.name!r} "
        f"({newest.op_type}, opset {newest.version}) have no opset of {domain or 'ai.onnx'!r} in "
        "common; build both for one version (version=)"
    )


def _since(node: Node) -> int:
    schema = find_schema(node.op_type, node.domain, node.version)
    return 0 if schema is None else schema.since_version
