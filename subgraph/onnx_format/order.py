"""Topological order of a model's nodes: the names that a node needs, and sorting by them.

Used by `subgraph.onnx_format.reader`.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence

from subgraph.errors import ModelError
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
    done: dict[int, bool] = {}
    order: list[NodeProto] = []
    for root in range(len(protos)):
        if root in done:
            continue
        done[root] = False
        # An explicit stack: the depth of a network is that of its longest path, far beyond Python's
        # limit on recursion.
        stack = [(root, used(protos[root]))]
        while stack:
            at, names = stack[-1]
            for name in names:
                source = maker.get(name)
                if source is None or name in known or done.get(source):
                    continue
                if source in done:
                    path = [index for index, _ in stack]
                    _raise_cycle([protos[i] for i in path[path.index(source) :]])
                done[source] = False
                stack.append((source, used(protos[source])))
                break
            else:
                stack.pop()
                done[at] = True
                order.append(protos[at])
    return order


def _raise_cycle(protos: Sequence[NodeProto]) -> None:
    names = [repr(proto.name or proto.op_type) for proto in reversed(protos)]
    shown = " -> ".join([*names[:8], *(["..."] if len(names) > 8 else [])])
    raise ModelError(
        f"the graph has a cycle: {shown} -> {names[0]}; a node cannot depend on its own result"
    )
