"""The pass "ConvertPrecision": values of one float dtype are computed in another one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import numpy as np

from subgraph.dtypes import FLOATS
from subgraph.errors import PassError, SubgraphError
from subgraph.graph.graph import Graph, Node, Value
from subgraph.graph.types import (
    ONNX_DTYPE,
    Array,
    OptionalType,
    SequenceType,
    TensorType,
    ValueType,
    canonical_dtype,
    numpy_dtype,
)
from subgraph.operators.inference import infer_types
from subgraph.operators.schema import find_schema
from subgraph.operators.subgraph_op import DefaultSubgraphOp, runs_by_default
from subgraph.transform.pass_manager import register_pass

from .widen_half import cast_value

# Attributes that name a dtype by its ONNX number.
_DTYPE_ATTRIBUTES = ("to", "dtype", "output_dtype", "output_datatype", "stash_type")


@register_pass("ConvertPrecision")
@attrs.frozen
class ConvertPrecision:
    """Convert all values of dtype ``source`` to ``target``, those of bodies included.

    Inputs and outputs of the model keep their dtypes. Parameters stay the same objects with a Cast
    after each, so assignments to weights still take effect. Regions that run by the default op are
    converted inside. Regions with an op of their own are not changed, since the op was made for
    their dtype; Casts around them convert their inputs and outputs.

    Attributes:
        source: The dtype to replace, for example "float16".
        target: The dtype to compute in.
    """

    source: str = attrs.field(default="float16", converter=canonical_dtype)
    target: str = attrs.field(default="float32", converter=canonical_dtype)

    def __call__(self, graph: Graph) -> Graph:
        """Return the converted graph.

        Raises:
            PassError: ``source`` or ``target`` is not a float dtype.
        """
        for dtype in (self.source, self.target):
            if dtype not in FLOATS:
                raise PassError(f"ConvertPrecision is for {', '.join(FLOATS)}; got {dtype!r}")
        copy = graph.clone()
        wanted = [v.type for v in copy.outputs]
        for level in copy.levels():
            self._convert(level, is_body=level is not copy)
        return self._with_old_outputs(copy, wanted)

    def _convert(self, level: Graph, *, is_body: bool) -> None:
        replacements: dict[Value, Value] = {}
        version = level.opsets.get("", 13)
        made = {value for node in level.nodes for value in node.outputs}
        own_dtype = {} if is_body else dict.fromkeys(level.inputs)
        for value in list(level.values()):
            if value in made or self._converted(value.type) == value.type:
                continue
            if value.parameter is None and value not in own_dtype:
                value.type = self._converted(value.type)  # an input or capture of a body
            elif isinstance(value.type, TensorType):
                replacements[value] = cast_value(value, self.target, version)
        for node in level.nodes:
            if node.subgraph is None:
                self._convert_node(node)
                if self._cast_operands(node, replacements, version) or self.source == "float32":
                    self._cast_fixed(node, replacements, version)
            elif runs_by_default(node.op):
                self._convert_region(node, node.subgraph)
            else:
                self._wrap_in_casts(node, replacements, version)
        level.rewire(replacements)

    def _convert_region(self, node: Node, inner: Graph) -> None:
        """Convert the inner graph of a region; the Casts of its weights stand inside."""
        copy = inner.clone()
        for level in copy.levels():
            self._convert(level, is_body=True)
        pairs = zip(node.inputs, inner.inputs, strict=True)
        node.inputs = tuple(_own_weight(outer, formal) for outer, formal in pairs)
        self._convert_node(node)
        node.subgraph = copy
        if node.op is not None:
            node.op = DefaultSubgraphOp(copy)

    def _convert_node(self, node: Node) -> None:
        for value in node.outputs:
            value.type = self._converted(value.type)
        for key in list(node.attrs):
            node.attrs[key] = self._attribute(key, node.attrs[key])

    def _cast_operands(self, node: Node, replacements: Mapping[Value, Value], version: int) -> bool:
        """Put Casts before operands that the operator takes in ``source`` but not in ``target``.

        Args:
            node: A converted node.
            replacements: New values by replaced ones.
            version: Version of the Casts.

        Returns:
            Whether there are such operands, as the scales of a Resize.
        """
        schema = find_schema(node.op_type, node.domain, node.version)
        inputs = list(node.inputs)
        for k, value in enumerate(inputs):
            known = frozenset[str]() if schema is None else schema.dtypes_of(k)
            if value is None or self.target in known or self.source not in known:
                continue
            type_ = replacements.get(value, value).type
            if isinstance(type_, TensorType) and type_.dtype == self.target:
                inputs[k] = self._in_source(value, replacements, version)
        found = inputs != list(node.inputs)
        node.inputs = tuple(inputs)
        return found

    def _in_source(self, value: Value, replacements: Mapping[Value, Value], version: int) -> Value:
        """Return a converted value in ``source``, by a Cast unless it was not converted itself."""
        if value not in replacements:
            return cast_value(value, self.source, version)
        # `rewire` would replace a use by the node, but no inputs of new nodes.
        same = Node("Identity", [value], version=1).outputs[0]
        same.type = value.type
        return same

    def _cast_fixed(self, node: Node, replacements: dict[Value, Value], version: int) -> None:
        """Put Casts after results that are ``source`` all the same, as of some Constants.

        Args:
            node: A converted node.
            replacements: New values by replaced ones; the Casts are added.
            version: Version of the Casts.
        """
        if node.bodies:
            return  # they are converted later
        given = [None if v is None else replacements.get(v, v).type for v in node.inputs]
        try:
            found = infer_types(node, given)
        except SubgraphError:
            return
        for value, type_ in zip(node.outputs, found, strict=True):
            if isinstance(type_, TensorType) and type_.dtype == self.source != self.target:
                value.type = type_
                replacements[value] = cast_value(value, self.target, version)

    def _attribute(self, key: str, value: Any) -> Any:
        held: Any = value
        if isinstance(value, np.ndarray) and held.dtype == numpy_dtype(self.source):
            array: Array = held.astype(numpy_dtype(self.target))
            array.flags.writeable = False
            return array
        if key in _DTYPE_ATTRIBUTES and held == ONNX_DTYPE[self.source]:
            return ONNX_DTYPE[self.target]
        return held

    def _wrap_in_casts(self, node: Node, replacements: dict[Value, Value], version: int) -> None:
        """Put Casts around a region that keeps its dtypes.

        Args:
            node: The subgraph node.
            replacements: New values by replaced ones; the Casts of the outputs are added.
            version: Version of the Casts.
        """
        assert node.subgraph is not None, "only called for regions"
        inputs: list[Value | None] = []
        for outer, formal in zip(node.inputs, node.subgraph.inputs, strict=True):
            value = _own_weight(outer, formal)
            if value is not None and (
                value in replacements or formal.type != value.type == self._converted(formal.type)
            ):
                value = self._in_source(value, replacements, version)
            inputs.append(value)
        for value in node.outputs:
            if self._converted(value.type) != value.type and isinstance(value.type, TensorType):
                replacements[value] = cast_value(value, self.target, version)
        node.inputs = tuple(inputs)

    def _converted(self, type_: ValueType | None) -> ValueType | None:
        if isinstance(type_, TensorType) and type_.dtype == self.source:
            return TensorType(self.target, type_.shape)
        if isinstance(type_, SequenceType):
            return SequenceType(self._converted(type_.element))
        if isinstance(type_, OptionalType):
            return OptionalType(self._converted(type_.element))
        return type_

    def _with_old_outputs(self, graph: Graph, wanted: Iterable[ValueType | None]) -> Graph:
        outputs: list[Value] = []
        for value, type_ in zip(graph.outputs, wanted, strict=True):
            if value.type != type_ and isinstance(type_, TensorType):
                back = cast_value(value, self.source, graph.opsets.get("", 13))
                back.name, value.name = value.name, ""
                value = back
            outputs.append(value)
        return Graph(
            graph.inputs,
            outputs,
            graph.name,
            nodes=graph.nodes,
            attrs=graph.attrs,
            opsets=graph.opsets,
            metadata=graph.metadata,
            doc=graph.doc,
        )


def _own_weight(outer: Value | None, formal: Value) -> Value | None:
    """Return a separate value for a region's weight, since uses of the old one get its Cast."""
    if outer is None or formal.parameter is None:
        return outer
    return Value(outer.name, outer.type, parameter=outer.parameter)
