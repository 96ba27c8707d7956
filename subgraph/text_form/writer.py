"""The text form of a graph, ``str(graph)``; `subgraph.text_form.parser` reads it back.

    graph "net" opsets {"" = 17} {
      input %x: float32[N, 3, 8, 8]
      weight %w: float32[4, 3, 3, 3] = @w
      %y: float32[N, 4, 8, 8] = Conv@11(%x, %w, -) "conv" {pads = [1, 1, 1, 1]}
      return %y
    }
    parameter @w: float32[4, 3, 3, 3] = base64 "..."

The text is deterministic, and takes linear time. Bodies and inner graphs are inside their node.
Large arrays and the record of a partition are omitted unless ``data`` is "all". For an op of a
subgraph node the text has metadata, from which a registered property makes the op again. Attributes
of the graph that JSON cannot represent, such as a property, are omitted.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable
from typing import Any, Literal, cast

import numpy as np

from subgraph.dtypes import DTYPES
from subgraph.errors import ModelError, require_type
from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.parameters import Parameter
from subgraph.graph.types import Array, TensorType, ValueType, dtype_of
from subgraph.partition.op_note import saved_metadata
from subgraph.partition.record import PartitionRecord
from subgraph.partition.saved import dump_record

Data = Literal["small", "all", "none", "digest"]

# Both limits are choices for people who read the text: a shape or a list of axes is readable as
# numbers, and 4 KiB are about a page of base64.
_READABLE = 16  # elements; arrays of at most so many are written as numbers, larger ones as base64
_SMALL = 4096  # bytes; larger arrays are omitted unless data is "all"
_BARE = re.compile(r"[A-Za-z0-9_.$/\-]+")


def print_graph(graph: Graph, data: Data = "small") -> str:
    """Return the text form of a graph.

    Args:
        graph: The graph.
        data: Arrays whose elements are written: "small" (up to 4 KiB), "all", "none"; "digest" is
            "small" with the SHA-256 of the other arrays.

    Raises:
        ModelError: ``graph`` is no graph.
    """
    require_type(graph, Graph, ModelError, "a graph, as sg.load returns")
    printer = _Printer(data)
    printer.graph(graph, "")
    printer.parameters()
    return "".join(printer.out)


def quoted(text: str) -> str:
    """Return text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def _name(name: str) -> str:
    return name if _BARE.fullmatch(name) else quoted(name)


def _is_plain(value: Any) -> bool:
    """Return whether JSON can represent a value."""
    if isinstance(value, dict):
        # JSON turns keys of other types into strings, so another dict would be read back. For the
        # same reason a tuple is not plain: it would be read back as a list.
        table = cast("dict[Any, Any]", value)
        return all(isinstance(key, str) and _is_plain(item) for key, item in table.items())
    if isinstance(value, list):
        return all(map(_is_plain, cast("list[Any]", value)))
    return value is None or isinstance(value, (str, int, float))


