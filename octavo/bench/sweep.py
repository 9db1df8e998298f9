"""`octavo bench sweep`: the serving benchmark over combinations of server and benchmark settings.

Every run has a fresh server, because the prompts of an earlier run in the prefix cache would
falsify the result. The cache of a running server (--base-url) is emptied between runs if possible.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import difflib
import hashlib
import json
import math
import re
import shlex
import statistics
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import httpx
import msgspec
from rich.console import Console

from octavo.bench import plots, results, serve
from octavo.bench.metrics import LATENCIES
from octavo.bench.process import Server, running_server
from octavo.config import (
    ConfigField,
    EngineConfig,
    ServerConfig,
    admin_keys_from_environment,
    api_keys_from_environment,
    config_fields,
    section_fields,
)
from octavo.errors import BenchError, OctavoError

SUMMARY = "summary.json"
# The search for the highest rate ends at this share of a rate, or of the burst's throughput.
_RATE_TOLERANCE = 0.05
_RATE_SPAN = 32
# Time from a server's last answer to the end of its process, in seconds.
_DEATH = 1.0
_SLO = re.compile(r"(ttft|tpot|itl|e2el)(?:_(?:p(\d+(?:\.\d+)?)|(mean|median)))?")
# Flags of `octavo bench serve` that the sweep sets itself.
_OWN = {"base_url", "plot", "result_dir", "result_filename", "save_result"}
# Settings of a run that change no figure: results with other values are the same.
_COSMETIC = {"api_key", "disable_tqdm", "request_rate", "command", "flags"}


@dataclass(frozen=True)
class Slos:
    """Service levels.

    Attributes:
        limits: limits in milliseconds by key of a result, such as p99_ttft_ms.
    """

    limits: dict[str, float]

    @property
    def percentiles(self) -> list[str]:
        """Percentiles that a result must contain for `excess`."""
        found = [re.match(r"p([\d.]+)_", key) for key in self.limits]
        return [match[1] for match in found if match]

    def excess(self, result: Mapping[str, Any]) -> float:
        """Return the largest relative excess of a result over its levels.

        A failed request violates the levels: its user waited in vain. Missing measurements (no TPOT
        of one token) violate none.
        """
        shares = [
            value / limit - 1
            for key, limit in self.limits.items()
            if (value := result[key]) is not None and not math.isnan(value)
        ]
        if result["failed"]:
            shares.append(result["failed"] / (result["failed"] + result["completed"]))
        return max(shares, default=0.0)


def parse_slos(text: str) -> Slos:
    """Parse service levels such as "ttft_p99:2000,tpot_p99:100", in milliseconds.

    Each consists of a latency (ttft, tpot, itl, e2el), optionally with _mean, _median or _p and a
    percentile (default: _p99), and the limit.

    Raises:
        BenchError: a part does not have that form.
    """
    limits: dict[str, float] = {}
    for word in text.replace(",", " ").split():
        name, _, number = word.partition(":")
        match = _SLO.fullmatch(name)
        if match is None or not 0 <= float(match[2] or 0) <= 100:
            raise BenchError(
                f"--slo {word!r}: must be NAME:MS, where NAME is one of {', '.join(LATENCIES)}, "
                "optionally with _mean, _median or _p and a percentile, as in ttft_p99:2000."
            )
        kind = match[3] or f"p{float(match[2] or 99):g}"
        key = f"{kind}_{match[1]}_ms"
        try:
            limit = float(number)
        except ValueError:
            limit = math.nan
        if not 0 < limit < math.inf:
            raise BenchError(f"--slo {word!r}: {number!r} is not a number of ms above 0.")
        if key in limits:
            raise BenchError(f"--slo {word!r}: this level is given twice.")
        limits[key] = limit
    if not limits:
        raise BenchError("--slo is empty; write for example ttft_p99:2000,tpot_p99:100.")
    return Slos(limits)


@dataclass
class Probe:
    """Measurement at one rate.

    Attributes:
        rate: offered rate in requests per second; inf: all at once.
        excess: see `Slos.excess`.
        throughput: achieved rate in requests per second.
    """

    rate: float
    excess: float
    throughput: float


def find_max_rate(
    probe: Callable[[float], Probe], tolerance: float = _RATE_TOLERANCE
) -> list[Probe]:
    """Find the highest rate within the service levels by bisection.

    The first probe sends all requests at once: the achieved throughput is the start of the search.
    The rate doubles while the levels are kept. Then the interval between the highest rate that kept
    them and the lowest that did not is halved.

    Args:
        probe: measures at a rate.
        tolerance: sufficient size of the interval, as a share of its upper end.

    Returns:
        All measurements. The answer is the highest rate with an excess of at most 0 (see
        `best_probe`); none exists if even 1/32 of that throughput is too much.
    """
    probes = [probe(math.inf)]
    if probes[0].excess <= 0:
        return probes
    rate = _round(probes[0].throughput)
    low, high = 0.0, math.inf
    lowest, highest = rate / _RATE_SPAN, rate * _RATE_SPAN
    while high - low > tolerance * high or math.isinf(high):
        found = probe(rate)
        probes.append(found)
        if found.excess <= 0:
            low = rate
        else:
            high = rate
        rate = _round(low * 2 if math.isinf(high) else (low + high) / 2)
        if (low == 0 and high <= lowest) or rate > highest or not low < rate < high:
            break
    return probes


def best_probe(probes: Sequence[Probe]) -> Probe | None:
    """Return the probe with the highest rate that kept the service levels."""
    return max((p for p in probes if p.excess <= 0), key=lambda p: p.rate, default=None)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags: those of `octavo bench serve` for all runs, and the sweep's own."""
    add = parser.add_argument_group("sweep").add_argument
    add(
        "--serve-cmd",
        metavar="TEXT",
        help="Command that starts the server; default: use the one at --base-url.",
    )
    add("--serve-params", metavar="FILE", help="JSON list of objects: flags of the server.")
    add("--bench-params", metavar="FILE", help="JSON list of objects: flags of the benchmark.")
    add(
        "--request-rates",
        metavar="X,...",
        help="Shorthand for --bench-params with these request rates.",
    )
    add("--num-runs", type=int, default=1, metavar="N", help="Runs of each combination [1].")
    add(
        "--find-max-rate",
        action="store_true",
        help="Search for the highest request rate within --slo instead of running given ones.",
    )
    add("--slo", metavar="NAME:MS,...", help="Latency limits in ms: ttft_p99:2000,tpot_p99:100.")
    add(
        "--ready-timeout",
        type=float,
        default=600.0,
        metavar="X",
        help="Timeout of a start in seconds [600].",
    )
    add("--resume", action="store_true", help="Skip runs that have a result already.")
    add("--dry-run", action="store_true", help="Print the commands without running them.")
    serve.add_server_arguments(parser)
    serve.add_load_arguments(parser)
    add = serve.add_figure_arguments(parser)
    parser.set_defaults(percentile_metrics="ttft,tpot")
    add("--save-detailed", action="store_true", help="Also save each request's figures and text.")
    add("--result-dir", default="sweep", metavar="DIR", help="Folder for the results [sweep].")
    add("--plot", metavar="FILE", help="Draw throughput and latency as FILE.png or FILE.svg.")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Run all combinations, print and save a summary.

    A failed run is recorded, and the others continue. Ctrl-C ends the sweep early; the measurements
    are saved, and --resume continues from there.

    Returns:
        metadata; `runs`, a list with label, serve_params, bench_params, run, request_rate, file and
        either the figures of `serve.benchmark` or `error`; with --find-max-rate, `max_rates`;
        `interrupted`.

    Raises:
        BenchError, ConfigError: a flag or file is wrong, or no run succeeded.
    """
    sweep = _Sweep(args)
    if args.dry_run:
        sweep.print_commands()
        return {"interrupted": False, "runs": []}
    if args.plot is not None:
        plots.check(args.plot)
    for file in (sweep.folder / SUMMARY, args.plot):
        results.check_writable(file)
    interrupted = False
    try:
        sweep.measure()
    except KeyboardInterrupt:
        interrupted = True
    result = {
        **results.metadata({k: v for k, v in vars(args).items() if k != "api_key"}),
        "interrupted": interrupted,
        "runs": sweep.runs,
        **({"max_rates": sweep.max_rates()} if args.find_max_rate else {}),
    }
    path = sweep.folder / SUMMARY
    results.save_json(path, result)
    sweep.print_tables()
    console = Console(highlight=False, soft_wrap=True)
    if interrupted:
        console.print("Interrupted; --resume continues from here.", style="yellow")
    for note in sweep.notes:
        console.print(note, markup=False, style="yellow")
    console.print(f"Saved in {path}", markup=False)
    good = [r for r in sweep.runs if "error" not in r]
    if not good and not interrupted:
        raise BenchError(
            f"None of the {len(sweep.runs)} runs succeeded. The first error: "
            f"{sweep.runs[0]['error']}"
        )
    if args.plot is not None and good:
        plots.throughput_latency(good, args.plot)
        console.print(f"Plot saved in {args.plot}", markup=False)
    return result


@dataclass
class _Combination:
    """Combination of a server and a benchmark. `probes` are those of --find-max-rate."""

    serve_params: dict[str, Any]
    bench_params: dict[str, Any]
    command: list[str] | None
    args: argparse.Namespace
    probes: list[Probe] = field(default_factory=list)

    @property
    def settings(self) -> dict[str, Any]:
        """Settings that distinguish it from others, without the request rate."""
        params = self.serve_params | self.bench_params
        return {k: v for k, v in params.items() if k != "request_rate"}

    @property
    def label(self) -> str:
        """Text of `settings`."""
        return " ".join(f"{k}={v}" for k, v in self.settings.items()) or "default"


class _Sweep:
    """Combinations, with their measurements."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Check the flags; raise BenchError or ConfigError if a flag or file is wrong."""
        self.runs: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.folder = Path(args.result_dir)
        self._args = args
        self._slos = _check_flags(args)
        command = _words("--serve-cmd", args.serve_cmd) if args.serve_cmd else None
        serve_list = _read_params("--serve-params", args.serve_params)
        bench_list = _bench_list(args)
        known = _server_fields(command)
        self.combinations = []
        for serve_params in serve_list:
            flags = server_flags(serve_params, known, f"--serve-params {args.serve_params}")
            for bench_params in bench_list:
                own = bench_arguments(_plain_bench(args), bench_params)
                if self._slos is not None:
                    own.metric_percentiles = _with(own.metric_percentiles, self._slos.percentiles)
                serve.check_arguments(own)
                words = None
                if command is not None:
                    words = _without(command, serve_params, known or {}) + flags
                if words is not None:
                    own.base_url = _address(own, words)
                self.combinations.append(_Combination(serve_params, bench_params, words, own))

    def print_commands(self) -> None:
        """Print the commands without running them."""
        for combination in self.combinations:
            if combination.command is not None:
                print(shlex.join(combination.command))
            words = shlex.join(bench_flags(combination.args))
            if self._slos is not None:
                words += "  # at rates from inf downwards, to find the highest within the SLOs"
            print(f"octavo bench serve {words}")

    def measure(self) -> None:
        """Fill `runs`; after KeyboardInterrupt the measurements so far are in it."""
        total = len(self.combinations) * self._args.num_runs
        find = self._slos is not None
        with results.progress(
            total=None if find else total, desc="Runs", disable=self._args.disable_tqdm
        ) as bar:
            for combination in self.combinations:
                if find:
                    self._search(combination, bar.update)
                else:
                    self._measure_at(combination, combination.args.request_rate, bar.update)

    def max_rates(self) -> list[dict[str, Any]]:
        """Return the highest rates found so far; null if none keeps the service levels."""
        found = []
        for combination in self.combinations:
            best = best_probe(combination.probes)
            found.append(
                {
                    "label": combination.label,
                    "serve_params": combination.serve_params,
                    "bench_params": combination.bench_params,
                    "max_rate": None if best is None else _json_rate(best.rate),
                    "request_throughput": None if best is None else best.throughput,
                    "probes": [
                        {"rate": _json_rate(p.rate), "excess": p.excess} for p in combination.probes
                    ],
                }
            )
        return found

    def print_tables(self) -> None:
        """Print a row for each combination and rate: medians over its runs."""
        tail = "p" + self._args.metric_percentiles.split(",")[-1].strip()
        settings = list(dict.fromkeys(k for c in self.combinations for k in c.settings))
        names = [n for n in LATENCIES if n in self._args.percentile_metrics.split(",")]
        keys = ["request_throughput", "output_throughput"]
        columns = [*settings, "req/s offered", "req/s", "tok/s"]
        if self._args.goodput is not None:
            keys.append("request_goodput")
            columns.append("good req/s")
        for name in names:
            short = LATENCIES[name][0]
            for kind in ("median", tail):
                keys.append(f"{kind}_{name}_ms")
                columns.append(f"{kind} {short}")
        groups: dict[tuple[str, Any], list[dict[str, Any]]] = {}
        for run_ in self.runs:
            groups.setdefault((run_["label"], run_["request_rate"]), []).append(run_)
        rows: list[list[object]] = []
        any_failed = any("error" in r for r in self.runs)
        for (_, rate), runs in groups.items():
            good = [r for r in runs if "error" not in r]
            given = runs[0]["serve_params"] | runs[0]["bench_params"]
            rows.append(
                [
                    *(given.get(name, "-") for name in settings),
                    rate,
                    *(_median(good, key) for key in keys),
                    *([f"{len(runs) - len(good)} of {len(runs)}"] if any_failed else []),
                ]
            )
        columns += ["failed"] * any_failed
        results.print_table("Sweep (times in ms)", [c.replace("_", " ") for c in columns], rows)
        errors = {r["error"]: r["label"] for r in self.runs if "error" in r}
        self.notes += [f"{label}: {error}" for error, label in errors.items()]
        noted = [r for r in self.runs if r.get("notes")]
        if noted:
            first = noted[0]
            others = results.counted(len(noted) - 1, "more run")
            more = f" (and {others}; see the notes)" * (len(noted) > 1)
            self.notes.append(
                f"{first['label']} at {first['request_rate']} req/s: {first['notes'][0]}{more}"
            )
        if self._slos is not None:
            rows = [
                [m["label"], "-" if m["max_rate"] is None else m["max_rate"]]
                for m in self.max_rates()
            ]
            results.print_table(
                f"Highest rate within {self._args.slo}", ["settings", "req/s"], rows
            )
            if any(m["max_rate"] == "inf" for m in self.max_rates()):
                self.notes.append(
                    "inf: the levels are kept even with all requests at once; more of them "
                    "(--num-prompts) make a longer queue."
                )

    def _search(self, combination: _Combination, done: Callable[[], object]) -> None:
        slos = self._slos
        assert slos is not None

        def probe(rate: float) -> Probe:
            runs = self._measure_at(combination, rate, done)
            for run_ in runs:
                if "error" in run_:
                    raise BenchError(run_["error"])
            found = Probe(
                rate,
                statistics.median(slos.excess(r) for r in runs),
                statistics.median(r["request_throughput"] for r in runs),
            )
            combination.probes.append(found)
            return found

        with contextlib.suppress(BenchError):  # it is recorded in the runs
            find_max_rate(probe)

    def _measure_at(
        self, combination: _Combination, rate: float, done: Callable[[], object]
    ) -> list[dict[str, Any]]:
        """Measure all runs of a combination at a rate; record failures."""
        measured = []
        for i in range(self._args.num_runs):
            name = _file_name(combination, rate, i)
            entry = {
                "label": combination.label,
                "serve_params": combination.serve_params,
                "bench_params": combination.bench_params,
                "run": i,
                "request_rate": _json_rate(rate),
                "file": name,
            }
            path = self.folder / name
            result = _read_result(path) if self._args.resume else None
            try:
                if result is None:
                    result = self._measure_one(combination, rate, path)
                entry |= _figures(result) | {"notes": result["notes"]}
            except OctavoError as error:
                entry["error"] = str(error)
            self.runs.append(entry)
            measured.append(entry)
            done()
            if result is not None and result["interrupted"]:
                raise KeyboardInterrupt
        return measured

    def _measure_one(self, combination: _Combination, rate: float, path: Path) -> dict[str, Any]:
        args = copy.copy(combination.args)
        args.request_rate = rate
        if combination.command is None:
            note = empty_prefix_cache(serve.server_url(args), args.api_key)
            if note is not None and note not in self.notes:
                self.notes.append(note)
            result = serve.benchmark(args)
        else:
            timeout = self._args.ready_timeout
            log = path.with_suffix(".log")
            with running_server(combination.command, args.base_url, log, timeout=timeout) as server:
                result = measure_with(server, args)
                result["server_start_seconds"] = server.seconds
        result |= {
            "serve_cmd": combination.command,
            "serve_params": combination.serve_params,
            "bench_params": combination.bench_params,
        }
        results.save_json(path, result)
        return result


