"""ONNX Runtime as the source that compiled models are compared with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnxruntime as ort

import subgraph as sg
from subgraph.graph.types import Array


def session_of(graph: sg.Graph) -> ort.InferenceSession:
    """Return ONNX Runtime's session of a graph, without its warnings."""
    options = ort.SessionOptions()
    options.log_severity_level = 3
    model = sg.to_onnx(graph).SerializeToString()
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


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
