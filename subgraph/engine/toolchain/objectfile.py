"""A small static linker: the undefined symbols of an ELF object, and its code as a loadable image.

An image holds the code and constants of one object file with all references among them resolved.
Its references are relative, so that it can be loaded at any address. External functions are called
through a table of addresses at its end, like a GOT; loading fills in the table and changes nothing
else. Images are cached instead of object files, so that a process whose kernels are cached starts
without LLVM.

Layout of an image::

    code and constants   the object's SHF_ALLOC sections, each aligned to 16 bytes or more
    jumps                one ``jmp *entry(%rip)`` per undefined symbol, like a PLT
    table                one 64-bit address per undefined symbol, in the order of the names

Only x86-64 objects with the sections and relocations that kernels have become images: read-only
PROGBITS sections; R_X86_64_PC32, PLT32 and GOTPCREL. LLVM's linker loads all others.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from subgraph.system.forking import computed_once

_ELF_MAGIC = b"\x7fELF\x02\x01"  # ELFCLASS64, ELFDATA2LSB (little-endian)
_X86_64 = 62  # e_machine
# Types and flags of sections, special section numbers, and types of relocations, by their names in
# the ELF and x86-64 specifications.
_SHT_PROGBITS, _SHT_SYMTAB, _SHT_RELA, _SHT_X86_64_UNWIND = 1, 2, 4, 0x70000001
_SHF_WRITE, _SHF_ALLOC = 1, 2
_SHN_UNDEF, _SHN_LORESERVE = 0, 0xFF00
_R_X86_64_PC32, _R_X86_64_PLT32 = 2, 4
_R_X86_64_GOTPCREL = (9, 41, 42)  # and its forms GOTPCRELX and REX_GOTPCRELX
_LEAST_ALIGN, _MOST_ALIGN, _WORD = 16, 64, 8  # bytes; `loader` aligns images to _MOST_ALIGN
_JUMP = b"\xff\x25"  # jmp *displacement(%rip), before its displacement of four bytes


class Image(NamedTuple):
    """Linked code that can be loaded at any address that is a multiple of 64.

    Attributes:
        data: Code and constants. The last 8 bytes per undefined symbol are the table, all zero,
            into which the loader writes the symbols' addresses.
        start: Offset of the function in bytes.
    """

    data: bytes
    start: int


def undefined_symbols(data: bytes) -> tuple[str, ...]:
    """Return the sorted names of the symbols that an ELF object uses and does not define.

    Args:
        data: An object file. The result is empty unless it is 64-bit little-endian ELF.

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
    return tuple(sorted(names - {"_GLOBAL_OFFSET_TABLE_"}))  # a symbol that linkers define


def link_image(data: bytes, symbol: str, needs: tuple[str, ...]) -> Image | None:
    """Link an object file; return its image, or None if LLVM has to link it.

    Args:
        data: An object file of any format; a damaged one gives None, too.
        symbol: The function at which the image begins to run.
        needs: The object's undefined symbols, in the order of the image's table.
    """
    try:
        file = _File(data)
        return _image(file, symbol, needs) if file.machine == _X86_64 else None
    except (_Unsupported, KeyError, struct.error, IndexError, OverflowError, ValueError):
        return None


class _Unsupported(Exception):
    """The object has a section or a relocation that this linker does not handle."""


class _Section(NamedTuple):
    """A section header, Elf64_Shdr: all fields in the specification's order."""

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
    """A symbol: its name, the index of its section, and its offset there."""

    name: str
    section: int
    value: int


class _File:
    """A 64-bit little-endian ELF object; offsets below are those of Elf64_Ehdr and Elf64_Sym.

    Attributes:
        machine: The header's e_machine.
        sections: The section headers, by index.
    """

    def __init__(self, data: bytes) -> None:
        if not data.startswith(_ELF_MAGIC):
            raise ValueError("not an ELF object")
        self._data = data
        (self.machine,) = struct.unpack_from("<H", data, 18)
        (offset,) = struct.unpack_from("<Q", data, 0x28)  # e_shoff
        size, count = struct.unpack_from("<HH", data, 0x3A)  # e_shentsize, e_shnum
        self.sections = [
            _Section(*struct.unpack_from("<IIQQQQIIQQ", data, offset + k * size))
            for k in range(count)
        ]

    def content(self, section: _Section) -> bytes:
        """Return the bytes of a section."""
        return self._data[section.offset : section.offset + section.size]

    @computed_once
    def symbols(self) -> list[_Symbol]:
        """The entries of the symbol table, by index."""
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
    """Place an object's sections, append jumps and table, and apply the relocations.

    Raises:
        _Unsupported: The object has a section or a relocation that this linker does not handle.
    """
    image, offsets = bytearray(), dict[int, int]()
    for number, section in enumerate(file.sections):
        # Unwinding tables are left out: no exception passes through a kernel.
        if section.flags & _SHF_ALLOC and section.kind != _SHT_X86_64_UNWIND:
            is_code_or_constants = section.kind == _SHT_PROGBITS and not section.flags & _SHF_WRITE
            if not is_code_or_constants or section.align > _MOST_ALIGN:
                raise _Unsupported
            _pad(image, max(section.align, _LEAST_ALIGN))
            offsets[number] = len(image)
            image += file.content(section)
    jumps, table = _add_jumps_and_table(image, needs)

    def target(symbol: _Symbol, kind: int) -> int:
        """Return the offset in the image to which a relocation of a type refers."""
        if symbol.section == _SHN_UNDEF and kind in (_R_X86_64_PLT32, *_R_X86_64_GOTPCREL):
            return (jumps if kind == _R_X86_64_PLT32 else table)[symbol.name]
        if symbol.section >= _SHN_LORESERVE or kind not in (_R_X86_64_PC32, _R_X86_64_PLT32):
            raise _Unsupported
        return offsets[symbol.section] + symbol.value

    for section in file.sections:
        if section.kind == _SHT_RELA and section.info in offsets:
            begin = offsets[section.info]
            # Elf64_Rela; all types handled here are 32-bit displacements from the relocated field.
            for at, info, addend in struct.iter_unpack("<QQq", file.content(section)):
                to = target(file.symbols[info >> 32], info & 0xFFFFFFFF)
                struct.pack_into("<i", image, begin + at, to + addend - begin - at)
    (start,) = (offsets[s.section] + s.value for s in file.symbols if s.name == symbol)
    return Image(bytes(image), start)


def _add_jumps_and_table(
    image: bytearray, needs: tuple[str, ...]
) -> tuple[dict[str, int], dict[str, int]]:
    """Append the jumps and the table; return the offset of each name's jump and of its entry."""
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
