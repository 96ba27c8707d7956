"""ONNX's Attention with all its inputs and attributes, against onnx.reference.

On the CPU device and on OPENCL, there with the kernels made for a CPU and with those for a GPU.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.devices.fallback import DeviceFallback
from subgraph.graph.types import Array

pytestmark = pytest.mark.usefixtures("quick_opencl_builds")
DEVICES: dict[str, tuple[str, dict[str, Any]]] = {
    "CPU": ("CPU", {}),
    "OPENCL": ("OPENCL", {"KERNELS": "CPU"}),
    "OPENCL-GPU": ("OPENCL", {"KERNELS": "GPU"}),
}


@pytest.fixture(params=DEVICES, autouse=True)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each test runs on each; what fails there is not hidden by another device."""
    if DEVICES[request.param][0] not in sg.default_core().available_devices:
        pytest.skip("there is no OpenCL device")
    monkeypatch.setattr(DeviceFallback, "recover", lambda self, error, session: None)
    return request.param


def _agree(device: str, arrays: dict[str, Array | None], outputs: int, **attributes: Any) -> None:
    values = {k: sg.input(k, a.shape, a.dtype.name) for k, a in arrays.items() if a is not None}
    given = [values.get(name) for name in arrays]
    while given and given[-1] is None:
        given.pop()
    made = ops.Attention(*given, outputs=outputs, **attributes)
    graph = sg.Graph(list(values.values()), made if outputs > 1 else [made])
    name, config = DEVICES[device]
    query = sg.default_core().query_model(graph, name, config)
    assert set(query) == {node.name for node in graph.nodes}, query.reasons
    feeds = {name: a for name, a in arrays.items() if a is not None}
    got = sg.compile_model(graph, name, config)(feeds)
    expected = sg.compile_model(graph, "REFERENCE")(feeds)
    for k in range(outputs):
        np.testing.assert_allclose(got[k], expected[k], rtol=1e-4, atol=1e-5)


