"""`octavo bench latency`: the time of one batch of equal requests, offline.

With --breakdown: the time of the parts of prefill and decode steps, against the roofline.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from octavo.bench import pictures, results
from octavo.bench.metrics import RequestRecord, summarize
from octavo.config.arguments import add_engine_settings
from octavo.errors import BenchError, ConfigError
from octavo.platforms.registry import get_platform
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.llm import LLM
    from octavo.models.spec import ModelSpec

_PERCENTILES = (10, 25, 50, 75, 90, 99)
# A breakdown consists of means over steps: a few batches have enough steps.
_BREAKDOWN_ITERS = 3
_PHASES = ("prefill", "decode")
_MOST_POINTS = 3
"""Maximum number of a phase's kernels in a plot."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add vLLM's flags, --breakdown, and those of the engine."""
    add = parser.add_argument_group("benchmark").add_argument
    add("--input-len", type=int, default=32, metavar="N", help="Tokens of a prompt [32].")
    add("--output-len", type=int, default=128, metavar="N", help="Tokens to generate [128].")
    add("--batch-size", type=int, default=8, metavar="N", help="Requests in a batch [8].")
    add("--n", type=int, default=1, metavar="N", help="Answers per prompt [1].")
    add(
        "--num-iters-warmup",
        type=int,
        default=10,
        metavar="N",
        help="Warm-up batches, which do not count [10].",
    )
    add("--num-iters", type=int, default=30, metavar="N", help="Batches to measure [30].")
    add("--disable-detokenize", action="store_true", help="Do not turn tokens into text.")
    add("--output-json", metavar="FILE", help="Save the results as JSON.")
    add("--profile", metavar="DIR", help="Write a Chrome trace of one more batch to this folder.")
    add("--breakdown", action="store_true", help="Show where a step's time goes.")
    add("--plot", metavar="FILE", help="Draw the breakdown's kernels under the roofline.")
    add_engine_settings(parser)
    # Otherwise the cache would contain the repeated prompts.
    parser.set_defaults(enable_prefix_caching=False)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run the benchmark, print its figures, and save them on request.

    Ctrl-C ends it early: the batches that have ended are counted, `interrupted` is true.

    Returns:
        The result of `metadata`; avg_latency, latencies and percentiles of a batch in seconds
        (vLLM's names); mean_, median_, std_ and p99_ of ttft_ms and tpot_ms; output_throughput;
        interrupted; with --breakdown, `breakdown`: machine, prefill and decode, see
        `octavo.bench.breakdown.summarize_steps`, and `picture`, see `octavo.bench.pictures`; with
        --profile, `profile`: the trace's file.

    Raises:
        ConfigError, ModelError: a flag, an engine setting or the model is unusable.
        BenchError: a batch failed, or the result cannot be saved.
    """
    result = benchmark(args)
    _print(result)
    if args.output_json is not None:
        results.save_json(args.output_json, result)
    if args.plot is not None and "breakdown" in result:
        machine, points = result["breakdown"]["machine"], _points(result["breakdown"])
        _plots().roofline(points, machine["bandwidth"], machine["peak"], args.plot)
    return result


def benchmark(args: argparse.Namespace) -> dict[str, Any]:
    """Run the benchmark without printing or saving; see `run`."""
    from octavo.bench.offline import check_least, check_settings
    from octavo.llm import LLM

    check_least(
        args,
        {"input_len": 1, "output_len": 1, "batch_size": 1, "n": 1}
        | {"num_iters_warmup": 0, "num_iters": 1},
    )
    kwargs, spec, max_model_len = check_settings(args)
    if args.input_len + args.output_len > max_model_len:
        raise ConfigError(
            f"--input-len {args.input_len} and --output-len {args.output_len} are more than the "
            f"model's context of {max_model_len} tokens; lower one."
        )
    results.check_writable(args.output_json)
    results.check_writable(args.plot)
    if args.plot is not None:
        if not args.breakdown:
            raise ConfigError(f"--plot {args.plot} draws the breakdown; add --breakdown.")
        _plots().check(args.plot)
    if args.breakdown and not get_platform(kwargs.get("device", "auto")).records_kernels:
        raise ConfigError(
            "--breakdown looks into the CPU kernels, and this engine runs on a GPU; use device=cpu "
            "or benchmarks/gpu_check.sh for the GPU's kernels."
        )
    if args.profile is not None:
        kwargs["profiler_dir"] = args.profile
    rng = np.random.default_rng(getattr(args, "seed", 0))
    prompts = rng.integers(spec.vocab_size, size=(args.batch_size, args.input_len)).tolist()
    params = SamplingParams(
        n=args.n,
        temperature=1.0,
        ignore_eos=True,
        max_tokens=args.output_len,
        detokenize=not (args.disable_detokenize or getattr(args, "skip_tokenizer_init", False)),
    )
    with LLM(**kwargs) as llm:
        result = _measure(args, llm, prompts, params)
        if not result["interrupted"] and args.profile is not None:
            with _interruptible(result):
                llm.start_profile()
                llm.generate(prompts, params, use_tqdm=False)
                trace = llm.stop_profile()
                result["profile"] = str(trace)
    if not result["interrupted"] and args.breakdown:
        with _interruptible(result):
            result["breakdown"] = _breakdown(args, spec, kwargs, prompts, params)
            machine, points = result["breakdown"]["machine"], _points(result["breakdown"])
            result["picture"] = pictures.roofline(points, machine["bandwidth"], machine["peak"])
    return result


