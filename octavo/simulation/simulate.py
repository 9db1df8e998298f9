"""`octavo simulate`: how an engine would serve a load, in virtual time.

The scheduler, the block pool and the front end's records are the real ones; only the model is
replaced by a function for the time of a step. Simulating a day only takes the time of scheduling
it.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from octavo.bench import plots, results
from octavo.bench.datasets import BenchRequest, add_dataset_arguments, load_dataset
from octavo.bench.metrics import RequestRecord, print_summary, summarize
from octavo.bench.serve import add_rate_arguments, arrival_times
from octavo.bench.sweep import Probe, Slos, best_probe, find_max_rate, parse_slos
from octavo.checkpoints.registry import open_checkpoint
from octavo.config import EngineConfig
from octavo.config.arguments import add_engine_settings, engine_kwargs
from octavo.config.engine_settings import engine_settings
from octavo.errors import BenchError, ConfigError
from octavo.kv_cache.groups import (
    KVCacheConfig,
    bytes_per_block,
    make_kv_cache_groups,
    max_blocks_per_request,
)
from octavo.models.hub import resolve_folders
from octavo.models.registry import read_spec
from octavo.models.spec import ModelSpec
from octavo.observability.recording import is_recording
from octavo.plan.memory_plan import (
    resolve_dtype,
    resolve_max_model_len,
    resolve_max_num_batched_tokens,
)
from octavo.plan.setup import resolve_kv_cache_dtype
from octavo.platforms.registry import get_platform
from octavo.simulation.recorded_steps import read_step_times
from octavo.simulation.simulation import SimulatedEngine, SimulatedRun, simulate
from octavo.simulation.step_times import StepTimes

_TRACES = {".csv": "azure", ".jsonl": "mooncake"}
_CHECKED = ("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms")
_LATENCIES = ("ttft", "tpot", "itl")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags: of the simulation, of data sets, and of the engine."""
    parser.add_argument(
        "model_arg", nargs="?", metavar="MODEL", help="The model; default: built in."
    )
    add = parser.add_argument_group("simulation").add_argument
    add(
        "--step-times",
        metavar="FILE",
        help="Step times: a file of --save-step-times, or a recording of octavo serve "
        "--record; default: measure the model now.",
    )
    add(
        "--save-step-times",
        metavar="FILE",
        help="Save the measured step times for other simulations.",
    )
    add(
        "--check",
        action="store_true",
        help="Also serve the same requests for real, and show how far off the simulation is.",
    )
    add("--slo", metavar="NAME:MS,...", help="Find the highest rate within these: ttft_p99:2000.")
    add("--plot", metavar="FILE", help="Draw queue, KV cache and TTFT as FILE.png or FILE.svg.")
    add("--output-json", metavar="FILE", help="Save the results as JSON.")
    add("--disable-tqdm", action="store_true", help="No progress bar.")
    add = parser.add_argument_group("load").add_argument
    add(
        "--trace",
        metavar="FILE",
        help="Requests of a trace: Azure's (.csv) or Mooncake's (.jsonl, with shared prefixes).",
    )
    add_rate_arguments(add)
    add_dataset_arguments(parser)
    add_engine_settings(parser, exclude=("seed",))  # one seed for the data set and the engine


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Simulate an engine under a workload; print the figures, and save and draw them on request.

    Returns:
        metadata; the figures of `summarize`, in virtual time; kv_cache_usage_max_perc,
        prefix_cache_hit_rate_perc, num_preemptions, num_steps; simulation_seconds, the duration of
        the simulation; step_times, see `StepTimes`; `notes`; with --slo max_rate (requests per
        second, or null) and `probes`; with --check `check`: simulated, measured and error by
        figure.

    Raises:
        ConfigError, ModelError: a flag, a setting or the model is unusable.
        BenchError, DatasetError: a file is wrong, or there is no usable request.
    """
    simulation = _Simulation(args)
    for path in (args.plot, args.output_json, args.save_step_times):
        results.check_writable(path)
    if args.plot is not None:
        plots.check(args.plot)
    result, simulated = simulation.run()
    _print(result)
    console = Console(highlight=False, soft_wrap=True)
    if args.output_json is not None:
        results.save_json(args.output_json, result)
        console.print(f"Saved in {args.output_json}", markup=False)
    if args.plot is not None:
        plots.simulation(simulated.timeline, simulated.records, args.plot)
        console.print(f"Plot saved in {args.plot}", markup=False)
    return result


class _Simulation:
    """Simulation that the flags describe."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Check the flags; raise ConfigError, ModelError or BenchError before anything runs."""
        self._args = args
        self._slos = None if args.slo is None else parse_slos(args.slo)
        for name in ("request_rate", "burstiness"):
            if not getattr(args, name) > 0:
                flag = name.replace("_", "-")
                raise ConfigError(f"--{flag} {getattr(args, name)}: must be above 0.")
        _set_trace(args)
        kwargs = engine_settings(engine_kwargs(args, args.model_arg))
        config = EngineConfig.from_kwargs(**kwargs)
        if config.speculation.speculative_config is not None:
            raise ConfigError(
                "speculative_config: a simulation cannot know which drafts are right; leave it out."
            )
        if (stages := config.device.pipeline_parallel_size) > 1:
            raise ConfigError(
                f"pipeline_parallel_size={stages}: a simulation does not support concurrent steps "
                "of several stages; leave it out."
            )
        checkpoint = open_checkpoint(resolve_folders(config)[0], config.load.load_format)
        self.spec = read_spec(checkpoint, config.model)
        platform = get_platform(config.device.device)
        self._budget = resolve_max_num_batched_tokens(
            config, platform.server_batched_tokens, self.spec
        )
        # The default of a server.
        kwargs["max_num_batched_tokens"] = self._budget
        self.config = EngineConfig.from_kwargs(**kwargs)
        self._notes: list[str] = []

    def run(self) -> tuple[dict[str, Any], SimulatedRun]:
        """Run the whole simulation."""
        args = self._args
        if args.step_times is not None and not args.check:
            return self._run(_load_step_times(args.step_times), None)
        from octavo.simulation.engine_probe import EngineProbe

        if args.step_times is None and not args.disable_tqdm:
            print(
                f"Measuring the steps of {self.config.model.model} for half a minute, with a large "
                "model for some minutes (--step-times FILE leaves it out).",
                file=sys.stderr,
            )
        with EngineProbe(self.config) as probe:
            if args.step_times is not None:
                step_times = _load_step_times(args.step_times)
            else:
                step_times = probe.measure_steps(quiet=args.disable_tqdm)
            return self._run(step_times, probe)

    def _run(self, step_times: StepTimes, probe: Any) -> tuple[dict[str, Any], SimulatedRun]:
        """Simulate; `probe` is the real engine, or None."""
        args = self._args
        if args.save_step_times is not None:
            step_times.save(args.save_step_times)
        engine = self._make_engine(step_times)
        requests = self._load(engine.max_model_len)
        arrivals = _arrivals(requests, args.request_rate, args)
        began = time.perf_counter()
        simulated = self._simulate(engine, requests, arrivals)
        seconds = time.perf_counter() - began
        percentiles = _percentiles(self._slos)
        result = {
            **results.metadata(vars(args)),
            "model_id": self.config.model.model,
            "request_rate": args.request_rate if math.isfinite(args.request_rate) else "inf",
            "num_prompts": len(requests),
            **_figures(simulated, percentiles),
            "simulation_seconds": seconds,
            "step_times": {"cpu": step_times.cpu, "model": step_times.model}
            | {"error": step_times.error, "seconds": step_times.seconds}
            | {"host_seconds": step_times.host_seconds}
            | {"host_request_seconds": step_times.host_request_seconds},
            "notes": self._notes,
        }
        if self._slos is not None:
            result |= self._find_max_rate(engine, requests, self._slos)
        if probe is not None and args.check:
            with self._bar(len(requests), "Serving for real") as bar:
                measured = probe.serve(requests, arrivals, bar.update)
            result["check"] = _compare(simulated.records, measured)
        return result, simulated

    def _make_engine(self, step_times: StepTimes) -> SimulatedEngine:
        """Make the engine; raise ConfigError if the cache is too small for the context."""
        config, cache = self.config, self.config.cache
        groups = make_kv_cache_groups(self.spec.caches)
        if any(group.has_states for group in groups):
            raise ConfigError(
                f"{self.spec.architecture} has layers with recurrent states, which `octavo "
                "simulate` does not support; name another model."
            )
        if self.spec.is_encoder_decoder:
            raise ConfigError(
                f"{self.spec.architecture} is an encoder-decoder, which `octavo simulate` does not "
                "support; name another model."
            )
        num_blocks = step_times.num_blocks
        if cache.num_gpu_blocks_override is not None:
            num_blocks = cache.num_gpu_blocks_override
        elif cache.kv_cache_memory_bytes is not None:
            dtype = resolve_kv_cache_dtype(config, resolve_dtype(config, self.spec))
            num_blocks = cache.kv_cache_memory_bytes // bytes_per_block(
                groups, cache.block_size, dtype
            )
        max_model_len = resolve_max_model_len(config, self.spec)
        if config.model.max_model_len in (None, -1):
            max_model_len = min(max_model_len, step_times.max_model_len)
        needed = max_blocks_per_request(groups, cache.block_size, max_model_len, self._budget)
        if needed > num_blocks - 1:
            raise ConfigError(
                f"A request of max_model_len={max_model_len} needs {needed} of {num_blocks} KV "
                "blocks, and one is kept free; lower max_model_len or raise the cache's size."
            )
        if step_times.model != config.model.model:
            self._notes.append(
                f"--step-times {self._args.step_times} are of {step_times.model}, not of "
                f"{config.model.model}."
            )
        kv_cache = KVCacheConfig(num_blocks, cache.block_size, groups)
        return SimulatedEngine(config, kv_cache, max_model_len, self._budget, step_times)

    def _load(self, max_model_len: int) -> list[BenchRequest]:
        """Return the requests that fit the context; traces at their recorded times."""
        args = argparse.Namespace(**vars(self._args))
        args.request_rate = math.inf if self._args.trace else self._args.request_rate
        loaded = load_dataset(args, _tokenizer(args, self.config), _vocab(args, self.spec))
        requests = [
            r for r in loaded if len(r.prompt_token_ids or ()) + r.max_tokens <= max_model_len
        ]
        if len(requests) < len(loaded):
            self._notes.append(
                f"Left out {len(loaded) - len(requests)} of "
                f"{results.counted(len(loaded), 'request')}: longer than the context of "
                f"{max_model_len} tokens."
            )
        if not requests:
            raise BenchError(f"No request can be served. {self._notes[-1]}")
        return requests

    def _simulate(
        self, engine: SimulatedEngine, requests: Sequence[BenchRequest], arrivals: Sequence[float]
    ) -> SimulatedRun:
        with self._bar(len(requests), "Simulated requests") as bar:
            return simulate(engine, requests, arrivals, bar.update)

    def _find_max_rate(
        self, engine: SimulatedEngine, requests: Sequence[BenchRequest], slos: Slos
    ) -> dict[str, Any]:
        """Find the highest rate within the service levels."""

        def probe(rate: float) -> Probe:
            arrivals = _arrivals(requests, rate, self._args, recorded=False)
            figures = _figures(self._simulate(engine, requests, arrivals), _percentiles(slos))
            return Probe(rate, slos.excess(figures), figures["request_throughput"])

        probes = find_max_rate(probe)
        best = best_probe(probes)
        rate = None if best is None else best.rate
        return {
            "max_rate": best.throughput if best is not None and math.isinf(best.rate) else rate,
            "probes": [
                {"rate": p.rate if math.isfinite(p.rate) else "inf", "excess": p.excess}
                for p in probes
            ],
        }

    def _bar(self, total: int, desc: str) -> Any:
        return results.progress(total=total, desc=desc, disable=self._args.disable_tqdm)


