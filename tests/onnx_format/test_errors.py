"""Damaged, hostile and wrong model files: one clear error each, nothing read that must not be."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper, parser

import subgraph as sg
from subgraph import ops
from subgraph.operators.schema import newest_opset

FILE_ERRORS = (sg.ModelError, sg.UnsupportedOpError)


def chain(*op_types: str, opset: int = 18) -> onnx.ModelProto:
    nodes: list[onnx.NodeProto] = []
    for k, op_type in enumerate(op_types):
        nodes.append(helper.make_node(op_type, [f"v{k}"], [f"v{k + 1}"], name=f"n{k}"))
    x = helper.make_tensor_value_info("v0", 1, (2,))
    y = helper.make_tensor_value_info(f"v{len(op_types)}", 1, (2,))
    graph = helper.make_graph(nodes, "g", [x], [y])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


def fails(source: Any, *words: str, error: type[sg.SubgraphError] = sg.ModelError) -> None:
    """Check that loading fails with this error whose message has these words."""
    with pytest.raises(error) as caught:
        sg.load(source)
    for word in words:
        assert word in str(caught.value)


def edited(edit: Callable[[onnx.ModelProto], Any], *op_types: str) -> onnx.ModelProto:
    proto = chain(*(op_types or ("Relu", "Neg")))
    edit(proto)
    return proto


def test_our_own_faults_are_not_called_damage(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fault(*_: Any, **__: Any) -> None:
        raise IndexError("list index out of range")

    monkeypatch.setattr("subgraph.operators.type_inference.infer_graph", fault)
    path = tmp_path / "good.onnx"
    onnx.save(chain("Relu"), path)
    for good in (path, str(path), path.read_bytes(), chain("Relu")):
        fails(good, "IndexError", "report it", error=sg.InternalError)
    fails(edited(lambda proto: proto.graph.output[0].type.Clear()), "damaged", "IndexError")


def test_what_is_no_model(tmp_path: Path) -> None:
    fails(tmp_path / "missing.onnx", "missing.onnx", "No such file")
    fails(tmp_path, "directory")
    empty = tmp_path / "empty.onnx"
    empty.touch()
    fails(empty, "empty")
    fails(b"", "graph")
    text = tmp_path / "text.onnx"
    text.write_text('{"not": "a model"}' * 10)
    fails(text, "text.onnx")
    fails(numpy_helper.from_array(np.zeros((3, 3), np.float32)).SerializeToString())
    fails(chain("Relu").graph.SerializeToString())
    fails(3.5, "cannot load a float")
    with text.open() as file:
        fails(file, "rb")
    with pytest.raises(sg.ModelError, match="inline"):
        sg.load(chain("Relu"), functions="drop")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def test_every_truncation_fails(tmp_path: Path) -> None:
    proto = chain("Relu", "Neg")
    weight = np.arange(3000, dtype=np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    raw = proto.SerializeToString()
    path = tmp_path / "cut.onnx"
    for length in [*range(0, 120), *range(120, len(raw), 997), len(raw) - 1]:
        path.write_bytes(raw[:length])
        with pytest.raises(FILE_ERRORS):
            sg.load(path)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=400))
def test_random_bytes_fail(raw: bytes) -> None:
    with pytest.raises(FILE_ERRORS):
        sg.load(raw)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 8))
def test_changed_bytes_load_or_fail_cleanly(seed: int, count: int) -> None:
    rng = random.Random(seed)
    proto = chain("Relu", "Neg", "Abs")
    proto.graph.initializer.append(numpy_helper.from_array(np.ones(5, np.float32), "w"))
    raw = bytearray(proto.SerializeToString())
    for _ in range(count):
        raw[rng.randrange(len(raw))] = rng.randrange(256)
    try:
        graph = sg.load(bytes(raw))
    except FILE_ERRORS:
        return
    graph.verify()
    assert sg.parse(str(graph))


def test_cycle_is_named() -> None:
    def edit(proto: onnx.ModelProto) -> None:
        proto.graph.node[0].input[0] = "v3"

    fails(edited(edit, "Relu", "Neg", "Abs"), "cycle", "'n0'", "'n1'", "'n2'")
    fails(edited(lambda p: p.graph.node[0].input.__setitem__(0, "v1")), "cycle", "'n0'")


def test_names_without_a_source_and_with_two() -> None:
    fails(edited(lambda p: p.graph.node[1].input.__setitem__(0, "no")), "'n1'", "'no'")
    fails(edited(lambda p: p.graph.output[0].__setattr__("name", "no")), "output 'no'")
    fails(edited(lambda p: p.graph.node[1].output.__setitem__(0, "v1")), "'v1'", "twice")
    fails(edited(lambda p: p.graph.node[1].output.__setitem__(0, "v0")), "'v0'", "twice")
    fails(edited(lambda p: p.graph.input.add(name="v0")), "'v0'", "twice")

    def weights(proto: onnx.ModelProto) -> None:
        for _ in range(2):
            proto.graph.initializer.append(numpy_helper.from_array(np.ones(2, "f4"), "w"))

    fails(edited(weights), "'w'", "twice")


def test_operators_and_opsets_that_are_not_known() -> None:
    unknown = sg.UnsupportedOpError
    fails(chain("Rellu"), "n0", "'Rellu'", "'Relu'", error=unknown)
    fails(chain("Mish", opset=17), "'Mish'", "opset 17", error=unknown)
    fails(chain("Upsample", opset=17), "'Upsample'", error=unknown)
    fails(chain("Relu", opset=999), "opset 999", "upgrade", error=unknown)
    fails(edited(lambda p: p.opset_import[0].__setattr__("version", -1)), error=unknown)
    fails(edited(lambda p: p.opset_import.pop()), "opset_import")
    fails(edited(lambda p: p.opset_import.add(domain="ai.onnx", version=7)), "two versions")
    fails(edited(lambda p: p.__setattr__("ir_version", 999)), "IR version 999")
    fails(edited(lambda p: p.ClearField("ir_version")), "IR version 0")
    fails(edited(lambda p: p.graph.node[0].__setattr__("domain", "ai.onnx.ml")), "ai.onnx.ml")


def test_an_operator_that_came_later() -> None:
    words = "operator 'Gelu' came after opset 18", "version_converter"
    fails(chain("Gelu", opset=18), *words, error=sg.UnsupportedOpError)


@pytest.mark.parametrize("number", [0, 99])
def test_a_cast_to_no_dtype(number: int) -> None:
    proto = chain("Cast")
    proto.graph.node[0].attribute.append(helper.make_attribute("to", number))
    words = rf"'n0' \(Cast\).* to is {number}, which is no element type"
    with pytest.raises(sg.ShapeError, match=words):
        sg.compile_model(sg.load(proto), "CPU")(np.zeros(2, np.float32))


def test_files_that_stand_for_others() -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    fails(pointer, "git lfs pull")
    fails(chain("Relu").SerializeToString()[:-3], "export or download it again")


def test_an_operator_of_a_foreign_domain_is_kept() -> None:
    def edit(proto: onnx.ModelProto) -> None:
        proto.graph.node[0].domain = "com.me"
        proto.opset_import.add(domain="com.me", version=3)

    graph = sg.load(edited(edit))
    assert (graph.nodes[0].domain, graph.nodes[0].version) == ("com.me", 3)
    assert sg.load(sg.to_onnx(graph)).opsets == {"": 18, "com.me": 3}


def test_nodes_that_do_not_fit_their_schema() -> None:
    fails(edited(lambda p: p.graph.node[0].input.append("v0")), "'n0'", "2 inputs")
    fails(edited(lambda p: p.graph.node[0].output.append("q")), "'n0'", "2 outputs")
    extra = helper.make_attribute("alpha", 1.0)
    fails(edited(lambda p: p.graph.node[0].attribute.append(extra)), "'n0'", "'alpha'")
    fails(chain("Cast"), "'to'")
    wrong = helper.make_attribute("to", "float")
    fails(edited(lambda p: p.graph.node[0].attribute.append(wrong), "Cast"), "'to'", "int")


def tensor_model(tensor: TensorProto) -> onnx.ModelProto:
    def edit(proto: onnx.ModelProto) -> None:
        proto.graph.initializer.append(tensor)
        proto.graph.output.add(name=tensor.name)

    return edited(edit)


@pytest.mark.parametrize("dims", [[1 << 40], [1 << 31, 1 << 31, 1 << 31], [-4], [3], [2, -2]])
def test_declared_sizes_that_are_not_there(dims: list[int]) -> None:
    started = time.perf_counter()
    for data in (b"1234" * 4, b"1234" * 2000):
        fails(tensor_model(TensorProto(name="w", dims=dims, data_type=1, raw_data=data)), "'w'")
        raw = tensor_model(TensorProto(name="w", dims=dims, data_type=1, raw_data=data))
        fails(raw.SerializeToString(), "'w'")
    floats = TensorProto(name="w", dims=dims, data_type=1, float_data=[1.0] * 4)
    fails(tensor_model(floats), "'w'")
    fails(tensor_model(TensorProto(name="w", dims=dims, data_type=99, raw_data=b"1234")), "99")
    assert time.perf_counter() - started < 5


def test_sparse_tensors_that_are_not_well_formed() -> None:
    def sparse(dims: list[int], indices: list[int]) -> onnx.ModelProto:
        values = helper.make_tensor("w", 1, (2,), [1.0, 2.0])
        places = helper.make_tensor("i", 7, (len(indices),), indices)
        made = onnx.SparseTensorProto(values=values, indices=places, dims=dims)
        return edited(lambda p: p.graph.sparse_initializer.append(made))

    sg.load(sparse([2, 2], [0, 3]))
    fails(sparse([2, 2], [0, 4]), "'w'", "indices")
    fails(sparse([2, 2], [-1, 3]), "'w'")
    fails(sparse([2, 2], [1]), "'w'")
    fails(sparse([1 << 20, 1 << 20], [0, 3]), "'w'", "2 GB")


def external(location: str, **entries: Any) -> onnx.ModelProto:
    tensor = TensorProto(name="w", dims=[4], data_type=1, data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, **entries}.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor_model(tensor)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a model's folder with data inside, outside, and links that leave it."""
    inside = tmp_path / "model"
    inside.mkdir()
    (inside / "data").write_bytes(np.arange(4, dtype="<f4").tobytes() * 2)
    (tmp_path / "secret").write_bytes(bytes(64))
    (inside / "link").symlink_to(tmp_path / "secret")
    (inside / "up").symlink_to(tmp_path)
    (inside / "here").symlink_to(inside / "data")
    (inside / "hard").hardlink_to(tmp_path / "secret")
    return inside


