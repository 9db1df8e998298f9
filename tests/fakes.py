"""Fake worker without a model, for the control plane's tests.

It keeps rows as the real one does, and a KV memory that stores, for each slot, a hash of the tokens
up to that position. Before a token "attends", every slot that it may see must hold the hash of the
request's tokens up to there. So a wrong block table, a missing copy, or a block allocated too early
or shared wrongly is found at once. Sampled tokens depend only on the tokens before them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import msgspec
import numpy as np

from octavo.config import LoRAConfig, SchedulerConfig
from octavo.executor.base import Executor, find_method
from octavo.kv_cache.groups import KVCacheConfig, make_kv_cache_groups
from octavo.kv_cache.hashing import input_keys, make_block_hasher
from octavo.kv_connector.base import KVConnectorScheduler
from octavo.layers.state_table import STATE_ARRAYS
from octavo.messages import (
    AdapterLoaded,
    AdapterRef,
    CoreSamplingParams,
    EncoderSlice,
    EngineCoreOutput,
    FinishReason,
    GrammarOutput,
    LogprobsLists,
    Modality,
    ModelRunnerOutput,
    MultiModalFeatureSpec,
    NewRequestData,
    PlaceholderRange,
    PoolingSpec,
    ScheduledRequest,
    SchedulerOutput,
    TensorData,
)
from octavo.models.cache import AttentionCache, CacheSpec
from octavo.models.state_cache import StateCache
from octavo.plan.memory import MemoryBudget
from octavo.request import Request
from octavo.scheduler.listener import StepListener
from octavo.scheduler.scheduler import Scheduler
from octavo.worker.encoder_cache import EncoderCache
from tests.params import core_params, core_request, pack_logprobs

VOCAB = 50
STATE = StateCache(((1,),))
MESSAGE_ENDS = (3, 17)
"""Tokens after which states are kept."""


def pages(*windows: int | None) -> tuple[AttentionCache, ...]:
    """Return a layer with keys and values for each window; None: without one."""
    return tuple(AttentionCache(1, 1, window) for window in windows)


def extend_hash(prefix: int, token: int) -> int:
    """Return the hash of a token sequence from the hash of all but its last token."""
    return hash((prefix, token))


def next_token(prefix: int, seed: int) -> int:
    """Return the token that the fake model samples after a prefix."""
    return hash((prefix, seed, 7)) % VOCAB  # hashes of integers are the same in every process


def picture(
    name: str,
    offset: int,
    length: int,
    is_embed: bytes | None = None,
    tokens: int = 0,
    ranges: tuple[tuple[int, int], ...] = (),
) -> MultiModalFeatureSpec:
    """Return an item; its content, and so its rows, are its name."""
    place = PlaceholderRange(offset, length, is_embed)
    data = {"pixels": TensorData("uint8", (1,), b"1")}
    num_tokens = tokens or place.num_embeds
    return MultiModalFeatureSpec("image", name, place, data, num_tokens, ranges=ranges)


def replace_tokens(tokens: Sequence[int], features: Iterable[MultiModalFeatureSpec]) -> list[int]:
    """Return tokens with a hash of the row in place of each one that a row replaces."""
    replaced = list(tokens)
    for feature in features:
        place, row = feature.mm_position, 0
        for i in range(place.length):
            if place.is_embed is None or place.is_embed[i]:
                replaced[place.offset + i] = -hash(
                    (int.from_bytes(feature.identifier.encode()), row)
                )
                row += 1
    return replaced


def expected_output(
    params: CoreSamplingParams,
    prompt: Sequence[int],
    max_model_len: int,
    allowed: Callable[[int], Sequence[int]] | None = None,
    adapter: str | None = None,
    adapter_begin: int = 0,
) -> list[int]:
    """Return the output of a request that runs alone, computed without a scheduler.

    `allowed`: the tokens that its grammar allows at each place of the output. `adapter`: the
    content of its adapter, which changes the tokens from `adapter_begin` on.
    """
    prefix = hash_prompt(prompt, adapter, adapter_begin)
    output: list[int] = []
    while True:
        token = next_token(prefix, params.seed)
        if allowed is not None:
            choice = allowed(len(output))
            token = choice[token % len(choice)]
        prefix = extend_hash(prefix, token)
        output.append(token)
        if token in params.all_stop_token_ids and len(output) > params.min_tokens:
            return output
        if len(output) == params.max_tokens or len(prompt) + len(output) >= max_model_len:
            return output


def begin_adapter(prefix: int, adapter: str | None) -> int:
    """Return the hash of some tokens before the content of an adapter."""
    return prefix if adapter is None else hash((prefix, int.from_bytes(adapter.encode()), 7))


def hash_prompt(tokens: Sequence[int], adapter: str | None, adapter_begin: int) -> int:
    """Return the hash of tokens, some with an adapter."""
    prefix = 0
    for index, token in enumerate(tokens):
        if index == adapter_begin:
            prefix = begin_adapter(prefix, adapter)
        prefix = extend_hash(prefix, token)
    return prefix


def pooled(tokens: Sequence[int], adapter: str | None = None, adapter_begin: int = 0) -> bytes:
    """Return the vector of a text."""
    return str(hash_prompt(tokens, adapter, adapter_begin)).encode()


def scheduled_tokens(work: SchedulerOutput) -> dict[str, int]:
    """Return the tokens to compute for each request of a step, in batch order."""
    return {request.req_id: request.num_tokens for request in work.scheduled_reqs}


class _Encoder:
    """Encoder that checks that it has the data of items, in a worker's cache."""

    def __init__(self, num_pieces: Callable[[Modality], int]) -> None:
        self._num_pieces = num_pieces

    def run_apart(self, items: Sequence[MultiModalFeatureSpec]) -> tuple[list[Any], dict[int, str]]:
        assert all(item.data for item in items), "the data of an item is missing"
        return [range(item.num_rows) for item in items], {}

    def advance(self, part: EncoderSlice) -> Any:
        assert part.begin or part.item.data, "the data of an item is missing"
        return (
            range(part.item.num_rows) if part.end == self._num_pieces(part.item.modality) else None
        )


