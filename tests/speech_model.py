"""Small Whisper with a tokenizer, for tests: a folder without weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers

# Text: one token for each of 95 characters. Then the end (95), the start (96), and the others.
CHARACTERS = [chr(i) for i in range(32, 127)]
SPECIAL = [
    "<|endoftext|>",
    "<|startoftranscript|>",
    "<|en|>",
    "<|de|>",
    "<|translate|>",
    "<|transcribe|>",
    "<|startofprev|>",
    "<|nospeech|>",
    "<|notimestamps|>",
]
END, START = len(CHARACTERS), len(CHARACTERS) + 1
FIRST_TIMESTAMP = len(CHARACTERS) + len(SPECIAL)
SECONDS = 6
VOCAB = FIRST_TIMESTAMP + 50 * SECONDS + 1

WHISPER: dict[str, Any] = {
    "architectures": ["WhisperForConditionalGeneration"],
    "model_type": "whisper",
    "is_encoder_decoder": True,
    "vocab_size": VOCAB,
    "d_model": 32,
    "num_mel_bins": 8,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_source_positions": 50 * SECONDS,
    "max_target_positions": 48,
    "decoder_start_token_id": START,
    "bos_token_id": END,
    "eos_token_id": END,
    "pad_token_id": END,
    "activation_function": "gelu",
    "dtype": "float32",
}
PREPROCESSOR = {
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 8,
    "chunk_length": SECONDS,
}
GENERATION = {
    "is_multilingual": True,
    "eos_token_id": END,
    "suppress_tokens": [1, 2],
    "begin_suppress_tokens": [0, END],
    "max_initial_timestamp_index": 10,
}


def write_speech_model(folder: Path, **generation: Any) -> str:
    """Write the folder of a model that hears 6 s; load it with load_format="dummy". Return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in (
        ("config.json", WHISPER),
        ("preprocessor_config.json", PREPROCESSOR),
        ("generation_config.json", GENERATION | generation),
    ):
        (folder / name).write_text(json.dumps(data))
    vocab = {token: i for i, token in enumerate(CHARACTERS)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, " "))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    backend.decoder = tokenizers.decoders.Fuse()
    backend.add_special_tokens(SPECIAL)
    backend.save(str(folder / "tokenizer.json"))
    return str(folder)
