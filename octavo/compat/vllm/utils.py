"""Helpers that scripts take from vLLM's modules, beside its engine."""

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
from octavo.errors import UnsupportedError
from octavo.models.weights import SHARDED_PATTERN
from octavo.system.device import trim_memory
from octavo.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch

_KEEP_ALIVE_SECONDS = 5
_FILES = 65535


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An argument parser whose flags may have underscores for dashes: vLLM's.

    Of two flags with one name the later counts: Octavo's settings have names that a script may
    need for its own flags.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"conflict_handler": "resolve", **kwargs})

    def parse_known_args(  # type: ignore[override]  # its overloads
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        """See `argparse.ArgumentParser`."""
        words = list(sys.argv[1:] if args is None else args)
        return super().parse_known_args([_with_dashes(word) for word in words], namespace)

    def check_port(self, value: str) -> int:
        """Return the port that a flag's value names."""
        port = int(value) if value.isdecimal() else 0
        if not 1024 <= port <= 65535:
            raise argparse.ArgumentTypeError(f"{value!r} is no port from 1024 to 65535")
        return port


def _with_dashes(word: str) -> str:
    if not word.startswith("--"):
        return word
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value


def cleanup_dist_env_and_memory(shutdown_ray: bool = False) -> None:
    """Give memory of unused engines back to the system."""
    gc.collect()
    trim_memory()


class Logger(logging.LoggerAdapter[logging.Logger]):
    """A logger that can also log a message only once: vLLM's."""

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
    """Return a tensor in the form in which requests carry prompt embeddings."""
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
    """What a vLLM engine is used for; Octavo reports it to no one."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"


class ProfilerConfig(dict[str, Any]):
    """vLLM's settings of profiles, as `LLM(profiler_config=...)` takes them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(settings)


class ShardedStateLoader:
    """The names of files that scripts give to `save_sharded_state`."""

    DEFAULT_PATTERN = TP_ONLY_PATTERN = SHARDED_PATTERN
    PP_AND_TP_PATTERN = "model-pp-{pp_rank}-tp-{tp_rank}-part-{part}.safetensors"


class Platform:
    """The device that Octavo computes with by default: vLLM's `current_platform`."""

    @property
    def device_type(self) -> str:
        """cpu or cuda."""
        from octavo.platforms.registry import get_platform

        return get_platform("auto").name

    def is_cpu(self) -> bool:
        """Return whether the device is the processor."""
        return self.device_type == "cpu"

    def is_cuda(self) -> bool:
        """Return whether the device is an NVIDIA GPU."""
        return self.device_type == "cuda"

    def is_cuda_alike(self) -> bool:
        """Return whether the device is a GPU."""
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
        """Seed Python's, numpy's and torch's random numbers; Octavo's depend on none of these."""
        if seed is not None:
            import numpy as np
            import torch

            random.seed(seed)
            np.random.seed(seed)
            torch.manual_seed(seed)


current_platform = Platform()


def read_variable(name: str) -> Any:
    """Return a variable of vLLM's environment, as `vllm.envs` has it.

    Raises:
        AttributeError: it is not set, and has no default here.
    """
    if name == "VLLM_HTTP_TIMEOUT_KEEP_ALIVE":
        return int(os.environ.get(name, _KEEP_ALIVE_SECONDS))
    if name in os.environ:
        value = os.environ[name]
        return int(value) if value.lstrip("-").isdecimal() else value
    raise AttributeError(
        f"vllm.envs.{name} is a variable of vLLM's environment, which is not set, and Octavo has "
        "no default for it; docs/vllm.md has the variables that Octavo reads."
    )


def with_cancellation(handler: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """Return a FastAPI handler that is cancelled when its client goes away."""
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
    """Return a coroutine that serves an application until the process is told to end.

    Raises:
        UnsupportedError: certificates are to be read again while it runs.
    """
    import uvicorn

    if enable_ssl_refresh:
        raise UnsupportedError("enable_ssl_refresh is not supported; put a proxy in front.")
    server = uvicorn.Server(uvicorn.Config(app, **settings))
    return server.serve(None if sock is None else [sock])


@dataclass
class SampleRequest:
    """A request of a data set: vLLM's form."""

    prompt: str
    prompt_len: int
    expected_output_len: int
    multi_modal_data: None = None


def add_dataset_parser(parser: argparse.ArgumentParser) -> None:
    """Add the flags of data sets; they are those of `octavo bench`."""
    add_dataset_arguments(parser)


def get_samples(args: argparse.Namespace, tokenizer: Any) -> list[SampleRequest]:
    """Return the requests that the flags of `add_dataset_parser` ask for.

    Args:
        args: the flags.
        tokenizer: Octavo's, or one of the library transformers.

    Raises:
        ConfigError, DatasetError: a flag or the file is wrong.
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