def _inputs(seed: int, past: int = 0) -> dict[str, Array | None]:
    rng = np.random.default_rng(seed)

    def some(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(np.float32)

    given: dict[str, Array | None] = {"q": some(2, 6, 5, 8), "k": some(2, 3, 7, 8)}
    given |= {"v": some(2, 3, 7, 10), "mask": None, "past_k": None, "past_v": None, "count": None}
    if past:
        given |= {"past_k": some(2, 3, past, 8), "past_v": some(2, 3, past, 10)}
    return given


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
@pytest.mark.parametrize("past", [0, 4])
def test_every_score_that_can_be_shown(device: str, mode: int, past: int) -> None:
    given = _inputs(mode, past)
    given["mask"] = np.random.default_rng(7).uniform(-1, 1, (6, 5, 7 + past)).astype(np.float32)
    _agree(device, given, 4, softcap=1.5, qk_matmul_output_mode=mode, is_causal=1)


@pytest.mark.parametrize("shape", [(5, 7), (6, 5, 7), (2, 1, 5, 7), (2, 6, 5, 7), (1, 1, 1, 7)])
@pytest.mark.parametrize("dtype", ["bool", "float32"])
def test_masks(device: str, shape: tuple[int, ...], dtype: str) -> None:
    given = _inputs(1)
    mask = np.random.default_rng(8).uniform(-1, 1, shape)
    given["mask"] = (mask > 0) if dtype == "bool" else mask.astype(np.float32)
    _agree(device, given, 1)
    _agree(device, given, 1, softcap=2.0, scale=0.3)


def test_a_mask_of_fewer_keys(device: str) -> None:
    given = _inputs(2)
    given["mask"] = np.random.default_rng(9).uniform(-1, 1, (5, 4)).astype(np.float32)
    _agree(device, given, 1)


@pytest.mark.parametrize("dtype", ["bool", "float32"])
def test_a_query_that_sees_nothing(device: str, dtype: str) -> None:
    given = _inputs(3)
    mask = np.ones((5, 7), bool)
    mask[2] = False
    given["mask"] = mask if dtype == "bool" else np.where(mask, 0, -np.inf).astype(np.float32)
    _agree(device, given, 1)
    _agree(device, given, 4, qk_matmul_output_mode=3)


@pytest.mark.parametrize("causal", [0, 1])
def test_a_cache(device: str, causal: int) -> None:
    _agree(device, _inputs(4, 3), 3, is_causal=causal)


def test_a_window(device: str) -> None:
    _agree(device, _inputs(5, 2), 3, left_window_size=3, right_window_size=1)
    _agree(device, _inputs(5), 1, left_window_size=1, is_causal=1)


@pytest.mark.parametrize("causal", [0, 1])
def test_keys_that_do_not_count(device: str, causal: int) -> None:
    given = _inputs(6)
    given["count"] = np.array([7, 5])
    _agree(device, given, 1, is_causal=causal)


def test_heads_in_one_dimension(device: str) -> None:
    rng = np.random.default_rng(0)
    given: dict[str, Array | None] = {
        name: rng.standard_normal((2, n, 4 * heads)).astype(np.float32)
        for name, n, heads in (("q", 5, 6), ("k", 7, 2), ("v", 7, 2))
    }
    given |= {"mask": None, "past_k": rng.standard_normal((2, 2, 3, 4)).astype(np.float32)}
    given["past_v"] = rng.standard_normal((2, 2, 3, 4)).astype(np.float32)
    _agree(device, given, 3, q_num_heads=6, kv_num_heads=2, is_causal=1)
    _agree(device, given, 4, q_num_heads=6, kv_num_heads=2, softcap=1.0)


def test_no_queries_give_no_results(device: str) -> None:
    q, k = (sg.input(name, (2, size, 8), "float32") for name, size in (("q", "n"), ("k", 5)))
    attrs = {"q_num_heads": 2, "kv_num_heads": 2}
    node = sg.Node("Attention", [q, k, k], attrs=attrs, version=24)
    model = sg.compile_model(sg.Graph([q, k], node.outputs), *DEVICES[device])
    [y] = model([np.zeros((2, 0, 8), np.float32), np.ones((2, 5, 8), np.float32)]).values()
    assert (y.dtype, y.shape) == (np.float32, (2, 0, 8))


@pytest.mark.parametrize("pattern", [False, True])
def test_scores_that_are_no_numbers(device: str, pattern: bool) -> None:
    """A mask that hides all of a row gives NaN in the written-out form, NaN inputs give NaN."""
    rng = np.random.default_rng(11)
    q, k, v = (rng.standard_normal((1, 2, 40, 8)).astype(np.float32) for _ in range(3))
    mask = np.where(rng.uniform(size=(40, 40)) < 0.5, 0, -np.inf).astype(np.float32)
    mask[3], mask[5, :32], mask[7] = -np.inf, -np.inf, np.finfo(np.float32).min
    q[0, 1, 20] = np.nan
    values = [sg.input(n, a.shape) for n, a in (("q", q), ("k", k), ("v", v), ("m", mask))]
    if pattern:
        transposed = ops.Transpose(values[1], perm=[0, 1, 3, 2])
        scores = ops.Add(ops.Div(ops.MatMul(values[0], transposed), np.float32(8**0.5)), values[3])
        made = ops.MatMul(ops.Softmax(scores, axis=-1), values[2])
    else:
        made = ops.Attention(*values, outputs=1)
    graph = sg.Graph(values, [made])
    name, config = DEVICES[device]
    got = sg.compile_model(graph, name, config)([q, k, v, mask])[0]
    with np.errstate(invalid="ignore"):
        scores = q @ k.transpose(0, 1, 3, 2) / 8**0.5 + mask
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
    if not pattern:
        weights[:, :, 3] = 0
    np.testing.assert_allclose(got, weights @ v, rtol=1e-4, atol=1e-5)


def test_a_scale_of_zero_gives_all_keys_one_weight(device: str) -> None:
    _agree(device, _inputs(9), 1, scale=0.0)


def test_a_scale_of_float64_is_not_rounded_to_float32(device: str) -> None:
    arrays = {name: None if a is None else a.astype(np.float64) for name, a in _inputs(3).items()}
    q, k, v = (np.asarray(arrays[name]) for name in "qkv")
    scores = 0.3 * q @ np.repeat(k, 2, axis=1).swapaxes(2, 3)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    values = [
        sg.input(name, array.shape, "float64") for name, array in zip("qkv", (q, k, v), strict=True)
    ]
    graph = sg.Graph(values, [ops.Attention(*values, scale=0.3)])
    for name, config in (DEVICES[device], ("REFERENCE", {})):
        (found,) = sg.compile_model(graph, name, config)([q, k, v]).values()
        np.testing.assert_allclose(found, weights @ np.repeat(v, 2, axis=1), rtol=1e-11, atol=1e-13)
