"""Kernels: one compiled function, named by its factory and the factory's arguments.

A *factory* is a function in a kernel module. Called with a *variant* (constants: dtype, lanes,
activation) it returns the Python function that is compiled::

    def direct(*, mr: int, nv: int, lanes: int, act: str):   # in ops/conv/kernels.py
        ...
        def kernel(args, begin, end, worker): ...
        return kernel

    Kernel("subgraph.ops.conv.kernels", "direct", mr=14, nv=2, lanes=16, act="Relu").address

A factory of a function that numba cannot express returns LLVM assembly that defines ``@entry``.

The compiled function has the C signature ``void(int64, int64, int64, int64)``: the address of the
kernel's argument block, the first and one past the last work unit to do, and the index of the
executing thread. See docs/kernels.md.
"""

from __future__ import annotations

from typing import Final

from subgraph.graph.symbolic import pinned
from subgraph.system.hooks import Hook

Option = int | float | str | bool | tuple[int | str, ...]
_NOT_SYMBOLIC = frozenset({bool, float, int, str})
_address: Hook[[Kernel], int] = Hook("address of a kernel")


class Kernel:
    """An immutable, hashable name of one compiled function; nothing is imported or compiled yet.

    Args:
        module: Full dotted name of the kernel module.
        factory: Name of the factory function in it.
        **variant: Keyword arguments of the factory. A symbolic integer is fixed to its present
            value, so that the plan which uses it serves that value alone.

    Attributes:
        module: Full dotted name of the kernel module.
        factory: Name of the factory.
        variant: Keyword arguments of the factory as (name, value) pairs, sorted by name.
    """

    __slots__ = ("_description", "_hash", "factory", "module", "variant")

    def __init__(self, module: str, factory: str, /, **variant: Option) -> None:
        self.module: Final = module
        self.factory: Final = factory
        options = list(variant.items())
        if not _NOT_SYMBOLIC.issuperset(map(type, variant.values())):
            options = [(name, _plain(option)) for name, option in options]
        self.variant: Final = tuple(sorted(options))
        self._description = ""
        # 1 == True == 1.0, but their kernels may differ: `__eq__` compares the descriptions, too.
        self._hash: Final = hash((self.module, factory, self.variant))

    @property
    def address(self) -> int:
        """Machine address of the function, which the first use compiles or loads from the cache.

        Raises:
            KernelError: The kernel cannot be compiled or loaded.
        """
        return _address(self)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Kernel):
            return NotImplemented
        return self is other or (
            self._hash == other._hash and self.description == other.description
        )

    @property
    def description(self) -> str:
        """``module.factory(variant)`` as text, the same in every process; part of the cache key."""
        if not self._description:
            options = ", ".join(f"{name}={value!r}" for name, value in self.variant)
            self._description = f"{self.module}.{self.factory}({options})"
        return self._description

    def __repr__(self) -> str:
        return f"Kernel({self.description})"


def _plain(option: Option) -> Option:
    """Return an option with symbolic integers fixed to their present values."""
    if isinstance(option, tuple):
        return tuple(map(pinned, option))
    return pinned(option)
