"""Assembly of an engine core from a config: the one place that chooses and connects its parts."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.config import EngineConfig
from octavo.engine.adapters import AdapterInbox
from octavo.engine.checks import check_encoders, check_settings
from octavo.engine.core import EngineCore
from octavo.engine.worker_setup import make_worker_setup
from octavo.errors import GRAMMAR_PACKAGES, ConfigError
from octavo.executor.base import Executor
from octavo.executor.registry import get_executor_class
from octavo.kv_cache.events import KVEventLog
from octavo.kv_cache.groups import KVCacheConfig, find_full_attention, make_kv_cache_groups
from octavo.kv_cache.sessions import SessionShape, find_hits
from octavo.kv_connector.base import KVConnectorScheduler
from octavo.kv_connector.inbox import TransferInbox
from octavo.kv_connector.registry import get_connector
from octavo.models.hub import resolve_folders
from octavo.models.open_model import find_merged, open_model
from octavo.models.registry import unused_generation_settings
from octavo.models.spec import ModelSpec
from octavo.models.weight_cache import read_ahead
from octavo.multimodal.processors.sounds import check_frames
from octavo.observability.profiler import Profiler
from octavo.plan.memory import MemoryBudget, MemoryItem
from octavo.plan.memory_plan import (
    MemoryPlan,
    make_memory_plan,
)
from octavo.plan.setup import Machine, WorkerSetup
from octavo.platforms.registry import get_platform
from octavo.quantization.packed import PackedBlocks
from octavo.sampling.plugins import import_plugins
from octavo.scheduler.listener import LogListener, StepListener
from octavo.scheduler.scheduler import Scheduler
from octavo.structured_output.client import GrammarHelper, HelperSetup
from octavo.structured_output.compiler import COMPILE_NBYTES, grammar_memory
from octavo.structured_output.manager import StructuredOutputManager
from octavo.system import clock
from octavo.system.device import resident_memory
from octavo.system.garbage import no_garbage_collection
from octavo.worker.platform import Platform

if TYPE_CHECKING:
    from octavo.engine.kv_publisher import KVEventPublisher

logger = logging.getLogger(__name__)

_TOKEN_NBYTES = 384
"""Bytes of a loaded tokenizer for each token of the vocabulary: 290 to 480 were measured."""

MakeExecutor = Callable[[WorkerSetup, Platform], Executor]


def grammar_backends() -> Sequence[str]:
    """Return the installed grammar backends; if none is installed, all, for their errors."""
    installed = [name for name in GRAMMAR_PACKAGES if importlib.util.find_spec(name) is not None]
    return installed or list(GRAMMAR_PACKAGES)


@no_garbage_collection()
def make_engine_core(
    config: EngineConfig,
    spec: ModelSpec,
    model_path: Path,
    *,
    default_batched_tokens: int,
    request_memory: int | None = None,
    warm_spare: bool | None = False,
    engine_index: int = 0,
    memory_limit: int | None = None,
    expert_memory: tuple[str, ...] = (),
    machine: Machine | None = None,
    listeners: Sequence[StepListener] = (),
    wake: Callable[[], object] = lambda: None,
    platform: Platform | None = None,
    make_executor: MakeExecutor | None = None,
) -> tuple[EngineCore, MemoryPlan]:
    """Plan the memory, load the model, and build a core.

    Args:
        config: the settings.
        spec: the model.
        model_path: its folder.
        default_batched_tokens: token budget of a step unless the config sets one.
        request_memory: bytes that a server's requests may use; None without a server.
        warm_spare: True to reserve memory for a spare process; None: only if it costs no KV cache.
        engine_index: see `EngineCoreOutputs`.
        memory_limit: bytes that the engine may use; None: its share of the free memory.
        expert_memory: memories of the engines that divide the experts; see `WorkerSetup`.
        machine: this machine, if these engines are on several.
        listeners: observers of the steps, in addition to those that the settings name.
        wake: called, on another thread, when an idle core has work again.
        platform: the device that computes; None: the config's.
        make_executor: creates the executor; None: the config's.

    Raises:
        ConfigError: the memory does not suffice, or settings do not fit the model.
        ModelError: the model folder cannot be used.
    """
    started = time.monotonic()
    # A server logs all details; a program or a chat only the progress.
    details = logging.DEBUG if request_memory is None else logging.INFO
    platform = platform or get_platform(config.device.device)
    setup = set_up_worker(
        config, spec, model_path, platform, default_batched_tokens, engine_index=engine_index
    )
    directory = config.observability.profiler_dir
    profiler = None if directory is None else Profiler(directory)
    if spec.left_out:
        logger.info("%s is run as a text model, without %s", spec.architecture, spec.left_out)
    setup = replace(setup, expert_memory=expert_memory, machine=machine)
    config, budget = setup.config, setup.max_num_batched_tokens
    checkpoint = open_model(config, model_path, setup.dtype)
    if spec.is_encoder_decoder and (unused := unused_generation_settings(checkpoint)):
        logger.info(
            "requests choose a beam search (LLM.beam_search, use_beam_search); not applied: %s of "
            "the model's files",
            ", ".join(unused),
        )
    check_frames(checkpoint, spec)
    for stage in setup.stages:
        read_ahead(config, stage.part, checkpoint, setup.dtype)  # while the memory is planned
    make_executor = make_executor or get_executor_class(config)
    estimate = platform.estimate_memory(setup)
    if estimate is not None:  # reject a plan that does not fit before loading
        plan, kv_cache = plan_memory(
            setup,
            estimate,
            request_memory=request_memory,
            warm_spare=warm_spare,
            limit=memory_limit,
        )
        _log_plan(plan, details)
        _log_hits(config, plan, kv_cache, budget, details)
        setup = _fit_plan(setup, plan, estimate)
    listeners = [*listeners]
    kv_events = None
    if LogListener.is_enabled():
        listeners.append(LogListener())
    if (publisher := _make_kv_publisher(setup, platform, engine_index)) is not None:
        listeners.append(publisher)
        kv_events = publisher.log
    with contextlib.ExitStack() as undo:
        for listener in listeners:
            undo.callback(listener.close)
        executor = make_executor(setup, platform)
        undo.callback(executor.shutdown)
        if estimate is None:
            measured = executor.measure_memory()
            plan, kv_cache = make_memory_plan(
                config,
                spec,
                measured,
                max_num_batched_tokens=budget,
                warm_spare=warm_spare,
                states_per_request=setup.states_per_request,
            )
            _log_plan(plan, details)
            _log_hits(config, plan, kv_cache, budget, details)
        executor.initialize_kv_cache(kv_cache)
        if executor.wave is not None:
            executor.wave.watch(wake)
        connector, transfers = _connect_workers(setup, executor, wake)
        adapters = None
        if config.lora.enable_lora:
            adapters = AdapterInbox(setup.rank.world_size, wake)
            executor.register_adapter_callback(adapters.put)
        scheduler = Scheduler(
            config.scheduler,
            kv_cache,
            max_model_len=plan.max_model_len,
            max_num_batched_tokens=budget,
            enable_caching=config.cache.enable_prefix_caching and not spec.sees_all,
            num_speculative_tokens=setup.num_speculative_tokens,
            max_num_drafts=setup.max_num_drafts,
            num_stages=setup.rank.num_stages,
            clock=clock.now,
            listeners=listeners,
            kv_events=kv_events,
            connector=connector,
            message_ends=spec.eos_token_ids,
            lora=config.lora if config.lora.enable_lora else None,
            encoder_cache_size=setup.encoder_cache_size,
            encoder_pieces=None if estimate is None else setup.encoder_pieces,
        )
        grammars = StructuredOutputManager(
            partial(_start_grammar_helper, config, spec, model_path),
            grammar_backends(),
            spec.vocab_size,
            wake,
        )
        core = EngineCore(
            scheduler,
            executor,
            clock=clock.now,
            structured_output=None if config.model.skip_tokenizer_init else grammars,
            profiler=profiler,
            engine_index=engine_index,
            enable_sleep_mode=config.model.enable_sleep_mode,
            listeners=listeners,
            transfers=transfers,
            adapters=adapters,
        )
        logger.info("model loaded in %.2f s", time.monotonic() - started)
        resident = [resident_memory(pid) for pid in (None, *executor.pids)]
        if estimate is not None and None not in resident:
            logger.log(details, "%s", plan.compare(sum(filter(None, resident))))
        undo.pop_all()
    return core, plan


def set_up_worker(
    config: EngineConfig,
    spec: ModelSpec,
    model_path: Path,
    platform: Platform,
    default_batched_tokens: int,
    engine_index: int = 0,
) -> WorkerSetup:
    """Return the setup of the first worker, after the checks of settings, model and device.

    Args: as for `make_engine_core`.

    Raises:
        ConfigError: settings do not fit each other, the device or the model.
        ModelError: the model folder cannot be used.
    """
    check_settings(config, platform)
    check_encoders(spec, config)
    blocks = {w.form.name for w in spec.weights() if isinstance(w.form, PackedBlocks)}
    if blocks and not platform.is_native(config.device):
        raise ConfigError(
            f"{config.model.model} has weights of the form {', '.join(sorted(blocks))}, which only "
            "the CPU's own kernels support; use device=cpu without attention_backend=triton, or "
            "another checkpoint."
        )
    return make_worker_setup(config, spec, model_path, default_batched_tokens, engine_index)


def plan_memory(
    setup: WorkerSetup,
    estimate: MemoryBudget,
    *,
    request_memory: int | None = None,
    warm_spare: bool | None = False,
    limit: int | None = None,
) -> tuple[MemoryPlan, KVCacheConfig]:
    """Plan the memory of an engine from the platform's estimate; see `make_memory_plan`."""
    config, spec = setup.config, setup.spec
    return make_memory_plan(
        config,
        spec,
        estimate,
        max_num_batched_tokens=setup.max_num_batched_tokens,
        request_memory=request_memory,
        warm_spare=warm_spare,
        limit=limit,
        draft=None if setup.draft is None else setup.draft.spec,
        items=_memory_items(setup),
        states_per_request=setup.states_per_request,
    )


