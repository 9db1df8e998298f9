"""Expected times of `octavo plan`: the cost of a few steps, priced for a machine."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from octavo import _native
from octavo.config import BUILTIN_MODEL
from octavo.llm import LLM
from octavo.models.spec import ModelSpec
from octavo.models.weights import Weight
from octavo.plan.setup import WorkerSetup
from octavo.plan.step_cost import Batch, Load, Machine, StepCost
from octavo.platforms.cpu import CPUPlatform
from octavo.sampling_params import SamplingParams
from octavo.system.device import num_cpus
from octavo.system.distributed import ALONE
from octavo.worker.memory_trial import MemoryTrial
from octavo.worker.scratch import measure_scratch
from octavo.worker.step_trial import StepTrial

_MOST_BYTES = 256 * 2**20
"""Most bytes that a measurement of the memory reads; they exceed the caches."""
_HOST_STEPS = 32
"""Steps of the engine that measure the host's part."""


class Trial(Protocol):
    """Source of the costs of a model's steps; see `StepTrial`."""

    def run(self, batch: Batch) -> StepCost:
        """Return the cost of a step, without the host's part."""
        ...


class Probe(Protocol):
    """Measurement of a machine."""

    cores: int
    """Number of cores that compute."""

    def memory(self, nbytes: float, weight: Weight, dtype: str, num_reqs: int) -> Machine:
        """Return the machine for steps of `num_reqs` requests that read `nbytes`.

        Most of these are of weights of the given shape and form.
        """
        ...

    def host(self, num_reqs: int) -> float:
        """Return the seconds of a step of `num_reqs` requests outside of the kernels."""
        ...

    def trial(self, setup: WorkerSetup, max_len: int) -> Trial:
        """Return a trial of a model's steps with contexts of up to `max_len` tokens."""
        ...


class MachineProbe:
    """Probe of this machine, with the engine's own kernels. It implements `Probe`.

    Args:
        num_threads: threads of a kernel; None: one for each core.
    """

    def __init__(self, num_threads: int | None) -> None:
        self.cores = num_threads or num_cpus()
        self._trials: dict[int, MemoryTrial] = {}
        self._machines: dict[tuple[object, ...], Machine] = {}
        self._hosts: dict[int, float] = {}

    def memory(self, nbytes: float, weight: Weight, dtype: str, num_reqs: int) -> Machine:
        """Implement `Probe`."""
        size = max(int(min(nbytes, _MOST_BYTES)), weight.nbytes(dtype))
        near = next((other for other in self._trials if size <= other <= 2 * size), size)
        if near not in self._trials:
            _native.set_num_threads(self.cores)
            self._trials[near] = MemoryTrial(size)
        key = near, weight.form.name, weight.shape, dtype, num_reqs
        if key not in self._machines:
            self._machines[key] = self._trials[near].run(weight, dtype, num_reqs)
        return self._machines[key]

    def host(self, num_reqs: int) -> float:
        """Return the mean of an engine with the built-in model."""
        if num_reqs not in self._hosts:
            self._hosts[num_reqs] = _measure_host(num_reqs, self.cores)
        return self._hosts[num_reqs]

    def trial(self, setup: WorkerSetup, max_len: int) -> StepTrial:
        """Implement `Probe`."""
        _native.set_num_threads(self.cores)
        backend = CPUPlatform().make_attention_backend(setup, "cpu")
        return StepTrial(setup, measure_scratch(setup, backend), max_len)


@dataclass(frozen=True)
class Times:
    """Expected times, in seconds.

    Attributes:
        ttft: time to the first token of one request.
        batch_ttft: the same of requests that arrive together, on average.
        tpot: time of each later token of one request.
        batch_tpot: the same, if the whole batch runs.
        longest_step: time of a step of prompts, for which running answers wait.
        parts: seconds of each part of a step of prompts, of one answer and of a batch of answers.
        machine: the machine.
    """

    ttft: float
    batch_ttft: float
    tpot: float
    batch_tpot: float
    longest_step: float
    parts: dict[str, dict[str, float]]
    machine: Machine


