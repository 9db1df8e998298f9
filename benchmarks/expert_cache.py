"""Speed of a mixture of experts with room for some of its experts, by the size of the cache.

    python benchmarks/expert_cache.py

Makes a mixture with random weights (8 layers of 32 experts, of which a token uses 4; 1.5 MiB each),
and decodes one request with room for different shares of the experts. The router is random too, so
tokens use all experts about equally often: a trained model hits more often. Packed weights are in
a temporary folder. `--cold` drops the system's copy of the file again and again, so that reads come
from the disk as with a model larger than memory; otherwise they come from memory.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import threading
import time
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from octavo import LLM, SamplingParams

EXPERTS, LAYERS, ACTIVE, HIDDEN, INNER = 32, 8, 4, 512, 512
EXPERT_NBYTES = 3 * HIDDEN * INNER * 2
SHARES = (1.0, 0.75, 0.5, 0.25, 0.1, ACTIVE / EXPERTS / LAYERS)


def make(folder: Path) -> None:
    """Write the model, in bfloat16."""
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
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


def keep_dropping(folder: Path, ends: threading.Event) -> None:
    """Drop the system's copies of the files in a folder until an event."""
    while not ends.wait(0.005):
        for file in folder.iterdir():
            descriptor = os.open(file, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def measure(folder: Path, packed: Path, nbytes: int | None, tokens: int, cold: bool) -> str:
    """Return a line with the speed of one request."""
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=tokens, ignore_eos=True)
    prompt = {"prompt_token_ids": list(range(10, 42))}
    settings = {"weight_cache": str(packed), "expert_cache": nbytes, "max_model_len": 2048}
    with LLM(str(folder), skip_tokenizer_init=True, enable_prefix_caching=False, **settings) as llm:
        llm.generate([prompt], params, use_tqdm=False)
        ends = threading.Event()
        dropping = threading.Thread(target=keep_dropping, args=(packed, ends))
        if cold:
            dropping.start()
        before, begun = llm.stats(), time.perf_counter()
        llm.generate([prompt], params, use_tqdm=False)
        seconds, after = time.perf_counter() - begun, llm.stats()
        ends.set()
    hits = after.expert_cache_hits - before.expert_cache_hits
    misses = after.expert_cache_misses - before.expert_cache_misses
    read = (after.expert_cache_bytes_read - before.expert_cache_bytes_read) / 2**20
    share = "all in memory" if nbytes is None else f"{hits / (hits + misses):.0%} hits"
    return f"{tokens / seconds:7.1f} tokens/s, {share}, {read / seconds:,.0f} MiB/s read"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=64, help="tokens of the answer")
    parser.add_argument("--cold", action="store_true", help="read from the disk")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, packed = Path(name) / "model", Path(name) / "packed"
        make(folder)
        whole = EXPERTS * LAYERS * EXPERT_NBYTES
        sizes = [None, *(max(int(share * whole), ACTIVE * EXPERT_NBYTES) for share in SHARES)]
        for nbytes in sizes:
            size = "without" if nbytes is None else f"{nbytes / 2**20:.0f} MiB"
            line = measure(folder, packed, nbytes, arguments.tokens, arguments.cold)
            print(f"{size:>8} {line}", flush=True)


if __name__ == "__main__":
    main()
