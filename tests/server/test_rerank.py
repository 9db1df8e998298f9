"""POST /rerank and /score in the forms of Cohere, Jina, vLLM and text-embeddings-inference."""

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest
from pydantic import TypeAdapter

from octavo.frontend.pooling import normalize
from octavo.models.blocks.pooler import SentencesSpec
from octavo.server import pooling_answers
from octavo.server.pooling_schema import MAX_TEXTS
from tests.server.fake_engine import Call, fake_pool
from tests.server.pooled import CLASSES, EMBED, LATE, RANKER, TOKENS, cosine, good, refused, serve

DOCUMENTS = ["a cat", {"text": "Paris", "title": "x"}, "dogs", "a cat"]
TEXTS = ["a cat", "Paris", "dogs", "a cat"]
RANKS = TypeAdapter(pooling_answers.RerankAnswer)
SCORES = TypeAdapter(pooling_answers.ScoreAnswer)


def ranked(scores):
    return sorted(range(len(scores)), key=lambda i: -scores[i])


def max_sim(a, b, skipped=()):
    """Return MaxSim of two texts' tokens."""
    x, y = (normalize(fake_pool(ids, TOKENS).astype(np.float32)) for ids in (a, b))
    y = y[[i not in skipped for i in b]]
    return float((x @ y.T).max(1).sum())


@pytest.mark.parametrize("path", ["/score", "/rerank", "tei"])
@pytest.mark.parametrize("pooler", [TOKENS, LATE])
def test_late_interaction(path, pooler):
    """The query is filled up, documents are cut and lose the vectors of some tokens."""

    async def scenario(served):
        texts = ["a. b", "a cat and a dog", "a. b"]
        if pooler is LATE:
            query = [256, *b"Q" + b"dog" + b"MMM"]
            documents = [[256, *b"D" + text.encode()][:9] for text in texts]
            expected = [max_sim(query, ids, [*b"."]) for ids in documents]
        else:
            ids = [[256, *text.encode()] for text in ["dog", *texts]]
            expected = [max_sim(ids[0], document) for document in ids[1:]]
        if path == "/score":
            rows = (await good(served, path, text_1="dog", text_2=texts))["data"]
            found = {row["index"]: row["score"] for row in rows}
        elif path == "/rerank":
            rows = (await good(served, path, query="dog", documents=texts))["results"]
            found = {row["index"]: row["relevance_score"] for row in rows}
        else:
            rows = await good(served, "/rerank", query="dog", texts=texts)
            found = {row["index"]: row["score"] for row in rows}
        assert [found[i] for i in range(3)] == pytest.approx(expected, rel=1e-5)
        assert len(served.engine.requests) == 3
        error = await refused(served, "/v1/embeddings", input="a")
        assert "It can: token_embed" in error["message"]

    serve(scenario, pooler)


