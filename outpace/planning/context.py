"""What a planner may know about its request and about the batch that this is in."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from outpace.core.types import Source
from outpace.planning.cost_model import CostModel


@dataclass
class BatchRows:
    """Number of rows in the pass that is being built: for each request those of this round or, until it has chosen,
    those of its last pass. A request that plans later sees what was planned before."""

    rows: int = 0


@dataclass(eq=False, kw_only=True)
class PlanningContext:
    """One request and its share of the batch. `budget` is the number of nodes, root included, that the batch allows it
    in this round."""

    committed: Sequence[int]  # the prompt and the tokens written so far
    costs: CostModel = field(repr=False)  # shared by all requests of the engine
    sources: Sequence[Source] = ()  # of its drafter, where drafting and verification alternate
    budget: int = 1
    requests: int = 1  # running requests, this one included
    rows: int = 1  # its own part of `batch`
    batch: BatchRows = field(default_factory=lambda: BatchRows(1), repr=False)
    tokens_left: int = 1  # that may still be written
    native_sources: Collection[str] | None = None  # lookup sources of native rounds; None: these are not available

    @property
    def rows_of_others(self) -> int:
        """Rows of other requests in the pass."""
        return self.batch.rows - self.rows

    def set_rows(self, rows: int) -> None:
        """Set the number of rows that this request has in the pass."""
        self.batch.rows += rows - self.rows
        self.rows = rows
