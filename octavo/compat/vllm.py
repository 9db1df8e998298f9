"""Runs a script that was written for vLLM: `python -m octavo.compat.vllm script.py [arguments]`.

`install` makes Octavo answer to the modules that such scripts import. What is not in them fails as
it does in Python: with an ImportError that names it.
"""

from __future__ import annotations

import argparse
import gc
import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import octavo
from octavo import config, metrics_reader, outputs, sampling_params
from octavo.device import trim_memory
from octavo.engine import async_llm, input_processor, llm_engine
from octavo.engine_args import AsyncEngineArgs, EngineArgs
from octavo.llm import LLM


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An argument parser whose flags may have underscores for dashes: vLLM's."""

    def parse_known_args(  # type: ignore[override]  # its overloads
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """See `argparse.ArgumentParser`."""
        words = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args([_with_dashes(word) for word in words], namespace)


def _with_dashes(word: str) -> str:
    if not word.startswith("--"):
        return word
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Gives memory of engines that nobody refers to any more back to the system."""
    gc.collect()
    trim_memory()


_CONFIG = {
    "KVEventsConfig": config.KVEventsConfig,
    "KVTransferConfig": config.KVTransferConfig,
}
_ENGINE = {"LLMEngine": llm_engine.LLMEngine}
_ASYNC_ENGINE = {"AsyncLLM": async_llm.AsyncLLM, "AsyncLLMEngine": async_llm.AsyncLLMEngine}
_ARGS = {"AsyncEngineArgs": AsyncEngineArgs, "EngineArgs": EngineArgs}
_INPUTS = {
    "EmbedsPrompt": input_processor.EmbedsPrompt,
    "PromptType": input_processor.Prompt,
    "TextPrompt": input_processor.TextPrompt,
    "TokensPrompt": input_processor.TokensPrompt,
}
_OUTPUTS = {
    "CompletionOutput": outputs.CompletionOutput,
    "RequestOutput": outputs.RequestOutput,
}
_SAMPLING = {
    "BeamSearchParams": sampling_params.BeamSearchParams,
    "GuidedDecodingParams": sampling_params.GuidedDecodingParams,
    "RequestOutputKind": sampling_params.RequestOutputKind,
    "SamplingParams": sampling_params.SamplingParams,
    "StructuredOutputsParams": sampling_params.StructuredOutputsParams,
}
_LOGPROBS = {"Logprob": outputs.Logprob}
_VERSION = {"__version__": octavo.__version__}
_PARSER = {"FlexibleArgumentParser": FlexibleArgumentParser}
_METRICS = {
    name: getattr(metrics_reader, name)
    for name in ("Counter", "Gauge", "Histogram", "Metric", "Vector")
}
_CLEANUP = {"cleanup_dist_env_and_memory": cleanup_dist_env_and_memory}
_MODULES: dict[str, dict[str, Any]] = {
    "vllm": {
        "LLM": LLM,
        "SamplingParams": sampling_params.SamplingParams,
        "AsyncLLMEngine": async_llm.AsyncLLMEngine,
        **(_ENGINE | _ARGS | _INPUTS | _OUTPUTS | _VERSION),
    },
    "vllm.beam_search": {
        "BeamSearchOutput": outputs.BeamSearchOutput,
        "BeamSearchSequence": outputs.BeamSearchSequence,
    },
    "vllm.config": _CONFIG,
    "vllm.config.kv_events": _CONFIG,
    "vllm.config.kv_transfer": _CONFIG,
    "vllm.distributed": _CLEANUP,
    "vllm.distributed.parallel_state": _CLEANUP,
    "vllm.engine": {},
    "vllm.engine.arg_utils": _ARGS,
    "vllm.engine.async_llm_engine": _ASYNC_ENGINE,
    "vllm.engine.llm_engine": _ENGINE,
    "vllm.entrypoints": {},
    "vllm.entrypoints.llm": {"LLM": LLM},
    "vllm.inputs": _INPUTS,
    "vllm.logprobs": _LOGPROBS,
    "vllm.outputs": _OUTPUTS,
    "vllm.sampling_params": _SAMPLING,
    "vllm.sequence": _LOGPROBS,
    "vllm.utils": _PARSER,
    "vllm.utils.argparse_utils": _PARSER,
    "vllm.v1": {},
    "vllm.v1.engine": {},
    "vllm.v1.engine.async_llm": _ASYNC_ENGINE,
    "vllm.v1.engine.llm_engine": _ENGINE,
    "vllm.v1.metrics": {},
    "vllm.v1.metrics.reader": _METRICS,
    "vllm.version": _VERSION,
}


def install() -> None:
    """Makes `import vllm` mean Octavo in this process, whether vLLM is installed or not.

    The names of metrics begin with `vllm:` from now on, as scripts look for them.

    Raises:
        RuntimeError: vLLM itself has been imported already.
    """
    found = sys.modules.get("vllm")
    if found is not None and not getattr(found, "_is_octavo", False):
        raise RuntimeError("vLLM has been imported already; install octavo.compat.vllm before it.")
    llm_engine.LLMEngine.metrics_prefix = "vllm"
    for name, attributes in _MODULES.items():
        module = ModuleType(name, "Octavo, under vLLM's name.")
        module.__path__ = []  # a package, with no files
        module.__file__ = __file__  # errors of imports name it
        module.__spec__ = ModuleSpec(name, None, origin=__file__, is_package=True)
        module.__dict__.update(attributes, _is_octavo=True)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


def main(words: Sequence[str]) -> int:
    """Runs a script with its arguments; returns the exit status."""
    if not words or words[0].startswith("-"):
        print("usage: python -m octavo.compat.vllm SCRIPT [ARGUMENT ...]", file=sys.stderr)
        return 2
    script = words[0]
    if not Path(script).exists():
        print(f"error: there is no script {script}", file=sys.stderr)
        return 2
    install()
    sys.argv = list(words)
    sys.path[0] = str(Path(script).resolve().parent)  # as Python does with a script
    runpy.run_path(script, run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
