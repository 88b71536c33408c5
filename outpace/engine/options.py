"""Options of an engine, and of what decodes in it. Importing this module imports no model and no method."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from outpace.core import registry
from outpace.core.errors import UserError, unknown
from outpace.core.options import CheckedOptions, number, option, same, whole
from outpace.drafters import drafter_modules

WORKERS = ("thread", "process", "polled", "inline")
MAX_NODES = 4096


@dataclass(frozen=True)
class EngineOptions(CheckedOptions):
    """The limits of an engine.

    `nodes`: most nodes of a request's tree in one pass, root included; `rows`: most nodes of all trees together (None:
    64 on a CPU, 512 on a GPU); `chunk`: most prompt tokens in a pass (None: 256 on a CPU, 2,048 on a GPU), fewer where
    these would keep other requests from writing.
    """

    nodes: int = whole(8, 1, MAX_NODES)
    rows: int | None = whole(None, 1, 65536)
    chunk: int | None = whole(None, 1, 65536)
    batch: int = whole(16, 1, 4096, help="Answers written at the same time; the others wait.")
    kv_memory: float | None = number(
        None,
        0.0,
        help="Memory for the KV cache, in GiB: the target's with its prefix cache, and that of drafts in this process;"
        " the default is half of the free memory. When it is used up, requests are paused.",
    )
    reuse: bool = option(
        True,
        "Start from the keys and values of an earlier text with the same beginning, and draft what followed the"
        " same prompt before.",
    )


@dataclass(frozen=True)
class BuildOptions(CheckedOptions):
    """How an `LLM` decodes.

    `part_options`: options of the method, the drafters and the rule, by name. After `engine.build.resolve`, `method`,
    `drafter`, `rule` and `nodes` are final, and `structured_drafter` is the drafter for requests with a grammar, None
    if it is the usual one.
    """

    method: str = option(
        "auto",
        "Decoding method: auto (drafts as much as pays), card, speculative, ...; outpace methods lists them.",
    )
    drafter: str | None = option(
        None,
        "Drafters, joined by +, as in model+ngram; a request chooses one where commas separate several; outpace methods"
        " lists them. The default depends on the method.",
    )
    rule: str = option(
        "auto",
        "Acceptance rule: greedy, gumbel, rejection, ...; outpace methods lists them; auto: greedy at temperature 0,"
        " else gumbel.",
    )
    worker: str | None = option(
        None,
        "Where a drafter runs that drafts in parallel with the target (card, planned, pearl, ssd): thread, process,"
        " polled (on the CPU while the GPU runs a pass), inline on a simulated clock, or grpc://HOST:PORT (grpcs://"
        " with TLS) on another machine by outpace draft-worker; in commands also ray (ray:num_gpus=1,...), on a machine"
        " of a Ray cluster. The default is polled for a target on a GPU with a draft on the CPU, else thread.",
    )
    draft_threads: int | None = whole(
        None,
        1,
        1024,
        help="CPU threads of a drafter that drafts in parallel with the target; the default is 1 for a target on a CPU,"
        " else all cores but one.",
    )
    nodes: int | None = whole(
        None,
        1,
        MAX_NODES,
        help="Maximum number of tree nodes verified in a pass, including the root; the default is 32 for auto, card and"
        " planned, else 8 or what the draft length needs.",
    )
    batch: int = same(EngineOptions, "batch")
    kv_memory: float | None = same(EngineOptions, "kv_memory")
    reuse: bool = same(EngineOptions, "reuse")
    rules: tuple[str, ...] = option(
        (),
        "Rules that a request may choose, with their options and hidden states; others can be chosen if they need"
        " neither.",
    )
    profile: bool = option(
        True,
        "Method auto starts from what earlier runs of this pair learnt on this machine, and saves what it learns.",
    )
    part_options: Mapping[str, Any] = field(default_factory=dict)
    structured_drafter: str | None = None

    def __post_init__(self) -> None:
        """Check what can be checked before a model is loaded."""
        super().__post_init__()
        if self.worker not in (None, *WORKERS) and not self.is_remote and not self.is_on_ray:
            if re.fullmatch(r"[\w.-]+:\d+", str(self.worker)):
                raise UserError(f"unknown worker {self.worker!r}; did you mean 'grpc://{self.worker}'?")
            raise unknown("worker", str(self.worker), (*WORKERS, "grpc://HOST:PORT"))
        if self.is_remote and self.drafter is not None:
            raise UserError(f"the drafter runs at {self.worker}: name {self.drafter!r} there, not here")
        registry.find("decoders", self.method)
        for rule in self.known_rules:
            registry.find("rules", rule)
        if self.drafter is not None:
            drafter_modules(self.drafter)

    @property
    def known_rules(self) -> list[str]:
        """The names of the LLM's own rule and of `rules`, without "auto"."""
        return [rule for rule in dict.fromkeys((self.rule, *self.rules)) if rule != "auto"]

    @property
    def is_remote(self) -> bool:
        """Whether the drafter runs on another machine."""
        from outpace.core.drafting import is_address

        return is_address(self.worker)

    @property
    def is_on_ray(self) -> bool:
        """Whether a command starts the drafter on a machine of a Ray cluster."""
        return self.worker is not None and str(self.worker).partition(":")[0] == "ray"

    @property
    def may_draft(self) -> bool:
        """Whether the method and the drafter can make use of a draft model in this process."""
        if self.is_remote:
            return False
        if self.method != "auto" and registry.find("decoders", self.method).drafting is None:
            return False
        parts = drafter_modules(self.drafter) if self.drafter is not None else ["model"]
        return any(registry.describe("drafters", part).needs == registry.DRAFT_MODEL for part in parts)

    @property
    def needs_same_tokens(self) -> bool:
        """Whether a draft model must have the target's tokens: only drafter `translated` does without."""
        modules = {} if self.drafter is None else drafter_modules(self.drafter)
        return "translated" not in modules or "model" in modules

    @property
    def engine_options(self) -> EngineOptions:
        """The limits of the engine."""
        nodes = EngineOptions.nodes if self.nodes is None else self.nodes
        return EngineOptions(nodes, batch=self.batch, kv_memory=self.kv_memory, reuse=self.reuse)
