"""SpecFormer as a draft model: eight tokens in one forward, by slots that attend to each other. arXiv:2511.20340.

A session's slot t holds position t of the text: `fc` joins the normed hidden states of the target there and the
embedding of token t + 1 (not in the paper), and a layer without an MLP attends to all earlier
positions. The last position's output, normed, is mapped to the inputs of all slots at once; a second layer lets them
attend to each other, and the target's final norm and output layer score them. Slot i predicts token t + 2 + i,
independently of the tokens in between.

So a head consists of two models of one layer. The first is a `JoinedModel` and owns the sessions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from outpace.core.logits import SparseLogits
from outpace.core.tree import PREFIX
from outpace.models.base import Part, apply_keep, check_forest
from outpace.models.heads.config import HeadConfig
from outpace.models.heads.eagle3 import HeadModel, JoinedModel
from outpace.models.heads.files import HeadFiles, HeadTensor
from outpace.models.heads.reader import layer_shapes

CONTEXT, LAYER = "context.", "layers.0."
NO_MLP = 32  # width of the first layer's MLP, whose weights are zero since the head has none


class SlotModel(HeadModel):
    """The layer across the slots, and the target's output layer. `fc` computes the slots' inputs."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._idle: list[Any] = []  # sessions

    def score_outputs(self, rows: Any) -> SparseLogits:
        """Return the logits of all slots for each of these outputs of the first layer, [rows, width], in order."""
        count = self.head.block
        inputs = self.multiply(self.normed("hidden_norm", rows)).reshape(len(rows), count, rows.shape[-1])
        sessions = [self._idle.pop() if self._idle else self.open(0, count) for _ in range(len(rows))]
        slots, parents = [0] * count, range(PREFIX, count - 1)
        forest = zip(sessions, inputs, strict=True)
        found = self.score_sparse([Part(one, slots, parents, range(count), inputs=its) for one, its in forest])
        for session in sessions:
            session.keep(())
        self._idle += sessions
        return found


class SpecFormerModel(JoinedModel):
    """A SpecFormer head: the layer that attends to the text, and `slots`, which it feeds."""

    slots: SlotModel

    def fuse(self, hidden: Any) -> Any:
        return self.normed_taps(hidden)

    def limit_threads(self, max_threads: int | None = None, leave: int = 0) -> None:
        super().limit_threads(max_threads, leave)
        self.slots.limit_threads(max_threads, leave)

    def score_sparse(self, forest: Sequence[Part]) -> SparseLogits:
        """Read nodes, each with a feature from the session's queue. Return `block` rows for each of the `logit_rows`:
        the logits of all of its slots."""
        check_forest(self, forest)
        parts = [self._with_features(part)._replace(logit_rows=()) for part in apply_keep(forest)]
        hidden = self.score_sparse_hidden(parts, (1,))[1][0]
        for part in parts:
            part.session.outputs += [None] * len(part.tokens)  # no node reads its parent's output
        if not len(hidden):  # text is read, and no logits are wanted
            return SparseLogits(hidden, None, self.vocab_size)
        self.slots.vocab_size = self.vocab_size
        return self.slots.score_outputs(hidden)


def context_part(files: HeadFiles, head: HeadConfig) -> tuple[HeadFiles, HeadConfig]:
    """Return the files and the configuration of the first layer, as a head of its own, whose MLP is zero."""
    config = replace(head.layers, intermediate_size=NO_MLP)
    own = {LAYER + name: np.zeros(shape, np.float32) for name, shape in layer_shapes(config, 0).items()}
    held = {name: _tensor(files, value) for name, value in own.items()}
    held |= {name: files.tensors[name] for name in files.tensors if name.startswith(("fc.", "fc_norm.", "embed_norm."))}
    held |= {LAYER + name.removeprefix(CONTEXT): one for name, one in files.tensors.items() if name.startswith(CONTEXT)}
    return HeadFiles(files.path, files.config, held), replace(head, layers=config)


def slots_part(files: HeadFiles, head: HeadConfig, norm: Any) -> tuple[HeadFiles, HeadConfig]:
    """Return the files and the configuration of the layer across the slots, as a head of its own.

    `norm` [width]: the target's final norm.
    """
    names = ("hidden_norm.", LAYER, "lm_head.", "d2t")
    held = {name: one for name, one in files.tensors.items() if name.startswith(names)}
    held |= {"fc.weight": files.tensors["slots.weight"], "norm.weight": _tensor(files, np.asarray(norm, np.float32))}
    return HeadFiles(files.path, files.config, held, files.is_gguf), replace(head, fc_norm=False)


def _tensor(files: HeadFiles, values: np.ndarray) -> HeadTensor:
    read = partial(np.array, values)
    return HeadTensor(files.path, values.shape, "F32", read, read)
