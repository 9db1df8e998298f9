"""Sizes of the experts of a model, and the division of an expert cache among ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from octavo.errors import ConfigError
from octavo.models.weights import Weight


@dataclass(frozen=True)
class ExpertSizes:
    """Sizes of the experts of a model, or of a rank's part of it."""

    count: int
    """Number of experts of all blocks."""
    nbytes: int
    """Bytes of all experts."""
    largest: int
    """Bytes of the largest expert: those of a slot."""
    least: int
    """Slots that one token needs at once: its number of experts in one block."""
    per_token: int
    """Bytes of the experts that a token uses; the average if a rank has only some experts."""

    @classmethod
    def of(cls, weights: Iterable[Weight], dtype: str) -> ExpertSizes:
        """Return the sizes of the experts among weights, for a model in `dtype`."""
        experts: dict[tuple[str, int], int] = {}
        blocks: dict[str, tuple[int, int]] = {}
        for weight in weights:
            if (expert := weight.expert) is not None:
                key = expert.block, expert.index
                experts[key] = experts.get(key, 0) + weight.nbytes(dtype)
                blocks[expert.block] = expert.active, expert.count
        own, per_token = dict.fromkeys(blocks, 0), 0.0
        for (block, _), nbytes in experts.items():
            active, count = blocks[block]
            own[block] += 1
            per_token += nbytes * active / count
        return cls(
            len(experts),
            sum(experts.values()),
            max(experts.values(), default=0),
            max((min(own[block], active) for block, (active, _) in blocks.items()), default=0),
            round(per_token),
        )


def divide_slots(size: int, ranks: Sequence[ExpertSizes], architecture: str) -> list[int]:
    """Return the number of slots of each rank: the cache is divided like the experts' bytes.

    Args:
        size: bytes of the cache of all ranks together.
        ranks: the experts of each rank.
        architecture: name of the model.

    Raises:
        ConfigError: the model has no experts, or the cache has no room for those of one token.
    """
    total = sum(rank.nbytes for rank in ranks)
    if not total:
        raise ConfigError(
            f"expert_cache={size} is not supported with {architecture}, which has no experts; leave"
            " it out."
        )
    slots, least = [], 0
    for rank in ranks:
        if not rank.nbytes:  # a stage without experts
            slots.append(0)
            continue
        slots.append(min(rank.count, size * rank.nbytes // total // rank.largest))
        least = max(least, -(-rank.least * rank.largest * total // rank.nbytes))
    if size < least:
        raise ConfigError(
            f"expert_cache={size} has no room for the experts that one token uses in a layer; set "
            f"it to at least {least:,} bytes ({-(-least // 2**20)} MiB)."
        )
    return slots
