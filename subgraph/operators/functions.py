"""Operators that runtimes have added to ONNX, defined by operators of the standard (`function`).

A file in ``ops/`` declares such an operator and writes its body: the operators of the standard that
replace one node, depending on its attributes and on which inputs are present. Output types and the
reference follow from the body, and so do all devices with their fusions, by way of the pass
"ExpandFunctions". The loaded graph keeps the node itself, so that saving it changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, cast

import attrs
import numpy as np

from subgraph.errors import ShapeError, UnsupportedOpError
from subgraph.graph.graph import Node, Value, copy_nodes
from subgraph.graph.limits import check_nodes
from subgraph.graph.symbolic import is_symbolic
from subgraph.graph.types import (
    ONNX_DTYPE,
    Array,
    Shape,
    TensorType,
    ValueType,
    dtype_of,
    numpy_dtype,
)
from subgraph.operators.inference import (
    EXTRA_REQUIREMENT,
    check_operands,
    part_metadata,
    set_output_types,
)
from subgraph.operators.operator import OPERATORS, Operator, operator_key, operator_of
from subgraph.operators.reference import evaluate_nodes
from subgraph.operators.schema import (
    ATTRIBUTE_KINDS,
    CONTRIBUTED,
    MICROSOFT,
    Attribute,
    AttributeKind,
    Schema,
    contributed,
)
from subgraph.operators.shape_values import from_array, has_symbolic, propagate, to_array
from subgraph.system.registry import declared_at, defined_at

Results = Sequence[Value | None]  # of a node; None for an output that nothing reads
Body = Callable[["Call"], Results]
# The operator set of the standard that bodies are written in. It is fixed, so that a newer onnx
# package does not change the meaning of a body.
_OPSET = 24
# onnx's own number for variadic inputs.
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
    """Return a decorator for the body of an operator: a function from a `Call` to its outputs.

    What a body adds must depend on nothing but the node's attributes and form, the types and shape
    values of its inputs, and which outputs are used: it is copied for the next node with the same.

    Args:
        op_type: Name of the operator.
        form: Its inputs and outputs, ``"A, B, bias? -> C, mask?"``: ``?`` marks an optional one,
            ``*`` a variadic last input.
        domain: Domain of the operator, one of which `contributed` says that it may have a body.
        requires: What its operands must satisfy, see `Operator`.
        attributes: The default of each attribute, an `Attribute` if the default is the name of a
            kind or, for one without default, its kind (``"float"``); ``!`` behind a kind
            (``"int!"``) marks a required attribute.

    Raises:
        UnsupportedOpError: `contributed` does not know the name, so that no device would expand it.
    """
    schema = _contributed_schema(op_type, form, domain, attributes)

    def register(body: Body) -> Body:
        operator = Operator(schema, _compute, _infer, requires=requires, body=body)
        _register(operator, defined_at(body))
        return body

    return register


def declare_contributed(
    op_type: str, form: str, *, attributes: Mapping[str, Any], **fields: Any
) -> None:
    """Declare an operator of ONNX Runtime that operators of the standard cannot express.

    Args:
        op_type: Name of the operator, of the domain ``com.microsoft``.
        form: Its inputs and outputs, as for `function`.
        attributes: Its attributes, as for `function`.
        **fields: Fields of `Operator`, ``compute`` and ``infer`` among them.
    """
    schema = _contributed_schema(op_type, form, MICROSOFT, attributes)
    _register(Operator(schema, **fields), declared_at())


def _register(operator: Operator, owner: str) -> None:
    assert isinstance(operator.schema, Schema), "an operator that is not the standard's has one"
    CONTRIBUTED.register(operator.key, operator.schema, owner)
    OPERATORS.register(operator.key, operator, owner)


def _contributed_schema(
    op_type: str, form: str, domain: str, attributes: Mapping[str, Any]
) -> Schema:
    """Return the schema of an operator that a runtime has added; see `function`."""
    if not contributed(op_type, domain):
        raise UnsupportedOpError(
            f"function {op_type!r} of domain {domain!r}: bodies are for operators that "
            f"subgraph.operators.schema.contributed knows, such as those of {MICROSOFT}; register "
            "an operator of your own with core.add_extension(...)"
        )
    inputs, outputs = (re.findall(r"(\w+)([?*]?)", side) for side in form.split("->"))
    return Schema(
        op_type=op_type,
        domain=domain,
        inputs=tuple(name for name, _ in inputs),
        outputs=tuple(name for name, _ in outputs),
        min_inputs=_min_count(inputs),
        optional=frozenset(name for name, mark in inputs if mark == "?"),
        max_inputs=_MANY if inputs[-1][1] == "*" else len(inputs),
        min_outputs=_min_count(outputs),
        max_outputs=len(outputs),
        attributes={name: _attribute(name, value) for name, value in attributes.items()},
    )


def _min_count(formals: Sequence[tuple[str, str]]) -> int:
    return max((k + 1 for k, (_, mark) in enumerate(formals) if mark != "?"), default=0)


def _attribute(name: str, given: Any) -> Attribute:
    if isinstance(given, Attribute):
        return given
    kind = _KINDS.get(given.rstrip("!")) if isinstance(given, str) else None
    if kind is not None:
        return Attribute(name, kind, required=given.endswith("!"))
    return Attribute(name, _KIND_OF[type(given)], default=given)


class Call:
    """One node while its body is written; ``call.Add(a, b, ...)`` adds an operator of the standard.

    Operands are values, None for an omitted one, and numbers, lists and arrays, which become
    constants: a number has the dtype of the first operand that is a value, a list is a vector of
    int64. Attributes that are None are omitted. ``outputs=`` is the number of outputs, which are a
    tuple if several; ``domain=`` the operator's domain; ``opset=`` the operator set of one that is
    newer than that of bodies; ``requires=`` a requirement of the domain "body" besides the
    operator's own (``ops/contrib/operands.py``).

    Attributes:
        node: The node that the body replaces.
        inputs: Its inputs in the schema's order, None for an omitted one.
        nodes: The nodes that the body has added.
    """

    def __init__(
        self,
        node: Node,
        operator: Operator,
        inputs: Sequence[Value | None],
        known: Sequence[Array | None] = (),
    ) -> None:
        """Begin a body.

        Args:
            node: The node that the body replaces.
            operator: Its operator, which has the body.
            inputs: Values for the node's inputs, of their types; None for an omitted one.
            known: Shape values of the inputs (`subgraph.operators.shape_values`); None: unknown.
        """
        self.node = node
        assert isinstance(operator.schema, Schema)
        self.inputs: list[Any] = [*inputs, *[None] * (len(operator.schema.inputs) - len(inputs))]
        self.nodes: list[Node] = []
        self._schema, self._body = operator.schema, operator.body
        self._known = {v: k for v, k in zip(inputs, known, strict=False) if v is not None}

    def results(self) -> list[Value | None]:
        """Run the body, which adds its nodes, and return the values for the node's outputs."""
        assert self._body is not None
        return list(self._body(self))

    def attribute(self, name: str) -> Any:
        """Return an attribute of the node, or its default."""
        return self.node.attrs.get(name, self._schema.attributes[name].default)

    def attributes(self, *names: str) -> dict[str, Any]:
        """Return several attributes by name, as keywords for an operator of the body."""
        return {name: self.attribute(name) for name in names}

    def input(self, name: str) -> Any:
        """Return an input by its name in the schema; None if it is omitted or no such name."""
        formals = self._schema.inputs
        return self.inputs[formals.index(name)] if name in formals else None

    def is_used(self, name: str) -> bool:
        """Return whether the output of this name may be used; True if the node is in no graph."""
        formals, outputs = self._schema.outputs, self.node.outputs
        position = formals.index(name) if name in formals else len(outputs)
        if position >= len(outputs):
            return False
        value, graph = outputs[position], self.node.graph
        return graph is None or bool(value.uses) or graph.is_output(value)

    def dtype(self, value: Value) -> str:
        """Return a value's dtype.

        Raises:
            ShapeError: the value's type is not known, or it is an omitted input.
        """
        return self._type(value).dtype

    def shape(self, value: Value) -> Shape:
        """Return a value's dimensions: numbers, names of symbols, None for unknown ones.

        Raises:
            ShapeError: the value's rank is not known.
        """
        shape = self._type(value).shape
        if shape is None:
            raise ShapeError(f"the rank of {value.name!r} is not known")
        return shape

    def rank(self, value: Value) -> int:
        """Return how many dimensions a value has."""
        return len(self.shape(value))

    def size(self, value: Value, axis: int) -> int:
        """Return the size of one dimension of a value.

        Raises:
            ShapeError: the size is not known.
        """
        dim = self.shape(value)[axis]
        if not isinstance(dim, int):
            raise ShapeError(f"dimension {axis} of {value.name!r} is not known")
        return dim

    def as_standard(self) -> Results:
        """Return the result of the standard's operator of this name, inputs and attributes."""
        operator = getattr(self, self.node.op_type)
        return [operator(*self.inputs, **self.attributes(*self._schema.attributes))]

    def unsupported(self, what: str) -> UnsupportedOpError:
        """Return the error for attributes or inputs (``what``) that the body does not support."""
        return _unsupported(self.node, what)

    def refuse_inputs(self, *names: str) -> None:
        """Raise UnsupportedOpError if one of these inputs is not omitted."""
        for name in names:
            if self.input(name) is not None:
                raise self.unsupported(f"the input {name}")

    def refuse_all_but(self, **attributes: Any) -> None:
        """Raise UnsupportedOpError unless attributes have these values, the supported ones."""
        for name, supported in attributes.items():
            if self.attribute(name) != supported:
                raise self.unsupported(f"{name}={self.attribute(name)}")

    def cast(self, value: Value, dtype: str) -> Value:
        """Return the value cast to ``dtype``; ``value`` itself if it has that dtype."""
        if self.dtype(value) == dtype:
            return value
        return self._add("Cast", [value], 1, {"to": ONNX_DTYPE[dtype]})[0]

    def constant(self, array: Any, dtype: str | None = None) -> Value:
        """Return the output of a new Constant; ``dtype`` None means that of ``array``."""
        held = np.array(array, None if dtype is None else numpy_dtype(dtype))
        held.flags.writeable = False
        return self._add("Constant", [], 1, {"value": held})[0]

    def _type(self, value: Value | None) -> TensorType:
        if value is None:
            raise ShapeError("a required input is omitted")
        if not isinstance(value.type, TensorType):
            raise ShapeError(f"the type of {value.name!r} is not known")
        return value.type

    def __getattr__(self, op_type: str) -> Callable[..., Any]:
        """Return the function that adds a node of this operator and returns its outputs."""
        # Python asks objects for names such as ``__len__`` or ``shape``; operators begin with a
        # capital.
        if not op_type[:1].isupper():
            raise AttributeError(op_type)

        def add(
            *operands: Any,
            outputs: int = 1,
            domain: str = "",
            opset: int = _OPSET,
            requires: str = "",
            **attributes: Any,
        ) -> Any:
            first = next((v for v in operands if isinstance(v, Value)), None)
            values = [self._operand(operand, first) for operand in operands]
            # Operators of the standard count their inputs: an omitted one at the end is left out.
            while values and values[-1] is None:
                values.pop()
            given = {k: _tuple_if_list(v) for k, v in attributes.items() if v is not None}
            made = self._add(op_type, values, outputs, given, domain, opset, requires)
            return made[0] if outputs == 1 else made

        return add

    def _operand(self, operand: Any, first: Value | None) -> Value | None:
        if operand is None or isinstance(operand, Value):
            return operand
        if isinstance(operand, (int, float)) and first is not None:
            return self.constant(operand, self.dtype(first))
        if isinstance(operand, (list, tuple)):
            return self.constant(operand, "int64")
        return self.constant(operand)

    def _add(
        self,
        op_type: str,
        values: list[Value | None],
        outputs: int,
        given: dict[str, Any],
        domain: str = "",
        opset: int = _OPSET,
        requires: str = "",
    ) -> Sequence[Value]:
        notes = part_metadata(self.node)
        if requires:
            notes[EXTRA_REQUIREMENT] = requires
        made = Node(
            op_type,
            values,
            outputs=outputs,
            name=f"{self.node.name}/{len(self.nodes)}",
            domain=domain,
            version=1 if domain else opset,
            attrs=given,
            metadata=notes,
        )
        types = [None if v is None else v.type for v in values]
        known = [None if v is None else self._known.get(v) for v in values]
        arrays = [to_array(k, t) for k, t in zip(known, types, strict=True)]
        set_output_types(made, arrays)
        elements = propagate(made, known, types)
        if elements is not None:
            self._known[made.outputs[0]] = elements
        self.nodes.append(made)
        # A body may have a loop over a size that the model states, such as a number of heads.
        check_nodes(len(self.nodes), f"node {self.node.name!r} ({self.node.op_type})")
        return made.outputs


