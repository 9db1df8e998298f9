"""Model of the time of a step: computing and reading, kernel by kernel, and the host's part.

A kernel reads weights, keys, values or states while it computes. If it did both at once, its time
would be the larger one of the two (Williams, Waterman and Patterson 2009, "Roofline"). In fact a
share of the smaller one is not hidden. The seconds of computing are measured with these numbers in
the caches, and those of both with these numbers in memory (`octavo/worker/step_trial.py`). The
bytes follow from the shapes. So the time on another machine follows from its bandwidth and its
number of cores.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

PARTS = {
    "linear": "products",
    "linear_q": "products",
    "head_linear": "products",
    "experts": "experts",
    "attention": "attention",
    "causal_conv": "states",
    "gated_delta_rule": "states",
    "ssd": "states",
    "selective_scan": "states",
    "token_shift": "states",
    "wkv7": "states",
}
"""Part of a step for each kernel that reads memory; the others have activations in the caches."""
OTHER, HOST = "other kernels", "host"


@dataclass(frozen=True)
class Machine:
    """Machine that computes the steps.

    Attributes:
        bandwidth: bytes per second that all cores together read from memory, while they compute
            a product of one row with a large weight.
        speed: speed of computing, relative to the machine of the measurement.
    """

    bandwidth: float
    speed: float = 1.0


@dataclass(frozen=True)
class KernelCost:
    """Calls of one kernel in a step.

    Attributes:
        name: its name, as in `_native.take_spans`.
        seconds: time of computing, if all it reads is in the caches.
        nbytes: bytes that it reads from memory; 0: it reads activations only.
        exposed: share of the smaller one of computing and reading that the larger one does not
            hide.
    """

    name: str
    seconds: float
    nbytes: float
    exposed: float = 0.0

    @property
    def part(self) -> str:
        """Part of the step that the kernel belongs to."""
        return PARTS.get(self.name.partition(" ")[0], OTHER)

    def divide(self, machine: Machine) -> tuple[float, float]:
        """Return the larger and the smaller one of the seconds of computing and of reading."""
        both = self.seconds / machine.speed, self.nbytes / machine.bandwidth
        return max(both), min(both)

    def time(self, machine: Machine) -> float:
        """Return the seconds on a machine."""
        larger, smaller = self.divide(machine)
        return larger + self.exposed * smaller

    def fit(self, seconds: float, machine: Machine) -> KernelCost:
        """Return the cost for which a machine takes these seconds.

        Neither computing nor reading takes longer than both.
        """
        if not self.nbytes:
            return replace(self, seconds=seconds)
        fitted = replace(
            self,
            seconds=min(self.seconds, seconds),
            nbytes=min(self.nbytes, seconds * machine.bandwidth),
        )
        larger, smaller = fitted.divide(machine)
        return replace(fitted, exposed=(seconds - larger) / smaller if smaller else 0.0)


@dataclass(frozen=True)
class StepCost:
    """Cost of a step.

    Attributes:
        kernels: its kernels. Products of different shapes are different kernels.
        host: seconds outside of the kernels.
    """

    kernels: tuple[KernelCost, ...]
    host: float = 0.0

    @classmethod
    def of(cls, kernels: Iterable[KernelCost]) -> StepCost:
        """Return the cost of calls, of which several may be of one kernel."""
        found: dict[str, KernelCost] = {}
        for kernel in kernels:
            before = found.get(kernel.name, KernelCost(kernel.name, 0.0, 0.0))
            found[kernel.name] = replace(
                before,
                seconds=before.seconds + kernel.seconds,
                nbytes=before.nbytes + kernel.nbytes,
            )
        return cls(tuple(found.values()))

    def fit(self, measured: StepCost, machine: Machine) -> StepCost:
        """Return the cost for which a machine takes the measured seconds of computing and reading.

        A kernel without measured ones hides as much as others, see `expose`.
        """
        seconds = {kernel.name: kernel.seconds for kernel in measured.kernels}
        known = [k.fit(seconds[k.name], machine) for k in self.kernels if k.name in seconds]
        others = StepCost(tuple(k for k in self.kernels if k.name not in seconds))
        exposed = others.expose(StepCost(tuple(known)), machine)
        return replace(self, kernels=(*known, *exposed.kernels))

    def expose(self, like: StepCost, machine: Machine) -> StepCost:
        """Return the cost of kernels that hide as much as those of another step on a machine.

        A kernel that the other step lacks hides as much as those of its part.
        """
        shares = {kernel.name: kernel.exposed for kernel in like.kernels}
        smaller: dict[str, float] = {}
        exposed: dict[str, float] = {}
        for kernel in like.kernels:
            seconds = kernel.divide(machine)[1]
            smaller[kernel.part] = smaller.get(kernel.part, 0.0) + seconds
            exposed[kernel.part] = exposed.get(kernel.part, 0.0) + kernel.exposed * seconds

        def share(kernel: KernelCost) -> float:
            if not smaller.get(kernel.part):
                return 0.0
            return shares.get(kernel.name, exposed[kernel.part] / smaller[kernel.part])

        return replace(
            self, kernels=tuple(replace(kernel, exposed=share(kernel)) for kernel in self.kernels)
        )

    def time(self, machine: Machine) -> float:
        """Return the seconds of the step on a machine."""
        return sum(self.parts(machine).values())

    def parts(self, machine: Machine) -> dict[str, float]:
        """Return the seconds of each part of the step on a machine."""
        found: dict[str, float] = {}
        for kernel in self.kernels:
            found[kernel.part] = found.get(kernel.part, 0.0) + kernel.time(machine)
        return found | {HOST: self.host}

    @property
    def nbytes(self) -> float:
        """Bytes that the step reads from memory."""
        return sum(kernel.nbytes for kernel in self.kernels)


def distinct_experts(experts: int, top_k: int, num_tokens: int) -> float:
    """Return the expected number of experts that tokens use, if all are chosen equally often."""
    return experts * (1 - (1 - top_k / experts) ** num_tokens)


Batch = tuple[tuple[int, int], ...]
"""Requests of a step: tokens that are in the cache, and tokens to compute, of each."""


@dataclass(frozen=True)
class Load:
    """Equal requests that arrive together.

    Attributes:
        input_len: tokens of a prompt.
        output_len: tokens of an answer.
        batch_size: number of requests.
        cached: tokens of a prompt that the prefix cache has.
    """

    input_len: int
    output_len: int
    batch_size: int
    cached: int = 0

    def without(self, share: float) -> Load:
        """Return the load if the prefix cache has a share of each prompt, except its last token."""
        cached = min(int(share * self.input_len), self.input_len - 1)
        return replace(self, input_len=self.input_len - cached, cached=cached)

    def decode(self, num_reqs: int, count: int = 1) -> Batch:
        """Return a step of `count` tokens of requests in the middle of their answers."""
        return ((self.input_len + self.output_len // 2, count),) * num_reqs

    def prompts(self, num_reqs: int, budget: int) -> tuple[Batch, Batch]:
        """Return the first and the last step of `budget` tokens of `num_reqs` prompts.

        A step computes several short prompts, or a part of a long one.
        """
        done = self.cached
        if self.input_len >= budget:
            return ((done, budget),), ((done + self.input_len - budget, budget),)
        batch = ((done, self.input_len),) * min(num_reqs, budget // self.input_len)
        return batch, batch

    def first_token_time(self, first: float, last: float, num_reqs: int, budget: int) -> float:
        """Return the mean time to the first token of `num_reqs` requests, in seconds.

        Steps compute one prompt after the other. The time of a step grows linearly with its
        position in a prompt, as attention does.

        Args:
            first: seconds of the first step that `prompts` returns.
            last: seconds of the last one.
            num_reqs: number of requests.
            budget: most tokens of a step.
        """
        batch, _ = self.prompts(num_reqs, budget)
        per_token = (first + last) / 2 / sum(count for _, count in batch)
        total = num_reqs * self.input_len
        ends = [(i + 1) * self.input_len for i in range(num_reqs)]
        # A prompt ends with the step that has its last token.
        return per_token * sum(min(-(-end // budget) * budget, total) for end in ends) / num_reqs
