"""API keys: read from a file or the environment, kept as hashes only."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from outpace.core.errors import UserError

VARIABLE = "OUTPACE_API_KEY"


def read_api_keys(file: Path | None) -> frozenset[bytes]:
    """The hashes of the keys in a file, one a line, and of those in OUTPACE_API_KEY, separated by commas."""
    keys = [key.strip() for key in os.environ.get(VARIABLE, "").split(",")]
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except OSError as error:
            raise UserError(f"{file}, for API keys, cannot be read ({error.strerror})") from None
        except UnicodeDecodeError as error:
            raise UserError(f"{file}, for API keys, is not UTF-8 text (byte {error.start})") from None
        found = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not found:
            raise UserError(f"{file} has no API key, write one a line")
        keys += found
    return frozenset(hashlib.sha256(key.encode()).digest() for key in keys if key)
