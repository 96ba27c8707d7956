"""Progress of compilation: counts for a callback, a terminal or a notebook."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import subgraph as sg
from subgraph.engine.toolchain import compile_display, toolchain
from subgraph.engine.toolchain.kernel import Kernel

MODULE = "tests.support.engine.kernels"
KERNELS = [Kernel(MODULE, "nested"), Kernel(MODULE, "count"), Kernel(MODULE, "burn")]


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use an empty cache and statistics of a process that has compiled nothing."""
    monkeypatch.setenv("SUBGRAPH_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(toolchain, "statistics", toolchain.Statistics())
    monkeypatch.setattr(compile_display, "_shown", 0)
    for kernel in KERNELS:
        toolchain.forget(kernel)


class Screen(io.StringIO):
    def __init__(self, tty: bool) -> None:
        super().__init__()
        self.tty = tty

    def isatty(self) -> bool:
        return self.tty


class ZMQInteractiveShell:
    """Named as the shell of a notebook."""


def test_a_callback_receives_counts() -> None:
    events: list[sg.CompileEvent] = []
    end = sg.watch_compilation(events.append)
    try:
        toolchain.prepare(KERNELS)
        assert [event.total for event in events] == [3] * 6
        assert sorted(e.done for e in events if e.seconds is not None) == [1, 2, 3]
        assert {event.kernel for event in events} == set(KERNELS)
        # One that nobody has foreseen is counted on.
        unforeseen = Kernel(MODULE, "scale", lanes=2)
        toolchain.forget(unforeseen)
        assert unforeseen.address
    finally:
        end()
    assert (events[-1].done, events[-1].total) == (4, 4)


def test_a_callback_that_raises_is_called_no_more(caplog: pytest.LogCaptureFixture) -> None:
    calls: list[sg.CompileEvent] = []

    def bad(event: sg.CompileEvent) -> None:
        calls.append(event)
        raise KeyError("user's mistake")

    end = sg.watch_compilation(bad)
    try:
        assert toolchain.prepare(KERNELS) == len(KERNELS)
    finally:
        end()
    assert len(calls) == 1
    warnings = [r for r in caplog.records if "watch_compilation" in r.message]
    assert len(warnings) == 1
    assert 'KeyError: "user\'s mistake"' in warnings[0].message
    end()  # a second time does no harm


def test_a_callback_is_a_function() -> None:
    wrong: Any = 3
    with pytest.raises(sg.ConfigError, match="a function that takes a CompileEvent"):
        sg.watch_compilation(wrong)


def test_a_kernel_that_cannot_be_compiled_is_not_expected() -> None:
    events: list[sg.CompileEvent] = []
    end = sg.watch_compilation(events.append)
    try:
        with pytest.raises(sg.DeviceError):
            toolchain.prepare([Kernel(MODULE, "broken")])
        toolchain.prepare([KERNELS[1]])
    finally:
        end()
    assert (events[-1].done, events[-1].total) == (1, 1)


@pytest.mark.parametrize("where", ["terminal", "notebook"])
def test_counts_are_shown_in_one_line(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(where == "terminal")
    monkeypatch.setattr(sys, "stderr", screen)
    if where == "notebook":
        shell = SimpleNamespace(get_ipython=ZMQInteractiveShell)
        monkeypatch.setitem(sys.modules, "IPython", shell)
    toolchain.prepare(KERNELS)
    lines = screen.getvalue().split("\r")
    shown = [line.partition(": ")[2].partition(" ")[0] for line in lines if ": " in line]
    assert shown[0] == "0/3"
    assert shown[-1] == "3/3"
    assert "\n" not in screen.getvalue()
    assert not lines[-1].strip()  # the line is taken away


@pytest.mark.parametrize("why", ["a file", "a listener"])
def test_nothing_is_written_to_other_streams(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(why == "a listener")
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setattr(toolchain.statistics, "announced", True)
    end = sg.watch_compilation(lambda event: None) if why == "a listener" else lambda: None
    try:
        toolchain.prepare(KERNELS[:1])
    finally:
        end()
    assert not screen.getvalue()
