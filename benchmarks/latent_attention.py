"""Time of multi-head latent attention in one layer of GLM-4.7-Flash's shape, bfloat16.

    python benchmarks/latent_attention.py --context 8192 --prompt 2048

Decoding is compared with the time to read the latents and the weights once, at the speed at which
a product with one row reads a large weight. Successive layers have different weights and caches, so
that all of them come from memory. A prompt is compared with the expanded form, which computes the
keys and values of each head and attends to these.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from octavo import _native
from octavo.attention.base import AttentionMetadata, AttentionParams
from octavo.attention.cpu import CPUAttention
from octavo.kernels.native import NativeOps
from octavo.system.tensor import HostTensor, empty, from_numpy, full

HIDDEN, HEADS, QUERY_RANK, LATENT, KEY, ROPE, VALUE = 2048, 20, 768, 512, 192, 64, 256
SIZE, BLOCK, LAYERS, ROUNDS = LATENT + ROPE, 64, 6, 9
SCALE = (KEY + ROPE) ** -0.5

_numbers = np.random.default_rng(0)


def random(*shape: int) -> HostTensor:
    """Return small random numbers in bfloat16."""
    array: NDArray[Any] = _numbers.normal(scale=0.05, size=shape).astype(ml_dtypes.bfloat16)
    return from_numpy(array)


def measure(calls: list[Callable[[], object]]) -> float:
    """Return the median time of a call in seconds; the calls are made in turns."""
    rounds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for call in calls:
            call()
        rounds.append((time.perf_counter() - started) / len(calls))
    return median(rounds)


def metadata(tokens: int, context: int) -> AttentionMetadata:
    """Return one request whose last `tokens` tokens are computed."""
    blocks = np.arange(-(-context // BLOCK), dtype=np.int32)
    return AttentionMetadata(
        num_reqs=1,
        num_tokens=tokens,
        max_query_len=tokens,
        max_seq_len=context,
        query_start_loc=from_numpy(np.array([0, tokens], np.int32)),
        seq_lens=from_numpy(np.array([context], np.int32)),
        block_table=from_numpy(blocks[None]),
        slot_mapping=from_numpy(np.arange(context - tokens, context)),
    )


def latents(backend: CPUAttention, context: int) -> HostTensor:
    """Return a filled cache."""
    blocks = -(-context // BLOCK)
    cache = full(backend.latent_cache_shape(blocks, BLOCK, SIZE), 0.0, "bfloat16")
    slots = from_numpy(np.arange(context))
    backend.write_latents(random(context, SIZE), cache, slots)
    return cache


def decode(ops: NativeOps, backend: CPUAttention, context: int) -> None:
    """Print the times of one token."""
    shapes = {
        "in_proj": (QUERY_RANK + SIZE, HIDDEN),
        "q_b_proj": (HEADS * (KEY + ROPE), QUERY_RANK),
        "o_proj": (HIDDEN, HEADS * VALUE),
        "key_heads": (HEADS * LATENT, KEY),
        "value_heads": (HEADS * VALUE, LATENT),
    }
    weights = {
        name: [ops.pack_weight(random(*shape)) for _ in range(LAYERS)]
        for name, shape in shapes.items()
    }
    large = ops.pack_weight(random(40960, 4096))
    caches = [latents(backend, context) for _ in range(LAYERS)]
    here, query = metadata(1, context), random(1, HEADS, SIZE)
    results = empty(1, HEADS, LATENT, dtype="bfloat16")
    row, long = random(1, large.k), {k: random(1, k) for _, k in shapes.values()}
    keys, values = random(1, HEADS, KEY), random(1, HEADS, LATENT)
    seconds = measure([lambda: ops.linear(row, large)])
    speed = large.nbytes / seconds
    print(f"reading: {speed / 1e9:.1f} GB/s")

    def linear(name: str) -> list[Callable[[], object]]:
        return [lambda w=w: ops.linear(long[w.k], w) for w in weights[name]]

    def heads(name: str, x: HostTensor) -> list[Callable[[], object]]:
        return [lambda w=w: ops.head_linear(x, w, HEADS) for w in weights[name]]

    def attend(cache: HostTensor) -> Callable[[], object]:
        return lambda: backend.attend_latents(query, cache, here, results, SCALE)

    calls = {
        "attention": [attend(cache) for cache in caches],
        **{name: linear(name) for name in ("in_proj", "q_b_proj", "o_proj")},
        "key_heads": heads("key_heads", keys),
        "value_heads": heads("value_heads", values),
    }
    nbytes = {name: weights[name][0].nbytes for name in shapes} | {"attention": context * SIZE * 2}
    in_turns = [call for layer in zip(*calls.values(), strict=True) for call in layer]
    times = {name: measure(made) for name, made in calls.items()}
    times["all"], nbytes["all"] = measure(in_turns) * len(calls), sum(nbytes.values())
    for name, seconds in times.items():
        best = nbytes[name] / speed
        print(
            f"1 token, context {context}: {name:12} {seconds * 1e6:8.0f} us, "
            f"{nbytes[name] / 1e6:6.1f} MB, {seconds / best:.2f} of reading"
        )


def prompt(ops: NativeOps, backend: CPUAttention, tokens: int) -> None:
    """Print the times of a prompt in both forms."""
    here, cache = metadata(tokens, tokens), latents(backend, tokens)
    query, absorbed = random(tokens, HEADS, KEY), random(tokens, HEADS, SIZE)
    results = empty(tokens, HEADS, LATENT, dtype="bfloat16")
    key_heads = ops.pack_weight(random(HEADS * LATENT, KEY))
    value_heads = ops.pack_weight(random(HEADS * VALUE, LATENT))
    both, latent = ops.pack_weight(random(HEADS * (KEY + VALUE), LATENT)), random(tokens, LATENT)
    whole = random(tokens, HEADS, KEY + ROPE)
    shape = backend.kv_cache_shape(-(-tokens // BLOCK), BLOCK, HEADS, VALUE)
    expanded, out = full(shape, 0.0, "bfloat16"), empty(*whole.shape, dtype="bfloat16")
    backend.write_kv(whole, whole, expanded, here.slot_mapping)
    params = AttentionParams(SCALE)
    times = {
        "absorbed: attention": lambda: backend.attend_latents(
            absorbed, cache, here, results, SCALE
        ),
        "absorbed: key_heads": lambda: ops.head_linear(query, key_heads, HEADS),
        "absorbed: value_heads": lambda: ops.head_linear(results, value_heads, HEADS),
        "expanded: attention": lambda: backend.forward(whole, expanded, here, out, params),
        "expanded: kv_b_proj": lambda: ops.linear(latent, both),
        "expanded: write": lambda: backend.write_kv(whole, whole, expanded, here.slot_mapping),
    }
    for name, call in times.items():
        print(f"{tokens} tokens: {name:22} {measure([call]) * 1e3:8.1f} ms")


def main() -> None:
    """Measure both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--threads", type=int, default=0)
    args = parser.parse_args()
    _native.set_num_threads(args.threads)
    ops, backend = NativeOps(), CPUAttention()
    print(f"{_native.isa()}, {_native.num_threads()} threads")
    decode(ops, backend, args.context)
    prompt(ops, backend, args.prompt)


if __name__ == "__main__":
    main()
