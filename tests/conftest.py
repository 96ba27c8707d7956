"""For every test: processes of a parallel run compile their kernels themselves."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def _no_crews_beside_others() -> None:  # pyright: ignore[reportUnusedFunction]
    """Leave the cores to the run's own processes: a crew's start would only take from them."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        from subgraph.engine import compile_crew

        compile_crew._MOST_WORKERS = 0  # pyright: ignore[reportConstantRedefinition]
