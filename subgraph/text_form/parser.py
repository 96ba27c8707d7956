"""Parser of the text form of graphs, ``sg.parse``; `subgraph.text_form.writer` defines the form.

A tokenizer of one regular expression and a recursive-descent parser. Errors have line and column.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from subgraph.errors import ModelError, ShapeError
from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.parameters import Parameter
from subgraph.graph.types import (
    Array,
    Dim,
    MapType,
    OptionalType,
    SequenceType,
    Shape,
    SparseTensorType,
    TensorType,
    ValueType,
    numpy_dtype,
)
from subgraph.operators.subgraph_op import DefaultSubgraphOp
from subgraph.partition.record import KEY
from subgraph.partition.saved import load_record
from subgraph.system.gc_control import paused_gc

_T = TypeVar("_T")
_TOKEN = re.compile(
    r"""(?:\s+|\#[^\n]*)*
    (?: (?P<number>-?(?:inf|nan)\b|-?\d+(?:\.\d*)?(?:[eE][+-]?\d+)?)
      | (?P<string>"(?:[^"\\\n]|\\.)*")
      | (?P<word>[A-Za-z_][A-Za-z0-9_]*)
      | (?P<end>\Z)
      | (?P<mark>::|.)
    )""",
    re.VERBOSE,
)
_BARE = re.compile(r"[A-Za-z0-9_.$/\-]+")
# A string cannot contain a line break, which JSON escapes, so a line that begins like this is no
# part of a string.
_PARAMETERS = re.compile(r"^[ \t]*parameter @", re.MULTILINE)


def parse(text: str, parameters: Mapping[str, Parameter | npt.ArrayLike] | None = None) -> Graph:
    """Return the graph of a text form.

    Args:
        text: A text that ``str(graph)`` returned, or written by hand.
        parameters: Parameters or arrays by name; they replace data of the text. A parameter
            without data is all zeros.

    Raises:
        ModelError: the text is malformed; the message has line and column.
    """
    from subgraph.partition.restore import restore_ops

    given: Any = text
    if not isinstance(given, str):
        raise ModelError(
            f"the text form is a str, got {type(given).__name__}; a file is read by "
            "pathlib.Path(...).read_text(), an ONNX model by sg.load"
        )
    parser = _Parser(text, parameters or {})
    try:
        with paused_gc():
            # Values of the graph name their parameters, which stand at the end of the text, so
            # these are read first.
            parser.declare()
            graph = parser.graph()
            restore_ops(graph)
    except RecursionError as error:
        raise ModelError("the text nests graphs too deeply") from error
    # `declare` has read and checked everything from the first parameter on. Anything else after the
    # graph, such as a second graph, would be ignored without this check.
    if parser.kind != "end" and not parser.at("parameter"):
        parser.fail("expected 'parameter' or the end")
    return graph


class _Tokens:
    """Tokenizer with a lookahead of one.

    Attributes:
        text: The whole text.
        kind: Kind of the next token: "number", "string", "word", "end" or "mark".
        token: Text of the next token.
        start: Position of the next token in the text.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.kind = self.token = ""
        self.start = 0
        self._next = 0
        self.seek(0)

    def seek(self, position: int) -> None:
        """Continue at a position of the text."""
        self._next = position
        self.advance()

    def advance(self) -> None:
        """Skip the next token."""
        match = _TOKEN.match(self.text, self._next)
        assert match is not None, "the pattern's last part takes any character"
        self.kind = match.lastgroup or ""
        self.token = match.group(self.kind)
        self.start = match.start(self.kind)
        self._next = match.end()

    def fail(self, why: str, start: int | None = None) -> NoReturn:
        """Raise ModelError with line and column of position ``start`` (None: the next token)."""
        at = self.start if start is None else start
        # Line and column are counted only for an error, so that tokens need not track them.
        line = self.text.count("\n", 0, at) + 1
        column = at - self.text.rfind("\n", 0, at)
        rest = self.text[at : at + 30].split("\n")[0]
        raise ModelError(f"line {line}, column {column}: {why}, at {rest!r}")

    def at(self, token: str) -> bool:
        """Return whether the next token is ``token``, a mark or a word."""
        return self.token == token and self.kind in ("mark", "word")

    def take(self, token: str) -> bool:
        """Skip the next token if it is ``token``; return whether it was."""
        found = self.at(token)
        if found:
            self.advance()
        return found

    def expect(self, token: str) -> None:
        """Skip the next token, which must be ``token``."""
        if not self.take(token):
            self.fail(f"expected {token!r}")

    def string(self) -> str:
        """Read a string in quotes."""
        if self.kind != "string":
            self.fail('expected a string in "quotes"')
        try:
            text: str = json.loads(self.token)
        except json.JSONDecodeError as error:
            self.fail(f"not a string: {error}")
        self.advance()
        return text

    def converted(self, convert: Callable[[str], _T], wanted: str) -> _T:
        """Read a string in quotes and convert it.

        Args:
            convert: Raises ValueError for a string that it cannot convert.
            wanted: What the string has to be, for the message.
        """
        start, text = self.start, self.string()
        try:
            return convert(text)
        except ValueError as error:  # includes Python's limit of digits in an int
            self.fail(f"not {wanted}: {error}", start)

    def name(self) -> str:
        """Read a bare name or a string."""
        if self.kind == "string":
            return self.string()
        # A bare name may begin with a digit and contain "/", "." and "-", which end a token. It is
        # therefore matched again from the start of the token, and the tokenizer continues after it.
        match = _BARE.match(self.text, self.start)
        if match is None:
            self.fail("expected a name")
        self.seek(match.end())
        return match.group()

    def number(self) -> int | float:
        """Read a number; one of digits only is an int, "inf" and "nan" are floats."""
        if self.kind != "number":
            self.fail("expected a number")
        token = self.token
        try:
            # Digits alone stay an int of any size: as a float, an int64 from 2**53 on could change.
            number = int(token) if token.lstrip("-").isdigit() else float(token)
        except ValueError as error:  # too many digits
            self.fail(f"not a number: {error}")
        self.advance()
        return number

    def whole(self) -> int:
        """Read a whole number."""
        start = self.start
        number = self.number()
        if not isinstance(number, int):
            self.fail("expected a whole number", start)
        return number

    def items(self, item: Callable[[], Any], opening: str, closing: str) -> list[Any]:
        """Read items, separated by commas, between two brackets.

        Args:
            item: Reads one item.
            opening: The opening bracket.
            closing: The closing bracket.
        """
        self.expect(opening)
        return self.items_until(item, closing)

    def items_until(self, item: Callable[[], Any], closing: str) -> list[Any]:
        """Read items, separated by commas, and the closing bracket after them."""
        found: list[Any] = []
        while not self.at(closing):
            found.append(item())
            if not self.take(","):
                break
        self.expect(closing)
        return found


