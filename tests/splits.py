"""Whether a reader of growing text tells the same however the text is cut: by steps, for every one of its splits."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any


def check_every_split(
    begin: Callable[[], Any], text: str, merged: Callable[[Iterable[Any]], list[Any]], every: int = 1
) -> list[Any]:
    """What the reader tells of the text, put together. AssertionError where a chunk, read from where its reader stands
    after the characters before it, tells other things than its own characters one by one, or leaves the reader in
    another state. So no split of the text, into however many chunks, can differ from another. `every`: chunks of four
    characters and more are read in so many cases each once."""
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
    if not hasattr(value, "__dict__") or isinstance(value, Enum):
        return value
    return {name: state(part) for name, part in vars(value).items()}
