"""Helpers that scripts import from vLLM's modules, except its engine."""

from __future__ import annotations

import argparse
import base64
import enum
import functools
import gc
import io
import logging
import os
import random
import resource
import socket
import sys
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octavo.bench.datasets import add_dataset_arguments, load_dataset
from octavo.checkpoints.sharded_state import SHARDED_PATTERN
from octavo.errors import UnsupportedError
from octavo.system.device import trim_memory
from octavo.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch
    from huggingface_hub import HfApi

_KEEP_ALIVE_SECONDS = 5
_FILES = 65535


class FlexibleArgumentParser(argparse.ArgumentParser):
    """Argument parser that accepts underscores for dashes in flags, like vLLM's.

    The later of two flags with one name overrides the earlier one, because Octavo's settings may
    have the names of a script's own flags.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"conflict_handler": "resolve", **kwargs})

    def parse_known_args(  # type: ignore[override]  # its overloads
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """Parse the arguments as `argparse.ArgumentParser` does."""
        words = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args([_with_dashes(word) for word in words], namespace)

    def check_port(self, value: str) -> int:
        """Return the port that a flag's value names."""
        port = int(value) if value.isdecimal() else 0
        if not 1024 <= port <= 65535:
            raise argparse.ArgumentTypeError(f"{value!r} is not a port from 1024 to 65535")
        return port


def _with_dashes(word: str) -> str:
    if not word.startswith("--"):
        return word
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Return the memory of unused engines to the system."""
    gc.collect()
    trim_memory()


class Logger(logging.LoggerAdapter[logging.Logger]):
    """Logger that can also log a message only once, like vLLM's."""

    def debug_once(self, message: str, *args: Any) -> None:
        """Log a debug message the first time."""
        self._log_once(logging.DEBUG, message, args)

    def info_once(self, message: str, *args: Any) -> None:
        """Log a message the first time."""
        self._log_once(logging.INFO, message, args)

    def warning_once(self, message: str, *args: Any) -> None:
        """Log a warning the first time."""
        self._log_once(logging.WARNING, message, args)

    def _log_once(self, level: int, message: str, args: tuple[Any, ...]) -> None:
        said = (self.logger.name, level, message, repr(args))
        if said not in _SAID:
            _SAID.add(said)
            self.log(level, message, *args)


_SAID: set[tuple[str, int, str, str]] = set()


def init_logger(name: str) -> Logger:
    """Return the logger of a module."""
    return Logger(logging.getLogger(name), {})


def hf_api() -> HfApi:
    """Return a client of the Hugging Face Hub."""
    from huggingface_hub import HfApi

    return HfApi()


def get_ip() -> str:
    """Return this machine's address in its network; 127.0.0.1 without one."""
    for family, far in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with socket.socket(family, socket.SOCK_DGRAM) as sock:
            try:
                sock.connect((far, 9))  # sends nothing
                return str(sock.getsockname()[0])
            except OSError:
                pass
    return "127.0.0.1"


def get_loopback_ip() -> str:
    """Return the address by which this machine reaches itself."""
    return "127.0.0.1"


def get_open_port() -> int:
    """Return a port at which no process listens."""
    with socket.socket() as sock:
        sock.bind(("", 0))
        return int(sock.getsockname()[1])


def join_host_port(host: str, port: int) -> str:
    """Return `host:port`, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def tensor2base64(tensor: torch.Tensor) -> str:
    """Return a tensor as base64 text: the encoding of prompt embeddings in requests."""
    import torch

    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


def random_uuid() -> str:
    """Return a new random id: 32 hexadecimal digits."""
    return uuid.uuid4().hex


def set_ulimit(target_soft_limit: int = _FILES) -> None:
    """Raise this process' limit of open files, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        target_soft_limit = min(target_soft_limit, hard)
    if soft < target_soft_limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (target_soft_limit, hard))


class UsageContext(enum.StrEnum):
    """Kinds of use of an engine in vLLM; Octavo does not report them."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"


class ProfilerConfig(dict[str, Any]):
    """Profiler settings in vLLM's form, for `LLM(profiler_config=...)`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(settings)


class ShardedStateLoader:
    """The names of files that scripts give to `save_sharded_state`."""

    DEFAULT_PATTERN = TP_ONLY_PATTERN = SHARDED_PATTERN
    PP_AND_TP_PATTERN = "model-pp-{pp_rank}-tp-{tp_rank}-part-{part}.safetensors"


