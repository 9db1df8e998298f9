"""`octavo bench throughput`: throughput of a whole data set, offline.

All requests arrive at the start; arrival times of timed data sets are ignored.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console

from octavo.bench import plots, results
from octavo.bench.datasets import BenchRequest, add_dataset_arguments, load_dataset
from octavo.bench.metrics import RequestRecord, summarize
from octavo.config import EngineConfig
from octavo.config.arguments import add_engine_settings
from octavo.errors import BenchError
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.models.spec import ModelSpec
    from octavo.observability.scheduler_stats import SchedulerStats
    from octavo.outputs import RequestOutput


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add vLLM's flags: of the benchmark, of data sets, and of the engine."""
    add = parser.add_argument_group("benchmark").add_argument
    add("--n", type=int, default=1, metavar="N", help="Answers per prompt [1].")
    add("--disable-detokenize", action="store_true", help="Do not turn tokens into text.")
    add("--output-json", metavar="FILE", help="Save the results, each request's included, as JSON.")
    add("--plot", metavar="FILE", help="Draw the requests and latencies as FILE.png or FILE.svg.")
    add("--disable-tqdm", action="store_true", help="No progress bar.")
    add_dataset_arguments(parser)
    add_engine_settings(parser, exclude=("seed",))  # one seed for the data set and the engine


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run the benchmark, print its figures, and save them on request.

    Ctrl-C ends it early: the requests that have ended are counted, `interrupted` is true.

    Returns:
        The result of `benchmark`.

    Raises:
        ConfigError, ModelError: a flag, an engine setting or the model is unusable.
        BenchError: there is no usable request, none succeeded, or the result cannot be saved.
    """
    result = benchmark(args)
    _print(result)
    if args.output_json is not None:
        results.save_json(args.output_json, result)
    if args.plot is not None:
        plots.requests(result, args.plot)
        print(f"Plot saved in {args.plot}")
    return result


def benchmark(args: argparse.Namespace) -> dict[str, Any]:
    """Run the benchmark without printing or saving anything.

    Returns:
        The result of `metadata`; model_id; elapsed_time (s), num_requests, total_num_tokens,
        requests_per_second and tokens_per_second (vLLM's names); the figures of `summarize` except
        for those that need the times of all tokens; kv_cache_usage_max_perc,
        prefix_cache_hit_rate_perc, num_preemptions; `notes`, texts for the user; lists with an
        entry for each request, times in seconds: input_lens, output_lens, cached_lens, start_times,
        ttfts, e2els, errors.

    Raises:
        ConfigError, ModelError, BenchError: see `run`.
    """
    from octavo.bench.offline import ObservedLLM, check_least, check_settings, record_of

    check_least(args, {"n": 1})
    kwargs, spec, max_model_len = check_settings(args)
    config = EngineConfig.from_kwargs(**kwargs)
    loaded = _load_requests(args, config, spec)
    requests = [r for r in loaded if len(r.token_ids) + r.max_tokens <= max_model_len]
    notes: list[str] = []
    if len(requests) < len(loaded):
        notes.append(
            f"Left out {len(loaded) - len(requests)} of {results.counted(len(loaded), 'request')}: "
            f"longer than the model's context of {max_model_len} tokens."
        )
    if not requests:
        raise BenchError(f"No request can be sent. {notes[0]}")
    for path in (args.output_json, args.plot):
        results.check_writable(path)
    if args.plot is not None:
        plots.check(args.plot)
    detokenize = not (args.disable_detokenize or getattr(args, "skip_tokenizer_init", False))
    params = [
        SamplingParams(
            n=args.n,
            temperature=1.0,
            ignore_eos=True,
            max_tokens=request.max_tokens,
            detokenize=detokenize,
        )
        for request in requests
    ]
    outputs: list[RequestOutput] = []
    interrupted = False
    with ObservedLLM(outputs.append, **kwargs) as llm:
        before = llm.stats()
        origin = time.monotonic()
        try:
            llm.generate(
                [request.token_ids for request in requests],
                params,
                use_tqdm=sys.stderr.isatty() and not args.disable_tqdm,
            )
        except KeyboardInterrupt:
            if not outputs:
                raise
            interrupted = True
            notes.append(
                f"Interrupted: the figures cover {len(outputs)} of "
                f"{results.counted(len(requests), 'request')}."
            )
        elapsed = time.monotonic() - origin
        after, kv_usage = llm.stats(), llm.kv_cache_usage_max
    outputs.sort(key=lambda output: int(output.request_id))
    records = [record_of(output, origin) for output in outputs]
    errors = [record.error for record in records if record.error is not None]
    if len(errors) == len(records):
        raise BenchError(
            f"None of the {len(errors)} requests succeeded. The first error: {errors[0]}"
        )
    if errors:
        notes.append(
            f"{results.counted(len(errors), 'request')} failed. The first error: {errors[0]}"
        )
    summary = _summary(records, elapsed, args.n)
    num_tokens = summary["total_input_tokens"] + summary["total_output_tokens"]
    return {
        **results.metadata(vars(args)),
        "model_id": config.model.model,
        "interrupted": interrupted,
        "elapsed_time": elapsed,
        "num_requests": len(requests),
        "total_num_tokens": num_tokens,
        "requests_per_second": summary["request_throughput"],
        "tokens_per_second": summary["total_token_throughput"],
        **summary,
        "kv_cache_usage_max_perc": kv_usage * 100,
        **_engine_figures(before, after),
        "notes": notes,
        **_details(records),
    }


def _load_requests(
    args: argparse.Namespace, config: EngineConfig, spec: ModelSpec
) -> list[BenchRequest]:
    if args.dataset_name == "workload":
        return load_dataset(args, None, 1)  # token ids as they are
    if config.model.skip_tokenizer_init:
        return load_dataset(args, None, spec.vocab_size)
    from octavo.models.hub import resolve_folders
    from octavo.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_folder(resolve_folders(config)[1], config.model.tokenizer_mode)
    return load_dataset(args, tokenizer, min(tokenizer.vocab_size, spec.vocab_size))


def _summary(records: Sequence[RequestRecord], elapsed: float, n: int) -> dict[str, float]:
    """Return the figures of `summarize` that only need each request's first and last token."""
    unknown = ["_itl_ms", "max_output_tokens_per_s"] + (["_tpot_ms"] if n > 1 else [])
    return {
        key: value
        for key, value in summarize(records, elapsed).items()
        if not any(name in key for name in unknown)
    }


def _engine_figures(before: SchedulerStats, after: SchedulerStats) -> dict[str, float]:
    queries = after.prefix_cache_queries - before.prefix_cache_queries
    hits = after.prefix_cache_hits - before.prefix_cache_hits
    figures: dict[str, float] = {"num_preemptions": after.num_preemptions - before.num_preemptions}
    if queries:
        figures["prefix_cache_hit_rate_perc"] = hits / queries * 100
    if drafted := after.num_draft_tokens - before.num_draft_tokens:
        accepted = sum(after.num_accepted_tokens_per_pos) - sum(before.num_accepted_tokens_per_pos)
        figures["spec_decode_acceptance_rate_perc"] = accepted / drafted * 100
        drafts = after.num_drafts - before.num_drafts
        figures["spec_decode_acceptance_length"] = 1 + accepted / drafts
    return figures


def _details(records: Sequence[RequestRecord]) -> dict[str, list[Any]]:
    return {
        "input_lens": [r.num_prompt_tokens for r in records],
        "output_lens": [r.num_output_tokens for r in records],
        "cached_lens": [r.num_cached_tokens for r in records],
        "start_times": [r.start_time for r in records],
        "ttfts": [r.ttft for r in records],
        "e2els": [r.e2el for r in records],
        "errors": [r.error for r in records],
    }


def _print(result: dict[str, Any]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    for note in result["notes"]:
        console.print(note, markup=False, style="yellow")
    lines = [
        f"Throughput: {result['requests_per_second']:.2f} requests/s, "
        f"{result['tokens_per_second']:.2f} total tokens/s, "
        f"{result['output_throughput']:.2f} output tokens/s",
        f"Total num prompt tokens:  {result['total_input_tokens']}",
        f"Total num output tokens:  {result['total_output_tokens']}",
        f"Elapsed time (s):  {result['elapsed_time']:.2f}",
    ]
    if "prefix_cache_hit_rate_perc" in result:
        lines.append(f"Prefix cache hit rate (%):  {result['prefix_cache_hit_rate_perc']:.2f}")
    lines.append(f"Most KV cache in use (%):  {result['kv_cache_usage_max_perc']:.2f}")
    lines.append(f"Preemptions:  {result['num_preemptions']}")
    for line in lines:
        console.print(line, markup=False)
