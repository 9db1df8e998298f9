"""Expected times of `octavo plan`: the cost of a few steps, priced for a machine."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

from octavo import _native
from octavo.config import BUILTIN_MODEL
from octavo.kernels.memory import map_memory
from octavo.llm import LLM
from octavo.models.spec import ModelSpec
from octavo.plan.setup import WorkerSetup
from octavo.plan.step_cost import Batch, Load, Machine, StepCost
from octavo.platforms.cpu import CPUPlatform
from octavo.sampling_params import SamplingParams
from octavo.system.device import num_cpus
from octavo.system.distributed import ALONE
from octavo.system.tensor import HostTensor
from octavo.worker.memory_trial import LEAST_NBYTES, read_bandwidth
from octavo.worker.scratch import measure_scratch
from octavo.worker.step_trial import StepTrial

_MOST_BYTES = 5 * 2**27
"""Most bytes that a trial of the memory reads in turn; they exceed the caches."""
_HOST_STEPS, _HOST_REQUESTS = 32, 8
"""Steps, and requests, of the engine that measures the host's part."""


class Trial(Protocol):
    """Source of the costs of a model's steps; see `StepTrial`."""

    def run(self, batch: Batch, samples: int = 1) -> StepCost:
        """Return the cost of a step with samples of each request, without the host's part."""
        ...


class Probe(Protocol):
    """Measurement of a machine."""

    cores: int
    """Number of cores that compute."""

    def bandwidth(self, nbytes: float) -> float:
        """Return the bytes per second of a step that reads `nbytes` in all."""
        ...

    def host(self, num_reqs: int) -> float:
        """Return the seconds of a step of `num_reqs` requests outside of the kernels."""
        ...

    def trial(self, setup: WorkerSetup, load: Load) -> Trial:
        """Return a trial of a model's steps."""
        ...

    def memory_trial(self, setup: WorkerSetup, load: Load) -> Trial:
        """Return a trial whose kernels read from memory, so that seconds include reading."""
        ...


