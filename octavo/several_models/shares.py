"""Shares of several models in the machine's memory."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from octavo.errors import ConfigError
from octavo.plan.memory_plan import MIB


class Needs(msgspec.Struct, frozen=True):
    """Memory that the server of one model needs, planned without loading it.

    All numbers are in bytes.
    """

    name: str
    fixed: int
    """Peak without the KV cache and without a spare process."""
    least: int
    """Least KV cache: one request of the greatest length."""
    wish: int
    """KV cache that the model would use if it were alone."""
    spare: int = 0
    """A spare process, which replaces a dead engine at once."""


def divide(needs: Sequence[Needs], limit: int, most_loaded: int) -> list[int]:
    """Return the size of each model's KV cache, so that any `most_loaded` models fit at once.

    All caches have the same size c, except that none is smaller than `least` or larger than `wish`;
    c is the largest size that fits.

    Args:
        needs: the models.
        limit: bytes that all models may use together.
        most_loaded: number of models that may be loaded at once.

    Raises:
        ConfigError: even the least caches do not fit.
    """
    if total_of(needs, [n.least for n in needs], most_loaded) > limit:
        raise ConfigError(_too_much(needs, limit, most_loaded))
    low, high = 0, max((n.wish for n in needs), default=0)
    while low < high:
        middle = (low + high + 1) // 2
        if total_of(needs, _caches(needs, middle), most_loaded) <= limit:
            low = middle
        else:
            high = middle - 1
    return _caches(needs, low)


def total_of(needs: Sequence[Needs], caches: Sequence[int], most_loaded: int) -> int:
    """Return the bytes of the `most_loaded` largest models with the given caches."""
    totals = [n.fixed + cache for n, cache in zip(needs, caches, strict=True)]
    return sum(sorted(totals, reverse=True)[:most_loaded])


def _caches(needs: Sequence[Needs], size: int) -> list[int]:
    return [min(max(size, n.least), max(n.wish, n.least)) for n in needs]


def _too_much(needs: Sequence[Needs], limit: int, most_loaded: int) -> str:
    total = total_of(needs, [n.least for n in needs], most_loaded)
    largest = sorted(needs, key=lambda n: n.fixed + n.least, reverse=True)[:most_loaded]
    parts = ", ".join(
        f"{n.name} {n.fixed / MIB:,.0f} MiB and a KV cache of {n.least / MIB:,.1f} MiB"
        for n in largest
    )
    fewer = " lower max_loaded_models," if most_loaded > 1 else ""
    return (
        f"The models need {total / MIB:,.0f} MiB, but only {limit / MIB:,.0f} MiB may be used: "
        f"{parts}. Use smaller models or dtypes,{fewer} or lower max_model_len, "
        "max_num_batched_tokens, max_num_seqs or request_memory_bytes."
    )
