"""Devices over other libraries whose packages are installed, as parameters of tests."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pytest

PACKAGES = {
    "ONEDNN": "onednn-cpu-gomp",
    "ONNXRUNTIME": "onnxruntime",
    "OPENVINO": "openvino",
    "TORCH": "torch",
    "TVM": "apache-tvm",
}


def is_missing(device: str) -> bool:
    """Return whether the package of a device is not installed."""
    try:
        version(PACKAGES[device])
    except PackageNotFoundError:
        return True
    return False


def installed(*devices: str) -> list[Any]:
    """Return devices as parameters, those without their packages skipped with that reason."""
    return [
        pytest.param(
            name,
            marks=pytest.mark.skipif(is_missing(name), reason=f"{PACKAGES[name]} is not installed"),
        )
        for name in devices
    ]
