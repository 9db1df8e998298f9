"""Memory plan: every byte that the engine will use, computed before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from octavo.config import CacheConfig, EngineConfig
from octavo.errors import ConfigError
from octavo.kv_cache.groups import (
    KVCacheConfig,
    bytes_per_block,
    make_kv_cache_groups,
    max_blocks_per_request,
    select_layers,
    state_nbytes,
)
from octavo.models.spec import ModelSpec, divide_layers
from octavo.plan.memory import MemoryBudget, MemoryItem, sum_nbytes
from octavo.plan.setup import resolve_kv_cache_dtype
from octavo.system.distributed import Rank

MIB = 2**20
SNAPSHOTS_PER_REQUEST = 32
"""Most snapshots of recurrent states for each request that runs at once."""
# Server process: interpreter, web framework and tokenizer (80 MiB), and the objects of a body of
# 8 MB.
SERVER_NBYTES = 256 * 2**20
# Spare process: an interpreter with torch that waits to replace an engine or a worker.
SPARE_NBYTES = 96 * 2**20


@dataclass(frozen=True)
class MemoryPlan:
    """Memory of an engine by purpose, and the size of its KV cache."""

    limit: int
    """Most bytes that the engine may use."""
    items: tuple[MemoryItem, ...]
    """All memory, the KV cache included."""
    num_blocks: int
    block_size: int
    block_nbytes: int
    max_model_len: int
    blocks_per_request: int
    """Most blocks that one request of `max_model_len` tokens needs."""
    num_states: int = 0
    """Number of slots for recurrent states; 0 if the model has none."""
    states_per_request: int = 1
    """Number of slots of a live state."""
    warm_spare: bool = False
    """True if a spare process may exist."""

    def nbytes(self, name: str) -> int:
        """Return the bytes of all items with the given name."""
        return sum_nbytes(self.items, name)

    @property
    def kv_cache(self) -> int:
        """Bytes of the KV cache, including a draft model's."""
        return self.num_blocks * self.block_nbytes

    @property
    def total(self) -> int:
        """Peak number of bytes."""
        return peak_nbytes(self.items)

    @property
    def steady(self) -> int:
        """Bytes in use without requests, after the model is loaded and all buffers were used."""
        return sum(item.nbytes for item in self.items if item.when in ("always", "step"))

    @property
    def max_concurrency(self) -> float:
        """Number of requests of the greatest length that fit at once."""
        if not self.blocks_per_request:  # a model without attention
            return float(self.num_states)
        return (self.num_blocks - 1) / self.blocks_per_request

    @property
    def state_nbytes(self) -> int:
        """Bytes of a recurrent state, and of its snapshot in the prefix cache."""
        return self.nbytes("states") // max(1, self.num_states)

    @property
    def most_snapshots(self) -> int:
        """Most snapshots in the prefix cache while one request runs."""
        return self.num_states - self.states_per_request

    def describe_snapshots(self) -> str:
        """Return the size of a snapshot and the room for snapshots as a phrase."""
        return (
            f"{self.state_nbytes / MIB:,.2f} MiB; room for {self.most_snapshots:,} of them and the "
            "state of one request"
        )

    def report(self) -> str:
        """Return the plan as lines for users."""
        lines = [f"memory plan: {self.total / MIB:,.0f} MiB of {self.limit / MIB:,.0f} MiB"]
        for item in self.items:
            is_freed = item.when == "loading"
            name = f"({item.name}" if is_freed else item.name
            end = ")" if is_freed else ""
            lines.append(f"  {name:<12} {item.nbytes / MIB:10,.1f} MiB{item.note}{end}")
        return "\n".join(lines)

    def compare(self, resident: int) -> str:
        """Return a line with the plan and the bytes that the processes have in memory."""
        parts = ", ".join(
            f"{item.name} {item.nbytes / MIB:,.0f}"
            for item in self.items
            if item.when in ("always", "step")
        )
        return (
            f"resident memory: {resident / MIB:,.0f} MiB; planned {self.steady / MIB:,.0f} MiB "
            f"({parts}); buffers and KV cache become resident as they are used"
        )


