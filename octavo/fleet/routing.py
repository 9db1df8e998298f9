"""Which of several engines gets a request: the one with the least to do, or that has its prefix.

What is known of the engines is what one front end sees: what it gave them, and what came back.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from octavo.kv_cache.hashing import hash_block, root_hash
from octavo.messages import EngineCoreRequest

# Blocks of a prompt that are looked at, since hashing holds the event loop: 15 ms for so many.
_MOST_HASHED = 1024
# Blocks that are remembered of all engines together: some 25 MB.
_MOST_REMEMBERED = 2**17
# By how much an engine may be busier than the least busy one, in requests that run and as a share
# of what that one has to do, and still get a request whose whole prompt it has.
_ALLOWANCE = 16.0
_ALLOWED_SHARE = 0.5


def load_of(num_waiting: int, num_running: int) -> int:
    """What an engine has to do: a request without a token yet is worth four that have one."""
    return 4 * num_waiting + num_running


def score(load: int, least_load: int, num_cached: int, num_blocks: int) -> float:
    """How much speaks against an engine for a request: the least score wins.

    It is the engine's load, less what its cache is worth: of a request whose whole prompt is cached
    16, or half of what the least busy engine has to do if that is more; of one that has a part of
    it so much less. So an engine is passed over for one that has the prefix only while their loads
    are not that far apart, and where nothing is cached the load alone decides.

    Args:
        load: the engine's, see `load_of`.
        least_load: that of the least busy one.
        num_cached: blocks of the prompt that the engine likely has.
        num_blocks: full blocks of the prompt.
    """
    if not num_blocks:
        return load
    return load - num_cached / num_blocks * max(_ALLOWANCE, _ALLOWED_SHARE * least_load)


class PrefixMap:
    """What engines likely have in their prefix caches: the blocks used last, as their pools do.

    Args:
        capacity: blocks that are remembered of an engine.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._blocks: dict[int, OrderedDict[bytes, None]] = {}

    def add(self, engine: int, hashes: Sequence[bytes]) -> None:
        """An engine computes a prompt.

        Args:
            engine: its number.
            hashes: chained hashes of the prompt's full blocks.
        """
        blocks = self._blocks.setdefault(engine, OrderedDict())
        for block in reversed(hashes):  # the end of a prompt is forgotten first
            blocks[block] = None
            blocks.move_to_end(block)
        while len(blocks) > self.capacity:
            blocks.popitem(last=False)

    def num_cached(self, engine: int, hashes: Sequence[bytes]) -> int:
        """How many of a prompt's first blocks the engine likely has."""
        blocks = self._blocks.get(engine, OrderedDict[bytes, None]())
        for index, block in enumerate(hashes):
            if block not in blocks:
                return index
        return len(hashes)

    def forget(self, engine: int) -> None:
        """The engine's cache is empty."""
        self._blocks.pop(engine, None)


@dataclass(slots=True)
class _Placed:
    """Where a live request is."""

    engine: int
    running: bool = False
    """Whether it has a token."""


class Router:
    """Places requests, and knows where each live one is.

    Args:
        block_size: tokens of a KV-cache block.
        num_engines: how many engines there are.
        enable_prefix_caching: whether they look for prefixes.
    """

    def __init__(self, block_size: int, num_engines: int, *, enable_prefix_caching: bool) -> None:
        self._block_size = block_size
        self._caching = enable_prefix_caching
        self._prefixes = PrefixMap(_MOST_REMEMBERED // num_engines)
        self._placed: dict[str, _Placed] = {}
        self._waiting: Counter[int] = Counter()
        self._running: Counter[int] = Counter()
        self._last = -1

    def place(self, request: EngineCoreRequest, engines: Collection[int]) -> int:
        """Chooses one of `engines` for a request, which has a place afterwards.

        Of equals the one that comes after the last one chosen; the n answers of a request stay
        together, since they share its prompt.
        """
        hashes = self._hash(request)
        least = min(map(self.load, engines))

        def key(engine: int) -> tuple[float, bool, int]:
            cached = self._prefixes.num_cached(engine, hashes) if hashes else 0
            against = score(self.load(engine), least, cached, len(hashes))
            return against, engine <= self._last, engine

        chosen = self._last = min(engines, key=key)
        self._prefixes.add(chosen, hashes)
        for child_id in request.child_ids:
            self.remove([child_id])
            self._placed[child_id] = _Placed(chosen)
            self._waiting[chosen] += 1
        return chosen

    def load(self, engine: int) -> int:
        """What an engine has to do, see `load_of`."""
        return load_of(self._waiting[engine], self._running[engine])

    def engine_of(self, request_id: str) -> int | None:
        """Where a core request is; None if it has no place."""
        placed = self._placed.get(request_id)
        return None if placed is None else placed.engine

    def note_token(self, request_id: str) -> None:
        """A core request has a token; one without a place is skipped."""
        placed = self._placed.get(request_id)
        if placed is not None and not placed.running:
            placed.running = True
            self._waiting[placed.engine] -= 1
            self._running[placed.engine] += 1

    def remove(self, request_ids: Iterable[str]) -> None:
        """Core requests have ended; those without a place are skipped."""
        for request_id in request_ids:
            placed = self._placed.pop(request_id, None)
            if placed is not None:
                counter = self._running if placed.running else self._waiting
                counter[placed.engine] -= 1

    def forget_prefixes(self, engine: int) -> None:
        """An engine's prefix cache is empty."""
        self._prefixes.forget(engine)

    def _hash(self, request: EngineCoreRequest) -> list[bytes]:
        """Chained hashes of the prompt's first full blocks, where it may be found again by them."""
        if not self._caching or request.prompt_embeds is not None:
            return []
        parent, hashes, size = root_hash(request.cache_salt), [], self._block_size
        tokens = request.prompt_token_ids
        for index in range(min(len(tokens) // size, _MOST_HASHED)):
            parent = hash_block(parent, tokens[index * size : (index + 1) * size])
            hashes.append(parent)
        return hashes
