"""Octavo: an LLM inference and serving engine."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from octavo.outputs import CompletionOutput, RequestOutput
from octavo.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from octavo.engine.async_llm import AsyncLLM, AsyncLLMEngine
    from octavo.engine.input_processor import EmbedsPrompt, TextPrompt, TokensPrompt
    from octavo.engine.llm_engine import LLMEngine
    from octavo.engine_args import AsyncEngineArgs, EngineArgs
    from octavo.llm import LLM

__version__ = version("octavo")

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchParams",
    "CompletionOutput",
    "EmbedsPrompt",
    "EngineArgs",
    "LLMEngine",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]

# They bring modules with them that not everybody needs.
_LAZY = {
    "AsyncEngineArgs": "octavo.engine_args",
    "AsyncLLM": "octavo.engine.async_llm",
    "AsyncLLMEngine": "octavo.engine.async_llm",
    "EmbedsPrompt": "octavo.engine.input_processor",
    "EngineArgs": "octavo.engine_args",
    "LLM": "octavo.llm",
    "LLMEngine": "octavo.engine.llm_engine",
    "TextPrompt": "octavo.engine.input_processor",
    "TokensPrompt": "octavo.engine.input_processor",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")
