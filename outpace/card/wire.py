"""Messages between two machines: the classes of `protocol.proto`, checked and turned into those of `card/loop.py`.

All messages of the other side are checked here. An invalid one raises ProtocolError, which ends its stream only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import lru_cache
from itertools import accumulate
from operator import sub
from pathlib import PurePath
from typing import Any, NamedTuple, TypeVar

from google.protobuf.message import DecodeError
from google.protobuf.message import Message as ProtobufMessage
from outpace_kernels import NodeDelta

from outpace.card.cache import CandidateLevel, Correction
from outpace.card.loop import Close, Correct, Message, Open, Pause, Resume, SetDirectives
from outpace.card.protocol_pb2 import Correction as CorrectionMessage
from outpace.card.protocol_pb2 import Directives, Event, FromTarget, Hello, Level
from outpace.card.protocol_pb2 import Request as RequestMessage
from outpace.core import registry
from outpace.core.drafting import DraftDirectives
from outpace.core.errors import UserError
from outpace.core.sampling import Sampling
from outpace.core.tree import Role
from outpace.core.types import Adjustments, Request, Rule
from outpace.models.files.cache import weights_digest
from outpace.models.runtimes import Loaded

M = TypeVar("M", bound=ProtobufMessage)
PROTOCOL_VERSION = 1
MAX_NODES = 1 << 16  # of a level, and of a request between two corrections
MAX_PADDING = 1 << 20  # bytes of a ping
LONGEST_TEXT = 1 << 20  # tokens
LONGEST_STEP = 1.0  # seconds of a draft step that the other side may claim; waits are multiples of it
_LARGEST_ID = 1 << 62
_LOWEST = -1e6  # log probability that is sent


class ProtocolError(Exception):
    """The other side sent an invalid message. The text is a sentence."""


class Identity(NamedTuple):
    """The model of one side. `tokenizer`, a hash of its tokens, and `num_tokens` must be equal on both sides. `digest`:
    a hash of its weights. `max_positions`: the longest text. Ids from `num_tokens` on pad a
    target's vocabulary; a text that has one is not drafted further."""

    tokenizer: str
    num_tokens: int
    name: str = ""
    digest: str = ""
    max_positions: int = LONGEST_TEXT

    @property
    def hello(self) -> Hello:
        return Hello(
            protocol_version=PROTOCOL_VERSION,
            tokenizer=self.tokenizer,
            num_tokens=self.num_tokens,
            name=self.name,
            digest=self.digest,
            max_positions=min(self.max_positions, 2**32 - 1),
        )

    def has_tokens(self, tokens: Iterable[int]) -> bool:
        """Return whether both sides know all these tokens."""
        return max(tokens, default=0) < self.num_tokens

    def mismatch(self, hello: Hello) -> str | None:
        """Return how the other side differs, in a sentence that names both values; None if the two fit."""
        if hello.protocol_version != PROTOCOL_VERSION:
            return f"protocol version {hello.protocol_version} was offered, {self.name} speaks {PROTOCOL_VERSION}"
        if hello.num_tokens != self.num_tokens:
            return f"{hello.name} has {hello.num_tokens} tokens, {self.name} has {self.num_tokens}"
        if hello.tokenizer != self.tokenizer:
            mine, theirs = self.tokenizer[:16], hello.tokenizer[:16]
            return f"{hello.name} has the tokenizer {theirs!r:.40}, {self.name} has {mine!r:.40}"
        return None


def identity_of(loaded: Loaded) -> Identity:
    """Return the identity of a loaded model; UserError if it has no tokenizer."""
    tokenizer = loaded.tokenizer
    if tokenizer is None:
        raise UserError(f"{loaded.name} has no tokenizer, without which two machines cannot compare their tokens")
    digest = weights_digest(loaded.files()) if loaded.files else ""
    name, size = PurePath(str(loaded.name)).name, min(tokenizer.size, loaded.model.vocab_size)
    longest = loaded.model.max_positions + loaded.model.max_source
    return Identity(tokenizer.fingerprint, size, name, digest, longest)


def parser(kind: type[M]) -> Callable[[bytes], M | None]:
    """Return a function that parses messages of a class; it returns None for other bytes, which ends the stream."""

    def parse(data: bytes) -> M | None:
        try:
            return kind.FromString(data)
        except DecodeError:
            return None

    return parse


def check(holds: bool, what: str) -> None:
    """Raise ProtocolError with the sentence `what` unless the condition holds."""
    if not holds:
        raise ProtocolError(what)


def check_tokens(tokens: Iterable[int], num_tokens: int) -> None:
    """Raise ProtocolError for a token outside the vocabulary."""
    largest = max(tokens, default=0)
    check(largest < num_tokens, f"token {largest} was sent, allowed are 0 to {num_tokens - 1}")


