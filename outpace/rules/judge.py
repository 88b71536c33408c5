"""Lossy: greedy decoding that also accepts drafted tokens which a trained judge expects to keep the final answer.

AutoJudge, Garipov et al., arXiv:2504.20039, but without the draft's hidden state and before the final norm.

The judge is a linear classifier of the target's hidden state at the drafted token, trained by `outpace judge` on
answers of this target. A token is accepted if it is the target's most likely one, or if the probability that it changes
the final answer is below a threshold. The longest accepted path is kept, and the target's own token follows. Threshold
0 is greedy decoding; threshold 1 accepts every drafted token.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from outpace.core.arrays import torch
from outpace.core.errors import UserError
from outpace.core.logits import host_array, token_scores
from outpace.core.options import MethodOptions, number, option, whole
from outpace.core.tree import Siblings, TokenTree
from outpace.core.types import Row, RuleTraits, Verdict
from outpace.rules._ratio import NodeScores
from outpace.rules._relaxed import longest_path
from outpace.rules.base import LogProbRule
from outpace.rules.greedy import Greedy

if TYPE_CHECKING:
    from torch import Tensor

FILE = "judge.safetensors"  # in the folder that `outpace judge` writes
FORMAT = "1"
RECALL = 0.9  # the paper's
_GREEDY = Greedy()


def find_judge(path: Path | str) -> Path:
    """Return a judge's file, given the file or its folder."""
    path = Path(path).expanduser()
    return path / FILE if path.is_dir() else path


