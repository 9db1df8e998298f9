"""POST /v2/embed and the older /v1/embed: vectors by Cohere's API."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from octavo.models.blocks.pooler import SentencesSpec
from octavo.server.abilities import find_pooler
from octavo.server.pooling import Floats, PoolingCall, encode, numbers_json
from octavo.server.pooling_schema import CohereEmbedBody
from octavo.server.rerank import as_inputs

_PROMPT_NAMES: Mapping[str, Sequence[str]] = {
    "search_query": ("search_query", "query", "retrieval.query"),
    "search_document": ("search_document", "document", "passage", "corpus", "retrieval.passage"),
    "classification": ("classification",),
    "clustering": ("clustering", "separation"),
}
"""Names of prompts in the folders of models, in small letters, by `input_type`."""


async def create_cohere_embed(request: Request) -> Response:
    """Return the vector of each text in one or several types, in the form of Cohere."""
    return await CohereEmbed.read(request, CohereEmbedBody)


async def create_old_cohere_embed(request: Request) -> Response:
    """Return the vector of each text; older than /v2/embed."""
    return await OldCohereEmbed.read(request, CohereEmbedBody)


class CohereEmbed(PoolingCall[CohereEmbedBody]):
    """Request of /v2/embed."""

    id_prefix = "embd"
    version = "2"

    def __init__(self, request: Request, body: CohereEmbedBody) -> None:
        super().__init__(request, body)
        self.param = body.given

    async def answer(self) -> Response:
        """Return the answer; see `PoolingCall.answer`."""
        engine = await self.state.get_engine()
        find_pooler(engine.spec, "embed")
        params = self.body.pooling_params("embed")
        if params.truncate_prompt_tokens is not None:
            params.truncate_prompt_tokens = min(params.truncate_prompt_tokens, engine.max_model_len)
        params.prompt_name, warning = find_prompt(engine.spec.sentences, self.body.input_type)
        kinds = list(dict.fromkeys(self.body.embedding_types or ["float"]))

        def write(_: int, x: Floats) -> tuple[bytes, ...]:
            return tuple(_TYPES[kind](x) for kind in kinds)

        texts = self.body.given_texts()
        rows = await self.results(engine, as_inputs(texts, self.param), params, write)
        columns = dict(zip(kinds, zip(*rows, strict=True), strict=True))
        meta = {
            "api_version": {"version": self.version},
            "billed_units": {"input_tokens": self.counts.prompt_tokens},
            **({} if warning is None else {"warnings": [warning]}),
        }
        tail = encode({"texts": texts, "meta": meta, **await self.explanation()})
        return await self.write_columns(columns, tail)

    async def write_columns(self, columns: Mapping[str, Sequence[bytes]], tail: bytes) -> Response:
        """Return the answer.

        Args:
            columns: the JSON of each text's vector, by type.
            tail: JSON object of the other fields, except the id.
        """
        head = encode({"response_type": "embeddings_by_type", "id": self.id})[:-1]
        lists: list[tuple[bytes, Sequence[bytes]]] = []
        for kind, column in columns.items():
            before = b"]," if lists else head + b',"embeddings":{'
            lists.append((before + b'"%b":[' % kind.encode(), column))
        return await self.write_lists(lists, b"]}," + tail[1:])


class OldCohereEmbed(CohereEmbed):
    """Request of /v1/embed; without `embedding_types` it has a plain list of vectors."""

    version = "1"

    async def write_columns(self, columns: Mapping[str, Sequence[bytes]], tail: bytes) -> Response:
        """Return the answer; see `CohereEmbed.write_columns`."""
        if self.body.embedding_types:
            return await super().write_columns(columns, tail)
        head = encode({"response_type": "embeddings_floats", "id": self.id})[:-1]
        return await self.write(head + b',"embeddings":[', columns["float"], b"]," + tail[1:])


def find_prompt(sentences: SentencesSpec, input_type: str | None) -> tuple[str | None, str | None]:
    """Return the name of the prompt for an `input_type`, and a warning.

    Without a fitting prompt the name is None, which stands for the model's default one. The
    warning is for models that have others.
    """
    if input_type is None:
        return None, None
    known = {name.lower(): name for name, _ in sentences.prompts}
    for name in _PROMPT_NAMES[input_type]:
        if name in known:
            return known[name], None
    if not known:
        return None, None
    return None, (
        f"input_type={input_type}: this model has no prompt for it; it has "
        f"{', '.join(known.values())}."
    )


def _int8(x: Floats) -> Floats:
    """Return a vector as whole numbers, the largest of them 127 or -127.

    The scale is the vector's own: a scale of a whole request, as sentence-transformers has it,
    would make a vector depend on the texts beside it.
    """
    most = np.abs(x).max()
    return np.rint(x * (np.float32(127) / most)) if most else x


def _bits(x: Floats) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """Return a bit for each number of a vector, 1 if it is positive; the first is the highest."""
    return np.packbits(x > 0)


_TYPES: Mapping[str, Callable[[Floats], bytes]] = {
    "float": numbers_json,
    "base64": lambda x: numbers_json(x, "base64"),
    "int8": lambda x: encode(_int8(x).astype(np.int8).tolist()),
    "uint8": lambda x: encode((_int8(x) + 128).astype(np.uint8).tolist()),
    "ubinary": lambda x: encode(_bits(x).tolist()),
    "binary": lambda x: encode((_bits(x).astype(np.int16) - 128).tolist()),
}
"""Writers of a vector by `embedding_types`."""
