"""A worker owns one device: its threads, its model runner, its share of the memory."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch

from octavo.device import (
    SWITCH_INTERVAL,
    bind_to_numa_node,
    cuda_memory,
    cuda_name,
    select_device,
    set_num_threads,
)
from octavo.errors import ConfigError, EngineDeadError
from octavo.kv_cache.groups import KVCacheConfig
from octavo.messages import GrammarOutput, SchedulerOutput
from octavo.profiler import drain_kernels, span
from octavo.worker.memory import DeviceMemory
from octavo.worker.model_runner import ModelRunner, PendingOutput
from octavo.worker.setup import WorkerSetup

_GRAPH_NBYTES = 4 * 2**20  # the launches of a captured step


class Worker:
    """Builds the model runner and passes steps on to it.

    Raises:
        ConfigError: if the device cannot be used, or the model does not fit it.
    """

    def __init__(self, setup: WorkerSetup) -> None:
        config = setup.config.device
        self.device = device = select_device(config.device, setup.dtype)
        if device.type == "cpu":
            # Before the pool starts and weights are read: both inherit it from this thread.
            if config.numa_node is not None:
                bind_to_numa_node(config.numa_node)
            set_num_threads(config.num_threads)
        else:
            for name in ("num_threads", "numa_node"):
                if getattr(config, name) is not None:
                    raise ConfigError(
                        f"{name}={getattr(config, name)} is for device=cpu, and this is "
                        f"{device}; leave it out, or set device=cpu."
                    )
            sys.setswitchinterval(SWITCH_INTERVAL)
            _check_weights(setup, device)
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
        with torch.inference_mode(), _out_of_memory("loading the model"):
            self._runner: ModelRunner | None = ModelRunner(setup, device)
        self._others = before  # bytes that this process had on the device already
        self._step = 0  # number of the current one: the engine core counts alike

    @property
    def runner(self) -> ModelRunner:
        """The model runner."""
        assert self._runner is not None, "the worker has been shut down"
        return self._runner

    def measure_memory(self) -> DeviceMemory:
        """See `Executor.measure_memory`."""
        loaded = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        with torch.inference_mode(), _out_of_memory("running the largest step"):
            kv_nbytes, graphs = self.runner.run_largest_step()
        step = torch.cuda.max_memory_allocated(self.device) - loaded - kv_nbytes
        if graphs:  # beside what other steps compute, the captured ones hold what the largest does
            setup, vocab_size = self.runner.setup, self.runner.spec.vocab_size
            rows = setup.config.scheduler.max_num_seqs
            # The measured step's activations are those of each token, times the tokens.
            step += -(-step * rows // setup.max_num_batched_tokens)
            step += graphs * _GRAPH_NBYTES + 4 * rows * vocab_size
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        total, free = cuda_memory(self.device)
        return DeviceMemory(
            total=total,
            foreign=total - free - torch.cuda.memory_reserved(self.device) + self._others,
            weights=loaded - self._others,
            step=step,
        )

    def initialize_kv_cache(self, kv_cache: KVCacheConfig) -> None:
        """See `Executor.initialize_kv_cache`."""
        with torch.inference_mode(), _out_of_memory("allocating the KV cache and capturing steps"):
            self.runner.initialize_kv_cache(kv_cache)

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Runs the forward pass of a step."""
        self._step += 1
        with torch.inference_mode(), span("execute_model") as note:
            note(
                step=self._step,
                requests=len(scheduler_output.scheduled_reqs),
                tokens=scheduler_output.total_num_scheduled_tokens,
            )
            self.runner.execute_model(scheduler_output)

    def sample_tokens(self, grammar: GrammarOutput | None = None) -> PendingOutput:
        """Samples the tokens of the step run last."""
        with torch.inference_mode(), span("sample_tokens") as note:
            note(step=self._step)
            output = self.runner.sample_tokens(grammar)
        drain_kernels()
        return output

    def cause(self, error: BaseException) -> BaseException:
        """What a step's failure means: on a GPU that cannot be used any more, `EngineDeadError`."""
        if self.device.type == "cuda":
            try:
                torch.cuda.synchronize(self.device)
            except Exception as lost:
                return EngineDeadError(f"The GPU failed, and the engine with it: {lost}")
        return error

    def shutdown(self) -> None:
        """Lets go of the model and the KV cache."""
        self._runner = None


@contextlib.contextmanager
def _out_of_memory(what: str) -> Iterator[None]:
    """Says what helps where the device's memory does not suffice."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            f"The GPU's memory ran out while {what}: {error}. Lower gpu_memory_utilization (other "
            "processes need their share), max_num_batched_tokens or max_num_seqs, or take a "
            "smaller model."
        ) from error


def _check_weights(setup: WorkerSetup, device: torch.device) -> None:
    """Refuses a model that cannot fit before it is loaded."""
    config = setup.config
    if config.model.quantization is not None:
        raise ConfigError(
            f"quantization={config.model.quantization} is not supported on CUDA yet; leave it out, "
            "or use device=cpu."
        )
    weights = setup.spec.weight_nbytes(setup.dtype, setup.max_model_len, None)
    total, free = cuda_memory(device)
    if weights > min(free, total * config.cache.gpu_memory_utilization):
        raise ConfigError(
            f"{config.model.model} takes {weights / 2**20:,.0f} MiB in {setup.dtype}, and "
            f"{cuda_name(device)} has {free / 2**20:,.0f} MiB free of "
            f"{total / 2**20:,.0f} MiB. Take a smaller model or dtype, or device=cpu."
        )
