"""Which OpenCL devices are found, and why others are left out."""

from __future__ import annotations

import sys
from typing import Any

import pytest

import subgraph as sg
from subgraph.errors import DeviceError
from subgraph.opencl import runtime
from tests.support.opencl import needs_device

pytestmark = needs_device


def test_no_device_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing:
        Error = RuntimeError

        @staticmethod
        def get_platforms() -> list[Any]:
            return []

    monkeypatch.setattr(runtime, "opencl", Nothing)
    with pytest.raises(DeviceError, match="no OpenCL device was found"):
        runtime.find_devices.__wrapped__()


def test_a_driver_that_does_not_know_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its devices count as missing, with what to install in the message."""
    monkeypatch.setattr(runtime, "_refusal", lambda device: "PoCL does not compile; install X")
    with pytest.raises(sg.DeviceError, match=r"no OpenCL device can be used.*install X"):
        runtime.find_devices.__wrapped__()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="PoCL links otherwise elsewhere")
def test_a_driver_without_a_linker_is_refused_before_it_aborts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    devices = [d for d in runtime.find_devices() if "PoCL" in d.version]
    if not devices:
        pytest.skip("PoCL is not installed, or knows no device")
    monkeypatch.setenv("PATH", "")
    assert "package binutils" in runtime._refusal(devices[0])


def test_a_driver_installed_twice_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    platforms = runtime._platforms(runtime.opencl())

    def twice(_: Any) -> list[Any]:
        return [*platforms, *platforms]

    monkeypatch.setattr(runtime, "_platforms", twice)
    assert len(runtime.find_devices.__wrapped__()) == len(runtime.find_devices())
