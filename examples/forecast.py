"""Forecast a generated series with the shipped pair, in patches that a draft model proposes.

Needs the extra timeseries. Run: python examples/forecast.py
"""

import numpy as np

from outpace.studies.timeseries import Forecaster

hours = np.arange(14 * 96) / 4  # two weeks of quarter hours
load = 50 + 10 * np.sin(2 * np.pi * hours / 24) + np.random.default_rng(0).normal(0, 1, len(hours))

forecaster = Forecaster.load(draft_length=3)  # None, the default, is the draft model's own: 0
forecast = forecaster.sample(load, prediction_length=24, num_samples=50, seed=1)
low, median, high = forecast.quantiles([0.1, 0.5, 0.9])[0].T
for quarter in range(0, 24, 4):
    print(f"in {quarter // 4 + 1} h: {median[quarter]:.1f}, likely {low[quarter]:.1f} to {high[quarter]:.1f}")
stats = forecast.stats
print(f"{stats.patches_per_forward:.2f} patches a target pass, acceptance {stats.acceptance[0]:.2f}")
