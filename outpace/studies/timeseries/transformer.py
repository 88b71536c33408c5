"""The architecture of the shipped models: transformers' Llama blocks over patches instead of token embeddings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Independent, StudentT
from torch.nn.functional import silu, softplus
from transformers import Cache, LlamaConfig, LlamaModel, LlamaPreTrainedModel
from transformers.cache_utils import DynamicLayer

from outpace.core.errors import UserError
from outpace.models.hf.load import without_bars
from outpace.models.llama.torch.linear import pack
from outpace.studies.timeseries.patch_models import PatchModel

_MIN_SCALE = 1e-3  # of a scaled value: a flat stretch of history must not give an infinite density
_MIN_FREEDOM = 2.05  # degrees of freedom; the variance is finite above 2
_SPARE_SLOTS = 16  # that a cache gets beyond those that it needs, so that it is seldom copied


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


class RowLayer(DynamicLayer):
    """Keys and values of one layer for rows of different lengths: a patch's slot is its position in its own row.

    transformers' caches add the same slots for all rows, and shorten all rows alike.
    """

    positions: Tensor  # of the new patches [rows, patches], set before each pass

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Write the new keys and values [rows, heads, patches, width]; return those of all slots in use."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        slots = int(self.positions.max()) + 1
        if (missing := slots - self.get_seq_length()) > 0:
            more = key_states.new_zeros(*key_states.shape[:2], missing + _SPARE_SLOTS, key_states.shape[3])
            self.keys, self.values = (torch.cat([cast(Tensor, old), more], -2) for old in (self.keys, self.values))
        rows = torch.arange(len(key_states))[:, None]
        found = []
        for kept, new in ((self.keys, key_states), (self.values, value_states)):
            kept = cast(Tensor, kept)
            kept[rows, :, self.positions] = new.transpose(1, 2)
            found.append(kept[:, :, :slots])
        return found[0], found[1]


class TransformerState:
    """Keys and values of rows of different lengths."""

    def __init__(self, rows: int, num_layers: int) -> None:
        self.cache = Cache([RowLayer() for _ in range(num_layers)])
        self.lengths = torch.zeros(rows, dtype=torch.long)  # patches of each row

    def append(self, count: int) -> tuple[Tensor, Tensor]:
        """Add patches to each row; return their positions [rows, count], and for each of them which slots it may read
        [rows, 1, count, slots]."""
        positions = self.lengths[:, None] + torch.arange(count)
        self.lengths = self.lengths + count
        for layer in cast("list[RowLayer]", self.cache.layers):
            layer.positions = positions
        return positions, (torch.arange(int(self.lengths.max())) <= positions[..., None])[:, None]

    def drop(self, counts: Tensor) -> None:
        """Remove the last `counts[row]` patches of each row; new ones will overwrite their slots."""
        self.lengths = self.lengths - counts

    def select(self, rows: Tensor) -> None:
        """Keep these rows."""
        self.lengths = self.lengths[rows]
        self.cache.batch_select_indices(rows)


class TransformerForecaster(PatchModel):
    """A `PatchTransformer` as target or draft, with a cache. The model's linear layers are packed in place, in oneDNN's
    order."""

    def __init__(self, model: PatchTransformer) -> None:
        self.model = model.eval()
        for module in model.model.modules():
            if isinstance(module, nn.Linear):
                # PyTorch's own product reorders the weights in each call, so that a pass over two to eight patches
                # takes up to twice as long as one over a single patch.
                module.forward = pack(module.weight.detach(), module.bias)  # type: ignore[assignment, method-assign]
                module.register_parameter("weight", None)
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
        state = TransformerState(len(history), self.model.config.num_hidden_layers)
        if history.shape[1]:
            self.propose(state, history)
        return state

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
