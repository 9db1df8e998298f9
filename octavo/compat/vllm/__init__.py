"""Runner of scripts for vLLM: `python -m octavo.compat.vllm script.py [arguments]`.

`install` provides Octavo's objects under the names of vLLM's modules. An import of any other name
of vLLM's fails with one sentence that describes the name and an alternative.
"""

from __future__ import annotations

import importlib
import runpy
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import ModuleType
from typing import Any

import octavo
from octavo import config, lora_request, lora_resolver, outputs, pooling_params, sampling_params
from octavo.compat import call_arguments as vllm_arguments
from octavo.compat.vllm import utils
from octavo.compat.vllm.absent import sentence
from octavo.compat.vllm.utils import FlexibleArgumentParser, cleanup_dist_env_and_memory
from octavo.config.engine_args import AsyncEngineArgs, EngineArgs
from octavo.errors import OctavoError
from octavo.frontend import async_llm, llm_engine, prompts
from octavo.llm import LLM
from octavo.observability import metrics_reader
from octavo.sampling.vllm_config import VllmConfig

_CONFIG = {
    "KVEventsConfig": config.KVEventsConfig,
    "KVTransferConfig": config.KVTransferConfig,
    "ProfilerConfig": utils.ProfilerConfig,
    "VllmConfig": VllmConfig,
}
_ENGINE = {"LLMEngine": llm_engine.LLMEngine}
_ASYNC_ENGINE = {"AsyncLLM": async_llm.AsyncLLM, "AsyncLLMEngine": async_llm.AsyncLLMEngine}
_ARGS = {"AsyncEngineArgs": AsyncEngineArgs, "EngineArgs": EngineArgs}
_INPUTS = {
    "EmbedsPrompt": prompts.EmbedsPrompt,
    "PromptType": prompts.Prompt,
    "TextPrompt": prompts.TextPrompt,
    "TokensPrompt": prompts.TokensPrompt,
}
_OUTPUTS = {
    "ClassificationOutput": outputs.ClassificationOutput,
    "ClassificationRequestOutput": outputs.ClassificationRequestOutput,
    "CompletionOutput": outputs.CompletionOutput,
    "EmbeddingOutput": outputs.EmbeddingOutput,
    "EmbeddingRequestOutput": outputs.EmbeddingRequestOutput,
    "PoolingOutput": outputs.PoolingOutput,
    "PoolingRequestOutput": outputs.PoolingRequestOutput,
    "RequestOutput": outputs.RequestOutput,
    "ScoringOutput": outputs.ScoringOutput,
    "ScoringRequestOutput": outputs.ScoringRequestOutput,
}
_POOLING = {"PoolingParams": pooling_params.PoolingParams}
_TASKS = {"PoolingTask": pooling_params.PoolingTask}
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
_LOGGERS = {
    "LoggingStatLogger": vllm_arguments.StatLogger,
    "AggregatedLoggingStatLogger": vllm_arguments.AggregatedStatLogger,
}
_MODULES: dict[str, dict[str, Any]] = {
    "vllm": {
        "LLM": LLM,
        "SamplingParams": sampling_params.SamplingParams,
        "AsyncLLMEngine": async_llm.AsyncLLMEngine,
        **(_ENGINE | _ARGS | _INPUTS | _OUTPUTS | _POOLING | _VERSION),
    },
    "vllm.beam_search": {
        "BeamSearchOutput": outputs.BeamSearchOutput,
        "BeamSearchSequence": outputs.BeamSearchSequence,
    },
    "vllm.benchmarks": {},
    "vllm.benchmarks.datasets": {
        "SampleRequest": utils.SampleRequest,
        "add_dataset_parser": utils.add_dataset_parser,
        "get_samples": utils.get_samples,
    },
    "vllm.config": _CONFIG,
    "vllm.config.kv_events": _CONFIG,
    "vllm.config.kv_transfer": _CONFIG,
    "vllm.config.profiler": _CONFIG,
    "vllm.distributed": _CLEANUP,
    "vllm.distributed.parallel_state": _CLEANUP,
    "vllm.engine": {},
    "vllm.engine.arg_utils": _ARGS,
    "vllm.engine.async_llm_engine": _ASYNC_ENGINE,
    "vllm.engine.llm_engine": _ENGINE,
    "vllm.entrypoints": {},
    "vllm.entrypoints.launchers": {},
    "vllm.entrypoints.launchers.launcher": {"serve_http": utils.serve_http},
    "vllm.entrypoints.llm": {"LLM": LLM},
    "vllm.entrypoints.serve": {},
    "vllm.entrypoints.serve.utils": {},
    "vllm.entrypoints.serve.utils.api_utils": {"with_cancellation": utils.with_cancellation},
    "vllm.envs": {},
    "vllm.inputs": _INPUTS,
    "vllm.logger": {"init_logger": utils.init_logger},
    "vllm.logprobs": _LOGPROBS,
    "vllm.lora": {},
    "vllm.lora.request": {"LoRARequest": lora_request.LoRARequest},
    "vllm.lora.resolver": {
        "LoRAResolver": lora_resolver.LoRAResolver,
        "LoRAResolverRegistry": lora_resolver.LoRAResolverRegistry,
    },
    "vllm.model_executor": {},
    "vllm.model_executor.model_loader": {"ShardedStateLoader": utils.ShardedStateLoader},
    "vllm.outputs": _OUTPUTS,
    "vllm.platforms": {"current_platform": utils.current_platform},
    "vllm.pooling_params": _POOLING,
    "vllm.sampling_params": _SAMPLING,
    "vllm.sequence": _LOGPROBS,
    "vllm.tasks": _TASKS,
    "vllm.transformers_utils": {},
    "vllm.transformers_utils.repo_utils": {"hf_api": utils.hf_api},
    "vllm.usage": {},
    "vllm.usage.usage_lib": {"UsageContext": utils.UsageContext},
    "vllm.utils": {**_PARSER, "random_uuid": utils.random_uuid},
    "vllm.utils.argparse_utils": _PARSER,
    "vllm.utils.network_utils": {
        "get_ip": utils.get_ip,
        "get_loopback_ip": utils.get_loopback_ip,
        "get_open_port": utils.get_open_port,
        "join_host_port": utils.join_host_port,
    },
    "vllm.utils.print_utils": {"print_embeddings": utils.print_embeddings},
    "vllm.utils.serial_utils": {"tensor2base64": utils.tensor2base64},
    "vllm.utils.system_utils": {"set_ulimit": utils.set_ulimit},
    "vllm.v1": {},
    "vllm.v1.core": {},
    "vllm.v1.core.kv_cache_utils": {"ExternalBlockHash": bytes | int},
    "vllm.v1.engine": {},
    "vllm.v1.engine.async_llm": _ASYNC_ENGINE,
    "vllm.v1.engine.llm_engine": _ENGINE,
    "vllm.v1.metrics": {},
    "vllm.v1.metrics.loggers": _LOGGERS,
    "vllm.v1.metrics.reader": _METRICS,
    "vllm.version": _VERSION,
}