class _Printer:
    def __init__(self, data: Data) -> None:
        self.out: list[str] = []
        self._data = data
        self._labels: dict[Parameter, str] = {}
        self._taken: set[str] = set()

    def graph(self, graph: Graph, indent: str) -> None:
        """Write a graph from the word ``graph`` to its closing brace, lines after ``indent``."""
        out, inside = self.out, indent + "  "
        opsets = ", ".join(f"{quoted(k)} = {v}" for k, v in graph.opsets.items())
        out.append(f"graph {quoted(graph.name)}{f' opsets {{{opsets}}}' if opsets else ''} {{\n")
        if graph.doc:
            out.append(f"{inside}doc {quoted(graph.doc)}\n")
        for key, text in graph.metadata.items():
            out.append(f"{inside}meta {quoted(key)} = {quoted(text)}\n")
        for key, held in graph.attrs.items():
            if isinstance(held, PartitionRecord):
                if self._data == "all":
                    out.append(f"{inside}attr {quoted(key)} = json {quoted(dump_record(held))}\n")
            elif _is_plain(held):
                text = json.dumps(held, ensure_ascii=False)
                out.append(f"{inside}attr {quoted(key)} = json {quoted(text)}\n")
        for value in graph.inputs:
            self._source("input", value, inside)
        for value in graph.captures:
            self._source("capture", value, inside)
        # The parser reads in one pass, so every value has to stand above the nodes that use it.
        self._weights(graph, inside)
        for node in graph.nodes:
            self._node(node, inside)
        outputs = ", ".join(self._value(v) for v in graph.outputs)
        out.append(f"{inside}return{' ' if outputs else ''}{outputs}\n{indent}}}")

    def _weights(self, graph: Graph, indent: str) -> None:
        # A parameter that is an input of the graph has been declared there.
        seen = {value.name for value in (*graph.inputs, *graph.captures)}
        used = (value for node in graph.nodes for value in node.sources)
        for values in (used, graph.outputs):
            for value in values:
                if value.parameter is not None and value.name not in seen:
                    seen.add(value.name)
                    self._source("weight", value, indent)

    def _source(self, word: str, value: Value, indent: str) -> None:
        label = "" if value.parameter is None else f" = @{_name(self._label(value.parameter))}"
        self.out.append(f"{indent}{word} {self._typed(value)}{label}\n")

    def _label(self, parameter: Parameter) -> str:
        label = self._labels.get(parameter)
        if label is None:
            # Names are unique in a graph and its bodies, but the inner graph of a subgraph node may
            # have another parameter of the same name. The label tells them apart, and `parameters`
            # writes the name beside it.
            label, number = parameter.name, 1
            while label in self._taken:
                number += 1
                label = f"{parameter.name}#{number}"
            self._taken.add(label)
            self._labels[parameter] = label
        return label

    def _value(self, value: Value | None) -> str:
        return "-" if value is None else "%" + _name(value.name)

    def _typed(self, value: Value) -> str:
        shown = self._value(value)
        return shown if value.type is None else f"{shown}: {value.type}"

    def _node(self, node: Node, indent: str) -> None:
        out = self.out
        made = ", ".join(self._typed(v) for v in node.outputs)
        # Of a node without outputs this name begins a line: bare, it might be read as a keyword.
        name = _name if made else quoted
        domain = f"{name(node.domain)}::" if node.domain else ""
        inputs = ", ".join([self._value(v) for v in node.inputs])
        out.append(
            f"{indent}{made}{' = ' if made else ''}{domain}{name(node.op_type)}@{node.version}"
            f"({inputs}) {quoted(node.name)}"
        )
        if node.attrs:
            out.append(" {")
            for position, (key, value) in enumerate(node.attrs.items()):
                out.append(f"{', ' if position else ''}{_name(key)} = ")
                self._attribute(value, indent + "  ")
            out.append("}")
        if node.captures:
            out.append(f" captures ({', '.join(self._value(v) for v in node.captures)})")
        # An op is code and has no text. Its note names the property that makes the op again.
        metadata = node.metadata if node.op is None else saved_metadata(node)
        if metadata:
            notes = ", ".join(f"{quoted(k)} = {quoted(v)}" for k, v in metadata.items())
            out.append(f" meta {{{notes}}}")
        if node.subgraph is not None:
            out.append(" subgraph ")
            self.graph(node.subgraph, indent)
        out.append("\n")

    def _attribute(self, value: Any, indent: str) -> None:
        from subgraph.operators.protobuf import SparseTensor

        item: Any = value
        match value:
            case Graph():
                self.graph(value, indent)
            case tuple() | list():
                self.out.append("[")
                for position, part in enumerate(item):
                    if position:
                        self.out.append(", ")
                    self._attribute(part, indent)
                self.out.append("]")
            case np.ndarray():
                self.out.append(f"tensor {self._array(item)}")
            case SparseTensor():
                self.out.append("sparse ")
                self._attribute((value.values, value.indices, tuple(value.shape)), indent)
            case _:
                self.out.append(_scalar(value))

    def _array(self, array: Array) -> str:
        shown = str(TensorType(dtype_of(array), array.shape))
        return shown + self._content(array)

    def _content(self, array: Array) -> str:
        """Return " = " and the elements, or "" if they are omitted."""
        small = array.size <= _READABLE or array.nbytes <= _SMALL
        if self._data == "none" or (self._data in ("small", "digest") and not small):
            if self._data != "digest":
                return ""
            return f" = sha256 {quoted(_digest(array))}"
        # NumPy's kinds of strings (object, str, bytes, StringDType) have no fixed bytes per
        # element.
        if array.dtype.kind in "OUST":
            items = (_scalar(s if isinstance(s, bytes) else str(s)) for s in array.ravel().tolist())
            return f" = [{', '.join(items)}]"
        numbers = _numbers(array) if array.size <= _READABLE else None
        if numbers is not None:
            return f" = [{', '.join(numbers)}]"
        raw = np.ascontiguousarray(array).tobytes()
        return f" = base64 {quoted(base64.b64encode(raw).decode())}"

    def parameters(self) -> None:
        """Write the parameters that the written graphs use."""
        self.out.append("\n")
        for parameter, label in self._labels.items():
            renamed = "" if label == parameter.name else f" {quoted(parameter.name)}"
            self.out.append(
                f"parameter @{_name(label)}{renamed}: {parameter.type}"
                f"{self._content(parameter.array)}\n"
            )


def _digest(array: Array) -> str:
    # The memory of such an array is pointers, which differ in every process.
    if array.dtype.kind in "OUST":
        raw = json.dumps([_scalar(s) for s in array.ravel().tolist()]).encode()
        return hashlib.sha256(raw).hexdigest()
    # The dtypes of ml_dtypes, such as bfloat16, do not support the buffer protocol; bytes do.
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return hashlib.sha256(data.data).hexdigest()


def _numbers(array: Array) -> Iterable[str] | None:
    """Return the elements as numbers that read back to the same bits; None if there are none."""
    items = array.ravel()
    if DTYPES[dtype_of(array)].kind in ("bool", "int", "uint"):
        return [str(int(item)) for item in items]
    # The form has no complex numbers, and the payload of a NaN has no decimal form; base64 keeps
    # both.
    if array.dtype.kind == "c":
        return None
    wide = items.astype(np.float64)
    if not np.isfinite(wide).all():
        return None
    # ``str`` of a float16 or float32 is the shortest decimal that reads back to the same element;
    # ``repr`` of the wider float64 would give many digits that mean nothing.
    short = array.dtype.kind == "f" and array.dtype.itemsize <= 4
    return [_float(str(item)) if short else repr(float(item)) for item in items]


def _float(text: str) -> str:
    # The parser reads digits alone as an int.
    return text if any(mark in text for mark in ".en") else text + ".0"


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, bytes):
        return f"bytes {quoted(base64.b64encode(value).decode())}"
    if isinstance(value, np.generic):
        return _scalar(value.item())
    # A bool is an int too, and ``str`` of it would be a word that the parser does not know.
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, float):
        return repr(value)
    if value is None:
        return "none"
    if isinstance(value, ValueType):
        return f"type {value}"
    # The parser refuses this word: a text for people may omit an attribute's value, but a graph
    # that is read back must not lose it silently.
    return f"opaque {quoted(repr(value))}"
