"""From a config to an engine core: the one place where its parts are chosen and put together."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.checkpoints.identity import model_hash
from octavo.checkpoints.registry import open_checkpoint
from octavo.config import EngineConfig, SpeculationConfig
from octavo.engine.checks import check_settings
from octavo.engine.core import EngineCore
from octavo.errors import ConfigError
from octavo.executor.base import Executor
from octavo.executor.registry import get_executor_class
from octavo.kv_cache.events import KVEventLog
from octavo.kv_cache.groups import find_full_attention, make_kv_cache_groups
from octavo.kv_connector.inbox import TransferInbox
from octavo.kv_connector.registry import get_connector
from octavo.models.drafts import find_draft
from octavo.models.heads import EagleSpec
from octavo.models.hub import resolve_folders
from octavo.models.spec import ModelSpec
from octavo.models.weight_cache import read_ahead
from octavo.observability.profiler import Profiler
from octavo.plan.memory import MemoryItem
from octavo.plan.memory_plan import (
    MemoryPlan,
    make_memory_plan,
    resolve_dtype,
    resolve_max_model_len,
    resolve_max_num_batched_tokens,
)
from octavo.plan.setup import WorkerSetup
from octavo.platforms.registry import get_platform
from octavo.scheduler.listener import LogListener, StepListener
from octavo.scheduler.scheduler import Scheduler
from octavo.structured_output.client import GrammarHelper, HelperSetup
from octavo.structured_output.compiler import COMPILE_NBYTES, grammar_memory
from octavo.structured_output.manager import StructuredOutputManager
from octavo.system import clock
from octavo.system.device import num_cpus, resident_memory
from octavo.system.distributed import Rank
from octavo.worker.platform import Platform

if TYPE_CHECKING:
    from octavo.engine.kv_publisher import KVEventPublisher

logger = logging.getLogger(__name__)

GRAMMAR_BACKENDS = ("llguidance", "xgrammar")
"""Grammar backends, in order of preference."""

MakeExecutor = Callable[[WorkerSetup, Platform], Executor]


def grammar_backends() -> Sequence[str]:
    """Return the installed grammar backends; all if none is, so that their errors say so."""
    installed = [name for name in GRAMMAR_BACKENDS if importlib.util.find_spec(name) is not None]
    return installed or GRAMMAR_BACKENDS


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
    listeners: Sequence[StepListener] = (),
    wake: Callable[[], object] = lambda: None,
    platform: Platform | None = None,
    make_executor: MakeExecutor | None = None,
) -> tuple[EngineCore, MemoryPlan]:
    """Plans the memory, loads the model, and puts a core together.

    Args:
        config: the settings.
        spec: the model.
        model_path: its folder.
        default_batched_tokens: token budget of a step where the config sets none.
        request_memory: bytes that a server's requests may take; None: there is no server.
        warm_spare: whether there is room for a spare process; None: if it costs no KV cache.
        engine_index: see `EngineCoreOutputs`.
        memory_limit: bytes that the engine may use; None: its share of what is free.
        listeners: watch the steps, in addition to those that the settings name.
        wake: called, on another thread, when an idle core has work again.
        platform: default: the config's.
        make_executor: default: what the config says.

    Raises:
        ConfigError: if the memory does not suffice or settings do not fit the model.
        ModelError: if the model folder cannot be used.
    """
    started = time.monotonic()
    # Who serves others wants to know all of it; a program or a chat of one's own, that it goes on.
    details = logging.DEBUG if request_memory is None else logging.INFO
    platform = platform or get_platform(config.device.device)
    check_settings(config, platform)
    directory = config.observability.profiler_dir
    profiler = None if directory is None else Profiler(directory)
    budget = resolve_max_num_batched_tokens(config, default_batched_tokens, spec.max_model_len)
    setup = WorkerSetup(
        config=config,
        spec=spec,
        model_path=model_path,
        dtype=resolve_dtype(config, spec),
        max_model_len=resolve_max_model_len(config, spec),
        max_num_batched_tokens=budget,
        rank=Rank.of(0, config.device),
    )
    setup = _with_draft(setup)
    if config.cache.kv_transfer_config is not None:
        setup = _with_connector(setup, engine_index)
        config = setup.config
    draft = setup.draft
    if setup.rank.world_size > 1:
        _check_parallel(setup)
    checkpoint = open_checkpoint(model_path, config.load.load_format)
    for stage in setup.stages:
        read_ahead(config, stage.part, checkpoint, setup.dtype)  # while torch is imported
    make_executor = make_executor or import_executor(config)
    estimate = platform.estimate_memory(setup)
    if estimate is not None:  # what does not fit is refused before anything is loaded
        plan, kv_cache = make_memory_plan(
            config,
            spec,
            estimate,
            max_num_batched_tokens=budget,
            request_memory=request_memory,
            warm_spare=warm_spare,
            limit=memory_limit,
            draft=None if draft is None else draft.spec,
            items=_memory_items(config, spec),
        )
        _log_plan(plan, details)
        setup = replace(setup, max_model_len=plan.max_model_len, scratches=estimate.scratches)
        if draft is not None:
            length = min(draft.max_model_len, plan.max_model_len)
            assert estimate.draft_scratch is not None
            draft = replace(draft, max_model_len=length, scratches=(estimate.draft_scratch,))
            setup = replace(setup, draft=draft)
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
                config, spec, measured, max_num_batched_tokens=budget, warm_spare=warm_spare
            )
            _log_plan(plan, details)
        executor.initialize_kv_cache(kv_cache)
        connector = transfers = None
        if (transfer := config.cache.kv_transfer_config) is not None:
            kind = get_connector(transfer)
            connector = kind.make_scheduler_half(config, setup.kv_layout)
            transfers = TransferInbox(setup.rank.world_size, wake)
            executor.register_transfer_callback(transfers.put)
            found: list[Any] = executor.collective_rpc("kv_handshake_metadata")
            connector.set_xfer_handshake_metadata(found)
        scheduler = Scheduler(
            config.scheduler,
            kv_cache,
            max_model_len=plan.max_model_len,
            max_num_batched_tokens=budget,
            enable_caching=config.cache.enable_prefix_caching,
            num_speculative_tokens=setup.num_speculative_tokens,
            max_num_drafts=setup.max_num_drafts,
            num_stages=setup.rank.num_stages,
            clock=clock.now,
            listeners=listeners,
            kv_events=kv_events,
            connector=connector,
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
        )
        logger.info("model loaded in %.2f s", time.monotonic() - started)
        resident = [resident_memory(pid) for pid in (None, *executor.pids)]
        if estimate is not None and None not in resident:
            logger.log(details, "%s", plan.compare(sum(filter(None, resident))))
        undo.pop_all()
    return core, plan


def _make_kv_publisher(
    setup: WorkerSetup, platform: Platform, engine_index: int
) -> KVEventPublisher | None:
    """Return the publisher of KV events; None unless the settings enable it.

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


