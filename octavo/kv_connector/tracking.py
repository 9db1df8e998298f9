"""Blocks of live requests, and the blocks that a step fills, for schedulers' halves."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from octavo.kv_cache.block_pool import NULL_BLOCK_ID
from octavo.kv_connector.layout import KVLayout
from octavo.messages import SchedulerOutput
from octavo.request import Request


class FullBlock(NamedTuple):
    """Block whose tokens are all known, and are computed when the step ends."""

    request: Request
    group_id: int
    block_id: int
    block_hash: bytes


@dataclass(slots=True)
class _Live:
    request: Request
    block_ids: list[list[int]]
    num_seen: int
    """Number of full blocks of tokens that were reported or skipped."""


class BlockTracker:
    """Blocks of the running requests.

    Args:
        layout: layout of a block.
    """

    def __init__(self, layout: KVLayout) -> None:
        self._layout = layout
        self._live: dict[str, _Live] = {}

    def start(self, request: Request, block_ids: list[list[int]]) -> None:
        """Add a request that starts in the step that is being scheduled."""
        copies = [list(ids) for ids in block_ids]
        self._live[request.request_id] = _Live(request, copies, 0)

    def full_blocks(
        self, step: SchedulerOutput, whole: Callable[[Request], bool] = lambda request: False
    ) -> Iterator[FullBlock]:
        """Yield the blocks that a step fills, or whose last tokens have become known since.

        Args:
            step: the scheduled step.
            whole: returns True for the requests, among those that the step starts, whose blocks
                from the prefix cache are yielded, too.
        """
        size = self._layout.block_size
        new = {scheduled.req_id for scheduled in step.scheduled_reqs if scheduled.new is not None}
        for req_id in step.finished_req_ids:
            if req_id not in new:  # a new request may have the same id
                self._live.pop(req_id, None)
        for scheduled in step.scheduled_reqs:
            live = self._live[scheduled.req_id]
            request = live.request
            if scheduled.new is not None:
                known = scheduled.new.num_computed_tokens // size
                live.num_seen = 0 if whole(request) else known
            elif scheduled.new_block_ids is not None:
                for ids, more in zip(live.block_ids, scheduled.new_block_ids, strict=True):
                    ids += more
            end = min(len(request.block_hashes), request.num_computed_tokens // size)
            if end <= live.num_seen:
                continue
            # Blocks that no position of the step attends to may have been freed already.
            start = request.num_computed_tokens - scheduled.num_tokens
            lowest = max(0, start - request.num_spec_in_flight)
            for group_id, manager in enumerate(self._layout.managers):
                first = max(live.num_seen, manager.first_needed_block(lowest))
                for i in range(first, min(end, manager.num_full_blocks(end * size))):
                    block_id = live.block_ids[group_id][i]
                    if block_id != NULL_BLOCK_ID:
                        yield FullBlock(request, group_id, block_id, request.block_hashes[i])
            live.num_seen = end


class KnownBlocks:
    """Hashes of a group's blocks that are elsewhere; each is looked up once.

    Args:
        group_id: the KV-cache group.
        has: returns True for blocks that are elsewhere.
    """

    def __init__(self, group_id: int, has: Callable[[tuple[int, bytes]], bool]) -> None:
        self._group_id, self._has = group_id, has
        self._seen: dict[bytes, bool] = {}

    @classmethod
    def of_groups(
        cls, layout: KVLayout, has: Callable[[tuple[int, bytes]], bool]
    ) -> list[KnownBlocks]:
        """Return the hashes of each group, for `longest_match`."""
        return [cls(group_id, has) for group_id in range(len(layout.groups))]

    def __contains__(self, block_hash: object) -> bool:
        assert isinstance(block_hash, bytes)
        if block_hash not in self._seen:
            self._seen[block_hash] = self._has((self._group_id, block_hash))
        return self._seen[block_hash]


def longest_match(
    layout: KVLayout,
    request: Request,
    num_computed_tokens: int,
    known: Sequence[Container[bytes]],
) -> int:
    """Return the length of a request's longest prefix that need not be computed, in whole blocks.

    Each block that the next token needs is in the prefix cache or in another place.

    Args:
        layout: layout of a block.
        request: a request that holds no blocks.
        num_computed_tokens: its tokens in the prefix cache; whole blocks.
        known: hashes of the blocks in the other place, for each KV-cache group.
    """
    hashes, size = request.block_hashes, layout.block_size
    begin, end = num_computed_tokens // size, len(hashes)
    agreed = False
    while end > begin and not agreed:
        before = end
        for group_id, manager in enumerate(layout.managers):
            while end > begin:
                first = manager.first_needed_block(min(end * size, request.num_tokens - 1))
                places = range(end - 1, max(first, begin) - 1, -1)
                missing = next((i for i in places if hashes[i] not in known[group_id]), None)
                if missing is None:
                    break
                end = missing
        agreed = end == before
    return max(begin, end)
