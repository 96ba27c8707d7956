"""The table of instruction sets: what machines support, and what a new row needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from subgraph.system import host

PRIVATE: dict[str, Any] = host.__dict__
AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni", "avx10.1", "amx-tile"}
AVX2 = {"sse2", "avx", "avx2", "fma", "f16c", "avxvnni", "vaes"}
Pretend = Callable[[str, set[str]], None]


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pretend]:
    """Return a function that makes `host` see a machine of an architecture and its features."""

    def become(architecture: str, features: set[str]) -> None:
        present = {name: name in features for name in (*AVX512, *AVX2, "v")}
        monkeypatch.setitem(PRIVATE, "architecture", lambda: architecture)
        monkeypatch.setitem(PRIVATE, "_host_cpu", lambda: ("generic", present))
        host.isa_named.cache_clear()

    yield become
    host.isa_named.cache_clear()


def enabled(isa: host.Isa) -> set[str]:
    return {feature[1:] for feature in isa.features.split(",") if feature.startswith("+")}


def test_a_machine_supports_the_levels_whose_features_it_has(pretend: Pretend) -> None:
    for architecture, features, names in (
        ("x86_64", AVX512 | AVX2, ("avx512", "avx2", "avx", "sse", "scalar")),
        ("x86_64", AVX2, ("avx2", "avx", "sse", "scalar")),
        ("x86_64", {"sse2", "avx"}, ("avx", "sse", "scalar")),
        ("aarch64", set[str](), ("neon", "scalar")),
        ("riscv64", {"v"}, ("scalar",)),
    ):
        pretend(architecture, features)
        assert host.available_isas() == names


def test_a_lower_level_disables_the_features_above_it(pretend: Pretend) -> None:
    pretend("x86_64", AVX512 | AVX2)
    assert enabled(host.isa_named("avx512")) == AVX512 | AVX2
    assert enabled(host.isa_named("avx2")) == AVX2 - {"avxvnni"}
    assert enabled(host.isa_named("avx")) == {"sse2", "avx"}
    assert enabled(host.isa_named("sse")) == enabled(host.isa_named("scalar")) == {"sse2"}
    pretend("x86_64", AVX2)
    assert enabled(host.isa_named("avx2")) == AVX2, "the widest level of a machine has all"


def test_a_new_instruction_set_is_a_row(pretend: Pretend, monkeypatch: pytest.MonkeyPatch) -> None:
    row = PRIVATE["_Level"]("riscv64", 16, 32, needs=("v",))
    monkeypatch.setitem(PRIVATE["_LEVELS"], "rvv", row)
    like = PRIVATE["_Emulation"]("rvv", frozenset[str](), "scalar")
    monkeypatch.setitem(PRIVATE["_LIKE"], "like-rvv", like)
    pretend("riscv64", {"v"})
    isa = host.isa_named("rvv")
    assert (isa.vector_bytes, isa.registers, isa.fma) == (16, 32, False)
    pretend("x86_64", AVX2)
    emulated = host.isa_named("like-rvv")
    assert (emulated.name, emulated.vector_bytes, emulated.registers) == ("rvv", 16, 32)
    with host.target(emulated, "x86_64"):
        answers = (host.has_vnni(), host.pmaddwd_lanes(), host.permutes("float32", 4))
    assert answers == (False, 0, False), "nobody asks for its name"


@pytest.mark.parametrize("allowed", [True, False])
def test_tile_registers_need_the_permission_of_the_system(
    monkeypatch: pytest.MonkeyPatch, allowed: bool
) -> None:
    features = dict.fromkeys((*AVX512, *AVX2, "amx-int8", "amx-bf16"), True)
    monkeypatch.setitem(PRIVATE, "processor", lambda: ("sapphirerapids", features))
    monkeypatch.setitem(PRIVATE, "permit_tile_registers", lambda: allowed)
    _, found = PRIVATE["_host_cpu"].__wrapped__()
    assert all(found[name] == allowed for name in found if name.startswith("amx"))
    assert found["avx512f"]