@contextmanager
def _interruptible(result: dict[str, Any]) -> Iterator[None]:
    """End only the body on Ctrl-C, and record that: earlier measurements are kept."""
    try:
        yield
    except KeyboardInterrupt:
        result["interrupted"] = True


def _measure(
    args: argparse.Namespace, llm: LLM, prompts: list[list[int]], params: SamplingParams
) -> dict[str, Any]:
    """Time batches.

    Raises:
        BenchError: a batch failed.
        KeyboardInterrupt: Ctrl-C before the first batch has ended.
    """
    from octavo.bench.offline import finite, record_of

    records: list[RequestRecord] = []
    latencies: list[float] = []
    interrupted = False
    try:
        for _ in results.progress(range(args.num_iters_warmup), desc="Warmup iterations"):
            llm.generate(prompts, params, use_tqdm=False)
        origin = time.monotonic()
        for _ in results.progress(range(args.num_iters), desc="Measured iterations"):
            begin = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            latencies.append(time.perf_counter() - begin)
            records += [record_of(output, origin) for output in outputs]
            if records[-1].error is not None:  # a step fails for its whole batch
                raise BenchError(f"A batch failed: {records[-1].error}")
    except KeyboardInterrupt:
        if not latencies:
            raise
        interrupted = True
    tokens = sum(record.num_output_tokens for record in records)
    # The answers to one prompt are one record: with several it has no time per token.
    names = ("ttft", "tpot") if args.n == 1 else ("ttft",)
    return {
        **results.metadata(vars(args)),
        "interrupted": interrupted,
        "num_iters": len(latencies),
        "avg_latency": float(np.mean(latencies)),
        "latencies": latencies,
        "percentiles": {str(p): float(np.percentile(latencies, p)) for p in _PERCENTILES},
        **finite(summarize(records, sum(latencies)), *names),
        "output_throughput": tokens / sum(latencies),
    }


def _breakdown(
    args: argparse.Namespace,
    spec: ModelSpec,
    kwargs: dict[str, Any],
    prompts: list[list[int]],
    params: SamplingParams,
) -> dict[str, Any]:
    """Profile additional batches in a separate engine."""
    from octavo import _native
    from octavo.bench.breakdown import ProfiledLLM, summarize_steps
    from octavo.bench.machine import measure_machine
    from octavo.plan.memory_plan import resolve_dtype

    with ProfiledLLM(**kwargs) as llm:
        dtype = resolve_dtype(llm.config, spec)
        machine = measure_machine(dtype, llm.config.model.quantization)
        llm.generate(prompts, params, use_tqdm=False)
        _native.set_profiling(True)
        try:
            iterations = range(min(args.num_iters, _BREAKDOWN_ITERS))
            for _ in results.progress(iterations, desc="Profiled iterations"):
                llm.generate(prompts, params, use_tqdm=False)
        finally:
            _native.set_profiling(False)
        # Other processes may have used the machine the first time.
        machine = machine.best(measure_machine(dtype, llm.config.model.quantization))
    breakdown: dict[str, Any] = {"machine": asdict(machine)}
    for name in _PHASES:
        steps = [step for step in llm.steps if step.is_prefill == (name == "prefill")]
        if steps:
            breakdown[name] = summarize_steps(steps, machine)
    return breakdown


def _plots() -> Any:
    from octavo.bench import plots

    return plots


def _points(breakdown: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the computing kernels with most of a step's time, for a plot of the roofline."""
    return [
        {
            "name": f"{phase}: {kernel['name']}",
            "flops": kernel["flops"],
            "bytes": kernel["bytes"],
            "seconds": kernel["ms"] / 1000,
        }
        for phase in _PHASES
        if phase in breakdown
        for kernel in [k for k in breakdown[phase]["kernels"] if k["flops"]][:_MOST_POINTS]
    ]


def _print(result: dict[str, Any]) -> None:
    console = Console(highlight=False, soft_wrap=True)

    def line(text: str) -> None:
        console.print(text, markup=False)

    if result["interrupted"]:
        line(f"Interrupted: the figures cover {results.counted(result['num_iters'], 'iteration')}.")
    line(f"Avg latency: {result['avg_latency']} seconds")
    for p, seconds in result["percentiles"].items():
        line(f"{p}% percentile latency: {seconds} seconds")
    for name in ("ttft", "tpot"):
        if f"mean_{name}_ms" in result:
            figures = [f"{k} {result[f'{k}_{name}_ms']:.2f}" for k in ("mean", "median", "p99")]
            line(f"{name.upper()} (ms): {', '.join(figures)}")
    line(f"Output token throughput: {result['output_throughput']:.2f} tokens/s")
    if "profile" in result:
        line(f"Profile in {result['profile']}")
    breakdown = result.get("breakdown")
    if breakdown is None:
        return
    from octavo.bench.breakdown import print_steps

    machine = breakdown["machine"]
    line(
        f"\nRoofline, measured just now: {machine['bandwidth'] / 1e9:.1f} GB/s read bandwidth "
        f"({machine['bandwidth_by']}), {machine['peak'] / 1e9:.0f} GFLOP/s {machine['dtype']} peak "
        f"({machine['peak_by']}'s product)."
    )
    for name in _PHASES:
        if name in breakdown:
            print_steps(name, breakdown[name], console)
    line(
        "Above 100 %: the data were in a cache, or other processes used the machine during the "
        "measurement. Steps ran one after the other here; with async scheduling (the default), "
        "scheduling and output of one overlap with the kernels of another."
    )