def _with_connector(setup: WorkerSetup, engine_index: int) -> WorkerSetup:
    """The same with what a KV connector must know of the model and the engine."""
    config, model = setup.config, setup.config.model
    transfer = config.cache.kv_transfer_config
    assert transfer is not None
    if transfer.engine_id is None:
        number = str(config.parallel.first_engine + engine_index)
        transfer = msgspec.structs.replace(transfer, engine_id=number)
    cache = msgspec.structs.replace(config.cache, kv_transfer_config=transfer)
    load_format = config.load.load_format
    seed = model.seed if load_format == "dummy" else None
    found = model_hash(open_checkpoint(setup.model_path, load_format), setup.model_path)
    overrides = msgspec.json.encode(model.hf_overrides, order="sorted").decode()
    identity = (found, setup.dtype, model.quantization, load_format, seed, setup.max_model_len)
    return replace(
        setup,
        config=msgspec.structs.replace(config, cache=cache),
        model_identity=" ".join(map(str, [*identity, overrides])),
    )


def _memory_items(config: EngineConfig, spec: ModelSpec) -> list[MemoryItem]:
    """Return the users of the host's memory besides the model and the server."""
    items, transfer = [], config.cache.kv_transfer_config
    if transfer is not None:
        nbytes = get_connector(transfer).host_nbytes(transfer)
        items.append(MemoryItem("KV connector", nbytes, note=" for blocks"))
    if not config.model.skip_tokenizer_init:
        note = " at most, for processes of structured output"
        items.append(MemoryItem("grammars", grammar_memory(spec.vocab_size), "serving", note))
    return items


