"""Small models with states, the tokenizer and the chat template of the built-in model."""

import json
import shutil
from pathlib import Path

import octavo
from tests.models.harness import make_hf

_BUILTIN = Path(octavo.__file__).parent / "builtin" / "stories"


_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
_KINDS = {
    "qwen3.5": (
        "Qwen3_5ForCausalLM",
        _ATTENTION
        | {
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention"] * 3 + ["full_attention"],
            "head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "max_position_embeddings": 2048,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
        },
    ),
    "lfm2": (
        "Lfm2ForCausalLM",
        _ATTENTION
        | {
            "num_hidden_layers": 3,
            "layer_types": ["conv", "full_attention", "conv"],
            "tie_word_embeddings": False,
            "max_position_embeddings": 2048,
        },
    ),
    "mamba2": (
        "Mamba2ForCausalLM",
        {"num_hidden_layers": 3, "num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 32},
    ),
}
HYBRIDS = tuple(_KINDS)
"""Kinds of models: Gated DeltaNet or short convolutions beside attention, and Mamba-2 alone."""


def save_hybrid(folder: Path, kind: str = "qwen3.5") -> str:
    """Write a model of one of `HYBRIDS` with random weights; return its folder."""
    builtin = json.loads((_BUILTIN / "config.json").read_text())
    ids = {name: builtin[name] for name in ("vocab_size", "bos_token_id", "eos_token_id")}
    architecture, config = _KINDS[kind]
    make_hf(architecture, hidden_size=64, **ids, **config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(_BUILTIN / name, folder)
    return str(folder)
