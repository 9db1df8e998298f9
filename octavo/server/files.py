"""OpenAI's /v1/files: upload, list, describe, read and delete files."""

from __future__ import annotations

import re
from operator import attrgetter
from typing import get_args

from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import RequestError
from octavo.server import answers, file_answers
from octavo.server.auth import tenant_of
from octavo.server.batch_runner import runner_of
from octavo.server.errors import show
from octavo.server.file_store import FileStore, Purpose, StorageError, StoredFile
from octavo.server.large_answers import LargeAnswer
from octavo.server.middleware import context_of
from octavo.server.pages import page_of
from octavo.server.state import state_of
from octavo.server.upload import check_origin, receive_form

_MAX_LISTED = 10_000
_PIECE = 2**18
MIN_EXPIRY, MAX_EXPIRY = 3600, 2_592_000
"""Least and most seconds after which a file may expire, as OpenAI defines them."""


async def create_file(request: Request) -> Response:
    """Store a file of a form (multipart/form-data): `file`, `purpose`, `expires_after[seconds]`."""
    check_origin(request)
    store, owner = await _files(request)
    writer = store.begin(owner)
    done = False
    try:
        filename, fields = await receive_form(request, writer)
        purpose = _purpose(fields)
        stored = await writer.finish(filename, purpose, _expiry(fields))
        done = True
    finally:
        if not done:
            await writer.discard()
    return answers.respond(_json(stored))


async def list_files(request: Request) -> Response:
    """List the files of the API key, the newest first unless order=asc."""
    store, owner = await _files(request)
    purpose = request.query_params.get("purpose")
    found = [file for file in store.files(owner) if purpose in (None, file.purpose)]
    page, more = page_of(request, found, attrgetter("id"), _MAX_LISTED, _MAX_LISTED)
    return answers.respond(
        file_answers.FileList(
            object="list",
            data=[_json(file) for file in page],
            first_id=page[0].id if page else None,
            last_id=page[-1].id if page else None,
            has_more=more,
        )
    )


async def get_file(request: Request) -> Response:
    """Return the description of a file."""
    store, owner = await _files(request)
    return answers.respond(_json(store.find(owner, request.path_params["file_id"])))


async def delete_file(request: Request) -> Response:
    """Delete a file; 409 if a batch needs it."""
    store, owner = await _files(request)
    file = store.find(owner, request.path_params["file_id"])
    await store.delete(file)
    return answers.respond(file_answers.FileDeleted(id=file.id, object="file", deleted=True))


async def get_file_content(request: Request) -> Response:
    """Return the bytes of a file."""
    store, owner = await _files(request)
    file = store.find(owner, request.path_params["file_id"])
    try:  # at once: a file that is deleted later can still be read
        stream = store.path(file.id).open("rb")
    except OSError as error:
        raise StorageError(error) from None
    pieces = iter(lambda: stream.read(_PIECE), b"")
    return LargeAnswer(
        state_of(request), pieces, stream, None, "application/octet-stream", file.bytes
    )


def owner_of(request: Request) -> str | None:
    """Return the owner of what a request stores: its key's tenant; None without a key."""
    return tenant_of(context_of(request).api_key)


async def _files(request: Request) -> tuple[FileStore, str | None]:
    return (await runner_of(request)).files, owner_of(request)


def _purpose(fields: dict[str, bytes]) -> str:
    if "purpose" not in fields:
        raise RequestError("purpose is missing; it is required.", "purpose", "missing_parameter")
    purpose = fields["purpose"].decode("utf-8", "replace")
    if purpose not in get_args(Purpose):
        raise RequestError(
            f"purpose={show(purpose)} is not allowed; use one of {', '.join(get_args(Purpose))}.",
            "purpose",
        )
    return purpose


def _expiry(fields: dict[str, bytes]) -> int | None:
    """Return the seconds after which the file expires; None: never."""
    anchor, seconds = (fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
    if anchor is None and seconds is None:
        return None
    if anchor != b"created_at":
        raise RequestError(
            f"expires_after[anchor]={show((anchor or b'').decode('utf-8', 'replace'))} is not "
            "allowed; use created_at.",
            "expires_after[anchor]",
        )
    if not re.fullmatch(rb"[0-9]{1,9}", seconds or b"") or not (
        MIN_EXPIRY <= int(seconds or b"") <= MAX_EXPIRY
    ):
        raise RequestError(
            f"expires_after[seconds]={show((seconds or b'').decode('utf-8', 'replace'))} is not "
            f"allowed; give {MIN_EXPIRY} to {MAX_EXPIRY}.",
            "expires_after[seconds]",
        )
    return int(seconds or b"")


def _json(file: StoredFile) -> file_answers.FileObject:
    return file_answers.FileObject(
        id=file.id,
        object="file",
        bytes=file.bytes,
        created_at=file.created_at,
        expires_at=file.expires_at,
        filename=file.filename,
        purpose=file.purpose,
        status="processed",
        status_details=None,
    )