def _fit_plan(setup: WorkerSetup, plan: MemoryPlan, estimate: MemoryBudget) -> WorkerSetup:
    """Return the setup with the context and the scratch memory of the plan."""
    draft = setup.draft
    if draft is not None:
        assert estimate.draft_scratch is not None
        draft = replace(
            draft,
            max_model_len=min(draft.max_model_len, plan.max_model_len),
            scratches=(estimate.draft_scratch,),
        )
    return replace(
        setup, max_model_len=plan.max_model_len, scratches=estimate.scratches, draft=draft
    )


def _connect_workers(
    setup: WorkerSetup, executor: Executor, wake: Callable[[], object]
) -> tuple[KVConnectorScheduler | None, TransferInbox | None]:
    """Return the scheduler's half of the KV connector, and the inbox of the workers' transfers."""
    transfer = setup.config.cache.kv_transfer_config
    if transfer is None:
        return None, None
    connector = get_connector(transfer).make_scheduler_half(setup.config, setup.kv_layout)
    transfers = TransferInbox(setup.rank.world_size, wake)
    executor.register_transfer_callback(transfers.put)
    found: list[Any] = executor.collective_rpc("kv_handshake_metadata")
    connector.set_xfer_handshake_metadata(found)
    return connector, transfers


def _make_kv_publisher(
    setup: WorkerSetup, platform: Platform, engine_index: int
) -> KVEventPublisher | None:
    """Return the publisher of KV events, or None if the settings do not enable it.

    Raises:
        ConfigError: an address cannot be used.
    """
    events, parallel = setup.config.cache.kv_events_config, setup.config.parallel
    if events is None or not events.enable_kv_cache_events or events.publisher == "null":
        return None
    from octavo.engine.kv_publisher import KVEventPublisher

    rank = parallel.first_engine + engine_index
    log = KVEventLog(
        find_full_attention(make_kv_cache_groups(setup.spec.caches)) or 0,
        setup.config.cache.block_size,
        "CPU" if platform.name == "cpu" else "GPU",
    )
    return KVEventPublisher(events, rank if parallel.numbered else None, log)


