"""Classes of vulnerabilities that ONNX, ONNX Runtime and OpenVINO had: each refused or harmless.

A test names the class, not the report: files that lie about paths, sizes, counts, ids and nesting.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import subgraph as sg
from subgraph.onnx_format import tensors as onnx_tensors

DEVICES = ["REFERENCE", "CPU"]
_HUGE = 1 << 62


def _info(name: str, shape: Sequence[int | str] | None, dtype: int = TensorProto.FLOAT) -> Any:
    return helper.make_tensor_value_info(name, dtype, shape)


def _model(
    nodes: Sequence[onnx.NodeProto],
    weights: Sequence[onnx.TensorProto] = (),
    inputs: Sequence[Any] = (),
    outputs: Sequence[Any] = (),
) -> onnx.ModelProto:
    graph = helper.make_graph(
        nodes, "g", inputs or [_info("x", [2])], outputs or [_info("y", None)], list(weights)
    )
    opsets = [helper.make_opsetid(d, v) for d, v in (("", 17), ("ai.onnx.ml", 3))]
    opsets.append(helper.make_opsetid("com.microsoft", 1))
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


# ------------------------------------------------------------------ external data


def _external(location: str, **entries: str) -> onnx.ModelProto:
    """Return a model whose weight, of two numbers, is in another file."""
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2])
    weight.data_location = TensorProto.EXTERNAL
    for key, value in {"location": location, **entries}.items():
        weight.external_data.add(key=key, value=value)
    return _model([helper.make_node("Add", ["x", "w"], ["y"])], [weight])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a model, beside one with a secret."""
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "w.bin").write_bytes(np.array([7, 7], np.float32).tobytes())
    inner = tmp_path / "model"
    inner.mkdir()
    (inner / "w.bin").write_bytes(np.array([1, 2], np.float32).tobytes())
    return inner


def _load(folder: Path, model: onnx.ModelProto) -> list[float]:
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    numbers: list[float] = sg.load(path).parameters["w"].array.tolist()
    return numbers


def test_external_data_in_the_folder_are_read(folder: Path) -> None:
    assert _load(folder, _external("w.bin")) == [1, 2]
    assert _load(folder, _external("./w.bin", length="8", offset="0")) == [1, 2]


@pytest.mark.parametrize(
    "location",
    [
        "../secret/w.bin",
        "a/../../secret/w.bin",
        "..\\secret\\w.bin",
        "./../secret/w.bin",
        "{secret}",
        "C:\\secret\\w.bin",
        "//server/share/w.bin",
        "file://{secret}",
        "w.bin\0.png",
        "",
        ".",
        "~/w.bin",
        "/dev/zero",
    ],
)
def test_paths_out_of_the_folder_are_refused(location: str, folder: Path) -> None:
    secret = folder.parent / "secret" / "w.bin"
    with pytest.raises(sg.ModelError):
        _load(folder, _external(location.format(secret=secret)))


def _link_file(folder: Path, secret: Path) -> str:
    (folder / "link.bin").symlink_to(secret)
    return "link.bin"


def _link_folder(folder: Path, secret: Path) -> str:
    (folder / "link").symlink_to(secret.parent)
    return "link/w.bin"


def _link_chain(folder: Path, secret: Path) -> str:
    (folder / "a").symlink_to(secret)
    (folder / "b").symlink_to("a")
    return "b"


def _link_hard(folder: Path, secret: Path) -> str:
    os.link(secret, folder / "hard.bin")
    return "hard.bin"


def _link_device(folder: Path, secret: Path) -> str:
    (folder / "zero").symlink_to("/dev/zero")
    return "zero"


@pytest.mark.parametrize("link", [_link_file, _link_folder, _link_chain, _link_hard, _link_device])
def test_links_out_of_the_folder_are_refused(
    link: Callable[[Path, Path], str], folder: Path
) -> None:
    location = link(folder, folder.parent / "secret" / "w.bin")
    with pytest.raises(sg.ModelError):
        _load(folder, _external(location))