class _Parser(_Tokens):
    def __init__(self, text: str, given: Mapping[str, Parameter | npt.ArrayLike]) -> None:
        self._given = given
        self._parameters: dict[str, Parameter] = {}
        super().__init__(text)

    # Types

    def _type(self) -> ValueType | None:
        if self.take("?"):
            return None
        start = self.start
        word = self.name()
        try:
            match word:
                case "sparse":
                    self.expect("(")
                    sparse = SparseTensorType(self.name(), self._shape())
                    self.expect(")")
                    return sparse
                case "seq" | "optional":
                    self.expect("(")
                    element = self._type()
                    self.expect(")")
                    return SequenceType(element) if word == "seq" else OptionalType(element)
                case "map":
                    self.expect("(")
                    key = self.name()
                    self.expect(",")
                    value = self._type()
                    self.expect(")")
                    return MapType(key, value)
                case _:
                    return TensorType(word, self._shape())
        except ShapeError as error:
            self.fail(str(error), start)

    def _shape(self) -> Shape | None:
        self.expect("[")
        if self.take("*"):
            self.expect("]")
            return None
        return tuple(self.items_until(self._dim, "]"))

    def _dim(self) -> Dim:
        if self.take("?"):
            return None
        return self.whole() if self.kind == "number" else self.name()

    # Parameters

    def declare(self) -> None:
        """Read the parameters at the end of the text; then continue at the begin of the text."""
        match = _PARAMETERS.search(self.text)
        self.seek(len(self.text) if match is None else match.start())
        while self.take("parameter"):
            self.expect("@")
            label = self.name()
            name = self.string() if self.kind == "string" else label
            self.expect(":")
            start = self.start
            type_ = self._type()
            array = self._content(type_, start)
            if label in self._parameters:
                self.fail(f"parameter @{label} is listed twice", start)
            self._parameter(label, name, type_, array, start)
        if self.kind != "end":
            self.fail("expected 'parameter' or the end")
        self.seek(0)

    def _parameter(
        self, label: str, name: str, type_: ValueType | None, array: Array | None, start: int
    ) -> Parameter:
        if not isinstance(type_, TensorType) or not type_.is_static:
            self.fail("a parameter has a tensor type of fixed shape", start)
        # The label in the text is unique. The parameter's own name may be shared by two parameters,
        # so the label has priority.
        held = self._given.get(label, self._given.get(name))
        if isinstance(held, Parameter):
            parameter = held
        elif held is not None:
            parameter = Parameter(name, held)
        else:
            parameter = Parameter.adopt(name, self._zeros(type_, start) if array is None else array)
        if parameter.type != type_:
            self.fail(f"parameter @{label} was given as {parameter.type}", start)
        self._parameters[label] = parameter
        return parameter

    def _content(self, type_: ValueType | None, start: int) -> Array | None:
        """Read the elements of an array; None if the text omits them."""
        if not isinstance(type_, TensorType) or not type_.is_static:
            self.fail("an array has a tensor type of fixed shape", start)
        if not self.take("="):
            return None
        shape, dtype = type_.sizes, numpy_dtype(type_.dtype)
        start = self.start
        try:
            # A digest serves to compare texts; the elements cannot be restored from it.
            if self.take("sha256"):
                self.string()
                return None
            if self.take("base64"):
                raw = bytearray(_from_base64(self.string()))
                array: Array = np.frombuffer(raw, dtype).reshape(shape)
            else:
                items = self.items(self._element, "[", "]")
                if any(isinstance(item, (str, bytes)) != (dtype.kind == "O") for item in items):
                    self.fail(f"the elements do not make {type_}", start)
                # An array of Python objects keeps every int exact until the conversion to the final
                # dtype. NumPy's own choice for a mix of ints and floats, or for an int from 2**63
                # on, would round.
                array = np.array(items, dtype=object)
                if dtype.kind not in "Obiufc":
                    exact = any(isinstance(item, float) for item in items)
                    array = array.astype(np.float64 if exact else np.int64)
                with np.errstate(over="ignore"):
                    array = array.astype(dtype).reshape(shape)
        except ModelError:
            raise
        except (ValueError, TypeError, OverflowError) as error:
            self.fail(f"the elements do not make {type_}: {error}", start)
        array.flags.writeable = False
        return array

    def _element(self) -> Any:
        if self.kind == "number":
            return self.number()
        return self._bytes() if self.take("bytes") else self.string()

    def _bytes(self) -> bytes:
        return self.converted(_from_base64, "base64")

    # Graphs

    def graph(self) -> Graph:
        """Read a graph from the word ``graph`` to its closing brace."""
        self.expect("graph")
        name = self.string()
        opsets = dict(self.items(self._opset, "{", "}")) if self.take("opsets") else {}
        start = self.start
        self.expect("{")
        attrs: dict[str, Any] = {}
        metadata: dict[str, str] = {}
        values: dict[str, Value] = {}
        inputs: list[Value] = []
        captures: list[Value] = []
        nodes: list[Node] = []
        doc = ""
        while not self.take("return"):
            if self.at("%") or self.kind not in ("word", "string"):
                nodes.append(self._node(values))
            elif self.take("input"):
                inputs.append(self._source(values))
            elif self.take("capture"):
                captures.append(self._source(values))
            elif self.take("weight"):
                self._source(values, weight=True)
            elif self.take("doc"):
                doc = self.string()
            elif self.take("meta"):
                key, note = self._note()
                metadata[key] = note
            elif self.take("attr"):
                key = self.string()
                self.expect("=")
                self.expect("json")
                attrs[key] = (
                    # The record of a partition is not plain JSON for a Graph: `explain` needs its
                    # class, and its numbers must be checked before they index lists.
                    self.converted(json.loads, "JSON")
                    if key != KEY
                    else self.converted(load_record, "a record")
                )
            else:
                nodes.append(self._node(values))
        outputs = self.items_until(lambda: self._known(values), "}")
        try:
            return Graph(
                inputs,
                outputs,
                name,
                nodes=nodes,
                captures=captures,
                attrs=attrs,
                opsets=opsets,
                metadata=metadata,
                doc=doc,
            )
        except ModelError as error:
            self.fail(str(error), start)

    def _opset(self) -> tuple[str, int]:
        domain = self.string()
        self.expect("=")
        return domain, self.whole()

    def _note(self) -> tuple[str, str]:
        key = self.string()
        self.expect("=")
        return key, self.string()

    def _source(self, values: dict[str, Value], *, weight: bool = False) -> Value:
        value = self._made(values)
        start = self.start
        if self.take("="):
            self.expect("@")
            label = self.name()
        elif weight:
            # A handwritten text may omit "= @label"; the parameter then has the name of the value.
            label = value.name
        else:
            return value
        parameter = self._parameters.get(label)
        if parameter is None:
            parameter = self._parameter(label, label, value.type, None, start)
        value.parameter = parameter
        return value

    def _made(self, values: dict[str, Value]) -> Value:
        start = self.start
        self.expect("%")
        name = self.name()
        if name in values:
            self.fail(f"value %{name} is made twice", start)
        value = values[name] = Value(name, self._type() if self.take(":") else None)
        return value

    def _known(self, values: Mapping[str, Value]) -> Value:
        start = self.start
        self.expect("%")
        name = self.name()
        value = values.get(name)
        if value is None:
            self.fail(f"nothing above makes value %{name}", start)
        return value

    def _node(self, values: dict[str, Value]) -> Node:
        outputs: list[Value] = []
        # Outputs become known only after the inputs are read, so that a node cannot use its own
        # result.
        made: dict[str, Value] = {}
        if self.at("%"):
            outputs.append(self._made(made))
            while self.take(","):
                outputs.append(self._made(made))
            self.expect("=")
        op_type, domain = self.name(), ""
        if self.take("::"):
            op_type, domain = self.name(), op_type
        version = self.whole() if self.take("@") else 0
        inputs = self.items(lambda: None if self.take("-") else self._known(values), "(", ")")
        name = self.string() if self.kind == "string" else ""
        attrs = dict(self.items(self._pair, "{", "}")) if self.at("{") else {}
        captures: list[Value] = []
        if self.take("captures"):
            captures = self.items(lambda: self._known(values), "(", ")")
        metadata = dict(self.items(self._note, "{", "}")) if self.take("meta") else {}
        # An inner graph resolves its own names only: a region gets every outer value as an input.
        inner = self.graph() if self.take("subgraph") else None
        for value in outputs:
            if value.name in values:
                self.fail(f"value %{value.name} is made twice")
            values[value.name] = value
        return Node(
            op_type,
            inputs,
            outputs=outputs,
            name=name,
            domain=domain,
            version=version,
            attrs=attrs,
            captures=captures,
            metadata=metadata,
            subgraph=inner,
            # `restore_ops` replaces the default op if a registered property can make the region's
            # own.
            op=None if inner is None else DefaultSubgraphOp(inner),
        )

    def _pair(self) -> tuple[str, Any]:
        key = self.name()
        self.expect("=")
        return key, self._attribute()

    def _attribute(self) -> Any:
        if self.kind == "number":
            return self.number()
        if self.kind == "string":
            return self.string()
        if self.at("["):
            return tuple(self.items(self._attribute, "[", "]"))
        if self.at("graph"):
            return self.graph()
        if self.take("none"):
            return None
        if self.take("bytes"):
            return self._bytes()
        if self.take("type"):
            return self._type()
        if self.take("tensor"):
            return self._tensor()
        if self.take("sparse"):
            return self._sparse()
        self.fail("expected the value of an attribute (one of those that have a text form)")

    def _tensor(self) -> Array:
        start = self.start
        type_ = self._type()
        array = self._content(type_, start)
        assert isinstance(type_, TensorType), "_content takes no other"
        return self._zeros(type_, start) if array is None else array

    def _zeros(self, type_: TensorType, start: int) -> Array:
        """Return a read-only array of zeros that takes the memory of one element."""
        shape, dtype = type_.sizes, numpy_dtype(type_.dtype)
        # The text states any shape it likes. Memory for all elements would let a line of text
        # exhaust the machine, so one zero is repeated with strides of 0.
        zero: Any = "" if type_.dtype == "string" else 0
        try:
            if math.prod(shape) == 0:
                return np.empty(shape, dtype)
            return np.broadcast_to(np.array(zero, dtype), shape)
        except ValueError as error:
            self.fail(f"no array can be of type {type_}: {error}", start)

    def _sparse(self) -> Any:
        from subgraph.operators.protobuf import SparseTensor

        start = self.start
        parts = self.items(self._attribute, "[", "]")
        kinds: list[Any] = [type(part) for part in parts]
        # NumPy compares the indices with the shape when the tensor is made dense.
        if kinds != [np.ndarray, np.ndarray, tuple] or not all(map(_is_int, parts[2])):
            self.fail("a sparse tensor has values, indices and a shape", start)
        return SparseTensor(*parts)


def _from_base64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _is_int(number: object) -> bool:
    return isinstance(number, int)
