"""Saving: load, save, load gives the same graph; onnx.checker and ONNX Runtime agree with us."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import parser

import subgraph as sg
from subgraph import ops, passes
from subgraph.graph.types import Array
from subgraph.testing import conformance as suite
from subgraph.text_form.writer import print_graph

DATA = Path(onnx.__file__).parent / "backend" / "test" / "data"
FILES = sorted([*DATA.glob("light/*.onnx"), *DATA.glob("*/*/model.onnx")])


def run(model: onnx.ModelProto | Path, feeds: dict[str, Array]) -> list[Any]:
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(source, options).run(None, feeds)


def text(graph: sg.Graph) -> str:
    """Return the text form without what a file's history says (opsets, IR version)."""
    graph = graph.clone()
    graph.attrs.clear()
    graph.opsets.clear()
    return re.sub(r" opsets {[^}]*}|@\d+\(", "(", print_graph(graph, "digest"))


def same(one: sg.Graph, two: sg.Graph) -> None:
    lines = text(one).splitlines(), text(two).splitlines()
    assert lines[0] == lines[1], "\n".join(difflib.unified_diff(*lines, n=0, lineterm=""))


def round_trip(source: Any, functions: Any = "inline", *, infer_types: bool = True) -> None:
    graph = sg.load(source, functions=functions)
    saved = sg.to_onnx(graph)
    onnx.checker.check_model(saved)
    same(graph, sg.load(saved, functions=functions, infer_types=infer_types))


def check_backend_models(step: int) -> None:
    cases = [case for case in suite.cases() if case.kind == "node"]
    assert len(cases) > 1500
    failed: list[str] = []
    for case in cases[::step]:
        for functions in ("inline", "keep"):
            try:
                round_trip(case.load()[0], functions)
            except (sg.SubgraphError, AssertionError, onnx.checker.ValidationError) as error:
                failed.append(f"{case.name}: {type(error).__name__}: {error}")
    assert not failed, "\n".join(failed)


@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")
def test_models_of_onnx_backend_tests() -> None:
    check_backend_models(9)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::DeprecationWarning")
def test_all_models_of_onnx_backend_tests() -> None:
    check_backend_models(1)


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_model_files_of_onnx(path: Path) -> None:
    # What stands for a Gradient has types that a second look makes more exact.
    round_trip(path, infer_types="gradient" not in path.parent.name)


def cnn() -> sg.Graph:
    rng = np.random.default_rng(0)
    x = sg.input("x", ("N", 3, 8, 8))
    w = sg.parameter("w", rng.standard_normal((4, 3, 3, 3)).astype(np.float32))
    b = sg.parameter("b", rng.standard_normal(4).astype(np.float32))
    y = ops.Conv(x, w, b, pads=[1, 1, 1, 1], name="conv", version=11)
    y = ops.Relu(y, name="act", version=14)
    z = ops.GlobalAveragePool(y, name="pool", version=1)
    return sg.Graph([x], [y, z], name="net", metadata={"who": "me"}, doc="A net.")


X: Array = np.random.default_rng(1).standard_normal((2, 3, 8, 8)).astype(np.float32)


def test_a_graph_built_here(tmp_path: Path) -> None:
    graph = cnn()
    model = sg.to_onnx(graph)
    onnx.checker.check_model(model, full_check=True)
    assert [(o.domain, o.version) for o in model.opset_import] == [("", 14)]
    same(graph, sg.load(model))
    path = tmp_path / "net.onnx"
    sg.save(graph, path)
    assert [p.name for p in tmp_path.iterdir()] == ["net.onnx"]
    for one, two in zip(run(model, {"x": X}), run(path, {"x": X}), strict=True):
        np.testing.assert_array_equal(one, two)


