"""What gpu_check.sh runs: checks and measurements on a GPU, in one table."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from octavo import LLM, SamplingParams
from octavo.attention.base import AttentionMetadata
from octavo.attention.triton import TritonAttention
from octavo.kernels.base import SAMPLING_ROW
from octavo.kernels.triton.ops import TritonOps

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SHAPES: dict[str, dict[str, Any]] = {
    "tinyllama-1.1b": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 22,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
        "rope_theta": 10000.0,
    },
    "llama-3-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
    },
}
TINY: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}
DECODE_BATCHES, PREFILLS = (1, 8, 64, 256), (512, 4096, 16384)
DECODE_STEPS = 64


@dataclass
class Row:
    """A line of the table."""

    what: str
    figure: str
    aim: str = ""
    good: bool | None = None
    """None: only a figure."""


class Report:
    """Rows as they come; a part that fails is a row, and the others go on."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.console = Console(width=120)

    def add(self, what: str, figure: str, aim: str = "", good: bool | None = None) -> None:
        """Takes a row in and shows it."""
        self.rows.append(Row(what, figure, aim, good))
        self.console.print(f"{what}: {figure}", highlight=False)

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Turns what goes wrong inside into a row."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.add(name, f"{type(error).__name__}: {error}", "runs", False)
        torch.cuda.empty_cache()

    def table(self) -> Table:
        """All rows."""
        name = torch.cuda.get_device_name()
        table = Table(title=f"Octavo on {name}, torch {torch.__version__}")
        for column in ("what", "figure", "aim", ""):
            table.add_column(column)
        for row in self.rows:
            verdict = "" if row.good is None else "ok" if row.good else "SHORT"
            table.add_row(row.what, row.figure, row.aim, verdict)
        return table


def gpu_seconds(run: Callable[[], object], repeats: int = 20) -> float:
    """Median time of a launch, by events, after three that are not counted."""
    times = []
    for i in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        if i >= 3:
            times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


@dataclass
class Card:
    """What the card reached in this run: bytes a second of a copy, FLOP/s of a bfloat16 product."""

    bandwidth: float
    peak: float


def measure_card(report: Report) -> Card:
    """A copy of 1 GiB (read and written), a product of 8192^3."""
    a = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    bandwidth = 2 * a.nbytes / gpu_seconds(lambda: b.copy_(a))
    x, y = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    peak = 2 * 8192**3 / gpu_seconds(lambda: x @ y)
    report.add("card: copy", f"{bandwidth / 1e9:,.0f} GB/s")
    report.add("card: bfloat16 product of 8192^3", f"{peak / 1e12:,.0f} TFLOP/s")
    return Card(bandwidth, peak)


# ---- correctness ----


def check_parity(report: Report) -> None:
    """Greedy tokens and logprobs against transformers, on random models."""
    import transformers

    rng = random.Random(0)
    prompts = [[rng.randrange(3, 1000) for _ in range(n)] for n in (1, 7, 30, 64, 200, 513)]
    for dtype in ("float32", "bfloat16"):
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            config = transformers.LlamaConfig(**TINY, max_position_embeddings=1024)
            model = transformers.LlamaForCausalLM(config).eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    if parameter.dim() == 2:
                        parameter.normal_(std=0.1)
            model.to(getattr(torch, dtype)).save_pretrained(folder)
            with engine(folder, dtype=dtype, max_num_batched_tokens=256) as llm:
                params = SamplingParams(temperature=0, max_tokens=32, logprobs=1, ignore_eos=True)
                outputs = llm.generate(as_prompts(prompts), params, use_tqdm=False)
            model = model.float().cuda()
            worst = equal = total = 0.0
            for prompt, output in zip(prompts, outputs, strict=True):
                ids = list(output.outputs[0].token_ids)
                with torch.inference_mode():
                    logits = model(torch.tensor([prompt + ids], device="cuda")).logits[0]
                logprobs = logits[len(prompt) - 1 : -1].float().log_softmax(-1)
                for i, (token, entries) in enumerate(
                    zip(ids, output.outputs[0].logprobs or [], strict=True)
                ):
                    worst = max(worst, abs(entries[token].logprob - logprobs[i, token].item()))
                    equal += logprobs[i].argmax().item() == token
                    total += 1
        bound, share = (1e-3, 1.0) if dtype == "float32" else (0.2, 0.9)
        report.add(
            f"parity with transformers in float32: {dtype}",
            f"{equal:.0f} of {total:.0f} greedy tokens equal, logprobs within {worst:.1e}",
            f"{share:.0%}, {bound:g}",
            equal >= share * total and worst <= bound,
        )


