"""Allocation of KV-cache blocks to requests: prefix hits, slots, copy on write, release.

A cached block is never overwritten, although steps are scheduled before earlier ones have run, and
blocks are reallocated while a step in flight may still write to them. The reasons:

1. Steps execute in the order of scheduling, and within a step the model writes the KV of the whole
batch before it attends, layer by layer. So a block contains the writes of the last step that was
scheduled to write to it.
2. A block is made known (hashed) when the step that computes its last position is scheduled, and
only if all its tokens are known then: neither tokens that a step in flight has yet to sample, nor
drafts. A request that hits it is scheduled in the same step or later, and reads the written
contents.
3. A request writes at its own computed position and beyond. Hashed blocks end at or before the end
of the step that made them known, and a rejected draft never moves a request back before its last
known token. So no request, in flight or later, writes to its own hashed blocks again. While drafts
are in flight a request counts as computed up to the last of them, and its true position may be
before them by at most their number. Even then it has known and computed all hashed tokens, and it
keeps the blocks that a sliding window may reach from there.
4. A request's writes in flight beyond its hashed blocks use blocks that only this request holds. If
it ends or is preempted meanwhile, these blocks are unhashed. A new owner is scheduled later, so its
writes are later, and it only reads its own writes or known contents.
5. A hit that ends inside a block (a prompt that is known to its end: the last token is computed
again for its logits) is the one case in which a request would write to a known block. If another
request uses the block, the request receives a copy. Otherwise the cache forgets the block and the
request uses it, to make it known again under rule 2. A block that is made known in this very step
has no content yet when copies are made, before the step: then the hit is shortened to exclude it.
6. The n requests of one prompt (`Request.leader`) share its last block, although it is not full and
cannot be found by hash. Once the leader has computed it in earlier steps, the others treat it as a
hit that ends inside a block, and receive copies. The leader's tokens after the prompt are copied
with it, and overwritten before they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from octavo.kv_cache.block_pool import NULL_BLOCK_ID, BlockPool, KVCacheBlock
from octavo.kv_cache.events import KVEventLog
from octavo.kv_cache.given_up import GivenUp, GivenUpLog
from octavo.kv_cache.groups import KVCacheConfig, make_manager
from octavo.kv_cache.kinds.cross_attention import CrossAttentionManager, row_hashes
from octavo.kv_cache.states import Snapshot, StateManager, id_of_state
from octavo.request import Request


@dataclass(slots=True)
class KVCacheBlocks:
    """Blocks in order, one list for each group, and the number of tokens with KV in them."""

    blocks: list[list[KVCacheBlock]]
    num_tokens: int = 0
    snapshot: Snapshot | None = None
    """Recurrent state after these tokens, in models with states."""
    num_parted: int = 0
    """Number of tokens that earlier prompts share; a snapshot may be missing for the last ones."""
    num_stored: int = 0
    """Number of tokens with known blocks, or in a model without attention of all whole blocks."""


@dataclass(slots=True)
class _RequestBlocks:
    """Blocks of one request."""

    blocks: list[list[KVCacheBlock]]
    num_released: list[int]
    """Number of released blocks at the front of each group, now null blocks."""
    num_cached_blocks: int
    """Number of blocks of tokens that have been offered to the prefix cache."""
    num_slots: int = 0
    """Number of tokens that the blocks can hold."""


@dataclass(slots=True)
class _LoadedBlocks:
    """Blocks that a KV connector fills for a request, and the blocks before them."""

    hit: list[list[KVCacheBlock]]
    new: list[tuple[int, KVCacheBlock, bytes]]
    """Tuples (group, block, hash of its future contents)."""
    request: Request
    start: int
    """Number of blocks of tokens before them; -1: the loaded blocks will not be known."""
    end: int
    """Number of blocks of tokens up to their end."""
    state: int | None = None
    """Slot for the recurrent state at their end; None: it is not loaded."""


class KVCacheManager:
    """Allocator of the blocks of the KV cache.

    The layout of a group's block table is determined by its kind (`kinds/`): its length, the blocks
    no longer needed, the usable prefixes. Groups of all kinds share one pool.

    Blocks of a request are hashed, looked up and shared only if the request has block hashes.

    Args:
        config: shape of the cache.
        enable_caching: True to keep known prefixes after their last user has ended.
        events: log of new and forgotten prefixes.
        message_ends: ids of the tokens that end messages; see `StateManager`.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        enable_caching: bool,
        events: KVEventLog | None = None,
        message_ends: Iterable[int] = (),
    ) -> None:
        self.config = config
        self.block_size = config.block_size
        paged = config.paged_groups
        groups = [group for group in paged if not group.is_cross]
        self.managers = [make_manager(group.cache, config.block_size) for group in groups]
        self.pool = BlockPool(config.num_blocks, len(paged), enable_caching, events)
        self.cross: CrossAttentionManager | None = None
        """Blocks of cross attention, in encoder-decoders; the groups follow those of `managers`."""
        if len(groups) < len(paged):
            self.cross = CrossAttentionManager(
                self.pool, config.block_size, range(len(groups), len(paged))
            )
        self.states: StateManager | None = None
        """Slots of recurrent states, in models with such layers."""
        if len(paged) < len(config.groups):
            self.states = StateManager(
                config.num_states,
                config.states_per_request,
                config.block_size,
                enable_caching,
                message_ends,
            )
        self.num_queries = 0
        """Number of tokens looked up for requests when they were first admitted."""
        self.num_hits = 0
        """Number of tokens found for them."""
        self._requests: dict[str, _RequestBlocks] = {}
        self._loads: dict[str, _LoadedBlocks] = {}
        # Of the step being scheduled:
        self._copies: list[tuple[KVCacheBlock, KVCacheBlock]] = []
        self._made_known: set[int] = set()
        self._begun: set[str] = set()
        """Requests that the step admits, or with prompt tokens that it computes."""
        # In a kind that keeps no full blocks, no block is part of a prefix. A state exists only
        # where a snapshot was taken.
        self._has_pages = self.states is None and all(
            m.num_full_blocks(self.block_size) == 1 for m in self.managers
        )

    def log_given_up(self, clock: Callable[[], float]) -> None:
        """Begin a log of the blocks and snapshots that are given up."""
        self.pool.given_up = GivenUpLog(clock)
        if self.states is not None:
            self.states.given_up = self.pool.given_up

    def given_up_after(self, request: Request, num_tokens: int) -> GivenUp | None:
        """Return when the block after a request's known prefix of `num_tokens` was given up.

        In models with states it may also be a later block's snapshot.
        """
        log = self.pool.given_up
        if log is None or request.skip_reading_prefix_cache:
            return None
        hashes = request.block_hashes[num_tokens // self.block_size :]
        found = map(log.find, hashes if self.states is not None else hashes[:1])
        return next((entry for entry in found if entry is not None), None)

    @property
    def num_used_blocks(self) -> int:
        """Number of blocks that live requests hold."""
        return self.pool.num_used_blocks

    @property
    def usage(self) -> float:
        """Share of the blocks that live requests hold, 0 to 1."""
        return self.pool.usage

    def get_computed_blocks(self, request: Request) -> tuple[KVCacheBlocks, int]:
        """Find the longest known prefix of a request that holds no blocks.

        All groups must be able to continue from the prefix. It excludes the last token, which must
        be computed for its logits.

        Returns:
            The blocks (nothing is reserved yet) and the number of tokens in them.
        """
        if request.skip_reading_prefix_cache:
            return KVCacheBlocks([[] for _ in self.managers]), 0
        hashes = request.block_hashes
        num_blocks = len(hashes)
        if self.states is not None:  # a state cannot go back by a token
            num_blocks = min(num_blocks, (request.num_tokens - 1) // self.block_size)
        if num_blocks and self._ends_in_block_without_content(request, num_blocks):
            num_blocks -= 1
            # A shorter hit may be unusable for a group that accepts a longer one (a window's
            # blocks are just before its end), so all groups are queried again until they agree.
        num_blocks = self._longest_hit(request, num_blocks)
        parted = stored = num_blocks * self.block_size
        snapshot = None
        if self.states is not None:
            if not self.managers:
                parted = self.states.num_remembered(hashes[:num_blocks]) * self.block_size
            num_blocks, snapshot = self._last_snapshot(request, num_blocks)
        end, last_blocks = num_blocks * self.block_size, self._last_prompt_blocks(request)
        if last_blocks is not None and num_blocks == request.num_prompt_tokens // self.block_size:
            end = request.num_prompt_tokens
        num_tokens = min(end, max(0, request.num_tokens - 1))
        hit = KVCacheBlocks([], num_tokens, snapshot, parted, stored)
        for group_id, manager in enumerate(self.managers):
            first, known = manager.first_needed_block(num_tokens), self.pool.cached_blocks(group_id)
            blocks = [known[block_hash] for block_hash in hashes[first:num_blocks]]
            hit.blocks.append([self.pool.null_block] * first + blocks)
            if last_blocks is not None and num_tokens > num_blocks * self.block_size:
                hit.blocks[-1].append(last_blocks[group_id])
        return hit, num_tokens

    def _longest_hit(self, request: Request, num_blocks: int) -> int:
        """Return the number of blocks, at most `num_blocks`, that all groups can continue from."""
        hashes, agreed = request.block_hashes, False
        while num_blocks and not agreed:
            before = num_blocks
            for group_id, manager in enumerate(self.managers):
                known = self.pool.cached_blocks(group_id)
                num_blocks = manager.longest_hit(hashes[:num_blocks], request.num_tokens, known)
            agreed = num_blocks == before
        return num_blocks

    def _last_snapshot(self, request: Request, num_blocks: int) -> tuple[int, Snapshot | None]:
        """Return the most blocks, at most `num_blocks`, with a snapshot that ends them."""
        assert self.states is not None
        known, hashes = self.states.known, request.block_hashes
        while num_blocks:
            snapshot = known.get(hashes[num_blocks - 1])
            if snapshot is not None and self._longest_hit(request, num_blocks) == num_blocks:
                return num_blocks, snapshot
            num_blocks -= 1
        return 0, None

    def waits_for_leader(self, request: Request) -> bool:
        """Return True if a request that holds no blocks should wait for the next step.

        This is so while this step computes the end of its leader's prompt: in the next step the
        request can share all of the prompt except for the last token. In models with recurrent
        states it also waits for the parts before, since only the end may have a snapshot.
        """
        leader = request.leader
        if (
            leader is None
            or leader.request_id not in self._begun
            or leader.request_id not in self._requests
            or request.skip_reading_prefix_cache
        ):
            return False
        if self.states is not None:
            return self.states.enable_caching and len(request.block_hashes) > 0
        return (
            leader.num_computed_tokens >= request.num_prompt_tokens
            and request.num_prompt_tokens % self.block_size != 1  # else it can be shared at once
            and self._has_pages
        )

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        new_computed_blocks: KVCacheBlocks | None = None,
    ) -> list[list[int]] | None:
        """Allocate the slots of a request's next tokens.

        A request without blocks is only accepted if all its known tokens fit, not just this step's.
        Otherwise it would be preempted next.

        Args:
            request: computed up to `num_computed_tokens`.
            num_new_tokens: tokens to compute in this step, including drafts.
            new_computed_blocks: known prefix of a request without blocks, as just found; the
                request counts as computed up to its end.

        Returns:
            Ids of the blocks to append, one list for each group ([] without blocks). None, without
            any change, if too few blocks are free.
        """
        held, hit = self._requests.get(request.request_id), new_computed_blocks
        if held is None:
            assert hit is not None
            start = hit.num_tokens
        else:
            start = request.num_computed_tokens
        end = start + num_new_tokens
        if held is None or start < request.num_prompt_tokens:
            self._begun.add(request.request_id)
        # Drafts in flight may be wrong: this is the lowest possible position of the request.
        lowest = start - request.num_spec_in_flight
        if held is not None:
            if end <= held.num_slots and len(request.block_hashes) <= held.num_cached_blocks:
                return []  # the usual decode step
            counts = [manager.num_blocks(end) for manager in self.managers]
            if self._num_blocks_needed(held, lowest, counts) > self.pool.num_free_blocks:
                return None
        else:
            assert hit is not None
            held = self._reserve_hit(request, hit, start, end)
            if held is None:
                return None
        self._release_unneeded(held, lowest)
        if self.states is not None:
            self.states.advance(request, end, -(-end // self.block_size) * self.block_size)
        new_ids: list[list[int]] = []
        if end > held.num_slots:
            held.num_slots = -(-end // self.block_size) * self.block_size
            for manager, blocks in zip(self.managers, held.blocks, strict=True):
                new = self.pool.get_new_blocks(
                    manager.num_blocks(end) - len(blocks), request.request_id
                )
                blocks += new
                new_ids.append([block.block_id for block in new])
        self._cache_full_blocks(request, held, end)
        return new_ids

    @property
    def num_loads(self) -> int:
        """Number of requests with blocks being loaded."""
        return len(self._loads)

    def is_loading(self, request_id: str, block_hashes: Iterable[bytes]) -> bool:
        """Return True if any of the given blocks is being loaded for a request."""
        load = self._loads[request_id]
        if load.start < 0:
            return False
        hashes = {*load.request.block_hashes[load.start : load.end]}
        hashes.update(block_hash for _, _, block_hash in load.new)
        return any(wanted in hashes for wanted in block_hashes)

    def missing_rows(self, request: Request) -> list[bytes]:
        """Return the hashes of a request's blocks of cross attention that the cache lacks."""
        if self.cross is None:
            return []
        groups = [self.pool.cached_blocks(group_id) for group_id in self.cross.groups]
        hashes = row_hashes(request, self.block_size)
        return [h for h in hashes if any(h not in known for known in groups)]

    def start_load(
        self, request: Request, hit: KVCacheBlocks, num_tokens: int
    ) -> list[list[int]] | None:
        """Reserve the blocks that a KV connector fills, and the known ones before them.

        No request can find them before `finish_load`, which makes them a known prefix. Steps in
        flight may still write to the allocated blocks, so the load begins after these steps. The
        load includes all blocks of cross attention that the cache lacks.

        Args:
            request: request without blocks.
            hit: its known prefix: whole blocks.
            num_tokens: tokens after it: whole blocks.

        Returns:
            For each group the ids of the blocks up to the end, 0 for a block that is not loaded:
            it is not needed, or the cache has it. In models with recurrent states another list
            follows, with `id_of_state` at the end if a state is loaded; in encoder-decoders, the
            lists of cross attention. None, without any change, if there is not enough room for all
            of the request's tokens.
        """
        size = self.block_size
        hashes = [request.block_hashes] * len(self.managers)
        start, end = hit.num_tokens // size, (hit.num_tokens + num_tokens) // size
        position = min(end * size, request.num_tokens - 1)
        needed, kept, ids = 0, [], []
        for group_id, (blocks, manager) in enumerate(zip(hit.blocks, self.managers, strict=True)):
            first = max(start, manager.first_needed_block(position))
            known = self.pool.cached_blocks(group_id)
            found = [known.get(block_hash) for block_hash in request.block_hashes[first:end]]
            kept.append([*blocks, *(block for block in found if block is not None)])
            needed += manager.num_blocks_to_admit(end * size, request.num_tokens) - first
            needed += sum(block.ref_cnt == 0 for block in kept[-1])
            needed -= sum(block is not None for block in found)
            before = [block.block_id for block in blocks]
            before += [NULL_BLOCK_ID] * (first - len(before))
            ids.append(before)
        ends = [end] * len(self.managers)
        if self.cross is not None:
            needed += self.cross.num_needed(request)
            hashes += [row_hashes(request, size)] * len(self.cross.groups)
            for group_id in self.cross.groups:
                known = self.pool.cached_blocks(group_id)
                kept.append([known[h] for h in hashes[group_id] if h in known])
                ids.append([])
                ends.append(len(hashes[group_id]))
        if needed > self.pool.num_free_blocks:
            return None
        load = _LoadedBlocks(kept, [], request, start, end)
        if self.states is not None:
            ids.append([NULL_BLOCK_ID] * end)
            if request.block_hashes[end - 1] not in self.states.known:
                load.state = self.states.reserve()
                if load.state is None:
                    return None
                ids[-1][-1] = id_of_state(load.state)
        for blocks in kept:
            self.pool.touch(blocks)
        for group_id, before in enumerate(ids[: len(ends)]):
            known = self.pool.cached_blocks(group_id)
            for block_hash in hashes[group_id][len(before) : ends[group_id]]:
                if block_hash in known:
                    before.append(NULL_BLOCK_ID)
                    continue
                (block,) = self.pool.get_new_blocks(1, request.request_id)
                load.new.append((group_id, block, block_hash))
                before.append(block.block_id)
        self._loads[request.request_id] = load
        return ids

    def finish_load(self, request_id: str, invalid_block_ids: Container[int]) -> bool:
        """Make loaded blocks known, except for invalid ones; return True if all are valid.

        The blocks are then free: any request with the prefix may use them. A loaded state is a
        snapshot.
        """
        load = self._loads.pop(request_id)
        good = True
        for group_id, block, block_hash in load.new:
            if block.block_id in invalid_block_ids:
                good = False
            elif load.start >= 0 and block_hash not in self.pool.cached_blocks(group_id):
                self.pool.cache_full_blocks([block], [block_hash], 0, 1, group_id)
                self._note_loaded(load, group_id, block_hash)
        if load.state is not None:
            good &= self._finish_state(load, load.state, invalid_block_ids)
        for _, block, _ in reversed(load.new):
            self.pool.free_blocks([block])
        for blocks in load.hit:
            self.pool.free_blocks(reversed(blocks))
        return good

    def _finish_state(
        self, load: _LoadedBlocks, slot: int, invalid_block_ids: Container[int]
    ) -> bool:
        """Make a loaded state known; return True if it is valid."""
        assert self.states is not None
        good = id_of_state(slot) not in invalid_block_ids
        loaded, size = None, self.block_size
        if good and load.start >= 0:
            block_hash = load.request.block_hashes[load.end - 1]
            loaded = Snapshot(slot, block_hash, load.end * size, (load.end - load.start) * size)
        self.states.finish_load(slot, loaded)
        return good

    def has_block(self, group_id: int, block_hash: bytes) -> bool:
        """Return True if the cache has a block."""
        return block_hash in self.pool.cached_blocks(group_id)

    def has_state(self, block_hash: bytes) -> bool:
        """Return True if the cache has the recurrent state at the end of a block."""
        return self.states is not None and block_hash in self.states.known

    def _note_loaded(self, load: _LoadedBlocks, group_id: int, block_hash: bytes) -> None:
        events, size = self.pool.events, self.block_size
        if events is not None and events.group_id == group_id:
            request = load.request
            i = request.block_hashes.index(block_hash, load.start)
            parent = request.block_hashes[i - 1] if i else None
            tokens = list(request.all_token_ids[i * size : (i + 1) * size])
            events.note_stored(block_hash, parent, tokens)

    def free(self, request: Request) -> None:
        """Free all blocks of a request; its last ones are reused first."""
        held = self._requests.pop(request.request_id, None)
        if held is not None:
            for blocks in held.blocks:
                self.pool.free_blocks(reversed(blocks))
            if self.cross is not None:
                self.cross.end(request)
            if self.states is not None:
                self.states.free(request)
                if not self.managers:  # the first blocks are forgotten last, as in the pool
                    self.states.remember(reversed(request.block_hashes[: held.num_cached_blocks]))

    def forget_items(self, request: Request) -> None:
        """Forget what a request may have made known from its first item on: it may contain NaN.

        The blocks are found by their hashes: a request that was preempted, or has ended, does not
        have them any more, and a window releases them early.
        """
        begin = min(item.begin for item in request.mm_features) // self.block_size
        for group_id in range(len(self.managers)):
            known = self.pool.cached_blocks(group_id)
            for block_hash in request.block_hashes[begin:]:
                if block_hash in known:
                    self.pool.uncache(known[block_hash])
        if self.cross is not None:
            self.cross.forget(request)
        if self.states is not None:
            self.states.forget(request)

    def held_blocks(self) -> dict[str, list[int]]:
        """Return the ids of the blocks of each request, or of a load for it; 0: the null block."""
        held = {
            request_id: [*chain.from_iterable(self._block_ids(request_id))]
            for request_id in self._requests
        }
        for request_id, load in self._loads.items():
            held[request_id] = [block.block_id for blocks in load.hit for block in blocks]
            held[request_id] += [block.block_id for _, block, _ in load.new]
        return held

    def num_held_blocks(self) -> dict[str, int]:
        """Return the number of blocks of each request, or of a load for it. O(requests)."""
        found = {
            request_id: sum(map(len, self._block_ids(request_id))) - sum(held.num_released)
            for request_id, held in self._requests.items()
        }
        for request_id, load in self._loads.items():
            found[request_id] = sum(map(len, load.hit)) + len(load.new)
        return found

    def get_block_ids(self, request: Request) -> list[list[int]]:
        """Return all blocks of a request in order, one list for each group."""
        return self._block_ids(request.request_id)

    def _block_ids(self, request_id: str) -> list[list[int]]:
        held = self._requests[request_id]
        ids = [[block.block_id for block in blocks] for blocks in held.blocks]
        return ids if self.cross is None else ids + self.cross.block_ids(request_id)

    def take_blocks_to_copy(self) -> list[tuple[int, int]]:
        """End the scheduling of a step; return the block copies to make before it.

        The sources may be reused from now on: a new owner writes in a later step.
        """
        pairs = [(source.block_id, copy.block_id) for source, copy in self._copies]
        if pairs:
            self.pool.free_blocks([source for source, _ in self._copies])
            self._copies = []
        self._made_known.clear()
        self._begun.clear()
        if self.states is not None:
            self.states.end_step()
        return pairs

    def reset_prefix_cache(self) -> bool:
        """Forget all known prefixes; change nothing and return False while requests hold blocks.

        Blocks that are being loaded will not become known either.
        """
        if self._requests or self._copies:
            return False
        self.forget_prefixes()
        return True

    def forget_prefixes(self) -> None:
        """Forget all known prefixes; requests keep their blocks."""
        for load in self._loads.values():
            load.start = -1
        self.pool.forget_all()
        if self.states is not None:
            self.states.forget_all()

    def check_integrity(self, requests: Iterable[Request]) -> None:
        """Check the records against the requests that should hold blocks. O(blocks).

        Raises:
            AssertionError: the records are inconsistent; the message names the inconsistency.
        """
        live = {request.request_id: request for request in requests}
        if live.keys() != self._requests.keys():
            raise AssertionError(f"blocks are held by {set(self._requests) ^ set(live)} wrongly")
        ref_counts = [0] * self.config.num_blocks
        for source, _ in self._copies:
            ref_counts[source.block_id] += 1
        for load in self._loads.values():
            for block in [*chain.from_iterable(load.hit), *(block for _, block, _ in load.new)]:
                if block is not self.pool.null_block:
                    ref_counts[block.block_id] += 1
            for _, block, _ in load.new:
                if block.ref_cnt != 1 or block.block_hash is not None:
                    raise AssertionError(f"{block} is being loaded, and is also in use")
        for req_id, held in self._requests.items():
            self._check_request(live[req_id], held, ref_counts)
        if self.cross is not None:
            self.cross.check_integrity([*live.values()], ref_counts)
        self.pool.check_integrity(ref_counts)
        if self.states is not None:
            self.states.check_integrity(live)

    def _last_prompt_blocks(self, request: Request) -> list[KVCacheBlock] | None:
        """Return each group's copyable block of the leader's prompt's end (rule 6), or None."""
        leader, index = request.leader, request.num_prompt_tokens // self.block_size
        held = None if leader is None else self._requests.get(leader.request_id)
        if leader is None or held is None or leader.request_id in self._begun:
            return None
        partial = request.num_prompt_tokens % self.block_size > 0
        if leader.num_computed_tokens < request.num_prompt_tokens or not (
            partial and self._has_pages
        ):
            return None
        blocks = [blocks[index] for blocks in held.blocks]
        return None if self.pool.null_block in blocks else blocks

    def _ends_in_block_without_content(self, request: Request, num_blocks: int) -> bool:
        """Return True if a full hit would copy from a block that this step has yet to fill."""
        if not self._made_known or num_blocks * self.block_size < request.num_tokens:
            return False
        last = request.block_hashes[num_blocks - 1]
        for group_id in range(len(self.managers)):
            block = self.pool.cached_blocks(group_id).get(last)
            if block is not None and block.block_id in self._made_known:
                return True
        return False

    def _num_blocks_needed(
        self, held: _RequestBlocks, start: int, num_blocks: Sequence[int]
    ) -> int:
        """Return the number of free blocks needed, minus those that are released.

        Args:
            held: the request's blocks.
            start: first position to compute.
            num_blocks: required table length of each group.
        """
        needed = 0
        for group_id, manager in enumerate(self.managers):
            blocks, released = held.blocks[group_id], held.num_released[group_id]
            unneeded = blocks[released : manager.first_needed_block(start)]
            needed += max(0, num_blocks[group_id] - len(blocks))
            needed -= sum(block.ref_cnt == 1 for block in unneeded)
        return needed

    def _reserve_hit(
        self, request: Request, hit: KVCacheBlocks, start: int, end: int
    ) -> _RequestBlocks | None:
        """Reserve a request's known prefix if the rest of its tokens also fits."""
        held = _RequestBlocks(
            blocks=[list(blocks) for blocks in hit.blocks],
            num_released=[manager.first_needed_block(start) for manager in self.managers],
            num_cached_blocks=start // self.block_size,
        )
        ends_inside = start % self.block_size > 0  # rule 5 of the module's docstring
        counts = [m.num_blocks_to_admit(end, request.num_tokens) for m in self.managers]
        needed = self._num_blocks_needed(held, start, counts)
        for blocks in held.blocks:
            needed += sum(block.ref_cnt == 0 for block in blocks)  # free, but not for new ones
            needed += ends_inside and blocks[-1].ref_cnt > 0
        if self.cross is not None:
            needed += self.cross.num_needed(request)
        if needed > self.pool.num_free_blocks:
            return None
        if self.states is not None:
            if not self.states.has_room(hit.snapshot):
                return None
            self.states.begin(request, hit.snapshot, hit.num_parted)
        for blocks in held.blocks:
            self.pool.touch(blocks)
        if self.cross is not None:
            self.cross.begin(request)
        for blocks in held.blocks if ends_inside else []:
            last = blocks[-1]
            if last.ref_cnt == 1:
                self.pool.uncache(last)
            else:
                # The reference just added keeps the source until the step is scheduled.
                (blocks[-1],) = self.pool.get_new_blocks(1, request.request_id)
                self._copies.append((last, blocks[-1]))
        self._requests[request.request_id] = held
        looked_up = request.block_hashes and not request.skip_reading_prefix_cache
        if looked_up and not request.num_preemptions:
            self.num_queries += request.num_tokens
            # Tokens that a connector has loaded for it are counted separately.
            self.num_hits += max(0, start - (request.num_external_tokens or 0))
        return held

    def _release_unneeded(self, held: _RequestBlocks, start: int) -> None:
        """Release the blocks that are invisible to all positions from `start` on."""
        for group_id, manager in enumerate(self.managers):
            first = manager.first_needed_block(start)
            released = held.num_released[group_id]
            if first > released:
                blocks = held.blocks[group_id]
                self.pool.free_blocks(blocks[released:first])
                blocks[released:first] = [self.pool.null_block] * (first - released)
                held.num_released[group_id] = first

    def _cache_full_blocks(self, request: Request, held: _RequestBlocks, computed: int) -> None:
        """Make known the blocks that this step fills (rule 2 of the module's docstring)."""
        hashes, done = request.block_hashes, held.num_cached_blocks
        known = min(len(hashes), computed // self.block_size)
        if self.states is not None and not self.managers:
            self.states.remember(hashes[done:known])
        for group_id, manager in enumerate(self.managers):
            end = min(known, manager.num_full_blocks(computed))
            new = self.pool.cache_full_blocks(held.blocks[group_id], hashes, done, end, group_id)
            self._made_known.update(block.block_id for block in new)
            events = self.pool.events
            if events is not None and events.group_id == group_id and new:
                self._note_stored(events, request, done, end, new)
        held.num_cached_blocks = known

    def _note_stored(
        self, events: KVEventLog, request: Request, start: int, end: int, new: list[KVCacheBlock]
    ) -> None:
        """Log events for a request's newly known blocks from `start` up to `end`."""
        hashes, size, tokens = request.block_hashes, self.block_size, request.all_token_ids
        made = {block.block_hash for block in new}
        for i in range(start, end):
            if hashes[i] in made:
                parent = hashes[i - 1] if i else None
                events.note_stored(hashes[i], parent, list(tokens[i * size : (i + 1) * size]))

    def _check_request(self, request: Request, held: _RequestBlocks, ref_counts: list[int]) -> None:
        """Check one request's blocks and add its references to `ref_counts`."""
        req_id, computed = request.request_id, request.num_computed_tokens
        if held.num_slots < computed:
            raise AssertionError(f"{req_id}: {computed} tokens in {held.num_slots} slots")
        for group_id, manager in enumerate(self.managers):
            blocks = held.blocks[group_id]
            if len(blocks) != manager.num_blocks(held.num_slots):
                raise AssertionError(f"{req_id}: group {group_id} has {len(blocks)} blocks")
            first = manager.first_needed_block(computed)
            full = manager.num_full_blocks(computed)
            for i, block in enumerate(blocks):
                is_null = block is self.pool.null_block
                if is_null != (i < held.num_released[group_id]) or (is_null and i >= first):
                    raise AssertionError(f"{req_id}: block {i} of group {group_id} is {block}")
                if is_null:
                    continue
                ref_counts[block.block_id] += 1
                if i >= full and block.ref_cnt != 1:
                    raise AssertionError(f"{req_id}: block {i}, yet to be written, is {block}")
                if block.block_hash is None:
                    continue
                if i >= full:
                    raise AssertionError(f"{req_id}: block {i} is known but not full")
                if block.group_id != group_id or block.block_hash != request.block_hashes[i]:
                    raise AssertionError(f"{req_id}: block {i} is known as something else")
