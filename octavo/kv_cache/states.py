"""Slots of recurrent states: those of live requests, and snapshots for the prefix cache.

A layer without attention keeps a state, which every token changes, so the state at a shorter prefix
is lost unless it was copied. A snapshot is such a copy. It is known by the hash of the block of
tokens that ends there, as blocks are. A request starts from the longest prefix with a snapshot and,
in models with attention, with known blocks.

A snapshot is taken where later prompts are likely to part from this one:

- at the ends of the first message and of the last ones. A message ends with a token that ends
  answers, or with the prompt;
- where a prompt begins to differ from earlier ones: blocks are known up to this place, but it has
  no snapshot. A model without attention has no blocks, so the manager remembers the hashes of
  recent ones;
- at distances from the end that double, in long prompts;
- in the answer, at each multiple of `ANSWER_SPACING`; the next one replaces it.

The least valuable snapshots make room for new states, by GreedyDual (Young, "On-Line File Caching",
1998): a snapshot's value is the number of tokens that must be computed again without it, plus the
value of the last snapshot that was given up.

Steps run in order, so a slot may have a new owner in the next step. Within a step, the slots that a
request reads, or receives a snapshot in, are pinned: no other request gets them. So no slot is
written too early. A snapshot is known from the next step on.
"""

from __future__ import annotations

import enum
import heapq
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from weakref import WeakKeyDictionary

from octavo.kv_cache.given_up import GivenUpLog
from octavo.request import Request

ANSWER_SPACING = 64
"""Distance of the snapshots in an answer, in tokens."""
_FIRST_DISTANCE = 1024  # from a long prompt's end, in tokens
_LAST_MESSAGES = 3
_MOST_REMEMBERED = 2**15
"""Number of remembered blocks: 2^19 tokens, 5 MB of hashes."""


@dataclass(eq=False, slots=True)
class Snapshot:
    """Copy of a state that the prefix cache knows."""

    slot: int
    block_hash: bytes
    num_tokens: int
    """Number of tokens in the state."""
    cost: int
    """Number of these tokens that would have to be computed again without the snapshot."""
    in_prompt: bool = True
    """False if its tokens end in an answer."""
    rank: tuple[int, int] = (0, 0)
    """Value, and number of the last use: the lowest one is given up first."""


@dataclass(slots=True)
class SnapshotLog:
    """Changes of the snapshots that requests have taken."""

    new: list[Snapshot] = field(default_factory=list)
    """Snapshots that became known."""
    dropped: list[bytes] = field(default_factory=list)
    """Hashes of snapshots that are not wanted any more, without those given up for others."""


@dataclass(slots=True)
class _RequestStates:
    """States of one request."""

    slots: list[int]
    """Slots of the live state, in rotation; see `NewRequestData.state_slots`."""
    source: Snapshot | None
    points: list[int]
    """Numbers of prompt tokens for which snapshots are still to be taken, in descending order."""
    pending: list[tuple[int, int]] = field(default_factory=list)
    """Pairs (number of tokens, slot) of the snapshots that steps write, in order; not known yet."""
    scheduled: list[tuple[int, int]] = field(default_factory=list)
    """Pairs (number of tokens, slot) of the snapshots that the step being scheduled takes."""
    last: int = 0
    """Number of tokens of the request's last known snapshot."""


class SlotKind(enum.IntEnum):
    """Content of a slot."""

    FREE = 0
    LIVE = 1
    """State of a running request."""
    PENDING = 2
    """Snapshot that a step writes."""
    SNAPSHOT = 3
    """Snapshot that the prefix cache knows."""
    LOADING = 4
    """Snapshot that a KV connector loads."""


def id_of_state(slot: int) -> int:
    """Return the id of the state in a slot: negative, so that it is not the id of a block."""
    return -1 - slot


def slot_of_state(state_id: int) -> int:
    """Return the slot of a state; see `id_of_state`."""
    return -1 - state_id


