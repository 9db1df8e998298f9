"""Print the answers of many layouts, forms and drafting methods, as JSON.

The test runs this script in two environments, one of them without torch, and compares the output.

    python answers.py CASE...
"""

from __future__ import annotations

import json
import sys
from typing import Any

from octavo import LLM, SamplingParams

MODEL = "octavo/stories"
PROMPTS = ["Once upon a time", "The little dog saw a", "One day, Tom and"]
PARAMS: dict[str, Any] = {
    "greedy": {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 1},
    "sampled": {"temperature": 0.9, "seed": 5, "n": 2, "min_p": 0.02, "logprobs": 100},
    "changed": {
        "temperature": 0.7,
        "seed": 1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {7: 2.0},
        "min_tokens": 5,
        "bad_words": [" was"],
    },
}


def _draft(model: str, method: str, **more: Any) -> dict[str, Any]:
    config = {"model": model, "method": method, "num_speculative_tokens": 3, **more}
    return {"speculative_config": config}


CASES: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "float32": {"dtype": "float32"},
    "float16": {"dtype": "float16"},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "eager": {"enforce_eager": True},
    "fp8 cache": {"kv_cache_dtype": "fp8"},
    "int8 cache": {"kv_cache_dtype": "int8"},
    "random weights": {"load_format": "dummy", "seed": 3},
    "chunks": {"max_num_batched_tokens": 16, "max_num_seqs": 3},
    "tensor parallel": {"tensor_parallel_size": 2},
    "sums of ranks": {"tensor_parallel_size": 2, "tensor_parallel_mode": "reduce"},
    "pipeline": {"pipeline_parallel_size": 2},
    "ngram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
    "suffix": {"speculative_config": {"method": "suffix", "num_speculative_tokens": 4}},
    "draft model": _draft("octavo/stories-draft", "draft_model"),
    "eagle": _draft("octavo/stories-eagle", "eagle"),
    "medusa": _draft("octavo/stories-medusa", "medusa"),
}


def main() -> None:
    answers: dict[str, Any] = {}
    for name in sys.argv[1:]:
        with LLM(MODEL, max_model_len=128, max_logprobs=100, **CASES[name]) as llm:
            answers[name] = {
                kind: [describe(answer) for answer in generate(llm, params)]
                for kind, params in PARAMS.items()
            }
    answers["torch"] = "torch" in sys.modules
    print(json.dumps(answers))


def generate(llm: LLM, params: dict[str, Any]) -> list[Any]:
    return llm.generate(PROMPTS, SamplingParams(max_tokens=24, **params), use_tqdm=False)


def describe(answer: Any) -> list[Any]:
    """Return everything that an answer consists of; floats keep all their bits in JSON."""
    prompt = answer.prompt_logprobs or []
    return [
        [
            sorted((token, it.logprob, it.rank) for token, it in (position or {}).items())
            for position in prompt
        ],
        [
            [
                list(output.token_ids),
                output.text,
                [
                    sorted((token, it.logprob, it.rank) for token, it in position.items())
                    for position in output.logprobs or []
                ],
            ]
            for output in answer.outputs
        ],
    ]


if __name__ == "__main__":
    main()
