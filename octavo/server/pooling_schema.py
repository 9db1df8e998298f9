"""Bodies of requests for vectors and scores: those of OpenAI, vLLM, Cohere, Jina, Ollama and
text-embeddings-inference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import BeforeValidator, Field, PlainValidator, StringConstraints

from octavo.compat import request_fields as known_fields
from octavo.errors import RequestError
from octavo.pooling_params import PoolingParams, PoolingTask
from octavo.server.body import Body
from octavo.server.chat_messages import Documents, Message, Messages
from octavo.server.errors import show
from octavo.server.schema import (
    MAX_PROMPTS,
    Int,
    Milliseconds,
    Prompts,
    RequestId,
    check_prompts,
)

MAX_TEXTS = MAX_PROMPTS
"""Most texts, or pairs of texts, of a request."""
Texts: TypeAlias = str | list[str]
Document: TypeAlias = str | dict[str, Any]


def check_texts(value: object, param: str) -> list[str]:
    """Return one text or several as a list; an object with `text` counts as its text.

    Raises:
        RequestError: `value` is no text and no list of texts, or holds none or too many.
    """
    texts = value if isinstance(value, list) else [value]
    if not texts:
        raise RequestError(f"{param} is an empty list; give at least one text.", param)
    if len(texts) > MAX_TEXTS:
        raise RequestError(
            f"{param} has {len(texts)} texts; at most {MAX_TEXTS} are allowed.", param
        )
    found = []
    for i, given in enumerate(texts):
        text = given.get("text") if isinstance(given, dict) else given
        if not isinstance(text, str):
            where = f"{param}[{i}]" if isinstance(value, list) else param
            raise RequestError(
                f'{where}={show(given)} is not a text; give a string, or {{"text": "..."}}.', param
            )
        found.append(text)
    return found


def _check_input(value: object, param: str) -> object:
    """Return `value` if it is one text or several, as texts or token ids, none of them empty."""
    return _not_empty(check_prompts(value, param), param)


def _check_texts(value: object, param: str) -> object:
    """Return `value` if it is a list of texts, none of them empty."""
    return _not_empty(check_texts(value if isinstance(value, list) else [value], param), param)


def _not_empty(found: object, param: str) -> object:
    for i, text in enumerate(found if isinstance(found, list) else [found]):
        if text == "":
            where = f"{param}[{i}]" if isinstance(found, list) else param
            raise RequestError(f"{where} is an empty text; give some text.", param)
    return found


def _given(value: object, param: str) -> object:
    if value is None:
        raise RequestError(f"{param} is missing; it is required.", param, "missing_parameter")
    return value


class PooledBody(Body):
    """Fields of all requests for vectors or scores."""

    unsupported = known_fields.POOLING
    instead = known_fields.POOLING_INSTEAD
    names: ClassVar[Mapping[str, str]] = {}
    """See `own_names`."""
    answers_list: ClassVar[bool] = False
    """True if the answer is a list."""

    model: str | None = None
    """Served model name; default: the first one."""
    request_id: RequestId | None = None
    """Request id in printable ASCII; default: X-Request-Id, or generated."""
    priority: Annotated[Int, Field(ge=-(2**31), lt=2**31)] | None = None
    """Smaller is served earlier, with --scheduling-policy priority."""
    deadline_ms: Milliseconds | None = None
    """Milliseconds after which the request fails with 408. Also as the header X-Deadline-Ms."""
    cache_salt: Annotated[str, StringConstraints(min_length=1)] | None = None
    """Scope of cached prefixes: requests with another one share none."""
    explain: bool | None = None
    """Explain the time of the request in its answer, as explanation; see docs/explain.md. Not in
    answers that are lists."""

    def check(self) -> None:
        """Raise RequestError if fields contradict each other, or the answer."""
        if self.explain and self.answers_list:
            raise RequestError(
                "explain=true: the answer of this route is a list and has no place for it; leave "
                "it out, and use /v1/requests/ID/explain with the X-Request-Id of the answer.",
                "explain",
            )

    def own_names(self) -> Mapping[str, str]:
        """Return the names that fields of `PoolingParams` have in this body, where they differ."""
        return self.names

    def pooling_params(self, task: str | None) -> PoolingParams:
        """Return the parameters of each text.

        Raises:
            RequestError: a value is out of its range.
        """
        return PoolingParams(task=task)


class VLLMBody(PooledBody):
    """Fields of the routes of OpenAI, vLLM, Cohere and Jina."""

    user: str | None = None
    """End user; no effect."""
    truncate_prompt_tokens: Int | None = None
    """Number of tokens to keep of each text; -1: as many as the model takes. Default: a longer text
    is an error."""
    windows: bool | None = None
    """Compute a text that is longer than the model's context in parts, and return the mean of their
    vectors. Default false."""
    truncation_side: Literal["left", "right"] | None = None
    """Side at which tokens are dropped. Default right."""
    use_activation: bool | None = None
    """Normalize vectors, or turn scores into probabilities; default: as the model says."""
    normalize: bool | None = None
    """Older name of use_activation."""
    activation: bool | None = None
    """Older name of use_activation."""
    softmax: bool | None = None
    """Older name of use_activation."""

    def pooling_params(self, task: str | None) -> PoolingParams:
        """Return the parameters of each text; see `PooledBody.pooling_params`."""
        return PoolingParams(
            task=task,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            truncation_side=self.truncation_side or "right",
            windows=self.windows is True,
            use_activation=self.use_activation,
            normalize=self.normalize,
            activation=self.activation,
            softmax=self.softmax,
            dimensions=getattr(self, "dimensions", None),
            prompt_name=getattr(self, "prompt_name", None),
        )


class InputBody(VLLMBody):
    """Fields of the routes that take texts or a chat."""

    inner: ClassVar[Mapping[str, type[Body]]] = {"messages": Message}

    input: Annotated[
        Prompts | None,
        PlainValidator(lambda value: _check_input(value, "input"), json_schema_input_type=Prompts),
    ] = None
    """Text or token ids, or a list of either; give this or messages."""
    messages: Messages | None = None
    """Chat to render with the template, as one text."""
    add_special_tokens: bool | None = None
    """Add the tokenizer's special tokens; default: true for texts, false for a chat."""
    add_generation_prompt: bool | None = None
    """Let the template begin the assistant's turn. Default false."""
    continue_final_message: bool | None = None
    """Leave the last message open."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables for the chat template."""
    documents: Documents = None
    """Texts for retrieval, for templates that use them."""

    def check(self) -> None:
        """Raise RequestError if fields contradict each other; see `PooledBody.check`."""
        super().check()
        if (self.input is None) == (self.messages is None):
            raise RequestError(
                "Give either input or messages.",
                "input",
                "missing_parameter" if self.input is None else None,
            )
        if self.add_generation_prompt and self.continue_final_message:
            raise RequestError(
                "add_generation_prompt and continue_final_message contradict; leave one of them "
                "out.",
                "add_generation_prompt",
            )


