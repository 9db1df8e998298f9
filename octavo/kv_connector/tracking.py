"""Blocks of live requests, and the blocks that a step fills, for schedulers' halves."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from octavo.kv_cache.block_pool import NULL_BLOCK_ID
from octavo.kv_cache.kinds.cross_attention import row_hashes
from octavo.kv_cache.states import id_of_state
from octavo.kv_connector.base import KVConnectorScheduler
from octavo.kv_connector.copy_cache import Key
from octavo.kv_connector.layout import KVLayout
from octavo.messages import SchedulerOutput
from octavo.request import Request


class FullBlock(NamedTuple):
    """Block whose tokens are all known, or whose rows of an encoder; the step computes them."""

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

        Those of cross attention are filled by the step that computes their rows.

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
                if scheduled.req_id in step.scheduled_encoder_inputs or whole(request):
                    yield from self._blocks_of_rows(live)
            elif scheduled.new_block_ids is not None:
                of_tokens = live.block_ids[: len(self._layout.managers)]
                for ids, more in zip(of_tokens, scheduled.new_block_ids, strict=True):
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

    def _blocks_of_rows(self, live: _Live) -> Iterator[FullBlock]:
        """Yield a request's blocks of cross attention."""
        size = self._layout.block_size
        for group_id in self._layout.cross_groups:
            for i, block_hash in enumerate(row_hashes(live.request, size)):
                yield FullBlock(live.request, group_id, live.block_ids[group_id][i], block_hash)

    def sources(
        self, step: SchedulerOutput, whole: Callable[[Request], bool]
    ) -> Iterator[tuple[int, bytes]]:
        """Yield the id of each state that new requests start from, and its last block's hash.

        The arguments are those of `full_blocks`, which is called first.
        """
        for scheduled in step.scheduled_reqs:
            new, request = scheduled.new, self._live[scheduled.req_id].request
            if new is not None and new.state_source >= 0 and whole(request):
                last = new.num_computed_tokens // self._layout.block_size - 1
                yield id_of_state(new.state_source), request.block_hashes[last]


def block_hashes(
    layout: KVLayout, request: Request, end: int | None = None
) -> list[Sequence[bytes]]:
    """Return the hashes of a request's blocks, for each group of the layout.

    They are the hashes of its first `end` blocks of tokens, or of all blocks of an encoder's rows.
    """
    rows = row_hashes(request, layout.block_size) if layout.cross_groups else []
    return [
        rows if i in layout.cross_groups else request.block_hashes[:end]
        for i in range(len(layout.groups))
    ]


def item_keys(layout: KVLayout, request: Request) -> Iterator[Key]:
    """Yield the keys of all copies that depend on a request's items: those of the blocks and the
    states from its first item on, and of an encoder's rows."""
    begin = min(item.begin for item in request.mm_features) // layout.block_size
    for group_id, hashes in enumerate(block_hashes(layout, request)):
        of_rows = group_id in layout.cross_groups
        yield from ((group_id, block_hash) for block_hash in hashes[0 if of_rows else begin :])
    for block_hash in request.block_hashes[begin:]:
        yield from layout.state_keys(block_hash)


class Known:
    """Hashes whose blocks, or states, are in another place; each is looked up once.

    Args:
        has: lookup.
    """

    def __init__(self, has: Callable[[bytes], bool]) -> None:
        self._has = has
        self._seen: dict[bytes, bool] = {}

    def __contains__(self, block_hash: object) -> bool:
        assert isinstance(block_hash, bytes)
        if block_hash not in self._seen:
            self._seen[block_hash] = self._has(block_hash)
        return self._seen[block_hash]


def find_match(
    half: KVConnectorScheduler,
    request: Request,
    num_computed_tokens: int,
    has: Callable[[Key], bool],
) -> int:
    """Return the number of tokens that a connector can load, in whole blocks.

    The rows of an encoder precede the tokens of a request: unless the prefix cache has all of them,
    they count, too, and nothing can be loaded without them.

    Args:
        half: the connector's half.
        request: a request that holds no blocks.
        num_computed_tokens: its tokens in the prefix cache; whole blocks.
        has: lookup of copies in the connector.
    """
    layout, cache = half.layout, half.prefix_cache

    def has_block(group_id: int, block_hash: bytes) -> bool:
        is_here = cache is not None and cache.has_block(group_id, block_hash)
        return is_here or has((group_id, block_hash))

    def has_state(block_hash: bytes) -> bool:
        is_here = cache is not None and cache.has_state(block_hash)
        return is_here or all(map(has, layout.state_keys(block_hash)))

    num_rows = 0
    if layout.cross_groups:
        hashes = row_hashes(request, layout.block_size)
        keys = [(group_id, block_hash) for group_id in layout.cross_groups for block_hash in hashes]
        if not keys or not all(has_block(*key) for key in keys):
            return 0
        if cache is None or not all(cache.has_block(*key) for key in keys):
            num_rows = len(hashes) * layout.block_size
    known = [Known(partial(has_block, group_id)) for group_id in range(len(layout.managers))]
    states = Known(has_state) if layout.states else None
    end = longest_match(layout, request, num_computed_tokens, known, states)
    return num_rows + end * layout.block_size - num_computed_tokens


def keys_to_load(
    layout: KVLayout, request: Request, block_ids: list[list[int]], num_external_tokens: int
) -> Iterator[tuple[Key, int]]:
    """Yield the key of each copy to load, and the id of its block or state.

    The arguments are those of `update_state_after_alloc`.
    """
    of_rows = [block_ids[group_id] for group_id in layout.cross_groups]
    if any(map(any, of_rows)):
        num_external_tokens -= len(of_rows[0]) * layout.block_size
    for group_id, ids in enumerate(block_ids):
        hashes, begin = request.block_hashes, len(ids) - num_external_tokens // layout.block_size
        if group_id in layout.cross_groups:
            hashes, begin = row_hashes(request, layout.block_size), 0
        for i in range(begin, len(ids)):
            block_hash = hashes[i]
            if ids[i] == NULL_BLOCK_ID:
                continue
            if group_id < len(layout.groups):
                yield (group_id, block_hash), ids[i]
            else:
                for key in layout.state_keys(block_hash):
                    yield key, ids[i]


def longest_match(
    layout: KVLayout,
    request: Request,
    num_computed_tokens: int,
    known: Sequence[Container[bytes]],
    states: Container[bytes] | None = None,
) -> int:
    """Return the length of a request's longest prefix that need not be computed, in whole blocks.

    Each block that the next token needs is in the prefix cache or in another place. In models with
    recurrent states the prefix ends with a known state, and does not contain the last token.

    Args:
        layout: layout of a block.
        request: a request that holds no blocks.
        num_computed_tokens: its tokens in the prefix cache; whole blocks.
        known: hashes of the blocks in the other place, for each KV-cache group.
        states: hashes of the last blocks of known states, in models with recurrent states.
    """
    hashes, size = request.block_hashes, layout.block_size
    begin, end = num_computed_tokens // size, len(hashes)
    if states is None:
        return _match_blocks(layout, request, begin, end, known)
    end = min(end, (request.num_tokens - 1) // size)
    while end > begin:
        if hashes[end - 1] in states and _match_blocks(layout, request, begin, end, known) == end:
            return end
        end -= 1
    return begin


def _match_blocks(
    layout: KVLayout, request: Request, begin: int, end: int, known: Sequence[Container[bytes]]
) -> int:
    """Return the longest prefix from `begin` up to `end`, in blocks; see `longest_match`."""
    hashes, size = request.block_hashes, layout.block_size
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
