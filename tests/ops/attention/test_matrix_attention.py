"""Fused attention over matrix tiles of bfloat16, emulated where the processor has none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import subgraph as sg
from subgraph import ops
from tests.ops.attention.test_kernels import check_attention

pytestmark = pytest.mark.usefixtures("tiles")
OPTION = {"INFERENCE_PRECISION": "bfloat16"}
# Operands are rounded to 8 bits. A score up to 12 changes by up to 12 / 256, and the result by up
# to a quarter of that times the distance of two values, which are up to 4.
TOLERANCE = 0.1


@settings(max_examples=80, deadline=None)
@given(
    batch=st.integers(1, 2),
    heads=st.sampled_from([(1, 1), (3, 3), (4, 2), (6, 1)]),
    positions=st.tuples(st.integers(9, 80), st.integers(1, 80)),
    sizes=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    orders=st.tuples(
        st.sampled_from(["bhtd", "bthd"]),
        st.sampled_from(["bhtd", "bthd", "bhdt"]),
        st.sampled_from(["bhtd", "bthd", "bhdt"]),
        st.sampled_from(["bhtd", "bthd"]),
    ),
    mask=st.sampled_from(["none", "keys", "pairs", "full"]),
    causal=st.booleans(),
    threads=st.integers(1, 3),
    cuts=st.lists(st.floats(0, 1), max_size=3),
)
def test_matrix_attention(**drawn: Any) -> None:
    check_attention(dtype="float32", options=OPTION, tolerance=TOLERANCE, **drawn)


@pytest.mark.parametrize("mask", ["none", "keys", "full"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("orders", ["bhtd", "bthd"])
def test_several_blocks_of_keys(mask: str, causal: bool, orders: str) -> None:
    all_orders = orders, orders, orders, orders
    check_attention(
        1, (2, 2), (300, 700), (24, 40), all_orders, mask, causal, "float32", 2, [0.5], OPTION,
        TOLERANCE,
    )  # fmt: skip


def test_the_kernel_is_chosen_for_the_option_alone() -> None:
    q = sg.input("q", shape=(1, 4, 64, 32), dtype="float32")
    graph = sg.Graph(
        [q], [ops.MatMul(ops.Softmax(ops.MatMul(q, ops.Transpose(q, perm=[0, 1, 3, 2]))), q)]
    )
    x = np.random.default_rng(0).standard_normal((1, 4, 64, 32)).astype(np.float32)
    for options, chosen in ((OPTION, True), ({}, False)):
        model = sg.compile_model(graph, "CPU", {**options, "ENABLE_PROFILING": True})
        request = model.create_infer_request()
        request.infer([x])
        kernels = [entry.kernel for entry in request.profile()]
        assert any("matrix_kernels.attention" in kernel for kernel in kernels) == chosen, kernels