@pytest.mark.parametrize("swapped", ["folder", "file"])
def test_what_is_swapped_between_check_and_use_is_refused(
    swapped: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = folder / "weights"
    inner.mkdir()
    (folder / "w.bin").rename(inner / "w.bin")
    secret = folder.parent / "secret"
    check = onnx_tensors.TensorReader._allowed  # pyright: ignore[reportPrivateUsage]

    def swap(self: onnx_tensors.TensorReader, proto: TensorProto, location: str) -> Any:
        allowed = check(self, proto, location)
        if swapped == "folder":
            inner.rename(folder / "aside")
            inner.symlink_to(secret)
        else:
            (inner / "w.bin").unlink()
            (inner / "w.bin").symlink_to(secret / "w.bin")
        return allowed

    monkeypatch.setattr(onnx_tensors.TensorReader, "_allowed", swap)
    with pytest.raises(sg.ModelError):
        _load(folder, _external("weights/w.bin"))


@pytest.mark.parametrize(
    "entries",
    [
        {"offset": "8"},
        {"offset": "-8"},
        {"offset": str(_HUGE), "length": str(_HUGE)},
        {"length": str(2**64)},
        {"length": "-8"},
        {"length": "4"},
        {"length": "9" * 5000},
        {"offset": "0x10"},
        {"offset": "1e3"},
    ],
)
def test_places_outside_of_the_file_are_refused(entries: dict[str, str], folder: Path) -> None:
    with pytest.raises(sg.ModelError):
        _load(folder, _external("w.bin", **entries))


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="files have no owner and mode here")
@pytest.mark.parametrize("change", ["shortened", "overwritten"])
def test_files_that_other_users_can_change_are_read_at_once(change: str, folder: Path) -> None:
    """They were mapped: a file that got shorter ended the process by SIGBUS."""
    count = 1 << 20
    numbers = np.ones(count, np.float32)
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[count])
    weight.data_location = TensorProto.EXTERNAL
    weight.external_data.add(key="location", value="w.bin")
    inside = numpy_helper.from_array(numbers, "v")
    nodes = [helper.make_node("Add", ["w", "v"], ["y"])]
    files = folder / "w.bin", folder / "model.onnx"
    files[0].write_bytes(numbers.tobytes())
    files[1].write_bytes(_model(nodes, [weight, inside]).SerializeToString())
    for path in files:
        path.chmod(0o666)
    model = sg.compile_model(sg.load(files[1]), "REFERENCE")
    for path in files:
        if change == "shortened":
            os.truncate(path, 10)
        else:
            path.write_bytes(bytes(path.stat().st_size))
    assert (model(x=np.zeros(2, np.float32))[0] == 2).all()


def test_entries_of_external_data_are_no_attributes_of_anything(folder: Path) -> None:
    """ONNX set every key of an entry as an attribute of a Python object."""
    keys = ["__class__", "__dict__", "_folder", "basepath", "checksum", "location2", "shape"]
    assert _load(folder, _external("w.bin", **dict.fromkeys(keys, "../secret/w.bin"))) == [1, 2]


# ------------------------------------------------------------------ sizes that lie


@pytest.mark.parametrize(
    "dims",
    [[_HUGE], [1 << 32, 1 << 32], [-1], [2, -1], [1 << 31] * 4, [_HUGE, 0, -1], [3]],
)
@pytest.mark.parametrize("field", ["raw_data", "float_data", "int32_data", ""])
def test_dims_that_the_data_do_not_fill_are_refused(dims: list[int], field: str) -> None:
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=dims)
    if field == "raw_data":
        weight.raw_data = bytes(8)
    elif field:
        getattr(weight, field).extend([1, 2])
    with pytest.raises(sg.SubgraphError):
        sg.load(_model([helper.make_node("Add", ["x", "w"], ["y"])], [weight]))


@pytest.mark.parametrize(
    ("places", "dims"),
    [([2], [2]), ([-1], [2]), ([_HUGE], [2]), ([0], [_HUGE]), ([0], [-2]), ([0, 1], [2])],
)
def test_sparse_tensors_do_not_write_outside_of_the_dense_one(
    places: list[int], dims: list[int]
) -> None:
    model = _model([helper.make_node("Add", ["x", "w"], ["y"])])
    values = numpy_helper.from_array(np.ones(1, np.float32), "w")
    indices = numpy_helper.from_array(np.array(places))
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, dims))
    with pytest.raises(sg.SubgraphError):
        sg.load(model)


