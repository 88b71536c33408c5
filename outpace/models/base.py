"""What every model offers: sessions with committed and pending tokens, and one forward for a whole forest."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from outpace.core.carried import Pairs
from outpace.core.drafting import Needs
from outpace.core.errors import UserError, check_whole
from outpace.core.logits import SparseLogits, TargetOutput
from outpace.core.multi_step import SupportsMultiStep
from outpace.core.tree import PREFIX

if TYPE_CHECKING:
    from torch import Tensor


class Capability(Enum):
    """What a model may do beside scoring trees, and the runtimes whose models do."""

    HIDDEN = "give hidden states of its layers", ("llama", "native", "transformers")
    LENGTH = "score behind a part of a text alone", ("llama", "native")
    STEER = "be steered in its MLPs", ("llama", "native")
    INPUTS = "take vectors in place of tokens", ("llama", "native")
    WITHOUT = "leave out sublayers", ("llama", "native")
    PROJECT = "score a hidden state", ("llama", "native")


class UnsupportedModel(UserError):
    """A model that our own runtimes refuse as not theirs to run; transformers may run it."""


class Session:
    """One request's storage in a model: committed tokens, and behind them the pending nodes scored since.

    Pending nodes are numbered from 0 in the order in which they were scored; `keep` renumbers them. A node's position
    in the text is `length` + its depth. Slots are made as they are needed, in blocks. Subclasses move what a
    slot holds.
    """

    block = 64  # a session has whole blocks of slots
    growth = 1.25  # times as many at least when it grows: what is held is copied then

    def __init__(self, capacity: int, room: int) -> None:
        self.capacity = capacity  # committed tokens at most
        self.room = room  # pending nodes at most beside so many
        self.slots = 0
        self.length = 0
        self.pending_depths: list[int] = []
        self._parents: list[int] = []  # by pending node
        self._sees: list[bytes] = []  # by pending node: 1 for those that it sees, 0 for others, itself the last

    @property
    def pending(self) -> int:
        return len(self.pending_depths)

    @property
    def free(self) -> int:
        """Nodes that may still come."""
        return self.capacity + self.room - self.length - self.pending

    def extend(self, parents: Sequence[int]) -> np.ndarray:
        """Reserves slots for new nodes; which pending nodes each sees, bool [new, pending with the new ones]."""
        rows = self.add(parents)
        return np.ndarray((len(parents), self.pending), bool, bytearray(rows))

    def add(self, parents: Sequence[int]) -> bytes:
        """As `extend`, in bytes, row by row."""
        before = len(self._sees)
        after = self.length + before + len(parents)
        if after > self.capacity + self.room:
            most, free = self.capacity + self.room, self.free
            raise UserError(f"{len(parents)} more tokens do not fit: {free} of {most} slots are free")
        self.reserve(after)
        self._hang(parents)
        if len(parents) == 1:
            return self._sees[before]
        total = len(self._sees)
        return b"".join([row.ljust(total, b"\0") for row in self._sees[before:]])

    def slots_after(self, slots: int, least: bool = False) -> int:
        """The slots that there are once `slots` are reserved."""
        more = slots if least else max(slots, int(self.slots * self.growth))
        return self._whole(more) if slots > self.slots else self.slots

    def reserve(self, slots: int, least: bool = False) -> None:
        """Makes slots until there are so many, and no more than that where `least`; what is held stays."""
        if slots > self.slots:
            self._resize(after := self.slots_after(slots, least))
            self.slots = after

    def trim(self) -> None:
        """Gives back the slots behind what is held, where they are more than growing leaves."""
        if (held := self._whole(self.length + self.pending)) * self.growth < self.slots:
            self._resize(held)
            self.slots = held

    def keep(self, path: Sequence[int], live: Sequence[int] = ()) -> None:
        """Commits the pending nodes of `path` (a branch, root first); of the rest only `live` stays, renumbered from 0.

        `live` nodes hang below the last of `path`, parents first. Everything else is dropped.
        """
        if self.length + len(path) > self.capacity:
            raise UserError(f"the text grows past {self.capacity} tokens, all that this session holds")
        if not self.pending_depths and not path:
            return
        source = [*path, *live]
        if source != list(range(len(source))):
            self._move([self.length + node for node in source], self.length)
        self.length += len(path)
        before = self._parents
        self._drop_pending()
        if live:
            places = {node: number for number, node in enumerate(live)}
            self._hang([places.get(before[node], PREFIX) for node in live])

    def truncate(self, length: int) -> None:
        """Forgets pending nodes and all committed tokens from position `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot truncate {self.length} tokens to {length}")
        self.length = length
        self._drop_pending()

    def start_from(self, other: Session, length: int) -> None:
        """An empty session begins with a copy of the first `length` tokens that `other` of the same model committed."""
        if self.length or self.pending or not 0 <= length <= min(other.length, self.capacity):
            raise ValueError(f"cannot start with {length} of {other.length} tokens: {self.length} stand here already")
        self.reserve(length)
        self._copy(other, length)
        self.length = length

    def _hang(self, parents: Sequence[int]) -> None:
        """New pending nodes below these."""
        sees, depths = self._sees, self.pending_depths
        self._parents += parents
        for parent in parents:
            above, depth = (b"", 0) if parent == PREFIX else (sees[parent], depths[parent] + 1)
            sees.append(above.ljust(len(sees), b"\0") + b"\1")
            depths.append(depth)

    def _whole(self, slots: int) -> int:
        return min(-(-slots // self.block) * self.block, self.capacity + self.room)

    def _drop_pending(self) -> None:
        self.pending_depths, self._parents, self._sees = [], [], []

    def _resize(self, slots: int) -> None:
        """Makes so many slots of `self.slots`; what is held stays."""
        raise NotImplementedError

    def _move(self, source: Sequence[int], start: int) -> None:
        """Copies slots `source` to start, start + 1, ... (they may overlap)."""
        raise NotImplementedError

    def _copy(self, other: Any, length: int) -> None:
        """Copies the first `length` slots of another session of the same model."""
        raise NotImplementedError


class Part(NamedTuple):
    """One session's part of a forest.

    `parents` point at pending nodes (the session's earlier ones, then these, counted on) or are PREFIX. `wanted` are
    the new nodes, numbered from 0, whose scores are asked for. `keep` is carried out first: those pending nodes are
    committed and all others dropped; None leaves what is pending as it is.
    `best`: so many best tokens of each wanted row are told with the scores, by a model that can; see `SparseLogits`.

    The others need a model's `extras`. `shown` are the new nodes whose hidden states are asked for. `length`: only so
    many committed tokens are there, and the nodes come behind them. `steer` [layers, MLP width] is added to what each
    MLP's gate multiplies. `inputs` [nodes, width] stand where the tokens' embeddings would.
    """

    session: Any
    tokens: Sequence[int]
    parents: Sequence[int]
    wanted: Sequence[int]
    keep: Sequence[int] | None = None
    shown: Sequence[int] = ()
    length: int | None = None
    steer: Tensor | None = None
    inputs: Tensor | None = None
    best: int = 0


def chain(session: Any, tokens: Sequence[int], wanted: Sequence[int] = (), keep: Sequence[int] = ()) -> Part:
    """A part that continues the committed tokens by one branch; nothing may be pending but what `keep` keeps."""
    return Part(session, tokens, range(PREFIX, len(tokens) - 1), wanted, keep)


class Model(SupportsMultiStep, Pairs):
    """A language model that scores token trees: what a runtime must offer, and what one may leave out."""

    vocab_size: int
    max_positions: int
    device: Any
    dtype: Any = None  # what torch computes it in; None: torch does not
    exact: bool = False  # a row's bits depend on its own token, prefix and ancestors alone
    trees: bool = True  # a token tree is one forward; else every branch is one
    notice: str | None = None  # what its users are to know of it, in a sentence
    num_layers: int = 0  # of which `shallow` may leave some out; 0: it cannot
    draft_window: int = 0  # tokens of a text's end that suffice it to draft; 0: it is to read the whole text
    extras: frozenset[Capability] = frozenset()
    inflate: int = 1  # times as much as its own weights would that a pass costs
    lacks: str = ""  # why it cannot what other models of its runtime can
    row_counts: Sequence[int] = ()  # that rows are padded to, in exact mode

    @property
    def deepest(self) -> int:
        """The most layers after which it can give hidden states."""
        return self.num_layers

    @property
    def precision(self) -> str:
        """What its weights are held in: int8, or the name of a torch type; "" for a model that does not tell."""
        return "" if self.dtype is None else str(self.dtype).removeprefix("torch.")

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values that one slot of a session takes."""
        raise NotImplementedError

    def session_bytes(self, slots: int) -> int:
        """Bytes that a session of so many slots takes."""
        return slots * self.token_bytes

    def stored_bytes(self, slots: Sequence[int]) -> int:
        """Bytes that several sessions of so many slots each take together."""
        return sum(map(self.session_bytes, slots))

    @property
    def num_captures(self) -> int:
        """Number of passes captured so far, as CUDA graphs for instance: a call that captures takes longer."""
        return 0

    @property
    def weight_bytes(self) -> int | None:
        """Bytes of weights that one pass reads; None for a model that does not tell."""
        return None

    @property
    def instruction_set(self) -> str | None:
        """That of the native kernels; None where torch computes."""
        return None

    def open(self, capacity: int, room: int) -> Any:
        """A session for at most `capacity` committed tokens and `room` pending nodes."""
        raise NotImplementedError

    def score(self, forest: Sequence[Part]) -> Tensor:
        """One forward over all parts: logits of the wanted nodes, part after part. [wanted rows, vocab]"""
        raise NotImplementedError

    def score_hidden(self, forest: Sequence[Part], layers: Sequence[int]) -> TargetOutput:
        """As `score`, with hidden states of the shown nodes after so many layers each, before the final norm; 0: what
        goes into the first layer."""
        raise unsupported(self, Capability.HIDDEN)

    def score_held(self, forest: Sequence[Part]) -> SparseLogits:
        """As `score`, of those tokens alone that the model has output rows for."""
        return SparseLogits(scores := self.score(forest), None, scores.shape[-1])

    def without(self, attention: Collection[int], mlp: Collection[int]) -> Model:
        """The same weights on the same sessions, where the residual passes by these layers' attention and MLP."""
        raise unsupported(self, Capability.WITHOUT)

    def project(self, hidden: Tensor) -> SparseLogits:
        """Scores of hidden states as they are before the final norm. [rows, width] to [rows, held]"""
        raise unsupported(self, Capability.PROJECT)

    def limit_threads(self, most: int | None = None, leave: int = 0) -> None:
        """This thread's passes take at most `most` CPU threads and leave `leave` cores to others. No result changes."""

    def shallow(self, layers: Sequence[int]) -> Model:
        """A model of these layers alone, sharing their weights; for a model that has `num_layers`."""
        raise NotImplementedError


def unsupported(model: Model, extra: Capability) -> UserError:
    """The error for what a model cannot do."""
    what, runtimes = extra.value
    why = f"; {model.lacks}" if model.lacks else ""
    return UserError(f"{type(model).__name__} cannot {what}, models of the runtime {' or '.join(runtimes)} can{why}")


def check_needs(model: Model, needs: Needs) -> None:
    """UserError where a target's passes cannot give what is needed."""
    check_whole("top", needs.top, 0, model.vocab_size)
    if needs.layers and Capability.HIDDEN not in model.extras:
        raise unsupported(model, Capability.HIDDEN)
    for layer in needs.layers:
        check_whole("a layer whose hidden states are needed", layer, 0, model.deepest)


def check_forest(model: Model, forest: Sequence[Part]) -> None:
    """UserError for a part that asks for more than the model can."""
    for part in forest:
        if part.length is None and part.steer is None and part.inputs is None:
            continue
        for value, extra in (
            (part.length, Capability.LENGTH),
            (part.steer, Capability.STEER),
            (part.inputs, Capability.INPUTS),
        ):
            if value is not None and extra not in model.extras:
                raise unsupported(model, extra)


def row_numbers(forest: Sequence[Part]) -> list[int]:
    """Those that are wanted."""
    starts = itertools.accumulate((len(part.tokens) for part in forest), initial=0)
    return [start + node for part, start in zip(forest, starts, strict=False) for node in part.wanted]


def shown_numbers(forest: Sequence[Part]) -> list[int]:
    """Those whose hidden states are shown."""
    starts = itertools.accumulate((len(part.tokens) for part in forest), initial=0)
    return [start + node for part, start in zip(forest, starts, strict=False) for node in part.shown]