def peak_nbytes(items: Sequence[MemoryItem]) -> int:
    """Return the peak number of bytes of all items."""
    total = dict.fromkeys(("always", "step", "sampling", "loading", "serving"), 0)
    for item in items:
        total[item.when] += item.nbytes
    step = total["step"] + total["sampling"]
    return total["always"] + max(step, total["loading"]) + total["serving"]


def _number(value: float) -> str:
    """Return the number with one decimal place, without a trailing ".0"."""
    return f"{value:,.1f}".removesuffix(".0")


def resolve_dtype(config: EngineConfig, spec: ModelSpec) -> str:
    """Return the type of weights and activations.

    Raises:
        ConfigError: the checkpoint is in float64, and no other type is configured.
    """
    dtype = spec.dtype if config.model.dtype == "auto" else config.model.dtype
    if dtype == "float64":
        raise ConfigError(
            f"{config.model.model} is in float64, which is not supported; set dtype=float32, "
            "bfloat16 or float16."
        )
    return dtype


def resolve_max_model_len(config: EngineConfig, spec: ModelSpec) -> int:
    """Return the configured context length; the model's for -1, which the plan may shorten.

    Raises:
        ConfigError: the configured length exceeds the model's positions.
    """
    asked = config.model.max_model_len
    if asked is None or asked == -1:
        return spec.max_model_len
    if asked > spec.max_model_len:
        raise ConfigError(
            f"max_model_len={asked} is more than the {spec.max_model_len} positions of "
            f"{config.model.model}; lower it or leave it out."
        )
    return asked


def resolve_max_num_batched_tokens(config: EngineConfig, default: int, spec: ModelSpec) -> int:
    """Return the configured token budget of a step, or `default` raised to the settings' needs.

    A text of a model that sees all of it is computed whole, and so are an encoder's input, and
    tokens that see each other, such as those of a picture.
    """
    sched = config.scheduler
    if sched.max_num_batched_tokens is not None:
        return sched.max_num_batched_tokens
    budget = max(default, sched.max_num_seqs)
    if spec.sees_all:
        return max(budget, resolve_max_model_len(config, spec))
    if spec.is_encoder_decoder:  # the encoder's input is computed whole, beside running requests
        budget = max(budget, spec.max_encoder_len + sched.max_num_seqs)
    for encoder in spec.encoders:
        if encoder.sight is not None:
            length = resolve_max_model_len(config, spec)
            budget = max(budget, encoder.sight.longest(length) + sched.max_num_seqs)
    return budget if sched.enable_chunked_prefill else max(budget, spec.max_model_len)


