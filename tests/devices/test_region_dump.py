"""DUMP_DIR of HETERO: what it compiled, one ONNX file for each region."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest

import subgraph as sg
from subgraph import ops
from tests.support.simulated_device import X, expected, seven, two_devices


def run(path: Path, *inputs: np.ndarray) -> list[np.ndarray]:
    session = onnxruntime.InferenceSession(str(path))
    names = [port.name for port in session.get_inputs()]
    return list(session.run(None, dict(zip(names, inputs, strict=True))))


def test_one_file_for_each_region(tmp_path: Path) -> None:
    core, _, _ = two_devices()
    folder = tmp_path / "new" / "dump"
    model = core.compile_model(seven(), "HETERO:A,B", {"DUMP_DIR": folder})
    files = sorted(folder.iterdir())
    regions = [(n.name, (n.metadata or {})["affinity"]) for n in model.graph.nodes]
    assert [f.name for f in files] == sorted(f"seven.{n}.{device}.onnx" for n, device in regions)
    nodes = {f.name: [node.name for node in sg.load(f).nodes] for f in files}
    for node in model.graph.nodes:
        assert node.subgraph is not None
        device = (node.metadata or {})["affinity"]
        name = f"seven.{node.name}.{device}.onnx"
        assert nodes[name] == [inner.name for inner in node.subgraph.nodes]
    # The files together compute what the model does.
    by_name = {f.name.split(".")[1]: f for f in files}
    first, second, third = (by_name[name] for name, _ in regions)
    (two,) = run(first, X)[:1]
    (four,) = run(second, two)
    (result,) = run(third, *([two, four] if len(sg.load(third).inputs) == 2 else [four]))
    np.testing.assert_allclose(result, expected(seven(), X)[0], rtol=1e-6)


def test_names_that_are_no_names_of_files(tmp_path: Path) -> None:
    core, _, _ = two_devices()
    x = sg.input("x", (2, 3))
    graph = sg.Graph([x], [ops.Neg(ops.Relu(x))], "../up and/away")
    core.compile_model(graph, "HETERO:A,B", {"DUMP_DIR": tmp_path})
    assert sorted(f.name for f in tmp_path.iterdir()) == [
        ".._up_and_away.A_0.A.onnx",
        ".._up_and_away.B_1.B.onnx",
    ]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    core, _, _ = two_devices()
    (tmp_path / "file").write_text("")
    with pytest.raises(sg.FileError, match="file"):
        core.compile_model(seven(), "HETERO:A,B", {"DUMP_DIR": tmp_path / "file" / "dump"})


def test_an_exported_model_does_not_dump_again(tmp_path: Path) -> None:
    core, _, _ = two_devices()
    folder = tmp_path / "dump"
    model = core.compile_model(seven(), "HETERO:A,B", {"DUMP_DIR": folder})
    model.export_model(tmp_path / "model.blob")
    for file in folder.iterdir():
        file.unlink()
    core.import_model(tmp_path / "model.blob")
    assert not list(folder.iterdir())
