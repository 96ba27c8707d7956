"""What LLVM compiles for: this machine's architecture, or another one's ahead of time."""

from __future__ import annotations

from typing import Any

from subgraph.errors import DeviceError
from subgraph.system import host


def triple() -> str:
    """Return LLVM's name of the system that is compiled for; empty if this process runs on it."""
    architecture = host.architecture()
    return "" if architecture == host.native_architecture() else f"{architecture}-unknown-linux-gnu"


def target() -> Any:
    """Return LLVM's target for the architecture that is compiled for.

    Raises:
        DeviceError: This LLVM cannot compile for it.
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
    """Return an LLVM target machine without special instructions."""
    return target().create_target_machine(opt=3, reloc="pic", codemodel="default")
