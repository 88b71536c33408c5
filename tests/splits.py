"""Checks that a reader of growing text returns the same however the text is split, by induction over its states."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable
from enum import Enum
from types import MethodType
from typing import Any


def check_every_split(
    begin: Callable[[], Any], text: str, merged: Callable[[Iterable[Any]], list[Any]], every: int = 1
) -> list[Any]:
    """Return the reader's merged results for a text.

    Raises AssertionError if a chunk, read after the characters before it, gives other results or another state than its
    characters one by one. So all splits of the text give the same. `every`: only one in this many chunks of four or
    more characters is read.
    """
    reader, told = begin(), list[list[Any]]()
    readers = [copy.deepcopy(reader)]
    for character in text:
        told.append(reader.push(character))
        readers.append(copy.deepcopy(reader))
    for start, end in itertools.combinations(range(len(text) + 1), 2):
        if end - start >= 4 and (start + end) % every:
            continue
        other = copy.deepcopy(readers[start])
        found = merged(other.push(text[start:end]))
        assert found == merged(itertools.chain(*told[start:end])), (text[:start], text[start:end])
        assert state(other) == state(readers[end]), (text[:start], text[start:end])
    return merged([*itertools.chain(*told), *reader.finish()])


def state(value: Any) -> Any:
    """All that a reader holds."""
    if isinstance(value, MethodType):
        return value.__name__
    if not hasattr(value, "__dict__") or isinstance(value, Enum):
        return value
    return {name: state(part) for name, part in vars(value).items()}
