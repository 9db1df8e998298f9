"""Batches: files of requests that are answered in the background, and survive a restart.

One server process runs them. Each batch has a record (`ID.json`), which is replaced when its status
changes, and a journal of its answers (`ID.journal`) until they are in its output file. The ids and
times in answers are made of the batch's id and time, so a batch that was interrupted has the same
output as any other. Lines run with a rank below all other requests (`RequestOptions.background`),
a limited number of them at a time, and take turns with those of other batches.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import shutil
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec
from starlette.requests import Request

from octavo.errors import (
    EngineDeadError,
    NotFoundError,
    OctavoError,
    QueueFullError,
    RequestError,
)
from octavo.frontend.request_memory import leaves_room
from octavo.server.auth import tenant_of
from octavo.server.batch_input import BatchError, check_input, read_lines
from octavo.server.batch_journal import Journal
from octavo.server.batch_line import answer_line, parse_line
from octavo.server.errors import RouteError, UnavailableError, show
from octavo.server.file_answers import BatchStatus
from octavo.server.file_store import FileStore, StorageError, StoredFile, new_file_id
from octavo.server.middleware import RequestContext
from octavo.server.state import ServerState
from octavo.server.state_dir import write_file

logger = logging.getLogger(__name__)

WINDOW = 86400
"""Seconds after which a batch expires (completion_window="24h")."""
MAX_UNFINISHED = 100
# Most batches that are remembered. More are forgotten once they have ended.
_MAX_BATCHES = 1000
# Bytes of lines that are answered at a time, unless one line has more.
_MAX_LINE_BYTES = 32 * 2**20
_LINES_AT_ONCE = 64
# Seconds until another attempt of a line for which there was no room, or that the operator stopped.
# They double from the first value to the second.
_LINE_RETRY = 1.0
_LONGEST_RETRY = 30.0
# Seconds until another attempt to read or write the files of a batch, or to find room for them.
_DISK_RETRY = 10.0

FINISHED = ("failed", "completed", "expired", "cancelled")


class Batch(msgspec.Struct):
    """Record of a batch. Times are seconds since 1970."""

    id: str
    owner: str | None
    """Tenant of the API key that created it; None: a client without a key."""
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] | None = None
    output_expires_after: int | None = None
    status: BatchStatus = "validating"
    ending: Literal["completed", "expired", "cancelled"] | None = None
    """Status that follows once the output file is written."""
    errors: list[BatchError] = []
    model: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None

    @property
    def finished(self) -> bool:
        """True if the batch does not change any more."""
        return self.status in FINISHED


class BatchRunner:
    """Files and batches of a server.

    Args:
        state: the server.
    """

    def __init__(self, state: ServerState) -> None:
        self.state = state
        self._files: FileStore | None = None
        self._batches: dict[str, Batch] = {}
        self._jobs: dict[str, _Job] = {}
        self._folder = Path()
        self._temporary: str | None = None
        self._opening: asyncio.Task[None] | None = None
        self._stopped = False
        keys = [*state.config.api_key, *state.config.admin_key]
        self._keys: dict[str | None, str | None] = {tenant_of(key): key for key in keys}
        """API keys by owner."""
        if not state.config.api_key:
            self._keys[None] = None
        self.slots = _Slots(state.engine_config.scheduler.max_num_seqs)
        self.working = asyncio.Lock()
        """Lock for long work on a thread, so that many batches do not keep all threads busy."""
        self.without_room: Counter[str | None] = Counter()
        """Number of answers that wait for room among the files of their owner."""
        self._saving = asyncio.Lock()

    # Lifecycle

    async def open(self) -> None:
        """Read the stored files and batches, and continue the unfinished ones; only once.

        Raises:
            RequestError: this server has no files.
            OctavoError: the folder cannot be used.
        """
        if self.state.config.api_server_count > 1:
            raise RouteError(
                404,
                "/v1/files and /v1/batches need a server with one front end; start it without "
                "--api-server-count, or use octavo run-batch.",
            )
        if self._opening is None:
            self._opening = asyncio.create_task(self._open())
        try:
            await asyncio.shield(self._opening)
        except OSError as error:
            self._opening = None
            raise StorageError(error) from None

    async def _open(self) -> None:
        if self.state.state_dir is None:
            self._temporary = await asyncio.to_thread(tempfile.mkdtemp, prefix="octavo-files-")
            folder = Path(self._temporary)
            files, self._folder = folder / "files", folder / "batches"
            files.mkdir()
            self._folder.mkdir()
        else:
            files = self.state.state_dir.subfolder("files")
            self._folder = self.state.state_dir.subfolder("batches")
        self._files = await asyncio.to_thread(
            FileStore,
            files,
            self.state.config.max_file_bytes,
            several_owners=len(self.state.api_keys) > 1,
        )
        self._files.in_use = self._is_read
        found = await asyncio.to_thread(_load, self._folder)
        self._batches = {batch.id: batch for batch in sorted(found, key=lambda b: b.created_at)}
        for batch in self._batches.values():
            if not batch.finished:
                self._start(batch)

    def stop(self) -> None:
        """Stop answering lines; the batches continue when a server opens the folder again."""
        self._stopped = True
        for job in self._jobs.values():
            job.task.cancel()

    async def close(self) -> None:
        """Stop, and remove a temporary folder. It may be called twice."""
        self.stop()
        tasks = [job.task for job in self._jobs.values()]
        if self._opening is not None:
            tasks.append(self._opening)
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._temporary is not None:
            await asyncio.to_thread(shutil.rmtree, self._temporary, ignore_errors=True)
            self._temporary = None

    @property
    def files(self) -> FileStore:
        """The files; `open` must have been called."""
        assert self._files is not None
        return self._files

    # Batches

    def find(self, owner: str | None, batch_id: str) -> Batch:
        """Return an owner's batch.

        Raises:
            NotFoundError: the owner has no such batch; another owner may have it.
        """
        found = self._batches.get(batch_id)
        if found is None or found.owner != owner:
            raise NotFoundError(
                f"There is no batch {show(batch_id)}; GET /v1/batches lists those of this API key.",
                "batch_id",
                "batch_not_found",
            )
        return found

    def batches(self, owner: str | None) -> list[Batch]:
        """Return an owner's batches, the oldest first."""
        return [batch for batch in self._batches.values() if batch.owner == owner]

    async def create(
        self,
        owner: str | None,
        endpoint: str,
        file: StoredFile,
        metadata: dict[str, str] | None,
        output_expires_after: int | None,
    ) -> Batch:
        """Begin a batch.

        Raises:
            QueueFullError: too many batches are unfinished.
            StorageError: its record cannot be written.
        """
        unfinished = Counter(b.owner for b in self._batches.values() if not b.finished)
        several = len(self.state.api_keys) > 1
        free = MAX_UNFINISHED - unfinished.total()
        if not leaves_room(unfinished[owner] if several else 0, 1, free):
            raise QueueFullError(
                f"{unfinished.total()} batches are unfinished, {unfinished[owner]} of them of this "
                f"API key, and the limit is {MAX_UNFINISHED}; wait for their end, or cancel some.",
                60,
            )
        now = int(time.time())
        batch = Batch(
            f"batch_{uuid.uuid4().hex}", owner, endpoint, file.id, now, now + WINDOW, metadata
        )
        batch.output_expires_after = output_expires_after
        self._batches[batch.id] = batch
        try:
            await self.save(batch)
        except OSError as error:
            del self._batches[batch.id]
            raise StorageError(error) from None
        self._start(batch)
        await self._forget_oldest()
        return batch

    async def cancel(self, batch: Batch) -> None:
        """Begin to cancel a batch; lines that are answered stay answered.

        Raises:
            RequestError: it has ended.
            StorageError: its record cannot be written.
        """
        if batch.status == "cancelling":
            return
        if batch.status not in ("validating", "in_progress"):
            error = RequestError(
                f"{batch.id} is {batch.status} and cannot be cancelled.", "batch_id", "batch_ended"
            )
            error.status = 409
            raise error
        before = batch.status
        batch.status, batch.cancelling_at = "cancelling", int(time.time())
        try:
            await self.save(batch)
        except OSError as failed:
            if batch.status == "cancelling":
                batch.status, batch.cancelling_at = before, None
            raise StorageError(failed) from None
        if (job := self._jobs.get(batch.id)) is not None:
            job.cancelled.set()

    async def save(self, batch: Batch) -> None:
        """Write the record of a batch.

        Raises:
            OSError: it cannot be written.
        """
        async with self._saving:  # else an older record might be written last
            data = msgspec.json.encode(batch)
            await asyncio.to_thread(write_file, self._folder / f"{batch.id}.json", data)

    def journal_path(self, batch: Batch) -> Path:
        """Return the path of a batch's journal."""
        return self._folder / f"{batch.id}.journal"

    def has_key(self, owner: str | None) -> bool:
        """Return True if the server still accepts the key of an owner."""
        return owner in self._keys

    def key(self, owner: str | None) -> str | None:
        """Return the API key of an owner."""
        return self._keys[owner]

    def _start(self, batch: Batch) -> None:
        if not self._stopped:
            self._jobs[batch.id] = job = _Job(self, batch)
            job.task.add_done_callback(lambda _: self._jobs.pop(batch.id, None))

    def _is_read(self, file_id: str) -> bool:
        return any(b.input_file_id == file_id and not b.finished for b in self._batches.values())

    async def _forget_oldest(self) -> None:
        """Forget batches that have ended until the limit holds: the oldest of who has the most."""
        while len(self._batches) > _MAX_BATCHES:
            ended: dict[str | None, list[Batch]] = {}
            for batch in self._batches.values():
                if batch.finished:
                    ended.setdefault(batch.owner, []).append(batch)
            if not ended:
                return
            oldest, *_ = max(ended.values(), key=len)
            del self._batches[oldest.id]
            path = self._folder / f"{oldest.id}.json"
            await asyncio.to_thread(path.unlink, missing_ok=True)


