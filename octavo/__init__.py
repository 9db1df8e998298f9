"""Octavo: an LLM inference and serving engine."""

from __future__ import annotations

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from octavo.outputs import CompletionOutput, RequestOutput
from octavo.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams

if TYPE_CHECKING:
    from octavo.llm import LLM

__version__ = version("octavo")

__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    # LLM brings torch with it, which the control plane must not import.
    if name == "LLM":
        from octavo.llm import LLM

        return LLM
    raise AttributeError(f"module 'octavo' has no attribute {name!r}")
