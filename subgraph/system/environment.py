"""Environment variables: how they are read and checked, and the folders that they name.

`check_variables` checks all of them when a model is queried, compiled or imported; an invalid
value would otherwise be found in a run, where it counts as a failure of the device.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import attrs

from subgraph.errors import ConfigError

_T = TypeVar("_T")
_variables: list[Variable[Any]] = []


@attrs.frozen(eq=False)
class Variable(Generic[_T]):
    """An environment variable.

    Attributes:
        name: Its name.
        default: Its value where it is not set, or blank unless ``reads_blank``.
        parse: Returns the value of a text without spaces around it; raises ValueError.
        takes: What is valid, for the message: "a number of megabytes".
        reads_blank: Whether a blank text has a meaning of its own.
    """

    name: str
    default: _T
    parse: Callable[[str], _T]
    takes: str
    reads_blank: bool = False

    def __attrs_post_init__(self) -> None:
        _variables.append(self)

    def value(self) -> _T:
        """Return the present value.

        Raises:
            ConfigError: the text is not valid.
        """
        text = os.environ.get(self.name)
        if text is None or not (self.reads_blank or text.strip()):
            return self.default
        found: _T = _parsed(self, text.strip())
        return found


@cache
def _parsed(variable: Variable[_T], text: str) -> _T:
    try:
        return variable.parse(text)
    except ValueError as error:
        raise ConfigError(
            f"environment variable {variable.name}={text!r} is not valid; it takes {variable.takes}"
        ) from error


def check_variables() -> None:
    """Check the present values of all variables.

    Raises:
        ConfigError: a text is not valid.
    """
    for variable in _variables:
        variable.value()


def _number_up_to(most: float) -> Callable[[str], float]:
    def parse(text: str) -> float:
        number = float(text)
        if not 0 <= number <= most:  # not for a NaN either
            raise ValueError(text)
        return number

    return parse


def _folder(text: str) -> Path:
    return Path(text).expanduser()


CACHE_DIR: Variable[Path | None] = Variable("SUBGRAPH_CACHE_DIR", None, _folder, "a folder")
CACHE_MEGABYTES = Variable(
    "SUBGRAPH_CACHE_MB",
    512.0,  # of 10**6 bytes (estimate)
    _number_up_to(1e12),
    "a number of megabytes, 0 for no limit",
)
SPIN_MICROSECONDS = Variable(
    "SUBGRAPH_SPIN_US", 50.0, _number_up_to(1e6), "a number of microseconds from 0 to 1000000"
)
BACKENDS = Variable[list[str]](
    "SUBGRAPH_BACKEND",
    [],
    lambda text: [name.strip() for name in text.split(",") if name.strip()],
    "names of properties or selectors, separated by commas",
)
_GUARD_MODES = {"0": "", "1": "end", "end": "end", "begin": "begin"}


def _guard_mode(text: str) -> str:
    if text.lower() not in _GUARD_MODES:
        raise ValueError(text)
    return _GUARD_MODES[text.lower()]


GUARD = Variable("SUBGRAPH_GUARD", "", _guard_mode, "end (or 1), begin, or 0 for none")
ISA = Variable("SUBGRAPH_ISA", "", str.lower, "the name of an instruction set")


PACKAGE_PREBUILT: Final = Path(__file__).parents[1] / "prebuilt"
PREBUILT = Variable[Path | None](
    "SUBGRAPH_PREBUILT",
    PACKAGE_PREBUILT,
    lambda text: _folder(text) if text else None,
    "a folder, or nothing for no prebuilt kernels",
    reads_blank=True,
)


def base_folder() -> Path:
    """Return the folder of cached files: ``SUBGRAPH_CACHE_DIR``, else `user_folder`."""
    return CACHE_DIR.value() or user_folder()


def cache_folder() -> Path:
    """Return the folder of compiled kernels."""
    return base_folder() / "kernels"


@cache
def user_folder() -> Path:
    """Return Subgraph's folder in the user's cache folder."""
    from platformdirs import user_cache_path

    return user_cache_path("subgraph", appauthor=False)
