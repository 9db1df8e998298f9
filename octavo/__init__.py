"""Octavo: an LLM inference and serving engine."""

from __future__ import annotations

from importlib import import_module

# pyproject.toml reads it here. To ask importlib.metadata for it costs 20 ms of each start.
__version__ = "0.1.0"

TYPE_CHECKING = False  # typing's own costs an import
if TYPE_CHECKING:
    from typing import Any

    from octavo.config.engine_args import AsyncEngineArgs, EngineArgs
    from octavo.frontend.async_llm import AsyncLLM, AsyncLLMEngine
    from octavo.frontend.llm_engine import LLMEngine
    from octavo.frontend.prompts import EmbedsPrompt, TextPrompt, TokensPrompt
    from octavo.llm import LLM
    from octavo.lora_request import LoRARequest
    from octavo.outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
        PoolingOutput,
        PoolingRequestOutput,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from octavo.pooling_params import PoolingParams
    from octavo.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
    from octavo.sentence_encoder import SentenceEncoder

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EmbedsPrompt",
    "EngineArgs",
    "LLMEngine",
    "LoRARequest",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "SentenceEncoder",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]

# They bring modules with them that not everybody needs, and that take the time in which a command
# of the terminal may be interrupted already (__main__.py).
_LAZY = {
    "AsyncEngineArgs": "octavo.config.engine_args",
    "AsyncLLM": "octavo.frontend.async_llm",
    "AsyncLLMEngine": "octavo.frontend.async_llm",
    "BeamSearchParams": "octavo.sampling_params",
    "ClassificationOutput": "octavo.outputs",
    "ClassificationRequestOutput": "octavo.outputs",
    "CompletionOutput": "octavo.outputs",
    "EmbeddingOutput": "octavo.outputs",
    "EmbeddingRequestOutput": "octavo.outputs",
    "EmbedsPrompt": "octavo.frontend.prompts",
    "EngineArgs": "octavo.config.engine_args",
    "LLM": "octavo.llm",
    "LLMEngine": "octavo.frontend.llm_engine",
    "LoRARequest": "octavo.lora_request",
    "PoolingOutput": "octavo.outputs",
    "PoolingParams": "octavo.pooling_params",
    "PoolingRequestOutput": "octavo.outputs",
    "RequestOutput": "octavo.outputs",
    "RequestOutputKind": "octavo.sampling_params",
    "SamplingParams": "octavo.sampling_params",
    "ScoringOutput": "octavo.outputs",
    "ScoringRequestOutput": "octavo.outputs",
    "SentenceEncoder": "octavo.sentence_encoder",
    "TextPrompt": "octavo.frontend.prompts",
    "TokensPrompt": "octavo.frontend.prompts",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")
