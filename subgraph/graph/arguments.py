"""Checks of what a user passes to the constructors of nodes and graphs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, TypeVar

from subgraph.errors import ModelError

_V = TypeVar("_V")
_MAPPING = (Mapping, type(None))
# Argument -> its types, and a right argument for the message.
_RIGHT: dict[str, tuple[type | tuple[type, ...], str]] = {
    "op_type": (str, "the name of an operator, such as 'Relu'"),
    "name": (str, "a string"),
    "domain": (str, "the name of an operator set; '' is ONNX's own"),
    "version": (int, "an integer"),
    "attrs": (_MAPPING, "a dict of attributes by name"),
    "metadata": (_MAPPING, "a dict of strings by key"),
    "opsets": (_MAPPING, "a dict of versions by domain"),
    "doc": (str, "a string"),
    "nodes": ((Iterable, type(None)), "a list of nodes"),
}


def check_types(node: Any = None, **given: object) -> None:
    """Check the types of arguments of a node or graph.

    Args:
        node: The node, whose name and operator are set; None: a graph.
        **given: Arguments by name, among those of ``_RIGHT``.

    Raises:
        ModelError: One has a wrong type; the message has its name, its value and a right one.
    """
    for name, value in given.items():
        kinds, wanted = _RIGHT[name]
        if not isinstance(value, kinds):
            raise ModelError(f"{_owned(name, node)}: got {value!r}; give {wanted}")


def check_node(node: Any, attrs: object, metadata: object) -> None:
    """Check the types of a node's operator, domain, name and version, and of what it will hold.

    Raises:
        ModelError: As for `check_types`.
    """
    # Most nodes pass here: a partition of a large model makes thousands of them.
    texts = type(node.op_type) is type(node.name) is type(node.domain) is str
    if not (texts and type(node.version) is int):
        fields = ("op_type", "name", "domain", "version")
        check_types(node, **{field: getattr(node, field) for field in fields})
    if attrs or metadata:
        check_types(node, attrs=attrs, metadata=metadata)


def _owned(what: str, node: Any) -> str:
    if node is None:
        return f"the graph's {what}"
    return f"the {what} of node {node.name!r} ({node.op_type})"


def check_no_source(value: Any, node: Any) -> None:
    """Check that nothing gives a value yet, which is to be an output of ``node``.

    Raises:
        ModelError: The value is a parameter or an output of a node.
    """
    if value.producer is not None or value.parameter is not None:
        raise ModelError(
            f"value {value.name!r} cannot be an output of node {node.name!r} ({node.op_type}): "
            "it has a source already; give each node values of its own"
        )


def as_items(values: Iterable[_V], kind: type[_V], what: str, node: Any = None) -> Any:
    """Return values or nodes as a tuple.

    Args:
        values: A list of them; None may stand for a value among the inputs of a node.
        kind: The class `Value` or `Node`.
        what: "inputs", "outputs", "captures" or "nodes".
        node: The node that they belong to; None: the graph.

    Raises:
        ModelError: It is no such list.
    """
    try:
        found = tuple(values)
    except TypeError:
        _refuse(values, kind, what, node)
    for value in found:
        # Only inputs of a node may be omitted.
        if not isinstance(value, kind) and (value is not None or node is None or what != "inputs"):
            _refuse(value, kind, what, node, among=True)
    return found


def _refuse(
    given: object, kind: type[Any], what: str, node: Any, *, among: bool = False
) -> NoReturn:
    """Raise the error for inputs or outputs, or for an item ``among`` them, that are wrong."""
    owner, wanted = _owned(what, node), kind.__name__.lower()
    if among:
        raise ModelError(
            f"{owner} hold {given!r}, which is no {wanted}; an operator with several outputs gives "
            "a tuple: unpack it"
        )
    if isinstance(given, kind):
        name = getattr(given, "name", "") or "x"
        raise ModelError(f"{owner} are one {wanted}; give a list: [{name}]")
    kind_name = type(given).__name__
    raise ModelError(f"got {given!r} of type {kind_name}; give {owner}, a list")