def _load_step_times(path: str) -> StepTimes:
    """Read step times; raise BenchError for a file of neither --save-step-times nor --record."""
    with contextlib.suppress(OSError):  # `load` reports it
        if is_recording(Path(path)):
            return read_step_times(Path(path))
    return StepTimes.load(path)


def _set_trace(args: argparse.Namespace) -> None:
    """Replace --trace FILE by --dataset-name and --dataset-path."""
    if args.trace is None:
        return
    if args.dataset_path is not None:
        raise ConfigError("--trace and --dataset-path both name requests; give one.")
    suffix = Path(args.trace).suffix.lower()
    if suffix not in _TRACES:
        raise ConfigError(f"--trace {args.trace}: must be Azure's .csv or Mooncake's .jsonl.")
    args.dataset_name, args.dataset_path = _TRACES[suffix], args.trace
    if args.num_prompts is None:
        args.num_prompts = 2**31  # all of it


def _tokenizer(args: argparse.Namespace, config: EngineConfig) -> Any:
    """Return the model's tokenizer, which all data sets except token ids need."""
    if args.dataset_name == "workload" or config.model.skip_tokenizer_init:
        return None
    from octavo.text.tokenizer import Tokenizer

    return Tokenizer.from_folder(resolve_folders(config)[1], config.model.tokenizer_mode)