def test_external_data_in_the_folder(folder: Path) -> None:
    for location in ("data", "./data", "here"):
        onnx.save(external(location, offset=16, length=16), folder / "m.onnx")
        loaded = sg.load(folder / "m.onnx").parameters["w"]
        np.testing.assert_array_equal(loaded.array, np.arange(4))


@pytest.mark.parametrize(
    "location",
    [
        "../secret",
        "a/../../secret",
        "..\\secret",
        "link",
        "up/secret",
        "hard",
        "/etc/hostname",
        "C:\\secret",
        "",
        ".",
        "\0",
    ],
)
def test_nothing_outside_the_folder_is_read(folder: Path, location: str) -> None:
    (folder / "m.onnx").write_bytes(external(location).SerializeToString())
    fails(folder / "m.onnx", "'w'", "outside")


def test_external_data_that_does_not_fit(folder: Path) -> None:
    def check(proto: onnx.ModelProto, *words: str) -> None:
        (folder / "m.onnx").write_bytes(proto.SerializeToString())
        fails(folder / "m.onnx", *words)

    check(external("missing"), "missing")
    check(external("data", offset=24), "'w'", "32")
    check(external("data", offset=-4), "'w'")
    check(external("data", length=12), "'w'", "12 bytes")
    check(external("data", length=1 << 60), "'w'")
    check(external("data", offset="many"), "'w'", "offset")
    if hasattr(os, "mkfifo"):
        os.mkfifo(folder / "pipe")
        check(external("pipe"), "regular file")
    fails(external("data"), "folder=")


