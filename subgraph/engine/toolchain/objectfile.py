"""Object files: their undefined symbols, and their code as an image that needs no linker.

An image holds the code and constants of one object file at their final distances from each other.
It can be loaded at any address. External functions are called through a table at its end, the only
part that is filled in when the image is loaded, so a warm process starts without LLVM. Only ELF is
read. Objects with sections or relocations that kernels on x86-64 do not have are linked by LLVM.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from subgraph.system.forking import computed_once

_ELF_MAGIC = b"\x7fELF\x02\x01"  # 64 bit, little endian
_X86_64 = 62
# Types and flags of sections, special section numbers, and types of relocations, by their names in
# the ELF and x86-64 specifications.
_SHT_PROGBITS, _SHT_SYMTAB, _SHT_RELA, _SHT_X86_64_UNWIND = 1, 2, 4, 0x70000001
_SHF_WRITE, _SHF_ALLOC = 1, 2
_SHN_UNDEF, _SHN_LORESERVE = 0, 0xFF00
_R_X86_64_PC32, _R_X86_64_PLT32 = 2, 4
_R_X86_64_GOTPCREL = (9, 41, 42)  # and its forms GOTPCRELX and REX_GOTPCRELX
_LEAST_ALIGN, _MOST_ALIGN, _WORD = 16, 64, 8
_JUMP = b"\xff\x25"  # jmp *displacement(%rip), before its displacement of four bytes


class Image(NamedTuple):
    """Code that can be loaded at any address that is a multiple of 64.

    Attributes:
        data: The code. Its last words, one for each undefined symbol, take their addresses.
        start: Offset of the function in bytes.
    """

    data: bytes
    start: int


def undefined_symbols(data: bytes) -> tuple[str, ...]:
    """Return the sorted names that an ELF object refers to and does not define.

    Args:
        data: A 64-bit little-endian ELF object; other formats give an empty tuple.

    Raises:
        ValueError: The file is damaged.
    """
    if not data.startswith(_ELF_MAGIC):
        return ()
    try:
        symbols = _File(data).symbols
    except (struct.error, IndexError, OverflowError, ValueError) as error:
        raise ValueError(f"damaged object file: {error}") from error
    names = {symbol.name for symbol in symbols if symbol.section == _SHN_UNDEF and symbol.name}
    return tuple(sorted(names - {"_GLOBAL_OFFSET_TABLE_"}))  # the linker defines it


def linked(data: bytes, symbol: str, needs: tuple[str, ...]) -> Image | None:
    """Return the image of an object file; None if LLVM has to link it.

    Args:
        data: An object file of any format.
        symbol: The name of the function.
        needs: Its undefined symbols.
    """
    try:
        file = _File(data)
        return _image(file, symbol, needs) if file.machine == _X86_64 else None
    except (_Other, KeyError, struct.error, IndexError, OverflowError, ValueError):
        return None


class _Other(Exception):
    """The object has a section or a relocation that an image cannot have."""


class _Section(NamedTuple):
    name: int
    kind: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    align: int
    item_size: int


class _Symbol(NamedTuple):
    name: str
    section: int
    value: int


class _File:
    """An ELF object."""

    def __init__(self, data: bytes) -> None:
        if not data.startswith(_ELF_MAGIC):
            raise ValueError("not an ELF object")
        self._data = data
        (self.machine,) = struct.unpack_from("<H", data, 18)
        (offset,) = struct.unpack_from("<Q", data, 0x28)
        size, count = struct.unpack_from("<HH", data, 0x3A)
        self.sections = [
            _Section(*struct.unpack_from("<IIQQQQIIQQ", data, offset + k * size))
            for k in range(count)
        ]

    def content(self, section: _Section) -> bytes:
        return self._data[section.offset : section.offset + section.size]

    @computed_once
    def symbols(self) -> list[_Symbol]:
        found: list[_Symbol] = []
        for table in self.sections:
            if table.kind == _SHT_SYMTAB and table.item_size:
                names = self.content(self.sections[table.link])
                for at in range(table.offset, table.offset + table.size, table.item_size):
                    name, _, _, section, value = struct.unpack_from("<IBBHQ", self._data, at)
                    found.append(
                        _Symbol(names[name : names.index(b"\0", name)].decode(), section, value)
                    )
        return found


def _image(file: _File, symbol: str, needs: tuple[str, ...]) -> Image:
    image, offsets = bytearray(), dict[int, int]()
    for number, section in enumerate(file.sections):
        if section.flags & _SHF_ALLOC and section.kind != _SHT_X86_64_UNWIND:
            is_code_or_constants = section.kind == _SHT_PROGBITS and not section.flags & _SHF_WRITE
            if not is_code_or_constants or section.align > _MOST_ALIGN:
                raise _Other
            _pad(image, max(section.align, _LEAST_ALIGN))
            offsets[number] = len(image)
            image += file.content(section)
    jumps, table = _add_needs(image, needs)

    def target(symbol: _Symbol, kind: int) -> int:
        if symbol.section == _SHN_UNDEF and kind in (_R_X86_64_PLT32, *_R_X86_64_GOTPCREL):
            return (jumps if kind == _R_X86_64_PLT32 else table)[symbol.name]
        if symbol.section >= _SHN_LORESERVE or kind not in (_R_X86_64_PC32, _R_X86_64_PLT32):
            raise _Other
        return offsets[symbol.section] + symbol.value

    for section in file.sections:
        if section.kind == _SHT_RELA and section.info in offsets:
            begin = offsets[section.info]
            for at, info, addend in struct.iter_unpack("<QQq", file.content(section)):
                to = target(file.symbols[info >> 32], info & 0xFFFFFFFF)
                struct.pack_into("<i", image, begin + at, to + addend - begin - at)
    (start,) = (offsets[s.section] + s.value for s in file.symbols if s.name == symbol)
    return Image(bytes(image), start)


def _add_needs(image: bytearray, needs: tuple[str, ...]) -> tuple[dict[str, int], dict[str, int]]:
    """Append a jump for each name, and the table of addresses; return the offsets by name."""
    _pad(image, _LEAST_ALIGN)
    jumps, table = len(image), len(image) + _WORD * len(needs)
    for k in range(len(needs)):
        here = len(image) + len(_JUMP) + 4
        image += _JUMP + struct.pack("<i", table + _WORD * k - here)
        _pad(image, _WORD)
    image += bytes(_WORD * len(needs))
    return (
        {name: jumps + _WORD * k for k, name in enumerate(needs)},
        {name: table + _WORD * k for k, name in enumerate(needs)},
    )


def _pad(image: bytearray, align: int) -> None:
    image += bytes(-len(image) % align)
