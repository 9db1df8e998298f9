"""Model of the time of a step: computing and reading, kernel by kernel, and the host's part.

A kernel reads weights, keys, values or states while it computes. If it did both at once, its time
would be the larger one of the two (Williams, Waterman and Patterson 2009, "Roofline"). In fact a
share of the smaller one is not hidden. The seconds of computing are measured with these numbers in
the caches (`octavo/worker/step_trial.py`), the bytes follow from the shapes, and the shares are
properties of the machine (`octavo/worker/memory_trial.py`). So the time on another machine follows
from its bandwidth and its number of cores.
"""

from __future__ import annotations

from dataclasses import dataclass

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
FEW_ROWS = 2
"""Most rows of a product that fetches weights ahead."""


@dataclass(frozen=True)
class Machine:
    """Machine that computes the steps.

    Attributes:
        bandwidth: bytes per second that all cores together read from memory, while they compute
            a product of one row with a large weight.
        speed: speed of computing, relative to the machine of the measurement.
        exposed: share of the smaller one of computing and reading that the larger one does not hide
            in products of several rows.
        exposed_in_few: the same in products of few rows, which fetch weights ahead.
        exposed_in_blocks: the same of kernels that read keys, values or states in small blocks.
    """

    bandwidth: float
    speed: float = 1.0
    exposed: float = 0.0
    exposed_in_few: float = 0.0
    exposed_in_blocks: float = 0.0


@dataclass(frozen=True)
class KernelCost:
    """Calls of one kernel in a step.

    Attributes:
        name: its name, as in `_native.take_spans`.
        seconds: time of computing, if all it reads is in the caches.
        nbytes: bytes that it reads from memory; 0: it reads activations only.
        rows: rows that it multiplies by each weight, on average.
    """

    name: str
    seconds: float
    nbytes: float
    rows: float = 1.0

    @property
    def part(self) -> str:
        """Part of the step that the kernel belongs to."""
        return PARTS.get(self.name.partition(" ")[0], OTHER)

    def time(self, machine: Machine) -> float:
        """Return the seconds on a machine."""
        computing, reading = self.seconds / machine.speed, self.nbytes / machine.bandwidth
        if self.part not in ("products", "experts"):
            exposed = machine.exposed_in_blocks
        else:
            exposed = machine.exposed if self.rows > FEW_ROWS else machine.exposed_in_few
        return max(computing, reading) + exposed * min(computing, reading)


@dataclass(frozen=True)
class StepCost:
    """Cost of a step.

    Attributes:
        kernels: its kernels. Calls of one kernel with different shapes are separate entries.
        host: seconds outside of the kernels.
    """

    kernels: tuple[KernelCost, ...]
    host: float = 0.0

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
    """

    input_len: int
    output_len: int
    batch_size: int

    def decode(self, num_reqs: int) -> Batch:
        """Return a step of `num_reqs` requests in the middle of their answers."""
        return ((self.input_len + self.output_len // 2, 1),) * num_reqs

    def prompts(self, num_reqs: int, budget: int) -> tuple[Batch, Batch]:
        """Return the first and the last step of `budget` tokens of `num_reqs` prompts.

        A step computes several short prompts, or a part of a long one.
        """
        if self.input_len >= budget:
            return ((0, budget),), ((self.input_len - budget, budget),)
        batch = ((0, self.input_len),) * min(num_reqs, budget // self.input_len)
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
