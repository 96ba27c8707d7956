"""Exported models that somebody has changed, with hashes that fit and any signature."""

from __future__ import annotations

import hashlib
import hmac
import io
import json
from collections.abc import Callable
from typing import Any

from subgraph.devices.blob import (
    _FIXED,  # pyright: ignore[reportPrivateUsage]
    _SIGNED,  # pyright: ignore[reportPrivateUsage]
    PROLOGUE,
    digest,
    leaf_hashes,
)

Change = Callable[[dict[str, Any], bytearray], object]


def split(data: bytes) -> tuple[dict[str, Any], bytearray]:
    """Return the header and the body of a file."""
    size, body_size = _FIXED.unpack_from(data)[3:5]
    start = PROLOGUE + size
    return json.loads(data[PROLOGUE:start]), bytearray(data[start : start + body_size])


def forged(data: bytes, change: Change, key: bytes | None = None) -> io.BytesIO:
    """Return a file after ``change`` with right lengths and hashes.

    Args:
        data: The file.
        change: Is given header and body, to change in place.
        key: Signs the file; None leaves the signature that it had.
    """
    header, body = split(data)
    change(header, body)
    text = json.dumps(header, sort_keys=True).encode()
    text += b" " * (-(PROLOGUE + len(text)) % 4096)
    magic, version, reserved, *_ = _FIXED.unpack_from(data)
    hashes = leaf_hashes(body)
    root = digest(len(body), hashes)
    fixed = _FIXED.pack(magic, version, reserved, len(text), len(body), root)
    told = data[_FIXED.size : _SIGNED]
    signed = fixed + (told if key is None else hmac.new(key, fixed + text, "sha256").digest())
    return io.BytesIO(signed + hashlib.sha256(signed + text).digest() + text + body + hashes)
