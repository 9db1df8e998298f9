"""Worker of one device: owns its threads, its model runner and its share of the memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from octavo.errors import EngineDeadError, StepLostError
from octavo.kv_cache.groups import KVCacheConfig
from octavo.messages import AdapterLoaded, GrammarOutput, KVConnectorOutput, SchedulerOutput
from octavo.observability.profiler import drain_kernels, span
from octavo.plan.memory import MemoryBudget
from octavo.plan.setup import WorkerSetup
from octavo.system.device import trim_memory
from octavo.system.distributed import group_failure
from octavo.worker.adapters import AdapterStore, ModelAdapters
from octavo.worker.following import FollowingRunner
from octavo.worker.kv_transfer import KVTransfers, make_transfers
from octavo.worker.model_runner import Drafts, ModelRunner, PendingOutput
from octavo.worker.platform import Platform
from octavo.worker.spec_decode.registry import make_proposer


class Worker:
    """Owner of the model runner, which computes the steps.

    Args:
        setup: the worker's setup.
        platform: the device's platform.

    Raises:
        ConfigError: the device cannot be used, or the model does not fit it.
    """

    def __init__(self, setup: WorkerSetup, platform: Platform) -> None:
        self._platform = platform
        self.device = platform.open_device(setup)
        self._allocated_before = platform.allocated_nbytes(self.device)
        with self._platform.computing("loading the model"):
            more = (make_proposer,) if setup.rank.drafts else ()
            runner = ModelRunner if setup.rank.samples else FollowingRunner
            self._runner: ModelRunner | None = runner(setup, platform, self.device, *more)
        self._transfers: KVTransfers | None = None
        self._on_transfer: Callable[[KVConnectorOutput], object] = lambda output: None
        self._on_adapter: Callable[[AdapterLoaded], object] = lambda loaded: None
        self._adapters: AdapterStore | None = None
        if self._runner.adapters is not None:
            with self._platform.computing("allocating the memory of adapters"):
                model = ModelAdapters(
                    setup,
                    platform,
                    self._runner.ops,
                    self._runner.adapters,
                    self._runner.open_checkpoint,
                )
                self._adapters = AdapterStore(
                    platform, self.device, model, lambda loaded: self._on_adapter(loaded)
                )
        self._step = 0  # number of the current one; the engine core counts in the same way

    @property
    def runner(self) -> ModelRunner:
        """Model runner."""
        assert self._runner is not None, "the worker has been shut down"
        return self._runner

    def measure_memory(self) -> MemoryBudget:
        """Implement `Executor.measure_memory`."""
        with self._platform.computing("running the largest step"):
            return self._platform.measure_memory(
                self.runner.setup,
                self.device,
                self.runner.run_largest_step,
                self._allocated_before,
                0 if self._adapters is None else self._adapters.model.nbytes,
            )

    def initialize_kv_cache(self, kv_cache: KVCacheConfig) -> None:
        """Implement `Executor.initialize_kv_cache`."""
        with self._platform.computing("allocating the KV cache and capturing steps"):
            self.runner.initialize_kv_cache(kv_cache)
        proposer = self.runner.state.proposer
        if self._adapters is not None and proposer is not None:
            self._adapters.drafter = proposer.adapters
        self._transfers = make_transfers(
            self.runner, kv_cache.num_blocks, lambda output: self._on_transfer(output)
        )

    def register_transfer_callback(self, callback: Callable[[KVConnectorOutput], object]) -> None:
        """Implement `Executor`."""
        self._on_transfer = callback

    def register_adapter_callback(self, callback: Callable[[AdapterLoaded], object]) -> None:
        """Implement `Executor`."""
        self._on_adapter = callback

    def kv_handshake_metadata(self) -> Any:
        """Return this rank's metadata for the scheduler's half of a KV connector."""
        return None if self._transfers is None else self._transfers.handshake_metadata()

    def execute_model(
        self, scheduler_output: SchedulerOutput, announce: Callable[[Drafts], None]
    ) -> None:
        """Run the forward pass of a step; call `announce` with its drafts before."""
        self._step += 1
        with self._platform.computing("running a step"), span("execute_model") as note:
            note(
                step=self._step,
                requests=len(scheduler_output.scheduled_reqs),
                tokens=scheduler_output.total_num_scheduled_tokens,
            )
            try:
                if self._adapters is not None:
                    self._adapters.begin_step(scheduler_output.adapter_changes)
                if self._transfers is None:
                    self.runner.execute_model(scheduler_output, announce)
                else:
                    with self._transfers.step(scheduler_output):
                        self.runner.execute_model(scheduler_output, announce)
            except BaseException:
                self._break_group()
                raise

    def sample_tokens(self, grammar: GrammarOutput | None = None) -> PendingOutput:
        """Sample the tokens of the last step; see `StepHandle.sample`."""
        with self._platform.computing("sampling"), span("sample_tokens") as note:
            note(step=self._step)
            try:
                output = self.runner.sample_tokens(grammar)
            except BaseException:
                self._break_group()
                raise
        drain_kernels()
        return output

    def expert_loads(self) -> list[tuple[int, list[int]]]:
        """Return the tokens of each expert over all steps, with the layer's index.

        Ranks with the same layers count the same; only the first of them answers.
        """
        runner = self.runner
        if runner.expert_loads is None or runner.setup.rank.index > 0:
            return []
        return runner.expert_loads.by_layer()

    def sleep(self) -> None:
        """Release the memory of weights and KV cache to the system.

        No step may run until `reload_weights` returns. The KV cache needs no reload: the system
        allocates its memory again, empty, when steps use it.
        """
        if self._adapters is not None:
            self._adapters.wait()  # they may need the weights
        self.runner.sleep()
        trim_memory()

    def memory_to_reload(self) -> tuple[int, int]:
        """Return the bytes that `reload_weights` and the KV cache will need, and the free bytes.

        All workers of this machine share the free bytes.
        """
        return self.runner.memory_to_reload()

    def reload_weights(self, *, same: bool = False) -> None:
        """Read the weights of all models again.

        Args:
            same: True to require the weights that were loaded before; False to load the current
                ones of the folders.

        Raises:
            ModelError: the weights cannot be read, or have changed; steps must not run.
        """
        self.runner.reload_weights(same=same)
        if self._adapters is not None and not same:
            self._adapters.reload()

    def cause(self, error: BaseException) -> BaseException:
        """Return the cause of a step's failure: `EngineDeadError` if the device is unusable.

        In a group of ranks every failure is an `EngineDeadError`: a rank does not know the state
        of the others.
        """
        if isinstance(error, StepLostError | EngineDeadError):
            return error
        if self.runner.group is not None:
            return group_failure(error)
        return self._platform.cause(self.device, error)

    def _break_group(self) -> None:
        """Stop other ranks from waiting for this one, which has failed."""
        if self.runner.group is not None:
            self.runner.group.memory.break_()

    def shutdown(self) -> None:
        """Release the model and the KV cache."""
        if self._transfers is not None:
            self._transfers.shutdown()
            self._transfers = None
        if self._adapters is not None:
            self._adapters.shutdown()
            self._adapters = None
        if self._runner is not None and self._runner.expert_relay is not None:
            self._runner.expert_relay.close()
        self._runner = None