def test_functions_that_call_themselves() -> None:
    text = """<ir_version: 10, opset_import: ["" : 18, "my" : 1]>
    g (float[2] x) => (float[2] y) { y = my.f(x) }
    <domain: "my", opset_import: ["" : 18, "my" : 1]> f (a) => (r) { r = my.g(a) }
    <domain: "my", opset_import: ["" : 18, "my" : 1]> g (a) => (r) { r = my.f(a) }"""
    fails(parser.parse_model(text), "my.f", "my.g")


def test_functions_that_grow_without_end_are_refused() -> None:
    bomb = ['<ir_version: 10, opset_import: ["" : 18, "my" : 1]>']
    bomb.append("g (float[2] x) => (float[2] y) { y = my.f40(x) }")
    one = '<domain: "my", opset_import: ["" : 18, "my" : 1]> '
    bomb.append(one + "f0 (a) => (r) { r = Relu(a) }")
    for k in range(1, 41):
        bomb.append(one + f"f{k} (a) => (r) {{ b = my.f{k - 1}(a) r = my.f{k - 1}(b) }}")
    started = time.perf_counter()
    with pytest.raises(sg.LimitError, match="inlining"):
        sg.load(parser.parse_model("\n".join(bomb)))
    assert time.perf_counter() - started < 5