@dataclass(frozen=True)
class JudgeFile:
    """A trained judge: p(important) = sigmoid(weight . hidden + bias), with the scaler folded into both.

    weight: float64 [width]. tap: number of layers after which hidden states are read. thresholds: by recall, the share
    of important mismatches that are refused. curve: float64 [points, 3], thresholds with the shares of important and of
    unimportant mismatches that they refuse. target: see `Loaded.identity`. tasks: digests of their questions, by name.
    facts: counts and the ROC-AUC on held-out prompts.
    """

    weight: np.ndarray
    bias: float
    tap: int
    thresholds: Mapping[float, float]
    curve: np.ndarray
    target: Mapping[str, str]
    tasks: Mapping[str, str]
    facts: Mapping[str, Any]
    path: Path | None = None

    @classmethod
    def read(cls, path: Path) -> JudgeFile:
        """Read a judge's file, or the one in a folder; UserError if it is no judge or damaged."""
        try:
            path = find_judge(path)
            with safe_open(path, "numpy") as file:
                known = file.metadata() or {}
                if known.get("format") != FORMAT:
                    raise UserError(f"{path} is no judge in format {FORMAT}: train one by `outpace judge`")
                arrays = {name: file.get_tensor(name).astype(np.float64) for name in ("weight", "bias", "curve")}
            thresholds = {float(recall): float(value) for recall, value in json.loads(known["thresholds"]).items()}
            target, tasks, facts = (dict(json.loads(known[name])) for name in ("target", "tasks", "facts"))
            found = cls(
                arrays["weight"],
                float(arrays["bias"][0]),
                int(known["tap"]),
                thresholds,
                arrays["curve"],
                target,
                tasks,
                facts,
                path,
            )
            is_whole = all(np.isfinite(array).all() for array in arrays.values())
            is_whole = is_whole and all(0.0 <= value <= 1.0 for value in thresholds.values())
            if not is_whole or found.weight.ndim != 1 or found.curve.shape[1:] != (3,) or found.tap < 0:
                raise ValueError("values are out of range")
        except OSError as error:
            raise UserError(f"judge is {str(path)!r}, which cannot be read ({error.strerror or error})") from error
        except (SafetensorError, RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise UserError(f"{path} is no judge, or is damaged ({error}): train one by `outpace judge`") from error
        return found

    def save(self, path: Path) -> None:
        """Write the file; an old one is replaced as a whole. UserError if that fails."""
        named = {"thresholds": {str(k): v for k, v in self.thresholds.items()}, "target": {**self.target}}
        named |= {"tasks": {**self.tasks}, "facts": {**self.facts}}
        metadata = {"format": FORMAT, "tap": str(self.tap)} | {name: json.dumps(v) for name, v in named.items()}
        arrays = {"weight": self.weight, "bias": np.array([self.bias]), "curve": self.curve}
        new = path.with_name(f"{path.name}.new")
        try:
            new.write_bytes(save(arrays, metadata=metadata))
            os.replace(new, path)
        except OSError as error:
            raise UserError(f"{path} cannot be written ({error.strerror})") from error

    def threshold(self, recall: float) -> float:
        """Return the threshold for this recall; UserError for a recall without one."""
        if recall not in self.thresholds:
            known = ", ".join(f"{one:g}" for one in sorted(self.thresholds))
            raise UserError(f"recall is {recall}, {self.path} has thresholds for {known}; or give --threshold")
        return self.thresholds[recall]

    def importance(self, hidden: np.ndarray) -> np.ndarray:
        """Return the probability that each token changes the final answer: [rows, width] to [rows]. Each row's bits are
        independent of the other rows."""
        if hidden.shape[-1] != len(self.weight):
            raise UserError(f"{self.path} reads hidden states of width {len(self.weight)}, not {hidden.shape[-1]}")
        scores = (hidden.astype(np.float64) * self.weight).sum(-1) + self.bias
        result: np.ndarray = 0.5 + 0.5 * np.tanh(0.5 * scores)
        return result

    def check_target(self, target: Any) -> None:
        """Raise UserError, which names the difference, if this judge was trained for another target."""
        for name, value in target.identity.items():
            if self.target.get(name, value) != value:
                raise UserError(
                    f"{self.path} was trained for a target with another {name} than {target.name}: {name}"
                    f" {self.target[name]}, not {value}; train one for this target by `outpace judge`"
                )


class JudgedNode(NamedTuple):
    """A node's reduced row: the target's token after the node, and whether the node's own token is unimportant.
    `scores`: the target's scores after the node, only if the request excludes tokens."""

    token: int
    is_unimportant: bool
    scores: NodeScores | None

    def allows(self, token: int) -> bool:
        """Whether the request neither excludes the token nor lowers it by logit_bias, which no judge sees."""
        if self.scores is None:
            return True
        adjustments = self.scores.row.request.adjustments
        if adjustments is not None and dict(adjustments.logit_bias).get(token, 0.0) < 0.0:
            return False
        return token_scores(self.scores.scores[None], [token])[0] > -math.inf


class Judge(LogProbRule):
    """Accepts the target's own tokens, and those that the judge takes to be unimportant."""

    cost = "an argmax and a product with one vector for each row"
    traits = RuleTraits(lossless=False, siblings=Siblings.PICKED, greedy=True, sampled=False, takes_arrays=True)

    @dataclass(frozen=True)
    class Options(MethodOptions):
        judge: str = option("", "the file or folder that `outpace judge` wrote")
        recall: float | None = number(
            None, 0.0, 1.0, help="share of the important mismatches to refuse: 0.8, 0.9 (the default), 0.95 or 0.99"
        )
        threshold: float | None = number(
            None,
            0.0,
            1.0,
            help="in place of `recall`: the lowest probability of changing the final answer with which a token is"
            " refused (0: greedy decoding, 1: none is refused)",
        )
        judge_window: int = whole(16, 1, help="maximum number of drafted tokens accepted in a round")

        def __post_init__(self) -> None:
            super().__post_init__()
            if self.recall is not None and self.threshold is not None:
                raise UserError(f"recall is {self.recall:g} and threshold {self.threshold:g}: give one of them")

    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self.file = JudgeFile.read(Path(self.options.judge)) if self.options.judge else None
        self.threshold = 0.0
        if self.file is not None:
            self.traits = replace(self.traits, hidden_layers=(self.file.tap,))
            self.threshold = self.options.threshold
            if self.threshold is None:
                self.threshold = self.file.threshold(RECALL if self.options.recall is None else self.options.recall)

    def check_target(self, target: Any) -> None:
        if self.file is None:
            raise UserError(
                "rule judge needs a judge: name one with --judge (in a bench, judge:judge=FOLDER);"
                " `outpace judge` trains it"
            )
        self.file.check_target(target)

    def reduce(self, logits: Tensor | np.ndarray, rows: Sequence[Row]) -> list[JudgedNode]:
        tokens, unimportant = _GREEDY.reduce(logits, rows), [False] * len(rows)
        if self.file is not None:
            given: list[Any] = [row.hidden[0] for row in rows if row.hidden is not None]
            is_on_host = isinstance(given[0], np.ndarray)
            hidden = np.stack(given) if is_on_host else host_array(torch.stack(given))  # one copy from a device
            unimportant = self._is_below(self.file.importance(hidden)).tolist()
        nodes = []
        for row, scores, token, below in zip(rows, logits, tokens, unimportant, strict=True):
            excludes = row.request.adjustments is not None or row.request.constraint is not None
            nodes.append(JudgedNode(token, below, NodeScores(row, scores) if excludes else None))
        return nodes

    def _is_below(self, importance: np.ndarray) -> np.ndarray:
        below: np.ndarray = importance < self.threshold
        return below | (self.threshold >= 1.0)

    def walk(self, tree: TokenTree, picks: Sequence[JudgedNode]) -> Verdict:
        def cost(parent: int, node: int) -> int | None:
            token = tree.tokens[node]
            if token == picks[parent].token:
                return 0
            is_unimportant = node < len(picks) and picks[node].is_unimportant
            return 1 if is_unimportant and picks[parent].allows(token) else None

        path = longest_path(tree, len(picks), cost)[: self.options.judge_window + 1]
        relaxed = sum(tree.tokens[node] != picks[parent].token for parent, node in itertools.pairwise(path))
        return Verdict(path, picks[path[-1]].token if path[-1] < len(picks) else None, relaxed)