def _vocab(args: argparse.Namespace, spec: ModelSpec) -> int:
    return 1 if args.dataset_name == "workload" else spec.vocab_size


def _arrivals(
    requests: Sequence[BenchRequest],
    rate: float,
    args: argparse.Namespace,
    *,
    recorded: bool = True,
) -> list[float]:
    """Return the arrival of each request: recorded, scaled to a rate, or random.

    Args:
        requests: in the order of their recorded times, if they have any.
        rate: requests per second.
        args: the flags.
        recorded: True if an infinite rate means recorded times rather than all at once.
    """
    times = [request.arrival for request in requests]
    known = [at for at in times if at is not None]
    if len(known) < len(times):
        return arrival_times(requests, rate, args.burstiness, args.seed)
    if math.isinf(rate):
        return known if recorded else [0.0] * len(known)
    if args.trace is None and recorded:
        return known  # the data set has applied the rate
    span = max(known) - min(known)
    scale = (len(known) - 1) / (span * rate) if span else 1.0
    return [(at - known[0]) * scale for at in known]


def _percentiles(slos: Slos | None) -> list[float]:
    return sorted({99.0, *(float(p) for p in (slos.percentiles if slos else ()))})


def _figures(simulated: SimulatedRun, percentiles: Sequence[float]) -> dict[str, Any]:
    """Return the figures of `summarize`, and those of the engine itself."""
    stats = simulated.stats
    figures: dict[str, Any] = dict(
        summarize(simulated.records, simulated.duration, percentiles=percentiles)
    )
    figures["kv_cache_usage_max_perc"] = simulated.kv_usage_max * 100
    if stats.prefix_cache_queries:
        hits = stats.prefix_cache_hits / stats.prefix_cache_queries
        figures["prefix_cache_hit_rate_perc"] = hits * 100
    figures["num_preemptions"] = stats.num_preemptions
    figures["num_steps"] = stats.num_steps
    return figures


