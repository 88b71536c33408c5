"""The choices of `outpace distill`: the kind of draft to train, and which draft to use."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from outpace.api.llm import LLM
from outpace.distill.report import read_state
from outpace.models.files.pairs import shipped_draft
from outpace.models.load import Loaded

PLAIN, TRAINED, STEERED_DRAFT = "plain decoding", "the trained draft", "the trained draft with steering"
COMPARED, TOKENS = 6, 96  # prompts, and most tokens of each answer


class KindChoice(NamedTuple):
    """The kind of draft to train, whether to train a steering of it too, and the reason: "" if there was no choice."""

    kind: str
    steers: bool
    why: str


def choose_kind(out: Path, device: str, target_name: str, is_open: bool = True, is_shaped: bool = False) -> KindChoice:
    """Choose what to train for the target of this name into the folder `out`.

    `is_open`: whether the kind of a new training is to be chosen; otherwise it is standalone. `is_shaped`: whether
    flags shape the draft.
    """
    state = read_state(out)
    if (known := state.get("kind")) is not None:
        return KindChoice(
            str(known), not is_shaped and state.get("steers") is True, f"{out} holds a training of this kind"
        )
    if not is_open:
        return KindChoice("standalone", False, "")
    if not device.startswith("cpu"):
        return KindChoice(
            "eagle3", False, "a GPU writes enough text for a head, whose draft step is cheap next to a target pass"
        )
    if shipped_draft(target_name) is not None:
        return KindChoice(
            "steered", False, f"a draft comes with outpace for {target_name}, and steering starts from it"
        )
    why = "on a CPU a small model learns most from little text; the target's hidden states may steer it"
    return KindChoice("standalone", True, why)


def tokens_per_second(
    target: Loaded, drafts: Mapping[str, Loaded], prompts: Sequence[str], seed: int = 0
) -> dict[str, float]:
    """Return the tokens/s of plain decoding and of `--method auto` with each draft: one request at a time, greedy, with
    prefill.

    The methods take turns at each prompt, after an untimed answer to the first prompt.
    """
    encoded = [target.tokenizer.encode_prompt(text) for text in prompts[:COMPARED]]
    shared: dict[str, Any] = {"batch": 1, "reuse": False}
    with ExitStack() as stack:
        llms = {PLAIN: stack.enter_context(LLM(target, None, method="autoregressive", **shared))}
        for name, draft in drafts.items():
            llms[name] = stack.enter_context(LLM(target, draft, profile=False, **shared))
        written, spent = dict.fromkeys(llms, 0), dict.fromkeys(llms, 0.0)
        for number, prompt in enumerate([encoded[0], *encoded]):
            for name, llm in llms.items():
                began = time.perf_counter()
                [result] = llm.generate([prompt], max_tokens=TOKENS, temperature=0.0, seed=seed)
                if number:
                    spent[name] += time.perf_counter() - began
                    written[name] += len(result.tokens)
    return {name: round(written[name] / spent[name], 2) for name in llms}


def verdict(speeds: Mapping[str, float], draft: str) -> str:
    """Return one line that says which draft to use. `draft`: path of the trained one."""
    listed = ", ".join(f"{name} {speed:.4g}" for name, speed in speeds.items())
    best = max(speeds, key=speeds.__getitem__)
    ours = dict.fromkeys((TRAINED, STEERED_DRAFT), f"use --draft {draft}")
    advice = {PLAIN: "use no draft", **ours}.get(best, f"keep {best}")
    return f"tokens/s by --method auto on held-out prompts: {listed}; {advice}"
