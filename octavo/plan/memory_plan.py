"""The memory plan: every byte that the engine will hold, computed before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo.config import CacheConfig, EngineConfig
from octavo.errors import ConfigError
from octavo.kv_cache.groups import (
    KVCacheConfig,
    bytes_per_block,
    make_kv_cache_groups,
    max_blocks_per_request,
    select_layers,
)
from octavo.models.spec import ModelSpec, divide_layers
from octavo.plan.memory import MemoryBudget
from octavo.plan.setup import resolve_kv_cache_dtype
from octavo.system.distributed import Rank

# The server's own process: interpreter, web framework and tokenizer (80 MiB), and a body of 8 MB
# as objects.
SERVER_NBYTES = 256 * 2**20
# An interpreter with torch that waits to take the place of an engine or a worker.
SPARE_NBYTES = 256 * 2**20


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose, and what the KV cache amounts to."""

    limit: int
    """What the engine may use in all."""
    runtime: int
    weights: int
    activations: int
    logits: int
    """Logits and what sampling does with them."""
    loading: int
    """The largest weight as it is read, beside the packed ones; gone before a step is run."""
    rows: int
    """Token histories, block tables and sampling state of the running requests."""
    kv_cache: int
    """That of the model that drafts included."""
    num_blocks: int
    block_size: int
    block_nbytes: int
    max_model_len: int
    blocks_per_request: int
    """Blocks that one request of `max_model_len` tokens needs at most."""
    draft: int = 0
    """Weights and buffers of the model that drafts."""
    server: int = 0
    """The other process of a server."""
    requests: int = 0
    """What requests and answers may take in both of them."""
    spare: int = 0
    """A spare process."""
    warm_spare: bool = False
    """Whether there may be one."""
    kv_connector: int = 0
    """Memory of a KV connector."""
    grammars: int = 0
    """Most bytes of the processes for structured output."""

    @property
    def total(self) -> int:
        """All of it, at the fullest moment."""
        loading = max(0, self.loading - self.activations - self.logits)
        others = self.server + self.requests + self.spare + self.grammars
        return self.steady + loading + others

    @property
    def steady(self) -> int:
        """What is held once the model is loaded and everything has been used, without requests."""
        held = self.runtime + self.weights + self.activations + self.logits + self.rows
        return held + self.draft + self.kv_cache + self.kv_connector

    @property
    def max_concurrency(self) -> float:
        """How many requests of the greatest length fit at once."""
        return (self.num_blocks - 1) / self.blocks_per_request

    def report(self) -> str:
        """The plan for people."""
        mib = 2**20
        lines = [
            f"memory plan: {self.total / mib:,.0f} MiB of {self.limit / mib:,.0f} MiB",
            f"  runtime      {self.runtime / mib:10,.1f} MiB",
            f"  weights      {self.weights / mib:10,.1f} MiB",
            f"  activations  {self.activations / mib:10,.1f} MiB",
            f"  logits       {self.logits / mib:10,.1f} MiB",
            f"  (loading     {self.loading / mib:10,.1f} MiB, freed before the first step)",
            f"  rows         {self.rows / mib:10,.1f} MiB",
            f"  KV cache     {self.kv_cache / mib:10,.1f} MiB = {self.num_blocks:,} blocks of "
            f"{self.block_size} tokens, room for {_number(self.max_concurrency)} full-length "
            f"requests ({self.max_model_len:,} tokens each)",
        ]
        if self.draft:
            lines.insert(
                -1, f"  draft model  {self.draft / mib:10,.1f} MiB, plus a part of the KV cache"
            )
        if self.kv_connector:
            lines.append(f"  KV connector {self.kv_connector / mib:10,.1f} MiB for blocks")
        if self.server:
            lines += [
                f"  requests     {self.requests / mib:10,.1f} MiB in this process and the server's",
                f"  server       {self.server / mib:10,.1f} MiB for its own process",
            ]
        if self.grammars:
            lines.append(
                f"  grammars     {self.grammars / mib:10,.1f} MiB at most, for processes of "
                "structured output"
            )
        if self.spare:
            lines.append(f"  warm spare   {self.spare / mib:10,.1f} MiB for a process that waits")
        return "\n".join(lines)

    def compare(self, resident: int) -> str:
        """The plan beside the bytes that a process has in memory, for people."""
        mib = 2**20
        buffers = self.activations + self.logits + self.rows + self.draft
        return (
            f"resident memory: {resident / mib:,.0f} MiB; planned {self.steady / mib:,.0f} MiB "
            f"(runtime {self.runtime / mib:,.0f}, weights {self.weights / mib:,.0f}, buffers "
            f"{buffers / mib:,.0f}, KV cache {self.kv_cache / mib:,.0f}); buffers and KV cache "
            "become resident as they are used"
        )


