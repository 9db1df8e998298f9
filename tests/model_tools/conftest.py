"""Small models of several architectures with a tokenizer, for all tests of the tools."""

from pathlib import Path

import pytest

from tests.models.harness import make_hf
from tests.small_tokenizers import byte_level, save

SIZES = {"vocab_size": 272, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
SIZES |= {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": None}


def make_folder(folder: Path, architecture: str, **config):
    """Save a random model with a byte-level tokenizer; return the transformers model."""
    hf = make_hf(architecture, **SIZES | config)
    hf.save_pretrained(folder)
    special = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": "{{ messages }}"}
    save(byte_level(), folder, special)
    return hf


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    """Return the folder of a tied Llama in float32, and the transformers model."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    folder.mkdir()
    return folder, make_folder(folder, "LlamaForCausalLM", tie_word_embeddings=True)
