"""Vectors, classes and scores of texts and pairs of texts, equal to those of transformers."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import models, pre_tokenizers, processors

from octavo import LLM
from octavo.errors import RequestError
from octavo.pooling_params import PoolingParams
from tests.models.harness import make_hf
from tests.models.test_encoders import CLASSES, SIZES, TOKENS
from tests.pooling import write_modules

WORDS = ["a", "cat", "sat", "on", "the", "mat", "dog", "ran", "under", "bed", "?", "."]
TEXTS = ["the cat sat on the mat .", "a dog ran", "?", "under the bed the dog sat on a mat " * 4]
QUERY = "the dog ?"


@pytest.fixture(scope="module")
def tokenizer() -> tokenizers.Tokenizer:
    vocab = {word: i for i, word in enumerate(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS])}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return backend


def save(folder: Path, tokenizer: tokenizers.Tokenizer, architecture: str, **config: object):
    hf = make_hf(architecture, **SIZES | config)
    hf.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"cls_token": "[CLS]"}))

    def compute(*texts: str):
        encoding = tokenizer.encode(*texts)
        with torch.inference_mode():
            return hf(
                torch.tensor([encoding.ids]), token_type_ids=torch.tensor([encoding.type_ids])
            )

    return compute


def test_a_reranker(tokenizer, tmp_path):
    compute = save(tmp_path, tokenizer, f"Bert{CLASSES}", num_labels=1)
    with LLM(str(tmp_path), dtype="float32") as llm:
        found = [output.outputs.score for output in llm.score(QUERY, TEXTS, use_tqdm=False)]
        raw = llm.score(
            QUERY, TEXTS, pooling_params=PoolingParams(use_activation=False), use_tqdm=False
        )
    logits = torch.stack([compute(QUERY, text).logits[0, 0] for text in TEXTS])
    torch.testing.assert_close(torch.tensor(found), logits.sigmoid(), atol=2e-5, rtol=2e-5)
    scores = torch.tensor([output.outputs.score for output in raw])
    torch.testing.assert_close(scores, logits, atol=2e-5, rtol=2e-5)
    assert scores.std() > 1e-3


def test_classes_of_texts_and_tokens(tokenizer, tmp_path):
    for kind in (CLASSES, TOKENS):
        folder = tmp_path / kind
        compute = save(folder, tokenizer, f"Bert{kind}")
        with LLM(str(folder), dtype="float32") as llm:
            outputs = llm.encode(TEXTS, use_tqdm=False)
            with pytest.raises(RequestError, match="It can: "):
                llm.embed(TEXTS, use_tqdm=False)
        for text, output in zip(TEXTS, outputs, strict=True):
            expected = compute(text).logits[0].softmax(-1)
            found = torch.from_numpy(np.array(output.outputs.data))
            torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


def test_vectors_of_the_first_token(tokenizer, tmp_path):
    compute = save(tmp_path, tokenizer, "BertModel")
    with LLM(str(tmp_path), dtype="float32") as llm:
        vectors = [output.outputs.embedding for output in llm.embed(TEXTS, use_tqdm=False)]
        pair = {"prompt": TEXTS[0], "text_pair": TEXTS[1]}
        joint = llm.embed(pair, use_tqdm=False)[0].outputs.embedding
    inputs = [*((text,) for text in TEXTS), (TEXTS[0], TEXTS[1])]
    for texts, vector in zip(inputs, [*vectors, joint], strict=True):
        first = compute(*texts).last_hidden_state[0, 0]
        torch.testing.assert_close(torch.tensor(vector), first / first.norm(), atol=2e-5, rtol=0)


SPLADE = Path(os.environ.get("OCTAVO_REAL_MODELS", ""), "splade-tiny")


@pytest.mark.skipif(not SPLADE.is_dir(), reason="set OCTAVO_REAL_MODELS to a folder with it")
@pytest.mark.parametrize("by_modules", [False, True])
def test_a_published_sparse_encoder(by_modules, tmp_path):
    """Names of norms as in TensorFlow, and the weights that sentence-transformers computes."""
    expected = json.loads((SPLADE / "expected_sparse.json").read_text())
    folder, architecture = SPLADE, {"architectures": ["BertSpladeSparseEmbeddingModel"]}
    if by_modules:
        folder, architecture = tmp_path, {}
        for file in SPLADE.iterdir():
            (tmp_path / file.name).symlink_to(file)
        write_modules(tmp_path, ("SpladePooling", {"pooling_strategy": "max"}))
    with LLM(str(folder), dtype="float32", hf_overrides=architecture) as llm:
        outputs = llm.embed(expected["sentences"], use_tqdm=False)
    for output, weights in zip(outputs, expected["weights"], strict=True):
        vector = np.array(output.outputs.embedding)
        assert {str(i) for i in np.flatnonzero(vector)} == set(weights)
        assert vector[[int(i) for i in weights]] == pytest.approx(list(weights.values()), abs=2e-5)
