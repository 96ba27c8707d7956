"""Declarations of argument blocks: the named arguments of kernels, for lowerings and for kernels.

The first argument of a kernel is the address of a block of 64-bit words. A class declares the
fields of the block in order; the section "Attributes" of its docstring says what each field is,
with its unit::

    class RowSumArguments(KernelArguments):
        \"\"\"Arguments of `row_sum`; a work unit is a row.\"\"\"

        rows: Address  # the first element of the rows
        columns: int  # elements of a row

A lowering passes the values by keyword: ``low.emit(kernel, RowSumArguments(rows=x, columns=n),
units)``. A kernel of CPU reads them through a view (`subgraph.engine.codegen.argument_views`), and
the function that launches a kernel of OPENCL takes the object itself. A type checker checks all
three. Lowerings import this module, so it does not import numba.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import itemgetter
from typing import Any, ClassVar, Literal, TypeAlias, cast, dataclass_transform

# Types of fields besides int and float: what a lowering passes, and what a kernel gets.
# An operand, scratch memory, a weight or a kernel; the kernel gets its address.
Address: TypeAlias = Any
# A `Report`; the kernel gets the address of its two words.
ReportWords: TypeAlias = Any
# Three integers, along depth, height and width; the kernel gets their address (see `along`).
Triple: TypeAlias = Any
# Any number of integers, only as the last field; the kernel gets the address of the first.
Words: TypeAlias = Any

Kind = Literal["int", "float", "Address", "ReportWords", "Triple", "Words"]
# Words of a field in the block. "Words" counts as none, because its values end the block.
_WIDTHS: dict[str, int] = {
    **{"int": 1, "float": 1, "Address": 1},
    **{"ReportWords": 2, "Triple": 3, "Words": 0},
}


class WordBlock:
    """Base of the declarations of blocks. A child's fields come after those of its parents.

    Direct children declare blocks that a kernel fills in on its stack for another kernel that it
    calls (`subgraph.engine.codegen.argument_views.stack_block`).

    Attributes:
        fields: For each field its index, in words from the block's begin, and its kind.
        block_words: Size of the block in words, without those of a field of kind "Words".
    """

    fields: ClassVar[dict[str, tuple[int, Kind]]] = {}
    block_words: ClassVar[int] = 0

    def __init_subclass__(cls) -> None:
        """Assign the fields their positions in the block.

        Raises:
            TypeError: The annotation of a field is none of `Kind`, a field comes after one of kind
                "Words", or two parents declare it.
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
            # Without the future import, annotations are objects, of which `Address` and `Triple`
            # are the same: `Any`.
            if not isinstance(kind, str):
                raise TypeError(
                    f"{cls.__name__}.{name}: the kinds of fields are words; write "
                    "'from __future__ import annotations' at the top of the file"
                )
            if kind.startswith("ClassVar"):
                continue
            if kind not in _WIDTHS:
                raise TypeError(f"{cls.__name__}.{name} is {kind}; it must be one of {[*_WIDTHS]}")
            # The number of values of kind "Words" is not declared, so that a later field has no
            # fixed index.
            if any(previous == "Words" for _, previous in fields.values()):
                raise TypeError(f"{cls.__name__}.{name} follows a field of kind Words")
            fields[name] = (width, cast("Kind", kind))
            width += _WIDTHS[kind]
        cls.fields, cls.block_words = fields, width


@dataclass_transform(frozen_default=True, kw_only_default=True)
class KernelArguments(WordBlock):
    """Base of the declarations of kernels' arguments; an object has the values of one block."""

    # For `words`: returns all values at once; indices of floats; indices of sequences, last first.
    _values: ClassVar[Callable[[dict[str, Any]], Any]] = lambda values: ()
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
            cls._values = lambda values: (values[only],)
        cls._floats = tuple(k for k, kind in enumerate(kinds) if kind == "float")
        ends = [k for k, kind in enumerate(kinds) if kind in ("Triple", "Words")]
        cls._sequences = tuple(reversed(ends))

    def __init__(self, **values: Any) -> None:
        """Set the fields.

        Args:
            **values: A value for each field.

        Raises:
            TypeError: The value of a field is missing, or a name is no field.
        """
        if values.keys() != self.fields.keys():
            missing = [name for name in self.fields if name not in values]
            unknown = [name for name in values if name not in self.fields]
            raise TypeError(
                f"{type(self).__name__}: without {missing}"
                if missing
                else f"{type(self).__name__} has no fields {unknown}"
            )
        self.__dict__ = values

    def words(self) -> list[Any]:
        """Return the values in the order of the block, sequences expanded, for `Lowering.emit`."""
        words = list(type(self)._values(self.__dict__))
        for k in self._floats:
            words[k] = float(words[k])
        # The last sequence is expanded first, so that the indices of the others stay valid.
        for k in self._sequences:
            words[k : k + 1] = words[k]
        return words
