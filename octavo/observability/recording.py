"""Recording of an engine: its requests, decisions and answers.

A file is a sequence of frames: a mark, length, checksum and time, and some records as msgpack.
Front end and engine core append to the same file, each frame with one write. So the records of a
killed process stay readable; a truncated frame is skipped. A dedicated thread writes. If the disk
is too slow, records are dropped, and no process waits.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import hmac
import logging
import mmap
import os
import queue
import secrets
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, TypeAlias

import msgspec

from octavo.errors import ConfigError, OctavoError, reason_of
from octavo.messages import EngineCoreOutput, EngineCoreRequest, FinishReason
from octavo.sampling_params import SamplingParams

logger = logging.getLogger(__name__)

FORMAT = 2
"""Format of new files. Format 1, whose requests have no `RequestOptions`, can be read."""
_MARK = b"\xabOCT"
_HEADER = struct.Struct("<4sIId")
"""Mark, bytes of the records, CRC-32 of time and records, seconds since 1970."""
_TIME = struct.Struct("<d")
# Interval between writes of the front end, in seconds: a frame costs the same for many records.
_INTERVAL = 0.05
# Maximum number of records that wait for the disk; further ones are dropped.
_MOST_PENDING = 20_000
# Maximum size of a frame, except for a single larger record.
_FRAME_NBYTES = 2**20
# Limits of the copies that are kept when an engine dies: seconds, bytes, and files.
_TAIL_SECONDS = 10.0
_TAIL_NBYTES = 16 * 2**20
_MOST_TAILS = 10

PromptsKept: TypeAlias = Literal["full", "hash"]


class RecordSettings(msgspec.Struct, frozen=True):
    """Settings of a recording."""

    path: str
    prompts: PromptsKept = "full"
    max_bytes: int = 2**30
    """Maximum size of both files together; see `Recorder`."""


class Head(msgspec.Struct, tag="head", array_like=True, frozen=True):
    """First record of each file; repeated when the engine's plan is known."""

    format: int
    """Format of the file: `FORMAT`."""
    id: str
    """Id of the recording: all its files have the same one."""
    created: float
    build: dict[str, str]
    config: dict[str, Any]
    """`EngineConfig` as plain values."""
    model: str
    """Hash by `octavo.checkpoints.identity.model_hash`."""
    prompts: PromptsKept
    num_blocks: int | None = None
    """Number of blocks of the KV cache; None: not known yet."""
    max_model_len: int | None = None
    """Maximum number of tokens of a request; None: not known yet."""


class Arrival(msgspec.Struct, tag="arrival", array_like=True):
    """Request, as the front end sends it to the core. It includes its seed."""

    request: EngineCoreRequest
    params: SamplingParams
    prompt_hash: str | None = None
    """SHA-256 of the prompt, which is then absent from `request`."""
    num_prompt_tokens: int = 0
    """Number of tokens of an absent prompt."""


class Outputs(msgspec.Struct, tag="outputs", array_like=True):
    """Results of a step, as the front end received them."""

    time: float
    """Time of the step's end."""
    outputs: list[EngineCoreOutput]


class End(msgspec.Struct, tag="end", array_like=True):
    """End of an answer: it is complete, or was aborted."""

    time: float
    request_id: str
    """Id in the core: each of n answers has a separate one."""
    reason: FinishReason
    stop_reason: int | str | None
    num_tokens: int
    """Number of computed tokens that the caller receives."""


class StepRequest(msgspec.Struct, array_like=True):
    """Part of one request in a step, as in `ScheduledRequest`."""

    req_id: str
    num_tokens: int
    num_drafts: int
    num_computed_tokens: int | None
    """Tokens found in the prefix cache at the start or, after a preemption, the restart."""


class StepEnd(msgspec.Struct, array_like=True):
    """Duration of a step."""

    number: int
    seconds: float
    """Seconds since the step could begin: it was submitted, and the step before it had ended."""
    host_seconds: float | None
    """Work of the engine's thread since the last result, without waits; None: it was idle."""


class Step(msgspec.Struct, tag="step", array_like=True):
    """Decision of the scheduler, recorded before the step is computed."""

    number: int
    """Number of the step, from 1 for each engine process."""
    time: float
    added: list[str]
    """Requests that the core received since the step before; one entry also for n > 1."""
    aborted: list[str]
    requests: list[StepRequest]
    freed: list[str]
    """Requests that left their rows: finished, or preempted."""
    blocks_to_copy: list[tuple[int, int]]
    ended: list[StepEnd] = []
    """Steps that have ended since the step before."""
    block_map: bytes = b""
    """Packed `BlockMap` after the scheduling of the step; most steps have none."""