_PACKED: dict[str, dict[str, Any]] = {
    "few bytes": {"b": np.zeros((4, 1, 8), np.uint8)},
    "one byte": {"b": np.zeros((1,), np.uint8)},
    "few scales": {"scales": np.ones(1, np.float32)},
    "few zero points": {"zero": np.zeros(1, np.uint8)},
    **{f"{k} {v}": {k: v} for k in ("K", "N", "block_size") for v in (0, -16, 10**6, _HUGE)},
    **{f"bits {v}": {"bits": v} for v in (0, -4, 3, 64, _HUGE)},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", _PACKED)
def test_packed_weights_shorter_than_their_attributes_say_are_refused(
    name: str, device: str
) -> None:
    """MatMulNBits packed and read as many bytes as K, N and block_size said."""
    given: dict[str, Any] = {
        "b": np.zeros((4, 2, 8), np.uint8),
        "scales": np.ones(8, np.float32),
        **_PACKED[name],
    }
    arrays = [given.pop(key) for key in ("b", "scales", "zero") if key in given]
    weights = [numpy_helper.from_array(array, f"w{k}") for k, array in enumerate(arrays)]
    numbers: dict[str, Any] = {"K": 32, "N": 4, "block_size": 16, "bits": 4, **given}
    names = ["x", *(weight.name for weight in weights)]
    node = helper.make_node("MatMulNBits", names, ["y"], domain="com.microsoft", **numbers)
    model = _model([node], weights, [_info("x", [2, 32])])
    with pytest.raises(sg.SubgraphError):
        sg.compile_model(model, device)(np.zeros((2, 32), np.float32))


# ------------------------------------------------------------------ names and ids twice, cycles


def test_values_that_two_nodes_make_are_refused() -> None:
    nodes = [helper.make_node(op, ["x"], ["y"]) for op in ("Relu", "Neg")]
    with pytest.raises(sg.ModelError, match="made twice"):
        sg.load(_model(nodes))


def test_weights_of_one_name_are_refused() -> None:
    weight = numpy_helper.from_array(np.ones(2, np.float32), "w")
    with pytest.raises(sg.ModelError, match="made twice"):
        sg.load(_model([helper.make_node("Add", ["x", "w"], ["y"])], [weight, weight]))


def test_attributes_given_twice_are_refused_or_one_counts() -> None:
    node = helper.make_node("Concat", ["x", "x"], ["y"], axis=0)
    node.attribute.append(helper.make_attribute("axis", _HUGE))
    with pytest.raises(sg.SubgraphError):
        sg.compile_model(_model([node]), "CPU")(np.ones(2, np.float32))


def test_nodes_in_a_cycle_are_refused() -> None:
    nodes = [helper.make_node("Add", ["x", "b"], ["y"]), helper.make_node("Relu", ["y"], ["b"])]
    with pytest.raises(sg.ModelError, match="cycle"):
        sg.load(_model(nodes))


_TREES: dict[str, dict[str, Any]] = {
    "a node that is its own child": {
        "nodes_modes": ["BRANCH_LEQ"] * 3,
        "nodes_truenodeids": [0, 0, 0],
        "nodes_falsenodeids": [0, 0, 0],
    },
    "a child above its parent": {
        "nodes_modes": ["BRANCH_LEQ", "BRANCH_LEQ", "LEAF"],
        "nodes_truenodeids": [1, 0, 0],
    },
    "two nodes of one id": {"nodes_nodeids": [0, 1, 1]},
    "a child that is not there": {"nodes_truenodeids": [99, 0, 0]},
    "a feature that is not there": {"nodes_featureids": [99, 0, 0]},
    "a feature before the first": {"nodes_featureids": [-1, 0, 0]},
    "a target that is not there": {"target_ids": [99, 0]},
    "too few values": {"nodes_values": [0.5]},
    "targets without end": {"n_targets": _HUGE},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", _TREES)
def test_trees_that_lead_nowhere_are_refused(name: str, device: str) -> None:
    attributes: dict[str, Any] = {
        "n_targets": 1,
        "nodes_treeids": [0, 0, 0],
        "nodes_nodeids": [0, 1, 2],
        "nodes_featureids": [0, 0, 0],
        "nodes_modes": ["BRANCH_LEQ", "LEAF", "LEAF"],
        "nodes_values": [0.5, 0.0, 0.0],
        "nodes_truenodeids": [1, 0, 0],
        "nodes_falsenodeids": [2, 0, 0],
        "target_treeids": [0, 0],
        "target_nodeids": [1, 2],
        "target_ids": [0, 0],
        "target_weights": [1.0, 2.0],
        **_TREES[name],
    }
    node = helper.make_node(
        "TreeEnsembleRegressor", ["x"], ["y"], domain="ai.onnx.ml", **attributes
    )
    with pytest.raises(sg.SubgraphError):
        sg.compile_model(_model([node], inputs=[_info("x", [1, 2])]), device)(
            np.zeros((1, 2), np.float32)
        )


# ------------------------------------------------------------------ nesting


def _field(number: int, content: bytes) -> bytes:
    """Return a field of a message whose content has bytes."""
    size, head = len(content), bytes([number << 3 | 2])
    while size > 127:
        head, size = head + bytes([size & 127 | 128]), size >> 7
    return head + bytes([size]) + content


@pytest.mark.parametrize("depth", [20, 34, 100, 3000])
def test_bodies_nested_without_end_are_refused(depth: int) -> None:
    body = b""
    for _ in range(depth):
        attribute = _field(1, b"then_branch") + _field(6, body) + b"\xa0\x01\x05"
        node = _field(1, b"c") + _field(2, b"o") + _field(4, b"If") + _field(5, attribute)
        body = _field(2, b"g") + _field(1, node)
    content = b"\x08\x0a" + _field(8, b"\x10\x14") + _field(7, body)
    with pytest.raises(sg.ModelError):
        sg.load(content)


@pytest.mark.parametrize("opening", ["seq(", "optional(", "["])
def test_types_nested_without_end_are_refused(opening: str) -> None:
    text = f'graph "g" (%x: {opening * 5000}'
    with pytest.raises(sg.ModelError):
        sg.parse(text)


# ------------------------------------------------------------------ numbers that divide or count


_DIVIDED: dict[str, tuple[str, dict[str, Any], list[int]]] = {
    "stride 0": ("MaxPool", {"kernel_shape": [1, 1], "strides": [0, 0]}, [1, 1, 2, 2]),
    "average stride 0": ("AveragePool", {"kernel_shape": [1, 1], "strides": [0, 0]}, [1, 1, 2, 2]),
    "block 0": ("DepthToSpace", {"blocksize": 0}, [1, 4, 2, 2]),
    "block -2": ("DepthToSpace", {"blocksize": -2}, [1, 4, 2, 2]),
    "space block 0": ("SpaceToDepth", {"blocksize": 0}, [1, 4, 2, 2]),
    "axis beyond": ("Softmax", {"axis": _HUGE}, [2, 2]),
    "axis before": ("Flatten", {"axis": -_HUGE}, [2, 2]),
    "size 0": ("LRN", {"size": 0}, [1, 4, 2, 2]),
    "size -1": ("LRN", {"size": -1}, [1, 4, 2, 2]),
    "perm twice": ("Transpose", {"perm": [0, 0]}, [2, 2]),
    "perm beyond": ("Transpose", {"perm": [0, 9]}, [2, 2]),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", _DIVIDED)
def test_attributes_that_divide_or_count_are_refused(name: str, device: str) -> None:
    op_type, attributes, shape = _DIVIDED[name]
    node = helper.make_node(op_type, ["x"], ["y"], **attributes)
    with pytest.raises(sg.SubgraphError):
        sg.compile_model(_model([node], inputs=[_info("x", shape)]), device)(
            np.ones(shape, np.float32)
        )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op_type", ["Div", "Mod"])
@pytest.mark.parametrize("dtype", ["int8", "int32", "int64"])
def test_integer_division_does_not_end_the_process(op_type: str, dtype: str, device: str) -> None:
    x, y = sg.input("x", (3,), dtype), sg.input("y", (3,), dtype)
    model = sg.compile_model(sg.Graph([x, y], [getattr(sg.ops, op_type)(x, y)]), device)
    least = int(np.iinfo(dtype).min)
    found = model(np.array([least, 5, 7], dtype), np.array([-1, 0, 2], dtype))[0]
    assert found[2] == (3 if op_type == "Div" else 1)


@pytest.mark.parametrize("device", ["CPU", "REFERENCE"])
def test_bytes_of_booleans_are_0_or_1(device: str) -> None:
    weight = TensorProto(name="w", data_type=TensorProto.BOOL, dims=[4], raw_data=b"\0\1\2\xff")
    nodes = [
        onnx.helper.make_node("And", ["x", "w"], ["both"]),
        onnx.helper.make_node("Identity", ["w"], ["same"]),
        onnx.helper.make_node("Cast", ["w"], ["number"], to=TensorProto.UINT8),
    ]
    info = onnx.helper.make_tensor_value_info
    results = [info("both", 9, [4]), info("same", 9, [4]), info("number", TensorProto.UINT8, [4])]
    graph = onnx.helper.make_graph(nodes, "flags", [info("x", 9, [4])], results, [weight])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)])
    found = sg.compile_model(sg.load(model.SerializeToString()), device)(
        {"x": np.ones(4, np.bool_)}
    )
    for result in found.values():
        assert result.view(np.uint8).tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize("device", DEVICES)
def test_strings_in_raw_data_are_refused(device: str) -> None:
    weight = TensorProto(name="w", data_type=TensorProto.STRING, dims=[2], raw_data=bytes(16))
    with pytest.raises(sg.SubgraphError):
        sg.compile_model(_model([helper.make_node("Identity", ["w"], ["y"])], [weight]), device)


def test_patterns_take_linear_time() -> None:
    x = sg.input("x", ("N",), "string")
    graph = sg.Graph([x], [sg.ops.RegexFullMatch(x, pattern="(a+)+b|(a|a)*c|(.*)*d")])
    found = sg.compile_model(graph, "REFERENCE")(np.array(["a" * 200, "aab"], dtype=object))[0]
    assert found.tolist() == [False, True]


def test_nothing_of_a_file_is_unpickled(folder: Path) -> None:
    (folder / "model.onnx").write_bytes(b"\x80\x04cos\nsystem\n(S'touch owned'\ntR.")
    with pytest.raises(sg.ModelError):
        sg.load(folder / "model.onnx")
    assert not (folder / "owned").exists()
