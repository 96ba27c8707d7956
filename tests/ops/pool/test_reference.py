"""The reference of pools, against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("op_type", ["GlobalMaxPool", "GlobalAveragePool", "GlobalLpPool"])
def test_global_pools(op_type: str, rank: int) -> None:
    compare_with_onnxruntime(op_type, [uniform(2, 3, *[4, 5, 6][:rank])], 11)
