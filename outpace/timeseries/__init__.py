"""Forecasts of time series by speculation: a draft model proposes patches, the target checks several in one forward."""

from outpace.core.errors import require

require("outpace.timeseries", "timeseries", "torch", "transformers")

from outpace.timeseries.base import PatchModel as PatchModel  # noqa: E402
from outpace.timeseries.forecaster import Forecaster as Forecaster  # noqa: E402
