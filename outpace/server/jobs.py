"""What an endpoint makes of a request's body: prompts in tokens, parameters, and how many choices of each."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outpace.api.llm import LLM, PreparedRequest
from outpace.api.params import SamplingParams
from outpace.core import registry
from outpace.engine.build import find_rule
from outpace.server.choices import Choice, no_thoughts
from outpace.server.errors import ApiError
from outpace.server.fields import OutpaceOptions, Sampled
from outpace.server.parts import Splitter

PLAIN = "autoregressive"
MOST_ANSWERS = 1024  # choices of all prompts of one request


@dataclass(frozen=True)
class Job:
    """`n` choices for each prompt, the best of `best_of`."""

    prompts: tuple[tuple[int, ...], ...]
    params: SamplingParams
    n: int = 1
    best_of: int = 1
    own: OutpaceOptions | None = None
    rounds: bool = False  # what each round verified is told
    splitter: Callable[[], Splitter] = Splitter  # makes what takes the text of a choice apart
    thoughts: Callable[[Sequence[int]], int] = no_thoughts  # counts the tokens of an answer's thought


def seed_of(body: Sampled) -> int:
    """The request's seed, or one that is drawn."""
    return secrets.randbelow(2**63) if body.seed is None else body.seed % 2**63


def room(llm: LLM, prompt: Sequence[int]) -> int:
    """Tokens that may follow a prompt; ApiError where none may."""
    most = llm.target.model.max_positions
    if len(prompt) >= most:
        raise ApiError(
            400,
            f"the prompt has {len(prompt)} tokens, this model's maximum context length is {most} with the answer",
            param="prompt",
            code="context_length_exceeded",
        )
    if not prompt:
        raise ApiError(400, "the prompt has no tokens, at least one is needed", param="prompt", code="invalid_value")
    return most - len(prompt)


def choices_of(job: Job, llm: LLM, key: str) -> Iterator[Choice]:
    """The choices that are computed for the owner of a key. Greedy ones of a prompt are alike: one stands for all."""
    params = replace(job.params, n=1)
    for number, prompt in enumerate(job.prompts):
        first = number * job.n
        if params.sampling.is_greedy:
            yield Choice(
                _prepared(llm, prompt, params, 0, job, key), range(first, first + job.n), params.stop_token_ids
            )
            continue
        for choice in range(max(job.best_of, job.n)):
            indices = [first + choice] if choice < job.n else []
            yield Choice(_prepared(llm, prompt, params, choice, job, key), indices, params.stop_token_ids)


def _prepared(
    llm: LLM, prompt: Sequence[int], params: SamplingParams, choice: int, job: Job, key: str
) -> PreparedRequest:
    own = job.own or OutpaceOptions()
    is_plain = own.speculation is False or own.method == PLAIN
    asked = llm.prepare(prompt, params, choice, is_plain, None if is_plain else own.drafter)
    changes: dict[str, Any] = {"rounds": job.rounds, "nodes": own.nodes, "cache_salt": key or None}
    if own.rule is not None:
        changes["rule"] = find_rule(own.rule, params.sampling)
    asked = replace(asked, request=replace(asked.request, **changes))
    if own.method is None or is_plain or own.method == llm.method:
        return asked
    decoder = registry.find("decoders", own.method)
    return replace(asked, decoder=decoder, options=decoder.Options(), method=own.method)


def own_options(body: Sampled, llm: LLM, allowed: Sequence[str]) -> OutpaceOptions | None:
    """How a request wants to be drafted; ApiError for a method, drafter or rule that it may not choose."""
    own = body.outpace
    if own is None:
        return None
    choices = {
        "method": {llm.method, PLAIN, *allowed},
        "drafter": {*llm.engine.drafting.drafters, *allowed},
        "rule": {llm.rule, *allowed} - {"auto"},
    }
    for name, names in choices.items():
        value = getattr(own, name)
        if value is not None and value not in names:
            said = f"{name} {value!r:.60} is not allowed here, allowed are {', '.join(sorted(names)) or 'none'}"
            raise ApiError(400, said, param="outpace", code="invalid_value")
    return own