def _tuple_if_list(value: Any) -> Any:
    """Return an attribute's value as nodes hold it: tuples instead of lists."""
    return tuple(cast("list[Any]", value)) if isinstance(value, list) else value


@attrs.frozen(eq=False)
class _Body:
    """A body as it was written for one node.

    Attributes:
        inputs: Stand-ins for the node's inputs.
        nodes: The nodes of the body.
        results: The values for the node's outputs.
    """

    inputs: Sequence[Value | None]
    nodes: Sequence[Node]
    results: Sequence[Value | None]

    def copy_for(self, node: Node, inputs: Sequence[Value | None]) -> list[Value | None]:
        """Return the values for the outputs of a node that `_key_of` does not tell apart.

        Args:
            node: The node; its name and metadata go to the nodes that compute the values.
            inputs: What the body reads.
        """
        pairs = zip(self.inputs, inputs, strict=True)
        values = {inner: outer for inner, outer in pairs if inner and outer}
        notes = part_metadata(node)
        for k, copy in enumerate(copy_nodes(self.nodes, values)):
            extra = (copy.metadata or {}).get(EXTRA_REQUIREMENT)
            copy.name = f"{node.name}/{k}"
            copy.metadata = dict(notes) if extra is None else {**notes, EXTRA_REQUIREMENT: extra}
        return [None if value is None else values[value] for value in self.results]


