"""Loading ONNX files: what becomes of every part of a model; the onnx package is the judge."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

import subgraph as sg
from subgraph.dtypes import DTYPES
from subgraph.graph.types import Array, numpy_dtype
from subgraph.onnx_format.wire import LARGE

DATA = Path(onnx.__file__).parent / "backend" / "test" / "data"


def model(text: str) -> onnx.ModelProto:
    return parser.parse_model(text)


def with_weights(size: int = 300) -> onnx.ModelProto:
    """Return x + a + b + c: weights of every way in which a tensor is stored."""
    rng = np.random.default_rng(1)
    arrays = {name: rng.standard_normal((size, 40)).astype(np.float32) for name in "abc"}
    raw = numpy_helper.from_array(arrays["a"], "a")
    floats = helper.make_tensor("b", TensorProto.FLOAT, (size, 40), arrays["b"].ravel().tolist())
    constant = helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(arrays["c"]))
    nodes = [
        constant,
        helper.make_node("Sum", ["x", "a", "b", "c"], ["y"], name="sum"),
    ]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 40])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    graph = helper.make_graph(nodes, "weights", [x], [y], [raw, floats])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def test_parts_of_a_model(tmp_path: Path) -> None:
    proto = with_weights()
    proto.metadata_props.add(key="author", value="me")
    proto.doc_string = "a sum"
    proto.graph.node[1].metadata_props.add(key="affinity", value="CPU")
    path = tmp_path / "m.onnx"
    onnx.save(proto, path)
    graph = sg.load(path)
    graph.verify()
    assert graph.name == "weights"
    assert graph.doc == "a sum"
    assert graph.metadata == {"author": "me"}
    assert graph.opsets == {"": 13}
    assert [str(v.type) for v in graph.inputs] == ["float32[n, 40]"]
    assert list(graph.parameters) == ["a", "b"]
    constant, total = graph.nodes
    assert total.metadata == {"affinity": "CPU"}
    assert (total.name, total.op_type, total.version) == ("sum", "Sum", 13)
    stored: dict[str, Any] = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}
    for name, parameter in graph.parameters.items():
        np.testing.assert_array_equal(parameter.array, stored[name])
        assert not parameter.array.flags.writeable
    want: Any = numpy_helper.to_array(proto.graph.node[0].attribute[0].t)
    np.testing.assert_array_equal(constant.attrs["value"], want)
    assert str(graph.outputs[0].type) == "float32[300, 40]"


def test_every_kind_of_source_gives_the_same_graph(tmp_path: Path) -> None:
    proto = with_weights()
    path = tmp_path / "m.onnx"
    onnx.save(proto, path)
    raw = path.read_bytes()
    with path.open("rb") as file:
        graphs = [
            sg.load(path),
            sg.load(str(path)),
            sg.load(raw),
            sg.load(proto),
            sg.load(file),
            sg.load(io.BytesIO(raw)),
            sg.load(path, mapped=False),
        ]
    from subgraph.text_form.writer import print_graph

    texts = {print_graph(graph, "all") for graph in graphs}
    assert len(texts) == 1


def test_large_weights_are_views_of_the_file_and_survive_saving_over_it(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    onnx.save(with_weights(2000), path)
    graph = sg.load(path)
    before = {name: np.array(p.array) for name, p in graph.parameters.items()}
    bases: list[Any] = []
    for parameter in graph.parameters.values():
        base: Any = parameter.array
        while getattr(base, "base", None) is not None:
            base = base.base
        bases.append(getattr(base, "obj", base))
    assert {type(base).__name__ for base in bases} == {"mmap"}
    graph.parameters["a"].assign(np.zeros_like(before["a"]))
    sg.save(graph, path)
    np.testing.assert_array_equal(graph.parameters["b"].array, before["b"])
    again = sg.load(path)
    assert not again.parameters["a"].array.any()
    np.testing.assert_array_equal(again.parameters["b"].array, before["b"])


@pytest.mark.parametrize("count", [LARGE // 4 - 1, LARGE // 4, LARGE // 4 + 1, 40000])
@pytest.mark.parametrize("dtype", ["float32", "int64", "bool", "float16", "uint8", "float64"])
def test_weights_of_every_size_and_dtype(count: int, dtype: str) -> None:
    array: Array = np.random.default_rng(count).integers(0, 2, count).astype(dtype)
    graph = helper.make_graph([], "g", [], [], [numpy_helper.from_array(array, "w")])
    graph.output.append(helper.make_tensor_value_info("w", 1, None))
    loaded = sg.load(helper.make_model(graph).SerializeToString()).parameters["w"].array
    assert loaded.dtype == dtype
    assert loaded.flags.aligned or loaded.nbytes >= 1 << 16
    np.testing.assert_array_equal(loaded, array)


@pytest.mark.parametrize("name", [n for n in DTYPES if numpy_dtype(n).isbuiltin != 1])
def test_dtypes_that_numpy_lacks(name: str) -> None:
    from subgraph.operators.protobuf import tensor_to_proto

    for count in (3, 20001):
        array: Array = np.random.default_rng(0).integers(0, 2, count).astype(numpy_dtype(name))
        proto = helper.make_graph([], "g", [], [], [tensor_to_proto(array, "w")])
        proto.output.append(helper.make_tensor_value_info("w", 1, None))
        graph = sg.load(helper.make_model(proto).SerializeToString())
        loaded = graph.parameters["w"]
        assert loaded.type == sg.TensorType(name, (count,))
        assert loaded.array.tobytes() == array.tobytes()
        again = sg.load(sg.to_onnx(graph)).parameters["w"]
        assert again.array.tobytes() == array.tobytes()


def test_strings() -> None:
    data = ["é".encode(), b"two"]
    tensor = TensorProto(name="w", data_type=TensorProto.STRING, dims=(2,), string_data=data)
    graph = helper.make_graph(
        [helper.make_node("Identity", ["w"], ["y"])],
        "g",
        [],
        [helper.make_tensor_value_info("y", TensorProto.STRING, (2,))],
        [tensor],
    )
    loaded = sg.load(helper.make_model(graph))
    assert loaded.parameters["w"].array.tolist() == ["é", "two"]
    again = sg.load(sg.to_onnx(loaded))
    assert again.parameters["w"].array.tolist() == ["é", "two"]


def test_sparse_initializers_become_dense() -> None:
    want = np.zeros((3, 4), np.float32)
    want[0, 1], want[2, 3] = 1, 2
    for indices_shape, indices in [((2,), [1, 11]), ((2, 2), [0, 1, 2, 3])]:
        sparse = helper.make_sparse_tensor(
            helper.make_tensor("w", TensorProto.FLOAT, (2,), [1.0, 2.0]),
            helper.make_tensor("i", TensorProto.INT64, indices_shape, indices),
            (3, 4),
        )
        node = helper.make_node("Identity", ["w"], ["y"])
        y = helper.make_tensor_value_info("y", 1, None)
        graph = helper.make_graph([node], "g", [], [y], sparse_initializer=[sparse])
        np.testing.assert_array_equal(sg.load(helper.make_model(graph)).parameters["w"].array, want)


def test_an_initializer_that_is_an_input_is_optional_since_ir_4() -> None:
    text = """<ir_version: {}, opset_import: ["" : 13]>
    g (float[2] x, float[2] w) => (float[2] y) <float[2] w = {{1, 2}}> {{ y = Add(x, w) }}"""
    old, new = (sg.load(model(text.format(version))) for version in (3, 7))
    assert [v.name for v in old.inputs] == ["x"]
    assert [v.name for v in new.inputs] == ["x", "w"]
    assert new.inputs[1].parameter is new.parameters["w"]
    assert [i.name for i in sg.to_onnx(new).graph.input] == ["x", "w"]
    onnx.checker.check_model(sg.to_onnx(old))


def test_names_that_are_missing_or_used_twice_get_new_ones() -> None:
    x = helper.make_tensor_value_info("x", 1, (1,))
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], name="same"),
        helper.make_node("Relu", ["a"], ["b"], name="same"),
        helper.make_node("Relu", ["b"], ["y"]),
    ]
    graph = helper.make_graph(nodes, "g", [x], [helper.make_tensor_value_info("y", 1, (1,))])
    assert [n.name for n in sg.load(helper.make_model(graph)).nodes] == ["same", "same_1", "Relu_0"]


def test_dimensions_called_by_a_question_mark_are_unknown_not_equal() -> None:
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", "?", "?"])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["n", "?", "?"])
    flip = helper.make_node("Transpose", ["x"], ["y"], perm=[0, 2, 1])
    proto = helper.make_model(helper.make_graph([flip], "g", [x], [y]))
    given = np.arange(12, dtype=np.float32).reshape(2, 3, 2)
    assert sg.load(proto).inputs[0].type == sg.TensorType("float32", ("n", None, None))
    got = sg.compile_model(proto, "CPU")(x=given)["y"]
    np.testing.assert_array_equal(got, given.transpose(0, 2, 1))


def test_nodes_in_any_order_are_sorted() -> None:
    text = """<ir_version: 8, opset_import: ["" : 16]>
    g (float[2] x, bool c) => (float[2] y) {
      y = If (c) <then_branch = t () => (float[2] r) { r = Neg(late) },
                  else_branch = e () => (float[2] r) { q = Neg(late) r = Neg(q) }>
      late = Relu(x)
    }"""
    graph = sg.load(model(text))
    assert [n.op_type for n in graph.nodes] == ["Relu", "If"]
    graph.verify()


NESTED = """<ir_version: 8, opset_import: ["" : 16]>
g (float[2] x, bool c, bool d) => (float[2] y) <float[2] w = {1, 2}> {
  t = Relu(x)
  y = If (c) <
    then_branch = a () => (float[2] r) <float[2] k = {3, 4}> {
      r = If (d) <
        then_branch = aa () => (float[2] s) { u = Add(t, w) s = Add(u, k) },
        else_branch = ab () => (float[2] s) { s = Sub(t, x) }
      >
    },
    else_branch = b () => (float[2] r) <float[2] k = {5, 6}> { r = Mul(w, k) }
  >
}"""


def test_bodies_capture_through_every_level() -> None:
    graph = sg.load(model(NESTED))
    relu, branch = graph.nodes
    then, other = branch.bodies
    assert [v.name for v in then.captures] == ["d", "t", "x"]
    assert not other.captures
    assert branch.captures == (graph.inputs[2], relu.outputs[0], graph.inputs[0])
    (inner,) = then.nodes
    assert [[v.name for v in body.captures] for body in inner.bodies] == [["t"], ["t", "x"]]
    # An outer parameter is the same object in each body; the two named "k" are two.
    weight = graph.parameters["w"]
    assert inner.bodies[0].parameters["w"] is weight
    assert other.parameters["w"] is weight
    assert sorted(graph.parameters) == ["k", "k_1", "w"]
    np.testing.assert_array_equal(graph.parameters["k_1"].array, [5, 6])


FUNCTIONS = """<ir_version: 10, opset_import: ["" : 18, "my" : 1]>
g (float[N] x, float[N] b) => (float[N] y, float[N] z) {
  t = my.twice <k = 3.0> (x)
  y = my.twice (t)
  z = my.same (y)
}
<domain: "my", opset_import: ["" : 18, "my" : 1]>
twice <k: float = 2.0> (a) => (r) {
  c = Constant <value_float: float = @k> ()
  m = Mul(a, c)
  n = my.same(m)
  r = Add(n, a)
}
<domain: "my", opset_import: ["" : 18]>
same (a) => (r) { r = Identity(a) }
"""


def test_functions_are_inlined_or_kept() -> None:
    proto = model(FUNCTIONS)
    inlined, kept = sg.load(proto), sg.load(proto, functions="keep")
    assert [n.op_type for n in inlined.nodes] == [
        *["Constant", "Mul", "Identity", "Add"] * 2,
        "Identity",
    ]
    assert [n.attrs.get("value_float") for n in inlined.nodes if n.op_type == "Constant"] == [3, 2]
    assert [n.op_type for n in kept.nodes] == ["twice", "twice", "same"]
    assert [n.domain for n in kept.nodes] == ["my"] * 3
    first = kept.nodes[0].subgraph
    assert first is not None
    assert [n.op_type for n in first.nodes] == ["Constant", "Mul", "same", "Add"]
    x = np.array([1, -2], np.float32)
    for graph in (inlined, kept):
        graph.verify()
        saved = sg.to_onnx(graph)
        onnx.checker.check_model(saved)
        results = run(saved, {"x": x, "b": x})
        np.testing.assert_array_equal(results[0], 12 * x)
    saved = sg.to_onnx(kept)
    # Called with other attributes a function is another one; with none it is there once.
    names = sorted((f.domain, f.name, f.overload) for f in saved.functions)
    assert names == [("my", "same", ""), ("my", "twice", ""), ("my", "twice", "1")]
    again = sg.load(saved)
    assert [n.op_type for n in again.nodes] == ["twice", "twice", "same"]
    assert sg.to_onnx(again) == saved


@pytest.mark.parametrize("functions", ["inline", "keep"])
def test_an_attribute_that_no_call_gives_is_absent_in_functions_inside(functions: Any) -> None:
    proto = model(
        """<ir_version: 10, opset_import: ["" : 18, "my" : 1]>
        g (float[N] x) => (float[N] y) { y = my.outer (x) }
        <domain: "my", opset_import: ["" : 18, "my" : 1]>
        outer <beta> (a) => (r) { r = my.leaky <alpha: float = @beta> (a) }
        <domain: "my", opset_import: ["" : 18]>
        leaky <alpha> (a) => (r) { r = LeakyRelu <alpha: float = @alpha> (a) }
        """
    )
    result = sg.compile_model(sg.load(proto, functions=functions), "REFERENCE")
    np.testing.assert_allclose(result(np.array([-1, 2], np.float32))[0], [-0.01, 2])


def run(proto: onnx.ModelProto, feeds: dict[str, Array]) -> list[Any]:
    import onnxruntime

    session = onnxruntime.InferenceSession(proto.SerializeToString())
    used = {i.name for i in session.get_inputs()}
    return session.run(None, {k: v for k, v in feeds.items() if k in used})


def test_overloads_of_a_function() -> None:
    proto = helper.make_model(
        helper.make_graph(
            [
                helper.make_node("f", ["x"], ["a"], domain="my", overload="neg"),
                helper.make_node("f", ["a"], ["y"], domain="my", overload="abs"),
            ],
            "g",
            [helper.make_tensor_value_info("x", 1, (2,))],
            [helper.make_tensor_value_info("y", 1, (2,))],
        ),
        opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid("my", 1)],
        ir_version=10,
    )
    for overload, op_type in [("neg", "Neg"), ("abs", "Abs")]:
        function = helper.make_function(
            "my",
            "f",
            ["x"],
            ["y"],
            [helper.make_node(op_type, ["x"], ["y"])],
            [helper.make_opsetid("", 18)],
            overload=overload,
        )
        proto.functions.append(function)
    onnx.checker.check_model(proto)
    assert [n.op_type for n in sg.load(proto).nodes] == ["Neg", "Abs"]


def test_external_data(tmp_path: Path) -> None:
    proto = with_weights()
    inline = sg.load(proto)
    (tmp_path / "deep").mkdir()
    onnx.save(
        proto,
        tmp_path / "m.onnx",
        save_as_external_data=True,
        location="deep/w.bin",
        size_threshold=0,
    )
    graph = sg.load(tmp_path / "m.onnx")
    for name, parameter in inline.parameters.items():
        np.testing.assert_array_equal(graph.parameters[name].array, parameter.array)
    with (tmp_path / "m.onnx").open("rb") as file:
        raw = file.read()
    assert sg.load(raw, folder=tmp_path).parameters.keys() == {"a", "b"}


def test_old_opsets_and_all_ir_versions() -> None:
    text = (
        '<ir_version: {}, opset_import: ["" : {}]> g (float[2] x) => (float[2] y) {{ y = Relu(x) }}'
    )
    for ir_version in range(3, onnx.IR_VERSION + 1):
        assert sg.load(model(text.format(ir_version, 6))).nodes[0].version == 6
    for opset in range(1, onnx.defs.onnx_opset_version() + 1):
        graph = sg.load(model(text.format(8, opset)))
        assert graph.nodes[0].version == opset
        assert sg.to_onnx(graph).opset_import[0].version == opset


_MEASURE = """
import sys
from pathlib import Path
import subgraph as sg

