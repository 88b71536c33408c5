"""Runs a transformers model's forwards over slots: a token tree in one forward, or one for each branch.

The caller decides which, and interprets the scores.
"""

from __future__ import annotations

import inspect
import reprlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from outpace.core.errors import UserError
from outpace.core.tree import PREFIX
from outpace.models.base import Part, Session
from outpace.models.hf.cache import SlotView, build_cache, read_layout
from outpace.models.hf.states import Saved, States

# Configuration fields with the context length; transformers maps GPT-2's n_positions and others to the first.
NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")
UNNAMED = 1 << 17  # a model without such a field has no learned positions; KV memory is its limit
# Rotary embeddings whose angles change with the text length: keys stored before the change do not fit after it.
CHANGING = ("dynamic", "longrope")


def max_positions(config: Any) -> int:
    """Return the context length, or the length at which the rotary angles change."""
    limit = next((value for name in NAMES if (value := _positive(config, name))), UNNAMED)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = rope.values() if all(isinstance(kind, dict) for kind in rope.values()) else [rope]
    for kind in kinds:
        if kind.get("rope_type", kind.get("type")) in CHANGING:
            name = "original_max_position_embeddings"
            limit = min(limit, kind.get(name) or _positive(config, name) or limit)
    return limit


def num_embeddings(module: Any) -> int:
    """Return the number of tokens that the model has embeddings for."""
    try:
        return int(module.get_input_embeddings().weight.shape[0])
    except (AttributeError, NotImplementedError):
        count = _positive(module.config.get_text_config(decoder=True), "vocab_size")
    if not count:
        raise UserError(f"{type(module).__name__} has no token embeddings, so it is not a language model")
    return count


def _positive(config: Any, name: str) -> int | None:
    value = getattr(config, name, None)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


class TransformersSession(Session):
    """Keys and values in slots, for every layer that stores some. Growing copies layer after layer."""

    def __init__(self, capacity: int, max_pending: int, config: Any) -> None:
        super().__init__(capacity, max_pending)
        self.cache, self.layers, recurrent = build_cache(config)
        self.states = States(recurrent)
        self.is_recurrent = bool(recurrent)

    def keep(self, path: Sequence[int], live: Sequence[int] = ()) -> None:
        super().keep(path, live)
        if self.is_recurrent:
            self.states.keep(path, live)

    def _save_state(self) -> Saved:
        return self.states.committed

    def _load_state(self, saved: Saved | None) -> None:
        self.states.load(saved)

    @torch.inference_mode()
    def show(self, view: SlotView) -> None:
        """Make every layer present these slots to the next forward."""
        for layer in self.layers:
            layer.show(view)

    @torch.inference_mode()
    def _resize(self, slots: int) -> None:
        for layer in self.layers:
            layer.resize(slots, min(slots, self.length + self.pending))

    @torch.inference_mode()
    def _move(self, source: Sequence[int], start: int) -> None:
        moved = np.array(source, dtype=np.int64)
        for layer in self.layers:
            layer.move(moved, start)

    @torch.inference_mode()
    def _copy(self, other: TransformersSession, length: int) -> None:
        for mine, others in zip(self.layers, other.layers, strict=True):
            mine.copy(others, length)


class TreeMask(NamedTuple):
    """What a tree's new nodes see: `length` committed tokens, and the pending nodes (with `depths`) in `sees`. [new,
    pending]"""

    length: int
    depths: Sequence[int]
    sees: np.ndarray


class RowLayout(NamedTuple):
    """The content of a result row: scores of `width` tokens, then the hidden states before each of `layers`."""

    width: int
    layers: tuple[int, ...]


