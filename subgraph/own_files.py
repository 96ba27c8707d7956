"""Which exported files were written here: a signature by a key in the user's cache folder.

A file may hold programs: words that compiled kernels follow as they are. They are used only where
this user's own processes wrote them; in every other file the same is found out from its graph.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
from functools import cache

_log = logging.getLogger("subgraph")
SIGNATURE_BYTES = 32


def signature(*parts: bytes) -> bytes:
    """Return the signature of a text."""
    state = hmac.new(_key(), digestmod="sha256")
    for part in parts:
        state.update(part)
    return state.digest()


def is_own(told: bytes, *parts: bytes) -> bool:
    """Return whether ``told`` is the signature of the text."""
    return hmac.compare_digest(told, signature(*parts))


@cache
def _key() -> bytes:
    """Return the key, made at its first use; one of this process where none can be kept."""
    from subgraph.engine.objectcache import cache_folder

    path = cache_folder().parent / "export.key"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f"{path.name}.{secrets.token_hex(6)}.tmp")
        if not path.exists():
            with open(fresh, "xb", opener=lambda p, f: os.open(p, f, 0o600)) as file:
                file.write(secrets.token_bytes(SIGNATURE_BYTES))
            try:
                os.link(fresh, path)  # whoever is first
            except FileExistsError:
                pass
            finally:
                fresh.unlink()
        found = path.read_bytes()
        if len(found) == SIGNATURE_BYTES:
            return found
        _log.info("%s is damaged; exported files are prepared anew by other processes", path)
    except OSError as error:
        _log.info("exported files are prepared anew by other processes: %s", error)
    return secrets.token_bytes(SIGNATURE_BYTES)
