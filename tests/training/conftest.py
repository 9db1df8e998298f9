"""Tiny generated corpus, with a tokenizer and a model trained on it; no shared data."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from training.corpus import BOYS, GIRLS, Corpus
from training.model import ModelConfig
from training.tokenizer import train_tokenizer

TINY = ModelConfig(
    vocab_size=400,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    max_position_embeddings=256,
)


def tiny_story(rng: random.Random) -> str:
    name, thing = rng.choice(GIRLS + BOYS), rng.choice(["ball", "kite", "dog", "boat", "cake"])
    return (
        f"Once upon a time, there was a child named {name}. {name} had a {thing}. Everybody liked"
        f" the {thing}. One day the {thing} was lost. {name} looked for the {thing}, and found"
        f" the {thing}. The end was happy."
    )


@pytest.fixture(scope="session")
def tiny() -> ModelConfig:
    return TINY


@pytest.fixture(scope="session")
def corpus() -> Corpus:
    rng = random.Random(0)
    return Corpus(
        stories=tuple(tiny_story(rng) for _ in range(60)),
        heldout=tuple(tiny_story(rng) for _ in range(3)),
        books=("A long and quiet evening came over the hills and the sea.\n" * 4,) * 3,
    )


@pytest.fixture(scope="session")
def tokenizer(corpus: Corpus) -> Tokenizer:
    return train_tokenizer(corpus.stories, TINY.vocab_size)


@pytest.fixture(scope="session")
def base_folder(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an exported, untrained tiny main model."""
    import torch

    from training.checkpoint import export_model
    from training.model import Llama

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("base")
    export_model(Llama(TINY), tokenizer, folder)
    return folder
