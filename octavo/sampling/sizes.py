"""How much memory sampling takes. Imports no torch: the memory plan is made before that."""

from __future__ import annotations

# Rows are worked on in groups of about this many logits, so that temporaries stay small (and, on
# a CPU, in the caches) whatever the batch. A row's result does not depend on its group.
CHUNK_ELEMENTS = 2**19
# Temporaries of the hungriest path, logprobs of many candidates, for each logit of a group: some
# float32 copies of the logits, and int64 keys, ids and their copies.
_WORKSPACE_BYTES = 96
# Penalties: an int32 count and an int32 list entry for each token id.
_PENALTY_BYTES = 8
# The native sampler's workspace of each thread, for each token id, and the tokens of a group.
_CANDIDATE_BYTES, _GROUP = 14, 64
# The per-row parameters: a SAMPLING_ROW and 8 arrays of at most 8 bytes.
_ROW_BYTES = 40 + 8 * 8


def rows_per_chunk(vocab_size: int) -> int:
    """Rows of logits that are worked on together."""
    return max(1, CHUNK_ELEMENTS // vocab_size)


def state_nbytes(max_num_rows: int, vocab_size: int) -> int:
    """Bytes that `SamplingState` can take at most.

    The penalty part is reserved, not used: its pages are taken from the system as rows with
    penalties touch them. Lists that requests bring themselves (`logit_bias`,
    `allowed_token_ids`, `bad_words`) are not counted.
    """
    return max_num_rows * (vocab_size * _PENALTY_BYTES + _ROW_BYTES)


def kernel_nbytes(num_threads: int, vocab_size: int) -> int:
    """Bytes that `Ops.sample` keeps at most: see csrc/sample.h."""
    return num_threads * (vocab_size + _GROUP) * _CANDIDATE_BYTES


def workspace_nbytes(max_num_rows: int, vocab_size: int) -> int:
    """Bytes that `Sampler.sample` takes at most beside the logits and a copy of them.

    The copy is there only when logprobs are asked for and processors change the logits.
    """
    return min(max_num_rows, rows_per_chunk(vocab_size)) * vocab_size * _WORKSPACE_BYTES
