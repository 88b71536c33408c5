"""FlashSpec: speculative decoding over transformers models, float32, with the strategy that it chooses itself.

FlashSpec 0.3, https://github.com/Mattral/FlashSpec: draft-then-verify, or prompt lookup with a draft to fall back on.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

from outpace.bench.peer import Answered, Peer, PeerSettings
from outpace.bench.peers._generate import load, num_threads
from outpace.bench.peers._rounds import Round, check_draft, check_room, fold, need
from outpace.core.errors import install_command

NAME = "flashspec"
INSTALL = f"`{install_command('flashspec')}` (Python 3.11 or later)"


def build(settings: PeerSettings) -> Peer:
    """The peer on the target's and the draft's weights, without a draft by prompt lookup alone.

    UserError where it is not installed.
    """
    need(NAME, "flashspec", INSTALL)
    draft = None if settings.draft is None else load(NAME, check_draft(NAME, settings))
    return FlashSpec(load(NAME, settings.target), draft, settings)


class FlashSpec:
    """Its engine over loaded models."""

    name = NAME
    precision = "float32"

    def __init__(self, target: Any, draft: Any, settings: PeerSettings) -> None:
        import flashspec
        from flashspec.engine import HuggingFaceDrafter, NgramDrafter, TargetModel

        self._settings = settings
        place = (torch.device("cpu"), torch.float32)
        alone: dict[str, Any] = (
            {} if draft else {"drafter_strategy": "bandit", "bandit": flashspec.BanditConfig(n_arms=1)}
        )
        sampling = flashspec.SamplingConfig(temperature=0.0)
        config = flashspec.FlashSpecConfig(device="cpu", dtype="float32", sampling=sampling, **alone)
        drafter: Any = HuggingFaceDrafter("draft", *place, model=draft) if draft else NgramDrafter()
        self._engine: Any = flashspec.SpeculativeEngine(config, [drafter], TargetModel("target", *place, model=target))

    def answer(self, prompt: Sequence[int], max_tokens: int) -> Answered:
        """Continues the prompt until a stop token, which counts, or `max_tokens`."""
        check_room(NAME, self._settings, prompt, max_tokens)
        ids = torch.tensor([list(prompt)])
        with num_threads(self._settings.threads):
            start = time.perf_counter()
            result = self._engine.generate(ids, max_tokens, eos_token_ids=sorted(self._settings.stop_ids))
            seconds = time.perf_counter() - start
        tokens = result.output_ids[0, : result.n_tokens_generated].tolist()
        return fold(_rounds(result.arm_steps, tokens, seconds), seconds)

    def close(self) -> None:
        """Lets go of the weights."""
        self._engine = None


def _rounds(steps: Sequence[Any], tokens: Sequence[int], seconds: float) -> list[Round]:
    """Its record of steps, counted back from the end of the call."""
    rounds, place = [], 0
    when = seconds - sum(step.seconds for step in steps)
    for step in steps:
        when += step.seconds
        written = tuple(tokens[place : place + step.emitted])
        rounds.append(Round(when, written, step.proposed, min(step.accepted, step.emitted)))
        place += step.emitted
    return rounds