class VectorsBody(InputBody):
    """Fields of the routes that return vectors."""

    encoding_format: Literal["float", "base64"] | None = None
    """float (default): lists of numbers; base64: little-endian float32."""
    dimensions: Int | None = None
    """Length to which vectors are cut, for models that are trained for it."""
    prompt_name: str | None = None
    """Prompt of the model that is put before each text, such as query; empty: none. Default: the
    model's."""


class EmbeddingsBody(VectorsBody):
    """Body of POST /v1/embeddings."""

    task: str | None = None
    """Jina's name of prompt_name, such as retrieval.query."""

    def own_names(self) -> Mapping[str, str]:
        """Return the names of fields; see `PooledBody.own_names`."""
        return self.names if self.task is None else {"prompt_name": "task"}

    def pooling_params(self, task: str | None) -> PoolingParams:
        """Return the parameters of each text; see `PooledBody.pooling_params`."""
        params = super().pooling_params(task)
        if self.task is not None:
            params.prompt_name = self.task
        return params

    def check(self) -> None:
        """Raise RequestError if fields contradict each other; see `PooledBody.check`."""
        super().check()
        if self.task is not None and self.prompt_name is not None:
            raise RequestError("task and prompt_name are the same; leave one of them out.", "task")


class ClassifyBody(InputBody):
    """Body of POST /v1/classify."""

    unsupported = known_fields.CLASSIFY


class PoolingBody(VectorsBody):
    """Body of POST /pooling."""

    task: PoolingTask | Literal["encode", "score"] | None = None
    """embed, classify, token_embed or token_classify; default: the model's first one."""


