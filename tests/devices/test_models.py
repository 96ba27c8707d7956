"""Whole models against ONNX Runtime: as they are, and partitioned by two selectors.

The nine light models of the onnx package (random weights) run here; the larger ones, made by
``benchmarks/make_models/export_models.py``, run when the folder SUBGRAPH_MODELS holds them.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import light_models
import numpy as np
import onnx
import onnxruntime
import pytest

import subgraph as sg
from subgraph import passes
from subgraph.graph.types import Array

Arrays = dict[str, Array]
FOLDER = os.environ.get("SUBGRAPH_MODELS")
LARGE = sorted(Path(FOLDER).glob("*.onnx")) if FOLDER else []
FAST = ("light_squeezenet", "light_shufflenet")


class Heavy(sg.SubgraphSelector):
    """Convolutions and products with what follows them, but nothing that feeds a Concat."""

    def select(self, node: sg.Node) -> bool:
        return node.op_type in {"Conv", "Gemm", "MatMul"}

    def select_input(self, node: sg.Node, input_node: sg.Node) -> bool:
        return input_node.op_type in {"Relu", "Add", "BatchNormalization", "Sum"}

    def select_output(self, node: sg.Node, output_node: sg.Node) -> bool | sg.Reject:
        if any(n.op_type == "Concat" for n in output_node.successors()):
            return sg.Reject("a Concat follows")
        return output_node.op_type in {"Relu", "Add", "BatchNormalization", "Mul", "Sum", "Conv"}


def arrays_for(session: Any) -> Arrays:
    rng = np.random.default_rng(0)
    return {i.name: rng.standard_normal(i.shape).astype(np.float32) for i in session.get_inputs()}


def check(model: onnx.ModelProto | Path, arrays: Arrays | None = None) -> None:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 2
    source = str(model) if isinstance(model, Path) else model.SerializeToString()
    session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    arrays = arrays_for(session) if arrays is None else arrays
    expected: list[Any] = session.run(None, arrays)
    graph = sg.load(model)
    for selector in (None, sg.ContainOpSelector({"Conv", "Relu", "MatMul", "Add"}), Heavy):
        if selector is None:
            cut = graph
        else:
            cut = graph.clone()
            cut.attrs["subgraph_property"] = selector
            cut = passes.apply_pass(cut, "PartitionGraph")
            sg.testing.check_partition(graph, cut)
            assert any(node.subgraph is not None for node in cut.nodes)
        found = list(sg.compile_model(cut, "CPU")(arrays).values())
        for ours, theirs in zip(found, expected, strict=True):
            scale = np.abs(theirs).max()
            np.testing.assert_allclose(np.asarray(ours), theirs, rtol=0, atol=1e-4 * scale)


@pytest.mark.parametrize("name", FAST)
def test_light_model(name: str) -> None:
    check(light_models.light_model(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(light_models.NAMES) - set(FAST)))
def test_larger_light_model(name: str) -> None:
    check(light_models.light_model(name))


@pytest.mark.slow
@pytest.mark.parametrize("path", LARGE, ids=lambda p: p.stem)
def test_exported_model(path: Path) -> None:
    beside = path.with_name(path.stem.removesuffix("_op23").removesuffix("_ts17") + ".npz")
    if not beside.exists():
        check(path)
        return
    with np.load(beside) as held:
        check(path, {name: held[name] for name in held if not name.startswith("__")})
