"""What is said where NVIDIA's bindings, driver or card are missing."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

import subgraph as sg
from subgraph.devices.backends.libraries.cuda import Card


def test_without_the_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", None)
    with pytest.raises(sg.DeviceError, match=r"Library needs .*pip install 'cuda-bindings >= "):
        Card("Library")


@pytest.mark.parametrize(
    ("driver", "cards", "number", "message"),
    [
        (0, (35, None), 0, r"no driver for one .*install NVIDIA's driver"),
        (12020, (35, None), 0, r"driver supports CUDA 12\.2, .* need CUDA 13\.5: update"),
        (13000, (100, None), 0, r"finds no NVIDIA card \(cudaGetDeviceCount: no device\)"),
        (13000, (0, 2), 2, r"finds no NVIDIA card 2; there are 2"),
    ],
)
def test_without_a_driver_or_card(
    driver: int, cards: Any, number: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answers of the runtime are those that it gives on such machines."""
    runtime = SimpleNamespace(
        cudaDriverGetVersion=lambda: (0, driver),
        cudaRuntimeGetVersion=lambda: (0, 13050),
        cudaGetDeviceCount=lambda: cards,
        cudaGetErrorString=lambda code: (0, b"no device"),  # pyright: ignore[reportUnknownLambdaType]
    )
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", runtime)
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(runtime=runtime))
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace())
    with pytest.raises(sg.DeviceError, match=message):
        Card("Library", number)
