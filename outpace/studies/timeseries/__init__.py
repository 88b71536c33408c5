"""Forecasts of time series by speculation: a draft model proposes patches, the target checks several in one forward."""

from outpace.core.errors import require

require("outpace.studies.timeseries", "timeseries", "torch", "transformers")

from outpace.studies.timeseries.forecaster import Forecaster as Forecaster  # noqa: E402
from outpace.studies.timeseries.patch_models import PatchModel as PatchModel  # noqa: E402
