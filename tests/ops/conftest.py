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


@pytest.fixture(scope="module")
def tiles() -> Iterator[None]:
    """Emulate matrix tiles of bfloat16 on a machine without them."""
    with pytest.MonkeyPatch.context() as patch:
        if not host.has_bfloat16_tiles():
            patch.setenv("SUBGRAPH_ISA", "like-amx")
            try:
                assert host.has_bfloat16_tiles()
            except sg.ConfigError as error:
                pytest.skip(str(error))
        yield
