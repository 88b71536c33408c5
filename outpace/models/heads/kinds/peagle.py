"""P-EAGLE: EAGLE-3 that drafts several tokens in one forward, by mask slots. arXiv:2602.01469.

The root's slot is followed by slots of a mask token, whose feature is the same at every place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from outpace.core.arrays import join_rows
from outpace.models.heads.config import HeadConfig
from outpace.models.heads.files import HeadFiles
from outpace.models.heads.kinds.eagle3 import FeatureHead
from outpace.models.heads.reader import read_mask
from outpace.models.llama.config.fields import ReadFields


class MaskHead(FeatureHead):
    """An EAGLE-3 head with a feature for mask slots."""

    drafter = "parallel"

    @classmethod
    def complete(cls, head: HeadConfig, config: ReadFields, files: HeadFiles, target: Mapping[str, Any]) -> HeadConfig:
        head = super().complete(head, config, files, target)
        return replace(head, mask_token=read_mask(head, config, files, target))

    @classmethod
    def shapes(cls, head: HeadConfig, files: HeadFiles) -> dict[str, tuple[int, ...]]:
        return super().shapes(head, files) | {"mask_hidden": (1, 1, len(head.taps) * head.target_width)}

    def mask_features(self, count: int) -> Any:
        """Return the features of mask slots: [count, width]."""
        hidden = self.vectors["mask_hidden"].reshape(len(self.spec.taps), 1, -1)
        return join_rows([self.fuse(hidden)] * count)
