"""Group and instance normalization between convolutions, and the form in which PyTorch exports it.

Convolutions compute on blocks of channels. NumPy in float64 computes what is compared.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import subgraph as sg
from subgraph import ops, passes
from subgraph.graph.types import Array
from subgraph.system import host

blocks = pytest.mark.skipif(host.lanes("float32") == 1, reason="no vectors, so no blocks")


def _values(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def _normalized(x: Array, groups: int, scale: Array, bias: Array, epsilon: float) -> Array:
    wide = x.astype(np.float64).reshape(len(x), groups, -1)
    mean, variance = wide.mean(2, keepdims=True), wide.var(2, keepdims=True)
    wide = ((wide - mean) / np.sqrt(variance + epsilon)).reshape(x.shape)
    row = (-1, *[1] * (x.ndim - 2))
    return wide * scale.reshape(row) + bias.reshape(row)


def _as_exported(x: Any, groups: int, scale: Array, bias: Array, epsilon: float) -> sg.Value:
    """Return what PyTorch exports for ``torch.nn.GroupNorm``."""
    shape = [int(size) for size in x.type.shape]
    row = (-1, *[1] * (len(shape) - 2))
    ones, zeros = np.ones(groups, np.float32), np.zeros(groups, np.float32)
    inner = ops.Reshape(x, np.array([0, groups, -1]))
    inner = ops.InstanceNormalization(
        inner, sg.parameter("ones", ones), sg.parameter("zeros", zeros), epsilon=epsilon
    )
    back = ops.Reshape(inner, np.array(shape))
    scaled = ops.Mul(back, sg.parameter("scale", scale.reshape(row)))
    return ops.Add(scaled, sg.parameter("bias", bias.reshape(row)))


def _kernels(graph: sg.Graph, x: Array, **config: object) -> tuple[list[Array], list[str]]:
    """Return the results and the kernels that ran."""
    model = sg.compile_model(graph, "CPU", {"ENABLE_PROFILING": True, **config})
    request = model.create_infer_request()
    results = request.infer([x])
    arrays = [np.array(results[k]) for k in range(len(graph.outputs))]
    return arrays, [each.kernel.split("(")[0].split(".")[-1] for each in request.profile()]


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 3),
    channels=st.sampled_from([8, 16, 24, 40, 48, 64, 96]),
    spatial=st.lists(st.integers(1, 40), min_size=1, max_size=3).filter(
        lambda sizes: np.prod(sizes) < 5000
    ),
    divisor=st.sampled_from([1, 2, 4, 8, 16, 32]),
    form=st.sampled_from(["group", "instance", "exported"]),
    offset=st.sampled_from([0.0, 100.0]),
)
def test_random_groups(
    batch: int, channels: int, spatial: list[int], divisor: int, form: str, offset: float
) -> None:
    """With a mean far beside the deviation as well; equal bit for bit with one and two threads."""
    groups = channels if form == "instance" or channels % divisor else channels // divisor
    shape = (batch, channels, *spatial)
    x = sg.input("x", shape)
    weight = np.eye(channels, dtype=np.float32).reshape(channels, channels, *[1] * len(spatial))
    y = ops.Conv(x, sg.parameter("w", weight))
    scale, bias = _values(channels, seed=1), _values(channels, seed=2)
    parameters = sg.parameter("scale", scale), sg.parameter("bias", bias)
    if form == "group":
        z = ops.GroupNormalization(y, *parameters, num_groups=groups, epsilon=1e-3)
    elif form == "instance":
        z = ops.InstanceNormalization(y, *parameters, epsilon=1e-3)
    else:
        z = _as_exported(y, groups, scale, bias, 1e-3)
    graph = sg.Graph([x], [z, y])
    array = _values(*shape) + np.float32(offset)
    results = [_kernels(graph, array, INFERENCE_NUM_THREADS=n)[0] for n in (1, 2)]
    wanted = _normalized(array, groups, scale, bias, 1e-3)
    # A channel's mean and parameters are one summand, of which the rounding remains.
    within = (3e-5 if offset else 2e-6) / np.sqrt(1e-3)
    np.testing.assert_allclose(results[0][0], wanted, rtol=0, atol=within)
    np.testing.assert_array_equal(results[0][1], array)
    np.testing.assert_array_equal(results[0][0], results[1][0])


@blocks
@pytest.mark.parametrize("form", ["group", "exported"])
def test_values_stay_in_blocks(form: str) -> None:
    """Also beyond the last channel: what the second convolution reads there must be 0."""
    x = sg.input("x", (1, 24, 30, 40))
    scale, bias = _values(24, seed=1), _values(24, seed=2)
    h = ops.Conv(x, sg.parameter("a", _values(24, 24, 3, 3, seed=3)), pads=[1] * 4)
    if form == "group":
        parameters = sg.parameter("scale", scale), sg.parameter("bias", bias)
        h = ops.GroupNormalization(h, *parameters, num_groups=6)
    else:
        h = _as_exported(h, 6, scale, bias, 1e-5)
    h = ops.Mul(h, ops.Sigmoid(h))
    graph = sg.Graph([x], [ops.Conv(h, sg.parameter("b", _values(24, 24, 3, 3, seed=4)))])
    array = _values(1, 24, 30, 40)
    (found,), kernels = _kernels(graph, array)
    wanted = sg.compile_model(graph, "REFERENCE")([array])[0]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    assert {"block_moments", "group_factors", "scale_blocks"} <= set(kernels)
    moved = [each for each in kernels if each in ("to_blocked", "to_plain")]
    assert moved == ["to_blocked", "to_plain"]  # of the graph's input and output


def test_infinite_and_empty_images() -> None:
    """Numbers that are not finite stay in their group."""
    x = sg.input("x", ("n", 32, 4, 4))
    y = ops.Conv(x, sg.parameter("w", np.ones((32, 1, 1, 1), np.float32)), group=32)
    ones, zeros = np.ones(32, np.float32), np.zeros(32, np.float32)
    z = ops.GroupNormalization(y, sg.parameter("s", ones), sg.parameter("b", zeros), num_groups=8)
    model = sg.compile_model(sg.Graph([x], [z]), "CPU")
    array = _values(2, 32, 4, 4)
    array[1, 5, 2, 2] = np.nan
    found = model([array])[0]
    wrong = np.isnan(found).any(axis=(2, 3))
    np.testing.assert_array_equal(np.argwhere(wrong), [[1, 4], [1, 5], [1, 6], [1, 7]])
    assert model([array[:0]])[0].shape == (0, 32, 4, 4)


def test_the_exported_form_is_one_operator() -> None:
    x = sg.input("x", ("n", 32, 4, 4))
    ones = sg.parameter("ones", np.ones(8, np.float32))
    zeros = sg.parameter("zeros", np.zeros(8, np.float32))
    row = sg.parameter("row", _values(32, 1, 1))

    def form(shape: list[int], norms: int = 1, back: str = "same", tap: bool = False) -> sg.Graph:
        value, extra = x, []
        for _ in range(norms):
            inner = ops.Reshape(value, np.array(shape))
            inner = ops.InstanceNormalization(inner, ones, zeros)
            value = ops.Reshape(inner, np.array([-1, 32, 4, 4] if back == "same" else [-1, 32, 16]))
            value = ops.Mul(value, row)
            extra += [value] if tap else []
            value = ops.Add(value, row)
        return sg.Graph([x], [value, *extra])

    def kinds(graph: sg.Graph) -> list[str]:
        fused = passes.apply_pass(graph, "FuseGroupNorm")
        fused.verify()
        return [node.op_type for node in fused.nodes if node.op_type.endswith("Normalization")]

    assert kinds(form([0, 8, -1])) == ["GroupNormalization"]
    assert kinds(form([0, 8, -1], norms=2)) == ["GroupNormalization"] * 2
    # A value inside is an output; the groups contain several images; the shape is another one.
    assert kinds(form([0, 8, -1], tap=True)) == ["InstanceNormalization"]
    assert kinds(form([-1, 8, 32])) == ["InstanceNormalization"]
    assert kinds(form([0, 8, -1], back="other")) == ["InstanceNormalization"]
