"""Forms (multipart/form-data) with a sound, which a router reads whole and writes again."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

from octavo.router.job import Job
from octavo.server.auth import private_salt

# Bytes of a sound with the weight of one more request.
_WEIGHT_NBYTES = 2**20


def write_form(fields: Mapping[str, bytes], filename: str, data: bytes) -> tuple[str, bytes]:
    """Return the media type and the body of a form with a file.

    Args:
        fields: the other fields.
        filename: name of the file.
        data: the file.
    """
    boundary = secrets.token_hex(24)
    parts = []
    for name, value in fields.items():
        parts.append(_head(boundary, name) + b"\r\n\r\n" + value)
    file = _head(boundary, "file") + f'; filename="{_quoted(filename)}"'.encode()
    parts.append(file + b"\r\nContent-Type: application/octet-stream\r\n\r\n" + data)
    body = b"\r\n".join([*parts, f"--{boundary}--\r\n".encode()])
    return f"multipart/form-data; boundary={boundary}", body


def _head(boundary: str, name: str) -> bytes:
    return (f'--{boundary}\r\nContent-Disposition: form-data; name="{_quoted(name)}"').encode()


def _quoted(text: str) -> str:
    """Return a text as browsers write it between quotes."""
    return text.replace('"', "%22").replace("\r", "%0D").replace("\n", "%0A")


def read_sound_job(
    target: str,
    headers: list[tuple[str, str]],
    fields: dict[str, bytes],
    filename: str,
    data: bytes,
    api_key: str | None,
) -> Job:
    """Make the job of a form with a sound.

    If the router has API keys, each key has its own scope of cached prefixes.

    Args:
        target: path with the query.
        headers: headers to pass on.
        fields: the form's fields besides the file.
        filename: name of the file.
        data: the file.
        api_key: the client's key, if the router has keys.
    """
    if api_key is not None:
        salt = fields.get("cache_salt", b"").decode(errors="replace") or None
        fields = fields | {"cache_salt": (private_salt(api_key, salt) or "").encode()}
    media_type, body = write_form(fields, filename, data)
    headers = [(name, value) for name, value in headers if name != "content-type"]
    job = Job("POST", target, [*headers, ("content-type", media_type)], body, api_key=api_key)
    job.model = fields.get("model", b"").decode(errors="replace") or None
    job.weight = 1 + len(data) // _WEIGHT_NBYTES
    if api_key is not None:
        given = {value for name, value in headers if name == "x-request-id"}
        job.request_ids = given | {fields.get("request_id", b"").decode(errors="replace")} - {""}
    return job
