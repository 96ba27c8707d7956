"""Signatures of exported files: HMAC-SHA-256 by a private key of the user.

A file may contain programs, whose arguments compiled kernels use unchecked. Programs, and other
content that is not checked like a model, are used only if this user has signed the file.
"""

from __future__ import annotations

import errno
import hmac
import logging
import os
import secrets
import stat
from contextlib import suppress
from functools import cache
from pathlib import Path

from subgraph.system.trusted_files import (
    UntrustedFileError,
    check_folder,
    make_folder,
    open_regular,
)

_log = logging.getLogger("subgraph")
SIGNATURE_BYTES = 32  # of an HMAC-SHA256, and of its key
KEY_FILE = "export.key"


def signature(*parts: bytes) -> bytes:
    """Return the signature of the concatenated ``parts``."""
    state = hmac.new(_key(), digestmod="sha256")
    for part in parts:
        state.update(part)
    return state.digest()


def is_own(found: bytes, *parts: bytes) -> bool:
    """Return whether ``found`` is this user's signature of the concatenated ``parts``."""
    return hmac.compare_digest(found, signature(*parts))


@cache
def _key() -> bytes:
    """Return the user's key, made at its first use; without usable file a key of this process."""
    path = _key_folder() / KEY_FILE
    try:
        return _stored_key(path)
    except UntrustedFileError as error:
        _log.warning(
            "other processes will compile exported models again, like those of other users: %s",
            error.strerror,
        )
    except OSError as error:
        _log.info("other processes will compile exported models again: %s", error)
    return secrets.token_bytes(SIGNATURE_BYTES)


def _key_folder() -> Path:
    """Return the base folder, or the user's own cache folder if that belongs to another user."""
    from subgraph.system.environment import base_folder, user_folder

    folder = base_folder()
    try:
        shared = hasattr(os, "geteuid") and os.stat(folder).st_uid != os.geteuid()
    except OSError:
        shared = False
    return user_folder() if shared else folder


def _stored_key(path: Path) -> bytes:
    """Return the key in a file, which is made if there is none.

    Raises:
        UntrustedFileError: other users can read or change it; the message says how to correct that.
        OSError: it is damaged, or cannot be read or made.
    """
    make_folder(path.parent)
    check_folder(path.parent)
    if not os.path.lexists(path):
        _make_key(path)
    with open_regular(path, follow=False) as file:
        _check_private(os.fstat(file.fileno()), path)
        found = file.read(SIGNATURE_BYTES + 1)
    if len(found) != SIGNATURE_BYTES:
        raise OSError(errno.EINVAL, "it is damaged; remove it, and a new one is made", str(path))
    return found


def _check_private(status: os.stat_result, path: Path) -> None:
    if not hasattr(os, "geteuid"):
        return
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid != os.geteuid() or mode & 0o077:
        raise UntrustedFileError(
            errno.EPERM,
            f"the key {path} has mode {mode:04o} and belongs to user {status.st_uid}; it must be "
            "yours alone (mode 0600). Others may know it: remove it, and a new one is made",
        )


def _make_key(path: Path) -> None:
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(6)}.tmp")
    try:
        with open(fresh, "xb", opener=lambda p, f: os.open(p, f, 0o600)) as file:
            file.write(secrets.token_bytes(SIGNATURE_BYTES))
        with suppress(FileExistsError):
            os.link(fresh, path)  # atomic: of several processes the first one's key stays
    finally:
        with suppress(OSError):
            fresh.unlink()
