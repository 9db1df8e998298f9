"""Error of `octavo plan`: its memory and times against those of the engine.

    python benchmarks/plan_accuracy.py FOLDER FOLDER:quantization=int8 FILE.gguf

Each case is a model, with settings behind it. Its plan and its engine are processes of their own.
The engine is given a KV cache that the load fills, so that all planned memory becomes resident; the
memory's error is that of the resident memory after the load. Times are medians.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from octavo import LLM, SamplingParams
from octavo.bench.metrics import summarize
from octavo.bench.offline import record_of
from octavo.plan.memory_plan import MIB
from octavo.system.device import resident_memory

BUDGET = 512
SLACK = 2
"""Blocks of the KV cache, relative to those of the requests of a batch."""
FIGURES = {
    "resident": "MiB after the load",
    "ttft_ms": "first token",
    "batch_ttft_ms": "first token, batch",
    "tpot_ms": "token",
    "batch_tpot_ms": "token, batch",
}


def measure(kwargs: dict[str, Any], args: argparse.Namespace) -> dict[str, float]:
    """Return the engine's figures."""
    rng, found = np.random.default_rng(0), {}
    params = SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=args.output_len)
    with LLM(**kwargs) as llm:
        plan = llm.llm_engine.memory_plan
        found["loaded"] = resident_memory() / MIB

        def run(size: int) -> dict[str, float]:
            shape = size, args.input_len
            prompts = rng.integers(llm.llm_engine.spec.vocab_size, size=shape).tolist()
            begin = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            records = [record_of(output, 0.0) for output in outputs]
            return summarize(records, time.perf_counter() - begin)

        end = time.perf_counter() + args.seconds
        run(1)
        runs: dict[int, list[dict[str, float]]] = {1: [], args.batch_size: []}
        while min(map(len, runs.values())) < 2 or time.perf_counter() < end:
            for size, figures in runs.items():
                figures.append(run(size))
        for size, prefix in ((1, ""), (args.batch_size, "batch_")):
            for name in ("ttft_ms", "tpot_ms"):
                values = [figures[f"mean_{name}"] for figures in runs[size]]
                found[f"{prefix}{name}"] = float(np.median(values))
        found["planned"] = plan.steady / MIB
        found["planned_loaded"] = plan.nbytes("runtime") / MIB + plan.nbytes("weights") / MIB
        found["resident"] = resident_memory() / MIB
    return found


def run_process(command: Sequence[str]) -> dict[str, Any]:
    """Return the JSON that a process prints.

    Raises:
        SystemExit: it failed.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def settings_of(case: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings of a case, as `LLM` takes them."""
    model, *given = case.split(":")
    kwargs: dict[str, Any] = {"model": model, "max_num_seqs": args.batch_size}
    kwargs |= {"max_num_batched_tokens": BUDGET}
    kwargs |= {"max_model_len": args.input_len + args.output_len}
    kwargs |= dict(setting.split("=") for setting in given)
    return kwargs


def compare(case: str, args: argparse.Namespace) -> dict[str, tuple[float, float]]:
    """Return the planned and the measured value of each figure."""
    kwargs = settings_of(case, args)
    flags = [f"--{name.replace('_', '-')}={v}" for name, v in kwargs.items() if name != "model"]
    flags += [f"--{name}={getattr(args, name.replace('-', '_'))}" for name in _LOAD]
    plan = run_process([sys.executable, "-m", "octavo", "plan", kwargs["model"], "--json", *flags])
    blocks = SLACK * args.batch_size * -(-kwargs["max_model_len"] // plan["block_size"])
    kwargs["num_gpu_blocks_override"] = blocks
    load = [f"--{name}={getattr(args, name.replace('-', '_'))}" for name in (*_LOAD, "seconds")]
    found = run_process([sys.executable, __file__, "--child", json.dumps(kwargs), *load])
    planned = {name: plan["times"].get(name) for name in FIGURES if name.endswith("ms")}
    planned["resident"] = found["planned"]
    print(
        f"  after loading {found['loaded']:,.0f} MiB, of which runtime and weights are planned "
        f"as {found['planned_loaded']:,.0f}",
        flush=True,
    )
    print("  parts", json.dumps(plan["times"]["parts_ms"]), plan["times"]["bandwidth"], flush=True)
    return {name: (planned[name], found[name]) for name in FIGURES}


_LOAD = "input-len", "output-len", "batch-size"


def main() -> None:
    """Compare all cases, and print their errors."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="MODEL[:SETTING=VALUE...]")
    parser.add_argument("--input-len", type=int, default=512)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(json.loads(args.child), args)))
        return
    for case in args.cases:
        print(case, flush=True)
        for name, (planned, measured) in compare(case, args).items():
            error = planned / measured - 1
            print(
                f"  {FIGURES[name]:20} {planned:10,.1f} {measured:10,.1f} {error:+7.1%}", flush=True
            )


if __name__ == "__main__":
    main()
