"""`octavo bench serve`: drives any OpenAI-compatible server and measures latencies of its users.

Requests arrive as a Poisson process (--request-rate), more or less bursty (--burstiness), at
recorded times (timed traces), or as earlier ones end (--max-concurrency). The client's own delays
are measured too: the figures are only meaningful while it keeps up.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import resource
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import uvloop
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from octavo.bench import plots, results
from octavo.bench.client import Client, is_chat
from octavo.bench.datasets import BenchRequest, add_dataset_arguments, load_dataset
from octavo.bench.metrics import (
    LATENCIES,
    RequestRecord,
    parse_goodput,
    print_summary,
    summarize,
)
from octavo.config import API_KEY_VARIABLES, api_keys_from_environment
from octavo.errors import BenchError, ConfigError, ModelError, reason_of
from octavo.models.hub import resolve_model
from octavo.text.tokenizer import Tokenizer

_ENDPOINTS = {
    "openai": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
    "vllm": "/v1/completions",
}
# Sampling parameters that some servers lack are only sent if they are given.
_SAMPLING = ("top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty")
_HEARTBEAT = 0.01
_GAUGE_INTERVAL = 0.5
# The client counts as the bottleneck if its loop runs this late (seconds, and as a share of the
# median time between tokens), or if it is this busy (share of a core).
_MAX_LAG = 0.005
_MAX_LAG_SHARE = 0.1
_MAX_CPU = 0.9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags, with vLLM's names where it has them."""
    add_server_arguments(parser)
    add_load_arguments(parser)
    add = add_figure_arguments(parser)
    add("--save-result", action="store_true", help="Save the results as JSON.")
    add("--save-detailed", action="store_true", help="Also save each request's figures and text.")
    add("--result-dir", metavar="DIR", help="Folder for the result; default: the current one.")
    add(
        "--result-filename",
        metavar="NAME",
        help="Name of the file; default: made of the backend, rate and date.",
    )
    add("--plot", metavar="FILE", help="Draw the requests and latencies as FILE.png or FILE.svg.")


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the server and its API."""
    add = parser.add_argument_group("server").add_argument
    add("--backend", choices=sorted(_ENDPOINTS), default="openai", help="Kind of API [openai].")
    add("--base-url", metavar="URL", help="Address of the server; overrides --host and --port.")
    add("--host", default="127.0.0.1", help="Host of the server [127.0.0.1].")
    add("--port", type=int, default=8000, metavar="N", help="Port of the server [8000].")
    add("--endpoint", metavar="PATH", help="Path of the API; default: the backend's.")
    add("--model", metavar="NAME", help="Model to use; default: the server's first.")
    add("--tokenizer", metavar="NAME", help="Folder or hub id of its tokenizer; default: --model.")
    keys = " or ".join(API_KEY_VARIABLES)
    add("--api-key", metavar="KEY", help=f"API key; default: {keys}.")
    add(
        "--ready-check-timeout-sec",
        type=float,
        default=60.0,
        metavar="X",
        help="Seconds to wait for the answer to a first, short request [60].",
    )
    add(
        "--request-timeout",
        type=float,
        default=3600.0,
        metavar="X",
        help="Timeout of a request in seconds [3600].",
    )


def add_rate_arguments(add: Callable[..., Any]) -> None:
    """Add the flags of the times of requests."""
    add(
        "--request-rate",
        type=float,
        default=math.inf,
        metavar="X",
        help="Requests per second; inf: all at once, traces at their recorded times [inf].",
    )
    add(
        "--burstiness",
        type=float,
        default=1.0,
        metavar="X",
        help="Shape of the gamma distribution of gaps; 1 is Poisson, below 1 is burstier [1].",
    )


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of the load: the requests and their times."""
    add_dataset_arguments(parser)
    add = parser.add_argument_group("load").add_argument
    add_rate_arguments(add)
    add("--max-concurrency", type=int, metavar="N", help="Maximum number of requests in flight.")
    add(
        "--num-warmups",
        type=int,
        default=0,
        metavar="N",
        help="Warm-up requests, which do not count [0].",
    )

    add = parser.add_argument_group("sampling").add_argument
    add(
        "--ignore-eos",
        action="store_true",
        help="Generate all requested tokens, even past the model's end.",
    )
    add(
        "--temperature",
        type=float,
        default=0.0,
        metavar="X",
        help="Randomness; 0: always the most probable token [0].",
    )
    for name in _SAMPLING:
        kind: type = int if name == "top_k" else float
        add(f"--{name.replace('_', '-')}", type=kind, metavar="X", help="Default: the server's.")


