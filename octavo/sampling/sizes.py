"""Memory sizes of sampling, for the memory plan."""

from __future__ import annotations

# Rows are processed in groups of about this number of logits, so that temporaries stay small (and,
# on a CPU, in the caches) for every batch. A row's result does not depend on its group.
CHUNK_ELEMENTS = 2**19
# Temporaries of the largest path, logprobs of many candidates, for each logit of a group: some
# float32 copies of the logits, and int64 keys, ids and their copies.
_WORKSPACE_BYTES = 96
# Penalties: an int32 count and an int32 list entry for each token id.
_PENALTY_BYTES = 8
# The native sampler's workspace of each thread, for each token id, and the tokens of a group.
_CANDIDATE_BYTES, _GROUP = 14, 64
# The per-row parameters: a SAMPLING_ROW and 8 arrays of at most 8 bytes.
_ROW_BYTES = 40 + 8 * 8


def rows_per_chunk(vocab_size: int) -> int:
    """Return the rows of logits that are processed together."""
    return max(1, CHUNK_ELEMENTS // vocab_size)


def state_nbytes(max_num_rows: int, vocab_size: int) -> int:
    """Return the maximum size of `SamplingState` in bytes.

    The penalty part is reserved, not used: the system allocates its pages as rows with penalties
    touch them. Lists that requests contain (`logit_bias`, `allowed_token_ids`, `bad_words`) are not
    counted, nor are guards, of at most 24 KiB for each row.
    """
    return max_num_rows * (vocab_size * _PENALTY_BYTES + _ROW_BYTES)


def kernel_nbytes(num_threads: int, vocab_size: int) -> int:
    """Return the maximum bytes that `Ops.sample` keeps: see csrc/sample.h."""
    return num_threads * (vocab_size + _GROUP) * _CANDIDATE_BYTES


def workspace_nbytes(max_num_rows: int, vocab_size: int) -> int:
    """Return the maximum bytes of `Sampler.sample`, excluding the logits and a copy of them.

    The copy only exists when logprobs are requested and processors change the logits.
    """
    return min(max_num_rows, rows_per_chunk(vocab_size)) * vocab_size * _WORKSPACE_BYTES
