"""Vectors and scores of real servers, by the clients of OpenAI and Ollama, and by plain JSON.

The clients of Cohere, LangChain, LlamaIndex and text-embeddings-inference are not installed: httpx
sends what they send.
"""

import base64
import contextlib
import json
import re
import shlex
from pathlib import Path

import httpx
import numpy as np
import ollama
import openai
import pytest

from octavo import LLM
from tests.bert_files import write_bert
from tests.e2e import harness
from tests.models.test_encoder_heads import DOCUMENTS, QUERY, write_pylate
from tests.pooling import write_modules

FLAGS = ["--dtype", "float32", "--num-threads", "1", "--served-model-name", "m", "--device", "cpu"]
TEXTS = ["a dog barks", "the sun shines", "which animal", "a cat"]
PAGE = Path(__file__).parents[2] / "docs" / "pooling_http.md"


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {
        "embed": write_bert(folder / "embed"),
        "rerank": write_bert(folder / "rerank", "ForSequenceClassification", 1),
    }


@pytest.fixture(scope="module")
def embedder(folders, tmp_path_factory):
    place = tmp_path_factory.mktemp("embedder")
    flags = [*FLAGS, "--api-key", "key1", "--api-key", "key2", "--max-num-seqs", "4"]
    with harness.serve(place, *flags, model=str(folders["embed"])) as server:
        yield server


@pytest.fixture(scope="module")
def client(embedder):
    with openai.OpenAI(base_url=embedder.url + "/v1", api_key="key1", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def http(embedder):
    headers = {"Authorization": "Bearer key1"}
    with httpx.Client(base_url=embedder.url, headers=headers, timeout=60) as made:
        yield made


def post(http, path, **body):
    response = http.post(path, json=body)
    assert response.status_code == 200, (path, response.text)
    return response.json()


@pytest.fixture(scope="module")
def vectors(folders):
    """Vectors of `TEXTS` by transformers, normalized: an encoder's is that of the first token."""
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folders["embed"])
    model = transformers.BertModel.from_pretrained(folders["embed"]).eval()
    with torch.no_grad():
        rows = [model(**tokenizer(text, return_tensors="pt"))[0][0, 0].numpy() for text in TEXTS]
    return np.array([row / np.linalg.norm(row) for row in rows])


def test_openais_client(client, vectors):
    """The client itself requests base64, and decodes it."""
    answer = client.embeddings.create(model="m", input=TEXTS)
    assert [row.index for row in answer.data] == [0, 1, 2, 3]
    found = np.array([row.embedding for row in answer.data])
    np.testing.assert_allclose(found, vectors, atol=1e-5)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == 5 + 5 + 4 + 4
    plain = client.embeddings.create(model="m", input=TEXTS, encoding_format="float")
    np.testing.assert_array_equal([row.embedding for row in plain.data], found)
    packed = client.embeddings.create(model="m", input=TEXTS[0], encoding_format="base64")
    numbers = np.frombuffer(base64.b64decode(packed.data[0].embedding), "<f4")
    np.testing.assert_array_equal(numbers, found[0])
    for wrong in ([], [""], "a " * 200, [[9999]]):
        with pytest.raises(openai.BadRequestError):
            client.embeddings.create(model="m", input=wrong)
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="other", input="a")
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").embeddings.create(model="m", input="a")
    with pytest.raises(openai.BadRequestError, match=r"generates no text\. It can: embed"):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}])


def test_langchains_and_llama_indexs_requests(http, vectors):
    """LangChain sends token ids (made with tiktoken) or texts; LlamaIndex texts and `user`."""
    ids = post(http, "/tokenize", model="m", prompt=TEXTS[0])["tokens"]
    body = {"model": "m", "encoding_format": "base64"}
    (row,) = post(http, "/v1/embeddings", input=[ids], **body)["data"]
    numbers = np.frombuffer(base64.b64decode(row["embedding"]), "<f4")
    np.testing.assert_allclose(numbers, vectors[0], atol=1e-5)
    body = {"model": "m", "user": "u", "encoding_format": "float"}
    rows = post(http, "/v1/embeddings", input=TEXTS[:2], **body)["data"]
    np.testing.assert_allclose([row["embedding"] for row in rows], vectors[:2], atol=1e-5)


