"""A model of one step that a test opens."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import subgraph as sg
from tests.support.gates import Gate, chain


@pytest.fixture
def gated() -> Iterator[tuple[sg.CompiledModel, Gate]]:
    model, gates = chain()
    yield model, gates[0]
    gates[0].open.set()
