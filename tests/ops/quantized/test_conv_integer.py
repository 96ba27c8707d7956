"""ConvInteger with zero points that are computed: exactly what NumPy and ONNX Runtime give."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from tests.support.peer import session_of


def _graph(
    given: tuple[int, ...], kernel: tuple[int, ...], zero: Any, **attributes: Any
) -> sg.Graph:
    rng = np.random.default_rng(1)
    weight = sg.parameter("w", rng.integers(-128, 128, kernel).astype(np.int8))
    x = sg.input("x", given)
    quantised, scale, shift = ops.DynamicQuantizeLinear(x)
    sums = ops.ConvInteger(quantised, weight, shift, zero, **attributes)
    return sg.Graph([x], [sums, ops.Mul(ops.Cast(sums, to=1), scale)])


@pytest.mark.parametrize(
    ("given", "kernel", "attributes"),
    [
        ((2, 3, 9, 8), (5, 3, 3, 3), {"pads": [1, 0, 2, 1], "strides": [2, 1]}),
        ((1, 4, 6, 6), (8, 2, 3, 3), {"group": 2, "pads": [1, 1, 1, 1]}),
        ((1, 6, 11, 3), (6, 1, 3, 1), {"group": 6, "dilations": [2, 1]}),
        ((3, 7, 5, 5), (4, 7, 1, 1), {}),
        # Each channel by itself, in float32 while that is exact.
        ((2, 24, 15, 13), (24, 1, 3, 3), {"group": 24, "pads": [1, 1, 1, 1], "strides": [2, 2]}),
        ((1, 8, 12, 12), (16, 1, 5, 5), {"group": 8, "auto_pad": "SAME_UPPER"}),
        ((1, 5, 40), (5, 1, 9), {"group": 5, "pads": [4, 4]}),
        ((1, 2, 40, 40), (2, 1, 17, 17), {"group": 2}),
    ],
)
@pytest.mark.parametrize("zero", ["none", "one", "each"])
def test_conv_integer(
    given: tuple[int, ...], kernel: tuple[int, ...], attributes: dict[str, Any], zero: str
) -> None:
    own = {"none": None, "one": np.int8(3), "each": np.arange(kernel[0], dtype=np.int8) - 2}[zero]
    graph = _graph(given, kernel, own, **attributes)
    assert not sg.default_core().query_model(graph, "CPU").reasons
    model = sg.compile_model(graph, "CPU")
    for seed in (0, 1):
        x = np.random.default_rng(seed).standard_normal(given).astype(np.float32) - seed
        wanted = sg.compile_model(graph, "REFERENCE")([x])
        found = model([x])
        np.testing.assert_array_equal(found[0], wanted[0])
        np.testing.assert_allclose(found[1], wanted[1], rtol=1e-6)
        if zero == "none" and len(given) == 4:
            session = session_of(graph)
            np.testing.assert_array_equal(found[0], session.run(None, {"x": x})[0])
        model.parameters["w"].assign(np.full(kernel, -5 + seed, np.int8))
        graph = model.source


@pytest.mark.parametrize(("size", "operator"), [(5, "Conv"), (17, "ConvInteger")])
def test_each_channel_by_itself(size: int, operator: str) -> None:
    """Bytes as loud as they come: a sum of 289 products would not fit into float32."""
    x = sg.input("x", (1, 8, 20, 20), "uint8")
    weight = sg.parameter("w", np.full((8, 1, size, size), 255, np.uint8))
    zero = np.uint8(0)
    graph = sg.Graph([x], [ops.ConvInteger(x, weight, zero, zero, group=8)])
    model = sg.compile_model(graph, "CPU", {"ENABLE_PROFILING": True})
    request = model.create_infer_request()
    given = np.full((1, 8, 20, 20), 255, np.uint8)
    given[:, :, 3, 4] = 254
    found = request.infer([given])[0]
    wanted = np.full(found.shape, 255 * 255 * size * size, np.int32)
    at = np.s_[max(0, 4 - size) : 4, max(0, 5 - size) : 5]
    wanted[(..., *at)] -= 255
    np.testing.assert_array_equal(found, wanted)
    assert operator in {entry.op_type for entry in request.profile()}
