"""Forecasts of time series by speculation: a draft model proposes patches, the target checks several in one forward."""

from outpace.timeseries.base import PatchModel as PatchModel
from outpace.timeseries.forecaster import Forecaster as Forecaster
