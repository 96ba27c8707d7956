"""The reference of Pad, Split, Shape and Dropout, against ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subgraph.graph.types import Array
from tests.support.peer import compare_with_onnxruntime, reference_result, uniform

pytestmark = pytest.mark.filterwarnings("ignore")


@given(
    mode=st.sampled_from(["constant", "edge", "reflect", "wrap"]),
    pads=st.lists(st.integers(-1, 2), min_size=4, max_size=4),
)
@settings(max_examples=30, deadline=None)
def test_pad(mode: str, pads: list[int]) -> None:
    if mode != "constant" and min(pads) < 0:
        pads = [max(p, 0) for p in pads]
    compare_with_onnxruntime(
        "Pad", [uniform(4, 5), np.array(pads), np.array(1.5, np.float32)], 19, mode=mode
    )


def test_pad_of_some_axes_and_of_old_opsets() -> None:
    compare_with_onnxruntime("Pad", [uniform(2, 3, 4), np.array([1, 2]), None, np.array([-2])], 18)
    compare_with_onnxruntime("Pad", [uniform(2, 3)], 7, pads=[0, 1, 2, 0], value=3.0)


@pytest.mark.parametrize("version", [2, 11, 13, 18])
def test_split(version: int) -> None:
    parts: dict[str, Any] = {2: {"split": [1, 3]}, 11: {"split": [3, 1]}}.get(version, {})
    inputs: list[Array | None] = [uniform(2, 4)]
    if version >= 13:
        inputs.append(np.array([1, 3]))
    compare_with_onnxruntime("Split", inputs, version, outputs=2, axis=1, **parts)
    if version == 18:
        compare_with_onnxruntime("Split", [uniform(2, 7)], 18, outputs=3, axis=1, num_outputs=3)


@pytest.mark.parametrize("start", [None, 0, 1, -1, -4, 5])
@pytest.mark.parametrize("end", [None, 0, 2, -1, -4, 7])
def test_a_part_of_a_shape(start: int | None, end: int | None) -> None:
    bounds = {"start": start, "end": end}
    given: dict[str, Any] = {k: bound for k, bound in bounds.items() if bound is not None}
    compare_with_onnxruntime("Shape", [uniform(2, 3, 4)], 15, **given)


def test_dropout_of_every_opset_keeps_the_input() -> None:
    x = uniform(2, 3)
    for version, attrs in ((1, {"is_test": 1}), (6, {"is_test": 1}), (7, {}), (10, {}), (13, {})):
        np.testing.assert_array_equal(reference_result("Dropout", [x], version, **attrs), x)
