"""Damaged models and huge sizes: a result or a SubgraphError, nothing else.

The whole harness is ``benchmarks/robustness.py``; here a small part of it runs.
"""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import Array

pytestmark = pytest.mark.filterwarnings("ignore")
_TOOL = Path(__file__).parents[2] / "benchmarks" / "robustness.py"
_WIDE, _HIGH = 2**20, 2**21  # a float32 array of these sides has 8 TiB


@pytest.mark.parametrize("device", ["REFERENCE", "AUTO"])
def test_damaged_models_give_a_result_or_our_error(device: str) -> None:
    command = [sys.executable, str(_TOOL), "--device", device, "--count", "300", "--start", "20000"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def _grow() -> dict[str, tuple[sg.Graph, Sequence[Array]]]:
    sides = sg.input("s", (2,), "int64")
    x, y = sg.input("x", ("N", 1)), sg.input("y", (1, "M"))
    image = sg.input("image", (1, 1, 4, 4))
    end = sg.input("end", (), "int64")
    one = np.ones((1, 1), np.float32)
    picture = np.ones((1, 1, 4, 4), np.float32)
    columns = [np.ones((_WIDE, 1), np.float32), np.ones((1, _HIGH), np.float32)]
    asked = [np.array([_WIDE, _HIGH])]
    pads = [0, 0, 0, 0, 0, 0, _WIDE, _HIGH]
    scales = np.array([1, 1, _WIDE, _WIDE], np.float32)
    return {
        "constant": (sg.Graph([sides], [ops.ConstantOfShape(sides)]), asked),
        "expand": (sg.Graph([sides], [ops.Expand(one, sides)]), asked),
        "tile": (sg.Graph([sides], [ops.Tile(one, sides)]), asked),
        "add": (sg.Graph([x, y], [ops.Add(x, y)]), columns),
        "matmul": (sg.Graph([x, y], [ops.MatMul(x, y)]), columns),
        "range": (sg.Graph([end], [ops.Range(0, end, 1)]), [np.array(2**45)]),
        "pad": (sg.Graph([image], [ops.Pad(image, pads)]), [picture]),
        "conv": (
            sg.Graph([image], [ops.Conv(image, np.ones((1, 1, 1, 1), "f"), pads=[_WIDE] * 4)]),
            [picture],
        ),
        "resize": (sg.Graph([image], [ops.Resize(image, None, scales)]), [picture]),
    }


@pytest.mark.parametrize("device", ["REFERENCE", "CPU"])
@pytest.mark.parametrize("name", list(_grow()))
def test_what_no_machine_can_hold_is_refused_before_it_is_allocated(name: str, device: str) -> None:
    graph, feeds = _grow()[name]
    model = sg.compile_model(graph, device)
    tracemalloc.start()
    with pytest.raises(sg.LimitError, match="GiB"):
        model(list(feeds))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 << 20


def test_a_refused_size_does_not_spoil_the_next_request() -> None:
    graph, feeds = _grow()["add"]
    model = sg.compile_model(graph, "CPU")
    with pytest.raises(sg.LimitError):
        model(list(feeds))
    model([np.ones((3, 1), np.float32), np.ones((1, 2), np.float32)])
    request = model.create_infer_request()
    result = request.infer([np.ones((3, 1), np.float32), np.ones((1, 2), np.float32)])
    assert result[0].tolist() == [[2, 2]] * 3


def _constant_file(make: Callable[[], list[onnx.TensorProto]], node: onnx.NodeProto) -> bytes:
    output = onnx.helper.make_tensor_value_info("o", 1, None)
    graph = onnx.helper.make_graph([node], "g", [], [output], make())
    return onnx.helper.make_model(graph).SerializeToString()


def test_a_short_file_that_asks_for_terabytes_is_refused() -> None:
    node = onnx.helper.make_node("ConstantOfShape", ["s"], ["o"])
    content = _constant_file(lambda: [onnx.helper.make_tensor("s", 7, [2], [_WIDE, _HIGH])], node)
    assert len(content) < 100
    with pytest.raises(sg.SubgraphError):
        sg.compile_model(content)([])
    node = onnx.helper.make_node("Identity", ["s"], ["o"])
    tensor = onnx.TensorProto(name="s", data_type=1, dims=[_WIDE, _HIGH], raw_data=b"1234")
    with pytest.raises(sg.ModelError):
        sg.load(_constant_file(lambda: [tensor], node))


def test_counts_of_n_grams_that_would_take_hours() -> None:
    """Found by damaging models: loops over numbers that nothing had checked."""
    usual: dict[str, Any] = {"mode": "TF", "min_gram_length": 2, "max_gram_length": 2}
    usual |= {"max_skip_count": 0, "ngram_counts": [0, 4], "ngram_indexes": [0, 1, 2, 3, 4, 5]}
    usual["pool_int64s"] = [2, 3, 5, 4, 5, 6, 7, 8]
    x = sg.input("x", (6,), "int32")
    given = np.array([5, 6, 2, 3, 7, 8], np.int32)

    def run(**changed: Any) -> Any:
        graph = sg.Graph([x], [sg.ops.TfIdfVectorizer(x, **{**usual, **changed})])
        return sg.compile_model(graph, "REFERENCE")([given])[0]

    expected = run(max_skip_count=6).tolist()
    assert run(max_skip_count=2**62).tolist() == expected
    for wrong in ({"ngram_counts": [-(2**62), 4]}, {"ngram_counts": [0, 2**40]}):
        with pytest.raises(sg.ShapeError, match="do not fit a pool"):
            run(**wrong)
    with pytest.raises(sg.LimitError, match="memory"):
        run(ngram_indexes=[0, 1, 2, 2**60])


@pytest.mark.parametrize("device", ["REFERENCE", "CPU"])
def test_a_loop_that_doubles_a_tensor_is_refused_within_seconds(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from onnx import TensorProto, helper, numpy_helper

    monkeypatch.setenv("SUBGRAPH_MEMORY_LIMIT", "128M")
    info = helper.make_tensor_value_info
    body = helper.make_graph(
        [
            helper.make_node("Identity", ["go"], ["on"]),
            helper.make_node("Concat", ["a", "a"], ["twice"], axis=0),
        ],
        "body",
        [info("i", TensorProto.INT64, []), info("go", TensorProto.BOOL, []), info("a", 1, None)],
        [info("on", TensorProto.BOOL, []), info("twice", TensorProto.FLOAT, None)],
    )
    graph = helper.make_graph(
        [helper.make_node("Loop", ["count", "", "x"], ["y"], body=body)],
        "g",
        [info("x", TensorProto.FLOAT, ["N"])],
        [info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.array(2**40), "count")],
    )
    opset = [helper.make_opsetid("", 22)]
    model = sg.compile_model(helper.make_model(graph, opset_imports=opset, ir_version=10), device)
    with pytest.raises(sg.LimitError, match="half of the memory"):
        model([np.ones(1, np.float32)])


def test_what_lives_at_a_time_must_fit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBGRAPH_MEMORY_LIMIT", "64K")
    x = sg.input("x", ("N",))
    turned = ops.Exp(ops.Transpose(ops.CumSum(x, np.array(0))))
    graph = sg.Graph([x], [ops.CumSum(ops.Concat(turned, turned, axis=0), np.array(0))])
    model = sg.compile_model(graph, "CPU")
    assert model([np.zeros(8, np.float32)])[0].shape == (16,)
    with pytest.raises(sg.LimitError, match="live at the same time"):
        model([np.zeros(6 << 10, np.float32)])


def test_a_loop_that_never_ends_stops_when_its_rounds_hold_too_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from onnx import TensorProto, helper, numpy_helper

    monkeypatch.setenv("SUBGRAPH_MEMORY_LIMIT", "64K")
    info = helper.make_tensor_value_info
    body = helper.make_graph(
        [helper.make_node("Identity", ["go"], ["on"]), helper.make_node("Relu", ["a"], ["row"])],
        "body",
        [info("i", TensorProto.INT64, []), info("go", TensorProto.BOOL, [])],
        [info("on", TensorProto.BOOL, []), info("row", TensorProto.FLOAT, ["n"])],
    )
    graph = helper.make_graph(
        [helper.make_node("Loop", ["count", ""], ["y"], body=body)],
        "g",
        [info("a", TensorProto.FLOAT, ["n"])],
        [info("y", TensorProto.FLOAT, ["t", "n"])],
        [numpy_helper.from_array(np.array(1 << 40), "count")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)])
    with pytest.raises(sg.LimitError, match="results of its body"):
        sg.compile_model(model, "REFERENCE")([np.ones(100, np.float32)])
