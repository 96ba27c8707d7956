"""The forms of ONNX Runtime's operators, as they are declared here, against its own."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import onnx
import onnx.helper
import pytest

from subgraph.operators.schema import CONTRIBUTED


def theirs() -> dict[tuple[str, str], Any]:
    """Return ONNX Runtime's schemas, by domain and name."""
    native: Any = import_module("onnxruntime.capi.onnxruntime_pybind11_state")
    found = native.get_all_operator_schema()
    return {(s.domain, s.name): s for s in found if s.since_version == 1}


def default_of(attribute: Any) -> Any:
    """Return the default of an attribute; None if it has none."""
    raw: bytes = attribute._default_value
    proto = onnx.AttributeProto.FromString(raw)
    if proto.type == onnx.AttributeProto.UNDEFINED:
        return None
    value = onnx.helper.get_attribute_value(proto)
    return value.decode() if isinstance(value, bytes) else value


@pytest.mark.parametrize("name", CONTRIBUTED.names())
def test_a_form_is_that_of_onnx_runtime(name: str) -> None:
    ours = CONTRIBUTED.get(name)
    other = theirs()[ours.domain, ours.op_type]
    _agree(ours.inputs, tuple(formal.name for formal in other.inputs))
    _agree(ours.outputs, tuple(formal.name for formal in other.outputs))
    optional = [
        [str(f.option).endswith("Optional") for f in fs] for fs in (other.inputs, other.outputs)
    ]
    assert ours.min_inputs == len(optional[0]) - _trailing(optional[0])
    assert ours.min_outputs == len(optional[1]) - _trailing(optional[1])
    shared = set(ours.attributes) & set(other.attributes)
    assert len(shared) >= len(ours.attributes) - 2
    assert all(not other.attributes[name].required for name in set(other.attributes) - shared)
    for key in shared:
        attribute, of = ours.attributes[key], other.attributes[key]
        assert attribute.kind == str(of.type).rpartition(".")[2].lower(), key
        assert attribute.required == of.required, key
        default = default_of(of)
        if default is not None:
            assert attribute.default == pytest.approx(default), key


def _agree(ours: tuple[str, ...], theirs: tuple[str, ...]) -> None:
    """Releases of ONNX Runtime add at the end, so that the shorter begins the longer."""
    count = min(len(ours), len(theirs))
    assert ours[:count] == theirs[:count]
    assert abs(len(ours) - len(theirs)) <= 2


def _trailing(optional: list[bool]) -> int:
    return next(
        (k for k, is_optional in enumerate(optional[::-1]) if not is_optional), len(optional)
    )
