"""Results of a graph of ``torch.compile`` that share memory, or are sizes.

Code after the graph may change an input, or a result, and see the change in a result that is a view
of it. PyTorch makes such views from the tensors that the compiled graph computes, which costs next
to nothing. It also computes the sizes among the results from those of the inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from typing import Any

from subgraph.errors import ModelError

# Functions and methods that return a view of their first argument, or a size, and do nothing else.
# A list, because others, such as relu(x, inplace=True), may return an argument after a change.
# fmt: off
_VIEWS = frozenset({
    "chunk", "detach", "diagonal", "expand", "expand_as", "flatten", "getattr", "getitem", "mT",
    "movedim", "narrow", "numpy_T", "permute", "reshape", "select", "size", "split", "squeeze",
    "swapaxes", "t", "transpose", "unbind", "unflatten", "unsqueeze", "view", "view_as",
})
# fmt: on


def split_results(
    torch: Any, module: Any
) -> tuple[list[Any], Callable[[Sequence[Any], Sequence[Any]], tuple[Any, ...]]]:
    """Return the nodes that have to be computed, and how the results are made of their tensors.

    Args:
        torch: The module torch.
        module: The ``torch.fx.GraphModule``.

    Returns:
        The nodes, and a function that takes the inputs and the tensors of the nodes. Its results
        are tensors of their own if they share memory in another way than by views.

    Raises:
        ModelError: a result is neither a tensor nor computed from sizes of the inputs.
    """
    nodes = list(module.graph.nodes)
    inputs = [node for node in nodes if node.op == "placeholder"]
    results: Sequence[Any] = nodes[-1].args[0]
    bases: dict[int, Any] = {}  # the first node in each memory
    for node in nodes:
        bases.setdefault(_memory(torch, node), node)
    users = Counter(_memory(torch, node) for node in dict.fromkeys(results))
    computed: list[Any] = []
    for node in results:
        memory = _memory(torch, node)
        base = [bases[memory]] if users[memory] > 1 and memory else []
        if not _follows(torch, node, [*inputs, *computed, *base]):
            if not memory:
                raise ModelError(f"its result {node} is neither a tensor nor made of input sizes")
            base = [node]
        computed += [item for item in base if item not in inputs and item not in computed]
    if computed == list(results):
        return computed, lambda _, tensors: tuple(tensors)

    graph = torch.fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in [*inputs, *computed]}

    def copy(node: Any) -> Any:
        if node not in copies:
            changed = _changed_argument(torch, node)
            copies[node] = graph.node_copy(node, copy) if changed is None else copy(changed)
        return copies[node]

    graph.output(tuple(copy(node) for node in results))
    finish = torch.fx.GraphModule(torch.nn.Module(), graph).forward
    return computed, lambda values, tensors: finish(*values, *tensors)


def _follows(torch: Any, node: Any, known: Collection[Any]) -> bool:
    """Return whether a node is one of ``known``, or a view of one, or computed from its sizes."""
    if node in known:
        return True
    memory, changed = _memory(torch, node), _changed_argument(torch, node)
    if changed is not None:
        return _follows(torch, changed, known)
    if memory and memory not in [_memory(torch, item) for item in known]:
        return False  # a copy, as of a[indices]
    pure = _name(node) in _VIEWS or (_is_arithmetic(node) and not memory)
    return pure and all(_follows(torch, item, known) for item in node.all_input_nodes)


def _changed_argument(torch: Any, node: Any) -> Any:
    """Return the argument that a node changes in place and returns as it is; None if none."""
    if not node.args or not (_name(node).endswith("_") or _is_arithmetic(node)):
        return None
    argument, memory = node.args[0], _memory(torch, node)
    if not memory or not isinstance(argument, torch.fx.Node) or _memory(torch, argument) != memory:
        return None
    before, after = (item.meta["example_value"] for item in (argument, node))
    # As text: a comparison of symbolic sizes would make a condition of the compiled code.
    same = _geometry(before) == _geometry(after) and _name(node) != "getitem"
    return argument if same else None


def _geometry(tensor: Any) -> str:
    return f"{tensor.shape} {tensor.stride()} {tensor.storage_offset()}"


def _name(node: Any) -> str:
    return f"{getattr(node.target, '__name__', node.target)}"


def _is_arithmetic(node: Any) -> bool:
    """Return whether a node is an operator of Python, such as ``+`` of sizes, or ``+=``."""
    return getattr(node.target, "__module__", "") == "_operator"


def _memory(torch: Any, node: Any) -> int:
    """Return a number of the memory of a node's tensor; 0 if it is not a dense tensor."""
    value: Any = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor):
        return 0
    try:
        return int(value.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # such as a sparse one
        return id(value)
