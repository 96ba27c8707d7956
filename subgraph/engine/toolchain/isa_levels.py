"""Levels of instruction sets, for which kernels are compiled ahead of time.

A level is a set of features that many processors have: LLVM's ``x86-64-v3`` and ``x86-64-v4``, the
latter also with VNNI and with the features of the first processors with bfloat16, and NEON. A
machine runs the code of every level whose features it has.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import NamedTuple

from subgraph.system.host import Isa

_V3 = (
    *("64bit", "avx", "avx2", "bmi", "bmi2", "cmov", "crc32", "cx16", "cx8", "f16c", "fma", "fxsr"),
    *("lzcnt", "mmx", "movbe", "popcnt", "sahf", "sse", "sse2", "sse3", "sse4.1", "sse4.2"),
    *("ssse3", "xsave"),
)
_V4 = (*_V3, "avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl")
_VNNI = (*_V4, "avx512vnni")
_BF16 = (
    *(*_VNNI, "avx512bf16", "avx512bitalg", "avx512ifma", "avx512vbmi", "avx512vbmi2"),
    *("avx512vpopcntdq", "gfni", "vaes", "vpclmulqdq"),
)
# The processor for which LLVM schedules instructions. Its x86-64-v4 means the first processors with
# AVX-512. Code scheduled for Zen 4 took as long as code for the machine itself, and that for
# x86-64-v4 took 2 to 5 % longer (ResNet-50 on Zen 5, in pairs).
_V4_SCHEDULE = "znver4"
# Features of that processor beyond those of a level, which are switched off.
_ZNVER4 = (
    *("adx", "aes", "clflushopt", "clwb", "clzero", "fsgsbase", "invpcid", "mwaitx", "pclmul"),
    *("pku", "prfchw", "rdpid", "rdpru", "rdrnd", "rdseed", "sha", "shstk", "sse4a", "wbnoinvd"),
    *("xsavec", "xsaveopt", "xsaves", *_BF16),
)


class IsaLevel(NamedTuple):
    """A level of an instruction set.

    Attributes:
        name: The level's name, which is also that of the file with its kernels.
        architecture: ``"x86_64"`` or ``"aarch64"``.
        isa: The instruction set.
        needs: LLVM's features that a machine must have.
        planned_as: LLVM's names of processors, one for each way in which kernels are chosen.
    """

    name: str
    architecture: str
    isa: Isa
    needs: frozenset[str]
    planned_as: tuple[str, ...] = ("generic",)

    def runs_on(self, isa: Isa, architecture: str) -> bool:
        """Return whether code of this level can be used instead of code for an instruction set."""
        if isa.like or architecture != self.architecture or sys.byteorder != "little":
            return False
        own = (self.isa.name, self.isa.vector_bytes, self.isa.registers, self.isa.fma)
        if own != (isa.name, isa.vector_bytes, isa.registers, isa.fma):
            return False
        return self.needs <= {f[1:] for f in isa.features.split(",") if f.startswith("+")}


def _text(on: Iterable[str], off: Iterable[str] = ()) -> str:
    """Return LLVM's feature string."""
    signs = {**dict.fromkeys(off, "-"), **dict.fromkeys(on, "+")}
    return ",".join(f"{sign}{feature}" for feature, sign in sorted(signs.items()))


def _avx512(name: str, features: tuple[str, ...]) -> IsaLevel:
    isa = Isa("avx512", 64, 32, True, _V4_SCHEDULE, _text(features, _ZNVER4))
    return IsaLevel(name, "x86_64", isa, frozenset(features), ("generic", "znver4"))


# The widest last: a later level is preferred if a machine has several.
LEVELS = (
    IsaLevel(
        "x86-64-v3",
        "x86_64",
        Isa("avx2", 32, 16, True, "x86-64-v3", _text(_V3)),
        frozenset(_V3),
    ),
    _avx512("x86-64-v4", _V4),
    _avx512("x86-64-v4-vnni", _VNNI),
    _avx512("x86-64-v4-bf16", _BF16),
    IsaLevel(
        "neon",
        "aarch64",
        Isa("neon", 16, 32, True, "generic", "+fp-armv8,+neon"),
        frozenset(),  # every processor of this architecture that runs Linux has it
    ),
)
