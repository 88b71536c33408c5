"""How often something was set up by which later work goes faster, a captured pass for instance.

What was timed meanwhile, in any thread, tells nothing of that work, and the planner does not learn from it.
"""

from __future__ import annotations

count = 0  # so far


def note() -> None:
    """Something was set up."""
    global count
    count += 1
