"""The machine that kernels and planner target: vector width, features, caches, cores.

``SUBGRAPH_ISA`` selects a lower instruction set of the host, a row of `_LEVELS` such as ``avx2``,
for vector widths and generated code. With a row of `_LIKE`, such as ``like-neon``, kernels emulate
another machine: they have its widths, tiles and code paths, and slow code for this one. This is for
tests.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import NamedTuple

from subgraph.dtypes import item_bytes
from subgraph.errors import ConfigError
from subgraph.system.control_groups import group_files
from subgraph.system.environment import ISA
from subgraph.system.processor import processor
from subgraph.system.tile_registers import permit_tile_registers


class _Level(NamedTuple):
    """An instruction set that code may be limited to.

    Attributes:
        architecture: The architecture of its machines; "" for all.
        vector_bytes: Bytes of a vector register; 0 without vectors.
        registers: Number of vector registers.
        needs: LLVM's features that a machine must have.
        disabled: LLVM's features (``avx512*``: all that begin so) that its code does not use on a
            machine of a higher level.
    """

    architecture: str
    vector_bytes: int
    registers: int
    needs: tuple[str, ...] = ()
    disabled: tuple[str, ...] = ()


class _Emulation(NamedTuple):
    """An instruction set ``like-...`` that kernels can emulate on another machine.

    Attributes:
        level: The level whose vectors and registers it has.
        features: LLVM's features that the emulated machine has, as far as kernels ask for them.
        needs: Level that this machine must support.
    """

    level: str
    features: frozenset[str]
    needs: str


_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "fma")
_ABOVE_AVX2 = ("avx512*", "avx10*", "amx*", "avxvnni*", "avxifma*", "avxneconvert*", "evex512*")
_ABOVE_AVX = (*_ABOVE_AVX2, "avx2", "fma", "fma4", "xop", "f16c", "vaes", "vpclmulqdq")
_ABOVE_SSE = (*_ABOVE_AVX, "avx")
# The instruction sets by name, of each architecture the widest first. "scalar" has vectors of one
# element.
_LEVELS = {
    "avx512": _Level("x86_64", 64, 32, _AVX512),
    "avx2": _Level("x86_64", 32, 16, ("avx2", "fma"), _ABOVE_AVX2),
    "avx": _Level("x86_64", 32, 16, ("avx",), _ABOVE_AVX),
    "sse": _Level("x86_64", 16, 16, ("sse2",), _ABOVE_SSE),
    "neon": _Level("aarch64", 16, 32),
    "scalar": _Level("", 0, 16, (), _ABOVE_SSE),
}
# Architectures of which every processor multiplies and adds in one instruction; on others it is
# the feature "fma".
_ALWAYS_FMA = frozenset({"aarch64"})
# Kernels of AVX-512 use instructions of AVX2 for shorter vectors.
_LIKE = {
    "like-avx512vnni": _Emulation("avx512", frozenset({*_AVX512, "avx2", "avx512vnni"}), "avx2"),
    "like-avx512": _Emulation("avx512", frozenset({*_AVX512, "avx2"}), "avx2"),
    "like-amx": _Emulation("avx512", frozenset({*_AVX512, "avx2", "amx-bf16", "amx-int8"}), "avx2"),
    "like-avx512bf16": _Emulation(
        "avx512", frozenset({*_AVX512, "avx2", "avx512vnni", "avx512bf16"}), "avx2"
    ),
    "like-avxvnni": _Emulation("avx2", frozenset({"fma", "avx2", "avxvnni"}), "avx2"),
    "like-neon": _Emulation("neon", frozenset(), "scalar"),
}
# Processors (LLVM's names) that execute a 512-bit multiplication on two 256-bit units (hardware
# figure).
_UNITS_OF_256_BITS = ("znver4", "cannonlake", "icelake-client", "tigerlake", "rocketlake")


class Isa(NamedTuple):
    """The instruction set that kernels are compiled for.

    Attributes:
        name: Name of its row in `_LEVELS`.
        vector_bytes: Bytes of one vector register; 0 without vectors.
        registers: Number of vector registers.
        fma: Whether a fused multiply-add is one instruction.
        cpu: LLVM's name of the processor.
        features: LLVM's feature string, sorted.
        like: The value ``like-...`` of SUBGRAPH_ISA if kernels emulate another machine; else "".
    """

    name: str
    vector_bytes: int
    registers: int
    fma: bool
    cpu: str
    features: str
    like: str = ""

    def has(self, feature: str) -> bool:
        """Return whether an LLVM feature (``"avx512vnni"``, ``"f16c"``) is enabled."""
        if self.like:
            answer = feature in _LIKE[self.like].features
        else:
            answer = f"+{feature}" in self.features.split(",")
        for answers in _recorders:
            answers[feature] = answer
        return answer


_recorders: list[dict[str, bool]] = []
_target: tuple[Isa, str] | None = None  # the instruction set and architecture of `target`


@contextmanager
def recorded_features() -> Generator[dict[str, bool]]:
    """Record the results of `Isa.has`: the features on which code made in the block depends.

    Yields:
        The results by feature; filled while the ``with`` block runs.
    """
    answers: dict[str, bool] = {}
    _recorders.append(answers)
    try:
        yield answers
    finally:
        _recorders.pop()


def set_target(isa: Isa, architecture: str) -> None:
    """Plan and compile for another machine than this one, for code that is made ahead of time.

    Args:
        isa: Future result of `isa`.
        architecture: Future result of `architecture`.
    """
    global _target
    _target = (isa, architecture)


@contextmanager
def target(isa: Isa, architecture: str) -> Generator[None]:
    """Set the target as `set_target` does until the ``with`` block ends."""
    global _target
    before = _target
    set_target(isa, architecture)
    try:
        yield
    finally:
        _target = before


class Caches(NamedTuple):
    """Data cache sizes in bytes.

    Attributes:
        l1: Level 1 of one core.
        l2: Level 2 of one core.
        l3: Level 3, shared by cores.
    """

    l1: int
    l2: int
    l3: int


def architecture() -> str:
    """Return the target's architecture: ``"x86_64"``, ``"aarch64"`` or Python's machine name."""
    return native_architecture() if _target is None else _target[1]


@cache
def native_architecture() -> str:
    """Return the architecture of this machine, which may not be the target."""
    if hasattr(os, "uname"):
        machine = os.uname().machine.lower()
    else:
        import platform  # slow to import

        machine = platform.machine().lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(machine, machine)


@cache
def _host_cpu() -> tuple[str, dict[str, bool]]:
    name, features = processor()
    # A process must ask the system before it uses these registers, in every process anew.
    if features.get("amx-tile") and not permit_tile_registers():
        features = {f: on and not f.startswith("amx") for f, on in features.items()}
    return name, features


def _supported(features: dict[str, bool]) -> list[str]:
    """Return the levels that a machine of the target's architecture supports, widest first."""
    architectures = (architecture(), "")
    return [
        name
        for name, level in _LEVELS.items()
        if level.architecture in architectures and all(features.get(f) for f in level.needs)
    ]


