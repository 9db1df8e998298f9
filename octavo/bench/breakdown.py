"""Breakdown of the time of a step: each kernel against the roofline, and the host's parts."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console

from octavo import _native
from octavo.bench.machine import Machine
from octavo.bench.results import print_table
from octavo.llm import LLM
from octavo.observability.scheduler_stats import SchedulerStats

_HOST = {
    "schedule": "before: schedule",
    "between": "between kernels",
    "sampling": "around sampling",
    "output": "after: output",
}


class KernelCall(NamedTuple):
    """Call of a native kernel; times in seconds of `time.monotonic`."""

    name: str
    begin: float
    end: float
    nbytes: float
    flops: float


@dataclass(frozen=True)
class Step:
    """Step of the engine.

    Attributes:
        begin: start of its scheduling, in seconds of `time.monotonic`.
        end: end of processing its output.
        num_tokens: number of computed tokens.
        is_prefill: True if some of them were prompt tokens.
        calls: calls of kernels, in order.
    """

    begin: float
    end: float
    num_tokens: int
    is_prefill: bool
    calls: list[KernelCall]


class ProfiledLLM(LLM):
    """Variant of `LLM` that records each step.

    Steps run one after the other (no async scheduling), so that each has its own kernel and host
    time.

    Args:
        **kwargs: as for `LLM`; `async_scheduling` is set.

    Attributes:
        steps: recorded steps; only those that computed something.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{**kwargs, "async_scheduling": False})
        self.steps: list[Step] = []

    def _step(self) -> list[str]:
        before = self.stats()
        begin = time.monotonic()
        request_ids = super()._step()
        end = time.monotonic()
        calls = [KernelCall(*span[:5]) for span in _native.take_spans()]
        num_tokens = self.stats().num_scheduled_tokens - before.num_scheduled_tokens
        if calls:
            self.steps.append(Step(begin, end, num_tokens, _has_prompts(before, num_tokens), calls))
        return request_ids


def _has_prompts(before: SchedulerStats, num_tokens: int) -> bool:
    """Return True if a step computes prompts: a request waited, or has several tokens computed."""
    return before.num_waiting_reqs > 0 or num_tokens > before.num_running_reqs


def summarize_steps(steps: Sequence[Step], machine: Machine) -> dict[str, Any]:
    """Compute means over steps.

    Returns:
        num_steps, tokens_per_step; step_ms, kernel_ms, host_ms (by part: `schedule` before the
        first kernel, `between` kernels of the forward pass, `sampling` from the last linear layer,
        the LM head, to the last kernel, `output` after it); floor_ms, the minimum time of the
        kernels' work; roofline, floor_ms / step_ms; kernels: for each name calls, ms, share (of the
        step), bytes, flops (all for one step), gb_s, gflop_s and roofline (floor / time), longest
        first.
    """
    num = len(steps)
    by_name: dict[str, np.ndarray] = {}
    host = dict.fromkeys(_HOST, 0.0)
    for step in steps:
        calls = step.calls
        head = max((i for i, c in enumerate(calls) if c.name.startswith("linear")), default=-1)
        gaps = [later.begin - earlier.end for earlier, later in itertools.pairwise(calls)]
        host["schedule"] += calls[0].begin - step.begin
        host["between"] += sum(gaps[: max(head, 0)])
        host["sampling"] += sum(gaps[max(head, 0) :])
        host["output"] += step.end - calls[-1].end
        for call in calls:
            floor = machine.floor(call.nbytes, call.flops)
            figures = [1, call.end - call.begin, call.nbytes, call.flops, floor]
            by_name[call.name] = by_name.get(call.name, np.zeros(5)) + figures
    step_s = sum(s.end - s.begin for s in steps) / num
    kernels = []
    for name, row in sorted(by_name.items(), key=lambda item: -item[1][1]):
        calls, seconds, nbytes, flops, floor = (row / num).tolist()
        kernels.append(
            {
                "name": name,
                "calls": calls,
                "ms": seconds * 1000,
                "share": seconds / step_s,
                "bytes": nbytes,
                "flops": flops,
                "gb_s": nbytes / seconds / 1e9,
                "gflop_s": flops / seconds / 1e9,
                "roofline": floor / seconds,
            }
        )
    floor_s = sum(row[4] for row in by_name.values()) / num
    return {
        "num_steps": num,
        "tokens_per_step": sum(s.num_tokens for s in steps) / num,
        "step_ms": step_s * 1000,
        "kernel_ms": sum(k["ms"] for k in kernels),
        "host_ms": {name: seconds / num * 1000 for name, seconds in host.items()},
        "floor_ms": float(floor_s) * 1000,
        "roofline": float(floor_s) / step_s,
        "kernels": kernels,
    }


def print_steps(title: str, summary: dict[str, Any], console: Console | None = None) -> None:
    """Print a result of `summarize_steps` as a table."""
    rows: list[Sequence[object]] = [
        (
            kernel["name"],
            f"{kernel['calls']:.4g}",
            f"{kernel['ms']:.3f}",
            f"{kernel['share']:.1%}",
            f"{kernel['gb_s']:.1f}",
            f"{kernel['gflop_s']:.0f}" if kernel["flops"] else "",
            f"{kernel['roofline']:.0%}",
        )
        for kernel in summary["kernels"]
    ]
    step_ms = summary["step_ms"]
    for name, label in _HOST.items():
        ms = summary["host_ms"][name]
        rows.append((label, "", f"{ms:.3f}", f"{ms / step_ms:.1%}", "", "", ""))
    nbytes, flops = (sum(k[key] for k in summary["kernels"]) for key in ("bytes", "flops"))
    rows.append(
        (
            "the step",
            "",
            f"{step_ms:.3f}",
            "100.0%",
            f"{nbytes / step_ms / 1e6:.1f}",
            f"{flops / step_ms / 1e6:.0f}",
            f"{summary['roofline']:.0%}",
        )
    )
    print_table(
        f"{title}: mean of {summary['num_steps']} steps of {summary['tokens_per_step']:.4g} tokens",
        ("", "calls", "ms", "share", "GB/s", "GFLOP/s", "roofline"),
        rows,
        console,
    )
