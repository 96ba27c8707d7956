"""Prebuilt kernels: object code that comes with the package, one file (*pack*) per `IsaLevel`.

A pack is a file of `subgraph.system.prebuilt_files`: a manifest, then the kernels' code, each
compressed by zlib. A kernel is used if its sources and the versions of numba and llvmlite are still
those with which it was compiled, and if the machine has, and lacks, the features that were queried
during its compilation. A stale pack or kernel is reported by a warning, once, and its kernels are
compiled for this machine.
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
import zlib
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import attrs

from subgraph.engine.toolchain.isa_levels import LEVELS, IsaLevel
from subgraph.engine.toolchain.kernel import Kernel
from subgraph.engine.toolchain.keys import compiler_versions, source_digest, symbol_of
from subgraph.engine.toolchain.loader import KernelError
from subgraph.system import host
from subgraph.system.objectcache import ObjectCode
from subgraph.system.prebuilt_files import (
    UNPACKED_LIMIT,
    folder,
    read_table,
    warn_once,
    write_raw,
)
from subgraph.system.trusted_files import UntrustedFileError, check_folder, open_trusted


class PackedKernel(NamedTuple):
    """One kernel's entry in a manifest: where its code is, and which machines may run it.

    Attributes:
        offset: Offset of the compressed code from the end of the manifest, in bytes.
        size: Bytes of the compressed code.
        checksum: SHA-256 of the compressed code, in hexadecimal digits.
        start: As in `ObjectCode`.
        needs: As in `ObjectCode`.
        features: As in `ObjectCode`: (feature, whether the machine must have or must lack it).
    """

    offset: int
    size: int
    checksum: str
    start: int | None
    needs: tuple[str, ...]
    features: tuple[tuple[str, bool], ...]


@attrs.frozen
class Manifest:
    """The header of a pack.

    Attributes:
        level: Name of the `IsaLevel`.
        platform: Operating system, as ``sys.platform``.
        versions: `compiler_versions` with which the kernels were compiled; others make it stale.
        names: Versions of numba and llvmlite, for messages.
        sources: `source_digest` of each module with kernels, by module name.
        kernels: The kernels by `kernel_key`.
    """

    level: str
    platform: str
    versions: Mapping[str, str]
    names: Mapping[str, str]
    sources: Mapping[str, str]
    kernels: Mapping[str, PackedKernel]


class Pack:
    """An open pack; its code is read kernel by kernel.

    Attributes:
        path: The file.
        manifest: The file's header.
    """

    def __init__(self, path: Path) -> None:
        """Read and check the manifest of a file.

        Raises:
            UntrustedFileError: Other users can write the file or its folder.
            KernelError: The file is damaged.
            OSError: The file cannot be read.
        """
        check_folder(path.parent)
        self.path = path
        with open_trusted(path) as file:
            try:
                self.manifest, self._begin = _read_manifest(file)
            except (struct.error, ValueError, LookupError, TypeError, AttributeError) as error:
                raise KernelError(
                    f"{path} is damaged ({error}); install the package anew"
                ) from error

    def read(self, key: str) -> ObjectCode:
        """Return the code of a kernel.

        Args:
            key: The kernel's `kernel_key`.

        Raises:
            KernelError: The code is damaged.
            LookupError: The kernel is not in the file.
            OSError: The file cannot be read.
        """
        entry = self.manifest.kernels[key]
        with open_trusted(self.path) as file:
            file.seek(self._begin + entry.offset)
            raw = file.read(entry.size)
        if hashlib.sha256(raw).hexdigest() != entry.checksum:
            raise KernelError(
                f"{self.path} is damaged (the checksum of a kernel does not fit); install the "
                "package anew"
            )
        unpacker = zlib.decompressobj()
        return ObjectCode(
            entry.needs, unpacker.decompress(raw, UNPACKED_LIMIT), entry.start, entry.features
        )


def _read_manifest(file: BinaryIO) -> tuple[Manifest, int]:
    """Return the manifest of a file, and the offset in bytes at which the code begins."""
    fields, begin = read_table(file)
    kernels = {key: _packed_kernel(*entry) for key, entry in fields.pop("kernels").items()}
    return Manifest(**fields, kernels=kernels), begin


def _packed_kernel(
    offset: int, size: int, checksum: str, start: int | None, needs: Any, features: Any
) -> PackedKernel:
    """Return an entry from the values that JSON has for its fields."""
    return PackedKernel(
        int(offset),
        int(size),
        str(checksum),
        None if start is None else int(start),
        tuple(str(name) for name in needs),
        tuple((str(name), bool(answer)) for name, answer in features),
    )


def write_pack(
    path: Path,
    level: IsaLevel,
    names: Mapping[str, str],
    sources: Mapping[str, str],
    kernels: Mapping[str, ObjectCode],
) -> None:
    """Write the pack of one level. Equal code is stored once.

    Args:
        path: The file to write.
        level: The level for which the kernels were compiled.
        names: Versions of numba and llvmlite, for messages (`version_names`).
        sources: `source_digest` of each module with kernels, by module name.
        kernels: The kernels' code by `kernel_key`.
    """
    entries: dict[str, PackedKernel] = {}
    written: dict[bytes, tuple[int, int, str]] = {}
    body = bytearray()
    for key, code in sorted(kernels.items()):
        part = written.get(code.data)
        if part is None:
            packed = zlib.compress(code.data, 9)
            part = (len(body), len(packed), hashlib.sha256(packed).hexdigest())
            written[code.data] = part
            body += packed
        entries[key] = PackedKernel(*part, code.start, code.needs, code.features)
    manifest = Manifest(
        level.name, sys.platform, compiler_versions(), dict(names), dict(sources), entries
    )
    write_manifest(path, manifest, bytes(body))


def write_manifest(path: Path, manifest: Manifest, body: bytes) -> None:
    """Write a pack's file.

    Args:
        path: The file to write.
        manifest: The header, whose entries refer to ``body``.
        body: The kernels' compressed code, one after the other.
    """
    header = json.dumps(attrs.asdict(manifest, recurse=False), sort_keys=True)
    write_raw(path, header.encode(), body)


def kernel_key(kernel: Kernel) -> str:
    """Return the key of an entry in a manifest: a hash that is the same in every version."""
    return hashlib.sha256(kernel.description.encode()).hexdigest()[:32]


def find(kernel: Kernel, isa: host.Isa) -> tuple[str, ObjectCode] | None:
    """Return the symbol and code of a prebuilt kernel; None if there is none that is up to date."""
    key = kernel_key(kernel)
    pack = _pack_with(key, isa)
    if pack is None:
        return None
    if not _is_current(pack, kernel):
        warn_once(
            f"the prebuilt kernels of {kernel.module} are stale: its sources, or those of a module "
            f"that it imports, changed since {pack.path.parent} was made; its kernels are compiled "
            "once for this machine (`make kernels` makes them anew)"
        )
        return None
    try:
        return symbol_of(key), pack.read(key)
    except (KernelError, OSError, ValueError, zlib.error) as error:
        warn_once(f"a prebuilt kernel is not used, and is compiled: {error}")
        return None


def holds(kernel: Kernel, isa: host.Isa) -> bool:
    """Return whether there is prebuilt code of a kernel, made from its present sources."""
    pack = _pack_with(kernel_key(kernel), isa)
    return pack is not None and _is_current(pack, kernel)


def _is_current(pack: Pack, kernel: Kernel) -> bool:
    """Return whether a pack was made from the present sources of a kernel's module."""
    return pack.manifest.sources.get(kernel.module) == source_digest(kernel.module)