def _memory_items(setup: WorkerSetup) -> list[MemoryItem]:
    """Return the users of the host's memory besides the model and the server."""
    config, spec = setup.config, setup.spec
    items, transfer = [], config.cache.kv_transfer_config
    if (adapter := find_merged(config)) is not None:
        from octavo.models.merge import merge_nbytes

        nbytes = merge_nbytes(adapter, setup.dtype) * setup.rank.world_size
        items.append(MemoryItem("merging", nbytes, "loading", ", freed before the first step"))
    if transfer is not None:
        nbytes = get_connector(transfer).host_nbytes(transfer)
        items.append(MemoryItem("KV connector", nbytes, note=" for blocks"))
    if spec.generates or config.model.logits_processors:
        # The modules are imported before the plan, here and in each worker process.
        nbytes = import_plugins(config.model.logits_processors) * (1 + config.num_worker_processes)
        items.append(MemoryItem("plug-ins", nbytes, note=" for logits processors, as measured"))
    if (nbytes := setup.encoder_cache_nbytes * setup.rank.size) > 0:  # of the first stage
        note = f" for {setup.encoder_cache_size:,} rows"
        items.append(MemoryItem("encoder cache", nbytes, note=note))
    if kept := kept_media_nbytes(config, spec):
        note = " at most, in the front end and in the engine"
        items.append(MemoryItem("kept media", 2 * kept, "serving", note))
    if not config.model.skip_tokenizer_init:
        items.append(MemoryItem("tokenizer", _TOKEN_NBYTES * spec.vocab_size))
    if spec.generates and not config.model.skip_tokenizer_init:
        note = " at most, for processes of structured output"
        nbytes = grammar_memory(spec.vocab_size, grammar_backends())
        items.append(MemoryItem("grammars", nbytes, "serving", note))
    return items