class Died(msgspec.Struct, tag="died", array_like=True):
    """Death of the engine process."""

    time: float
    reason: str


class Lost(msgspec.Struct, tag="lost", array_like=True):
    """Gap in the records: the disk was too slow for them, or one could not be written."""

    count: int


Record: TypeAlias = Head | Arrival | Outputs | End | Step | Died | Lost


class Recorder:
    """Writer of a recording.

    The newest `max_bytes` of a recording are kept, in two files: when FILE reaches half of that, it
    becomes FILE.1 and a new one begins. Only the owner can read the files. When an engine dies, the
    last seconds are copied to FILE.crash-1 to -10, in turn.

    Args:
        path: FILE. A file of an earlier run becomes FILE.1.
        head: first record of each file. None: another process has begun the recording, and this
            one appends to it.
        max_bytes: maximum size of both files together.

    Raises:
        ConfigError: the file cannot be written, or a file to replace is not a recording or belongs
            to another server.
    """

    def __init__(self, path: Path, head: Head | None = None, max_bytes: int = 2**30) -> None:
        self._path = path
        self._head = head
        self._max_file = max_bytes // 2
        self._num_lost = 0
        """Number of dropped records since the last accepted one."""
        self._num_tails = 0
        self._secret = secrets.token_bytes(16)
        self._stopped = False
        """True if writing has failed."""
        self._encoder = msgspec.msgpack.Encoder()
        self._queue: queue.SimpleQueue[Record | None] = queue.SimpleQueue()
        try:
            if head is None:
                self._descriptor = self._open()
            else:
                tails = [self._tail(number) for number in range(1, _MOST_TAILS + 1)]
                for file in (path, older_file(path), self._new_file, *tails):
                    if file.exists():
                        _check_replaceable(path, file)
                self._descriptor = self._begin(head)
        except OSError as error:
            raise ConfigError(
                f"record={str(path)!r} cannot be written: {reason_of(error)}."
            ) from None
        self._thread = threading.Thread(target=self._run, name="octavo-recorder", daemon=True)
        self._thread.start()

    def put(self, record: Record) -> None:
        """Queue a record for writing. The caller must not change it any more."""
        if self._stopped:
            return
        if self._queue.qsize() >= _MOST_PENDING:
            self._num_lost += 1
            return
        self._put_lost()
        self._queue.put(record)

    def put_plan(self, num_blocks: int, max_model_len: int) -> None:
        """Write the head of this process again, with the sizes of the loaded engine.

        Args:
            num_blocks: number of blocks of the KV cache.
            max_model_len: maximum number of tokens of a request.
        """
        assert self._head is not None
        self.put(
            msgspec.structs.replace(self._head, num_blocks=num_blocks, max_model_len=max_model_len)
        )

    def close(self) -> None:
        """Write the remaining records. A second call is harmless."""
        self._put_lost()
        self._queue.put(None)
        self._thread.join(timeout=5)

    def _put_lost(self) -> None:
        """Queue a record of the dropped records, in their place."""
        if self._num_lost:
            self._queue.put(Lost(self._num_lost))
            self._num_lost = 0

    @property
    def _new_file(self) -> Path:
        return self._path.with_name(self._path.name + ".new")

    def _tail(self, number: int) -> Path:
        """Return the path of the copy for an engine's death."""
        return self._path.with_name(f"{self._path.name}.crash-{number}")

    def _begin(self, head: Head) -> int:
        """Begin a new file; the current one becomes the older one."""
        new = self._new_file
        new.unlink(missing_ok=True)
        descriptor = os.open(new, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # until the file is closed or its process ends
            _write_all(descriptor, _frame([self._encoder.encode(head)]))
            with contextlib.suppress(FileNotFoundError):
                os.replace(self._path, older_file(self._path))
            os.replace(new, self._path)
        except OSError:
            os.close(descriptor)
            raise
        return descriptor

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND)

    def _change_to(self, descriptor: int) -> None:
        os.close(self._descriptor)
        self._descriptor = descriptor

    def _run(self) -> None:
        try:
            while (record := self._queue.get()) is not None:
                if self._head is not None:
                    time.sleep(_INTERVAL)
                records = [record]
                while not self._queue.empty() and (record := self._queue.get()) is not None:
                    records.append(record)
                self._write(records)
                if record is None:
                    break
        except OSError as error:
            logger.warning("nothing more is recorded in %s: %s", self._path, reason_of(error))
            self._stopped = True
        finally:
            os.close(self._descriptor)

    def _write(self, records: list[Record]) -> None:
        """Append the records."""
        encoded: list[bytes] = []
        for record in records:
            if isinstance(record, Head):
                self._head = record
            try:
                data = self._encoder.encode(self._without_secrets(record))
            except Exception as error:  # such as a text that is not valid Unicode
                logger.warning("something could not be recorded: %r", error)
                data = _LOST
            if len(data) > self._max_file // 2:
                data = _LOST
            if encoded and sum(map(len, encoded)) + len(data) > _FRAME_NBYTES:
                self._append(encoded)
                encoded = []
            encoded.append(data)
        self._append(encoded)
        if self._head is not None:
            for record in records:
                if isinstance(record, Died):
                    self._save_tail(self._head, record)

    def _append(self, encoded: list[bytes]) -> None:
        """Write the records as a frame."""
        frame = _frame(encoded)
        if self._head is None:
            with contextlib.suppress(FileNotFoundError):  # the file is being replaced
                if os.stat(self._path).st_ino != os.fstat(self._descriptor).st_ino:
                    self._change_to(self._open())
        elif os.fstat(self._descriptor).st_size + len(frame) > self._max_file:
            self._change_to(self._begin(self._head))
        _write_all(self._descriptor, frame)

    def _without_secrets(self, record: Record) -> Record:
        """Return a record with hashed salt and tenant, and with hashed prompts if configured.

        A salt grants access to a cache, and a tenant may be identified by its key. Guessing cannot
        find them, since the secret of the hash is not stored.
        """
        replace = msgspec.structs.replace
        hashes_prompts = self._head is not None and self._head.prompts == "hash"
        if isinstance(record, Outputs) and hashes_prompts:  # prompt logprobs contain its tokens
            return Outputs(
                record.time, [replace(o, new_prompt_logprobs=None) for o in record.outputs]
            )
        if not isinstance(record, Arrival):
            return record
        request, params = record.request, record.params
        request = replace(
            request,
            options=replace(
                request.options,
                cache_salt=self._hide(request.options.cache_salt),
                tenant=self._hide(request.options.tenant),
            ),
        )
        if params.cache_salt is not None:
            params = replace(params, cache_salt=self._hide(params.cache_salt))
        prompt_hash, num_prompt_tokens = None, 0
        if hashes_prompts:
            prompt_hash = _hash(
                self._encoder.encode(
                    (request.prompt_token_ids, request.prompt_embeds, request.mm_features)
                )
            )
            num_prompt_tokens = len(request.prompt_token_ids)
            request = replace(request, prompt_token_ids=[], prompt_embeds=None, mm_features=[])
        return Arrival(request, params, prompt_hash, num_prompt_tokens)

    def _hide(self, text: str | None) -> str | None:
        """Return a keyed hash of a text; it is the same within the recording only."""
        if text is None:
            return None
        return hmac.new(self._secret, text.encode(), hashlib.sha256).hexdigest()

    def _save_tail(self, head: Head, death: Died) -> None:
        """Copy the last seconds before a death."""
        self._num_tails = self._num_tails % _MOST_TAILS + 1
        path = self._tail(self._num_tails)
        tail: list[bytes] = []
        for file in (older_file(self._path), self._path):
            with contextlib.suppress(FileNotFoundError):
                tail += (
                    frame
                    for when, _, frame in _frames(_read_tail(file, _TAIL_NBYTES))
                    if when >= death.time - _TAIL_SECONDS
                )
        path.unlink(missing_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as out:
            out.write(_frame([self._encoder.encode(head)]))
            out.writelines(tail)
        logger.warning("the last seconds before the engine's death are in %s", path)


def older_file(path: Path) -> Path:
    """Return the path of a recording's older half."""
    return path.with_name(path.name + ".1")


def recording_files(path: Path) -> tuple[Head, list[Path]]:
    """Return the first record of a recording, and its files: the older half, if any, and FILE.

    Raises:
        OctavoError: the file cannot be read, or has another format.
    """
    head = next(read_records(path), None)
    if not isinstance(head, Head):
        raise OctavoError(
            f"{path} does not begin as a recording of this Octavo does: it is damaged, or another "
            "Octavo wrote it, which must replay it."
        )
    if head.format not in (1, FORMAT):
        raise OctavoError(f"{path} is a recording of another format; use the Octavo that wrote it.")
    older = older_file(path)
    if older.is_file() and is_recording(older):
        first = next(read_records(older), None)
        if isinstance(first, Head) and first.id == head.id:
            return head, [older, path]
    return head, [path]


def read_records(path: Path) -> Iterator[Record | None]:
    """Yield the records of a file, in order; None for bytes without a frame or a known record.

    Raises:
        OctavoError: the file does not exist, or is not a recording.
    """
    try:
        if not is_recording(path):
            raise OctavoError(f"{path} is not a recording (octavo serve --record writes one).")
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            for _, records, _ in _frames(data):
                yield from [None] if records is None else _decode(records)
    except OSError as error:
        raise OctavoError(f"{path} cannot be read: {error.strerror}.") from None


_LIST_DECODER = msgspec.msgpack.Decoder(list[msgspec.Raw])
_DECODER = msgspec.msgpack.Decoder(Record)
# The second: bytes that are not UTF-8; the third: deeply nested lists.
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def _decode(records: bytes) -> Iterator[Record | None]:
    """Yield the records of a frame; None for records of another build that this one cannot read."""
    try:
        for data in _LIST_DECODER.decode(records):
            try:
                yield _DECODER.decode(data)
            except _UNREADABLE:
                yield _decode_first_format(data)
    except _UNREADABLE:
        yield None


def _decode_first_format(record: msgspec.Raw) -> Arrival | None:
    """Return an arrival of format 1; None if the record is another one, or damaged."""
    try:
        kind, request, *rest = msgspec.msgpack.decode(record)
        request_id, prompt, params, arrival_time, salt, deadline, n, turn, *more = request
        output, num_logprobs, embeds, first_deadline, tenant, *last = more
        answers, kv_transfer_params, flow = [*last, None, None, None][:3]
        options = [arrival_time, tenant, params.pop(13), deadline, first_deadline, turn, salt]
        request = [request_id, prompt, params, [*options, kv_transfer_params, flow], n, output]
        request += [num_logprobs, embeds, answers]
        return msgspec.convert([kind, request, *rest], Arrival)
    except (*_UNREADABLE, TypeError, ValueError, LookupError, AttributeError):
        return None


_LOST = msgspec.msgpack.encode(Lost(1))


def _write_all(descriptor: int, data: bytes) -> None:
    if os.write(descriptor, data) < len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _frame(records: list[bytes]) -> bytes:
    """Return a frame of encoded records with the current time."""
    when = _TIME.pack(time.time())
    count = len(records)
    payload = b"".join([b"\xdd", count.to_bytes(4, "big"), *records])  # msgpack's array of 32 bits
    checksum = zlib.crc32(payload, zlib.crc32(when))
    return b"".join([_MARK, struct.pack("<II", len(payload), checksum), when, payload])


def _frames(data: bytes | mmap.mmap) -> Iterator[tuple[float, bytes | None, bytes]]:
    """Yield the time, the records and all bytes of each frame; records None: a truncated frame."""
    position, size = 0, len(data)
    while position < size:
        end = position + _HEADER.size
        if end <= size and data[position : position + len(_MARK)] == _MARK:
            _, length, checksum, when = _HEADER.unpack(data[position:end])
            records = data[end : end + length] if end + length <= size else b""
            if zlib.crc32(records, zlib.crc32(_TIME.pack(when))) == checksum:
                yield when, records, data[position : end + length]
                position = end + length
                continue
        found = data.find(_MARK, position + 1)
        if position or found < 0:  # the beginning of a tail may be within a frame: not reported
            yield 0.0, None, b""
        position = size if found < 0 else found


def _check_replaceable(path: Path, file: Path) -> None:
    """Raise ConfigError if `file` is not a recording, or another server writes it."""
    if not file.is_file() or (file.stat().st_size and not is_recording(file)):
        raise ConfigError(
            f"record={str(path)!r}: {file} exists and is not a recording; name another file."
        )
    with file.open("rb") as opened:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"record={str(path)!r} is being written by another server; name another file."
            ) from None


def is_recording(path: Path) -> bool:
    """Return True if a file is a recording; a pipe is not read.

    Raises:
        OSError: the file does not exist, or cannot be read.
    """
    if not path.is_file():
        path.stat()  # raises the reason if the file does not exist
        return False
    with open(path, "rb") as file:
        return file.read(len(_MARK)) == _MARK


def _read_tail(path: Path, nbytes: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(-min(nbytes, os.fstat(file.fileno()).st_size), os.SEEK_END)
        return file.read()


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
