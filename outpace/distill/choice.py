"""The choices of `outpace distill`: the kind of draft to train, and which draft to use."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from outpace.api.llm import LLM
from outpace.distill.report import read_state
from outpace.models.files.pairs import shipped_draft
from outpace.models.load import Loaded

PLAIN, TRAINED = "plain decoding", "the trained draft"
COMPARED, TOKENS = 6, 96  # prompts, and most tokens of each answer


def choose_kind(out: Path, device: str, target_name: str, is_open: bool = True) -> tuple[str, str]:
    """Return the kind of draft to train for the target of this name into the folder `out`, and the reason.

    `is_open`: whether the kind of a new training is to be chosen; otherwise it is standalone, without a reason ("").
    """
    known = read_state(out).get("kind")
    if known is not None:
        return str(known), f"{out} holds a training of this kind"
    if not is_open:
        return "standalone", ""
    if not device.startswith("cpu"):
        return "eagle3", "a GPU writes enough text for a head, whose step is cheap next to the target's pass"
    if shipped_draft(target_name) is not None:
        return "steered", f"a draft comes with outpace for {target_name}, and steering starts from it"
    return "standalone", "on a CPU a small model learns most from little text"


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
    advice = {PLAIN: "use no draft", TRAINED: f"use --draft {draft}"}.get(best, f"keep {best}")
    return f"tokens/s by --method auto on held-out prompts: {listed}; {advice}"
