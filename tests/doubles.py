"""Toy targets, drafters by name, and one helper that decodes with any method and says what it met."""

from __future__ import annotations

import math
import random
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from light import DrafterDiedError as DrafterDiedError
from light import Empty as Empty
from light import Wrapped, failing
from outpace_kernels import NodeDelta
from torch import Tensor
from toy import Toy, ToySession

from outpace.card.cache import CandidateLevel
from outpace.card.inline import InlineWorker, SimulatedClock
from outpace.card.thread import ThreadWorker
from outpace.core import registry
from outpace.core.logits import SparseLogits
from outpace.core.sampling import GREEDY, Sampling
from outpace.core.stats import RoundStats, RunStats, summarize
from outpace.core.tree import TokenTree
from outpace.core.types import Observation, Request, Row
from outpace.decoders.autoregressive import Autoregressive
from outpace.decoders.base import Decoder, DecoderGenerator, RequestContext
from outpace.drafters import model as draft_model
from outpace.drafters import ngram
from outpace.drafters._composite import SharedTree
from outpace.engine.engine import Engine, EngineOptions
from outpace.engine.sequence import TokenSequence
from outpace.models.base import Model, Part, apply_keep
from outpace.models.heads.config import HeadConfig
from outpace.models.heads.files import HeadFiles
from outpace.models.heads.head import Head
from outpace.models.heads.kinds.block import BlockHead
from outpace.models.heads.kinds.features import FeatureHead
from outpace.models.heads.kinds.slots import SlotHead
from outpace.models.heads.steering import Steering

T = TypeVar("T")
DRAFTERS = ("perfect", "garbage", "empty", "ngram", "model", "both")
torch.set_num_threads(1)  # rows of 16 numbers: a pool of threads only makes them wait for one another
SMALL = EngineOptions(nodes=12, rows=36, chunk=4)  # prompts travel in pieces


class Candidate(NamedTuple):
    """One node of a level, by its columns."""

    node_id: int
    parent_id: int
    token: int
    log_prob: float
    role: int


def level_of(root_id: int, candidates: Sequence[Candidate] = ()) -> CandidateLevel:
    """Return the message of a drafter that proposes these candidates."""
    ids, parents, tokens, log_probs, roles = [[*column] for column in zip(*candidates, strict=True)] or [[]] * 5
    return CandidateLevel(root_id, NodeDelta((ids, parents, tokens, roles, log_probs)))


def decoder_of(decode: Any, drafting: str | None = None) -> type[Decoder]:
    """Return a decoder class that runs the generator function `decode(context, options)`."""

    class Custom(Decoder):
        name = "custom"
        Options = Autoregressive.Options

        def decode(self, context: RequestContext, options: Any) -> DecoderGenerator:
            return decode(context, options)

    Custom.drafting = drafting
    return Custom


class QuickToy(Toy):
    """A toy that remembers its rows by the tokens that they depend on; many requests of one run share them."""

    def __init__(self, vocab_size: int = 16, order: int = 3, seed: int = 0, agreement: float = 1.0) -> None:
        super().__init__(vocab_size, order, seed, agreement)
        self._rows: dict[tuple[int, ...], Tensor] = {}

    def skip_sublayers(self, attention: Collection[int], mlp: Collection[int]) -> QuickToy:
        other = super().skip_sublayers(attention, mlp)
        other._rows = {}
        return other

    def _row(self, context: Sequence[int]) -> Tensor:
        seen = tuple(int(token) for token in context[-self.num_layers :])
        if seen not in self._rows:
            self._rows[seen] = super()._row(seen)
        return self._rows[seen].clone()


class ToyLayers(QuickToy):
    """Layers of a head that predict as the toy does, whatever their inputs are."""

    def score_sparse_hidden(self, forest: Sequence[Part], layers: Sequence[int]) -> tuple[SparseLogits, Any]:
        found = self._score_hidden([part._replace(inputs=None) for part in forest], layers)
        return SparseLogits(found.logits, None, self.vocab_size), torch.empty(
            1, 0
        ) if found.hidden is None else found.hidden


