"""The permission to use AMX's tile registers, which Linux gives to a process that asks for it.

Source: Linux's Documentation/arch/x86/xstate.rst, "Using dynamically enabled XSTATE features in
user space applications". Without the permission the first tile instruction ends the process by
SIGILL. Threads and forked children inherit it, a program that is executed does not.
"""

from __future__ import annotations

import ctypes
import sys

# Numbers of Linux's x86-64 interface: the system call arch_prctl, its request of a permission, and
# the number of the component of a thread's state that holds the tiles' data.
_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 158, 0x1023, 18


def permit_tile_registers() -> bool:
    """Ask for the permission to use tile registers; return whether the process has it.

    It is refused by systems before Linux 5.16, by sandboxes that filter system calls, and if a
    thread has an alternate signal stack that is too small for the state of the registers.
    """
    if not sys.platform.startswith("linux"):
        return False
    call = ctypes.CDLL(None, use_errno=True).syscall
    return bool(call(_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0)
