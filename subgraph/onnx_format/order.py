"""Topological order of a model's nodes: the names that a node needs, and sorting by them.

Used by `subgraph.onnx_format.reader`.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

from subgraph.graph.order import visit
from subgraph.operators.messages import AttributeProto, GraphProto, NodeProto


def used(proto: NodeProto) -> Iterator[str]:
    """Yield the names of a node's inputs and of the outer values that its bodies use."""
    yield from proto.input
    for attribute in proto.attribute:
        if attribute.type == AttributeProto.GRAPH:
            yield from _free(attribute.g)


def _free(graph: GraphProto) -> list[str]:
    """Return the names that a body uses and does not define."""
    made = {info.name for info in graph.input}
    made.update(tensor.name for tensor in graph.initializer)
    made.update(sparse.values.name for sparse in graph.sparse_initializer)
    # A dict, because a set's order would differ from run to run.
    needed = {info.name: None for info in graph.output}
    for node in graph.node:
        made.update(node.output)
        needed.update((name, None) for name in used(node))
    return [name for name in needed if name not in made]


def sort_nodes(protos: Sequence[NodeProto], known: Container[str]) -> list[NodeProto]:
    """Return nodes in topological order.

    Args:
        protos: The nodes.
        known: Names that are defined before the first node.

    Raises:
        ModelError: the nodes form a cycle; the message names them.
    """
    maker = {name: at for at, proto in enumerate(protos) for name in proto.output if name}

    def needed(at: int) -> Iterator[int]:
        names = (name for name in used(protos[at]) if name in maker and name not in known)
        return (maker[name] for name in names)

    order: list[int] = []
    done: dict[int, bool] = {}
    for root in range(len(protos)):
        if root not in done:
            visit(root, needed, done, order, protos.__getitem__)
    return [protos[at] for at in order]
