"""What requests do to their logits before a token is chosen. Semantics and order are vLLM's.

Each function changes float32 logits [R, V] in place and touches only the rows, mostly only the
single logits, that need it. All arithmetic is elementwise, so no row depends on another one.
"""

from __future__ import annotations

import math

import torch

from octavo.kernels.base import Ops
from octavo.kernels.memory import to_device
from octavo.sampling.metadata import (
    BiasEntries,
    LogitEntries,
    PenaltyEntries,
    SamplingMetadata,
)


def apply_logits_processors(ops: Ops, logits: torch.Tensor, metadata: SamplingMetadata) -> None:
    """Applies all that can change which token is the most probable one."""
    if metadata.grammar is not None:
        grammar = metadata.grammar
        bitmask, rows = (to_device(array, logits.device) for array in (grammar.words, grammar.at))
        ops.apply_bitmask_(logits, bitmask, rows)
    if metadata.allowed is not None:
        ops.apply_bitmask_(logits, metadata.allowed.bitmask, metadata.allowed.rows)
    if metadata.banned is not None:
        apply_banned_token_ids(logits, metadata.banned)
    if metadata.logit_bias is not None:
        apply_logit_bias(logits, metadata.logit_bias)
    if metadata.penalties is not None:
        for entries in metadata.penalties:
            apply_penalties(logits, entries)


def apply_banned_token_ids(logits: torch.Tensor, banned: LogitEntries) -> None:
    """Makes the listed tokens impossible: bad words, and stop tokens before `min_tokens`."""
    logits[banned.rows, banned.token_ids] = -math.inf


def apply_logit_bias(logits: torch.Tensor, bias: BiasEntries) -> None:
    """Adds each request's `logit_bias`."""
    logits[bias.rows, bias.token_ids] += bias.values


def apply_penalties(logits: torch.Tensor, penalties: PenaltyEntries) -> None:
    """Repetition, then frequency, then presence penalty.

    Repetition (N. S. Keskar et al., "CTRL", 2019, section 4.1, with Hugging Face's rule for
    negative logits) looks at prompt and output; the other two, OpenAI's, at the output only.
    """
    p = penalties
    values = logits[p.rows, p.token_ids]
    values = torch.where(values > 0, values / p.repetition, values * p.repetition)
    values -= p.frequency * p.output_counts
    values -= p.presence * (p.output_counts > 0)
    logits[p.rows, p.token_ids] = values