def make_memory_plan(
    config: EngineConfig,
    spec: ModelSpec,
    budget: MemoryBudget,
    *,
    max_num_batched_tokens: int,
    request_memory: int | None = None,
    warm_spare: bool | None = False,
    limit: int | None = None,
    draft: ModelSpec | None = None,
    items: Sequence[MemoryItem] = (),
    states_per_request: int = 1,
) -> tuple[MemoryPlan, KVCacheConfig]:
    """Plan the memory of an engine: the KV cache uses the rest.

    Args:
        config: the settings.
        spec: the model.
        budget: the device's memory, and the items of the model.
        max_num_batched_tokens: token budget of a step.
        request_memory: bytes for a server's requests, if they use the same memory; None: they do
            not, or there is no server.
        warm_spare: True to reserve memory for a spare process, in the same memory as requests;
            None: only if the KV cache does not shrink.
        limit: bytes that the engine may use; None: its share of the available bytes. Each of
            several engines counts a part of the shared items (server, requests, spare).
        draft: the draft model. Its KV cache is in the same blocks.
        items: other users of the same memory.
        states_per_request: slots of a request's recurrent state, if the model has such states.

    Raises:
        ConfigError: the model, or one request of `max_model_len` tokens, does not fit; the message
            names settings that would fit.
        ModelError: blocks do not have the same size in all layers.
    """
    cache = config.cache
    cache_dtype = resolve_kv_cache_dtype(config, resolve_dtype(config, spec))
    device = config.device
    stages = [
        spec.cache_range(*layers)
        for layers in divide_layers(spec, device.pipeline_parallel_size, device.pipeline_layers)
    ]
    ranks = [Rank.of(i, device) for i in range(device.tensor_parallel_size)]
    layouts = [make_kv_cache_groups(spec.split(rank).caches) for rank in ranks]
    groups = layouts[0]  # all ranks have the same number of blocks
    block_nbytes = sum(
        bytes_per_block(select_layers(layout, *caches), cache.block_size, cache_dtype)
        for layout in layouts
        for caches in stages
    )
    if draft is not None:
        block_nbytes += sum(c.block_nbytes(cache.block_size, cache_dtype) for c in draft.caches)

    num_rows = min(spec.max_encoder_len, max_num_batched_tokens - 1)

    def blocks_for(length: int) -> int:
        return max_blocks_per_request(
            groups, cache.block_size, length, max_num_batched_tokens, num_rows
        )

    engines = config.parallel.num_local_engines
    if limit is None:
        limit = int(budget.available * cache.gpu_memory_utilization) // engines
    server: list[MemoryItem] = []
    spare = MemoryItem("warm spare", 0, "serving", " for a process that waits")
    if request_memory is not None:
        server = [
            MemoryItem(
                "requests",
                request_memory // engines,
                "serving",
                " in this process and the server's",
            ),
            MemoryItem("server", SERVER_NBYTES // engines, "serving", " for its own process"),
        ]
        spare_nbytes = SPARE_NBYTES * (1 + config.num_spare_workers)
        spare = replace(spare, nbytes=spare_nbytes // engines)
    others = [*items, *server, *([spare] if warm_spare else [])]
    left = limit - peak_nbytes([*budget.items, *others])
    if left < 0:
        has_connector = any(item.name == "KV connector" for item in items)
        least = "the sizes in kv_transfer_config" if has_connector else "request_memory_bytes"
        shared = f", among {engines} engines" if engines > 1 else ""
        raise ConfigError(
            f"{config.model.model} needs {(limit - left) / 2**20:,.0f} MiB without the KV cache, "
            f"but only {limit / 2**20:,.0f} MiB may be used ({cache.gpu_memory_utilization:.0%} of "
            f"{budget.source}{shared}). Use a smaller model or dtype, or lower "
            f"max_num_batched_tokens, max_num_seqs or {least}."
        )
    max_model_len = resolve_max_model_len(config, spec)
    useful = config.scheduler.max_num_seqs * blocks_for(max_model_len) + 1
    if spec.sees_all:  # a text holds blocks for one step, and two steps are in flight
        of_step = max_num_batched_tokens // cache.block_size + config.scheduler.max_num_seqs
        useful = min(useful, 2 * max(of_step, blocks_for(max_model_len)) + 1)
    most = min(budget.most_kv_cache // engines, left)
    state = sum(
        state_nbytes(select_layers(layout, *caches)) for layout in layouts for caches in stages
    )
    snapshots = SNAPSHOTS_PER_REQUEST if cache.enable_prefix_caching else 0
    useful_states = config.scheduler.max_num_seqs * (states_per_request + snapshots)
    num_states = 0
    if state:
        num_states = _num_states(
            config, state, states_per_request, block_nbytes, left, most, useful_states
        )
        left, most = left - num_states * state, most - num_states * state
    num_blocks = _num_blocks(cache, block_nbytes, left, most, useful, num_states * state)
    max_model_len = _fit_context(
        config, blocks_for, num_blocks, block_nbytes, max_model_len, useful_states * state
    )
    if warm_spare is None:
        warm_spare = num_blocks * block_nbytes <= left - spare.nbytes
        others += [spare] if warm_spare else []
    needed = blocks_for(max_model_len)
    kv_items = []
    if needed:
        concurrency = _number((num_blocks - 1) / needed)
        note = (
            f" = {num_blocks:,} blocks of {cache.block_size} tokens, room for "
            f"{concurrency} full-length requests ({max_model_len:,} tokens each)"
        )
        kv_items.append(MemoryItem("KV cache", num_blocks * block_nbytes, note=note))
    if state:
        own = "" if states_per_request == 1 else f", {states_per_request} for each request"
        note = f" = {num_states:,} of {state / MIB:,.2f} MiB, with those of cached prefixes{own}"
        kv_items.append(MemoryItem("states", num_states * state, note=note))
    plan = MemoryPlan(
        limit=limit,
        items=tuple(item for item in (*budget.items, *kv_items, *others) if item.nbytes),
        num_blocks=num_blocks,
        block_size=cache.block_size,
        block_nbytes=block_nbytes,
        num_states=num_states,
        states_per_request=states_per_request,
        max_model_len=max_model_len,
        blocks_per_request=needed,
        warm_spare=warm_spare,
    )
    return plan, KVCacheConfig(num_blocks, cache.block_size, groups, num_states, states_per_request)


def _num_states(
    config: EngineConfig,
    nbytes: int,
    per_request: int,
    block_nbytes: int,
    left: int,
    most: int,
    useful: int,
) -> int:
    """Return the number of slots for recurrent states, at most `useful`.

    States may use half of the cache's memory, or all of it in a model without attention. A live
    state for each seat is useful, and with prefix caching `SNAPSHOTS_PER_REQUEST` snapshots.

    Raises:
        ConfigError: there is no room for one request.
    """
    memory = config.cache.kv_cache_memory_bytes
    if memory is None:
        memory = most
    num_states = min(memory // (2 if block_nbytes else 1) // nbytes, useful)
    if num_states < per_request or num_states * nbytes > left:
        least = per_request * nbytes * (2 if block_nbytes else 1)
        raise ConfigError(
            f"The cache of {memory / MIB:,.1f} MiB has no room for the recurrent state of one "
            f"request; raise kv_cache_memory_bytes to at least {least:,} (a half is for states), "
            "or free memory."
        )
    return num_states


def _num_blocks(
    cache: CacheConfig, block_nbytes: int, left: int, most: int, useful: int, states: int
) -> int:
    """Return the configured number of blocks, or the number that fits `most`, up to `useful`.

    Args:
        cache: the settings.
        block_nbytes: bytes of a block; 0 for a model without attention.
        left: bytes that the model and the states leave.
        most: most bytes of blocks, if no setting gives their number.
        useful: most blocks that requests can use.
        states: bytes of the states, which are a part of `kv_cache_memory_bytes`.
    """
    if not block_nbytes:
        return 2  # the pool's least number
    if cache.num_gpu_blocks_override is not None:
        num_blocks = cache.num_gpu_blocks_override
    elif cache.kv_cache_memory_bytes is not None:
        num_blocks = (cache.kv_cache_memory_bytes - states) // block_nbytes
    else:
        num_blocks = min(most // block_nbytes, useful)
    if num_blocks * block_nbytes > left:
        raise ConfigError(
            f"A KV cache of {num_blocks * block_nbytes / 2**20:,.0f} MiB does not fit: "
            f"the model leaves {left / 2**20:,.0f} MiB. Lower kv_cache_memory_bytes or "
            "num_gpu_blocks_override."
        )
    return num_blocks


def _fit_context(
    config: EngineConfig,
    blocks_for: Callable[[int], int],
    num_blocks: int,
    block_nbytes: int,
    max_model_len: int,
    most_states: int,
) -> int:
    """Return `max_model_len`, or the longest context that fits if the settings allow less.

    `most_states` is the number of bytes that recurrent states use if half of the cache's memory has
    room for them.
    """
    needed = blocks_for(max_model_len)
    if needed <= num_blocks - 1:
        return max_model_len
    fits = _longest_that_fits(blocks_for, num_blocks - 1, max_model_len)
    if fits < 1:
        raise ConfigError(
            f"The KV cache has {num_blocks} blocks of {block_nbytes} bytes: too few for any "
            "request. Raise kv_cache_memory_bytes or num_gpu_blocks_override."
        )
    if config.model.max_model_len != -1:
        blocks = (needed + 1) * block_nbytes
        raise ConfigError(
            f"The KV cache has {num_blocks} blocks, but a single request of max_model_len="
            f"{max_model_len} needs {needed}, and one is kept free. Set max_model_len={fits} (the "
            "largest that fits) or less, or increase the cache to "
            f"{(blocks + min(blocks, most_states)) / 2**20:,.1f} MiB."
        )
    return fits


def _longest_that_fits(blocks_for: Callable[[int], int], num_blocks: int, longest: int) -> int:
    """Return the greatest length up to `longest` that needs at most `num_blocks` blocks."""
    low, high = 0, longest
    while low < high:
        middle = (low + high + 1) // 2
        if blocks_for(middle) <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low
