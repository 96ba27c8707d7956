"""The reference of LSTM, GRU and RNN, against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subgraph.graph.types import Array
from tests.support.peer import compare_with_onnxruntime, uniform

pytestmark = pytest.mark.filterwarnings("ignore")


_GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


_NAMED = {
    "RNN": ["Relu", "Tanh", "Sigmoid", "Affine", "LeakyRelu", "ThresholdedRelu", "HardSigmoid"],
    # Gates without bound (Elu, Softplus) grow what runtimes round differently beyond any tolerance.
    "GRU": ["Sigmoid", "HardSigmoid", "Softsign"],
    "LSTM": ["Sigmoid", "HardSigmoid", "Softsign", "ScaledTanh"],
}


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_recurrent_networks(data: st.DataObject) -> None:
    op_type = data.draw(st.sampled_from(["RNN", "GRU", "LSTM"]))
    direction = data.draw(st.sampled_from(["forward", "reverse", "bidirectional"]))
    layout = data.draw(st.sampled_from([0]))  # ONNX Runtime has layout 0 only
    steps, batch, features, hidden = 4, 3, 2, 5
    directions = 2 if direction == "bidirectional" else 1
    gates = _GATES[op_type]
    x = uniform(steps, batch, features)
    w = uniform(directions, gates * hidden, features, seed=1)
    r = uniform(directions, gates * hidden, hidden, seed=2)
    b = uniform(directions, 2 * gates * hidden, seed=3) if data.draw(st.booleans()) else None
    lengths = np.array([4, 2, 1], np.int32) if data.draw(st.booleans()) else None
    h = uniform(directions, batch, hidden, seed=4) if data.draw(st.booleans()) else None
    inputs: list[Array | None] = [x, w, r, b, lengths, h]
    attrs: dict[str, Any] = {"hidden_size": hidden, "direction": direction}
    if op_type == "LSTM":
        inputs.append(
            uniform(directions, batch, hidden, seed=5) if data.draw(st.booleans()) else None
        )
        inputs.append(uniform(directions, 3 * hidden, seed=6) if data.draw(st.booleans()) else None)
        attrs["input_forget"] = int(data.draw(st.booleans()))
    if op_type == "GRU":
        attrs["linear_before_reset"] = int(data.draw(st.booleans()))
    if data.draw(st.booleans()):
        first = data.draw(st.sampled_from(_NAMED[op_type]))
        names = {"RNN": [first], "GRU": [first, "Tanh"], "LSTM": [first, "Tanh", "Tanh"]}[op_type]
        attrs["activations"] = names * directions
        if first in ("Affine", "HardSigmoid", "ScaledTanh"):
            attrs["activation_alpha"], attrs["activation_beta"] = (
                [0.5] * directions,
                [0.1] * directions,
            )
        if first in ("LeakyRelu", "ThresholdedRelu"):
            attrs["activation_alpha"] = [0.3] * directions
    while inputs[-1] is None:
        inputs.pop()
    del layout
    compare_with_onnxruntime(
        op_type, inputs, 14, outputs=3 if op_type == "LSTM" else 2, tolerance=1e-4, **attrs
    )