class _Row:
    def __init__(
        self, data: NewRequestData, block_ids: list[list[int]], adapter: str | None
    ) -> None:
        self.adapter, self.adapter_begin = adapter, data.adapter_begin
        self.tokens = replace_tokens(data.token_ids, data.mm_features)
        self.features = data.mm_features
        self.ranges = {pair for feature in data.mm_features for pair in feature.ranges}
        self.slots: list[list[int]] = [[] for _ in block_ids]
        """Expected content of the slots of its tokens for each group, as far as computed."""
        self.prefixes: list[int] = []
        """Hash of the tokens up to each one, as far as computed."""
        self.num_prompt_tokens = data.num_prompt_tokens
        self.params = data.sampling_params
        self.pooling = data.pooling
        self.tables = [list(ids) for ids in block_ids]
        self.num_skipped = self.num_computed_tokens = data.num_computed_tokens

    def prefix(self, position: int) -> int:
        """Return the hash of the tokens up to and including `position`."""
        prefixes = self.prefixes
        while len(prefixes) <= position:
            at = len(prefixes)
            prefix = prefixes[-1] if at else 0
            if at == self.adapter_begin:
                prefix = begin_adapter(prefix, self.adapter)
            prefix = extend_hash(prefix, self.tokens[at])
            prefixes.append(prefix)
            for group, slots in enumerate(self.slots):
                slots.append(prefix + group)
            for begin, end in self.ranges:
                if at == end - 1:  # all tokens of the range depend on its last one
                    for group, slots in enumerate(self.slots):
                        slots[begin:end] = [hash((slot, prefix)) + group for slot in slots[begin:]]
        return prefixes[position]

    def truncate(self, count: int) -> None:
        del self.tokens[count:]
        for slots in [self.prefixes, *self.slots]:
            del slots[count:]


