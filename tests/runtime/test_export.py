"""Export, import, the model cache and preprocessing: round trips, damage, mismatches, atomicity."""

from __future__ import annotations

import io
import json
import logging
import os
import random
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st

import subgraph as sg
from subgraph import ops
from subgraph.devices import model_cache
from subgraph.devices.blob import (
    MAGIC,
    PROLOGUE,
    BlobReader,
    BlobWriter,
    digest,
    leaf_hashes,
    read_header,
)
from subgraph.devices.plugins.multi import MultiModel
from subgraph.graph.types import Array
from subgraph.runtime.preprocessing import preprocessed

DEVICES = ["REFERENCE", "CPU"]
X = np.linspace(-1, 1, 2 * 3 * 8 * 8, dtype=np.float32).reshape(2, 3, 8, 8)


def net(seed: int = 0, size: int = 8) -> sg.Graph:
    rng = np.random.default_rng(seed)
    x = sg.input("x", ("N", 3, size, size))
    w = sg.parameter("w", rng.standard_normal((16, 3, 3, 3)).astype(np.float32))
    b = sg.parameter("b", rng.standard_normal(16).astype(np.float32))
    m = sg.parameter("m", rng.standard_normal((16, 10)).astype(np.float32))
    y = ops.Relu(ops.Conv(x, w, b, pads=[1, 1, 1, 1], name="conv"), name="relu")
    pooled = ops.Flatten(ops.GlobalAveragePool(y, name="pool"), name="flat")
    return sg.Graph([x], [ops.MatMul(pooled, m, name="mm"), ops.Abs(y, name="abs")], "net")


@pytest.fixture
def core() -> sg.Core:
    return sg.Core()