def _check_documents(value: object) -> object:
    check_texts(value if isinstance(value, list) else [value], "documents")
    return value


class PairsBody(VLLMBody):
    """Fields of the routes that score pairs of texts."""

    max_tokens_per_query: Annotated[Int, Field(ge=0)] | None = None
    """Tokens of a query, or first text, to read; default, and 0: all."""
    max_tokens_per_doc: Annotated[Int, Field(ge=0)] | None = None
    """Tokens of a document, or second text, to read; default, and 0: all."""
    instruction: str | None = None
    """Task of a reranker whose template has one, such as Qwen3-Reranker's."""


class RerankBody(PairsBody):
    """Body of POST /rerank, /v1/rerank and /v2/rerank."""

    unsupported = known_fields.RERANK

    query: Annotated[
        str,
        BeforeValidator(lambda value: value.get("text") if isinstance(value, dict) else value),
    ]
    """Text to compare the documents with."""
    documents: Annotated[
        list[Document], PlainValidator(_check_documents, json_schema_input_type=list[Document])
    ]
    """Texts, or objects with text."""
    top_n: Annotated[Int, Field(ge=0)] | None = None
    """Number of results; default, and 0: all."""
    return_documents: bool | None = None
    """Return the documents with the results. Default true."""


class ScoreBody(PairsBody):
    """Body of POST /v1/score: a pair of texts, a text with several, or as many of both.

    The two sides have one of four pairs of names.
    """

    unsupported = known_fields.CLASSIFY

    text_1: Annotated[Any, Field(json_schema_extra={"type": "string"})] = None
    """First texts, a string or a list: one for all of the second ones, or as many."""
    text_2: Annotated[Any, Field(json_schema_extra={"type": "string"})] = None
    """Second texts."""
    data_1: Any = None
    """Other name of text_1."""
    data_2: Any = None
    """Other name of text_2."""
    queries: Any = None
    """Other name of text_1."""
    documents: Any = None
    """Other name of text_2, with queries."""
    items: Any = None
    """Other name of text_2, with queries."""

    def sides(self) -> tuple[tuple[str, list[str]], tuple[str, list[str]]]:
        """Return the name and the texts of the first and of the second side, of one length.

        Raises:
            RequestError: a side is missing, holds no texts, or the lengths do not fit.
        """
        given = [n for n in _SIDES if getattr(self, n) is not None]
        names = next((names for names in _PAIRS if list(names) == given), None)
        if names is None:
            raise RequestError(
                "Give text_1 and text_2, or data_1 and data_2, or queries and documents, or "
                f"queries and items; the body has {', '.join(given) or 'none of them'}.",
                given[0] if given else "text_1",
                "missing_parameter",
            )
        (first, left), (second, right) = ((n, check_texts(getattr(self, n), n)) for n in names)
        if len(left) == 1:
            left *= len(right)
        if len(left) != len(right):
            raise RequestError(
                f"{first} has {len(left)} texts and {second} {len(right)}; give one {first} for "
                "all, or as many.",
                first,
            )
        return (first, left), (second, right)

    def check(self) -> None:
        """Raise RequestError if fields contradict each other; see `PooledBody.check`."""
        super().check()
        self.sides()


_SIDES = ("text_1", "text_2", "data_1", "data_2", "queries", "documents", "items")
_PAIRS = (
    ("text_1", "text_2"),
    ("data_1", "data_2"),
    ("queries", "documents"),
    ("queries", "items"),
)


# Cohere


class CoherePart(Body):
    """Part of a text in `inputs`."""

    unsupported: ClassVar = {"image_url": (None,)}

    type: Literal["text"]
    """text, the only one: the models read no pictures."""
    text: str
    """Text."""


class CohereInput(Body):
    """Text in `inputs`."""

    inner: ClassVar[Mapping[str, type[Body]]] = {"content": CoherePart}

    content: Annotated[list[CoherePart], Field(min_length=1)]
    """Parts of the text, which are joined by line breaks."""


CohereType: TypeAlias = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]