class _States:
    """Slots of recurrent states; a state is the hash of its tokens."""

    def __init__(self, num_slots: int) -> None:
        self.slots: list[int | None] = [None] * num_slots
        self._indices: dict[str, int] = {}
        self._fillers = [array.make_filler(10_000) for array in STATE_ARRAYS]
        self.num_hits = 0

    def schedule(self, request: ScheduledRequest) -> None:
        if request.new is not None:
            index = self._indices.setdefault(request.req_id, len(self._indices))
            for filler in self._fillers:
                filler.add_row(index, request.new)
            self.num_hits += request.new.state_source >= 0
        for filler in self._fillers:
            filler.schedule(self._indices[request.req_id], request)

    def update(self, rows: dict[str, _Row], counts: dict[str, int]) -> None:
        """Read the states before a step and write those after its tokens, as the kernels do."""
        starts = np.array([rows[req_id].num_computed_tokens for req_id in counts])
        sizes = np.array(list(counts.values()))
        indices = np.array([self._indices[req_id] for req_id in counts])
        sources, slots, snapshots = np.zeros((3, max(sizes.sum(), len(sizes))), np.int32)
        for filler, out in zip(self._fillers, (sources, slots, snapshots), strict=True):
            filler.fill(out, indices, starts, sizes)
        owners: dict[int, str] = {}
        written: dict[int, int] = {}
        token = 0
        for source, (req_id, count) in zip(sources.tolist(), counts.items(), strict=False):
            row = rows[req_id]
            first = row.num_computed_tokens
            assert (source < 0) == (first == 0)
            if first:
                assert self.slots[source] == row.prefix(first - 1), (req_id, first)
            for position in range(first, first + count):
                targets = [int(s) for s in (slots[token], snapshots[token]) if s >= 0]
                token += 1
                for slot in targets:
                    assert owners.setdefault(slot, req_id) == req_id, "two of a step use a slot"
                    written[slot] = row.prefix(position)
            assert slots[token - 1] >= 0
        for source, req_id in zip(sources.tolist(), counts, strict=False):
            assert source not in written or owners[source] == req_id, "a source is overwritten"
        for slot, prefix in written.items():
            self.slots[slot] = prefix


