"""A number for every prompt, by its text alone: it names the job, keys its noise, and tells what is held out."""

from __future__ import annotations

import hashlib

HELD_OUT_ONE_IN = 50


def number(text: str, turn: int = 0) -> int:
    """63 bits for a prompt and a round: names the job, keys its noise, and shuffles."""
    digest = hashlib.sha256(f"{turn}\n{text}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def is_held_out(text: str) -> bool:
    """One prompt in fifty is for judging alone: by its text, so that it stays so in every run and in every mix."""
    return number(text) % HELD_OUT_ONE_IN == 0