def _check_parallel(setup: WorkerSetup) -> None:
    """Refuses what several ranks cannot do together.

    Raises:
        ConfigError: naming the setting.
    """
    config, rank = setup.config, setup.rank
    if rank.splits_rows and setup.kept_layers:
        raise ConfigError(
            "enable_sequence_parallel is not supported with a drafter that reads several layers "
            "of the model (EAGLE-3); leave one of the two out."
        )
    cores, threads = num_cpus(), config.device.num_threads or 1
    if config.parallel.data_parallel_size == 1 and rank.world_size * threads > cores:
        logger.warning(
            "%d processes with %d threads each are more than the %d cores there are for them: they "
            "wait for each other%s",
            rank.world_size,
            threads,
            cores,
            " at every layer, and a step takes many times as long" if rank.size > 1 else "",
        )


def _with_draft(setup: WorkerSetup) -> WorkerSetup:
    """The same with the model that drafts, if there is to be one, and the method that it means."""
    config = setup.config
    found = find_draft(config, setup.spec)
    if found is None:
        return setup
    if found.spec.caches and find_full_attention(make_kv_cache_groups(setup.spec.caches)) is None:
        raise ConfigError(
            f"speculative_config: all layers of {config.model.model} have sliding windows, and a "
            "draft model needs one layer without; use method ngram or suffix."
        )
    speculative = config.speculation.speculative_config
    assert speculative is not None
    speculative = msgspec.structs.replace(
        speculative,
        method=found.method,
        num_speculative_tokens=speculative.num_speculative_tokens or found.num_heads,
    )
    draft = WorkerSetup(
        config=msgspec.structs.replace(
            config,
            speculation=SpeculationConfig(),
            model=msgspec.structs.replace(config.model, enable_prompt_embeds=False),
        ),
        spec=found.spec,
        model_path=found.path,
        dtype=setup.dtype,
        max_model_len=min(setup.max_model_len, found.spec.max_model_len),
        max_num_batched_tokens=setup.max_num_batched_tokens,
    )
    speculation = SpeculationConfig(speculative_config=speculative)
    return replace(
        setup,
        config=msgspec.structs.replace(config, speculation=speculation),
        kept_layers=found.spec.kept_layers if isinstance(found.spec, EagleSpec) else (),
        draft=draft,
    )


def _start_grammar_helper(
    config: EngineConfig, spec: ModelSpec, model_path: Path, backend: str
) -> GrammarHelper:
    """Start the process that loads a grammar library and the model's tokenizer.

    Raises:
        OctavoError: there is no tokenizer.
        OSError: the process cannot be started.
    """
    folder = model_path if config.model.tokenizer is None else resolve_folders(config)[1]
    setup = HelperSetup(
        backend, str(folder), spec.vocab_size, list(spec.eos_token_ids), COMPILE_NBYTES
    )
    return GrammarHelper([sys.executable, "-m", "octavo.structured_output.process"], setup)


def _log_plan(plan: MemoryPlan, details: int) -> None:
    """Logs the sum, and at the level `details` what it is made of."""
    total, *lines = plan.report().splitlines()
    logger.info("%s", total)
    for line in lines:
        logger.log(details, "%s", line)


def import_executor(config: EngineConfig | None = None) -> MakeExecutor:
    """The executor; with workers in this process also torch: what takes longest of a start.

    That import makes some 200,000 objects that stay: looking through them again and again for
    garbage would take a tenth of its time.

    Args:
        config: the settings; None: they are not known yet.

    Raises:
        ConfigError: see `get_executor_class`.
    """
    with _no_garbage_collection():
        return get_executor_class(config or EngineConfig())


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()