class MachineProbe:
    """Probe of this machine, with the engine's own kernels. It implements `Probe`.

    Args:
        num_threads: threads of a kernel; None: one for each core.
    """

    def __init__(self, num_threads: int | None) -> None:
        self.cores = num_threads or num_cpus()
        CPUPlatform.open_threads(self.cores)
        self._memory = map_memory(_MOST_BYTES)
        self._touched = 0
        self._bandwidths: dict[int, float] = {}

    def bandwidth(self, nbytes: float) -> float:
        """Implement `Probe`."""
        size = max(int(min(nbytes, _MOST_BYTES)), LEAST_NBYTES)
        near = next((other for other in self._bandwidths if size <= other <= 2 * size), size)
        if near not in self._bandwidths:
            self._bandwidths[near] = read_bandwidth(self._touch(near))
        return self._bandwidths[near]

    def host(self, num_reqs: int) -> float:
        """Return the mean of an engine with the built-in model; it grows with the requests."""
        one, several = self._hosts
        return one + (several - one) * (num_reqs - 1) / (_HOST_REQUESTS - 1)

    @cached_property
    def _hosts(self) -> tuple[float, float]:
        """Seconds of steps of one request and of `_HOST_REQUESTS`."""
        settings: dict[str, Any] = {"kv_cache_memory_bytes": 2**23}
        settings |= {"max_model_len": 4 * _HOST_STEPS, "max_num_seqs": _HOST_REQUESTS}
        with without_logs(), LLM(BUILTIN_MODEL, num_threads=self.cores, **settings) as llm:
            return _measure_host(llm, 1), _measure_host(llm, _HOST_REQUESTS)

    def trial(self, setup: WorkerSetup, load: Load) -> StepTrial:
        """Implement `Probe`."""
        return self._make_trial(setup, load, None)

    def memory_trial(self, setup: WorkerSetup, load: Load) -> StepTrial:
        """Implement `Probe`. Small models need less memory than the most."""
        weights = setup.spec.weights()
        nbytes = sum(weight.nbytes(setup.dtype) for weight in weights) + 64 * len(weights)
        return self._make_trial(setup, load, self._touch(min(2 * nbytes + 2**24, _MOST_BYTES)))

    def _make_trial(self, setup: WorkerSetup, load: Load, memory: HostTensor | None) -> StepTrial:
        _native.set_num_threads(self.cores)
        backend = CPUPlatform().make_attention_backend(setup, "cpu")
        scratch = measure_scratch(setup, backend)
        return StepTrial(setup, scratch, load.input_len + load.output_len, load.batch_size, memory)

    def _touch(self, nbytes: int) -> HostTensor:
        """Return the beginning of the memory, with pages."""
        new = self._memory[self._touched : max(nbytes, self._touched)]
        _native.touch_pages(new.data_ptr(), new.nbytes)
        self._touched = max(nbytes, self._touched)
        return self._memory[:nbytes]


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
        here: the measured machine.
        shares: step of a batch, whose kernels hide shares of reading.
    """

    ttft: float
    batch_ttft: float
    tpot: float
    batch_tpot: float
    longest_step: float
    parts: dict[str, dict[str, float]]
    machine: Machine
    here: Machine
    shares: StepCost


@dataclass(frozen=True)
class Drafts:
    """Drafts of speculative decoding that cost no time, as those of the n-gram method.

    Attributes:
        count: drafts of a step.
        accepted: probability that a draft is accepted if those before it are.
    """

    count: int
    accepted: float

    @property
    def tokens(self) -> float:
        """Mean number of tokens of a step (Leviathan, Kalman and Matias 2023, equation 1)."""
        return sum(self.accepted**number for number in range(self.count + 1))


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
    like: Times | None = None,
    cached: float = 0.0,
    drafts: Drafts | None = None,
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
        like: times of the same weights with other settings, whose kernels hide as much; None:
            measure that.
        cached: part of each prompt that the prefix cache has.
        drafts: drafts of speculative decoding; None: no drafts.
    """
    whole = replace(setup, rank=ALONE, engine=ALONE, scratches=())
    budget, most = setup.max_num_batched_tokens, load.batch_size
    count = 1 if drafts is None else drafts.count + 1
    one, several = load.decode(1, count), load.decode(most, count)
    trial = probe.trial(whole, load)
    costs = {batch: trial.run(batch, count) for batch in (one, several)}
    if like is None:
        here = Machine(probe.bandwidth(costs[one].nbytes))
        in_memory = probe.memory_trial(whole, load)
        costs = {batch: cost.fit(in_memory.run(batch), here) for batch, cost in costs.items()}
        shares = costs[several]
    else:
        here, shares = like.here, like.shares
        costs = {batch: cost.expose(shares, here) for batch, cost in costs.items()}
    machine = Machine(bandwidth or here.bandwidth, (cores or probe.cores) / probe.cores)
    tokens = 1.0 if drafts is None else drafts.tokens

    def cost(batch: Batch) -> StepCost:
        if batch not in costs:
            costs[batch] = trial.run(batch).expose(shares, here)
        return replace(costs[batch], host=probe.host(len(batch)))

    prompts = load.without(cached)

    def first_token(num_reqs: int) -> float:
        first, last = (cost(batch).time(machine) for batch in prompts.prompts(num_reqs, budget))
        return prompts.first_token_time(first, last, num_reqs, budget)

    _, longest = prompts.prompts(most, budget)
    return Times(
        ttft=first_token(1),
        batch_ttft=first_token(most),
        tpot=cost(one).time(machine) / tokens,
        batch_tpot=cost(several).time(machine) / tokens,
        longest_step=cost(longest).time(machine),
        parts={
            "prompt": cost(longest).parts(machine),
            "one answer": cost(one).parts(machine),
            "batch of answers": cost(several).parts(machine),
        },
        machine=machine,
        here=here,
        shares=shares,
    )


def _measure_host(llm: LLM, num_reqs: int) -> float:
    """Return the seconds of a step outside of the kernels, as the engine overlaps them."""
    params = SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=_HOST_STEPS)
    prompts = [[1, 2, 3]] * num_reqs
    llm.generate(prompts, params, use_tqdm=False)
    _native.set_profiling(True)
    try:
        llm.generate(prompts, params, use_tqdm=False)
    finally:
        _native.set_profiling(False)
    spans = _native.take_spans()
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