def _load(folder: Path) -> list[Batch]:
    """Return the batches of a folder, and remove what no batch needs."""
    found = []
    for path in folder.glob("*.json"):
        try:
            batch = msgspec.json.decode(path.read_bytes(), type=Batch)
        except msgspec.MsgspecError:
            logger.warning("%s does not describe a batch, and is removed", path)
            path.unlink()
            continue
        found.append(batch)
    unfinished = {batch.id for batch in found if not batch.finished}
    for path in folder.iterdir():
        if path.suffix != ".json" and path.stem not in unfinished:
            path.unlink()
    return found


async def runner_of(request: Request) -> BatchRunner:
    """Return the open runner of the server that received a request.

    Raises:
        RequestError: the server has no files.
    """
    runner = request.app.state.batches
    assert isinstance(runner, BatchRunner)
    await runner.open()
    return runner


class _Slots:
    """Places for lines that are answered at the same time; batches that wait take turns.

    Args:
        count: number of lines.
    """

    def __init__(self, count: int) -> None:
        self._places = asyncio.Semaphore(count)
        self._nbytes = 0
        self._freed = asyncio.Event()

    async def acquire(self, nbytes: int) -> contextlib.ExitStack:
        """Wait for a place for a line of `nbytes` bytes; `close` of the result frees it."""
        await self._places.acquire()
        try:
            while self._nbytes and self._nbytes + nbytes > _MAX_LINE_BYTES:
                self._freed.clear()
                await self._freed.wait()
        except BaseException:
            self._places.release()
            raise
        self._nbytes += nbytes
        place = contextlib.ExitStack()
        place.callback(self._release, nbytes)
        return place

    def _release(self, nbytes: int) -> None:
        self._places.release()
        self._nbytes -= nbytes
        self._freed.set()


