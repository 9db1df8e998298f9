"""`octavo plan`: memory of a server by purpose, what its prefix cache will hold, expected times."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import msgspec
from msgspec import structs
from rich.text import Text

from octavo.config import ServerConfig
from octavo.config.arguments import add_engine_settings
from octavo.engine.assemble import plan_memory, set_up_worker
from octavo.errors import ConfigError, ModelError
from octavo.kv_cache.groups import KVCacheConfig, max_blocks_per_request
from octavo.kv_cache.sessions import SessionShape, find_hits
from octavo.model_tools.opened import MODEL_HELP, OpenedModel, model_kwargs
from octavo.model_tools.plan_times import (
    Drafts,
    MachineProbe,
    Probe,
    Times,
    expect_times,
    find_problem,
    without_logs,
)
from octavo.model_tools.tables import make_console, make_table, mib, print_pairs
from octavo.models.loader import check_inputs
from octavo.plan.memory_plan import MIB, MemoryPlan
from octavo.plan.setup import WorkerSetup
from octavo.plan.step_cost import Load
from octavo.platforms.registry import get_platform
from octavo.terminal.screen import harmless
from octavo.worker.scratch import check_caches

_SESSION_FLAGS = {
    "sessions": "Concurrent sessions",
    "turns": "Messages of the user in a session",
    "system_tokens": "Tokens of the system prompt that all sessions share",
    "message_tokens": "Tokens of a message of the user",
    "answer_tokens": "Tokens of an answer",
}
_DEFAULT_LOAD = Load(512, 128, 8)
_UNLIMITED = 2**62
"""Memory of another machine, if none is given."""
_MS = 1000.0
_PROBE_SECONDS = 4.0
"""Time after which no further setting is tried: the probe takes five seconds in all."""
_DRAFTS = Drafts(count=4, accepted=0.5)
"""Drafts of speculative decoding in the table of settings."""


@dataclass(frozen=True)
class Expectation:
    """Requests and machine of the expected times.

    Attributes:
        input_len: tokens of a prompt; None: 512, or fewer if the context is short.
        output_len: tokens of an answer; None: 128, or fewer.
        batch_size: requests at once; None: 8, or fewer if they do not fit.
        cores: cores of another machine; None: this machine's.
        bandwidth: bytes per second that these read; None: this machine's.
        memory: bytes of another machine's memory; None: this machine's, or with `cores` or
            `bandwidth` no limit.
        probe: the measured machine; None: this one.
    """

    input_len: int | None = None
    output_len: int | None = None
    batch_size: int | None = None
    cores: int | None = None
    bandwidth: float | None = None
    memory: int | None = None
    probe: Probe | None = None

    @property
    def available(self) -> int | None:
        """Bytes of the memory; None: this machine's."""
        elsewhere = self.cores is not None or self.bandwidth is not None
        return _UNLIMITED if self.memory is None and elsewhere else self.memory

    def load(self, planned: _Planned) -> Load:
        """Return the requests.

        Raises:
            ConfigError: they do not fit the plan.
        """
        length, default = planned.plan.max_model_len, _DEFAULT_LOAD
        output_len = self.output_len or min(default.output_len, max(1, length // 4))
        input_len = self.input_len or min(default.input_len, max(1, length - output_len))
        if input_len + output_len > length:
            raise ConfigError(
                f"--input-len {input_len} and --output-len {output_len} are more than the context "
                f"of {length:,} tokens; lower one."
            )
        most = planned.room(input_len + output_len)
        if self.batch_size is not None and self.batch_size > most:
            raise ConfigError(
                f"--batch-size {self.batch_size}: {most} requests of {input_len + output_len} "
                "tokens run at once with these settings; lower it, or raise max_num_seqs or "
                "kv_cache_memory_bytes."
            )
        return Load(input_len, output_len, self.batch_size or min(default.batch_size, most))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add MODEL, --json, chat sessions, requests, another machine and the flags of the engine."""
    parser.add_argument("model_arg", nargs="?", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument("--json", action="store_true", help="Print the result as JSON.")
    group = parser.add_argument_group("chat sessions, whose cached prefixes are predicted")
    for name, doc in _SESSION_FLAGS.items():
        default, flag = getattr(SessionShape, name), "--" + name.replace("_", "-")
        group.add_argument(flag, type=int, default=default, metavar="N", help=f"{doc} [{default}].")
    add = parser.add_argument_group("requests, whose times are predicted").add_argument
    default = _DEFAULT_LOAD
    add("--input-len", type=int, metavar="N", help=f"Tokens of a prompt [{default.input_len}].")
    add("--output-len", type=int, metavar="N", help=f"Tokens of an answer [{default.output_len}].")
    add("--batch-size", type=int, metavar="N", help=f"Requests at once [{default.batch_size}].")
    add = parser.add_argument_group("another machine, with cores like this one's").add_argument
    add("--cores", type=int, metavar="N", help="Number of cores [this machine's].")
    add(
        "--bandwidth",
        type=float,
        metavar="GB/S",
        help="10^9 bytes per second that all cores read from memory [measured].",
    )
    add("--memory", type=float, metavar="GIB", help="Memory in GiB [no limit].")
    add_engine_settings(parser)


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Plan the memory, and print the plan.

    Returns:
        See `plan`.

    Raises:
        ConfigError, ModelError, HubError: see `plan`.
    """
    shape = SessionShape(**{name: getattr(args, name) for name in _SESSION_FLAGS})
    for name in ("input_len", "output_len", "batch_size", "cores", "bandwidth", "memory"):
        value, flag = getattr(args, name), name.replace("_", "-")
        if value is not None and not value > 0:
            raise ConfigError(f"--{flag} {value:g} must be greater than 0.")
    expected = Expectation(
        args.input_len,
        args.output_len,
        args.batch_size,
        args.cores,
        None if args.bandwidth is None else args.bandwidth * 1e9,
        None if args.memory is None else int(args.memory * 2**30),
    )
    result = plan(model_kwargs(args), shape, expected)
    if args.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(result), indent=2).decode() + "\n")
    else:
        _print(result)
    return result


