"""Breakdown of the time of a step."""

import io

import pytest
from rich.console import Console

from octavo import SamplingParams, _native
from octavo.bench.breakdown import KernelCall, ProfiledLLM, Step, print_steps, summarize_steps
from octavo.bench.machine import Machine

MACHINE = Machine(1e9, 1e9, "bfloat16", bandwidth_by="plain read", peak_by="Octavo")


def make_step(begin):
    """Return a step of 10 s: 1 before, gather 1, gap 0.5, linear 4, gap 0.5, sample 1, 2 after."""
    calls = [
        KernelCall("gather", begin + 1, begin + 2, 1e8, 0),
        KernelCall("linear 4x4", begin + 2.5, begin + 6.5, 1e9, 2e9),
        KernelCall("sample", begin + 7, begin + 8, 0, 0),
    ]
    return Step(begin, begin + 10, 8, False, calls)


def test_means_over_steps():
    summary = summarize_steps([make_step(0), make_step(100)], MACHINE)
    assert summary["num_steps"] == 2
    assert summary["tokens_per_step"] == 8
    assert summary["step_ms"] == pytest.approx(10_000)
    assert summary["kernel_ms"] == pytest.approx(6000)
    assert summary["host_ms"] == pytest.approx(
        {"schedule": 1000, "between": 500, "sampling": 500, "output": 2000}
    )
    assert summary["floor_ms"] == pytest.approx(2100)  # 0.1 s of reading, 2 s of computing
    assert summary["roofline"] == pytest.approx(0.21)
    linear, gather, _ = summary["kernels"]
    assert linear == pytest.approx(
        {
            "name": "linear 4x4",
            "calls": 1,
            "ms": 4000,
            "share": 0.4,
            "bytes": 1e9,
            "flops": 2e9,
            "gb_s": 0.25,
            "gflop_s": 0.5,
            "roofline": 0.5,
        }
    )
    assert gather["roofline"] == pytest.approx(0.1)
    console = Console(file=io.StringIO(), width=120)
    print_steps("decode", summary, console)
    text = console.file.getvalue()
    assert "decode: mean of 2 steps of 8 tokens" in text
    for word in ("linear 4x4", "40.0%", "50%", "after: output", "10000.000", "21%"):
        assert word in text


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_steps_of_a_real_engine(enforce_eager):
    """Each kernel call belongs to one step, and prefill is distinguished from decode."""
    kwargs = {"max_model_len": 64, "kv_cache_memory_bytes": "16M", "max_num_batched_tokens": 24}
    kwargs |= {"max_num_seqs": 8, "enforce_eager": enforce_eager}
    params = SamplingParams(max_tokens=4, ignore_eos=True, temperature=1.0)
    with ProfiledLLM(**kwargs) as llm:
        llm.generate([[1] * 10], params, use_tqdm=False)
        assert llm.steps == []  # no request has arrived yet
        _native.set_profiling(True)
        try:
            llm.generate([[i + 2] * 20 for i in range(2)], params, use_tqdm=False)
        finally:
            _native.set_profiling(False)
    steps = llm.steps
    assert [s.num_tokens for s in steps if s.is_prefill] == [24, 17]
    assert [s.num_tokens for s in steps if not s.is_prefill] == [2, 2, 1]
    for step in steps:
        times = [step.begin, *(t for c in step.calls for t in (c.begin, c.end)), step.end]
        assert times == sorted(times)
        assert sum(c.name.startswith("linear") for c in step.calls) > 2
    summary = summarize_steps(steps, MACHINE)
    host = sum(summary["host_ms"].values())
    assert summary["kernel_ms"] + host == pytest.approx(summary["step_ms"])
