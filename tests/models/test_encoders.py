"""Hidden states and classes of every encoder, equal to those of transformers in float32."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from octavo.kernels.torch_tensors import as_torch
from octavo.layers.pooler import Floats, PooledRow
from octavo.models.decoder import DecoderModel
from tests.models.harness import Runner, make_hf, make_prompts, save_and_load

VOCAB = 97
LENGTHS = (1, 17, 3, 40, 64, 33, 26)
"""Numbers of tokens of the texts, all in one step."""
SIZES: dict[str, Any] = {"vocab_size": VOCAB, "hidden_size": 40, "intermediate_size": 56}
SIZES |= {"num_hidden_layers": 3, "num_attention_heads": 4, "max_position_embeddings": 80}
SIZES |= {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "num_labels": 3}
ODD = SIZES | {"hidden_size": 39, "num_attention_heads": 3, "intermediate_size": 41}
WIDE = SIZES | {"num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 100}
DISTIL = {"vocab_size": VOCAB, "dim": 40, "hidden_dim": 56, "n_layers": 3, "n_heads": 4}
DISTIL |= {"max_position_embeddings": 80, "pad_token_id": 1, "num_labels": 3}
MODERN = SIZES | {"local_attention": 14, "num_hidden_layers": 4, "cls_token_id": 1}
MODERN |= {"sep_token_id": 1}
CLASSES, TOKENS = "ForSequenceClassification", "ForTokenClassification"

ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", SIZES),
    "bert-odd": (f"Bert{CLASSES}", ODD),
    "bert-wide": (f"Bert{TOKENS}", WIDE | {"hidden_act": "gelu_new", "type_vocab_size": 1}),
    "bert-mlm": ("BertForMaskedLM", SIZES | {"hidden_act": "relu"}),
    "roberta": (f"Roberta{CLASSES}", ODD | {"pad_token_id": 3}),
    "roberta-model": ("RobertaModel", SIZES),
    "roberta-tokens": (f"Roberta{TOKENS}", WIDE),
    "xlm-roberta": (f"XLMRoberta{CLASSES}", SIZES | {"num_labels": 1, "type_vocab_size": 1}),
    "xlm-roberta-model": ("XLMRobertaModel", ODD),
    "xlm-roberta-tokens": (f"XLMRoberta{TOKENS}", WIDE),
    "camembert": (f"Camembert{CLASSES}", SIZES),
    "camembert-model": ("CamembertModel", ODD),
    "camembert-tokens": (f"Camembert{TOKENS}", WIDE),
    "distilbert": (f"DistilBert{CLASSES}", DISTIL),
    "distilbert-model": ("DistilBertModel", DISTIL | {"dim": 39, "n_heads": 3}),
    "distilbert-tokens": (f"DistilBert{TOKENS}", DISTIL | {"n_heads": 2, "activation": "relu"}),
    "electra": (f"Electra{CLASSES}", ODD | {"embedding_size": 17}),
    "electra-model": ("ElectraModel", SIZES | {"embedding_size": 40}),
    "electra-tokens": (f"Electra{TOKENS}", WIDE | {"embedding_size": 24}),
    "mpnet": (f"MPNet{CLASSES}", SIZES),
    "mpnet-model": ("MPNetModel", ODD | {"max_position_embeddings": 300}),
    "mpnet-tokens": (f"MPNet{TOKENS}", WIDE | {"relative_attention_num_buckets": 32}),
    "albert": (f"Albert{CLASSES}", SIZES | {"embedding_size": 17}),
    "albert-model": ("AlbertModel", ODD | {"num_hidden_groups": 2, "embedding_size": 8}),
    "albert-tokens": (f"Albert{TOKENS}", WIDE | {"hidden_act": "gelu", "embedding_size": 40}),
    "modernbert": (f"ModernBert{CLASSES}", MODERN),
    "modernbert-model": ("ModernBertModel", MODERN | {"norm_bias": True, "local_attention": 9}),
    "modernbert-mean": (
        f"ModernBert{CLASSES}",
        MODERN
        | {"classifier_pooling": "mean", "classifier_bias": True, "attention_bias": True}
        | {"mlp_bias": True, "norm_bias": True},
    ),
    "modernbert-tokens": (f"ModernBert{TOKENS}", MODERN | {"num_attention_heads": 2}),
    "eurobert": (f"EuroBert{CLASSES}", SIZES | {"num_key_value_heads": 2, "mask_token_id": 3}),
    "eurobert-model": ("EuroBertModel", WIDE | {"num_key_value_heads": 2, "mask_token_id": 3}),
    "eurobert-first": (
        f"EuroBert{CLASSES}",
        SIZES | {"classifier_pooling": "bos", "mask_token_id": 3},
    ),
    "eurobert-tokens": (f"EuroBert{TOKENS}", SIZES | {"mask_token_id": 3}),
    "gte": (f"Gte{CLASSES}", SIZES),
    "gte-model": ("GteModel", WIDE | {"type_vocab_size": 0}),
    "gte-tokens": (f"Gte{TOKENS}", SIZES | {"type_vocab_size": 2}),
    "nomic": (f"NomicBert{CLASSES}", SIZES),
    "nomic-model": ("NomicBertModel", WIDE),
    "nomic-tokens": (f"NomicBert{TOKENS}", SIZES | {"head_dim": 6}),
    "jina-v3": (f"JinaEmbeddingsV3{CLASSES}", SIZES),
    "jina-v3-model": ("JinaEmbeddingsV3Model", WIDE),
    "jina-v3-tokens": (f"JinaEmbeddingsV3{TOKENS}", SIZES),
}
TYPELESS = ("DistilBert", "MPNet", "ModernBert", "EuroBert")
"""Encoders without token types."""


def texts(lengths: tuple[int, ...] = LENGTHS) -> tuple[list[list[int]], list[list[int]]]:
    """Return texts, and the types of their tokens: every second text is a pair."""
    ids = make_prompts(VOCAB - 4, lengths, seed=1)
    # Neither padding nor the tokens before it, in any case.
    ids = [[token + 3 for token in text] for text in ids]
    return ids, [[int(i % 2 and p > 5) for p in range(len(text))] for i, text in enumerate(ids)]


def compute(model: DecoderModel, ids: list[list[int]], types: list[list[int]]) -> list[Tensor]:
    """Return the hidden states of each text; all are in one step."""
    runner = Runner(model, len(ids), 128)
    flat = [kind for text in types for kind in text]
    hidden, starts = runner.hidden(dict(enumerate(ids)), flat)
    states = as_torch(hidden)
    return [states[a:b] for a, b in pairwise(starts)]


def pool(model: DecoderModel, task: str, states: Tensor) -> Floats:
    """Return the result of a text."""
    pooler, hidden = model.poolers[task], states.float().numpy()
    if pooler.pooling == ("all",):
        return pooler.head(hidden)
    row = PooledRow(pooler.pooling)
    row.add(pooler.of_tokens(hidden), 0)
    return pooler.head(row.result(len(hidden))[None])[0]


@pytest.mark.parametrize("case", ENCODERS)
def test_same_as_transformers(case: str, tmp_path: Path) -> None:
    architecture, config = ENCODERS[case]
    hf = make_hf(architecture, **config)
    model = save_and_load(hf, tmp_path)
    ids, types = texts()
    if config.get("type_vocab_size", 2) < 2 or architecture.startswith(("Gte", "JinaEmb")):
        types = [[0] * len(text) for text in ids]
    found = compute(model, ids, types)
    tasks = [pooler.task for pooler in model.spec.poolers]
    for text, kinds, states in zip(ids, types, found, strict=True):
        inputs = {"input_ids": torch.tensor([text])}
        if not architecture.startswith(TYPELESS):
            inputs["token_type_ids"] = torch.tensor([kinds])
        with torch.inference_mode():
            out = hf(**inputs, output_hidden_states=True)
        hidden = out.hidden_states[-1] if "logits" in out else out.last_hidden_state
        torch.testing.assert_close(states, hidden[0], atol=2e-5, rtol=2e-5)
        if CLASSES in architecture or TOKENS in architecture:
            result = torch.from_numpy(pool(model, tasks[0], states))
            torch.testing.assert_close(result, out.logits[0], atol=2e-5, rtol=2e-5)
