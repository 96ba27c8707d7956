"""Fixtures of the partition's tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import subgraph as sg
from subgraph.partition.property import PROPERTIES
from tests.support.accelerators import Accelerator


@pytest.fixture
def accelerator() -> Iterator[str]:
    name = "test_accelerator"
    sg.register_property(name, Accelerator)
    yield name
    PROPERTIES.unregister(name)
