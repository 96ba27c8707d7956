"""Lets the tests of OPENCL run on Oclgrind: ``pytest -p tests.opencl.oclgrind_plugin``.

A test fails when Oclgrind has written to its log meanwhile. What ran is noted in the file
OCLGRIND_NOTES: every kernel that was launched, and every test that was left out, with the reason.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator
from pathlib import Path
from typing import Any, cast

import pytest

from subgraph.opencl.executable_plan import ClExecutablePlan
from subgraph.opencl.lowering import ClLaunch

LOG = Path(os.environ["OCLGRIND_LOG"])
KERNELS = os.environ["SUBGRAPH_OPENCL_KERNELS"]
START, STEP = (int(number) for number in os.environ["OCLGRIND_PART"].split("/"))
_launched: set[str] = set()
_left_out: dict[str, str] = {}
_enqueue = ClExecutablePlan._enqueue_step


def _noting(self: ClExecutablePlan, item: Any) -> Any:
    launch = getattr(item, "launch", None)
    if isinstance(launch, ClLaunch):
        _launched.add(launch.description)
    return _enqueue(self, item)


def pytest_configure() -> None:
    """Note what is launched."""
    ClExecutablePlan._enqueue_step = _noting  # type: ignore[method-assign]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep this part, and of tests that name a form of the kernels those of this one."""
    kept: list[pytest.Item] = []
    for item in items:
        given = cast("dict[str, Any]", getattr(getattr(item, "callspec", None), "params", {}))
        if given.get("kernels", KERNELS) == KERNELS and not item.get_closest_marker("slow"):
            kept.append(item)
    items[:] = kept[START::STEP]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Fail a test in which Oclgrind found something."""
    before = _written()
    yield
    found = _written()[len(before) :]
    if found.strip():
        pytest.fail(f"Oclgrind: {found.strip()[:2000]}", pytrace=False)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note what was left out."""
    if report.skipped:
        _left_out[report.nodeid] = str(report.longrepr)


def pytest_sessionfinish() -> None:
    """Write the notes."""
    notes = {"launched": sorted(_launched), "left out": _left_out}
    Path(os.environ["OCLGRIND_NOTES"]).write_text(json.dumps(notes))


def _written() -> str:
    return LOG.read_text() if LOG.exists() else ""
