"""Forecasts with sample paths and quantiles, by methods with the names and result shapes of Chronos' pipelines."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from outpace.core.errors import UserError, check_range, check_whole, unknown
from outpace.studies.timeseries.patch_models import PatchModel
from outpace.studies.timeseries.rules import ExactRule, PatchRule, StrideRule
from outpace.studies.timeseries.sampling import MAX_LENGTH, DraftLength, PathStats, draw_paths

if TYPE_CHECKING:
    import pandas as pd

RULES = {"exact": ExactRule, "stride": StrideRule}
QUANTILES = tuple(round(0.1 * tenth, 1) for tenth in range(1, 10))
SHIPPED = Path(__file__).parent / "pair"
_MAX_ROWS = 128  # paths that are drawn in one batch: larger caches take longer to copy
_FLAT = 1e-12  # a series is constant if its deviation is at most this fraction of its largest value


@dataclass(frozen=True)
class SampledForecast:
    """Sample paths [series, samples, length], and which of their values are accepted drafts."""

    samples: Tensor
    is_drafted: Tensor
    stats: PathStats

    def quantiles(self, levels: Sequence[float] = QUANTILES) -> Tensor:
        """Return quantiles [series, length, levels]."""
        found = np.quantile(self.samples.numpy(), levels, axis=1)  # torch's takes at most 2^24 values
        return torch.from_numpy(found).permute(1, 2, 0)


class Forecaster:
    """Continues series with a target, and a draft model that proposes patches for it.

    `draft_length` is the number of patches drafted in a round, 0 to 8; 0 is the target alone. None is the draft model's
    own `draft_length`, or with the rule stride a number that adapts to the acceptance rate. `dials` are the parameters
    of the rule.
    """

    def __init__(
        self,
        target: PatchModel,
        draft: PatchModel | None = None,
        *,
        rule: str = "exact",
        draft_length: int | None = None,
        **dials: float,
    ) -> None:
        if rule not in RULES:
            raise unknown("rule", rule, RULES)
        if draft is not None and draft.patch_length != target.patch_length:
            lengths = f"patches of {draft.patch_length} values, those of the target have {target.patch_length}"
            raise UserError(f"the draft model has {lengths}: they must be equal")
        if draft_length is not None:
            check_whole("draft_length", draft_length, 0, MAX_LENGTH)
            if draft_length and draft is None:
                raise UserError(f"draft_length is {draft_length}, but there is no draft model")
        try:
            self.rule: PatchRule = RULES[rule](**dials)
        except TypeError:
            raise UserError(f"the rule {rule} takes no {' or '.join(dials)}; only stride has dials") from None
        self.target, self.draft, self._draft_length = target, draft, draft_length

    @classmethod
    def load(cls, target: str | Path | None = None, draft: str | Path | None = None, **options: Any) -> Forecaster:
        """Load folders that bench/forecast_train.py wrote; by default the shipped pair. A target that is
        named has no draft unless one is named too."""
        from outpace.studies.timeseries.transformer import TransformerForecaster

        if target is None:
            target, draft = SHIPPED / "target", SHIPPED / "draft" if draft is None else draft
        models = [None if one is None else TransformerForecaster.load(Path(one)) for one in (target, draft)]
        return cls(models[0], models[1], **options)  # type: ignore[arg-type]

    def predict(
        self, inputs: Any, prediction_length: int, num_samples: int = 100, *, seed: int | None = None
    ) -> Tensor:
        """Return sample paths [batch, samples, length]; `inputs` is a series, a batch [batch, time] or a list of
        series."""
        return self.sample(inputs, prediction_length, num_samples, seed=seed).samples

    def predict_quantiles(
        self,
        inputs: Any,
        prediction_length: int,
        quantile_levels: Sequence[float] = QUANTILES,
        num_samples: int = 100,
        *,
        seed: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return quantiles [batch, length, levels] and means [batch, length]."""
        for level in quantile_levels:
            check_range("quantile level", level, 0.0, 1.0)
        found = self.sample(inputs, prediction_length, num_samples, seed=seed)
        return found.quantiles(quantile_levels), found.samples.double().mean(1)

    def predict_df(
        self,
        df: pd.DataFrame,
        prediction_length: int,
        quantile_levels: Sequence[float] = QUANTILES,
        num_samples: int = 100,
        *,
        seed: int | None = None,
        id_column: str | None = "item_id",
        timestamp_column: str = "timestamp",
        target: str = "target",
    ) -> pd.DataFrame:
        """Return the mean and the quantiles of each series' next values, one row for each series and time."""
        from outpace.studies.timeseries.frames import split_series, to_frame

        series = split_series(df, timestamp_column, target, id_column, self.target.frequencies)
        values = [one.values for one in series]
        found = self.predict_quantiles(values, prediction_length, quantile_levels, num_samples, seed=seed)
        return to_frame(series, *found, quantile_levels, id_column, timestamp_column)

    def sample(
        self, inputs: Any, prediction_length: int, num_samples: int = 100, *, seed: int | None = None
    ) -> SampledForecast:
        """Draw sample paths of each series."""
        check_whole("prediction_length", prediction_length, 1)
        check_whole("num_samples", num_samples, 1)
        if seed is not None:
            check_whole("seed", seed, 0, 2**63)
        num_patches = math.ceil(prediction_length / self.target.patch_length)
        context = self._context(num_patches, prediction_length)
        histories = [
            _Scaled(values, number, context, self.target.patch_length) for number, values in enumerate(_listed(inputs))
        ]
        samples = torch.stack([one.mean.expand(num_samples, prediction_length) for one in histories]).clone()
        is_drafted = torch.zeros(samples.shape, dtype=torch.bool)
        stats, length = PathStats(), self._length()
        with torch.random.fork_rng(devices=[]) if seed is not None else nullcontext():
            if seed is not None:
                torch.manual_seed(seed)
            for group in _groups(histories, max(1, _MAX_ROWS // num_samples)):
                patches = torch.stack([histories[number].patches for number in group])
                for first in range(0, num_samples, _MAX_ROWS):
                    part = slice(first, min(first + _MAX_ROWS, num_samples))
                    shape = (len(group), part.stop - first, -1)
                    paths = draw_paths(
                        self.target, self.draft, patches, shape[1], num_patches, self.rule, length, stats
                    )
                    marks = paths.is_drafted.repeat_interleave(self.target.patch_length, 1)
                    is_drafted[group, part] = marks.reshape(shape)[..., :prediction_length]
                    drawn = paths.patches.reshape(shape)[..., :prediction_length]
                    for number, own in zip(group, drawn, strict=True):
                        samples[number, part] = histories[number].unscaled(own)
        return SampledForecast(samples, is_drafted, stats)

    def _context(self, num_patches: int, prediction_length: int) -> int | None:
        """Return the maximum number of patches of history to read; raise UserError if the forecast is too long."""
        limits = [model.max_patches for model in (self.target, self.draft) if model is not None and model.max_patches]
        if not limits:
            return None
        max_patches = min(limits) // 2
        if num_patches > max_patches:
            allowed = f"at most {max_patches * self.target.patch_length}, half of the model's positions"
            raise UserError(f"prediction_length is {prediction_length}, it must be {allowed}")
        return min(limits) - num_patches

    def _length(self) -> DraftLength:
        if self._draft_length is not None or self.draft is None:
            return DraftLength(self._draft_length or 0)
        if isinstance(self.rule, StrideRule):
            return DraftLength(3, adapts=True)
        return DraftLength(self.draft.draft_length)


class _Scaled:
    """One series' history in patches, scaled by its own mean and standard deviation."""

    def __init__(self, values: Any, number: int, context: int | None, patch_length: int) -> None:
        whole = torch.as_tensor(np.asarray(values, dtype=np.float64))
        if whole.ndim != 1:
            raise UserError(f"series {number} has {whole.ndim} dimensions, it must have one")
        if not whole.isfinite().all():
            place = int((~whole.isfinite()).nonzero()[0])
            raise UserError(f"series {number} is {whole[place].item()} at value {place}, all values must be finite")
        patches = min(len(whole) // patch_length, context or len(whole))
        if patches < 2:
            needed = f"at least {2 * patch_length} (two patches)"
            raise UserError(f"series {number} has {len(whole)} values, a forecast needs {needed}")
        known = whole[len(whole) - patches * patch_length :]
        unit = known.abs().max().clamp(min=1e-300)  # squares of very large or small values overflow or become 0
        mean, deviation = (known / unit).mean(), (known / unit).std(correction=0)
        self.mean, self.deviation = unit * mean, unit * deviation
        self.is_constant = bool(deviation <= _FLAT)
        if self.is_constant:
            warnings.warn(
                f"series {number} is constant over the {len(known)} values that are read, so is its forecast",
                stacklevel=4,
            )
            self.mean = known[-1]
        scaled = (known / unit - mean) / deviation.clamp(min=_FLAT)
        self.patches = scaled.float().reshape(patches, patch_length)

    def unscaled(self, drawn: Tensor) -> Tensor:
        return drawn.double() * self.deviation + self.mean


def _listed(inputs: Any) -> list[Any]:
    """Return the series of a batch."""
    if isinstance(inputs, Sequence) and inputs and not np.isscalar(inputs[0]):
        return list(inputs)
    values = np.asarray(inputs, dtype=np.float64)
    return [values] if values.ndim == 1 else list(values)


def _groups(histories: Sequence[_Scaled], size: int) -> list[list[int]]:
    """Return the numbers of the series that are not constant, in groups of at most `size` of equal length."""
    lengths: dict[int, list[int]] = {}
    for number, one in enumerate(histories):
        if not one.is_constant:
            lengths.setdefault(len(one.patches), []).append(number)
    return [numbers[at : at + size] for numbers in lengths.values() for at in range(0, len(numbers), size)]
