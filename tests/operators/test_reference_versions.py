"""Every version of an operator: where its form did not change, an old version does what a new does.

The suite's cases of one node are run again as each older version whose schema takes the node as it
is. What differs by the standard is listed; what ONNX Runtime knows of it is compared with it in
test_reference_operators.py.
"""

from __future__ import annotations

import re
from collections import defaultdict
from functools import cache

import numpy as np
import onnx
import onnx.defs
import pytest

import subgraph as sg
from subgraph.testing import conformance as suite
from subgraph.tools import backend
from tests.support.peer import reference_result, uniform

pytestmark = pytest.mark.filterwarnings("ignore")
_BROADCAST = r"broadcast is 0|could not be broadcast|does not broadcast"
# Operator, its version (0: any that differs) -> what tells the expected error; "" for any.
_EXPECTED: dict[tuple[str, int], str] = {
    **{(name, 0): _BROADCAST for name in ("Add", "Sub", "Mul", "Div", "Pow", "PRelu")},
    **{(name, 0): _BROADCAST for name in ("And", "Or", "Xor", "Equal", "Greater", "Less")},
    ("BatchNormalization", 6): "Mismatched",  # trains unless is_test is set
    ("Dropout", 1): "Mismatched",  # drops unless is_test is set
    ("Dropout", 6): "Mismatched",
    ("Bernoulli", 0): "Mismatched",
    ("Cast", 1): "takes string",  # the dtype is named
    ("LpPool", 1): "takes float",
    **{(name, 0): "Mismatched" for name in ("Softmax", "LogSoftmax", "Hardmax")},  # flatten
    ("If", 0): "came after",  # the bodies' operators are newer
    ("Loop", 0): "came after|takes 1 to 1",
    ("MaxPool", 0): r"tensor\(uint8\)|gives 1 to 1",
    ("OneHot", 0): r"non-negative|tensor\(bfloat16\)",
    ("OneHot", 9): "Mismatched|bfloat16",  # indices outside of the range gave no one
    ("Flatten", 0): "outside",  # axes did not count from the end
    ("Resize", 11): "marked single",  # all inputs were required
    ("Scan", 8): "",  # scanned along axis 1, with a batch
}


@cache
def _history() -> dict[tuple[str, str], list[onnx.defs.OpSchema]]:
    """Return all schemas of each operator; onnx makes them anew at each call."""
    found = defaultdict[tuple[str, str], list[onnx.defs.OpSchema]](list)
    for schema in onnx.defs.get_all_schemas_with_history():
        found[schema.domain, schema.name].append(schema)
    return found


def _older_versions(node: onnx.NodeProto, opset: int) -> list[int]:
    now = onnx.defs.get_schema(node.op_type, opset, node.domain).since_version
    found: list[int] = []
    given = {attribute.name for attribute in node.attribute}
    for schema in _history()[node.domain, node.op_type]:
        if schema.since_version >= now or schema.deprecated:
            continue
        required = {name for name, a in schema.attributes.items() if a.required}
        fits = schema.min_input <= len(node.input) <= schema.max_input
        if fits and required <= given <= set(schema.attributes):
            found.append(schema.since_version)
    return found


def test_old_versions_do_what_new_ones_do_where_the_standard_says_so() -> None:
    ran, wrong = 0, defaultdict[tuple[str, int], list[str]](list)
    for case in suite.cases():
        if case.kind != "node":
            continue
        model, sets = case.load()
        if len(model.graph.node) != 1 or model.functions:
            continue
        node = model.graph.node[0]
        opset = {entry.domain: entry.version for entry in model.opset_import}[node.domain]
        for version in _older_versions(node, opset):
            old = onnx.ModelProto()
            old.CopyFrom(model)
            for entry in old.opset_import:
                if entry.domain == node.domain:
                    entry.version = version
            ran += 1
            try:
                got = backend.prepare(old, "REFERENCE").run(sets[0][0])
                suite.assert_matches(case, sets[0][1], list(got))
            except Exception as error:
                expected = _EXPECTED.get((node.op_type, version), _EXPECTED.get((node.op_type, 0)))
                text = " ".join(str(error).split())
                if expected is None or not re.search(expected, text):
                    wrong[node.op_type, version].append(f"{case.name}: {text[:200]}")
    assert ran > 2500
    assert not wrong


@pytest.mark.parametrize("device", ["CPU", "REFERENCE"])
def test_the_first_clip_has_its_bounds_as_attributes(device: str) -> None:
    node = onnx.helper.make_node("Clip", ["x"], ["y"], min=-0.5, max=1.0, consumed_inputs=[0])
    ends = [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, [5]) for n in "xy"]
    graph = onnx.helper.make_graph([node], "g", ends[:1], ends[1:])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 1)])
    x = np.array([-3, -0.5, 0.25, 1, 7], np.float32)
    np.testing.assert_array_equal(sg.compile_model(model, device)([x])[0], x.clip(-0.5, 1))


def test_attributes_that_became_inputs() -> None:
    x = uniform(2, 6)
    assert reference_result("Reshape", [x], 1, shape=[3, -1]).shape == (3, 4)
    np.testing.assert_array_equal(reference_result("Cast", [x], 1, to="INT32"), x.astype(np.int32))
    np.testing.assert_array_equal(
        reference_result("Clip", [x], 6, min=-1.0, max=1.0), x.clip(-1, 1)
    )
    np.testing.assert_array_equal(
        reference_result("Pad", [x], 1, paddings=[0, 1, 0, 1]), np.pad(x, ((0, 0), (1, 1)))
    )
    np.testing.assert_array_equal(
        reference_result("Slice", [x], 1, starts=[1], ends=[5], axes=[1]), x[:, 1:5]
    )
    np.testing.assert_array_equal(reference_result("Concat", [x, x], 1), np.concatenate([x, x], 1))
    np.testing.assert_array_equal(
        reference_result("Tile", [x, np.array(2.0, "f"), np.array(1.0, "f")], 1), np.tile(x, (1, 2))
    )
    np.testing.assert_allclose(
        reference_result("LpPool", [x[None]], 1, p=2.0, kernel_shape=[2]).shape, (1, 2, 5)
    )
