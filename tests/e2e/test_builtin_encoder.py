"""The built-in encoder and reranker: results of transformers, by name and over HTTP."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from octavo import LLM, SentenceEncoder
from octavo.models.hub import resolve_model
from tests.e2e import harness

ENCODER, RERANKER = "octavo/stories-encoder", "octavo/stories-reranker"
TEXTS = ["Where does a frog live?", "A frog lives in a pond.", "Mia has 3 kites.", "Once"]


def theirs(name, kind, *texts):
    """Return the output of transformers in float32 for a text or a pair."""
    transformers = pytest.importorskip("transformers")
    folder = resolve_model(name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(**tokenizer(*texts, return_tensors="pt"))


def test_vectors_are_those_of_transformers():
    with SentenceEncoder(ENCODER, dtype="float32") as encoder:
        found = encoder.encode(TEXTS)
        assert encoder.max_seq_length == 512
    assert found.shape == (len(TEXTS), 128)
    for vector, text in zip(found, TEXTS, strict=True):
        mean = theirs(ENCODER, "AutoModel", text).last_hidden_state[0].mean(0).numpy()
        np.testing.assert_allclose(vector, mean / np.linalg.norm(mean), atol=2e-5)


def test_scores_are_those_of_transformers():
    with LLM(RERANKER, dtype="float32") as reranker:
        outputs = reranker.score(TEXTS[0], TEXTS[1:], use_tqdm=False)
    for output, text in zip(outputs, TEXTS[1:], strict=True):
        kind = "AutoModelForSequenceClassification"
        logit = theirs(RERANKER, kind, TEXTS[0], text).logits[0, 0]
        assert output.outputs.score == pytest.approx(logit.sigmoid().item(), abs=2e-5)


def test_bfloat16_is_near_float32():
    with SentenceEncoder(ENCODER) as encoder:
        assert encoder.llm.llm_engine.spec.dtype == "bfloat16"
        short = encoder.encode(TEXTS)
    with SentenceEncoder(ENCODER, dtype="float32") as encoder:
        assert (short * encoder.encode(TEXTS)).sum(1).min() > 0.999


def test_octavo_embed(tmp_path):
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS))
    out = tmp_path / "vectors.npy"
    command = [sys.executable, "-m", "octavo", "embed", str(tmp_path / "texts.txt")]
    command += ["--out", str(out), "--model", ENCODER]
    subprocess.run(command, check=True, timeout=240, capture_output=True)
    with SentenceEncoder(ENCODER) as encoder:
        assert np.array_equal(np.load(out), encoder.encode(TEXTS))


@pytest.mark.parametrize("name", [ENCODER, RERANKER])
def test_octavo_serve(name, tmp_path):
    with harness.serve(tmp_path, model=name) as server:
        body = {"query": TEXTS[0], "documents": TEXTS[1:], "top_n": 1}
        best = server.post("/v1/rerank", body).json()["results"][0]
        assert best["index"] == 0
        answer = server.post("/v1/embeddings", {"model": name, "input": TEXTS})
        assert answer.status_code == (200 if name == ENCODER else 400)