class ForwardPasses:
    """The forwards of a transformers model object, or one with its interface."""

    decoder_start: tuple[int, ...] = ()  # as of `Model`

    def __init__(self, module: Any) -> None:
        """`module` is put in evaluation mode; its weights are not changed or moved.

        Raises UserError if it is not a loaded model or cannot remove a drafted token.
        """
        is_model = isinstance(module, torch.nn.Module) and hasattr(module, "config")
        if not is_model:
            raise UserError(
                f"{reprlib.repr(module)} is no model: give the name of one, a folder, a GGUF file, or what"
                " AutoModelForCausalLM of transformers gives"
            )
        self.module = module.eval()
        self.config = module.config.get_text_config(decoder=True)
        self.layout = read_layout(self.config)
        inner: Any = getattr(module, "get_base_model", lambda: module)()  # of adapters (PEFT)
        self.arguments = inspect.signature(inner.forward).parameters
        self.device = torch.device(getattr(module, "device", "cpu"))
        if self.device.type == "meta":  # offloaded weights, whose hooks move the ids
            self.device = torch.device("cpu")
        self._is_spread = len({*map(str, getattr(module, "hf_device_map", {}).values())}) > 1
        self.dtype = getattr(module, "dtype", None) or torch.get_default_dtype()
        self.max_positions = max_positions(self.config)
        self.num_embeddings = num_embeddings(module)

    def open(self, capacity: int, max_pending: int) -> TransformersSession:
        """Open a session for at most `capacity` committed tokens and `max_pending` pending nodes."""
        return TransformersSession(min(capacity, self.max_positions), max_pending, self.config)

    @torch.inference_mode()
    def score(self, forest: Sequence[Part], *, width: int, as_trees: bool, layers: Sequence[int] = ()) -> Tensor:
        """Return the logit rows of all parts in order: `width` scores, then hidden states before each of `layers`.
        [logit rows, width + hidden]

        With `as_trees` a tree is one forward with a mask, otherwise one forward for each branch. A chain needs no mask.
        """
        columns = RowLayout(width, tuple(layers))
        rows = [self._score_part(part, columns, as_trees) for part in forest if part.tokens]
        return torch.cat(rows) if rows else self._zeros(columns)[:0]

    def plain(self, tokens: Sequence[int], source: int = 0) -> Tensor:
        """Score a text, after its first `source` tokens, without any cache: the reference for all else. [tokens,
        vocab]"""
        return self._plain(tokens, input_ids=self._ids(tokens))

    @torch.inference_mode()
    def _plain(self, tokens: Sequence[int], **inputs: Tensor) -> Tensor:
        output = self.module(**inputs, use_cache=False)
        logits = getattr(output, "logits", None)
        if not isinstance(logits, Tensor) or logits.shape[:2] != (1, len(tokens)):
            name = type(self.module).__name__
            raise UserError(f"{name} gives no scores for the next token, load it with AutoModelForCausalLM")
        return logits[0]

    def _score_part(self, part: Part, columns: RowLayout, as_trees: bool) -> Tensor:
        session = part.session
        before = session.pending
        sees = session.extend(part.parents)
        session.states.tokens += part.tokens
        nodes, num_encoded = np.arange(len(part.tokens)), self._read_source(part, before)
        is_chain = np.array_equal(sees, np.tril(np.ones_like(sees), before))  # every node sees all nodes before it
        if is_chain or not as_trees:
            branches = [nodes] if is_chain else _branches(part.parents, before)
            decoded = [branch[branch >= num_encoded] for branch in branches]
            return self._chains(part, sees, [branch for branch in decoded if len(branch)], before, columns)
        seen = TreeMask(session.length, list(session.pending_depths), sees)
        return self._forward(part, nodes, np.arange(before), seen, list(part.logit_rows), columns)

    def _read_source(self, part: Part, before: int) -> int:
        """Let an encoder read those new nodes that are of its source; return their number. `before`: pending nodes
        before the new ones."""
        return 0

    def _chains(
        self, part: Part, sees: np.ndarray, branches: Sequence[np.ndarray], before: int, columns: RowLayout
    ) -> Tensor:
        """Run one forward for each branch, whose nodes follow one another after the stored ones, so no mask is needed.

        Nodes beyond the context, which are never committed, are not computed: their rows are 0.
        """
        session = part.session
        rows: dict[int, Tensor] = {}
        for branch in branches:
            above = np.flatnonzero(sees[branch[0]])[:-1]
            before_branch = session.length + len(above) - session.source_length
            inside = branch[: max(0, self.max_positions - before_branch)]
            logit_rows = [node for node in inside.tolist() if node in part.logit_rows]
            if len(inside):
                found = self._forward(part, inside, above, None, logit_rows, columns, before)
                rows.update(zip(logit_rows, found, strict=True))
        missing = self._zeros(columns)
        found_rows = [rows.get(node, missing[0]) for node in part.logit_rows]
        return torch.stack(found_rows) if found_rows else missing[:0]

    def _zeros(self, columns: RowLayout) -> Tensor:
        """Return the row of a node that was not computed. [1, width + hidden]"""
        hidden = int(self.config.hidden_size) * len(columns.layers) if columns.layers else 0
        return torch.zeros(1, columns.width + hidden, dtype=self.dtype, device=self.device)

    def _forward(
        self,
        part: Part,
        nodes: np.ndarray,
        above: np.ndarray,
        seen: TreeMask | None,
        logit_rows: Sequence[int],
        columns: RowLayout,
        before: int | None = None,
    ) -> Tensor:
        """Run one forward of new nodes after the prefix and the pending nodes `above`; return the logit rows."""
        session = part.session
        if session.is_recurrent:
            return self._forward_again(part, nodes, above, logit_rows, columns)
        start, first = session.length, session.source_length
        pending = nodes + (len(above) if before is None else before)
        num_encoded = max(first - start, 0)  # pending nodes of the source, which the decoder does not see as tokens
        above = above[above >= num_encoded]
        read = np.concatenate([above, pending])
        is_gapless = np.array_equal(read, np.arange(num_encoded, num_encoded + len(read)))
        order = None if is_gapless else np.concatenate([np.arange(first, start), start + read])
        session.show(SlotView(max(start - first, 0) + len(above), start + pending, order, first))
        last = self.max_positions - 1  # a tree may reach past the context; such nodes are never committed
        depths = session.pending_depths
        positions = [min(start - first + depths[node], last) for node in pending]
        tokens = [part.tokens[node] for node in nodes]
        places = np.searchsorted(nodes, logit_rows).tolist() if len(logit_rows) else [len(nodes) - 1]
        try:
            scores = self._call(session, tokens, positions, seen, places, columns)
        finally:
            session.show(SlotView(0, np.arange(0), None))  # frees the tensors gathered for this pass
        return scores[: len(logit_rows)]

    def _forward_again(
        self, part: Part, nodes: np.ndarray, above: np.ndarray, logit_rows: Sequence[int], columns: RowLayout
    ) -> Tensor:
        """Run one forward from the saved states of recurrent layers: of the committed tokens since, the pending nodes
        `above`, and the new nodes; return the logit rows."""
        session = part.session
        states, start = session.states, session.length
        owed = states.committed.owed
        path = [*above.tolist(), *(nodes + session.pending - len(part.tokens)).tolist()]
        first, skipped = start - len(owed), len(owed) + len(above)
        slots = np.concatenate([np.arange(first, start), start + np.asarray(path)])
        count = first + len(slots)
        order = None if path == list(range(len(path))) else np.concatenate([np.arange(first), slots])
        states.restore()
        session.show(SlotView(first, slots, order))
        places = (skipped + np.searchsorted(nodes, logit_rows)).tolist() if len(logit_rows) else [len(slots) - 1]
        try:
            tokens = [*owed, *(states.tokens[node] for node in path)]
            scores = self._call(session, tokens, range(first, count), None, places, columns)
        finally:
            session.show(SlotView(0, np.arange(0), None))
        states.finish(path)
        return scores[: len(logit_rows)]

    @torch.inference_mode()
    def _call(
        self,
        session: TransformersSession,
        tokens: Sequence[int],
        positions: Sequence[int],
        seen: TreeMask | None,
        rows: Sequence[int],
        columns: RowLayout,
    ) -> Tensor:
        """Call the model with those arguments that it accepts. [rows, width + hidden]"""
        given = self._inputs(session, tokens) | {"past_key_values": session.cache, "use_cache": True}
        if seen is not None:
            given["attention_mask"] = self._mask(seen)
        if "position_ids" in self.arguments:
            given["position_ids"] = torch.tensor([list(positions)], device=self.device)
        index = torch.tensor(rows, device=self.device)
        first = min(rows) if self._is_spread else 0
        if columns.layers:
            given["output_hidden_states"] = True
        if "logits_to_keep" in self.arguments:
            # an index tensor would be on the first device, but the hidden states are on the last
            output = self.module(**given, logits_to_keep=len(tokens) - first if self._is_spread else index)
            logits = output.logits[0]
            logits = logits[(index - first).to(logits.device)] if self._is_spread else logits
        else:
            output = self.module(**given)
            logits = output.logits[0][index.to(output.logits.device)]
        logits = logits[:, : columns.width]
        return torch.cat([logits, *self._hidden(output, index, columns.layers)], 1) if columns.layers else logits

    def _inputs(self, session: TransformersSession, tokens: Sequence[int]) -> dict[str, Any]:
        """Return the model's arguments for new tokens of a session."""
        return {"input_ids": self._ids(tokens)}

    def _hidden(self, output: Any, rows: Tensor, layers: Sequence[int]) -> Iterator[Tensor]:
        """Yield the input of each of these layers. [rows, hidden]"""
        states = getattr(output, "hidden_states", None)
        if states is None or len(states) != self.config.num_hidden_layers + 1:
            raise UserError(f"{type(self.module).__name__} does not give the hidden states of its layers")
        for layer in layers:
            yield states[layer][0][rows.to(states[layer].device)].to(self.device)

    def _ids(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor([list(tokens)], device=self.device)  # [1, tokens]

    def _mask(self, of: TreeMask) -> Any:
        """Return an additive mask [1, 1, new, prefix + pending], or one for each layer type."""
        start, count = of.length, len(of.sees)
        seen = np.concatenate([np.ones((count, start), dtype=bool), of.sees], axis=1)
        places = np.concatenate([np.arange(start), start + np.asarray(of.depths)])
        back = places[-count:, None] - places  # distance from node to key
        masks = {}
        for name, window in self.layout.windows.items():
            hidden = torch.from_numpy(~(seen if window is None else seen & (back < window)))
            mask = torch.zeros(hidden.shape, dtype=self.dtype)
            masks[name] = mask.masked_fill_(hidden, torch.finfo(self.dtype).min)[None, None].to(self.device)
        return masks.get("", masks)


def _branches(parents: Sequence[int], before: int) -> list[np.ndarray]:
    """Split the new nodes into branches without forks, parents first."""
    branches: list[list[int]] = []
    for node, parent in enumerate(parents):
        branch = next((b for b in branches if parent != PREFIX and b[-1] == parent - before), None)
        if branch is None:
            branches.append([node])
        else:
            branch.append(node)
    return [np.asarray(branch) for branch in branches]
