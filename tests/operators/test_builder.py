"""Building graphs with ``ops.<Operator>``: inputs, constants, attributes, outputs, mistakes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.defs
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.operators.operator import unregister_operator
from subgraph.operators.schema import canonical_domain


def test_every_operator_of_onnx_is_there() -> None:
    names = {s.name for s in onnx.defs.get_all_schemas() if not canonical_domain(s.domain)}
    assert names <= set(dir(ops))
    for name in names:
        if not onnx.defs.get_schema(name).deprecated:
            assert getattr(ops, name).__name__ == name
    with pytest.raises(AttributeError, match="did you mean 'Relu'"):
        _ = ops.Rellu


def test_operators_have_a_text() -> None:
    text = ops.Conv.__doc__ or ""
    assert text.startswith("Conv(X, W, B=None, *, auto_pad='NOTSET'")
    assert "-> Y\n\nThe convolution operator" in text
    assert (ops.Concat.__doc__ or "").startswith("Concat(*inputs, axis) -> concat_result\n")


def test_inputs_by_position_and_by_name() -> None:
    x = sg.input("x", ("N", 3, 8, 8))
    w = sg.parameter("w", np.zeros((4, 3, 3, 3), np.float32))
    b = sg.parameter("b", np.zeros(4, np.float32))
    y = ops.Conv(x, w, B=b, pads=[1, 1, 1, 1], name="conv")
    node = y.producer
    assert node.inputs == (x, w, b)
    assert node.attrs == {"pads": (1, 1, 1, 1)}
    assert y.type == sg.TensorType("float32", ("N", 4, 8, 8))
    assert ops.Clip(x, max=sg.parameter("m", np.float32(6))).producer.inputs[1] is None


def test_numbers_and_lists_become_constants_of_the_right_dtype() -> None:
    x, k = sg.input("x", (2, 3)), sg.input("k", (2,), dtype="int32")
    half = ops.Mul(x, 0.5).producer.inputs[1]
    assert half.type == sg.TensorType("float32", ())
    assert ops.Add(k, 1).producer.inputs[1].type == sg.TensorType("int32", ())
    assert ops.Add(1, k).producer.inputs[0].type == sg.TensorType("int32", ())
    shaped = ops.Reshape(x, [3, -1])
    assert shaped.producer.inputs[1].type == sg.TensorType("int64", (2,))
    assert shaped.type == sg.TensorType("float32", (3, 2))
    double = np.ones(3)
    assert ops.Add(double, double).type == sg.TensorType("float64", (3,))
    graph = sg.Graph([x], [ops.Add(ops.Mul(x, 2.0), 2.0)])
    assert len(graph.parameters) == 2


def test_outputs_one_several_and_optional() -> None:
    x = sg.input("x", (6, 4))
    one, two = ops.Split(x, num_outputs=2)
    assert one.type == two.type == sg.TensorType("float32", (3, 4))
    assert isinstance(ops.Dropout(x), sg.Value)
    values, mask = ops.Dropout(x, outputs=2)
    assert (values.type.dtype, mask.type.dtype) == ("float32", "bool")
    top, index = ops.TopK(x, [2])
    assert (top.type.shape, index.type.dtype) == ((6, 2), "int64")
    with pytest.raises(sg.ModelError, match="num_outputs"):
        ops.Split(x)


def test_versions_and_metadata() -> None:
    x = sg.input("x", (2, 3))
    old = ops.Softmax(x, version=11, metadata={"affinity": "CPU"}).producer
    assert (old.version, old.metadata) == (11, {"affinity": "CPU"})
    assert ops.Relu(x).producer.version == onnx.defs.get_schema("Relu").since_version
    with pytest.raises(sg.UnsupportedOpError, match="opset 3"):
        ops.Mish(x, version=3)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda x: ops.Relu(), "takes 1 input "),
        (lambda x: ops.Relu(x, x), "got 2"),
        (lambda x: ops.Add(x, A=x), "given twice"),
        (lambda x: ops.Relu(x, alfa=1), "no attribute or input 'alfa'"),
        (lambda x: ops.LeakyRelu(x, alfa=1), "did you mean 'alpha'"),
        (lambda x: ops.Concat(x, axis="one"), "'axis' takes int"),
        (lambda x: ops.Cast(x), "needs the attribute 'to'"),
        (lambda x: ops.Relu((x, x)), "tuple of values"),
        (lambda x: ops.MatMul(x, x), "do not fit"),
        (lambda x: sg.input("", (2,)), "name"),
        (lambda x: sg.parameter("", [1.0]), "name"),
        (lambda x: ops.If(x, then_branch=3), "else_branch|then_branch"),
    ],
)
def test_mistakes_say_what_is_wrong(build: Any, message: str) -> None:
    with pytest.raises(sg.SubgraphError, match=message):
        build(sg.input("x", (2, 3)))


def test_a_body_says_which_outer_value_it_means() -> None:
    c, x = sg.input("c", (), dtype="bool"), sg.input("x", (2,))
    lost = sg.Value("lost", x.type)
    body = sg.Graph([], [ops.Neg(lost)], captures=[lost])
    fine = sg.Graph([], [ops.Neg(sg.capture(x))])
    with pytest.raises(sg.ModelError, match=r"'lost'.*sg\.capture"):
        ops.If(c, then_branch=body, else_branch=fine)


def test_custom_operators_are_functions_too() -> None:
    schema = sg.Schema(
        "Twice",
        "test.builder",
        inputs=("x",),
        outputs=("y",),
        attributes={"k": sg.Attribute("k", "float")},
    )
    assert (schema.min_inputs, schema.max_inputs) == (schema.min_outputs, schema.max_outputs)
    assert schema.max_outputs == 1
    operator = sg.Operator(
        schema, lambda node, inputs: [2 * inputs[0]], lambda node, types, values: [types[0]]
    )
    sg.Core().add_extension(operator)
    x = sg.input("x", (2,))
    y = ops.Twice(x, k=1.5)
    assert (y.type, y.producer.domain, y.producer.attrs) == (x.type, "test.builder", {"k": 1.5})
    loaded = sg.load(sg.to_onnx(sg.Graph([x], [y])))
    assert loaded.nodes[0].attrs == {"k": 1.5}


def test_names_in_several_domains() -> None:
    """Which one was meant depended on the order in which they were registered."""
    made: list[sg.Operator] = []

    def register(op_type: str, domain: str) -> None:
        schema = sg.Schema(op_type, domain, inputs=("x",), outputs=("y",))
        made.append(sg.Operator(schema, lambda node, inputs: inputs, None))
        sg.Core().add_extension(made[-1])

    x = sg.input("x", (2,))
    try:
        register("TestHomonym", "test.b")
        assert ops.TestHomonym(x).producer.domain == "test.b"
        register("TestHomonym", "test.a")
        calls = (
            r"ops.operator\('TestHomonym', 'test.a'\) or ops.operator\('TestHomonym', 'test.b'\)"
        )
        with pytest.raises(AttributeError, match=f"is in 2 domains: write {calls}"):
            _ = ops.TestHomonym
        assert ops.operator("TestHomonym", "test.a")(x).producer.domain == "test.a"
        register("Relu", "test.a")
        assert ops.Relu(x).producer.domain == "", "the standard's"
        register("BiasGelu", "test.a")
        with pytest.raises(AttributeError, match=r"'com.microsoft'\) or .*'test.a'"):
            _ = ops.BiasGelu
    finally:
        for operator in made:
            unregister_operator(operator)


def test_inputs_that_must_not_be_omitted() -> None:
    """Their forms say which are optional, also where others follow; the schema did not."""
    x = sg.input("x", ("N", 4))
    scale = np.float32(1)
    with pytest.raises(sg.ModelError, match="QLinearSigmoid needs the input 'Y_scale'"):
        ops.QLinearSigmoid(x, scale, None, None, np.uint8(0))
    with pytest.raises(sg.ModelError, match="SkipLayerNormalization needs the input 'skip'"):
        ops.SkipLayerNormalization(x, None, np.ones(4, np.float32))
    assert "X_zero_point=None, Y_scale, Y_zero_point=None" in (ops.QLinearSigmoid.__doc__ or "")
    y = ops.SkipLayerNormalization(x, x, np.ones(4, np.float32), outputs=1)
    model = sg.to_onnx(sg.Graph([x], [y]))
    assert sg.load(model).nodes[0].op_type == "SkipLayerNormalization"
    model.graph.node[0].input[1] = ""
    with pytest.raises(sg.ModelError, match="omits its input 'skip', which is not optional"):
        sg.load(model)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (
            lambda x, k: ops.Add(x, k),
            "inputs 'A' and 'B' must have one dtype, got float32 and int64",
        ),
        (lambda x, k: ops.Concat(x, k, axis=0), "all 'inputs' must have one dtype"),
        (lambda x, k: ops.Sin(k), "Sin .*: input 'input' is int64; it takes bfloat16, float16"),
        (lambda x, k: ops.Where(x, x, x), "input 'condition' is float32; it takes bool"),
        (lambda x, k: ops.Conv(x, np.ones((2, 3, 1, 1))), "'X' and 'W' must have one dtype"),
        (lambda x, k: ops.Relu("x"), "input 'X' is string"),
        (lambda x, k: ops.Relu(object()), "an input is <object"),
        (lambda x, k: ops.Cast(x, to="floatx"), "attribute 'to' takes int, got 'floatx'"),
    ],
)
def test_dtypes_that_the_standard_does_not_allow(build: Any, says: str) -> None:
    with pytest.raises(sg.ModelError, match=says):
        build(sg.input("x", (1, 3, 4, 4)), sg.input("k", (1, 3, 4, 4), "int64"))


def test_inputs_of_mixed_dtypes_where_the_standard_has_them() -> None:
    x, k = sg.input("x", (4,)), sg.input("k", (1,), "int64")
    assert ops.Gather(x, k, axis=0).type == sg.TensorType("float32", (1,))
    assert ops.Pow(x, k).type == sg.TensorType("float32", (4,))
    v, n = sg.input("v", (4,)), sg.input("n", (1,), "int64")
    i, c = sg.input("i", (), "int64"), sg.input("c", (), "bool")
    body = sg.Graph([i, c, v, n], [ops.Identity(c), ops.Relu(v), ops.Neg(n)])
    assert len(ops.Loop(None, None, x, k, body=body)) == 2


def test_a_dtype_by_its_name() -> None:
    x = sg.input("x", (2,))
    for name in ("float16", np.float16, np.dtype("float16"), 10):
        assert ops.Cast(x, to=name).type == sg.TensorType("float16", (2,))


def test_operators_of_the_other_domains_of_onnx() -> None:
    node = ops.Scaler(sg.input("x", (1, 2)), offset=[0, 1], scale=[2, 3]).producer
    assert (node.domain, node.op_type) == ("ai.onnx.ml", "Scaler")
    assert {"Scaler", "Conv"} <= set(dir(ops))


def test_names_are_strings() -> None:
    wrong: Any = 3
    with pytest.raises(sg.ModelError, match="an input needs a name, a string; got 3"):
        sg.input(wrong, (2,))
    with pytest.raises(sg.ModelError, match="a parameter needs a name, a string; got ''"):
        sg.parameter("", 1.0)


def test_what_is_no_shape_or_parameter() -> None:
    for shape in (3, "N"):
        with pytest.raises(sg.ShapeError, match="is not a list of dimensions; for one write"):
            sg.input("x", shape)  # type: ignore[arg-type]
    with pytest.raises(sg.ShapeError, match="array of objects"):
        sg.parameter("w", np.array([object()]))


@pytest.mark.parametrize(
    ("op_type", "attributes"),
    [("Softmax", {"axis": 0.5}), ("Transpose", {"perm": [0.0, 1.25]}), ("Flatten", {"axis": "1"})],
)
def test_whole_numbers_are_not_rounded(op_type: str, attributes: dict[str, Any]) -> None:
    (name,) = attributes
    with pytest.raises(sg.ModelError, match=f"{op_type}: attribute '{name}' takes int"):
        getattr(ops, op_type)(sg.input("x", (2, 2)), **attributes)
    assert ops.Softmax(sg.input("x", (2, 2)), axis=np.float32(1)).producer.attrs["axis"] == 1