class ToyBlockLayers(QuickToy):
    """Layers of a head that reads tokens in place of features, and predicts after the text and its own best tokens."""

    def store_inputs(self, parts: Sequence[Part]) -> None:
        for part in parts:
            session, start = part.session, part.session.length
            session.extend(part.parents)
            session.tokens[start : start + len(part.tokens)] = part.inputs[:, 0]

    def score_sparse(self, forest: Sequence[Part]) -> SparseLogits:
        rows = []
        for part in forest:
            known = [*part.session.tokens[: part.session.length].tolist(), part.tokens[0]]
            part.session.extend(part.parents)
            for _ in part.logit_rows:
                rows.append(self._row(known))
                known.append(int(rows[-1].argmax()))
        return SparseLogits(torch.stack(rows), None, self.vocab_size)


class NoWeights:
    """What a toy's head loads: nothing."""

    files = HeadFiles(Path("toy"), {}, {})
    target = None

    def storing(self, layers: Any) -> Any:
        return layers.store_inputs

    def vector(self, name: str) -> None:
        return None

    def receive(self, hidden: Tensor) -> Tensor:
        return hidden


def spec_of(**fields: Any) -> HeadConfig:
    return cast(HeadConfig, SimpleNamespace(taps=(1,), norm_output=False, norm_before_residual=False, **fields))


class ToyHead(FeatureHead):
    """A head whose features do not matter: it predicts as the toy does after all tokens but the first."""

    def __init__(self, *sizes: Any) -> None:
        super().__init__(spec_of(logit_scale=1.0, mask_token=None), cast(Any, NoWeights()), ToyLayers(*sizes))

    def fuse(self, hidden: Tensor) -> Tensor:
        return hidden[0]


class ToyBlock(BlockHead):
    """A head that recognises the text's tokens in the hidden states of the toy with seed 0."""

    def __init__(self, *sizes: Any) -> None:
        spec = spec_of(block=3, num_drafted=3, from_anchor=True, mask_token=0)
        super().__init__(spec, cast(Any, NoWeights()), ToyBlockLayers(*sizes))

    def fuse(self, hidden: Tensor) -> Tensor:
        table = QuickToy(self.vocab_size, 3, 0)._tables[0]
        return torch.cdist(hidden[0], table).argmin(dim=1)[:, None]


class ToySlots(SlotHead):
    """A SpecFormer head that ignores its features: its slots predict what the toy would write after the text without
    its first token."""

    def __init__(self, *sizes: Any) -> None:
        Head.__init__(self, spec_of(block=3), cast(Any, NoWeights()), ToyLayers(*sizes))

    @property
    def weight_bytes(self) -> None:  # type: ignore[override]
        return None

    @property
    def num_captures(self) -> int:
        return 0

    def fuse(self, hidden: Tensor) -> Tensor:
        return hidden[0]

    def make_inputs(self, features: Tensor, part: Part) -> Tensor:
        return features

    def score_sparse(self, forest: Sequence[Part]) -> SparseLogits:
        rows, parts = [], apply_keep(forest)
        for part, call in zip(parts, self._calls(parts), strict=True):
            session = part.session
            self.layers._score_hidden([call._replace(inputs=None, logit_rows=(), hidden_rows=())], ())
            session.outputs += [None] * len(part.tokens)
            for node in part.logit_rows:
                known = session.tokens[: session.length + session.pending - len(part.tokens) + node + 1].tolist()
                for _ in range(self.spec.block):
                    rows.append(self.layers._row(known))
                    known.append(int(rows[-1].argmax()))
        return SparseLogits(torch.stack(rows) if rows else torch.empty(0, self.vocab_size), None, self.vocab_size)


class ToySteered(QuickToy):
    """A toy with a steering that changes no prediction, because a toy has no MLPs."""

    def __init__(self, vocab_size: int = 16, order: int = 3, seed: int = 0) -> None:
        super().__init__(vocab_size, order, seed)
        ones, zeros = torch.ones(vocab_size), torch.zeros(vocab_size)
        self.steering = Steering((1,), order, _same, _same, ones, zeros, lambda rows: rows.repeat(1, order))