def request_message(request: Request) -> RequestMessage:
    """Encode what a drafter needs to know of a request: not its constraints, banned texts and prediction."""
    adjustments, sampling = request.adjustments or Adjustments(), request.sampling
    options = {name: str(value) for name, value in asdict(request.rule.options).items()}
    return RequestMessage(
        prompt=request.prompt,
        rule=_name_of(request.rule),
        rule_options=options,
        temperature=sampling.temperature,
        top_k=min(sampling.top_k, 2**32 - 1),
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        repetition_penalty=adjustments.repetition_penalty,
        presence_penalty=adjustments.presence_penalty,
        frequency_penalty=adjustments.frequency_penalty,
        logit_bias=dict(adjustments.logit_bias),
        min_tokens=min(adjustments.min_tokens, request.max_tokens, 2**32 - 1),
        allowed=adjustments.allowed or (),
        stop_ids=sorted(request.stop_ids),
        seed=request.seed,
        choice=request.choice,
        max_tokens=min(request.max_tokens, 2**32 - 1),
    )


def read_request(message: RequestMessage, own: Identity) -> Request:
    """Decode a request; ProtocolError for an invalid one."""
    prompt = tuple(message.prompt)
    max_tokens = own.max_positions - 1
    check(0 < len(prompt) <= max_tokens, f"a prompt of {len(prompt)} tokens was sent, allowed are 1 to {max_tokens}")
    for tokens in (prompt, message.logit_bias, message.allowed, message.stop_ids):
        check_tokens(tokens, own.num_tokens)
    check(message.seed < 2**63, f"seed {message.seed} was sent, it must be less than 2**63")
    check(message.max_tokens > 0, "max_tokens 0 was sent, it must be at least 1")
    check(message.min_tokens <= message.max_tokens, f"min_tokens {message.min_tokens} is above max_tokens")
    try:
        sampling = Sampling(message.temperature, message.top_k, message.top_p, message.min_p)
        adjustments = Adjustments(
            message.repetition_penalty,
            message.presence_penalty,
            message.frequency_penalty,
            tuple(sorted(message.logit_bias.items())),
            min_tokens=message.min_tokens,
            allowed=tuple(message.allowed) or None,
        )
        rule = _rule(message.rule, tuple(sorted(message.rule_options.items())))
    except UserError as error:
        raise ProtocolError(str(error)) from None
    judges = rule.traits.greedy if sampling.is_greedy else rule.traits.sampled
    check(judges, f"rule {message.rule} does not work with temperature {sampling.temperature:g}")
    return Request(
        prompt=prompt,
        rule=rule,
        max_tokens=message.max_tokens,
        sampling=sampling,
        seed=message.seed,
        choice=message.choice,
        stop_ids=frozenset(message.stop_ids),
        adjustments=None if adjustments == Adjustments() else adjustments,
    )


@lru_cache(64)
def _rule(name: str, options: tuple[tuple[str, str], ...]) -> Rule:
    """Return the rule of this name, one instance for equal options, so that requests share batches."""
    kind = registry.find("rules", name)
    registry.check_known({f"rule {name}": kind}, dict(options))
    rule: Rule = kind(registry.build_options(kind, dict(options)))
    if not rule.traits.same_text:
        raise UserError(f"rule {name} is not available over a link, because its text depends on the drafts")
    return rule


def _name_of(rule: Rule) -> str:
    return next(name for name in registry.names("rules") if registry.find("rules", name) is type(rule))


def event_message(message: Message, sends_request: bool = True) -> Event:
    """Encode a message to a drafter. `sends_request`: whether `Open` contains the request, else the drafter has it."""
    event = Event(key=message.key)
    if isinstance(message, Open):
        event.open.next_id = message.next_id
        if sends_request:
            event.open.request.CopyFrom(request_message(message.request))
    elif isinstance(message, Correct):
        tokens, length, root_id = message.correction
        event.correction.CopyFrom(CorrectionMessage(tokens=tokens, length=length, root_id=root_id))
    elif isinstance(message, SetDirectives):
        event.directives.CopyFrom(Directives(**message.directives._asdict()))
    elif isinstance(message, Pause):
        event.pause.SetInParent()
    elif isinstance(message, Resume):
        event.resume.SetInParent()
    else:
        event.close.SetInParent()
    return event


def add_message(whole: FromTarget, message: Message) -> None:
    """Append a message to the events of a FromTarget."""
    whole.events.append(event_message(message))