def plan(
    kwargs: Mapping[str, Any],
    shape: SessionShape | None = None,
    expected: Expectation | None = None,
    *,
    compare_settings: bool = True,
) -> dict[str, Any]:
    """Return the memory plan of `octavo serve`, and the times to expect.

    Args:
        kwargs: settings, as `LLM` takes them.
        shape: chat sessions whose hits are predicted; None: the default ones.
        expected: requests and machine of the expected times; None: without times.
        compare_settings: False to leave out what each setting buys.

    Returns:
        model; total, limit (bytes; None: no limit); `items`: the bytes of each purpose; num_blocks,
        block_size, kv_cache_dtype, kv_cache_nbytes_per_token; max_model_len (tokens);
        max_concurrency: number of requests of that length that fit at once; `prefix_cache`: see
        `_describe_cache`; `times`: see `_describe_times`, or None; `settings`: what each setting
        buys, and settings_left_out, see `_Comparison`.

    Raises:
        ConfigError, ModelError, HubError: settings or model are unusable, or the memory is too
            small, or the device measures its memory only after loading, or the requests do not fit.
    """
    found = _Planned.of(kwargs, expected or Expectation())
    planned, setup = found.plan, found.setup
    result: dict[str, Any] = {
        "model": setup.config.model.model,
        "total": planned.total,
        "limit": None if found.is_unlimited else planned.limit,
        "items": {item.name: item.nbytes for item in planned.items},
        "num_blocks": planned.num_blocks,
        "block_size": planned.block_size,
        "kv_cache_dtype": setup.kv_cache_dtype,
        "kv_cache_nbytes_per_token": planned.block_nbytes / planned.block_size,
        "max_model_len": planned.max_model_len,
        "max_concurrency": planned.max_concurrency,
        "prefix_cache": _describe_cache(planned, found.kv_cache, setup, shape or SessionShape()),
        "times": None,
        "settings": [],
        "settings_left_out": [],
    }
    if expected is None:
        return result
    load = expected.load(found)
    problem = find_problem(setup)
    result["times"] = asdict(load) | {"problem": problem}
    if problem is None:
        begin = time.perf_counter()
        # The threads of another machine are not those of the probe of this one.
        threads = None if expected.cores is not None else setup.config.device.num_threads
        probe = expected.probe or MachineProbe(threads)
        expected = replace(expected, probe=probe)
        times = _expect(found, load, expected)
        result["times"] |= _describe_times(times, load, expected.cores or probe.cores)
        if compare_settings:
            hit_rate = result["prefix_cache"].get("hit_rate", 0.0)
            comparison = _Comparison(kwargs, found, load, expected, times, hit_rate)
            comparison.run(begin + _PROBE_SECONDS)
            result["settings"] = comparison.rows
            result["settings_left_out"] = comparison.left_out
    return result