def check_invariance(report: Report) -> None:
    """A request alone and among 63 others."""
    rng = random.Random(1)
    target = [rng.randrange(3, 1000) for _ in range(150)]
    others = [[rng.randrange(3, 1000) for _ in range(rng.randrange(1, 300))] for _ in range(63)]
    params = SamplingParams(temperature=0.8, seed=7, max_tokens=64, logprobs=3, ignore_eos=True)
    for invariant in (True, False):
        with (
            tempfile.TemporaryDirectory() as folder,
            engine(write_config(folder, TINY), batch_invariant=invariant, dummy=True) as llm,
        ):
            alone = llm.generate(as_prompts([target]), params, use_tqdm=False)[0].outputs[0]
            among = llm.generate(as_prompts([*others, target]), params, use_tqdm=False)[-1]
        same = list(alone.token_ids) == list(among.outputs[0].token_ids)
        bits = same and [{t: e.logprob for t, e in p.items()} for p in alone.logprobs or []] == [
            {t: e.logprob for t, e in p.items()} for p in among.outputs[0].logprobs or []
        ]
        report.add(
            f"a request alone and among 63 others, batch_invariant={invariant}",
            "the same bits" if bits else "the same tokens" if same else "other tokens",
            "the same bits" if invariant else "",
            bits if invariant else None,
        )


# ---- kernels ----


def measure_kernels(report: Report, card: Card) -> None:
    """Bandwidth or FLOP/s of each kernel, as a share of the card's."""
    ops, invariant = TritonOps(), TritonOps(batch_invariant=True)
    bf16 = {"dtype": torch.bfloat16, "device": "cuda"}

    def memory(
        what: str, nbytes: float, run: Callable[[], object], aim: float | None = None
    ) -> None:
        share = nbytes / gpu_seconds(run) / card.bandwidth
        report.add(
            f"kernel: {what}",
            f"{share:.0%} of the copy's bandwidth",
            "" if aim is None else f"{aim:.0%}",
            None if aim is None else share >= aim,
        )

    x, residual, weight = torch.randn(8192, 4096, **bf16), torch.randn(8192, 4096, **bf16), None
    weight = torch.ones(4096, **bf16)
    memory(
        "RMSNorm with residual, 8192 x 4096",
        4 * x.nbytes,
        lambda: ops.fused_add_rms_norm(x, residual, weight, 1e-5),
    )
    gate_up = torch.randn(4096, 2 * 14336, **bf16)
    memory(
        "SiLU and multiply, 4096 x 14336",
        1.5 * gate_up.nbytes,
        lambda: ops.act_and_mul(gate_up, "silu"),
    )
    logits = torch.randn(64, 128256, device="cuda")
    for name, given in (
        ("argmax", {"temperature": 0.0}),
        ("top-p", {"temperature": 1.0, "top_p": 0.9}),
    ):
        params = np.zeros(64, SAMPLING_ROW)
        params["top_p"], params["uniform"] = 1.0, 0.5
        for field, value in given.items():
            params[field] = value
        rows = torch.from_numpy(params.view(np.int64).reshape(-1, 4)).cuda()
        out = torch.empty(64, dtype=torch.int64, device="cuda")
        seconds = gpu_seconds(lambda rows=rows, out=out: ops.sample_into(logits, rows, out))
        report.add(f"kernel: sample 64 x 128,256, {name}", f"{seconds * 1e6:,.0f} us")

    heads, kv_heads, size, page = 32, 8, 128, 16
    for batch, length in ((1, 32768), (8, 16384), (64, 4096)):
        attention = TritonAttention(torch.device("cuda"), 32768)
        blocks = batch * length // page
        cache = torch.randn(blocks + 1, 2, page, kv_heads, size, **bf16)
        metadata = AttentionMetadata(
            num_reqs=batch,
            num_tokens=batch,
            max_query_len=1,
            max_seq_len=length,
            query_start_loc=torch.arange(batch + 1, dtype=torch.int32, device="cuda"),
            seq_lens=torch.full((batch,), length, dtype=torch.int32, device="cuda"),
            block_table=(1 + torch.randperm(blocks, dtype=torch.int32, device="cuda")).view(
                batch, -1
            ),
            slot_mapping=torch.empty(0, dtype=torch.int64, device="cuda"),
        )
        query = torch.randn(batch, heads, size, **bf16)
        out = torch.empty_like(query)
        memory(
            f"attention, decode of {batch} x {length:,}",
            cache.nbytes,
            lambda a=attention, q=query, c=cache, m=metadata, o=out: a.forward(
                q, c, m, o, scale=size**-0.5
            ),
            0.7 if length >= 16384 else None,
        )
        del cache

    for rows in (1, 64, 4096):
        x = torch.randn(rows, 4096, **bf16)
        packed = ops.pack_weight(torch.randn(4096, 4096, **bf16))
        plain = gpu_seconds(lambda x=x, w=packed: ops.linear(x, w))
        fixed = gpu_seconds(lambda x=x, w=packed: invariant.linear(x, w))
        report.add(
            f"kernel: batch-invariant product, {rows} x 4096 x 4096",
            f"{fixed / plain:.2f} of cuBLAS' time, "
            f"{2 * rows * 4096**2 / fixed / card.peak:.0%} of the peak",
        )


