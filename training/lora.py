"""LoRA adapters of the trainer's Llama, saved in PEFT's format."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from training.checkpoint import write_json, write_tensors
from training.model import Llama

RANK = 8
# The projections of attention alone: the adapter is a third as large as with those of the MLP.
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")


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


def add_lora(model: Llama, rank: int = RANK) -> Llama:
    """Freeze ``model`` and put an adapter on every projection of `TARGETS`; alpha is 2 ranks."""
    model.requires_grad_(False)
    for layer in model.model.layers:
        for name in TARGETS:
            base = getattr(layer.self_attn, name)
            setattr(layer.self_attn, name, LoraLinear(base, rank, 2 * rank))
    return model


def export_lora(model: Llama, folder: Path, base: str, rank: int = RANK) -> None:
    """Write the adapters of ``model`` as float16; ``base`` is the name of their model."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"base_model.model.{name}": weight
        for name, weight in model.state_dict().items()
        if "lora_" in name
    }
    write_tensors(folder / "adapter_model.safetensors", tensors, torch.float16)
    write_json(
        folder / "adapter_config.json",
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "r": rank,
            "lora_alpha": 2 * rank,
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