def test_ollamas_client(embedder, vectors, request):
    headers = {"Authorization": "Bearer key2"}
    client = ollama.Client(embedder.url, headers=headers)
    request.addfinalizer(client._client.close)
    answer = client.embed(model="m:latest", input=TEXTS)
    np.testing.assert_allclose(answer.embeddings, vectors, atol=1e-5)
    assert answer.prompt_eval_count == 18
    old = client.embeddings(model="m", prompt=TEXTS[1])
    np.testing.assert_allclose(old.embedding, vectors[1], atol=1e-5)
    assert client.show("m").capabilities == ["embedding"]
    client.embed(model="m", input="a " * 200)
    with pytest.raises(ollama.ResponseError, match="maximum context"):
        client.embed(model="m", input="a " * 200, truncate=False)


def test_coheres_jinas_and_teis_requests(http, vectors):
    scores = vectors[1:] @ vectors[0]
    order = np.argsort(-scores).tolist()
    body = {"query": TEXTS[0], "documents": TEXTS[1:]}
    cohere = post(http, "/v2/rerank", model="m", top_n=2, **body)
    assert [result["index"] for result in cohere["results"]] == order[:2]
    jina = post(http, "/v1/rerank", model="m", return_documents=True, **body)
    assert [r["document"]["text"] for r in jina["results"]] == [TEXTS[1 + i] for i in order]
    tei = post(http, "/rerank", query=TEXTS[0], texts=TEXTS[1:])
    assert [rank["index"] for rank in tei] == order
    np.testing.assert_allclose([rank["score"] for rank in tei], scores[order], atol=1e-5)
    np.testing.assert_allclose(post(http, "/embed", inputs=TEXTS), vectors, atol=1e-5)
    inputs = {"source_sentence": TEXTS[0], "sentences": TEXTS[1:]}
    np.testing.assert_allclose(post(http, "/similarity", inputs=inputs), scores, atol=1e-5)
    (rows,) = post(http, "/embed_all", inputs=TEXTS[0])
    first = np.array(rows[0])
    np.testing.assert_allclose(first / np.linalg.norm(first), vectors[0], atol=1e-5)
    assert http.get("/info").json()["model_type"] == {"embedding": {"pooling": "cls"}}


def test_many_texts_in_order(http):
    texts = [f"{i} dog" for i in range(300)]
    rows = post(http, "/v1/embeddings", input=texts)["data"]
    backwards = post(http, "/v1/embeddings", input=texts[::-1])["data"]
    assert [row["index"] for row in rows] == list(range(300))
    # A text's vector does not depend on the texts around it.
    assert [row["embedding"] for row in rows] == [row["embedding"] for row in backwards[::-1]]


def unfinished(http):
    page = http.get("/metrics").text
    found = re.findall(r"^octavo:num_requests_(?:running|waiting){[^}]*} (\S+)", page, re.M)
    return sum(map(float, found))


def test_a_client_that_goes_away_ends_its_texts(embedder, http):
    body = {"input": ["a dog barks " * 15] * 4000}
    for _ in range(10):  # the server may be faster than the client
        done = embedder.metric("octavo:request_success_total")
        with contextlib.suppress(httpx.ReadTimeout):
            http.post("/v1/embeddings", json=body, timeout=httpx.Timeout(60, read=0.5))
        post(http, "/v1/embeddings", input="a")  # it does not wait for the rest
        harness.wait_until(lambda: not unfinished(http))
        count = embedder.metric("octavo:request_success_total") - done
        if count < 4000:
            break
    assert count < 4000
    response = http.post("/v1/embeddings", json={"input": ["a"] * 5000})
    assert response.status_code == 400
    assert "at most 4096" in response.json()["error"]["message"]


def test_a_router_passes_vectors_on(embedder, tmp_path, vectors):
    flags = ["--servers", embedder.url]
    with harness.serve(tmp_path, *flags, what="router") as router:
        headers = {"Authorization": "Bearer key1"}
        with httpx.Client(base_url=router.url, headers=headers, timeout=60) as http:
            rows = post(http, "/v1/embeddings", input=TEXTS)["data"]
            np.testing.assert_allclose([row["embedding"] for row in rows], vectors, atol=1e-5)
            np.testing.assert_allclose(post(http, "/embed", inputs=TEXTS), vectors, atol=1e-5)
            assert len(post(http, "/rerank", query="a", documents=TEXTS)["results"]) == 4
            assert len(post(http, "/api/embed", model="m", input=TEXTS)["embeddings"]) == 4
            assert http.get("/info").status_code == 200
            assert http.post("/v1/embeddings", json={"input": []}).status_code == 400


def expected_logits(folder, texts, pairs):
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.BertForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        encoded = [
            tokenizer(a, b, return_tensors="pt", return_token_type_ids=True)
            for a, b in zip(texts, pairs, strict=True)
        ]
        return np.array([model(**one).logits[0].numpy() for one in encoded])


