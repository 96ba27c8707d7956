"""For every test: what makes a run on few cores short, and what makes a search long."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator
from typing import Any

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key
from hypothesis import HealthCheck, is_hypothesis_test, settings

from subgraph.system import guard_pages

# Tests count what is compiled: whether `make kernels` was run must not matter.
os.environ.setdefault("SUBGRAPH_PREBUILT", "")

# How long an example takes says more of the machine than of the code: the first one may compile.
settings.register_profile("subgraph", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("subgraph")


@pytest.fixture(scope="session", autouse=True)
def _no_compile_workers_in_parallel_runs() -> None:  # pyright: ignore[reportUnusedFunction]
    """Let each process of a parallel test run compile its kernels without worker processes."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        from subgraph.engine.toolchain import compile_workers

        compile_workers._MAX_WORKERS = 0  # pyright: ignore[reportConstantRedefinition]


@pytest.fixture(autouse=True)
def _stacks_at_a_crash(pytestconfig: pytest.Config) -> None:  # pyright: ignore[reportUnusedFunction]
    """Print Python's stacks if a test ends the process.

    The LLVM of an OpenCL driver puts handlers of its own in the place of pytest's: a process that
    aborts says nothing then.
    """
    if faulthandler.is_enabled():
        faulthandler.disable()
        faulthandler.enable(file=pytestconfig.stash.get(fault_handler_stderr_fd_key, 2))


@pytest.fixture(scope="module")
def quick_opencl_builds() -> Iterator[None]:
    """Build OpenCL kernels without the driver's optimiser, which takes most of the time.

    For files that ask for many variants on few numbers; models run with it, and Oclgrind too.
    """
    with pytest.MonkeyPatch.context() as patch:
        if "OCLGRIND_LOG" not in os.environ:
            patch.setenv("PYOPENCL_BUILD_OPTIONS", "-cl-opt-disable")
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--examples",
        type=int,
        default=1,
        metavar="N",
        help="ask for N times the examples of every @given",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if guard_pages.MODE:
        where = pytest.mark.skip(reason="SUBGRAPH_GUARD puts memory elsewhere, and copies inputs")
        for item in items:
            if item.get_closest_marker("plain_memory"):
                item.add_marker(where)
    _ask_for_more(config, items)


def _ask_for_more(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Look for bugs that the samples of a short run miss (``make fuzz-tests``).

    Tests say how many examples they want themselves, so a profile of hypothesis cannot.
    """
    times: Any = config.getoption("--examples")
    if times == 1:
        return
    functions: list[Any] = [item.function for item in items if isinstance(item, pytest.Function)]
    for function in {f for f in functions if is_hypothesis_test(f)}:
        own = function._hypothesis_internal_use_settings
        function._hypothesis_internal_use_settings = settings(
            own, max_examples=own.max_examples * times, derandomize=False, print_blob=True
        )
