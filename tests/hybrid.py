"""Small hybrid model with the tokenizer and the chat template of the built-in model."""

import json
import shutil
from pathlib import Path

import octavo
from tests.models.harness import make_hf

_BUILTIN = Path(octavo.__file__).parent / "builtin" / "stories"


def save_hybrid(folder: Path) -> str:
    """Write a model with random weights, three layers with states and one with attention."""
    config = json.loads((_BUILTIN / "config.json").read_text())
    make_hf(
        "Qwen3_5ForCausalLM",
        vocab_size=config["vocab_size"],
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        max_position_embeddings=2048,
        bos_token_id=config["bos_token_id"],
        eos_token_id=config["eos_token_id"],
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    ).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(_BUILTIN / name, folder)
    return str(folder)
