"""Parts of the GPU check at toy sizes, on a CPU."""

from __future__ import annotations

import json
import time
from pathlib import Path

import gpu_check
import torch
from gpu.base import Gpu, Row, Sizes

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 60,
    "max_position_embeddings": 24,
}
TOY = Sizes(
    copy=2**16,
    product=16,
    tiny=SHAPE,
    prompts=(1, 9),
    answer=2,
    target=12,
    others=2,
    norm=(2, 16),
    gate=(2, 16),
    sampling=(2, 50),
    heads=(2, 1, 16),
    written=16,
    decode=((1, 300), (2, 20)),
    decode_fp8=(1, 20),
    long_context=300,
    prefill=20,
    linear=32,
    linear_rows=(1, 3),
    models={"toy": SHAPE},
    batches=(1, 2),
    busy_batch=2,
    decode_prompt=4,
    settle=2,
    steps=1,
    repeats=1,
    prefills=(4, 16),
    long_prefill=16,
    mix=2,
)


class Event:
    """Event of torch.cuda on a CPU: all work before `record` has finished."""

    asked = 0

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.time = time.perf_counter()

    def query(self) -> bool:
        Event.asked += 1
        return Event.asked < 3

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return (end.time - self.time) * 1e3


class Cpu(Gpu):
    """CPU in place of the GPU, with interpreted kernels."""

    device = torch.device("cpu")
    settings = {"device": "cpu", "attention_backend": "triton"}  # noqa: RUF012
    flush = 64
    repeats = 1

    def name(self) -> str:
        return "a CPU"


class NativeCpu(Cpu):
    settings = {"device": "cpu"}  # noqa: RUF012


def run_part(part: str, folder: Path, gpu: type[Cpu] = Cpu, sizes: Sizes = TOY) -> list[Row]:
    (folder / f"{part}.jsonl").unlink(missing_ok=True)
    gpu_check.run_part(part, gpu, sizes, folder)
    return [Row(**json.loads(x)) for x in (folder / f"{part}.jsonl").read_text().splitlines()]


def put_card(folder: Path) -> None:
    card = {"name": "a CPU", "bandwidth": 1e9, "peak": 1e9}
    (folder / "card.json").write_text(json.dumps(card))
