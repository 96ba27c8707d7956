"""Devices over other libraries whose packages are installed, as parameters of tests."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest

import subgraph as sg
from subgraph.devices.backends.libraries.cuda import Card

# The packages of each device; one of them is needed.
PACKAGES = {
    "CUDNN": ("nvidia-cudnn-frontend",),
    "ONEDNN": ("onednn-cpu-gomp",),
    "ONNXRUNTIME": ("onnxruntime",),
    "OPENVINO": ("openvino",),
    "TENSORRT": ("tensorrt", "tensorrt-rtx"),
    "TORCH": ("torch",),
    "TVM": ("apache-tvm",),
}
ON_CARDS = ("CUDNN", "TENSORRT")  # devices that need an NVIDIA card


def is_missing(device: str) -> bool:
    """Return whether no package of a device is installed."""
    for package in PACKAGES[device]:
        with suppress(PackageNotFoundError):
            version(package)
            return False
    return True


def no_package(device: str) -> str:
    """Return that the package of a device is not installed; "" if it is."""
    return f"{' or '.join(PACKAGES[device])} is not installed" if is_missing(device) else ""


@cache
def no_card() -> str:
    """Return why this machine runs nothing on an NVIDIA card; "" if it does."""
    try:
        Card("the test")
    except sg.DeviceError as error:
        return str(error)
    return ""


def unusable(device: str) -> str:
    """Return why a device runs nothing here; "" if it does."""
    return no_package(device) or (no_card() if device in ON_CARDS else "")


def installed(*devices: str) -> list[Any]:
    """Return devices as parameters; those that run nothing here are skipped with the reason.

    The order is that of the names: test processes that run in parallel must agree on it.
    """
    return [
        pytest.param(name, marks=pytest.mark.skipif(bool(unusable(name)), reason=unusable(name)))
        for name in sorted(devices)
    ]
