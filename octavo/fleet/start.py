"""Start of a server's engines, on this machine or several."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from octavo.checkpoints.identity import model_hash
from octavo.config import EngineConfig
from octavo.engine.checks import check_requirements
from octavo.errors import OctavoError, reason_of
from octavo.fleet.core_launcher import CoreLauncher, with_kv_cache_of
from octavo.fleet.process import CoreProcess
from octavo.fleet.supervisor import Recovery, Supervisor
from octavo.messages import EngineCoreRequest
from octavo.models.hub import local_folder
from octavo.models.open_model import open_model
from octavo.observability.recording import RecordSettings
from octavo.plan.memory_plan import MemoryPlan
from octavo.platforms.registry import get_platform
from octavo.system.device import cpu_memory, num_cpus, numa_cpus

if TYPE_CHECKING:
    from octavo.fleet.data_parallel import DataParallelClient
    from octavo.fleet.elastic_group import ElasticGroup

logger = logging.getLogger(__name__)

Unfinished = Callable[[], list[EngineCoreRequest]]
OnRecovery = Callable[[Recovery], None]


@dataclass(frozen=True)
class EngineProcesses:
    """Settings of the engine processes and of their supervision.

    Attributes:
        progress_timeout: seconds without a sign of life from the engine, busy or idle, after
            which it is replaced; a step may take as long.
        max_engine_restarts: maximum number of replacements of an engine within ten minutes.
        warm_spare: True to keep an interpreter ready for replacements; None: if memory allows.
        process: the first engine process, started or not; None: create one.
        request_memory: bytes that unfinished requests may occupy, here and in the engine.
        log_level: minimum level that the engine process logs.
        log_format: "text" or "json".
        record: settings of the recording, if any.
        reports_steps: True if the engines' outputs contain records of their steps.
    """

    progress_timeout: float = 60.0
    max_engine_restarts: int = 5
    warm_spare: bool | None = None
    process: CoreProcess | None = None
    request_memory: int = 2**30
    log_level: str = "info"
    log_format: str = "text"
    record: RecordSettings | None = None
    reports_steps: bool = False


def share_cores(config: EngineConfig) -> EngineConfig:
    """Return the settings of each engine, with its share of the cores.

    Raises:
        ConfigError: see `check_requirements`.
    """
    size, device = config.parallel.data_parallel_size, config.device
    check_requirements(config, get_platform(device.device))
    if size == 1:
        return config
    cores = num_cpus() if device.numa_node is None else len(numa_cpus(device.numa_node))
    local = config.parallel.num_local_engines
    workers = local * config.world_size
    threads = device.num_threads or max(1, cores // workers)
    if workers * threads > cores:
        logger.warning(
            "%d processes with %d threads each exceed the %d available cores: they wait for each "
            "other, which slows every step",
            workers,
            threads,
            cores,
        )
    replace = msgspec.structs.replace
    return replace(config, device=replace(device, num_threads=threads))


def start_loading(config: EngineConfig, processes: EngineProcesses) -> None:
    """Let `processes.process` load the model before `start_engines`, which continues with it.

    Without effect if there is no such process, if there are several engines, or if a download or
    the begin of a recording must precede the loading.

    Raises:
        ConfigError, ModelError: settings or the model's folder are bad.
        OctavoError: the system lacks resources for sockets.
    """
    process, path = processes.process, local_folder(config.model.model)
    is_alone = config.parallel.of_server().data_parallel_size == 1
    if process is not None and path is not None and is_alone and processes.record is None:
        launcher = _make_launcher(_of_server(config), path, processes)
        try:
            process.start(launcher.make_setup(None, engine_index=0))
        except OSError as error:
            raise OctavoError(f"The engine cannot be started: {reason_of(error)}.") from error


def start_engines(
    config: EngineConfig,
    path: Path,
    tokenizer_path: Path,
    processes: EngineProcesses,
    unfinished: Unfinished,
    on_recovery: OnRecovery,
) -> Supervisor | DataParallelClient | ElasticGroup:
    """Start the engines of a server; return while the model still loads.

    Args:
        config: the engine's settings.
        path: the model's folder.
        tokenizer_path: the tokenizer's folder.
        processes: settings of the processes.
        unfinished: returns the live requests, in order of arrival, as another engine should receive
            them.
        on_recovery: see `Supervisor`.
    """
    if config.scales_experts:
        return _start_elastic_group(config, path, processes, unfinished, on_recovery)
    config = _of_server(config)
    parallel = config.parallel
    size = parallel.data_parallel_size
    launcher = _make_launcher(config, path, processes)
    restarts, timeout = processes.max_engine_restarts, processes.progress_timeout
    if size == 1 and not parallel.enable_elastic_ep:
        return Supervisor(
            launcher,
            unfinished,
            max_restarts=restarts,
            progress_timeout=timeout,
            on_recovery=on_recovery,
            number=parallel.first_engine if parallel.numbered else None,
        )
    from octavo.fleet.data_parallel import DataParallelClient

    remote = parallel.num_local_engines < size
    return DataParallelClient(
        launcher,
        unfinished,
        config=config,
        model=model_hash(open_model(config, path), tokenizer_path) if remote else "",
        max_restarts=restarts,
        progress_timeout=timeout,
        on_recovery=on_recovery,
    )


def _start_elastic_group(
    config: EngineConfig,
    path: Path,
    processes: EngineProcesses,
    unfinished: Unfinished,
    on_recovery: OnRecovery,
) -> ElasticGroup:
    """Start engines that divide the experts, and whose number may change; see `start_engines`."""
    from octavo.fleet.data_parallel import DataParallelClient
    from octavo.fleet.elastic_group import ElasticGroup

    def make(size: int, plan: MemoryPlan | None = None, reserved: int = 0) -> DataParallelClient:
        resized, own, limit = share_cores(config.resized(size)), processes, None
        if plan is not None:
            resized, own = with_kv_cache_of(resized, plan), replace(processes, process=None)
            free = max(0, cpu_memory(config.device.numa_node)[1] - reserved)
            limit = int(free * config.cache.gpu_memory_utilization) // size
        return DataParallelClient(
            _make_launcher(resized, path, own, limit),
            unfinished,
            config=resized,
            max_restarts=processes.max_engine_restarts,
            progress_timeout=processes.progress_timeout,
            on_recovery=on_recovery,
        )

    return ElasticGroup(make, config.parallel.data_parallel_size, unfinished)


def _of_server(config: EngineConfig) -> EngineConfig:
    """Return the settings of each engine of a server."""
    config = msgspec.structs.replace(config, parallel=config.parallel.of_server())
    if config.scales_experts:
        config = config.resized(config.parallel.data_parallel_size)
    return share_cores(config)


def _make_launcher(
    config: EngineConfig,
    path: Path,
    processes: EngineProcesses,
    memory_limit: int | None = None,
) -> CoreLauncher:
    return CoreLauncher(
        config,
        path,
        default_batched_tokens=get_platform(config.device.device).server_batched_tokens,
        request_memory=processes.request_memory,
        warm_spare=processes.warm_spare,
        memory_limit=memory_limit,
        process=processes.process,
        log_level=processes.log_level,
        log_format=processes.log_format,
        record=None if processes.record is None else processes.record.path,
        reports_steps=processes.reports_steps,
    )