class StateManager:
    """Allocator of the slots of recurrent states.

    Args:
        num_slots: number of slots.
        slots_per_request: number of slots of a live state: 1, and one for each draft.
        block_size: tokens in a block.
        enable_caching: False to take no snapshots.
        message_ends: ids of the tokens that end messages.
    """

    def __init__(
        self,
        num_slots: int,
        slots_per_request: int,
        block_size: int,
        enable_caching: bool,
        message_ends: Iterable[int] = (),
    ) -> None:
        self.num_slots, self.slots_per_request = num_slots, slots_per_request
        self.block_size, self.enable_caching = block_size, enable_caching
        self.num_evictions = 0
        """Number of snapshots given up for other states."""
        self._message_ends = frozenset(message_ends)
        self._free = list(range(num_slots - 1, -1, -1))
        self._requests: dict[str, _RequestStates] = {}
        self._taken: WeakKeyDictionary[Request, list[Snapshot]] = WeakKeyDictionary()
        """Snapshots of each request, also from before a preemption; one of its answer at most."""
        self._known: dict[bytes, Snapshot] = {}
        self._heap: list[tuple[tuple[int, int], Snapshot]] = []
        """Snapshots by rank; entries of forgotten ones, and of earlier uses, are ignored."""
        self._order = count()
        self._last_value = 0
        self._remembered: OrderedDict[bytes, None] = OrderedDict()
        """Hashes of blocks of tokens, the least recently used first."""
        self._loading: set[int] = set()
        """Slots that a KV connector fills."""
        self.given_up: GivenUpLog | None = None
        """Log of the snapshots given up; None if no reader needs it."""
        self.log: SnapshotLog | None = None
        """Log for a KV connector."""
        # Of the step being scheduled:
        self._pinned: set[int] = set()
        self._freed: list[int] = []
        self._becoming: list[Snapshot] = []

    @property
    def known(self) -> Mapping[bytes, Snapshot]:
        """Snapshots by the hash of the last block of their tokens."""
        return self._known

    @property
    def num_pinned(self) -> int:
        """Number of slots that the step being scheduled keeps from other requests."""
        return len(self._pinned)

    def has_room(self, source: Snapshot | None) -> bool:
        """Return True if a request can begin, from the snapshot `source` if there is one."""
        least = len(self._free) + len(self._known) - len(self._pinned) - 1
        if least >= self.slots_per_request:  # without a look at all of them
            return True
        usable = sum(snapshot.slot not in self._pinned for snapshot in self._known.values())
        if source is not None and source.slot not in self._pinned:
            usable -= 1
        return len(self._free) + usable >= self.slots_per_request

    def reserve(self) -> int | None:
        """Return a slot for a state that a KV connector loads; None if requests need all slots.

        Steps in flight may still write to the slot, so the load begins after these steps.
        """
        slot = self._allocate() if self.num_slots > self.slots_per_request else None
        if slot is not None:
            self._loading.add(slot)
        return slot

    def finish_load(self, slot: int, loaded: Snapshot | None) -> None:
        """End the load of a state: it is a snapshot from now on, or None if the load failed."""
        self._loading.remove(slot)
        if loaded is None or loaded.block_hash in self._known:
            self._free.append(slot)
        else:
            self._known[loaded.block_hash] = loaded
            self._touch(loaded)

    def take_changes(self) -> SnapshotLog:
        """Return the log's entries since the last call that still apply. Call it after `end_step`.

        The slots of the new snapshots have their contents once the step has run.
        """
        assert self.log is not None
        new = [s for s in self.log.new if self._known.get(s.block_hash) is s]
        dropped = [h for h in self.log.dropped if h not in self._known]
        self.log = SnapshotLog()
        return SnapshotLog(new, dropped)

    def remember(self, block_hashes: Iterable[bytes]) -> None:
        """Remember blocks of tokens that were computed, in a model without attention."""
        if not self.enable_caching:
            return
        for block_hash in block_hashes:
            self._remembered[block_hash] = None
            self._remembered.move_to_end(block_hash)
        while len(self._remembered) > _MOST_REMEMBERED:
            self._remembered.popitem(last=False)

    def num_remembered(self, block_hashes: Sequence[bytes]) -> int:
        """Return the number of blocks at the beginning that were computed recently."""
        for i, block_hash in enumerate(block_hashes):
            if block_hash not in self._remembered:
                return i
        return len(block_hashes)

    def begin(self, request: Request, source: Snapshot | None, parted: int) -> None:
        """Allocate a request's live state; there must be room.

        Args:
            request: request without a state.
            source: the snapshot that it starts from.
            parted: number of the request's first tokens that an earlier prompt has, too.
        """
        if source is not None:
            self._pinned.add(source.slot)
            self._touch(source)
        slots = [self._allocate() for _ in range(self.slots_per_request)]
        assert None not in slots, "no free slot for a state"
        first = 0 if source is None else source.num_tokens
        points = self._find_points(request, first, parted) if self.enable_caching else []
        states = _RequestStates([s for s in slots if s is not None], source, points[::-1])
        states.last = first
        self._requests[request.request_id] = states

    def live_slots(self, request: Request) -> tuple[list[int], int]:
        """Return the slots of a request's state, and the slot of its source; -1 for none."""
        states = self._requests[request.request_id]
        return states.slots, -1 if states.source is None else states.source.slot

    def advance(self, request: Request, end: int, num_slots: int) -> None:
        """Note that a step computes a request's tokens up to `end`.

        Args:
            request: request with a state.
            end: end of the step's tokens, drafts included.
            num_slots: number of tokens that the request's blocks can hold. Later steps within these
                blocks are not noted.
        """
        states = self._requests[request.request_id]
        self._publish(request, states)
        self._pinned.update(slot for _, slot in states.pending)
        wanted = []
        while states.points and states.points[-1] <= num_slots:
            wanted.append(states.points.pop())
        in_answer = num_slots > request.num_prompt_tokens and num_slots % ANSWER_SPACING == 0
        last = states.pending[-1][0] if states.pending else states.last
        if self.enable_caching and in_answer and num_slots > max([last, *wanted]):
            wanted.append(num_slots)
        for num_tokens in wanted:
            slot = self._allocate()
            if slot is not None:
                self._pinned.add(slot)
                states.pending.append((num_tokens, slot))
                states.scheduled.append((num_tokens, slot))
        # The tokens of a prompt are known, so its snapshots are as good as written.
        self._publish(request, states, min(end, request.num_prompt_tokens))

    def take_scheduled(self, request: Request) -> list[tuple[int, int]]:
        """Return the snapshots that a step must take of a request, as in `ScheduledRequest`."""
        states = self._requests[request.request_id]
        scheduled, states.scheduled = states.scheduled, []
        return scheduled

    def free(self, request: Request) -> None:
        """Free a request's live state; keep its snapshots, unless it has failed."""
        states = self._requests.pop(request.request_id, None)
        if states is None:
            return
        self._publish(request, states)
        if request.error is not None:  # its state may contain NaN
            self.forget(request)
        for slot in [*states.slots, *(slot for _, slot in states.pending)]:
            self._release(slot)

    def forget(self, request: Request) -> None:
        """Forget the snapshots that a request has taken."""
        for snapshot in self._taken.pop(request, ()):
            self._drop_for_good(snapshot)

    def forget_all(self) -> None:
        """Forget all snapshots."""
        for snapshot in [*self._known.values(), *self._becoming]:
            self._drop(snapshot)
        self._remembered.clear()

    def end_step(self) -> None:
        """End the scheduling of a step: requests of the next one may use its snapshots."""
        self._pinned.clear()
        self._free += self._freed
        self._freed = []
        for snapshot in self._becoming:
            if snapshot.block_hash in self._known:  # another request was first
                self._free.append(snapshot.slot)
            else:
                self._known[snapshot.block_hash] = snapshot
                self._touch(snapshot)
                if self.log is not None:
                    self.log.new.append(snapshot)
        self._becoming = []

    def slots(self) -> dict[int, tuple[SlotKind, str | None]]:
        """Return the content of the used slots, and the request that owns it."""
        found: dict[int, tuple[SlotKind, str | None]] = {}
        for slot in self._loading:
            found[slot] = SlotKind.LOADING, None
        for snapshot in [*self._known.values(), *self._becoming]:
            found[snapshot.slot] = SlotKind.SNAPSHOT, None
        for request_id, states in self._requests.items():
            found.update((slot, (SlotKind.LIVE, request_id)) for slot in states.slots)
            found.update((slot, (SlotKind.PENDING, request_id)) for _, slot in states.pending)
        return found

    def ranked_slots(self) -> list[int]:
        """Return the slots of the known snapshots; the one that is given up last is first."""
        known = sorted(self._known.values(), key=lambda snapshot: snapshot.rank, reverse=True)
        return [snapshot.slot for snapshot in known]

    def check_integrity(self, live: Iterable[str]) -> None:
        """Check that each slot has one owner.

        Args:
            live: ids of the requests that should have states.

        Raises:
            AssertionError: the records are inconsistent.
        """
        if set(live) != self._requests.keys():
            raise AssertionError(f"states are held wrongly: {set(live) ^ self._requests.keys()}")
        used = [*self._free, *self._freed, *self._loading]
        used += [snapshot.slot for snapshot in [*self._known.values(), *self._becoming]]
        for states in self._requests.values():
            used += [*states.slots, *(slot for _, slot in states.pending)]
        if sorted(used) != list(range(self.num_slots)):
            raise AssertionError(f"slots of states are lost or used twice: {sorted(used)}")

    def _find_points(self, request: Request, first: int, parted: int) -> list[int]:
        """Return the numbers of prompt tokens at which to take snapshots, ascending."""
        size, total = self.block_size, request.num_tokens
        ends = [
            (i + 1) // size * size
            for i, token in enumerate(request.all_token_ids[:total])
            if token in self._message_ends
        ]
        last = (total - 1) // size * size  # a hit must leave at least one token to compute
        if not ends or last - ends[-1] >= ANSWER_SPACING:
            ends.append(last)
        points = {parted, ends[0], *ends[-_LAST_MESSAGES:]}
        distance = _FIRST_DISTANCE
        while distance < total - first:
            points.add((total - distance) // size * size)
            distance *= 2
        return sorted(point for point in points if first < point <= last)

    def _publish(self, request: Request, states: _RequestStates, computed: int = 0) -> None:
        """Make the snapshots known that are certain to hold the states of known tokens."""
        computed = max(computed, request.num_computed_tokens - request.num_spec_in_flight)
        certain = min(computed, len(request.block_hashes) * self.block_size)
        while states.pending and states.pending[0][0] <= certain:
            num_tokens, slot = states.pending.pop(0)
            block_hash = request.block_hashes[num_tokens // self.block_size - 1]
            if block_hash in self._known:
                self._touch(self._known[block_hash])
                self._release(slot)
            else:
                in_prompt = num_tokens <= request.num_prompt_tokens
                cost, taken = num_tokens - states.last, self._taken.setdefault(request, [])
                snapshot = Snapshot(slot, block_hash, num_tokens, cost, in_prompt)
                self._becoming.append(snapshot)
                if taken and not (in_prompt or taken[-1].in_prompt):
                    self._drop_for_good(taken.pop())  # the one of the answer before
                taken.append(snapshot)
            states.last = num_tokens

    def _touch(self, snapshot: Snapshot) -> None:
        """Set a snapshot's rank as if it were new."""
        snapshot.rank = self._last_value + snapshot.cost, next(self._order)
        heapq.heappush(self._heap, (snapshot.rank, snapshot))
        if len(self._heap) > 2 * self.num_slots:  # ignored entries would fill the memory
            self._heap = [(known.rank, known) for known in self._known.values()]
            heapq.heapify(self._heap)

    def _allocate(self) -> int | None:
        """Return a free slot; give up the least valuable snapshot if there is none."""
        if self._free:
            return self._free.pop()
        kept, slot = [], None
        while self._heap and slot is None:
            entry = heapq.heappop(self._heap)
            rank, snapshot = entry
            if self._known.get(snapshot.block_hash) is not snapshot or rank != snapshot.rank:
                continue  # the snapshot was forgotten, or used since then
            if snapshot.slot in self._pinned:
                kept.append(entry)
                continue
            del self._known[snapshot.block_hash]
            self._last_value = rank[0]
            self.num_evictions += 1
            if self.given_up is not None:
                self.given_up.note(snapshot.block_hash, None)
            slot = snapshot.slot
        for entry in kept:
            heapq.heappush(self._heap, entry)
        return slot

    def _drop_for_good(self, snapshot: Snapshot) -> None:
        """Forget a snapshot that is not wanted any more, wherever it is."""
        if self.log is not None:
            self.log.dropped.append(snapshot.block_hash)
        self._drop(snapshot)

    def _drop(self, snapshot: Snapshot) -> None:
        """Forget a snapshot, unless it was given up before."""
        if snapshot in self._becoming:
            self._becoming.remove(snapshot)
        elif self._known.get(snapshot.block_hash) is snapshot:
            del self._known[snapshot.block_hash]
        else:
            return
        self._release(snapshot.slot)

    def _release(self, slot: int) -> None:
        """Free a slot, from the next step on if this one uses it."""
        (self._freed if slot in self._pinned else self._free).append(slot)
