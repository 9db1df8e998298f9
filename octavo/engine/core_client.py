"""How a front end reaches an engine core in another process.

Offline use needs no client: `LLM` holds its `EngineCore` directly.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from octavo.config import EngineConfig
from octavo.engine import core_process as wire
from octavo.errors import EngineDeadError, make_error
from octavo.messages import EngineCoreOutputs, EngineCoreRequest, UtilityCall, UtilityResult


class AsyncMPClient:
    """Starts an engine-core process and talks to it from an asyncio event loop.

    Args:
        config: the engine's settings.
        model_path: the model's folder.
        default_batched_tokens: see `EngineCore`.
        request_memory: see `EngineCore`.
        log_level: least level that the process logs.
        log_format: "text" or "json".
    """

    def __init__(
        self,
        config: EngineConfig,
        model_path: Path,
        *,
        default_batched_tokens: int,
        request_memory: int,
        log_level: str,
        log_format: str,
    ) -> None:
        self._folder = tempfile.mkdtemp(prefix="octavo-")
        self._context = zmq.asyncio.Context()
        self._input = self._context.socket(zmq.PUSH)
        self._output = self._context.socket(zmq.PULL)
        addresses = [f"ipc://{self._folder}/{name}" for name in ("input", "output")]
        self._input.set_hwm(0)  # requests may queue up while the process starts
        self._input.connect(addresses[0])
        self._output.bind(addresses[1])
        self._encoder = msgspec.msgpack.Encoder()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count()
        self.ready: asyncio.Future[wire.CoreReady] = asyncio.get_running_loop().create_future()
        """Result once the model is loaded; `EngineDeadError` if the start failed."""

        setup = msgspec.msgpack.encode(
            wire.CoreProcessSetup(
                config=config,
                model_path=str(model_path),
                default_batched_tokens=default_batched_tokens,
                request_memory=request_memory,
                input_address=addresses[0],
                output_address=addresses[1],
                log_level=log_level,
                log_format=log_format,
            )
        )
        self.process = subprocess.Popen(
            [sys.executable, "-m", "octavo.engine.core_process"], stdin=subprocess.PIPE
        )
        assert self.process.stdin is not None
        # The pipe stays open: its end tells the child that this process is gone. A child that
        # has died already is found by `get_output`.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(len(setup).to_bytes(4, "little") + setup)
            self.process.stdin.flush()

    async def get_output(self) -> EngineCoreOutputs:
        """The next step's outputs.

        Raises:
            EngineDeadError: with the root cause, when the process has ended.
        """
        outputs_decoder = msgspec.msgpack.Decoder(EngineCoreOutputs)
        while True:
            if not await self._output.poll(timeout=500):
                if (code := self.process.poll()) is not None and not await self._output.poll(0):
                    raise EngineDeadError(_describe_exit(code))
                continue
            kind, payload = await self._output.recv_multipart()
            if kind == wire.OUTPUTS:
                return outputs_decoder.decode(payload)
            if kind == wire.READY:
                self.ready.set_result(msgspec.msgpack.decode(payload, type=wire.CoreReady))
            elif kind == wire.RESULT:
                self._finish_call(msgspec.msgpack.decode(payload, type=UtilityResult))
            elif kind == wire.DEAD:
                raise EngineDeadError(msgspec.msgpack.decode(payload, type=wire.CoreDead).error)

    async def add_request(self, request: EngineCoreRequest) -> None:
        """Hands a request to the core."""
        await self._send(wire.ADD, request)

    async def abort_requests(self, request_ids: list[str]) -> None:
        """Ends requests in the core."""
        if request_ids:
            await self._send(wire.ABORT, request_ids)

    async def call_utility(self, method: str, *args: Any) -> Any:
        """Calls a utility method of the core and returns its (plain) result.

        Raises:
            OctavoError: what the method raised; of the same class if it is one of Octavo's.
        """
        call_id = next(self._call_ids)
        future = self._calls[call_id] = asyncio.get_running_loop().create_future()
        await self._send(wire.UTILITY, UtilityCall(call_id, method, list(args)))
        return await future

    def fail_calls(self, error: Exception) -> None:
        """Fails everything that waits for an answer of the core."""
        for future in [self.ready, *self._calls.values()]:
            if not future.done():
                future.set_exception(error)
        self._calls.clear()

    async def shutdown(self, timeout: float = 5.0) -> None:
        """Ends the process: asks it to, then makes it. May be called twice."""
        if self._context.closed:
            return
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            await asyncio.to_thread(self.process.wait, timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            await asyncio.to_thread(self.process.wait)
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _send(self, kind: bytes, message: object) -> None:
        await self._input.send_multipart([kind, self._encoder.encode(message)])

    def _finish_call(self, result: UtilityResult) -> None:
        future = self._calls.pop(result.call_id, None)
        if future is None or future.done():
            return
        if result.error is not None:
            future.set_exception(make_error(result.error_kind, result.error))
        else:
            future.set_result(result.value)


def _describe_exit(code: int) -> str:
    if code < 0:
        name = signal.Signals(-code).name
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return f"the engine process was ended by {name}{hint}"
    return f"the engine process ended with status {code}"