# ---- models ----


def measure_model(report: Report, card: Card, name: str, *, quick: bool) -> None:
    """Decode and prefill of a shape, random weights; graphs on and off; a mix of requests."""
    shape = SHAPES[name]
    with tempfile.TemporaryDirectory() as folder:
        model = write_config(folder, shape)
        with engine(model, dummy=True, max_num_seqs=256, max_num_batched_tokens=16384) as llm:
            weights = llm._core.plan.weights
            floor = weights / (card.bandwidth / 2)  # weights are read, a copy reads and writes
            for batch in DECODE_BATCHES if not quick else DECODE_BATCHES[:2]:
                seconds = decode_seconds(llm, batch)
                busy = graph_seconds(llm, batch)
                aim = 1.35 if batch == 1 else None
                report.add(
                    f"{name}: decode, batch {batch}",
                    f"{seconds * 1e3:.2f} ms a token, {seconds / floor:.2f} of the time of reading "
                    f"the weights; GPU idle {max(0.0, 1 - busy / seconds):.0%}",
                    "1.35" if batch == 1 else "idle 5%" if batch == 64 else "",
                    seconds <= aim * floor
                    if aim
                    else 1 - busy / seconds <= 0.05
                    if batch == 64
                    else None,
                )
            flop = 2 * (weights / 2 - shape["vocab_size"] * shape["hidden_size"] * 2)
            for length in PREFILLS if not quick else PREFILLS[:1]:
                seconds = prefill_seconds(llm, length)
                share = length * flop / seconds / card.peak
                report.add(
                    f"{name}: prefill of {length:,}",
                    f"{length / seconds:,.0f} tokens/s, {share:.0%} of the matrix peak",
                    "60%" if length == 4096 else "",
                    share >= 0.6 if length == 4096 else None,
                )
            if not quick:
                report.add(
                    f"{name}: mix of 256 requests", f"{mix_tokens_a_second(llm):,.0f} tokens/s out"
                )
        with engine(model, dummy=True, max_num_seqs=64, enforce_eager=True) as llm:
            for batch in (1, 64):
                report.add(
                    f"{name}: decode, batch {batch}, without graphs",
                    f"{decode_seconds(llm, batch) * 1e3:.2f} ms a token",
                )


