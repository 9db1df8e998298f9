"""Requests of a benchmark: random ones, texts, recorded workloads and timed traces.

All randomness derives from `--seed`: the same flags make the same requests.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from octavo.errors import ConfigError, DatasetError
from octavo.text.tokenizer import Tokenizer

T = TypeVar("T")

# Limits of ShareGPT conversations that are used, as in other benchmarks.
_SHAREGPT_MIN_LEN = 4
_SHAREGPT_MAX_PROMPT = 1024
_SHAREGPT_MAX_TOTAL = 2048
_MOONCAKE_BLOCK = 512
# Maximum length of a trace's prompt; no model has such a context.
_MOST_TOKENS = 2**24
_MOST_DIGITS = 100
_SONNET_TASK = "Pick as many lines as you can from these poem lines:\n"


@dataclass(frozen=True)
class BenchRequest:
    """Request of a data set.

    Attributes:
        prompt_token_ids: the prompt as tokens; None only for texts loaded without a tokenizer.
        prompt: the prompt as text; None if the data set only has tokens.
        max_tokens: tokens to generate.
        arrival: time to send it, in seconds since the start; None: the request rate decides.
        prefix_len: number of first tokens that are intentionally shared with other requests.
    """

    prompt_token_ids: list[int] | None
    prompt: str | None
    max_tokens: int
    arrival: float | None = None
    prefix_len: int = 0

    @property
    def token_ids(self) -> list[int]:
        """Prompt as tokens, of a request that has some."""
        assert self.prompt_token_ids is not None, "data sets that need a tokenizer had one"
        return self.prompt_token_ids


def add_dataset_arguments(parser: argparse.ArgumentParser) -> None:
    """Add vLLM's flags for data sets, and the flags for workload files and traces."""
    group = parser.add_argument_group("data set")
    add = group.add_argument
    add(
        "--dataset-name",
        choices=sorted(_LOADERS),
        metavar="NAME",
        default="random",
        help=f"Kind of data set: {', '.join(sorted(_LOADERS))} [random].",
    )
    add("--dataset-path", metavar="FILE", help="File of the data set.")
    add(
        "--num-prompts",
        type=int,
        metavar="N",
        help="Number of requests; default: 1000, or the whole file of a workload.",
    )
    add("--seed", type=int, default=0, metavar="N", help="Random seed [0].")
    add(
        "--no-oversample",
        action="store_true",
        help="Send fewer requests rather than repeat those of a text data set.",
    )
    add("--disable-shuffle", action="store_true", help="Keep the order of a text data set.")
    add("--input-len", type=int, metavar="N", help="Override the data set's input length.")
    add("--output-len", type=int, metavar="N", help="Override the data set's output length.")
    for name, default, doc in _LENGTHS:
        shown = "" if default is None else f" [{default}]"
        add(f"--{name}", type=int, default=default, metavar="N", help=doc + shown)
    add(
        "--random-range-ratio",
        type=float,
        default=0.0,
        metavar="R",
        help="random: lengths vary evenly from (1 - R) to (1 + R) times the given ones [0].",
    )
    add("--spec-bench-category", metavar="NAME", help="spec_bench: only this category.")


_LENGTHS: tuple[tuple[str, int | None, str], ...] = (
    ("random-input-len", 1024, "random: tokens of a prompt after the prefix"),
    ("random-output-len", 128, "random: tokens to generate"),
    ("random-prefix-len", 0, "random: tokens that all prompts begin with"),
    ("sharegpt-output-len", None, "sharegpt: tokens to generate; default: those of the answer"),
    ("sonnet-input-len", 550, "sonnet: tokens of a prompt"),
    ("sonnet-output-len", 150, "sonnet: tokens to generate"),
    ("sonnet-prefix-len", 200, "sonnet: tokens that all prompts begin with"),
    ("spec-bench-output-len", 256, "spec_bench: tokens to generate"),
    ("prefix-repetition-prefix-len", 256, "prefix_repetition: tokens of a prefix"),
    ("prefix-repetition-suffix-len", 256, "prefix_repetition: tokens after the prefix"),
    ("prefix-repetition-num-prefixes", 10, "prefix_repetition: number of prefixes"),
    ("prefix-repetition-output-len", 128, "prefix_repetition: tokens to generate"),
)


