"""What becomes of known prefixes, for routers: vLLM's KV events, with its names and its encoding.

Imports nothing but msgspec: subscribers may import it.
"""

from __future__ import annotations

import msgspec


class KVCacheEvent(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    """Something that became of the prefix cache; on the wire an array whose first item is a name.

    Hashes are chained: equal ones mean equal tokens from the beginning of the prompt, in the same
    scope (`cache_salt`).
    """


class BlockStored(KVCacheEvent):
    """Blocks that follow one another hold a known prefix, or will once their step is computed."""

    block_hashes: list[bytes]
    parent_block_hash: bytes | None
    """Of the block before the first one; None: this is the beginning of a prompt."""
    token_ids: list[int]
    """Of all these blocks."""
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    """Where the blocks are: "CPU", or "GPU"."""


class BlockRemoved(KVCacheEvent):
    """Blocks are used for something else."""

    block_hashes: list[bytes]
    medium: str | None = None


class AllBlocksCleared(KVCacheEvent):
    """Nothing is known any more; also the first event of an engine that has just been started."""


AnyKVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    """What happened in a step, in order."""

    ts: float
    """Seconds since 1970."""
    events: list[AnyKVEvent]
    data_parallel_rank: int | None = None


class KVEventLog:
    """Takes down events of one KV-cache group until somebody takes them.

    Args:
        group_id: the group whose blocks decide what a request finds.
        block_size: tokens of a block.
        medium: see `BlockStored`.
    """

    def __init__(self, group_id: int, block_size: int, medium: str) -> None:
        self.group_id = group_id
        self._block_size, self._medium = block_size, medium
        self._events: list[AnyKVEvent] = []

    def note_stored(self, hash: bytes, parent: bytes | None, token_ids: list[int]) -> None:
        """A block is known now; those that follow one another become one event."""
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockStored) and last.block_hashes[-1] == parent:
            last.block_hashes.append(hash)
            last.token_ids += token_ids
        else:
            self._events.append(
                BlockStored([hash], parent, token_ids, self._block_size, None, self._medium)
            )

    def note_removed(self, hash: bytes) -> None:
        """A block is not known any more."""
        last = self._events[-1] if self._events else None
        if isinstance(last, BlockRemoved):
            last.block_hashes.append(hash)
        else:
            self._events.append(BlockRemoved([hash], self._medium))

    def note_cleared(self) -> None:
        """None is; what happened before does not matter any more."""
        self._events = [AllBlocksCleared()]

    def take(self) -> list[AnyKVEvent]:
        """What happened since the last call."""
        events, self._events = self._events, []
        return events