def test_a_reranker(folders, tmp_path):
    """A reranker is a classifier with one class."""
    logits = expected_logits(folders["rerank"], [TEXTS[0]] * 3, TEXTS[1:])[:, 0]
    alone = expected_logits(folders["rerank"], TEXTS, [None] * 4)[:, 0]
    order = np.argsort(-logits).tolist()
    with (
        harness.serve(tmp_path, *FLAGS, model=str(folders["rerank"])) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        answer = post(http, "/v1/rerank", query=TEXTS[0], documents=TEXTS[1:])
        assert [result["index"] for result in answer["results"]] == order
        found = [result["relevance_score"] for result in answer["results"]]
        np.testing.assert_allclose(found, 1 / (1 + np.exp(-logits[order])), atol=1e-5)
        answer = post(http, "/v1/score", text_1=TEXTS[0], text_2=TEXTS[1:])
        found = [row["score"] for row in answer["data"]]
        np.testing.assert_allclose(found, 1 / (1 + np.exp(-logits)), atol=1e-5)
        raw = post(http, "/rerank", query=TEXTS[0], texts=TEXTS[1:], raw_scores=True)
        np.testing.assert_allclose([r["score"] for r in raw], logits[order], atol=1e-4)
        rows = post(http, "/classify", input=TEXTS)["data"]
        probs = 1 / (1 + np.exp(-alone))
        np.testing.assert_allclose([row["probs"][0] for row in rows], probs, atol=1e-5)
        assert {row["label"] for row in rows} == {"LABEL_0"}
        found = post(http, "/predict", inputs=[[text] for text in TEXTS], raw_scores=True)
        np.testing.assert_allclose([row[0]["score"] for row in found], alone, atol=1e-4)
        error = http.post("/v1/embeddings", json={"input": "a"}).json()["error"]
        assert "It can: classify" in error["message"]


def test_late_interaction_and_sparse_vectors(tmp_path):
    """Over HTTP as in Python: ColBERT in a folder of PyLate, and SPLADE."""
    late, sparse = tmp_path / "late", tmp_path / "sparse"
    write_pylate(late)
    write_bert(sparse, "ForMaskedLM")
    write_modules(sparse, ("SpladePooling", {}))
    settings = {"dtype": "float32", "num_threads": 1}
    with LLM(str(late), **settings) as llm:
        expected = [o.outputs.score for o in llm.score(QUERY, DOCUMENTS, use_tqdm=False)]
    with LLM(str(sparse), **settings) as llm:
        vectors = [o.outputs.embedding for o in llm.embed(TEXTS, use_tqdm=False)]
    with (
        harness.serve(tmp_path, *FLAGS, model=str(late)) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        rows = post(http, "/score", text_1=QUERY, text_2=DOCUMENTS)["data"]
        assert [row["score"] for row in rows] == expected
        ranks = post(http, "/v1/rerank", query=QUERY, documents=DOCUMENTS)["results"]
        assert {rank["index"]: rank["relevance_score"] for rank in ranks} == dict(
            enumerate(expected)
        )
        body = {"input": QUERY, "task": "token_embed", "prompt_name": "query"}
        assert np.array(post(http, "/pooling", **body)["data"][0]["data"]).shape == (24, 16)
        assert "has no sparse vectors" in http.post("/embed_sparse", json={"inputs": "a"}).text
    with (
        harness.serve(tmp_path, *FLAGS, model=str(sparse)) as server,
        httpx.Client(base_url=server.url, timeout=60) as http,
    ):
        found = post(http, "/embed_sparse", inputs=TEXTS)
        for entries, vector in zip(found, vectors, strict=True):
            weights = {i: weight for i, weight in enumerate(vector) if weight}
            assert {entry["index"]: entry["value"] for entry in entries} == weights


def test_the_lines_of_the_page(embedder, http):
    """Each curl line of docs/pooling_http.md works, or its model cannot do it."""
    lines = re.findall(r"^curl .*$", PAGE.read_text(), re.M)
    assert len(lines) == 14
    paths = set()
    for line in lines:
        _, address, *options = shlex.split(line)
        path = address.removeprefix("http://localhost:8000")
        paths.add(path)
        given = dict(zip(options[::2], options[1::2], strict=True))
        if "-d" not in given:
            assert http.get(path).status_code == 200
            continue
        body = json.loads(given["-d"])
        if "model" in body:
            body["model"] = "m"
        response = http.post(path, json=body)
        if path in ("/v1/classify", "/predict"):
            assert response.status_code == 400
            assert "does not have the task classify" in response.text
        else:
            assert response.status_code == 200, (line, response.text)
    assert {"/v1/embeddings", "/v1/rerank", "/pooling", "/embed", "/api/embed"} <= paths
