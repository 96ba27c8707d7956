"""Operators that runtimes have added to ONNX, defined by the standard's: what `function` registers.

A file in ``ops/`` declares such an operator and writes its body: which operators of the standard
stand for one node, given its attributes and which inputs it has. Everything else follows from the
body: the types of the outputs, the reference, and, by the pass "ExpandFunctions", every device with
its fusions. The node itself stays in the graph that was loaded, and is saved as it was.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, cast

import numpy as np

from subgraph.errors import ShapeError, UnsupportedOpError
from subgraph.graph.graph import Node, Value
from subgraph.graph.limits import check_nodes
from subgraph.graph.types import (
    ONNX_DTYPE,
    Array,
    Shape,
    TensorType,
    ValueType,
    dtype_of,
    numpy_dtype,
)
from subgraph.operators.inference import BEYOND, check_operands, infer_types
from subgraph.operators.operator import OPERATORS, Operator, find_operator, operator_key
from subgraph.operators.reference import evaluate
from subgraph.operators.schema import (
    ATTRIBUTE_KINDS,
    CONTRIBUTED,
    MICROSOFT,
    Attribute,
    AttributeKind,
    Schema,
    contributed,
)
from subgraph.operators.shape_values import from_array, propagate, to_array
from subgraph.system.registry import defined_at

Body = Callable[["Call"], Sequence[Value | None]]
# The operator set of the standard that bodies are written in.
_OPSET = 24
_MANY = 2**31 - 1
_KINDS: dict[str, AttributeKind] = {kind: kind for kind in ATTRIBUTE_KINDS}
_KIND_OF: dict[type, AttributeKind] = {int: "int", float: "float", str: "string"}


def function(
    op_type: str,
    form: str,
    *,
    domain: str = MICROSOFT,
    requires: Callable[..., None] | None = None,
    **attributes: Any,
) -> Callable[[Body], Body]:
    """Decorate the function that writes the body of an operator: `Call` in, its outputs out.

    Args:
        op_type: Its name.
        form: Its inputs and outputs, ``"A, B, bias? -> C, mask?"``: ``?`` marks what may be left
            out, ``*`` the last one where it may be given many times.
        domain: Its domain.
        requires: What its operands must satisfy, see `Operator`.
        attributes: For each attribute its default or, without one, its kind (``"float"``); with
            ``!`` behind it (``"int!"``) it has to be given.
    """
    inputs, outputs = (re.findall(r"(\w+)([?*]?)", side) for side in form.split("->"))
    schema = Schema(
        op_type=op_type,
        domain=domain,
        inputs=tuple(name for name, _ in inputs),
        outputs=tuple(name for name, _ in outputs),
        min_inputs=_least(inputs),
        max_inputs=_MANY if inputs[-1][1] == "*" else len(inputs),
        min_outputs=_least(outputs),
        max_outputs=len(outputs),
        attributes={name: _attribute(name, value) for name, value in attributes.items()},
    )
    key = operator_key(op_type, domain)

    def register(body: Body) -> Body:
        owner = defined_at(body)
        CONTRIBUTED.register(key, schema, owner)
        operator = Operator(schema, _compute, _infer, requires=requires, body=body)
        OPERATORS.register(key, operator, owner)
        return body

    return register


def _least(formals: Sequence[tuple[str, str]]) -> int:
    return max((k + 1 for k, (_, mark) in enumerate(formals) if mark != "?"), default=0)


def _attribute(name: str, given: Any) -> Attribute:
    kind = _KINDS.get(given.rstrip("!")) if isinstance(given, str) else None
    if kind is not None:
        return Attribute(name, kind, required=given.endswith("!"))
    return Attribute(name, _KIND_OF[type(given)], default=given)


class Call:
    """One node while its body is written; ``call.Add(a, b, ...)`` adds an operator of the standard.

    Operands are values, None for one left out, and numbers and arrays, which become constants: a
    number has the dtype of the first operand that is a value. Attributes that are None are left
    out; ``outputs=`` asks for several outputs, which come as a tuple, ``domain=`` for an operator
    of another domain, ``requires=`` for a requirement of the domain "body" besides the operator's
    own (``ops/contrib/operands.py``).

    Attributes:
        node: The node.
        inputs: Its inputs in the form's order, None where one is left out.
        nodes: What was added so far.
    """

    def __init__(
        self,
        node: Node,
        operator: Operator,
        inputs: Sequence[Value | None],
        known: Sequence[Array | None] = (),
    ) -> None:
        """Begin; ``known`` holds the elements of inputs that are known."""
        self.node = node
        assert isinstance(operator.schema, Schema)
        self.inputs = [*inputs, *[None] * (len(operator.schema.inputs) - len(inputs))]
        self.nodes: list[Node] = []
        self._schema, self._body = operator.schema, operator.body
        self._known = {v: k for v, k in zip(inputs, known, strict=False) if v is not None}

    def results(self) -> list[Value | None]:
        """Write the body, and return what stands for the node's outputs."""
        assert self._body is not None
        return list(self._body(self))

    def attribute(self, name: str) -> Any:
        """Return an attribute, or its default."""
        return self.node.attrs.get(name, self._schema.attributes[name].default)

    def attributes(self, *names: str) -> dict[str, Any]:
        """Return several attributes by name, to be given on."""
        return {name: self.attribute(name) for name in names}

    def given(self, name: str) -> Value | None:
        """Return an input by its name; None if it is left out, or the form has none of it."""
        formals = self._schema.inputs
        return self.inputs[formals.index(name)] if name in formals else None

    def wants(self, name: str) -> bool:
        """Return whether somebody may need the output of this name."""
        formals, outputs = self._schema.outputs, self.node.outputs
        position = formals.index(name) if name in formals else len(outputs)
        if position >= len(outputs):
            return False
        value, graph = outputs[position], self.node.graph
        return graph is None or bool(value.uses) or graph.gives(value)

    def dtype(self, value: Value) -> str:
        """Return a value's dtype.

        Raises:
            ShapeError: it is not known.
        """
        return self._type(value).dtype

    def shape(self, value: Value) -> Shape:
        """Return a value's dimensions, symbols and None among them.

        Raises:
            ShapeError: its rank is not known.
        """
        shape = self._type(value).shape
        if shape is None:
            raise ShapeError(f"the rank of {value.name!r} is not known")
        return shape

    def rank(self, value: Value) -> int:
        """Return how many dimensions a value has."""
        return len(self.shape(value))

    def size(self, value: Value, axis: int) -> int:
        """Return one dimension of a value.

        Raises:
            ShapeError: it is not known.
        """
        dim = self.shape(value)[axis]
        if not isinstance(dim, int):
            raise ShapeError(f"dimension {axis} of {value.name!r} is not known")
        return dim

    def refuse(self, what: str) -> UnsupportedOpError:
        """Return the error for a use of the operator that has no body."""
        return UnsupportedOpError(
            f"node {self.node.name!r}: operator {self.node.domain}.{self.node.op_type} with {what} "
            "is not supported; export the model without this fusion, or register the operator "
            "with core.add_extension(...)"
        )

    def cast(self, value: Value, dtype: str) -> Value:
        """Return a value in another dtype; itself if it has that."""
        if self.dtype(value) == dtype:
            return value
        return self._add("Cast", [value], 1, {"to": ONNX_DTYPE[dtype]})[0]

    def constant(self, array: Any, dtype: str | None = None) -> Value:
        """Return a constant."""
        held = np.array(array, None if dtype is None else numpy_dtype(dtype))
        held.flags.writeable = False
        return self._add("Constant", [], 1, {"value": held})[0]

    def _type(self, value: Value) -> TensorType:
        if not isinstance(value.type, TensorType):
            raise ShapeError(f"the type of {value.name!r} is not known")
        return value.type

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        """Return the function that adds an operator."""
        if not op_type[:1].isupper():
            raise AttributeError(op_type)

        def add(
            *operands: Any,
            outputs: int = 1,
            domain: str = "",
            requires: str = "",
            **attributes: Any,
        ) -> Any:
            first = next((v for v in operands if isinstance(v, Value)), None)
            values = [self._operand(operand, first) for operand in operands]
            while values and values[-1] is None:
                values.pop()
            given = {k: _held(v) for k, v in attributes.items() if v is not None}
            made = self._add(op_type, values, outputs, given, domain, requires)
            return made[0] if outputs == 1 else made

        return add

    def _operand(self, operand: Any, first: Value | None) -> Value | None:
        if operand is None or isinstance(operand, Value):
            return operand
        if isinstance(operand, (int, float)) and first is not None:
            return self.constant(operand, self.dtype(first))
        return self.constant(operand)

    def _add(
        self,
        op_type: str,
        values: list[Value | None],
        outputs: int,
        given: dict[str, Any],
        domain: str = "",
        requires: str = "",
    ) -> Sequence[Value]:
        notes = dict(self.node.metadata or {})
        notes.pop(BEYOND, None)
        if requires:
            notes[BEYOND] = requires
        made = Node(
            op_type,
            values,
            outputs=outputs,
            name=f"{self.node.name}/{len(self.nodes)}",
            domain=domain,
            version=1 if domain else _OPSET,
            attrs=given,
            metadata={**notes, "origin": notes.get("origin", self.node.name)},
        )
        types = [None if v is None else v.type for v in values]
        known = [None if v is None else self._known.get(v) for v in values]
        arrays = [to_array(k, t) for k, t in zip(known, types, strict=True)]
        for value, type_ in zip(made.outputs, infer_types(made, types, arrays), strict=True):
            value.type = type_
        elements = propagate(made, known, types)
        if elements is not None:
            self._known[made.outputs[0]] = elements
        self.nodes.append(made)
        check_nodes(len(self.nodes), f"node {self.node.name!r} ({self.node.op_type})")
        return made.outputs


