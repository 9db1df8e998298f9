"""The share that requests in the background have of the steps with other requests."""

from __future__ import annotations

from octavo.scheduler.step import ScheduledStep

# Tokens for which a step reads the weights about as long as for one.
BACKGROUND_TOKENS = 16
"""Tokens of all requests in the background in a step with others, on average."""


class BackgroundShare:
    """Number of tokens that requests in the background may add to a step with other requests.

    Together they may add `BACKGROUND_TOKENS`, and those that they saved in earlier steps, so that
    a step takes about as long as without them. They are last in the order of service.
    """

    def __init__(self) -> None:
        self.num_saved = 0
        """Tokens of the background that it did not use in the last step with others."""

    def begin(self, step: ScheduledStep, *, alone: bool) -> bool:
        """Limit a step's budget before the first request in the background is added to it.

        Args:
            step: the step being scheduled; the other requests have got their tokens.
            alone: True if no other requests run.

        Returns:
            True if requests in the background may add tokens to the step.
        """
        if not alone and not step.is_shared:
            step.is_shared = True
            allowed = BACKGROUND_TOKENS + self.num_saved
            self.num_saved = 0
            step.num_left_out = max(0, step.budget - allowed)
            step.budget -= step.num_left_out
        return step.budget > 0

    def save(self, step: ScheduledStep) -> None:
        """Save the rest of a step's budget for later steps, if the background shares the step.

        The next request in the background needs more tokens at once: those that see each other, or
        an encoder's input. It gets them once as many have been saved.
        """
        if step.is_shared:
            self.num_saved = step.budget
            step.num_left_out += step.budget
            step.budget = 0