def kept_media_nbytes(config: EngineConfig, spec: ModelSpec) -> int:
    """Return the most bytes of the media that front ends keep, and also the engine."""
    if not spec.encoders or spec.is_encoder_decoder:
        return 0
    return int(config.model.mm_processor_cache_gb * 2**30)


def _start_grammar_helper(
    config: EngineConfig, spec: ModelSpec, model_path: Path, backend: str
) -> GrammarHelper:
    """Start the process that loads a grammar library and the model's tokenizer.

    Raises:
        OctavoError: the model has no tokenizer.
        OSError: the process cannot be started.
    """
    folder = model_path if config.model.tokenizer is None else resolve_folders(config)[1]
    setup = HelperSetup(
        backend,
        str(folder),
        spec.vocab_size,
        list(spec.eos_token_ids),
        COMPILE_NBYTES,
        config.model.tokenizer_mode,
    )
    return GrammarHelper([sys.executable, "-m", "octavo.structured_output.process"], setup)


def _log_hits(
    config: EngineConfig, plan: MemoryPlan, kv_cache: KVCacheConfig, budget: int, details: int
) -> None:
    """Log the hit rate that the snapshots of recurrent states buy, if the model has such states."""
    if not (plan.num_states and config.cache.enable_prefix_caching):
        return
    if not logger.isEnabledFor(details):
        return
    logger.log(details, "snapshot of a recurrent state: %s", plan.describe_snapshots())
    with contextlib.suppress(ConfigError):  # the context is too short for these sessions
        found = find_hits(
            kv_cache,
            SessionShape(),
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=plan.max_model_len,
        )
        logger.log(details, "prefix cache: %s", found)


def _log_plan(plan: MemoryPlan, details: int) -> None:
    """Log the sum of the memory plan, and its items at the level `details`."""
    total, *lines = plan.report().splitlines()
    logger.info("%s", total)
    for line in lines:
        logger.log(details, "%s", line)