def test_external_data_is_aligned_and_beside_the_file(tmp_path: Path) -> None:
    graph = cnn()
    big = sg.parameter("big", np.ones((1 << 19) + 1, np.float32))
    graph = sg.Graph(graph.inputs, [ops.Mul(graph.outputs[1], ops.ReduceSum(big))], name="net")
    path = tmp_path / "net.onnx"
    sg.save(graph, path, external_data=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["net.onnx", "net.onnx.data"]
    assert path.stat().st_size < 3000
    onnx.checker.check_model(path)
    stored = onnx.load(path, load_external_data=False).graph.initializer
    places = {t.name: {e.key: e.value for e in t.external_data} for t in stored}
    assert {k: int(v["offset"]) % 4096 for k, v in places.items() if v} == {"big": 0}
    same(graph, sg.load(path))
    # The large weight is used where it lies in the file.
    assert not sg.load(path).parameters["big"].array.flags.owndata


def test_a_failed_save_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "net.onnx"
    sg.save(cnn(), path)
    before = path.read_bytes()

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(sg.ModelError, match="No space left"):
        sg.save(cnn(), path, external_data=True)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["net.onnx"]


@pytest.mark.slow
def test_over_two_gigabytes(tmp_path: Path) -> None:
    arrays = [np.full((1 << 28) + 7, k, np.float32) for k in (1, 2)]
    parts = [ops.ReduceMax(sg.parameter(f"w{k}", a), version=13) for k, a in enumerate(arrays)]
    graph = sg.Graph([], [ops.Add(*parts, version=14)], name="large")
    with pytest.raises(sg.ModelError, match="2 GB"):
        sg.to_onnx(graph)
    with pytest.raises(sg.ModelError, match="external_data"):
        sg.save(graph, tmp_path / "m.onnx", external_data=False)
    sg.save(graph, tmp_path / "m.onnx")
    loaded = sg.load(tmp_path / "m.onnx")
    assert [p.array[-1] for p in loaded.parameters.values()] == [1, 2]


def test_opset_is_what_the_file_said_or_the_smallest() -> None:
    x = sg.input("x", (2, 3))
    old = ops.Relu(x, version=6)
    assert sg.to_onnx(sg.Graph([x], [old])).opset_import[0].version == 6
    mixed = ops.Add(old, ops.Identity(x, version=1), version=7)
    assert sg.to_onnx(sg.Graph([x], [mixed])).opset_import[0].version == 7
    # Relu 14 differs from Relu 6 by dtypes alone, so one newer node fits among old ones.
    dropout = ops.Dropout(ops.Relu(x), version=7)
    assert sg.to_onnx(sg.Graph([x], [dropout], opsets={"": 9})).opset_import[0].version == 9
    # The newest Cast is there for new dtypes; older runtimes know what this one asks for.
    cast = sg.Graph([x], [ops.Transpose(ops.Cast(x, to=1))])
    assert sg.to_onnx(cast).opset_import[0].version == 21
    held = sg.Graph([x], [ops.Swish(x)])
    assert sg.to_onnx(held).opset_import[0].version == 24
    y = sg.input("y", (2, 3))
    soft = ops.Add(ops.Softmax(y, version=11), ops.Softmax(y, version=13), name="sum")
    with pytest.raises(sg.ModelError, match="Softmax"):
        sg.to_onnx(sg.Graph([y], [soft]))
    assert sg.to_onnx(sg.Graph([x], [x])).opset_import[0].version > 0


def test_optional_outputs_that_nobody_uses_are_left_out() -> None:
    proto = parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 14]>
        g (float[S, B, 2] x, float[1, 12, 2] w, float[1, 12, 3] r) => (float[1, B, 3] h)
        { , h = LSTM <hidden_size = 3> (x, w, r) }"""
    )
    graph = sg.load(proto)
    assert list(sg.to_onnx(graph).graph.node[0].output) == ["", "h"]
    x, w, r = (sg.input(v.name, type=v.type) for v in graph.inputs)
    built = sg.Graph([x, w, r], [ops.LSTM(x, w, r, hidden_size=3)[1]])
    names = list(sg.to_onnx(built).graph.node[0].output)
    assert names[0] == ""
    assert names[1]


def test_names_are_made_unique_where_bodies_repeat_them() -> None:
    x, c = sg.input("x", (2,)), sg.input("c", (), dtype="bool")
    w = sg.parameter("w", np.ones(2, np.float32))
    y = ops.Relu(x)

    def branch(op: Any) -> sg.Graph:
        inner = op(sg.capture(y), sg.capture(w))
        return sg.Graph([], [ops.Relu(inner)], name="branch")

    graph = sg.Graph([x, c], [ops.If(c, then_branch=branch(ops.Add), else_branch=branch(ops.Mul))])
    model = sg.to_onnx(graph)
    onnx.checker.check_model(model, full_check=True)
    graph.opsets[""] = 18
    for flag, want in ((True, [2, 1]), (False, [1, 0])):
        feeds = {"x": np.array([1, -1], np.float32), "c": np.array(flag)}
        result = run(sg.to_onnx(graph), feeds)[0]
        np.testing.assert_array_equal(result, want)


def test_outputs_that_are_no_results_of_nodes() -> None:
    x = sg.input("x", (2,))
    w = sg.parameter("w", np.array([1, 2], np.float32))
    y = ops.Relu(x, version=14)
    graph = sg.Graph([x], [y, x, w, y])
    model = sg.to_onnx(graph)
    onnx.checker.check_model(model)
    feed = np.array([-1, 3], np.float32)
    results = run(model, {"x": feed})
    for result, want in zip(results, ([0, 3], feed, [1, 2], [0, 3]), strict=True):
        np.testing.assert_array_equal(result, want)


# Subgraph nodes


def partitioned(graph: sg.Graph, *op_types: str) -> sg.Graph:
    graph = graph.clone()
    graph.attrs["subgraph_property"] = sg.ContainOpSelector(set(op_types))
    return passes.apply_pass(graph, "PartitionGraph")


def check_functions(graph: sg.Graph, whole: sg.Graph, feeds: dict[str, Array]) -> None:
    """Check that the partitioned graph is saved as functions and comes back as it was."""
    model = sg.to_onnx(graph)
    onnx.checker.check_model(model)
    assert model.functions
    assert {f.domain for f in model.functions} == {"subgraph"}
    assert len({f.name for f in model.functions}) == len(model.functions)
    for one, two in zip(run(sg.to_onnx(whole), feeds), run(model, feeds), strict=True):
        np.testing.assert_array_equal(one, two)
    loaded = sg.load(model)
    assert shape_of(loaded) == shape_of(graph)
    same(loaded, sg.load(sg.to_onnx(loaded)))


def shape_of(graph: sg.Graph) -> list[Any]:
    """Return the operators of a graph, nested as its subgraph nodes are."""
    return [n.op_type if n.subgraph is None else shape_of(n.subgraph) for n in graph.nodes]


def by_hand(inner: sg.Graph, *inputs: sg.Value) -> sg.Node:
    return sg.subgraph_node(inner, name=inner.name, inputs=inputs)


def test_subgraph_nodes_are_local_functions() -> None:
    whole = cnn()
    x = sg.input("x", ("N", 3, 8, 8))
    v = sg.input("x", ("N", 3, 8, 8))
    w, b = (whole.parameters[name] for name in "wb")
    y = ops.Relu(
        ops.Conv(v, sg.parameter("w", w), sg.parameter("b", b), pads=[1] * 4, version=11),
        name="act",
        version=14,
    )
    inner = sg.Graph([v, *(y.producer.inputs[0].producer.inputs[1:])], [y], name="net/region 0")
    node = by_hand(inner, x, sg.parameter("w", w), sg.parameter("b", b))
    node.outputs[0].name = "y"
    pool = ops.GlobalAveragePool(node.outputs[0], version=1)
    graph = sg.Graph([x], [node.outputs[0], pool], name="net")
    graph.outputs[1].name = "z"
    check_functions(graph, whole, {"x": X})
    again = sg.load(sg.to_onnx(graph)).nodes[0]
    assert (again.op_type, again.domain) == (node.op_type, node.domain)
    assert again.subgraph is not None
    assert again.subgraph.inputs[1].parameter is again.inputs[1].parameter  # type: ignore[union-attr]  # pyright: ignore[reportOptionalMemberAccess]


def test_functions_in_functions_with_parameters_of_bodies() -> None:
    w = sg.parameter("w", np.array([2, 3], np.float32))

    def body(c: sg.Value, v: sg.Value) -> Any:
        def branch(op: Any) -> sg.Graph:
            return sg.Graph([], [op(sg.capture(v), sg.capture(w))], name="branch")

        return ops.If(c, then_branch=branch(ops.Add), else_branch=branch(ops.Mul), version=16)

    def ends() -> tuple[sg.Value, sg.Value]:
        return sg.input("c", (), dtype="bool"), sg.input("x", (2,))

    c, x = ends()
    whole = sg.Graph([c, x], [ops.Neg(body(c, x))], opsets={"": 18})
    c, x = ends()
    innermost = sg.Graph([c, x], [body(c, x)], name="region")
    c, x = ends()
    middle = by_hand(innermost, c, x)
    outer = sg.Graph([c, x], [ops.Neg(middle.outputs[0])], name="region")
    c, x = ends()
    graph = sg.Graph([c, x], by_hand(outer, c, x).outputs, opsets={"": 18})
    for flag in (True, False):
        check_functions(graph, whole, {"c": np.array(flag), "x": np.array([1, 5], np.float32)})
    model = sg.to_onnx(graph)
    assert len(model.functions) == 2
    assert [i.name for i in model.graph.initializer] == ["w"]


def test_partitioned_models_are_saved_with_the_same_results(tmp_path: Path) -> None:
    whole = sg.load(DATA / "light" / "light_squeezenet.onnx")
    graph = partitioned(whole, "Conv", "Relu", "MaxPool")
    regions = [node for node in graph.nodes if node.subgraph is not None]
    assert regions
    path = tmp_path / "p.onnx"
    sg.save(graph, path)
    shape = [d if isinstance(d, int) else 1 for d in whole.inputs[0].type.shape]  # type: ignore[union-attr]  # pyright: ignore
    feeds = {whole.inputs[0].name: np.random.default_rng(0).random(shape, np.float32)}
    for one, two in zip(run(sg.to_onnx(whole), feeds), run(path, feeds), strict=True):
        np.testing.assert_array_equal(one, two)
    graph.attrs.clear()
    same(graph, sg.load(path))


def test_what_a_graph_has_no_place_for_is_written_back(tmp_path: Path) -> None:
    """Unused weights, descriptions of nodes and values, notes, training graphs, annotations."""
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["" : 21]>
        main (float[N, 2] x, bool go) => (float[N, 2] y)
        <float[2] w = {1, 2}, float[3] spare = {3, 4, 5}, float[1] inner = {6}> {
            a = Add(x, w)
            y = If (go) <
                then_branch = yes () => (float[N, 2] b) <float[1] lost = {7}> { b = Mul(a, inner) },
                else_branch = no () => (float[N, 2] c) { c = Neg(a) }>
        }"""
    )
    graph = model.graph
    model.doc_string, graph.doc_string = "of the model", "of the graph"
    graph.node[0].name, graph.node[0].doc_string = "add", "of a node"
    body = graph.node[1].attribute[0].g
    body.node[0].name, body.node[0].doc_string = "add", "of a node in a body"
    graph.input[0].doc_string = "of an input"
    graph.output[0].metadata_props.add(key="k", value="of an output")
    graph.value_info.add(name="a", doc_string="of a value").type.CopyFrom(graph.input[0].type)
    graph.metadata_props.add(key="k", value="v")
    graph.quantization_annotation.add(tensor_name="a").quant_parameter_tensor_names.add(key="SCALE")
    training = model.training_info.add()
    training.initialization_binding.add(key="w", value="w0")
    path = tmp_path / "again.onnx"
    sg.save(sg.load(model), path)
    again = onnx.load(path)
    for name in ("doc_string", "training_info"):
        assert getattr(again, name) == getattr(model, name)
    for name in ("doc_string", "quantization_annotation", "metadata_props"):
        assert getattr(again.graph, name) == getattr(graph, name)
    weights = {t.name: onnx.numpy_helper.to_array(t).tolist() for t in again.graph.initializer}
    assert weights["spare"] == [3, 4, 5]
    assert weights["w"] == [1, 2]
    assert [node.doc_string for node in again.graph.node] == ["of a node", ""]
    inside = again.graph.node[1].attribute[0].g
    assert inside.node[0].doc_string == "of a node in a body"
    assert sorted(t.name for t in inside.initializer) == ["inner", "lost"]
    assert again.graph.input[0].doc_string == "of an input"
    assert again.graph.output[0].metadata_props == graph.output[0].metadata_props
    assert {i.name: i.doc_string for i in again.graph.value_info}["a"] == "of a value"
    onnx.checker.check_model(again)


