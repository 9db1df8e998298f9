"""Make a model with random weights in the shape of Qwen3.5-0.8B, to replay sessions with.

    python benchmarks/hybrid_model.py FOLDER

Three of four layers have linear attention. Tokenizer and chat template are those of the built-in
model, which has 4,096 tokens; the model's vocabulary is as large as that of Qwen3.5. Its answers
are noise, so replay recorded ones (session_replay.py --answers recorded).
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

_BUILTIN = Path(__file__).resolve().parents[1] / "octavo" / "builtin" / "stories"


def make(folder: Path) -> None:
    """Write the model, in bfloat16."""
    config = Qwen3_5TextConfig(
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=24,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        max_position_embeddings=262144,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=2,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    Qwen3_5ForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(_BUILTIN / name, folder)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder to make")
    make(parser.parse_args().folder)


if __name__ == "__main__":
    main()
