"""Environment variables with settings and keys; no other module reads these."""

from __future__ import annotations

import os
import re
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote

from octavo.errors import ConfigError

# Variables with API keys: Octavo's, and vLLM's for users who migrate from vLLM.
API_KEY_VARIABLES = ("OCTAVO_API_KEY", "VLLM_API_KEY")


ADMIN_KEY_VARIABLE = "OCTAVO_ADMIN_KEY"


# The key that a router sends to its servers.
SERVER_API_KEY_VARIABLE = "OCTAVO_SERVER_API_KEY"


_SECRET_VARIABLES = frozenset([*API_KEY_VARIABLES, ADMIN_KEY_VARIABLE, SERVER_API_KEY_VARIABLE])


# Variables of vLLM's without a warning: Octavo has nothing that they turn off or choose.
_NO_MEANING = (
    "DISABLE_LOG_LOGO",
    "DO_NOT_TRACK",
    "ENABLE_V1_MULTIPROCESSING",
    "NO_USAGE_STATS",
    "USAGE_SOURCE",
    "USE_V1",
    "WORKER_MULTIPROC_METHOD",
)


LogLevel = Literal["debug", "info", "warning", "error"]


def _read_switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError(text)
    return text == "1"


def _read_gib(text: str) -> int | None:
    """Return the bytes of a number of GiB; None for 0, which means not set."""
    number = float(text)
    if not 0 <= number < 2**30:  # a setting cannot hold more bytes
        raise ValueError(text)
    return int(number * 2**30) or None


def _read_seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise ValueError(text)
    return seconds


def _read_log_level(text: str) -> str:
    """Return a level of `log_level`; also accept Python's other names, as vLLM does."""
    level = text.lower()
    level = {"critical": "error", "fatal": "error", "warn": "warning"}.get(level, level)
    if level not in typing.get_args(LogLevel):
        raise ValueError(text)
    return level


ENVIRONMENT: dict[str, tuple[str, Callable[[str], Any], str]] = {
    "BATCH_INVARIANT": ("batch_invariant", _read_switch, "0 or 1"),
    "CPU_KVCACHE_SPACE": ("kv_cache_memory_bytes", _read_gib, "GiB; 0 means not set"),
    "SERVER_DEV_MODE": ("enable_admin", _read_switch, "0 or 1"),
    "LOG_STATS_INTERVAL": ("log_stats_interval", _read_seconds, "seconds, more than 0"),
    "LOGGING_LEVEL": ("log_level", _read_log_level, "debug, info, warning or error"),
}
"""Names without OCTAVO_ or VLLM_: the setting, its parser, and a text with the allowed values."""


def hub_offline() -> bool:
    """Return True if HF_HUB_OFFLINE forbids requests to the hub."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}


def cache_folder() -> Path | None:
    """Return Octavo's folder in the user's cache folder (XDG_CACHE_HOME); None without one."""
    # The XDG specification says to ignore relative paths.
    for folder in (os.environ.get("XDG_CACHE_HOME", ""), os.path.expanduser("~/.cache")):
        if os.path.isabs(folder):
            return Path(folder) / "octavo"
    return None


def api_keys_from_environment() -> dict[str, str]:
    """Return the environment's API keys by variable; clients use the first one."""
    return {name: key for name in API_KEY_VARIABLES if (key := os.environ.get(name))}


def admin_keys_from_environment() -> list[str]:
    """Return a list with the environment's admin key, or an empty list."""
    key = os.environ.get(ADMIN_KEY_VARIABLE)
    return [key] if key else []


def server_api_key_from_environment() -> dict[str, str]:
    """Return the router's setting `server_api_key` if the environment has it."""
    key = os.environ.get(SERVER_API_KEY_VARIABLE)
    return {"server_api_key": key} if key else {}


def traces_from_environment() -> tuple[str, dict[str, str]]:
    """Return the name of this service in traces, and the headers to send spans with.

    These are OpenTelemetry's variables OTEL_SERVICE_NAME and OTEL_EXPORTER_OTLP_HEADERS
    (name=value,name=value, percent-encoded); OTEL_EXPORTER_OTLP_TRACES_HEADERS overrides the
    latter.

    Raises:
        ConfigError: the headers are malformed; the message has the variable, but no secret.
    """
    headers: dict[str, str] = {}
    for variable in ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"):
        for item in filter(None, map(str.strip, os.environ.get(variable, "").split(","))):
            name, separator, value = (part.strip() for part in item.partition("="))
            value = unquote(value)
            if not (separator and re.fullmatch(r"[\w!#$%&'*+.^`|~-]+", name, re.ASCII)) or (
                not re.fullmatch(r"[ -~]*", value)
            ):
                raise ConfigError(
                    f"{variable} is not allowed; give names and values as in "
                    "authorization=Bearer%20TOKEN,x-tenant=a."
                )
            headers[name.lower()] = value
    return os.environ.get("OTEL_SERVICE_NAME", "").strip() or "octavo", headers


def notify_socket() -> str | None:
    """Return the address of systemd's socket for the state of this service; None without one."""
    return os.environ.get("NOTIFY_SOCKET") or None


def environment_without_keys() -> dict[str, str]:
    """Return the environment without keys, for a server that must not accept them."""
    return {name: text for name, text in os.environ.items() if name not in _SECRET_VARIABLES}


def settings_from_environment() -> dict[str, Any]:
    """Return the settings of environment variables by name; flags override them.

    For each name of `ENVIRONMENT`, OCTAVO_... overrides VLLM_....

    Raises:
        ConfigError: a variable's value is wrong; the message names the variable.
    """
    settings: dict[str, Any] = {}
    for name, (setting, read, allowed) in ENVIRONMENT.items():
        for variable in (f"OCTAVO_{name}", f"VLLM_{name}"):
            text = os.environ.get(variable, "").strip()
            if not text:
                continue
            try:
                value = read(text)
            except ValueError:
                raise ConfigError(f"{variable}={text!r} is not allowed; give {allowed}.") from None
            if value is not None:
                settings[setting] = value
            break
    return settings


def unknown_variables() -> list[str]:
    """Return the VLLM_ environment variables that Octavo ignores with a warning."""
    known = {f"VLLM_{name}" for name in (*ENVIRONMENT, *_NO_MEANING)} | {*API_KEY_VARIABLES}
    return sorted(name for name in os.environ if name.startswith("VLLM_") and name not in known)
