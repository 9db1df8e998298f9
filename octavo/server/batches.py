"""OpenAI's /v1/batches: begin, list, describe and cancel batches."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints
from starlette.requests import Request
from starlette.responses import Response

from octavo.errors import RequestError
from octavo.server import answers, file_answers
from octavo.server.batch_line import Endpoint
from octavo.server.batch_runner import Batch, runner_of
from octavo.server.body import Body, read_model
from octavo.server.files import MAX_EXPIRY, MIN_EXPIRY, owner_of
from octavo.server.pages import page_of
from octavo.server.state import state_of
from octavo.server.upload import check_origin

_MAX_LISTED = 100
_LISTED = 20


class ExpiresAfter(Body):
    """Time after which a file is deleted."""

    anchor: Literal["created_at"]
    """Beginning of the time."""
    seconds: Annotated[int, Field(ge=MIN_EXPIRY, le=MAX_EXPIRY)]
    """Length of the time."""


class CreateBatchBody(Body):
    """Body of POST /v1/batches."""

    inner: ClassVar[Mapping[str, type[Body]]] = {"output_expires_after": ExpiresAfter}

    input_file_id: str
    """File of the requests, uploaded with purpose=batch."""
    endpoint: Endpoint
    """Address that all requests of the file name."""
    completion_window: Literal["24h"]
    """Time after which the batch expires."""
    metadata: Annotated[
        dict[
            Annotated[str, StringConstraints(max_length=64)],
            Annotated[str, StringConstraints(max_length=512)],
        ]
        | None,
        Field(max_length=16),
    ] = None
    """Up to 16 texts that are returned with the batch."""
    output_expires_after: ExpiresAfter | None = None
    """Time after which the output file and the error file are deleted; default: never."""


async def create_batch(request: Request) -> Response:
    """Begin to answer the requests of a file in the background."""
    body = await read_model(request, CreateBatchBody, state_of(request).config.max_request_bytes)
    runner, owner = await runner_of(request), owner_of(request)
    file = runner.files.find(owner, body.input_file_id, "input_file_id")
    if file.purpose != "batch":
        raise RequestError(
            f"{file.id} has purpose={file.purpose!r}; upload the requests with purpose=batch.",
            "input_file_id",
        )
    expiry = body.output_expires_after
    batch = await runner.create(
        owner, body.endpoint, file, body.metadata, None if expiry is None else expiry.seconds
    )
    return answers.respond(_json(batch))


async def list_batches(request: Request) -> Response:
    """List the batches of the API key, the newest first."""
    runner = await runner_of(request)
    found = runner.batches(owner_of(request))
    page, more = page_of(request, found, attrgetter("id"), _LISTED, _MAX_LISTED)
    return answers.respond(
        file_answers.BatchList(
            object="list",
            data=[_json(batch) for batch in page],
            first_id=page[0].id if page else None,
            last_id=page[-1].id if page else None,
            has_more=more,
        )
    )


async def get_batch(request: Request) -> Response:
    """Return the state of a batch."""
    runner = await runner_of(request)
    return answers.respond(_json(runner.find(owner_of(request), request.path_params["batch_id"])))


async def cancel_batch(request: Request) -> Response:
    """Cancel a batch; the answers so far are in its output file once it is cancelled."""
    check_origin(request)
    runner = await runner_of(request)
    batch = runner.find(owner_of(request), request.path_params["batch_id"])
    await runner.cancel(batch)
    return answers.respond(_json(batch))


def _json(batch: Batch) -> file_answers.Batch:
    errors = [
        file_answers.BatchError(code=e.code, message=e.message, param=e.param, line=e.line)
        for e in batch.errors
    ]
    return file_answers.Batch(
        id=batch.id,
        object="batch",
        endpoint=batch.endpoint,
        model=batch.model,
        errors=file_answers.BatchErrors(object="list", data=errors) if errors else None,
        input_file_id=batch.input_file_id,
        completion_window="24h",
        status=batch.status,
        # The files exist only once the batch has ended.
        output_file_id=batch.output_file_id if batch.finished else None,
        error_file_id=batch.error_file_id if batch.finished else None,
        created_at=batch.created_at,
        in_progress_at=batch.in_progress_at,
        expires_at=batch.expires_at,
        finalizing_at=batch.finalizing_at,
        completed_at=batch.completed_at,
        failed_at=batch.failed_at,
        expired_at=batch.expired_at,
        cancelling_at=batch.cancelling_at,
        cancelled_at=batch.cancelled_at,
        request_counts=file_answers.RequestCounts(
            total=batch.total, completed=batch.completed, failed=batch.failed
        ),
        metadata=batch.metadata,
    )