class CohereEmbedBody(PooledBody):
    """Body of POST /v2/embed and /v1/embed."""

    unsupported: ClassVar = {**known_fields.POOLING, "images": (None, [])}
    inner: ClassVar[Mapping[str, type[Body]]] = {"inputs": CohereInput}
    names: ClassVar = {
        "truncate_prompt_tokens": "truncate",
        "dimensions": "output_dimension",
    }

    texts: Annotated[
        list[str] | None,
        PlainValidator(
            lambda value: value if value is None else _check_texts(value, "texts"),
            json_schema_input_type=list[str],
        ),
    ] = None
    """Texts; give these or inputs."""
    inputs: Annotated[list[CohereInput], Field(min_length=1, max_length=MAX_TEXTS)] | None = None
    """Texts as objects with parts."""
    input_type: (
        Literal["search_document", "search_query", "classification", "clustering"] | None
    ) = None
    """Purpose of the vectors. Names a prompt of the model, if it has one for it."""
    embedding_types: list[CohereType] | None = None
    """Types of the numbers, one or several. Default float."""
    output_dimension: Annotated[Int, Field(ge=1)] | None = None
    """Length to which vectors are cut, for models that are trained for it."""
    truncate: Literal["NONE", "START", "END"] | None = None
    """Side at which texts that are too long are cut; NONE: they are an error. Default END."""
    max_tokens: Annotated[Int, Field(ge=1)] | None = None
    """Tokens of each text to read. Default: as many as the model takes."""

    @property
    def given(self) -> str:
        """Field that holds the texts."""
        return "texts" if self.texts is not None else "inputs"

    def given_texts(self) -> list[str]:
        """Return the texts."""
        if self.texts is not None:
            return self.texts
        return ["\n".join(part.text for part in it.content) for it in self.inputs or []]

    def check(self) -> None:
        """Raise RequestError if fields contradict each other; see `PooledBody.check`."""
        super().check()
        if (self.texts is None) == (self.inputs is None):
            raise RequestError(
                "Give either texts or inputs.",
                "texts",
                "missing_parameter" if self.texts is None else None,
            )
        _check_texts(self.given_texts(), self.given)
        if self.truncate == "NONE" and self.max_tokens is not None:
            raise RequestError(
                f"max_tokens={self.max_tokens} and truncate=NONE contradict; leave one out.",
                "max_tokens",
            )

    def pooling_params(self, task: str | None) -> PoolingParams:
        """Return the parameters of each text; see `PooledBody.pooling_params`."""
        return PoolingParams(
            task=task,
            truncate_prompt_tokens=None if self.truncate == "NONE" else self.max_tokens or -1,
            truncation_side="left" if self.truncate == "START" else "right",
            dimensions=self.output_dimension,
        )


# text-embeddings-inference


class TEIBody(PooledBody):
    """Fields of the routes of text-embeddings-inference."""

    answers_list = True
    names: ClassVar = {"truncate_prompt_tokens": "truncate"}

    truncate: bool | None = None
    """Cut texts that are too long. Default: they are an error."""
    truncation_direction: Literal["Left", "Right", "left", "right"] | None = None
    """Side at which tokens are dropped. Default Right."""

    def pooling_params(self, task: str | None) -> PoolingParams:
        """Return the parameters of each text; see `PooledBody.pooling_params`."""
        direction = (self.truncation_direction or "right").lower()
        return PoolingParams(
            task=task,
            truncate_prompt_tokens=-1 if self.truncate else None,
            truncation_side="left" if direction == "left" else "right",
            dimensions=getattr(self, "dimensions", None),
            prompt_name=getattr(self, "prompt_name", None),
            use_activation=False if getattr(self, "raw_scores", False) else None,
        )


class TEIInputsBody(TEIBody):
    """Body of POST /embed_all and /embed_sparse."""

    inputs: Annotated[
        Prompts,
        PlainValidator(
            lambda value: _check_input(_given(value, "inputs"), "inputs"),
            json_schema_input_type=Prompts,
        ),
    ]
    """Text or token ids, or a list of either."""
    prompt_name: str | None = None
    """Prompt of the model that is put before each text, such as query."""

    def pooling_params(self, task: str | None) -> PoolingParams:
        """Return the parameters of each text; vectors of tokens are not normalized."""
        params = super().pooling_params(task)
        params.use_activation = False if task == "token_embed" else None
        return params


class TEIEmbedBody(TEIInputsBody):
    """Body of POST /embed."""

    normalize: bool | None = None
    """Divide vectors by their lengths. Default true."""
    dimensions: Int | None = None
    """Length to which vectors are cut, for models that are trained for it."""

    def pooling_params(self, task: str | None) -> PoolingParams:
        """Return the parameters of each text; see `PooledBody.pooling_params`."""
        params = super().pooling_params(task)
        params.use_activation = self.normalize is not False
        return params


