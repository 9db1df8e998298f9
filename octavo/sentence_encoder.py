"""Vectors of texts with the interface of sentence-transformers, and of LangChain's embeddings."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ModelError, RequestError
from octavo.frontend.pooling import normalize
from octavo.llm import LLM
from octavo.pooling_params import PoolingParams

Floats = NDArray[np.float32]
_QUERIES, _DOCUMENTS = ("query",), ("document", "passage", "corpus")
"""Names of prompts for queries and for documents, in the order of preference."""


class SentenceEncoder:
    """Model that maps texts to vectors. Long texts are cut to its limit.

    It replaces `SentenceTransformer` in programs that encode and compare texts. It also has the
    methods of LangChain's `Embeddings`, `embed_documents` and `embed_query`, and the asynchronous
    ones. Several threads may use it; their calls run one after the other.

    Args:
        model_name_or_path: folder, or hub id.
        prompts: texts to put before texts, by name; added to those of the model.
        default_prompt_name: prompt of texts for which none is named; None: the model's.
        truncate_dim: number of a vector's first numbers to keep; None: all.
        **kwargs: settings of `LLM`, such as `dtype` and `quantization`.

    Raises:
        ConfigError, ModelError, HubError: settings, model folder or download are wrong, or the
            model makes no vectors.
    """

    def __init__(
        self,
        model_name_or_path: str,
        *,
        prompts: Mapping[str, str] | None = None,
        default_prompt_name: str | None = None,
        truncate_dim: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.llm = LLM(model_name_or_path, **kwargs)
        spec = self.llm.llm_engine.spec
        pooler = spec.pooler("embed")
        if pooler is None:
            self.llm.shutdown()
            can = ", ".join(pooler.task for pooler in spec.poolers) or "generate"
            raise ModelError(f"{model_name_or_path} makes no vectors of texts. It can: {can}.")
        self._size = pooler.size
        self._lock = threading.Lock()
        self.prompts = dict(spec.sentences.prompts) | dict(prompts or {})
        self.default_prompt_name = default_prompt_name or spec.sentences.default_prompt_name
        self.similarity_fn_name = spec.sentences.similarity_fn_name
        self.truncate_dim = truncate_dim

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """Free the model's memory. A second call is harmless."""
        self.llm.shutdown()

    @property
    def max_seq_length(self) -> int:
        """Number of tokens of the longest text."""
        return self.llm.memory_plan.max_model_len

    def get_sentence_embedding_dimension(self) -> int:
        """Return the number of numbers of a vector."""
        return self.truncate_dim or self._size

    def encode(
        self,
        sentences: str | Sequence[str],
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        show_progress_bar: bool | None = None,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        convert_to_numpy: bool = True,
    ) -> Floats:
        """Return the vector of a text, float32 [n], or of several, [texts, n].

        Args:
            sentences: one text or several.
            prompt_name: name of one of `prompts`, put before each text; None: the default one.
            prompt: text to put before each text, instead of `prompt_name`.
            batch_size: ignored; the engine fills its steps itself.
            show_progress_bar: True for a progress bar.
            normalize_embeddings: True to divide each vector by its length.
            truncate_dim: number of a vector's first numbers to keep; None: as at the start.
            convert_to_numpy: must be True; use torch.from_numpy on the result.

        Raises:
            RequestError: a text is empty or not valid Unicode, or an option is wrong.
        """
        if not convert_to_numpy:
            raise RequestError(
                "convert_to_numpy=False is not supported; use torch.from_numpy on the result.",
                "convert_to_numpy",
            )
        texts = [sentences] if isinstance(sentences, str) else list(sentences)
        before = self._prompt(prompt_name) if prompt is None else prompt
        params = PoolingParams(
            task="embed",
            dimensions=truncate_dim or self.truncate_dim,
            truncate_prompt_tokens=-1,
            use_activation=True if normalize_embeddings else None,
            prompt_name="",  # `before` has it
        )
        if not texts:
            return np.zeros((0, params.dimensions or self._size), np.float32)
        with self._lock:
            outputs = self.llm.encode(
                [before + text for text in texts], params, use_tqdm=bool(show_progress_bar)
            )
        vectors = [output.outputs.data for output in outputs]
        if normalize_embeddings:
            vectors = [normalize(vector) for vector in vectors]
        return vectors[0] if isinstance(sentences, str) else np.stack(vectors)

    def encode_query(self, sentences: str | Sequence[str], **options: Any) -> Floats:
        """Return the vectors of queries: with the model's prompt for queries, if it has one."""
        return self.encode(sentences, **self._named(_QUERIES) | options)

    def encode_document(self, sentences: str | Sequence[str], **options: Any) -> Floats:
        """Return the vectors of documents: with the model's prompt for them, if it has one."""
        return self.encode(sentences, **self._named(_DOCUMENTS) | options)

    def embed_query(self, text: str) -> list[float]:
        """Return the vector of a query; LangChain's name."""
        vector: list[float] = self.encode_query(text).tolist()
        return vector

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Return the vectors of documents; LangChain's name."""
        vectors: list[list[float]] = self.encode_document(texts).tolist()
        return vectors

    async def aembed_query(self, text: str) -> list[float]:
        """Return the vector of a query while the event loop does other work; LangChain's name."""
        return await asyncio.to_thread(self.embed_query, text)

    async def aembed_documents(self, texts: list[str]) -> list[list[float]]:
        """Return the vectors of documents while the event loop does other work."""
        return await asyncio.to_thread(self.embed_documents, texts)

    def similarity(self, first: Floats, second: Floats) -> Floats:
        """Return the similarity of each vector of [a, n] with each of [b, n]: float32 [a, b]."""
        a, b = np.atleast_2d(first), np.atleast_2d(second)
        kind = self.similarity_fn_name
        if kind == "cosine":
            result: Floats = normalize(a) @ normalize(b).T
        elif kind == "dot":
            result = a @ b.T
        else:
            order = 2 if kind == "euclidean" else 1
            result = -np.linalg.norm(a[:, None] - b[None], ord=order, axis=-1)
        return result

    def _named(self, names: tuple[str, ...]) -> dict[str, Any]:
        found = next((name for name in names if name in self.prompts), None)
        return {} if found is None else {"prompt_name": found}

    def _prompt(self, name: str | None) -> str:
        """Return the text of a prompt; "" for none."""
        name = name or self.default_prompt_name
        if name is None:
            return ""
        if name not in self.prompts:
            known = ", ".join(self.prompts) or "none"
            raise RequestError(f"prompt_name={name!r}: the prompts are {known}.", "prompt_name")
        return self.prompts[name]
