"""Instruction set levels for which the kernels of the package are compiled ahead of time.

A level is a set of features that many processors share: the psABI's ``x86-64-v3`` and
``x86-64-v4``, the latter also with AVX512-VNNI and with all that Zen 4 and Sapphire Rapids share,
and AArch64 with NEON. A machine can run the code of every level whose features it has
(`IsaLevel.runs_on`).
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
# The processor whose scheduling model LLVM uses for the AVX-512 levels. LLVM's own x86-64-v4 uses
# that of the first AVX-512 processors, whose code took 2 to 5 % longer; code scheduled for Zen 4
# took as long as code for the machine itself (measured: ResNet-50 on Zen 5, in pairs).
_V4_SCHEDULE = "znver4"
# Features that LLVM implies by that processor's name; those that a level lacks are switched off.
_ZNVER4 = (
    *("adx", "aes", "clflushopt", "clwb", "clzero", "fsgsbase", "invpcid", "mwaitx", "pclmul"),
    *("pku", "prfchw", "rdpid", "rdpru", "rdrnd", "rdseed", "sha", "shstk", "sse4a", "wbnoinvd"),
    *("xsavec", "xsaveopt", "xsaves", *_BF16),
)


class IsaLevel(NamedTuple):
    """An instruction set for which kernels are compiled ahead of time.

    Attributes:
        name: Name of the level, and stem of the file with its kernels.
        architecture: ``"x86_64"`` or ``"aarch64"``.
        isa: The instruction set that its kernels are compiled for.
        needs: Names of LLVM's features that a machine must have to run the code.
        planned_as: LLVM's names of processors. Lowerings choose among kernels by the processor's
            name, too (`subgraph.system.host.splits_512_bit_vectors`): models are planned once as on
            each of these, so that the file has the kernels of all choices.
    """

    name: str
    architecture: str
    isa: Isa
    needs: frozenset[str]
    planned_as: tuple[str, ...] = ("generic",)

    def runs_on(self, isa: Isa, architecture: str) -> bool:
        """Return whether a machine can use this level's code as its own.

        Also the vector width and the number of registers must agree, as kernels' variants, and so
        their names in the file, depend on them.

        Args:
            isa: The instruction set in force on the machine.
            architecture: The machine's architecture, as `subgraph.system.host.architecture` says.
        """
        if isa.like or architecture != self.architecture or sys.byteorder != "little":
            return False
        own = (self.isa.name, self.isa.vector_bytes, self.isa.registers, self.isa.fma)
        if own != (isa.name, isa.vector_bytes, isa.registers, isa.fma):
            return False
        return self.needs <= {f[1:] for f in isa.features.split(",") if f.startswith("+")}


def _text(on: Iterable[str], off: Iterable[str] = ()) -> str:
    """Return LLVM's feature string, such as ``"+avx2,-avx512f"``; ``on`` wins over ``off``."""
    signs = {**dict.fromkeys(off, "-"), **dict.fromkeys(on, "+")}
    return ",".join(f"{sign}{feature}" for feature, sign in sorted(signs.items()))


def _avx512(name: str, features: tuple[str, ...]) -> IsaLevel:
    isa = Isa("avx512", 64, 32, True, _V4_SCHEDULE, _text(features, _ZNVER4))
    return IsaLevel(name, "x86_64", isa, frozenset(features), ("generic", "znver4"))


# In order of preference, the best last: `prebuilt` searches them from the end.
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
