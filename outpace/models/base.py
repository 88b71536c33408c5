"""The interface of all models: sessions with committed and pending tokens, and one forward pass over token trees."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
from outpace_kernels import PendingNodes

from outpace.core.drafting import Needs
from outpace.core.errors import UserError, check_whole
from outpace.core.logits import SparseLogits, TargetOutput
from outpace.core.tree import PREFIX
from outpace.core.types import Request

TEXT_CHUNK = 256  # tokens that a forward of `read_text` reads


class Capability(Enum):
    """An optional ability of a model: its name in error messages, and the runtimes whose models have it."""

    HIDDEN = "give hidden states of its layers", ("llama", "native", "transformers")
    LENGTH = "score after a prefix of the committed text", ("llama", "native")
    MLP_BIAS = "add a bias inside its MLPs", ("llama", "native")
    INPUTS = "take vectors in place of tokens", ("llama", "native")
    SKIP_SUBLAYERS = "leave out sublayers", ("llama", "native")
    PROJECT = "score a hidden state", ("llama", "native")


class UnsupportedModel(UserError):
    """Raised for a model that our own runtimes cannot run; transformers may run it."""


class Session:
    """Stores one sequence in a model: its committed tokens, followed by the pending tree nodes scored since.

    Pending nodes are numbered from 0 in the order in which they were scored; `keep` renumbers them. The position of a
    node is `length` + its depth. Slots are allocated in blocks, as they are needed. Subclasses define what a slot
    holds.
    """

    block = 64  # slots are allocated in whole blocks
    growth = 1.25  # growing copies what is stored, so it grows at least by this factor
    is_recurrent = False  # whether it has states after its committed tokens, which cannot be cut
    is_block = False  # whether all pending nodes see each other
    source_length = 0  # first tokens of the text, which an encoder reads; set when the session is opened for a request

    def __init__(self, capacity: int, max_pending: int) -> None:
        self.capacity = capacity  # maximum number of committed tokens
        self.max_pending = max_pending  # maximum number of pending nodes in addition to them
        self.slots = 0
        self.length = 0
        self._nodes = PendingNodes()
        self._snapshots: dict[int, Any] = {}  # states of recurrent layers, by the number of tokens that they follow

    @property
    def pending(self) -> int:
        return len(self._nodes)

    @property
    def pending_depths(self) -> list[int]:
        return self.depths_from(0)

    def depths_from(self, first: int) -> list[int]:
        """Return the depths of the pending nodes from number `first` on."""
        depths: list[int] = self._nodes.depths(first)
        return depths

    @property
    def free(self) -> int:
        """Number of nodes that can still be added."""
        return self.capacity + self.max_pending - self.length - self.pending

    def extend(self, parents: Sequence[int]) -> np.ndarray:
        """Reserve slots for new nodes; return which pending nodes each attends to: bool [new, pending with the new]."""
        rows = bytearray(self.extend_bytes(parents))
        return np.ndarray((len(parents), self.pending), bool, rows)

    def extend_bytes(self, parents: Sequence[int]) -> bytes:
        """Reserve slots as `extend` does, but return the mask as bytes, row after row."""
        before = len(self._nodes)
        after = self.length + before + len(parents)
        if after > self.capacity + self.max_pending:
            total, free = self.capacity + self.max_pending, self.free
            raise UserError(f"{len(parents)} more tokens do not fit: {free} of {total} slots are free")
        if after > self.slots:
            self.reserve(after)
        self._nodes.add(parents)
        mask: bytes = self._nodes.mask(before)
        return b"\1" * len(mask) if self.is_block else mask

    def slots_after(self, slots: int, exact: bool = False) -> int:
        """Return how many slots the session has after `reserve(slots, exact)`."""
        grown = slots if exact else max(slots, int(self.slots * self.growth))
        return self._whole_blocks(grown) if slots > self.slots else self.slots

    def reserve(self, slots: int, exact: bool = False) -> None:
        """Grow to at least `slots` slots, or to just as many if `exact`. What is stored is kept."""
        if slots > self.slots:
            self._resize(after := self.slots_after(slots, exact))
            self.slots = after

    def trim(self, exact: bool = False) -> None:
        """Free the unused slots, if they are more than growing would leave or if `exact`."""
        used = self._whole_blocks(self.length + self.pending)
        if used * (1.0 if exact else self.growth) < self.slots:
            self._resize(used)
            self.slots = used

    def keep(self, path: Sequence[int], live: Sequence[int] = ()) -> None:
        """Commit the pending nodes of `path` (a branch, root first) and drop all others but `live`.

        The `live` nodes are descendants of the last node of `path`, parents first; they are renumbered from 0.
        """
        if self.length + len(path) > self.capacity:
            raise UserError(f"the text grows past {self.capacity} tokens, all that this session holds")
        if not path and not self._nodes:
            return
        source = [*path, *live]
        if source != list(range(len(source))):
            self._move([self.length + node for node in source], self.length)
        self.length += len(path)
        self._nodes.keep(live)

    @property
    def num_snapshots(self) -> int:
        return len(self._snapshots)

    def take_snapshot(self) -> None:
        """Remember the states after the committed tokens, so that the session can be cut there."""
        if self.is_recurrent and self.length:
            self._snapshots[self.length] = self._save_state()

    def drop_snapshots(self, count: int = 0) -> None:
        """Forget all snapshots but the `count` longest."""
        self._snapshots = dict(sorted(self._snapshots.items())[max(0, len(self._snapshots) - count) :])

    def cut_below(self, length: int, total: int | None = None) -> int:
        """Return how many of the first `length` committed tokens the session can be cut to, or another start from.
        `total`: tokens that it will have committed by then; None: as now. An encoder reads its source as a whole."""
        if length < self.source_length:
            return 0
        if not self.is_recurrent or length == (self.length if total is None else total):
            return length
        return max((cut for cut in self._snapshots if cut <= length), default=0)

    def truncate(self, length: int) -> None:
        """Drop pending nodes, and all committed tokens from position `length` on; see `cut_below`."""
        if not 0 <= length <= self.length or length != self.cut_below(length):
            raise ValueError(f"cannot truncate {self.length} tokens to {length}")
        if self.is_recurrent:
            self._load_state(self._state_after(length))
            self._snapshots = {cut: saved for cut, saved in self._snapshots.items() if cut <= length}
        self.length = length
        self._nodes.keep([])

    def start_from(self, other: Session, length: int) -> None:
        """Copy the first `length` committed tokens of `other`, a session of the same model, into this empty session;
        see `cut_below`."""
        if self.length or self.pending or not 0 <= length <= min(other.length, self.capacity):
            raise ValueError(f"cannot start with {length} of {other.length} tokens: {self.length} are here already")
        if length != other.cut_below(length):
            raise ValueError(f"cannot start with {length} tokens: the other session has no state there")
        self.reserve(length)
        self._copy(other, length)
        if self.is_recurrent:
            self._load_state(other._state_after(length))
        self.length = length

    def _state_after(self, length: int) -> Any:
        """Return the states after `length` committed tokens; None at the beginning."""
        return self._save_state() if length == self.length else self._snapshots.get(length)

    def _save_state(self) -> Any:
        """Return the states after the committed tokens, which nothing changes afterwards."""
        raise NotImplementedError

    def _load_state(self, saved: Any) -> None:
        """Continue from saved states, or from the beginning of a text with None; nothing is pending then."""
        raise NotImplementedError

    def _whole_blocks(self, slots: int) -> int:
        return min(-(-slots // self.block) * self.block, self.capacity + self.max_pending)

    def _resize(self, slots: int) -> None:
        """Change the number of slots from `self.slots` to `slots`, keeping what is stored."""
        raise NotImplementedError

    def _move(self, source: Sequence[int], start: int) -> None:
        """Copy slots `source` to start, start + 1, ... (the ranges may overlap)."""
        raise NotImplementedError

    def _copy(self, other: Any, length: int) -> None:
        """Copy the first `length` slots of another session of the same model."""
        raise NotImplementedError


class Part(NamedTuple):
    """One session's share of a forward pass: new tree nodes, and what to return for them.

    `parents` are pending nodes (the session's earlier ones, then the new ones, counted on) or PREFIX. `logit_rows`
    lists the new nodes, numbered from 0, whose logits are returned. `keep` is applied first: those pending nodes are
    committed and all others are dropped; with None all stay pending. `best`: number of top tokens to return for each
    logit row, from models that can; see `SparseLogits`.

    The other fields need capabilities of the model. `hidden_rows`: new nodes whose hidden states are returned.
    `length`: the nodes follow only this many of the committed tokens. `mlp_bias`, [layers, MLP width] for all nodes or
    [nodes, layers, MLP width], is added to the MLPs' up projections. `inputs` [nodes, width] replace the tokens'
    embeddings.
    """

    session: Any
    tokens: Sequence[int]
    parents: Sequence[int]
    logit_rows: Sequence[int]
    keep: Sequence[int] | None = None
    hidden_rows: Sequence[int] = ()
    length: int | None = None
    mlp_bias: Any = None  # array or tensor
    inputs: Any = None
    best: int = 0


def chain(session: Any, tokens: Sequence[int], logit_rows: Sequence[int] = (), keep: Sequence[int] = ()) -> Part:
    """Make a part that continues the committed tokens by one branch. Pending nodes outside `keep` are dropped."""
    return Part(session, tokens, range(PREFIX, len(tokens) - 1), logit_rows, keep)


def read_text(model: Model, text: Sequence[int], first: int) -> Iterator[tuple[int, SparseLogits]]:
    """Read a text, `TEXT_CHUNK` tokens in a forward. Yield, for each forward with positions from `first` on, the first
    of them and their logits."""
    session, keep = model.open(len(text), TEXT_CHUNK), range(0)
    for start in range(0, len(text), TEXT_CHUNK):
        part = text[start : start + TEXT_CHUNK]
        rows = range(max(first - start, 0), len(part))
        logits = model.score_sparse([chain(session, part, rows, keep)])
        keep = range(len(part))
        if rows:
            yield start + rows[0], logits


def apply_keep(forest: Sequence[Part]) -> list[Part]:
    """Commit the pending nodes that each part keeps and drop the others; return the parts without their `keep`.

    So the keys and values of rejected tokens are dropped at the beginning of the next pass, not after the verdict.
    """
    parts = []
    for part in forest:
        if part.keep is not None:
            part.session.keep(part.keep)
            part = part._replace(keep=None)
        parts.append(part)
    return parts


class Model:
    """A language model that scores token trees.

    A subclass sets `vocab_size`, `max_positions`, `device` and `token_bytes`, and implements `open` and one of
    `_score_hidden` and, if it gives no hidden states, `_score`; everything else has a default. Callers use `score`,
    `score_hidden` or `score_sparse`, which drop the rejected nodes of the last pass first (see `apply_keep`).
    """

    vocab_size: int
    max_positions: int
    device: Any
    dtype: Any = None  # the torch type it computes in; None if it is not computed by torch
    exact: bool = False  # whether a row's bits depend on its own token, prefix and ancestors only
    supports_trees: bool = True  # whether a token tree takes one forward pass; otherwise each branch takes one
    notice: str | None = None  # a sentence about this model for its users
    num_layers: int = 0  # number of layers; 0: unknown
    chunk: int = 0  # most prompt tokens in a pass, where more would take much memory; 0: any number
    draft_window: int = 0  # number of trailing tokens it reads when it drafts; 0: the whole text
    mask_token: int | None = None  # token that marks a position to predict, in models trained to draft in parallel
    decoder_start: tuple[int, ...] = ()  # tokens between the source and the answer of an encoder-decoder model
    max_source: int = 0  # most tokens of a source
    steering: Any = None  # of a draft: biases its MLPs by the target's hidden states, see models/heads/steering.py
    capabilities: frozenset[Capability] = frozenset()
    row_counts: Sequence[int] = ()  # row counts that exact mode pads to
    stage: range | None = None  # the layers of a pipeline's stage, by their numbers in the whole model
    is_pipeline = False  # whether other ranks hold some of the layers

    @property
    def max_hidden_layer(self) -> int:
        """Number of layers after which hidden states can be returned at most."""
        return self.num_layers

    @property
    def distinct_experts(self) -> float:
        """Number of experts that a layer applied in the last pass: the mean over the layers with experts, 0 if none."""
        return 0.0

    @property
    def promised_bytes(self) -> int:
        """Bytes of memory that weights may still take, because they are loaded when passes need them."""
        return 0

    @property
    def precision(self) -> str:
        """Format of the weights: int8, or the name of a torch type; "" if unknown."""
        return "" if self.dtype is None else str(self.dtype).removeprefix("torch.")

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values per slot of a session."""
        raise NotImplementedError

    @property
    def state_bytes(self) -> int:
        """Bytes of a session's recurrent states, and of each snapshot of them."""
        return 0

    def session_bytes(self, slots: int) -> int:
        """Return the bytes that a session with `slots` slots takes, without snapshots."""
        return slots * self.token_bytes + self.state_bytes

    def source_length(self, prompt: int) -> int:
        """Return how many of the tokens of a prompt of this length an encoder reads; 0 without an encoder."""
        return max(prompt - len(self.decoder_start), 0) if self.decoder_start else 0

    def max_length(self, prompt: int) -> int:
        """Return the most tokens of a text that begins with a prompt of this length; 0 if its source is too long."""
        source = self.source_length(prompt)
        return self.max_positions + source if source <= self.max_source else 0

    def complete(self, request: Request) -> Request:
        """Return the request with what the model's generation needs besides the user's prompt and parameters. UserError
        for a prompt without a text."""
        return request

    def stored_bytes(self, slots: Sequence[int]) -> int:
        """Return the bytes that sessions with these numbers of slots take together."""
        return sum(map(self.session_bytes, slots))

    @property
    def is_asynchronous(self) -> bool:
        """Whether a pass returns before the device has computed it; the host then waits when it reads the output."""
        return str(self.device) != "cpu"

    @property
    def reduced_output(self) -> ReducedOutput | None:
        """What the output layer keeps after `reduce_output`; None: all."""
        return None

    def reduce_output(self, tokens: int | None) -> None:
        """Score only the first `tokens` of the vocabulary, and others that the model has read; all others get -inf.

        None: as many as make passes much shorter, if any. UserError if the runtime cannot, or for a smaller vocabulary.
        """
        if tokens is not None:
            raise UserError(
                f"draft_vocab {tokens} is for draft models by the runtimes native and llama, this one is by another"
            )

    @property
    def num_captures(self) -> int:
        """Number of passes captured so far, for instance as CUDA graphs. A call that captures a pass takes longer, so
        its time is not used."""
        return 0

    def reserve_sessions(self, count: int, max_bytes: int) -> None:
        """Make room for this many sessions with short texts, where sessions share a store that moves when it grows; it
        may keep up to `max_bytes`."""

    def capture_passes(self, sizes: Sequence[tuple[int, int]], layers: Sequence[int] = ()) -> None:
        """Capture passes in advance, where passes are captured. `sizes`: sessions of a pass, and nodes of each;
        `layers`: as in `score_hidden`."""

    @property
    def weight_bytes(self) -> int | None:
        """Bytes of weights that one pass reads; None if unknown."""
        return None

    @property
    def instruction_set(self) -> str | None:
        """Instruction set of the native kernels; None if torch computes."""
        return None

    def open(self, capacity: int, max_pending: int) -> Any:
        """Create a session for at most `capacity` committed tokens and `max_pending` pending nodes."""
        raise NotImplementedError

    def score(self, forest: Sequence[Part]) -> Any:
        """Apply each part's `keep`, run one forward pass, and return the nodes' logits: [logit rows, vocab]"""
        check_forest(self, forest)
        return self._score(apply_keep(forest))

    def score_hidden(self, forest: Sequence[Part], layers: Sequence[int]) -> TargetOutput:
        """Run a pass as `score` does; also return hidden states of the nodes after these numbers of layers.

        They are taken before the final norm; 0 means the input of the first layer.
        """
        self.check_capability(Capability.HIDDEN)
        check_forest(self, forest)
        return self._score_hidden(apply_keep(forest), layers)

    def score_sparse(self, forest: Sequence[Part]) -> SparseLogits:
        """Run a pass as `score` does, but return logits only for the tokens that the output layer has rows for."""
        return SparseLogits(scores := self.score(forest), None, scores.shape[-1])

    def score_sparse_hidden(self, forest: Sequence[Part], layers: Sequence[int]) -> tuple[SparseLogits, Any]:
        """Return sparse logits and hidden states, as `score_hidden` does."""
        found = self.score_hidden(forest, layers)
        return SparseLogits(found.logits, None, found.logits.shape[-1]), found.hidden

    def _score(self, forest: Sequence[Part]) -> Any:
        return self._score_hidden(forest, ()).logits

    def _score_hidden(self, forest: Sequence[Part], layers: Sequence[int]) -> TargetOutput:
        raise NotImplementedError

    def skip_sublayers(self, attention: Collection[int], mlp: Collection[int]) -> Model:
        """Return a model with the same weights and sessions that skips these layers' attention and MLP."""
        raise unsupported(self, Capability.SKIP_SUBLAYERS)

    def embed(self, tokens: Sequence[int]) -> Any:
        """Return the embeddings of tokens, which `Part.inputs` replaces: [tokens, width]"""
        raise unsupported(self, Capability.INPUTS)

    def limit_window(self, tokens: int) -> None:
        """Let all layers see at most this many trailing tokens; called before sessions are opened."""
        raise NotImplementedError

    def project(self, hidden: Any) -> SparseLogits:
        """Return the logits of hidden states taken before the final norm: [rows, width] to [rows, output rows]"""
        raise unsupported(self, Capability.PROJECT)

    def limit_threads(self, max_threads: int | None = None, leave: int = 0) -> None:
        """Limit this thread's passes to `max_threads` CPU threads, leaving `leave` cores idle. Results do not
        change."""

    def check_capability(self, capability: Capability) -> None:
        """Raise UserError if the model does not have this capability."""
        if capability not in self.capabilities:
            raise unsupported(self, capability)


class ReducedOutput(NamedTuple):
    """What a reduced output layer scores: the first tokens of the vocabulary, and others that were added since.

    `share`: the layer's part of the bytes of weights that a pass reads.
    """

    first: int
    added: int
    vocab: int
    share: float

    def __str__(self) -> str:
        return (
            f"the first {self.first:,} of {self.vocab:,} tokens and {self.added:,} others:"
            f" {self.share:.0%} of the bytes of a step"
        )


def runtime_name(model: Model) -> str:
    """Return the names of a model's runtime (of a pipeline, that of its stages) and precision, on which its hidden
    states depend."""
    return f"{type(getattr(model, 'first', model)).__name__} {getattr(model, 'precision', model.dtype)}"


def unsupported(model: Model, capability: Capability) -> UserError:
    """Make the error for a capability that a model lacks."""
    ability, runtimes = capability.value
    if model.decoder_start:
        return UserError(f"an encoder-decoder model cannot {ability}")
    if model.state_bytes:
        return UserError(f"a model with recurrent layers cannot {ability}")
    return UserError(f"{type(model).__name__} cannot {ability}, models of the runtime {' or '.join(runtimes)} can")


def check_decoder_only(model: Model, name: str, what: str) -> None:
    """Raise UserError for an encoder-decoder model; `what` takes only others."""
    if model.decoder_start:
        raise UserError(f"{name} is an encoder-decoder model: {what} takes decoder-only models")


def check_needs(model: Model, needs: Needs) -> None:
    """Raise UserError if a target's passes cannot provide what is needed."""
    check_whole("top", needs.top, 0, model.vocab_size)
    if needs.layers:
        model.check_capability(Capability.HIDDEN)
    for layer in needs.layers:
        check_whole("a layer whose hidden states are needed", layer, 0, model.max_hidden_layer)


def check_forest(model: Model, forest: Sequence[Part]) -> None:
    """Raise UserError for a part that needs a capability which the model lacks."""
    for part in forest:
        if part.length is not None:
            model.check_capability(Capability.LENGTH)
        if part.mlp_bias is not None:
            model.check_capability(Capability.MLP_BIAS)
        if part.inputs is not None:
            model.check_capability(Capability.INPUTS)


def row_numbers(forest: Sequence[Part]) -> list[int]:
    """Return the logit rows, counted over the nodes of all parts."""
    starts = itertools.accumulate((len(part.tokens) for part in forest), initial=0)
    return [start + node for part, start in zip(forest, starts, strict=False) for node in part.logit_rows]


def hidden_row_numbers(forest: Sequence[Part]) -> list[int]:
    """Return the rows whose hidden states are returned, counted over the nodes of all parts."""
    return row_numbers([part._replace(logit_rows=part.hidden_rows) for part in forest])
