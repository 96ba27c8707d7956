"""Kernels: the specification of one compiled function by a kernel factory and its variant.

A factory is a plain function in a kernel module. Called with the variant it returns the kernel::

    def direct(*, mr: int, nv: int, lanes: int, act: str):   # in ops/conv/kernels.py
        ...
        def kernel(args, begin, end, worker): ...
        return kernel

    Kernel("subgraph.ops.conv.kernels", "direct", mr=14, nv=2, lanes=16, act="Relu").address

The kernel is compiled as ``void(int64, int64, int64, int64)``: the address of a block of argument
words, a range of work units, and the index of the executing thread.
"""

from __future__ import annotations

from typing import Final

from subgraph.graph.symbolic import pinned
from subgraph.system.hooks import Hook

Option = int | float | str | bool | tuple[int | str, ...]
_NOT_SYMBOLIC = frozenset({bool, float, int, str})
_address: Hook[[Kernel], int] = Hook("address of a kernel")


class Kernel:
    """A frozen, hashable specification of one compiled function.

    Args:
        module: Full name of the module with the factory.
        factory: Name of the factory function in it.
        **variant: The arguments of the factory; constants only.

    Attributes:
        module: Full dotted name of the module.
        factory: Name of the factory.
        variant: Sorted (name, value) pairs.
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
        # 1 == True == 1.0, but their kernels may differ; `__eq__` also compares descriptions.
        self._hash: Final = hash((self.module, factory, self.variant))

    @property
    def address(self) -> int:
        """Machine address of the function; compiled or loaded from the cache at first use.

        Raises:
            KernelError: It cannot be compiled or loaded.
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
        """The kernel as text, the same in every process; part of its cache key."""
        if not self._description:
            options = ", ".join(f"{name}={value!r}" for name, value in self.variant)
            self._description = f"{self.module}.{self.factory}({options})"
        return self._description

    def __repr__(self) -> str:
        return f"Kernel({self.description})"


def _plain(option: Option) -> Option:
    """Return an option without symbolic integers, which are fixed to their present value."""
    if isinstance(option, tuple):
        return tuple(map(pinned, option))
    return pinned(option)
