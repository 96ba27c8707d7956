"""The reference of softmax and BatchNormalization, against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.peer import compare_with_onnxruntime, uniform

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("op_type", ["Softmax", "LogSoftmax", "Hardmax"])
@pytest.mark.parametrize("version", [1, 11, 13])
@pytest.mark.parametrize("axis", [None, 0, 1, 2, -1])
def test_softmax_of_every_opset(op_type: str, version: int, axis: int | None) -> None:
    if version < 11 and axis is not None and axis < 0:
        return
    attrs: dict[str, Any] = {} if axis is None else {"axis": axis}
    compare_with_onnxruntime(op_type, [uniform(2, 3, 4)], max(version, 7), **attrs)


@pytest.mark.parametrize("version", [7, 9, 14, 15])
def test_batch_normalization_infers(version: int) -> None:
    inputs = [
        uniform(2, 3, 4),
        uniform(3),
        uniform(3, seed=1),
        uniform(3, seed=2),
        np.abs(uniform(3, seed=3)),
    ]
    compare_with_onnxruntime("BatchNormalization", inputs, version, epsilon=0.01)
