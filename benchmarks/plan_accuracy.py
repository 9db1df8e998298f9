"""Error of `octavo plan`: its memory and times against those of the engine.

    python benchmarks/plan_accuracy.py FOLDER FOLDER:quantization=int8 FILE.gguf

Each case is a model, with settings behind it. The engine is a process that stays, and each plan a
process of its own; they run in turns. An error is that of the mean of the plans before and after a
turn of the engine, and the result is the median, as the speed of a machine changes. The memory is
that of the engine after a load that fills the KV cache and all buffers.

With `--uninterrupted`, a step of the engine takes the sum of the medians of its kernel calls and of
the gaps between them, as other processes do not interrupt most calls; a batch's first token is left
out. This tests the plan on a machine with other users, whose wall times say little.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import numpy as np

from octavo import LLM, SamplingParams, _native
from octavo.bench.offline import record_of
from octavo.model_tools.plan import Expectation, plan
from octavo.plan.memory_plan import MIB
from octavo.sampling_params import StructuredOutputsParams
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

    Without the prefix cache, no prompt waits for a snapshot of its state, and the KV cache has as
    many blocks as the load fills.
    """
    model, *given = case.split(":")
    length = args.input_len + args.output_len
    kwargs: dict[str, Any] = {"model": model, "max_num_batched_tokens": BUDGET}
    kwargs |= {"max_num_seqs": args.batch_size, "max_model_len": length}
    kwargs |= {"enable_prefix_caching": False}
    return kwargs | dict(setting.split("=") for setting in given)


def expect(kwargs: dict[str, Any], args: argparse.Namespace) -> dict[str, float]:
    """Return the plan's figures, except the memory."""
    requests = Expectation(args.input_len, args.output_len, args.batch_size)
    times: dict[str, float] = plan(kwargs, None, requests, compare_settings=False)["times"]
    return {name: times[name] for name in FIGURES if name.endswith("ms")}


def uninterrupted(llm: LLM, prompts: list[list[int]], output_len: int) -> dict[str, float]:
    """Return the milliseconds of the step of prompts and of a step of answers; see the top."""
    params = SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=output_len)
    kinds: list[dict[int, list[list[float]]]] = [{}, {}]
    for _ in range(_REPEATS):
        _native.take_spans()
        _native.set_profiling(True)
        last = time.monotonic()
        llm.generate(prompts, params, use_tqdm=False)
        _native.set_profiling(False)
        step: list[float] = []
        number = 0
        for name, begin, end, *_ in _native.take_spans():
            step += [max(0.0, begin - last), end - begin]
            last = end
            if name == "sample":
                if number != 1:  # the first step of answers sets up what the others reuse
                    kinds[number > 0].setdefault(len(step), []).append(step)
                step, number = [], number + 1
    seconds = []
    for kind in kinds:
        most = max(kind.values(), key=len)  # of equal steps
        seconds.append(1000 * float(np.median(most, 0).sum()))
    return {"ttft_ms": seconds[0], "tpot_ms": seconds[1]}


