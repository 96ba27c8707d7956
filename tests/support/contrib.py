"""One operator of ONNX Runtime's own, here on each device and there: what test_contrib_* share."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

import subgraph as sg
from subgraph.graph.types import Array, TensorType, dtype_of
from subgraph.operators.type_inference import merge

DEVICES = ("CPU", "REFERENCE")


def node_model(
    op_type: str,
    inputs: Sequence[Array | None],
    *,
    constants: Collection[int] = (),
    outputs: Sequence[bool] = (True,),
    domain: str = "com.microsoft",
    standard: int = 17,
    symbolic: bool = False,
    **attributes: Any,
) -> onnx.ModelProto:
    """Return a model of one node; inputs at ``constants`` are weights, others ``symbolic``."""
    names = ["" if array is None else f"x{k}" for k, array in enumerate(inputs)]
    results = [f"y{k}" if wanted else "" for k, wanted in enumerate(outputs)]
    node = helper.make_node(op_type, names, results, name="node", domain=domain, **attributes)
    given = {k: array for k, array in enumerate(inputs) if array is not None}
    infos = [
        helper.make_tensor_value_info(
            names[k],
            helper.np_dtype_to_tensor_dtype(array.dtype),
            [f"d{size}" for size in array.shape] if symbolic else array.shape,
        )
        for k, array in given.items()
        if k not in constants
    ]
    weights = [onnx.numpy_helper.from_array(given[k], names[k]) for k in constants if k in given]
    made = [helper.make_tensor_value_info(r, TensorProto.UNDEFINED, None) for r in results if r]
    for info in made:
        info.ClearField("type")
    graph = helper.make_graph([node], "contrib", infos, made, weights)
    imports = [helper.make_opsetid("", standard), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=9)


def oracle(model: onnx.ModelProto, inputs: dict[str, Array]) -> list[Array]:
    """Return what ONNX Runtime computes, without optimisations."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    options.intra_op_num_threads = 1  # DynamicQuantizeLSTM rounds the states of each thread apart
    raw = model.SerializeToString()
    session = onnxruntime.InferenceSession(raw, options, providers=["CPUExecutionProvider"])
    return session.run(None, inputs)


def check(
    op_type: str,
    inputs: Sequence[Array | None],
    *,
    rtol: float = 1e-5,
    atol: float = 1e-5,
    steps: int = 1,
    expected: Sequence[Array] | None = None,
    compared: int | None = None,
    devices: Sequence[str] = DEVICES,
    **form: Any,
) -> list[Array]:
    """Compare one node with ONNX Runtime on each device; bytes may differ by ``steps``.

    ``expected`` stands for ONNX Runtime's results where it has no kernel. Only the first
    ``compared`` are looked at. Returns them.
    """
    model = node_model(op_type, inputs, **form)
    given = {i.name: array for i in model.graph.input for array in [inputs[int(i.name[1:])]]}
    fed = {name: array for name, array in given.items() if array is not None}
    want = oracle(model, fed) if expected is None else list(expected)
    graph = sg.load(model)
    for value, array in zip(graph.outputs, want, strict=True):
        assert isinstance(value.type, TensorType)
        assert merge(value.type, TensorType(dtype_of(array), array.shape)) is not None
        assert form.get("symbolic") or op_type == "Unique" or value.type.is_static
    (saved,) = sg.to_onnx(graph).graph.node
    saved.ClearField("doc_string")
    assert saved == model.graph.node[0]
    placed = sg.default_core().query_model(graph, "CPU")
    assert "CPU" not in devices or "node" in placed, placed.reasons
    for device in devices:
        found = sg.compile_model(graph, device)(fed)
        for k, right in enumerate(want[:compared]):
            got = found[k]
            assert got.dtype == right.dtype
            assert got.shape == right.shape
            if right.dtype.kind in "iu":
                apart = np.abs(got.astype(np.int64) - right.astype(np.int64))
                assert apart.size == 0 or apart.max() <= steps, (device, k, apart.max())
                assert np.mean(apart > 0) <= 0.02 if apart.size > 100 else True, (device, k)
            else:
                np.testing.assert_allclose(got, right, rtol, atol, err_msg=f"{device} {k}")
    return want