def measure_with(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    """Run `serve.benchmark` on a server; if the server ends meanwhile, report its log.

    Raises:
        BenchError: the server ended, or see `serve.benchmark`.
    """
    try:
        result = serve.benchmark(args)
    except BenchError:
        server.check(_DEATH)
        raise
    if not result["interrupted"]:
        server.check()
    return result


def empty_prefix_cache(base_url: str, api_key: str | None) -> str | None:
    """Request that a running server forget its cached prefixes; return a note if it cannot."""
    environment = [*admin_keys_from_environment(), *api_keys_from_environment().values()]
    key = api_key or next(iter(environment), None)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        response = httpx.post(
            f"{base_url}/reset_prefix_cache", json={}, headers=headers, timeout=10
        )
        if response.status_code == 200:
            return None
        reason = f"status {response.status_code}"
    except httpx.HTTPError as error:
        reason = str(error) or type(error).__name__
    return (
        f"The server's prefix cache could not be emptied ({reason} of /reset_prefix_cache): runs "
        "after the first may find their prompts in it. Octavo does it with an admin key (--api-key "
        "or OCTAVO_ADMIN_KEY) or with --enable-admin; with --serve-cmd every run has a fresh "
        "server."
    )


def bench_arguments(args: argparse.Namespace, params: Mapping[str, Any]) -> argparse.Namespace:
    """Return the flags of a run: those given to all, overridden by its own.

    Args:
        args: flags of `serve.add_arguments`.
        params: values by name of a flag, without dashes.

    Raises:
        BenchError: a name or value is not one of `octavo bench serve`.
    """
    parser = _BenchParser(add_help=False, allow_abbrev=False)
    serve.add_arguments(parser)
    actions = {action.dest: action for action in parser._actions if action.dest not in _OWN}
    own = copy.copy(args)
    for name, value in params.items():
        action = actions.get(name)
        if action is None:
            raise BenchError(_unknown("--bench-params", name, list(actions)))
        if action.nargs == 0 or isinstance(value, bool):
            if action.nargs != 0 or not isinstance(value, bool):
                kind = "true or false" if action.nargs == 0 else "a value"
                raise BenchError(f"--bench-params {name}={value!r}: must be {kind}.")
            setattr(own, name, value)
            continue
        words = value if isinstance(value, list) else [value]
        parser.parse_args([action.option_strings[0], *map(str, words)], own)
    return own


def bench_flags(args: argparse.Namespace) -> list[str]:
    """Return the words after `octavo bench serve` that correspond to `args`."""
    parser = argparse.ArgumentParser(add_help=False)
    serve.add_arguments(parser)
    words: list[str] = []
    for action in parser._actions:
        value = getattr(args, action.dest)
        if value == action.default or action.dest == "api_key":
            continue
        values = [] if action.nargs == 0 else value if isinstance(value, list) else [value]
        words += [action.option_strings[0], *map(str, values)]
    return words


def _without(
    command: Sequence[str], params: Container[str], known: Mapping[str, ConfigField]
) -> list[str]:
    """Remove some settings from a server's command, so that no flag is given twice."""
    left, skipped = list[str](), 0
    for word in command:
        name = word.partition("=")[0].removeprefix("--").replace("-", "_")
        positive = name.removeprefix("no_")
        if word.startswith("--"):
            field = known.get(name) or known.get(positive)
            skipped = 0
            if field is not None and field.name in params:
                if "=" not in word and field.type is not bool:
                    # A list continues up to the next flag.
                    skipped = len(command) if isinstance(field.default, list) else 1
                continue
        elif skipped:
            skipped -= 1
            continue
        left.append(word)
    return left


def server_flags(
    params: Mapping[str, Any], known: Mapping[str, ConfigField] | None, where: str
) -> list[str]:
    """Convert settings to words of a command line: true is --x, false is --no-x.

    Args:
        params: values by name.
        known: the server's settings, if known.
        where: origin of the settings, for errors.

    Raises:
        BenchError: a name is not known, or a value is an object or null.
    """
    words: list[str] = []
    for name, value in params.items():
        flag = "--" + name.replace("_", "-")
        if known is not None and name not in known:
            raise BenchError(_unknown(where, name, list(known)))
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        elif isinstance(value, (str, int, float)):
            words += [flag, str(value)]
        elif isinstance(value, list) and value:
            words += [flag, *map(str, value)]
        else:
            raise BenchError(
                f"{where}: {name}={value!r} is not allowed; give a text, a number, true, false or "
                "a list."
            )
    return words


class _BenchParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise BenchError."""
        raise BenchError(f"--bench-params: {message}.")


def _check_flags(args: argparse.Namespace) -> Slos | None:
    """Raise BenchError for flags that are wrong or exclude each other."""
    if args.serve_cmd is None and args.base_url is None:
        raise BenchError(
            "No server is named; give its command with --serve-cmd 'octavo serve MODEL', or the "
            "address of a running one with --base-url."
        )
    if args.serve_cmd is not None and args.base_url is not None:
        raise BenchError(
            f"--serve-cmd and --base-url {args.base_url} name two servers; give one of them. The "
            "port of a command is its own --port, or --port of the sweep."
        )
    if args.serve_cmd is None and args.serve_params is not None:
        raise BenchError("--serve-params needs the command that they are for: --serve-cmd.")
    if args.request_rates is not None and args.bench_params is not None:
        raise BenchError(
            "--request-rates and --bench-params are both given; write the rates into the file."
        )
    if args.num_runs < 1:
        raise BenchError(f"--num-runs {args.num_runs}: must be at least 1.")
    if not args.ready_timeout > 0:
        raise BenchError(f"--ready-timeout {args.ready_timeout:g}: must be above 0.")
    if not args.find_max_rate:
        if args.slo is not None:
            raise BenchError("--slo is for --find-max-rate; --goodput counts the good requests.")
        return None
    if args.slo is None:
        raise BenchError(
            "--find-max-rate needs the service levels: --slo ttft_p99:2000,tpot_p99:100."
        )
    if args.request_rates is not None or math.isfinite(args.request_rate):
        raise BenchError("--find-max-rate chooses the rates itself; leave out the given ones.")
    return parse_slos(args.slo)


def _bench_list(args: argparse.Namespace) -> list[dict[str, Any]]:
    if args.request_rates is None:
        params = _read_params("--bench-params", args.bench_params)
        if args.find_max_rate and any("request_rate" in p for p in params):
            raise BenchError(
                f"--bench-params {args.bench_params}: request_rate does not go with "
                "--find-max-rate, which chooses the rates itself."
            )
        return params
    try:
        rates = [float(word) for word in args.request_rates.split(",")]
    except ValueError:
        rates = [math.nan]
    if not all(rate > 0 for rate in rates):
        raise BenchError(
            f"--request-rates {args.request_rates!r}: must be numbers above 0: 1,2,4,8."
        )
    return [{"request_rate": _json_rate(rate)} for rate in rates]


def _read_params(flag: str, path: str | None) -> list[dict[str, Any]]:
    """Read a JSON list of objects; without a file, return one empty object."""
    if path is None:
        return [{}]
    try:
        params = msgspec.json.decode(Path(path).expanduser().read_bytes())
    except OSError as error:
        raise BenchError(f"{flag} {path}: cannot be read: {error.strerror}.") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BenchError(f"{flag} {path}: is not JSON: {error}.") from error
    if not isinstance(params, list) or not all(isinstance(p, dict) for p in params):
        raise BenchError(f'{flag} {path}: must be a list of objects: [{{"max_num_seqs": 8}}, ...].')
    if not params:
        raise BenchError(f"{flag} {path}: the list is empty; write at least one object.")
    return [{k.lstrip("-").replace("-", "_"): v for k, v in p.items()} for p in params]


def _server_fields(command: Sequence[str] | None) -> dict[str, ConfigField] | None:
    """Return the settings of an Octavo server; None for another command."""
    if command is None or "serve" not in command:
        return None
    program = command[: command.index("serve")]
    if not program or Path(program[-1]).name != "octavo":
        return None
    return {f.name: f for f in (*config_fields(EngineConfig), *section_fields(ServerConfig))}


def _words(flag: str, text: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise BenchError(f"{flag} {text!r}: {error}.") from None
    if not words:
        raise BenchError(f"{flag} is empty; write for example 'octavo serve MODEL'.")
    return words


def _address(args: argparse.Namespace, command: Sequence[str]) -> str:
    """Return the address of a started server: the port of its command, or else --port."""
    port = str(args.port)
    for i, word in enumerate(command):
        name, equals, value = word.partition("=")
        if name == "--port":
            port = value if equals else "".join(command[i + 1 : i + 2])
    if not port.isdecimal():
        raise BenchError(f"--serve-cmd: --port {port!r} is not a port.")
    return f"http://{args.host}:{port}"


def _plain_bench(args: argparse.Namespace) -> argparse.Namespace:
    """Convert the sweep's flags to those of a serving benchmark."""
    parser = argparse.ArgumentParser(add_help=False)
    serve.add_arguments(parser)
    plain = parser.parse_args([])
    for name in vars(plain):
        if name not in ("plot", "result_dir", "save_result", "result_filename"):
            setattr(plain, name, getattr(args, name))
    return plain


def _with(percentiles: str, more: Sequence[str]) -> str:
    """Add the percentiles of the service levels to a list."""
    words = [w.strip() for w in percentiles.split(",")]
    return ",".join([*words, *(p for p in more if p not in words)])


def _file_name(combination: _Combination, rate: float, run_: int) -> str:
    """Make a readable name that differs for everything that changes the figures."""
    settings = {k: v for k, v in vars(combination.args).items() if k not in _COSMETIC}
    text = json.dumps([combination.command, settings, rate], default=str, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    label = re.sub(r"[^\w.=+-]+", "_", combination.label)[:80]
    return f"{label}-rate={rate:g}-{digest}-run{run_}.json"


def _read_result(path: Path) -> dict[str, Any] | None:
    """Read an earlier result; return None if it does not exist, or its run was interrupted.

    Raises:
        BenchError: the file cannot be read, or is not a result of a sweep.
    """
    try:
        result: dict[str, Any] = msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
        return None if result["interrupted"] else result
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, KeyError) as error:
        raise BenchError(f"{path} is not a result of a sweep ({error}); delete it.") from error


def _figures(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the numbers of a result, without lists and values of the whole summary."""
    left_out = {"date", "cpu", "num_cpus", "base_url", "request_rate"}
    return {
        k: v
        for k, v in result.items()
        if k not in left_out
        and not k.endswith("_version")
        and (v is None or isinstance(v, (int, float, str)))
    }


def _median(runs: Sequence[Mapping[str, Any]], key: str) -> str:
    values = [r[key] for r in runs if r.get(key) is not None and not math.isnan(r[key])]
    return shown_number(statistics.median(values)) if values else "-"


def shown_number(value: float) -> str:
    """Format three digits, or all before the point."""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _json_rate(rate: float) -> float | str:
    return rate if math.isfinite(rate) else "inf"


def _round(rate: float) -> float:
    """Round to three digits: enough for a rate, and easy to repeat."""
    return float(f"{rate:.3g}")


def _unknown(where: str, name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(known))}."
    return f"{where}: unknown name {name!r}; {hint}"
