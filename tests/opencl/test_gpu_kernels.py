"""The kernels for a GPU: every way to divide products and convolutions, and shared queries.

They run on PoCL too: slowly, but with the same results.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import subgraph as sg
from subgraph import ops
from subgraph.graph.types import Array
from subgraph.opencl.runtime import ClSource, Runtime, opencl
from subgraph.opencl.tuning import TILES
from subgraph.ops.matmul import opencl as products
from subgraph.ops.matmul.opencl import Tiling
from tests.opencl.test_opencl_ops import heavy
from tests.support.opencl import core, graph_of, needs_device, random

pytestmark = [needs_device, pytest.mark.usefixtures("quick_opencl_builds")]
GPU: dict[str, Any] = {"KERNELS": "GPU", "RUNTIME_FALLBACK": False}
PRODUCTS = [case for case in heavy() if case[0] in ("MatMul", "Gemm", "Conv")]


def compare(graph: sg.Graph, arrays: list[Array]) -> None:
    """Compare the GPU's kernels with those of CPU."""
    wanted = core().compile_model(graph, "CPU")(arrays)[0]
    found = core().compile_model(graph, "OPENCL", GPU)(arrays)[0]
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("slices", [1, 3, 8])
@pytest.mark.parametrize("tile", TILES)
def test_every_tiling(tile: int, slices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the depth in slices, a second kernel adds them and finishes the elements."""
    monkeypatch.setattr(products, "choose_tiling", lambda low, product: Tiling(tile, slices))
    for op, case in PRODUCTS:
        if tile == TILES[0] and case["arrays"][0].dtype == np.float64:
            continue  # too large for the registers and local memory of a GPU: never chosen
        compare(*graph_of(op, **case))
    x = sg.input("x", (2, 16, 9, 7))
    w, bias = sg.parameter("w", random(24, 16, 3, 3)), sg.parameter("bias", random(24))
    y = ops.Conv(x, w, bias, pads=[1, 1, 1, 1])
    z = ops.Conv(
        ops.Clip(y, np.float32(-1), np.float32(2)), sg.parameter("v", random(24, 24, 1, 1))
    )
    compare(sg.Graph([x], [ops.Relu(ops.Add(z, y))]), [random(2, 16, 9, 7)])


def test_more_products_than_a_gpu_has_groups_in_a_dimension() -> None:
    compare(*graph_of("MatMul", [random(70_000, 2, 3), random(70_000, 3, 2)]))


def test_float64_takes_no_tile_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[Tiling] = []
    choose = products.choose_tiling

    def note(low: Any, product: Any) -> Tiling:
        chosen.append(choose(low, product))
        return chosen[-1]

    monkeypatch.setattr(products, "choose_tiling", note)
    monkeypatch.setattr(products, "_estimate", lambda low, product, choice: -choice.tile)
    for dtype in ("float32", "float64"):
        arrays = [random(70, 16, dtype=dtype), random(16, 70, dtype=dtype)]
        compare(*graph_of("MatMul", arrays))
    assert list(dict.fromkeys(tiling.tile for tiling in chosen)) == [128, 64]


@pytest.mark.parametrize("seed", range(12))
def test_attention(seed: int) -> None:
    """Any sizes of heads, shared heads, masks, queries that see no key, and bounds of scores."""
    rng = np.random.default_rng(seed)
    batch, heads, queries, keys = (int(rng.integers(1, most)) for most in (3, 4, 150, 200))
    depth, values = int(rng.choice([1, 3, 4, 33, 64, 100])), int(rng.choice([1, 5, 32, 128]))
    shared = int(rng.choice([n for n in range(1, heads + 1) if heads % n == 0]))
    arrays = [random(batch, heads, queries, depth)]
    arrays += [random(batch, shared, keys, size) for size in (depth, values)]
    if seed % 3 == 1:
        seen = rng.random((queries, keys)) < 0.6
        seen[0] = False
        arrays.append(seen)
    elif seed % 3 == 2:
        arrays.append(random(batch, 1, queries, keys))
    softcap = (seed // 6) * 1.5
    compare(*graph_of("Attention", arrays, version=23, is_causal=seed % 2, softcap=softcap))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("size", [1, 2, 5, 64, 256])
def test_attention_fits_in_local_memory(
    size: int, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of one element took 64 KB for a block of keys; GPUs have 32 KB or more."""
    bound: list[Any] = []
    original = Runtime.kernel

    def note(self: Runtime, source: ClSource, name: str) -> Any:
        bound.append(original(self, source, name))
        return bound[-1]

    monkeypatch.setattr(Runtime, "kernel", note)
    arrays = [random(1, 1, 9, size, dtype=dtype), *[random(1, 1, 70, size, dtype=dtype)] * 2]
    compare(*graph_of("Attention", arrays, version=23))
    size_of = opencl().kernel_work_group_info.LOCAL_MEM_SIZE
    used = [k.get_work_group_info(size_of, k.context.devices[0]) for k in bound]
    assert 1024 < max(used) <= 32768
