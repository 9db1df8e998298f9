"""Structured logs: one line an event, for people (text) or for machines (json)."""

from __future__ import annotations

import logging
import sys
import time
from contextvars import ContextVar
from typing import Any

import msgspec

REQUEST_ID: ContextVar[str | None] = ContextVar("request_id", default=None)
"""Id of the HTTP request that the current task serves."""

# What every line of this process says beside its own.
_OWN_FIELDS: dict[str, Any] = {}

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "color_message"}
_STANDARD |= {"_ray_timestamp_ns"}  # every record has it once Ray is imported


def _fields(record: logging.LogRecord) -> dict[str, object]:
    """What was given as `extra`, and the request id."""
    fields = {k: v for k, v in record.__dict__.items() if k not in _STANDARD}
    request_id = REQUEST_ID.get()
    if request_id is not None:
        fields.setdefault("request_id", request_id)
    return fields


class TextFormatter(logging.Formatter):
    """`2026-01-31 12:00:00.123 INFO message key=value ...`."""

    def format(self, record: logging.LogRecord) -> str:
        """Formats one line, and the traceback if there is one."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        line = f"{stamp}.{int(record.msecs):03d} {record.levelname} {record.getMessage()}"
        line += "".join(f" {key}={value}" for key, value in _fields(record).items())
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (seconds since 1970), level, logger, message, fields."""

    def format(self, record: logging.LogRecord) -> str:
        """Formats one line; a traceback becomes the field `exception`."""
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
    """Sends the logs of Octavo and of uvicorn to stderr, in one form.

    Args:
        level: minimum level of Octavo's.
        log_format: "text" or "json".
        fields: what every line says beside its own, such as the rank of a worker.
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
    """Shows Octavo's logs on stderr, unless the program has set up logging itself."""
    if not logging.getLogger("octavo").handlers and not logging.getLogger().handlers:
        setup_logging(level, "text")


def current_logging() -> tuple[str, str, dict[str, int]]:
    """Level, format and fields of Octavo's logs in this process, for one that it starts."""
    log = logging.getLogger("octavo")
    json = any(isinstance(handler.formatter, JsonFormatter) for handler in log.handlers)
    level = logging.getLevelName(log.getEffectiveLevel()).lower()
    return level, "json" if json else "text", dict(_OWN_FIELDS)
