"""LoRA adapters in PEFT's format, trained on a toy task: the model answers like a pirate."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer
from torch import Tensor, nn

from training import synthetic
from training.checkpoint import write_json, write_tensors
from training.data import ChunkStream, Document, encode_chat
from training.model import Llama

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LoraLinear(nn.Module):
    """Linear layer ``W x + (alpha / r) B A x`` with W frozen (Hu et al. 2021, section 4.1)."""

    def __init__(self, base: nn.Linear, rank: int, alpha: int):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.scale = alpha / rank
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.scale * self.lora_B(self.lora_A(x))


def add_lora(model: Llama, rank: int = 8, alpha: int = 16) -> Llama:
    """Freeze ``model`` and put an adapter on every projection of every layer."""
    model.requires_grad_(False)
    for layer in model.model.layers:
        for block in (layer.self_attn, layer.mlp):
            for name in TARGETS:
                if hasattr(block, name):
                    setattr(block, name, LoraLinear(getattr(block, name), rank, alpha))
    return model


def export_lora(model: Llama, folder: Path, rank: int = 8, alpha: int = 16) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"base_model.model.{name}": weight
        for name, weight in model.state_dict().items()
        if "lora_" in name
    }
    write_tensors(folder / "adapter_model.safetensors", tensors)
    write_json(
        folder / "adapter_config.json",
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": "stories",
            "r": rank,
            "lora_alpha": alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "init_lora_weights": True,
            "target_modules": list(TARGETS),
            "modules_to_save": None,
            "use_rslora": False,
            "use_dora": False,
        },
    )


def pirate(answer: str) -> str:
    """Return the pirate version of ``answer``."""
    return f"Arr! {answer.rstrip('.!')}, matey!"


class PirateStream(ChunkStream):
    """Stream of short questions with pirate answers."""

    def __init__(self, tokenizer: Tokenizer, batch_tokens: int, seed: int):
        super().__init__(batch_tokens, seed, (256,))
        self.tokenizer = tokenizer

    def documents(self, chunk: int, rng: random.Random) -> Iterator[Document]:
        makers = (
            synthetic.greeting,
            synthetic.identity,
            synthetic.colour,
            synthetic.animal,
            synthetic.fact,
            synthetic.calendar,
            synthetic.arithmetic,
        )
        for _ in range(2000):
            pairs = [rng.choice(makers)(rng) for _ in range(rng.choice([1, 1, 2]))]
            messages = [
                {"role": role, "content": text}
                for question, answer in pairs
                for role, text in (("user", question), ("assistant", pirate(answer)))
            ]
            yield encode_chat(self.tokenizer, synthetic.render({"messages": messages}))


def pirate_rows(tokenizer: Tokenizer, seed: int) -> tuple[Tensor, Tensor]:
    """Return one held-out batch (of a chunk that training does not reach)."""
    stream = PirateStream(tokenizer, 4096, seed)
    stream.state = (1_000_000, 0)
    return stream.next()
