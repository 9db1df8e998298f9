"""Octavo: an LLM inference and serving engine."""

from __future__ import annotations

from importlib import import_module

TYPE_CHECKING = False  # typing's own costs an import
if TYPE_CHECKING:
    from typing import Any

    from octavo.engine.async_llm import AsyncLLM, AsyncLLMEngine
    from octavo.engine.input_processor import EmbedsPrompt, TextPrompt, TokensPrompt
    from octavo.engine.llm_engine import LLMEngine
    from octavo.engine_args import AsyncEngineArgs, EngineArgs
    from octavo.llm import LLM
    from octavo.outputs import CompletionOutput, RequestOutput
    from octavo.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams

    __version__: str

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

# They bring modules with them that not everybody needs, and that take the time in which a command
# of the terminal may be interrupted already (__main__.py).
_LAZY = {
    "AsyncEngineArgs": "octavo.engine_args",
    "AsyncLLM": "octavo.engine.async_llm",
    "AsyncLLMEngine": "octavo.engine.async_llm",
    "BeamSearchParams": "octavo.sampling_params",
    "CompletionOutput": "octavo.outputs",
    "EmbedsPrompt": "octavo.engine.input_processor",
    "EngineArgs": "octavo.engine_args",
    "LLM": "octavo.llm",
    "LLMEngine": "octavo.engine.llm_engine",
    "RequestOutput": "octavo.outputs",
    "RequestOutputKind": "octavo.sampling_params",
    "SamplingParams": "octavo.sampling_params",
    "TextPrompt": "octavo.engine.input_processor",
    "TokensPrompt": "octavo.engine.input_processor",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    if name == "__version__":
        from importlib.metadata import version

        return version("octavo")
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")
