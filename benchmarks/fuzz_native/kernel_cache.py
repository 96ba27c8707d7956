"""Target: modified entries of the kernel cache and object files; their code is not run.

An input chooses between damaged bytes of an entry, an entry with another header or code and a valid
checksum, and an object file for the linker. Damaged entries must count as absent; of entries with a
valid checksum, which only the user can write, an accepted image must be consistent.
"""

from __future__ import annotations

import hashlib
import json
import random
import struct
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from robustness import damaged_bytes

from subgraph.engine.toolchain import loader, objectfile, targets
from subgraph.system import objectcache

from .draw import Draw, any_leaf
from .outcome import Finding

_PREFIX = struct.Struct("<8s32sI")
_ASSEMBLY = """
declare double @sin(double)
@table = private constant [4 x i64] [i64 1, i64 2, i64 3, i64 4]
define i64 @entry(i64 %x, double %y) {
  %z = call double @sin(double %y)
  %i = and i64 %x, 3
  %p = getelementptr [4 x i64], ptr @table, i64 0, i64 %i
  %v = load i64, ptr %p
  %w = fptosi double %z to i64
  %r = add i64 %v, %w
  ret i64 %r
}
"""


@cache
def _entries() -> list[tuple[str, Path, bytes]]:
    """Return key, path and content of entries: an object file, code without symbols, an image."""
    needs = objectfile.undefined_symbols(_object())
    image = objectfile.link_image(_object(), "entry", needs)
    codes = [loader.ObjectCode(needs, _object()), loader.ObjectCode((), b"\xc3" * 99, 0)]
    if image is not None:  # None: the linker does not support this processor
        codes.append(loader.ObjectCode(needs, image.data, image.start))
    found: list[tuple[str, Path, bytes]] = []
    for number, code in enumerate(codes):
        key = f"{number:064x}"
        objectcache.write(key, code)
        path = next(objectcache.cache_folder().glob(f"*/{key}.sgk"))
        found.append((key, path, path.read_bytes()))
    return found


@cache
def _object() -> bytes:
    from llvmlite import binding

    machine = targets.machine()
    return bytes(machine.emit_object(binding.parse_assembly(_ASSEMBLY)))


def seeds() -> Iterator[bytes]:
    """Yield inputs of every kind."""
    rng = random.Random(0)
    for kind in range(0, 256, 8):
        yield bytes([kind]) + rng.randbytes(24)


def run(data: bytes) -> None:
    """Change an entry and read it; or change an object file and link it."""
    draw = Draw(data)
    if draw.often(0.4):
        _link(draw)
        return
    key, path, content = draw.choice(_entries())
    damage = draw.often(0.4)
    changed = damaged_bytes(content, draw.rng()) if damage else _forged(content, draw)
    path.write_bytes(changed)
    try:
        code = objectcache.read(key)
    finally:
        path.write_bytes(content)
    if code is not None:
        if damage and changed != content:
            raise Finding("a damaged cache entry is read")
        _check_image(key, code)


def _forged(content: bytes, draw: Draw) -> bytes:
    """Return an entry with another header or code, and a valid checksum."""
    magic, _, length = _PREFIX.unpack_from(content)
    text, code = content[_PREFIX.size :][:length], content[_PREFIX.size + length :]
    if draw.often(0.7):
        header = json.loads(text)
        found = any_leaf(header, draw)
        if found is not None:
            found[0][found[1]] = draw.choice(
                (draw.number(), "exp", "system", None, [], ["exp"] * 99, {})
            )
        text = json.dumps(header).encode()
    else:
        code = damaged_bytes(code, draw.rng())
    rest = text + code
    return _PREFIX.pack(magic, hashlib.sha256(rest).digest(), len(text)) + rest


def _check_image(symbol: str, code: loader.ObjectCode) -> None:
    """Check the image that would be loaded."""
    try:
        loader.check_symbols(symbol, code.needs)
        image = loader.as_image(symbol, code)
    except loader.KernelError:
        return
    if image.start is None:
        return
    if not 0 <= image.start < len(image.data) or 8 * len(image.needs) > len(image.data):
        raise Finding("an image begins outside of itself")


def _link(draw: Draw) -> None:
    data = bytearray(_object())
    for _ in range(1 + draw.below(6)):
        # Changes in the first 64 bytes, the ELF header, are more frequent.
        at = draw.below(64) if draw.often(0.3) else draw.below(len(data))
        match draw.below(3):
            case 0:
                data[at] = draw.byte()
            case 1 if at + 8 <= len(data):
                struct.pack_into("<q", data, at, draw.number())
            case _:
                if at + 4 <= len(data):
                    struct.pack_into("<I", data, at, draw.number() & 0xFFFFFFFF)
    if draw.often(0.1):
        del data[draw.below(len(data)) :]
    try:
        needs = objectfile.undefined_symbols(bytes(data))
    except ValueError:
        needs = ("sin",)
    image = objectfile.link_image(bytes(data), "entry", needs)
    if image is not None:
        _check_image("entry", loader.ObjectCode(needs, image.data, image.start))
