"""SpecFormer: eight tokens in one forward, by slots that attend to each other. arXiv:2511.20340.

A session's slot t holds position t of the text: `fc` joins the normed hidden states of the target there and the
embedding of token t + 1 (not in the paper), and a layer without an MLP attends to all earlier positions. The last
position's output, normed, is mapped to the inputs of all slots at once; a second layer lets them attend to each other,
and the target's final norm and output layer score them. Slot i predicts token t + 2 + i, independently of the tokens in
between. So a head has two models of one layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from outpace.core.errors import UserError
from outpace.core.logits import SparseLogits
from outpace.core.tree import PREFIX
from outpace.models.base import Model, Part, apply_keep
from outpace.models.heads.config import SPECFORMER, HeadConfig
from outpace.models.heads.files import HeadFiles, HeadTensor
from outpace.models.heads.head import Weights, rms_norm
from outpace.models.heads.kinds.features import JoinedHead
from outpace.models.heads.reader import BLOCK_TAPS, MAX_DRAFTED, base_shapes, layer_shapes
from outpace.models.llama.config.fields import ReadFields, size

CONTEXT, LAYER = "context.", "layers.0."
OF_MLP = ("mlp.", "post_attention_layernorm.")  # prefixes of a layer's tensors
NO_MLP = 32  # width of the first layer's MLP, whose weights are zero since the head has none


class SlotHead(JoinedHead):
    """The layer that attends to the text is `layers`; `slots` attend to each other."""

    kinds: tuple[str, ...] = (SPECFORMER,)
    drafter = "specformer"
    tap_fields = BLOCK_TAPS
    reads_last = False
    joins_embedding = True

    def __init__(self, spec: HeadConfig, weights: Weights, layers: Model | None = None) -> None:
        files, own = _context_part(weights.files, spec)
        super().__init__(own, weights.of(files), layers)
        files, own = _slots_part(weights.files, spec, self.vectors["target_norm.weight"])
        others = weights.of(files)
        self.slots: Any = others.layers(own)
        self._widen, self._scale = others.product("fc"), others.vector("hidden_norm.weight")
        self._idle: list[Any] = []  # sessions of the slots

    @classmethod
    def complete(cls, head: HeadConfig, config: ReadFields, files: HeadFiles, target: Mapping[str, Any]) -> HeadConfig:
        slots = size(config, "num_slots")
        if slots > MAX_DRAFTED:
            raise UserError(f"num_slots is {slots}, it must be at most {MAX_DRAFTED}")
        if head.layers.hidden_size != head.target_width:
            raise UserError(f"hidden_size is {head.layers.hidden_size}, and the target's is {head.target_width}")
        if head.layers.num_layers > 1:
            count = head.layers.num_layers
            raise UserError(f"num_hidden_layers is {count}, and SpecFormer has one layer across its slots")
        return replace(head, block=slots, from_anchor=True, fc_norm=True)

    @classmethod
    def shapes(cls, head: HeadConfig, files: HeadFiles) -> dict[str, tuple[int, ...]]:
        return base_shapes(head, files, ()) | slot_shapes(head)

    @property
    def weight_bytes(self) -> int:
        layers: int = self.layers.weight_bytes - self.layers.output_bytes + self.slots.weight_bytes
        return layers + self.fc.bytes + self._widen.bytes

    @property
    def num_captures(self) -> int:
        count: int = self.layers.num_captures + self.slots.num_captures
        return count

    def fuse(self, hidden: Any) -> Any:
        return self.normed_taps(hidden)

    def score_sparse(self, forest: Sequence[Part]) -> SparseLogits:
        """Read nodes, each with a feature from the session's queue. Return `block` rows for each of the `logit_rows`:
        the logits of all of its slots."""
        parts = apply_keep(forest)
        calls = [part._replace(logit_rows=()) for part in self._calls(parts)]
        hidden = self.layers.score_sparse_hidden(calls, (1,))[1][0]
        for part in parts:
            part.session.outputs += [None] * len(part.tokens)  # no node reads its parent's output
        if not len(hidden):  # text is read, and no logits are wanted
            return SparseLogits(hidden, None, self.vocab_size)
        return self.score_outputs(hidden)

    def score_outputs(self, rows: Any) -> SparseLogits:
        """Return the logits of all slots for each of these outputs of the first layer, [rows, width], in order."""
        count, self.slots.vocab_size = self.spec.block, self.vocab_size
        normed = rms_norm(rows, self._scale, self.spec.layers.rms_norm_eps)
        inputs = self._widen(normed).reshape(len(rows), count, rows.shape[-1])
        sessions = [self._idle.pop() if self._idle else self.slots.open(0, count) for _ in range(len(rows))]
        slots, parents = [0] * count, range(PREFIX, count - 1)
        parts = []
        for session, own in zip(sessions, inputs, strict=True):
            session.is_block = True
            parts.append(Part(session, slots, parents, range(count), inputs=own))
        found: SparseLogits = self.slots.score_sparse(parts)
        for session in sessions:
            session.keep(())
        self._idle += sessions
        return found


def slot_shapes(head: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a SpecFormer head's own tensors; `context.`: a layer without an MLP."""
    hidden, taps = head.layers.hidden_size, len(head.taps)
    layer = layer_shapes(head.layers, 0)
    shapes: dict[str, tuple[int, ...]] = {f"fc_norm.{tap}.weight": (head.target_width,) for tap in range(taps)}
    shapes |= {f"{name}.weight": (hidden,) for name in ("embed_norm", "hidden_norm")}
    shapes |= {"fc.weight": (hidden, hidden + taps * head.target_width), "slots.weight": (head.block * hidden, hidden)}
    shapes |= {f"{CONTEXT}{name}": shape for name, shape in layer.items() if not name.startswith(OF_MLP)}
    return shapes | {f"{LAYER}{name}": shape for name, shape in layer.items()}


def _context_part(files: HeadFiles, head: HeadConfig) -> tuple[HeadFiles, HeadConfig]:
    """Return the files and the configuration of the first layer, whose MLP is zero."""
    config, own = replace(head.layers, intermediate_size=NO_MLP), ("fc.", "fc_norm.", "embed_norm.")
    zeros = {LAYER + name: np.zeros(shape, np.float32) for name, shape in layer_shapes(config, 0).items()}
    held = {name: _tensor(files, value) for name, value in zeros.items()}
    held |= {name: one for name, one in files.tensors.items() if name.startswith(own)}
    held |= {LAYER + name.removeprefix(CONTEXT): one for name, one in files.tensors.items() if name.startswith(CONTEXT)}
    return HeadFiles(files.path, files.config, held), replace(head, layers=config)


def _slots_part(files: HeadFiles, head: HeadConfig, norm: Any) -> tuple[HeadFiles, HeadConfig]:
    """Return the files and the configuration of the layer across the slots. `norm` [width]: the target's final one."""
    held = {
        name: one for name, one in files.tensors.items() if name.startswith(("hidden_norm.", LAYER, "lm_head.", "d2t"))
    }
    values = norm if isinstance(norm, np.ndarray) else norm.float().cpu().numpy()
    held |= {"fc.weight": files.tensors["slots.weight"], "norm.weight": _tensor(files, np.asarray(values, np.float32))}
    return HeadFiles(files.path, files.config, held, files.is_gguf), head


def _tensor(files: HeadFiles, values: np.ndarray) -> HeadTensor:
    read = partial(np.array, values)
    return HeadTensor(files.path, values.shape, "F32", read, read)
