"""Judges of made weights, as `outpace judge` writes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from outpace.rules.judge import FILE, Judge, JudgeFile

THRESHOLDS = {0.8: 0.7, 0.9: 0.5, 0.95: 0.3, 0.99: 0.1}


def judge_file(weight: Sequence[float] | np.ndarray, tap: int, bias: float = 0.0, **changes: Any) -> JudgeFile:
    """A judge with these weights."""
    fields: dict[str, Any] = {"thresholds": THRESHOLDS, "curve": np.zeros((1, 3)), "target": {}, "tasks": {}}
    return JudgeFile(np.asarray(weight, np.float64), bias, tap, **{**fields, "facts": {}, **changes})


def rule_of(path: Path, file: JudgeFile, **options: Any) -> Judge:
    """The rule by this judge, through its file."""
    file.save(path)
    return Judge(Judge.Options(str(path), **options))


def random_judge(folder: Path, target: Any, seed: int = 0) -> Path:
    """Write a judge for a loaded target, with random weights; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    width = target.model.config.hidden_size
    weight = np.random.default_rng(seed).normal(size=width)
    judge_file(weight, 1, target=target.identity, tasks={"made": "0"}).save(folder / FILE)
    return folder
