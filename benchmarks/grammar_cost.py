"""Measure the cost of structured output: the same tokens with and without grammars, in turn.

    python benchmarks/grammar_cost.py MODEL --functions FOLDER

`--functions` is a folder with the Berkeley function-calling data: each request uses the schema of
another function's arguments. All requests run at once; those without a grammar have answers of the
same lengths. Grammars are compiled before. Prints the median of the ratios of successive runs.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

from grammar_conformance import read_functions

from octavo import LLM, SamplingParams
from octavo.sampling_params import StructuredOutputsParams

PROMPT = (
    "Once upon a time there was a little girl named Lily. She liked to write down what she saw:"
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--functions", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--dtype", default="bfloat16")
    args = parser.parse_args()
    found = [case.schema for case in read_functions(args.functions)]
    schemas = found[:: max(1, len(found) // args.requests)][: args.requests]
    with LLM(
        args.model,
        dtype=args.dtype,
        max_model_len=1024,
        max_num_seqs=args.requests,
        enable_prefix_caching=False,
    ) as llm:

        def run(lengths: list[int] | None) -> tuple[float, list[int]]:
            params = [
                SamplingParams(
                    temperature=0.8,
                    seed=i,
                    max_tokens=args.max_tokens if lengths is None else lengths[i],
                    ignore_eos=lengths is not None,
                    structured_outputs=StructuredOutputsParams(json=schema)
                    if lengths is None
                    else None,
                )
                for i, schema in enumerate(schemas)
            ]
            begin = time.perf_counter()
            outputs = llm.generate([PROMPT] * len(schemas), params, use_tqdm=False)
            seconds = time.perf_counter() - begin
            return seconds, [len(o.outputs[0].token_ids) for o in outputs]

        _, lengths = run(None)
        run(lengths)
        ratios = []
        for turn in range(args.repeats):
            if turn % 2:
                plain, held = run(lengths)[0], run(None)[0]
            else:
                held, plain = run(None)[0], run(lengths)[0]
            ratios.append(held / plain)
    print(
        f"{len(schemas)} requests, {sum(lengths)} tokens: with grammars"
        f" {statistics.median(ratios):.3f} times as long"
        f" ({min(ratios):.3f}-{max(ratios):.3f}, {len(ratios)} pairs)"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
