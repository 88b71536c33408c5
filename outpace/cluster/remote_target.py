"""A target on another machine (`outpace serve --draft-port`), for which a draft model in this process drafts."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from outpace.api.params import SamplingParams, read_params
from outpace.api.prompts import Prompt, tokens_of
from outpace.api.stream import Result
from outpace.api.text import Piece, TextAssembler, assembler_of, echo_of, thought_before
from outpace.card import link
from outpace.card.cache import CandidateLevel
from outpace.card.link import NO_HELLO, Address, DialedStream, LinkError, Outbox
from outpace.card.loop import Close, Correct, Open
from outpace.card.protocol_pb2 import FromDrafter, FromTarget, Pong
from outpace.card.protocol_pb2 import Request as RequestMessage
from outpace.card.wire import Identity, ProtocolError, SentRequest, identity_of, parser, request_message
from outpace.cluster.draft_thread import DraftThread, NewLevel, add_level
from outpace.core.errors import UserError
from outpace.core.stats import RoundStats, summarize
from outpace.core.types import Drafter, Request
from outpace.engine.build import find_rule
from outpace.models.runtimes import Loaded

PAUSES = (0.2, 1.0, 5.0, 5.0, 5.0)  # seconds before each retry of an answer whose link broke
PATIENCE = 60.0  # seconds of silence after which the link counts as broken; a long prompt takes time
_POLL_SECONDS = 0.2
_NOT_SENT = ("logprobs", "bad_words", "response_format", "structured_outputs", "prediction")
_REFUSALS = ("UNAUTHENTICATED", "FAILED_PRECONDITION", "INVALID_ARGUMENT")


class RemoteTarget(AbstractContextManager["RemoteTarget"]):
    """Answers prompts by a target on another machine; its draft model is in this process.

    Has what commands use of an `LLM`: `stream`, `tokenizer` and `target` (the draft, named by the target's address).
    """

    method = "card"

    def __init__(self, address: Address, draft: Loaded, drafter: Drafter, key: str | None = None) -> None:
        """`key`: an API key of the server."""
        link.grpc()
        self.address, self._key, self.own = address, key, identity_of(draft)
        draft.model.vocab_size = self.own.num_tokens  # the target may lack rows that pad the draft
        self.tokenizer, self.draft = draft.tokenizer, draft
        self.target = replace(draft, name=str(address), notice=None, files=None)  # its files are elsewhere
        self._keys = itertools.count(1)
        self._sending: dict[int, Callable[[CandidateLevel, float], None]] = {}  # by the drafter's key
        self._thread = DraftThread(drafter, self._send)

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End the drafter."""
        self._thread.stop()

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, choice: int = 0, **options: Any
    ) -> RemoteStream:
        """Start an answer; see `LLM.stream`. UserError for parameters that are not sent."""
        params, defaults = read_params(sampling_params, options), SamplingParams()
        for name in _NOT_SENT:
            if getattr(params, name) not in ("", getattr(defaults, name)):
                raise UserError(f"{name} is not available from a target on another machine, leave it out")
        tokens = tokens_of(prompt, self.tokenizer)
        request = params.request(tokens, find_rule("auto", params.sampling), self.tokenizer, choice)
        try:
            message = request_message(request)
        except ValueError as error:
            raise UserError(f"the request cannot be sent: {error}") from None
        text = assembler_of(params, self.tokenizer, thought_before(prompt, tokens, params, self.tokenizer))
        return RemoteStream(self, request, message, text, echo_of(params, prompt, tokens, self.tokenizer))

    def open(self, send: Callable[[CandidateLevel, float], None], request: Request, next_id: int) -> int:
        """Let the drafter draft a request; return its key. `send` is called in the drafter's thread."""
        key = next(self._keys)
        self._sending[key] = send
        self._thread.post(Open(key, request, next_id))
        return key

    def post(self, message: Any) -> None:
        """Send the drafter a message."""
        self._thread.post(message)

    def close_request(self, key: int) -> None:
        """End the drafting of a request."""
        del self._sending[key]
        self._thread.post(Close(key))

    def check_drafter(self) -> None:
        """Warn if the drafter has failed."""
        if (failure := self._thread.failure) is not None:
            warnings.warn(f"the drafter failed ({failure}); continuing without it", stacklevel=2)

    def connect(self) -> TargetConnection:
        """Open a stream for one answer."""
        return TargetConnection(self.address, self.own, self._key)

    def _send(self, key: int, level: CandidateLevel, seconds: float) -> None:
        if (send := self._sending.get(key)) is not None:
            send(level, seconds)


