"""LLVM's target: this machine's architecture or, for code made ahead of time, another one.

The architecture in force is that of `subgraph.system.host.architecture`.
"""

from __future__ import annotations

from typing import Any

from subgraph.errors import DeviceError
from subgraph.system import host


def triple() -> str:
    """Return LLVM's target triple of the architecture in force; empty for this machine's own."""
    architecture = host.architecture()
    return "" if architecture == host.native_architecture() else f"{architecture}-unknown-linux-gnu"


def target() -> Any:
    """Return LLVM's target for the architecture in force.

    Raises:
        DeviceError: This build of LLVM lacks a backend for it.
    """
    from llvmlite import binding

    name = triple()
    if not name:
        binding.initialize_native_target()
        binding.initialize_native_asmprinter()
        return binding.Target.from_default_triple()
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    try:
        return binding.Target.from_triple(name)
    except RuntimeError as error:
        raise DeviceError(f"this LLVM does not compile for {name}: {error}") from error


def machine() -> Any:
    """Return a target machine for the architecture's baseline instruction set."""
    return target().create_target_machine(opt=3, reloc="pic", codemodel="default")
