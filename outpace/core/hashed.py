"""SHA-256, imported at its first use: OpenSSL behind it takes 4 MB of memory, and text by the native runtime needs none
of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hashlib import _Hash


def sha256(data: bytes = b"") -> _Hash:
    """As hashlib's."""
    import hashlib

    return hashlib.sha256(data)