# Bodies that were written last, by `_key_of`: the layers of a network have equal ones.
_BODIES: dict[Any, _Body] = {}
_MOST_BODIES = 64  # a network has few different ones (estimate)


def _body_of(
    node: Node,
    operator: Operator,
    inputs: Sequence[Value | None],
    types: Sequence[ValueType | None],
    known: Sequence[Array | None] = (),
) -> _Body:
    """Return the body for a node.

    Args:
        node: The node.
        operator: Its operator, which has the body.
        inputs: Its inputs, of which only is read whether they are omitted.
        types: The types of the inputs.
        known: Shape values of the inputs; None: unknown.

    Raises:
        UnsupportedOpError: the body does not support these attributes.
        ShapeError: the body needs a type that is not known, or the operands do not fit.
    """
    key = _key_of(node, operator, inputs, types, known)
    found = None if key is None else _BODIES.get(key)
    if found is None:
        pairs = enumerate(zip(inputs, types, strict=True))
        inner = [None if v is None else Value(f"input {k}", type_) for k, (v, type_) in pairs]
        call = Call(node, operator, inner, known)
        results = call.results()
        found = _Body(inner, call.nodes, results)
        if key is not None:
            if len(_BODIES) >= _MOST_BODIES:
                _BODIES.clear()
            _BODIES[key] = found
    return found