class SentRequest:
    """A request as its messages describe it to the drafter's side, against which the next message is checked."""

    def __init__(self, request: Request, next_id: int) -> None:
        check(0 < next_id < _LARGEST_ID, f"first id {next_id} was sent, it must be above 0")
        self.request, self._length = request, 0
        self._last_root, self._next_id = 0, next_id

    def note(self, level: CandidateLevel) -> None:
        """Remember the ids of a level that is sent, since its nodes may become roots."""
        ids = level.nodes.columns()[0]
        if ids:
            self._next_id = max(self._next_id, ids[-1] + 1)

    def read(self, key: int, event: Event, own: Identity) -> Message:
        """Decode any event but `open`; ProtocolError for an invalid one."""
        kind = event.WhichOneof("content")
        if kind == "correction":
            return Correct(key, self._read_correction(event.correction, own))
        if kind == "directives":
            return SetDirectives(key, _read_directives(event.directives))
        if kind == "pause":
            return Pause(key)
        if kind == "resume":
            return Resume(key)
        check(kind == "close", f"request {event.key} was sent {kind or 'an empty event'}, not expected here")
        return Close(key)

    def _read_correction(self, message: CorrectionMessage, own: Identity) -> Correction:
        tokens, length, root_id = list(message.tokens), message.length, message.root_id
        check_tokens(tokens, own.num_tokens)
        known = self._length + len(tokens)
        check(bool(tokens) and length == known, f"a correction to length {length} was sent, where {known} was expected")
        # the last round's tokens may exceed the context: they are cut later
        max_tokens = own.max_positions + MAX_NODES - len(self.request.prompt)
        check(length <= max_tokens, f"an answer of {length} tokens was sent, allowed are {max_tokens}")
        is_miss = -_LARGEST_ID < root_id < self._last_root
        check(is_miss or 0 < root_id < self._next_id, f"root {root_id} was sent, and no level had this node")
        self._length, self._last_root = length, min(self._last_root, root_id)
        return Correction(tokens, length, root_id)


def _read_directives(message: Directives) -> DraftDirectives:
    share, floor = message.share, message.floor if message.HasField("floor") else None
    check(0.0 < share <= 1.0, f"share {share:g} was sent, it must be above 0 and at most 1")
    check(floor is None or 0.0 <= floor <= 1.0, f"floor {floor} was sent, it must be between 0 and 1")
    levels = message.levels if message.HasField("levels") else None
    for name in ("levels", "depth", "width", "outcomes"):
        check(getattr(message, name) <= MAX_NODES, f"{name} {getattr(message, name)} was sent, at most {MAX_NODES}")
    return DraftDirectives(
        levels, message.depth, message.width, message.outcomes, floor, message.share, message.in_levels
    )


def level_message(key: int, level: CandidateLevel) -> Level:
    """Encode a level, in about 10 bytes per node."""
    ids, parents, tokens, roles, log_probs = level.nodes.columns()
    return Level(
        key=key,
        root_id=level.root_id,
        alias=level.alias,
        id_steps=map(sub, ids, [0, *ids]),
        parent_steps=map(sub, ids, parents),
        tokens=tokens,
        roles=roles,
        log_probs=[min(max(value, _LOWEST), 0.0) for value in log_probs],
    )


def read_level(message: Level, num_tokens: int) -> CandidateLevel:
    """Decode a level; ProtocolError for an invalid one."""
    columns: list[Sequence[Any]] = [message.id_steps, message.parent_steps, message.tokens, message.roles]
    columns.append(message.log_probs)
    count = len(message.tokens)
    check(all(len(column) == count for column in columns), "a level has lists of different lengths")
    check(count <= MAX_NODES, f"a level has {count} nodes, at most {MAX_NODES} are allowed")
    ids = list(accumulate(message.id_steps))
    check(not ids or (ids[0] > 0 and ids[-1] < _LARGEST_ID), "a level has an id out of range")
    check(min(message.id_steps, default=1) > 0, "the ids of a level do not increase")
    check(min(message.parent_steps, default=1) > 0, "a level has a node before its parent")
    parents = [*map(sub, ids, message.parent_steps)]
    check(min(parents, default=0) > -_LARGEST_ID, "a level has an id out of range")
    check_tokens(message.tokens, num_tokens)
    check(
        max(message.roles, default=0) <= Role.PROBE,
        f"role {max(message.roles, default=0)} was sent, allowed are 0 to 2",
    )
    wrong = next((value for value in message.log_probs if not _LOWEST <= value <= 0.0), None)
    check(wrong is None, f"log probability {wrong} was sent, allowed are {_LOWEST:g} to 0")
    check(abs(message.root_id) < _LARGEST_ID, f"root {message.root_id} was sent, which is out of range")
    alias = message.alias if message.HasField("alias") else None
    check(alias is None or 0 < alias < _LARGEST_ID, f"alias {alias} was sent, which is not the id of a node")
    nodes = NodeDelta((ids, parents, list(message.tokens), list(message.roles), list(message.log_probs)))
    return CandidateLevel(message.root_id, nodes, alias)


class LevelLimit:
    """Bounds what a drafter adds to requests between two corrections, so that it cannot fill the memory."""

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def reset(self, key: int) -> None:
        self._counts.pop(key, None)

    def count(self, key: int, level: CandidateLevel) -> None:
        """Count a level; ProtocolError if there are too many."""
        self._counts[key] = count = self._counts.get(key, 0) + len(level.nodes) + 1
        check(count <= 2 * MAX_NODES, f"more than {MAX_NODES} nodes were sent between two corrections")


def read_seconds(value: float) -> float:
    """Check the seconds of a draft step, and return them, at most LONGEST_STEP."""
    is_valid = math.isfinite(value) and value >= 0.0
    check(is_valid, f"a draft step of {value} seconds was sent, it must be finite and at least 0")
    return min(value, LONGEST_STEP)
