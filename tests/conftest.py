"""For every test: what makes a run on few cores short, and what makes a search long."""

from __future__ import annotations

import faulthandler
import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
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


def _path_of_stacks(process: int) -> Path:
    """Return the file for the stacks of a worker of a parallel run, by its process id."""
    return Path(tempfile.gettempdir(), f"subgraph-tests-{process}.txt")


@pytest.fixture(scope="session")
def _file_of_stacks(pytestconfig: pytest.Config) -> Iterator[Any]:  # pyright: ignore[reportUnusedFunction]
    """Yield the file to which the stacks go if a test ends the process."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        yield pytestconfig.stash.get(fault_handler_stderr_fd_key, 2)
        return
    path = _path_of_stacks(os.getpid())
    with path.open("wb") as file:
        yield file
        faulthandler.disable()
    path.unlink()


@pytest.fixture(autouse=True)
def _stacks_at_a_crash(_file_of_stacks: Any) -> None:  # pyright: ignore[reportUnusedFunction]
    """Write Python's stacks if a test ends the process.

    The LLVM of an OpenCL driver puts handlers of its own in the place of pytest's: a process that
    aborts says nothing then.
    """
    faulthandler.disable()
    faulthandler.enable(file=_file_of_stacks)


@pytest.hookimpl(optionalhook=True)
def pytest_handlecrashitem(report: Any) -> None:
    """Add the status and the stacks of a worker that crashed to the report of its test."""
    worker = report.node.gateway._io.popen
    status = worker.wait(60)
    ending = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
    path = _path_of_stacks(worker.pid)
    stacks = path.read_text(errors="replace") if path.exists() else ""
    path.unlink(missing_ok=True)
    report.longrepr = f"{ending}: {report.longrepr}\n{stacks}"


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
