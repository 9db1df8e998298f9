"""Engines on random models, and requests to them."""

from __future__ import annotations

import gc
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from gpu.base import LLAMA, Bench, Shape
from octavo import LLM, SamplingParams
from octavo.outputs import CompletionOutput


def random_ids(count: int, *, seed: int, vocab: int) -> list[int]:
    """Return a prompt without special tokens."""
    rng = random.Random(seed)
    return [rng.randrange(3, vocab) for _ in range(count)]


def generate(
    llm: LLM, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
) -> list[CompletionOutput]:
    """Return the answer to each prompt.

    Raises:
        RuntimeError: an answer is shorter than requested: its request failed.
    """
    asked = params if isinstance(params, list) else [params] * len(prompts)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], asked, use_tqdm=False)
    answers = [output.outputs[0] for output in outputs]
    for answer, wanted in zip(answers, asked, strict=True):
        if answer.finish_reason != "length" or len(answer.token_ids) != wanted.max_tokens:
            raise RuntimeError(
                f"a request ended after {len(answer.token_ids)} of {wanted.max_tokens} tokens: "
                f"{answer.finish_reason}, {answer.stop_reason}"
            )
    return answers


def write_config(folder: str, shape: Shape) -> str:
    """Write a model folder without weights."""
    (Path(folder) / "config.json").write_text(json.dumps(LLAMA | shape))
    return folder


@contextmanager
def engine(bench: Bench, model: str, **settings: Any) -> Iterator[LLM]:
    """Run an engine on the GPU."""
    gc.collect()
    torch.cuda.empty_cache()  # memory of an earlier engine
    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        **bench.gpu.settings | settings,
    )
    try:
        yield llm
    finally:
        llm.shutdown()
