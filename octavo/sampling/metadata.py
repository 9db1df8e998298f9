"""One step's view of the sampling parameters: what the sampler has to know about each row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

NO_LOGPROBS = -2
"""In `SamplingMetadata.num_logprobs`: the row asks for none (-1 asks for the whole vocabulary)."""


@dataclass(frozen=True, slots=True)
class LogitEntries:
    """Single logits, as parallel int64 tensors [E] on the logits' device."""

    rows: torch.Tensor
    token_ids: torch.Tensor


@dataclass(frozen=True, slots=True)
class BiasEntries(LogitEntries):
    """Logits to add something to; no logit appears twice."""

    values: torch.Tensor
    """float32 [E]."""


@dataclass(frozen=True, slots=True)
class PenaltyEntries(LogitEntries):
    """Logits of tokens seen before, of the rows with penalties; no logit appears twice."""

    output_counts: torch.Tensor
    """float32 [E], how many times the token was generated; 0: it is in the prompt only."""
    repetition: torch.Tensor
    """float32 [E], like the next two the row's parameter."""
    frequency: torch.Tensor
    presence: torch.Tensor


@dataclass(frozen=True, slots=True)
class AllowedTokens:
    """The only logits to keep in some rows."""

    rows: torch.Tensor
    """int64 [G], those rows."""
    bitmask: torch.Tensor
    """int32 [G, ceil(V / 32)] as in `Ops.apply_bitmask_`."""


@dataclass(frozen=True, slots=True)
class GrammarBitmask:
    """What the grammars of some rows allow in one step."""

    at: NDArray[np.int64]
    """[G], the rows of the logits; no row twice."""
    words: NDArray[np.int32]
    """[G, ceil(V / 32)] as in `Ops.apply_bitmask_`."""


@dataclass(frozen=True, slots=True)
class SamplingMetadata:
    """The R rows of one step, in the order of the logits. Made by `SamplingState.metadata`.

    The per-row arrays stay on the host, where the branches are decided; None stands for work
    that no row needs.
    """

    params: NDArray[np.void]
    """`SAMPLING_ROW` [R]."""
    num_logprobs: NDArray[np.int64]
    """[R]; -1: the whole vocabulary, `NO_LOGPROBS`: none asked for."""
    grammar: GrammarBitmask | None = None
    allowed: AllowedTokens | None = None
    banned: LogitEntries | None = None
    """Ends of bad words, and stop tokens of rows that have not reached `min_tokens`."""
    logit_bias: BiasEntries | None = None
    penalties: Iterable[PenaltyEntries] | None = None
    """In portions; no logit appears twice."""

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.params)

    @property
    def plain(self) -> bool:
        """Whether tokens are chosen from the logits as they are, and nothing else is asked for."""
        return not self.changes_logits and bool((self.num_logprobs == NO_LOGPROBS).all())

    @property
    def changes_logits(self) -> bool:
        """Whether any processor has work to do."""
        return not (
            self.grammar is None
            and self.allowed is None
            and self.banned is None
            and self.logit_bias is None
            and self.penalties is None
        )
