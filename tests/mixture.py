"""Small mixture of experts with the tokenizer and the chat template of the built-in model."""

import json
import shutil
from pathlib import Path

import octavo
from tests.models.harness import make_hf

_BUILTIN = Path(octavo.__file__).parent / "builtin" / "stories"


def save_mixture(folder: Path) -> str:
    """Write a model with random weights and twelve experts, of which each token uses two."""
    config = json.loads((_BUILTIN / "config.json").read_text())
    make_hf(
        "Qwen3MoeForCausalLM",
        vocab_size=config["vocab_size"],
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=12,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=2048,
        bos_token_id=config["bos_token_id"],
        eos_token_id=config["eos_token_id"],
    ).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(_BUILTIN / name, folder)
    return str(folder)