def test_a_description_stays_where_it_was() -> None:
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> m (float x) => (float y) { y = Neg(x) }'
    )
    model.graph.doc_string = "of the graph alone"
    again = sg.to_onnx(sg.load(model))
    assert (again.doc_string, again.graph.doc_string) == ("", "of the graph alone")
    changed = sg.load(model)
    changed.doc = "new"
    assert sg.to_onnx(changed).doc_string == "new"


def test_who_made_a_model_is_not_invented() -> None:
    proto = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 18]> g (float[2] x) => (float[2] y) { y = Relu(x) }'
    )
    for name in ("", "somebody"):
        proto.producer_name = name
        saved = sg.to_onnx(sg.load(proto))
        assert (saved.producer_name, saved.producer_version) == (name, "")


def test_a_node_of_an_old_version_asks_for_no_newer_opset() -> None:
    x = sg.input("x", (4,), "bool")
    graph = sg.Graph([x], [ops.Identity(ops.Cast(x, to="int32"), version=1)])
    assert [entry.version for entry in sg.to_onnx(graph).opset_import] == [21]


def test_the_ir_version_that_a_file_states_is_kept() -> None:
    proto = onnx.parser.parse_model(
        '<ir_version: 10, opset_import: ["" : 23]> g (float[2] x) => (float[2] y) { y = Relu(x) }'
    )
    assert sg.to_onnx(sg.load(proto)).ir_version == 10


