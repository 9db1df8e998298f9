"""Sampling of tokens from logits.

A sampled row draws by a race among its tokens, each with a Philox number for (request seed, output
position, token); see `Ops.sample`. A row's token depends neither on the other rows nor on a
device's order of sums. Rounding cannot break ties, and a token of weight zero can never be drawn.
(Tokens 2**40 times less probable than the most probable one have weight zero, and one that is 2**33
times less probable than all together is hardly ever drawn: numbers have 32 bits.)
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from octavo.errors import RequestError
from octavo.kernels.base import Ops
from octavo.messages import LogprobsLists
from octavo.sampling.acceptance import accept_drafts
from octavo.sampling.metadata import NO_LOGPROBS, SamplingMetadata
from octavo.sampling.sizes import rows_per_chunk
from octavo.system.tensor import Tensor

logger = logging.getLogger(__name__)

LongArray = NDArray[np.int64]

_FAULT = "its sampling parameters could not be applied, which is a fault of Octavo; see the log"
NOT_FINITE = "the model's logits for it are not finite (NaN or infinity)"


@dataclass(slots=True)
class SamplerOutput:
    """Result of one call of the sampler."""

    token_ids: Tensor
    """int64 [R], on the logits' device; -1 for a row that failed."""
    logprobs: dict[int, LogprobsLists] = field(default_factory=dict)
    """Logprobs of each row that requests them: one position, the chosen token, then candidates."""
    errors: dict[int, str] = field(default_factory=dict)
    """Errors of single rows: logits that are not finite, no token left, or a logits processor."""


