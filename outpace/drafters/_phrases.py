"""Tables of phrases by the token before them, which forget the least recently used and can be saved between runs.

The cache of Cacheback (arXiv:2511.21699), also used as the pool of lookahead decoding and of Ouroboros.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from outpace.core.drafting import BuildContext
from outpace.core.errors import UserError
from outpace.core.stats import PerSalt
from outpace.models.files import token_tables

Phrase = tuple[int, ...]
_END = -1  # pads phrases in a file
_KIND = "phrases"
LEADERS, FOLLOWERS = 32768, 8  # usual size of a table
PHRASES_FILE = "a file that keeps the table of phrases between runs; the default is no file"  # help of an option


class PhraseTable:
    """An LRU table of leaders (tokens) and, for each, an LRU list of followers (phrases)."""

    def __init__(self, leaders: int, followers: int) -> None:
        self._leaders: OrderedDict[int, OrderedDict[Phrase, None]] = OrderedDict()
        self._most_leaders, self._most_followers = leaders, followers

    def __len__(self) -> int:
        return sum(map(len, self._leaders.values()))

    def learn(self, leader: int, phrase: Phrase) -> None:
        followers = self._leaders.setdefault(leader, OrderedDict())
        self._leaders.move_to_end(leader)
        followers[phrase] = None
        followers.move_to_end(phrase)
        if len(followers) > self._most_followers:
            followers.popitem(last=False)
        if len(self._leaders) > self._most_leaders:
            self._leaders.popitem(last=False)

    def read(self, last: Sequence[int], tokens: Sequence[int], length: int) -> list[int]:
        """Continue a text whose last tokens are `last`: learn the phrases of this length that are now complete. Return
        the new last tokens."""
        text = [*last, *tokens]
        for place in range(len(text) - length):
            self.learn(text[place], tuple(text[place + 1 : place + 1 + length]))
        return text[-length:]

    def followers(self, leader: int) -> list[Phrase]:
        """Return the phrases that followed a leader, the latest first."""
        return list(reversed(self._leaders.get(leader, {})))

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the arrays to save, int32 [phrases] and [phrases, longest], in the order in which they will be learnt
        again."""
        held = [(leader, phrase) for leader, followers in self._leaders.items() for phrase in followers]
        phrases = np.full((len(held), max((len(phrase) for _, phrase in held), default=0)), _END, np.int32)
        for row, (_, phrase) in enumerate(held):
            phrases[row, : len(phrase)] = phrase
        return {"leaders": np.array([leader for leader, _ in held], np.int32), "phrases": phrases}

    def load_arrays(self, arrays: Mapping[str, np.ndarray]) -> None:
        for leader, row in zip(arrays["leaders"].tolist(), arrays["phrases"].tolist(), strict=True):
            self.learn(leader, tuple(token for token in row if token != _END))


class PhraseTables(PerSalt[PhraseTable]):
    """A table for each cache salt; that of requests without a salt is kept in the file that an option names.

    The file is for one tokenizer.
    """

    def __init__(self, leaders: int, followers: int, path: str, given: BuildContext | None) -> None:
        """Read the file, if there is one already; no file with path "". UserError if the target's tokenizer is unknown,
        the folder does not exist, or the file is damaged, of another kind or of another tokenizer."""
        super().__init__(partial(PhraseTable, leaders, followers))
        self._path = Path(path).expanduser() if path else None
        if self._path is None:
            return
        tokenizer = token_tables.tokenizer_of(given)
        if tokenizer is None:
            raise UserError(f"phrases are kept in {path} for one tokenizer, and the target's is not known here")
        if not self._path.parent.is_dir():
            raise UserError(f"phrases cannot be kept in {path}, there is no folder {self._path.parent}")
        self._tokenizer = tokenizer
        if self._path.exists():
            again = "delete it, and the phrases are learnt again"
            self.shared.load_arrays(token_tables.read(self._path, _KIND, tokenizer, again))

    def save(self) -> None:
        """Replace the file atomically, if there is one."""
        if self._path is not None:
            token_tables.write(self._path, _KIND, self._tokenizer, self.shared.arrays())