def same(a: sg.CompiledModel, b: sg.CompiledModel, x: Array = X) -> None:
    for one, other in zip(a(x).values(), b(x).values(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def exported(model: sg.CompiledModel) -> bytes:
    stream = io.BytesIO()
    model.export_model(stream)
    return stream.getvalue()


@pytest.mark.parametrize("device", DEVICES)
def test_round_trip_by_path_and_stream(core: sg.Core, tmp_path: Path, device: str) -> None:
    model = core.compile_model(net(), device)
    model(X)
    path = tmp_path / "net.blob"
    model.export_model(path)
    with open(path, "rb") as stream:
        models = [core.import_model(path), core.import_model(str(path), device)]
        models.append(core.import_model(stream))
    for again in models:
        same(again, model)
        assert again.name == "net"
        assert [p.name for p in again.inputs] == ["x"]
        assert again.inputs[0].type == model.inputs[0].type
        assert set(again.parameters) == {"w", "b", "m"}
        again.parameters["m"].assign(np.zeros((16, 10), np.float32))
        assert not again(X)[0].any()
    assert model(X)[0].any()
    assert os.listdir(tmp_path) == ["net.blob"]


@pytest.mark.parametrize("ran", [True, False])
def test_what_was_made_of_weights_is_taken_from_the_file(
    core: sg.Core, tmp_path: Path, ran: bool
) -> None:
    graph = net()
    if not ran:  # then the shape of the input has to be known
        graph.inputs[0].type = sg.TensorType("float32", X.shape)
    model = core.compile_model(graph, "CPU")
    if ran:
        model(X)
    path = tmp_path / "net.blob"
    model.export_model(path)
    header = read_header(path)
    assert header["packed"], "the CPU keeps convolution weights in its own layout"
    again = core.import_model(path)
    same(again, model)
    ops_of = [n.op for n in again.graph.nodes if n.op is not None]
    assert sum(op.weights.stats().made for op in ops_of) == 0
    reader = BlobReader(path)
    for item in [*header["packed"], *header["weights"].values()]:
        part = reader.part(item.get("place", item))
        assert np.frombuffer(part, np.uint8).ctypes.data % 64 == 0
    again.parameters["w"].assign(again.parameters["w"].array * 2)
    model.parameters["w"].assign(model.parameters["w"].array * 2)
    same(again, model)


def test_large_weights_are_mapped_not_read(core: sg.Core, tmp_path: Path) -> None:
    x = sg.input("x", ("N", 1024))
    w = sg.parameter("w", np.ones((1024, 1024), np.float32))
    model = core.compile_model(sg.Graph([x], [ops.MatMul(x, w)]), "REFERENCE")
    path = tmp_path / "big.blob"
    model.export_model(path)
    array = core.import_model(path).parameters["w"].array
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    assert type(getattr(base, "obj", base)).__name__ == "mmap"
    with pytest.raises(ValueError, match="read-only"):
        array[0, 0] = 2


def test_multi_writes_each_devices_model(
    core: sg.Core, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An import compiles nothing; the devices share weights, which can still change."""
    model = core.compile_model(net(), "MULTI:CPU,REFERENCE", {"CPU": {"FUSION": False}})
    path = tmp_path / "net.blob"
    model.export_model(path)

    def fail(*_: Any) -> Any:
        raise AssertionError("compiled anew")

    with monkeypatch.context() as patched:
        patched.setattr(sg.Core, "compile_model", fail)
        again = core.import_model(path)
    same(again, model)
    assert isinstance(again, MultiModel)
    assert again.device == model.device
    assert [m.get_property("FUSION") for m in again.models if m.device == "CPU"] == [False]
    for part in again.models:
        same(part, model)
    again.parameters["m"].assign(np.zeros((16, 10), np.float32))
    for part in again.models:
        assert not part(X)[0].any()
    for device in ("CPU", "REFERENCE", "MULTI:REFERENCE", "MULTI:REFERENCE,CPU", "HETERO:CPU"):
        same(core.import_model(path, device), model)
    with pytest.raises(sg.BlobError, match="not for HETERO"):
        core.import_model(path, "HETERO:CPU", {"ALLOW_RECOMPILE": False})
    data = bytearray(path.read_bytes())
    for place in range(0, len(data), 1009):
        data[place] ^= 1
        with pytest.raises(sg.BlobError):
            core.import_model(io.BytesIO(data))
        data[place] ^= 1


def test_optional_weights_of_multi_survive(core: sg.Core) -> None:
    x = sg.input("x", ("N", 4))
    scale = sg.parameter("scale", np.full(4, 2, np.float32))
    graph = sg.Graph([x, scale], [ops.Mul(x, scale)], "net")
    model = core.compile_model(graph, "MULTI:CPU,REFERENCE")
    again = core.import_model(io.BytesIO(exported(model)))
    data = np.ones((2, 4), np.float32)
    assert again(data)[0].tolist() == model(data)[0].tolist() == (2 * data).tolist()
    own = np.full(4, 3, np.float32)
    assert again(x=data, scale=own)[0].tolist() == (3 * data).tolist()


def test_import_in_another_process(core: sg.Core, tmp_path: Path) -> None:
    model = core.compile_model(net(), "CPU")
    path = tmp_path / "net.blob"
    model.export_model(path)
    code = (
        "import sys, numpy as np, subgraph as sg\n"
        f"m = sg.import_model({str(path)!r})\n"
        "x = np.linspace(-1, 1, 2*3*8*8, dtype=np.float32).reshape(2, 3, 8, 8)\n"
        "sys.stdout.buffer.write(m(x)[0].tobytes())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    got = np.frombuffer(done.stdout, np.float32).reshape(2, 10)
    np.testing.assert_array_equal(got, model(X)[0])


def damaged(blob: bytes, rng: random.Random) -> bytes:
    data = bytearray(blob)
    kind = rng.randrange(6)
    if kind == 0:
        for _ in range(rng.choice([1, 1, 4])):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == 1:
        del data[rng.randrange(len(data)) :]
    elif kind == 2:
        data += bytes(rng.randrange(1, 100))
    elif kind == 3:
        begin = rng.randrange(len(data))
        data[begin : begin + 64] = bytes(reversed(data[begin : begin + 64])) or b"x"
    elif kind == 4:
        offset, size = rng.choice([(8, 4), (12, 4), (16, 8), (24, 8)])
        data[offset : offset + size] = rng.randrange(1 << 8 * size).to_bytes(size, "little")
    else:
        begin = rng.randrange(len(data))
        data[begin : begin + rng.randrange(1, 4096)] = bytes(rng.randrange(1, 4096))
    return bytes(data)


def test_a_thousand_damaged_files_are_a_thousand_clean_errors(core: sg.Core) -> None:
    blob = exported(core.compile_model(net(), "REFERENCE"))
    rng = random.Random(7)
    tried = 0
    while tried < 1000:
        data = damaged(blob, rng)
        if data == blob:
            continue
        tried += 1
        with pytest.raises(sg.BlobError):
            core.import_model(data, "REFERENCE")
        with pytest.raises(sg.BlobError):
            core.import_model(data)


def lies() -> list[Any]:
    def drop(key: str) -> Any:
        return lambda h: h.pop(key)

    def put(key: str, value: Any) -> Any:
        return lambda h: h.__setitem__(key, value)

    def offset(h: Any) -> None:
        next(iter(h["weights"].values()))["offset"] = 1 << 40

    def size(h: Any) -> None:
        next(iter(h["weights"].values()))["size"] = 12

    def no_weight(h: Any) -> None:
        h["weights"].clear()

    values = [None, 5, "x", [], {}, -1, 1e400]
    changes = [put(k, v) for k in ("weights", "model", "options", "capability") for v in values]
    changes += [drop(k) for k in ("weights", "model", "options", "capability", "configs")]
    changes += [offset, size, no_weight, put("byteorder", "odd"), put("device", 3)]
    changes += [put("model", {"offset": 0, "size": 100}), put("packed", [{"recipe": 3}])]
    changes += [put("options", {"SPEED": 1}), put("defaults", 3), put("defaults", {"a": "w"})]
    return changes


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("number", range(len(lies())))
def test_headers_that_lie_with_right_checksums(
    core: sg.Core, number: int, own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    blob = exported(core.compile_model(net(), "REFERENCE"))
    size, body_size = struct.unpack_from("<QQ", blob, 16)
    start = PROLOGUE + size
    header = json.loads(blob[PROLOGUE:start])
    lies()[number](header)
    writer = BlobWriter()
    writer.add(blob[start : start + body_size])
    stream = io.BytesIO()
    if not own:
        monkeypatch.setattr("subgraph.devices.blob.signature", lambda *_: bytes(32))
    writer.write(header, stream)
    stream.seek(0)
    try:
        model = core.import_model(stream, "REFERENCE")
    except (sg.BlobError, sg.ConfigError):
        return
    same(model, core.compile_model(net(), "REFERENCE"))  # what was changed did not matter


@pytest.mark.parametrize("data", [b"", b"abc", MAGIC, MAGIC + bytes(100), b"PK\x03\x04" * 50])
def test_files_that_are_something_else(core: sg.Core, tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x"
    path.write_bytes(data)
    for source in (path, io.BytesIO(data)):
        with pytest.raises(sg.BlobError):
            core.import_model(source)
    for device_name in ("", "REFERENCE"):
        with pytest.raises(sg.MissingFileError, match=r"cannot read .*missing': No such file") as e:
            core.import_model(tmp_path / "missing", device_name)
        assert isinstance(e.value, sg.BlobError)
        assert isinstance(e.value, FileNotFoundError)
    with pytest.raises(sg.BlobError, match=r"not a regular file|cannot read"):
        core.import_model(tmp_path)
    with pytest.raises(sg.BlobError, match="cannot import a int"):
        core.import_model(3, "REFERENCE")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    with pytest.raises(sg.BlobError, match="open for text"):
        core.import_model(io.StringIO("text"), "REFERENCE")  # type: ignore[arg-type]


def test_where_a_file_cannot_be_written(core: sg.Core, tmp_path: Path) -> None:
    model = core.compile_model(net(), "REFERENCE")
    with pytest.raises(sg.MissingFileError, match=r"cannot write .*nowhere.a.blob': No such file"):
        model.export_model(tmp_path / "nowhere" / "a.blob")
    with pytest.raises(sg.BlobError, match="cannot export to a int"):
        model.export_model(3)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def test_exported_bytes_and_files_of_the_other_kind(core: sg.Core, tmp_path: Path) -> None:
    model = core.compile_model(net(), "REFERENCE")
    model.export_model(tmp_path / "a.blob")
    same(core.import_model((tmp_path / "a.blob").read_bytes()), model)
    with pytest.raises(sg.ModelError, match="an exported model, not an ONNX one"):
        sg.load(tmp_path / "a.blob")
    sg.save(net(), tmp_path / "a.onnx")
    with pytest.raises(sg.BlobError, match="an ONNX model goes to compile_model"):
        core.import_model(tmp_path / "a.onnx")


def checksum(data: bytes | bytearray) -> bytes:
    return digest(len(data), leaf_hashes(data))


@given(st.integers(0, 200_000), st.data())
def test_the_checksum_sees_every_changed_byte(size: int, draw: st.DataObject) -> None:
    data = np.random.default_rng(size).bytes(size)
    before = checksum(data)
    assert before == checksum(bytearray(data))
    if data:
        position = draw.draw(st.integers(0, len(data) - 1))
        flipped = bytearray(data)
        flipped[position] ^= draw.draw(st.integers(1, 255))
        assert checksum(flipped) != before
        assert checksum(data[:position]) != before
    assert checksum(data + b"\0") != before


def test_the_checksum_sees_a_change_in_every_part_of_a_large_file() -> None:
    data = bytearray(np.random.default_rng(0).bytes(5 * (1 << 22) + 1000))
    before = checksum(data)
    for position in (0, len(data) // 3, 1 << 22, len(data) - 1001, len(data) - 1):
        data[position] ^= 16
        assert checksum(data) != before
        data[position] ^= 16
    assert checksum(data) == before


def test_what_does_not_fit_is_compiled_anew_or_refused(core: sg.Core) -> None:
    class Chip(sg.Device):
        revision = "1"
        compiled = 0

        def supports(self, node: sg.Node, options: Any) -> bool:
            return True

        def create_op(self, graph: sg.Graph, options: Any) -> sg.SubgraphOp:
            type(self).compiled += 1
            return super().create_op(graph, options)

        def capability(self) -> dict[str, str]:
            return {**super().capability(), "revision": self.revision}

    core.register_device("CHIP", Chip)
    model = core.compile_model(net(), "CHIP")
    blob = exported(model)
    Chip.revision = "2"
    again = core.import_model(io.BytesIO(blob))
    same(again, model)
    with pytest.raises(sg.BlobError, match="another CHIP: revision '1', here '2'"):
        core.import_model(io.BytesIO(blob), "CHIP", {"ALLOW_RECOMPILE": False})
    core.unregister_device("CHIP")
    with pytest.raises(sg.DeviceError, match="no device named 'CHIP'"):
        core.import_model(io.BytesIO(blob))
    same(core.import_model(io.BytesIO(blob), "REFERENCE"), model)


def test_an_op_of_a_user_cannot_be_exported(core: sg.Core, tmp_path: Path) -> None:
    class Mine(sg.SubgraphOp):
        def forward(self, inputs: list[Any]) -> list[Array]:
            return inputs

    x = sg.input("x", (2,))
    inner = sg.Graph([x], [ops.Relu(x)], "inner")
    node: Any = sg.subgraph_node(inner, Mine(inner), "mine")
    model = core.compile_model(sg.Graph(node.inputs, node.outputs), "REFERENCE")
    path = tmp_path / "x"
    path.write_bytes(b"old")
    with pytest.raises(sg.BlobError, match=r"node 'mine' runs by Mine"):
        model.export_model(path)
    assert path.read_bytes() == b"old"
    with pytest.raises(OSError, match=r"."):
        core.compile_model(net(), "REFERENCE").export_model(tmp_path / "no" / "folder")
    assert os.listdir(tmp_path) == ["x"]


def test_optional_inputs_and_control_flow_survive(core: sg.Core) -> None:
    x, c = sg.input("x", ("N",)), sg.input("c", (), "bool")
    k = sg.parameter("k", np.array([2], np.float32))
    w = sg.parameter("w", np.arange(600, dtype=np.float32))
    then = sg.Graph(outputs=[ops.Mul(sg.capture(x), sg.capture(k))], name="then")
    other = sg.Graph(outputs=[ops.Add(sg.capture(x), sg.capture(w))], name="else")
    graph = sg.Graph([x, c, k], [ops.If(c, then_branch=then, else_branch=other)], "flow")
    model = core.compile_model(graph, "CPU")
    again = core.import_model(io.BytesIO(exported(model)))
    value = np.ones(600, np.float32)
    for m in (model, again):
        assert m(value, np.array(True))[0][0] == 2
        assert m(value, np.array(True), np.array([5], np.float32))[0][0] == 5
        assert m(value, np.array(False))[0][7] == 8


# ----------------------------------------------------------------------------- the model cache


@pytest.mark.parametrize("device", DEVICES)
def test_cache_finds_by_content(core: sg.Core, tmp_path: Path, device: str) -> None:
    config = {"CACHE_DIR": str(tmp_path / "cache")}
    graph = net()
    first = core.compile_model(graph, device, config)
    assert len(list((tmp_path / "cache").iterdir())) == 1
    second = core.compile_model(graph, device, config)
    assert second.parameters["w"] is graph.parameters["w"]
    same(second, first)
    same(core.compile_model(net(), device, config), first)
    assert len(list((tmp_path / "cache").iterdir())) == 1
    same(core.compile_model(net(1), device, config), core.compile_model(net(1), device))
    core.compile_model(net(), device, {**config, "PERFORMANCE_HINT": "THROUGHPUT"})
    assert len(list((tmp_path / "cache").iterdir())) == 3
    graph.parameters["m"].assign(np.zeros((16, 10), np.float32))
    assert not second(X)[0].any()  # the cached model is built on the parameters of its graph
    core.set_property(device, config)
    core.compile_model(graph, device)
    assert len(list((tmp_path / "cache").iterdir())) == 4


def test_damaged_cache_entries_are_made_anew(core: sg.Core, tmp_path: Path) -> None:
    config = {"CACHE_DIR": str(tmp_path)}
    first = core.compile_model(net(), "REFERENCE", config)
    (entry,) = tmp_path.iterdir()
    good = entry.read_bytes()
    for bad in (b"", good[:-1], good[:5000] + b"?" + good[5001:]):
        entry.write_bytes(bad)
        same(core.compile_model(net(), "REFERENCE", config), first)
        assert len(entry.read_bytes()) == len(good)


def test_a_graph_that_has_no_text_is_not_cached(core: sg.Core, tmp_path: Path) -> None:
    graph = net()
    graph.nodes[0].attrs["callback"] = object()
    with pytest.raises(sg.ModelError, match="object"):
        model_cache.cache_key(core.device("REFERENCE"), "REFERENCE", graph, {})


def test_a_cache_that_cannot_be_written_is_no_error(
    core: sg.Core, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with caplog.at_level(logging.WARNING):
        model = core.compile_model(net(), "REFERENCE", {"CACHE_DIR": str(blocked)})
    assert "cannot be cached" in caplog.text
    same(model, core.compile_model(net(), "REFERENCE"))


def test_many_threads_share_a_cache(core: sg.Core, tmp_path: Path) -> None:
    config = {"CACHE_DIR": str(tmp_path)}
    want = core.compile_model(net(), "REFERENCE")
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(3):
                same(core.compile_model(net(), "REFERENCE", config), want)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(list(tmp_path.iterdir())) == 1


# ----------------------------------------------------------------------------- preprocessing


def numpy_of(image: Array, mean: Any, scale: Any) -> Array:
    data = (image.astype(np.float32) - np.float32(mean)) / np.float32(scale)
    return np.ascontiguousarray(np.moveaxis(data, -1, 1))


@pytest.mark.parametrize("device", DEVICES)
def test_preprocessing_becomes_nodes(core: sg.Core, device: str) -> None:
    image = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3)).astype(np.uint8)
    mean, scale = (123.7, 116.3, 103.5), (58.4, 57.1, 57.4)
    steps = sg.Preprocess(dtype="uint8", layout="NHWC", mean=mean, scale=scale)
    model = core.compile_model(net(), device, preprocess={"x": steps})
    assert str(model.inputs[0]) == "x: uint8[N, 8, 8, 3]"
    plain = core.compile_model(net(), device)
    want = plain(numpy_of(image, mean, scale))
    for got, each in zip(model(image).values(), want.values(), strict=True):
        np.testing.assert_allclose(got, each, rtol=1e-4, atol=1e-4)


def test_resize_agrees_with_onnxruntime(core: sg.Core) -> None:
    image = np.random.default_rng(0).random((1, 5, 11, 3), np.float32)
    graph = preprocessed(net(), {"x": {"layout": "NHWC", "size": (None, "W")}})
    assert str(graph.inputs[0].type) == "float32[N, ?, W, 3]"
    session = onnxruntime.InferenceSession(sg.to_onnx(graph).SerializeToString())
    want = session.run(None, {"x": image})
    got = core.compile_model(graph, "REFERENCE")(image)
    for one, other in zip(got.values(), want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_one_number_needs_no_layout(core: sg.Core) -> None:
    x = sg.input("x", ("N", 4))
    graph = sg.Graph([x], [ops.Relu(x)])
    model = core.compile_model(graph, "REFERENCE", preprocess={"x": {"mean": 1, "scale": 2}})
    np.testing.assert_allclose(model([[[1, 3, 5, -1]]])[0], [[0, 1, 2, 0]])
    assert [n.op_type for n in graph.nodes] == ["Relu"]
    same_again = core.compile_model(graph, "REFERENCE", preprocess={"x": {}})
    assert same_again([[[1, -3, 5, -1]]])[0].tolist() == [[1, 0, 5, 0]]


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ({"z": {}}, "no input 'z'"),
        ({"x": {"men": 1}}, "did you mean 'mean'"),
        ({"x": {"layout": "HNWC"}}, "layout 'HNWC'"),
        ({"x": {"layout": "HWC"}}, "cannot become NCHW"),
        ({"x": {"dtype": "uint9"}}, "uint9"),
        ({"x": {"mean": (1, 2)}}, "has 3 channels, mean has 2 numbers"),
        ({"x": {"scale": 0}}, "scale of input 'x' is zero"),
    ],
)
def test_wrong_preprocessing(core: sg.Core, steps: Any, message: str) -> None:
    with pytest.raises(sg.ConfigError, match=message):
        core.compile_model(net(), "REFERENCE", preprocess=steps)


@pytest.mark.parametrize("device", DEVICES)
def test_cached_bodies_stand_on_the_graphs_parameters(
    core: sg.Core, tmp_path: Path, device: str
) -> None:
    x, c = sg.input("x", ("N",)), sg.input("c", (), "bool")
    k = sg.parameter("k", np.array([2], np.float32))
    then = sg.Graph(outputs=[ops.Mul(sg.capture(x), sg.capture(k))], name="then")
    other = sg.Graph(outputs=[ops.Add(sg.capture(x), sg.capture(k))], name="else")
    graph = sg.Graph([x, c], [ops.If(c, then_branch=then, else_branch=other)], "flow")
    config = {"CACHE_DIR": str(tmp_path)}
    value = np.ones(3, np.float32)
    core.compile_model(graph, device, config)
    model = core.compile_model(graph, device, config)
    assert model.parameters["k"] is graph.parameters["k"]
    for number in (2, 7):
        graph.parameters["k"].assign(np.array([number], np.float32))
        assert model(value, np.array(True))[0][0] == number
        assert model(value, np.array(False))[0][0] == number + 1


class Pipe(io.RawIOBase):
    """A stream that cannot be put back and gives few bytes at a time."""

    def __init__(self, data: bytes) -> None:
        self._data = io.BytesIO(data)

    def read(self, size: int = -1) -> bytes:
        return self._data.read(min(size, 777) if size >= 0 else 777)


def test_a_stream_goes_on_after_the_model(core: sg.Core) -> None:
    models = [core.compile_model(net(), name) for name in ("REFERENCE", "CPU")]
    stream = io.BytesIO()
    stream.write(b"before")
    for model in models:
        model.export_model(stream)
        stream.write(b"between")
    sources: list[Any] = [io.BytesIO(stream.getvalue()), Pipe(stream.getvalue())]
    for source in sources:
        named = isinstance(source, Pipe)  # such a stream cannot be asked for the device first
        assert source.read(6) == b"before"
        for model in models:
            again = core.import_model(source, model.device if named else "")
            assert again.device == model.device
            np.testing.assert_allclose(again(X)[0], model(X)[0])
            assert source.read(7) == b"between"
        assert source.read(1) == b""


def test_bytes_and_files_hold_one_model_alone(core: sg.Core, tmp_path: Path) -> None:
    blob = exported(core.compile_model(net(), "REFERENCE"))
    assert core.import_model(blob).device == "REFERENCE"
    with pytest.raises(sg.BlobError, match="go on for 3 after the model; give a stream"):
        core.import_model(blob + b"end")
    path = tmp_path / "model.blob"
    path.write_bytes(blob + b"end")
    with pytest.raises(sg.BlobError, match="damaged"):
        core.import_model(path)
    stream = io.BytesIO(blob[:-1])
    with pytest.raises(sg.BlobError, match="damaged: it has"):
        core.import_model(stream, "REFERENCE")