def test_results_of_branches_have_names_that_nothing_inside_them_has() -> None:
    """A result that nobody uses has one, too; so has one that is a value from outside."""
    x = sg.input("x", (2,))
    outer = ops.Sin(x)
    positive = ops.Greater(ops.ReduceSum(x, keepdims=0), np.float32(0))

    def branch(name: str, *results: sg.Value) -> sg.Graph:
        return sg.Graph([], list(results), name)

    held = sg.capture(outer)
    inner = ops.If(
        sg.capture(positive),
        then_branch=branch("inner_then", sg.capture(held)),
        else_branch=branch("inner_else", ops.Neg(sg.capture(held))),
    )
    first, _ = ops.If(
        positive,
        then_branch=branch("then", held, inner),
        else_branch=branch("else", ops.Exp(sg.capture(outer)), sg.capture(outer)),
        outputs=2,
    )
    given = np.array([0.5, 1], np.float32)
    model = sg.to_onnx(sg.Graph([x], [first]))
    np.testing.assert_allclose(run(model, {"x": given})[0], np.sin(given), rtol=1e-6)
    np.testing.assert_allclose(run(model, {"x": -given})[0], np.exp(-np.sin(given)), rtol=1e-6)


@pytest.mark.parametrize("where", ["value", "graph", "parameter", "doc"])
def test_text_without_a_form_in_utf_8_is_refused(where: str, tmp_path: Path) -> None:
    """A lone surrogate, as Python decodes bytes of file names that are not UTF-8."""
    text = "a\udcff"
    x = sg.input(text if where == "value" else "x", (2,))
    weight = sg.parameter(text if where == "parameter" else "w", np.ones(2, np.float32))
    graph = sg.Graph([x], [ops.Add(x, weight)], text if where == "graph" else "g")
    graph.doc = text if where == "doc" else ""
    target = tmp_path / "model.onnx"
    model = sg.compile_model(graph, "CPU")
    for write in (lambda: sg.save(graph, target), lambda: model.export_model(target)):
        with pytest.raises(sg.ModelError, match=r"'a\\udcff' has '\\udcff' at 1"):
            write()
    assert not list(tmp_path.iterdir())