def _key_of(
    node: Node,
    operator: Operator,
    inputs: Sequence[Value | None],
    types: Sequence[ValueType | None],
    known: Sequence[Array | None],
) -> Any:
    """Return all that a body may depend on; None if attributes or types have no equality for it.

    The arguments are those of `_body_of`.
    """
    if not all(isinstance(v, (int, float, str, bytes, tuple)) for v in node.attrs.values()):
        return None
    # Decisions that depend on symbolic sizes are recorded each time that a plan is made with them.
    for type_ in types:
        if isinstance(type_, TensorType):
            if any(map(is_symbolic, type_.shape or ())):
                return None
        elif type_ is not None:
            return None
    if any(elements is not None and has_symbolic(elements) for elements in known):
        return None
    graph = node.graph
    return (
        operator.body,
        # 0, 0.0 and False are equal, but not as attributes.
        repr(sorted(node.attrs.items())),
        *(node.op_type, node.domain, node.version),
        tuple([value is None for value in inputs]),
        tuple(types),
        repr([None if elements is None else elements.tolist() for elements in known]),
        tuple([graph is None or bool(v.uses) or graph.is_output(v) for v in node.outputs]),
    )


def function_of(node: Node) -> Operator | None:
    """Return the operator of a node if `function` declared it with a body, else None."""
    if not contributed(node.op_type, node.domain):
        return None
    found = operator_of(node)
    return None if found.body is None else found


