"""Interface of logits processors, built-in ones and plug-ins."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from octavo.kernels.base import Ops
from octavo.messages import CoreSamplingParams
from octavo.system.tensor import Tensor

LongArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class NewRow:
    """New or resumed request."""

    row: int
    """Row of the request from now on."""
    params: CoreSamplingParams
    token_ids: Sequence[int]
    """Prompt tokens and the tokens generated so far."""
    num_prompt_tokens: int
    """Number of prompt tokens in `token_ids`."""

    @property
    def output_token_ids(self) -> Sequence[int]:
        """Tokens generated so far."""
        return self.token_ids[self.num_prompt_tokens :]


@dataclass(frozen=True, slots=True)
class StepRows:
    """The A rows of one step's logits that a processor works on."""

    at: LongArray
    """[A], indices of the rows in the logits, without duplicates."""
    rows: LongArray
    """[A], the request's row in `SamplingState`; repeated if a request has drafts to verify."""
    num_output_tokens: LongArray
    """[A], tokens of the request before the one to be chosen, including drafts."""

    def take(self, some: NDArray[np.bool_] | slice) -> StepRows:
        """Return some of the rows."""
        return StepRows(self.at[some], self.rows[some], self.num_output_tokens[some])


class LogitsProcessor(ABC):
    """Processor that keeps its part of the requests' parameters, by row, and changes their logits.

    Its effect on a row must follow from the request's parameters and tokens alone. Then the answer
    does not depend on other requests, and a preempted request resumes unchanged. One thread calls
    the methods.

    Args:
        max_num_rows: number of rows, numbered from 0, so that memory can be reserved by row.
        vocab_size: V, the width of the logits.
    """

    extra_args: frozenset[str] = frozenset()
    """Keys of `SamplingParams.extra_args` of a plug-in, which only receives requests with such a
    key."""
    takes_all: bool = False
    """True if a plug-in receives every request, and with it all keys of `extra_args`."""
    needs_tokens: bool = False
    """True if the effect depends on the generated tokens; only then `append` is called. Such rows
    are slower: on a GPU they wait for their tokens, and drafts are sampled one after the other."""
    owns_logprobs: bool = False
    """True if the logprob of a row's chosen token is that among the tokens that the processors
    leave. The logprobs of the other candidates are those before any processor, as always."""

    def __init__(self, max_num_rows: int, vocab_size: int) -> None:
        self.max_num_rows, self.vocab_size = max_num_rows, vocab_size

    @abstractmethod
    def add_row(self, new: NewRow) -> bool:
        """Add a request, new or resumed.

        Args:
            new: the request and its row, which belongs to it until `remove_row`.

        Returns:
            True if the processor has work for the row, now or later. An exception fails this
            request only.
        """

    def remove_row(self, row: int) -> None:
        """Remove a request; also called after an `add_row` that raised or returned False."""

    def append(self, rows: LongArray, tokens: LongArray) -> None:
        """Add a generated token (both int64 [R]) to each of some rows, without duplicates."""

    def select(self, step: StepRows) -> StepRows:
        """Return the rows of a step with logits that the processor changes."""
        return step

    @abstractmethod
    def apply(self, ops: Ops, logits: Tensor, step: StepRows) -> None:
        """Change logits in place, only those of `step.at`.

        Args:
            ops: operations on the logits' device; their reductions do not depend on other rows.
            logits: float32 [R, V]. A plug-in receives a torch.Tensor with its own rows only, some
                at a time, so that R = A, `step.at` counts them, and copies of them stay within the
                memory plan.
            step: the result of `select`.
        """
