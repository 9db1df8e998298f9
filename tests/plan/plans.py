"""Synthetic memory plans."""

from octavo.plan.memory_plan import MemoryPlan


def make_plan(max_model_len: int, num_blocks: int, *, warm_spare: bool = False) -> MemoryPlan:
    """Return a plan with a context and a number of blocks; all else is zero."""
    return MemoryPlan(
        **dict.fromkeys(
            ("limit", "runtime", "weights", "activations", "logits", "loading", "rows", "kv_cache"),
            0,
        ),
        num_blocks=num_blocks,
        block_size=16,
        block_nbytes=1,
        max_model_len=max_model_len,
        blocks_per_request=1,
        warm_spare=warm_spare,
    )
