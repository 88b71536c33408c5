"""EAGLE-3 as a draft model: a decoder layer that reads the target's hidden states. Li et al., arXiv:2503.01840.

Slot t of a session holds the feature f_t of position t and the token x_(t+1), and predicts x_(t+2). For positions that
the target has computed, f_t = fc(the target's hidden states); for drafted nodes it is the output of the parent's slot.
So a session holds the text from its second token on, and a queue of features: those of the committed tokens to be read
next, and that of the tree's root.

EAGLE-1 (arXiv:2401.15077; EAGLE-2 and HASS have the same files) and the MTP layers of MiMo and Qwen3.5 read one hidden
state, after the target's last layer and final norm, and `fc` joins it with the token's embedding.

P-EAGLE (the same layout with `mask_hidden`) drafts several tokens in one forward: the root's slot is followed by slots
of a mask token, whose feature is the same at every place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from outpace.core.arrays import join_rows, torch
from outpace.core.logits import SparseLogits
from outpace.models.base import Model, Part, Session, apply_keep, check_forest
from outpace.models.heads.config import MIMO_MTP, HeadConfig


def rms_norm(x: Any, weight: Any, eps: float) -> Any:
    """Apply an RMS norm, computed in float32, to the rows of an array or a tensor."""
    if isinstance(x, np.ndarray):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps)) * weight
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def stack_rows(rows: Sequence[Any]) -> Any:
    """Stack single rows that are arrays, or tensors."""
    return np.stack(rows) if isinstance(rows[0], np.ndarray) else torch.stack([*rows])


class FeatureSession(Session):
    """Adds features to a runtime's session.

    `features` [queued, width]: features of the next slots, in order; they are computed when they are read.
    `num_features`: their number.
    `outputs`: the output [width] of each pending node, which its children read; None for nodes without a logit row.
    """

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._features: Any = ()
        self._hidden: tuple[Any, ...] = ()  # hidden states of the positions after those of `_features`
        self._fuse: Callable[[Any], Any]
        self.num_features = 0
        self.outputs: list[Any] = []

    @property
    def features(self) -> Any:
        if self._hidden:
            rows = self._fuse(join_rows(self._hidden, 1))
            self._features, self._hidden = join_rows([*([self._features] if len(self._features) else []), rows]), ()
        return self._features

    @features.setter
    def features(self, rows: Any) -> None:
        self._features, self._hidden, self.num_features = rows, (), len(rows)

    def add_features(self, rows: Any) -> None:
        """Queue the features of the next positions."""
        self.features = join_rows([self.features, rows]) if self.num_features else rows

    def add_hidden(self, hidden: Any, fuse: Callable[[Any], Any]) -> None:
        """Queue the target's hidden states at the next positions, [taps, rows, width]. `fuse` computes the features of
        all of them together when they are first read."""
        self._fuse = fuse
        self._hidden, self.num_features = (*self._hidden, hidden), self.num_features + hidden.shape[1]

    def keep(self, path: Sequence[int], live: Sequence[int] = ()) -> None:
        super().keep(path, live)
        self.outputs = [self.outputs[node] for node in live]

    def truncate(self, length: int) -> None:
        if length < self.length:
            self.features = ()
        super().truncate(length)
        self.outputs = []


class HeadModel(Model):
    """A head: a runtime's model of its layers, which reads the target's hidden states.

    `fuse` computes features from them: [taps, rows, target's width] to [rows, width]. `normed_taps` only norms them:
    [rows, taps * target's width]. `multiply` applies `fc`. `limit_window` lets the layers see at most this many
    trailing tokens; it is called before sessions are opened.
    """

    head: HeadConfig
    own: Mapping[str, Any]  # norms outside of the layers, fc's bias, mask_hidden and the target's final norm, by name
    fuse: Callable[[Any], Any]
    normed_taps: Callable[[Any], Any]
    multiply: Callable[[Any], Any]
    limit_window: Callable[[int], None]
    score_sparse_hidden: Callable[[Sequence[Part], Sequence[int]], tuple[SparseLogits, Any]]

    def normed(self, name: str, rows: Any, eps: float = 0.0) -> Any:
        """Apply the norm of this name, if the head has one. With `eps` 0 the head's own epsilon is used."""
        weight = self.own.get(f"{name}.weight")
        return rows if weight is None else rms_norm(rows, weight, eps or self.head.layers.rms_norm_eps)


class EagleModel(HeadModel):
    """Adds EAGLE-3's features to a runtime whose model consists of the head's layers."""

    def residual(self, features: Any, part: Part) -> Any:
        """Return the first layer's residual of the part's nodes, which read these features."""
        return self.normed("layers.0.hidden_norm", features) if self.head.norm_before_residual else features

    def mask_features(self, count: int) -> Any:
        """Return the features of mask slots, for heads that draft in parallel: [count, width]."""
        raise NotImplementedError

    def score_sparse(self, forest: Sequence[Part]) -> SparseLogits:
        """Score nodes. Each reads a feature, from the session's queue or from the output of its parent's slot.

        The outputs of nodes with a logit row are stored for their children. A parent must have been scored in an
        earlier pass, unless the node's feature comes from the queue.
        """
        check_forest(self, forest)
        parts = [self._with_features(part) for part in apply_keep(forest)]
        logits, hidden = self.score_sparse_hidden(parts, (self.num_layers,))
        outputs = iter(self.normed("norm", hidden[0]) if self.head.norm_output else hidden[0])
        for part in parts:
            new: list[Any] = [None] * len(part.tokens)
            for node in part.logit_rows:
                new[node] = next(outputs)
            part.session.outputs += new
        return logits if self.head.logit_scale == 1.0 else logits._replace(values=logits.values * self.head.logit_scale)

    def _score(self, forest: Sequence[Part]) -> Any:
        return self.score_sparse(forest).to_dense()

    def _with_features(self, part: Part) -> Part:
        """Return the part with each node's feature as its input, and take the used ones off the queue."""
        session, count = part.session, len(part.tokens)
        queued, outputs = min(len(session.features), count), session.outputs
        rows = [session.features[:queued]] if queued else []
        if queued < count:
            parents = [part.parents[node] for node in range(queued, count)]
            if not all(0 <= parent < len(outputs) for parent in parents):
                raise ValueError("a node has neither a queued feature nor a parent with an output")
            rows.append(stack_rows([outputs[parent] for parent in parents]))
        session.features = session.features[queued:]
        inputs = self.residual(join_rows(rows), part)
        return part._replace(inputs=inputs, hidden_rows=part.logit_rows, best=0)


class JoinedModel(EagleModel):
    """EAGLE-1 and MTP layers: `fc` joins a token's embedding and a feature to the input of an ordinary layer.

    The feature of a position is what the target's output layer reads; that of a drafted node is its parent's output.
    `received` returns hidden states as the runtime computes with them, and `embed` returns the embeddings of tokens.
    """

    received: Callable[[Any], Any]
    embed: Callable[[Sequence[int]], Any]

    def fuse(self, hidden: Any) -> Any:
        return self.normed("target_norm", self.received(hidden[0]), self.head.target_eps)

    def residual(self, features: Any, part: Part) -> Any:
        embedded, session, is_mimo = self.embed(part.tokens), part.session, self.head.kind == MIMO_MTP
        if is_mimo and not session.length + session.pending:
            embedded[0] = 0.0  # MiMo was trained without the embedding at the first position
        both = [self.normed("embed_norm", embedded), self.normed("hidden_norm", features)]
        return self.multiply(join_rows(both[::-1] if is_mimo else both, 1))
