"""Fixtures of the tests of quantized operators."""

from __future__ import annotations

import pytest

import subgraph as sg
from subgraph.system import host


@pytest.fixture(autouse=True)
def matrix_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Emulate matrix tiles of bytes for the flavour ``matrix`` on a machine without them."""
    parameters = getattr(request.node, "callspec", None)
    if parameters is None or parameters.params.get("flavour") != "matrix":
        return
    if not host.has_int8_tiles():
        monkeypatch.setenv("SUBGRAPH_ISA", "like-amx")
        try:
            assert host.has_int8_tiles()
        except sg.ConfigError as error:
            pytest.skip(str(error))