@dataclass(frozen=True)
class _Planned:
    """Planned engine."""

    setup: WorkerSetup
    plan: MemoryPlan
    kv_cache: KVCacheConfig

    @classmethod
    def of(cls, kwargs: Mapping[str, Any], expected: Expectation) -> _Planned:
        """Plan an engine; see `plan`."""
        model = OpenedModel.of(dict(kwargs), with_weights=False)
        platform = get_platform(model.config.device.device)
        setup = set_up_worker(
            model.config, model.spec, model.path, platform, platform.server_batched_tokens
        )
        if expected.cores is not None:  # each thread has memory of its own
            device = structs.replace(model.config.device, num_threads=expected.cores)
            setup = replace(setup, config=structs.replace(model.config, device=device))
        estimate = platform.estimate_memory(setup)
        if estimate is None:
            raise ConfigError(
                f"device={platform.name} has no plan: it measures memory after loading."
            )
        if expected.available is not None:
            estimate = replace(estimate, source="--memory", available=expected.available)
        memory = ServerConfig().request_memory_bytes
        planned, kv_cache = plan_memory(setup, estimate, request_memory=memory, warm_spare=None)
        return cls(setup, planned, kv_cache)

    @property
    def is_unlimited(self) -> bool:
        """True if the memory has no limit."""
        return self.plan.limit > _UNLIMITED // 4

    def room(self, length: int) -> int:
        """Return the number of requests of `length` tokens that run at once."""
        plan, most = self.plan, self.setup.config.scheduler.max_num_seqs
        blocks = max_blocks_per_request(
            self.kv_cache.groups,
            plan.block_size,
            length,
            self.setup.max_num_batched_tokens,
            self.setup.max_encoder_len,
        )
        if blocks:
            most = min(most, (plan.num_blocks - 1) // blocks)
        if plan.num_states:
            most = min(most, plan.num_states // plan.states_per_request)
        return most


def _expect(found: _Planned, load: Load, expected: Expectation, **more: Any) -> Times:
    assert expected.probe is not None
    cores, bandwidth = expected.cores, expected.bandwidth
    with without_logs():
        return expect_times(
            found.setup, load, expected.probe, cores=cores, bandwidth=bandwidth, **more
        )


def _describe_times(times: Times, load: Load, cores: int) -> dict[str, Any]:
    """Return the times in milliseconds.

    Returns:
        cores and bandwidth (bytes per second) of the machine; ttft_ms and tpot_ms of one request;
        batch_ttft_ms and batch_tpot_ms of the whole batch; output_throughput, tokens per second of
        the batch; longest_step_ms; parts_ms: see `Times`.
    """
    return {
        "cores": cores,
        "bandwidth": times.machine.bandwidth,
        "ttft_ms": times.ttft * _MS,
        "tpot_ms": times.tpot * _MS,
        "batch_ttft_ms": times.batch_ttft * _MS,
        "batch_tpot_ms": times.batch_tpot * _MS,
        "output_throughput": load.batch_size / times.batch_tpot,
        "longest_step_ms": times.longest_step * _MS,
        "parts_ms": {
            step: {name: seconds * _MS for name, seconds in parts.items()}
            for step, parts in times.parts.items()
        },
    }


@dataclass(frozen=True)
class _Comparison:
    """Comparison of a plan with those of other settings.

    Attributes:
        rows: first the plan itself. Each is a dict with setting; total (bytes); kv_tokens: tokens
            that the KV cache holds; room: requests that run at once; ttft_ms, tpot_ms,
            batch_tpot_ms, longest_step_ms; note: what the times assume, or "". Settings with errors
            have none.
        left_out: settings that were not tried for lack of time.
    """

    kwargs: Mapping[str, Any]
    found: _Planned
    load: Load
    expected: Expectation
    times: Times
    hit_rate: float
    """Part of a prompt of a chat session that the prefix cache has."""
    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[dict[str, Any]] = field(default_factory=list)

    def run(self, end: float) -> None:
        """Compare all settings, and try none after `end`, a time of `time.perf_counter`."""
        self._add({}, self.found, self.times)
        for setting in self._settings():
            try:
                with without_logs():
                    other = _Planned.of({**self.kwargs, **setting}, self.expected)
                    check_inputs(other.setup.spec.weights())
                    backend = get_platform("cpu").make_attention_backend(other.setup, "cpu")
                    check_caches(other.setup, backend)
            except (ConfigError, ModelError):
                continue
            if other.room(self.load.input_len + self.load.output_len) < self.load.batch_size:
                continue
            if time.perf_counter() > end:
                self.left_out.append(setting)
            else:
                self._try(setting, other)

    def _settings(self) -> Iterator[dict[str, Any]]:
        config = self.found.setup.config
        for form in ("int8", "int4"):
            if config.model.quantization != form:
                yield {"quantization": form}
        if self.hit_rate:
            yield {"enable_prefix_caching": True}
        yield {"speculative_config": {"method": "ngram", "num_speculative_tokens": _DRAFTS.count}}
        for dtype in ("int8", "fp8"):
            if config.cache.kv_cache_dtype != dtype:
                yield {"kv_cache_dtype": dtype}
        budget, seqs = self.found.setup.max_num_batched_tokens, config.scheduler.max_num_seqs
        for value in (budget // 2, 2 * budget):
            yield {"max_num_batched_tokens": value}
        for value in (seqs // 2, 2 * seqs):
            yield {"max_num_seqs": value}

    def _try(self, setting: Mapping[str, Any], other: _Planned) -> None:
        (name,) = setting
        match name:
            case "quantization":
                self._add(setting, other, _expect(other, self.load, self.expected))
            case "max_num_seqs":  # has no influence on a step of the same batch
                self._add(setting, other, self.times)
            case "enable_prefix_caching":
                times = _expect(
                    other, self.load, self.expected, like=self.times, cached=self.hit_rate
                )
                self._add(setting, other, times, f"{self.hit_rate:.0%} of a prompt cached")
            case "speculative_config":
                times = _expect(other, self.load, self.expected, like=self.times, drafts=_DRAFTS)
                note = f"{_DRAFTS.count} drafts, each accepted with {_DRAFTS.accepted:.0%}"
                self._add(setting, other, times, note)
            case _:
                times = _expect(other, self.load, self.expected, like=self.times)
                self._add(setting, other, times)

    def _add(
        self, setting: Mapping[str, Any], planned: _Planned, times: Times, note: str = ""
    ) -> None:
        self.rows.append(
            {
                "setting": dict(setting),
                "total": planned.plan.total,
                "kv_tokens": planned.plan.num_blocks * planned.plan.block_size,
                "room": planned.room(self.load.input_len + self.load.output_len),
                "ttft_ms": times.ttft * _MS,
                "tpot_ms": times.tpot * _MS,
                "batch_tpot_ms": times.batch_tpot * _MS,
                "longest_step_ms": times.longest_step * _MS,
                "note": note,
            }
        )


def _describe_cache(
    planned: MemoryPlan, kv_cache: KVCacheConfig, setup: WorkerSetup, shape: SessionShape
) -> dict[str, Any]:
    """Return what the prefix cache keeps of chat sessions.

    Returns:
        problem, or None; of a model with recurrent states state_nbytes, most_snapshots and
        snapshots, a phrase; the fields of `SessionHits`; description.
    """
    config = setup.config
    if not config.cache.enable_prefix_caching:
        return {"problem": "enable_prefix_caching=False"}
    found: dict[str, Any] = {"problem": None}
    if planned.num_states:
        found |= {"state_nbytes": planned.state_nbytes, "most_snapshots": planned.most_snapshots}
        found["snapshots"] = planned.describe_snapshots()
    try:
        hits = find_hits(
            kv_cache,
            shape,
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=setup.max_num_batched_tokens,
            max_model_len=planned.max_model_len,
        )
    except ConfigError as error:
        return found | {"problem": str(error)}
    return found | asdict(hits) | {"description": str(hits)}


# Output


def _print(result: Mapping[str, Any]) -> None:
    """Print the plan."""
    console = make_console()
    items = {name: mib(nbytes) for name, nbytes in result["items"].items()}
    tokens = result["num_blocks"] * result["block_size"]
    if "KV cache" in items:
        items["KV cache"] += (
            f" = {result['num_blocks']:,} blocks of {result['block_size']} tokens = {tokens:,} "
            f"tokens, {result['kv_cache_nbytes_per_token']:,.0f} bytes each "
            f"({result['kv_cache_dtype']}); {result['max_concurrency']:,.1f} requests of "
            f"{result['max_model_len']:,} tokens"
        )
    title = f"memory plan: {mib(result['total'])}"
    if result["limit"] is not None:
        title += f" of {mib(result['limit'])}"
    print_pairs(console, title, items)
    cache, lines = result["prefix_cache"], {}
    if "snapshots" in cache:
        lines["snapshot of a state"] = cache["snapshots"]
    lines["chat sessions"] = cache["problem"] or cache["description"]
    print_pairs(console, "prefix cache", lines)
    times = result["times"]
    if times["problem"] is not None:
        print_pairs(console, "expected times", {"problem": times["problem"]})
        return
    title = f"expected times: {times['cores']} cores, {times['bandwidth'] / 1e9:,.1f} GB/s read"
    print_pairs(console, title, _time_lines(times))
    _print_settings(result["settings"], times["batch_size"])
    if result["settings_left_out"]:
        flags = ", ".join(_flags(setting) for setting in result["settings_left_out"])
        lines = {"not tried": f"{flags}: the five seconds of the probe are over"}
        print_pairs(console, "other settings", lines)


def _time_lines(times: Mapping[str, Any]) -> dict[str, str]:
    size, length, parts = times["batch_size"], times["input_len"], times["parts_ms"]
    return {
        f"first token, a prompt of {length:,}": f"{times['ttft_ms']:,.0f} ms",
        f"first token, {size:,} prompts at once": f"{times['batch_ttft_ms']:,.0f} ms on average",
        "later tokens, one answer": (
            f"{times['tpot_ms']:,.1f} ms = {_MS / times['tpot_ms']:,.1f} tokens/s: "
            + _phrase(parts["one answer"])
        ),
        f"later tokens, {size:,} answers": (
            f"{times['batch_tpot_ms']:,.1f} ms = {times['output_throughput']:,.1f} tokens/s in "
            f"all: {_phrase(parts['batch of answers'])}"
        ),
        "longest step, of prompts": (
            f"{times['longest_step_ms']:,.0f} ms, for which answers wait: "
            + _phrase(parts["prompt"])
        ),
    }


def _phrase(parts: Mapping[str, float]) -> str:
    """Return the shares of a step's parts, the largest first."""
    total = sum(parts.values())
    shares = sorted(((ms / total, name) for name, ms in parts.items()), reverse=True)
    return ", ".join(f"{name} {share:.0%}" for share, name in shares if share >= 0.005)


def _print_settings(settings: Sequence[Mapping[str, Any]], batch_size: int) -> None:
    """Print a table of what each setting buys."""
    columns = {
        "total": ("MiB", 1 / MIB),
        "kv_tokens": ("KV tokens", 1.0),
        "room": ("at once", 1.0),
        "ttft_ms": ("first token", 1.0),
        "tpot_ms": ("token", 1.0),
        "batch_tpot_ms": (f"token, {batch_size}", 1.0),
        "longest_step_ms": ("longest step", 1.0),
    }
    names = [name for name, _ in columns.values()]
    title = "what a setting buys: this plan (times in ms), and the changes"
    table = make_table(title, ("", *names), 1)
    base = settings[0]
    for row in settings:
        label = _flags(row["setting"]) or "this plan"
        if row["note"]:
            label += f" ({row['note']})"
        cells = []
        for key, (_, unit) in columns.items():
            value, change = row[key] * unit, row[key] / base[key] - 1
            cell = f"{value:,.1f}" if value < 100 and key.endswith("ms") else f"{value:,.0f}"
            cells.append(cell if row is base else f"{change:+.0%}" if abs(change) >= 0.005 else "")
        table.add_row(Text(harmless(f"  {label}")), *cells)
    make_console().print(table)


def _flags(setting: Mapping[str, Any]) -> str:
    """Return a setting as a flag of the command line."""
    shown = []
    for name, value in setting.items():
        text = msgspec.json.encode(value).decode() if isinstance(value, dict) else str(value)
        flag = f"--{name.replace('_', '-')}"
        shown.append(flag if value is True else f"{flag} {text}")
    return " ".join(shown)
