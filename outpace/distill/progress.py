"""How a distillation tells how far it is: figures by name, as they come; `screen.NAMES` are those that are shown."""

from __future__ import annotations

from collections.abc import Callable

Figures = dict[str, float]

Progress = Callable[[Figures], None]
"""Told the figures of a stage."""

StageProgress = Callable[[str, Figures], None]
"""Told the stage as well."""
