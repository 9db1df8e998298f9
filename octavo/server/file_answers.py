"""Answers of OpenAI's Files and Batches APIs."""

from __future__ import annotations

from typing import Literal

from octavo.server.answers import Answer

BatchStatus = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
"""State of a batch."""


class FileObject(Answer):
    """OpenAI's description of a file."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int | None
    filename: str
    purpose: str
    status: Literal["processed"]
    status_details: None


class FileList(Answer):
    """GET /v1/files."""

    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileDeleted(Answer):
    """DELETE /v1/files/{file_id}."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


class BatchError(Answer):
    """Reason why a batch failed."""

    code: str
    message: str
    param: str | None
    line: int | None
    """Number of the line, from 1."""


class BatchErrors(Answer):
    """Reasons why a batch failed, at most a hundred."""

    object: Literal["list"]
    data: list[BatchError]


class RequestCounts(Answer):
    """Numbers of the lines of a batch."""

    total: int
    completed: int
    failed: int


class Batch(Answer):
    """OpenAI's description of a batch. Times are seconds since 1970."""

    id: str
    object: Literal["batch"]
    endpoint: str
    model: str | None
    errors: BatchErrors | None
    input_file_id: str
    completion_window: Literal["24h"]
    status: BatchStatus
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    in_progress_at: int | None
    expires_at: int
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: RequestCounts
    metadata: dict[str, str] | None


class BatchList(Answer):
    """GET /v1/batches."""

    object: Literal["list"]
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool
