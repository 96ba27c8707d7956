"""ONNX Runtime as the source that compiled models are compared with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import subgraph as sg
from subgraph.graph.types import Array, TensorType, dtype_of
from subgraph.operators.protobuf import type_to_proto
from subgraph.tools import backend


def session_of(graph: sg.Graph) -> ort.InferenceSession:
    """Return ONNX Runtime's session of a graph, without its warnings."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    model = sg.to_onnx(graph).SerializeToString()
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def random(*shape: int, seed: int = 0) -> Array:
    """Return float32 numbers of the standard normal distribution."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def check_results(
    model: sg.CompiledModel,
    session: ort.InferenceSession,
    inputs: Sequence[Array],
    *,
    tolerance: float,
) -> None:
    """Check that a model gives what a session gives: shapes, dtypes, and numbers so far."""
    names = [port.name for port in session.get_inputs()]
    wanted = session.run(None, dict(zip(names, inputs, strict=True)))
    found = model(list(inputs))
    for k, expected in enumerate(wanted):
        assert found[k].shape == expected.shape
        assert found[k].dtype == expected.dtype
        np.testing.assert_allclose(found[k], expected, rtol=tolerance, atol=tolerance)


def uniform(*shape: int, seed: int = 0) -> Array:
    """Return random numbers of float32 between -2 and 2."""
    return np.random.default_rng(seed).uniform(-2, 2, shape).astype(np.float32)


def model_of_node(
    op_type: str,
    inputs: Sequence[Array | None],
    version: int,
    outputs: int = 1,
    domain: str = "",
    **attrs: Any,
) -> tuple[onnx.ModelProto, list[Array]]:
    """Return the model of one node, and the inputs that it is given.

    Args:
        op_type: The node's operator.
        inputs: The operands, None where one is left out.
        version: Opset version.
        outputs: Number of outputs.
        domain: The operator's domain.
        **attrs: The node's attributes.
    """
    names = [f"i{k}" if v is not None else "" for k, v in enumerate(inputs)]
    made = [f"o{k}" for k in range(outputs)]
    node = onnx.helper.make_node(op_type, names, made, domain=domain, **attrs)
    graph = onnx.GraphProto(name="g")
    graph.node.append(node)
    given = [v for v in inputs if v is not None]
    for name, value in zip([n for n in names if n], given, strict=True):
        proto = type_to_proto(TensorType(dtype_of(value), value.shape))
        graph.input.add(name=name).type.CopyFrom(proto)
    for name in made:
        graph.output.add(name=name)
    opsets = [onnx.helper.make_opsetid(domain, version)]
    if domain:
        opsets.append(onnx.helper.make_opsetid("", 18))
    return onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8), given


def compare_with_onnxruntime(
    op_type: str,
    inputs: Sequence[Array | None],
    version: int,
    outputs: int = 1,
    tolerance: float = 1e-5,
    device: str = "REFERENCE",
    **attrs: Any,
) -> None:
    """Check that a device gives what ONNX Runtime gives: values, shapes and dtypes.

    Args:
        op_type: The operator.
        inputs: The operands, None where one is left out.
        version: Opset version.
        outputs: Number of outputs.
        tolerance: Of numbers, relative and absolute.
        device: The device.
        **attrs: The attributes, and the domain.
    """
    model, given = model_of_node(op_type, inputs, version, outputs, **attrs)
    ours = backend.run_model(model, given, device)
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(model.SerializeToString(), options)
    names = [item.name for item in session.get_inputs()]
    theirs = session.run(None, dict(zip(names, given, strict=True)))
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        if isinstance(other, list):
            assert [{k: pytest.approx(v) for k, v in m.items()} for m in other] == list(mine)
            continue
        assert mine.shape == other.shape
        if other.dtype.kind == "O":
            assert mine.tolist() == other.tolist()
            continue
        assert mine.dtype == other.dtype
        np.testing.assert_allclose(mine, other, rtol=tolerance, atol=tolerance)


def reference_result(op_type: str, inputs: Sequence[Array], version: int, **attrs: Any) -> Any:
    """Return the first result of one node on REFERENCE."""
    model, given = model_of_node(op_type, inputs, version, **attrs)
    return backend.run_model(model, given, "REFERENCE")[0]


def compare(graph: sg.Graph, *rounds: Sequence[Array], **config: Any) -> sg.CompiledModel:
    """Check CPU against ONNX Runtime, on each of these inputs; return the model."""
    session = session_of(graph)
    model = sg.compile_model(graph, "CPU", config)
    for inputs in rounds:
        check_results(model, session, inputs, tolerance=1e-5)
    return model
