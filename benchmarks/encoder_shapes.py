"""Make an encoder with random weights in the shape of a released one, to measure speed with.

    python benchmarks/encoder_shapes.py FOLDER --shape bge-small --tokenizer MINILM

MINILM is a folder of all-MiniLM-L6-v2 or of another model, whose tokenizer all shapes have: its
tokens are fewer than those of the shapes. `cross-encoder` scores pairs; the others are folders of
sentence-transformers.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "bge-small": (
        "cls_token",
        {
            "model_type": "bert",
            "hidden_size": 384,
            "intermediate_size": 1536,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
        },
    ),
    "qwen3-embedding-0.6b": (
        "lasttoken",
        {
            "model_type": "qwen3",
            "vocab_size": 151669,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 32768,
        },
    ),
    "cross-encoder": (  # ms-marco-MiniLM-L6-v2
        "",
        {
            "model_type": "bert",
            "hidden_size": 384,
            "intermediate_size": 1536,
            "num_hidden_layers": 6,
            "num_attention_heads": 12,
            "num_labels": 1,
        },
    ),
}
"""Name -> way of pooling, and the fields of config.json."""


def write_json(path: Path, value: object) -> None:
    """Write a value as JSON."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    args = parser.parse_args()
    pooling, fields = SHAPES[args.shape]
    config = AutoConfig.for_model(**fields)
    torch.manual_seed(0)
    kind = AutoModel if pooling else AutoModelForSequenceClassification
    kind.from_config(config).save_pretrained(args.folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(args.tokenizer / name, args.folder)
    if not pooling:
        return
    parts = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (path, name) in enumerate(parts.items())
    ]
    write_json(args.folder / "modules.json", modules)
    write_json(args.folder / "sentence_bert_config.json", {"max_seq_length": 512})
    size = {"word_embedding_dimension": fields["hidden_size"]}
    write_json(args.folder / "1_Pooling/config.json", size | {f"pooling_mode_{pooling}": True})


if __name__ == "__main__":
    main()
