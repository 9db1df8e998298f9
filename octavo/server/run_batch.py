"""`octavo run-batch`: a file of requests in OpenAI's batch format, and a file of the answers.

Each line is answered as the server would answer it. A wrong line gets an error as its answer, and
the others continue. Answers are written as they finish, in the order of the requests.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
import time
import uuid
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from octavo.config import EngineConfig, ServerConfig
from octavo.errors import ConfigError, EngineDeadError, QueueFullError, RequestError
from octavo.server.batch_line import (
    BatchLine,
    LineAnswer,
    LineError,
    answer_line,
    failed,
    parse_line,
)
from octavo.server.errors import UnavailableError, error_detail
from octavo.server.middleware import RequestContext
from octavo.server.run import engine_processes
from octavo.server.serve import start_engine
from octavo.server.state import ServerState
from octavo.system.logs import setup_logging

logger = logging.getLogger(__name__)

# Interval of retries of a line that the server rejects for lack of capacity.
_RETRY_SECONDS = 0.2


def run_batch(
    config: ServerConfig, engine_config: EngineConfig, input_file: str, output_file: str
) -> int:
    """Answer all lines of a file; return the exit status.

    Args:
        config: settings of the server that affect answers.
        engine_config: settings of the engine.
        input_file: lines of JSON: custom_id, method, url, body.
        output_file: file for an answer to each line.

    Raises:
        ConfigError: a file cannot be read or written.
        OctavoError: the engine failed; the message has the root cause.
    """
    setup_logging(config.log_level, config.log_format)
    source, target = Path(input_file), Path(output_file)
    if target.exists() and source.exists() and source.samefile(target):
        raise ConfigError(f"output_file={output_file!r} is the input file; name another one.")
    try:
        lines = source.open("rb")
    except OSError as error:
        raise ConfigError(f"input_file={input_file!r} cannot be read: {error.strerror}.") from None
    with lines:
        try:
            answers = _open_private(target)
        except OSError as error:
            raise ConfigError(
                f"output_file={output_file!r} cannot be written: {error.strerror}."
            ) from None
        with answers:
            processes = engine_processes(config)
            state = ServerState(
                config, engine_config, lambda: start_engine(config, engine_config, processes)
            )
            asyncio.run(_answer_all(state, lines, answers))
    return 0


def _open_private(path: Path) -> BinaryIO:
    """Open a file for writing that only this user can read, as it holds answers.

    Raises:
        OSError: the file cannot be written, or belongs to another user.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        if stat.S_ISREG(os.fstat(descriptor).st_mode):  # an older file may have other permissions
            os.fchmod(descriptor, 0o600)
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "wb")


async def _answer_all(state: ServerState, lines: BinaryIO, answers: BinaryIO) -> None:
    state.start()
    try:
        await (await state.get_engine()).wait_ready()
        batch = _Batch(state, answers)
        for number, line in _numbered(lines):
            await batch.add(number, line)
        await batch.finish()
        logger.info("batch finished", extra={"lines": batch.num_lines, "failed": batch.num_failed})
    finally:
        await state.close()


def _numbered(lines: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Return the lines that are not blank, with their numbers from 1."""
    return ((number, line) for number, line in enumerate(lines, 1) if line.strip())


class _Batch:
    """Requests in flight: at most twice the number that the engine computes at once."""

    def __init__(self, state: ServerState, answers: BinaryIO) -> None:
        self.num_lines = 0
        self.num_failed = 0
        self._state = state
        self._answers = answers
        self._most = 2 * state.engine_config.scheduler.max_num_seqs
        self._tasks: deque[asyncio.Task[dict[str, Any]]] = deque()
        self._num_asking = 0

    async def add(self, number: int, line: bytes) -> None:
        """Begin to answer a line, after waiting for capacity."""
        while len(self._tasks) >= self._most:
            await self._write_first()
        self._tasks.append(asyncio.create_task(self._answer(number, line)))

    async def finish(self) -> None:
        """Wait for all answers."""
        while self._tasks:
            await self._write_first()

    async def _write_first(self) -> None:
        answer = await self._tasks.popleft()
        if answer["error"] is not None and self._state.failure is not None:
            raise self._state.failure
        self.num_lines += 1
        self.num_failed += answer["error"] is not None
        self._answers.write(msgspec.json.encode(answer) + b"\n")
        self._answers.flush()

    async def _answer(self, number: int, line: bytes) -> dict[str, Any]:
        """Return the answer to a line, also for a wrong line."""
        try:
            request = parse_line(line)
        except LineError as wrong:
            error = error_detail(RequestError(f"line {number} of the input {wrong.message}"))
            custom_id = wrong.custom_id
            return {"id": _new_id(), "custom_id": custom_id, "response": None, "error": error}
        answer = await self._ask(request)
        return {
            "id": _new_id(),
            "custom_id": request.custom_id,
            "response": {
                "status_code": answer.status,
                "request_id": answer.request_id,
                "body": msgspec.Raw(answer.body),
            },
            "error": answer.error,
        }

    async def _ask(self, request: BatchLine) -> LineAnswer:
        """Return the answer to a request; retry a rejected one after others have finished."""
        while True:
            self._num_asking += 1
            context = RequestContext(uuid.uuid4().hex, time.monotonic())
            try:
                answer = await answer_line(self._state, request, context)
                if answer.status != 429 or self._num_asking == 1:  # its deadline may be met later
                    return answer
            except QueueFullError as full:
                if self._num_asking == 1:  # nothing will make room
                    return failed(context.request_id, full)
            except (EngineDeadError, UnavailableError) as error:
                return failed(context.request_id, error)
            finally:
                self._num_asking -= 1
            await asyncio.sleep(_RETRY_SECONDS)


def _new_id() -> str:
    return f"batch_req_{uuid.uuid4().hex}"
