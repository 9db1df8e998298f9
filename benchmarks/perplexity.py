"""Perplexity of a model on a text, with its own weights and quantized, through the engine.

The text is cut into rows of `--context` tokens; each row is a prompt, and every token but its
first counts. Prints the perplexity of each form of weights, its ratio to the first, and the bytes
of the weights.

    python benchmarks/perplexity.py MODEL TEXT [--quantization none int8 int4] [--context 512]
        [--max-tokens 100000] [--dtype bfloat16]
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from octavo import LLM, SamplingParams

BATCH = 64  # prompts given to the engine together, so that their logprobs are let go in between


def perplexity(llm: LLM, rows: list[list[int]]) -> float:
    """exp of the mean negative log-likelihood of all tokens but each row's first."""
    params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)
    total, count = 0.0, 0
    for at in range(0, len(rows), BATCH):
        prompts = [{"prompt_token_ids": row} for row in rows[at : at + BATCH]]
        for row, output in zip(
            rows[at : at + BATCH], llm.generate(prompts, params, use_tqdm=False), strict=True
        ):
            assert output.prompt_logprobs is not None
            for token, entries in zip(row[1:], output.prompt_logprobs[1:], strict=True):
                assert entries is not None
                total -= entries[token].logprob
                count += 1
    return math.exp(total / count)


def make_rows(llm: LLM, text: str, context: int, max_tokens: int) -> list[list[int]]:
    """Token rows; each begins with what the tokenizer puts first (a BOS token, or nothing)."""
    tokenizer = llm.get_tokenizer()
    first = tokenizer.encode("")
    ids = tokenizer.encode(text, add_special_tokens=False)[:max_tokens]
    step = context - 1 - len(first)  # room for the token that every request makes
    rows = [first + ids[at : at + step] for at in range(0, len(ids), step)]
    return [row for row in rows if len(row) > 1]


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--quantization", nargs="+", default=["none", "int8", "int4"])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=100_000)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    base = 0.0
    print(f"{'weights':10} {'perplexity':>12} {'ratio':>8} {'MiB':>9}")
    for name in args.quantization:
        with LLM(
            args.model,
            quantization=None if name == "none" else name,
            dtype=args.dtype,
            max_model_len=args.context,
            max_num_seqs=BATCH,
            enable_prefix_caching=False,
        ) as llm:
            rows = make_rows(llm, args.text.read_text(), args.context, args.max_tokens)
            value = perplexity(llm, rows)
            base = base or value
            mib = llm.memory_plan.weights / 2**20
            print(f"{name:10} {value:12.4f} {value / base:8.4f} {mib:9.1f}", flush=True)


if __name__ == "__main__":
    main()
