"""The requests of a benchmark: invented ones, texts, recorded workloads and timed traces.

Everything random comes from `--seed`: the same flags make the same requests.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from octavo.errors import ConfigError, DatasetError
from octavo.tokenizer import Tokenizer

# ShareGPT conversations outside these limits are left out, as everybody's benchmark does.
_SHAREGPT_MIN_LEN = 4
_SHAREGPT_MAX_PROMPT = 1024
_SHAREGPT_MAX_TOTAL = 2048
_MOONCAKE_BLOCK = 512
_SONNET_TASK = "Pick as many lines as you can from these poem lines:\n"


@dataclass(frozen=True)
class BenchRequest:
    """One request of a data set.

    Attributes:
        prompt_token_ids: the prompt as tokens; None only for texts loaded without a tokenizer.
        prompt: the prompt as text; None where the data set has tokens only.
        max_tokens: tokens to generate.
        arrival: when to send it, in seconds since the start; None: the request rate decides.
        prefix_len: how many of the first tokens are shared with other requests on purpose.
    """

    prompt_token_ids: list[int] | None
    prompt: str | None
    max_tokens: int
    arrival: float | None = None
    prefix_len: int = 0


def add_dataset_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds vLLM's flags of data sets, and those of workload files and traces."""
    group = parser.add_argument_group("data set")
    add = group.add_argument
    add("--dataset-name", choices=sorted(_LOADERS), default="random", help="Kind of data [random].")
    add("--dataset-path", metavar="FILE", help="File of the data set.")
    add(
        "--num-prompts",
        type=int,
        metavar="N",
        help="Requests; default: 1000, for workloads and traces the whole file.",
    )
    add("--seed", type=int, default=0, metavar="N", help="Seed of everything random [0].")
    add(
        "--no-oversample",
        action="store_true",
        help="Rather fewer requests than to repeat those of a text data set.",
    )
    add("--disable-shuffle", action="store_true", help="Keep a text data set's order.")
    add("--input-len", type=int, metavar="N", help="Stands for the data set's own input length.")
    add("--output-len", type=int, metavar="N", help="Stands for the data set's own output length.")
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
    ("sharegpt-output-len", None, "sharegpt: tokens to generate; default: as the answer has"),
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
    """Makes the requests that the flags of `add_dataset_arguments` ask for.

    `args.request_rate`, where there is one and it is finite, scales recorded arrivals: a workload
    file's units are divided by it, a trace is replayed at that mean rate.

    Args:
        args: the flags.
        tokenizer: of the model that is measured; text data sets need one.
        vocab_size: invented tokens are below it.

    Raises:
        ConfigError: a flag is wrong or missing.
        DatasetError: the file is missing, empty or malformed.
    """
    if args.num_prompts is not None and args.num_prompts < 1:
        raise ConfigError(f"--num-prompts {args.num_prompts}: must be at least 1.")
    requests = _LOADERS[args.dataset_name](_Source(args, tokenizer, vocab_size))
    if not requests:
        raise DatasetError(
            f"{args.dataset_path or args.dataset_name} has no usable request; nothing to measure."
        )
    return requests


class _Source:
    """What every loader needs: flags that are checked, a random generator, tokens, lines."""

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
        """The value of a length flag; --input-len and --output-len come before it."""
        name = flag
        for short in ("input-len", "output-len"):
            if flag.endswith(short) and getattr(self.args, short.replace("-", "_")) is not None:
                name = short
        value = int(getattr(self.args, name.replace("-", "_")))
        if value < least:
            raise ConfigError(f"--{name} {value}: must be at least {least}.")
        return value

    def tokens(self, count: int, rng: np.random.Generator | None = None) -> list[int]:
        """Random tokens that are not special."""
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


_LOADERS: dict[str, Callable[[_Source], list[BenchRequest]]] = {
    "random": _random,
}
