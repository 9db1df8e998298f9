"""POST /rerank (Cohere, Jina, text-embeddings-inference) and /score (vLLM): scores of pairs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from octavo.frontend.pooling import find_comparison
from octavo.server.abilities import cannot
from octavo.server.body import read_model
from octavo.server.pooling import Floats, Input, PoolingCall, encode
from octavo.server.pooling_schema import (
    PooledBody,
    RerankBody,
    ScoreBody,
    TEIRerankBody,
    check_texts,
)
from octavo.server.state import state_of
from octavo.system.offload import offload

if TYPE_CHECKING:
    from octavo.frontend.async_llm import AsyncLLM

B = TypeVar("B", bound=PooledBody)


async def create_rerank(request: Request) -> Response:
    """Sort documents by their relevance to a query."""
    limit = state_of(request).config.max_request_bytes
    body: RerankBody | TEIRerankBody = await read_model(request, _kind, limit)
    if isinstance(body, RerankBody):
        return await Rerank.serve(request, body)
    return await TEIRerank.serve(request, body)


async def create_score(request: Request) -> Response:
    """Return the score of each pair of texts."""
    limit = state_of(request).config.max_request_bytes
    return await Score.serve(request, await read_model(request, ScoreBody, limit))


def _kind(body: dict[str, Any]) -> type[RerankBody] | type[TEIRerankBody]:
    return TEIRerankBody if "texts" in body and "documents" not in body else RerankBody


class PairsCall(PoolingCall[B]):
    """Request for scores of pairs of texts."""

    async def scores(
        self, engine: AsyncLLM, first: Sequence[Input], second: Sequence[Input]
    ) -> list[float]:
        """Return the score of each pair.

        A reranker reads both texts together. The score of a model of vectors is the similarity of
        the two vectors that its files name, the cosine by default; that of a late-interaction model
        is MaxSim of their tokens' vectors. Each text is computed once.

        Args:
            engine: the engine.
            first: first texts, such as the query.
            second: as many second texts.

        Raises:
            RequestError: the model has no scores of pairs, or a text is wrong.
        """
        spec = engine.spec
        scorer = spec.pooler("classify")
        if scorer is not None and scorer.size == 1:
            pairs = [
                Input({"prompt": a.prompt, "text_pair": b.prompt}, b.where)
                for a, b in zip(first, second, strict=True)
            ]
            params = self.body.pooling_params("classify")
            return await self.results(engine, pairs, params, lambda _, x: float(x[0]))
        comparison = find_comparison(spec.poolers, spec.sentences)
        if comparison is None:
            raise cannot(spec, "has no scores of pairs")
        task, compare, roles = comparison
        first, second = (
            [text._replace(prompt_name=role) for text in side]
            for side, role in zip((first, second), roles, strict=True)
        )
        texts = {(text.prompt, text.prompt_name): text for text in (*first, *second)}
        params = self.body.pooling_params(task)

        def keep(_: int, x: Floats) -> Floats:
            return x

        vectors = dict(
            zip(texts, await self.results(engine, [*texts.values()], params, keep), strict=True)
        )
        pairs_of_vectors = [
            (vectors[a.prompt, a.prompt_name], vectors[b.prompt, b.prompt_name])
            for a, b in zip(first, second, strict=True)
        ]
        # A product of two matrices takes longer than the cosine of two vectors.
        work = sum(a.size * len(b) if b.ndim > 1 else a.size for a, b in pairs_of_vectors)
        return await offload(work // 1000, lambda: [compare(a, b) for a, b in pairs_of_vectors])


def as_inputs(texts: Sequence[str], param: str) -> list[Input]:
    """Return the texts of a field that holds a list."""
    return [Input(text, f"{param}[{i}]") for i, text in enumerate(texts)]


class Rerank(PairsCall[RerankBody]):
    """Request to sort documents."""

    id_prefix = "rerank"
    param = "documents"

    async def answer(self) -> Response:
        """Return the answer; see `PoolingCall.answer`."""
        engine = await self.state.get_engine()
        body = self.body
        texts = check_texts(body.documents, "documents")
        query = [Input(body.query, "query")] * len(texts)
        scores = await self.scores(engine, query, as_inputs(texts, "documents"))
        rows = []
        for index in _ranked(scores)[: body.top_n or None]:
            result: dict[str, object] = {"index": index, "relevance_score": scores[index]}
            if body.return_documents is not False:
                result["document"] = {"text": texts[index]}
            rows.append(encode(result))
        head = encode({"id": self.id, "model": self.model_name})[:-1] + b',"results":['
        usage = {"prompt_tokens": self.prompt_tokens, "total_tokens": self.prompt_tokens}
        meta = {"billed_units": {"search_units": 1}, "tokens": {"input_tokens": self.prompt_tokens}}
        tail = b"]," + encode({"usage": usage, "meta": meta})[1:]
        return await self.write(head, rows, tail)


class TEIRerank(PairsCall[TEIRerankBody]):
    """Request to sort texts, in the form of text-embeddings-inference."""

    id_prefix = "rerank"
    param = "texts"

    async def answer(self) -> Response:
        """Return the answer; see `PoolingCall.answer`."""
        engine = await self.state.get_engine()
        texts = self.body.texts
        query = [Input(self.body.query, "query")] * len(texts)
        scores = await self.scores(engine, query, as_inputs(texts, "texts"))
        shows = bool(self.body.return_text)
        rows = [
            encode({"index": i, **({"text": texts[i]} if shows else {}), "score": scores[i]})
            for i in _ranked(scores)
        ]
        return await self.write(b"[", rows, b"]")


class Score(PairsCall[ScoreBody]):
    """Request for scores."""

    id_prefix = "score"
    param = "text_2"

    async def answer(self) -> Response:
        """Return the answer; see `PoolingCall.answer`."""
        engine = await self.state.get_engine()
        (first, left), (second, right) = self.body.sides()
        scores = await self.scores(engine, as_inputs(left, first), as_inputs(right, second))
        rows = [
            encode({"index": i, "object": "score", "score": score})
            for i, score in enumerate(scores)
        ]
        return await self.write_list(rows)


def _ranked(scores: Sequence[float]) -> list[int]:
    """Return the numbers of documents, the best first; of equal ones the first one first."""
    return sorted(range(len(scores)), key=lambda i: -scores[i])
