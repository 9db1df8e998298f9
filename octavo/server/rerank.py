"""POST /rerank (Cohere, Jina, text-embeddings-inference) and /score (vLLM): scores of pairs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import RequestError
from octavo.frontend.pooling import find_comparison
from octavo.server.abilities import cannot
from octavo.server.body import read_model
from octavo.server.pooling import Floats, Input, PoolingCall, encode
from octavo.server.pooling_schema import (
    PairsBody,
    PooledBody,
    RerankBody,
    ScoreBody,
    TEIRerankBody,
    check_texts,
)
from octavo.server.state import state_of
from octavo.system.offload import offload
from octavo.text.pair_template import PairTemplate

if TYPE_CHECKING:
    from octavo.frontend.async_llm import AsyncLLM

B = TypeVar("B", bound=PooledBody)
_NO_OPTIONS = PairsBody.model_construct()  # no field is required


async def create_rerank(request: Request) -> Response:
    """Sort documents by their relevance to a query."""
    limit = state_of(request).config.max_request_bytes
    body: RerankBody | TEIRerankBody = await read_model(request, _kind, limit)
    if isinstance(body, RerankBody):
        return await Rerank.serve(request, body)
    return await TEIRerank.serve(request, body)


async def create_score(request: Request) -> Response:
    """Return the score of each pair of texts."""
    return await Score.read(request, ScoreBody)


def _kind(body: dict[str, Any]) -> type[RerankBody] | type[TEIRerankBody]:
    return TEIRerankBody if "texts" in body and "documents" not in body else RerankBody


class PairsCall(PoolingCall[B]):
    """Request for scores of pairs of texts."""

    async def scores(
        self,
        engine: AsyncLLM,
        first: Sequence[Text],
        second: Sequence[Text],
        options: PairsBody = _NO_OPTIONS,
    ) -> list[float]:
        """Return the score of each pair.

        A reranker reads both texts together, in its template if it has one. The score of a model of
        vectors is the similarity of the two vectors that its files name, the cosine by default;
        that of a late-interaction model is MaxSim of their tokens' vectors. Each text is computed
        once.

        Args:
            engine: the engine.
            first: first texts, such as the query.
            second: as many second texts.
            options: the instruction of a reranker, and the lengths to which texts are cut.

        Raises:
            RequestError: the model has no scores of pairs, or a text is wrong.
        """
        spec, instruction = engine.spec, options.instruction
        first = await self._cut(engine, first, options.max_tokens_per_query)
        second = await self._cut(engine, second, options.max_tokens_per_doc)
        scorer = spec.pooler("classify")
        if scorer is not None and scorer.size == 1:
            template = await self._template(engine, instruction)
            pairs = [
                Input({"prompt": a.text, "text_pair": b.text}, b.where)
                if template is None
                else Input(partial(_render, template, a.text, b.text, instruction), b.where)
                for a, b in zip(first, second, strict=True)
            ]
            params = self.body.pooling_params("classify")
            return await self.results(engine, pairs, params, lambda _, x: float(x[0]))
        comparison = find_comparison(spec.poolers, spec.sentences)
        if comparison is None:
            raise cannot(spec, "has no scores of pairs")
        if instruction is not None:
            raise _without_template("is a model of vectors")
        task, compare, roles = comparison
        left, right = (
            [(text.text, role, text.where) for text in side]
            for side, role in zip((first, second), roles, strict=True)
        )
        texts = {(t, role): Input(t, where, role) for t, role, where in (*left, *right)}
        params = self.body.pooling_params(task)

        def keep(_: int, x: Floats) -> Floats:
            return x

        vectors = dict(
            zip(texts, await self.results(engine, [*texts.values()], params, keep), strict=True)
        )
        pairs_of_vectors = [
            (vectors[a[:2]], vectors[b[:2]]) for a, b in zip(left, right, strict=True)
        ]
        # A product of two matrices takes longer than the cosine of two vectors.
        work = sum(a.size * len(b) if b.ndim > 1 else a.size for a, b in pairs_of_vectors)
        return await offload(work // 1000, lambda: [compare(a, b) for a, b in pairs_of_vectors])

    async def _cut(
        self, engine: AsyncLLM, texts: Sequence[Text], most: int | None
    ) -> Sequence[Text]:
        """Return texts that are cut to a number of tokens; None and 0: the whole texts."""
        if not most:
            return texts
        tokenizer = self.state.tokenizer(engine, self.param)
        found = {}
        for text in dict.fromkeys(text for text, _ in texts):
            found[text] = await offload(len(text), tokenizer.cut, text, most)
        return [Text(found[text], where) for text, where in texts]

    async def _template(self, engine: AsyncLLM, instruction: str | None) -> PairTemplate | None:
        """Return the template of pairs; None: the tokenizer joins the two texts."""
        template = await self.state.pair_template(self.state.tokenizer(engine, self.param))
        if template is None and instruction is not None:
            raise _without_template("has no template with the roles query and document")
        return template


class Text(NamedTuple):
    """Text of a pair."""

    text: str
    where: str
    """Its place in the body, such as documents[3]."""


async def _render(
    template: PairTemplate, query: str, document: str, instruction: str | None
) -> str:
    return await asyncio.wrap_future(template.submit(query, document, instruction))


def _without_template(why: str) -> RequestError:
    return RequestError(
        f"instruction: this model {why}; leave it out, or start the server with --chat-template.",
        "instruction",
    )


def _texts(texts: Sequence[str], param: str) -> list[Text]:
    return [Text(text, f"{param}[{i}]") for i, text in enumerate(texts)]


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
        query = [Text(body.query, "query")] * len(texts)
        scores = await self.scores(engine, query, _texts(texts, "documents"), body)
        rows = []
        for index in _ranked(scores)[: body.top_n or None]:
            result: dict[str, object] = {"index": index, "relevance_score": scores[index]}
            if body.return_documents is not False:
                result["document"] = {"text": texts[index]}
            rows.append(encode(result))
        head = encode({"id": self.id, "model": self.model_name})[:-1] + b',"results":['
        count = self.counts.prompt_tokens
        usage = {"prompt_tokens": count, "total_tokens": count}
        meta = {"billed_units": {"search_units": 1}, "tokens": {"input_tokens": count}}
        told = await self.explanation()
        tail = b"]," + encode({"usage": usage, "meta": meta, **told})[1:]
        return await self.write(head, rows, tail)


class TEIRerank(PairsCall[TEIRerankBody]):
    """Request to sort texts, in the form of text-embeddings-inference."""

    id_prefix = "rerank"
    param = "texts"

    async def answer(self) -> Response:
        """Return the answer; see `PoolingCall.answer`."""
        engine = await self.state.get_engine()
        texts = self.body.texts
        query = [Text(self.body.query, "query")] * len(texts)
        scores = await self.scores(engine, query, _texts(texts, "texts"))
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
        texts = _texts(left, first), _texts(right, second)
        scores = await self.scores(engine, *texts, self.body)
        rows = [
            encode({"index": i, "object": "score", "score": score})
            for i, score in enumerate(scores)
        ]
        return await self.write_list(rows)


def _ranked(scores: Sequence[float]) -> list[int]:
    """Return the numbers of documents, the best first; of equal ones the first one first."""
    return sorted(range(len(scores)), key=lambda i: -scores[i])
