"""Choice of the engine for a request: the least loaded one, or one with its prefix or its adapter.

It uses the knowledge of one front end: the requests that it sent, and their outputs.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from octavo.kv_cache.hashing import MediaKeys, adapter_keys, hash_block, root_hash
from octavo.messages import EngineCoreRequest

# Maximum number of hashed blocks of a prompt, since hashing blocks the event loop: 15 ms for these.
_MOST_HASHED = 1024
# Maximum number of remembered blocks of all engines together: some 25 MB.
_MOST_REMEMBERED = 2**17
# Maximum excess load, in running requests and as a share of the least load, of an engine that still
# receives a request with its whole prompt in the cache.
_ALLOWANCE = 16.0
_ALLOWED_SHARE = 0.5
ADAPTER_ALLOWANCE = 8.0
"""Maximum excess load of an engine that still receives a request whose adapter it has in memory:
two waiting requests. Elsewhere the adapter must be read, and takes turns with others."""


def load_of(num_waiting: int, num_running: int) -> int:
    """Return an engine's load: a request without a token yet counts as four running ones."""
    return 4 * num_waiting + num_running


def score(load: int, least_load: int, num_cached: int, num_blocks: int) -> float:
    """Return an engine's score for a request: the lowest score wins.

    The score is the engine's load, minus the value of its cache. For a request with the whole
    prompt cached the value is 16, or half of the least load if that is more; for a part of the
    prompt, it is proportional. So the prefix outweighs a limited difference in load, and without
    cached blocks the load alone decides.

    Args:
        load: the engine's load, see `load_of`.
        least_load: load of the least busy engine.
        num_cached: blocks of the prompt that the engine likely has.
        num_blocks: full blocks of the prompt.
    """
    if not num_blocks:
        return load
    return load - num_cached / num_blocks * max(_ALLOWANCE, _ALLOWED_SHARE * least_load)


class PrefixMap:
    """Likely contents of the engines' prefix caches: the blocks used last, as in their pools.

    Args:
        capacity: maximum number of remembered blocks of an engine.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._blocks: dict[int, OrderedDict[bytes, None]] = {}

    def add(self, engine: int, hashes: Sequence[bytes]) -> None:
        """Record that an engine computes a prompt.

        Args:
            engine: index of the engine.
            hashes: chained hashes of the prompt's full blocks.
        """
        blocks = self._blocks.setdefault(engine, OrderedDict())
        for block in reversed(hashes):  # the end of a prompt is forgotten first
            blocks[block] = None
            blocks.move_to_end(block)
        while len(blocks) > self.capacity:
            blocks.popitem(last=False)

    def num_cached(self, engine: int, hashes: Sequence[bytes]) -> int:
        """Return the number of a prompt's first blocks that the engine likely has."""
        blocks = self._blocks.get(engine, OrderedDict[bytes, None]())
        for index, block in enumerate(hashes):
            if block not in blocks:
                return index
        return len(hashes)

    def forget(self, engine: int) -> None:
        """Record that the engine's cache is empty."""
        self._blocks.pop(engine, None)


@dataclass(slots=True)
class _Placed:
    """Place of a live request."""

    engine: int
    holder: tuple[int, int] | None
    """See `Router.holder_of`."""
    running: bool = False
    """True if it has a token."""


class Router:
    """Router that places requests, and knows the engine of each live one.

    Args:
        block_size: tokens of a KV-cache block.
        num_engines: number of engines.
        enable_prefix_caching: True if the engines cache prefixes.
        num_adapters: number of adapters that an engine has in memory.
    """

    def __init__(
        self,
        block_size: int,
        num_engines: int,
        *,
        enable_prefix_caching: bool,
        num_adapters: int = 0,
    ) -> None:
        self._block_size = block_size
        self._caching = enable_prefix_caching
        self._prefixes = PrefixMap(_MOST_REMEMBERED // num_engines)
        self._adapters = PrefixMap(num_adapters)
        """Adapters that are likely in memory, each as a chain of one block."""
        self._placed: dict[str, _Placed] = {}
        self._waiting: Counter[int] = Counter()
        self._running: Counter[int] = Counter()
        self._last = -1

    def place(self, request: EngineCoreRequest, engines: Collection[int]) -> int:
        """Choose one of `engines` for a request, and record the choice.

        Equal engines take turns. The n answers of a request stay together, since they share its
        prompt.
        """
        hashes, adapter = self._hash(request), request.options.adapter
        own = [] if adapter is None else [adapter.key.encode()]
        least = min(map(self.load, engines))
        cached = {i: self._prefixes.num_cached(i, hashes) if hashes else 0 for i in engines}

        def key(engine: int) -> tuple[float, bool, int]:
            against = score(self.load(engine), least, cached[engine], len(hashes))
            against -= ADAPTER_ALLOWANCE * self._adapters.num_cached(engine, own)
            return against, engine <= self._last, engine

        chosen = self._last = min(engines, key=key)
        most = max(engines, key=cached.__getitem__)
        holder = None
        if cached[most] > cached[chosen]:
            holder = most, cached[most] * self._block_size
        self._prefixes.add(chosen, hashes)
        self._adapters.add(chosen, own)
        for child_id in request.child_ids:
            self.remove([child_id])
            self._placed[child_id] = _Placed(chosen, holder)
            self._waiting[chosen] += 1
        return chosen

    def load(self, engine: int) -> int:
        """Return an engine's load, see `load_of`."""
        return load_of(self._waiting[engine], self._running[engine])

    def engine_of(self, request_id: str) -> int | None:
        """Return the engine of a core request; None if it has no place."""
        placed = self._placed.get(request_id)
        return None if placed is None else placed.engine

    def holder_of(self, request_id: str) -> tuple[int, int] | None:
        """Return the engine that likely had most of a core request's prompt in its cache, and the
        number of tokens; None if the request is there, or has no place."""
        placed = self._placed.get(request_id)
        return None if placed is None else placed.holder

    def note_token(self, request_id: str) -> None:
        """Record that a core request has a token; ignore one without a place."""
        placed = self._placed.get(request_id)
        if placed is not None and not placed.running:
            placed.running = True
            self._waiting[placed.engine] -= 1
            self._running[placed.engine] += 1

    def remove(self, request_ids: Iterable[str]) -> None:
        """Remove ended core requests; ignore those without a place."""
        for request_id in request_ids:
            placed = self._placed.pop(request_id, None)
            if placed is not None:
                counter = self._running if placed.running else self._waiting
                counter[placed.engine] -= 1

    def forget_prefixes(self, engine: int) -> None:
        """Record that an engine's prefix cache is empty, and perhaps its memory of adapters."""
        self._prefixes.forget(engine)
        self._adapters.forget(engine)

    def _hash(self, request: EngineCoreRequest) -> list[bytes]:
        """Return chained hashes of the prompt's first full blocks for the prefix cache."""
        if not self._caching or request.prompt_embeds is not None:
            return []
        options, hashes, size = request.options, [], self._block_size
        parent = root_hash(options.cache_salt)
        tokens = request.prompt_token_ids
        media = MediaKeys(options, request.mm_features, tokens)
        for index in range(min(len(tokens) // size, _MOST_HASHED)):
            begin, end = index * size, (index + 1) * size
            extra = adapter_keys(options, begin, end)
            extra += media.of_block(begin, end)
            parent = hash_block(parent, tokens[begin:end], extra)
            hashes.append(parent)
        return hashes
