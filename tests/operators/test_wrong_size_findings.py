"""What the fuzzer of wrong sizes found: all devices agree on what is an error, and on the rest."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import helper
from wrong_sizes.table import Row, rows

import subgraph as sg
from subgraph.graph.types import Array
from subgraph.operators.schema import MICROSOFT, get_schema
from tests.support.requirements import DEVICES, floats, ints

pytestmark = pytest.mark.filterwarnings("ignore")
FORMS = ("sizes", "symbolic", "unknown", "constants")


def model_of(node: onnx.NodeProto, values: dict[str, Array], form: str, version: int) -> Any:
    """Return the model of a node, its operands declared in one of `FORMS`."""
    graph = onnx.GraphProto(name="g", node=[node])
    for k, (name, value) in enumerate(values.items()):
        if form == "constants" and k:
            graph.initializer.append(onnx.numpy_helper.from_array(value, name))
            continue
        shape: Any = value.shape if form in ("sizes", "constants") else None
        if form == "symbolic":
            shape = [f"{name}_{axis}" for axis in range(value.ndim)]
        kind = helper.np_dtype_to_tensor_dtype(value.dtype)
        graph.input.append(helper.make_tensor_value_info(name, kind, shape))
    graph.output.extend(onnx.ValueInfoProto(name=name) for name in node.output)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", version)], ir_version=10)


def run(
    device: str,
    op_type: str,
    arrays: Sequence[Array],
    attrs: dict[str, Any],
    version: int,
    form: str = "sizes",
) -> Array:
    """Run one node and return its first result."""
    values = {f"i{k}": array for k, array in enumerate(arrays)}
    results = ["o", "more"] if op_type == "CausalConvWithState" else ["o"]
    node = helper.make_node(op_type, list(values), results, **attrs)
    model = model_of(node, values, form, version)
    given = {value.name: values[value.name] for value in model.graph.input}
    return sg.compile_model(model, device)(given)[0]


LABELS = np.array([0, 3, 1, 2])
WORDS: dict[str, Any] = {
    **{"ngram_counts": [0], "pool_int64s": [1, 2], "min_gram_length": 1, "max_gram_length": 1},
}
REFUSED: list[tuple[str, list[Array], dict[str, Any], int, str]] = [
    ("SwiGLU", [floats(2, 4), floats(1, 4)], {}, 28, "B has shape"),
    ("SwiGLU", [floats(2, 4), floats(4)], {}, 28, "B has shape"),
    ("SwiGLU", [floats(2, 4), floats(2, 1)], {}, 28, "B has shape"),
    ("Flatten", [floats(2, 3)], {"axis": -1}, 9, "outside"),
    ("HannWindow", [np.array(-1)], {}, 17, "size is -1"),
    ("HannWindow", [ints(3)], {}, 17, "needs rank 0"),
    ("Unique", [floats(3, 3)], {"axis": 0, "sorted": 7}, 11, "sorted is 7"),
    ("Pad", [floats(3), ints(-4, 2)], {"mode": "edge"}, 18, "leave nothing"),
    ("Pad", [floats(3), ints(-3, 2)], {"mode": "reflect"}, 18, "leave nothing"),
    ("Pad", [floats(3), ints(1, 2)], {"mode": "none"}, 18, "mode is 'none'"),
    ("Pad", [floats(3), ints(-2, -2)], {}, 18, "cut off more"),
    ("If", [np.array([True, True])], {}, 16, "must hold one|do not make a scalar"),
    (
        "CausalConvWithState",
        [floats(2, 4, 8), floats(4, 1, 4), floats().reshape(())],
        {},
        27,
        "(bias|B) has shape",
    ),
    (
        "NegativeLogLikelihoodLoss",
        [floats(4, 4), np.array([0, -3, 1, 2])],
        {"ignore_index": -5},
        13,
        "-3",
    ),
    (
        "SoftmaxCrossEntropyLoss",
        [floats(4, 4), np.array([0, 7, 1, 2])],
        {"ignore_index": 9},
        13,
        "7",
    ),
    (
        "Attention",
        [floats(1, 2, 3, 4)] * 3,
        {"left_window_size": -(1 << 63)},
        25,
        "left_window_size",
    ),
    ("Attention", [floats(1, 2, 3, 4)] * 3, {"softcap": -1.0}, 23, "softcap is -1"),
    ("Squeeze", [floats().reshape(())], {"axes": [0]}, 11, "a scalar has none"),
    ("SplitToSequence", [floats(6, 2), ints()], {}, 11, "does not fill"),
    ("GridSample", [floats(1, 1, 3, 0), floats(1, 2, 4, 2)], {}, 22, "nothing to sample"),
    ("Col2Im", [floats(1, 0, 25), ints(5, 5), ints(1, 1)], {}, 18, "rows of columns"),
    ("Upsample", [floats(1, 1, 2, 2), np.array([1, 1, 0.5, 1], "f4")], {}, 9, "at least 1"),
    ("ConvTranspose", [floats(1, 1, 0), floats(1, 2, 3)], {}, 22, "no elements"),
    (
        "MelWeightMatrix",
        [np.array(8), np.array(16), np.array(8192), np.array(0, "f4"), np.array(-1, "f4")],
        {},
        17,
        "not negative",
    ),
    *(
        (
            "TfIdfVectorizer",
            [ints(1, 2)],
            {"mode": "TF", "max_skip_count": 0, "ngram_indexes": [0, 1], **changed},
            9,
            said,
        )
        for changed, said in (
            (WORDS | {"min_gram_length": 2}, "min_gram_length is 2, max_gram_length 1"),
            (WORDS | {"min_gram_length": 0}, "min_gram_length is 0, max_gram_length 1"),
            (WORDS | {"ngram_counts": [0, 1]}, "2-grams"),
        )
    ),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("op_type", "arrays", "attrs", "version", "said"), REFUSED, ids=lambda value: str(value)[:20]
)
def test_is_refused_everywhere(
    op_type: str,
    arrays: list[Array],
    attrs: dict[str, Any],
    version: int,
    said: str,
    form: str,
    device: str,
) -> None:
    if op_type == "If":
        attrs = branches()
    with pytest.raises(sg.ShapeError, match=said):
        run(device, op_type, arrays, attrs, version, form)


def branches() -> dict[str, Any]:
    """Return the branches of an If that give 1 and 2."""
    made: dict[str, Any] = {}
    for number, name in enumerate(("then_branch", "else_branch"), 1):
        value = onnx.numpy_helper.from_array(np.full(2, number, np.float32))
        constant = helper.make_node("Constant", [], [f"{name}_out"], value=value)
        out = helper.make_tensor_value_info(f"{name}_out", 1, [2])
        made[name] = helper.make_graph([constant], name, [], [out])
    return made


EYE = np.eye(4, dtype=np.float32)
GIVEN: list[tuple[str, list[Array], dict[str, Any], int, Any]] = [
    ("If", [np.array([[False]])], {}, 16, np.full(2, 2, np.float32)),
    ("Pad", [floats(3), ints(-4, 2)], {}, 18, np.zeros(1, np.float32)),
    ("Pad", [floats(3), ints(-1, 2)], {}, 18, np.array([0, 1, 0, 0], np.float32)),
    ("Pad", [floats(3), ints(4, -5)], {}, 18, np.zeros(2, np.float32)),
    *(
        ("Clip", [floats(1)[0], bounds[0], bounds[1]], {}, 13, np.float32(-0.5))
        for bounds in (
            (np.array([-0.5], "f4"), np.array(1, "f4")),
            (np.array(-0.5, "f4"), np.array([1], "f4")),
        )
    ),
    ("ArgMax", [np.array(3, "f4")], {"select_last_index": 1, "keepdims": 0}, 13, np.int64(0)),
    ("ArgMin", [np.array(3, "f4")], {"select_last_index": 1}, 13, np.int64(0)),
    ("ReduceMin", [np.array(3, "f4"), ints(0)], {}, 18, np.float32(3)),
    ("ReduceL1", [np.array(-3, "f4"), ints(0)], {"keepdims": 0}, 18, np.float32(3)),
    ("ReduceLogSumExp", [np.array(3, "f4"), ints(0)], {"keepdims": 0}, 18, np.float32(3)),
    ("Squeeze", [floats(1, 3), np.array(0)], {}, 21, floats(3)),
    ("Dropout", [floats(3), np.ones(1, np.float32)], {}, 22, floats(3)),
    (
        "Resize",
        [np.array([2**63 - 1, 5]), floats(0), np.array([2], np.float32)],
        {"mode": "nearest", "coordinate_transformation_mode": "asymmetric"},
        13,
        np.array([2**63 - 1, 2**63 - 1, 5, 5]),
    ),
    (
        # In float64, 10 times 0.7 (a float32 number) is below 7, and no position is exactly 1.5.
        "Resize",
        [np.arange(10, dtype=np.float32), floats(0), np.array([0.7], np.float32)],
        {"mode": "nearest", "coordinate_transformation_mode": "align_corners"},
        13,
        np.array([0, 1, 3, 4, 6, 7, 9], np.float32),
    ),
    (
        "Range",  # NumPy's arange refuses a far start from which the steps lead away
        [np.array(1e38, "f4"), np.array(4, "f4"), np.array(0.5, "f4")],
        {},
        11,
        np.zeros(0, np.float32),
    ),
    ("Unique", [np.zeros(0, ml_dtypes.bfloat16)], {}, 11, np.zeros(0, ml_dtypes.bfloat16)),
    ("OneHot", [ints(1, -1, 3), ints(4), floats(2)], {}, 9, 2 * EYE[[1, 3, 3]] - 1),
    ("OneHot", [ints(1, -1, 3), ints(4), floats(2)], {}, 11, 2 * EYE[[1, 3, 3]] - 1),
    (
        "ConvTranspose",
        [floats(1, 1, 3), np.ones((1, 0, 2), np.float32)],
        {},
        11,
        np.zeros((1, 0, 4), np.float32),
    ),
    (
        "Col2Im",
        [floats(0, 5, 5), ints(5, 5), ints(1, 5)],
        {},
        18,
        np.zeros((0, 1, 5, 5), np.float32),
    ),
    (
        "GridSample",
        [floats(1, 2, 3, 2), floats(1, 0, 4, 2)],
        {},
        20,
        np.zeros((1, 2, 0, 4), np.float32),
    ),
    (
        "NegativeLogLikelihoodLoss",
        [-EYE, np.array([0, -5, 1, 2])],
        {"ignore_index": -5, "reduction": "sum"},
        13,
        np.float32(1),
    ),
    (
        "NegativeLogLikelihoodLoss",
        [-EYE, np.array([0, 2**40, 1, 2])],
        {"ignore_index": 2**40, "reduction": "sum"},
        13,
        np.float32(1),
    ),
]
_NONE_MARKED = next(k for k, given in enumerate(GIVEN) if given[0] == "OneHot")
GIVEN[_NONE_MARKED][4][1] = -1  # before opset 11 a negative index marks nothing


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("op_type", "arrays", "attrs", "version", "expected"), GIVEN, ids=lambda value: str(value)[:20]
)
def test_gives_the_same_everywhere(
    op_type: str,
    arrays: list[Array],
    attrs: dict[str, Any],
    version: int,
    expected: Array,
    form: str,
    device: str,
) -> None:
    if op_type == "If":
        attrs = branches()
    found = run(device, op_type, arrays, attrs, version, form)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)
    assert found.shape == expected.shape


@pytest.mark.parametrize("device", DEVICES)
def test_a_choice_of_several_conditions_is_refused_at_run_time(device: str) -> None:
    """The model says that there is one condition; where there are more, none is chosen by each."""
    nodes = [
        helper.make_node("NonZero", ["x"], ["places"]),
        helper.make_node("Squeeze", ["places", "zero"], ["row"]),
        helper.make_node("Greater", ["row", "zero"], ["cond"]),
        helper.make_node("If", ["cond"], ["o"], **branches()),
    ]
    x = helper.make_tensor_value_info("x", 1, [2])
    graph = helper.make_graph(nodes, "g", [x], [onnx.ValueInfoProto(name="o")])
    graph.value_info.append(helper.make_tensor_value_info("cond", 9, [1]))
    graph.initializer.append(onnx.numpy_helper.from_array(ints(0), "zero"))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 16)], ir_version=10)
    compiled = sg.compile_model(model, device)
    np.testing.assert_array_equal(compiled([np.array([0, 3], "f4")])[0], [1, 1])
    with pytest.raises(sg.ShapeError):
        compiled([np.array([2, 3], "f4")])


SEVERAL = [
    row
    for row in rows()
    if row.domain == MICROSOFT and get_schema(row.op, row.domain).max_outputs > 1
]


@pytest.mark.parametrize("device", ["CPU", "REFERENCE"])
@pytest.mark.parametrize("row", SEVERAL, ids=lambda row: row.op)
@pytest.mark.timeout(120)
def test_all_outputs_of_an_added_operator_are_given_or_refused(row: Row, device: str) -> None:
    """An output that nobody defines kept the pass that expands functions from coming to an end."""
    names = ["" if x is None else f"i{k}" for k, x in enumerate(row.inputs)]
    values = {n: x for n, x in zip(names, row.inputs, strict=True) if isinstance(x, np.ndarray)}
    results = [f"o{k}" for k in range(get_schema(row.op, row.domain).max_outputs)]
    node = helper.make_node(row.op, names, results, domain=row.domain, **row.options)
    model = model_of(node, values, "symbolic", 17)
    model.opset_import.append(helper.make_opsetid(MICROSOFT, 1))
    with suppress(sg.UnsupportedOpError):
        found = sg.compile_model(model, device)(values)
        assert [name for name in results if found[name] is None] == []
