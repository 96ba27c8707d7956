"""Arguments of kernels by name: declared once, given by lowerings, read by kernels of any device.

A kernel gets the address of a block of 64-bit words. A class declares the block, one field for each
argument, in order; its docstring says what each is, with its unit::

    class RowSumArguments(KernelArguments):
        \"\"\"Arguments of `row_sum`; a work unit is a row.

Attributes:
            rows: First element of the rows.
            columns: Elements of a row.
        \"\"\"

        rows: Address
        columns: int

A lowering gives the values by keyword: ``low.emit(kernel, RowSumArguments(rows=x, columns=n),
units)``. A kernel of the CPU reads them through a view (`subgraph.engine.codegen.argument_views`),
and the function that launches the kernel of OPENCL gets the object. A type checker sees all three.
This module is free of numba, since lowerings import it.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any, ClassVar, Literal, TypeAlias, dataclass_transform

# An operand, scratch memory, a weight or a kernel to a lowering; to a kernel, where it lies.
Address: TypeAlias = Any
# A `Report` to a lowering; to a kernel, where its two words lie.
ReportWords: TypeAlias = Any
# Three numbers, along depth, height and width; to a kernel, where they lie: see `along`.
Triple: TypeAlias = Any
# Any number of further words, as the last field; to a kernel, where they begin.
Words: TypeAlias = Any

Kind = Literal["int", "float", "Address", "ReportWords", "Triple", "Words"]
# How many words a field takes; those of "Words" are as many as are given.
_WIDTHS: dict[str, int] = {
    **{"int": 1, "float": 1, "Address": 1},
    **{"ReportWords": 2, "Triple": 3, "Words": 0},
}


class WordBlock:
    """Base of the declarations of blocks of words; a child's fields come after its parents'.

    A kernel sets the fields of a block that it makes on its stack
    (`subgraph.engine.codegen.argument_views.stack_block`), for kernels that it calls.

    Attributes:
        fields: For each name the index of its first word, and its kind.
        block_words: Words of the block.
    """

    fields: ClassVar[dict[str, tuple[int, Kind]]] = {}
    block_words: ClassVar[int] = 0

    def __init_subclass__(cls) -> None:
        """Lay the fields out.

        Raises:
            TypeError: a field has no kind of `Kind`, stands behind one of kind "Words", or is in
                two parents.
        """
        fields: dict[str, tuple[int, Kind]] = {}
        width = 0
        for parent in cls.__bases__:
            if issubclass(parent, WordBlock):
                for name, (index, kind) in parent.fields.items():
                    if name in fields:
                        raise TypeError(f"{cls.__name__}.{name} is in two parents")
                    fields[name] = (width + index, kind)
                width += parent.block_words
        for name, kind in vars(cls).get("__annotations__", {}).items():
            if kind.startswith("ClassVar"):
                continue
            if kind not in _WIDTHS:
                raise TypeError(f"{cls.__name__}.{name} is {kind}; it must be one of {[*_WIDTHS]}")
            if any(known == "Words" for _, known in fields.values()):
                raise TypeError(f"{cls.__name__}.{name} stands behind words of any number")
            fields[name] = (width, kind)
            width += _WIDTHS[kind]
        cls.fields, cls.block_words = fields, width


@dataclass_transform(frozen_default=True, kw_only_default=True)
class KernelArguments(WordBlock):
    """Base of the declarations of kernels' arguments, whose objects hold values for a block."""

    # For `words`: gets all values at once; indices of floats; indices of sequences, last first.
    _values: ClassVar[Callable[[dict[str, Any]], Any]] = lambda held: ()
    _floats: ClassVar[tuple[int, ...]] = ()
    _sequences: ClassVar[tuple[int, ...]] = ()

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        fields = cls.fields
        kinds = [kind for _, kind in fields.values()]
        if len(fields) > 1:
            cls._values = itemgetter(*fields)
        elif fields:
            [only] = fields
            cls._values = lambda held: (held[only],)
        cls._floats = tuple(k for k, kind in enumerate(kinds) if kind == "float")
        ends = [k for k, kind in enumerate(kinds) if kind in ("Triple", "Words")]
        cls._sequences = tuple(reversed(ends))

    def __init__(self, **given: Any) -> None:
        """Take a value for each field.

        Raises:
            TypeError: one is missing, or there is no such field.
        """
        if given.keys() != self.fields.keys():
            missing = [name for name in self.fields if name not in given]
            unknown = [name for name in given if name not in self.fields]
            raise TypeError(
                f"{type(self).__name__}: without {missing}"
                if missing
                else f"{type(self).__name__} has no fields {unknown}"
            )
        self.__dict__ = given

    def words(self) -> list[Any]:
        """Return the values in the order of the block, as `Lowering.emit` takes them."""
        found = list(type(self)._values(self.__dict__))
        for place in self._floats:
            found[place] = float(found[place])
        for place in self._sequences:
            found[place : place + 1] = found[place]
        return found
