"""What gpu_check.sh runs: checks and measurements on a GPU, in one table."""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from octavo import LLM, SamplingParams
from octavo.attention.base import AttentionMetadata, Rotary
from octavo.attention.triton import TritonAttention
from octavo.kernels.base import SAMPLING_ROW
from octavo.kernels.triton.ops import TritonOps
from octavo.outputs import CompletionOutput

LAST_START, LIMIT = 420.0, 455.0
"""Seconds after which no part is started, and after which the one that runs is ended."""

Shape = dict[str, int]

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32768,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TINY: Shape = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "max_position_embeddings": 2048,
}
TINYLLAMA: Shape = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}
LLAMA_3_8B: Shape = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rope_theta": 500000,
}


@dataclass(frozen=True)
class Sizes:
    """How large everything is that is run."""

    copy: int = 2**30
    """Bytes."""
    product: int = 8192

    tiny: Shape = field(default_factory=lambda: TINY)
    """The model of the checks."""
    prompts: tuple[int, ...] = (1, 7, 30, 64, 200, 513)
    answer: int = 32
    target: int = 700
    """Prompt tokens of the request that is sent alone and among others: several splits of KV."""
    others: int = 63

    norm: tuple[int, int] = (8192, 4096)
    gate: tuple[int, int] = (4096, 14336)
    sampling: tuple[int, int] = (64, 128256)
    heads: tuple[int, int, int] = (32, 8, 128)
    """Query heads, KV heads, and their size."""
    written: int = 8192
    """Tokens whose keys and values are written."""
    decode: tuple[tuple[int, int], ...] = ((1, 32768), (8, 16384), (64, 4096))
    """Requests and their context."""
    decode_fp8: tuple[int, int] = (8, 16384)
    long_context: int = 16384
    """From here on decode attention has an aim."""
    prefill: int = 8192
    linear: int = 4096
    linear_rows: tuple[int, ...] = (1, 64, 4096)

    models: dict[str, Shape] = field(
        default_factory=lambda: {"tinyllama-1.1b": TINYLLAMA, "llama-3-8b": LLAMA_3_8B}
    )
    batches: tuple[int, ...] = (1, 8, 64, 256)
    busy_batch: int = 64
    """The batch at which the GPU should hardly ever be idle."""
    decode_prompt: int = 32
    settle: int = 8
    """Tokens that are decoded before the counted ones, 2 at least."""
    steps: int = 64
    repeats: int = 3
    """Of what is timed from outside; the median counts."""
    prefills: tuple[int, ...] = (512, 4096, 16384)
    long_prefill: int = 4096
    """From here on prefill has an aim."""
    mix: int = 256
    """Requests."""


FULL = Sizes()
QUICK = replace(
    FULL,
    linear_rows=(64,),
    models={"tinyllama-1.1b": TINYLLAMA},
    batches=(1, 64),
    prefills=(4096,),
    mix=64,
)


@dataclass
class Row:
    """A line of the table; `good` is None where it is only a figure."""

    what: str
    figure: str
    aim: str = ""
    good: bool | None = None


@dataclass(frozen=True)
class Card:
    """What the card reached in this run.

    Attributes:
        name: its name.
        bandwidth: bytes a second of a copy, those read and those written together.
        peak: FLOP/s of a bfloat16 product.
    """

    name: str
    bandwidth: float
    peak: float