def expanded(node: Node, inputs: Sequence[Value | None]) -> list[Value | None] | None:
    """Return the values that replace a node's outputs; None if its operator has no body.

    Args:
        node: The node to replace.
        inputs: Values that the body reads, of the types of the node's inputs.

    Raises:
        UnsupportedOpError: the body does not support these attributes, or lacks a used output.
        ShapeError: the body needs a type that is not known, or the operands do not fit.
    """
    found = function_of(node)
    if found is None:
        return None
    check_operands(node, [None if value is None else value.type for value in node.inputs])
    types = [None if value is None else value.type for value in inputs]
    return _check_used(node, _body_of(node, found, inputs, types).copy_for(node, inputs))


def _check_used(node: Node, results: list[Value | None]) -> list[Value | None]:
    """Return ``results``, after a check that they have every output of the node that is used.

    Raises:
        UnsupportedOpError: the body has no value for a used output.
    """
    graph = node.graph
    outputs = node.outputs
    for k, (value, result) in enumerate(zip_longest(outputs, results[: len(outputs)])):
        if result is None and graph is not None and (value.uses or graph.is_output(value)):
            raise _unsupported(node, f"output {k}, {value.name!r}, which its definition lacks,")
    return results


def _unsupported(node: Node, what: str) -> UnsupportedOpError:
    return UnsupportedOpError(
        f"node {node.name!r}: operator {node.domain}.{node.op_type} with {what} is not supported; "
        "export the model without this fusion, or register the operator with "
        "core.add_extension(...)"
    )


def _declared(node: Node) -> Operator:
    """Return the node's operator, which `function` has registered."""
    return OPERATORS.get(operator_key(node.op_type, node.domain))


def _infer(
    node: Node, types: Sequence[ValueType | None], values: Sequence[Array | None]
) -> Sequence[ValueType | None]:
    """Return the types of the body's results (the operator's ``infer``)."""
    known = [None if v is None else from_array(v) for v in values]
    try:
        body = _body_of(node, _declared(node), node.inputs, types, known)
    except UnsupportedOpError:
        return []  # loading succeeds; running the node raises the error
    except ShapeError:
        # With complete types the operands are wrong. Otherwise the body may only lack a size that
        # is known when the model runs.
        if all(isinstance(t, TensorType) and t.is_static for t in types if t is not None):
            raise
        return []
    return [None if value is None else value.type for value in body.results]


def _compute(node: Node, given: Sequence[Any]) -> Sequence[Any]:
    """Evaluate the body node by node (the operator's ``compute``)."""
    found = _declared(node)
    inputs = [
        None if array is None else Value(f"input {k}", TensorType(dtype_of(array), array.shape))
        for k, array in enumerate(given)
    ]
    # Types inside the body depend on the elements of inputs that may be shapes.
    elements = [None if array is None else from_array(array) for array in given]
    call = Call(node, found, inputs, elements)
    results = _check_used(node, call.results())
    known: dict[Value | None, Any] = {**dict(zip(inputs, given, strict=True)), None: None}
    return evaluate_nodes(call.nodes, known, results)
