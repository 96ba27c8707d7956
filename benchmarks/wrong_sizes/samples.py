"""Honest samples for fuzzing with wrong sizes: every operator and version that the loader accepts.

They come from ONNX's node cases, from the tables of the tests and from `table`. Versions
of an operator that none of these has take over the samples of its other versions, as far as their
schema takes them.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import onnx
import onnx.defs

from subgraph.graph.types import ONNX_DTYPE, Array
from subgraph.operators.operator import OPERATORS
from subgraph.operators.schema import MICROSOFT, canonical_domain

ROOT = Path(__file__).parents[2]
Operand = Array | list[Array] | dict[Any, Any] | None
OPSET = 26  # newest of ONNX Runtime
# Operators whose results are not compared.
RANDOM = {name for name in OPERATORS.names() if OPERATORS.get(name).random} | {"BiasDropout"}
_MAX_BYTES = 1 << 20  # of a sample's operands; larger ones cost time and show nothing more
_MAX_CARRIED = 6  # samples that a version takes over from another
# What the standard defines and Subgraph does not run: it needs gradients of other operators.
NOT_RUN = frozenset([("ai.onnx.preview.training", "Gradient")])


@attrs.frozen(eq=False)
class Sample:
    """One node with operands that fit.

    Attributes:
        node: The node.
        values: Its operands by name; a list is a sequence, a dictionary a map, None an optional
            without a value.
        opsets: Version of each domain.
        source: Where it is from.
        types: Types of operands that are no tensors.
        before: Nodes that run before it, in a graph of several; the operands are then the graph's.
    """

    node: onnx.NodeProto
    values: dict[str, Operand]
    opsets: dict[str, int]
    source: str
    types: dict[str, onnx.TypeProto] = attrs.field(factory=dict[str, onnx.TypeProto])
    before: tuple[onnx.NodeProto, ...] = ()

    @property
    def version(self) -> int:
        """The version of the operator: the operator set in which it last changed."""
        return since(self.node.domain, self.node.op_type, self.opsets[self.node.domain])

    @property
    def title(self) -> str:
        """Operator and version."""
        return f"{self.node.domain}:{self.node.op_type}-{self.version}"


@cache
def _history() -> dict[tuple[str, str], list[onnx.defs.OpSchema]]:
    """Return the schemas of each operator of the standard, ascending by version."""
    found = defaultdict[tuple[str, str], list[onnx.defs.OpSchema]](list)
    for schema in onnx.defs.get_all_schemas_with_history():
        found[canonical_domain(schema.domain), schema.name].append(schema)
    return {key: sorted(of, key=lambda s: s.since_version) for key, of in found.items()}


@cache
def since(domain: str, op: str, opset: int) -> int:
    """Return the version of an operator that an operator set has; 1 where no standard has it."""
    versions = [s.since_version for s in _history().get((domain, op), ())]
    return max((v for v in versions if v <= opset), default=1)


def _of_suite() -> Iterator[Sample]:
    """Yield the node cases of ONNX's suite that are one node."""
    from subgraph.testing import conformance

    for case in conformance.cases():
        if case.kind != "node" or case.name.endswith("_expanded"):
            continue
        model, sets = case.load()
        if len(model.graph.node) != 1 or not sets or model.graph.initializer:
            continue
        given = zip(model.graph.input, sets[0][0], strict=False)
        values = {v.name: x if x is None else _operand(x) for v, x in given}
        types = {v.name: v.type for v in model.graph.input if not v.type.HasField("tensor_type")}
        opsets = {o.domain: o.version for o in model.opset_import}
        opsets = {"": OPSET, **opsets}
        yield Sample(model.graph.node[0], values, opsets, case.name, types)


def _operand(value: Any) -> Operand:
    """Return an operand of which numbers are arrays."""
    if isinstance(value, dict):
        return value
    return [np.asarray(x) for x in value] if isinstance(value, list) else np.asarray(value)


def _type_of(value: Operand) -> onnx.TypeProto | None:
    """Return the type of a sequence or map; None for others."""
    kind = onnx.TypeProto()
    if isinstance(value, list):
        kind.sequence_type.elem_type.tensor_type.elem_type = element_type(value[0])
    elif isinstance(value, dict):
        key, element = next(iter(value.items()))
        text = onnx.TensorProto.STRING
        kind.map_type.key_type = text if isinstance(key, str) else onnx.TensorProto.INT64
        number = text if isinstance(element, str) else onnx.TensorProto.FLOAT
        kind.map_type.value_type.tensor_type.elem_type = number
    else:
        return None
    return kind


def element_type(array: Array) -> int:
    """Return the number that ONNX has for the dtype of an array."""
    return onnx.TensorProto.STRING if array.dtype.kind in "OUS" else ONNX_DTYPE[array.dtype.name]