class FakeWorker:
    """Worker that executes steps in order, and checks each.

    Args:
        config: shape of the KV cache.
        num_drafts: maximum drafts of a request in a step; about every third one is wrong.
        fail: requests that fail once their prompt is computed.
    """

    def __init__(
        self, config: KVCacheConfig, num_drafts: int = 0, fail: Iterable[str] = ()
    ) -> None:
        self.config = config
        self.num_drafts = num_drafts
        self.fail = set(fail)
        self.rows: dict[str, _Row] = {}
        self.memory: dict[int, list[int | None]] = {}
        """Content of the slots of each block: prefix hash + group."""
        has_states = any(group.has_states for group in config.groups)
        self.states = _States(config.num_states) if has_states else None
        self.allowed: dict[str, list[list[int]]] = {}
        """Tokens that grammars allow in the current step, at each sampled position."""
        self._counts: dict[str, int] = {}
        self._drafts: dict[str, list[int]] = {}
        """Tokens to compute and drafts of each request, of the step that has begun."""
        self.adapters: dict[int, str] = {}
        """Contents of the slots of adapters."""
        self.reading: dict[int, str] = {}
        """Contents that are being read, by slot."""
        self.encoder_pieces: dict[str, int] = {}
        """Numbers of pieces of the runs that may be cut, by modality."""
        self.slice: tuple[str, int] | None = None
        """Item of the last slice, and the number of its computed pieces."""
        encoder: Any = _Encoder(lambda modality: self.encoder_pieces[modality])
        self.encoders = EncoderCache({"image": encoder, "audio": encoder, "video": encoder})
        self.encoded: dict[str, int] = {}
        """Number of rows of each item in the encoder cache."""
        self.num_encoded = 0
        """Number of items that the encoder has computed."""
        self.num_copies = 0
        self.num_accepted = 0
        self.awake = True
        self.reloads: list[bool] = []
        """For each reload of weights: True if they had to be the same."""

    def sleep(self) -> None:
        self.awake = False
        self.forget()

    def forget(self) -> None:
        """Lose all keys, values, states and rows of encoders."""
        self.memory.clear()
        self.encoded.clear()
        if self.states is not None:
            self.states.slots = [None] * len(self.states.slots)

    def memory_to_reload(self) -> tuple[int, int]:
        return 0, 0

    def reload_weights(self, *, same: bool) -> None:
        self.reloads.append(same)
        self.awake = True

    def execute(
        self, work: SchedulerOutput, grammar: GrammarOutput | None = None
    ) -> ModelRunnerOutput:
        self.begin(work)
        return self.finish(grammar)

    def begin(self, work: SchedulerOutput) -> dict[str, list[int]]:
        """Compute the forward pass of a step; return its drafts."""
        # Through the wire format, so that nothing is shared with the scheduler.
        work = msgspec.msgpack.decode(msgspec.msgpack.encode(work), type=SchedulerOutput)
        self._update_rows(work)
        scheduled = work.scheduled_reqs
        assert self.awake or not scheduled
        assert sum(r.num_tokens for r in scheduled) == work.total_num_scheduled_tokens
        assert len({r.req_id for r in scheduled}) == len(scheduled)
        self._counts, self._drafts = {}, {}
        for request in scheduled:
            row = self.rows[request.req_id]
            assert request.num_drafts <= self.num_drafts
            if request.num_drafts:
                assert row.num_computed_tokens == len(row.tokens) - 1
                assert request.num_tokens == 1 + request.num_drafts
            drafts = self._drafts[request.req_id] = self._propose(row, request.num_drafts)
            row.tokens += drafts
            self._counts[request.req_id] = request.num_tokens - request.num_drafts + len(drafts)
        written: set[int] = set()
        for req_id, count in self._counts.items():
            self._write(self.rows[req_id], count, written)
        if self.states is not None and self._counts:
            self.states.update(self.rows, self._counts)
        for req_id, count in self._counts.items():
            self._attend(self.rows[req_id], count)
        return {req_id: drafts for req_id, drafts in self._drafts.items() if drafts}

    def finish(self, grammar: GrammarOutput | None = None) -> ModelRunnerOutput:
        """Sample the step that `begin` has computed."""
        self.allowed = {} if grammar is None else _unpack(grammar, self._drafts)
        out = ModelRunnerOutput()
        for req_id, count in self._counts.items():
            self._sample(req_id, count, self._drafts[req_id], out)
        return msgspec.msgpack.decode(msgspec.msgpack.encode(out), type=ModelRunnerOutput)

    def _update_rows(self, work: SchedulerOutput) -> None:
        for req_id in work.finished_req_ids:
            del self.rows[req_id]  # it must have a row
        for change in work.adapter_changes:
            if change.adapter is None:
                assert change.slot not in self.reading
                gone = self.adapters.pop(change.slot, None)  # absent if it could not be read
                assert gone is None or all(row.adapter != gone for row in self.rows.values())
            else:
                assert change.slot not in self.adapters.keys() | self.reading
                self.reading[change.slot] = change.adapter.content_hash
        for identifier in work.free_encoder_mm_hashes:
            self.encoded.pop(identifier, None)  # absent if its step failed
        copies = work.blocks_to_copy
        assert not {source for source, _ in copies} & {copy for _, copy in copies}
        for source, copy in copies:
            self.memory[copy] = self._block(source).copy()
            self.num_copies += 1
        for request in work.scheduled_reqs:
            if self.states is not None:
                self.states.schedule(request)
            new_blocks = request.new_block_ids or [[]] * len(self.config.paged_groups)
            if request.new is not None:
                assert request.req_id not in self.rows
                slot = request.new.adapter_slot
                adapter = None if slot < 0 else self.adapters[slot]
                self.rows[request.req_id] = _Row(request.new, new_blocks, adapter)
            else:
                row = self.rows[request.req_id]
                for table, ids in zip(row.tables, new_blocks, strict=True):
                    table += ids
        part, ended = work.encoder_slice, None
        if part is not None:
            name, most = part.item.identifier, self.encoder_pieces[part.item.modality]
            assert work.scheduled_reqs
            assert part.begin < part.end <= most
            if part.begin:
                assert self.slice in ((name, part.begin), None), "a slice does not follow another"
            self.slice, ended = (name, part.end), name if part.end == most else None
        self.encoders.update(work, {req_id: row.features for req_id, row in self.rows.items()})
        for req_id, indices in work.scheduled_encoder_inputs.items():
            for index in indices:
                feature = self.rows[req_id].features[index]
                ended = None if ended == feature.identifier else ended
                assert feature.identifier not in self.encoded, "an item is computed again"
                self.encoded[feature.identifier] = feature.num_rows
                self.num_encoded += 1
        assert ended is None, "a run ends without a use for its rows"

    def _block(self, block: int) -> list[int | None]:
        return self.memory.setdefault(block, [None] * self.config.block_size)

    def _write(self, row: _Row, count: int, written: set[int]) -> None:
        first, size = row.num_computed_tokens, self.config.block_size
        end = first + count
        assert count > 0
        assert end <= len(row.tokens)
        for feature in row.features:
            place = feature.mm_position
            if place.num_embeds_before(first) < place.num_embeds_before(end):
                assert feature.identifier in self.encoded, "rows of an item are missing"
        for begin, last in row.ranges:
            assert not (first < last and begin < end < last), "a step ends within a range"
        row.prefix(end - 1)
        for group in range(len(self.config.paged_groups)):
            for index in range(first // size, (end - 1) // size + 1):
                block, start = row.tables[group][index], index * size
                assert 0 < block < self.config.num_blocks
                assert block not in written, "two of a step write to a block"
                written.add(block)
                low, high = max(first, start), min(end, start + size)
                self._block(block)[low - start : high - start] = row.slots[group][low:high]

    def _attend(self, row: _Row, count: int) -> None:
        first, size = row.num_computed_tokens, self.config.block_size
        end = first + count
        for group_id, group in enumerate(self.config.paged_groups):
            window, chunk = group.cache.sliding_window, group.cache.chunk_size
            lowest = 0 if window is None else max(0, first - window + 1)
            if chunk is not None:
                lowest = first // chunk * chunk
            slots, table = row.slots[group_id], row.tables[group_id]
            for start in range(lowest - lowest % size, end, size):
                block = table[start // size]
                assert block > 0, "a token looks at the null block"
                low, high = max(lowest, start), min(end, start + size)
                found = self._block(block)[low - start : high - start]
                assert found == slots[low:high], (block, low, found, slots[low:high])

    def _propose(self, row: _Row, most: int) -> list[int]:
        """Return drafts, now and then fewer than possible."""
        prefix, drafts = row.prefix(len(row.tokens) - 1), []
        for _ in range(prefix % (most + 1)):
            token = next_token(prefix, row.params.seed)
            drafts.append((token + 1) % VOCAB if prefix % 3 == 0 else token)
            prefix = extend_hash(prefix, token)
        return drafts

    def _sample(self, req_id: str, count: int, drafts: list[int], out: ModelRunnerOutput) -> None:
        row = self.rows[req_id]
        first = row.num_computed_tokens
        out.req_ids.append(req_id)
        seed = row.params.seed
        if row.params.prompt_logprobs is not None:
            targets = row.tokens[first + 1 : min(first + count + 1, row.num_prompt_tokens)]
            if targets:
                out.prompt_logprobs[req_id] = _logprobs(targets)
        if row.pooling is not None:
            assert not (row.pooling.reads_all and row.num_skipped), "a prefix is missing"
            assert not row.pooling.whole or count == len(row.tokens), "a text is divided"
            if first + count == len(row.tokens):
                out.pooled[req_id] = pooled(row.tokens, row.adapter, row.adapter_begin)
            if req_id in self.fail:
                out.errors[req_id] = "made to fail"
            out.sampled_token_ids.append([])
            row.num_computed_tokens += count
            return
        if first + count < len(row.tokens):
            out.sampled_token_ids.append([])
            row.num_computed_tokens += count
            return
        known = len(row.tokens) - len(drafts)
        sampled: list[int] = []
        for i in range(len(drafts) + 1):
            token = next_token(row.prefix(known - 1 + i), seed)
            if req_id in self.allowed:
                allowed = self.allowed[req_id][i]
                token = allowed[token % len(allowed)]
            sampled.append(token)
            if i < len(drafts) and sampled[-1] != drafts[i]:
                break
        row.truncate(known)
        row.tokens += sampled
        row.num_computed_tokens = len(row.tokens) - 1
        self.num_accepted += len(sampled) - 1
        if req_id in self.fail:
            out.errors[req_id] = "made to fail"
            sampled = []
        out.sampled_token_ids.append(sampled)
        if row.params.logprobs is not None:
            out.logprobs[req_id] = _logprobs(sampled)
        if drafts:
            out.num_draft_tokens[req_id] = len(drafts)


class FakeExecutor(Executor):
    """Executor with a fake worker.

    Args:
        kv_cache: shape of the KV cache; None: `initialize_kv_cache` sets it.
        max_in_flight: as in `Executor`.
    """

    def __init__(self, kv_cache: KVCacheConfig | None = None, max_in_flight: int = 1) -> None:
        self.max_in_flight = max_in_flight
        self.worker = None if kv_cache is None else FakeWorker(kv_cache)
        self.calls: list[str] = []
        self.steps: list[SchedulerOutput] = []
        self.failure: BaseException | None = None
        """Error that steps raise."""
        self.interrupt = False
        """True if Ctrl-C is pressed once during the next wait for a step."""

    def measure_memory(self) -> MemoryBudget:
        raise NotImplementedError

    def initialize_kv_cache(self, kv_cache: KVCacheConfig) -> None:
        self.worker = FakeWorker(kv_cache)

    def execute(self, work: SchedulerOutput) -> FakeStep:
        self.calls.append("execute")
        self.steps.append(work)
        return FakeStep(self, work)

    def collective_rpc(self, method, timeout=None, args=(), kwargs=None):
        return [find_method(self.worker, method)(*args, **(kwargs or {}))]

    def shutdown(self) -> None:
        self.calls.append("shutdown")


class FakeStep:
    def __init__(self, executor: FakeExecutor, work: SchedulerOutput) -> None:
        assert executor.worker is not None
        self._executor, self._work = executor, work
        self._drafts = executor.worker.begin(work)

    def drafts(self) -> dict[str, list[int]]:
        return self._drafts

    def sample(self, grammar: GrammarOutput | None = None) -> Future[ModelRunnerOutput]:
        executor = self._executor
        executor.calls.append("sample")
        future: Future[ModelRunnerOutput] = _InterruptedFuture() if executor.interrupt else Future()
        executor.interrupt = False
        assert executor.worker is not None
        with_grammar = {r.req_id for r in self._work.scheduled_reqs if r.has_grammar}
        assert (grammar is None) == (not with_grammar)
        assert grammar is None or with_grammar.issuperset(grammar.req_ids)
        result = executor.worker.finish(grammar)
        if executor.failure is not None:
            future.set_exception(executor.failure)
        else:
            future.set_result(result)
        return future


class _InterruptedFuture(Future[ModelRunnerOutput]):
    """Result whose first wait is interrupted by Ctrl-C."""

    _interrupted = False

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        if not self._interrupted:
            self._interrupted = True
            raise KeyboardInterrupt
        return super().result(timeout)


def _unpack(
    grammar: GrammarOutput, drafts: Mapping[str, Sequence[int]]
) -> dict[str, list[list[int]]]:
    """Return the allowed tokens of each request at each position that it samples."""
    rows = np.frombuffer(grammar.bitmask, np.uint8).reshape(-1, -(-VOCAB // 32) * 4)
    bits = [np.flatnonzero(row).tolist() for row in np.unpackbits(rows, axis=1, bitorder="little")]
    allowed, at = {}, 0
    for req_id in grammar.req_ids:
        count = 1 + len(drafts[req_id])
        allowed[req_id], at = bits[at : at + count], at + count
    assert at == len(bits)
    return allowed


def _logprobs(tokens: Sequence[int]) -> LogprobsLists:
    return pack_logprobs([[t] for t in tokens], [[-float(t)] for t in tokens], [1] * len(tokens))


class FakeEngine:
    """Scheduler and fake executor, with `depth` steps in flight, checked at every turn."""

    def __init__(
        self,
        *,
        caches: Sequence[CacheSpec] = pages(None),
        num_blocks: int = 64,
        block_size: int = 8,
        max_model_len: int = 128,
        max_num_batched_tokens: int = 64,
        depth: int = 1,
        caching: bool = True,
        num_drafts: int = 0,
        num_stages: int = 1,
        fail: Iterable[str] = (),
        listeners: Sequence[StepListener] = (),
        make_connector: Callable[[KVCacheConfig], KVConnectorScheduler] | None = None,
        num_states: int = 0,
        lora: LoRAConfig | None = None,
        encoder_cache_size: int = 0,
        encoder_pieces: dict[str, int] | None = None,
        **config: object,
    ) -> None:
        groups = make_kv_cache_groups(caches)
        self.kv_config = KVCacheConfig(num_blocks, block_size, groups, num_states, 1 + num_drafts)
        self.max_loras = 0 if lora is None else lora.max_loras
        self.on_step: Callable[[SchedulerOutput], object] = lambda work: None
        self.now = 0.0
        self.encoder_pieces = encoder_pieces or {}
        self.piece_seconds = 0.0
        """Seconds of a piece of a run; a step takes 0.01 s more. 0: time stands still."""
        config.setdefault("max_num_seqs", 8)
        self.scheduler = Scheduler(
            msgspec.convert(config, SchedulerConfig),
            self.kv_config,
            max_model_len=max_model_len,
            max_num_batched_tokens=max_num_batched_tokens,
            enable_caching=caching,
            num_speculative_tokens=num_drafts,
            max_num_drafts=3 * num_drafts,
            num_stages=num_stages,
            clock=lambda: self.now,
            listeners=listeners,
            connector=None if make_connector is None else make_connector(self.kv_config),
            message_ends=MESSAGE_ENDS,
            lora=lora,
            encoder_cache_size=encoder_cache_size,
            encoder_pieces={
                modality: lambda tokens, rows, count=count: count
                for modality, count in self.encoder_pieces.items()
            },
        )
        self.executor = FakeWorker(self.kv_config, num_drafts, fail)
        self.executor.encoder_pieces = self.encoder_pieces
        self.encoder_cache_size = encoder_cache_size
        self.hasher = make_block_hasher(block_size, input_keys) if caching else None
        self.depth = depth
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self.steps: list[SchedulerOutput] = []
        self.outputs: dict[str, list[EngineCoreOutput]] = {}
        self._arrivals = 0

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        turn: int = 0,
        deadline: float | None = None,
        first_token_deadline: float | None = None,
        tenant: str | None = None,
        priority: int = 0,
        background: bool = False,
        progress: bool = False,
        salt: str | None = None,
        hashed: bool = True,
        stop: Sequence[int] = (),
        output: Sequence[int] = (),
        leader: Request | None = None,
        scope: str | None = None,
        pooling: PoolingSpec | None = None,
        adapter: str | None = None,
        adapter_begin: int = 0,
        features: Sequence[MultiModalFeatureSpec] = (),
        **params: object,
    ) -> Request:
        """Add a request; `stop` are stop tokens besides `stop_token_ids`, such as EOS.

        `output`: tokens that it already has. With a `scope` it is hashed even without caching.
        `adapter`: content of its adapter, which changes the tokens from `adapter_begin` on.
        """
        self._arrivals += 1
        sampling = core_params(**{"max_tokens": 8, "all_stop_token_ids": list(stop)} | params)
        core = core_request(
            request_id,
            prompt,
            sampling,
            arrival_time=self._arrivals,
            priority=priority,
            background=background,
            reports_progress=progress,
            cache_salt=salt,
            deadline=deadline,
            turn=turn,
            output_token_ids=list(output),
            first_token_deadline=first_token_deadline,
            tenant=tenant,
            pooling=pooling,
            adapter=None if adapter is None else AdapterRef(f"name of {adapter}", "/x", adapter),
            adapter_begin=adapter_begin,
            mm_features=list(features),
        )
        size = self.kv_config.block_size
        hasher = make_block_hasher(size, input_keys) if scope else self.hasher
        request = Request(core, hasher if hashed else None, cache_scope=scope, leader=leader)
        self.scheduler.add_request(request)
        self.outputs[request_id] = []
        return request

    def finish_reading(self, error: str | None = None) -> None:
        """Let the worker finish, or fail, to read the oldest adapter, if it reads one."""
        for slot, content in [*self.executor.reading.items()][:1]:
            del self.executor.reading[slot]
            if error is None:
                self.executor.adapters[slot] = content
            self.scheduler.update_adapter(AdapterLoaded(slot, error))
            self.scheduler.check_integrity()

    def schedule(self) -> SchedulerOutput:
        """Schedule and execute a step, whose result stays in flight."""
        work = self.scheduler.schedule()
        assert work.total_num_scheduled_tokens <= self.scheduler.max_num_batched_tokens
        self.scheduler.check_integrity()
        self.in_flight.append((work, self.executor.execute(work)))
        self.on_step(work)
        assert set(self.executor.rows) == {r.request_id for r in self.scheduler.running}
        assert len({row.adapter for row in self.executor.rows.values()} - {None}) <= self.max_loras
        assert sum(self.executor.encoded.values()) <= self.encoder_cache_size
        self._check_encoder_work(work)
        self.steps.append(work)
        return work

    def _check_encoder_work(self, work: SchedulerOutput) -> None:
        """Check the bound of a step's encoder work."""
        sizes = [
            self.executor.rows[req_id].features[index].num_encoder_tokens
            for req_id, indices in work.scheduled_encoder_inputs.items()
            for index in indices
        ]
        alone = len(sizes) <= 1
        if not self.scheduler.config.enable_chunked_prefill:
            alone = len(work.scheduled_encoder_inputs) <= 1
        assert alone or sum(sizes) <= self.scheduler.max_num_batched_tokens

    def update(self) -> list[EngineCoreOutput]:
        """Process the oldest result in flight."""
        if self.piece_seconds:
            part = self.in_flight[0][0].encoder_slice
            self.now += 0.01 + self.piece_seconds * (part.end - part.begin if part else 0)
        outputs = self.scheduler.update_from_output(*self.in_flight.popleft())
        self.scheduler.check_integrity()
        for output in outputs:
            earlier = self.outputs.setdefault(output.request_id, [])
            assert not earlier or earlier[-1].finish_reason is None, "output after the end"
            earlier.append(output)
        return outputs

    def step(self) -> list[EngineCoreOutput]:
        """Schedule until `depth` steps are in flight, then process the oldest.

        The worker finishes to read an adapter before.
        """
        self.finish_reading()
        while len(self.in_flight) < self.depth:
            self.schedule()
        return self.update()

    def run(self) -> None:
        """Run steps until all requests have finished and the worker knows it.

        The first request in order of service always advances. So a request must end at least once
        in a bounded number of steps, even if many wait after it.
        """
        left, idle_steps = len(self.scheduler.requests), 0
        while self.scheduler.has_requests() or self.in_flight or self.executor.reading:
            if self.scheduler.has_requests() or self.executor.reading:
                self.step()
            else:
                self.update()
            idle_steps += 1
            if len(self.scheduler.requests) < left:
                left, idle_steps = len(self.scheduler.requests), 0
            assert idle_steps < 1000, "some request starves"
        while self.in_flight:
            self.update()
        self.schedule()
        self.update()
        assert not self.executor.rows
        assert self.scheduler.kv_cache_manager.num_used_blocks == 0

    def tokens(self, request_id: str) -> list[int]:
        return [t for output in self.outputs[request_id] for t in output.new_token_ids]

    def finish_reason(self, request_id: str) -> FinishReason | None:
        outputs = self.outputs[request_id]
        return outputs[-1].finish_reason if outputs else None

    def running_ids(self) -> list[str]:
        return [request.request_id for request in self.scheduler.running]

    def check_tokens(self, *requests: Request) -> None:
        """Check that each request got the tokens that it gets alone."""
        for request in requests:
            prompt = request.all_token_ids[: request.num_prompt_tokens]
            params, limit = request.sampling_params, self.scheduler.max_model_len
            assert self.tokens(request.request_id) == expected_output(params, prompt, limit)
