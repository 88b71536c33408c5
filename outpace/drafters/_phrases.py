"""Phrases by the token that they followed: a table that forgets what was used longest ago, and keeps between runs.

The cache of Cacheback (arXiv:2511.21699), which serves as the pool of lookahead decoding and Ouroboros too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from outpace.core.drafting import BuildContext
from outpace.core.errors import UserError
from outpace.models.files import token_tables

Phrase = tuple[int, ...]
_END = -1  # fills the places behind a phrase in a file
_KIND = "phrases"


class PhraseTable:
    """Leaders and their followers, each the latest last; of both the one that was not seen longest goes first."""

    def __init__(self, leaders: int, followers: int) -> None:
        self._leaders: OrderedDict[int, OrderedDict[Phrase, None]] = OrderedDict()
        self._most_leaders, self._most_followers = leaders, followers

    def __len__(self) -> int:
        """Phrases that are held."""
        return sum(map(len, self._leaders.values()))

    def learn(self, leader: int, phrase: Phrase) -> None:
        """The phrase was seen behind the leader."""
        followers = self._leaders.setdefault(leader, OrderedDict())
        self._leaders.move_to_end(leader)
        followers[phrase] = None
        followers.move_to_end(phrase)
        if len(followers) > self._most_followers:
            followers.popitem(last=False)
        if len(self._leaders) > self._most_leaders:
            self._leaders.popitem(last=False)

    def read(self, last: Sequence[int], tokens: Sequence[int], length: int) -> list[int]:
        """A text goes on behind its `last` tokens: learns the phrases of this length that it completes; the new last
        tokens, whose phrases are not complete."""
        text = [*last, *tokens]
        for place in range(len(text) - length):
            self.learn(text[place], tuple(text[place + 1 : place + 1 + length]))
        return text[-length:]

    def followers(self, leader: int) -> list[Phrase]:
        """The phrases behind a leader, the latest first."""
        return list(reversed(self._leaders.get(leader, {})))

    def arrays(self) -> dict[str, np.ndarray]:
        """What a file holds of it: the phrases in the order in which they would be learnt again. int32 [phrases] and
        [phrases, longest]"""
        held = [(leader, phrase) for leader, followers in self._leaders.items() for phrase in followers]
        phrases = np.full((len(held), max((len(phrase) for _, phrase in held), default=0)), _END, np.int32)
        for row, (_, phrase) in enumerate(held):
            phrases[row, : len(phrase)] = phrase
        return {"leaders": np.array([leader for leader, _ in held], np.int32), "phrases": phrases}

    def load_state_dict(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Learns what a file holds."""
        for leader, row in zip(arrays["leaders"].tolist(), arrays["phrases"].tolist(), strict=True):
            self.learn(leader, tuple(token for token in row if token != _END))


class PhraseFile:
    """The file in which a table is kept from run to run, for one tokenizer."""

    def __init__(self, path: str, given: BuildContext | None) -> None:
        """UserError where nothing says which tokenizer the phrases are of, or no file can lie there."""
        tokenizer = token_tables.tokenizer_of(given)
        if tokenizer is None:
            raise UserError(f"phrases are kept in {path} for one tokenizer, and the target's is not known here")
        self._path, self._tokenizer = Path(path).expanduser(), tokenizer
        if not self._path.parent.is_dir():
            raise UserError(f"phrases cannot be kept in {path}, there is no folder {self._path.parent}")

    def read(self, table: PhraseTable) -> None:
        """Puts what the file holds into a table; a file that is not there yet holds nothing. UserError for one that is
        torn, of another kind, or of another tokenizer."""
        if self._path.exists():
            again = "delete it, and the phrases are learnt anew"
            table.load_state_dict(token_tables.read(self._path, _KIND, self._tokenizer, again))

    def write(self, table: PhraseTable) -> None:
        """Replaces the file as a whole."""
        token_tables.write(self._path, _KIND, self._tokenizer, table.arrays())


def open_phrase_file(path: str, given: BuildContext | None, table: PhraseTable) -> PhraseFile | None:
    """The file that an option names, "" for none; the table begins with what it holds."""
    kept = PhraseFile(path, given) if path else None
    if kept is not None:
        kept.read(table)
    return kept