class Gpu:
    """What the parts need a GPU for; the tests put a CPU in its place.

    Attributes:
        settings: of every engine.
    """

    device = torch.device("cuda")
    settings: ClassVar[dict[str, Any]] = {"device": "cuda", "gpu_memory_utilization": 0.85}
    flush = 2**28
    """Bytes that are read to drive everything else out of the caches."""
    repeats = 15

    def __init__(self) -> None:
        self._other = torch.zeros(self.flush // 4, device=self.device)
        self._cycles = 2**21  # about 1 ms

    def name(self) -> str:
        """The card's name."""
        return torch.cuda.get_device_name()

    def seconds(self, run: Callable[[], object]) -> float:
        """Median time of what `run` launches, its inputs not in the caches, launching not counted.

        `run` must not wait for the GPU.
        """
        for _ in range(2):
            run()
        times: list[float] = []
        while len(times) < self.repeats:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._other.sum()  # reading, unlike writing, leaves nothing to be written back later
            torch.cuda._sleep(self._cycles)  # for as long as launching takes
            start.record()
            run()
            late = start.query()
            end.record()
            end.synchronize()
            if late and self._cycles < 2**26:
                self._cycles *= 2
            else:
                times.append(start.elapsed_time(end) / 1e3)
        return statistics.median(times)


class Bench:
    """What a part gets: the GPU, the sizes, a place for its rows, the card's limits.

    Args:
        gpu: where to run.
        sizes: how much.
        folder: where rows go as they come, and where the card's limits are.
        part: the part's name.
    """

    def __init__(self, gpu: Gpu, sizes: Sizes, folder: Path, part: str) -> None:
        self.gpu, self.sizes = gpu, sizes
        self._rows, self._card = folder / f"{part}.jsonl", folder / "card.json"

    def add(self, what: str, figure: str, aim: str = "", good: bool | None = None) -> None:
        """Takes a row in and shows it."""
        print(f"{what}: {figure}", flush=True)
        with self._rows.open("a") as file:
            file.write(json.dumps(asdict(Row(what, figure, aim, good))) + "\n")

    @property
    def card(self) -> Card:
        """What the first part measured."""
        if not self._card.exists():
            raise RuntimeError("the card's own limits were not measured")
        return Card(**json.loads(self._card.read_text()))

    @card.setter
    def card(self, card: Card) -> None:
        self._card.write_text(json.dumps(asdict(card)))


def measure_card(bench: Bench) -> None:
    """A large copy and a large product."""
    gpu, sizes = bench.gpu, bench.sizes
    a = torch.zeros(sizes.copy, dtype=torch.uint8, device=gpu.device)
    b = torch.empty_like(a)
    bandwidth = 2 * a.nbytes / gpu.seconds(lambda: b.copy_(a))
    n = sizes.product
    x, y = (torch.randn(n, n, device=gpu.device, dtype=torch.bfloat16) for _ in range(2))
    peak = 2 * n**3 / gpu.seconds(lambda: x @ y)
    bench.card = Card(gpu.name(), bandwidth, peak)
    bench.add("card: copy, read and written", f"{bandwidth / 1e9:,.0f} GB/s")
    bench.add(f"card: bfloat16 product of {n}^3", f"{peak / 1e12:,.0f} TFLOP/s")


# ---- correctness ----


def check_parity(bench: Bench) -> None:
    """Greedy tokens and logprobs against transformers in float32, on random models."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    sizes, device, vocab = bench.sizes, bench.gpu.device, bench.sizes.tiny["vocab_size"]
    prompts = [random_ids(n, seed=n, vocab=vocab) for n in sizes.prompts]
    params = SamplingParams(temperature=0, max_tokens=sizes.answer, logprobs=1, ignore_eos=True)
    for dtype in ("float32", "bfloat16"):
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(sizes.tiny))
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() == 2:
                        parameter.normal_(std=0.1)
            model.to(getattr(torch, dtype)).save_pretrained(folder)
            with engine(
                bench,
                folder,
                dtype=dtype,
                max_num_seqs=len(prompts),
                max_num_batched_tokens=256,
            ) as llm:
                answers = generate(llm, prompts, params)
            # The truth, and how far transformers itself is from it in the model's own dtype.
            truth, theirs = (
                transformers.LlamaForCausalLM.from_pretrained(folder, dtype=form).eval().to(device)
                for form in (torch.float32, getattr(torch, dtype))
            )
        worst = their_worst = 0.0
        equal = their_equal = total = 0
        for prompt, answer in zip(prompts, answers, strict=True):
            ids = list(answer.token_ids)
            true, rounded = (logprobs(model, prompt, ids, device) for model in (truth, theirs))
            chosen = torch.tensor(ids)
            steps = torch.arange(len(ids))
            assert answer.logprobs is not None
            reported = zip(ids, answer.logprobs, strict=True)
            ours = torch.tensor([entry[token].logprob for token, entry in reported])
            worst = max(worst, (ours - true[steps, chosen]).abs().max().item())
            error = (rounded - true)[steps, chosen].abs().max().item()
            their_worst = max(their_worst, error)
            equal += int((true.argmax(-1) == chosen).sum())
            their_equal += int((true.argmax(-1) == rounded.argmax(-1)).sum())
            total += len(ids)
        if dtype == "float32":
            bound, fewest, note = 1e-3, total, ""
        else:
            bound, fewest = 2 * their_worst, math.floor(0.95 * their_equal)
            note = f" (transformers in {dtype}: {their_equal}, {their_worst:.1e})"
        bench.add(
            f"parity with transformers in float32: {dtype}",
            f"{equal} of {total} greedy tokens equal, logprobs within {worst:.1e}{note}",
            f"{fewest}, {bound:.1e}",
            equal >= fewest and worst <= bound,
        )


def logprobs(model: Any, prompt: list[int], ids: list[int], device: torch.device) -> Tensor:
    """Of all tokens where a transformers model was to choose each of `ids`: [len(ids), vocab]."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([prompt + ids], device=device)).logits[0]
        return logits[len(prompt) - 1 : -1].float().log_softmax(-1).cpu()


def check_invariance(bench: Bench) -> None:
    """A request alone and among others, its prompt in chunks that the others move."""
    sizes, rng = bench.sizes, random.Random(1)
    vocab = sizes.tiny["vocab_size"]
    target = random_ids(sizes.target, seed=0, vocab=vocab)
    others = [
        random_ids(rng.randrange(1, sizes.target // 2), seed=i, vocab=vocab)
        for i in range(sizes.others)
    ]
    params = SamplingParams(
        temperature=0.8, seed=7, max_tokens=2 * sizes.answer, logprobs=3, ignore_eos=True
    )
    for invariant in (True, False):
        with (
            tempfile.TemporaryDirectory() as folder,
            engine(
                bench,
                write_config(folder, sizes.tiny),
                load_format="dummy",
                batch_invariant=invariant,
                max_num_seqs=sizes.others + 1,
                max_num_batched_tokens=256,
            ) as llm,
        ):
            alone = generate(llm, [target], params)[0]
            among = generate(llm, [*others, target], params)[-1]
        same = list(alone.token_ids) == list(among.token_ids)
        bits = same and numbers(alone) == numbers(among)
        bench.add(
            f"a request alone and among {sizes.others} others, batch_invariant={invariant}",
            "the same bits" if bits else "the same tokens" if same else "other tokens",
            "the same bits" if invariant else "",
            bits if invariant else None,
        )


def numbers(answer: CompletionOutput) -> list[dict[int, float]]:
    """All logprobs of an answer."""
    return [{t: entry.logprob for t, entry in step.items()} for step in answer.logprobs or []]


# ---- kernels ----


def measure_kernels(bench: Bench) -> None:
    """Bandwidth or FLOP/s of each kernel, as a share of the card's."""
    gpu, sizes, card = bench.gpu, bench.sizes, bench.card
    device = gpu.device
    ops = TritonOps()
    assert isinstance(ops, TritonOps)
    bf16: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}

    def memory(what: str, nbytes: float, run: Callable[[], object], aim: float = 0.0) -> None:
        seconds = gpu.seconds(run)
        share = nbytes / seconds / card.bandwidth
        bench.add(
            f"kernel: {what}",
            f"{seconds * 1e6:,.0f} us, {share:.0%} of the copy's bandwidth",
            f"{aim:.0%}" if aim else "",
            share >= aim if aim else None,
        )

    x, residual = (torch.randn(*sizes.norm, **bf16) for _ in range(2))
    weight = torch.ones(sizes.norm[1], **bf16)
    memory(
        f"RMSNorm with residual, {shown(sizes.norm)}",
        4 * x.nbytes,
        lambda: ops.fused_add_rms_norm(x, residual, weight, 1e-5),
    )
    gate_up = torch.randn(sizes.gate[0], 2 * sizes.gate[1], **bf16)
    memory(
        f"SiLU and multiply, {shown(sizes.gate)}",
        1.5 * gate_up.nbytes,
        lambda: ops.act_and_mul(gate_up, "silu"),
    )
    write_kv(bench, memory)

    logits = torch.randn(*sizes.sampling, device=device)
    tokens = torch.empty(sizes.sampling[0], dtype=torch.int64, device=device)
    for name, temperature, top_p in (("greedy", 0.0, 1.0), ("top-p 0.9", 1.0, 0.9)):
        params = np.zeros(sizes.sampling[0], SAMPLING_ROW)
        params["temperature"], params["top_p"], params["uniform"] = temperature, top_p, 0.5
        rows = torch.from_numpy(params.view(np.int64).reshape(-1, 4)).to(device)
        memory(
            f"sampling {shown(sizes.sampling)}, {name}; logits counted once",
            logits.nbytes,
            partial(ops.sample_into, logits, rows, tokens),
        )

    decodes = [(*size, torch.bfloat16) for size in sizes.decode]
    for batch, length, dtype in [*decodes, (*sizes.decode_fp8, torch.float8_e4m3fn)]:
        nbytes, run = attention(bench, batch, length, 1, dtype)
        fp8 = dtype != torch.bfloat16
        judged = length >= sizes.long_context and not fp8
        memory(
            f"attention, decode of {batch} x {length:,}{', FP8 cache' * fp8}",
            nbytes,
            run,
            0.7 if judged else 0.0,
        )
    _, run = attention(bench, 1, sizes.prefill, sizes.prefill, torch.bfloat16)
    heads, _, size = sizes.heads
    share = attention_flop(heads * size, sizes.prefill) / gpu.seconds(run) / card.peak
    bench.add(f"kernel: attention, prefill of {sizes.prefill:,}", f"{share:.0%} of the matrix peak")

    n, invariant = sizes.linear, TritonOps(batch_invariant=True)
    packed = ops.pack_weight(torch.randn(n, n, **bf16))
    for count in sizes.linear_rows:
        x = torch.randn(count, n, **bf16)
        plain, fixed = (gpu.seconds(partial(o.linear, x, packed)) for o in (ops, invariant))
        nbytes, flop = packed.nbytes + 2 * x.nbytes, 2 * count * n * n
        bench.add(
            f"kernel: batch-invariant product, {count} x {n} x {n}",
            f"{fixed / plain:.2f} of cuBLAS' time, {flop / fixed / card.peak:.0%} of the matrix "
            f"peak, {nbytes / fixed / card.bandwidth:.0%} of the copy's bandwidth",
        )


def write_kv(bench: Bench, memory: Callable[..., None]) -> None:
    """Rotary embedding and the write into the cache, to slots in no order."""
    device, tokens = bench.gpu.device, bench.sizes.written
    heads, kv_heads, size = bench.sizes.heads
    backend = TritonAttention(device, tokens)
    bf16: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    shape = backend.kv_cache_shape(tokens // 16 + 1, 16, kv_heads, size)
    cache = torch.zeros(shape, **bf16)
    query = torch.randn(tokens, heads, size, **bf16)
    key, value = (torch.randn(tokens, kv_heads, size, **bf16) for _ in range(2))
    slots = 16 + torch.randperm(tokens, device=device)
    table = torch.rand(tokens, size, device=device)
    rotary = Rotary(
        TritonOps().rotary_embedding,
        torch.arange(tokens, device=device),
        query,
        table,
    )
    memory(
        f"rotary embedding and KV write, {tokens:,} tokens",
        2 * (query.nbytes + key.nbytes + value.nbytes) + table.nbytes,
        lambda: backend.write_kv(key, value, cache, slots, rotary),
    )


def attention(
    bench: Bench, batch: int, length: int, query_len: int, dtype: torch.dtype
) -> tuple[int, Callable[[], None]]:
    """Attention of the last `query_len` tokens of `batch` contexts; the cache's bytes, and a call.

    The blocks of the contexts are in no order.
    """
    device, page = bench.gpu.device, 16
    heads, kv_heads, size = bench.sizes.heads
    longest = max(context for _, context in bench.sizes.decode)
    backend = TritonAttention(device, longest)
    blocks = batch * -(-length // page)
    shape = backend.kv_cache_shape(blocks + 1, page, kv_heads, size)
    cache = torch.randn(shape, dtype=torch.bfloat16, device=device).to(dtype)
    order = 1 + torch.randperm(blocks, dtype=torch.int32, device=device)
    counts = torch.arange(batch + 1, dtype=torch.int32, device=device)
    metadata = AttentionMetadata(
        num_reqs=batch,
        num_tokens=batch * query_len,
        max_query_len=query_len,
        max_seq_len=length,
        query_start_loc=counts * query_len,
        seq_lens=torch.full_like(counts[1:], length),
        block_table=order.view(batch, -1),
        slot_mapping=torch.empty(0, dtype=torch.int64, device=device),
    )
    query = torch.randn(batch * query_len, heads, size, dtype=torch.bfloat16, device=device)
    out = torch.empty_like(query)
    run = partial(backend.forward, query, cache, metadata, out, scale=size**-0.5)
    return cache[1:].nbytes, run


def attention_flop(width: int, length: int) -> float:
    """Of causal attention over a prompt: two products, of half the pairs of tokens each."""
    return 2.0 * width * length**2


# ---- models ----


def measure_model(bench: Bench, name: str) -> None:
    """Decode, with and without graphs, prefill, and a mix of requests; random weights."""
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
    """Elements of the matrices of a layer."""
    hidden, heads = shape["hidden_size"], shape["num_attention_heads"]
    both = 2 * hidden * hidden  # queries and output
    kv = 2 * hidden * (hidden // heads) * shape["num_key_value_heads"]
    return both + kv + 3 * hidden * shape["intermediate_size"]


def read_nbytes(shape: Shape) -> int:
    """Bytes of bfloat16 weights that a step reads: all, but of the embeddings only some rows.

    Tied embeddings are the output's weight as well, and are counted as that.
    """
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    norms = (2 * layers + 1) * hidden
    return 2 * (layers * layer_elements(shape) + shape["vocab_size"] * hidden + norms)


def prefill_flop(shape: Shape, length: int) -> float:
    """Of the matrix products and attention of a prompt; logits are those of the last token."""
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    products = 2.0 * length * layers * layer_elements(shape) + 2.0 * hidden * shape["vocab_size"]
    return products + layers * attention_flop(hidden, length)


def decode_seconds(llm: LLM, sizes: Sizes, batch: int) -> float:
    """Time of a decode step: what some more tokens take."""
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
    """Time to the first token of prompts that share nothing; one more goes ahead."""
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    times = []
    for seed in range(1 + sizes.repeats):
        prompt = random_ids(length, seed=seed, vocab=vocab)
        start = time.perf_counter()
        generate(llm, [prompt], params)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def mix_tokens_a_second(llm: LLM, sizes: Sizes, vocab: int) -> float:
    """Lengths as in ShareGPT conversations: log-normal, 220 in and 200 out on average."""
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
    """What runs the steps of an engine, see octavo/worker/device_steps.py."""
    return llm._client.core.executor._worker.runner.steps  # type: ignore[attr-defined]


def last_step(llm: LLM, sizes: Sizes, batch: int) -> Callable[[], None]:
    """Repeats the last decode step of `decode_seconds`: its graph, its inputs.

    Raises:
        RuntimeError: something else has run since, and left inputs that fit no step of that size.
    """
    captured = device_steps(llm)._graphs[batch]
    length = sizes.decode_prompt + sizes.settle - 1
    arrays = captured.arrays
    if not bool(((arrays.seq_lens == length) & (arrays.positions == length - 1)).all()):
        raise RuntimeError(f"the last step was no decode step of {batch} requests")
    replay: Callable[[], None] = captured.graph.replay
    return replay


@contextmanager
def graphs_off(llm: LLM) -> Iterator[None]:
    """Steps run as with enforce_eager, in the very same engine."""
    steps = device_steps(llm)
    graphs, steps._graphs = steps._graphs, {}
    try:
        yield
    finally:
        steps._graphs = graphs


# ---- helpers ----


def shown(shape: tuple[int, int]) -> str:
    """A shape for people."""
    return " x ".join(f"{n:,}" for n in shape)


def random_ids(count: int, *, seed: int, vocab: int) -> list[int]:
    """A prompt without special tokens."""
    rng = random.Random(seed)
    return [rng.randrange(3, vocab) for _ in range(count)]


def generate(
    llm: LLM, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
) -> list[CompletionOutput]:
    """The answer to each prompt.

    Raises:
        RuntimeError: one of them is not as long as it was asked for: its request failed.
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
    """A model folder without weights."""
    (Path(folder) / "config.json").write_text(json.dumps(LLAMA | shape))
    return folder


@contextmanager
def engine(bench: Bench, model: str, **settings: Any) -> Iterator[LLM]:
    """An engine on the GPU, shut down afterwards."""
    gc.collect()
    torch.cuda.empty_cache()  # what an engine before this one held
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


# ---- parts and their processes ----


def parts(sizes: Sizes) -> dict[str, Callable[[Bench], None]]:
    """All parts, in order; the first measures what others are compared with."""
    return {
        "card": measure_card,
        "parity": check_parity,
        "invariance": check_invariance,
        "kernels": measure_kernels,
        **{name: partial(measure_model, name=name) for name in sizes.models},
    }


def run_part(part: str, make_gpu: Callable[[], Gpu], sizes: Sizes, folder: Path) -> None:
    """Runs a part in this process; what goes wrong is a row."""
    bench = Bench(make_gpu(), sizes, folder, part)
    try:
        parts(sizes)[part](bench)
    except Exception as error:
        traceback.print_exc()
        bench.add(part, f"{type(error).__name__}: {error}", "runs", False)


def check(child: Sequence[str], names: Sequence[str], out: Path | None = None) -> int:
    """Runs each part in a process of its own and prints the table; returns 1 if a check failed.

    A process that met an error of CUDA can do nothing more with the GPU; the other parts can.

    Args:
        child: a command that runs a part, but for "--part NAME --folder FOLDER".
        names: of the parts.
        out: where to write the rows as JSON, after every part anew.
    """
    start = time.monotonic()
    rows: list[Row] = []
    seconds: dict[str, float] = {}
    title: dict[str, Any] = {"torch": torch.__version__}
    try:
        with tempfile.TemporaryDirectory() as folder:
            for part in names:
                before = time.monotonic() - start
                if before > LAST_START:
                    rows.append(Row(part, f"skipped: {before:.0f} s had passed", "runs", False))
                else:
                    command = [*child, "--part", part, "--folder", folder]
                    failure = run_child(command, LIMIT - before)
                    file = Path(folder, f"{part}.jsonl")
                    lines = file.read_text().splitlines() if file.exists() else []
                    rows += [Row(**json.loads(line)) for line in lines]
                    if failure is not None:
                        rows.append(Row(part, failure, "runs", False))
                    seconds[part] = round(time.monotonic() - start - before, 1)
                    print(f"-- {part}: {seconds[part]:.0f} s", flush=True)
                card = Path(folder, "card.json")
                if card.exists():
                    title["card"] = json.loads(card.read_text())
                if out is not None:
                    data = title | {"seconds": seconds, "rows": [asdict(row) for row in rows]}
                    out.write_text(json.dumps(data, indent=1) + "\n")
    finally:
        name = title["card"]["name"] if "card" in title else "an unknown card"
        print(f"\nOctavo on {name}, torch {torch.__version__}")
        print_table(rows)
        each = ", ".join(f"{part} {spent:.0f}" for part, spent in seconds.items())
        print(f"{time.monotonic() - start:.0f} s: {each}", flush=True)
    return int(any(row.good is False for row in rows))


def run_child(command: Sequence[str], limit: float) -> str | None:
    """Runs a part; returns what became of it if it did not end well."""
    try:
        status = subprocess.run(command, timeout=limit).returncode
    except subprocess.TimeoutExpired:
        return f"ended after {limit:.0f} s, before it was done"
    return None if status == 0 else f"crashed with status {status}"


def print_table(rows: Sequence[Row]) -> None:
    """All rows for people."""
    verdicts = {None: "", True: "ok", False: "SHORT"}
    lines = [("what", "figure", "aim", "")]
    lines += [(row.what, row.figure, row.aim, verdicts[row.good]) for row in rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        print("  ".join(cells).rstrip())


def main() -> int:
    """Runs all parts, or as their child process one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the rows as JSON")
    parser.add_argument("--quick", action="store_true", help="one model and few sizes")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    sizes = QUICK if args.quick else FULL
    if args.part is not None:
        run_part(args.part, Gpu, sizes, args.folder)
        return 0
    child = [sys.executable, __file__, *(["--quick"] if args.quick else [])]
    return check(child, list(parts(sizes)), args.out)


if __name__ == "__main__":
    sys.exit(main())