def _check_sequences(value: object) -> object:
    """Check TEI's inputs: a text, a pair of texts, or a list of lists of one text or two."""
    batch = value if isinstance(value, list) and value and isinstance(value[0], list) else [value]
    if len(batch) > MAX_TEXTS:
        raise RequestError(
            f"inputs has {len(batch)} texts; at most {MAX_TEXTS} are allowed.", "inputs"
        )
    for item in batch:
        texts = item if isinstance(item, list) else [item]
        if not 1 <= len(texts) <= 2 or not all(isinstance(text, str) for text in texts):
            raise RequestError(
                f"inputs={show(item)} is not allowed; give a string, a pair of strings, or a list "
                "of lists of one string or two.",
                "inputs",
            )
    return value


Sequences: TypeAlias = str | list[str] | list[list[str]]


class TEIPredictBody(TEIBody):
    """Body of POST /predict."""

    inputs: Annotated[Sequences, PlainValidator(_check_sequences, json_schema_input_type=Sequences)]
    """A text, a pair of texts, or a list of lists of one text or two."""
    raw_scores: bool | None = None
    """Return scores instead of probabilities. Default false."""


class TEIRerankBody(TEIBody):
    """Body of POST /rerank in the form of text-embeddings-inference."""

    query: str
    """Text to compare the texts with."""
    texts: Annotated[
        list[str],
        PlainValidator(
            lambda value: check_texts(value if isinstance(value, list) else [value], "texts"),
            json_schema_input_type=list[str],
        ),
    ]
    """Texts to rank."""
    raw_scores: bool | None = None
    """Return scores instead of probabilities. Default false."""
    return_text: bool | None = None
    """Return the texts with the results. Default false."""


class SimilarityInputs(Body):
    """Texts of POST /similarity."""

    source_sentence: str
    """Text to compare the others with."""
    sentences: Annotated[
        list[str],
        PlainValidator(
            lambda value: check_texts(
                value if isinstance(value, list) else [value], "inputs.sentences"
            ),
            json_schema_input_type=list[str],
        ),
    ]
    """The others."""


class SimilarityBody(PooledBody):
    """Body of POST /similarity."""

    inner: ClassVar[Mapping[str, type[Body]]] = {
        "inputs": SimilarityInputs,
        "parameters": TEIBody,
    }
    names: ClassVar = {"truncate_prompt_tokens": "parameters.truncate"}
    answers_list = True

    inputs: SimilarityInputs
    """Texts."""
    parameters: TEIBody | None = None
    """truncate and truncation_direction."""

    def pooling_params(self, task: str | None) -> PoolingParams:
        """Return the parameters of each text; see `PooledBody.pooling_params`."""
        return (self.parameters or TEIBody()).pooling_params(task)


# Ollama


class OllamaPooledBody(PooledBody):
    """Fields of both of Ollama's routes for vectors."""

    names: ClassVar = {"truncate_prompt_tokens": "truncate"}

    model: Annotated[str, Field(min_length=1)]
    """Served model name, also with the tag `:latest`."""
    truncate: bool | None = None
    """Cut texts that are too long. Default true."""
    dimensions: Int | None = None
    """Length to which vectors are cut, for models that are trained for it."""
    options: dict[str, Any] | None = None
    """No effect: they are parameters of generation."""
    keep_alive: float | str | None = None
    """No effect: the model stays loaded."""

    def pooling_params(self, task: str | None) -> PoolingParams:
        """Return the parameters of each text; see `PooledBody.pooling_params`."""
        return PoolingParams(
            task=task,
            truncate_prompt_tokens=None if self.truncate is False else -1,
            dimensions=self.dimensions,
        )


class OllamaEmbedBody(OllamaPooledBody):
    """Body of POST /api/embed."""

    input: Annotated[
        Texts,
        PlainValidator(
            lambda value: value if value == [] else check_texts(value, "input"),
            json_schema_input_type=Texts,
        ),
    ]
    """Text, or a list of texts."""


class OllamaEmbeddingsBody(OllamaPooledBody):
    """Body of POST /api/embeddings, the older route for one text."""

    prompt: str
    """Text."""