@pytest.mark.parametrize("name", ["cosine", "dot", "euclidean", "manhattan"])
def test_the_similarity_that_a_model_names(name):
    async def scenario(served):
        served.engine.spec.sentences = SentencesSpec(similarity_fn_name=name)
        rows = (await good(served, "/score", text_1="dog", text_2=["cat", "dogs"]))["data"]
        x, *others = (fake_pool([256, *it], EMBED) for it in (b"dog", b"cat", b"dogs"))
        for row, y in zip(rows, others, strict=True):
            expected = {
                "cosine": x @ y / np.linalg.norm(x) / np.linalg.norm(y),
                "dot": x @ y,
                "euclidean": -np.sqrt(((x - y) ** 2).sum()),
                "manhattan": -np.abs(x - y).sum(),
            }
            assert row["score"] == pytest.approx(expected[name], rel=1e-5)

    serve(scenario, replace(EMBED, activates=False))


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_vectors_are_compared_by_their_cosine(path):
    async def scenario(served):
        scores = [cosine("capital?", text) for text in TEXTS]
        answer = await good(served, path, query="capital?", documents=DOCUMENTS, model="fake")
        RANKS.validate_python(answer)
        assert [r["index"] for r in answer["results"]] == ranked(scores)
        for result in answer["results"]:
            assert result["relevance_score"] == pytest.approx(scores[result["index"]], rel=1e-6)
            assert result["document"] == {"text": TEXTS[result["index"]]}
        # Each text is computed once.
        assert len(served.engine.requests) == 4
        tokens = sum(1 + len(text) for text in ["capital?", *TEXTS[:3]])
        assert answer["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
        assert answer["meta"]["tokens"] == {"input_tokens": tokens}

    serve(scenario)


def test_a_reranker_reads_pairs():
    async def scenario(served):
        answer = await good(served, "/rerank", query="q", documents=["one", "two", "three"])
        prompts = [r.prompt_token_ids for r in served.engine.requests]
        assert prompts == [[256, *b"q" + text] for text in (b"one", b"two", b"three")]
        x = np.array([fake_pool(ids, RANKER)[0] for ids in prompts])
        assert [r["index"] for r in answer["results"]] == ranked(x)
        found = [r["relevance_score"] for r in answer["results"]]
        np.testing.assert_allclose(found, 1 / (1 + np.exp(-x[ranked(x)])), rtol=1e-5)
        raw = await good(served, "/rerank", query="q", documents=["one"], use_activation=False)
        assert raw["results"][0]["relevance_score"] == pytest.approx(x[0], rel=1e-5)
        raw = await good(served, "/rerank", query="q", texts=["one"], raw_scores=True)
        assert raw == [{"index": 0, "score": pytest.approx(x[0], rel=1e-5)}]

    serve(scenario, RANKER)


def test_texts_are_cut():
    async def scenario(served):
        lengths = {"max_tokens_per_doc": 3, "max_tokens_per_query": 2}
        body = {"query": "what?", "documents": ["a cat", "ab", "a\u00e9\u00e9"]}
        answer = await good(served, "/v2/rerank", **body, **lengths)
        await good(served, "/score", text_1="what?", text_2="a cat", **lengths)
        await good(served, "/rerank", query="what?", documents=["ab"], max_tokens_per_doc=0)
        prompts = [bytes(r.prompt_token_ids[1:]).decode() for r in served.engine.requests]
        assert prompts == ["wha c", "whab", "wha\u00e9", "wha c", "what?ab"]
        assert {r["document"]["text"] for r in answer["results"]} == set(body["documents"])

    serve(scenario, RANKER)


PAIRS = (
    '{% for m in messages %}{{ m.role[0] }}={{ m.content }};{% endfor %}{# "query" "document" #}'
)


def test_a_reranker_with_a_template():
    async def scenario(served):
        await good(served, "/rerank", query="x", documents=["one", "two"])
        await good(served, "/rerank", query="x", texts=["six"])
        await good(served, "/v2/rerank", query="x", documents=["one"], instruction="find")
        await good(served, "/score", text_1="x", text_2=["one"], instruction="match")
        prompts = [bytes(r.prompt_token_ids[1:]).decode() for r in served.engine.requests]
        assert prompts == [
            "q=x;d=one;",
            "q=x;d=two;",
            "q=x;d=six;",
            "s=find;q=x;d=one;",
            "s=match;q=x;d=one;",
        ]

    serve(scenario, RANKER, template=PAIRS)
    serve(scenario, RANKER, chat_template=PAIRS)


@pytest.mark.parametrize(
    ("pooler", "message"),
    [(RANKER, "has no template with the roles"), (EMBED, "is a model of vectors")],
)
def test_an_instruction_needs_a_template(pooler, message):
    async def scenario(served):
        for path, body in [
            ("/rerank", {"query": "q", "documents": ["d"]}),
            ("/score", {"text_1": "q", "text_2": "d"}),
        ]:
            error = await refused(served, path, instruction="i", **body)
            assert message in error["message"]
            assert error["param"] == "instruction"

    serve(scenario, pooler)


def test_a_pair_that_the_template_rejects():
    async def scenario(served):
        error = await refused(served, "/rerank", query="q", documents=["d"])
        assert "no documents" in error["message"]

    serve(scenario, RANKER, template=PAIRS + "{{ raise_exception('no documents') }}")


def test_the_best_ones_without_their_texts():
    async def scenario(served):
        order = ranked([cosine("q", text) for text in TEXTS])
        for top_n, count in [(2, 2), (0, 4), (9, 4), (None, 4)]:
            answer = await good(
                served, "/rerank", query="q", documents=TEXTS, top_n=top_n, return_documents=False
            )
            assert [r["index"] for r in answer["results"]] == order[:count]
            assert all("document" not in r for r in answer["results"])
        query = {"text": "q"}  # as Jina allows it
        again = await good(served, "/rerank", query=query, documents=TEXTS, return_documents=False)
        assert again["results"] == answer["results"]

    serve(scenario)


def test_the_form_of_text_embeddings_inference():
    async def scenario(served):
        order = ranked([cosine("q", text) for text in TEXTS])
        found = await good(served, "/rerank", query="q", texts=TEXTS)
        TypeAdapter(list[pooling_answers.TEIRank]).validate_python(found)
        assert [rank["index"] for rank in found] == order
        assert set(found[0]) == {"index", "score"}
        found = await good(served, "/rerank", query="q", texts=TEXTS, return_text=True)
        assert [rank["text"] for rank in found] == [TEXTS[i] for i in order]
        error = await refused(served, "/rerank", query="x" * 900, texts=["a"])
        assert error["param"] == "query"
        await good(served, "/rerank", query="x" * 900, texts=["a"], truncate=True)

    serve(scenario)


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"documents": ["a"]}, "query", "missing"),
        ({"query": "a"}, "documents", "missing"),
        ({"query": 1, "documents": ["a"]}, "query", "query=1"),
        ({"query": "a", "documents": []}, "documents", "empty list"),
        ({"query": "a", "documents": [{"title": "x"}]}, "documents", "documents[0]="),
        ({"query": "a", "documents": ["a", 1]}, "documents", "documents[1]=1"),
        ({"query": "a", "documents": ["a"] * 5000}, "documents", f"at most {MAX_TEXTS}"),
        ({"query": "a", "documents": ["a", "x" * 900]}, "documents[1]", "context length"),
        ({"query": "a", "documents": ["a"], "top_n": -1}, "top_n", "greater than or equal"),
        ({"query": "a", "documents": ["a"], "max_tokens_per_doc": -1}, "max_tokens_per_doc", "-1"),
        ({"query": "a", "texts": []}, "texts", "empty list"),
        ({"query": "a", "texts": [1]}, "texts", "texts[0]=1"),
    ],
)
def test_what_is_wrong(body, param, said):
    async def scenario(served):
        error = await refused(served, "/v1/rerank", **body)
        assert error["param"] == param
        assert said in error["message"]

    serve(scenario)


