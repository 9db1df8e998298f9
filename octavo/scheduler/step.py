"""A step of the scheduler, from its first request to its result."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.messages import SchedulerOutput
from octavo.request import Request
from octavo.scheduler.pace import ItemWork


@dataclass(slots=True)
class ScheduledStep:
    """A step that is being scheduled, and then is in flight."""

    output: SchedulerOutput
    budget: int
    """Number of tokens that may still be added."""
    draft_budget: int
    """Number of places for drafts that may still be added."""
    drafts_per_request: int
    forced_per_request: int
    """Most drafts of a request's grammar; see `Drafting.forced_per_request`."""
    scheduled_at: float
    preempted: bool = False
    is_shared: bool = False
    """True if requests in the background share the step with others."""
    num_left_out: int = 0
    """Number of tokens that those may not use."""
    forced: bool = False
    """True if it contains drafts of grammars."""
    item_work: ItemWork = field(default_factory=ItemWork)
    """Work for items, such as pictures, beside texts."""
    entries: list[tuple[Request, int, int]] = field(default_factory=list)
    """(request, first position computed, most tokens that it samples), in batch order."""
    busy: frozenset[Request] = frozenset()
    """Requests that would delay the step: another stage must sample their last tokens first."""

    def drop(self) -> None:
        """Remove all requests, since the step's result is not valid."""
        for request, _, num_sampled in self.entries:
            if num_sampled:
                request.num_output_placeholders -= num_sampled
                request.num_spec_in_flight -= num_sampled - 1
        self.entries.clear()