def find_problem(setup: WorkerSetup) -> str | None:
    """Return why the times of an engine's steps are not known; None: they are."""
    config = setup.config
    reasons = {
        "pipeline_parallel_size": config.device.pipeline_parallel_size > 1,
        "data_parallel_size": config.parallel.data_parallel_size > 1,
        "speculative_config": config.speculation.speculative_config is not None,
        "expert_cache": config.load.expert_cache is not None,
        "attention_backend": config.device.attention_backend not in ("auto", "cpu"),
        f"{setup.spec.architecture}": setup.spec.model_class != ModelSpec.model_class
        or not setup.spec.generates,
    }
    found = [name for name, is_true in reasons.items() if is_true]
    return f"not known with {found[0]}" if found else None


def expect_times(
    setup: WorkerSetup,
    load: Load,
    probe: Probe,
    *,
    cores: int | None = None,
    bandwidth: float | None = None,
) -> Times:
    """Return the expected times of requests on a server that does nothing else.

    Ranks of tensor parallelism share the cores and the bandwidth, so their time is that of one
    process with all threads.

    Args:
        setup: the worker's setup, without a problem (`find_problem`).
        load: the requests.
        probe: the measured machine.
        cores: number of cores of another machine; None: those of the probe.
        bandwidth: bytes per second that all of its cores read; None: those of the probe.
    """
    whole = replace(setup, rank=ALONE, engine=ALONE, scratches=())
    budget, most = setup.max_num_batched_tokens, load.batch_size
    trial = probe.trial(whole, load.input_len + load.output_len)
    costs: dict[Batch, StepCost] = {}

    def cost(batch: Batch) -> StepCost:
        if batch not in costs:
            costs[batch] = replace(trial.run(batch), host=probe.host(len(batch)))
        return costs[batch]

    one, several = load.decode(1), load.decode(most)
    machine = probe.memory(cost(one).nbytes, _main_weight(setup), setup.dtype, most)
    machine = replace(
        machine,
        bandwidth=bandwidth or machine.bandwidth,
        speed=(cores or probe.cores) / probe.cores,
    )

    def first_token(num_reqs: int) -> float:
        first, last = (cost(batch).time(machine) for batch in load.prompts(num_reqs, budget))
        return load.first_token_time(first, last, num_reqs, budget)

    _, longest = load.prompts(most, budget)
    return Times(
        ttft=first_token(1),
        batch_ttft=first_token(most),
        tpot=cost(one).time(machine),
        batch_tpot=cost(several).time(machine),
        longest_step=cost(longest).time(machine),
        parts={
            "prompt": cost(longest).parts(machine),
            "one answer": cost(one).parts(machine),
            "batch of answers": cost(several).parts(machine),
        },
        machine=machine,
    )


def _main_weight(setup: WorkerSetup) -> Weight:
    """Return a linear weight of the shape and the form that have most bytes in the layers.

    Experts are left out: a kernel multiplies several of them.
    """
    sizes: dict[tuple[str, tuple[int, ...]], int] = {}
    found: dict[tuple[str, tuple[int, ...]], Weight] = {}
    for weight in setup.spec.weights():
        in_layer = weight.name.startswith("layers.") and weight.expert is None
        if weight.kind == "linear" and in_layer:
            key = weight.form.name, weight.shape
            found[key] = weight
            sizes[key] = sizes.get(key, 0) + weight.nbytes(setup.dtype)
    return found[max(sizes, key=lambda key: sizes[key])]


def _measure_host(num_reqs: int, num_threads: int) -> float:
    """Return the seconds of a step outside of the kernels, as the engine overlaps them."""
    params = SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=_HOST_STEPS)
    settings: dict[str, Any] = {"kv_cache_memory_bytes": 2**23, "max_model_len": 4 * _HOST_STEPS}
    with (
        without_logs(),
        LLM(BUILTIN_MODEL, max_num_seqs=num_reqs, num_threads=num_threads, **settings) as llm,
    ):
        prompts = [[1, 2, 3]] * num_reqs
        llm.generate(prompts, params, use_tqdm=False)
        _native.set_profiling(True)
        try:
            (output, *_) = llm.generate(prompts, params, use_tqdm=False)
        finally:
            _native.set_profiling(False)
        spans = _native.take_spans()
    del output
    begin = min(span[1] for span in spans)
    end = max(span[2] for span in spans)
    inside = sum(span[2] - span[1] for span in spans)
    return max(0.0, (end - begin - inside) / (_HOST_STEPS - 1))


@contextmanager
def without_logs() -> Iterator[None]:
    """Log nothing below errors: settings are tried, and their warnings do not matter."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