def load_dataset(
    args: argparse.Namespace, tokenizer: Tokenizer | None, vocab_size: int
) -> list[BenchRequest]:
    """Make the requests selected by the flags of `add_dataset_arguments`.

    `args.request_rate`, if it exists and is finite, scales recorded arrivals: a workload file's
    units are divided by it, a trace is replayed at that mean rate.

    Args:
        args: the flags.
        tokenizer: tokenizer of the measured model; text data sets need one.
        vocab_size: upper limit of random tokens.

    Raises:
        ConfigError: a flag is wrong or missing.
        DatasetError: the file is missing, empty or malformed.
    """
    if args.num_prompts is not None and args.num_prompts < 1:
        raise ConfigError(f"--num-prompts {args.num_prompts}: must be at least 1.")
    requests = _LOADERS[args.dataset_name](_Source(args, tokenizer, vocab_size))
    if not requests:
        raise DatasetError(
            f"{args.dataset_path or args.dataset_name} has no usable requests; there is nothing to "
            "measure."
        )
    return requests


class _Source:
    """Inputs of the loaders: checked flags, a random generator, tokens, lines."""

    def __init__(
        self, args: argparse.Namespace, tokenizer: Tokenizer | None, vocab_size: int
    ) -> None:
        self.args = args
        self._tokenizer = tokenizer
        self.rng = np.random.default_rng(args.seed)
        special = set() if tokenizer is None else tokenizer.all_special_ids
        self._ids = np.asarray([i for i in range(vocab_size) if i not in special], np.int64)
        if not len(self._ids):
            raise ConfigError(f"A vocabulary of {vocab_size} tokens has none to make prompts of.")

    @property
    def num_prompts(self) -> int:
        return 1000 if self.args.num_prompts is None else int(self.args.num_prompts)

    @property
    def request_rate(self) -> float:
        return float(getattr(self.args, "request_rate", math.inf))

    @property
    def path(self) -> Path:
        if self.args.dataset_path is None:
            raise ConfigError(
                f"--dataset-name {self.args.dataset_name} reads a file; name it with "
                "--dataset-path."
            )
        return Path(self.args.dataset_path).expanduser()

    @property
    def tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise ConfigError(
                f"--dataset-name {self.args.dataset_name} holds text, so it needs the model's "
                "tokenizer; name it with --tokenizer."
            )
        return self._tokenizer

    def length(self, flag: str, least: int = 1) -> int:
        """Return the value of a length flag; --input-len and --output-len override it."""
        name = flag
        for short in ("input-len", "output-len"):
            if flag.endswith(short) and getattr(self.args, short.replace("-", "_")) is not None:
                name = short
        value = int(getattr(self.args, name.replace("-", "_")))
        if value < least:
            raise ConfigError(f"--{name} {value}: must be at least {least}.")
        return value

    def tokens(self, count: int, rng: np.random.Generator | None = None) -> list[int]:
        """Return random tokens that are not special."""
        picks = (rng or self.rng).integers(len(self._ids), size=count)
        tokens: list[int] = self._ids[picks].tolist()
        return tokens


def _random(source: _Source) -> list[BenchRequest]:
    num_input, num_output = source.length("random-input-len"), source.length("random-output-len")
    prefix = source.tokens(source.length("random-prefix-len", 0))
    ratio = source.args.random_range_ratio
    if not 0 <= ratio < 1:
        raise ConfigError(f"--random-range-ratio {ratio}: must be at least 0 and below 1.")

    def lengths(middle: int) -> list[int]:
        low, high = math.floor(middle * (1 - ratio)), math.ceil(middle * (1 + ratio))
        return list(map(int, source.rng.integers(max(1, low), high + 1, size=source.num_prompts)))

    return [
        BenchRequest(prefix + source.tokens(i), None, o, prefix_len=len(prefix))
        for i, o in zip(lengths(num_input), lengths(num_output), strict=True)
    ]