class _Job:
    """Work on a batch until it has ended, or the server stops.

    Args:
        runner: the runner.
        batch: the batch, in any unfinished state.
    """

    def __init__(self, runner: BatchRunner, batch: Batch) -> None:
        self.cancelled = asyncio.Event()
        self._runner = runner
        self._batch = batch
        self._appends: set[asyncio.Task[None]] = set()
        self._counted = 0
        if batch.status == "cancelling":
            self.cancelled.set()
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        batch = self._batch
        while True:
            try:
                await self._attempt()
                return
            except (EngineDeadError, UnavailableError):
                return  # the server stops
            except OSError as error:
                logger.error("batch %s waits for its files: %s", batch.id, error)
            except Exception:
                logger.exception("batch %s failed", batch.id)
                await self._fail([BatchError("server_error", "Internal server error.")])
                return
            await asyncio.sleep(_DISK_RETRY)

    async def _attempt(self) -> None:
        """Continue the batch from its record and its journal.

        Raises:
            OSError: a file cannot be read or written; another attempt may succeed.
            EngineDeadError, UnavailableError: the server stops.
        """
        batch, runner = self._batch, self._runner
        if not runner.has_key(batch.owner):
            message = "The server does not accept the API key of the batch any more."
            await self._fail([BatchError("invalid_api_key", message)])
            return
        if batch.status == "validating":
            await self._validate()
        if batch.finished:
            return
        journal = await asyncio.to_thread(Journal, runner.journal_path(batch))
        self._count(journal.nbytes)
        try:
            batch.completed = journal.num_good
            batch.failed = len(journal.places) - batch.completed
            lost = batch.ending == "completed" and len(journal.places) < batch.total
            if batch.ending is None or lost:
                ending = await self._answer_all(journal)
                now = int(time.time())
                batch.ending = ending
                if ending != "cancelled":
                    batch.status, batch.finalizing_at = "finalizing", now
                batch.output_file_id = batch.output_file_id or new_file_id()
                batch.error_file_id = batch.error_file_id or new_file_id()
                await runner.save(batch)
            await self._finish(journal)
        finally:
            self._count(0)
            journal.close()
        await asyncio.to_thread(runner.journal_path(batch).unlink, missing_ok=True)
        logger.info("batch %s is %s", batch.id, batch.status)

    def _count(self, nbytes: int) -> None:
        """Count the bytes of the journal among those of the owner's files."""
        self._runner.files.count(self._batch.owner, nbytes - self._counted)
        self._counted = nbytes

    async def _fail(self, errors: list[BatchError]) -> None:
        batch = self._batch
        batch.status, batch.failed_at, batch.errors = "failed", int(time.time()), errors
        with contextlib.suppress(OSError):  # a later server finds out again
            await self._runner.save(batch)

    async def _validate(self) -> None:
        batch, runner = self._batch, self._runner
        state = runner.state
        try:
            file = runner.files.find(batch.owner, batch.input_file_id)
        except NotFoundError as error:
            await self._fail([BatchError("file_not_found", error.message, None, "input_file_id")])
            return
        async with runner.working:
            checked = await asyncio.to_thread(
                check_input,
                runner.files.path(file.id),
                batch.endpoint,
                None if state.adapters.resolves else state.all_names,
                state.max_chat_bytes,
            )
        if checked.errors:
            await self._fail(checked.errors)
            return
        batch.total, batch.model = checked.num_lines, checked.model or state.model_names[0]
        if batch.status == "validating":  # else it was cancelled
            batch.status, batch.in_progress_at = "in_progress", int(time.time())
        await runner.save(batch)

    async def _answer_all(self, journal: Journal) -> Literal["completed", "expired", "cancelled"]:
        """Answer the lines without an answer until all have one, or the batch ends."""
        batch = self._batch
        try:
            await (await self._runner.state.get_engine()).wait_ready()
        except OctavoError as error:
            raise EngineDeadError(str(error)) from error
        work = asyncio.create_task(self._answer_lines(journal))
        cancelled = asyncio.create_task(self.cancelled.wait())
        try:
            await asyncio.wait(
                {work, cancelled},
                timeout=max(0.0, batch.expires_at - time.time()),
                return_when=asyncio.FIRST_COMPLETED,
            )
            if work.done():
                work.result()
                return "completed"
            return "cancelled" if cancelled.done() else "expired"
        finally:
            for task in (work, cancelled):
                task.cancel()
            await asyncio.gather(work, cancelled, return_exceptions=True)
            # Finish writing the answers that exist, even now.
            await asyncio.gather(*self._appends, return_exceptions=True)

    async def _answer_lines(self, journal: Journal) -> None:
        runner, batch = self._runner, self._batch
        path = runner.files.path(batch.input_file_id)
        lines = read_lines(path, runner.state.max_chat_bytes)
        tasks: set[asyncio.Task[None]] = set()
        try:
            while read := await asyncio.to_thread(_take, lines):
                for number, line in read:
                    if number in journal.places or line is None:
                        continue
                    for task in [task for task in tasks if task.done()]:
                        tasks.remove(task)
                        task.result()
                    place = await self._take_place(len(line))
                    task = asyncio.create_task(self._answer(number, line, journal, place))
                    task.add_done_callback(partial(_leave, place))
                    tasks.add(task)
            for task in tasks:
                await task
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _take_place(self, nbytes: int) -> contextlib.ExitStack:
        """Wait until a line of `nbytes` bytes may run; see `_Slots.acquire`.

        No line of an owner begins while answers of this owner wait for room.
        """
        runner = self._runner
        while True:
            place = await runner.slots.acquire(nbytes)
            if not runner.without_room[self._batch.owner]:
                return place
            place.close()
            await asyncio.sleep(_DISK_RETRY)

    async def _answer(
        self, number: int, line: bytes, journal: Journal, place: contextlib.ExitStack
    ) -> None:
        """Answer a line, and write the answer to the journal.

        Args:
            number: number of the line.
            line: the line.
            journal: journal of the batch.
            place: the line's place, which is freed early if the answer waits for room.
        """
        batch, runner = self._batch, self._runner
        request, request_id = parse_line(line), _digest(batch.id, number)
        retry = _LINE_RETRY
        while True:
            context = RequestContext(
                request_id,
                time.monotonic(),
                api_key=runner.key(batch.owner),
                background=True,
                created=batch.created_at,
            )
            try:
                answer = await answer_line(runner.state, request, context, runner)
                if answer.status != 503 and not context.is_aborted:
                    break
            except QueueFullError:
                pass
            await asyncio.sleep(retry)
            retry = min(2 * retry, _LONGEST_RETRY)
        good = answer.error is None
        data = msgspec.json.encode(
            {
                "id": f"batch_req_{request_id}",
                "custom_id": request.custom_id,
                "response": {
                    "status_code": answer.status,
                    "request_id": answer.request_id,
                    "body": msgspec.Raw(answer.body),
                },
                "error": None,
            }
        )
        await self._take_room(len(data), place)
        append = asyncio.create_task(self._append(journal, number, good, data))
        self._appends.add(append)
        append.add_done_callback(self._appends.discard)
        await asyncio.shield(append)

    async def _take_room(self, nbytes: int, place: contextlib.ExitStack) -> None:
        """Wait until the owner's files have room for an answer, and count its bytes.

        An answer that waits leaves its place to lines of others, who may have room.
        """
        if not self._has_room(nbytes):
            place.close()
            without_room, owner = self._runner.without_room, self._batch.owner
            without_room[owner] += 1
            try:
                while not self._has_room(nbytes):
                    await asyncio.sleep(_DISK_RETRY)
            finally:
                without_room[owner] -= 1
        self._count(self._counted + nbytes)

    def _has_room(self, nbytes: int) -> bool:
        """Return True if the owner's files have room for an answer."""
        try:
            self._runner.files.check_room(self._batch.owner, nbytes)
        except RequestError as error:
            logger.warning("batch %s waits for room: %s", self._batch.id, error)
            return False
        return True

    async def _append(self, journal: Journal, number: int, good: bool, data: bytes) -> None:
        batch = self._batch
        await journal.append(number, good, data)
        batch.completed += good
        batch.failed += not good

    async def _finish(self, journal: Journal) -> None:
        """Make files of the journal, and end the batch."""
        batch, files = self._batch, self._runner.files
        assert batch.ending is not None
        if batch.ending == "expired":
            batch.failed = batch.total - batch.completed
        kinds = [(True, "output", batch.output_file_id), (False, "error", batch.error_file_id)]
        written: list[str | None] = []
        for good, kind, file_id in kinds:
            assert file_id is not None
            async with self._runner.working:
                file = await asyncio.to_thread(self._write_file, journal, good, kind, file_id)
            if file.bytes:
                files.replace(file)
            written.append(file.id if file.bytes else None)
        ids = batch.output_file_id, batch.error_file_id
        batch.output_file_id, batch.error_file_id = written
        batch.status = batch.ending
        now = int(time.time())
        match batch.ending:
            case "completed":
                batch.completed_at = now
            case "expired":
                batch.expired_at = now
            case "cancelled":
                batch.cancelled_at = now
        try:
            await self._runner.save(batch)
        except OSError:
            batch.output_file_id, batch.error_file_id = ids
            batch.status = "cancelling" if batch.ending == "cancelled" else "finalizing"
            raise

    def _write_file(self, journal: Journal, good: bool, kind: str, file_id: str) -> StoredFile:
        """Write the output file or the error file; return its description."""
        batch, files = self._batch, self._runner.files
        path = files.path(file_id)
        with open(path, "wb") as stream:
            path.chmod(0o600)
            journal.write_to(stream, good)
            if batch.ending == "expired" and not good:
                self._write_expired(journal, stream)
            nbytes = stream.tell()
            stream.flush()
            os.fsync(stream.fileno())
        now = int(time.time())
        expires = batch.output_expires_after
        file = StoredFile(
            file_id,
            batch.owner,
            f"{batch.id}_{kind}.jsonl",
            "batch_output",
            nbytes,
            now,
            None if expires is None else now + expires,
        )
        if nbytes:
            files.describe(file)
        else:
            path.unlink()
        return file

    def _write_expired(self, journal: Journal, stream: BinaryIO) -> None:
        batch, runner = self._batch, self._runner
        path = runner.files.path(batch.input_file_id)
        error = {
            "code": "batch_expired",
            "message": "This request could not be answered before the batch expired.",
        }
        for number, line in read_lines(path, runner.state.max_chat_bytes):
            if number in journal.places or line is None:
                continue
            record = {
                "id": f"batch_req_{_digest(batch.id, number)}",
                "custom_id": parse_line(line).custom_id,
                "response": None,
                "error": error,
            }
            stream.write(msgspec.json.encode(record) + b"\n")


def _take(lines: Iterator[tuple[int, bytes | None]]) -> list[tuple[int, bytes | None]]:
    """Return the next lines, about a MiB."""
    taken, nbytes = [], 0
    for number, line in islice(lines, _LINES_AT_ONCE):
        taken.append((number, line))
        nbytes += len(line or b"")
        if nbytes > 2**20:
            break
    return taken


def _leave(place: contextlib.ExitStack, _: object) -> None:
    """Free the place of a line whose task has ended."""
    place.close()


def _digest(batch_id: str, number: int) -> str:
    """Return the id of a line's request: the same after a restart."""
    return hashlib.blake2b(f"{batch_id}-{number}".encode(), digest_size=16).hexdigest()
