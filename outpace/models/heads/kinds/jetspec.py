"""JetSpec: DFlash with slots that attend to no later ones, and a tree that grows below its best node.

JetSpec, arXiv:2606.18394.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from outpace.models.heads.config import HeadConfig
from outpace.models.heads.fields import agreed, within
from outpace.models.heads.files import HeadFiles
from outpace.models.heads.kinds.block import BlockHead
from outpace.models.llama.config.fields import ReadFields, flag


class JetSpecHead(BlockHead):
    """Calls the layers as DFlash does.

    With `draft_shift` each slot predicts the token after it; the last one predicts nothing, and is left out.
    """

    kinds = ("jetspec",)
    own_fields = ("causal_head",)
    is_best_first = True

    @classmethod
    def complete(cls, head: HeadConfig, config: ReadFields, files: HeadFiles, target: Mapping[str, Any]) -> HeadConfig:
        head = super().complete(head, config, files, target)
        causal = agreed(config, within("dflash_config", "causal_head"), flag)
        shift = agreed(config, within("dflash_config", "draft_shift"), flag)
        layers = (causal is None or causal[1],) * head.layers.num_layers
        if shift is None or not shift[1]:
            return replace(head, causal=layers)
        return replace(head, causal=layers, block=head.block - 1, from_anchor=True)
