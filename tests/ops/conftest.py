"""Fixtures of the operators' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import subgraph as sg
from subgraph.system import host


@pytest.fixture
def no_fallback(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Let no test pass whose kernels failed, so that another device gave the results."""
    yield
    assert not [r for r in caplog.records if "failed on device" in r.getMessage()]


@pytest.fixture(params=["sse", "scalar", "like-avx512vnni"])
def other_isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Compile kernels as for another instruction set, if this machine can run them."""
    name: str = request.param
    monkeypatch.setenv("SUBGRAPH_ISA", name)
    try:
        host.isa()
    except sg.ConfigError as error:
        pytest.skip(str(error))
    return name


@pytest.fixture(scope="module", params=["matrix tiles", "dot products"])
def tiles(request: pytest.FixtureRequest) -> Iterator[None]:
    """Multiply bfloat16 by matrix tiles, or by dot products; emulate what this machine lacks."""
    by_tiles = request.param == "matrix tiles"
    native = host.multiplies_bfloat16() and host.has_bfloat16_tiles() == by_tiles
    with pytest.MonkeyPatch.context() as patch:
        if not native:
            patch.setenv("SUBGRAPH_ISA", "like-amx" if by_tiles else "like-avx512bf16")
            try:
                assert host.multiplies_bfloat16()
            except sg.ConfigError as error:
                pytest.skip(str(error))
        assert host.has_bfloat16_tiles() == by_tiles
        yield
