"""`octavo bench tune`: search for the best engine settings within given service levels.

The search is successive halving (Jamieson and Talwalkar, "Non-stochastic Best Arm Identification
and Hyperparameter Optimization", AISTATS 2016): many configurations are tried with few requests,
the best third of them with three times as many, and so on. A trial is a real server with these
settings, driven by the serving benchmark.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import random
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from octavo.bench import plots, results, serve
from octavo.bench.process import free_port, running_server
from octavo.bench.sweep import (
    Probe,
    Slos,
    best_probe,
    empty_prefix_cache,
    find_max_rate,
    measure_with,
    parse_slos,
    server_flags,
    shown_number,
)
from octavo.config import BUILTIN_MODEL, EngineConfig, config_fields, environment_without_keys
from octavo.errors import BenchError, ConfigError, DatasetError
from octavo.platforms.registry import get_platform
from octavo.quantization.registry import FORMS

SPACE: dict[str, tuple[Any, ...]] = {
    "max_num_batched_tokens": (128, 256, 512, 1024, 2048, 4096, 8192),
    "max_num_seqs": (4, 8, 16, 32, 64, 128, 256),
    "long_prefill_token_threshold": (0, 64, 128, 256, 512, 1024),
}
"""Values of the settings that are searched."""

# Its prefix cache is emptied between runs, which needs an admin.
_SERVE = (sys.executable, "-m", "octavo", "serve", "--enable-admin")
_NUM_PROMPTS = 180
_NUM_WARMUPS = 8
_TOLERANCE = 0.1

Config = Mapping[str, Any]


@dataclass
class Trial:
    """Configuration with its score.

    Attributes:
        config: engine settings by name; the others are the defaults.
        budget: number of requests.
        score: higher is better: the objective if the service levels are kept, else minus their
            relative excess, minus infinity for a failed server.
        figures: measurements.
        error: cause of a failure, or None.
    """

    config: Config
    budget: int
    score: float
    figures: dict[str, Any] = field(default_factory=dict)
    error: str | None = None


def halving_budgets(num_configs: int, max_budget: int, eta: int) -> list[tuple[int, int]]:
    """Return the rungs of successive halving: numbers of configurations, and their budgets.

    The last rung has the whole budget and fewer than `eta` configurations; each one before has
    `eta` times the configurations and 1/`eta` of the budget, so all cost about the same.
    """
    last = 0
    while eta ** (last + 1) <= num_configs:
        last += 1
    return [
        (num_configs // eta**rung, max(1, max_budget // eta ** (last - rung)))
        for rung in range(last + 1)
    ]


def successive_halving(
    configs: Sequence[Config],
    evaluate: Callable[[Config, int], Trial],
    *,
    max_budget: int,
    eta: int = 3,
) -> list[Trial]:
    """Find a good configuration while spending little on bad ones.

    Args:
        configs: the candidates.
        evaluate: tries one with a budget.
        max_budget: budget of the last rung.
        eta: keep the best 1/eta of each rung.

    Returns:
        The trials of the last rung, best first; equals in the order of `configs`.
    """
    survivors = list(configs)
    trials: list[Trial] = []
    for count, budget in halving_budgets(len(configs), max_budget, eta):
        order = sorted(survivors[:count], key=configs.index)
        trials = sorted((evaluate(c, budget) for c in order), key=lambda t: -t.score)
        survivors = [t.config for t in trials]
    return trials


def sample_configs(
    space: Mapping[str, Sequence[Any]],
    count: int,
    seed: int,
    is_valid: Callable[[Config], bool] = lambda config: True,
) -> list[dict[str, Any]]:
    """Draw different configurations that cover each setting evenly.

    A Latin hypercube (McKay, Beckman and Conover 1979): each setting's values occur equally often,
    in an independent order. Invalid and repeated configurations are replaced by random ones.

    Args:
        space: values by setting.
        count: number of configurations; fewer are returned only if there are no more.
        seed: seed of the draw.
        is_valid: returns True for allowed configurations.
    """
    rng = random.Random(seed)
    columns = []
    for values in space.values():
        column = [values[i % len(values)] for i in range(count)]
        rng.shuffle(column)
        columns.append(column)
    every = list(itertools.product(*space.values()))
    rng.shuffle(every)
    drawn: list[dict[str, Any]] = []
    for row in itertools.chain(zip(*columns, strict=True), every):
        config = dict(zip(space, row, strict=True))
        if len(drawn) < count and config not in drawn and is_valid(config):
            drawn.append(config)
    return drawn


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags: those of the load of `octavo bench serve`, and the search's own."""
    parser.add_argument(
        "model",
        nargs="?",
        default=BUILTIN_MODEL,
        metavar="MODEL",
        help=f"Folder or hub id of a model; default: the built-in one ({BUILTIN_MODEL}).",
    )
    add = parser.add_argument_group("search").add_argument
    add(
        "--slo",
        required=True,
        metavar="NAME:MS,...",
        help="Latency limits in ms: e2el_p99:500,ttft_p99:200.",
    )
    add("--num-configs", type=int, default=18, metavar="N", help="Configurations to try [18].")
    add(
        "--eta",
        type=int,
        default=3,
        metavar="N",
        help="Keep the best 1/N of the configurations after each round [3].",
    )
    add(
        "--allow-quantization",
        metavar="NAME,...",
        help="Try these quantizations, too, which change the answers: int8,int4,fp8.",
    )
    add(
        "--serve-args",
        default="",
        metavar="TEXT",
        help="More flags of every server: --serve-args='--max-model-len 2048'.",
    )
    add(
        "--ready-timeout",
        type=float,
        default=600.0,
        metavar="X",
        help="Timeout of a start in seconds [600].",
    )
    add("--result-dir", default=".", metavar="DIR", help="Folder for the result [.].")
    add(
        "--result-filename",
        default="tune.json",
        metavar="NAME",
        help="Name of the result file [tune.json].",
    )
    add("--plot", metavar="FILE", help="Draw the trials as FILE.png or FILE.svg.")
    add("--disable-tqdm", action="store_true", help="No progress.")
    serve.add_load_arguments(parser)
    parser.set_defaults(num_warmups=_NUM_WARMUPS)  # every server is new


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Search, print the trials and the command line of the best one, and save them.

    With --request-rate or --max-concurrency, the objective is the output throughput at that load;
    otherwise, it is the throughput at the highest request rate that keeps the levels. --num-prompts
    is the budget of the last rung.

    The result is saved after each trial. Ctrl-C ends the search early.

    Returns:
        metadata; `objective`; `slo`; `trials` (see `Trial`); `winner` and `default`, trials with
        the same, full budget, or None without such trials; `keeps_slos`, true if the winner does;
        `command`, the words to start the winner with; `interrupted`.

    Raises:
        BenchError, ConfigError: a flag is wrong, or no server worked.
    """
    search = _Search(args)
    for path in (search.path, args.plot):
        results.check_writable(path)
    if args.plot is not None:
        plots.check(args.plot)
    interrupted = False
    try:
        search.run()
    except KeyboardInterrupt:
        interrupted = True
    result = search.save(interrupted)
    search.report(result)
    if all(t.error is not None for t in search.trials) and not interrupted:
        raise BenchError(
            f"None of the {len(search.trials)} trials succeeded. The first error: "
            f"{search.trials[0].error}"
        )
    if args.plot is not None and search.trials:
        plots.trials(result, args.plot)
        print(f"Plot saved in {args.plot}")
    return result


class _Search:
    """Trials of a search, kept in a separate object so that they survive Ctrl-C."""

    def __init__(self, args: argparse.Namespace) -> None:
        """Check the flags; raise BenchError or ConfigError if one is wrong."""
        self.trials: list[Trial] = []
        self._args = args
        self._slos = parse_slos(args.slo)
        self.path = Path(args.result_dir) / args.result_filename
        self._console = Console(highlight=False, soft_wrap=True)
        for flag, least in (("num_configs", 1), ("eta", 2)):
            if getattr(args, flag) < least:
                name = flag.replace("_", "-")
                raise BenchError(f"--{name} {getattr(args, flag)}: must be at least {least}.")
        if not args.ready_timeout > 0:
            raise BenchError(f"--ready-timeout {args.ready_timeout:g}: must be above 0.")
        space = dict(SPACE)
        if args.max_concurrency is not None:  # more rows than requests have no effect
            useful = (n for n in SPACE["max_num_seqs"] if n < args.max_concurrency)
            space["max_num_seqs"] = (*useful, _default("max_num_seqs"))
        if args.allow_quantization is not None:
            space["quantization"] = (None, *_quantizations(args.allow_quantization))
        self._space = tuple(space)
        self._serve_args = _serve_args(args.serve_args, space)
        self._bench = _bench_arguments(args, self._slos)
        serve.check_arguments(self._bench)
        self._max_budget = _NUM_PROMPTS if args.num_prompts is None else args.num_prompts
        if self._max_budget < 1:
            raise BenchError(f"--num-prompts {self._max_budget}: must be at least 1.")
        self._by_rate = math.isinf(args.request_rate) and args.max_concurrency is None
        sampled = sample_configs(space, args.num_configs - 1, args.seed, _is_valid)
        self._configs: list[Config] = [{}, *map(_given, sampled)]
        rungs = halving_budgets(len(self._configs), self._max_budget, args.eta)
        self._total = sum(count * budget for count, budget in rungs)
        self._num_trials = sum(count for count, _ in rungs)
        self._least_budget = rungs[0][1]

    @property
    def objective(self) -> str:
        """Figure that is maximised."""
        return "request_throughput" if self._by_rate else "output_throughput"

    def run(self) -> None:
        """Fill `trials`; after KeyboardInterrupt it contains those that ended."""
        goal = "highest request rate" if self._by_rate else "most output tokens a second"
        self._console.print(
            f"{len(self._configs)} configurations, for the {goal} within {self._args.slo}: "
            f"{self._num_trials} trials, each of a separate server that receives "
            f"{self._least_budget} to {self._max_budget} requests"
            f"{', at several rates' if self._by_rate else ''}. The first trial "
            "shows how long that takes.",
            markup=False,
        )
        began = time.monotonic()
        quiet = self._args.disable_tqdm
        # Without a terminal, the lines about the trials are enough.
        disable = quiet or not sys.stderr.isatty()
        with results.progress(total=self._total, desc="Requests", disable=disable) as bar:

            def evaluate(config: Config, budget: int) -> Trial:
                trial = self._evaluate(config, budget)
                self.trials.append(trial)
                bar.update(budget)
                self.save(interrupted=False)
                if not quiet:
                    done = sum(t.budget for t in self.trials)
                    seconds, total = time.monotonic() - began, bar.total or done
                    bar.write(self._progress(seconds, done, total), file=sys.stderr)
                return trial

            last = successive_halving(
                self._configs, evaluate, max_budget=self._max_budget, eta=self._args.eta
            )
            if all(t.config for t in last):  # add the default for comparison
                bar.total = self._total + self._max_budget
                evaluate({}, self._max_budget)

    def _progress(self, seconds: float, done: int, total: float) -> str:
        """Return a line about the last trial and the remaining time.

        Args:
            seconds: duration of the trials so far.
            done: requests of the trials so far.
            total: requests of all trials.
        """
        trial, left = self.trials[-1], seconds * (total - done) / done
        return (
            f"trial {len(self.trials)} of about {max(self._num_trials, len(self.trials))}, "
            f"{_label(trial.config)}: {_outcome(trial, self.objective)}; "
            f"{_duration(seconds)} so far, at most {_duration(left)} left"
        )

    def save(self, interrupted: bool) -> dict[str, Any]:
        """Write the results so far, and return them."""
        args = self._args
        winner, default = self._winner(), self._at_full_budget(lambda t: not t.config)
        result = {
            **results.metadata({k: v for k, v in vars(args).items() if k != "api_key"}),
            "objective": self.objective,
            "slo": self._slos.limits,
            "interrupted": interrupted,
            "trials": [_as_json(t) for t in self.trials],
            "winner": None if winner is None else _as_json(winner),
            "default": None if default is None else _as_json(default),
            "keeps_slos": winner is not None and winner.score >= 0,
            "command": None if winner is None else self._shown_command(winner.config),
        }
        results.save_json(self.path, result)
        return result

    def report(self, result: Mapping[str, Any]) -> None:
        """Print the trials, the winner and its command line."""
        winner, default = self._winner(), self._at_full_budget(lambda t: not t.config)
        keys = [self.objective, *self._slos.limits]
        rows: list[list[object]] = []
        for trial in sorted(self.trials, key=lambda t: (-t.budget, -t.score)):
            name = "best" if trial is winner else "" if trial.config else "default"
            kept = "failed" if trial.error else "yes" if trial.score >= 0 else "no"
            settings = [trial.config.get(n, _default(n)) for n in self._space]
            shown = [_cell(trial.figures.get(key)) for key in keys]
            rows.append([name, *settings, trial.budget, *shown, kept])
        columns = ["", *self._space, "requests", *keys, "kept"]
        results.print_table("Trials", [c.replace("_", " ") for c in columns], rows)
        say = self._console.print
        for error in dict.fromkeys(t.error for t in self.trials if t.error):
            say(error, markup=False, style="yellow")
        say(f"Saved in {self.path}", markup=False)
        if result["interrupted"]:
            say("Interrupted: the search is not complete.", style="yellow")
        if winner is None:
            return
        if winner.score < 0:
            say(
                f"No configuration meets {self._args.slo}. The nearest one misses it by "
                f"{-winner.score:.0%}: {_label(winner.config)}",
                markup=False,
                style="yellow",
            )
        else:
            value = winner.figures[self.objective]
            say(f"Best: {_label(winner.config)}: {_cell(value)} {self.objective}", markup=False)
        if default is not None and winner.config:
            say(f"Default: {_outcome(default, self.objective)}", markup=False)
            if min(winner.score, default.score) > 0:
                say(f"Best / default: {winner.score / default.score:.3f}", markup=False)
        say("Start it with:", style="bold")
        say(shlex.join(result["command"]), markup=False)

    def _winner(self) -> Trial | None:
        """Return the best trial with the largest budget so far; the default wins among equals."""
        return self._at_full_budget(lambda t: t.error is None)

    def _at_full_budget(self, wanted: Callable[[Trial], bool]) -> Trial | None:
        most = max((t.budget for t in self.trials), default=0)
        return max(
            (t for t in self.trials if t.budget == most and wanted(t)),
            key=lambda t: (t.score, not t.config),
            default=None,
        )

    def _evaluate(self, config: Config, budget: int) -> Trial:
        """Try a configuration; a server that fails has the lowest score.

        Raises:
            KeyboardInterrupt: the user pressed Ctrl-C; also if the benchmark ended in order because
                of it.
            ConfigError, DatasetError: the load is wrong for any configuration.
        """
        port = free_port()
        command = [*_SERVE, *self._words(config), "--host", "127.0.0.1", "--port", str(port)]
        url = f"http://127.0.0.1:{port}"
        log = self.path.with_suffix(".log")
        bench = copy.copy(self._bench)
        bench.base_url, bench.num_prompts = url, budget
        try:
            with running_server(
                command,
                url,
                log,
                timeout=self._args.ready_timeout,
                environment=environment_without_keys(),  # it needs no keys
            ) as server:

                def measure(rate: float) -> dict[str, Any]:
                    own = copy.copy(bench)
                    own.request_rate = rate
                    empty_prefix_cache(url, own.api_key)
                    result = measure_with(server, own)
                    if result["interrupted"]:
                        raise KeyboardInterrupt
                    return result

                return self._try(config, budget, measure)
        except DatasetError:
            raise
        except BenchError as error:
            return Trial(config, budget, -math.inf, error=str(error))

    def _try(
        self, config: Config, budget: int, measure: Callable[[float], dict[str, Any]]
    ) -> Trial:
        """Score a configuration with its running server."""
        measured: dict[float, dict[str, Any]] = {}

        def probe(rate: float) -> Probe:
            result = measured[rate] = measure(rate)
            return Probe(rate, self._slos.excess(result), result["request_throughput"])

        if not self._by_rate:
            rate = self._args.request_rate
            found = probe(rate)
        else:
            probes = find_max_rate(probe, _TOLERANCE)
            found = best_probe(probes) or min(probes, key=lambda p: p.excess)
        # Use the achieved rate, not the offered one: it distinguishes servers that keep up with any
        # rate.
        score = measured[found.rate][self.objective]
        figures = _figures(measured[found.rate])
        return Trial(config, budget, score if found.excess <= 0 else -found.excess, figures)

    def _words(self, config: Config) -> list[str]:
        return [self._args.model, *self._serve_args, *server_flags(config, None, "tune")]

    def _shown_command(self, config: Config) -> list[str]:
        return ["octavo", "serve", *self._words(config)]


def _bench_arguments(args: argparse.Namespace, slos: Slos) -> argparse.Namespace:
    """Return the flags of the serving benchmark: its defaults, and those of the load."""
    parser = argparse.ArgumentParser(add_help=False)
    serve.add_arguments(parser)
    bench = parser.parse_args([])
    for name, value in vars(args).items():
        if hasattr(bench, name) and name not in ("model", "result_dir", "result_filename"):
            setattr(bench, name, value)
    # On a terminal the search's own bar is enough.
    bench.disable_tqdm = args.disable_tqdm or sys.stderr.isatty()
    bench.metric_percentiles = ",".join(dict.fromkeys(["99", *slos.percentiles]))
    return bench


def _quantizations(text: str) -> list[str]:
    choices = [name for name in FORMS if name is not None]
    names = [word.strip() for word in text.split(",")]
    for name in names:
        if name not in choices:
            raise BenchError(f"--allow-quantization {name!r}: must be of {', '.join(choices)}.")
    return list(dict.fromkeys(names))


def _serve_args(text: str, space: Mapping[str, Any]) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise BenchError(f"--serve-args {text!r}: {error}.") from None
    for word, after in itertools.zip_longest(words, words[1:], fillvalue=""):
        flag, _, value = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if word.startswith("--") and name in (*space, "host", "port", "model"):
            raise BenchError(f"--serve-args {word!r}: tune sets this flag itself; leave it out.")
        device = value or after
        # `_default` would return other values than that server's.
        if flag == "--device" and get_platform(device).name != get_platform("auto").name:
            raise BenchError(
                f"--serve-args --device {device}: this machine has a GPU, where servers have other "
                "defaults; hide it with CUDA_VISIBLE_DEVICES= instead."
            )
    return words


def _is_valid(config: Config) -> bool:
    """Return True if the engine allows the configuration, and no other is equivalent."""
    if config["long_prefill_token_threshold"] >= config["max_num_batched_tokens"]:
        return False
    try:
        EngineConfig.from_kwargs(**config)
    except ConfigError:
        return False
    return bool(_given(config))


def _given(config: Config) -> dict[str, Any]:
    """Remove the settings with a server's default."""
    return {name: value for name, value in config.items() if value != _default(name)}


def _default(name: str) -> Any:
    """Return a server's default of a setting."""
    if name == "max_num_batched_tokens":  # the config's own default is None
        return get_platform("auto").server_batched_tokens
    return next(f.default for f in config_fields() if f.name == name)


def _figures(result: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in result.items() if isinstance(v, (int, float)) and k != "num_cpus"}


def _as_json(trial: Trial) -> dict[str, Any]:
    """Convert to JSON, which has no infinity: a failed trial's score is null."""
    return asdict(trial) | {"score": trial.score if math.isfinite(trial.score) else None}


def _label(config: Config) -> str:
    return " ".join(f"{k}={v}" for k, v in config.items()) or "default"


def _cell(value: Any) -> str:
    return "-" if value is None or math.isnan(value) else shown_number(value)


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _outcome(trial: Trial, objective: str) -> str:
    if trial.error is not None:
        return "failed"
    kept = "" if trial.score >= 0 else f", breaking the SLOs by {-trial.score:.0%}"
    return f"{_cell(trial.figures[objective])} {objective}{kept}"
