"""The engine: one step for all running requests, their memory, who drafts, and how an engine is put together."""

from typing import NoReturn

from outpace._moved import moved_name


def __getattr__(name: str) -> NoReturn:
    moved_name("engine", name)
