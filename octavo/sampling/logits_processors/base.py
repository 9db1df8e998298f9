"""What every logits processor is: the built-in ones and those of plug-ins."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from octavo.kernels.base import Ops
from octavo.messages import CoreSamplingParams

LongArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class NewRow:
    """A request that is new or resumed."""

    row: int
    """Where it is from now on."""
    params: CoreSamplingParams
    token_ids: Sequence[int]
    """Prompt and what was generated so far."""
    num_prompt_tokens: int
    """How many of them are the prompt."""

    @property
    def output_token_ids(self) -> Sequence[int]:
        """What was generated so far."""
        return self.token_ids[self.num_prompt_tokens :]


@dataclass(frozen=True, slots=True)
class StepRows:
    """Those A rows of one step's logits that a processor works on."""

    at: LongArray
    """[A], where in the logits they are; none twice."""
    rows: LongArray
    """[A], the request's row in `SamplingState`; twice where a request has drafts to verify."""
    num_output_tokens: LongArray
    """[A], tokens that the request has generated before the one to be chosen, drafts included."""

    def take(self, some: NDArray[np.bool_] | slice) -> StepRows:
        """Some of them."""
        return StepRows(self.at[some], self.rows[some], self.num_output_tokens[some])


class LogitsProcessor(ABC):
    """Keeps what requests ask of it, by row, and changes their logits.

    What it does to a row must follow from the request's parameters and tokens alone, so that the
    answer does not depend on other requests, and that a preempted request resumes as it was. It is
    called from one thread.

    Args:
        max_num_rows: rows are numbered from 0; what is kept by row can be reserved here.
        vocab_size: V, the width of the logits.
    """

    extra_args: frozenset[str] = frozenset()
    """Keys of `SamplingParams.extra_args` that a plug-in takes; it gets only requests with one."""
    takes_all: bool = False
    """Whether a plug-in gets every request, and with it all keys of `extra_args`."""
    needs_tokens: bool = False
    """Whether what it does depends on which tokens were generated; only then `append` is called.
    Such rows are slower: on a GPU they wait for their tokens, and drafts are sampled in turn."""

    def __init__(self, max_num_rows: int, vocab_size: int) -> None:
        self.max_num_rows, self.vocab_size = max_num_rows, vocab_size

    @abstractmethod
    def add_row(self, new: NewRow) -> bool:
        """Takes in a request, new or resumed.

        Args:
            new: the request and its row, which is its own until `remove_row`.

        Returns:
            Whether it has anything to do for the row, now or later. Whatever it raises fails this
            request only.
        """

    def remove_row(self, row: int) -> None:
        """Forgets a request; also called after an `add_row` that raised or returned False."""

    def append(self, rows: LongArray, tokens: LongArray) -> None:
        """Takes in one more generated token (both int64 [R]) for some of its rows, none twice."""

    def select(self, step: StepRows) -> StepRows:
        """Those of its rows in a step whose logits it changes there."""
        return step

    @abstractmethod
    def apply(self, ops: Ops, logits: torch.Tensor, step: StepRows) -> None:
        """Changes logits in place, and no others than those of `step.at`.

        Args:
            ops: operations on the logits' device; their reductions do not depend on other rows.
            logits: float32 [R, V]. A plug-in is shown its own rows only, some at a time, so that
                R = A, `step.at` counts them, and copies of them are no larger than planned.
            step: what `select` returned.
        """
