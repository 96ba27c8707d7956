"""Test kit for users: checks of partitions, properties and devices, strategies for graphs.

`check_partition` checks the invariants of a partition, `check_property` a property and
`check_device` a device on random graphs. The strategies (`graphs`, `topologies`, `selectors`,
`misbehaving_selectors`) are for hypothesis, which all but `check_partition` need
(``pip install subgraph-ml[testing]``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from subgraph.testing.invariants import check_partition

if TYPE_CHECKING:
    from subgraph.testing.checks import check_property
    from subgraph.testing.device_checks import DEVICE_CHECKS, check_device
    from subgraph.testing.device_under_test import DeviceReport
    from subgraph.testing.random_graphs import (
        feeds,
        graphs,
        misbehaving_selectors,
        selectors,
        topologies,
    )

__all__ = [
    "DEVICE_CHECKS",
    "DeviceReport",
    "check_device",
    "check_partition",
    "check_property",
    "feeds",
    "graphs",
    "misbehaving_selectors",
    "selectors",
    "topologies",
]

_MODULES = {
    "DEVICE_CHECKS": "device_checks",
    "DeviceReport": "device_under_test",
    "check_device": "device_checks",
    "check_property": "checks",
    "feeds": "random_graphs",
    "graphs": "random_graphs",
    "topologies": "random_graphs",
    "misbehaving_selectors": "random_graphs",
    "selectors": "random_graphs",
}


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module 'subgraph.testing' has no attribute {name!r}")
    from importlib import import_module

    try:
        return getattr(import_module(f"subgraph.testing.{module}"), name)
    except ModuleNotFoundError as error:
        if error.name != "hypothesis":
            raise
        raise ModuleNotFoundError(
            f'sg.testing.{name} needs hypothesis: pip install "subgraph-ml[testing]"',
            name=error.name,
        ) from None


def __dir__() -> list[str]:
    return __all__
