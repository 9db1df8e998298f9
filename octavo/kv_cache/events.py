"""Events of the prefix cache, for routers: vLLM's KV events, with its names and its encoding.

The module imports only msgspec, so that subscribers can import it.
"""

from __future__ import annotations

import msgspec


class KVCacheEvent(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    """Event of the prefix cache; on the wire an array that starts with its name.

    Hashes are chained: equal hashes mean equal tokens from the beginning of the prompt, in the same
    scope (`cache_salt`).
    """


class BlockStored(KVCacheEvent):
    """Event: successive blocks hold a known prefix, or will once their step is computed."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    """Hash of the block before the first one; None: this is the beginning of a prompt."""
    token_ids: list[int]
    """Tokens of all these blocks."""
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    """Location of the blocks: "CPU" or "GPU"."""


class BlockRemoved(KVCacheEvent):
    """Event: blocks are reused."""

    block_hashes: list[bytes]
    medium: str | None = None


class AllBlocksCleared(KVCacheEvent):
    """Event: no prefix is known any more; also the first event of a new engine."""


AnyKVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """Events of a step, in order."""

    ts: float
    """Time in seconds since 1970."""
    events: list[AnyKVEvent]
    data_parallel_rank: int | None = None


class KVEventLog:
    """Log of events of one KV-cache group, until `take` returns them.

    Args:
        group_id: the group with blocks that determine a request's hits.
        block_size: tokens of a block.
        medium: see `BlockStored`.
    """

    def __init__(self, group_id: int, block_size: int, medium: str) -> None:
        self.group_id = group_id
        self._block_size, self._medium = block_size, medium
        self._events: list[AnyKVEvent] = []

    def note_stored(self, hash: bytes, parent: bytes | None, token_ids: list[int]) -> None:
        """Record a newly known block; successive blocks become one event."""
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockStored) and last.block_hashes[-1] == parent:
            last.block_hashes.append(hash)
            last.token_ids += token_ids
        else:
            self._events.append(
                BlockStored([hash], parent, token_ids, self._block_size, None, self._medium)
            )

    def note_removed(self, hash: bytes) -> None:
        """Record that a block is no longer known."""
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(hash)
        else:
            self._events.append(BlockRemoved([hash], self._medium))

    def note_cleared(self) -> None:
        """Record that no block is known any more; drop earlier events."""
        self._events = [AllBlocksCleared()]

    def take(self) -> list[AnyKVEvent]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events
