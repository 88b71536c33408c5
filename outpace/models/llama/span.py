"""Where one session's rows lie in a forward, and which slots each of them sees in layers with and without a window."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from outpace.core.arrays import uploaded
from outpace.models.base import Part


class View(NamedTuple):
    """The slots that matter to a layer: those before `first` are out of every row's window.

    `hidden` [nodes, last slots] is -inf where a node does not see one of the last slots; None: all is seen.
    """

    first: int
    hidden: Tensor | None


class Span:
    """One session's part of a forest; reserves its slots. `windows`: those that the model's layers have."""

    def __init__(
        self, part: Part, first_row: int, last_position: int, windows: Iterable[int | None], device: torch.device
    ) -> None:
        session = part.session
        before = session.pending
        sees = session.extend(part.parents)  # [nodes, pending]
        self.session, self.steer, self.inputs = session, part.steer, part.inputs
        self.rows = slice(first_row, first_row + len(part.tokens))
        self.slots = slice(session.length + before, session.length + session.pending)
        self.seen = session.length + session.pending
        depths = np.asarray(session.pending_depths, dtype=np.int64)
        length = session.length if part.length is None else part.length
        # a tree may reach past the context; what lies there is never committed
        self.positions = np.minimum(length + depths[before:], last_position).tolist()
        gap = session.length - length  # committed tokens that are not there for these nodes
        self.views = {window: _view(length, depths, sees, window, gap, device) for window in windows}


def _view(
    length: int, depths: np.ndarray, sees: np.ndarray, window: int | None, gap: int, device: torch.device
) -> View:
    """What nodes `sees` [nodes, pending], the last of those with `depths` [pending], see behind `length` tokens, then
    `gap` slots that nobody sees.

    A node at position p sees the tokens of its own branch and prefix at positions above p - window.
    """
    new = depths[len(depths) - len(sees) :]
    unseen = np.zeros((len(sees), gap), dtype=bool)
    if window is None or not len(new) or length + new.max() < window:
        return View(0, _hidden(np.concatenate([unseen, sees], axis=1) if gap else sees, device))
    first = max(0, min(length, length + int(new.min()) + 1 - window))
    places = np.concatenate([np.arange(first, length), length + depths])
    seen = np.concatenate([np.ones((len(sees), length - first), dtype=bool), sees], axis=1)
    seen &= places[None] > (length + new - window)[:, None]
    if gap:
        seen = np.concatenate([seen[:, : length - first], unseen, seen[:, length - first :]], axis=1)
    return View(first, _hidden(seen, device))


def _hidden(seen: np.ndarray, device: torch.device) -> Tensor | None:
    return None if seen.all() else uploaded(np.where(seen, 0.0, -np.inf), np.float64, device)
