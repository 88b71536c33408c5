"""The MTP layers of MiMo and Qwen3.5, which are in the files of their targets: EAGLE-1's layer with further norms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from outpace.models.base import Part
from outpace.models.heads.config import MIMO_MTP, HeadConfig
from outpace.models.heads.files import HeadFiles
from outpace.models.heads.kinds.eagle1 import NORMS, JoinedHead
from outpace.models.heads.reader import base_shapes
from outpace.models.llama.config.fields import ReadFields


class MtpHead(JoinedHead):
    """An MTP layer. Its output is normed before the next draft step reads it."""

    shares_config = True

    @property
    def swaps_inputs(self) -> bool:  # type: ignore[override]
        return self.spec.kind == MIMO_MTP

    @classmethod
    def complete(cls, head: HeadConfig, config: ReadFields, files: HeadFiles, target: Mapping[str, Any]) -> HeadConfig:
        head = super().complete(head, config, files, target)
        layers = replace(head.layers, norms_features=True)
        return replace(head, layers=layers, has_fc_bias=False, norm_output=True)

    @classmethod
    def shapes(cls, head: HeadConfig, files: HeadFiles) -> dict[str, tuple[int, ...]]:
        hidden = head.layers.hidden_size
        return base_shapes(head, files, NORMS) | {"fc.weight": (hidden, 2 * hidden)}

    def embed(self, part: Part) -> Any:  # type: ignore[override]
        embedded, session = super().embed(part), part.session
        if self.spec.kind == MIMO_MTP and not session.length + session.pending:
            embedded[0] = 0.0  # MiMo was trained without the embedding at the first position
        return embedded