class Platform:
    """Octavo's default device, with the interface of vLLM's `current_platform`."""

    @property
    def device_type(self) -> str:
        """Name of the device: cpu or cuda."""
        from octavo.platforms.registry import get_platform

        return get_platform("auto").name

    def is_cpu(self) -> bool:
        """Return True if the device is a CPU."""
        return self.device_type == "cpu"

    def is_cuda(self) -> bool:
        """Return True if the device is an NVIDIA GPU."""
        return self.device_type == "cuda"

    def is_cuda_alike(self) -> bool:
        """Return True if the device is a GPU."""
        return self.is_cuda()

    def is_rocm(self) -> bool:
        """Return False: AMD GPUs are not supported."""
        return False

    def is_tpu(self) -> bool:
        """Return False: TPUs are not supported."""
        return False

    def is_xpu(self) -> bool:
        """Return False: Intel GPUs are not supported."""
        return False

    def device_count(self) -> int:
        """Return the number of GPUs; 0 on a CPU."""
        if self.is_cpu():
            return 0
        import torch

        return torch.cuda.device_count()

    def seed_everything(self, seed: int | None) -> None:
        """Seed the random numbers of Python, numpy and torch; Octavo's do not depend on them."""
        if seed is not None:
            import numpy as np
            import torch

            random.seed(seed)
            np.random.seed(seed)
            torch.manual_seed(seed)


current_platform = Platform()


def read_variable(name: str) -> Any:
    """Return an environment variable of vLLM's, as `vllm.envs` does.

    Raises:
        AttributeError: the variable is not set and has no default.
    """
    if name == "VLLM_HTTP_TIMEOUT_KEEP_ALIVE":
        return int(os.environ.get(name, _KEEP_ALIVE_SECONDS))
    if name in os.environ:
        value = os.environ[name]
        return int(value) if value.lstrip("-").isdecimal() else value
    raise AttributeError(
        f"vllm.envs.{name} is an environment variable that is not set and has no default in "
        "Octavo; docs/vllm.md lists the variables that Octavo reads."
    )


def with_cancellation(handler: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Return a FastAPI handler that is cancelled if its client disconnects."""
    import asyncio

    @functools.wraps(handler)
    async def run(*args: Any, **kwargs: Any) -> Any:
        request = kwargs.get("raw_request") or args[1]

        async def wait_for_disconnect() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass

        answer = asyncio.ensure_future(handler(*args, **kwargs))
        gone = asyncio.ensure_future(wait_for_disconnect())
        done, pending = await asyncio.wait([answer, gone], return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        return answer.result() if answer in done else None

    return run


async def serve_http(
    app: Any,
    sock: socket.socket | None = None,
    enable_ssl_refresh: bool = False,
    **settings: Any,
) -> Coroutine[Any, Any, None]:
    """Return a coroutine that serves an application until a signal stops the process.

    Raises:
        UnsupportedError: `enable_ssl_refresh` is set.
    """
    import uvicorn

    if enable_ssl_refresh:
        raise UnsupportedError(
            "enable_ssl_refresh is not supported; use a proxy in front of the server."
        )
    server = uvicorn.Server(uvicorn.Config(app, **settings))
    return server.serve(None if sock is None else [sock])


@dataclass
class SampleRequest:
    """Request of a data set, in vLLM's form."""

    prompt: str
    prompt_len: int
    expected_output_len: int
    multi_modal_data: None = None


def add_dataset_parser(parser: argparse.ArgumentParser) -> None:
    """Add the flags for data sets, as in `octavo bench`."""
    add_dataset_arguments(parser)


def get_samples(args: argparse.Namespace, tokenizer: Any) -> list[SampleRequest]:
    """Return the requests of the data set that the flags select.

    Args:
        args: parsed flags of `add_dataset_parser`.
        tokenizer: tokenizer of Octavo, or of the library transformers.

    Raises:
        ConfigError: a flag is wrong.
        DatasetError: the file is wrong.
    """
    own = tokenizer if isinstance(tokenizer, Tokenizer) else _own_tokenizer(tokenizer)
    samples = []
    for request in load_dataset(args, own, own.vocab_size):
        ids = request.prompt_token_ids
        prompt = own.decode(ids or []) if request.prompt is None else request.prompt
        samples.append(
            SampleRequest(
                prompt, len(own.encode(prompt) if ids is None else ids), request.max_tokens
            )
        )
    return samples


def _own_tokenizer(tokenizer: Any) -> Tokenizer:
    from octavo.models.hub import resolve_model

    return Tokenizer.from_folder(resolve_model(tokenizer.name_or_path))


def print_embeddings(embeds: Sequence[float], prefix: str = "Embeddings") -> None:
    """Print the first numbers of a vector, and their number."""
    shown = ", ".join(map(str, embeds[:4])) + (", ..." if len(embeds) > 4 else "")
    print(f"{prefix}: [{shown}] (size={len(embeds)})")