def _same(rows: Any) -> Any:
    return rows


class Watched(draft_model.ModelDrafter):
    """A model drafter that counts full trees and compares its storage with the committed text after every verdict."""

    def __init__(self, model: Toy, options: draft_model.Options) -> None:
        super().__init__(model, options)
        self._tree_nodes = options.tree_nodes
        self.met: Counter[str] = Counter()

    def grow(self, states: Sequence[Any], trees: Sequence[TokenTree]) -> None:
        self.met["full tree"] += sum(len(tree) >= self._tree_nodes for tree in trees)
        super().grow(states, trees)

    def observe(self, state: Any, seen: Observation) -> None:
        super().observe(state, seen)
        assert state.tokens[-1] == seen.tree.tokens[0], "the drafter's root is not the last committed token"
        check_session(state.session, state.tokens)


def sleepy(inner: Any, seed: int, most_seconds: float = 0.001) -> Wrapped:
    """Sleeps a random fraction of a millisecond before each verb, or not at all."""
    chance = random.Random(seed)
    return Wrapped(inner, lambda verb: time.sleep(chance.choice((0.0, 0.0, chance.random())) * most_seconds))


def make_drafter(name: str, target: Toy, *, width: int = 4, tree_nodes: int = 64, floor: float = 0.005) -> Any:
    """A new drafter by name; `width` 1 makes chains."""
    options = draft_model.Options(width=width, tree_nodes=tree_nodes, floor=floor)
    order, vocab = len(target._tables), target.vocab_size
    if name == "perfect":
        return Watched(target, options)
    if name == "garbage":
        return Watched(QuickToy(vocab, 2, 99), options)
    if name == "empty":
        return Empty()
    table = ngram.NgramDrafter(ngram.Options(branches=min(width, 2)))
    if name == "ngram":
        return table
    near = QuickToy(vocab, order, 0, 0.7)
    near._tables = 0.75 * target._tables + 0.25 * near._tables
    partial = Watched(near, options)
    return {"model": partial, "both": SharedTree([table, partial]), "failing": failing(partial)}[name]


@lru_cache
def make_rule(name: str) -> Any:
    """A rule by its file's name, the same for all requests, so that equal requests are equal."""
    return registry.find("rules", name)()


def make_request(prompt: Sequence[int], rule: Any = "greedy", max_tokens: int = 40, **options: Any) -> Request:
    """A request; `rule` by name or as it is, `temperature` and filters among the options."""
    names = ("temperature", "top_k", "top_p", "min_p")
    sampling = Sampling(**{name: options.pop(name) for name in names if name in options})
    rule = make_rule(rule) if isinstance(rule, str) else rule
    return Request(tuple(prompt), rule, max_tokens, options.pop("sampling", sampling) or GREEDY, **options)


@dataclass(frozen=True)
class Outcome:
    """What a run wrote and met, in the order of its requests."""

    texts: list[list[int]]
    reasons: list[str | None]
    steps: list[list[RoundStats]]
    figures: RunStats
    counts: Counter[str]  # of all candidate caches
    failure: BaseException | None  # the worker's


def decode(
    requests: Sequence[Request],
    method: str = "autoregressive",
    drafter: Any = None,
    *,
    worker: Any = None,
    target: Model,
    engine: EngineOptions = SMALL,
    clock: SimulatedClock | None = None,
    seconds: Callable[[], float] = time.perf_counter,
    check_storage: bool = True,
    **options: Any,
) -> Outcome:
    """Runs all requests in one engine to their end. `worker` is None, "inline", "thread" or a worker. `seconds` is what
    the engine times by.

    Raises what a coroutine raised; fails where the text does not end in as many steps as it has tokens, where a thread
    hangs, and where the target's storage is not the committed text.
    """
    if worker == "inline":
        worker = InlineWorker(drafter, clock)

    def run() -> Outcome:
        beside = ThreadWorker(drafter).start() if worker == "thread" else worker
        with Engine(target, None if beside else drafter, beside, engine, seconds) as parts:
            return _drive(parts, requests, registry.find("decoders", method), options, check_storage)

    return within(60.0, run) if worker == "thread" else run()


