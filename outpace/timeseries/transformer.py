"""The architecture of the shipped models: transformers' Llama blocks over patches instead of token embeddings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, StudentT
from torch.nn.functional import silu, softplus
from transformers import DynamicCache, LlamaConfig, LlamaModel, LlamaPreTrainedModel
from transformers.cache_utils import DynamicLayer

from outpace.core.errors import UserError
from outpace.models.hf.load import without_bars
from outpace.timeseries.base import PatchModel

_MIN_SCALE = 1e-3  # of a scaled value: a flat stretch of history must not give an infinite density
_MIN_FREEDOM = 2.05  # degrees of freedom; the variance is finite above 2
_MAX_UNUSED = 16  # slots of a cache beyond those of the longest row


class PatchTransformer(LlamaPreTrainedModel):
    """Predicts the patch after each patch: a Student-t distribution for each point, with one number of degrees of
    freedom for all points of a patch.

    Its config is a `LlamaConfig` with three more fields: `patch_length`; `frequencies`, those of the series in its
    training data, as pandas names them; and `draft_length`, the number of patches to draft if times may not be measured
    (None for a target).
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        points = config.patch_length
        self.model = LlamaModel(config)
        self.embed = nn.Linear(points, config.hidden_size)
        self.mix = nn.Linear(config.hidden_size, config.hidden_size)
        self.head = nn.Linear(config.hidden_size, 2 * points + 1)
        self.skip = nn.Linear(points, 2 * points + 1, bias=False)  # the last norm would lose the patch's amplitude
        self.post_init()

    def forward(self, patches: Tensor, **options: Any) -> Distribution:
        """Return the distributions [rows, patches] of the patch after each; patches: scaled values [rows, patches,
        points]. Options are those of `LlamaModel`."""
        squashed = patches.asinh()  # limits spikes to values that the layers can handle
        embedded = self.embed(squashed)
        hidden = self.model(inputs_embeds=embedded + self.mix(silu(embedded)), **options).last_hidden_state
        points = patches.shape[-1]
        loc, scale, freedom = (self.head(hidden) + self.skip(squashed)).split([points, points, 1], dim=-1)
        spread = StudentT(
            _MIN_FREEDOM + softplus(freedom + 3.0), loc, _MIN_SCALE + softplus(scale), validate_args=False
        )
        return Independent(spread, 1, validate_args=False)


class TransformerState:
    """Keys and values of rows of different lengths.

    All rows share the slots of the cache, which can only be shortened for all rows alike. So a mask says which slots
    belong to a row, and positions are counted by row. If the cache has over `_MAX_UNUSED` slots more than its longest
    row, each row's slots are moved to the end and the others are removed.
    """

    def __init__(self, cache: DynamicCache, rows: int) -> None:
        self.cache = cache
        self.is_used = torch.ones(rows, cache.get_seq_length(), dtype=torch.bool)  # [rows, slots]

    @property
    def lengths(self) -> Tensor:
        """Number of patches of each row."""
        return self.is_used.sum(1)

    def append(self, count: int) -> tuple[Tensor, Tensor]:
        """Add slots for new patches; return the positions of these [rows, count] and the mask of all slots."""
        positions = self.lengths[:, None] + torch.arange(count)
        self.is_used = torch.cat([self.is_used, torch.ones(len(self.is_used), count, dtype=torch.bool)], 1)
        return positions, self.is_used.long()

    def drop(self, counts: Tensor) -> None:
        """Remove the last `counts[row]` patches of each row."""
        slots = self.is_used.shape[1]
        self.is_used &= torch.arange(slots) < slots - counts[:, None]
        common = int(counts.min())
        if common:
            self.cache.crop(-common)
            self.is_used = self.is_used[:, : slots - common]
        if self.is_used.shape[1] - int(self.lengths.max()) > _MAX_UNUSED:
            self._compact()

    def select(self, rows: Tensor) -> None:
        """Keep these rows."""
        self.is_used = self.is_used[rows]
        if self.cache.get_seq_length():
            self.cache.batch_select_indices(rows)
            self._compact()

    def _compact(self) -> None:
        """Move each row's patches to the last slots and remove the slots that no row uses."""
        longest = int(self.lengths.max())
        if longest == self.is_used.shape[1]:
            return
        order = self.is_used.int().argsort(dim=1, stable=True)[:, -longest:]  # unused slots first
        self.is_used = self.is_used.gather(1, order)
        for layer in cast("list[DynamicLayer]", self.cache.layers):
            keys, values = cast(Tensor, layer.keys), cast(Tensor, layer.values)  # [rows, heads, slots, width]
            index = order[:, None, :, None].expand(-1, keys.shape[1], -1, keys.shape[3])
            layer.keys, layer.values = keys.gather(2, index), values.gather(2, index)


class TransformerForecaster(PatchModel):
    """A `PatchTransformer` as target or draft, with a cache."""

    def __init__(self, model: PatchTransformer) -> None:
        self.model = model.eval()
        config = model.config
        self.patch_length, self.max_patches = config.patch_length, config.max_position_embeddings
        self.frequencies = tuple(config.frequencies)
        if config.draft_length is not None:
            self.draft_length = config.draft_length

    @classmethod
    def load(cls, folder: Path) -> TransformerForecaster:
        """Load a folder that `PatchTransformer.save_pretrained` wrote; computes in float32."""
        config = folder / "config.json"
        if not config.is_file():
            raise UserError(f"{folder} has no config.json; a forecaster is a folder with config.json and weights")
        fields = json.loads(config.read_text(encoding="utf-8"))
        if fields.get("architectures") != [PatchTransformer.__name__]:
            found = fields.get("architectures")
            raise UserError(
                f"{config} is of {found}, it must be of {PatchTransformer.__name__} (bench/forecast_train.py)"
            )
        with without_bars():
            return cls(PatchTransformer.from_pretrained(folder, dtype=torch.float32, local_files_only=True))

    def open(self, history: Tensor) -> TransformerState:
        """Read the histories."""
        cache = DynamicCache(config=self.model.config)
        if history.shape[1]:
            self.model(history, past_key_values=cache, use_cache=True)
        return TransformerState(cache, len(history))

    def propose(self, state: TransformerState, patches: Tensor) -> Distribution:
        """Read the patches and predict the one after each."""
        positions, mask = state.append(patches.shape[1])
        found: Distribution = self.model(
            patches, position_ids=positions, attention_mask=mask, past_key_values=state.cache, use_cache=True
        )
        return found

    def drop(self, state: TransformerState, counts: Tensor) -> None:
        """Remove the last patches of each row."""
        state.drop(counts)

    def select(self, state: TransformerState, rows: Tensor) -> None:
        """Keep these rows."""
        state.select(rows)