_PROCESSORS = (
    "AddedRequest",
    "BatchUpdate",
    "LogitsProcessor",
    "MoveDirectionality",
    "MovedRequest",
    "RemovedRequest",
)
_WITH_TORCH: dict[str, dict[str, str]] = {
    "vllm.logits_process": {"LogitsProcessor": "RequestLogitsProcessor"},
    "vllm.v1.sample": {},
    "vllm.v1.sample.logits_processor": {
        name: name
        for name in (
            *_PROCESSORS,
            "AdapterLogitsProcessor",
            "RequestLogitsProcessor",
            "process_dict_updates",
        )
    },
    "vllm.v1.sample.logits_processor.builtin": {"process_dict_updates": "process_dict_updates"},
    "vllm.v1.sample.logits_processor.interface": {name: name for name in _PROCESSORS},
}
"""Modules with names that are imported from `_TORCH_MODULE` at first use, because that module
imports torch."""
_TORCH_MODULE = "octavo.sampling.vllm_logits_processors"
_NAMES: dict[str, Mapping[str, Any]] = {
    **_MODULES,
    **_WITH_TORCH,
}


class AbsentError(ModuleNotFoundError):
    """Import of a module of vLLM's that Octavo lacks."""


class AbsentNameError(AttributeError):
    """Use of an attribute of a vLLM module that Octavo lacks."""


