"""Error of `octavo plan`: its memory and times against those of the engine.

    python benchmarks/plan_accuracy.py FOLDER FOLDER:quantization=int8 FILE.gguf

Each case is a model, with settings behind it. Plan and engine are processes of their own, in turns.
An error is the median of the ratios of neighbouring turns, as the speed of a machine changes. The
memory is that of the engine after a load that fills the KV cache and all buffers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np

from octavo import LLM, SamplingParams
from octavo.bench.offline import record_of
from octavo.model_tools.plan import Expectation, plan
from octavo.plan.memory_plan import MIB
from octavo.system.device import resident_memory

BUDGET = 512
"""Tokens of a step: the default of a server on a CPU."""
FIGURES = {
    "ttft_ms": "first token",
    "batch_ttft_ms": "first token, batch",
    "tpot_ms": "token",
    "batch_tpot_ms": "token, batch",
    "memory": "MiB",
}


def settings_of(case: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of a case, as `LLM` takes them.

    Without the prefix cache, no prompt waits for a snapshot of its state. To measure the memory,
    the KV cache has as many blocks as the load fills.
    """
    model, *given = case.split(":")
    length = args.input_len + args.output_len
    kwargs: dict[str, Any] = {"model": model, "max_num_batched_tokens": BUDGET}
    kwargs |= {"max_num_seqs": args.batch_size, "max_model_len": length}
    kwargs |= {"enable_prefix_caching": False}
    if args.memory:
        kwargs |= {"num_gpu_blocks_override": 1 + args.batch_size * -(-length // 16)}
    return kwargs | dict(setting.split("=") for setting in given)


def expect(kwargs: dict[str, Any], args: argparse.Namespace) -> dict[str, float]:
    """Return the plan's figures, except the memory."""
    requests = Expectation(args.input_len, args.output_len, args.batch_size)
    times: dict[str, float] = plan(kwargs, None, requests, compare_settings=False)["times"]
    return {name: times[name] for name in FIGURES if name.endswith("ms")}


def measure(kwargs: dict[str, Any], args: argparse.Namespace) -> dict[str, float]:
    """Return the engine's figures, and the planned memory.

    The time of a batch's tokens is that of its last request, which waits for no prompts.
    """
    rng = np.random.default_rng()
    found: dict[str, list[float]] = {name: [] for name in FIGURES}
    with LLM(**kwargs) as llm:

        def run(size: int, **more: Any) -> list[Any]:
            params = SamplingParams(
                temperature=1.0, ignore_eos=True, max_tokens=args.output_len, **more
            )
            shape = size, args.input_len
            prompts = rng.integers(llm.llm_engine.spec.vocab_size, size=shape).tolist()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            return [record_of(output, 0.0) for output in outputs]

        run(1)
        end = time.perf_counter() + args.seconds
        while not found["tpot_ms"] or time.perf_counter() < end:
            for size, prefix in ((1, ""), (args.batch_size, "batch_")):
                records = run(size)
                first = [record.ttft for record in records]
                found[f"{prefix}ttft_ms"].append(1000 * statistics.mean(first))
                found[f"{prefix}tpot_ms"].append(1000 * records[-1].tpot)
        if args.memory:
            run(args.batch_size, logprobs=2, repetition_penalty=1.1)
            run(1, prompt_logprobs=2)
            found["memory"].append(resident_memory() / MIB)
        figures = {name: statistics.median(values) for name, values in found.items() if values}
        return figures | {"planned": llm.llm_engine.memory_plan.steady / MIB}


def run_process(mode: str, kwargs: dict[str, Any], args: argparse.Namespace) -> dict[str, float]:
    """Return the figures of a process.

    Raises:
        SystemExit: it failed.
    """
    flags = [f"--{n}={getattr(args, n.replace('-', '_'))}" for n in _VALUES]
    flags += ["--memory"] * args.memory
    command = [sys.executable, __file__, f"--{mode}", json.dumps(kwargs), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    found: dict[str, float] = json.loads(done.stdout)
    return found


_VALUES = "input-len", "output-len", "batch-size", "seconds"


def main() -> None:
    """Compare all cases, and print a line for each figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="MODEL[:SETTING=VALUE...]")
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=5.0, help="Time of an engine's turn.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--memory", action="store_true", help="Measure the memory, too.")
    parser.add_argument("--expect", help=argparse.SUPPRESS)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.expect or args.measure:
        figures = expect if args.expect else measure
        print(json.dumps(figures(json.loads(args.expect or args.measure), args)))
        return
    for case in args.cases:
        kwargs, rounds = settings_of(case, args), []
        for _ in range(args.rounds):
            planned = run_process("expect", kwargs, args)
            found = run_process("measure", kwargs, args)
            rounds.append((planned | {"memory": found["planned"]}, found))
        print(case, flush=True)
        for name, label in FIGURES.items():
            if all(name in found for _, found in rounds):
                pairs = [(planned[name], found[name]) for planned, found in rounds]
                errors = [planned / found - 1 for planned, found in pairs]
                medians = [statistics.median(values) for values in zip(*pairs, strict=True)]
                print(
                    f"  {label:20} {medians[0]:10,.1f} {medians[1]:10,.1f} "
                    f"{statistics.median(errors):+7.1%} ({min(errors):+.1%} to {max(errors):+.1%})",
                    flush=True,
                )


if __name__ == "__main__":
    main()