class Sampler:
    """Sampler of one token for each row of logits.

    Args:
        ops: the operations of the logits' device.
    """

    def __init__(self, ops: Ops) -> None:
        self.ops = ops

    def sample(self, logits: Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        """Choose a token for each row.

        Logprobs are vLLM's `raw_logprobs`: of the logits before any processor; for exceptions see
        `LogitsProcessor.owns_logprobs`.

        Args:
            logits: float32 [R, V], contiguous; changed in place.
            metadata: parameters of the same R rows.
        """
        errors: dict[int, str] = {}
        changes = len(metadata.processors) > 0
        asking = np.flatnonzero(metadata.num_logprobs != NO_LOGPROBS)
        raw, raw_rows = logits, asking
        if changes and len(asking):
            raw = self.ops.embedding(logits, self.ops.to_device(asking))
            raw_rows = np.arange(len(asking))

        if changes:
            self._fail_rows(logits, errors, NOT_FINITE)
        for processor, step in metadata.processors:
            try:
                processor.apply(self.ops, logits, step)
            except RequestError as error:  # a plug-in's
                message = error.message
            except Exception:
                logger.exception("the logits processor %s failed", type(processor).__name__)
                message = _FAULT
            else:
                continue
            self.ops.set_at_(logits, step.at, None, math.nan)
            for row in step.at.tolist():
                errors.setdefault(row, message)
        if changes:
            self._fail_rows(
                logits,
                errors,
                "no token is left to choose: allowed_token_ids, bad_words, min_tokens, extra_args"
                " or its grammar exclude them all, or a penalty made its logits infinite",
            )

        output = SamplerOutput(self.ops.sample(logits, metadata.params), errors=errors)
        if metadata.drafted is not None:
            drafted = metadata.drafted
            accept_drafts(self.ops, logits, metadata.params, drafted, output.token_ids)
        if not changes:
            for row in np.flatnonzero(self.ops.to_host(output.token_ids) < 0).tolist():
                errors[row] = NOT_FINITE
        if len(asking):
            good = np.asarray([row not in errors for row in asking.tolist()])
            self._add_logprobs(raw, raw_rows[good], metadata, asking[good], output)
        for processor, step in metadata.processors:
            if processor.owns_logprobs:
                self._set_own_logprobs(logits, step.at, output)
        return output

    def _set_own_logprobs(self, logits: Tensor, rows: LongArray, output: SamplerOutput) -> None:
        """Replace the logprobs of the rows' own tokens by those of the processed logits."""
        asking = np.asarray([row for row in rows.tolist() if row in output.logprobs], np.int64)
        for some in _chunks(asking, logits.shape[1]):
            own = self.ops.embedding(logits, self.ops.to_device(some))
            chosen = self.ops.to_host(output.token_ids)[some]
            found = self.ops.gather(self.ops.log_softmax(own), chosen[:, None])
            for row, logprob in zip(some.tolist(), found, strict=True):
                lists = output.logprobs[row]
                lists.logprobs = logprob.tobytes() + lists.logprobs[logprob.nbytes :]

    def _fail_rows(self, logits: Tensor, errors: dict[int, str], message: str) -> None:
        """Add an error for each row without a finite maximum."""
        largest = self.ops.to_host(self.ops.row_max(logits))
        for row in np.flatnonzero(~np.isfinite(largest)).tolist():
            errors.setdefault(row, message)

    def _add_logprobs(
        self,
        raw: Tensor,
        raw_rows: LongArray,
        metadata: SamplingMetadata,
        rows: LongArray,
        output: SamplerOutput,
    ) -> None:
        """Add logprobs; rows with the same number of candidates are processed together.

        `raw_rows[i]` is the index in `raw` of the unchanged logits of row `rows[i]`.
        """
        asked, ids = metadata.num_logprobs[rows], metadata.logprob_token_ids
        chosen = self.ops.to_host(output.token_ids)
        by_id = np.array([row in ids for row in rows.tolist()], np.bool_)
        for k, given in sorted(set(zip(asked.tolist(), by_id.tolist(), strict=True))):
            alike = np.flatnonzero((asked == k) & (by_id == given))
            for some in _chunks(alike, raw.shape[1]):
                logits = self.ops.embedding(raw, self.ops.to_device(raw_rows[some]))
                candidates = None
                if given:
                    of_rows = np.stack([ids[row] for row in rows[some].tolist()])
                    candidates = of_rows.astype(np.int64)
                lists = _gather_logprobs(self.ops, logits, chosen[rows[some]], k, candidates)
                for i, row in enumerate(rows[some].tolist()):
                    output.logprobs[row] = lists.select(i, i + 1)


def prompt_logprobs(
    ops: Ops, logits: Tensor, target_token_ids: LongArray, num_logprobs: int
) -> LogprobsLists:
    """Return logprobs of given tokens, such as the prompt tokens that follow.

    Args:
        ops: the operations of the logits' device.
        logits: float32 [T, V].
        target_token_ids: int64 [T], the token to report for each row.
        num_logprobs: number of most probable tokens to report in addition; -1: the whole
            vocabulary.

    Returns:
        T rows of 1 + num_logprobs entries.
    """
    step = rows_per_chunk(logits.shape[1])
    return LogprobsLists.join(
        [
            _gather_logprobs(
                ops, logits[at : at + step], target_token_ids[at : at + step], num_logprobs
            )
            for at in range(0, len(logits), step)
        ]
    )


def _gather_logprobs(
    ops: Ops,
    logits: Tensor,
    token_ids: LongArray,
    k: int,
    candidates: LongArray | None = None,
) -> LogprobsLists:
    """Return the logprobs of each row's token and its k most probable ones (-1: all).

    `candidates`, int64 [R, k], replaces the most probable ones. Ranks are those of the logits,
    since rounding may make logprobs equal: the greedy token has rank 1.
    """
    ids = token_ids[:, None]
    if k != 0:
        if candidates is None:
            found = ops.top_k(logits, logits.shape[1] if k == -1 else k)[1]
            candidates = ops.to_host(found)
        ids = np.concatenate([ids, candidates], axis=1)
    return LogprobsLists(
        ids.astype(np.int32).tobytes(),
        ops.gather(ops.log_softmax(logits), ids).tobytes(),
        ops.ranks(logits, token_ids).astype(np.int32).tobytes(),
    )


def _chunks(rows: LongArray, vocab_size: int) -> Iterator[LongArray]:
    """Split rows so that temporaries stay small."""
    step = rows_per_chunk(vocab_size)
    for at in range(0, len(rows), step):
        yield rows[at : at + step]