def _compare(
    simulated: Sequence[RequestRecord], measured: Sequence[RequestRecord]
) -> dict[str, dict[str, float]]:
    """Compare the main figures; return the simulation's error relative to the measurement."""
    found = {}
    ours, real = (summarize(records, 1.0) for records in (simulated, measured))
    for name in _CHECKED:
        if not math.isnan(real[name]):
            error = ours[name] / real[name] - 1 if real[name] else math.nan
            found[name] = {"simulated": ours[name], "measured": real[name], "error": error}
    return found


def _print(result: dict[str, Any]) -> None:
    console = Console(highlight=False, soft_wrap=True)

    def line(text: str, style: str | None = None) -> None:
        console.print(text, markup=False, style=style)

    for note in result["notes"]:
        line(note, "yellow")
    print_summary(result, latencies=_LATENCIES, title="Simulated Serving Result", console=console)
    line(
        f"{result['duration']:,.0f} s simulated in {result['simulation_seconds']:.1f} s: "
        f"{result['num_steps']:,} steps. Step times are within "
        f"{result['step_times']['error']:.0%} (median) of those measured."
    )
    if "max_rate" in result:
        best = result["max_rate"]
        line(
            "No rate meets --slo."
            if best is None
            else f"Highest rate within --slo: {best:.4g} requests/s"
        )
    if "check" in result:
        results.print_table(
            "Simulated against measured (ms)",
            ["figure", "simulated", "measured", "error %"],
            [
                [name.removesuffix("_ms"), c["simulated"], c["measured"], c["error"] * 100]
                for name, c in result["check"].items()
            ],
            console,
        )
