"""Structured logs: one line for each event, as text or as JSON."""

from __future__ import annotations

import logging
import sys
import time
from contextvars import ContextVar
from typing import Any

import msgspec

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Id of the HTTP request of the current task."""

# Fields of every line of this process.
_OWN_FIELDS: dict[str, Any] = {}

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "color_message"}
_STANDARD |= {"_ray_timestamp_ns"}  # every record has it once Ray is imported


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """Return the fields given as `extra`, and the request id."""
    fields = {k: v for k, v in record.__dict__.items() if k not in _STANDARD}
    request_id = REQUEST_ID.get()
    if request_id is not None:
        fields.setdefault("request_id", request_id)
    return fields


class TextFormatter(logging.Formatter):
    """Formatter of lines `2026-01-31 12:00:00.123 INFO message key=value ...`."""

    def format(self, record: logging.LogRecord) -> str:
        """Format one line, and the traceback if there is one."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        line = f"{stamp}.{int(record.msecs):03d} {record.levelname} {record.getMessage()}"
        line += "".join(f" {key}={value}" for key, value in _fields(record).items())
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """Formatter of JSON lines: time (seconds since 1970), level, logger, message, fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Format one line; a traceback becomes the field `exception`."""
        entry: dict[str, object] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return msgspec.json.encode(entry, enc_hook=str).decode()


def setup_logging(level: str, log_format: str, **fields: int) -> None:
    """Send the logs of Octavo and of uvicorn to stderr, in the same format.

    Args:
        level: minimum level of Octavo's logs.
        log_format: "text" or "json".
        fields: additional fields of every line, such as the rank of a worker.
    """

    _OWN_FIELDS.clear()
    _OWN_FIELDS.update(fields)

    def add_fields(record: logging.LogRecord) -> bool:
        record.__dict__.update(_OWN_FIELDS)
        return True

    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    handler.addFilter(add_fields)
    for name, least in (("octavo", level), ("uvicorn", "warning")):
        log = logging.getLogger(name)
        log.handlers = [handler]
        log.propagate = False
        log.setLevel(max(logging.getLevelName(level.upper()), logging.getLevelName(least.upper())))


def setup_default_logging(level: str) -> None:
    """Show Octavo's logs on stderr, if the program has not set up logging."""
    if not logging.getLogger("octavo").handlers and not logging.getLogger().handlers:
        setup_logging(level, "text")


def current_logging() -> tuple[str, str, dict[str, int]]:
    """Return level, format and fields of Octavo's logs in this process, for a child process."""
    log = logging.getLogger("octavo")
    json = any(isinstance(handler.formatter, JsonFormatter) for handler in log.handlers)
    level = logging.getLevelName(log.getEffectiveLevel()).lower()
    return level, "json" if json else "text", dict(_OWN_FIELDS)
