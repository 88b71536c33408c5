"""The Llama family in our own runtimes: what a config.json says, the parts of a layer, torch and native passes."""

from typing import NoReturn

from outpace._moved import moved_name


def __getattr__(name: str) -> NoReturn:
    moved_name("models.llama", name)