def add_figure_arguments(parser: argparse.ArgumentParser) -> Callable[..., argparse.Action]:
    """Add the flags of the metrics; return a function that adds more flags to the group."""
    add = parser.add_argument_group("results").add_argument
    add(
        "--percentile-metrics",
        default="ttft,tpot,itl",
        metavar="NAMES",
        help="Latencies to show, of ttft, tpot, itl, e2el [ttft,tpot,itl].",
    )
    add("--metric-percentiles", default="99", metavar="P,...", help="Percentiles [99].")
    add(
        "--goodput",
        nargs="+",
        metavar="NAME:MS",
        help="Count requests within these times: ttft:200,tpot:50,e2el:5000.",
    )
    add("--disable-tqdm", action="store_true", help="No progress bar.")
    return add


def check_arguments(args: argparse.Namespace) -> None:
    """Reject wrong flags before a server is contacted.

    Raises:
        ConfigError: a flag is wrong; the message names it.
    """
    _percentiles(args.metric_percentiles)
    _latencies(args.percentile_metrics)
    if args.goodput is not None:
        parse_goodput(args.goodput)
    _check_load(args)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run the benchmark, print its figures, and save them on request.

    Args:
        args: the flags of `add_arguments`.

    Returns:
        The result of `benchmark`. If `interrupted` is true, the caller should end as Ctrl-C does.

    Raises:
        ConfigError: a flag is wrong.
        BenchError: the server does not answer, no request succeeded, or the result cannot be saved.
    """
    folder = Path(args.result_dir or ".")
    if args.plot is not None:
        plots.check(args.plot)
    results.check_writable(args.plot)
    if args.save_result or args.save_detailed:
        results.check_writable(folder / (args.result_filename or "result.json"))
    result = benchmark(args)
    print_summary(result, latencies=_latencies(args.percentile_metrics))
    console = Console(highlight=False, soft_wrap=True)
    for note in result["notes"]:
        console.print(note, markup=False, style="yellow")
    if args.save_result or args.save_detailed:
        path = folder / (args.result_filename or _filename(result))
        results.save_json(path, result)
        console.print(f"Saved in {path}", markup=False)
    if args.plot is not None:
        plots.requests(result, args.plot)
        console.print(f"Plot saved in {args.plot}", markup=False)
    return result


def server_url(args: argparse.Namespace) -> str:
    """Return the address of the flags' server, without the /v1 of OpenAI's clients."""
    url: str = args.base_url or f"http://{_in_url(args.host)}:{args.port}"
    return url.rstrip("/").removesuffix("/v1")


def benchmark(args: argparse.Namespace) -> dict[str, Any]:
    """Run the benchmark without printing or saving anything.

    Ctrl-C ends it early: the requests that have ended are counted, `interrupted` is true.

    Returns:
        The results of `summarize` and `metadata`; num_prompts, model_id, request_rate and the like;
        the server's own figures if it has /metrics (kv_cache_usage_max_perc,
        prefix_cache_hit_rate_perc, num_preemptions, spec_decode_...); client_lag_p99_ms,
        client_lag_max_ms, client_cpu_perc and client_bottleneck; `notes`, a list of texts for the
        user; with --save-detailed or --plot, lists with an entry for each request (vLLM's names).

    Raises:
        ConfigError, BenchError: see `run`.
    """
    check_arguments(args)
    percentiles = _percentiles(args.metric_percentiles)
    goodput = None if args.goodput is None else parse_goodput(args.goodput)
    base_url = server_url(args)
    endpoint = args.endpoint or _ENDPOINTS[args.backend]
    api_key = args.api_key or next(iter(api_keys_from_environment().values()), None)
    card = _model_card(base_url, args.model, api_key)
    model = args.model or card["id"]
    requests = _load_requests(args, card, model, chat=is_chat(endpoint))
    notes = []
    fitting = [r for r in requests if _fits(r, card.get("max_model_len"))]
    if len(fitting) < len(requests):
        notes.append(
            f"Left out {len(requests) - len(fitting)} of "
            f"{results.counted(len(requests), 'request')}: longer than the model's context of "
            f"{card['max_model_len']} tokens."
        )
    if not fitting:
        raise BenchError(f"No request can be sent. {notes[0]}")
    client = Client(
        base_url,
        model,
        endpoint=endpoint,
        api_key=api_key,
        timeout=args.request_timeout,
        params=_params(args),
        keep_text=args.save_detailed,
    )
    _allow_connections(len(fitting) if args.max_concurrency is None else args.max_concurrency)
    measurement = _Measurement(fitting, client, base_url, args)
    interrupted = False
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(measurement.run())
    except KeyboardInterrupt:
        interrupted = True
    records = [measurement.records[i] for i in sorted(measurement.records)]
    if not interrupted:
        _check_any(records)
    summary = summarize(records, measurement.duration, percentiles=percentiles, goodput=goodput)
    lag = measurement.lag.summary(measurement.duration, summary["median_itl_ms"])
    notes += _notes(lag, records, fitting, args, interrupted)
    result = {
        **results.metadata({k: v for k, v in vars(args).items() if k != "api_key"}),
        "backend": args.backend,
        "base_url": base_url,
        "model_id": model,
        "num_prompts": len(fitting),
        "request_rate": args.request_rate if math.isfinite(args.request_rate) else "inf",
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        "interrupted": interrupted,
        **summary,
        **measurement.server.summary(),
        **lag,
        "notes": notes,
    }
    return result | (_details(records) if args.save_detailed or args.plot else {})


async def run_serve(
    requests: Sequence[BenchRequest],
    client: Client,
    *,
    request_rate: float = math.inf,
    burstiness: float = 1.0,
    max_concurrency: int | None = None,
    seed: int = 0,
    lag: ClientLag | None = None,
    on_record: Callable[[int, RequestRecord], None] | None = None,
) -> list[RequestRecord]:
    """Send requests at their times and wait for all answers.

    Args:
        requests: the requests; an `arrival`, if given, is the time to send.
        client: sends them.
        request_rate: rate of the other requests per second; inf: at once.
        burstiness: see `arrival_times`.
        max_concurrency: maximum number of requests in flight; the others wait in the client.
        seed: seed of the arrivals.
        lag: records the client's delays.
        on_record: called with the request's index and its record as soon as it has ended.

    Returns:
        The records in the order of the requests. Their times count from this call.
    """
    times = arrival_times(requests, request_rate, burstiness, seed)
    slots = asyncio.Semaphore(max_concurrency or len(requests))
    lag = ClientLag() if lag is None else lag
    origin = time.perf_counter()

    async def one(index: int) -> RequestRecord:
        delay = origin + times[index] - time.perf_counter()
        if delay > 0:
            await asyncio.sleep(delay)
            lag.late.append(time.perf_counter() - origin - times[index])
        async with slots:
            record = await client.send(requests[index], origin=origin, scheduled_time=times[index])
        if on_record is not None:
            on_record(index, record)
        return record

    async with lag.watch():
        return list(await asyncio.gather(*map(one, range(len(requests)))))


def arrival_times(
    requests: Sequence[BenchRequest], request_rate: float, burstiness: float, seed: int
) -> list[float]:
    """Return the time to send each request, in seconds since the start.

    A request's own `arrival` takes precedence. For the others, gaps are drawn from a gamma
    distribution of shape `burstiness` and mean 1 / `request_rate`, then scaled so that the last
    request arrives at number / rate: so short runs have the configured rate, too.
    """
    if math.isinf(request_rate):
        drawn = np.zeros(len(requests))
    else:
        gaps = np.random.default_rng(seed).gamma(burstiness, size=len(requests))
        drawn = np.cumsum(gaps)
        drawn *= len(requests) / request_rate / drawn[-1]
    return [
        float(at) if r.arrival is None else r.arrival for r, at in zip(requests, drawn, strict=True)
    ]


@dataclass
class ClientLag:
    """Delays of the client itself; all times in seconds.

    Attributes:
        late: delay of sending each request (or queuing it for a slot); only of requests with a time
            to wait for, as a delay is harmless when all are sent at once.
        beats: delays of the event loop in waking a task that sleeps 10 ms at a time: they also
            delay the reading of tokens.
        cpu: processor time of this process while watched.
    """

    late: list[float] = field(default_factory=list)
    beats: list[float] = field(default_factory=list)
    cpu: float = 0.0

    @contextlib.asynccontextmanager
    async def watch(self) -> Any:
        """Measure during the body."""
        cpu = time.process_time()
        beating = asyncio.create_task(self._beat())
        try:
            yield
        finally:
            beating.cancel()
            self.cpu += time.process_time() - cpu

    async def _beat(self) -> None:
        while True:
            begin = time.perf_counter()
            await asyncio.sleep(_HEARTBEAT)
            self.beats.append(time.perf_counter() - begin - _HEARTBEAT)

    def summary(self, duration: float, median_itl_ms: float) -> dict[str, Any]:
        """Return the lag in ms, the load in % of a core, and client_bottleneck.

        Args:
            duration: duration of the run, in seconds.
            median_itl_ms: reference value for the lag, or NaN.
        """
        beats = np.maximum(self.beats or [0.0], 0)
        late = np.maximum(self.late or [0.0], 0)
        p99 = max(float(np.percentile(beats, 99)), float(np.percentile(late, 99)))
        limit = max(
            _MAX_LAG, 0 if math.isnan(median_itl_ms) else median_itl_ms / 1000 * _MAX_LAG_SHARE
        )
        share = self.cpu / duration if duration > 0 else 0.0
        return {
            "client_lag_p99_ms": p99 * 1000,
            "client_lag_max_ms": float(max(beats.max(), late.max())) * 1000,
            "client_late_sends_p99_ms": float(np.percentile(late, 99)) * 1000,
            "client_cpu_perc": share * 100,
            "client_bottleneck": p99 > limit or share > _MAX_CPU,
        }


class _Measurement:
    """Run and its results, kept in a separate object so that they survive Ctrl-C."""

    def __init__(
        self,
        requests: list[BenchRequest],
        client: Client,
        base_url: str,
        args: argparse.Namespace,
    ) -> None:
        self.records: dict[int, RequestRecord] = {}
        self.duration = 0.0
        self.lag = ClientLag()
        self.server = ServerFigures(base_url)
        self._requests = requests
        self._client = client
        self._args = args

    async def run(self) -> None:
        """Check, warm up, measure.

        Raises:
            BenchError: the server does not answer a first request.
        """
        args = self._args
        await self._check_server()
        await run_serve(
            [_warmup(r) for r in self._requests[: args.num_warmups]],
            self._client,
            max_concurrency=args.max_concurrency,
        )
        await self.server.begin()
        polling = asyncio.create_task(self.server.poll())
        with results.progress(
            total=len(self._requests), desc="Requests", disable=args.disable_tqdm
        ) as bar:

            def on_record(index: int, record: RequestRecord) -> None:
                self.records[index] = record
                bar.update()

            begin = time.perf_counter()
            try:
                await run_serve(
                    self._requests,
                    self._client,
                    request_rate=args.request_rate,
                    burstiness=args.burstiness,
                    max_concurrency=args.max_concurrency,
                    seed=args.seed,
                    lag=self.lag,
                    on_record=on_record,
                )
            finally:
                self.duration = time.perf_counter() - begin
                polling.cancel()
        await self.server.end()

    async def _check_server(self) -> None:
        """Send a request of one token, too short to leave anything in a prefix cache."""
        first = self._requests[0]
        ids = None if first.prompt_token_ids is None else first.prompt_token_ids[:1]
        short = BenchRequest(ids, None if first.prompt is None else "a", 1)
        timeout = self._args.ready_check_timeout_sec
        try:
            async with asyncio.timeout(timeout):
                record = await self._client.send(short)
            error = record.error
        except TimeoutError:
            error = f"No answer within {timeout:g} s (--ready-check-timeout-sec)."
        if error is not None:
            raise BenchError(f"The server does not answer a first, short request. {error}")


class ServerFigures:
    """Figures of a server from its /metrics, before, during and after a run.

    Reads the names of Octavo and of vLLM. A server without such a page has no figures.
    """

    _COUNTERS = (
        "prefix_cache_queries",
        "prefix_cache_hits",
        "num_preemptions",
        "spec_decode_num_drafts",
        "spec_decode_num_draft_tokens",
        "spec_decode_num_accepted_tokens",
    )

    def __init__(self, base_url: str) -> None:
        self._url = f"{base_url}/metrics"
        self._before: dict[str, float] = {}
        self._after: dict[str, float] = {}
        self._kv_usage_max: float | None = None

    async def begin(self) -> None:
        """Read the counters before the run."""
        self._before = await self._read()

    async def end(self) -> None:
        """Read the counters after the run."""
        self._after = await self._read()

    async def poll(self) -> None:
        """Watch the usage of the KV cache, until cancelled."""
        while "kv_cache_usage_perc" in self._before:
            await asyncio.sleep(_GAUGE_INTERVAL)
            await self._read()

    def summary(self) -> dict[str, float]:
        """Return the figures that the server has."""
        change = {
            name: self._after[name] - self._before[name]
            for name in self._COUNTERS
            if name in self._before and name in self._after
        }
        figures: dict[str, float] = {}
        if self._kv_usage_max is not None:
            figures["kv_cache_usage_max_perc"] = self._kv_usage_max * 100
        if queries := change.get("prefix_cache_queries"):
            figures["prefix_cache_hit_rate_perc"] = change["prefix_cache_hits"] / queries * 100
        if "num_preemptions" in change:
            figures["num_preemptions"] = int(change["num_preemptions"])
        if tokens := change.get("spec_decode_num_draft_tokens"):
            accepted = change["spec_decode_num_accepted_tokens"]
            figures["spec_decode_acceptance_rate_perc"] = accepted / tokens * 100
            if drafts := change.get("spec_decode_num_drafts"):
                figures["spec_decode_acceptance_length"] = 1 + accepted / drafts
        return figures

    async def _read(self) -> dict[str, float]:
        """Return values by name without prefix, summed over labels; nothing without such a page."""
        try:
            async with httpx.AsyncClient(timeout=10) as http:
                response = await http.get(self._url)
            values = _parse_metrics(response.text) if response.status_code == 200 else {}
        except (httpx.HTTPError, ValueError):
            return {}
        if "kv_cache_usage_perc" in values:
            self._kv_usage_max = max(self._kv_usage_max or 0.0, values["kv_cache_usage_perc"])
        return values


def _parse_metrics(text: str) -> dict[str, float]:
    wanted = (*ServerFigures._COUNTERS, "kv_cache_usage_perc")
    lines = [line for line in text.splitlines() if any(name in line for name in wanted)]
    values: dict[str, float] = {}
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            name = sample.name.rpartition(":")[2].removesuffix("_total")
            if name in wanted:
                values[name] = values.get(name, 0.0) + sample.value
    return values


def _model_card(base_url: str, model: str | None, api_key: str | None) -> dict[str, Any]:
    """Return the server's entry of the model (of its first one without a name) in /v1/models.

    Raises:
        BenchError: no server answers there, or the answer is not OpenAI's.
    """
    url = f"{base_url}/v1/models"
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        response = httpx.get(url, headers=headers, timeout=10)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = reason_of(error)
        raise BenchError(
            f"No answer from {url}: {reason}. Start a server with `octavo serve`, or name another "
            "one with --base-url."
        ) from None
    if response.status_code == 401:
        raise BenchError(f"{url} rejects the API key; pass one with --api-key.")
    if response.status_code == 404 and model is not None:
        return {"id": model}  # a server without a list of models
    try:
        cards = {str(card["id"]): dict(card) for card in response.json()["data"]}
        # A server may know a model by more names than it lists.
        return cards.get(model, {"id": model}) if model else next(iter(cards.values()))
    except (ValueError, LookupError, TypeError, StopIteration):
        raise BenchError(
            f"{url} answers with status {response.status_code} and "
            f"{response.content[:60]!r}: not OpenAI's list of models."
        ) from None


def _load_requests(
    args: argparse.Namespace, card: Mapping[str, Any], model: str, *, chat: bool
) -> list[BenchRequest]:
    if args.dataset_name == "workload" and not chat:
        return load_dataset(args, None, 1)  # token ids as they are
    name = args.tokenizer or card.get("root") or model
    try:
        tokenizer = Tokenizer.from_folder(resolve_model(name, load_format="dummy"))
    except ModelError as error:
        raise ConfigError(
            f"The prompts need the model's tokenizer, and {name!r} has none: {error} Name its "
            "folder with --tokenizer."
        ) from error
    requests = load_dataset(args, tokenizer, tokenizer.vocab_size)
    if not chat:
        return requests
    return [
        r if r.prompt is not None else replace(r, prompt=tokenizer.decode(r.prompt_token_ids or []))
        for r in requests
    ]


def _warmup(request: BenchRequest) -> BenchRequest:
    """Reverse a request, so that it leaves nothing useful in a prefix cache."""
    ids, text = request.prompt_token_ids, request.prompt
    return BenchRequest(
        None if ids is None else ids[::-1], None if text is None else text[::-1], request.max_tokens
    )


def _fits(request: BenchRequest, max_model_len: int | None) -> bool:
    if max_model_len is None:
        return True
    return len(request.prompt_token_ids or []) + request.max_tokens <= max_model_len


def _params(args: argparse.Namespace) -> dict[str, Any]:
    params = {"temperature": args.temperature}
    params |= {n: getattr(args, n) for n in _SAMPLING if getattr(args, n) is not None}
    return params | ({"ignore_eos": True} if args.ignore_eos else {})


def _check_load(args: argparse.Namespace) -> None:
    """Raise ConfigError for flags out of range."""
    for name in ("request_rate", "burstiness", "request_timeout", "ready_check_timeout_sec"):
        if not getattr(args, name) > 0:
            flag = name.replace("_", "-")
            raise ConfigError(f"--{flag} {getattr(args, name)}: must be above 0.")
    if args.max_concurrency is not None and args.max_concurrency < 1:
        raise ConfigError(f"--max-concurrency {args.max_concurrency}: must be at least 1.")
    if args.num_warmups < 0:
        raise ConfigError(f"--num-warmups {args.num_warmups}: must be at least 0.")


def _latencies(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in LATENCIES:
            raise ConfigError(f"--percentile-metrics {name!r}: must be of {', '.join(LATENCIES)}.")
    return names


def _percentiles(text: str) -> list[float]:
    try:
        values = [float(word) for word in text.split(",")]
    except ValueError:
        values = [math.nan]
    if not all(0 <= p <= 100 for p in values):
        raise ConfigError(f"--metric-percentiles {text!r}: must be numbers from 0 to 100: 50,99.")
    return values


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _allow_connections(count: int) -> None:
    """Raise the limit of open files, as every request in flight has a connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + 256
    if soft != resource.RLIM_INFINITY and soft < needed:
        limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def _check_any(records: Iterable[RequestRecord]) -> None:
    """Raise BenchError if no request succeeded."""
    errors = [r.error for r in records]
    if None not in errors:
        raise BenchError(
            f"None of the {len(errors)} requests succeeded. The first error: {errors[0]}"
        )


def _notes(
    lag: Mapping[str, Any],
    records: Sequence[RequestRecord],
    requests: Sequence[BenchRequest],
    args: argparse.Namespace,
    interrupted: bool,
) -> list[str]:
    """Return notes for the user about the validity of the figures."""
    notes = []
    if interrupted:
        notes.append(
            f"Interrupted: the figures cover {len(records)} of "
            f"{results.counted(len(requests), 'request')}."
        )
    failed = [r.error for r in records if r.error is not None]
    if failed:
        notes.append(
            f"{results.counted(len(failed), 'request')} failed. The first error: {failed[0]}"
        )
    if args.ignore_eos and not interrupted:
        short = sum(
            record.error is None and record.num_output_tokens < request.max_tokens
            for record, request in zip(records, requests, strict=True)
        )
        if short:
            notes.append(
                f"{results.counted(short, 'answer')} came out shorter than requested, despite "
                "--ignore-eos."
            )
    if lag["client_bottleneck"]:
        cause = (
            "it had too much to do; offer less load"
            if lag["client_cpu_perc"] > _MAX_CPU * 100
            else "other processes used its core; reserve one for it"
        )
        notes.append(
            f"The client was a bottleneck: {lag['client_lag_p99_ms']:.1f} ms late (p99; most "
            f"{lag['client_lag_max_ms']:.1f} ms), using {lag['client_cpu_perc']:.0f} % of a core. "
            f"Latencies may be that much too high: {cause}."
        )
    return notes


def _details(records: Sequence[RequestRecord]) -> dict[str, list[Any]]:
    """Return vLLM's lists; times in seconds."""
    return {
        "input_lens": [r.num_prompt_tokens for r in records],
        "output_lens": [r.num_output_tokens for r in records],
        "cached_lens": [r.num_cached_tokens for r in records],
        "scheduled_times": [r.scheduled_time for r in records],
        "start_times": [r.start_time for r in records],
        "ttfts": [r.ttft for r in records],
        "itls": [r.itls for r in records],
        "generated_texts": [r.text for r in records],
        "errors": [r.error for r in records],
    }


def _filename(result: Mapping[str, Any]) -> str:
    """Name the file by vLLM's scheme: backend, rate, concurrency, model, date."""
    limit = result["max_concurrency"]
    concurrency = "" if limit is None else f"-concurrency{limit}"
    model = str(result["model_id"]).rstrip("/").rpartition("/")[2]
    date = datetime.now().strftime("%Y%m%d-%H%M%S")
    return f"{result['backend']}-{result['request_rate']}qps{concurrency}-{model}-{date}.json"
