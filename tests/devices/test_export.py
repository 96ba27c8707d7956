"""Export and import: round trips by path, stream and bytes, and devices that do not fit."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.devices.blob import BlobReader, read_header
from subgraph.devices.plugins.multi import MultiModel
from subgraph.graph.types import Array
from tests.support.small_network import X, exported, net, same

DEVICES = ["REFERENCE", "CPU"]


@pytest.fixture
def core() -> sg.Core:
    return sg.Core()


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


@pytest.mark.parametrize("device", [*DEVICES, "HETERO:CPU,REFERENCE", "MULTI:CPU,REFERENCE"])
def test_pickled_model(core: sg.Core, device: str) -> None:
    model = core.compile_model(net(), device)
    model.parameters["b"].assign(np.full(16, 0.5, np.float32))
    again = pickle.loads(pickle.dumps(model))
    same(again, model)
    assert again.device == model.device
    again.parameters["m"].assign(np.zeros((16, 10), np.float32))
    assert model(X)[0].any()


def test_pickled_model_in_another_process(core: sg.Core) -> None:
    model = core.compile_model(net(), "CPU")
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        found = pool.submit(model, X).result()
    np.testing.assert_array_equal(found[0], model(X)[0])


def test_model_of_an_op_without_export_is_not_pickled(core: sg.Core) -> None:
    class Negative(sg.SubgraphOp):
        def forward(self, inputs: list[Any]) -> list[Any]:
            return [-inputs[0]]

    x = sg.input("x", (2,))
    inner = sg.Graph([x], [ops.Neg(x)], "negative")
    node = sg.subgraph_node(inner, Negative(inner))
    outer = sg.input("x", (2,))
    node.inputs = (outer,)
    model = core.compile_model(sg.Graph([outer], node.outputs, nodes=[node]), "CPU")
    with pytest.raises(sg.BlobError, match="Negative"):
        pickle.dumps(model)


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