def test_messages_nested_without_end() -> None:
    from subgraph.onnx_format.wire import delimited

    raw = bytes(5000)
    for field in [6, 5, 1] * 60:
        raw = delimited(field, len(raw)) + raw
    fails(delimited(7, len(raw)) + raw, "nested")


def test_text_that_is_not_utf8() -> None:
    raw = chain("Relu", "Neg").SerializeToString().replace(b"n0", b"\xff\xfe")
    fails(raw, "UTF-8")


def test_a_malformed_einsum_equation_does_not_hang() -> None:
    # onnx 1.23's own inference runs forever on these.
    from subgraph import ops

    x = sg.input("x", (2, 3))
    for equation in ("ij>", "i.j->ij", "..ij", "ij-"):
        with pytest.raises(sg.ShapeError, match="equation"):
            ops.Einsum(x, equation=equation)


def test_an_output_that_cannot_be_written(tmp_path: Path) -> None:
    graph = sg.load(chain("Relu"))
    with pytest.raises(sg.ModelError, match="cannot write"):
        sg.save(graph, tmp_path / "missing" / "m.onnx")
    (tmp_path / "folder").mkdir()
    with pytest.raises(sg.ModelError, match="cannot write"):
        sg.save(graph, tmp_path / "folder")
    with pytest.raises(sg.ModelError, match="cannot write ''"):
        sg.save(graph, "")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["folder"]
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(sg.ModelError, match="no regular file"):
            sg.save(graph, tmp_path / "pipe")
        assert not (tmp_path / "pipe").is_file()


def test_a_link_to_the_output_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "m.onnx").symlink_to(tmp_path / "real" / "m.onnx")
    sg.save(sg.load(chain("Relu")), tmp_path / "m.onnx")
    assert (tmp_path / "m.onnx").is_symlink()
    assert sg.load(tmp_path / "real" / "m.onnx").nodes[0].op_type == "Relu"


def test_newest_operator_sets_are_those_of_the_onnx_package() -> None:
    newest = {"": 1, "subgraph": 1, "com.microsoft": 1}
    for schema in onnx.defs.get_all_schemas_with_history():
        newest[schema.domain] = max(newest.get(schema.domain, 1), schema.since_version)
    assert {domain: newest_opset(domain) for domain in newest} == newest


@pytest.mark.parametrize("key", ["subgraph.version", "subgraph.hidden_inputs"])
@pytest.mark.parametrize("text", ["", "1-", "-1", "0x1", "1" * 5000, "\N{SUPERSCRIPT TWO}"])
def test_a_number_in_the_metadata_of_a_saved_region_may_be_damaged(key: str, text: str) -> None:
    x = sg.input("x", (2, 2), "float32")
    graph = sg.Graph([x], [ops.Relu(ops.Neg(x))])
    proto = sg.to_onnx(sg.optimize_for(graph, sg.ContainOpSelector({"Relu"})))
    (function,) = proto.functions
    for entry in [each for each in function.metadata_props if each.key == key]:
        function.metadata_props.remove(entry)
    function.metadata_props.add(key=key, value=text)
    with pytest.raises(sg.ModelError, match=f"metadata '{key}' is '.*'; it must be a number"):
        sg.load(proto)
