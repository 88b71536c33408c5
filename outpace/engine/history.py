"""What became of a request, round by round."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from outpace.core.stats import Step
from outpace.core.types import TokenLogprobs

TARGET, UNKNOWN = "target", "draft"  # who wrote a token: the target itself, or a drafter that does not tell its name


class Round(NamedTuple):
    """What a round verified: a tree, who planted its nodes, and the path that was accepted."""

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    sources: tuple[str, ...]
    path: tuple[int, ...]


@dataclass(eq=False)
class History:
    """What became of a request: a Step a round, records of tokens, and seconds on the engine's clock."""

    submitted: float = 0.0
    began: float = 0.0  # when it left the queue, 0 before
    reused: int = 0  # tokens of the prompt whose keys and values were there
    first_token: float = 0.0  # when the first round ended, 0 before
    ended: float = 0.0  # when the last one did
    stale: int = 0  # candidates of a worker that came after the text had gone another way
    pauses: int = 0  # how often its keys and values were taken away for want of memory
    steps: list[Step] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)  # of the answer's tokens: a drafter's name, or "target"
    drafted: Counter[str] = field(default_factory=Counter)  # tokens that were judged, by who proposed them
    rounds: list[Round] = field(default_factory=list)  # where they are asked for
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the answer's tokens, where they are asked for
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of the prompt's, but for its first