class TargetConnection(DialedStream):
    """A stream to a target, for one answer."""

    def __init__(self, address: Address, own: Identity, key: str | None) -> None:
        outbox: Outbox[NewLevel | FromDrafter] = Outbox(FromDrafter, add_level)
        super().__init__(address, "Join", FromDrafter(hello=own.hello), parser(FromTarget), outbox, key)

    def error_of(self, code: str, details: str) -> Exception:
        if code == "OK":
            return LinkError(f"{self.address} ended the link")
        if code == "UNIMPLEMENTED":
            return UserError(f"no target listens on {self.address}: start one by `outpace serve --draft-port`")
        if code in _REFUSALS:
            return UserError(f"the target at {self.address} refused this request: {details}")
        return LinkError(f"no link to {self.address} ({details})")


class RemoteStream:
    """One answer of a `RemoteTarget`: an iterator over its Pieces. `finish()` reads to the end, `abort()` ends it.

    If the link breaks, the same request is sent again. Its text is a function of the request, so what was already
    yielded is skipped.
    """

    def __init__(
        self, owner: RemoteTarget, request: Request, message: RequestMessage, text: TextAssembler, echo: str
    ) -> None:
        self._owner, self._request, self._message, self._text, self._echo = owner, request, message, text, echo
        self._tokens: list[int] = []  # already passed to `text`
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._steps: list[RoundStats] = []
        self._began, self._first, self._ended = time.perf_counter(), 0.0, 0.0
        self._reason: str | None = None
        self._is_aborted = self._has_warned = False
        self._pieces = self._iterate()

    def __iter__(self) -> Generator[Piece, None, None]:
        return self._pieces

    @property
    def choice(self) -> int:
        """The number of this answer among several to one prompt."""
        return self._request.choice

    def abort(self) -> None:
        """End the answer and return at once; safe in signal handlers and in any thread."""
        self._is_aborted = True

    def close(self) -> None:
        """End the answer here."""
        self.abort()
        self._pieces.close()

    def finish(self) -> Result:
        """Read the answer to its end and return all of it."""
        for _ in self._pieces:
            pass
        decoding, later = self._ended - self._first, len(self._tokens) - (self._steps[0].emitted if self._steps else 0)
        return Result(
            text="".join(self._texts),
            tokens=tuple(self._tokens),
            finish_reason=self._reason or "abort",
            method=self._owner.method,
            seed=self._request.seed,
            seconds=max(self._ended - self._began, 0.0),
            time_to_first_token=max(self._first - self._began, 0.0),
            tokens_per_second=max(later, 0) / decoding if decoding > 0 else 0.0,
            figures=summarize(self._steps),
            choice=self.choice,
            prompt_tokens=len(self._request.prompt),
            rounds=tuple(self._steps),
            reasoning="".join(self._thoughts),
        )

    def _iterate(self) -> Generator[Piece, None, None]:
        pauses = iter(PAUSES)
        if self._echo:
            yield self._shown(Piece(self._echo, (), False))
        while self._reason is None and not self._is_aborted:
            written = len(self._tokens)
            try:
                yield from self._attempt()
            except LinkError as error:
                pauses = iter(PAUSES) if len(self._tokens) > written else pauses
                pause = next(pauses, None) if self._tokens else None  # before the first token, a failure is reported
                if pause is None:
                    raise UserError(str(error)) from None
                if not self._has_warned:
                    warnings.warn(f"{error}; the answer continues when the link is back", stacklevel=2)
                self._has_warned = True
                self._sleep(pause)
        self._owner.check_drafter()
        self._text.finish()
        yield from self._news()

    def _sleep(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._is_aborted and (left := end - time.monotonic()) > 0:
            time.sleep(min(left, _POLL_SECONDS))

    def _attempt(self) -> Iterator[Piece]:
        """Send the request, draft for it, and yield its pieces until it ends; LinkError if the link breaks."""
        with self._owner.connect() as connection:
            connection.outbox.put(FromDrafter(request=self._message))
            answer = DraftedAnswer(self._owner, connection, self._request)
            try:
                silent_since = time.monotonic()
                while self._reason is None and not self._is_aborted:
                    message = connection.receive(_POLL_SECONDS)
                    if isinstance(message, Exception):
                        raise message
                    if message is not None:
                        silent_since = time.monotonic()
                        self._take(answer, message)
                        yield from self._news()
                    elif time.monotonic() > silent_since + PATIENCE:
                        raise LinkError(f"the link to {self._owner.address} was silent for {PATIENCE:g} seconds")
            except ProtocolError as error:
                raise UserError(f"the target at {self._owner.address} sent an invalid message: {error}") from None
            finally:
                answer.end()

    def _take(self, answer: DraftedAnswer, message: FromTarget) -> None:
        """Take the tokens of a message, up to the end of the answer."""
        for correction in answer.take(message):
            self._first = self._first or time.perf_counter()
            start = answer.length - len(correction.correction.tokens)
            new = list(correction.correction.tokens)[max(len(self._tokens) - start, 0) :]
            if not new:  # already yielded before the link broke
                continue
            kept = self._cut(new, answer.most_tokens)
            hit = "primary" if correction.correction.root_id > 0 else "miss"
            self._steps.append(RoundStats(0, len(kept) - 1, len(kept), hit=hit))
            stopped = self._text.watch(kept, len(kept) - 1)
            self._tokens += kept if stopped is None else kept[:stopped]
            self._ended = time.perf_counter()
            if stopped is not None:
                self._reason = "stop"
            if self._reason is not None:
                return
        if answer.finish_reason is not None:
            self._reason = self._reason or answer.finish_reason

    def _cut(self, tokens: list[int], max_tokens: int) -> list[int]:
        """Cut a round's tokens at the end of the answer, as the target does."""
        kept = list[int]()
        for token in tokens:
            kept.append(token)
            if token in self._request.stop_ids:
                self._reason = "stop"
            elif len(self._tokens) + len(kept) >= max_tokens:
                self._reason = "length"
            if self._reason is not None:
                break
        return kept

    def _news(self) -> Iterator[Piece]:
        while self._text.has_news:
            yield self._shown(self._text.pieces.popleft())

    def _shown(self, piece: Piece) -> Piece:
        self._texts.append(piece.text)
        self._thoughts.append(piece.reasoning)
        return piece


class DraftedAnswer:
    """One answer on the drafter's side: passes the target's messages to the drafter, and its levels to the target."""

    def __init__(self, owner: RemoteTarget, connection: TargetConnection, request: Request) -> None:
        self._owner, self._connection, self._request = owner, connection, request
        self._sent: SentRequest | None = None
        self._key: int | None = None
        self._has_hello = False
        self._own = owner.own._replace(num_tokens=1 << 31)  # the target may write ids that pad its vocabulary
        self.length, self.most_tokens = 0, request.max_tokens
        self.finish_reason: str | None = None

    def take(self, message: FromTarget) -> Iterator[Correct]:
        """Take a message; yield its corrections. UserError if the target refuses the request."""
        if message.HasField("hello"):
            if mismatch := self._owner.own.mismatch(message.hello):
                raise UserError(f"the target at {self._owner.address} does not fit: {mismatch}")
            longest = message.hello.max_positions
            self._own = self._own._replace(max_positions=max(longest, 1))
            self.most_tokens = min(self.most_tokens, longest - len(self._request.prompt))
            self._has_hello = True
        if not self._has_hello:
            raise ProtocolError(NO_HELLO)
        if message.HasField("ping"):
            self._connection.outbox.put(FromDrafter(pong=Pong(number=message.ping.number)))
        for event in message.events:
            kind = event.WhichOneof("content")
            if kind == "open":
                self.end()
                self._sent = SentRequest(self._request, event.open.next_id)
                self._key = self._owner.open(self._send, self._request, event.open.next_id)
            elif kind == "close":
                if event.close.error:
                    raise UserError(f"the target at {self._owner.address} refused: {event.close.error}")
                self.finish_reason = event.close.finish_reason or "abort"
            else:
                if self._sent is None:
                    raise ProtocolError("an event came before its request was opened")
                found = self._sent.read(self._key or 0, event, self._own)
                if isinstance(found, Correct):
                    self.length = found.correction.length
                    if not self._owner.own.has_tokens(found.correction.tokens):
                        self.end()  # the draft cannot read them
                if self._key is not None:
                    self._owner.post(found)
                if isinstance(found, Correct):
                    yield found

    def end(self) -> None:
        """End the drafting."""
        if self._key is not None:
            self._owner.close_request(self._key)
            self._key = None

    def _send(self, level: CandidateLevel, seconds: float) -> None:
        if self._sent is not None:
            self._sent.note(level)
            self._connection.outbox.put(NewLevel(0, level, seconds))