def memory(kind):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(kind))

sg.load(sys.argv[2])
before = memory("VmRSS")
graph = sg.load(sys.argv[1])
for p in graph.parameters.values():
    p.array.view("u1").sum()  # reads every page
steady, peak = memory("VmRSS") - before, memory("VmHWM") - before
print(steady, peak)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads memory use from /proc")
@pytest.mark.parametrize("stored", ["raw", "floats", "external"])
def test_weights_are_in_memory_once(tmp_path: Path, stored: str) -> None:
    rng = np.random.default_rng(0)
    tensors: list[TensorProto] = []
    for k in range(8):
        array: Array = rng.standard_normal((1000, 1500)).astype(np.float32)
        if stored == "floats":
            tensor = TensorProto(name=f"w{k}", data_type=1, dims=array.shape)
            tensor.float_data.extend(array.ravel())
        else:
            tensor = numpy_helper.from_array(array, f"w{k}")
        tensors.append(tensor)
    nodes = [helper.make_node("Sum", [f"w{k}" for k in range(8)], ["y"])]
    y = helper.make_tensor_value_info("y", 1, None)
    proto = helper.make_model(helper.make_graph(nodes, "g", [], [y], tensors))
    path = tmp_path / "large.onnx"
    onnx.save(proto, path, save_as_external_data=stored == "external", location="data")
    size = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert size > 45_000_000
    small = tmp_path / "small.onnx"
    onnx.save(model(NESTED), small)
    done = subprocess.run(
        [sys.executable, "-c", _MEASURE, str(path), str(small)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ,
    )
    steady, peak = (int(number) for number in done.stdout.split())
    assert 0.9 * size < steady <= 1.1 * size, "every page was read, and is there once"
    assert peak <= 2.1 * size