def _held(value: Any) -> Any:
    """Return an attribute as nodes hold it."""
    return tuple(cast("list[Any]", value)) if isinstance(value, list) else value


def function_of(node: Node) -> Operator | None:
    """Return the operator of a node if it has a body; None for others, and those of a user."""
    if not contributed(node.op_type, node.domain):
        return None
    found = find_operator(operator_key(node.op_type, node.domain))
    return None if found is None or found.body is None else found


def expanded(node: Node, inputs: Sequence[Value | None]) -> list[Value | None] | None:
    """Return what stands for each output of a node; None for another operator.

    Args:
        node: The node.
        inputs: What it is made of: values of the types of the node's inputs.

    Raises:
        UnsupportedOpError: there is no body for these attributes, or an output is used that the
            body does not give.
        ShapeError: types have to be known, and are not.
    """
    found = function_of(node)
    if found is None:
        return None
    check_operands(node, [None if value is None else value.type for value in node.inputs])
    call = Call(node, found, inputs)
    return _all_used(call, call.results())


def _all_used(call: Call, results: list[Value | None]) -> list[Value | None]:
    """Return the results of a body, of which none is missing that somebody uses.

    Raises:
        UnsupportedOpError: one is.
    """
    graph = call.node.graph
    outputs = call.node.outputs
    for k, (value, result) in enumerate(zip_longest(outputs, results[: len(outputs)])):
        if result is None and graph is not None and (value.uses or graph.gives(value)):
            raise call.refuse(f"output {k}, {value.name!r}, which nobody defines")
    return results


