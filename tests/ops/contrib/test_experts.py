"""Mixtures of experts, against ONNX Runtime; what it has no kernel for against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import Array
from tests.support.contrib import check, node_model

pytestmark = pytest.mark.filterwarnings("ignore")
_ROWS, _SIZE, _INNER, _EXPERTS = 7, 32, 64, 5


def _random(*shape: int, seed: int, scale: float = 1.0) -> Array:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def _floats(doubled: bool, bias: bool) -> list[Array | None]:
    outputs = _INNER * (2 if doubled else 1)
    return [
        _random(_EXPERTS, outputs, _SIZE, seed=1, scale=0.2),
        _random(_EXPERTS, outputs, seed=2) if bias else None,
        _random(_EXPERTS, _SIZE, _INNER, seed=3, scale=0.2),
        _random(_EXPERTS, _SIZE, seed=4) if bias else None,
    ]


@pytest.mark.parametrize("normalized", [0, 1])
@pytest.mark.parametrize("k", [1, 2, 5])
@pytest.mark.parametrize("shape", [(_ROWS, _SIZE), (1, _ROWS, _SIZE)])
def test_moe(shape: tuple[int, ...], k: int, normalized: int) -> None:
    x, router = _random(*shape, seed=0), _random(_ROWS, _EXPERTS, seed=9)
    weights = _floats(doubled=False, bias=k != 2)
    check(
        "MoE", [x, router, *weights], constants=[2, 3, 4, 5], rtol=1e-4, atol=1e-4, k=k,
        normalize_routing_weights=normalized, activation_type="relu",
    )  # fmt: skip


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "identity", "swiglu"])
def test_activations(activation: str) -> None:
    x, router = _random(_ROWS, _SIZE, seed=0), _random(_ROWS, _EXPERTS, seed=9)
    form: dict[str, Any] = {"activation_type": activation, "k": 2}
    if activation == "swiglu":
        form |= {"swiglu_fusion": 1, "swiglu_limit": 1.5}
        form |= {"activation_alpha": 1.7, "activation_beta": 1.0}
    weights = _floats(doubled=activation == "swiglu", bias=True)
    check("MoE", [x, router, *weights], constants=[2, 3, 4, 5], rtol=1e-4, atol=2e-4, **form)


@pytest.mark.parametrize("fusion", [0, 2])
def test_gates_in_other_layouts(fusion: int) -> None:
    """The same experts with a gate of its own (0), or behind the other half (2), as with pairs."""
    x, router = _random(_ROWS, _SIZE, seed=0), _random(_ROWS, _EXPERTS, seed=9)
    pairs, bias, second, last = _floats(doubled=True, bias=True)
    assert pairs is not None
    assert bias is not None
    form: dict[str, Any] = {"activation_type": "swiglu", "k": 2, "activation_beta": 0.5}

    def result(*inputs: Array | None, fusion: int) -> Array:
        values = [sg.input("x", x.shape), sg.input("router", router.shape)]
        y = ops.MoE(*values, *inputs, **form, swiglu_fusion=fusion)
        return sg.compile_model(sg.Graph(values, [y]), "CPU")(x, router)[0]

    wanted = result(pairs, bias, second, last, fusion=1)
    if fusion == 0:
        layers = [pairs[:, ::2], bias[:, ::2], second, last, pairs[:, 1::2], bias[:, 1::2]]
    else:
        order = [*range(0, 2 * _INNER, 2), *range(1, 2 * _INNER, 2)]
        layers = [pairs[:, order], bias[:, order], second, last]
    np.testing.assert_allclose(result(*layers, fusion=fusion), wanted, rtol=1e-4, atol=1e-4)


def _packed(outputs: int, inputs: int, bits: int, block: int, seed: int) -> list[Array]:
    """Return packed weights, scales and packed zero points of all experts."""
    rng = np.random.default_rng(seed)
    blocks = inputs // block if block else 1
    scales = rng.uniform(0.1, 0.4, (_EXPERTS, outputs, blocks)).astype(np.float32)
    scales /= np.float32(1 << bits)
    width = -(-blocks * bits // 8) if block else -(-outputs * bits // 8)
    zeros = (_EXPERTS, outputs, width) if block else (_EXPERTS, width)
    return [
        rng.integers(0, 256, (_EXPERTS, outputs, inputs * bits // 8)).astype(np.uint8),
        scales if block else scales[..., 0],
        rng.integers(0, 256, zeros).astype(np.uint8),
    ]


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("block", [0, 16, 32])
@pytest.mark.parametrize("bits", [4, 8])
def test_qmoe(bits: int, block: int, zeros: bool) -> None:
    x, router = _random(_ROWS, _SIZE, seed=0), _random(_ROWS, _EXPERTS, seed=9)
    first = _packed(2 * _INNER, _SIZE, bits, block, 1)
    second = _packed(_SIZE, _INNER, bits, block, 2)
    bias = _random(_EXPERTS, 2 * _INNER, seed=3), _random(_EXPERTS, _SIZE, seed=4)
    points = [first[2], second[2]] if zeros else []
    inputs: list[Array | None] = [x, router, *first[:2], bias[0], *second[:2], bias[1]]
    inputs += [None, None, None, *points] if zeros else []
    form: dict[str, Any] = {"expert_weight_bits": bits, "k": 2, "weights_prepacked": 0}
    form |= {"activation_type": "swiglu", "swiglu_fusion": 1, "normalize_routing_weights": 1}
    form |= {"block_size": block} if block else {}
    constants = [k for k, value in enumerate(inputs) if k > 1 and value is not None]
    # ONNX Runtime rounds the rows beside weights of 8 bits in blocks to 8 bits.
    rounded = 0.1 if bits == 8 and block else 2e-3
    check("QMoE", inputs, constants=constants, rtol=rounded, atol=rounded, **form)


def test_the_router_may_weigh_the_results_otherwise() -> None:
    x, router = _random(_ROWS, _SIZE, seed=0), _random(_ROWS, _EXPERTS, seed=9)
    mixing = np.abs(_random(_ROWS, _EXPERTS, seed=8))
    first, second = _packed(_INNER, _SIZE, 4, 16, 1), _packed(_SIZE, _INNER, 4, 16, 2)
    inputs = [x, router, *first[:2], None, *second[:2], *[None] * 7, mixing]
    for normalized in (0, 1):
        check(
            "QMoE", inputs, constants=[2, 3, 5, 6], rtol=2e-3, atol=2e-3, k=2, block_size=16,
            weights_prepacked=0, normalize_routing_weights=normalized,
        )  # fmt: skip


def test_cpu_multiplies_the_rows_of_an_expert_together() -> None:
    x, router = sg.input("x", (40, _SIZE)), sg.input("router", (40, _EXPERTS))
    y = ops.MoE(x, router, *_floats(doubled=False, bias=True), k=2)
    model = sg.compile_model(sg.Graph([x, router], [y]), "CPU", {"ENABLE_PROFILING": True})
    request = model.create_infer_request()
    request.infer([_random(40, _SIZE, seed=0), _random(40, _EXPERTS, seed=1)])
    kernels = [entry.kernel.split("(")[0] for entry in request.profile()]
    assert kernels.count("matmul.kernels.grouped") == 2


@pytest.mark.parametrize(("bits", "block", "rows"), [(4, 16, 200), (8, 0, 3), (2, 16, 40)])
@pytest.mark.parametrize(
    ("level", "group", "half"), [(0, 0, False), (4, 0, False), (0, 16, False), (0, 0, True)]
)
@pytest.mark.parametrize("zeros", [False, True])
def test_packed_weights_of_experts(
    zeros: bool, level: int, group: int, half: bool, bits: int, block: int, rows: int
) -> None:
    """CPU reads them as they are packed; REFERENCE converts them to floats."""
    outputs = 2 * _INNER + 16  # half a panel more than whole ones
    first = _packed(outputs, _SIZE, bits, block, 1)
    second = _packed(_SIZE, outputs, bits, block, 2)
    first[1], second[1] = (np.abs(part[1]) / 4 for part in (first, second))
    x, router = _random(rows, _SIZE, seed=0), _random(rows, _EXPERTS, seed=9)
    form: dict[str, Any] = {"expert_weight_bits": bits, "k": 2, "weights_prepacked": 0}
    form |= {"accuracy_level": level, **({"block_size": block} if block else {})}
    inputs = [x, router, *first[:2], None, *second[:2], *[None] * 4]
    inputs += [first[2], second[2]] if zeros else []
    if half:
        inputs = [v.astype(np.float16) if v is not None and v.dtype == "f4" else v for v in inputs]
        x, router = inputs[:2]
    constants = [k for k, value in enumerate(inputs) if k > 1 and value is not None]
    graph = sg.load(node_model("QMoE", inputs, constants=constants, **form))
    expected = sg.compile_model(graph, "REFERENCE")([x, router])[0]
    config = {"ENABLE_PROFILING": True, "DYNAMIC_QUANTIZATION_GROUP_SIZE": group}
    request = sg.compile_model(graph, "CPU", config).create_infer_request()
    found = request.infer([x, router])[0]
    scale, apart = np.abs(expected).max(), np.abs(found - expected).max()
    rounds = level or group
    assert apart <= (0.03 if rounds else 0.004 if half else 1e-5) * scale
    assert half or (apart > 1e-4 * scale) == bool(rounds)
    kernels = [entry.kernel.split("(")[0] for entry in request.profile()]
    assert kernels.count("contrib.blockwise_kernels.grouped_rows") == 2


def test_experts_in_two_branches() -> None:
    """The constants of the bodies had one name in a program with both branches."""
    x, router = sg.input("x", (40, _SIZE)), sg.input("router", (40, _EXPERTS))
    taken = sg.input("taken", (), "bool")

    def branch(seed: int) -> sg.Graph:
        parts = _packed(_INNER, _SIZE, 4, 16, seed)[:2], _packed(_SIZE, _INNER, 4, 16, seed)[:2]
        first, second = (
            [sg.parameter(f"w{seed}{k}{p.dtype}", p) for p in part] for k, part in enumerate(parts)
        )
        held = sg.capture(x), sg.capture(router)
        result = ops.QMoE(*held, *first, None, *second, k=2, block_size=16, weights_prepacked=0)
        return sg.Graph([], [result])

    y = ops.If(taken, then_branch=branch(1), else_branch=branch(2))
    graph = sg.Graph([taken, x, router], [y])
    arrays = [_random(40, _SIZE, seed=0), _random(40, _EXPERTS, seed=1)]
    for flag in (np.array(True), np.array(False)):
        wanted, found = (
            sg.compile_model(graph, device)([flag, *arrays])[0] for device in ("REFERENCE", "CPU")
        )
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"k": 6}, "k is 6"),
        ({"activation_type": "swiglu"}, "swiglu_fusion"),
        ({"activation_type": "tanh"}, "activation_type"),
        ({"router": (3, _EXPERTS)}, "router_probs"),
        ({"router": (_ROWS, 4)}, "router_probs"),
        ({"x": (_ROWS, 16)}, "16"),
    ],
)
def test_what_does_not_fit_is_an_error(change: dict[str, Any], words: str) -> None:
    x = sg.input("x", change.pop("x", (_ROWS, _SIZE)))
    router = sg.input("router", change.pop("router", (_ROWS, _EXPERTS)))
    with pytest.raises(sg.ShapeError, match=words):
        ops.MoE(x, router, *_floats(doubled=False, bias=True), **change)


@pytest.mark.parametrize("shape", [(7, 8), (2, 3, 8)])
@pytest.mark.parametrize(
    "form",
    [
        {"top_k": 2},
        {"top_k": 2, "n_group": 4, "topk_group": 2, "group_topk": 1},
        {"top_k": 3, "n_group": 2, "topk_group": 1, "router_sentinel": -1.0},
        {"top_k": 5, "n_group": 4, "topk_group": 2, "group_topk": 9},
    ],
)
def test_group_router(form: dict[str, Any], shape: tuple[int, ...]) -> None:
    check("MoEGroupRouter", [_random(*shape, seed=0), _random(8, seed=1, scale=0.1)], **form)


@pytest.mark.parametrize("projected", [True, False])
def test_full_scores_of_the_router(projected: bool) -> None:
    rows = _random(7, 256 if projected else 8, seed=0, scale=0.1)
    weights = _random(8, 256, seed=2) if projected else None
    inputs = [rows, _random(8, seed=1), weights]
    check("MoEGroupRouter", inputs, outputs=(False, True, True), rtol=1e-4, top_k=2)
