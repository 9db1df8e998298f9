"""Measure a working set larger than the KV cache: hit rate and throughput with blocks in memory.

    python benchmarks/working_set.py --model DIR --trace mooncake_conversation.jsonl

Requests of Mooncake's trace (Qin et al. 2024) in their order, scaled down: each of its blocks of
512 tokens becomes one of --block tokens, and outputs are shortened by the same factor. The KV cache
has room for a part of all the blocks that occur (--share); OffloadingConnector has room for all of
them. Both run in turn; the hit rate is that of prompt tokens.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time

from octavo import LLM, SamplingParams

_TRACE_BLOCK = 512


def read(path: str, count: int, block: int) -> tuple[list[list[int]], list[int], int]:
    """Return prompts, numbers of output tokens, and the number of different blocks."""
    prompts, lengths, blocks = [], [], {}
    with open(path, encoding="utf-8") as file:
        for line, _ in zip(file, range(count), strict=False):
            record = json.loads(line)
            prompt: list[int] = []
            for number in record["hash_ids"]:
                if number not in blocks:
                    rng = random.Random(number)
                    blocks[number] = [rng.randrange(5, 1000) for _ in range(block)]
                prompt += blocks[number]
            prompts.append(prompt[: max(2, record["input_length"] * block // _TRACE_BLOCK)])
            lengths.append(max(1, record["output_length"] * block // _TRACE_BLOCK))
    return prompts, lengths, len(blocks)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True)
    parser.add_argument("--trace", required=True)
    parser.add_argument("--num-requests", type=int, default=600)
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--share", type=float, default=0.25)
    parser.add_argument("--repeat", type=int, default=1)
    args = parser.parse_args()
    prompts, lengths, num_blocks = read(args.trace, args.num_requests, args.block)
    num_tokens = sum(map(len, prompts))
    cache = int(num_blocks * args.block * args.share) // 16
    print(
        f"{len(prompts)} requests, {num_tokens} prompt tokens, {sum(lengths)} output tokens, "
        f"{num_blocks * args.block} different ones; the KV cache has {cache * 16}"
    )
    params = [
        SamplingParams(max_tokens=n, temperature=0, ignore_eos=True, detokenize=False)
        for n in lengths
    ]
    settings = {
        "model": args.model,
        "dtype": "bfloat16",
        "num_gpu_blocks_override": cache,
        "max_num_seqs": 8,
        "max_model_len": max(len(p) + n for p, n in zip(prompts, lengths, strict=True)) + 16,
        "skip_tokenizer_init": True,
    }
    found: dict[str, list[tuple[float, float]]] = {"without": [], "with offloading": []}
    for _ in range(args.repeat):
        for kind, results in found.items():
            more = {}
            if kind != "without":
                extra = {"cpu_bytes_to_use": 8 * 2**30}
                more["kv_transfer_config"] = {
                    "kv_connector": "OffloadingConnector",
                    "kv_connector_extra_config": extra,
                }
            with LLM(**settings, **more) as llm:
                begin = time.perf_counter()
                outputs = llm.generate(
                    [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
                )
                seconds = time.perf_counter() - begin
            cached = sum(output.num_cached_tokens or 0 for output in outputs)
            results.append((cached / num_tokens, len(prompts) / seconds))
            print(f"{kind}: hit rate {results[-1][0]:.3f}, {results[-1][1]:.2f} requests/s")
    plain, offloaded = (
        [statistics.median(column) for column in zip(*results, strict=True)]
        for results in found.values()
    )
    print(f"hit rate {offloaded[0] / plain[0]:.2f} times, throughput {offloaded[1] / plain[1]:.2f}")


if __name__ == "__main__":
    main()
