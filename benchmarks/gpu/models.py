"""Whole models with random weights: decode, prefill, and a mix of requests."""

from __future__ import annotations

import math
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gpu.base import LLAMA, Bench, Shape, Sizes
from gpu.engines import engine, generate, random_ids, write_config
from gpu.kernels import attention_flop
from octavo import LLM, SamplingParams


def measure_model(bench: Bench, name: str) -> None:
    """Measure decode with and without graphs, prefill, and a mix of requests; random weights."""
    gpu, sizes, card = bench.gpu, bench.sizes, bench.card
    shape = LLAMA | sizes.models[name]
    start = time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as folder,
        engine(
            bench,
            write_config(folder, shape),
            load_format="dummy",
            max_num_seqs=max(sizes.batches),
            max_model_len=max(sizes.prefills) + 1,
            # All prompts of a batch in one step, so that their last tokens share one, too.
            max_num_batched_tokens=max(*sizes.prefills, max(sizes.batches) * sizes.decode_prompt),
        ) as llm,
    ):
        ready = time.perf_counter() - start
        count = len(device_steps(llm)._graphs)
        bench.add(f"{name}: ready, {count} decode steps captured", f"{ready:.1f} s")
        floor = read_nbytes(shape) / card.bandwidth
        room = (llm.memory_plan.num_blocks - 1) * llm.memory_plan.block_size
        for batch in sizes.batches:
            needed = batch * (sizes.decode_prompt + sizes.settle + sizes.steps + 16)
            if needed > room:
                bench.add(f"{name}: decode, batch {batch}", f"does not fit: {room:,} tokens do")
                continue
            seconds = decode_seconds(llm, sizes, batch)
            times = seconds / floor
            idle = max(0.0, 1 - gpu.seconds(last_step(llm, sizes, batch)) / seconds)
            aim, good = "", None
            if batch == 1:
                aim, good = "1.35 times", times <= 1.35
            elif batch == sizes.busy_batch:
                aim, good = "idle 5%", idle < 0.05
            bench.add(
                f"{name}: decode, batch {batch}",
                f"{seconds * 1e3:.2f} ms a token, {times:.2f} times as long as reading the "
                f"weights; GPU idle {idle:.1%}",
                aim,
                good,
            )
            if batch in (1, sizes.busy_batch):
                with graphs_off(llm):
                    eager = decode_seconds(llm, sizes, batch)
                bench.add(
                    f"{name}: decode, batch {batch}, without graphs",
                    f"{eager * 1e3:.2f} ms a token, {eager / seconds:.2f} times as long",
                )
        for length in sizes.prefills:
            seconds = prefill_seconds(llm, sizes, shape["vocab_size"], length)
            share = prefill_flop(shape, length) / seconds / card.peak
            judged = length >= sizes.long_prefill
            bench.add(
                f"{name}: prefill of {length:,}",
                f"{length / seconds:,.0f} tokens/s, {share:.0%} of the matrix peak, attention's "
                "operations included",
                "60%" if judged else "",
                share >= 0.6 if judged else None,
            )
        for _ in range(2):  # the first one only warms up
            rate = mix_tokens_a_second(llm, sizes, shape["vocab_size"])
        bench.add(f"{name}: mix of {sizes.mix} requests", f"{rate:,.0f} tokens/s out")


def layer_elements(shape: Shape) -> int:
    """Return the elements of the matrices of a layer."""
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    both = 2 * hidden * hidden  # queries and output
    kv = 2 * hidden * (hidden // heads) * shape["num_key_value_heads"]
    return both + kv + 3 * hidden * shape["intermediate_size"]


def read_nbytes(shape: Shape) -> int:
    """Return the bytes of bfloat16 weights that a step reads: all, except most rows of embeddings.

    Tied embeddings are the output's weight as well, and counted as such.
    """
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    norms = (2 * layers + 1) * hidden
    return 2 * (layers * layer_elements(shape) + shape["vocab_size"] * hidden + norms)


def prefill_flop(shape: Shape, length: int) -> float:
    """Return the FLOP of a prompt's matrix products and attention, with the last token's logits."""
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    products = 2.0 * length * layers * layer_elements(shape) + 2.0 * hidden * shape["vocab_size"]
    return products + layers * attention_flop(hidden, length)


def decode_seconds(llm: LLM, sizes: Sizes, batch: int) -> float:
    """Return the time of a decode step, from the time of additional tokens."""
    prompts = [[3 + (i + j) % 50 for j in range(sizes.decode_prompt)] for i in range(batch)]

    def seconds(count: int) -> float:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
        start = time.perf_counter()
        generate(llm, prompts, params)
        return time.perf_counter() - start

    seconds(sizes.settle)
    few, many = sizes.settle, sizes.settle + sizes.steps
    return statistics.median(
        (seconds(many) - seconds(few)) / sizes.steps for _ in range(sizes.repeats)
    )


def prefill_seconds(llm: LLM, sizes: Sizes, vocab: int, length: int) -> float:
    """Return the time to the first token of unrelated prompts, after a warm-up."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    times = []
    for seed in range(1 + sizes.repeats):
        prompt = random_ids(length, seed=seed, vocab=vocab)
        start = time.perf_counter()
        generate(llm, [prompt], params)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def mix_tokens_a_second(llm: LLM, sizes: Sizes, vocab: int) -> float:
    """Measure lengths as in ShareGPT conversations: log-normal, 220 in and 200 out on average."""
    rng = random.Random(0)
    room = llm.memory_plan.max_model_len // 2

    def length(mean: float, most: int) -> int:
        return max(4, min(most, room, int(rng.lognormvariate(math.log(mean) - 0.5, 1.0))))

    prompts = [random_ids(length(220, 2048), seed=i, vocab=vocab) for i in range(sizes.mix)]
    params = [
        SamplingParams(temperature=0, max_tokens=length(200, 1024), ignore_eos=True)
        for _ in prompts
    ]
    start = time.perf_counter()
    answers = generate(llm, prompts, params)
    return sum(len(a.token_ids) for a in answers) / (time.perf_counter() - start)


def device_steps(llm: LLM) -> Any:
    """Return the object that runs the steps of an engine, see octavo/worker/device_steps.py."""
    return llm._client.core.executor._worker.runner.state.steps  # type: ignore[attr-defined]


def last_step(llm: LLM, sizes: Sizes, batch: int) -> Callable[[], None]:
    """Return a function that repeats the last decode step of `decode_seconds`: graph and inputs.

    Raises:
        RuntimeError: another step has run since, with inputs that fit no step of that size.
    """
    captured = device_steps(llm)._graphs[batch]
    length = sizes.decode_prompt + sizes.settle - 1
    table = captured.table
    if not bool(((table.seq_lens == length) & (table.positions == length - 1)).all()):
        raise RuntimeError(f"the last step was no decode step of {batch} requests")
    replay: Callable[[], None] = captured.graph.replay
    return replay


@contextmanager
def graphs_off(llm: LLM) -> Iterator[None]:
    """Run steps as with enforce_eager, in the same engine."""
    steps = device_steps(llm)
    graphs, steps._graphs = steps._graphs, {}
    try:
        yield
    finally:
        steps._graphs = graphs
