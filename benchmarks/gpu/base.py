"""Common code of the parts: sizes, the GPU, and the output of rows."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

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
    """Sizes of all checks and measurements."""

    copy: int = 2**30
    """Bytes of the copy."""
    product: int = 8192

    tiny: Shape = field(default_factory=lambda: TINY)
    """Model of the checks."""
    prompts: tuple[int, ...] = (1, 7, 30, 64, 200, 513)
    answer: int = 32
    target: int = 700
    """Prompt tokens of the request that is sent alone and among others: several splits of KV."""
    others: int = 63

    families: tuple[str, ...] = (
        "mixture",
        "latent attention and mixture",
        "gated delta rule",
        "Mamba-2",
        "Mamba-1",
        "short convolution",
        "RWKV 7",
    )
    """Names in `gpu.families.FAMILIES`."""

    norm: tuple[int, int] = (8192, 4096)
    gate: tuple[int, int] = (4096, 14336)
    sampling: tuple[int, int] = (64, 128256)
    heads: tuple[int, int, int] = (32, 8, 128)
    """Number of query heads, of KV heads, and their size."""
    written: int = 8192
    """Number of tokens with written keys and values."""
    decode: tuple[tuple[int, int], ...] = ((1, 32768), (8, 16384), (64, 4096))
    """Numbers of requests and their context."""
    decode_fp8: tuple[int, int] = (8, 16384)
    long_context: int = 16384
    """Minimum context for which decode attention has a target."""
    prefill: int = 8192
    linear: int = 4096
    linear_rows: tuple[int, ...] = (1, 64, 4096)

    models: dict[str, Shape] = field(
        default_factory=lambda: {"tinyllama-1.1b": TINYLLAMA, "llama-3-8b": LLAMA_3_8B}
    )
    batches: tuple[int, ...] = (1, 8, 64, 256)
    busy_batch: int = 64
    """Batch at which the GPU should hardly ever be idle."""
    decode_prompt: int = 32
    settle: int = 8
    """Tokens that are decoded before the counted ones, 2 at least."""
    steps: int = 64
    repeats: int = 3
    """Repeats of measurements by the host; the median counts."""
    prefills: tuple[int, ...] = (512, 4096, 16384)
    long_prefill: int = 4096
    """Minimum length for which prefill has a target."""
    mix: int = 256
    """Number of requests."""


FULL = Sizes()
QUICK = replace(
    FULL,
    families=("latent attention and mixture", "gated delta rule"),
    linear_rows=(64,),
    models={"tinyllama-1.1b": TINYLLAMA},
    batches=(1, 64),
    prefills=(4096,),
    mix=64,
)


@dataclass
class Row:
    """Line of the table; `good` is None for a figure without a target."""

    what: str
    figure: str
    aim: str = ""
    good: bool | None = None


@dataclass(frozen=True)
class Card:
    """Limits of the GPU, as measured in this run.

    Attributes:
        name: its name.
        bandwidth: bytes per second of a copy, read and written bytes together.
        peak: FLOP/s of a bfloat16 product.
    """

    name: str
    bandwidth: float
    peak: float


class Gpu:
    """Access of the parts to the GPU; tests replace it by a CPU.

    Attributes:
        settings: settings of every engine.
    """

    device = torch.device("cuda")
    settings: ClassVar[dict[str, Any]] = {"device": "cuda", "gpu_memory_utilization": 0.85}
    flush = 2**28
    """Bytes that are read to evict everything else from the caches."""
    repeats = 15

    def __init__(self) -> None:
        self._other = torch.zeros(self.flush // 4, device=self.device)
        self._cycles = 2**21  # about 1 ms

    def name(self) -> str:
        """Return the name of the GPU."""
        return torch.cuda.get_device_name()

    def seconds(self, run: Callable[[], object]) -> float:
        """Return the median time of the GPU work that `run` launches, with cold caches.

        `run` must not wait for the GPU.
        """
        for _ in range(2):
            run()
        times: list[float] = []
        while len(times) < self.repeats:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._other.sum()  # reading, unlike writing, causes no later write-back
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
    """Environment of a part: the GPU, the sizes, the output of rows, the GPU's limits.

    Args:
        gpu: device to run on.
        sizes: sizes of the measurements.
        folder: folder for the rows and the GPU's limits.
        part: the part's name.
    """

    def __init__(self, gpu: Gpu, sizes: Sizes, folder: Path, part: str) -> None:
        self.gpu, self.sizes = gpu, sizes
        self._rows, self._card = folder / f"{part}.jsonl", folder / "card.json"

    def add(self, what: str, figure: str, aim: str = "", good: bool | None = None) -> None:
        """Add a row and show it."""
        print(f"{what}: {figure}", flush=True)
        with self._rows.open("a") as file:
            file.write(json.dumps(asdict(Row(what, figure, aim, good))) + "\n")

    @property
    def card(self) -> Card:
        """Limits that the first part measured."""
        if not self._card.exists():
            raise RuntimeError("the card's own limits were not measured")
        return Card(**json.loads(self._card.read_text()))

    @card.setter
    def card(self, card: Card) -> None:
        self._card.write_text(json.dumps(asdict(card)))
