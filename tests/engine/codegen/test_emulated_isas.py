"""Kernels with the vector widths, tiles and code paths of other machines, run on this one.

``make check-isas`` runs the tests of all kernels so; these tests have one net of each kind.
"""

from __future__ import annotations

import numpy as np
import pytest
from cross_targets import examine, isa_of, spills

import subgraph as sg
from subgraph import ops
from subgraph.engine.codegen.tiling import tile_shape
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.graph.types import Array
from subgraph.system import host

rng = np.random.default_rng(11)
EMULATED = ("like-avx512vnni", "like-avxvnni", "like-neon")


def emulating(*names: str) -> pytest.MarkDecorator:
    """Parametrize a test by these instruction sets; the others are slow tests."""
    slow = [pytest.param(name, marks=pytest.mark.slow) for name in EMULATED if name not in names]
    return pytest.mark.parametrize("emulated", [*names, *slow], indirect=True)


@pytest.fixture
def emulated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> host.Isa:
    monkeypatch.setenv("SUBGRAPH_ISA", request.param)
    try:
        return host.isa()
    except sg.ConfigError as error:
        pytest.skip(str(error))


def weight(name: str, *shape: int) -> sg.Value:
    return sg.parameter(name, rng.standard_normal(shape).astype(np.float32))


def compare(graph: sg.Graph, *arrays: Array, exact: bool = False) -> None:
    model = sg.compile_model(graph, "CPU", {"INFERENCE_NUM_THREADS": 1})
    want = sg.compile_model(graph, "REFERENCE")(list(arrays))
    for got, expected in zip(model(list(arrays)).values(), want.values(), strict=True):
        if exact:
            np.testing.assert_array_equal(got, expected)
        else:
            np.testing.assert_allclose(got, expected, rtol=2e-4, atol=2e-4)


@emulating(*EMULATED)
def test_kernels_see_the_emulated_machine(emulated: host.Isa) -> None:
    registers = {"avx512": 32, "avx2": 16, "neon": 32}[emulated.name]
    width = {"avx512": 64, "avx2": 32, "neon": 16}[emulated.name]
    assert (emulated.registers, emulated.vector_bytes) == (registers, width)
    assert host.lanes("float32") == width // 4
    assert host.has_vnni() == emulated.like.endswith("vnni")
    assert tile_shape(4, registers)[0] == (14 if registers == 32 else 6)
    assert emulated.features == host.isa_named(host.available_isas()[0]).features


@emulating("like-avx512vnni")
def test_convolutions_and_products(emulated: host.Isa) -> None:
    x = sg.input("x", shape=(1, 3, 20, 18), dtype="float32")
    h = ops.Relu(ops.Conv(x, weight("stem", 40, 3, 3, 3), strides=[2, 2], pads=[1] * 4))
    h = ops.Clip(ops.Conv(h, weight("depth", 40, 1, 3, 3), pads=[1] * 4, group=40), 0.0, 6.0)
    h = ops.Add(h, ops.Conv(h, weight("point", 40, 40, 1, 1)))
    flat = ops.Flatten(ops.GlobalAveragePool(ops.Sigmoid(h)))
    graph = sg.Graph([x], [ops.Softmax(ops.Gemm(flat, weight("fc", 40, 21), weight("b", 21)))])
    compare(graph, rng.standard_normal((1, 3, 20, 18)).astype(np.float32))


@emulating("like-avx512vnni")
def test_a_recurrent_network(emulated: host.Isa) -> None:
    x = sg.input("x", shape=(5, 3, 9), dtype="float32")
    w, r, b = weight("w", 1, 44, 9), weight("r", 1, 44, 11), weight("b", 1, 88)
    graph = sg.Graph([x], [ops.LSTM(x, w, r, b, hidden_size=11)[0]])
    compare(graph, rng.standard_normal((5, 3, 9)).astype(np.float32))


@emulating("like-avx512vnni", "like-neon")
@pytest.mark.parametrize("weights", ["int8", "uint8"])
def test_integer_products_are_exact(emulated: host.Isa, weights: str) -> None:
    """Extreme bytes, which saturate where a machine adds pairs of products in 16 bits."""
    info = np.iinfo(weights)
    x = sg.input("x", shape=(1, 36, 7, 9), dtype="uint8")
    wide = rng.choice([info.min, info.max, 3], (34, 36, 3, 3)).astype(weights)
    scales = [sg.parameter(n, np.array(v, np.float32)) for n, v in (("a", 0.02), ("c", 40.0))]
    zeros = [sg.parameter(n, np.array(v, np.uint8)) for n, v in (("az", 131), ("cz", 7))]
    ws = sg.parameter("ws", rng.uniform(0.01, 0.1, 34).astype(np.float32))
    wz = sg.parameter("wz", np.full(34, 0 if weights == "int8" else 128, weights))
    bias = sg.parameter("bias", rng.integers(-9999, 9999, 34).astype(np.int32))
    y = ops.QLinearConv(
        *(x, scales[0], zeros[0], sg.parameter("w", wide), ws, wz),
        *(scales[1], zeros[1], bias),
        pads=[1] * 4,
    )
    graph = sg.Graph([x], [y])
    compare(graph, rng.choice([0, 255, 131], (1, 36, 7, 9)).astype(np.uint8), exact=True)


LOOP = """\
	vmovups	%zmm3, 64(%rsp)
.LBB0_1:
	vfmadd231ps	(%rax){1to16}, %zmm1, %zmm2
{spill}	decq	%rcx
	jg	.LBB0_1
	vmovups	%zmm4, 128(%rsp)
"""


def test_spilled_sums_are_found() -> None:
    """Only stores inside a loop count, not registers that are saved around it."""
    assert spills(LOOP.replace("{spill}", "")) == 0
    assert spills(LOOP.replace("{spill}", "\tvmovups\t%zmm2, -64(%rsp)\n")) == 1
    assert spills(LOOP.replace("{spill}", "\tvmovaps\t%ymm2, (%rsp)\n")) == 1


@pytest.mark.skipif(host.architecture() != "x86_64", reason="code for x86 is made on x86")
def test_integer_tiles_are_one_instruction_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    isa = isa_of("sapphirerapids")
    monkeypatch.setattr(host, "isa", lambda: isa)
    module = "subgraph.engine.codegen.tile_int"
    for flavour in ("quads", "pairs"):
        tile = Kernel(
            module, "integer_contraction", flavour=flavour, weights="int8", output="int32"
        )
        assert examine(tile, "sapphirerapids") == []