def _drive(
    parts: Engine, requests: Sequence[Request], decoder: Any, options: Mapping[str, Any], check_storage: bool
) -> Outcome:
    if check_storage:
        check_when_closed(parts)
    runs = [parts.submit(request, decoder, decoder.Options(**options)) for request in requests]
    limit = 10 + sum(len(request.prompt) + request.max_tokens for request in requests)
    for _ in range(limit):
        if all(run.finish_reason is not None for run in runs):
            break
        parts.step()
    for run in runs:
        if run.error is not None:
            raise run.error
        assert run.finish_reason is not None, f"no end after {limit} steps"
    counts: Counter[str] = Counter()
    for run in runs:
        counts.update(run.context.candidates.counts if decoder.drafting == "parallel" else {})
    failure = parts.worker.failure if parts.worker else None
    steps = [run.history.steps for run in runs]
    figures = summarize(step for some in steps for step in some)
    return Outcome([run.tokens for run in runs], [run.finish_reason for run in runs], steps, figures, counts, failure)


def check_session(session: ToySession, text: Sequence[int]) -> None:
    """What is kept must be what a fresh prefill of the text would keep."""
    kept = session.tokens[: session.length]
    assert np.array_equal(kept, np.asarray(text[: session.length])), f"kept {kept.tolist()} of the text {list(text)}"


def check_when_closed(parts: Engine) -> None:
    """Every request's storage is compared with its text when the engine takes it back."""
    close = parts.memory.close

    def checked(run: TokenSequence) -> None:
        session = run.kv.session
        close(run)
        check_session(session, run.committed)

    parts.memory.close = checked  # type: ignore[method-assign]


def write(target: Toy, request: Request) -> list[int]:
    """Plain decoding without engine, session, tree or batch: the reference of the reference."""
    text = list(request.prompt)
    for _ in range(request.max_tokens):
        row = Row(request, text)
        text += request.rule.reduce(target._row(text)[None], [row])
        if text[-1] in request.stop_ids:
            break
    return text[len(request.prompt) :]


def probabilities(logits: Tensor, sampling: Sampling) -> list[float]:
    """p after temperature, top-k, top-p and min-p, token by token and without ties: a slow twin of `processed`."""
    if sampling.is_greedy:
        return [float(token == logits.argmax()) for token in range(len(logits))]
    p = torch.softmax(logits.double() / sampling.temperature, dim=-1).tolist()
    ranked = sorted(range(len(p)), key=lambda token: -p[token])
    kept = ranked[: sampling.top_k or len(p)]
    total = sum(p[token] for token in kept)
    nucleus, mass = [], 0.0
    for token in kept:
        if mass < sampling.top_p * total:
            nucleus.append(token)
        mass += p[token]
    nucleus = [token for token in nucleus if p[token] >= sampling.min_p * p[ranked[0]]]
    total = sum(p[token] for token in nucleus)
    return [p[token] / total if token in nucleus else 0.0 for token in range(len(p))]


def chi_square(seen: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Standard deviations by which the statistic lies above its mean (Wilson and Hilferty's cube root)."""
    total = sum(seen.values())
    cells = [(seen[text], total * p) for text, p in expected.items() if p > 0]
    assert sum(count for count, _ in cells) == total, "a text of probability 0 was written"
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    freedom = len(cells) - 1
    return ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


def within(seconds: float, work: Callable[[], T]) -> T:
    """The result of `work`, done in a thread of its own; an AssertionError where it hangs."""
    results: list[T] = []
    errors: list[BaseException] = []

    def body() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=body, name="test-watchdog-body", daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"hangs: not done within {seconds} seconds"
    if errors:
        raise errors[0]
    return results[0]


def collect_warnings(work: Callable[[], T]) -> tuple[T, list[str]]:
    """The result of `work` and the messages of the warnings that it gave."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = work()
    return result, [str(warning.message) for warning in caught]