def _number(value: float) -> str:
    """With a digit behind the point, unless that is 0."""
    return f"{value:,.1f}".removesuffix(".0")


def resolve_dtype(config: EngineConfig, spec: ModelSpec) -> str:
    """The type of weights and activations.

    Raises:
        ConfigError: if none is set for a checkpoint in float64.
    """
    dtype = spec.dtype if config.model.dtype == "auto" else config.model.dtype
    if dtype == "float64":
        raise ConfigError(
            f"{config.model.model} is in float64, which is not supported; set dtype=float32, "
            "bfloat16 or float16."
        )
    return dtype


def resolve_max_model_len(config: EngineConfig, spec: ModelSpec) -> int:
    """The context length asked for; for -1, the model's, which the plan may shorten.

    Raises:
        ConfigError: if more is asked for than the model's positions allow.
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


def resolve_max_num_batched_tokens(config: EngineConfig, default: int, max_model_len: int) -> int:
    """The token budget of a step: as set, or `default` raised to what the other settings need."""
    sched = config.scheduler
    if sched.max_num_batched_tokens is not None:
        return sched.max_num_batched_tokens
    budget = max(default, sched.max_num_seqs)
    return budget if sched.enable_chunked_prefill else max(budget, max_model_len)


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
    kv_connector: int = 0,
    grammars: int = 0,
) -> tuple[MemoryPlan, KVCacheConfig]:
    """Plans the memory of an engine: the KV cache gets what is left.

    Args:
        config: the settings.
        spec: the model.
        budget: what there is, and what is taken beside the KV cache.
        max_num_batched_tokens: token budget of a step.
        request_memory: bytes for a server's requests, if they come from the same memory; None:
            they do not, or there is no server.
        warm_spare: whether there is room for a spare process, in the same memory as requests;
            None: if it costs no KV cache.
        limit: bytes that the engine may use; None: its share of what there is. What several engines
            have together (server, requests, spare) counts for each of them in part.
        draft: the model that drafts. What it keeps of a token lies in a block of the same number.
        kv_connector: bytes of the same memory that a KV connector takes.
        grammars: bytes of the same memory that processes for structured output may take.

    Raises:
        ConfigError: if the model, or one request of `max_model_len` tokens, does not fit; the
            message names what would.
        ModelError: if blocks do not take the same bytes in all layers.
    """
    cache = config.cache
    cache_dtype = resolve_kv_cache_dtype(config, resolve_dtype(config, spec))
    device = config.device
    stages = divide_layers(spec, device.pipeline_parallel_size, device.pipeline_layers)
    ranks = [Rank.of(i, device) for i in range(device.tensor_parallel_size)]
    layouts = [make_kv_cache_groups(spec.split(rank).caches) for rank in ranks]
    groups = layouts[0]  # of as many blocks as the others
    block_nbytes = sum(
        bytes_per_block(select_layers(layout, *layers), cache.block_size, cache_dtype)
        for layout in layouts
        for layers in stages
    )
    if draft is not None:
        block_nbytes += sum(c.block_nbytes(cache.block_size, cache_dtype) for c in draft.caches)

    def blocks_for(length: int) -> int:
        return max_blocks_per_request(groups, cache.block_size, length, max_num_batched_tokens)

    engines = config.parallel.num_local_engines
    if limit is None:
        limit = int(budget.available * cache.gpu_memory_utilization) // engines
    server = requests = of_spare = 0
    spare_nbytes = SPARE_NBYTES * (1 + config.num_spare_workers)
    if request_memory is not None:
        server, requests, of_spare = (
            nbytes // engines for nbytes in (SERVER_NBYTES, request_memory, spare_nbytes)
        )
    left = limit - budget.runtime - budget.weights - budget.rows - budget.draft
    spare = of_spare if warm_spare else 0
    left -= server + requests + spare + kv_connector + grammars
    left -= max(budget.activations + budget.logits, budget.loading)
    if left < 0:
        least = "what kv_transfer_config gets" if kv_connector else "request_memory_bytes"
        shared = f", among {engines} engines" if engines > 1 else ""
        raise ConfigError(
            f"{config.model.model} needs {(limit - left) / 2**20:,.0f} MiB without the KV cache, "
            f"but only {limit / 2**20:,.0f} MiB may be used ({cache.gpu_memory_utilization:.0%} of "
            f"{budget.source}{shared}). Use a smaller model or dtype, or lower "
            f"max_num_batched_tokens, max_num_seqs or {least}."
        )
    max_model_len = resolve_max_model_len(config, spec)
    useful = config.scheduler.max_num_seqs * blocks_for(max_model_len) + 1
    most = min(budget.most_kv_cache // engines, left)
    num_blocks = _num_blocks(cache, block_nbytes, left, most, useful)
    max_model_len = _fit_context(config, blocks_for, num_blocks, block_nbytes, max_model_len)
    if warm_spare is None:
        warm_spare = num_blocks * block_nbytes <= left - of_spare
        spare = of_spare if warm_spare else 0
    plan = MemoryPlan(
        limit=limit,
        runtime=budget.runtime,
        weights=budget.weights,
        activations=budget.activations,
        logits=budget.logits,
        loading=budget.loading,
        rows=budget.rows,
        kv_cache=num_blocks * block_nbytes,
        draft=budget.draft,
        num_blocks=num_blocks,
        block_size=cache.block_size,
        block_nbytes=block_nbytes,
        max_model_len=max_model_len,
        blocks_per_request=blocks_for(max_model_len),
        server=server,
        requests=requests,
        spare=spare,
        warm_spare=warm_spare,
        kv_connector=kv_connector,
        grammars=grammars,
    )
    return plan, KVCacheConfig(num_blocks, cache.block_size, groups)


def _num_blocks(cache: CacheConfig, block_nbytes: int, left: int, most: int, useful: int) -> int:
    """Blocks of the KV cache: as set, or what fits `most` bytes, but no more than are of use."""
    if cache.num_gpu_blocks_override is not None:
        num_blocks = cache.num_gpu_blocks_override
    elif cache.kv_cache_memory_bytes is not None:
        num_blocks = cache.kv_cache_memory_bytes // block_nbytes
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
) -> int:
    """The context that fits the KV cache: `max_model_len`, or less where the settings allow it."""
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
        raise ConfigError(
            f"The KV cache has {num_blocks} blocks, but a single request of max_model_len="
            f"{max_model_len} needs {needed}, and one is kept free. Set max_model_len={fits} (the "
            "largest that fits) or less, or give the cache "
            f"{(needed + 1) * block_nbytes / 2**20:,.1f} MiB."
        )
    return fits


def _longest_that_fits(blocks_for: Callable[[int], int], num_blocks: int, longest: int) -> int:
    """The greatest length up to `longest` that needs at most `num_blocks` blocks."""
    low, high = 0, longest
    while low < high:
        middle = (low + high + 1) // 2
        if blocks_for(middle) <= num_blocks:
            low = middle
        else:
            high = middle - 1
    return low
