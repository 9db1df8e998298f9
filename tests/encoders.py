"""Small encoder with a tokenizer, for tests: a sentence-transformers folder without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

BERT: dict[str, Any] = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "vocab_size": 128,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "dtype": "float32",
}
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]


def write_encoder(folder: Path, **changes: Any) -> str:
    """Write the folder of an encoder; load it with load_format="dummy". Return the folder.

    Its tokenizer has one token for each printable ASCII character.

    Args:
        folder: the folder.
        changes: fields of config.json.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(BERT | changes))
    vocab = SPECIAL + [chr(i) for i in range(32, 127)]
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({token: i for i, token in enumerate(vocab)}, "[UNK]")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    backend.add_special_tokens(SPECIAL)
    backend.save(str(folder / "tokenizer.json"))
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    (folder / "modules.json").write_text(
        json.dumps(
            [
                {"idx": i, "path": path, "type": f"sentence_transformers.models.{name}"}
                for i, (path, name) in enumerate(modules)
            ]
        )
    )
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(
        json.dumps({"pooling_mode_mean_tokens": True})
    )
    return str(folder)