class _Finder(MetaPathFinder):
    """Import finder that rejects modules of vLLM's that Octavo lacks, with a sentence."""

    def find_spec(self, name: str, path: object, target: object = None) -> None:
        """Raise AbsentError for a module of vLLM's; ignore any other module."""
        if name.startswith("vllm."):
            # No `name`: with one, Python would discard the error in `from module import attribute`.
            raise AbsentError(sentence(name, _NAMES))


def install() -> None:
    """Make `import vllm` import Octavo in this process, even if vLLM is installed.

    From then on metric names begin with `vllm:`, as scripts expect.

    Raises:
        RuntimeError: vLLM itself is already imported.
    """
    found = sys.modules.get("vllm")
    if found is not None and not getattr(found, "_is_octavo", False):
        raise RuntimeError(
            "vLLM is already imported; call octavo.compat.vllm.install before importing it."
        )
    llm_engine.LLMEngine.metrics_prefix = "vllm"
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    for name in _NAMES:
        module = ModuleType(name, "Octavo, under vLLM's name.")
        module.__path__ = []  # a package, with no files
        module.__file__ = __file__  # import errors show it
        module.__spec__ = ModuleSpec(name, None, origin=__file__, is_package=True)
        module.__dict__.update(_MODULES.get(name, {}), _is_octavo=True, __getattr__=_missing(name))
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)


def _missing(module: str) -> Any:
    """Return the `__getattr__` of a module."""

    def missing(name: str) -> Any:
        own_name = _WITH_TORCH.get(module, {}).get(name)
        if own_name is not None:
            return getattr(importlib.import_module(_TORCH_MODULE), own_name)
        if module == "vllm.envs" and name.startswith("VLLM_"):
            return utils.read_variable(name)
        if name.startswith("__"):  # Python itself looks these up
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        raise AbsentNameError(sentence(f"{module}.{name}", _NAMES))

    return missing


def main(words: Sequence[str]) -> int:
    """Run a script with its arguments and return the exit status."""
    if not words or words[0].startswith("-"):
        print("usage: python -m octavo.compat.vllm SCRIPT [ARGUMENT ...]", file=sys.stderr)
        return 2
    script = words[0]
    if not Path(script).exists():
        print(f"error: there is no script {script}", file=sys.stderr)
        return 2
    install()
    sys.argv = list(words)
    sys.path[0] = str(Path(script).resolve().parent)  # as Python does for a script
    in_process, in_thread = BaseProcess.run, threading.excepthook

    def run(self: BaseProcess) -> None:
        try:
            in_process(self)
        except Exception as error:
            if not _report(script, error):
                raise
            sys.exit(1)

    def report(failed: threading.ExceptHookArgs) -> None:
        if not _report(script, failed.exc_value):
            in_thread(failed)

    BaseProcess.run = run  # type: ignore[method-assign]  # for processes that the script forks
    threading.excepthook = report
    try:
        runpy.run_path(script, run_name="__main__")
    except Exception as error:
        if not _report(script, error):
            raise
        return 1
    finally:
        for thread in threading.enumerate():
            is_own = thread is threading.current_thread() or thread.name.startswith("octavo-")
            if not (thread.daemon or is_own):
                thread.join()  # Python waits for them as well; their errors are reported until then
        BaseProcess.run, threading.excepthook = in_process, in_thread  # type: ignore[method-assign]
    return 0


def _report(script: str, error: BaseException | None) -> bool:
    """Print the message of a known error with the line of the script; return False for others."""
    message = None if error is None else _explain(error)
    if error is None or message is None:
        return False
    lines = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == script]
    line = f"{script}:{lines[-1].lineno}: " if lines else ""
    print(f"{line}error: {message}", file=sys.stderr)
    return True


def _explain(error: BaseException) -> str | None:
    if isinstance(error, OctavoError | AbsentError | AbsentNameError):
        return str(error)
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"the package {error.name.partition('.')[0]} is not installed."
    # Errors of httpx, requests and OpenAI's client for a status of 400 or more.
    response = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    if response is None or status is None:
        return None
    try:
        said = response.json()["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return None
    return f"the server answers {status}: {said}"