def _declared(node: Node) -> Operator:
    """Return the operator whose body this file's functions evaluate."""
    return OPERATORS.get(operator_key(node.op_type, node.domain))


def _infer(
    node: Node, types: Sequence[ValueType | None], values: Sequence[Array | None]
) -> Sequence[ValueType | None]:
    """Return the types that the body gives."""
    found = _declared(node)
    inputs = [
        None if given is None else Value(f"input {k}", type_)
        for k, (given, type_) in enumerate(zip(node.inputs, types, strict=True))
    ]
    known = [None if v is None else from_array(v) for v in values]
    try:
        results = Call(node, found, inputs, known).results()
    except UnsupportedOpError:
        return []  # said when it is to be run
    except ShapeError:
        if all(isinstance(t, TensorType) and t.is_static for t in types if t is not None):
            raise
        return []
    return [None if value is None else value.type for value in results]


def _compute(node: Node, given: Sequence[Any]) -> Sequence[Any]:
    """Return what the body gives."""
    found = _declared(node)
    inputs = [
        None if array is None else Value(f"input {k}", TensorType(dtype_of(array), array.shape))
        for k, array in enumerate(given)
    ]
    # What may be a shape has to be known for the types inside.
    elements = [None if array is None else from_array(array) for array in given]
    call = Call(node, found, inputs, elements)
    results = _all_used(call, call.results())
    known: dict[Value | None, Any] = {None: None, **dict(zip(inputs, given, strict=True))}
    known[None] = None
    for step in call.nodes:
        made = evaluate(step, [known[value] for value in step.inputs])
        known.update(zip(step.outputs, made, strict=True))
    return [known[value] for value in results]
