"""Request sets: read from a folder of JSON lines, or made from a seed without a folder.

Each line contains `prompt_token_ids`, `max_tokens` and, for serving, `arrival_unit`. The recipe of
the seeded ones, which consist of random tokens:

- w1_b1, w1_b8: 1 or 8 requests of 32 tokens, 128 out;
- w2: 200 requests (smollm2-135m; 24 for tinyllama-1.1b), lognormal lengths of mean 200 in (sigma 1,
  at most 1,024; 256) and 180 out (sigma 0.9, at most 512; 128), at least 8;
- w3: 100 requests of such lengths, at most 1,024 in and 128 out, Poisson arrivals;
- w4: 48 requests of one shared prefix of 1,024 tokens and 32 of their own, 16 out;
- w5: 5 prompts of 2,048 tokens, 1 out;
- w7: 256 requests of 16 tokens, 128 out;
- w8, never read from a folder: 1 or 16 requests that continue a story, or a repetitive text, 96
  out; tokens of the built-in model.
"""

from __future__ import annotations

import json
import math
import random
import re
from pathlib import Path

from peers.base import PREFILL, TOKENS, Row
from peers.installing import CompareError

TOY_VOCABULARY = 1000
STORIES_FOLDER = Path(__file__).resolve().parents[2] / "octavo" / "builtin" / "stories"
TEXTS = {
    "stories": (
        "Once upon a time there was a little girl named Lily. She liked to",
        "Tom and his dog went to the park. They saw a",
        "One day a bird found a shiny stone. The bird wanted to",
        "Mia was sad because her toy was broken. Her mom said",
    ),
    # A model this small cannot copy a list; it continues these in the same pattern.
    "repeats": ("The dog ran. " * 20, "One, two, three, four, five. " * 12),
}
"""Beginnings of the texts of W8."""


def read(name: str, folder: Path) -> tuple[Row, ...]:
    """Read or make the requests of a workload.

    Raises:
        CompareError: the file is missing or a line of it is invalid.
    """
    if name.startswith("w8_") or not folder.is_dir():
        return make(name)
    path = folder / f"{name}.jsonl"
    if not path.exists():
        raise CompareError(f"There is no workload {path}; give another folder with --data.")
    rows = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            plain = json.loads(line)
            row = Row(
                [int(token) for token in plain["prompt_token_ids"]],
                int(plain["max_tokens"]),
                float(plain.get("arrival_unit", 0.0)),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise CompareError(f"{path}, line {number} is no request: {error!r}.") from None
        if not row.prompt_token_ids or row.max_tokens < 1:
            raise CompareError(f"{path}, line {number}: the prompt or the answer is empty.")
        rows.append(row)
    if not rows:
        raise CompareError(f"{path} is empty.")
    return tuple(rows)


def make(name: str) -> tuple[Row, ...]:
    """Make a workload from its name, by the recipe above.

    Raises:
        CompareError: the name is unknown.
    """
    kind, _, model = re.sub("^(w[18])_b", r"\1-b", name).partition("_")
    random_ = random.Random(name)
    low, high = (TOKENS[0], TOY_VOCABULARY) if model == "toy" else TOKENS

    def tokens(count: int) -> list[int]:
        return [random_.randrange(low, high) for _ in range(count)]

    def length(mean: float, sigma: float, most: int) -> int:
        drawn = random_.lognormvariate(math.log(mean) - sigma**2 / 2, sigma)
        return min(most, max(8, round(drawn)))

    def lengths(count: int, most_in: int, most_out: int) -> list[tuple[int, int]]:
        return [(length(200, 1.0, most_in), length(180, 0.9, most_out)) for _ in range(count)]

    if kind in ("w1-b1", "w1-b8"):
        return tuple(Row(tokens(32), 128) for _ in range(int(kind[4:])))
    if kind == "w2":
        shape = (24, 256, 128) if model == "tinyllama-1.1b" else (200, 1024, 512)
        return tuple(Row(tokens(i), o) for i, o in lengths(*shape))
    if kind == "w3":
        now, rows = 0.0, []
        for i, o in lengths(100, 1024, 128):
            now += random_.expovariate(1.0)
            rows.append(Row(tokens(i), o, now))
        return tuple(rows)
    if kind == "w4":
        prefix = tokens(1024)
        return tuple(Row(prefix + tokens(32), 16) for _ in range(48))
    if kind == "w5":
        return tuple(Row(tokens(PREFILL), 1) for _ in range(5))
    if kind == "w7":
        return tuple(Row(tokens(16), 128) for _ in range(256))
    if kind in ("w8-b1", "w8-b16"):
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(str(STORIES_FOLDER / "tokenizer.json"))
        prompts = [tokenizer.encode(text).ids for text in TEXTS[model]]
        return tuple(Row(prompts[i % len(prompts)], 96) for i in range(int(kind[4:])))
    raise CompareError(f"There is no workload called {name!r}.")
