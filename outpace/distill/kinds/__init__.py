"""The kinds of draft that can be trained, a module each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from outpace.distill.kinds import dspark, eagle3, specformer, standalone, steered
from outpace.distill.kinds.standalone import DraftShape
from outpace.distill.student import Student
from outpace.models.files.checkpoint import Checkpoint


class TrainedKind(Protocol):
    """What the module of a kind provides; its student has the forward and the loss."""

    def default_taps(self, num_layers: int) -> tuple[int, ...]:
        """Return the numbers of layers after which the draft reads the target's hidden states."""

    def shape_from_options(self, layers: str, init: str, vocab: int, target: str | None) -> DraftShape:
        """Return the shape for these options; UserError for those that the kind does not use."""

    def vocab_ids(self, folder: Path) -> Tensor | None:
        """Return the reduced vocabulary of an earlier draft in `folder`, int64 [ids]; None if it has all tokens."""

    def trained_shapes(self, target: Checkpoint, shape: DraftShape, taps: Sequence[int]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the trained tensors; UserError for a shape that does not fit the target."""

    def new_student(
        self, target: Path, shape: DraftShape, ids: Tensor | None, device: str, taps: Sequence[int]
    ) -> Student:
        """Return the draft as its training begins."""

    def write(self, folder: Path, student: Student, target: Path, shape: DraftShape, origin: Mapping[str, str]) -> None:
        """Replace the draft in `folder`; the old one is kept if that fails. `origin`: what wrote the text."""


KINDS: dict[str, TrainedKind] = {
    "standalone": standalone,
    "eagle3": eagle3,
    "dspark": dspark,
    "specformer": specformer,
    "steered": steered,
}
LEARNING_RATES = {"steered": steered.LEARNING_RATE}  # of kinds whose default is not that of TrainOptions
