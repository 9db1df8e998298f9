"""Speed of a mixture of experts with room for some of its experts, by the size of the cache.

    python benchmarks/expert_cache.py

Makes mixtures with random weights (8 layers of 32 experts, of which a token uses 4; 1.5 MiB each),
and decodes one request with room for different shares of the experts, in turns with and without
fetching experts ahead. It prints how many tokens each made per second, how many of the experts that
the steps used were in memory, and how many of the experts that were fetched ahead were used.

No mixture here is trained, and how well the next layer's router guesses depends on that. So there
are two that bound what to expect:

- random: the weights of transformers' initialization. The layers change the residual stream
  completely, so guesses are little better than chance: fetching ahead can only cost.
- steady: embeddings are so large that all layers together change the residual stream little, so
  nearly all guesses are right. Each token has experts of its own, however, and uses all about
  equally often, so this model hits less often than a trained one.

Packed weights are in a temporary folder. `--cold` drops the system's copy of the file again and
again, so that reads come from the disk as with a model larger than memory; otherwise they come from
memory.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from octavo import LLM, SamplingParams
from octavo.layers.experts import Experts

EXPERTS, LAYERS, ACTIVE, HIDDEN, INNER = 32, 8, 4, 512, 512
EXPERT_NBYTES = 3 * HIDDEN * INNER * 2
SHARES = (1.0, 0.75, 0.5, 0.25, 0.1, ACTIVE / EXPERTS / LAYERS)
EMBEDDINGS = {"random": 1.0, "steady": 250.0}
"""Factor of the embeddings of each model; their standard deviation is 0.02 before."""


class Result(NamedTuple):
    """Measurement of one request."""

    seconds: float
    hits: int
    misses: int
    nbytes: int
    fetched: int
    used: int
    tokens: list[int]


def make(folder: Path, embeddings: float) -> None:
    """Write a model, in bfloat16."""
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=EXPERTS,
        num_experts_per_tok=ACTIVE,
        vocab_size=4096,
        max_position_embeddings=2048,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = Qwen3MoeForCausalLM(config)
    model.get_input_embeddings().weight.data.mul_(embeddings)
    model.save_pretrained(folder)


def keep_dropping(folder: Path, ends: threading.Event) -> None:
    """Drop the system's copies of the files in a folder until an event."""
    while not ends.wait(0.005):
        for file in folder.iterdir():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def measure(
    folder: Path, packed: Path, nbytes: int | None, tokens: int, *, cold: bool, ahead: bool
) -> Result:
    """Decode one request, after another one that fills the cache."""
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=tokens, ignore_eos=True)
    prompt = {"prompt_token_ids": list(range(10, 42))}
    settings = {"weight_cache": str(packed), "expert_cache": nbytes, "max_model_len": 2048}
    no_guesses = patch.object(Experts, "expect", lambda *_: None)
    with (
        contextlib.nullcontext() if ahead else no_guesses,
        LLM(str(folder), skip_tokenizer_init=True, enable_prefix_caching=False, **settings) as llm,
    ):
        llm.generate([prompt], params, use_tqdm=False)
        ends = threading.Event()
        dropping = threading.Thread(target=keep_dropping, args=(packed, ends))
        if cold:
            dropping.start()
        before, begun = llm.stats(), time.perf_counter()
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        seconds, after = time.perf_counter() - begun, llm.stats()
        ends.set()
    names = ("hits", "misses", "bytes_read", "fetched_ahead", "fetched_ahead_used")
    counts = (
        getattr(after, f"expert_cache_{name}") - getattr(before, f"expert_cache_{name}")
        for name in names
    )
    return Result(seconds, *counts, list(output.outputs[0].token_ids))


def describe(results: list[Result]) -> str:
    """Return the speed of the median run, and its counts."""
    result = sorted(results)[len(results) // 2]
    line = f"{len(result.tokens) / statistics.median(r.seconds for r in results):7.1f} tokens/s"
    uses = result.hits + result.misses
    share = f"{result.hits / uses:.0%}" if uses else ""
    return f"{line} {share:>5} hits {result.nbytes / 2**20 / result.seconds:6,.0f} MiB/s read"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=EMBEDDINGS, default=list(EMBEDDINGS))
    parser.add_argument("--tokens", type=int, default=64, help="tokens of the answer")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each, in turns")
    parser.add_argument("--cold", action="store_true", help="read from the disk")
    arguments = parser.parse_args()
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as temporary:
            folder, packed = Path(temporary) / "model", Path(temporary) / "packed"
            make(folder, EMBEDDINGS[name])
            print(f"{name}: without fetching ahead | with it | fetched ahead, and used", flush=True)
            whole = EXPERTS * LAYERS * EXPERT_NBYTES
            sizes = [None, *(max(int(share * whole), ACTIVE * EXPERT_NBYTES) for share in SHARES)]
            for nbytes in sizes:
                results: dict[bool, list[Result]] = {False: [], True: []}
                for _ in range(arguments.rounds):
                    for ahead, runs in results.items():
                        runs.append(
                            measure(
                                folder,
                                packed,
                                nbytes,
                                arguments.tokens,
                                cold=arguments.cold,
                                ahead=ahead,
                            )
                        )
                answers = {tuple(r.tokens) for runs in results.values() for r in runs}
                assert len(answers) == 1, "a guess changed the answer"
                size = "all" if nbytes is None else f"{nbytes / 2**20:.0f} MiB"
                fetched, used = (
                    sum(getattr(r, field) for r in results[True]) for field in ("fetched", "used")
                )
                right = f"{fetched / arguments.rounds:.0f}, {used / fetched:.0%}" if fetched else ""
                print(
                    f"{size:>8} {describe(results[False])} | {describe(results[True])} | {right}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
