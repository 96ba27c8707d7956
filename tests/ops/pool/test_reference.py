"""The reference of pools, against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import subgraph as sg
from subgraph import ops
from tests.support.peer import compare_with_onnxruntime, uniform

pytestmark = pytest.mark.filterwarnings("ignore")


@given(
    op_type=st.sampled_from(["MaxPool", "AveragePool", "LpPool"]),
    rank=st.integers(1, 3),
    kernel=st.integers(1, 3),
    stride=st.integers(1, 3),
    pads=st.sampled_from([0, 1, "SAME_UPPER", "SAME_LOWER", "VALID"]),
    ceil=st.booleans(),
    include=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_pools(
    op_type: str, rank: int, kernel: int, stride: int, pads: Any, ceil: bool, include: bool
) -> None:
    if pads == 1 and kernel == 1:
        pads = 0
    if isinstance(pads, str) and stride > kernel:
        pads = 0  # ONNX Runtime refuses it
    attrs: dict[str, Any] = {"kernel_shape": [kernel] * rank, "strides": [stride] * rank}
    if isinstance(pads, str):
        attrs["auto_pad"] = pads
    else:
        attrs["pads"] = [pads] * (2 * rank)
    if op_type != "LpPool" and not isinstance(pads, str):
        attrs["ceil_mode"] = int(ceil)
    if op_type == "AveragePool":
        attrs["count_include_pad"] = int(include)
    x = uniform(2, 3, *[6, 5, 7][:rank])
    compare_with_onnxruntime(op_type, [x], 11, **attrs)


@pytest.mark.parametrize("device", ["REFERENCE", "CPU"])
@pytest.mark.parametrize("op_type", ["MaxPool", "AveragePool", "LpPool"])
@pytest.mark.parametrize("include", [0, 1])
@pytest.mark.parametrize(
    ("kernel", "stride", "pads"), [(2560, 2560, 0), (9, 9, 0), (9, 3, 0), (11, 3, 1), (10, 5, 2)]
)
def test_one_window_longer_than_the_image(
    op_type: str, kernel: int, stride: int, pads: int, include: int, device: str
) -> None:
    """With ceil_mode the beginning of a window is enough, as in EfficientNet of transformers."""
    attrs: dict[str, Any] = {"kernel_shape": [kernel] * 2, "strides": [stride] * 2}
    if op_type == "AveragePool":
        attrs["count_include_pad"] = include
    x = uniform(2, 20, 7, 7)
    compare_with_onnxruntime(op_type, [x], 22, device=device, pads=[pads] * 4, ceil_mode=1, **attrs)


@pytest.mark.parametrize(("kernel", "stride"), [(9, 1), (9, 2), (1 << 40, 1 << 40)])
def test_windows_that_do_not_fit(kernel: int, stride: int) -> None:
    x = sg.input("x", (1, 2, 7, 7))
    attrs = {"kernel_shape": (kernel, kernel), "strides": (stride, stride), "ceil_mode": 1}
    with pytest.raises(sg.SubgraphError, match=r"does not fit|at most"):
        sg.compile_model(sg.Graph([x], [ops.MaxPool(x, **attrs)]))(np.zeros((1, 2, 7, 7), "f"))


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("op_type", ["GlobalMaxPool", "GlobalAveragePool", "GlobalLpPool"])
def test_global_pools(op_type: str, rank: int) -> None:
    compare_with_onnxruntime(op_type, [uniform(2, 3, *[4, 5, 6][:rank])], 11)