def _made(
    op: str,
    inputs: Sequence[Operand],
    options: dict[str, Any],
    opsets: dict[str, int],
    *,
    outputs: int = 1,
    domain: str = "",
    source: str = "",
) -> Sample:
    """Return a sample whose operands are called i0, i1, ... and its results o0, o1, ..."""
    names = ["" if value is None else f"i{k}" for k, value in enumerate(inputs)]
    results = [f"o{k}" for k in range(outputs)]
    given = zip(names, inputs, strict=True)
    values = {name: _operand(value) for name, value in given if value is not None}
    types = {name: kind for name, value in values.items() if (kind := _type_of(value))}
    node = onnx.helper.make_node(op, names, results, domain=domain, **options)
    return Sample(node, values, opsets, source, types)


def _of_operator_cases() -> Iterator[Sample]:
    from tests.support.operator_cases import all_cases

    for case in all_cases():
        if sum(value.nbytes for value in case.inputs if value is not None) < _MAX_BYTES:
            opsets = {"": case.version or OPSET}
            yield _made(
                case.op,
                case.inputs,
                case.attrs,
                opsets,
                outputs=case.outputs,
                source="operator_cases",
            )


def _of_versions() -> Iterator[Sample]:
    from tests.operators.test_operator_versions import _dtypes, _versions  # pyright: ignore[reportPrivateUsage]
    from tests.support.version_samples import MAKERS, Draw

    for op, make in MAKERS.items():
        for version in _versions(op):
            rng = np.random.default_rng(version)
            for dtype in _dtypes(op, version)[:3]:
                drawn = make(Draw(rng, op, version, dtype))
                yield _made(
                    op,
                    drawn.inputs,
                    drawn.options,
                    {"": version},
                    outputs=drawn.outputs,
                    source="version_samples",
                )


def _of_table() -> Iterator[Sample]:
    from wrong_sizes.table import rows

    for row in rows():
        opsets = {"": OPSET, row.domain: row.version}
        yield _made(
            row.op,
            row.inputs,
            row.options,
            opsets,
            outputs=row.outputs,
            domain=row.domain,
            source="table",
        )


def _carried(sample: Sample, schema: onnx.defs.OpSchema) -> Sample | None:
    """Return a sample as one of another version; None if its schema does not take it."""
    node = onnx.NodeProto()
    node.CopyFrom(sample.node)
    kept = [a for a in node.attribute if a.name in schema.attributes]
    required = {name for name, a in schema.attributes.items() if a.required}
    if not required <= {a.name for a in kept}:
        return None
    if not schema.min_input <= len(node.input) <= schema.max_input:
        return None
    del node.attribute[:], node.output[schema.max_output :]
    node.attribute.extend(kept)
    opsets = {**sample.opsets, node.domain: schema.since_version}
    return attrs.evolve(sample, node=node, opsets=opsets, source=f"{sample.source}, other version")


def operator_versions() -> list[tuple[str, str, int]]:
    """Return domain, operator and version of all that the loader accepts, ONNX Runtime's too."""
    from subgraph.operators.schema import CONTRIBUTED, FAMILIES

    FAMILIES.load_all()
    found = [
        (*key, schema.since_version)
        for key, schemas in _history().items()
        for schema in schemas
        if key not in NOT_RUN and not schema.deprecated
    ]
    contributed = [(s.domain, s.op_type, 1) for _, s in CONTRIBUTED.items()]
    return sorted({*found, *contributed})


@cache
def samples(only: str = "") -> list[list[Sample]]:
    """Return the samples of each operator and version.

    Args:
        only: Operators, separated by commas; "" for all.
    """
    sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]
    wanted = set(only.split(",")) if only else set[str]()
    found: dict[tuple[str, str, int], list[Sample]] = {}
    for make in (_of_suite, _of_operator_cases, _of_versions, _of_table):
        for sample in make():
            key = sample.node.domain, sample.node.op_type, sample.version
            if not wanted or sample.node.op_type in wanted:
                found.setdefault(key, []).append(sample)
    for domain, op, version in operator_versions():
        known = [key for key in found if key[:2] == (domain, op)]
        if domain == MICROSOFT or not known or (domain, op, version) in found:
            continue
        schema = next(s for s in _history()[domain, op] if s.since_version == version)
        nearest = sorted(known, key=lambda key: abs(key[2] - version))
        carried = [_carried(sample, schema) for key in nearest for sample in found[key]]
        fitting = [sample for sample in carried if sample is not None][:_MAX_CARRIED]
        if fitting:
            found[domain, op, version] = fitting
    return [found[key] for key in sorted(found)]