def _prefix_repetition(source: _Source) -> list[BenchRequest]:
    """Make equal numbers of prompts for each prefix, shuffled."""
    num_prefixes = source.length("prefix-repetition-num-prefixes")
    prefix_len = source.length("prefix-repetition-prefix-len")
    suffix_len = source.length("prefix-repetition-suffix-len")
    max_tokens = source.length("prefix-repetition-output-len")
    if source.num_prompts < num_prefixes:
        raise ConfigError(
            f"--num-prompts {source.num_prompts}: must be at least "
            f"--prefix-repetition-num-prefixes ({num_prefixes})."
        )
    requests = []
    for _ in range(num_prefixes):
        prefix = source.tokens(prefix_len)
        requests += [
            BenchRequest(
                prefix + source.tokens(suffix_len), None, max_tokens, prefix_len=prefix_len
            )
            for _ in range(source.num_prompts // num_prefixes)
        ]
    return [requests[i] for i in source.rng.permutation(len(requests))]


def _sharegpt(source: _Source) -> list[BenchRequest]:
    """Use the first question of each conversation; generate as many tokens as its answer has."""
    path, tokenizer = source.path, source.tokenizer
    fixed = source.args.output_len or source.args.sharegpt_output_len
    if fixed is not None and fixed < 1:
        raise ConfigError(f"--sharegpt-output-len {fixed}: must be at least 1.")
    try:
        conversations = msgspec.json.decode(_read(path))
    except (msgspec.DecodeError, RecursionError) as error:
        raise DatasetError(f"{path} is not JSON: {error}") from None
    if not isinstance(conversations, list):
        raise DatasetError(f"{path} must hold a list of conversations, as ShareGPT has it.")
    pairs = []
    for i, entry in enumerate(conversations):
        where = f"{path}, entry {i}"
        turns = _field(entry, "conversations", list, where)
        values = [
            _field(turn, "value", str, f"{where}, conversations[{j}]")
            for j, turn in enumerate(turns[:2])
        ]
        if len(values) == 2:
            pairs.append((values[0], values[1]))

    def request(pair: tuple[str, str]) -> BenchRequest | None:
        ids = tokenizer.encode(pair[0])
        max_tokens = fixed or len(tokenizer.encode(pair[1], add_special_tokens=False))
        usable = (
            _SHAREGPT_MIN_LEN <= len(ids) <= _SHAREGPT_MAX_PROMPT
            and (fixed or max_tokens >= _SHAREGPT_MIN_LEN)
            and len(ids) + max_tokens <= _SHAREGPT_MAX_TOTAL
        )
        return BenchRequest(ids, pair[0], max_tokens) if usable else None

    return _pick(source, pairs, request)


def _spec_bench(source: _Source) -> list[BenchRequest]:
    """Use the first turn of each question of Spec-Bench (Xia et al. 2024)."""
    path, tokenizer, category = source.path, source.tokenizer, source.args.spec_bench_category
    max_tokens = source.length("spec-bench-output-len")
    prompts, categories = [], set()
    for where, row in _json_lines(path):
        turns = _field(row, "turns", list, where)
        if not turns or not isinstance(turns[0], str):
            raise DatasetError(f"{where}: turns must be a list of texts, not empty.")
        kind = _field(row, "category", str, where) if category else ""
        categories.add(kind)
        if not category or kind == category:
            prompts.append(turns[0])
    if category and not prompts:
        raise ConfigError(
            f"--spec-bench-category {category!r}: {path} has {', '.join(sorted(categories))}."
        )
    return _pick(
        source, prompts, lambda text: BenchRequest(tokenizer.encode(text), text, max_tokens)
    )


def _sonnet(source: _Source) -> list[BenchRequest]:
    """Make prompts of a task, the poem's first lines (the same in all), and random lines of it."""
    path, tokenizer = source.path, source.tokenizer
    input_len = source.length("sonnet-input-len")
    prefix_len = source.length("sonnet-prefix-len", 0)
    max_tokens = source.length("sonnet-output-len")
    lines = [line for line in _text(path).splitlines() if line.strip()]
    if not lines:
        raise DatasetError(f"{path} has no lines of text.")
    sizes = [len(tokenizer.encode(line + "\n", add_special_tokens=False)) for line in lines]
    task = len(tokenizer.encode(_SONNET_TASK))
    average = sum(sizes) / len(sizes)
    num_prefix = max(0, round((prefix_len - task) / average))
    num_random = round((input_len - task) / average) - num_prefix
    if num_random < 0 or num_prefix > len(lines) or input_len <= task:
        raise ConfigError(
            f"--sonnet-prefix-len {prefix_len} and --sonnet-input-len {input_len} do not fit "
            f"{path}: the task takes {task} tokens, a line {average:.1f}, and there "
            f"are {len(lines)} lines."
        )
    head = _SONNET_TASK + "".join(line + "\n" for line in lines[:num_prefix])
    shared = len(tokenizer.encode(head))
    requests = []
    for _ in range(source.num_prompts):
        picks = source.rng.integers(len(lines), size=num_random)
        text = head + "".join(lines[i] + "\n" for i in picks)
        requests.append(BenchRequest(tokenizer.encode(text), text, max_tokens, prefix_len=shared))
    return requests


def _workload(source: _Source) -> list[BenchRequest]:
    """Read JSON lines of prompt_token_ids, max_tokens and maybe arrival_unit (seconds x rate)."""
    requests, rate = [], source.request_rate
    for where, row in itertools.islice(_json_lines(source.path), source.args.num_prompts):
        ids = _field(row, "prompt_token_ids", list, where)
        if not ids or not all(type(i) is int and i >= 0 for i in ids):
            raise DatasetError(f"{where}: prompt_token_ids must be token ids, at least one.")
        arrival = None
        if "arrival_unit" in row:
            arrival = _number(row, "arrival_unit", where)
        requests.append(
            BenchRequest(
                ids,
                None,
                _whole(row, "max_tokens", where),
                arrival,
                _whole(row, "prefix_len", where, 0) if "prefix_len" in row else 0,
            )
        )
        if (arrival is None) != (requests[0].arrival is None):
            raise DatasetError(f"{where}: either all rows have an arrival_unit or none.")
    if math.isinf(rate):
        return [replace(r, arrival=None) for r in requests]
    return [r if r.arrival is None else replace(r, arrival=r.arrival / rate) for r in requests]


def _azure(source: _Source) -> list[BenchRequest]:
    """Read Azure's inference traces: CSV of TIMESTAMP, ContextTokens, GeneratedTokens.

    They contain no text; the prompts are random tokens.
    """
    path = source.path
    rows = csv.DictReader(_text(path).splitlines())
    columns = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
    missing = [name for name in columns if name not in (rows.fieldnames or [])]
    if missing:
        raise DatasetError(f"{path}, line 1: there is no column {missing[0]}.")
    times, requests = [], []
    for row in itertools.islice(_csv_rows(rows, path), source.num_prompts):
        where = f"{path}, line {rows.line_num}"
        try:
            times.append(datetime.fromisoformat(row["TIMESTAMP"] or "").timestamp())
        except ValueError:
            raise DatasetError(
                f"{where}: TIMESTAMP is {row['TIMESTAMP']!r}, not a date and time."
            ) from None
        num_input, num_output = (_parse_whole(row, name, where) for name in columns[1:])
        if num_input > _MOST_TOKENS:
            raise DatasetError(f"{where}: ContextTokens is {num_input}, above {_MOST_TOKENS}.")
        requests.append(BenchRequest(source.tokens(num_input), None, num_output))
    return _timed(source, requests, times)


def _mooncake(source: _Source) -> list[BenchRequest]:
    """Read Mooncake's traces (Qin et al. 2024): timestamp in ms, lengths, ids of 512-token blocks.

    Equal ids become equal tokens, so that prefixes are shared as in the original.
    """
    times, requests = [], []
    blocks: dict[int, list[int]] = {}
    for where, row in itertools.islice(_json_lines(source.path), source.num_prompts):
        num_input = _whole(row, "input_length", where)
        hash_ids = _field(row, "hash_ids", list, where)
        if not all(type(i) is int and i >= 0 for i in hash_ids):
            raise DatasetError(f"{where}: hash_ids must be whole numbers, 0 or above.")
        if len(hash_ids) != -(-num_input // _MOONCAKE_BLOCK):
            raise DatasetError(
                f"{where}: hash_ids has {len(hash_ids)} blocks of {_MOONCAKE_BLOCK} tokens, "
                f"which do not fit input_length {num_input}."
            )
        for i in hash_ids:
            if i not in blocks:
                rng = np.random.default_rng([source.args.seed, i])
                blocks[i] = source.tokens(_MOONCAKE_BLOCK, rng)
        ids = [token for i in hash_ids for token in blocks[i]][:num_input]
        times.append(_number(row, "timestamp", where) / 1000)
        requests.append(BenchRequest(ids, None, _whole(row, "output_length", where)))
    return _timed(source, requests, times)


_LOADERS: dict[str, Callable[[_Source], list[BenchRequest]]] = {
    "random": _random,
    "sharegpt": _sharegpt,
    "sonnet": _sonnet,
    "prefix_repetition": _prefix_repetition,
    "spec_bench": _spec_bench,
    "workload": _workload,
    "azure": _azure,
    "mooncake": _mooncake,
}


def _pick(
    source: _Source, items: list[T], make: Callable[[T], BenchRequest | None]
) -> list[BenchRequest]:
    """Make the configured number of requests: shuffled, and repeated if there are too few."""
    order = range(len(items)) if source.args.disable_shuffle else source.rng.permutation(len(items))
    made = filter(None, (make(items[i]) for i in order))
    requests = list(itertools.islice(made, source.num_prompts))
    if requests and not source.args.no_oversample:
        requests = list(itertools.islice(itertools.cycle(requests), source.num_prompts))
    return requests


def _timed(source: _Source, requests: list[BenchRequest], times: list[float]) -> list[BenchRequest]:
    """Schedule requests relative to the first, scaled to a finite request rate."""
    if not requests:
        return []
    first, span = min(times), max(times) - min(times)
    # n requests have n - 1 gaps.
    scale = (len(times) - 1) / (span * source.request_rate) if span else 1.0
    if math.isinf(source.request_rate):
        scale = 1.0
    timed = [
        replace(request, arrival=(time - first) * scale)
        for request, time in zip(requests, times, strict=True)
    ]
    return sorted(timed, key=lambda request: request.arrival or 0.0)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DatasetError(f"{path} cannot be read: {error.strerror}.") from None


def _text(path: Path) -> str:
    try:
        return _read(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path} is not UTF-8 text: {error}") from None


def _csv_rows(rows: csv.DictReader[str], path: Path) -> Iterator[dict[str, str | None]]:
    try:
        yield from rows
    except csv.Error as error:
        raise DatasetError(f"{path}, after line {rows.line_num}: is not CSV: {error}") from None


def _json_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a file of JSON lines, with their locations; skip empty lines."""
    for number, line in enumerate(_read(path).splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DatasetError(f"{where}: is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise DatasetError(f"{where}: must be a JSON object.")
        yield where, row


def _field(row: Any, name: str, kind: type[T], where: str) -> T:
    value = row.get(name) if isinstance(row, dict) else None
    if not isinstance(value, kind):
        wanted = "a list" if kind is list else "a text"
        raise DatasetError(f"{where}: {name} must be {wanted}, not {_shown(value)}.")
    return value


def _number(row: dict[str, Any], name: str, where: str) -> float:
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0:
        raise DatasetError(f"{where}: {name} must be a number, 0 or above, not {_shown(value)}.")
    return float(value)


def _whole(row: dict[str, Any], name: str, where: str, least: int = 1) -> int:
    value = row.get(name)
    if type(value) is not int or value < least:
        raise DatasetError(
            f"{where}: {name} must be a whole number, {least} or above, not {_shown(value)}."
        )
    return value


def _parse_whole(row: dict[str, str | None], name: str, where: str) -> int:
    """Parse text of a CSV file like `_whole`."""
    text = row[name]
    is_number = text is not None and text.strip().isdecimal() and len(text) < _MOST_DIGITS
    value = int(text) if text is not None and is_number else text
    return _whole({name: value}, name, where)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:40] + "..."
