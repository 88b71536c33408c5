"""EAGLE-3 as a draft model: one decoder layer that reads the target's hidden states. Li et al., arXiv:2503.01840.

Slot t of a session holds the feature f_t of position t and the token x_(t+1), and predicts x_(t+2). For positions that
the target has passed, f_t = fc(its hidden states); below that, in a drafted tree, it is the output of the parent's
slot. So a session holds the text from its second token on, and has a queue of features for the tokens that it reads
next: those that are committed, and the tree's root.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from outpace.core.lazy import torch
from outpace.core.logits import SparseLogits
from outpace.models.base import Model, Part, Session, apply_keep, check_forest
from outpace.models.heads.config import HeadConfig


def rms_norm(x: Any, weight: Any, eps: float) -> Any:
    """Divide rows by their root mean square, in an array or a tensor of float32."""
    if isinstance(x, np.ndarray):
        return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps)) * weight
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def join_rows(parts: Sequence[Any]) -> Any:
    """Concatenate rows of one kind, arrays or tensors."""
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if isinstance(parts[0], np.ndarray) else torch.cat([*parts])


def stack_rows(rows: Sequence[Any]) -> Any:
    """Stack single rows, arrays or tensors."""
    return np.stack(rows) if isinstance(rows[0], np.ndarray) else torch.stack([*rows])


class FeatureSession(Session):
    """Adds features to a runtime's session. `features` [queued, width]: of the next slots. `outputs`: the output
    [width] of each pending node, which its children read; None for nodes without a logit row."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.features: Any = ()
        self.outputs: list[Any] = []

    def add_features(self, rows: Any) -> None:
        """Queue the features of the next positions."""
        self.features = join_rows([self.features, rows]) if len(self.features) else rows

    def keep(self, path: Sequence[int], live: Sequence[int] = ()) -> None:
        super().keep(path, live)
        self.outputs = [self.outputs[node] for node in live]

    def truncate(self, length: int) -> None:
        if length < self.length:
            self.features = ()
        super().truncate(length)
        self.outputs = []


class EagleModel(Model):
    """Adds EAGLE-3's features to a runtime whose model has the head's layer alone."""

    head: HeadConfig
    score_shown: Callable[[Sequence[Part], Sequence[int]], tuple[SparseLogits, Any]]  # of the runtime

    def fuse(self, hidden: Any) -> Any:
        """Return the features of the target's hidden states: [taps, rows, target's width] to [rows, width]."""
        raise NotImplementedError

    def norm_feature(self, features: Any) -> Any:
        """Apply the norm before the layer, for heads whose residual carries its result."""
        raise NotImplementedError

    def norm_output(self, outputs: Any) -> Any:
        """Apply the final norm."""
        raise NotImplementedError

    def limit_window(self, tokens: int) -> None:
        """Let the layer see at most this many trailing tokens; call it before sessions are opened."""
        raise NotImplementedError

    def score_held(self, forest: Sequence[Part]) -> SparseLogits:
        """Score nodes, each with its feature: from the session's queue, or the output of its parent's slot.

        The outputs of nodes with a logit row are stored for their children. A parent must have been scored in an
        earlier pass, unless the node's feature comes from the queue.
        """
        check_forest(self, forest)
        parts = [self._with_features(part) for part in apply_keep(forest)]
        logits, hidden = self.score_shown(parts, (self.num_layers,))
        outputs = iter(self.norm_output(hidden[0]) if self.head.norm_output else hidden[0])
        for part in parts:
            new: list[Any] = [None] * len(part.tokens)
            for node in part.logit_rows:
                new[node] = next(outputs)
            part.session.outputs += new
        return logits if self.head.logit_scale == 1.0 else logits._replace(values=logits.values * self.head.logit_scale)

    def _score(self, forest: Sequence[Part]) -> Any:
        return self.score_held(forest).wide()

    def _with_features(self, part: Part) -> Part:
        session, count = part.session, len(part.tokens)
        queued, outputs = min(len(session.features), count), session.outputs
        rows = [session.features[:queued]] if queued else []
        if queued < count:
            above = [part.parents[node] for node in range(queued, count)]
            if not all(0 <= node < len(outputs) for node in above):
                raise ValueError("a node's parent has no output yet, and the session's queue no feature for it")
            rows.append(stack_rows([outputs[node] for node in above]))
        session.features = session.features[queued:]
        inputs = join_rows(rows)
        inputs = self.norm_feature(inputs) if self.head.norm_before_residual else inputs
        return part._replace(inputs=inputs, hidden_rows=part.logit_rows, best=0)
