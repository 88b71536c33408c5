"""Trains a judge on mined mismatches: a linear classifier of hidden states, for the rule `judge`.

AutoJudge, Garipov et al., arXiv:2504.20039: scikit-learn's StandardScaler and LogisticRegression. C is chosen by the
ROC-AUC on a held-out tenth of the prompts.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from outpace.core.errors import UserError, require
from outpace.core.options import CheckedOptions
from outpace.distill.mining import Journal, Miner, MiningOptions, Mismatch, Question, read_questions
from outpace.distill.progress_display import StageProgress
from outpace.models.files.cache import exclusive_lock
from outpace.models.runtimes import Loaded
from outpace.rules.judge import FILE, JudgeFile

RECALLS = (0.8, 0.9, 0.95, 0.99)
GRID = tuple(10.0**power for power in range(-7, 2))  # values of C
MIN_MISMATCHES = 200  # number of mismatches that training needs
HELD_OUT = 0.1  # share of the prompts
POINTS = 101  # of the curve


@dataclass(frozen=True)
class JudgeOptions(CheckedOptions):
    """Which questions to mine, and the folder of the journal and the judge."""

    tasks: Sequence[Path]
    out: Path
    mining: MiningOptions = field(default_factory=MiningOptions)


def make_judge(target: Loaded, draft: Loaded, options: JudgeOptions, progress: StageProgress) -> JudgeFile:
    """Mine the questions that are not mined yet, then train a judge and write it. UserError, with counts, for too few
    mismatches."""
    require("outpace judge", "judge", "sklearn")
    questions = read_questions(options.tasks, options.mining.run_tests)
    miner = Miner(target, draft, options.mining)

    def fail() -> None:
        raise UserError(f"another process is mining in {options.out}: wait for it, or choose another --out")

    with exclusive_lock(options.out / FILE, fail):
        options.out.mkdir(parents=True, exist_ok=True)
        journal = Journal(options.out, miner.settings(), questions)
        miner.mine(journal, lambda figures: progress("mining", figures))
        facts = {"draft": Path(draft.name).name, "questions": len(questions)}
        judge = train(journal.mismatches, miner.tap, target.identity, _task_digests(questions), facts)
        judge.save(options.out / FILE)
    return judge


def _task_digests(questions: Sequence[Question]) -> dict[str, str]:
    """Return each task's name with a digest of its questions."""
    numbers: dict[str, list[int]] = {}
    for question in questions:
        numbers.setdefault(question.task, []).append(question.number)
    return {
        task: hashlib.sha256(" ".join(map(str, sorted(own))).encode()).hexdigest()[:16] for task, own in numbers.items()
    }


def train(
    found: Sequence[tuple[Question, Mismatch]],
    tap: int,
    target: Mapping[str, str],
    tasks: Mapping[str, str],
    facts: Mapping[str, Any],
) -> JudgeFile:
    """Fit the classifier. UserError for too few mismatches, or if those for training or the held-out ones are all of
    one class."""
    numbers = sorted({question.number for question, _ in found})
    held_out = set(numbers[: math.ceil(HELD_OUT * len(numbers))])  # a tenth of the prompts, with the lowest hashes
    hidden = np.array([mismatch.hidden for _, mismatch in found], np.float64)
    is_important = np.array([mismatch.is_important for _, mismatch in found], bool)
    is_held_out = np.array([question.number in held_out for question, _ in found], bool)
    important = int(is_important.sum())
    counts = f"{len(found)} mismatches were mined, {important} of them important"
    if len(found) < MIN_MISMATCHES:
        raise UserError(f"{counts}: {MIN_MISMATCHES} are needed, add questions")
    held, others = is_important[is_held_out], is_important[~is_held_out]
    for part in (held, others):
        if len(np.unique(part)) < 2:
            raise UserError(
                f"{counts}: important and unimportant ones are needed in the held-out tenth of the prompts and in the"
                " rest, add questions"
            )
    scores, weight, bias, c, auc = _best_fit(hidden[~is_held_out], others, hidden[is_held_out], held)
    own, rest = np.sort(scores[held])[::-1], scores[~held]
    thresholds = {recall: float(own[math.ceil(recall * len(own)) - 1]) for recall in RECALLS}
    points = np.unique(np.quantile(scores, np.linspace(0.0, 1.0, POINTS)))
    curve = np.stack([points, *((part >= points[:, None]).mean(-1) for part in (own, rest))], -1)
    measured = {
        "roc_auc": round(auc, 4),
        "c": c,
        "mismatches": len(found),
        "important": important,
        "held_out_mismatches": len(held),
        "held_out_important": int(held.sum()),
    }
    return JudgeFile(weight, bias, tap, thresholds, curve, target, tasks, {**facts, **measured})


def _best_fit(
    trained: np.ndarray, labels: np.ndarray, held: np.ndarray, held_labels: np.ndarray
) -> tuple[np.ndarray, np.ndarray, float, float, float]:
    """Return the best fit's probabilities for held-out prompts, its weight and bias with the scaler folded in, its C,
    and its ROC-AUC on held-out prompts."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.metrics import roc_auc_score
    from sklearn.preprocessing import StandardScaler

    scaler = StandardScaler().fit(trained)
    scaled = scaler.transform(trained)

    def fitted(c: float) -> tuple[np.ndarray, np.ndarray, float, float, float]:
        fit = LogisticRegression(C=c, max_iter=2000).fit(scaled, labels)
        weight = fit.coef_[0] / scaler.scale_
        bias = float(fit.intercept_[0] - weight @ scaler.mean_)
        scores = JudgeFile(weight, bias, 0, {}, np.zeros((0, 3)), {}, {}, {}).importance(held)
        return scores, weight, bias, c, float(roc_auc_score(held_labels, scores))

    return max(map(fitted, GRID), key=lambda fit: fit[-1])
