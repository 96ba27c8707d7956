"""Memory that is released: pages of model files, and of the library that links kernels."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from llvmlite import binding

import subgraph as sg
from subgraph import ops
from subgraph.engine.cpu import region_session
from subgraph.engine.executable import executable_plan
from subgraph.engine.executable.executable_plan import Arena
from subgraph.engine.toolchain import loader
from subgraph.graph.types import Array
from subgraph.system.large_pages import mapped_empty
from subgraph.tools.bench_worker import peak_memory
from subgraph.weights import mapped_files as mapped

MAPS = """\
7f0000000000-7f0000003000 r--p 00000000 fe:00 12 /opt/my lib/libtool.so
7f0000003000-7f0000009000 r-xp 00003000 fe:00 12 /opt/my lib/libtool.so
7f0000009000-7f000000b000 r--p 00009000 fe:00 12 /opt/my lib/libtool.so
7f000000b000-7f000000c000 r--p 0000b000 fe:00 12 /opt/my lib/libtool.so
7f000000c000-7f000000d000 rw-p 0000c000 fe:00 12 /opt/my lib/libtool.so
7f000000d000-7f000000e000 rw-p 00000000 00:00 0
7f0000010000-7f0000019000 r-xp 00003000 fe:00 13 /usr/lib/libother.so
"""


def test_only_unchanged_pages_of_files_are_released() -> None:
    base = 0x7F0000000000
    want = [(base, 0x3000), (base + 0x3000, 0x6000), (base + 0x9000, 0x2000)]
    assert mapped._clean_parts(MAPS, "libtool") == want
    assert mapped._clean_parts(MAPS, "libnone") == []
    # Without a part that was protected after relocation, the last one could be it.
    without = "\n".join(line for line in MAPS.splitlines() if "0000b000 fe" not in line)
    assert mapped._clean_parts(without, "libtool") == want[:2]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="done on Linux")
def test_kernels_are_linked_after_the_pages_of_llvm_were_released() -> None:
    x = sg.input("x", shape=(4, 8), dtype="float32")
    w = np.random.default_rng(3).normal(size=(8, 5)).astype(np.float32)
    data = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)
    for activation in (ops.Relu, ops.Tanh, ops.Sigmoid):
        graph = sg.Graph([x], [activation(ops.MatMul(x, sg.parameter("w", w)))])
        want = sg.compile_model(graph, "REFERENCE")(data)[0]
        loader.release_llvm()
        np.testing.assert_allclose(sg.compile_model(graph, "CPU")(data)[0], want, rtol=1e-5)
    binding.initialize_native_target()  # images are loaded without it
    assert mapped.release_library("libllvmlite") > 1 << 20


def test_the_peak_is_that_of_this_program() -> None:
    before = peak_memory()
    assert before > 1 << 20
    block = np.ones(8 << 20)
    assert peak_memory() >= block.nbytes
    if Path("/proc/self/status").exists():
        assert peak_memory() >= before


def made_arenas(monkeypatch: pytest.MonkeyPatch) -> list[Arena]:
    """Return a list to which each arena is added when a request makes it."""
    arenas: list[Arena] = []

    class Counted(Arena):
        def __init__(self) -> None:
            super().__init__()
            arenas.append(self)

    monkeypatch.setattr(region_session, "Arena", Counted)
    return arenas


@pytest.mark.plain_memory
def test_the_regions_of_a_request_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """They run one after the other, each with temporary values as large as its input."""
    arenas = made_arenas(monkeypatch)
    weights = [
        np.random.default_rng(k).standard_normal((64, 64)).astype(np.float32) / 8 for k in range(4)
    ]
    x = sg.input("x", ("N", 64))
    first = ops.MatMul(ops.MatMul(x, weights[0]), weights[1])
    # How many there are is known at run time only: a region ends here.
    rows = ops.Gather(ops.NonZero(ops.Greater(first, np.float32(0))), np.array(0))
    last = ops.MatMul(ops.MatMul(ops.Gather(first, rows), weights[2]), weights[3])
    request = sg.compile_model(sg.Graph([x], [last]), "CPU").create_infer_request()
    rng = np.random.default_rng(0)
    for count in (3, 500, 20):
        array = rng.standard_normal((count, 64)).astype(np.float32)
        got = request.infer([array])[0]
        middle = array.astype(np.float64) @ weights[0] @ weights[1]
        wanted = middle[np.nonzero(middle > 0)[0]] @ weights[2] @ weights[3]
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
    assert len(arenas) > 1
    assert sum(arena.memory.nbytes > 0 for arena in arenas) == 1


@pytest.mark.plain_memory
def test_memory_that_cannot_be_enlarged_is_allocated_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that was bound before ran in the memory that had been returned to the system."""
    most, held = 1 << 20, []

    def limited(size: int) -> Array:
        if size > most:
            raise MemoryError
        held.append(mapped_empty(size))  # otherwise the test would crash
        return held[-1]

    monkeypatch.setattr(executable_plan, "mapped_empty", limited)
    x = sg.input("x", ("N", 64))
    graph = sg.Graph([x], [ops.Softmax(ops.Transpose(ops.Softmax(x, axis=0), perm=[1, 0]))])
    arenas = made_arenas(monkeypatch)
    request = sg.compile_model(graph, "CPU").create_infer_request()
    small, large = (np.ones((n, 64), np.float32) for n in (512, 8192))
    for array in (small, large, small):
        result = request.infer(array)[0]
        np.testing.assert_allclose(result, np.full((64, len(array)), 1 / len(array)), rtol=1e-5)
    (arena,) = [each for each in arenas if each.address]
    assert arena.address == arena.memory.ctypes.data
    assert len(held) == 2
