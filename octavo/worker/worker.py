"""A worker owns one device: its threads, its model runner, its share of the memory."""

from __future__ import annotations

import torch

from octavo.device import bind_to_numa_node, select_device, set_num_threads
from octavo.messages import ModelRunnerOutput, SchedulerOutput
from octavo.profiler import drain_kernels, span
from octavo.worker.model_runner import ModelRunner
from octavo.worker.setup import WorkerSetup


class Worker:
    """Builds the model runner and passes steps on to it."""

    def __init__(self, setup: WorkerSetup) -> None:
        config = setup.config.device
        device = select_device(config.device)
        if device.type == "cpu":
            # Before the pool starts and weights are read: both inherit it from this thread.
            if config.numa_node is not None:
                bind_to_numa_node(config.numa_node)
            set_num_threads(config.num_threads)
        with torch.inference_mode():
            self._runner: ModelRunner | None = ModelRunner(setup, device)
        self._step = 0  # number of the current one: the engine core counts alike

    @property
    def runner(self) -> ModelRunner:
        """The model runner."""
        assert self._runner is not None, "the worker has been shut down"
        return self._runner

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        """Runs the forward pass of a step."""
        self._step += 1
        with torch.inference_mode(), span("execute_model") as note:
            note(
                step=self._step,
                requests=len(scheduler_output.num_scheduled_tokens),
                tokens=scheduler_output.total_num_scheduled_tokens,
            )
            self.runner.execute_model(scheduler_output)

    def sample_tokens(self) -> ModelRunnerOutput:
        """Samples the tokens of the step run last."""
        with torch.inference_mode(), span("sample_tokens") as note:
            note(step=self._step)
            output = self.runner.sample_tokens()
        drain_kernels()
        return output

    def shutdown(self) -> None:
        """Lets go of the model and the KV cache."""
        self._runner = None
