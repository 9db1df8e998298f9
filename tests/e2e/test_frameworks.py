"""Vectors and scores through Cohere's client and through frameworks, where they are installed."""

import asyncio

import numpy as np
import openai
import pytest

from octavo import SentenceEncoder
from tests.bert_files import write_bert
from tests.e2e import harness

FLAGS = ["--dtype", "float32", "--num-threads", "1", "--served-model-name", "m", "--device", "cpu"]
TEXTS = ["a dog barks", "the sun shines", "which animal", "a cat"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_bert(tmp_path_factory.mktemp("embed"))


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    with harness.serve(tmp_path_factory.mktemp("log"), *FLAGS, model=str(folder)) as server:
        yield server


@pytest.fixture(scope="module")
def vectors(server):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="k", max_retries=0) as client:
        answer = client.embeddings.create(model="m", input=TEXTS)
        return np.array([row.embedding for row in answer.data])


@pytest.fixture(scope="module")
def encoder(folder):
    with SentenceEncoder(str(folder), dtype="float32") as encoder:
        yield encoder


def test_coheres_client(server, vectors):
    cohere = pytest.importorskip("cohere")
    order = np.argsort(-(vectors[1:] @ vectors[0])).tolist()
    asked = {"model": "m", "query": TEXTS[0], "documents": TEXTS[1:]}
    with cohere.ClientV2("k", base_url=server.url) as client:
        results = client.rerank(**asked, top_n=2, max_tokens_per_doc=4).results
    assert [result.index for result in results] == order[:2]
    with cohere.Client("k", base_url=server.url) as client:
        results = client.rerank(**asked, return_documents=True).results
    assert [result.document.text for result in results] == [TEXTS[1 + i] for i in order]


def test_langchains_client(server, vectors):
    langchain = pytest.importorskip("langchain_openai")
    client = langchain.OpenAIEmbeddings(
        model="m", base_url=server.url + "/v1", api_key="k", check_embedding_ctx_length=False
    )
    np.testing.assert_allclose(client.embed_documents(TEXTS), vectors, atol=1e-6)
    np.testing.assert_allclose(client.embed_query(TEXTS[0]), vectors[0], atol=1e-6)


def test_an_encoder_in_langchain(encoder):
    embeddings = pytest.importorskip("langchain_core.embeddings")
    stores = pytest.importorskip("langchain_core.vectorstores")
    embeddings.Embeddings.register(SentenceEncoder)
    assert isinstance(encoder, embeddings.Embeddings)
    store = stores.InMemoryVectorStore.from_texts(TEXTS, encoder)
    found = store.similarity_search_with_score(TEXTS[2], k=1)
    assert found[0][0].page_content == TEXTS[2]
    found = asyncio.run(store.asimilarity_search(TEXTS[1], k=1))
    assert found[0].page_content == TEXTS[1]


def test_llama_indexs_client(server, vectors):
    module = pytest.importorskip("llama_index.embeddings.openai_like")
    client = module.OpenAILikeEmbedding(model_name="m", api_base=server.url + "/v1", api_key="k")
    np.testing.assert_allclose(client.get_text_embedding_batch(TEXTS), vectors, atol=1e-6)
    np.testing.assert_allclose(client.get_query_embedding(TEXTS[0]), vectors[0], atol=1e-6)


def test_an_encoder_in_llama_index(encoder):
    module = pytest.importorskip("llama_index.core.embeddings")

    class OctavoEmbedding(module.BaseEmbedding):
        def _get_query_embedding(self, query):
            return encoder.embed_query(query)

        def _get_text_embedding(self, text):
            return encoder.embed_documents([text])[0]

        def _get_text_embeddings(self, texts):
            return encoder.embed_documents(texts)

        async def _aget_query_embedding(self, query):
            return await encoder.aembed_query(query)

    found = OctavoEmbedding().get_text_embedding_batch(TEXTS)
    assert found == encoder.encode(TEXTS).tolist()
    assert asyncio.run(OctavoEmbedding().aget_query_embedding(TEXTS[0])) == found[0]


def test_haystacks_components(server, vectors):
    embedders = pytest.importorskip("haystack.components.embedders")
    haystack = pytest.importorskip("haystack")
    token = pytest.importorskip("haystack.utils").Secret.from_token("k")
    options = {"api_key": token, "api_base_url": server.url + "/v1", "model": "m"}
    found = embedders.OpenAITextEmbedder(**options).run(TEXTS[0])["embedding"]
    np.testing.assert_allclose(found, vectors[0], atol=1e-6)
    component = embedders.OpenAIDocumentEmbedder(**options, progress_bar=False)
    documents = component.run([haystack.Document(content=text) for text in TEXTS])["documents"]
    np.testing.assert_allclose([doc.embedding for doc in documents], vectors, atol=1e-6)