def test_a_model_without_scores_of_pairs():
    async def scenario(served):
        for path, body in [
            ("/rerank", {"query": "a", "documents": ["a"]}),
            ("/v1/score", {"text_1": "a", "text_2": "b"}),
        ]:
            error = await refused(served, path, **body)
            assert (
                "has no scores of pairs. It can: classify (POST /v1/classify)" in error["message"]
            )

    serve(scenario, CLASSES)


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize(
    "names",
    [("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items")],
)
def test_scores(path, names):
    first, second = names

    async def scenario(served):
        for left, right, pairs in [
            ("one", "two", [("one", "two")]),
            ("one", ["two", "x"], [("one", "two"), ("one", "x")]),
            (["one", "x"], ["two", "y"], [("one", "two"), ("x", "y")]),
        ]:
            answer = await good(served, path, **{first: left, second: right})
            SCORES.validate_python(answer)
            expected = [pytest.approx(cosine(a, b), rel=1e-6) for a, b in pairs]
            assert [row["score"] for row in answer["data"]] == expected
        error = await refused(served, path, **{first: ["a", "b"], second: ["c"]})
        assert error["param"] == first
        assert f"{first} has 2 texts and {second} 1" in error["message"]
        error = await refused(served, path, **{first: "a"})
        assert "Give text_1 and text_2" in error["message"]
        error = await refused(served, path, **{first: "a", second: 5})
        assert error["param"] == second

    serve(scenario)


def test_a_client_that_goes_away_ends_all_pairs():
    async def scenario(served):
        served.engine.paused = True
        body = json.dumps({"query": "q", "documents": ["a", "b", "c"]}).encode()
        call = Call(served, "/rerank", body)
        while served.engine.num_unfinished_requests < 3:
            await asyncio.sleep(0.002)
        call.disconnect()
        await asyncio.wait_for(call.task, 60)
        assert len(served.engine.aborted) == 3

    serve(scenario, RANKER)


def test_no_vector_at_all():
    async def scenario(served):
        served.engine.pool = lambda ids, pooler: np.zeros(4)
        answer = await good(served, "/v1/score", text_1="a", text_2="b")
        assert answer["data"][0]["score"] == 0.0
        served.engine.pool = lambda ids, pooler: np.full(4, np.nan)
        response = await served.post("/rerank", query="a", documents=["b"])
        assert response.status_code == 500
        assert response.json()["error"]["code"] == "result_not_finite"

    serve(scenario, EMBED)
