"""LLVM's name and features of the processor, cached in the folder of compiled kernels.

Without the cache, a process whose kernels are all cached would load LLVM only for this, which takes
a third of its start.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from subgraph.system.environment import cache_folder
from subgraph.system.trusted_files import read_trusted, write_trusted

# Keys of /proc/cpuinfo whose values differ between cores or change over time.
_VOLATILE_KEYS = (
    "processor",
    "cpu mhz",
    "physical id",
    "siblings",
    "core id",
    "cpu cores",
    "apicid",
    "initial apicid",
    "bogomips",
)
_FIRST_CORE = 1 << 14  # bytes of /proc/cpuinfo to read; an EPYC takes 1,200 a core (measured)


class Processor(NamedTuple):
    """A processor.

    Attributes:
        name: LLVM's name.
        features: Whether the processor has each of LLVM's features.
    """

    name: str
    features: dict[str, bool]


def processor(description: Path = Path("/proc/cpuinfo")) -> Processor:
    """Return this machine's processor.

    Args:
        description: The system's description of it; if there is no such file, nothing is cached.
    """
    digest = _digest(description)
    if digest is None:
        return _from_llvm()
    path = cache_folder() / f"processor-{digest[:32]}.json"
    found = _read(path)
    if found is None:
        found = _from_llvm()
        _write(path, found)
    return found


def _digest(description: Path) -> str | None:
    """Return a hash of everything that LLVM's result depends on; None without description."""
    import llvmlite

    try:
        with open(description, "rb") as file:
            first = file.read(_FIRST_CORE).decode(errors="replace").partition("\n\n")[0]
    except OSError:
        return None
    lines = [line for line in first.splitlines() if _key(line) not in _VOLATILE_KEYS]
    text = "\n".join([str(llvmlite.__version__), *lines])
    return hashlib.sha256(text.encode()).hexdigest()


def _key(line: str) -> str:
    return line.partition(":")[0].strip().lower()


def _from_llvm() -> Processor:
    from llvmlite import binding

    try:
        features = dict(binding.get_host_cpu_features())
    except RuntimeError:  # LLVM does not know the features on every platform
        features = {}
    return Processor(str(binding.get_host_cpu_name()), features)


def _read(path: Path) -> Processor | None:
    try:
        checksum, _, text = read_trusted(path).decode().partition("\n")
        if hashlib.sha256(text.encode()).hexdigest() != checksum:
            return None
        name, features = json.loads(text)
    except (OSError, ValueError):
        return None
    return Processor(name, features)


def _write(path: Path, found: Processor) -> None:
    text = json.dumps(found)
    with suppress(OSError):  # a folder that is only read
        write_trusted(path, f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}".encode())
