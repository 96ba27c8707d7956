"""For every test: what makes a run on few cores short without changing what it proves."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def _no_crews_beside_others() -> None:  # pyright: ignore[reportUnusedFunction]
    """Let processes of a parallel run compile their kernels themselves; a crew takes from them."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        from subgraph.engine import compile_crew

        compile_crew._MOST_WORKERS = 0  # pyright: ignore[reportConstantRedefinition]


@pytest.fixture(scope="module")
def quick_opencl_builds() -> Iterator[None]:
    """Build OpenCL kernels without the driver's optimiser, which takes most of the time.

    For files that ask for many variants on few numbers; models run with it, and Oclgrind too.
    """
    with pytest.MonkeyPatch.context() as patch:
        if "OCLGRIND_LOG" not in os.environ:
            patch.setenv("PYOPENCL_BUILD_OPTIONS", "-cl-opt-disable")
        yield