def _narrow(name: str, features: dict[str, bool]) -> dict[str, bool]:
    """Return a machine's features without those that a level disables on a higher machine."""
    if name == _supported(features)[0]:
        return features
    disabled = _LEVELS[name].disabled
    return {
        feature: on and not any(fnmatchcase(feature, pattern) for pattern in disabled)
        for feature, on in features.items()
    }


def _emulated(supported: list[str]) -> list[str]:
    """Return the instruction sets ``like-...`` that this machine can emulate."""
    return [name for name, emulation in _LIKE.items() if emulation.needs in supported]


def available_isas() -> tuple[str, ...]:
    """Return the names of the instruction sets that this machine can run, widest first."""
    return tuple(_supported(_host_cpu()[1]))


@cache
def isa_named(name: str) -> Isa:
    """Return the instruction set of a name, one that SUBGRAPH_ISA may have.

    Raises:
        ConfigError: the machine cannot run it, or the name is unknown.
    """
    cpu, features = _host_cpu()
    supported = _supported(features)
    if name in _emulated(supported):
        emulation, exact = _LIKE[name], isa_named(supported[0])
        level = _LEVELS[emulation.level]
        has_fma = level.architecture in _ALWAYS_FMA or "fma" in emulation.features
        fma, cpu, text = exact.fma and has_fma, exact.cpu, exact.features
        return Isa(emulation.level, level.vector_bytes, level.registers, fma, cpu, text, name)
    if name not in supported:
        raise ConfigError(
            f"SUBGRAPH_ISA={name!r} cannot run on this machine ({cpu}); "
            f"use one of {', '.join(supported + _emulated(supported))}"
        )
    narrowed = _narrow(name, features)
    text = ",".join(("+" if on else "-") + f for f, on in sorted(narrowed.items()))
    fma = architecture() in _ALWAYS_FMA or bool(narrowed.get("fma"))
    level = _LEVELS[name]
    return Isa(name, level.vector_bytes, level.registers, fma, cpu, text)


def isa() -> Isa:
    """Return the target's instruction set: `set_target`, ``SUBGRAPH_ISA`` or the host's widest."""
    if _target is not None:
        return _target[0]
    return isa_named(ISA.value() or _widest())


# Properties of the target's instruction set. A new instruction set is a row of `_LEVELS` (and of
# `_LIKE`, to emulate it), and an answer here where it has instructions that kernels ask for. All
# other code asks these functions, never for names; their answers for a row that they do not name
# are those of a machine without such instructions.


def is_emulated() -> bool:
    """Return whether kernels emulate another instruction set (``like-...``)."""
    return bool(isa().like)


def has_32_registers() -> bool:
    """Return whether there are 32 vector registers, not 16."""
    return isa().registers >= 32


def has_512_bit_vectors() -> bool:
    """Return whether a vector register has 512 bits."""
    return isa().vector_bytes == 64


def has_masked_stores() -> bool:
    """Return whether masked stores of vectors of every length are as fast as plain ones."""
    return isa().has("avx512vl")


