"""Measure the perplexity of a model on a text, with original and quantized weights and KV cache.

The text is cut into rows of `--context` tokens; each row is a prompt, and every token except its
first counts. Prints the perplexity of each weight format with each type of the cache, its ratio to
the first, and the bytes of the weights and of the cache for each token.

    python benchmarks/perplexity.py MODEL TEXT [--quantization none int8 int4] [--context 512]
        [--kv-cache-dtype auto fp8_e4m3 fp8_e5m2 int8] [--max-tokens 100000] [--dtype bfloat16]
        [--peers FOLDER]

With `--peers FOLDER`, the folder of `compare.py install --into FOLDER`, also prints the results of
llama.cpp and OpenVINO for the same token rows: bf16, int8 (q8_0) and int4 (q4_0), their ratios to
their own bf16, the size of the files, and the types of the converted weights.
"""

from __future__ import annotations

import argparse
import itertools
import math
import tempfile
from pathlib import Path

from peers.installing import CompareError
from peers.likelihood import ENGINES, WEIGHTS, measure

from octavo import LLM, SamplingParams
from octavo.models.hub import resolve_model

BATCH = 64  # prompts per call of the engine, which limits the memory of logprobs


def perplexity(llm: LLM, rows: list[list[int]]) -> float:
    """Return exp of the mean negative log-likelihood of all tokens except each row's first."""
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
    """Make token rows; each begins with the tokenizer's first token (a BOS token, or nothing)."""
    tokenizer = llm.get_tokenizer()
    first = tokenizer.encode("")
    ids = tokenizer.encode(text, add_special_tokens=False)[:max_tokens]
    step = context - 1 - len(first)  # room for the token that every request makes
    rows = [first + ids[at : at + step] for at in range(0, len(ids), step)]
    return [row for row in rows if len(row) > 1]


def print_peers(root: Path, model: Path, rows: list[list[int]]) -> None:
    """Print a table of other engines; one without a figure shows the reason."""
    print(f"\n{'engine':10} {'weights':10} {'perplexity':>12} {'ratio':>8} {'MiB':>9}  weights are")
    for name in ENGINES:
        base = 0.0
        with tempfile.TemporaryDirectory() as work:
            for weights in WEIGHTS:
                try:
                    figure = measure(name, root, model, weights, rows, Path(work))
                except CompareError as error:
                    print(f"{name:10} {weights:10} no figure: {error}", flush=True)
                    if weights == WEIGHTS[0]:
                        break
                    continue
                base = base or figure.perplexity
                print(
                    f"{name:10} {weights:10} {figure.perplexity:12.4f} "
                    f"{figure.perplexity / base:8.4f} {figure.mib:9.1f}  {figure.note}",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("text", type=Path)
    parser.add_argument("--quantization", nargs="+", default=["none", "int8", "int4"])
    parser.add_argument("--kv-cache-dtype", nargs="+", default=["auto"])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=100_000)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--peers", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    base, rows = 0.0, []
    head = f"{'weights':10} {'KV cache':10} {'perplexity':>12} {'ratio':>8} {'MiB':>9}"
    print(f"{head} {'B/token':>9}")
    for name, cache in itertools.product(args.quantization, args.kv_cache_dtype):
        with LLM(
            args.model,
            quantization=None if name == "none" else name,
            kv_cache_dtype=cache,
            dtype=args.dtype,
            max_model_len=args.context,
            max_num_seqs=BATCH,
            enable_prefix_caching=False,
        ) as llm:
            rows = make_rows(llm, args.text.read_text(), args.context, args.max_tokens)
            value = perplexity(llm, rows)
            base = base or value
            plan = llm.memory_plan
            print(
                f"{name:10} {cache:10} {value:12.4f} {value / base:8.4f} "
                f"{plan.nbytes('weights') / 2**20:9.1f} {plan.block_nbytes / plan.block_size:9.0f}",
                flush=True,
            )
    if args.peers:
        print_peers(args.peers.resolve(), resolve_model(args.model), rows)


if __name__ == "__main__":
    main()
