"""Start of a server's engines, on this machine or several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from octavo.checkpoints.identity import model_hash
from octavo.checkpoints.registry import open_checkpoint
from octavo.config import EngineConfig
from octavo.fleet.core_launcher import CoreLauncher, CoreProcess
from octavo.fleet.data_parallel import DataParallelClient, share_cores
from octavo.fleet.supervisor import Recovery, Supervisor
from octavo.messages import EngineCoreRequest
from octavo.observability.recording import RecordSettings
from octavo.platforms.registry import get_platform

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
        process: the first engine process, not started yet; None: create one.
        request_memory: bytes that unfinished requests may occupy, here and in the engine.
        log_level: minimum level that the engine process logs.
        log_format: "text" or "json".
        record: settings of the recording, if any.
    """

    progress_timeout: float = 60.0
    max_engine_restarts: int = 5
    warm_spare: bool | None = None
    process: CoreProcess | None = None
    request_memory: int = 2**30
    log_level: str = "info"
    log_format: str = "text"
    record: RecordSettings | None = None


def start_engines(
    config: EngineConfig,
    path: Path,
    tokenizer_path: Path,
    processes: EngineProcesses,
    unfinished: Unfinished,
    on_recovery: OnRecovery,
) -> Supervisor | DataParallelClient:
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
    parallel = config.parallel.of_server()
    config = share_cores(msgspec.structs.replace(config, parallel=parallel))
    size = parallel.data_parallel_size
    launcher = CoreLauncher(
        config,
        path,
        default_batched_tokens=get_platform(config.device.device).server_batched_tokens,
        request_memory=processes.request_memory,
        warm_spare=processes.warm_spare,
        process=processes.process,
        log_level=processes.log_level,
        log_format=processes.log_format,
        record=None if processes.record is None else processes.record.path,
    )
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
    remote = parallel.num_local_engines < size
    return DataParallelClient(
        launcher,
        unfinished,
        config=config,
        model=model_hash(open_checkpoint(path, config.load.load_format), tokenizer_path)
        if remote
        else "",
        max_restarts=restarts,
        progress_timeout=timeout,
        on_recovery=on_recovery,
    )
