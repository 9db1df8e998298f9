"""Vectors and scores through Cohere's client and through frameworks, where they are installed."""

import asyncio
import base64

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


@pytest.mark.filterwarnings("ignore::pydantic.warnings.PydanticDeprecationWarning")  # its own
def test_coheres_client(server, vectors):
    cohere = pytest.importorskip("cohere")
    order = np.argsort(-(vectors[1:] @ vectors[0])).tolist()
    asked = {"model": "m", "query": TEXTS[0], "documents": TEXTS[1:]}
    with cohere.ClientV2("k", base_url=server.url) as client:
        results = client.rerank(**asked, top_n=2, max_tokens_per_doc=4).results
        kinds = ["float", "int8", "uint8", "binary", "ubinary", "base64"]
        texts = {"model": "m", "texts": TEXTS, "input_type": "search_document"}
        found = client.embed(**texts, embedding_types=kinds, truncate="START").embeddings
        parts = [{"content": [{"type": "text", "text": text}]} for text in TEXTS]
        by_parts = client.embed(model="m", inputs=parts, input_type="classification")
        with pytest.raises(cohere.BadRequestError, match="output_dimension=5"):
            client.embed(**texts, output_dimension=5)
    assert [result.index for result in results] == order[:2]
    np.testing.assert_allclose(found.float_, vectors, atol=1e-6)
    np.testing.assert_allclose(by_parts.embeddings.float_, vectors, atol=1e-6)
    packed = [np.frombuffer(base64.b64decode(row), "<f4") for row in found.base64]
    np.testing.assert_array_equal(packed, np.float32(found.float_))
    whole = np.array(found.int8, np.float64)
    np.testing.assert_array_equal(np.array(found.uint8), whole + 128)
    cosines = (whole * vectors).sum(1) / np.linalg.norm(whole, axis=1)
    assert cosines.min() > 0.9999
    np.testing.assert_array_equal(np.array(found.binary) + 128, found.ubinary)
    bits = np.unpackbits(np.array(found.ubinary, np.uint8), axis=1)
    np.testing.assert_array_equal(bits, vectors > 0)
    with cohere.Client("k", base_url=server.url) as client:
        results = client.rerank(**asked, return_documents=True).results
        many = client.embed(model="m", texts=TEXTS * 30)  # the client sends 96 at a time
        typed = client.embed(**texts, embedding_types=["float"])
    assert [result.document.text for result in results] == [TEXTS[1 + i] for i in order]
    np.testing.assert_allclose(many.embeddings, np.tile(vectors, (30, 1)), atol=1e-6)
    np.testing.assert_allclose(typed.embeddings.float_, vectors, atol=1e-6)


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
