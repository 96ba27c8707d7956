"""The reference of QLinearConv, against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.peer import compare_with_onnxruntime

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("bias", [False, True])
def test_a_scale_for_each_filter(rank: int, groups: int, bias: bool) -> None:
    rng = np.random.default_rng(rank)
    x = rng.integers(0, 256, (2, 3, *(5, 6, 4)[:rank])).astype(np.uint8)
    weight = rng.integers(-60, 61, (6, 3 // groups, *(2, 3, 1)[:rank])).astype(np.int8)
    scales = rng.uniform(0.001, 0.01, 6).astype(np.float32)
    inputs: list[Any] = [x, np.float32(0.03), np.uint8(121), weight, scales]
    inputs += [np.zeros(6, np.int8), np.float32(0.2), np.uint8(90)]
    inputs += [rng.integers(-2000, 2000, 6).astype(np.int32)] if bias else []
    compare_with_onnxruntime(
        "QLinearConv",
        [np.asarray(v) for v in inputs],
        10,
        group=groups,
        strides=[2, *[1] * (rank - 1)],
    )
