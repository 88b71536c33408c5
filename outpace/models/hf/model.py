"""Any causal language model that transformers runs, with its own weights' format: token trees over its Cache.

Trees go through one forward where the model takes a mask and positions; a probe at the start finds out. Elsewhere each
branch is a forward of its own over the keys and values that stand already: right, but slow, so chains suit it better.
Sessions of a forest take a forward each. Results are equal to rounding, never bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from outpace.core.logits import TargetOutput
from outpace.models.base import Extra, Model, Part, check_forest
from outpace.models.hf.passes import Passes, TransformersSession
from outpace.models.hf.probe import Found


class TransformersModel(Model):
    """A transformers model that was probed. `score` is to be called by one thread at a time.

    `trees`: a token tree is one forward; where it is False, `notice` says in a sentence what that means and why.
    """

    extras = frozenset({Extra.HIDDEN})

    def __init__(self, passes: Passes, found: Found) -> None:
        """`found` is what the probe of these passes found."""
        self._passes, self._found = passes, found
        self.module, self.config = passes.module, passes.config
        self.device, self.dtype = passes.device, passes.dtype
        self.max_positions = passes.max_positions
        self.vocab_size = min(passes.num_embeddings, found.width)
        self.trees = found.objection is None
        self.notice = None if self.trees else _notice(found.objection)

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values that one slot of a session takes."""
        return self._found.token_bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights, all of which a pass is taken to read."""
        return sum(weight.nbytes for weight in self.module.parameters())

    def open(self, capacity: int, room: int) -> TransformersSession:
        """A session for at most `capacity` committed tokens and `room` pending nodes."""
        return self._passes.open(capacity, room)

    @property
    def deepest(self) -> int:
        """What stands after the last layer is given after the final norm alone."""
        return int(self.config.num_hidden_layers) - 1

    def score(self, forest: Sequence[Part]) -> Tensor:
        """A forward for each part, or more; logits of the wanted nodes, part after part. [wanted rows, vocab]"""
        check_forest(self, forest)
        return self._passes.score(forest, width=self.vocab_size, as_trees=self.trees)

    def score_hidden(self, forest: Sequence[Part], layers: Sequence[int]) -> TargetOutput:
        """As `score`, with the model's own hidden states, those before the layers. [layers, shown rows, width]"""
        check_forest(self, forest)
        asked = [part._replace(wanted=sorted({*part.wanted, *part.shown})) for part in forest]
        rows = self._passes.score(asked, width=self.vocab_size, as_trees=self.trees, layers=layers)
        wanted, shown, first = [], [], 0
        for part, of in zip(forest, asked, strict=True):
            places = {node: first + place for place, node in enumerate(of.wanted)}
            wanted += [places[node] for node in part.wanted]
            shown += [places[node] for node in part.shown]
            first += len(of.wanted)
        hidden = rows[shown][:, self.vocab_size :].unflatten(1, (len(layers), -1))  # [shown rows, layers, width]
        return TargetOutput(rows[wanted][:, : self.vocab_size], hidden.transpose(0, 1))


def _notice(objection: str | None) -> str:
    return f"chains only: every branch of a token tree costs a pass of its own, because {objection}"
