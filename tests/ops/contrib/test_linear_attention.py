"""Operators of decoders with a recurrent state, against ONNX Runtime."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph.graph.types import Array
from tests.support.contrib import check, node_model

pytestmark = pytest.mark.filterwarnings("ignore")


def _random(*shape: int, seed: int = 0, dtype: str = "float32") -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def _unit(x: Array) -> Array:
    """Return rows of length 1, which the delta rules need."""
    rows: Array = x / np.linalg.norm(x.astype(np.float32), axis=-1, keepdims=True)
    return rows.astype(x.dtype)


@pytest.mark.parametrize("past", [True, False])
@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize(
    ("steps", "dilation", "taps"), [(5, 1, 4), (2, 1, 4), (5, 2, 3), (1, 3, 1)]
)
def test_causal_convolution(steps: int, dilation: int, taps: int, last: int, past: bool) -> None:
    before, sizes = (taps - 1) * dilation, (2, 3)
    x = _random(2, steps, *sizes) if last else _random(2, 6, steps)
    state = _random(2, before, *sizes, seed=1) if last else _random(2, 6, before, seed=1)
    inputs = [x, _random(6, 1, taps, seed=2), _random(6, seed=3), state if past else None]
    check(
        "CausalConvWithState", inputs, constants=[1, 2], outputs=(True, True), symbolic=not past,
        activation="silu" if last else "none", dilation=dilation, channels_last=last,
    )  # fmt: skip


@pytest.mark.parametrize("change", [{"ndim": 2}, {"state_window": 1}, {"input_channels": 2}])
def test_what_only_cuda_has_is_refused(change: dict[str, Any]) -> None:
    model = node_model(
        "CausalConvWithState", [_random(2, 3, 5), _random(3, 1, 4)], outputs=(True, True), **change
    )
    with pytest.raises(sg.UnsupportedOpError, match=next(iter(change))):
        sg.compile_model(sg.load(model), "REFERENCE")([_random(2, 3, 5), _random(3, 1, 4)])


@pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "key_heads"), [(4, 2, 2), (2, 2, 1), (2, 6, 6), (2, 4, 2), (2, 6, 3)]
)
@pytest.mark.parametrize("symbolic", [True, False])
def test_linear_attention(
    rule: str, heads: int, kv_heads: int, key_heads: int, symbolic: bool
) -> None:
    batch, tokens, size, values = 2, 5, 8, 6
    key_heads = kv_heads if symbolic else key_heads  # fewer keys need sizes that are known
    query = _unit(_random(batch, tokens, heads, size)).reshape(batch, tokens, -1)
    key = _unit(_random(batch, tokens, key_heads, size, seed=1)).reshape(batch, tokens, -1)
    inputs = [
        query,
        key,
        _random(batch, tokens, kv_heads * values, seed=2),
        _random(batch, kv_heads, size, values, seed=3) if symbolic else None,
        -np.abs(_random(batch, tokens, kv_heads * (1 if symbolic else size), seed=4)),
        np.abs(np.tanh(_random(batch, tokens, kv_heads if symbolic else 1, seed=5))),
    ]
    check(
        "LinearAttention", inputs, outputs=(True, True), symbolic=symbolic, rtol=1e-4, atol=1e-5,
        q_num_heads=heads, kv_num_heads=kv_heads, update_rule=rule,
    )  # fmt: skip


@pytest.mark.parametrize("state", ["float32", "float16"])
def test_linear_attention_in_half_precision(state: str) -> None:
    half = "float16"
    inputs = [
        _unit(_random(1, 3, 8, dtype=half)),
        _unit(_random(1, 3, 8, seed=1, dtype=half)),
        _random(1, 3, 4, seed=2, dtype=half),
        _random(1, 1, 8, 4, seed=3, dtype=state),
        -np.abs(_random(1, 3, 1, seed=4, dtype=half)),
        np.abs(np.tanh(_random(1, 3, 1, seed=5, dtype=half))),
    ]
    check(
        "LinearAttention", inputs, outputs=(True, True), rtol=5e-3, atol=5e-3, q_num_heads=1,
        kv_num_heads=1,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("both", [True, False])
def test_linear_attention_gate(both: bool, dtype: str) -> None:
    a, b = _random(2, 5, 4, dtype=dtype), _random(2, 5, 4, seed=1, dtype=dtype)
    inputs = [a, _random(4, seed=2), _random(4, seed=3), b if both else None]
    rounded = 1e-5 if dtype == "float32" else 2e-3
    outputs = (True, True)[: 1 + both]
    check("LinearAttentionGate", inputs, outputs=outputs, rtol=rounded, atol=rounded)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("activation", ["silu", "swish", "sigmoid"])
@pytest.mark.parametrize(("shape", "size"), [((2, 5, 12), 4), ((2, 5, 12), 12), ((12,), 3)])
def test_gated_norm(shape: tuple[int, ...], size: int, activation: str, dtype: str) -> None:
    x, gate = _random(*shape, dtype=dtype), _random(*shape, seed=1, dtype=dtype)
    rounded = 1e-5 if dtype == "float32" else 2e-3
    check(
        "GatedRMSNorm", [x, _random(size, seed=2, dtype=dtype), gate], constants=[1], rtol=rounded,
        atol=rounded, symbolic=activation == "swish", activation=activation, epsilon=1e-3,
    )  # fmt: skip


_TOKENS, _HEADS, _VALUES, _SIZE, _VALUE = 10, 2, 4, 8, 6


def _delta_net(per_key: bool = False, lead: tuple[int, ...] = (_TOKENS,)) -> list[Array | None]:
    """Return operands for two requests, without bounds and gates."""
    return [
        _unit(_random(*lead, _HEADS, _SIZE)),
        _unit(_random(*lead, _HEADS, _SIZE, seed=1)),
        _random(*lead, _VALUES, _VALUE, seed=2),
        None,
        -np.abs(_random(*lead, _VALUES, *([_SIZE] if per_key else []), seed=3)),
        np.abs(np.tanh(_random(*lead, _VALUES, seed=4))),
        _random(2, _VALUES, _VALUE, _SIZE, seed=5),
    ]


def _check_delta_net(inputs: Sequence[Array | None], **form: Any) -> None:
    check("GatedDeltaNet", inputs, outputs=(True, True), rtol=1e-4, atol=1e-5, **form)


@pytest.mark.parametrize("rule", ["linear", "gated", "delta", "gated_delta"])
@pytest.mark.parametrize("per_key", [True, False])
def test_delta_net(rule: str, per_key: bool) -> None:
    inputs = _delta_net(per_key)
    inputs[4] = inputs[4] if "gated" in rule else None
    inputs[5] = inputs[5] if "delta" in rule else None
    _check_delta_net(inputs, update_rule=rule, scale=0.25)


@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("ends", [(3, 10), (0, 10), (10, 10)])
def test_delta_net_of_requests(ends: tuple[int, int], state: bool) -> None:
    inputs = _delta_net()
    inputs[3] = np.array([0, *ends], np.int32)
    inputs[6] = inputs[6] if state else None
    _check_delta_net(inputs)


@pytest.mark.parametrize("bounds", [(3, 5, 10), (0, 12, 10), (0, 3, 9), (0, 3, 13), (-3, 0, 7)])
@pytest.mark.parametrize("device", ["CPU", "REFERENCE"])
def test_wrong_bounds_of_requests(device: str, bounds: tuple[int, ...]) -> None:
    inputs = _delta_net()
    inputs[3] = np.array([0, 3, 10], np.int32)
    graph = sg.load(node_model("GatedDeltaNet", inputs, outputs=(True, True)))
    compiled = sg.compile_model(graph, device)
    given = [x for x in inputs if x is not None]
    good = compiled(given)[0]
    with pytest.raises(sg.ShapeError, match=r"begins at|Split"):
        compiled([*given[:3], np.array(bounds, np.int32), *given[4:]])
    np.testing.assert_array_equal(compiled(given)[0], good)


@pytest.mark.parametrize("state", [True, False])
def test_delta_net_of_batches(state: bool) -> None:
    inputs = _delta_net(lead=(2, _TOKENS // 2))
    inputs[6] = inputs[6] if state else None
    _check_delta_net(inputs)


@pytest.mark.parametrize("lead", [(_TOKENS,), (2, _TOKENS // 2)])
def test_delta_net_of_packed_operands(lead: tuple[int, ...]) -> None:
    inputs = _delta_net(lead=lead)
    parts = [x.reshape(*lead, -1) for x in inputs[:3] if x is not None]
    _check_delta_net([np.concatenate(parts, axis=-1), None, None, *inputs[3:]])


@pytest.mark.parametrize("kind", ["softplus", "qwen", "sigmoid", "kda"])
@pytest.mark.parametrize(("per_key", "bias"), [(0, (4,)), (1, (4,)), (1, (4, 8)), (1, (32,))])
def test_gates_of_delta_nets(kind: str, per_key: int, bias: tuple[int, ...]) -> None:
    inputs = [*_delta_net(bool(per_key)), _random(4, seed=6) / 4, _random(*bias, seed=7)]
    _check_delta_net(
        inputs, gate_activation=kind, beta_activation="sigmoid", qk_l2_norm=1, gate_lower_bound=-2.0
    )


def test_delta_net_in_half_precision() -> None:
    inputs = [
        x if x is None or k in (3, 6) else x.astype(np.float16) for k, x in enumerate(_delta_net())
    ]
    check("GatedDeltaNet", inputs, outputs=(True, True), rtol=5e-3, atol=5e-3)