def _pack_with(key: str, isa: host.Isa) -> Pack | None:
    """Return the best pack with an entry of a key that this machine may run."""
    for pack in _packs(folder(), isa, host.architecture()):
        entry = pack.manifest.kernels.get(key)
        if entry is not None and all(isa.has(name) == answer for name, answer in entry.features):
            return pack
    return None


@cache
def _packs(folder: Path | None, isa: host.Isa, architecture: str) -> tuple[Pack, ...]:
    """Return the packs in a folder whose level this machine can run, the best level first."""
    if folder is None:
        return ()
    fitting = [level for level in reversed(LEVELS) if level.runs_on(isa, architecture)]
    return tuple(_opened(folder / f"{level.name}.pack" for level in fitting))


def _opened(paths: Iterable[Path]) -> Iterable[Pack]:
    """Yield the packs that exist, are trusted and are up to date; warn of the others."""
    for path in paths:
        try:
            pack = Pack(path)
        except FileNotFoundError:
            continue  # normal in a checkout and in a wheel built without prebuilt kernels
        except UntrustedFileError as error:
            warn_once(f"prebuilt kernels are not used: {error.strerror}")
        except (KernelError, OSError) as error:
            warn_once(f"prebuilt kernels are not used: {error}")
        else:
            if pack.manifest.platform != sys.platform:
                continue
            if pack.manifest.versions == compiler_versions():
                yield pack
            else:
                warn_once(_stale(pack))


def _stale(pack: Pack) -> str:
    """Return the warning about a pack that another compiler made."""
    now = version_names()
    changed = [
        f"{k} {v}, here {now.get(k)}" for k, v in pack.manifest.names.items() if v != now.get(k)
    ]
    why = f"they were made with {'; '.join(changed)}" if changed else "Subgraph's compiler changed"
    return (
        f"the prebuilt kernels in {pack.path.parent} are stale: {why}. Kernels are compiled once "
        "for this machine instead (`make kernels` makes them anew)"
    )


def version_names() -> dict[str, str]:
    """Return the installed versions of numba and llvmlite by package name, for messages."""
    from importlib.metadata import PackageNotFoundError, version

    names: dict[str, str] = {}
    for name in ("numba", "llvmlite"):
        try:
            names[name] = version(name)
        except PackageNotFoundError:
            names[name] = "of an unknown version"
    return names