def decode_seconds(llm: LLM, batch: int) -> float:
    """Time of a decode step: what 64 more tokens take, the second time."""
    prompts = as_prompts([[3 + (i + j) % 900 for j in range(32)] for i in range(batch)])
    times = {}
    for _ in range(2):
        for count in (8, 8 + DECODE_STEPS):
            params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
            start = time.perf_counter()
            llm.generate(prompts, params, use_tqdm=False)
            times[count] = time.perf_counter() - start
    return (times[8 + DECODE_STEPS] - times[8]) / DECODE_STEPS


def graph_seconds(llm: LLM, batch: int) -> float:
    """Time of a decode step on the GPU alone: its graph, replayed."""
    graphs = llm._core.executor._worker.runner.steps._graphs  # type: ignore[attr-defined]
    graph = graphs[min(size for size in graphs if size >= batch)].graph
    return gpu_seconds(graph.replay)


def prefill_seconds(llm: LLM, length: int) -> float:
    """Time to the first token, the best of three prompts that share nothing."""
    times = []
    for seed in range(4):
        rng = random.Random(seed)
        prompt = as_prompts([[rng.randrange(3, 30000) for _ in range(length)]])
        start = time.perf_counter()
        llm.generate(prompt, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def mix_tokens_a_second(llm: LLM) -> float:
    """Lengths as in ShareGPT conversations: log-normal, 220 in and 200 out on average."""
    rng = random.Random(0)

    def length(mean: float, most: int) -> int:
        return max(4, min(most, int(rng.lognormvariate(np.log(mean) - 0.5, 1.0))))

    prompts = [[rng.randrange(3, 30000) for _ in range(length(220, 2048))] for _ in range(256)]
    params = [
        SamplingParams(temperature=0, max_tokens=length(200, 1024), ignore_eos=True)
        for _ in prompts
    ]
    start = time.perf_counter()
    outputs = llm.generate(as_prompts(prompts), params, use_tqdm=False)
    return sum(len(o.outputs[0].token_ids) for o in outputs) / (time.perf_counter() - start)


# ---- helpers ----


def as_prompts(prompts: list[list[int]]) -> list[dict[str, list[int]]]:
    """Token ids as `LLM.generate` takes them."""
    return [{"prompt_token_ids": ids} for ids in prompts]


def write_config(folder: str, shape: dict[str, Any]) -> str:
    """A model folder without weights."""
    (Path(folder) / "config.json").write_text(json.dumps(LLAMA | shape))
    return folder


@contextmanager
def engine(model: str, *, dummy: bool = False, **settings: Any) -> Iterator[LLM]:
    """An engine on the GPU, shut down afterwards."""
    if dummy:
        settings["load_format"] = "dummy"
    llm = LLM(
        model=model,
        device="cuda",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        **{"gpu_memory_utilization": 0.85} | settings,
    )
    try:
        yield llm
    finally:
        llm.shutdown()
        torch.cuda.empty_cache()


def main() -> int:
    """Runs all parts; returns 1 if a check failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the rows as JSON")
    parser.add_argument("--quick", action="store_true", help="small shapes and few sizes")
    args = parser.parse_args()
    report, start = Report(), time.monotonic()
    card = measure_card(report)
    with report.part("parity"):
        check_parity(report)
    with report.part("batch invariance"):
        check_invariance(report)
    with report.part("kernels"):
        measure_kernels(report, card)
    for name in list(SHAPES)[: 1 if args.quick else None]:
        with report.part(name):
            measure_model(report, card, name, quick=args.quick)
    report.console.print(report.table())
    report.console.print(f"{time.monotonic() - start:.0f} s")
    if args.out is not None:
        device = torch.cuda.get_device_name()
        data = {
            "device": device,
            "torch": torch.__version__,
            "rows": [asdict(r) for r in report.rows],
        }
        args.out.write_text(json.dumps(data, indent=1))
    return int(any(row.good is False for row in report.rows))


if __name__ == "__main__":
    sys.exit(main())