def measure(kwargs: dict[str, Any], args: argparse.Namespace) -> None:
    """Print {} when loaded, the engine's figures for each line of the input, and its memory.

    The time of a batch's tokens is that of its last request, which waits for no prompts.
    """
    rng = np.random.default_rng()
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
        print("{}", flush=True)  # ready: loading would take time of a plan
        for _ in sys.stdin:
            if args.uninterrupted:
                vocabulary = llm.llm_engine.spec.vocab_size
                one, several = (
                    rng.integers(vocabulary, size=(size, args.input_len)).tolist()
                    for size in (1, args.batch_size)
                )
                figures = uninterrupted(llm, one, args.output_len)
                batch = uninterrupted(llm, several, args.output_len)["tpot_ms"]
                print(json.dumps(figures | {"batch_tpot_ms": batch}), flush=True)
                continue
            found: dict[str, list[float]] = {}
            end = time.perf_counter() + args.seconds
            while len(found.get("ttft_ms", [])) < _LEAST_RUNS or time.perf_counter() < end:
                for size, prefix in ((1, ""), (args.batch_size, "batch_")):
                    records = run(size)
                    ttft = statistics.mean(record.ttft for record in records)
                    found.setdefault(f"{prefix}ttft_ms", []).append(1000 * ttft)
                    found.setdefault(f"{prefix}tpot_ms", []).append(1000 * records[-1].tpot)
            print(json.dumps({k: statistics.median(v) for k, v in found.items()}), flush=True)
        if args.memory:
            run(args.batch_size, logprobs=20, repetition_penalty=1.1, top_p=0.9)
            run(args.batch_size, prompt_logprobs=20)
            text = StructuredOutputsParams(regex=_FORCED)  # drafts need rows of logits
            run(args.batch_size, logprobs=20, repetition_penalty=1.1, structured_outputs=text)
        resident = resident_memory()
        assert resident is not None
        memory = {
            "memory": resident / MIB,
            "planned": llm.llm_engine.memory_plan.steady / MIB,
        }
        print(json.dumps(memory), flush=True)


def start(mode: str, kwargs: dict[str, Any], args: argparse.Namespace) -> subprocess.Popen[str]:
    """Start a process."""
    flags = [f"--{n}={getattr(args, n.replace('-', '_'))}" for n in _VALUES]
    flags += ["--memory"] * args.memory + ["--uninterrupted"] * args.uninterrupted
    command = [sys.executable, __file__, f"--{mode}", json.dumps(kwargs), *flags]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)


def receive(process: subprocess.Popen[str]) -> dict[str, float]:
    """Return the next figures of a process.

    Raises:
        SystemExit: it failed.
    """
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line:
        raise SystemExit(f"{process.args!r} failed with status {process.wait()}.")
    found: dict[str, float] = json.loads(line)
    return found


def compare(case: str, args: argparse.Namespace) -> None:
    """Print the planned and the measured figures of a case, and the errors."""
    kwargs = settings_of(case, args)
    engine = start("measure", kwargs, args)
    assert engine.stdin is not None
    receive(engine)

    def make_plan() -> dict[str, float]:
        process = start("expect", kwargs, args)
        found = receive(process)
        process.wait()  # its end takes time of the engine's turn otherwise
        return found

    plans, turns = [make_plan()], []
    for _ in range(args.rounds):
        engine.stdin.write("\n")
        engine.stdin.flush()
        turns.append(receive(engine))
        plans.append(make_plan())
    engine.stdin.close()
    memory = receive(engine)
    engine.wait()
    print(case, flush=True)
    for name, label in FIGURES.items():
        if name == "memory":
            pairs = [(memory["planned"], memory["memory"])] * args.memory
        elif name not in turns[0]:
            continue
        else:
            means = [
                (before[name] + after[name]) / 2 for before, after in itertools.pairwise(plans)
            ]
            pairs = [(mean, turn[name]) for mean, turn in zip(means, turns, strict=True)]
        if not pairs:
            continue
        errors = [planned / found - 1 for planned, found in pairs]
        medians = [statistics.median(values) for values in zip(*pairs, strict=True)]
        print(
            f"  {label:20} {medians[0]:10,.1f} {medians[1]:10,.1f} "
            f"{statistics.median(errors):+7.1%} ({min(errors):+.1%} to {max(errors):+.1%})",
            flush=True,
        )


_REPEATS, _LEAST_RUNS = 5, 3
_FORCED = "The quick brown fox jumps over the lazy dog, the moon, the sun and the stars"
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
    parser.add_argument("--seconds", type=float, default=3.0, help="Time of an engine's turn.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--uninterrupted", action="store_true", help="See above.")
    parser.add_argument("--memory", action="store_true", help="Measure the memory, too.")
    parser.add_argument("--expect", help=argparse.SUPPRESS)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.expect:
        print(json.dumps(expect(json.loads(args.expect), args)), flush=True)
    elif args.measure:
        measure(json.loads(args.measure), args)
    else:
        for case in args.cases:
            compare(case, args)


if __name__ == "__main__":
    main()
