"""How far the state machines of hypothesis walk: a short way in `make test`, a long one in `make test-all`.

The walks are the same at every run. For other walks, run the long tests with derandomize off.
"""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, settings

COMMON = settings(
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
)
SEARCH = settings(COMMON, max_examples=300, stateful_step_count=30, phases=[Phase.generate])  # what it finds stays long
DEPTHS = [
    pytest.param(settings(COMMON, max_examples=10, stateful_step_count=30), id="short"),
    pytest.param(settings(COMMON, max_examples=300, stateful_step_count=50), id="deep", marks=pytest.mark.long),
]
DEAR_DEPTHS = [  # where a step is many rounds of an engine
    pytest.param(settings(COMMON, max_examples=6, stateful_step_count=30), id="short"),
    DEPTHS[1],
]
