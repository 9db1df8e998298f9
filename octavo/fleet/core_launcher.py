"""Launcher of an engine's processes, with their setups and spares."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec

from octavo.config import EngineConfig
from octavo.engine.core_messages import CoreProcessSetup, CoreReady
from octavo.errors import reason_of
from octavo.fleet.expert_memory import ExpertMemory
from octavo.fleet.process import CoreProcess
from octavo.plan.group_layout import ExpertGroupLayout
from octavo.plan.memory_plan import MemoryPlan
from octavo.plan.setup import Machine
from octavo.system.distributed import GroupMemory

logger = logging.getLogger(__name__)


def usable_process(spare: CoreProcess | None, warm: EngineConfig | None = None) -> CoreProcess:
    """Return the spare if it is usable; otherwise end it and return a new process.

    Args:
        spare: process that was started earlier, if any.
        warm: see `CoreProcess`; for a new process.

    Raises:
        OSError: the system lacks resources for the process.
    """
    if spare is not None:
        if spare.usable:
            return spare
        spare.shutdown(0.0)
    return CoreProcess(warm=warm)


def usable_spare(spare: CoreProcess | None, warm: EngineConfig) -> CoreProcess | None:
    """Return a usable spare, see `usable_process`; None if the system lacks resources."""
    try:
        return usable_process(spare, warm)
    except OSError as error:
        logger.warning("there is no warm spare: %s", reason_of(error))
        return None


class CoreLauncher:
    """Launcher of an engine's first process and of its replacements.

    Args:
        config: the engine's settings.
        model_path: the model's folder.
        default_batched_tokens: see `make_engine_core`.
        request_memory: see `make_engine_core`.
        warm_spare: see `make_engine_core`.
        memory_limit: bytes that the first process may use; None: its share of the free memory.
        process: the first process, started or not; None: create one.
        log_level: minimum level that a process logs.
        log_format: "text" or "json".
        record: the recording that the processes add to, if any.
        reports_steps: True if the processes send records of their steps.

    Raises:
        ConfigError: engines that divide experts do not work on this system; see `ExpertMemory`.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_path: Path,
        *,
        default_batched_tokens: int,
        request_memory: int | None,
        warm_spare: bool | None,
        memory_limit: int | None = None,
        process: CoreProcess | None = None,
        log_level: str,
        log_format: str,
        record: str | None = None,
        reports_steps: bool = False,
    ) -> None:
        self._config = config
        self._model_path = model_path
        self._default_batched_tokens = default_batched_tokens
        self._request_memory = request_memory
        self._warm_spare = warm_spare
        self._memory_limit = memory_limit
        self._log_level, self._log_format = log_level, log_format
        self._record, self._reports_steps = record, reports_steps
        self._spare = process
        processes, parallel = config.device.tensor_parallel_size, config.parallel
        ranks = processes * parallel.num_local_engines
        has_relay = parallel.num_local_engines < parallel.data_parallel_size
        self._expert_group = ExpertGroupLayout(ranks + has_relay, processes)
        self._memory: ExpertMemory | None = None
        """Memory of engines that divide experts."""
        if config.divides_experts:
            self._memory = ExpertMemory(config.device.pipeline_parallel_size)
        self._machine: Machine | None = None
        """This machine, if these engines are on several."""
        self._generations: dict[int, bytes] = {}
        """Generation of each engine's last process."""

    def span(self, machine: Machine) -> None:
        """Divide the experts among engines on several machines, of which this one is the head."""
        self._machine = machine

    def begin_generation(self) -> None:
        """Start later processes apart from all earlier ones, which are killed."""
        assert self._machine is not None
        assert self._memory is not None
        self._machine = msgspec.structs.replace(self._machine, generation=os.urandom(16))
        self._memory.renew()

    def is_outdated(self, engine_index: int) -> bool:
        """Return True if an engine's last process belongs to an earlier generation."""
        assert self._machine is not None
        return self._generations.get(engine_index) != self._machine.generation

    def launch(self, ready: CoreReady | None, engine_index: int = 0) -> CoreProcess:
        """Start a process.

        Args:
            ready: answer of the first process, so that KV cache and context stay the same with any
                amount of free memory; None: this is the first process.
            engine_index: index of the engine among several, see `EngineCoreOutputs`.

        Raises:
            OSError: the system lacks resources for the process.
        """
        spare, self._spare = self._spare, None
        if spare is not None and spare.started:
            return spare
        process = usable_process(spare)
        try:
            process.start(self.make_setup(ready, engine_index))
        except OSError:
            process.shutdown(0.0)
            raise
        self.note_launch(engine_index)
        return process

    def note_launch(self, engine_index: int) -> None:
        """Record that a process of an engine was started, here or on another machine."""
        if self._machine is not None:
            self._generations[engine_index] = self._machine.generation

    def make_setup(self, ready: CoreReady | None, engine_index: int) -> CoreProcessSetup:
        """Return the setup of a process; see `launch`."""
        config, warm_spare = self._config, self._warm_spare
        memory_limit = self._memory_limit
        if ready is not None:
            memory_limit = None
            config, warm_spare = with_kv_cache_of(config, ready.plan), ready.plan.warm_spare
            if config.parallel.data_parallel_size > 1:  # other engines need the free memory, too
                memory_limit = ready.plan.limit
        return CoreProcessSetup(
            config=config,
            model_path=str(self._model_path),
            default_batched_tokens=self._default_batched_tokens,
            request_memory=self._request_memory,
            warm_spare=warm_spare,
            memory_limit=memory_limit,
            engine_index=engine_index,
            expert_memory=() if self._memory is None else self._memory.paths,
            machine=self._machine,
            log_level=self._log_level,
            log_format=self._log_format,
            record=self._record,
            reports_steps=self._reports_steps,
        )

    def make_spare(self) -> None:
        """Start a spare interpreter that a later process can use, if none exists."""
        self._spare = usable_spare(self._spare, self._config)

    def shutdown(self) -> None:
        """End the spare. May be called twice."""
        spare, self._spare = self._spare, None
        if spare is not None:
            spare.shutdown(0.0)

    def close(self) -> None:
        """Free what all engines share, once they have ended. May be called twice."""
        if self._memory is not None:
            self._memory.close()

    def engines_behind(self) -> list[int]:
        """Return the engines that others wait for, since they divide the experts of a step.

        If these wait for other machines, it is not known for which engine there; the result is the
        first one.
        """
        begin, layout = GroupMemory.size(0), self._expert_group
        found = []
        for descriptor in () if self._memory is None else self._memory.descriptors:
            counters = os.pread(descriptor, layout.nbytes, begin)
            if behind := layout.behind(counters):
                found.append((layout.newest_step(counters), behind))
        # Stages that wait in later steps, or behind this one, wait for this one.
        return min(found, key=lambda it: it[0])[1] if found else []


def with_kv_cache_of(config: EngineConfig, plan: MemoryPlan) -> EngineConfig:
    """Return settings with the resolved KV cache and context.

    Args:
        config: the settings.
        plan: the memory plan that was made from them.
    """
    replace = msgspec.structs.replace
    return replace(
        config,
        model=replace(config.model, max_model_len=plan.max_model_len),
        cache=replace(
            config.cache, num_gpu_blocks_override=plan.num_blocks, kv_cache_memory_bytes=None
        ),
    )
