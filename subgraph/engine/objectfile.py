"""Which symbols an object file needs from outside: read before it is loaded, so nothing surprises.

Only ELF is read; on other systems the linker itself reports what is missing.
"""

from __future__ import annotations

import struct

_ELF_MAGIC = b"\x7fELF\x02\x01"  # 64 bit, little endian
_SYMBOL_TABLE = 2


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
        return tuple(sorted(_undefined_elf(data)))
    except (struct.error, IndexError, OverflowError, ValueError) as error:
        raise ValueError(f"damaged object file: {error}") from error


def _undefined_elf(data: bytes) -> set[str]:
    section_offset = struct.unpack_from("<Q", data, 0x28)[0]
    entry_size, count = struct.unpack_from("<HH", data, 0x3A)
    sections = [
        struct.unpack_from("<IIQQQQIIQQ", data, section_offset + i * entry_size)
        for i in range(count)
    ]
    names: set[str] = set()
    for _, kind, _, _, offset, size, link, _, _, item_size in sections:
        if kind != _SYMBOL_TABLE or item_size == 0:
            continue
        strings = sections[link][4]
        for at in range(offset + item_size, offset + size, item_size):
            name, _info, _other, section = struct.unpack_from("<IBBH", data, at)
            if section == 0 and name:
                start = strings + name
                names.add(data[start : data.index(b"\0", start)].decode())
    names.discard("_GLOBAL_OFFSET_TABLE_")  # made by the linker
    return names