def has_vscalef() -> bool:
    """Return whether one instruction computes x * 2**n for vectors (vscalefps)."""
    return isa().has("avx512vl") and not is_emulated()


def has_saturating_packs() -> bool:
    """Return whether 256-bit vectors are narrowed to bytes by saturating packs (vpackssdw)."""
    return isa().name in ("avx2", "avx512")


def prefers_pmaddubsw() -> bool:
    """Return whether int8 GEMMs use vpmaddubsw, which adds two products of bytes in int16."""
    return isa().name == "avx2" and not is_emulated() and not has_vnni()


def pmaddwd_lanes() -> int:
    """Return the largest number of int32 lanes of pmaddwd (sums of two int16 products); 0: none."""
    if architecture() != "x86_64" or is_emulated():
        return 0
    return {"avx512": 16, "avx2": 8}.get(isa().name, 4)


def permutes(dtype: str, lanes: int) -> bool:
    """Return whether one instruction permutes the elements of such a vector arbitrarily."""
    sizes = {"avx2": (8,), "avx512": (8, 16)}.get(isa().name, ())
    return dtype == "float32" and not isa().like and lanes in sizes


def has_bfloat16_tiles() -> bool:
    """Return whether one instruction multiplies matrix tiles of bfloat16 (AMX's tdpbf16ps)."""
    return isa().has("amx-bf16") and has_512_bit_vectors()


def multiplies_bfloat16() -> bool:
    """Return whether products of bfloat16 take less time than those of float32.

    They are matrix tiles, or else dot products of two elements (AVX512_BF16's vdpbf16ps).
    """
    return has_bfloat16_tiles() or (isa().has("avx512bf16") and has_512_bit_vectors())


def widens_float16() -> bool:
    """Return whether one instruction converts vectors of float16 to float32."""
    return isa().name in ("avx512", "avx2", "neon")


def rounds_to_bfloat16() -> bool:
    """Return whether one instruction rounds vectors to bfloat16 (vcvtneps2bf16)."""
    return isa().has("avx512bf16") and not is_emulated()


def has_int8_tiles() -> bool:
    """Return whether one instruction multiplies matrix tiles of bytes (AMX's tdpbusd)."""
    return isa().has("amx-int8") and has_512_bit_vectors()


def has_vnni() -> bool:
    """Return whether one instruction multiplies and adds bytes (vpdpbusd)."""
    has = isa().has
    # In this order a machine with both records the same features as one with AVX-512 VNNI alone.
    return (has("avx512vnni") and has("avx512vl")) or has("avxvnni")


@cache
def _widest() -> str:
    return _supported(_host_cpu()[1])[0]


def lanes(dtype: str) -> int:
    """Return the number of elements of a dtype in a vector register (1 without vectors)."""
    return max(1, isa().vector_bytes // item_bytes(dtype))


def splits_512_bit_vectors() -> bool:
    """Return whether a multiplication of a 256-bit vector takes half the time of a 512-bit one.

    This holds for processors that split 512-bit operations, and for emulated AVX-512, whose vectors
    are pairs of 256 bits. No processor with matrix tiles does so.
    """
    here = isa()
    if here.like:
        return here.name == "avx512" and not here.has("amx-bf16")
    return here.name == "avx512" and here.cpu in _UNITS_OF_256_BITS


def _sysfs_size(text: str) -> int:
    units = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
    return int(text[:-1]) * units[text[-1]] if text[-1] in units else int(text)


@cache
def caches() -> Caches:
    """Return the data cache sizes: from Linux's sysfs, else usual sizes (estimates)."""
    found = {1: 32 << 10, 2: 1 << 20, 3: 8 << 20}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            if (index / "type").read_text().strip() == "Instruction":
                continue
            level = int((index / "level").read_text())
            found[level] = _sysfs_size((index / "size").read_text().strip())
        except (OSError, ValueError, KeyError, IndexError):
            continue
    return Caches(found[1], found[2], found[3])


def _quota(limit: str, period: str) -> float:
    """Return a CPU quota in cores; infinity if there is no limit (``"max"``, ``"-1"``)."""
    return int(limit) / int(period) if limit.isdigit() else float("inf")


def cgroup_cores(root: Path = Path("/")) -> float:
    """Return the CPU quota of this process's control groups in cores, infinity without one.

    Args:
        root: Folder in which ``proc`` and ``sys`` are mounted.
    """
    quotas = [float("inf")]
    for said in group_files("cpu.max", root):
        with suppress(ValueError):
            limit, period = said.split()[:2]
            quotas.append(_quota(limit, period))
    folder = root / "sys/fs/cgroup/cpu"
    try:
        words = [(folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period")]
        quotas.append(_quota(words[0].strip(), words[1].strip()))
    except (OSError, ValueError):
        pass
    return min(quotas)


@cache
def _allowed_cores() -> float:
    """Return the CPU quota, read once, because the files are slow to read."""
    return cgroup_cores()


def core_count() -> int:
    """Return the number of cores of this process by affinity and control groups, at least 1."""
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    return max(1, min(count, int(min(_allowed_cores(), 1 << 16) + 0.5)))
