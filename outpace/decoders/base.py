"""The base class of decoders, and what a decoder sees of the engine."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from outpace.core.drafting import DraftDirectives
from outpace.core.options import MethodOptions
from outpace.core.tree import TokenTree
from outpace.core.types import Commit, DecoderAction, Request
from outpace.planning.sources import PlanningContext

if TYPE_CHECKING:
    from outpace.card.cache import CandidateCache, Correction

DecoderGenerator = Generator[DecoderAction, Any, None]
"""A generator-based coroutine (not async): it yields Draft, Verify, Await or Commit, and is sent the result of each."""


def _ignore(message: Correction | DraftDirectives) -> None:
    """Drop a message to a worker that does not exist."""


@dataclass(eq=False, kw_only=True)
class RequestContext(PlanningContext):
    """One running request as its decoder sees it; nothing of other requests but their number and rows."""

    request: Request
    chains: bool = False  # the engine verifies one chain per request, not a tree
    candidates: CandidateCache = field(init=False, repr=False)  # only for decoders that need a worker
    correct: Callable[[Correction], None] = field(default=_ignore, repr=False)  # sends the worker the new root
    set_directives: Callable[[DraftDirectives], None] = field(
        default=_ignore, repr=False
    )  # sends the worker drafting directives
    draft_seconds: Callable[[], float] = field(default=float, repr=False)  # mean duration of the worker's forwards
    round_trip: Callable[[], float] = field(default=float, repr=False)  # to the worker's drafter, in seconds

    @property
    def last_token(self) -> int:
        """The last committed token: the next tree's root."""
        return self.committed[-1]


def walk_and_correct(context: RequestContext, tree: TokenTree, picks: Sequence[Any], is_sent: bool = True) -> Commit:
    """Return the verdict on a tree that was queried from the candidate cache, after adding late nodes to the tree and
    sending the drafter the correction, unless `is_sent` is False."""
    context.candidates.add_late_children(tree)
    verdict = context.request.rule.walk(tree, picks)
    hit, correction = context.candidates.correct(tree, verdict, len(picks))
    if is_sent:
        context.correct(correction)
    return Commit(tree, verdict, hit)


class Decoder:
    """A way to write one answer. The engine makes an instance for each request and runs the coroutine `decode`.

    A subclass is a method: the name of its file is the name of the method, and the docstring of that file is its help.
    """

    name: ClassVar[str]
    lossless: ClassVar[bool] = True  # with a rule that keeps the target's distribution
    cost: ClassVar[str] = ""  # what a round costs, for the table of methods
    # "sequential": drafting alternates with the target; "parallel": a worker drafts during the passes; None: no
    # drafts.
    drafting: ClassVar[str | None] = "sequential"
    rule: ClassVar[str | None] = None  # the rule where the user names none; None: it depends on the temperature
    length_option: ClassVar[str | None] = None  # name of the option that limits the tokens of a draft
    usual_nodes: ClassVar[int] = 8  # default limit of the nodes in a pass, if the longest draft does not need more
    Options: ClassVar[type[Any]] = MethodOptions

    @classmethod
    def num_nodes(cls, options: Any) -> int:
        """Return how many nodes, root included, a pass needs to verify the longest draft at once."""
        return getattr(options, cls.length_option) + 1 if cls.length_option else 1

    @classmethod
    def drafter_defaults(cls, options: Any, values: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the method's own defaults for options of drafters; `values`: the options that the user named."""
        return {"width": 16, "tree_nodes": 1024} if cls.drafting == "parallel" else {}

    def decode(self, context: RequestContext, options: Any) -> DecoderGenerator:
        """Write one answer, round by round, until the engine closes the coroutine."""
        raise NotImplementedError
