"""Mistakes in speculation over patches; statistical tests, or a comparison with the whole history, must show each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from forecast_checks import ToyForecaster, find_in_forecasts
from mutation_checks import Mutation, Original
from torch import Tensor
from torch.distributions import Distribution, Normal

from outpace.studies.timeseries import rules
from outpace.studies.timeseries.rules import ExactRule, PatchVerdict
from outpace.studies.timeseries.transformer import TransformerState


def find_in_state() -> str | None:
    """Return how a state of unequal rows differs from the whole history, or None."""
    from test_forecast_rules import MODELS, fault_of_state

    return fault_of_state(MODELS["transformer"]())


def without_residual(draw: Original, *given: Any) -> None:
    """Leave the draw from p."""


def reflect_to_a_draw(reflect: Original, drafts: Tensor, q: Distribution, p: Distribution, position: int) -> Any:
    found = reflect(drafts, q, p, position)
    return None if found is None else (p.sample()[:, position], found[1])


def without_log_determinant(log_prob: Original, self: Normal, values: Tensor) -> Tensor:
    return -(((values - self.loc) / self.scale) ** 2) / 2.0


def with_the_drafts_variance(log_density: Original, p: Any, what: str, values: Tensor, fresh: Tensor) -> Tensor:
    if isinstance(getattr(p, "base_dist", None), Normal):
        p = torch.distributions.Independent(Normal(p.base_dist.loc, torch.ones(())), 1)
    return log_density(p, what, values, fresh)


def bonus_from_q(
    verify: Original, self: Any, drafts: Tensor, q: Sequence[Distribution], p: Distribution
) -> PatchVerdict:
    accepted, patch = verify(self, drafts, q, p)
    return PatchVerdict(accepted, torch.where((accepted == len(q))[:, None], q[-1].sample()[:, -1], patch))


def one_patch_behind(drop: Original, self: ToyForecaster, state: Any, counts: Tensor) -> None:
    """Drop an accepted patch too; the target alone drops nothing, so its paths stay right."""
    drop(self, state, counts + 1)


def drop_one_less(drop: Original, self: TransformerState, counts: Tensor) -> None:
    drop(self, (counts - 1).clamp(min=0))


def slots_of_the_longest_row(append: Original, self: TransformerState, count: int) -> Any:
    """Give all rows the slots that transformers' caches would."""
    self.lengths = self.lengths.max().expand_as(self.lengths)
    return append(self, count)


def _mutation(name: str, owner: Any, attribute: str, mistake: Any, find: Any = find_in_forecasts) -> Mutation:
    return Mutation(f"forecast: {name}", [owner], attribute, mistake, find)


FORECAST_MUTATIONS = [
    _mutation("no residual: p after a rejection", ExactRule, "_draw_residual", without_residual),
    _mutation("no reflection: p after a rejection", rules, "_reflect", reflect_to_a_draw),
    _mutation("densities without the log-determinant", Normal, "log_prob", without_log_determinant),
    _mutation("the draft's variance in the target's density", rules, "_log_density", with_the_drafts_variance),
    _mutation("the bonus patch comes from q", ExactRule, "verify", bonus_from_q),
    _mutation("states one patch behind", ToyForecaster, "drop", one_patch_behind),
    _mutation("the cache keeps a rejected patch", TransformerState, "drop", drop_one_less, find_in_state),
    _mutation("slots after the longest row", TransformerState, "append", slots_of_the_longest_row, find_in_state),
]
